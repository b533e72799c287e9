// Programmatic dependent launch (griddepcontrol: sm_90), one instruction per function. Without effect in a kernel that was launched
// without the attribute.
#pragma once

namespace attention_ext {

// Lets the kernel behind this one in the stream start, if it was launched so, as soon as all CTAs have come here or left. What this
// kernel writes after as before is visible to it behind its wait_for_prerequisites.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Until the kernels before have ended and their writes are visible. What they read or write must not be touched before.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

}  // namespace attention_ext

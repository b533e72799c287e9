// Programmatic dependent launch (griddepcontrol: sm_90), one instruction per function. Without effect in a kernel that was launched
// without the attribute.
#pragma once

namespace attention_ext {

// Lets the next kernel of the stream start, if it was launched so, as soon as all CTAs have come here or ended. All that this
// kernel writes, here or later, is visible to that one after its wait_for_prerequisites.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Waits until the kernels before this one have ended and their writes are visible. What they read or write must not be touched
// earlier.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

}  // namespace attention_ext

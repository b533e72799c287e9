// What bounds the keys that the queries of a call see: a plain struct, for host and device. key_range.cuh makes ranges of it.
#pragma once

#include <cstdint>

namespace attention_ext {

struct Sequence {
  bool causal;                 // query i sees no key after key i
  const int32_t* key_lengths;  // (N / heads,) in device memory: a batch row sees only the keys before its own; null: all
  int64_t heads;               // query heads, as many matrices as a batch row has
};

}  // namespace attention_ext

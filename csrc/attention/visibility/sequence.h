// What bounds the keys that the queries of a call see: a plain struct, for host and device. key_range.cuh makes ranges of it.
#pragma once

namespace attention_ext {

struct Sequence {
  bool causal;  // query i sees no key after key i
};

}  // namespace attention_ext

// What a thread has worked out last: a model calls with few shapes, again and again. Plain C++.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace attention_ext {

// Values by all that they depend on, for the latest few different keys. Of one thread, so that nothing is locked.
template <class Key, class Value, size_t kCount = 8>
class Recent {
 public:
  // The value of a key, from make() where it is not among the latest; until the next call.
  template <class Make>
  const Value& find(const Key& key, const Make& make) {
    for (const auto& entry : entries_) {
      if (entry.has_value() && entry->first == key) return entry->second;
    }
    auto& oldest = entries_[next_++ % kCount];
    oldest.reset();  // should make() throw
    return oldest.emplace(key, make()).second;
  }

 private:
  std::array<std::optional<std::pair<Key, Value>>, kCount> entries_;
  size_t next_ = 0;
};

}  // namespace attention_ext

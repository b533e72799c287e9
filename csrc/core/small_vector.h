// A vector of a few numbers, without the heap: sizes and strides, of which a call makes dozens. Plain C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

namespace attention_ext {

// Up to kInline items lie in the object itself, more in a std::vector.
template <class T, size_t kInline>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T>, "items move between the two by copies");

 public:
  SmallVector() = default;
  explicit SmallVector(size_t count) { resize(count); }
  SmallVector(std::initializer_list<T> items) { append(items); }
  template <class Iterator, class = typename std::iterator_traits<Iterator>::iterator_category>
  SmallVector(Iterator first, Iterator last) {
    resize(static_cast<size_t>(std::distance(first, last)));
    std::copy(first, last, begin());
  }
  SmallVector(const SmallVector&) = default;
  SmallVector& operator=(const SmallVector&) = default;
  SmallVector(SmallVector&& other) noexcept { *this = std::move(other); }
  SmallVector& operator=(SmallVector&& other) noexcept {  // leaves it empty
    if (this == &other) return *this;
    std::copy_n(other.few_, kInline, few_);
    many_ = std::move(other.many_);
    size_ = std::exchange(other.size_, 0);
    other.many_.clear();
    return *this;
  }

  T* begin() { return many_.empty() ? few_ : many_.data(); }
  T* end() { return begin() + size_; }
  const T* begin() const { return many_.empty() ? few_ : many_.data(); }
  const T* end() const { return begin() + size_; }
  const T* data() const { return begin(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return begin()[i]; }
  const T& operator[](size_t i) const { return begin()[i]; }
  T& back() { return end()[-1]; }
  const T& back() const { return end()[-1]; }
  bool operator==(const SmallVector& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
  bool operator!=(const SmallVector& other) const { return !(*this == other); }

  void resize(size_t count) {  // new items are 0
    if (count > kInline) {
      if (many_.empty()) many_.assign(few_, few_ + size_);
      many_.resize(count);
    } else {
      if (!many_.empty()) std::copy_n(many_.begin(), count, few_);
      if (count > size_) std::fill(few_ + size_, few_ + count, T{});
      many_.clear();
    }
    size_ = count;
  }
  void push_back(const T& item) {
    const T copy = item;
    resize(size_ + 1);
    back() = copy;
  }
  void append(std::initializer_list<T> items) {
    const size_t old = size_;
    resize(old + items.size());
    std::copy(items.begin(), items.end(), begin() + old);
  }
  void prepend(size_t count, const T& item) {
    const T copy = item;
    resize(size_ + count);
    std::copy_backward(begin(), end() - count, end());
    std::fill_n(begin(), count, copy);
  }

 private:
  T few_[kInline] = {};
  size_t size_ = 0;
  std::vector<T> many_;
};

}  // namespace attention_ext

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// AlignedBuffer<T>: a block of zeros that begins on a cache line. Its length is fixed; moving it leaves an empty one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace cortado {

template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  static constexpr std::size_t kAlignmentBytes = 64;

  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t elems) : elems_(elems) {
    if (elems == 0) return;
    // A product that wraps asks for the most there is, which fails as it should.
    const std::size_t bytes = elems > SIZE_MAX / sizeof(T) ? SIZE_MAX : elems * sizeof(T);
    data_.reset(static_cast<T*>(::operator new (bytes, std::align_val_t{kAlignmentBytes})));
    std::memset(static_cast<void*>(data_.get()), 0, bytes);
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::move(other.data_)), elems_(std::exchange(other.elems_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    data_ = std::move(other.data_);
    elems_ = std::exchange(other.elems_, 0);
    return *this;
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  std::size_t size() const { return elems_; }
  bool empty() const { return elems_ == 0; }
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + elems_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + elems_; }
  std::span<T> span() { return {data(), elems_}; }
  std::span<const T> span() const { return {data(), elems_}; }

 private:
  struct Release {
    void operator()(T* memory) const { ::operator delete (memory, std::align_val_t{kAlignmentBytes}); }
  };
  std::unique_ptr<T, Release> data_;
  std::size_t elems_ = 0;
};

}  // namespace cortado

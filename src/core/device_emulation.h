// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: runs kernels (device.h) on the CPU, block after block and thread after thread. In both orders the results
// must be equal: then no thread reads what another one writes in the same phase, and no block what another one writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/device.h"
#include "cortado/status.h"

namespace cortado {

enum class EmulatedOrder { kForwards, kBackwards };

template <int kThreadCount>
class EmulatedBlock {
 public:
  static constexpr int kThreads = kThreadCount;

  template <typename T>
  class PerThread {
   public:
    PerThread() { std::memset(static_cast<void*>(values_), 0xa5, sizeof(values_)); }
    T& operator[](int thread) { return values_[thread]; }

   private:
    T values_[kThreads];
  };

  EmulatedBlock(std::int64_t number, EmulatedOrder order) : number_(number), order_(order) {}

  std::int64_t number() const { return number_; }

  template <class F>
  void each(const F& f) {
    const bool forwards = order_ == EmulatedOrder::kForwards;
    for (int i = 0; i < kThreads; ++i) f(forwards ? i : kThreads - 1 - i);
  }
  template <class F>
  void each_in_warp(const F& f) {
    each(f);
  }

  template <typename T, class Op>
  void butterfly(PerThread<T>& x, int width, const Op& op) {
    T before[kThreads];
    for (int apart = width / 2; apart > 0; apart /= 2) {
      for (int t = 0; t < kThreads; ++t) before[t] = x[t];
      for (int t = 0; t < kThreads; ++t) x[t] = op(before[t], before[t ^ apart]);
    }
  }

  void ballot(PerThread<std::uint32_t>& x) {
    for (int warp = 0; warp < kThreads; warp += kWarpThreads) {
      std::uint32_t bits = 0;
      for (int t = 0; t < kWarpThreads; ++t) bits |= std::uint32_t{x[warp + t] != 0} << t;
      for (int t = 0; t < kWarpThreads; ++t) x[warp + t] = bits;
    }
  }

  template <typename T>
  T exclusive_sum(PerThread<T>& x) {
    T sum = 0;
    for (int t = 0; t < kThreads; ++t) {
      const T value = x[t];
      x[t] = sum;
      sum += value;
    }
    return sum;
  }

  template <typename T>
  T uniform(const T& value) const {
    return value;
  }

  template <typename T>
  static void add(T* to, T value) {
    *to += value;
  }
  static void raise(std::uint32_t* to, std::uint32_t value) { *to = value > *to ? value : *to; }
  static void set_bits(std::uint32_t* to, std::uint32_t bits) { *to |= bits; }

 private:
  std::int64_t number_;
  EmulatedOrder order_;
};

// Device memory is memory; everything is done when a call returns.
class EmulatedDevice {
 public:
  explicit EmulatedDevice(DeviceStream) {}

  // Of all devices of this thread.
  static EmulatedOrder& order() {
    thread_local EmulatedOrder value = EmulatedOrder::kForwards;
    return value;
  }

  template <class Kernel>
  void launch(std::int64_t blocks, const Kernel& kernel) {
    const auto shared = std::make_unique<Memory<sizeof(typename Kernel::Shared)>>();
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::int64_t number = order() == EmulatedOrder::kForwards ? i : blocks - 1 - i;
      std::memset(shared->bytes, 0xa5, sizeof(shared->bytes));
      EmulatedBlock<Kernel::kThreads> block(number, order());
      kernel(block, *reinterpret_cast<typename Kernel::Shared*>(shared->bytes));
    }
  }
  void fill(void* to, int byte, std::uint64_t bytes) { std::memset(to, byte, bytes); }
  void upload(void* to, const void* from, std::uint64_t bytes) { std::memcpy(to, from, bytes); }
  Status status() const { return {}; }

 private:
  template <std::size_t kBytes>
  struct Memory {
    alignas(64) std::byte bytes[kBytes];
  };
};

}  // namespace cortado

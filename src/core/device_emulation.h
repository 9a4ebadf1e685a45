// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: runs kernels (device.h) on the CPU, block after block, warp after warp and thread after thread. Behind
// each_in_warp() a warp goes on, and only where all threads wait for each other do the others catch up. In both orders
// the results must be equal: then no thread reads what another one writes before it has waited for it, and no block
// what another one writes. docs/adr/0030 says what this can't show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/device.h"
#include "core/emulated_warps.h"
#include "cortado/status.h"

namespace cortado {

enum class EmulatedOrder { kForwards, kBackwards };

// As a warp sees it.
template <int kThreadCount>
class EmulatedBlock {
 public:
  static constexpr int kThreads = kThreadCount;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static_assert(kThreads % kWarpThreads == 0);

  template <typename T>
  class PerThread {
   public:
    PerThread() { std::memset(static_cast<void*>(values_), 0xa5, sizeof(values_)); }
    T& operator[](int thread) { return values_[thread % kWarpThreads]; }

   private:
    T values_[kWarpThreads];
  };

  EmulatedBlock(std::int64_t number, EmulatedOrder order, EmulatedWarps& warps, int warp)
      : number_(number), order_(order), warps_(warps), warp_(warp) {}

  std::int64_t number() const { return number_; }

  template <class F>
  void each(const F& f) {
    each_in_warp(f);
    warps_.wait();
  }
  template <class F>
  void each_in_warp(const F& f) {
    const bool forwards = order_ == EmulatedOrder::kForwards;
    for (int i = 0; i < kWarpThreads; ++i) f(warp_ * kWarpThreads + (forwards ? i : kWarpThreads - 1 - i));
  }

  template <typename T, class Op>
  void butterfly(PerThread<T>& x, int width, const Op& op) {
    T before[kWarpThreads];
    for (int apart = width / 2; apart > 0; apart /= 2) {
      for (int t = 0; t < kWarpThreads; ++t) before[t] = x[t];
      for (int t = 0; t < kWarpThreads; ++t) x[t] = op(before[t], before[t ^ apart]);
    }
  }

  template <typename T>
  void exchange(PerThread<T>& x, int apart) {
    T before[kWarpThreads];
    for (int t = 0; t < kWarpThreads; ++t) before[t] = x[t];
    for (int t = 0; t < kWarpThreads; ++t) x[t] = before[t ^ apart];
  }

  void ballot(PerThread<std::uint32_t>& x) {
    std::uint32_t bits = 0;
    for (int t = 0; t < kWarpThreads; ++t) bits |= std::uint32_t{x[t] != 0} << t;
    for (int t = 0; t < kWarpThreads; ++t) x[t] = bits;
  }

  template <typename T>
  T exclusive_sum(PerThread<T>& x) {
    static_assert(sizeof(T) <= EmulatedWarps::kNoteBytes);
    T own = 0;
    for (int t = 0; t < kWarpThreads; ++t) own += x[t];
    warps_.wait();  // the sums of a call before are read
    std::memcpy(warps_.note(warp_), &own, sizeof(T));
    warps_.wait();
    T before = 0, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp_) before = all;
      T sum;
      std::memcpy(&sum, warps_.note(i), sizeof(T));
      all += sum;
    }
    for (int t = 0; t < kWarpThreads; ++t) {
      const T value = x[t];
      x[t] = before;
      before += value;
    }
    return all;
  }

  template <typename T>
  T uniform(const T& value) {
    const T read = value;
    warps_.wait();
    return read;
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
  EmulatedWarps& warps_;
  int warp_;
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
    using Block = EmulatedBlock<Kernel::kThreads>;
    const auto shared = std::make_unique<Memory<sizeof(typename Kernel::Shared)>>();
    const bool forwards = order() == EmulatedOrder::kForwards;
    EmulatedWarps& warps = EmulatedWarps::of_thread();
    for (std::int64_t i = 0; i < blocks; ++i) {
      std::memset(shared->bytes, 0xa5, sizeof(shared->bytes));
      warps.run(Block::kWarps, forwards, [&](int warp) {
        Block block(forwards ? i : blocks - 1 - i, order(), warps, warp);
        kernel(block, *reinterpret_cast<typename Kernel::Shared*>(shared->bytes));
      });
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

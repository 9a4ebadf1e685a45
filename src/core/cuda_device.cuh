// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Kernels of device.h on a CUDA device. Only .cu files include this.
#pragma once

#include "core/cuda_device.h"

namespace cortado {

template <int kThreadCount>
class CudaBlock {
 public:
  static constexpr int kThreads = kThreadCount;
  static_assert(kThreads % kWarpThreads == 0 && kThreads <= 1024);

  // One register, or a few: the index is the thread's own.
  template <typename T>
  class PerThread {
   public:
    __device__ PerThread() {}
    __device__ T& operator[](int) { return value_; }

   private:
    T value_;
  };

  __device__ std::int64_t number() const { return blockIdx.x; }

  template <class F>
  __device__ void each(const F& f) {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class F>
  __device__ void each_in_warp(const F& f) {
    f(static_cast<int>(threadIdx.x));
    __syncwarp();
  }

  template <typename T, class Op>
  __device__ void butterfly(PerThread<T>& x, int width, const Op& op) {
    T& own = x[0];
    for (int apart = width / 2; apart > 0; apart /= 2) own = op(own, from_lane_xor(own, apart));
  }

  template <typename T>
  __device__ void exchange(PerThread<T>& x, int apart) {
    x[0] = from_lane_xor(x[0], apart);
  }

  __device__ void ballot(PerThread<std::uint32_t>& x) { x[0] = __ballot_sync(kAllThreads, x[0] != 0); }

  template <typename T>
  __device__ T exclusive_sum(PerThread<T>& x) {
    __shared__ T sums[kThreads / kWarpThreads];
    const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    T inclusive = x[0];
    for (int apart = 1; apart < kWarpThreads; apart *= 2) {
      const T other = __shfl_up_sync(kAllThreads, inclusive, apart);
      if (lane >= apart) inclusive += other;
    }
    __syncthreads();  // the sums of a call before are read
    if (lane == kWarpThreads - 1) sums[warp] = inclusive;
    __syncthreads();
    T before = 0, all = 0;
    for (int i = 0; i < kThreads / kWarpThreads; ++i) {
      if (i < warp) before += sums[i];
      all += sums[i];
    }
    x[0] = before + inclusive - x[0];
    return all;
  }

  template <typename T>
  __device__ T uniform(const T& value) const {
    const T read = value;
    __syncthreads();
    return read;
  }

  __device__ static void add(std::uint32_t* to, std::uint32_t value) { atomicAdd(to, value); }
  __device__ static void add(std::uint64_t* to, std::uint64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
  }
  __device__ static void raise(std::uint32_t* to, std::uint32_t value) { atomicMax(to, value); }
  __device__ static void set_bits(std::uint32_t* to, std::uint32_t bits) { atomicOr(to, bits); }

 private:
  static constexpr unsigned kAllThreads = 0xffffffffu;

  template <typename T>
  __device__ static T from_lane_xor(const T& value, int apart) {
    static_assert(sizeof(T) % sizeof(std::uint32_t) == 0);
    std::uint32_t words[sizeof(T) / sizeof(std::uint32_t)];
    memcpy(words, &value, sizeof(T));
    for (std::uint32_t& word : words) word = __shfl_xor_sync(kAllThreads, word, apart);
    T result;
    memcpy(&result, words, sizeof(T));
    return result;
  }
};

// The memory of a block is raw, since CUDA allows no constructors there.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) run_kernel(const __grid_constant__ Kernel kernel) {
  __shared__ alignas(16) unsigned char memory[sizeof(typename Kernel::Shared)];
  CudaBlock<Kernel::kThreads> block;
  kernel(block, *reinterpret_cast<typename Kernel::Shared*>(memory));
}

// Kept out of line, since other compilers call it from plans that they instantiate as well.
template <class Kernel>
__attribute__((noinline)) void CudaDevice::launch(std::int64_t blocks, const Kernel& kernel) {
  if (blocks <= 0) return;
  if (blocks > kMostBlocks) return note_too_many_blocks();
  void* arguments[] = {const_cast<Kernel*>(&kernel)};
  note(cudaLaunchKernel(run_kernel<Kernel>, static_cast<unsigned>(blocks), Kernel::kThreads, arguments, 0, stream_));
}

}  // namespace cortado

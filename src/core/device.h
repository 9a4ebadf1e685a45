// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What code that runs on the CPU and on a GPU is written with. A kernel is an object:
//
//   struct Halve {
//     float* values;                                  its arguments are its members, copied to the device
//     std::int64_t elems;
//
//     static constexpr int kThreads = 256;            of a block
//     struct Shared {};                               memory of a block, uninitialised
//     template <class Block>
//     CORTADO_HD void operator()(Block& block, Shared& shared) const {
//       block.each([&](int t) { ... });               a phase: every thread, then all wait for each other
//     }
//   };
//   device.launch(blocks, Halve{values, elems});      blocks 0 ... blocks - 1, in any order
//
// A Block is a CudaBlock (cuda_device.cuh) or an EmulatedBlock (device_emulation.h), whose threads take turns, so that
// the body that a GPU runs is tested on any machine. Both have
//
//   number()                        of the block
//   PerThread<T> x;  x[t]           a value that thread t keeps from phase to phase: a register
//   each(f), each_in_warp(f)        a phase f(thread). Behind the second only the 32 threads of a warp have waited
//   butterfly(x, width, op)         x[t] = op(x[t], x[t ^ apart]) for apart = width / 2 ... 1; width at most 32
//   exchange(x, apart)              x[t] = x[t ^ apart], apart at most 16
//   ballot(x)                       x[t] = a bit for each thread of the warp whose x was not 0
//   exclusive_sum(x)                x[t] = sum of the x before; returns the sum of all
//   uniform(v)                      the value of a variable in Shared, for code between phases: no thread goes on to
//                                   change it before all have read it
//   add(p, v), raise(p, v), set_bits(p, v)    atomic +=, max, |=
//
// Between phases, code of the body runs in every thread (once a warp, emulated), must do the same in all, and writes
// nothing but variables of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CORTADO_HD __host__ __device__
#else
#define CORTADO_HD
#endif

struct CUstream_st;

namespace cortado {

// A cudaStream_t; nullptr is the default stream.
using DeviceStream = CUstream_st*;

constexpr int kWarpThreads = 32;
constexpr std::int64_t kMostBlocks = 0x7fffffff;  // of one launch

}  // namespace cortado

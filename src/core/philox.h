// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits as a
// pure function of a counter and a key, so that every rank, thread and variant draws the same ones in any order.
#pragma once

#include <array>
#include <cstdint>

#include "core/device.h"

namespace cortado {

using PhiloxBlock = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

CORTADO_HD inline PhiloxBlock philox4x32_10(const PhiloxBlock& counter, const PhiloxKey& key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  constexpr int kRounds = 10;
  PhiloxBlock x = counter;
  PhiloxKey k = key;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = kMultiplier0 * x[0];
    const std::uint64_t product1 = kMultiplier1 * x[2];
    x = {static_cast<std::uint32_t>(product1 >> 32) ^ x[1] ^ k[0], static_cast<std::uint32_t>(product1),
         static_cast<std::uint32_t>(product0 >> 32) ^ x[3] ^ k[1], static_cast<std::uint32_t>(product0)};
    k = {k[0] + kWeyl0, k[1] + kWeyl1};
  }
  return x;
}

// The key of one tensor's stream: the first two words of the block of counter (tensor, 0) under the key `seed`.
CORTADO_HD inline PhiloxKey philox_key(std::uint64_t seed, std::uint64_t tensor) {
  const PhiloxBlock block =
      philox4x32_10({static_cast<std::uint32_t>(tensor), static_cast<std::uint32_t>(tensor >> 32), 0, 0},
                    {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return {block[0], block[1]};
}

// The blocks of random numbers of one tensor in one step.
struct PhiloxStream {
  PhiloxKey key;
  std::uint64_t step;

  // Counter (number, step). Different steps and blocks never share a counter.
  CORTADO_HD PhiloxBlock block(std::uint64_t number) const {
    return philox4x32_10({static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32),
                          static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
                         key);
  }
};

// One block of the stream of (seed, tensor) in `step`.
inline PhiloxBlock philox_block(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, std::uint64_t block) {
  return PhiloxStream{philox_key(seed, tensor), step}.block(block);
}

// One value of philox_fill_normal(), from two words of a block.
CORTADO_HD inline float normal_from(std::uint32_t a, std::uint32_t b) {
  // A 16-bit uniform number has mean 65535 / 2 and variance (2^32 - 1) / 12.
  constexpr std::int32_t kMeanOfFour = 2 * 65535;
  constexpr float kPerStandardDeviation = 2.6428998e-05f;  // sqrt(3 / (2^32 - 1))
  const std::uint32_t sum = (a & 0xffffu) + (a >> 16) + (b & 0xffffu) + (b >> 16);
  return static_cast<float>(static_cast<std::int32_t>(sum) - kMeanOfFour) * kPerStandardDeviation;
}

// elems values of about the normal distribution with mean 0 and variance 1: sums of four uniform 16-bit numbers,
// centred (an exact integer) and multiplied by one float32 constant, so that all machines get the same bits.
// Values i and i + 1 (i even) come from the words 0, 1 and 2, 3 of block i / 2. Magnitudes stay below 3.47.
void philox_fill_normal(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, float* values,
                        std::int64_t elems);

}  // namespace cortado

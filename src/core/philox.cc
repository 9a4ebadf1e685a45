// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/philox.h"

namespace cortado {

namespace {

constexpr int kRounds = 10;
constexpr std::uint64_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
constexpr std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

PhiloxBlock numbered_block(const PhiloxKey& key, std::uint64_t step, std::uint64_t block) {
  return philox4x32_10({low(block), high(block), low(step), high(step)}, key);
}

// A 16-bit uniform number has mean 65535 / 2 and variance (2^32 - 1) / 12.
constexpr std::int32_t kMeanOfFour = 2 * 65535;
constexpr float kPerStandardDeviation = 2.6428998e-05f;  // sqrt(3 / (2^32 - 1))

float normal_from(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t sum = (a & 0xffffu) + (a >> 16) + (b & 0xffffu) + (b >> 16);
  return static_cast<float>(static_cast<std::int32_t>(sum) - kMeanOfFour) * kPerStandardDeviation;
}

}  // namespace

PhiloxBlock philox4x32_10(const PhiloxBlock& counter, const PhiloxKey& key) {
  PhiloxBlock x = counter;
  PhiloxKey k = key;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = kMultiplier0 * x[0];
    const std::uint64_t product1 = kMultiplier1 * x[2];
    x = {high(product1) ^ x[1] ^ k[0], low(product1), high(product0) ^ x[3] ^ k[1], low(product0)};
    k = {k[0] + kWeyl0, k[1] + kWeyl1};
  }
  return x;
}

PhiloxKey philox_key(std::uint64_t seed, std::uint64_t tensor) {
  const PhiloxBlock block = philox4x32_10({low(tensor), high(tensor), 0, 0}, {low(seed), high(seed)});
  return {block[0], block[1]};
}

PhiloxBlock philox_block(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, std::uint64_t block) {
  return numbered_block(philox_key(seed, tensor), step, block);
}

void philox_fill_normal(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, float* values,
                        std::int64_t elems) {
  const PhiloxKey key = philox_key(seed, tensor);
  for (std::int64_t i = 0; i < elems; i += 2) {
    const PhiloxBlock block = numbered_block(key, step, static_cast<std::uint64_t>(i / 2));
    values[i] = normal_from(block[0], block[1]);
    if (i + 1 < elems) values[i + 1] = normal_from(block[2], block[3]);
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits as a
// pure function of a counter and a key, so that every rank, thread and variant draws the same ones in any order.
#pragma once

#include <array>
#include <cstdint>

namespace cortado {

using PhiloxBlock = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

PhiloxBlock philox4x32_10(const PhiloxBlock& counter, const PhiloxKey& key);

// The key of one tensor's stream: the first two words of the block of counter (tensor, 0) under the key `seed`.
PhiloxKey philox_key(std::uint64_t seed, std::uint64_t tensor);

// Block number `block` of a tensor in a step: counter (block, step) under philox_key(seed, tensor). Different steps and
// blocks never share a counter.
PhiloxBlock philox_block(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, std::uint64_t block);

// elems values of about the normal distribution with mean 0 and variance 1: sums of four uniform 16-bit numbers,
// centred (an exact integer) and multiplied by one float32 constant, so that all machines get the same bits.
// Values i and i + 1 (i even) come from the words 0, 1 and 2, 3 of block i / 2. Magnitudes stay below 3.47.
void philox_fill_normal(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, float* values,
                        std::int64_t elems);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: `sign` as its specification says it, one value at a time. Values come as float32, which holds every fp16
// and bf16 exactly.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "codec/sign/sign_kernels.h"

namespace cortado::reference {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

inline void append(Bytes& bytes, float value) {
  const auto raw = std::bit_cast<std::array<std::byte, 4>>(value);
  bytes.insert(bytes.end(), raw.begin(), raw.end());
}

// In place: half of the sums are added to the other half, until one is left.
inline double tree_sum(std::span<double> sums) {
  for (std::size_t half = sums.size() / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// The mean of those of `values` for which `chosen` is true; 0 if there are none.
template <typename Chosen>
float mean_magnitude(std::span<const float> values, const Chosen& chosen) {
  double parts[256] = {};
  double count = 0;
  for (std::size_t first = 0; first < values.size(); first += 1024) {
    double lanes[16] = {};
    for (std::size_t i = first; i < std::min(first + 1024, values.size()); ++i) {
      if (!chosen(values[i])) continue;
      lanes[i % 16] += std::fabs(static_cast<double>(values[i]));
      count += 1;
    }
    parts[first / 1024 % 256] += tree_sum(lanes);
  }
  const auto mean = static_cast<float>(tree_sum(parts) / std::max(count, 1.0));
  return std::isnan(mean) ? std::bit_cast<float>(0x7fc00000u) : mean;
}

inline Bytes sign_payload(const Floats& values, std::size_t block_elems, SignScale scale) {
  const auto is_negative = [](float value) { return value < 0; };
  Bytes payload;
  for (std::size_t begin = 0; begin < values.size(); begin += block_elems) {
    const auto block = std::span(values).subspan(begin, std::min(block_elems, values.size() - begin));
    if (scale == SignScale::kTwoMeans) {
      append(payload, mean_magnitude(block, [&](float value) { return !is_negative(value); }));
      const float mean = mean_magnitude(block, is_negative);
      append(payload, mean == 0 ? 0 : -mean);
    } else {
      const float mean = mean_magnitude(block, [](float) { return true; });
      append(payload, scale == SignScale::kMeanAbs ? mean
                      : std::isfinite(mean)        ? 1
                                                   : std::bit_cast<float>(0x7fc00000u));
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % 8 == 0) payload.push_back(std::byte{0});
    if (is_negative(values[i])) payload.back() |= std::byte{1} << (i % 8);
  }
  return payload;
}

inline Floats sign_decoded(const Bytes& payload, std::size_t elems, std::size_t block_elems, SignScale scale) {
  const std::size_t scale_bytes = scale == SignScale::kTwoMeans ? 8 : 4;
  const std::size_t blocks = (elems + block_elems - 1) / block_elems;
  Floats output(elems);
  for (std::size_t i = 0; i < elems; ++i) {
    const std::byte* levels = payload.data() + i / block_elems * scale_bytes;
    float positive, negative;
    std::memcpy(&positive, levels, 4);
    std::memcpy(&negative, levels + scale_bytes - 4, 4);
    if (scale != SignScale::kTwoMeans) negative = -negative;
    const bool bit = (payload[blocks * scale_bytes + i / 8] >> (i % 8) & std::byte{1}) == std::byte{1};
    output[i] = bit ? negative : positive;
  }
  return output;
}

}  // namespace cortado::reference

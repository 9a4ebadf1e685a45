// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What contributors have encoded of the same values, added on a device one after the other, or their votes counted: the
// bits of SchemeCoder::add().
#pragma once

#include <cmath>
#include <cstdint>

#include "core/device.h"

namespace cortado {

// sum += decoded, which the first term begins; with `magnitude` a vote: behind the last term sum is the sign of the sum
// of signs times the sum of magnitudes. Pointers are to device memory.
struct AddTerm {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 4096;

  const float* decoded = nullptr;
  float* sum = nullptr;
  float* magnitude = nullptr;  // null: no vote
  std::int64_t elems = 0;
  bool is_first = false, is_last = false;

  struct Shared {};

  std::int64_t blocks() const { return (elems + kTileElems - 1) / kTileElems; }

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t first = block.number() * kTileElems;
    const std::int64_t end = elems - first < kTileElems ? elems : first + kTileElems;
    block.each([&](int t) {
      for (std::int64_t i = first + t; i < end; i += kThreads) magnitude == nullptr ? add(i) : vote(i);
    });
  }

 private:
  CORTADO_HD static float sign_of(float value) { return static_cast<float>((value > 0.0f) - (value < 0.0f)); }

  CORTADO_HD void add(std::int64_t i) const { sum[i] = is_first ? decoded[i] : sum[i] + decoded[i]; }
  CORTADO_HD void vote(std::int64_t i) const {
    const float votes = (is_first ? 0.0f : sum[i]) + sign_of(decoded[i]);
    const float total = (is_first ? 0.0f : magnitude[i]) + fabsf(decoded[i]);
    sum[i] = is_last ? sign_of(votes) * total : votes;
    magnitude[i] = total;
  }
};

}  // namespace cortado

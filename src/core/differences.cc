// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/differences.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/differences.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;

constexpr std::int64_t kSums = 16, kPiece = 1024;

// Of values above 1e18, whose squares have no float: again, from what `lost` keeps, as it may be where values were.
DifferenceSquares squares_of_large(const float* values, const float* decoded, std::int64_t count, const float* lost) {
  DifferenceSquares piece;
  for (std::int64_t i = 0; i < count; ++i) {
    const double difference = values != nullptr ? values[i] - decoded[i] : lost[i];
    const double value = values != nullptr ? values[i] : difference + decoded[i];
    piece.of_values += value * value;
    piece.of_differences += difference * difference;
  }
  return piece;
}

template <bool kKeeps>
void add_piece(const float* values, const float* decoded, std::int64_t count, float* lost, DifferenceSquares* total) {
  const F32 df;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(F32()));
  constexpr std::int64_t kVectors = kSums / kLanes;
  hn::Vec<F32> value_sums[kVectors], difference_sums[kVectors];
  for (std::int64_t v = 0; v < kVectors; ++v) value_sums[v] = difference_sums[v] = hn::Zero(df);
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::int64_t v = 0; v < kVectors; ++v) {
      const auto value = hn::LoadU(df, values + i + v * kLanes);
      const auto difference = hn::Sub(value, hn::LoadU(df, decoded + i + v * kLanes));
      if (kKeeps) hn::StoreU(difference, df, lost + i + v * kLanes);
      value_sums[v] = hn::Add(value_sums[v], hn::Mul(value, value));
      difference_sums[v] = hn::Add(difference_sums[v], hn::Mul(difference, difference));
    }
  }
  float of_values[kSums], of_differences[kSums];
  for (std::int64_t v = 0; v < kVectors; ++v) {
    hn::StoreU(value_sums[v], df, of_values + v * kLanes);
    hn::StoreU(difference_sums[v], df, of_differences + v * kLanes);
  }
  for (; i < count; ++i) {
    const float difference = values[i] - decoded[i];
    of_values[i % kSums] += values[i] * values[i];
    of_differences[i % kSums] += difference * difference;
    if (kKeeps) lost[i] = difference;
  }
  DifferenceSquares piece;
  for (std::int64_t k = 0; k < kSums; ++k) {
    piece.of_values += of_values[k];
    piece.of_differences += of_differences[k];
  }
  if (!std::isfinite(piece.of_values) || !std::isfinite(piece.of_differences)) {
    const DifferenceSquares again = squares_of_large(kKeeps ? nullptr : values, decoded, count, lost);
    if (!std::isfinite(piece.of_values)) piece.of_values = again.of_values;
    if (!std::isfinite(piece.of_differences)) piece.of_differences = again.of_differences;
  }
  total->of_values += piece.of_values;
  total->of_differences += piece.of_differences;
}

DifferenceSquares TakeDifferences(const float* values, const float* decoded, std::int64_t elems, float* lost) {
  DifferenceSquares total;
  for (std::int64_t begin = 0; begin < elems; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, elems - begin);
    if (lost == nullptr) {
      add_piece<false>(values + begin, decoded + begin, count, nullptr, &total);
    } else {
      add_piece<true>(values + begin, decoded + begin, count, lost + begin, &total);
    }
  }
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(TakeDifferences);

DifferenceSquares take_differences(const float* values, const float* decoded, std::int64_t elems, float* lost) {
  return HWY_DYNAMIC_DISPATCH(TakeDifferences)(values, decoded, elems, lost);
}

}  // namespace cortado
#endif

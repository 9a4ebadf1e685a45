// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/float_passes.h"

#include <algorithm>
#include <cstring>

#include "core/loss_scale.h"
#include "core/streaming.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/float_passes.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;
using VF32 = hn::Vec<F32>;

constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(F32()));

// to[i] = act(from[i], to[i]), a vector at a time; the last one is filled up with zeros.
template <class Act>
HWY_INLINE void for_vectors(const float* from, std::int64_t elems, float* to, Act&& act) {
  const F32 d;
  std::int64_t i = 0;
  for (; i + kLanes <= elems; i += kLanes) hn::StoreU(act(hn::LoadU(d, from + i), hn::LoadU(d, to + i)), d, to + i);
  if (i == elems) return;
  const std::size_t bytes = static_cast<std::size_t>(elems - i) * sizeof(float);
  float last_from[kLanes] = {}, last_to[kLanes] = {};
  std::memcpy(last_from, from + i, bytes);
  std::memcpy(last_to, to + i, bytes);
  hn::StoreU(act(hn::LoadU(d, last_from), hn::LoadU(d, last_to)), d, last_to);
  std::memcpy(to + i, last_to, bytes);
}

void AddValues(const float* values, std::int64_t elems, float* sum) {
  for_vectors(values, elems, sum, [](VF32 value, VF32 to) HWY_ATTR { return hn::Add(to, value); });
}

void ScaleValues(const float* values, float scale, std::int64_t elems, float* scaled) {
  const VF32 factor = hn::Set(F32(), scale);
  for_vectors(values, elems, scaled, [&](VF32 value, VF32) HWY_ATTR { return hn::Mul(value, factor); });
}

// From a cache line on, and whole vectors.
void ScaleToMemory(const float* values, float scale, std::int64_t elems, float* scaled) {
  const F32 d;
  const VF32 factor = hn::Set(d, scale);
  for (std::int64_t i = 0; i < elems; i += kLanes) hn::Stream(hn::Mul(hn::LoadU(d, values + i), factor), d, scaled + i);
}

bool AddValuesBelow(float limit, const float* values, float scale, std::int64_t elems, float* sum) {
  const F32 d;
  const VF32 factor = hn::Set(d, scale), bound = hn::Set(d, limit);
  auto all_below = hn::Lt(hn::Zero(d), hn::Set(d, 1.0f));
  for_vectors(values, elems, sum, [&](VF32 value, VF32 to) HWY_ATTR {
    const auto is_below = hn::Lt(hn::Abs(value), bound);
    all_below = hn::And(all_below, is_below);
    return hn::Add(to, hn::IfThenElseZero(is_below, hn::Mul(value, factor)));
  });
  return hn::AllTrue(d, all_below);
}

class TakeBack {
 public:
  TakeBack(float limit, float scale)
      : factor_(hn::Set(F32(), scale)), bound_(hn::Set(F32(), limit)), share_(hn::Set(F32(), kRoundingShare)) {}
  HWY_INLINE VF32 operator()(VF32 value, VF32 sum) const {
    const VF32 added = hn::Mul(value, factor_), left = hn::Sub(sum, added);
    const auto is_rounding = hn::Le(hn::Abs(left), hn::Mul(share_, hn::Abs(added)));
    return hn::IfThenElse(hn::Lt(hn::Abs(value), bound_), hn::IfThenZeroElse(is_rounding, left), sum);
  }

 private:
  VF32 factor_, bound_, share_;
};

void TakeValuesBackBelow(float limit, const float* values, float scale, std::int64_t elems, float* sum) {
  for_vectors(values, elems, sum, TakeBack(limit, scale));
}

// From a cache line on, and whole vectors.
void TakeValuesBackToMemory(float limit, const float* values, float scale, std::int64_t elems, const float* sum,
                            float* undone) {
  const F32 d;
  const TakeBack act(limit, scale);
  for (std::int64_t i = 0; i < elems; i += kLanes) {
    hn::Stream(act(hn::LoadU(d, values + i), hn::LoadU(d, sum + i)), d, undone + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

constexpr std::int64_t kLineElems = kStreamAlignBytes / sizeof(float);

HWY_EXPORT(AddValues);
HWY_EXPORT(ScaleValues);
HWY_EXPORT(ScaleToMemory);
HWY_EXPORT(AddValuesBelow);
HWY_EXPORT(TakeValuesBackBelow);
HWY_EXPORT(TakeValuesBackToMemory);

void add_values(const float* values, std::int64_t elems, float* sum) {
  HWY_DYNAMIC_DISPATCH(AddValues)(values, elems, sum);
}

void scale_values(const float* values, float scale, std::int64_t elems, float* scaled, bool streams) {
  constexpr auto kElemBytes = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t skipped_bytes = bytes_to_stream_alignment(scaled);
  if (streams && skipped_bytes % kElemBytes == 0) {
    const std::int64_t before = std::min(elems, skipped_bytes / kElemBytes);
    HWY_DYNAMIC_DISPATCH(ScaleValues)(values, scale, before, scaled);
    const std::int64_t lines = (elems - before) / kLineElems * kLineElems;
    HWY_DYNAMIC_DISPATCH(ScaleToMemory)(values + before, scale, lines, scaled + before);
    values += before + lines;
    scaled += before + lines;
    elems -= before + lines;
  }
  HWY_DYNAMIC_DISPATCH(ScaleValues)(values, scale, elems, scaled);
}

bool add_values_below(float limit, const float* values, float scale, std::int64_t elems, float* sum) {
  return HWY_DYNAMIC_DISPATCH(AddValuesBelow)(limit, values, scale, elems, sum);
}

void take_values_back_below(float limit, const float* values, float scale, std::int64_t elems, const float* sum,
                            float* undone) {
  std::int64_t lines = 0;
  if (undone != sum) {
    if (is_stream_aligned(undone)) lines = elems / kLineElems * kLineElems;
    HWY_DYNAMIC_DISPATCH(TakeValuesBackToMemory)(limit, values, scale, lines, sum, undone);
    std::copy(sum + lines, sum + elems, undone + lines);
  }
  HWY_DYNAMIC_DISPATCH(TakeValuesBackBelow)(limit, values + lines, scale, elems - lines, undone + lines);
}

}  // namespace cortado
#endif

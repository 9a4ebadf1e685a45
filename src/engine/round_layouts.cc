// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/round_layouts.h"

#include <cstdint>
#include <numeric>

namespace cortado {

using Method = EngineOptions::Method;

namespace {

constexpr double kMiB = 1024.0 * 1024.0;
// As DDP hands gradients over: none of a message waits for what comes with the next of its buckets.
constexpr FusionBudget kDenseBudget{FusionBudget::Kind::kBuckets, kBucketBytes};
constexpr FusionBudget kPublishedBudget{FusionBudget::Kind::kScaled, std::int64_t{25} << 20};

FusionBudget budget_of(const EngineOptions& options) {
  FusionBudget budget;
  if (options.bucket_cap_mib >= 0) {
    budget.kind = options.bucket_cap_mib == 0 ? FusionBudget::Kind::kNone : FusionBudget::Kind::kScaled;
    budget.cap_bytes = static_cast<std::int64_t>(options.bucket_cap_mib * kMiB);
  } else if (options.method == Method::kCast) {
    budget = kDenseBudget;
  } else if (options.phase == EngineOptions::Phase::kGlobal) {
    budget = kPublishedBudget;
  }
  return budget;
}

bool alternates(const EngineOptions& options) {
  return options.method == Method::kAcp && options.sides == EngineOptions::Sides::kAlternate;
}

std::vector<LayoutTensor> shapes_of(const std::vector<EngineTensor>& tensors,
                                    const std::vector<Treatment>& treatments) {
  std::vector<LayoutTensor> shapes;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    shapes.push_back({.rows = tensors[t].rows,
                      .cols = tensors[t].cols,
                      .rank = treatments[t].rank,
                      .payload_elems = treatments[t].payload_elems,
                      .gradient_elem_bytes = static_cast<std::int64_t>(dtype_bytes(tensors[t].dtype))});
  }
  return shapes;
}

// Gradients become ready about in reverse order of registration (ACP-SGD, section 5.2), as DDP assumes too.
std::vector<std::uint32_t> order_of(const std::vector<EngineTensor>& tensors) {
  std::vector<std::uint32_t> order(tensors.size());
  std::iota(order.rbegin(), order.rend(), 0u);
  return order;
}

// What each tensor sends in the first compressed step.
std::vector<SlotKind> first_kinds(const std::vector<LayoutTensor>& shapes, const std::vector<Treatment>& treatments,
                                  const EngineOptions& options, const TrainedCodec& codec) {
  if (options.method != Method::kCodec) {
    return choose_sides(shapes, alternates(options) && options.phase == EngineOptions::Phase::kBalanced);
  }
  const SlotKind of_codec = codec.is_summed ? SlotKind::kValues : SlotKind::kPayload;
  std::vector<SlotKind> kinds;
  for (const Treatment& treatment : treatments) {
    kinds.push_back(treatment.is_compressed() ? of_codec : SlotKind::kDense);
  }
  return kinds;
}

}  // namespace

RoundLayouts choose_round_layouts(const std::vector<EngineTensor>& tensors, const std::vector<Treatment>& treatments,
                                  const EngineOptions& options, const TrainedCodec& codec) {
  const std::vector<LayoutTensor> shapes = shapes_of(tensors, treatments);
  std::vector<SlotKind> sides = first_kinds(shapes, treatments, options, codec);
  std::vector<SlotKind> other_sides = sides;
  std::vector<bool> skip(tensors.size());  // in a second round
  for (std::size_t t = 0; t < sides.size(); ++t) {
    skip[t] = treatments[t].rank == 0;
    if (skip[t]) continue;
    other_sides[t] = sides[t] == SlotKind::kRowFactor ? SlotKind::kColFactor : SlotKind::kRowFactor;
    if (options.method == Method::kAcp && !alternates(options)) sides[t] = SlotKind::kBothFactors;
  }
  const auto layout = [&](const std::vector<SlotKind>& kinds, const std::vector<bool>& skipped) {
    return make_layout(shapes, order_of(tensors), kinds, skipped, budget_of(options),
                       static_cast<std::int64_t>(dtype_bytes(options.wire)));
  };
  RoundLayouts layouts;
  layouts.first.push_back(layout(sides, {}));
  if (alternates(options)) layouts.first.push_back(layout(other_sides, {}));
  if (options.method == Method::kPower) layouts.second = layout(other_sides, skip);
  return layouts;
}

Layout warm_up_layout(const std::vector<EngineTensor>& tensors, const std::vector<Treatment>& treatments) {
  const std::vector<SlotKind> dense(tensors.size(), SlotKind::kDense);
  return make_layout(shapes_of(tensors, treatments), order_of(tensors), dense, {}, kDenseBudget, sizeof(float));
}

}  // namespace cortado

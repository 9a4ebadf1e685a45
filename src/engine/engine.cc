// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/engine.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "core/hash.h"
#include "engine/agreement.h"
#include "engine/engine_impl.h"

namespace cortado {

using Method = EngineOptions::Method;

Result<std::unique_ptr<Engine>> Engine::create(std::vector<EngineTensor> tensors, const EngineOptions& given,
                                               Communicator* communicator, const Clock* clock, TraceRecorder* trace) {
  // Fields that were set one by one are held to the rules of the string.
  CORTADO_ASSIGN_OR_RETURN(const EngineOptions options, EngineOptions::parse(given.to_spec()));
  // Ranks first agree on what they were asked for, so that an error of one's own model comes second and on all of them.
  const auto timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(options.timeout_s * 1e9));
  CORTADO_RETURN_IF_ERROR(check_agreement(communicator, options.results_spec(), tensors, timeout));
  CORTADO_ASSIGN_OR_RETURN(std::vector<Treatment> treatments, choose_treatments(tensors, options));
  return std::unique_ptr<Engine>(
      new EngineImpl(std::move(tensors), options, std::move(treatments), communicator, clock, trace));
}

EngineImpl::EngineImpl(std::vector<EngineTensor> tensors, const EngineOptions& options,
                       std::vector<Treatment> treatments, Communicator* communicator, const Clock* clock,
                       TraceRecorder* trace)
    : tensors_(std::move(tensors)),
      options_(options),
      treatments_(std::move(treatments)),
      communicator_(communicator),
      clock_(clock),
      trace_(trace),
      pool_(options.threads),
      low_rank_(tensors_.size()),
      steps_(tensors_.size()) {
  buffers_.reserve(tensors_.size() + 1);
  if (passes_through() || options_.method == Method::kNone) return;
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    if (treatments_[t].rank == 0) continue;
    low_rank_[t] = LowRankTensor::make(
        options_, {.rows = tensors_[t].rows,
                   .cols = tensors_[t].cols,
                   .rank = treatments_[t].rank,
                   .dtype = tensors_[t].dtype,
                   .wire = options_.wire,
                   .world_size = communicator_->world_size(),
                   .warm_start = options_.warm_start,
                   .key = {.seed = options_.random_seed, .step = 0, .tensor = fnv1a_64(tensors_[t].name)}});
  }
  make_rounds();
  if (!in_warm_up()) allocate_residuals();
}

void EngineImpl::make_rounds() {
  std::vector<LayoutTensor> shapes;
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    shapes.push_back({tensors_[t].rows, tensors_[t].cols, treatments_[t].rank});
  }
  // Gradients become ready about in reverse order of registration (section 5.2), as DDP assumes too.
  std::vector<std::uint32_t> order(tensors_.size());
  std::iota(order.rbegin(), order.rend(), 0u);

  constexpr double kMiB = 1024.0 * 1024.0;
  constexpr FusionBudget kDenseBudget{FusionBudget::Kind::kScaled, std::int64_t{25} << 20};
  FusionBudget budget;
  if (options_.bucket_cap_mib >= 0) {
    budget.kind = options_.bucket_cap_mib == 0 ? FusionBudget::Kind::kNone : FusionBudget::Kind::kScaled;
    budget.cap_bytes = static_cast<std::int64_t>(options_.bucket_cap_mib * kMiB);
  } else if (options_.phase == EngineOptions::Phase::kGlobal || options_.method == Method::kCast) {
    budget = kDenseBudget;
  }

  const std::vector<SlotKind> dense(tensors_.size(), SlotKind::kDense);
  if (in_warm_up()) {
    warm_up_ = std::make_unique<Round>(
        Round::Layouts{
            {make_layout(shapes, order, dense, {}, kDenseBudget, sizeof(float))}, tensors_.size(), DType::kFloat32},
        communicator_, clock_);
  }
  const auto wire_bytes = static_cast<std::int64_t>(dtype_bytes(options_.wire));
  const bool alternates = options_.method == Method::kAcp && options_.sides == EngineOptions::Sides::kAlternate;
  std::vector<SlotKind> sides = choose_sides(shapes, alternates && options_.phase == EngineOptions::Phase::kBalanced);
  std::vector<SlotKind> other_sides = sides;
  for (std::size_t t = 0; t < sides.size(); ++t) {
    if (sides[t] == SlotKind::kDense) continue;
    other_sides[t] = sides[t] == SlotKind::kRowFactor ? SlotKind::kColFactor : SlotKind::kRowFactor;
    if (options_.method == Method::kAcp && !alternates) sides[t] = SlotKind::kBothFactors;
  }
  std::vector<Layout> layouts = {make_layout(shapes, order, sides, {}, budget, wire_bytes)};
  if (alternates) layouts.push_back(make_layout(shapes, order, other_sides, {}, budget, wire_bytes));
  first_ = std::make_unique<Round>(Round::Layouts{std::move(layouts), tensors_.size(), options_.wire}, communicator_,
                                   clock_);
  if (options_.method != Method::kPower) return;
  std::vector<bool> skip(tensors_.size());
  for (std::size_t t = 0; t < tensors_.size(); ++t) skip[t] = treatments_[t].rank == 0;
  second_ = std::make_unique<Round>(
      Round::Layouts{
          {make_layout(shapes, order, other_sides, skip, budget, wire_bytes)}, tensors_.size(), options_.wire},
      communicator_, clock_);
}

void EngineImpl::allocate_residuals() {
  if (!options_.use_error_feedback || !is_low_rank()) return;
  std::vector<std::int64_t> elems;
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    elems.push_back(low_rank_[t] == nullptr ? 0 : tensors_[t].rows * tensors_[t].cols);
  }
  residuals_ = ResidualStore(elems, options_.rollback == EngineOptions::Rollback::kExact);
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    if (low_rank_[t] != nullptr) low_rank_[t]->set_residual(residuals_.residual(t), residuals_.spare(t));
  }
}

std::chrono::nanoseconds EngineImpl::timeout() const {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(options_.timeout_s * 1e9));
}

}  // namespace cortado

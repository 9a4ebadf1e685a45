// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What an engine of a plan carries from plan to plan, saves, loads and tells.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <utility>

#include "core/check.h"
#include "engine/find_tensor.h"
#include "engine/finite_state.h"
#include "engine/plan_engine.h"
#include "engine/state_hash.h"

namespace cortado {

namespace {

// The place of what an earlier plan has lost.
constexpr const char* kCarried = "carried";

}  // namespace

std::string plan_summary(const Plan& plan) {
  char text[96];
  std::snprintf(text, sizeof(text), "plan(hash=%016" PRIx64 ", buckets=%zu)", plan_hash(plan), plan.buckets.size());
  return text;
}

// ---- another plan --------------------------------------------------------------------------------------------------

Status PlanEngine::switch_plan(const Plan& plan) {
  CORTADO_RETURN_IF_ERROR(check_between_steps("switch_plan"));
  // Everything that can differ between ranks is compared first, so that all of them go on or none does.
  Status agreed = check_same_number(communicator_, "the step at which the plan is switched",
                                    static_cast<std::uint64_t>(step_number()), timeout());
  if (agreed.ok()) agreed = check_same_number(communicator_, "the plan (its hash)", plan_hash(plan), timeout());
  if (!agreed.ok()) {
    return fail_if_cut_off(agreed.with_context("switch_plan before step " + std::to_string(step_number())));
  }
  Result<std::unique_ptr<Schedule>> made = make_schedule(plan);
  agreed = agree_on_outcome(communicator_, "switch_plan", made.status(), timeout());
  if (!agreed.ok()) return fail_if_cut_off(agreed);
  std::unique_ptr<Schedule> next = std::move(made).value();
  carry_over(next.get());
  schedule_ = std::move(next);
  name_collectives();
  options_.codec = plan_summary(plan);
  return {};
}

// A residual goes to the same tensor's residual at the same place, if there is one of the same values and as many ranks
// share it; else to one of this rank alone, or to what is added to the next gradient. Either way it is delivered once.
void PlanEngine::carry_over(Schedule* next) {
  const auto find_like = [&](std::uint32_t t, const MessageResidual& like) -> std::span<float> {
    Bucket& bucket = bucket_of(next, t);
    for (const MessageResidual& residual : residuals_of(bucket)) {
      const bool same = residual.slot == next->places[t].slot && residual.place == like.place &&
                        residual.begin == like.begin && residual.values.size() == like.values.size() &&
                        residual.share == like.share && residual.replicas == like.replicas;
      if (same) return residual.values;
    }
    return {};
  };
  for (Bucket& bucket : schedule_->buckets) {
    for (const MessageResidual& residual : residuals_of(bucket)) {
      const std::uint32_t t = bucket.tensors[static_cast<std::size_t>(residual.slot)];
      const std::span<float> to = find_like(t, residual);
      if (!to.empty()) {
        std::copy(residual.values.begin(), residual.values.end(), to.begin());
        continue;
      }
      const float share = residual.share / static_cast<float>(residual.replicas);
      float* carried = carried_values(t) + residual.begin;
      for (std::size_t i = 0; i < residual.values.size(); ++i) carried[i] += residual.values[i] * share;
    }
  }
  std::erase_if(carried_, [&](const auto& entry) {
    return bucket_of(next, entry.first).message->absorb(next->places[entry.first].slot, entry.second.data());
  });
  for (std::uint32_t t = 0; t < tensors_.size() && !passes_through(); ++t) carry_basis_over(next, t);
}

// What a low-rank codec has learnt of a tensor is of use to the same codec only.
void PlanEngine::carry_basis_over(Schedule* next, std::uint32_t t) {
  const auto codec_of = [t](const Schedule& schedule) {
    return schedule.plan.buckets[static_cast<std::size_t>(schedule.places[t].bucket)].codec;
  };
  if (tensors_[t].elems() == 0 || codec_of(*schedule_) != codec_of(*next)) return;
  const std::span<const float> from = bucket_of(t).message->basis(slot_of(t));
  const std::span<float> to = bucket_of(next, t).message->basis(next->places[t].slot);
  if (from.size() == to.size()) std::copy(from.begin(), from.end(), to.begin());
}

std::vector<MessageResidual> PlanEngine::residuals_of(Bucket& bucket) {
  return bucket.message == nullptr ? std::vector<MessageResidual>() : bucket.message->residuals();
}

float* PlanEngine::carried_values(std::uint32_t t) {
  AlignedBuffer<float>& carried = carried_[t];
  if (carried.empty()) carried = AlignedBuffer<float>(static_cast<std::size_t>(tensors_[t].elems()));
  return carried.data();
}

// ---- save and load -------------------------------------------------------------------------------------------------

Result<EngineState> PlanEngine::save_state() {
  CORTADO_RETURN_IF_ERROR(check_between_steps("save_state"));
  EngineState state{.spec = options_.results_spec(),
                    .world_size = communicator_->world_size(),
                    .rank = communicator_->rank(),
                    .step = step_,
                    .phase_step = step_,
                    .layout = {},
                    .tensors = {}};
  std::vector<TensorState> tensors(tensors_.size());
  for (Bucket& bucket : schedule_->buckets) {
    for (const MessageResidual& residual : residuals_of(bucket)) {
      TensorState& tensor = tensors[bucket.tensors[static_cast<std::size_t>(residual.slot)]];
      tensor.places.push_back({std::string(residual.place), residual.begin,
                               std::vector<float>(residual.values.begin(), residual.values.end())});
    }
    for (std::size_t slot = 0; bucket.message != nullptr && slot < bucket.tensors.size(); ++slot) {
      const std::span<float> basis = bucket.message->basis(static_cast<int>(slot));
      tensors[bucket.tensors[slot]].basis.assign(basis.begin(), basis.end());
    }
  }
  for (const auto& [t, carried] : carried_) {
    tensors[t].places.push_back({kCarried, 0, std::vector<float>(carried.begin(), carried.end())});
  }
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    tensors[t].name = tensors_[t].name;
    if (!tensors[t].places.empty() || !tensors[t].basis.empty()) state.tensors.push_back(std::move(tensors[t]));
  }
  return state;
}

// Everything is checked before anything is changed.
Status PlanEngine::check_state(const EngineState& state) {
  CORTADO_RETURN_IF_ERROR(check_origin(state));
  const bool same_world = state.world_size == communicator_->world_size();
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    Bucket& bucket = bucket_of(t);
    if (bucket.message == nullptr || bucket.message->basis(slot_of(t)).empty()) continue;
    const bool is_saved = std::any_of(state.tensors.begin(), state.tensors.end(),
                                      [&](const TensorState& tensor) { return tensor.name == tensors_[t].name; });
    if (is_saved) continue;
    return make_error(StatusCode::kMismatch,
                      "load_state: the state has no tensor \"%s\"; it is of another model or plan",
                      tensors_[t].name.c_str());
  }
  return for_values(state, same_world, [](std::span<const float>, const auto&) {});
}

// Calls act(saved, here) for all that the state holds of each tensor: its basis and, if asked for, what it keeps at its
// places, the carried values included, for which here() makes memory. Fails if something is not here.
template <typename Act>
Status PlanEngine::for_values(const EngineState& state, bool with_places, Act&& act) {
  for (const TensorState& tensor : state.tensors) {
    const std::optional<std::uint32_t> found = find_tensor(tensors_, tensor.name);
    if (!found.has_value()) {
      return make_error(StatusCode::kMismatch, "load_state: the model has no tensor \"%s\"", tensor.name.c_str());
    }
    const std::uint32_t t = *found;
    Bucket& bucket = bucket_of(t);
    const auto take = [&](const std::string& what, const std::vector<float>& saved, std::size_t elems,
                          const auto& here) -> Status {
      if (elems != saved.size()) {
        return make_error(
            StatusCode::kMismatch,
            "load_state: \"%s\" has %zu values of %s, expected %zu; the state is of another model or plan",
            tensor.name.c_str(), saved.size(), what.c_str(), elems);
      }
      act(std::span<const float>(saved), here);
      return {};
    };
    std::span<float> basis;
    if (bucket.message != nullptr) basis = bucket.message->basis(slot_of(t));
    CORTADO_RETURN_IF_ERROR(take("the basis", tensor.basis, basis.size(), [basis] { return basis; }));
    for (const PlaceState& place : tensor.places) {
      if (!with_places) break;
      const std::string what = "place " + place.name;
      if (place.name == kCarried) {
        const auto elems = static_cast<std::size_t>(tensors_[t].elems());
        CORTADO_RETURN_IF_ERROR(
            take(what, place.values, elems, [&] { return std::span<float>(carried_values(t), elems); }));
        continue;
      }
      std::span<float> here;
      for (const MessageResidual& residual : residuals_of(bucket)) {
        if (residual.slot == slot_of(t) && residual.place == place.name && residual.begin == place.begin) {
          here = residual.values;
        }
      }
      CORTADO_RETURN_IF_ERROR(take(what, place.values, here.size(), [here] { return here; }));
    }
  }
  return {};
}

Result<std::string> PlanEngine::load_state(const EngineState& state) {
  Status checked = check_state(state);
  if (checked.ok()) checked = check_finite(state);
  Status agreed = agree_on_outcome(communicator_, "load_state", checked, timeout());
  if (agreed.ok()) {
    agreed =
        check_same_number(communicator_, "the state to load (hash of step and bases)", state_hash(state), timeout());
  }
  if (!agreed.ok()) return fail_if_cut_off(agreed);
  step_ = state.step;
  set_first_step(state.step);
  replicas_ = {};
  carried_.clear();
  for (Bucket& bucket : schedule_->buckets) {
    for (const MessageResidual& residual : residuals_of(bucket)) {
      std::fill(residual.values.begin(), residual.values.end(), 0.0f);
    }
  }
  const bool same_world = state.world_size == communicator_->world_size();
  CORTADO_RETURN_IF_ERROR(for_values(state, same_world, [](std::span<const float> saved, const auto& here) {
    std::copy(saved.begin(), saved.end(), here().begin());
  }));
  return warning_of_ranks(state);
}

// ---- report --------------------------------------------------------------------------------------------------------

EngineReport PlanEngine::report() const {
  EngineReport report = begin_report();
  SquareSums sums;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    TensorReport& tensor = report.tensors[t];
    const Place place = schedule_->places[t];
    const PlanMessage* message = schedule_->buckets[static_cast<std::size_t>(place.bucket)].message.get();
    if (message == nullptr || tensor.elems == 0) continue;
    if (finished_steps_ == 0) continue;
    tensor.compressed = message->is_compressed(place.slot);
    tensor.payload_bytes = message->payload_bytes(place.slot);
    const DifferenceSquares squares = message->squares(place.slot);
    if (squares.of_values > 0) tensor.relative_l2_error = std::sqrt(squares.of_differences / squares.of_values);
    sums.of_values += squares.of_values;
    sums.of_errors += squares.of_differences;
    if (message->residual_bytes() == 0) continue;
    sums.of_residuals += message->lost_squares(place.slot);
  }
  add_squares(sums, &report);
  for (const Bucket& bucket : schedule_->buckets) {
    if (bucket.message == nullptr) continue;
    report.residual_bytes += bucket.message->residual_bytes();
    report.factor_bytes += bucket.message->factor_bytes();
    report.message_bytes += bucket.message->buffer_bytes();
  }
  for (const auto& [t, carried] : carried_) {
    report.residual_bytes += static_cast<std::int64_t>(carried.size() * sizeof(float));
  }
  report_devices(&report);
  if (passes_through()) report.fallbacks.push_back({"", "world size 1: nothing to exchange", finished_steps_});
  if (non_finite_steps_ > 0) report.fallbacks.push_back({"", "non-finite: step rolled back", non_finite_steps_});
  return report;
}

// Whether the CPU does what the plan gives to a GPU, and why.
void PlanEngine::report_devices(EngineReport* report) const {
  const auto is_for_gpu = [](const Operation& op) {
    return (op.kind == OpKind::kEncode || op.kind == OpKind::kDecode) && op.device == OpDevice::kGpu;
  };
  const std::vector<PlanBucket>& planned = schedule_->plan.buckets;
  int on_host = 0;
  std::string reason;
  for (std::size_t b = 0; b < planned.size(); ++b) {
    const std::vector<Operation>& operations = planned[b].option.operations;
    const Bucket& bucket = schedule_->buckets[b];
    if (bucket.message == nullptr || std::none_of(operations.begin(), operations.end(), is_for_gpu)) continue;
    const std::string why = device_ == nullptr ? "this engine has no device" : bucket.message->host_reason();
    if (why.empty()) continue;
    ++on_host;
    if (reason.empty()) reason = why;
  }
  if (on_host == 0) return;
  report->host_reason = "of " + std::to_string(on_host) + " of " + std::to_string(planned.size()) +
                        " buckets the CPU does what the plan gives to the GPU: " + reason;
  report->fallbacks.push_back({"", report->host_reason, finished_steps_});
}

std::string PlanEngine::describe() const {
  const EngineReport now = report();
  std::int64_t encoded = 0;
  for (const Bucket& bucket : schedule_->buckets) {
    for (std::size_t slot = 0; bucket.message != nullptr && slot < bucket.tensors.size(); ++slot) {
      encoded += bucket.message->is_compressed(static_cast<int>(slot));
    }
  }
  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); };
  char text[320];
  std::snprintf(text, sizeof(text),
                "cortado: %s over %s, %d ranks; %zu tensors in %zu messages, %" PRId64
                " of them compressed\ncortado: memory: residual %.2f MiB, factors %.2f MiB, messages %.2f MiB",
                now.spec.c_str(), now.communicator.c_str(), now.world_size, tensors_.size(), schedule_->buckets.size(),
                encoded, mib(now.residual_bytes), mib(now.factor_bytes), mib(now.message_bytes));
  return text;
}

}  // namespace cortado

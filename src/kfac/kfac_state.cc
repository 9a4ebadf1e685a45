// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cinttypes>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/finite.h"
#include "kfac/kfac_impl.h"

namespace cortado {

namespace {

KfacTraffic traffic_of(const OwnerGather& gather) {
  const OwnerGatherReport report = gather.report();
  return {report.steps, report.collectives, report.payload_bytes, report.dense_bytes, report.relative_l2_error};
}

bool is_finite(const std::vector<float>& values) {
  return all_finite(values.data(), static_cast<std::int64_t>(values.size()), DType::kFloat32);
}

// One Inf or NaN would stay in a running average for good.
Status check_finite(const std::vector<float>& values, const std::string& layer) {
  if (is_finite(values)) return {};
  return make_error(StatusCode::kMismatch, "layer %s: the saved state has an Inf or NaN", layer.c_str());
}

}  // namespace

// What load_state() changes, once all ranks know that they can.
struct KfacImpl::Loading {
  struct Copy {
    const std::vector<float>* from;
    std::vector<float>* to;
  };
  std::vector<Copy> copies;
  std::vector<OwnerResidual> residuals;
  std::vector<std::size_t> begun_anew;  // layers whose factors no state has
  bool has_inverses = true;
};

KfacReport KfacImpl::report() const {
  KfacReport report = report_;
  report.steps = step_;
  report.factors = sync_->traffic();
  report.inverses = traffic_of(*inverse_gather_);
  report.gradients = traffic_of(*gradient_gather_);
  for (const auto& [key, times] : fallbacks_) report.fallbacks.push_back({key.first, key.second, times});
  for (const AutoMessage* message : {&auto_factors_, &auto_inverses_, &auto_gradients_}) {
    if (message->is_on) report.choices.push_back(message->choice);
  }
  return report;
}

KfacMemory KfacImpl::memory() const {
  const auto bytes = [](const std::vector<float>& values) {
    return static_cast<std::int64_t>(values.size() * sizeof(float));
  };
  KfacMemory memory;
  for (const HeldFactor& factor : factors_) {
    memory.factors_bytes += bytes(factor.running);
    memory.inverses_bytes += bytes(factor.inverse) + bytes(factor.values) + bytes(factor.triangles);
  }
  memory.batch_bytes = sync_->memory_bytes();
  memory.gradients_bytes = bytes(gradient_memory_[0]) + bytes(gradient_memory_[1]);
  memory.exchange_bytes = inverse_gather_->report().memory_bytes + gradient_gather_->report().memory_bytes;
  memory.scratch_bytes = factor_scratch_.bytes() + bytes(product_scratch_);
  memory.scratch_bytes += inverter_->scratch_bytes();
  if (device_ == nullptr) return memory;
  const KfacMemory there = device_->memory();
  memory.batch_bytes += there.batch_bytes;
  memory.inverses_bytes += there.inverses_bytes;
  memory.gradients_bytes += there.gradients_bytes;
  memory.scratch_bytes += there.scratch_bytes;
  return memory;
}

KfacState KfacImpl::save_state(bool with_inverses) const {
  KfacState state = {.strategy = settings_text(options_),
                     .world_size = world_->world_size(),
                     .rank = rank(),
                     .step = step_,
                     .layers = {}};
  const std::vector<OwnerResidual> residuals = gradient_gather_->save_residuals();
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const HeldFactor &a = factors_[2 * i], &g = factors_[2 * i + 1];
    KfacLayerState layer;
    layer.name = layers_[i].name;
    layer.a_factor = a.running;
    layer.g_factor = g.running;
    if (with_inverses && !inverses_are_stale_) {
      layer.a_inverse = a.inverse;
      layer.g_inverse = g.inverse;
      layer.a_eigenvalues = a.values;
      layer.g_eigenvalues = g.values;
    }
    for (const OwnerResidual& residual : residuals) {
      if (residual.name == layer.name) layer.residual = residual.values;
    }
    state.layers.push_back(std::move(layer));
  }
  return state;
}

// Of each list that this rank holds of a layer, the first that is not empty in a state. Inverses of the other kind, of
// which only one has eigenvalues, and those with an Inf or NaN are as if they were not there.
Status KfacImpl::find_layer(std::size_t i, std::span<const KfacState> states, Loading* loading) {
  const std::string& name = layers_[i].name;
  const auto find = [&](std::vector<float> KfacLayerState::*list, std::vector<float>* held, bool is_inverse,
                        bool* found_all) -> Status {
    if (held->empty()) return {};
    for (const KfacState& state : states) {
      for (const KfacLayerState& saved : state.layers) {
        if (saved.name != name || (saved.*list).empty()) continue;
        if (is_inverse && (saved.a_eigenvalues.empty() == is_eigen() || !is_finite(saved.*list))) continue;
        if ((saved.*list).size() != held->size()) {
          return make_error(StatusCode::kMismatch, "layer %s: the saved state has %zu values where %zu are expected",
                            name.c_str(), (saved.*list).size(), held->size());
        }
        CORTADO_RETURN_IF_ERROR(check_finite(saved.*list, name));
        loading->copies.push_back({&(saved.*list), held});
        return {};
      }
    }
    *found_all = false;
    return {};
  };
  HeldFactor &a = factors_[2 * i], &g = factors_[2 * i + 1];
  bool has_factors = true;
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::a_factor, &a.running, false, &has_factors));
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::g_factor, &g.running, false, &has_factors));
  if (!has_factors) loading->begun_anew.push_back(i);
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::a_inverse, &a.inverse, true, &loading->has_inverses));
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::g_inverse, &g.inverse, true, &loading->has_inverses));
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::a_eigenvalues, &a.values, true, &loading->has_inverses));
  CORTADO_RETURN_IF_ERROR(find(&KfacLayerState::g_eigenvalues, &g.values, true, &loading->has_inverses));
  for (const KfacState& state : states) {
    for (const KfacLayerState& saved : state.layers) {
      if (saved.name != name || saved.residual.empty()) continue;
      if (static_cast<std::int64_t>(saved.residual.size()) != layers_[i].gradient_elems()) {
        return make_error(StatusCode::kMismatch, "layer %s: the saved residual has %zu values, its gradient %" PRId64,
                          name.c_str(), saved.residual.size(), layers_[i].gradient_elems());
      }
      CORTADO_RETURN_IF_ERROR(check_finite(saved.residual, name));
      loading->residuals.push_back({name, saved.residual});
    }
  }
  return {};
}

// Everything is checked before anything is changed.
Status KfacImpl::check_states(std::span<const KfacState> states, Loading* loading) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (states.empty()) return make_error(StatusCode::kInvalidArgument, "expected at least one state");
  for (const KfacState& state : states) {
    if (state.step != states[0].step) {
      return make_error(StatusCode::kMismatch, "states are of different steps: %" PRId64 " and %" PRId64,
                        states[0].step, state.step);
    }
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) CORTADO_RETURN_IF_ERROR(find_layer(i, states, loading));
  return {};
}

Result<std::string> KfacImpl::load_state(std::span<const KfacState> states) {
  Loading loading;
  const Status checked = check_states(states, &loading);
  Status agreed = agree_on_outcome(world_, "load_state", checked, timeout());
  if (agreed.ok()) {
    agreed = check_same_number(world_, "step", static_cast<std::uint64_t>(states[0].step), timeout());
  }
  if (!agreed.ok()) return is_cut_off(agreed) ? fail(agreed) : agreed;
  // One rank that lacks inverses makes all of them compute theirs at the next step.
  const std::int64_t lacks = loading.has_inverses ? 0 : 1;
  const Result<std::vector<std::int64_t>> somebody_lacks = largest_of_ranks(world_, std::span(&lacks, 1), timeout());
  if (!somebody_lacks.ok()) return fail(somebody_lacks.status().with_context("load_state"));

  for (const FactorSlot& slot : slots()) {
    const std::vector<std::size_t>& anew = loading.begun_anew;
    if (std::find(anew.begin(), anew.end(), slot.layer) != anew.end()) begin_anew(slot);
  }
  for (const Loading::Copy& copy : loading.copies) *copy.to = *copy.from;
  CORTADO_RETURN_IF_ERROR(gradient_gather_->load_residuals(loading.residuals));
  for (const std::size_t i : loading.begun_anew) {
    count(layers_[i].name, "its factors were in no saved state: they begin anew");
  }
  step_ = states[0].step;
  reset_batch();
  device_has_inverses_ = false;
  inverses_are_stale_ = somebody_lacks.value()[0] != 0;
  for (AutoMessage* message : {&auto_factors_, &auto_inverses_, &auto_gradients_}) {
    message->phase = AutoMessage::Phase::kUndecided;
  }
  if (loading.begun_anew.empty()) return std::string();
  return "the states given lack factors of " + std::to_string(loading.begun_anew.size()) + " layers that rank " +
         std::to_string(rank()) + " holds now (saved with world size " + std::to_string(states[0].world_size) +
         ", loaded with " + std::to_string(world_->world_size()) +
         "); they begin anew. Give the states of all ranks to keep them";
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <cinttypes>
#include <numeric>

#include "collective/agreement.h"
#include "core/check.h"
#include "kfac/kfac_impl.h"

namespace cortado {

namespace {

KfacTraffic traffic_of(const OwnerGather& gather) {
  const OwnerGatherReport report = gather.report();
  return {report.steps, report.collectives, report.payload_bytes, report.dense_bytes, report.relative_l2_error};
}

// Takes over the first list of that layer which is not empty, if this rank holds such a list itself.
Status take(std::span<const KfacState> states, const std::string& layer, std::vector<float> KfacLayerState::*list,
            std::vector<float>* held, bool* found) {
  *found = held->empty();
  for (const KfacState& state : states) {
    for (const KfacLayerState& saved : state.layers) {
      if (*found || saved.name != layer || (saved.*list).empty()) continue;
      if ((saved.*list).size() != held->size()) {
        return make_error(StatusCode::kMismatch, "layer %s: the saved state has %zu values where %zu are expected",
                          layer.c_str(), (saved.*list).size(), held->size());
      }
      *held = saved.*list;
      *found = true;
    }
  }
  return {};
}

}  // namespace

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
  memory.gradients_bytes = bytes(gradients_) + bytes(results_);
  memory.exchange_bytes = inverse_gather_->report().memory_bytes + gradient_gather_->report().memory_bytes;
  memory.scratch_bytes = factor_scratch_.bytes() + bytes(product_scratch_);
  memory.scratch_bytes += inverter_->scratch_bytes();
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
    if (with_inverses) {
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

Status KfacImpl::load_layer(std::size_t i, std::span<const KfacState> states, bool* has_inverses) {
  const std::string& name = layers_[i].name;
  bool found = false, has_factors = true;
  const auto take_one = [&](std::vector<float> KfacLayerState::*list, std::vector<float>* held, bool* all) -> Status {
    CORTADO_RETURN_IF_ERROR(take(states, name, list, held, &found));
    *all &= found;
    return {};
  };
  HeldFactor &a = factors_[2 * i], &g = factors_[2 * i + 1];
  CORTADO_RETURN_IF_ERROR(take_one(&KfacLayerState::a_factor, &a.running, &has_factors));
  CORTADO_RETURN_IF_ERROR(take_one(&KfacLayerState::g_factor, &g.running, &has_factors));
  if (!has_factors) count(name, "its factors were in no saved state: they begin anew");
  CORTADO_RETURN_IF_ERROR(take_one(&KfacLayerState::a_inverse, &a.inverse, has_inverses));
  CORTADO_RETURN_IF_ERROR(take_one(&KfacLayerState::g_inverse, &g.inverse, has_inverses));
  CORTADO_RETURN_IF_ERROR(take_one(&KfacLayerState::a_eigenvalues, &a.values, has_inverses));
  return take_one(&KfacLayerState::g_eigenvalues, &g.values, has_inverses);
}

Result<std::string> KfacImpl::load_state(std::span<const KfacState> states) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (states.empty()) return make_error(StatusCode::kInvalidArgument, "expected at least one state");
  for (const KfacState& state : states) {
    if (state.step != states[0].step) {
      return make_error(StatusCode::kMismatch, "states are of different steps: %" PRId64 " and %" PRId64,
                        states[0].step, state.step);
    }
  }
  CORTADO_RETURN_IF_ERROR(check_same_number(world_, "step", static_cast<std::uint64_t>(states[0].step), timeout()));
  const auto begun_anew = [&] {
    std::int64_t layers = 0;
    for (const auto& [key, times] : fallbacks_) layers += key.second.starts_with("its factors were in no") ? times : 0;
    return layers;
  };
  const std::int64_t before = begun_anew();
  bool has_inverses = true;
  for (std::size_t i = 0; i < layers_.size(); ++i) CORTADO_RETURN_IF_ERROR(load_layer(i, states, &has_inverses));
  std::vector<OwnerResidual> residuals;
  for (const KfacState& state : states) {
    for (const KfacLayerState& layer : state.layers) {
      if (!layer.residual.empty()) residuals.push_back({layer.name, layer.residual});
    }
  }
  CORTADO_RETURN_IF_ERROR(gradient_gather_->load_residuals(residuals));
  step_ = states[0].step;
  sync_->reset();

  // One rank that lacks inverses makes all of them compute theirs at the next step.
  const std::uint64_t lacks = has_inverses ? 0 : 1;
  std::vector<std::uint64_t> all(static_cast<std::size_t>(world_->world_size()));
  CORTADO_RETURN_IF_ERROR(
      world_->all_gather(std::as_bytes(std::span(&lacks, 1)), std::as_writable_bytes(std::span(all)), timeout()));
  inverses_are_stale_ = std::accumulate(all.begin(), all.end(), std::uint64_t{0}) > 0;
  const std::int64_t anew = begun_anew() - before;
  if (anew == 0) return std::string();
  return "the states given lack factors of " + std::to_string(anew) + " layers that rank " + std::to_string(rank()) +
         " holds now (saved with world size " + std::to_string(states[0].world_size) + ", loaded with " +
         std::to_string(world_->world_size()) + "); they begin anew. Give the states of all ranks to keep them";
}

}  // namespace cortado

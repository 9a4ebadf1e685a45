// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/finite.h"
#include "kfac/inverse.h"
#include "kfac/kfac_impl.h"
#include "kfac/triangle.h"

namespace cortado {

Status KfacImpl::add_batch(std::size_t layer, Side side, const KfacBatch& batch, double scale) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (layer >= layers_.size()) {
    return make_error(StatusCode::kInvalidArgument, "there are %zu layers, got layer %zu", layers_.size(), layer);
  }
  if (!(scale > 0) || !std::isfinite(scale)) {
    return make_error(StatusCode::kInvalidArgument, "the scale of the loss must be above 0, got %g", scale);
  }
  const bool is_a = side == Side::kA;
  CORTADO_RETURN_IF_ERROR(is_a ? check_activations(layers_[layer], batch)
                               : check_output_gradients(layers_[layer], batch));
  const std::size_t slot = 2 * layer + (is_a ? 0 : 1);
  if (!sync_->wants(slot)) return {};
  start_lap();
  if (device_ != nullptr) {
    if (Status status = device_->add_batch(slot, batch, scale); !status.ok()) return fail(status);
  } else if (is_a) {
    add_activation_factors(layers_[layer], batch, sync_->triangles(slot), &factor_scratch_);
  } else {
    add_gradient_factors(layers_[layer], batch, scale, sync_->triangles(slot), &factor_scratch_);
  }
  sync_->count_batch(slot);
  lap(KfacStage::kFactors);
  return {};
}

// From the device.
Status KfacImpl::fetch_factors() {
  CORTADO_RETURN_IF_ERROR(device_->fetch_factors());
  for (std::size_t s = 0; s < factors_.size(); ++s) {
    if (sync_->has_batch(s)) std::copy_n(device_->triangles(s), sync_->slots()[s].elems(), sync_->triangles(s));
  }
  return {};
}

Status KfacImpl::update_factors(double decay) {
  if (device_ != nullptr) {
    CORTADO_RETURN_IF_ERROR(fetch_factors());
    lap(KfacStage::kFactors);
  }
  CORTADO_RETURN_IF_ERROR(decide_factors());
  const std::int64_t begin_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(sync_->reduce(static_cast<std::uint64_t>(step_)));
  auto_factors_.record(clock_->now_ns() - begin_ns, true);
  for (std::size_t s = 0; s < factors_.size(); ++s) {
    std::vector<float>& running = factors_[s].running;
    if (running.empty()) continue;
    const FactorSync::Sum sum = sync_->sum(s);
    const std::string& name = layers_[s / 2].name;
    if (!(sum.ranks >= 1)) {
      count(name, "no rank had a batch for a factor: the average stays");
    } else if (!all_finite(sum.triangles, static_cast<std::int64_t>(running.size()), DType::kFloat32)) {
      count(name, "a factor of the batch is not finite: the average stays");
    } else {
      const auto old_share = static_cast<float>(decay), new_share = static_cast<float>((1 - decay) / sum.ranks);
      for (std::size_t i = 0; i < running.size(); ++i) {
        running[i] = old_share * running[i] + new_share * sum.triangles[i];
      }
    }
  }
  return {};
}

SplitDamping KfacImpl::damping_of(std::size_t layer, std::int64_t group, double damping) const {
  if (!options_.pi_correction) return {.a = damping, .g = damping};
  const std::int64_t a = layers_[layer].a_dim(), g = layers_[layer].g_dim();
  return split_damping(damping, mean_diagonal(a, factors_[2 * layer].running.data() + group * triangle_elems(a)),
                       mean_diagonal(g, factors_[2 * layer + 1].running.data() + group * triangle_elems(g)));
}

Status KfacImpl::reserve_inverses() {
  std::vector<InverseJob> jobs;
  for (const FactorSlot& slot : sync_->slots()) {
    float unread = 0;
    if (slot.owner != rank()) continue;
    jobs.insert(jobs.end(), static_cast<std::size_t>(slot.matrices),
                {.n = slot.n, .values = is_eigen() ? &unread : nullptr});
  }
  return inverter_->reserve(jobs);
}

Status KfacImpl::invert_all(double damping) {
  std::vector<InverseJob> jobs;
  std::vector<const std::string*> names;  // of their layers
  for (std::size_t s = 0; s < factors_.size(); ++s) {
    for (std::int64_t m = 0; !factors_[s].running.empty() && m < sync_->slots()[s].matrices; ++m) {
      jobs.push_back(inverse_job(s, m, damping));
      names.push_back(&layers_[s / 2].name);
    }
  }
  CORTADO_RETURN_IF_ERROR(inverter_->invert(jobs, timeout()));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i].is_indefinite) count(*names[i], "a factor is indefinite: eigenvalues below 0 count as 0");
    if (jobs[i].raised > 0) count(*names[i], "a factor is not positive definite: damping was raised");
    if (jobs[i].failed) count(*names[i], "a factor could not be inverted: the last inverse stays");
  }
  return {};
}

InverseJob KfacImpl::inverse_job(std::size_t s, std::int64_t matrix, double damping) {
  const FactorSlot& slot = sync_->slots()[s];
  HeldFactor& factor = factors_[s];
  const SplitDamping split = is_eigen() ? SplitDamping{} : damping_of(slot.layer, matrix, damping);
  return {.n = slot.n,
          .triangle = factor.running.data() + matrix * triangle_elems(slot.n),
          .inverse = factor.inverse.data() + matrix * slot.n * slot.n,
          .values = is_eigen() ? factor.values.data() + matrix * slot.n : nullptr,
          .damping = slot.side == Side::kA ? split.a : split.g};
}

Status KfacImpl::update_inverses(const KfacHyperparameters& values) {
  CORTADO_RETURN_IF_ERROR(invert_all(values.damping));
  device_has_inverses_ = false;
  lap(KfacStage::kInverses);
  CORTADO_RETURN_IF_ERROR(gather_inverses());
  lap(KfacStage::kGatherInverses);
  return {};
}

// Inverses are symmetric, eigenvectors are not.
void KfacImpl::pack_own_inverses() {
  for (const std::size_t s : gathered_slots_) {
    const FactorSlot& slot = sync_->slots()[s];
    HeldFactor& factor = factors_[s];
    for (std::int64_t m = 0; !is_eigen() && slot.owner == rank() && m < slot.matrices; ++m) {
      copy_to_triangle(slot.n, factor.inverse.data() + m * slot.n * slot.n,
                       factor.triangles.data() + m * triangle_elems(slot.n));
    }
  }
}

const std::string& KfacImpl::inverse_codec() const {
  return auto_inverses_.is_on ? auto_inverses_.choice.codec : options_.factor_compression;
}

Status KfacImpl::send_inverses() {
  std::vector<OwnerNote> notes(static_cast<std::size_t>(column_->get()->world_size()));
  return inverse_gather_->run(static_cast<std::uint64_t>(step_), gathered_inverses_, {}, notes);
}

Status KfacImpl::gather_inverses() {
  if (column_->is_alone()) return {};
  pack_own_inverses();
  CORTADO_RETURN_IF_ERROR(decide_inverses());
  const std::int64_t begin_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(send_inverses());
  // A codec that overflows (cast(fp16) with little damping). Eigenvectors are at most 1, and eigenvalues exact.
  if (!is_eigen() && inverse_codec() != "none" && !inverse_gather_->report().finite) {
    count("", "inverses overflow in " + inverse_codec() + ": sent as they are");
    pack_own_inverses();
    CORTADO_RETURN_IF_ERROR(inverse_gather_->set_codec("none"));
    CORTADO_RETURN_IF_ERROR(send_inverses());
    CORTADO_RETURN_IF_ERROR(inverse_gather_->set_codec(inverse_codec()));
  }
  auto_inverses_.record(clock_->now_ns() - begin_ns, inverse_gather_->report().finite);
  for (const std::size_t s : gathered_slots_) {
    const FactorSlot& slot = sync_->slots()[s];
    for (std::int64_t m = 0; !is_eigen() && m < slot.matrices; ++m) {
      copy_from_triangle(slot.n, factors_[s].triangles.data() + m * triangle_elems(slot.n),
                         factors_[s].inverse.data() + m * slot.n * slot.n);
    }
  }
  return {};
}

}  // namespace cortado

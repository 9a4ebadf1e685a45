// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/float_passes.h"
#include "core/hash.h"
#include "kfac/gradient_matrix.h"
#include "kfac/kfac_impl.h"

namespace cortado {

namespace {

Status check_hyperparameters(const KfacHyperparameters& values) {
  const auto refuse = [](const char* name, const char* expected, double got) {
    return make_error(StatusCode::kInvalidArgument, "%s must be %s, got %g", name, expected, got);
  };
  if (!(values.factor_decay >= 0 && values.factor_decay <= 1)) {
    return refuse("factor_decay", "from 0 to 1", values.factor_decay);
  }
  if (!(values.damping > 0) || !std::isfinite(values.damping)) return refuse("damping", "above 0", values.damping);
  if (!(values.kl_clip >= 0)) return refuse("kl_clip", "0 (off) or more", values.kl_clip);
  if (!std::isfinite(values.lr)) return refuse("lr", "finite", values.lr);
  return {};
}

const char* updates_text(const KfacHyperparameters& values) {
  if (values.update_inverses) return values.update_factors ? "factors and inverses" : "inverses";
  return values.update_factors ? "factors" : "neither factors nor inverses";
}

constexpr std::uint64_t kNotFinite = 1;  // in the flags of a note

}  // namespace

// A hash; the texts where it differs.
Status KfacImpl::compare_step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients) {
  if (world_->world_size() == 1) return {};
  const double numbers[] = {static_cast<double>(step_),
                            values.factor_decay,
                            values.damping,
                            values.kl_clip,
                            values.lr,
                            static_cast<double>(values.update_factors),
                            static_cast<double>(values.update_inverses)};
  const std::string codecs = codecs_text();
  std::string whole = codecs + std::string(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  for (const KfacGradient& gradient : gradients) whole += gradient.weight != nullptr ? '1' : '0';
  const std::uint64_t own = fnv1a_64(whole);
  const std::string context = "step " + std::to_string(step_);
  const Result<std::vector<std::uint64_t>> gathered =
      gather_checked(world_, "settings", std::span<const std::uint64_t>(&own, 1), timeout());
  CORTADO_RETURN_IF_ERROR(gathered.status().with_context(context));
  const std::vector<std::uint64_t>& hashes = gathered.value();
  const auto other = std::find_if(hashes.begin(), hashes.end(), [&](std::uint64_t hash) { return hash != own; });
  if (other == hashes.end()) return {};
  CORTADO_RETURN_IF_ERROR(check_agreement(world_, codecs, {}, timeout()).with_context(context));
  return make_error(StatusCode::kMismatch,
                    "step %" PRId64
                    ": ranks differ in factor_decay, damping, kl_clip, lr, the step, which layers have gradients or "
                    "what they update: rank %d has others than rank %d, which has %g, %g, %g and %g and updates %s",
                    step_, static_cast<int>(other - hashes.begin()), rank(), values.factor_decay, values.damping,
                    values.kl_clip, values.lr, updates_text(values));
}

Status KfacImpl::check_gradients(std::span<const KfacGradient> gradients) const {
  if (gradients.size() != layers_.size()) {
    return make_error(StatusCode::kInvalidArgument, "expected the gradients of %zu layers, got %zu", layers_.size(),
                      gradients.size());
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const KfacGradient& gradient = gradients[i];
    if (gradient.dtype == DType::kUint8) {
      return make_error(StatusCode::kInvalidArgument, "layer %s: gradients must be fp32, fp16 or bf16",
                        layers_[i].name.c_str());
    }
    if ((gradient.weight != nullptr && layers_[i].has_bias) != (gradient.bias != nullptr)) {
      return make_error(StatusCode::kInvalidArgument, "layer %s: expected gradients of weight and %s",
                        layers_[i].name.c_str(), layers_[i].has_bias ? "bias" : "no bias");
    }
  }
  return {};
}

// Preconditions the layers of this rank's column into results_; returns the sum of their products with the gradients.
Result<double> KfacImpl::precondition(double damping, std::span<const KfacGradient> gradients) {
  if (device_ != nullptr) return precondition_on_device(damping, gradients);
  double product = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (!is_worker(i)) continue;
    const KfacLayer& layer = layers_[i];
    const std::int64_t a = layer.a_dim(), g = layer.g_dim();
    float* w = gradients_ + offsets_[i];
    load_gradient(layer, gradients[i], w);
    for (std::int64_t m = 0; m < layer.groups; ++m) {
      const float *group_w = w + m * g * a, *a_inverse = factors_[2 * i].inverse.data() + m * a * a,
                  *g_inverse = factors_[2 * i + 1].inverse.data() + m * g * g;
      float* v = results_ + offsets_[i] + m * g * a;
      if (is_eigen()) {
        precondition_by_eigen(g, a, {g_inverse, factors_[2 * i + 1].values.data() + m * g},
                              {a_inverse, factors_[2 * i].values.data() + m * a}, damping, options_.pi_correction,
                              group_w, v, product_scratch_.data());
      } else {
        precondition_by_inverse(g, a, g_inverse, a_inverse, group_w, v, product_scratch_.data());
      }
    }
    product += inner_product(results_ + offsets_[i], w, layer.gradient_elems());
  }
  return product;
}

// The same there; to results_ only where they travel.
Result<double> KfacImpl::precondition_on_device(double damping, std::span<const KfacGradient> gradients) {
  for (std::size_t s = 0; s < factors_.size() && !device_has_inverses_; ++s) {
    const HeldFactor& factor = factors_[s];
    if (!is_worker(s / 2)) continue;
    CORTADO_RETURN_IF_ERROR(device_->load_inverse(s, factor.inverse.data(), factor.values.data()));
  }
  device_has_inverses_ = true;
  CORTADO_RETURN_IF_ERROR(device_->load_gradients(gradients, 1, /*all=*/false));
  return device_->precondition(damping, stays_on_device() ? nullptr : results_);
}

Status KfacImpl::store(const float* results, float scale, bool all, std::span<const KfacGradient> gradients,
                       DeviceStream stream) {
  if (device_ != nullptr) {
    CORTADO_RETURN_IF_ERROR(device_->follow(stream));
    CORTADO_RETURN_IF_ERROR(device_->store_gradients(gradients, scale, all, results));
    return device_->lead(stream);
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (all || is_worker(i)) store_gradient(layers_[i], results + offsets_[i], scale, gradients[i]);
  }
  return {};
}

Result<KfacOutcome> KfacImpl::exchange(const KfacHyperparameters& values, double own_product) {
  std::vector<OwnerNote> notes(static_cast<std::size_t>(row_->get()->world_size()));
  CORTADO_RETURN_IF_ERROR(decide_gradients());
  if (auto_gradients_.is_on) lap(KfacStage::kGather);  // the wait for others, too
  const std::uint64_t flags = std::isfinite(own_product) ? 0 : kNotFinite;
  const OwnerGatherReport before = gradient_gather_->report();
  const std::int64_t begin_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(
      gradient_gather_->run(static_cast<std::uint64_t>(step_), result_of_layer_, {own_product, flags}, notes));
  const OwnerGatherReport after = gradient_gather_->report();
  auto_gradients_.record(clock_->now_ns() - begin_ns, after.finite);
  report_.stage_ns[static_cast<int>(KfacStage::kEncode)] += after.encode_ns - before.encode_ns;
  report_.stage_ns[static_cast<int>(KfacStage::kGather)] += after.gather_ns - before.gather_ns;
  report_.stage_ns[static_cast<int>(KfacStage::kDecode)] += after.decode_ns - before.decode_ns;
  start_lap();

  KfacOutcome outcome{.finite = after.finite};
  double product = 0;
  for (const OwnerNote& note : notes) {
    outcome.finite &= (note.flags & kNotFinite) == 0;
    product += note.value;
  }
  const double squared = std::fabs(product * values.lr * values.lr);
  if (values.kl_clip > 0 && squared > 0) outcome.scale = std::min(1.0, std::sqrt(values.kl_clip / squared));
  return outcome;
}

Result<KfacOutcome> KfacImpl::step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients,
                                   void* device_stream) {
  CORTADO_RETURN_IF_ERROR(failure_);
  CORTADO_RETURN_IF_ERROR(check_hyperparameters(values));
  CORTADO_RETURN_IF_ERROR(check_gradients(gradients));
  const Result<KfacOutcome> outcome = run_step(values, gradients, static_cast<DeviceStream>(device_stream));
  if (!outcome.ok()) return fail(outcome.status());
  ++step_;
  return outcome;
}

Result<KfacOutcome> KfacImpl::run_step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients,
                                       DeviceStream stream) {
  CORTADO_RETURN_IF_ERROR(compare_step(values, gradients));
  start_lap();
  if (device_ != nullptr) CORTADO_RETURN_IF_ERROR(device_->follow(stream));
  if (values.update_factors) {
    CORTADO_RETURN_IF_ERROR(update_factors(values.factor_decay));
    lap(KfacStage::kReduceFactors);
  } else {
    reset_batch();
  }
  if (values.update_inverses || inverses_are_stale_) {
    CORTADO_RETURN_IF_ERROR(update_inverses(values));
    inverses_are_stale_ = false;
  }
  CORTADO_ASSIGN_OR_RETURN(const double product, precondition(values.damping, gradients));
  lap(KfacStage::kPrecondition);
  CORTADO_ASSIGN_OR_RETURN(const KfacOutcome outcome, exchange(values, product));
  if (outcome.finite) {
    CORTADO_RETURN_IF_ERROR(store(stays_on_device() ? nullptr : results_, static_cast<float>(outcome.scale),
                                  /*all=*/true, gradients, stream));
  } else {
    ++report_.non_finite_steps;
  }
  lap(KfacStage::kApply);
  return outcome;
}

Status KfacImpl::reduce_gradients(std::span<const KfacGradient> gradients, void* device_stream) {
  CORTADO_RETURN_IF_ERROR(failure_);
  CORTADO_RETURN_IF_ERROR(check_gradients(gradients));
  if (world_->world_size() == 1) return {};
  start_lap();
  const auto stream = static_cast<DeviceStream>(device_stream);
  const float share = 1.0f / static_cast<float>(world_->world_size());
  if (Status status = load_all(gradients, share, stream); !status.ok()) return fail(status);
  if (Status status = sum_gradients(); !status.ok()) return fail(status);
  if (Status status = store(results_, 1, /*all=*/false, gradients, stream); !status.ok()) return fail(status);
  lap(KfacStage::kReduceGradients);
  return {};
}

// Gradients of all layers times `scale` to gradients_.
Status KfacImpl::load_all(std::span<const KfacGradient> gradients, float scale, DeviceStream stream) {
  if (device_ != nullptr) {
    CORTADO_RETURN_IF_ERROR(allocate(&gradients_));
    CORTADO_RETURN_IF_ERROR(allocate(&results_));
    CORTADO_RETURN_IF_ERROR(device_->follow(stream));
    CORTADO_RETURN_IF_ERROR(device_->load_gradients(gradients, scale, /*all=*/true));
    return device_->fetch_gradients(gradients_);
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    float* w = gradients_ + offsets_[i];
    load_gradient(layers_[i], gradients[i], w);
    scale_values(w, scale, layers_[i].gradient_elems(), w);
  }
  return {};
}

// Within a row, the layers of each column to its rank; then among the ranks of a column.
Status KfacImpl::sum_gradients() {
  const auto run = [&](Communicator* communicator, const CollectiveCall& call) -> Status {
    if (communicator->world_size() == 1) return {};
    ++report_.reduced_gradients.collectives;
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start(call));
    const Status status = communicator->wait(work, timeout());
    gradients_in_flight_ = status.ok() ? nullptr : communicator;
    return status;
  };
  const int column = grid_.column_of(rank());
  const std::int64_t first = std::accumulate(column_elems_.begin(), column_elems_.begin() + column, std::int64_t{0});
  const std::int64_t elems = column_elems_[static_cast<std::size_t>(column)];
  report_.reduced_gradients.collectives = 0;
  ++report_.reduced_gradients.messages;
  report_.reduced_gradients.payload_bytes = report_.reduced_gradients.dense_bytes =
      gradient_elems_ * static_cast<std::int64_t>(sizeof(float));
  if (grid_.columns == 1) std::copy_n(gradients_, gradient_elems_, results_);
  CORTADO_RETURN_IF_ERROR(run(row_->get(), {.kind = CollectiveKind::kReduceScatter,
                                            .dtype = DType::kFloat32,
                                            .sent = gradients_,
                                            .received = results_ + first,
                                            .counts = column_elems_}));
  return run(column_->get(), {.kind = CollectiveKind::kAllReduce,
                              .dtype = DType::kFloat32,
                              .sent = results_ + first,
                              .received = results_ + first,
                              .elems = elems});
}

}  // namespace cortado

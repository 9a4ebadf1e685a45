// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/engine_base.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <iterator>

#include "core/check.h"
#include "core/format.h"
#include "core/loss_scale.h"
#include "core/seconds.h"

namespace cortado {

// ---- a step --------------------------------------------------------------------------------------------------------

Status EngineBase::check_between_steps(const char* call) const {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "%s: a step is under way", call);
  return {};
}

Status EngineBase::check_in_step(const char* call) const {
  if (!failure_.ok()) return failure_;
  if (!in_step_) return make_error(StatusCode::kFailedPrecondition, "%s: no step was begun", call);
  return {};
}

Status EngineBase::check_gradient_scale(const char* where, double scale) {
  if (is_loss_scale(scale)) return {};
  return make_error(StatusCode::kInvalidArgument, "%s: gradient_scale must be above 0 and finite in float32, got %g",
                    where, scale);
}

Status EngineBase::begin_any_step(const StepContext& context, bool takes_scale_of_device) {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "begin_step: the step before has not been finished");
  CORTADO_RETURN_IF_ERROR(check_gradient_scale("begin_step", context.gradient_scale));
  if (context.device_gradient_scale != nullptr && !takes_scale_of_device) {
    return make_error(StatusCode::kInvalidArgument, "begin_step: a scale on a device, but gradients on the host");
  }
  context_ = context;
  in_step_ = true;
  finite_ = true;
  std::fill(submitted_.begin(), submitted_.end(), SubmittedGradient{});
  return {};
}

// ---- errors --------------------------------------------------------------------------------------------------------

Status EngineBase::fail(const Status& status) {
  if (failure_.ok()) {
    failure_ = status.with_context("step " + std::to_string(step_number()));
    communicator_->abandon(failure_.message());
  }
  return failure_;
}

Status EngineBase::not_submitted(std::uint32_t tensor) const {
  return make_error(StatusCode::kFailedPrecondition, "finish_step: rank %d has not submitted the gradient of \"%s\"",
                    communicator_->rank(), tensors_[tensor].name.c_str());
}

void EngineBase::abandon(const std::string& why) {
  if (!failure_.ok()) return;
  std::size_t missing = 0, first = 0;
  for (std::size_t t = tensors_.size(); t-- > 0;) {
    if (in_step_ && submitted_[t].submitted) continue;
    first = t;
    ++missing;
  }
  const std::string name =
      name_tensors(tensors_.empty() ? "" : tensors_[first].name, missing > 0 ? missing : tensors_.size());
  failure_ =
      make_error(StatusCode::kFailedPrecondition, "rank %d abandoned step %" PRId64 " %s %s were submitted: %s",
                 communicator_->rank(), step_number(), missing > 0 ? "before" : "after", name.c_str(), why.c_str());
  communicator_->abandon(why);
}

void EngineBase::leave_group() {
  if (in_step_ && failure_.ok()) communicator_->abandon("the engine was destroyed within a step");
}

std::chrono::nanoseconds EngineBase::timeout() const { return from_seconds(options_.timeout_s); }

Status EngineBase::check_replicas(std::span<const ReplicaTensor> tensors) {
  CORTADO_RETURN_IF_ERROR(check_between_steps("check_replicas"));
  const Result<ReplicaDifference> difference = compare_replicas(communicator_, tensors, timeout());
  if (!difference.ok()) return fail(difference.status().with_context("check_replicas"));
  return replicas_.note(difference.value(), step_number());
}

// ---- state ---------------------------------------------------------------------------------------------------------

Status EngineBase::check_origin(const EngineState& state) const {
  CORTADO_RETURN_IF_ERROR(check_between_steps("load_state"));
  if (state.spec != options_.results_spec()) {
    return make_error(StatusCode::kMismatch, "load_state: the state is of \"%s\", this engine of \"%s\"",
                      state.spec.c_str(), options_.results_spec().c_str());
  }
  if (state.world_size == communicator_->world_size() && state.rank != communicator_->rank()) {
    return make_error(StatusCode::kMismatch,
                      "load_state: this is the state of rank %d, here is rank %d; each rank loads its own", state.rank,
                      communicator_->rank());
  }
  return {};
}

std::string EngineBase::warning_of_ranks(const EngineState& state) const {
  if (state.world_size == communicator_->world_size()) return "";
  return "the state was saved by " + std::to_string(state.world_size) + " ranks and is loaded by " +
         std::to_string(communicator_->world_size()) +
         ": residuals start at zero (what they held is lost once), bases and step are kept";
}

// ---- reports and traces --------------------------------------------------------------------------------------------

void EngineBase::record(Stage stage, int message, int tensor, const Interval& interval, std::int64_t bytes,
                        std::int32_t collective) {
  stage_ns_[static_cast<int>(stage)] += interval.end_ns - interval.start_ns;
  if (trace_ == nullptr) return;
  trace_->record({stage, message, tensor, step_number(), interval.start_ns, interval.end_ns, bytes, collective});
}

void EngineBase::note_non_finite(const std::string& where, int rank) {
  if (finite_) {
    last_non_finite_ = "step " + std::to_string(step_number()) + ": " + where +
                       (rank >= 0 ? ", rank " + std::to_string(rank) : ", in the sum over ranks");
  }
  finite_ = false;
}

EngineReport EngineBase::begin_report() const {
  EngineReport report;
  report.spec = options_.to_spec();
  report.communicator = communicator_->name();
  report.world_size = communicator_->world_size();
  report.steps = finished_steps_;
  report.non_finite_steps = non_finite_steps_;
  report.last_non_finite = last_non_finite_;
  report.payload_bytes = last_payload_bytes_;
  report.messages = last_messages_;
  for (const EngineTensor& tensor : tensors_) {
    TensorReport& its = report.tensors.emplace_back();
    its.name = tensor.name;
    its.elems = tensor.elems();
    report.dense_bytes += tensor.size_bytes();
  }
  if (last_payload_bytes_ > 0) {
    report.ratio = static_cast<double>(report.dense_bytes) / static_cast<double>(last_payload_bytes_);
  }
  std::copy(std::begin(stage_ns_), std::end(stage_ns_), std::begin(report.stage_ns));
  return report;
}

void EngineBase::add_squares(const SquareSums& sums, EngineReport* report) {
  if (sums.of_values > 0) report->relative_l2_error = std::sqrt(sums.of_errors / sums.of_values);
  report->residual_l2 = std::sqrt(sums.of_residuals);
}

std::vector<std::string> EngineBase::names() const {
  std::vector<std::string> names;
  for (const EngineTensor& tensor : tensors_) names.push_back(tensor.name);
  return names;
}

Trace EngineBase::trace() const {
  Trace trace{.spec = options_.to_spec(),
              .rank = communicator_->rank(),
              .world_size = communicator_->world_size(),
              .tensors = names(),
              .events = {}};
  if (trace_ != nullptr) {
    trace.events = trace_->events();
    trace.dropped = trace_->dropped();
    trace.collectives = trace_->collectives();
  }
  return trace;
}

}  // namespace cortado

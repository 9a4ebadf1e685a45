// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A step of auto: what happens to gradients on their way to the engine inside, and back.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "codec/cast/float_chunks.h"
#include "collective/device_wait.h"
#include "core/finite.h"
#include "session/auto_engine.h"

namespace cortado {

namespace {

// NaN is more than Inf here, which is more than all else: as their bits are.
double largest_magnitude(const float* values, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  const auto magnitude = std::bit_cast<float>(most);
  return std::isnan(magnitude) ? std::numeric_limits<double>::infinity() : magnitude;
}

}  // namespace

Status AutoEngineImpl::begin_step(const StepContext& context) {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "begin_step: the step before has not been finished");
  context_ = context;
  if (was_passed_) inner_->set_first_step(step_number());
  // What the caller keeps is not what is sent then.
  if (!debts_.empty()) context_.keeps_local_gradients = false;
  const bool touches_gradients = !debts_.empty() || adds_squares();
  route_ = copies_ == nullptr        ? Route::kDirect
           : !inner_->is_on_device() ? Route::kHost
           : touches_gradients       ? Route::kBoth
                                     : Route::kDirect;
  is_inside_begun_ = false;
  if (route_ != Route::kDirect) {
    const GradientScale scale{.value = context.gradient_scale,
                              .on_device = static_cast<const float*>(context.device_gradient_scale)};
    const Status status =
        copies_->begin_step(scale, 0, /*is_dense=*/true, static_cast<DeviceStream>(context.device_stream));
    if (!status.ok()) return fail(status.with_context("to the device"));
  }
  // The host learns the scale with the first gradients.
  if (route_ != Route::kHost || context_.device_gradient_scale == nullptr) CORTADO_RETURN_IF_ERROR(begin_inside());
  in_step_ = true;
  was_passed_ = false;
  own_ns_ = 0;
  gradient_squares_ = 0;
  last_ready_ns_ = step_first_ready_ns_ = 0;
  held_.clear();
  debts_.begin_step();
  empty_.clear();
  std::fill(submitted_.begin(), submitted_.end(), SubmittedGradient{});
  return {};
}

Status AutoEngineImpl::begin_inside() {
  is_inside_begun_ = true;
  StepContext context = context_;
  if (route_ == Route::kHost) {
    context.keeps_local_gradients = false;  // what decoding overwrites is a copy
    context.device_stream = nullptr;
    context.device_gradient_scale = nullptr;
  } else if (route_ == Route::kBoth) {
    context.device_stream = copies_->stream();  // from which it gets gradients that have been changed
  }
  return inner_->begin_step(context);
}

Status AutoEngineImpl::note_submission(std::span<const Gradient> gradients) {
  if (!failure_.ok()) return failure_;
  if (!in_step_) return make_error(StatusCode::kFailedPrecondition, "submit: no step was begun");
  return note_submitted(gradients, tensors_, &submitted_);
}

// Before the engine inside gets them.
void AutoEngineImpl::note_gradients(std::span<const Gradient> gradients) {
  if (phase_ != Phase::kRun && !gradients.empty()) {
    last_ready_ns_ = clock_->now_ns() - step_start_ns_ - own_ns_;
    if (step_first_ready_ns_ == 0) step_first_ready_ns_ = last_ready_ns_;
  }
  for (const Gradient& gradient : gradients) {
    const EngineTensor& tensor = tensors_[gradient.tensor];
    const std::int64_t elems = tensor.elems();
    if (holds_back()) ready_ns_[gradient.tensor] = last_ready_ns_;
    // The rest is for gradients that the host can read.
    if (elems == 0 || gradient.data == nullptr || (route_ == Route::kDirect && inner_->is_on_device())) continue;
    if (adds_squares()) {
      float buffer[kChunkElems];
      for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
        const float* values = load_floats(gradient.data, tensor.dtype, at, count, buffer);
        double squares = 0;
        for (std::int64_t i = 0; i < count; ++i) squares += static_cast<double>(values[i]) * values[i];
        gradient_squares_ += squares;
      });
    }
    if (takes_magnitudes() && tensor.dtype != DType::kFloat16) {
      float buffer[kChunkElems];
      for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
        const float* values = load_floats(gradient.data, tensor.dtype, at, count, buffer);
        largest_gradient_ = std::max(largest_gradient_, largest_magnitude(values, count));
      });
    }
    if (takes_samples()) take_sample(gradient);
    debts_.pay(gradient, context_, steps_);
  }
}

void AutoEngineImpl::take_sample(const Gradient& gradient) {
  const auto found = sampled_.find(gradient.tensor);
  if (found == sampled_.end()) return;
  std::vector<float>& sample = samples_[found->second];
  float buffer[kChunkElems];
  for_chunks(static_cast<std::int64_t>(sample.size()), [&](std::int64_t at, std::int64_t count) {
    const float* values = load_floats(gradient.data, tensors_[gradient.tensor].dtype, at, count, buffer);
    std::copy_n(values, count, sample.begin() + at);
  });
}

Status AutoEngineImpl::submit(std::span<const Gradient> gradients) {
  const std::int64_t start_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(note_submission(gradients));
  if (route_ != Route::kDirect) {
    CORTADO_RETURN_IF_ERROR(submit_copied(gradients));
  } else {
    note_gradients(gradients);
    if (holds_back()) {
      if (!gradients.empty()) held_.push_back({.gradients = {gradients.begin(), gradients.end()}});
    } else {
      CORTADO_RETURN_IF_ERROR(inner_->submit(gradients));
    }
  }
  own_ns_ += clock_->now_ns() - start_ns;
  return {};
}

Status AutoEngineImpl::submit_copied(std::span<const Gradient> gradients) {
  for (const Gradient& gradient : gradients) {
    if (tensors_[gradient.tensor].elems() == 0) empty_.push_back(gradient);
  }
  if (const Status status = copies_->submit(gradients); !status.ok()) return fail(status.with_context("submit"));
  return take_copies();
}

// Gives the engine inside what has arrived on the host.
Status AutoEngineImpl::take_copies() {
  for (;;) {
    const Result<const DeviceSide::Arrival*> next = copies_->next();
    if (!next.ok()) return fail(next.status().with_context("from the device"));
    if (next.value() == nullptr) break;
    if (context_.device_gradient_scale != nullptr) context_.gradient_scale = copies_->gradient_scale();
    if (!is_inside_begun_) {
      const Status status = begin_inside();
      if (!status.ok()) return fail(status.with_context("with the scale read on the device"));
    }
    arrived_.clear();
    for (const std::uint32_t t : next.value()->on_host) arrived_.push_back({t, copies_->host_copy(t)});
    const std::size_t changed = debts_.paid().size();
    note_gradients(arrived_);
    if (route_ == Route::kBoth) {
      for (const Gradient& gradient : debts_.paid().subspan(changed)) {
        if (const Status status = copies_->put_back(gradient.tensor); !status.ok()) return fail(status);
      }
      for (Gradient& gradient : arrived_) gradient.data = submitted_[gradient.tensor].data;
    }
    CORTADO_RETURN_IF_ERROR(inner_->submit(arrived_));
  }
  return is_inside_begun_ ? inner_->submit({}) : Status();
}

Status AutoEngineImpl::wait_for_copies() {
  DeviceWait wait(communicator_, clock_, timeout(), "computed its gradients");
  for (;;) {
    CORTADO_RETURN_IF_ERROR(take_copies());
    if (!copies_->awaits()) break;
    if (const Status status = wait.pause(); !status.ok()) return fail(status);
  }
  if (!is_inside_begun_) {  // nothing was submitted but tensors without elements
    if (const Status status = begin_inside(); !status.ok()) return fail(status);
  }
  return empty_.empty() ? Status() : inner_->submit(empty_);
}

Status AutoEngineImpl::submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) {
  if (!sums_buffers()) return submit(gradients);
  const std::int64_t start_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(note_submission(gradients));
  note_gradients(gradients);
  if (holds_back()) {
    if (!gradients.empty()) held_.push_back({{gradients.begin(), gradients.end()}, true, data, elems, dtype});
  } else {
    CORTADO_RETURN_IF_ERROR(inner_->submit_buffer(gradients, data, elems, dtype));
  }
  own_ns_ += clock_->now_ns() - start_ns;
  return {};
}

Status AutoEngineImpl::submit_held() {
  for (const Held& held : held_) {
    CORTADO_RETURN_IF_ERROR(held.is_buffer ? inner_->submit_buffer(held.gradients, held.data, held.elems, held.dtype)
                                           : inner_->submit(held.gradients));
  }
  held_.clear();
  return {};
}

Result<StepOutcome> AutoEngineImpl::finish_step(const LocalGradient& local_gradient) {
  if (!failure_.ok()) return failure_;
  if (!in_step_) return make_error(StatusCode::kFailedPrecondition, "finish_step: no step was begun");
  const Result<StepOutcome> outcome = finish_inside(local_gradient);
  if (!outcome.ok() && failure_.ok()) release_gradients();
  in_step_ = false;
  if (!outcome.ok()) return failure_ = outcome.status();
  if (!debts_.paid().empty() && outcome.value().finite && sums_are_finite()) debts_.settle();
  if (const Status status = after_step(); !status.ok()) return fail(status);
  return outcome;
}

Result<StepOutcome> AutoEngineImpl::finish_inside(const LocalGradient& local_gradient) {
  if (route_ == Route::kDirect) {
    if (const Status status = submit_held(); !status.ok()) return fail(status);
    return inner_->finish_step(local_gradient);
  }
  CORTADO_RETURN_IF_ERROR(wait_for_copies());
  const auto checked = [this](const Status& status) {
    return status.ok() ? status : fail(status.with_context("to the device"));
  };
  if (route_ == Route::kBoth) {
    CORTADO_RETURN_IF_ERROR(checked(copies_->follow()));
    CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, inner_->finish_step(local_gradient));
    CORTADO_RETURN_IF_ERROR(checked(copies_->lead()));
    return outcome;
  }
  CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, inner_->finish_step({}));
  CORTADO_RETURN_IF_ERROR(checked(copies_->finish_step(outcome.finite, [](std::uint32_t) { return true; })));
  return outcome;
}

// An engine that does not look for Inf and NaN calls every step finite. The sums are the same on all ranks, so all of
// them see the same. A caller that skips steps skips all of one, wherever Inf is: then no debt has been paid.
bool AutoEngineImpl::sums_are_finite() const {
  if (!sums_buffers()) return true;
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    const EngineTensor& tensor = tensors_[t];
    if (submitted_[t].submitted && !all_finite(submitted_[t].data, tensor.elems(), tensor.dtype)) return false;
  }
  return true;
}

bool AutoEngineImpl::may_pass() const {
  return options_.can_average && failure_.ok() && phase_ != Phase::kMeasure && current_ == 0 && owes_nothing_;
}

// What is owed to a tensor that a rank has not used waits on that rank alone.
Status AutoEngineImpl::agree_on_debts() {
  const Debts::Dropped dropped = debts_.drop_old(steps_);
  const std::int64_t own[] = {!debts_.empty(), dropped.tensors, dropped.last};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> most,
                           largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  owes_nothing_ = most[0] == 0;
  tell_dropped({most[1], most[2]});
  return {};
}

// `most`: the largest of any rank, so that all say the same.
void AutoEngineImpl::tell_dropped(const Debts::Dropped& most) {
  if (most.tensors == 0) return;
  const std::string& name = tensors_[static_cast<std::size_t>(most.last)].name;
  say_at_step("\"" + name + "\"" +
              (most.tensors > 1 ? " and " + std::to_string(most.tensors - 1) + " more have" : " has") +
              " had no gradient for " + std::to_string(Debts::kStepsWithoutGradient) +
              " steps: what is still owed there is dropped");
}

Status AutoEngineImpl::pass_step() {
  if (!failure_.ok()) return failure_;
  if (in_step_ || !may_pass()) {
    return make_error(StatusCode::kFailedPrecondition, "pass_step: this step is not the caller's (may_pass())");
  }
  if (!was_passed_) {
    uncounted_ = std::max(uncounted_, kUncountedSteps);
    times_ns_.clear();
    first_ready_ns_.clear();
  }
  was_passed_ = true;
  step_first_ready_ns_ = 0;
  ++passed_steps_;
  gradient_squares_ = 0;
  if (const Status status = after_step(); !status.ok()) return fail(status);
  return {};
}

Status AutoEngineImpl::after_step() {
  ++steps_;
  if (phase_ != Phase::kRun) ++measured_steps_;
  if (communicator_->world_size() == 1) {
    owes_nothing_ = debts_.empty();
    return {};
  }
  if (options_.can_average && phase_ != Phase::kMeasure && current_ == 0 && !owes_nothing_) {
    CORTADO_RETURN_IF_ERROR(agree_on_debts());
  }
  const std::int64_t now_ns = clock_->now_ns();
  if (uncounted_ > 0) {
    --uncounted_;
    if (phase_ == Phase::kTry) {
      recent_first_ready_ns_.push_back(step_first_ready_ns_);
      if (uncounted_ == 0) CORTADO_RETURN_IF_ERROR(predict_trial());
    }
  } else {
    times_ns_.push_back(now_ns - step_start_ns_);
    if (phase_ != Phase::kRun) first_ready_ns_.push_back(step_first_ready_ns_);
    if (phase_ == Phase::kMeasure && is_quiet_) CORTADO_RETURN_IF_ERROR(end_quiet_step());
    if (phase_ == Phase::kMeasure && !is_quiet_) dense_ready_ns_.push_back(last_ready_ns_);
    if (static_cast<std::int64_t>(times_ns_.size()) == block_steps_) {
      CORTADO_RETURN_IF_ERROR(phase_ == Phase::kRun ? check_progress() : end_block());
    }
  }
  step_start_ns_ = clock_->now_ns();
  return {};
}

}  // namespace cortado

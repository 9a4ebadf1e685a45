// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/auto_engine.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/cast/float_chunks.h"
#include "collective/device_wait.h"
#include "core/check.h"
#include "core/finite.h"
#include "core/format.h"
#include "core/hash.h"
#include "core/seconds.h"
#include "engine/finite_state.h"
#include "engine/submission.h"

namespace cortado {

namespace {

// Everything dense, fused, for callers that do not hand over buffers.
constexpr const char* kFusedDense = "acp(rank=1, dense=[*], start_step=0, use_error_feedback=false)";

constexpr std::int64_t kBlockNs = 1'500'000'000;  // about what a block of steps takes, between these numbers of steps:
constexpr std::int64_t kFewestSteps = 3, kMostSteps = 8;
// Of so many dense steps follow as many more, of an odd number, whose transfers wait for the last gradient: the one in
// the middle tells how long the backward pass takes by itself.
constexpr std::int64_t quiet_steps(std::int64_t dense_steps) { return (dense_steps - 1) | 1; }
constexpr int kUncountedOnTrial = 2;               // in the first one what the setting before owes is paid
constexpr std::int64_t kWatchNs = 10'000'000'000;  // between comparisons, within these numbers of steps:
constexpr std::int64_t kWatchFewest = 10, kWatchMost = 500;
constexpr std::int64_t kWatchOfState = 16;  // steps, after a state was loaded: what they take is not known
constexpr int kInARow = 2;                  // comparisons that must agree before something changes
constexpr int kMostToPass = 64;             // comparisons
constexpr double kSlower = 1.1;             // over what was decided on, before others may be tried again
constexpr std::ptrdiff_t kRecentSteps = 5;  // tell how fast the machine is
constexpr double kOtherPace = 0.03;         // a pace further from 1 is told
// Rounding to 16 bits takes 0.002 of a gradient, unless much of it is beyond what they hold, or below; and nothing
// keeps what it takes.
constexpr double kMostErrorOfCasts = 0.05;

std::string milliseconds(std::int64_t time_ns) {
  return format_text("%.*f ms", time_ns < 100'000'000 ? 1 : 0, static_cast<double>(time_ns) * 1e-6);
}

double as_double(std::int64_t value) { return static_cast<double>(value); }

// NaN is more than Inf here, which is more than all else: as their bits are.
double largest_magnitude(const float* values, std::int64_t count) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  const auto magnitude = std::bit_cast<float>(most);
  return std::isnan(magnitude) ? std::numeric_limits<double>::infinity() : magnitude;
}

// Whether a candidate compresses, but by casts only.
bool only_casts(const std::string& what) {
  const auto is_cast = [](const std::string& codec) { return codec.starts_with("cast("); };
  if (!what.starts_with('{')) return is_cast(what);
  const Result<Plan> plan = plan_from_json(what);
  return plan.ok() && std::all_of(plan.value().buckets.begin(), plan.value().buckets.end(),
                                  [&](const PlanBucket& of) { return of.option.encodes() == 0 || is_cast(of.codec); });
}

}  // namespace

// ---- set-up --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<AutoEngine>> AutoEngine::create(std::vector<EngineTensor> tensors, const AutoOptions& options,
                                                       Communicator* communicator, const Clock* clock) {
  auto engine = std::make_unique<AutoEngineImpl>(std::move(tensors), options, communicator, clock);
  CORTADO_RETURN_IF_ERROR(engine->start());
  return std::unique_ptr<AutoEngine>(std::move(engine));
}

AutoEngineImpl::AutoEngineImpl(std::vector<EngineTensor> tensors, const AutoOptions& options,
                               Communicator* communicator, const Clock* clock, AutoDevice device)
    : tensors_(std::move(tensors)),
      options_(options),
      communicator_(communicator),
      clock_(clock),
      device_(std::move(device)),
      submitted_(tensors_.size()) {
  decision_.candidates = {{.label = "dense", .what = "none"}};
}

Status AutoEngineImpl::start(const Result<std::optional<LauncherPlace>>& place) {
  // A device that can't be used is of one rank alone, which tells the others here.
  const Status opened = open_device().with_context("a device that can't be used");
  CORTADO_RETURN_IF_ERROR(check_agreement(communicator_, options_.to_spec(), {}, timeout(), opened));
  CORTADO_RETURN_IF_ERROR(agree_on_buffers());
  CORTADO_ASSIGN_OR_RETURN(placement_, find_placement(place, communicator_, timeout()));
  CORTADO_ASSIGN_OR_RETURN(cluster_, given_cluster(options_, placement_.topology, communicator_));
  if (!predicts_) cluster_.reset();  // the file is of these machines, and that is all
  CORTADO_ASSIGN_OR_RETURN(inner_, make_inner(decision_.candidates[0].what));
  if (communicator_->world_size() == 1) {
    decision_.decided = true;
    decision_.reason = "one rank: there is nothing to exchange";
    phase_ = Phase::kRun;
    owes_nothing_ = true;
    return {};
  }
  begin_measuring();
  return {};
}

Status AutoEngineImpl::open_device() {
  if (!is_on_device() || communicator_->world_size() == 1) return {};
  CORTADO_RETURN_IF_ERROR(device_.copies.failure);
  std::vector<std::int64_t> bytes;
  for (const EngineTensor& tensor : tensors_) {
    bytes.push_back(tensor.rows * tensor.cols * static_cast<std::int64_t>(dtype_bytes(tensor.dtype)));
  }
  copies_ = std::make_unique<DeviceSide>(std::move(device_.copies), std::move(bytes));
  return copies_->allocate(/*all=*/true);
}

// Where some rank does not hand over buffers in host memory, no rank's are summed whole. And what calibrate() measures
// are codecs on the CPU, in a file too, which says nothing of a device: then nothing is predicted.
Status AutoEngineImpl::agree_on_buffers() {
  if (communicator_->world_size() == 1) return {};
  const std::int64_t own[] = {!options_.takes_buffers || is_on_device(), is_on_device(), !options_.can_average};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> most,
                           largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  options_.takes_buffers = most[0] == 0;
  predicts_ = most[1] == 0;
  options_.can_average = most[2] == 0;
  if (!predicts_) options_.measure_s = 0;
  return {};
}

std::chrono::nanoseconds AutoEngineImpl::timeout() const { return from_seconds(options_.timeout_s); }

Result<std::unique_ptr<Engine>> AutoEngineImpl::make_inner(const std::string& what) {
  EngineOptions options;
  std::unique_ptr<Engine> made;
  if (what.starts_with('{')) {
    CORTADO_ASSIGN_OR_RETURN(const Plan plan, plan_from_json(what));
    options.random_seed = options_.random_seed;
    options.timeout_s = options_.timeout_s;
    CORTADO_ASSIGN_OR_RETURN(made, Engine::create(tensors_, plan, options, communicator_, clock_, trace_));
    return made;
  }
  CORTADO_ASSIGN_OR_RETURN(options,
                           EngineOptions::parse(what == "none" && !options_.takes_buffers ? kFusedDense : what));
  options.start_step = 0;  // dense steps have been made
  options.random_seed = options_.random_seed;
  options.timeout_s = options_.timeout_s;
  if (is_on_device() && what != "none") {
    return device_.make_engine(tensors_, options, communicator_, clock_, trace_);
  }
  CORTADO_ASSIGN_OR_RETURN(made, Engine::create(tensors_, options, communicator_, clock_, trace_));
  return made;
}

AutoEngineImpl::~AutoEngineImpl() {
  if (in_step_ && failure_.ok()) communicator_->abandon("the engine was destroyed within a step");
}

// The step in hand is broken off: the caller's stream, from now on, comes after what was given to copy into gradients.
void AutoEngineImpl::release_gradients() {
  if (in_step_ && way_ != Way::kDirect) static_cast<void>(copies_->lead());
}

Status AutoEngineImpl::fail(const Status& status) {
  if (failure_.ok()) {
    release_gradients();
    failure_ = status.with_context("auto");
    inner_->abandon(failure_.message());
    communicator_->abandon(failure_.message());
  }
  return failure_;
}

void AutoEngineImpl::abandon(const std::string& why) {
  if (failure_.ok()) release_gradients();
  inner_->abandon(why);
  if (failure_.ok())
    failure_ = make_error(StatusCode::kFailedPrecondition, "rank %d abandoned step %" PRId64 ": %s",
                          communicator_->rank(), step_number(), why.c_str());
}

void AutoEngineImpl::set_first_step(std::int64_t step) {
  first_step_ = step - steps_;
  inner_->set_first_step(step);
}

// ---- a step --------------------------------------------------------------------------------------------------------

Status AutoEngineImpl::begin_step(const StepContext& context) {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "begin_step: the step before has not been finished");
  context_ = context;
  if (was_passed_) inner_->set_first_step(step_number());
  // What the caller keeps is not what is sent then.
  if (!carried_.empty()) context_.keeps_local_gradients = false;
  const bool touches_gradients = !carried_.empty() || adds_squares();
  way_ = copies_ == nullptr        ? Way::kDirect
         : !inner_->is_on_device() ? Way::kHost
         : touches_gradients       ? Way::kBoth
                                   : Way::kDirect;
  is_inside_begun_ = false;
  if (way_ != Way::kDirect) {
    const GradientScale scale{.value = context.gradient_scale,
                              .on_device = static_cast<const float*>(context.device_gradient_scale)};
    const Status status =
        copies_->begin_step(scale, 0, /*is_dense=*/true, static_cast<DeviceStream>(context.device_stream));
    if (!status.ok()) return fail(status.with_context("to the device"));
  }
  // The host learns the scale with the first gradients.
  if (way_ != Way::kHost || context_.device_gradient_scale == nullptr) CORTADO_RETURN_IF_ERROR(begin_inside());
  in_step_ = true;
  was_passed_ = false;
  own_ns_ = 0;
  gradient_squares_ = 0;
  last_ready_ns_ = step_first_ready_ns_ = 0;
  held_.clear();
  carrying_.clear();
  empty_.clear();
  std::fill(submitted_.begin(), submitted_.end(), TensorStep{});
  return {};
}

Status AutoEngineImpl::begin_inside() {
  is_inside_begun_ = true;
  StepContext context = context_;
  if (way_ == Way::kHost) {
    context.keeps_local_gradients = false;  // what decoding overwrites is a copy
    context.device_stream = nullptr;
    context.device_gradient_scale = nullptr;
  } else if (way_ == Way::kBoth) {
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
    const std::int64_t elems = tensor.rows * tensor.cols;
    if (holds_back()) ready_ns_[gradient.tensor] = last_ready_ns_;
    // The rest is for gradients that the host can read.
    if (elems == 0 || gradient.data == nullptr || (way_ == Way::kDirect && inner_->is_on_device())) continue;
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
    if (!carried_.empty()) add_carried(gradient);
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

void AutoEngineImpl::add_carried(const Gradient& gradient) {
  const auto found = carried_.find(gradient.tensor);
  if (found == carried_.end()) return;
  const EngineTensor& tensor = tensors_[gradient.tensor];
  const std::int64_t elems = tensor.rows * tensor.cols;
  const std::size_t bytes = static_cast<std::size_t>(elems) * dtype_bytes(tensor.dtype);
  // A parameter that was not used: what arrives for it is dropped.
  if (context_.holds_zero_gradients && all_bits_zero(gradient.data, static_cast<std::int64_t>(bytes))) return;
  found->second.last_gradient = steps_ + 1;
  const float factor = static_cast<float>(context_.gradient_scale / found->second.pieces);
  float buffer[kChunkElems], sums[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    const float* values = load_floats(gradient.data, tensor.dtype, at, count, buffer);
    for (std::int64_t i = 0; i < count; ++i) sums[i] = values[i] + found->second.values.data()[at + i] * factor;
    store_floats(sums, 1.0f, count, gradient.data, tensor.dtype, at);
  });
  carrying_.push_back(gradient);
}

Status AutoEngineImpl::submit(std::span<const Gradient> gradients) {
  const std::int64_t start_ns = clock_->now_ns();
  CORTADO_RETURN_IF_ERROR(note_submission(gradients));
  if (way_ != Way::kDirect) {
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
    const EngineTensor& tensor = tensors_[gradient.tensor];
    if (tensor.rows * tensor.cols == 0) empty_.push_back(gradient);
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
    const std::size_t changed = carrying_.size();
    note_gradients(arrived_);
    if (way_ == Way::kBoth) {
      for (std::size_t i = changed; i < carrying_.size(); ++i) {
        if (const Status status = copies_->put_back(carrying_[i].tensor); !status.ok()) return fail(status);
      }
      for (Gradient& gradient : arrived_) gradient.data = submitted_[gradient.tensor].gradient;
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
  if (!carrying_.empty() && outcome.value().finite) count_delivered();
  if (const Status status = after_step(); !status.ok()) return fail(status);
  return outcome;
}

Result<StepOutcome> AutoEngineImpl::finish_inside(const LocalGradient& local_gradient) {
  if (way_ == Way::kDirect) {
    if (const Status status = submit_held(); !status.ok()) return fail(status);
    return inner_->finish_step(local_gradient);
  }
  CORTADO_RETURN_IF_ERROR(wait_for_copies());
  const auto checked = [this](const Status& status) {
    return status.ok() ? status : fail(status.with_context("to the device"));
  };
  if (way_ == Way::kBoth) {
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
// them count the same. A caller that skips steps skips all of one, wherever Inf is.
void AutoEngineImpl::count_delivered() {
  if (sums_buffers()) {
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::int64_t elems = tensors_[t].rows * tensors_[t].cols;
      if (submitted_[t].submitted && !all_finite(submitted_[t].gradient, elems, tensors_[t].dtype)) return;
    }
  }
  for (const Gradient& gradient : carrying_) {
    const auto found = carried_.find(gradient.tensor);
    if (--found->second.pieces_left == 0) carried_.erase(found);
  }
}

bool AutoEngineImpl::may_pass() const {
  return options_.can_average && failure_.ok() && phase_ != Phase::kMeasure && current_ == 0 && owes_nothing_;
}

// What is owed to a tensor that a rank has not used waits on that rank alone.
Status AutoEngineImpl::agree_on_debts() {
  const Dropped dropped = drop_old_debts();
  const std::int64_t own[] = {!carried_.empty(), dropped.tensors, dropped.last};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> most,
                           largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  owes_nothing_ = most[0] == 0;
  tell_dropped({most[1], most[2]});
  return {};
}

// A layer that was frozen, say, has no gradient any more that what is owed could be added to.
AutoEngineImpl::Dropped AutoEngineImpl::drop_old_debts() {
  Dropped dropped;
  dropped.tensors = static_cast<std::int64_t>(std::erase_if(carried_, [&](const auto& entry) {
    const bool is_old = steps_ - entry.second.last_gradient >= kStepsWithoutGradient;
    if (is_old) dropped.last = entry.first;
    return is_old;
  }));
  return dropped;
}

// `most`: the largest of any rank, so that all say the same.
void AutoEngineImpl::tell_dropped(const Dropped& most) {
  if (most.tensors == 0) return;
  const std::string& name = tensors_[static_cast<std::size_t>(most.last)].name;
  say("auto, step " + std::to_string(step_number()) + ": \"" + name + "\"" +
      (most.tensors > 1 ? " and " + std::to_string(most.tensors - 1) + " more have" : " has") +
      " had no gradient for " + std::to_string(kStepsWithoutGradient) + " steps: what is still owed there is dropped");
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
    owes_nothing_ = carried_.empty();
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

// ---- between steps: measure and try --------------------------------------------------------------------------------

void AutoEngineImpl::begin_measuring() {
  phase_ = Phase::kMeasure;
  decision_.decided = false;
  decision_.chosen = 0;
  decision_.reason = "measuring";
  is_quiet_ = false;
  dense_ns_.clear();
  dense_ready_ns_.clear();
  dense_first_ready_ns_.clear();
  times_ns_.clear();
  first_ready_ns_.clear();
  block_steps_ = kFewestSteps;
  ready_ns_.assign(tensors_.size(), 0);
  quiet_ready_ns_.clear();
  quiet_first_ready_ns_.clear();
  retried_.reset();
  forget_samples();
  largest_gradient_ = 0;
  if (communicator_->rank() != 0) return;
  for (const auto& [tensor, elems] : sampled_elems(tensors_)) {
    sampled_[tensor] = samples_.size();
    samples_.emplace_back(static_cast<std::size_t>(elems));
  }
}

void AutoEngineImpl::forget_samples() {
  samples_ = {};
  sampled_.clear();
  predict_ = nullptr;
  varying_.clear();
}

// What is exchanged waits for the last rank. And the next step begins on all ranks at once, as steps do whose exchange
// is short: those that share a core would have it for themselves as long as others still receive.
Status AutoEngineImpl::end_quiet_step() {
  const std::span<const std::int64_t> own(ready_ns_);
  CORTADO_ASSIGN_OR_RETURN(quiet_ready_ns_.emplace_back(), largest_of_ranks(communicator_, own, timeout()));
  return {};
}

Status AutoEngineImpl::end_block() {
  std::vector<std::int64_t> own = std::exchange(times_ns_, {});
  const auto steps = static_cast<std::ptrdiff_t>(own.size());
  own.insert(own.end(), first_ready_ns_.begin(), first_ready_ns_.end());
  first_ready_ns_.clear();
  // The mean: a rank that was held up begins the next step late, which is shorter there.
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> mean,
                           mean_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  const std::vector<std::int64_t> times(mean.begin(), mean.begin() + steps);
  std::vector<std::int64_t> first_ready(mean.begin() + steps, mean.end());
  const auto append = [](std::vector<std::int64_t>* all, const std::vector<std::int64_t>& more) {
    all->insert(all->end(), more.begin(), more.end());
  };
  if (phase_ == Phase::kTry) {
    std::vector<std::int64_t>& trials_ns = trials_ns_[static_cast<std::size_t>(current_)];
    if (was_passed_ && !dense_was_passed_) {  // those from before had the engine in between
      contest_->forget_dense();
      trials_ns.clear();
    }
    dense_was_passed_ = was_passed_ || dense_was_passed_;
    CORTADO_ASSIGN_OR_RETURN(const bool is_lossy, loses_too_much_on_trial());
    is_lossy ? contest_->drop() : contest_->note(times);
    trials_ns.push_back(median_of(times));
    if (predictions_.is_simulated(current_)) {
      predictions_.end_trial(current_, pace_of_steps(first_ready), trials_ns.back());
    }
    recent_first_ready_ns_ = std::move(first_ready);
    return next_trial();
  }
  if (is_quiet_) {
    quiet_first_ready_ns_ = std::move(first_ready);
    return begin_trials();
  }
  append(&dense_ns_, times);
  append(&dense_first_ready_ns_, first_ready);
  const std::int64_t wanted =
      std::clamp(kBlockNs / std::max<std::int64_t>(1, median_of(dense_ns_)), kFewestSteps, kMostSteps);
  block_steps_ = wanted - static_cast<std::int64_t>(dense_ns_.size());
  if (block_steps_ > 0) return {};
  if (!cluster_.has_value() && options_.measure_s == 0) return begin_trials();  // nothing will be predicted
  is_quiet_ = true;
  block_steps_ = quiet_steps(wanted);
  return {};
}

Status AutoEngineImpl::begin_trials() {
  const std::span<const std::int64_t> dense_ready(dense_ready_ns_);
  CORTADO_ASSIGN_OR_RETURN(dense_ready_ns_, largest_of_ranks(communicator_, dense_ready, timeout()));
  const double own_largest[] = {largest_gradient_};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<double> largest,
                           largest_of_ranks(communicator_, std::span<const double>(own_largest), timeout()));
  MeasuredSteps steps{.ready_ns = ready_ns_,
                      .dense_ns = median_of(dense_ns_),
                      .dense_ready_ns = median_of(dense_ready_ns_),
                      .dense_first_ready_ns = median_of(dense_first_ready_ns_),
                      .keeps_gradients = context_.keeps_local_gradients,
                      .largest_gradient = largest[0],
                      .samples = std::move(samples_)};
  if (!quiet_ready_ns_.empty()) {
    std::vector<std::pair<std::int64_t, std::size_t>> order;
    for (std::size_t s = 0; s < quiet_ready_ns_.size(); ++s) {
      const std::vector<std::int64_t>& ready_ns = quiet_ready_ns_[s];
      order.emplace_back(ready_ns.empty() ? 0 : *std::max_element(ready_ns.begin(), ready_ns.end()), s);
    }
    std::sort(order.begin(), order.end());
    const std::size_t middle = order[order.size() / 2].second;
    steps.ready_ns = quiet_ready_ns_[middle];
    steps.first_ready_ns = quiet_first_ready_ns_[middle];
  }
  const CandidateRequest request{tensors_, options_, placement_.topology, cluster_, refused_};
  CORTADO_ASSIGN_OR_RETURN(Candidates found, find_candidates(request, steps, communicator_, clock_));
  samples_ = std::move(steps.samples);
  predict_ = std::move(found.predict);
  for (const std::string& note : found.notes) say(note);
  decision_.candidates = std::move(found.list);
  for (std::size_t c = 1; c < decision_.candidates.size(); ++c) {
    const AutoCandidate& of = decision_.candidates[c];
    if (of.predicted_ns >= 0 && has_varying_payloads(of.what)) varying_.insert(static_cast<int>(c));
  }
  current_ = 0;
  std::vector<std::int64_t> predicted_ns;
  for (const AutoCandidate& candidate : decision_.candidates) predicted_ns.push_back(candidate.predicted_ns);
  contest_.emplace(std::move(predicted_ns), dense_ns_);
  lost_on_trial_ = false;
  predictions_ = TrialPredictions(decision_.candidates.size());
  trials_ns_.assign(decision_.candidates.size(), {});
  recent_first_ready_ns_.clear();
  dense_was_passed_ = false;
  block_steps_ = std::clamp(kBlockNs / std::max<std::int64_t>(1, steps.dense_ns), kFewestSteps, kMostSteps);
  phase_ = Phase::kTry;
  return next_trial();
}

Status AutoEngineImpl::next_trial() {
  while (contest_->next() >= 0) {
    CORTADO_ASSIGN_OR_RETURN(const bool is_there, try_to_switch(contest_->next()));
    if (is_there) return {};
    contest_->drop();
  }
  return decide();
}

// Before the steps of each trial that count. The machine is expected to be as fast as it was in the last steps, those
// that do not count and the end of the trial before, and in the trials so far, rather than in the dense steps, which
// are what the contest compares by.
Status AutoEngineImpl::predict_trial() {
  if (retried_.has_value() || current_ == 0 || current().predicted_ns < 0) return {};
  if (contest_->steps(current_) == 0) CORTADO_RETURN_IF_ERROR(simulate_setting());
  if (!predictions_.is_simulated(current_)) return {};
  if (const auto count = std::ssize(recent_first_ready_ns_); count > kRecentSteps) {
    recent_first_ready_ns_.erase(recent_first_ready_ns_.begin(), recent_first_ready_ns_.end() - kRecentSteps);
  }
  const std::span<const std::int64_t> recent(recent_first_ready_ns_);
  CORTADO_ASSIGN_OR_RETURN(recent_first_ready_ns_, mean_of_ranks(communicator_, recent, timeout()));
  predictions_.begin_trial(current_, pace_of_steps(recent_first_ready_ns_));
  decision_.candidates[static_cast<std::size_t>(current_)].predicted_ns = predictions_.predicted_ns(current_);
  return {};
}

// In the first trial of a setting, before the steps that count: what they take at all paces, from now on. Gradients
// change in the steps on trial, and with them payloads that vary: those of the trial before are encoded.
Status AutoEngineImpl::simulate_setting() {
  const AutoCandidate& of = current();
  const bool varies = varying_.erase(current_) > 0;
  std::vector<std::int64_t> own(TrialPredictions::kPaces.size(), 0);
  if (predict_) {  // on rank 0
    Result<std::vector<std::int64_t>> simulated_ns = predict_(of.what, samples_, TrialPredictions::kPaces);
    if (simulated_ns.ok()) own = std::move(simulated_ns).value();
    if (varies && own[0] > 0 && !tell_sizes(samples_)) {  // they are what they were
      const double same = as_double(of.predicted_ns) / as_double(own[TrialPredictions::kAsDense]);
      for (std::int64_t& ns : own) ns = std::llround(as_double(ns) * same);
    }
  }
  CORTADO_ASSIGN_OR_RETURN(own, largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  if (own[0] == 0) {
    say(of.label + " can't be predicted anew on trial: what was predicted before stays");
    return {};
  }
  predictions_.set_simulated(current_, own);
  contest_->predict(current_, own[TrialPredictions::kAsDense]);
  return {};
}

std::optional<double> AutoEngineImpl::pace_of_steps(std::vector<std::int64_t> first_ready_ns) const {
  std::erase(first_ready_ns, 0);  // not known of steps that were passed
  if (first_ready_ns.empty() || dense_first_ready_ns_.empty()) return std::nullopt;
  return pace_of(median_of(std::move(first_ready_ns)), median_of(dense_first_ready_ns_));
}

double AutoEngineImpl::max_error_of(const std::string& what) const {
  return only_casts(what) ? std::min(kMostErrorOfCasts, options_.max_relative_error) : options_.max_relative_error;
}

// In the last step on trial. Of casts alone: others keep what they lose. Of a gradient that is not finite (NaN) a cast
// loses nothing that was there.
Result<bool> AutoEngineImpl::loses_too_much_on_trial() {
  const std::string& what = current().what;
  if (!only_casts(what)) return false;
  const double error = inner_->report().relative_l2_error;
  const double own[] = {std::isnan(error) ? 0 : error}, max_error = max_error_of(what);
  CORTADO_ASSIGN_OR_RETURN(const std::vector<double> most,
                           largest_of_ranks(communicator_, std::span<const double>(own), timeout()));
  if (most[0] <= max_error) return false;
  say(current().label + " loses too much on trial: relative L2 error " + format_text("%.3f", most[0]) + " (limit " +
      format_text("%g", max_error) + "); it is not used again");
  refused_.push_back(what.starts_with('{') ? "plan" : what);
  return lost_on_trial_ = true;
}

Status AutoEngineImpl::decide() {
  std::vector<AutoCandidate>& candidates = decision_.candidates;
  forget_samples();
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    const bool was_tried = contest_->steps(static_cast<int>(c)) > (c == 0 && retried_.has_value() ? 1 : 0);
    if (!was_tried) continue;
    candidates[c].measured_ns = contest_->median_ns(static_cast<int>(c));
    candidates[c].steps = contest_->steps(static_cast<int>(c));
    candidates[c].trials_ns = trials_ns_[c];
    if (!predictions_.is_simulated(static_cast<int>(c))) continue;
    candidates[c].simulated_ns = predictions_.simulated_ns(static_cast<int>(c));
    candidates[c].pace = predictions_.pace(static_cast<int>(c));
    candidates[c].predicted_at_pace_ns = predictions_.predicted_at_pace_ns(static_cast<int>(c));
  }
  for (int winner = contest_->winner(options_.min_gain);; winner = contest_->winner(options_.min_gain)) {
    CORTADO_ASSIGN_OR_RETURN(const bool is_there, try_to_switch(winner));
    if (is_there) break;
    contest_->withdraw(winner);
  }
  const int best = contest_->best_other(), winner = current_;
  const AutoCandidate& dense = candidates[0];
  const auto gain = [&](const AutoCandidate& of) {
    return format_text("%.2fx", as_double(dense.measured_ns) / as_double(of.measured_ns));
  };
  const auto predicted = [this](const AutoCandidate& of) {
    // What was said before the first trials tells nothing of the second ones.
    if (of.predicted_ns < 0 || retried_.has_value()) return std::string();
    const auto error = [&of](std::int64_t predicted_ns) {
      const double over = as_double(predicted_ns) / as_double(std::max<std::int64_t>(1, of.measured_ns)) - 1;
      return format_text("%+.0f %%", over * 100);
    };
    std::string text = ", predicted " + milliseconds(of.predicted_ns) + " (" + error(of.predicted_ns);
    if (of.predicted_at_pace_ns > 0 && std::abs(of.pace - 1) > kOtherPace) {
      text += "; " + error(of.predicted_at_pace_ns) + " at the machine's speed then";
    }
    return text + ")";
  };
  const AutoCandidate& chosen = candidates[static_cast<std::size_t>(winner)];
  if (winner != 0) {
    decision_.reason = chosen.label + ": " + milliseconds(chosen.measured_ns) + " a step" + predicted(chosen) +
                       "; dense " + milliseconds(dense.measured_ns) + predicted(dense) + " (" + gain(chosen) + ")";
  } else if (best != 0) {
    const AutoCandidate& other = candidates[static_cast<std::size_t>(best)];
    decision_.reason = "dense, " + milliseconds(dense.measured_ns) + " a step" + predicted(dense) +
                       ": compression does not pay here; the fastest setting allowed, " + other.label + ", takes " +
                       milliseconds(other.measured_ns) + predicted(other) + " (" + gain(other) + "), and less than " +
                       format_text("%g %%", options_.min_gain * 100) + " is no reason to lose anything";
  } else {
    decision_.reason = "dense, " + milliseconds(dense.measured_ns) + " a step" + predicted(dense) +
                       (lost_on_trial_         ? ": what was tried loses too much"
                        : retried_.has_value() ? ": what was faster on trial can't be made any more"
                                               : ": no setting allowed is predicted to be faster");
  }
  std::string others;
  for (std::size_t c = 1; c < candidates.size(); ++c) {
    if (static_cast<int>(c) == winner || candidates[c].measured_ns < 0) continue;
    others += (others.empty() ? "; tried: " : ", ") + candidates[c].label + " " +
              milliseconds(candidates[c].measured_ns) + predicted(candidates[c]);
  }
  say("auto, step " + std::to_string(step_number()) + ": " + decision_.reason + others);
  if (winner != 0) news_.push_back(inner_->describe());
  decision_.decided = true;
  decision_.step = step_number();
  decision_.chosen = winner;
  phase_ = Phase::kRun;
  expected_ns_ = contest_->median_ns(winner);
  if (!retried_.has_value()) {
    first_ns_.clear();
    for (const AutoCandidate& candidate : candidates) first_ns_.push_back(candidate.measured_ns);
  } else if (winner == retried_->candidate) {
    expected_ns_ = std::max(expected_ns_, retried_->step_ns);  // fresh, it was faster than it stays
  }
  retried_.reset();
  std::int64_t& first_ns = first_ns_[static_cast<std::size_t>(winner)];
  if (first_ns < 0) first_ns = expected_ns_;
  drift_from_ns_ = first_ns;
  block_steps_ = std::clamp(kWatchNs / std::max<std::int64_t>(1, expected_ns_), kWatchFewest, kWatchMost);
  // The first comparison tells.
  if (winner == 0 && options_.can_average && !dense_was_passed_) expected_ns_ = drift_from_ns_ = -1;
  decision_.step_ns = -1;
  checks_ = drifted_ = lossy_ = beaten_ = 0;
  return {};
}

// ---- between steps: watch -------------------------------------------------------------------------------------------

Status AutoEngineImpl::check_progress() {
  const EngineReport report = inner_->report();
  const double gradient = std::sqrt(gradient_squares_) / context_.gradient_scale;
  const Dropped dropped = drop_old_debts();
  const double error = report.relative_l2_error;
  const double own[] = {only_casts(current().what) && std::isnan(error) ? 0 : error,
                        gradient > 0 ? report.residual_l2 / gradient : 0, as_double(dropped.tensors),
                        as_double(dropped.last)};
  const std::int64_t own_step_ns[] = {median_of(times_ns_)};
  times_ns_.clear();
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> mean,
                           mean_of_ranks(communicator_, std::span<const std::int64_t>(own_step_ns), timeout()));
  CORTADO_ASSIGN_OR_RETURN(const std::vector<double> most,
                           largest_of_ranks(communicator_, std::span<const double>(own), timeout()));
  const std::int64_t step_ns = mean[0];
  const double relative_error = most[0], residual = most[1];
  tell_dropped({static_cast<std::int64_t>(most[2]), static_cast<std::int64_t>(most[3])});
  ++checks_;
  if (expected_ns_ < 0) expected_ns_ = drift_from_ns_ = step_ns;  // after a checkpoint
  decision_.step_ns = step_ns;
  decision_.drift = as_double(step_ns) / as_double(drift_from_ns_) - 1;
  decision_.relative_error = relative_error;
  decision_.residual = residual;

  const double max_error = max_error_of(current().what);
  const bool is_lossy = relative_error > max_error || residual > options_.max_residual;
  lossy_ = is_lossy ? lossy_ + 1 : 0;
  const double beyond = 1 + options_.drift;
  const bool has_drifted = as_double(step_ns) > beyond * as_double(drift_from_ns_) ||
                           as_double(drift_from_ns_) > beyond * as_double(step_ns);
  drifted_ = has_drifted ? drifted_ + 1 : 0;
  beaten_ =
      as_double(step_ns) > kSlower * as_double(expected_ns_) && !faster_on_trial(step_ns).empty() ? beaten_ + 1 : 0;
  if (lossy_ >= kInARow && current_ != 0) {
    say("auto, step " + std::to_string(step_number()) + ": " + current().label + " loses too much: relative L2 error " +
        format_text("%.3f", relative_error) + " (limit " + format_text("%g", max_error) + "), residual " +
        format_text("%.1f", residual) + " gradients (limit " + format_text("%g", options_.max_residual) +
        "); its residual is dropped, and it is not used again. Dense, and measuring again");
    refused_.push_back(current().what.starts_with('{') ? "plan" : current().what);
    CORTADO_RETURN_IF_ERROR(switch_to(0, /*keep_residual=*/false));
    begin_measuring();
  } else if (drifted_ >= kInARow && checks_ > checks_to_pass_) {
    say("auto, step " + std::to_string(step_number()) + ": a step takes " + milliseconds(step_ns) + ", expected " +
        milliseconds(drift_from_ns_) + "; dense, and measuring again");
    checks_to_pass_ = std::clamp(2 * checks_to_pass_, 4, kMostToPass);  // never one decision after the other
    CORTADO_RETURN_IF_ERROR(switch_to(0));
    begin_measuring();
  } else if (beaten_ >= kInARow && checks_ > retries_to_pass_) {
    return try_again(step_ns);
  }
  return {};
}

// Who saved something, on trial, of what a step takes now.
std::vector<int> AutoEngineImpl::faster_on_trial(std::int64_t step_ns) const {
  std::vector<int> faster;
  for (int c = 0; c < static_cast<int>(decision_.candidates.size()); ++c) {
    const std::int64_t measured_ns = decision_.candidates[static_cast<std::size_t>(c)].measured_ns;
    if (c == current_ || measured_ns < 0) continue;
    if (as_double(measured_ns) <= (1 - options_.min_gain) * as_double(step_ns)) faster.push_back(c);
  }
  return faster;
}

// Payloads of some settings grow as training goes on. Links and codecs are what they were: nothing is measured anew.
Status AutoEngineImpl::try_again(std::int64_t step_ns) {
  std::vector<AutoCandidate>& candidates = decision_.candidates;
  std::vector<int> contestants = faster_on_trial(step_ns);
  std::string others;
  for (const int c : contestants) {
    const AutoCandidate& of = candidates[static_cast<std::size_t>(c)];
    others += (others.empty() ? "" : ", ") + of.label + " " + milliseconds(of.measured_ns);
  }
  say("auto, step " + std::to_string(step_number()) + ": a step takes " + milliseconds(step_ns) + ", expected " +
      milliseconds(expected_ns_) + ", and others took less on trial: " + others + "; trying them and " +
      current().label + " again");
  contestants.push_back(current_);
  retries_to_pass_ = std::clamp(2 * retries_to_pass_, 4, kMostToPass);
  retried_ = {.candidate = current_, .step_ns = step_ns};
  if (current_ == 0) candidates[0].measured_ns = step_ns;
  const std::int64_t dense_ns[] = {candidates[0].measured_ns};
  contest_.emplace(std::vector<std::int64_t>(candidates.size(), -1), dense_ns);
  lost_on_trial_ = false;
  predictions_ = TrialPredictions(candidates.size());
  trials_ns_.assign(candidates.size(), {});
  contest_->keep_only(contestants);
  for (const int c : contestants) {
    if (c == 0) continue;
    AutoCandidate& of = candidates[static_cast<std::size_t>(c)];
    of = {.label = of.label, .what = of.what, .predicted_ns = of.predicted_ns};
  }
  CORTADO_RETURN_IF_ERROR(switch_to(0));
  decision_.decided = false;
  decision_.chosen = 0;
  decision_.reason = "trying again";
  block_steps_ = std::clamp(kBlockNs / std::max<std::int64_t>(1, step_ns), kFewestSteps, kMostSteps);
  phase_ = Phase::kTry;
  const Status status = next_trial();
  uncounted_ = std::max(uncounted_, kPieces);  // until what the one that ran for long owes is paid
  return status;
}

// ---- from engine to engine ------------------------------------------------------------------------------------------

// False: it can't be made, now and here. Models and settings are the same on all ranks, and where the device of one has
// too little memory all hear of it, so all of them go on without it. What ran before it has gone then: two engines may
// need more memory than there is.
Result<bool> AutoEngineImpl::try_to_switch(int candidate) {
  if (candidate != current_ && current_ != 0) CORTADO_RETURN_IF_ERROR(switch_to(0));
  if (candidate == current_) {
    CORTADO_RETURN_IF_ERROR(exchange(candidate, nullptr));
    return true;
  }
  const AutoCandidate& wanted = decision_.candidates[static_cast<std::size_t>(candidate)];
  Result<std::unique_ptr<Engine>> made = make_inner(wanted.what);
  if (made.ok()) {
    CORTADO_RETURN_IF_ERROR(exchange(candidate, std::move(made).value()));
    return true;
  }
  // What came damaged may have come so to this rank alone.
  if (made.status().is_fatal()) return made.status();
  say(wanted.label + " is left out: " + made.status().message());
  return false;
}

Status AutoEngineImpl::switch_to(int candidate, bool keep_residual) {
  std::unique_ptr<Engine> made;
  if (candidate != current_) {
    CORTADO_ASSIGN_OR_RETURN(made, make_inner(decision_.candidates[static_cast<std::size_t>(candidate)].what));
  }
  return exchange(candidate, std::move(made), keep_residual);
}

// `made` is the candidate's engine; nothing if it runs already.
Status AutoEngineImpl::exchange(int candidate, std::unique_ptr<Engine> made, bool keep_residual) {
  // What is owed after some steps on trial is no more than these; after a long time it may be much.
  const int pieces = phase_ == Phase::kRun ? kPieces : 1;
  uncounted_ = std::max(kUncountedOnTrial, pieces);
  if (made == nullptr) return {};
  if (keep_residual) CORTADO_RETURN_IF_ERROR(harvest(inner_.get(), current().what, pieces));
  put_inside(std::move(made), candidate);
  return {};
}

// In place of the engine inside, what that has counted is kept.
void AutoEngineImpl::put_inside(std::unique_ptr<Engine> made, int candidate) {
  const EngineReport report = inner_->report();
  non_finite_steps_ += report.non_finite_steps;
  if (!report.last_non_finite.empty()) last_non_finite_ = report.last_non_finite + " of " + current().label;
  for (int stage = 0; stage < kStageCount; ++stage) stage_ns_[stage] += report.stage_ns[stage];
  inner_ = std::move(made);
  inner_->set_first_step(step_number());
  current_ = candidate;
  owes_nothing_ = false;
}

// What an engine of `what` still owes. It can't be used afterwards.
Status AutoEngineImpl::harvest(Engine* from, const std::string& what, int pieces) {
  if (what == "none") return {};
  if (what.starts_with('{')) {
    // A plan that encodes nothing has no residuals, so those there are become one sum for each tensor.
    CORTADO_ASSIGN_OR_RETURN(Plan plan, plan_from_json(what));
    const LevelRange all{0, static_cast<int>(plan.topology.levels.size()) - 1};
    for (PlanBucket& bucket : plan.buckets) {
      bucket.codec = "none";
      bucket.option.operations = {{.kind = OpKind::kAllReduce, .levels = all}};
    }
    CORTADO_RETURN_IF_ERROR(from->switch_plan(plan));
  }
  CORTADO_ASSIGN_OR_RETURN(const EngineState state, from->save_state());
  std::map<std::string_view, std::uint32_t> by_name;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) by_name[tensors_[t].name] = t;
  for (const TensorState& tensor : state.tensors) {
    const std::uint32_t t = by_name.at(tensor.name);
    if (!tensor.residual.empty()) carry(t, tensor.residual, 1.0f, pieces);
    // Plans divide by the number of ranks before they encode.
    for (const PlaceState& place : tensor.places) {
      carry(t, place.values, static_cast<float>(communicator_->world_size()), pieces);
    }
  }
  return {};
}

void AutoEngineImpl::carry(std::uint32_t tensor, std::span<const float> values, float factor, int pieces) {
  if (values.empty() || std::all_of(values.begin(), values.end(), [](float value) { return value == 0; })) return;
  Carried& carried = carried_[tensor];
  if (carried.values.empty()) carried.values = AlignedBuffer<float>(values.size());
  const float left = static_cast<float>(carried.pieces_left) / static_cast<float>(carried.pieces);
  if (carried.pieces_left > pieces) pieces = kPieces;  // what was spread stays so
  for (std::size_t i = 0; i < values.size(); ++i) {
    carried.values.data()[i] = carried.values.data()[i] * left + values[i] * factor;
  }
  carried.pieces = carried.pieces_left = pieces;
  carried.last_gradient = steps_;
}

// ---- what callers ask -----------------------------------------------------------------------------------------------

void AutoEngineImpl::set_trace(TraceRecorder* trace) {
  trace_ = trace;
  inner_->set_trace(trace);
}

std::string AutoEngineImpl::summary() const {
  const std::string doing = !decision_.decided ? "measuring, " : "";
  return "auto(quality=" + std::string(quality_name(options_.quality)) + "): " + doing + current().label;
}

EngineReport AutoEngineImpl::report() const {
  EngineReport report = inner_->report();
  report.spec = summary();
  report.steps = steps_;
  report.non_finite_steps += non_finite_steps_;
  if (report.last_non_finite.empty()) report.last_non_finite = last_non_finite_;
  for (int stage = 0; stage < kStageCount; ++stage) report.stage_ns[stage] += stage_ns_[stage];
  if (measured_steps_ > 0) report.fallbacks.push_back({"", "auto: measuring", measured_steps_});
  report.passed_steps = passed_steps_;
  if (was_passed_) {
    report.payload_bytes = report.dense_bytes;
    report.messages = 0;  // of how many nothing is known
  }
  if (copies_ != nullptr) {
    report.message_bytes += copies_->memory_bytes();
    if (!inner_->is_on_device()) report.host_reason = "auto runs " + current().label + ", which is summed on the host";
  }
  return report;
}

std::string AutoEngineImpl::describe() const {
  const std::string start = "cortado: auto(quality=" + std::string(quality_name(options_.quality)) + ") over " +
                            communicator_->name() + ", world size " + std::to_string(communicator_->world_size()) +
                            ": ";
  if (decision_.decided) return start + decision_.reason;
  std::string settings;
  int count = 0;
  for (const AutoSetting& setting : auto_settings()) {
    if (setting.quality > options_.quality) continue;
    settings += ", " + setting.spec;
    ++count;
  }
  const bool predicts = cluster_.has_value() || options_.measure_s > 0;
  const auto steps_of = [&](std::int64_t dense) { return predicts ? dense + quiet_steps(dense) : dense; };
  std::string text = start + "dense for the first " + std::to_string(kUncountedSteps + steps_of(kFewestSteps)) +
                     " to " + std::to_string(kUncountedSteps + steps_of(kMostSteps)) + " steps, then ";
  if (predicts && !cluster_.has_value()) {
    text += "about " + format_text("%g", options_.measure_s) + " s for links and codecs, then ";
  }
  const int most = std::min(kMostTried, count + 1);  // and a plan
  if (predicts) {
    text += "at most " + std::to_string(most) + " settings for some steps each";
    if (count > most) text += " (all " + std::to_string(count) + " where nothing can be predicted)";
  } else {
    text += "each of " + std::to_string(count) + " settings for some steps";
  }
  text += "; may use none" + settings + (predicts ? ", a plan" : "");
  if (!placement_.note.empty()) text += "; all links count as one level (" + placement_.note + ")";
  return text;
}

Status AutoEngineImpl::check_replicas(std::span<const ReplicaTensor> tensors) {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "check_replicas: a step is under way");
  const Result<ReplicaDifference> difference = compare_replicas(communicator_, tensors, timeout());
  if (!difference.ok()) return fail(difference.status().with_context("check_replicas"));
  return replicas_.note(difference.value(), step_number());
}

std::vector<std::string> AutoEngineImpl::take_news() { return std::exchange(news_, {}); }

// ---- state ----------------------------------------------------------------------------------------------------------

namespace {

// A place of a tensor's state: what is still to be added to its gradients, with the number of pieces for `begin`; 0:
// all of it in the next step.
constexpr const char* kOwed = "auto";

// What stands for the specification in a state: "auto, step 40: cast(bf16)", "auto, step 9, measuring, not
// topk(density=0.01): none". Behind "measuring" is what was on trial; states from before had no step.
struct SavedDecision {
  std::int64_t step = 0;
  bool decided = false;
  std::vector<std::string> refused;
  std::string what;

  std::string text() const {
    std::string text = "auto, step " + std::to_string(step) + (decided ? "" : ", measuring");
    for (const std::string& setting : refused) text += ", not " + setting;
    return text + ": " + what;
  }

  static std::optional<SavedDecision> parse(std::string_view text) {
    const std::string_view start = "auto", step = ", step ", measuring = ", measuring", refusing = ", not ";
    const std::size_t colon = text.find(": ");
    if (colon == std::string_view::npos || !text.starts_with(start)) return std::nullopt;
    SavedDecision saved;
    saved.what = text.substr(colon + 2);
    std::string_view rest = text.substr(start.size(), colon - start.size());
    if (rest.starts_with(step)) {
      rest.remove_prefix(step.size());
      const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), saved.step);
      if (parsed.ec != std::errc() || saved.step < 0) return std::nullopt;
      rest.remove_prefix(static_cast<std::size_t>(parsed.ptr - rest.data()));
    }
    saved.decided = !rest.starts_with(measuring);
    if (!saved.decided) rest.remove_prefix(measuring.size());
    while (!rest.empty()) {
      if (!rest.starts_with(refusing)) return std::nullopt;
      rest.remove_prefix(refusing.size());
      const std::string_view setting = rest.substr(0, rest.find(refusing));
      saved.refused.emplace_back(setting);
      rest.remove_prefix(setting.size());
    }
    return saved;
  }
};

}  // namespace

Result<EngineState> AutoEngineImpl::save_state() {
  if (!failure_.ok()) return failure_;
  CORTADO_ASSIGN_OR_RETURN(EngineState state, inner_->save_state());
  state.spec =
      SavedDecision{.step = step_number(), .decided = decision_.decided, .refused = refused_, .what = current().what}
          .text();
  for (const auto& [t, carried] : carried_) {
    const std::string& name = tensors_[t].name;
    auto tensor = std::find_if(state.tensors.begin(), state.tensors.end(),
                               [&name](const TensorState& s) { return s.name == name; });
    if (tensor == state.tensors.end()) {
      state.tensors.push_back({.name = name, .residual = {}, .basis = {}, .velocity = {}});
      tensor = state.tensors.end() - 1;
    }
    tensor->places.push_back({kOwed, carried.pieces == 1 ? 0 : carried.pieces_left,
                              std::vector<float>(carried.values.begin(), carried.values.end())});
  }
  return state;
}

Status AutoEngineImpl::check_state(const EngineState& state) const {
  if (!failure_.ok()) return failure_;
  if (in_step_) return make_error(StatusCode::kFailedPrecondition, "load_state: a step is under way");
  if (state.spec == "auto, measuring") {
    return make_error(StatusCode::kMismatch,
                      "load_state: the state is of \"auto, measuring\", from before states said what was on trial, "
                      "expected \"auto, measuring: \" and a setting; leave the state out: auto measures again, and "
                      "residuals start at zero");
  }
  if (!SavedDecision::parse(state.spec).has_value()) {
    return make_error(StatusCode::kMismatch, "load_state: the state is of \"%s\", this engine of auto",
                      state.spec.c_str());
  }
  if (state.world_size == communicator_->world_size() && state.rank != communicator_->rank()) {
    return make_error(StatusCode::kMismatch,
                      "load_state: this is the state of rank %d, here is rank %d; each rank loads its own", state.rank,
                      communicator_->rank());
  }
  for (const auto& phase : state.layout) {
    for (const auto& message : phase) {
      for (const std::string& name : message) {
        if (std::any_of(tensors_.begin(), tensors_.end(), [&](const EngineTensor& t) { return t.name == name; }))
          continue;
        return make_error(StatusCode::kMismatch, "load_state: the state has a tensor \"%s\", this model has none",
                          name.c_str());
      }
    }
  }
  for (const TensorState& tensor : state.tensors) {
    const auto found =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const EngineTensor& t) { return t.name == tensor.name; });
    for (const PlaceState& place : tensor.places) {
      if (place.name != kOwed) continue;
      if (found == tensors_.end() || place.begin < 0 || place.begin > kPieces ||
          static_cast<std::int64_t>(place.values.size()) != found->rows * found->cols) {
        return make_error(StatusCode::kMismatch, "load_state: what \"%s\" is still owed is of another model",
                          tensor.name.c_str());
      }
    }
  }
  return check_finite(state);
}

// What a checked state says is still owed.
void AutoEngineImpl::take_owed(const EngineState& state) {
  carried_.clear();
  for (const TensorState& tensor : state.tensors) {
    for (const PlaceState& place : tensor.places) {
      if (place.name != kOwed) continue;
      const auto found =
          std::find_if(tensors_.begin(), tensors_.end(), [&](const EngineTensor& t) { return t.name == tensor.name; });
      const auto t = static_cast<std::uint32_t>(found - tensors_.begin());
      carry(t, place.values, 1.0f, place.begin > 0 ? kPieces : 1);
      const auto carried = carried_.find(t);
      if (place.begin > 0 && carried != carried_.end()) carried->second.pieces_left = static_cast<int>(place.begin);
    }
  }
}

// Dense, and measuring, as after start().
Status AutoEngineImpl::start_again() {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> made, make_inner("none"));
  put_inside(std::move(made), 0);
  uncounted_ = kUncountedSteps;
  decision_.candidates.resize(1);
  if (communicator_->world_size() > 1) begin_measuring();
  return {};
}

Result<std::string> AutoEngineImpl::load_state(const EngineState& saved) {
  const Status checked = check_state(saved);
  Status agreed = agree_on_outcome(communicator_, "load_state", checked, timeout());
  if (agreed.ok()) {
    agreed = check_same_number(communicator_, "the state to load (hash of ranks and decision)",
                               fnv1a_64(saved.spec) + static_cast<std::uint64_t>(saved.world_size), timeout());
  }
  if (!agreed.ok()) return fail_if_cut_off(agreed);
  const SavedDecision decision = *SavedDecision::parse(saved.spec);
  if (saved.world_size != communicator_->world_size()) {
    if (const Status status = start_again(); !status.ok()) return fail(status);
    set_first_step(decision.step);
    replicas_ = {};
    carried_.clear();
    refused_ = decision.refused;
    return "the state was saved by " + std::to_string(saved.world_size) + " ranks and is loaded by " +
           std::to_string(communicator_->world_size()) +
           ": auto measures again, and residuals start at zero (what they held is lost once)";
  }
  EngineState state = saved;
  for (TensorState& tensor : state.tensors) {
    std::erase_if(tensor.places, [](const PlaceState& place) { return place.name == kOwed; });
  }
  std::erase_if(state.tensors, [](const TensorState& tensor) {
    return tensor.residual.empty() && tensor.basis.empty() && tensor.velocity.empty() && tensor.places.empty();
  });
  Result<std::unique_ptr<Engine>> restored = make_inner(decision.what);
  if (!restored.ok()) return fail_if_cut_off(restored.status());
  std::unique_ptr<Engine> made = std::move(restored).value();
  state.spec = made->options().results_spec();
  // Dense steps leave nothing behind; those of DDP's buffers have no layout, either, which other engines look for.
  std::string warning;
  if (decision.what != "none") {
    Result<std::string> loaded = made->load_state(state);
    if (!loaded.ok()) return fail_if_cut_off(loaded.status());
    warning = std::move(loaded).value();
  }

  // From here on nothing refuses the state.
  set_first_step(decision.step);
  replicas_ = {};
  take_owed(saved);
  refused_ = decision.refused;
  const std::string label = decision.what.starts_with('{') ? made->options().codec
                            : decision.what == "none"      ? "dense"
                                                           : decision.what;
  const bool is_allowed = may_run(decision.what, options_, refused_);
  const bool fits =
      !decision.what.starts_with('{') || plan_from_json(decision.what).value().topology == placement_.topology;
  if (!decision.decided || !is_allowed || !fits) {
    // What was on trial, or may not run here, is not resumed; what it owes is paid.
    Status status = harvest(made.get(), decision.what, decision.decided ? kPieces : 1);
    if (status.ok()) status = start_again();
    if (!status.ok()) return fail(status);
    if (!decision.decided) return warning;
    if (is_allowed) {
      return "the state was saved with " + label +
             ", a plan for ranks that sit elsewhere on machines: auto measures again";
    }
    return "the state was saved with " + label +
           ", which is not allowed at quality=" + std::string(quality_name(options_.quality)) + ": auto measures again";
  }
  put_inside(std::move(made), 0);
  uncounted_ = kUncountedSteps;
  times_ns_.clear();
  first_ready_ns_.clear();
  decision_ = {.decided = true, .step = step_number(), .chosen = 0, .candidates = {}, .reason = {}};
  decision_.candidates = {{.label = "dense", .what = "none"}};
  if (decision.what != "none") {
    decision_.candidates.push_back({.label = label, .what = decision.what});
    decision_.chosen = 1;
  }
  decision_.reason = label + ", as in the checkpoint";
  current_ = decision_.chosen;
  phase_ = Phase::kRun;
  forget_samples();
  retried_.reset();
  expected_ns_ = drift_from_ns_ = -1;
  block_steps_ = kWatchOfState;
  checks_ = drifted_ = lossy_ = beaten_ = 0;
  return warning;
}

}  // namespace cortado

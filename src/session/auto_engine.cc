// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/auto_engine.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/format.h"
#include "core/seconds.h"
#include "engine/find_tensor.h"
#include "session/pace.h"

namespace cortado {

namespace {

// Everything dense, fused, for callers that do not hand over buffers.
constexpr const char* kFusedDense = "acp(rank=1, dense=[*], start_step=0, use_error_feedback=false)";

constexpr std::int64_t kBlockNs = 1'500'000'000;  // about what a block of steps takes, between these numbers of steps:
constexpr std::int64_t kFewestSteps = 3, kMostSteps = 8;
std::int64_t steps_of_block(std::int64_t step_ns) {
  return std::clamp(kBlockNs / std::max<std::int64_t>(1, step_ns), kFewestSteps, kMostSteps);
}
// After the dense steps as many more are made, an odd number, whose transfers wait for the last gradient: the one in
// the middle tells how long the backward pass takes alone.
constexpr std::int64_t quiet_steps(std::int64_t dense_steps) { return (dense_steps - 1) | 1; }
constexpr int kUncountedOnTrial = 2;               // the first of them still pays the debts of the setting before
constexpr std::int64_t kWatchNs = 10'000'000'000;  // between comparisons, within these numbers of steps:
constexpr std::int64_t kWatchFewest = 10, kWatchMost = 500;
constexpr std::ptrdiff_t kRecentSteps = 5;  // tell how fast the machine is
constexpr double kOtherPace = 0.03;         // a pace further from 1 is told
// Rounding to 16 bits loses 0.002 of a gradient, unless much of it is outside their range; and casts have no residual,
// so that is lost for good.
constexpr double kMostErrorOfCasts = 0.05;

std::string milliseconds(std::int64_t time_ns) {
  return format_text("%.*f ms", time_ns < 100'000'000 ? 1 : 0, static_cast<double>(time_ns) * 1e-6);
}

double as_double(std::int64_t value) { return static_cast<double>(value); }

// Whether a candidate compresses, but by casts only.
bool only_casts(const AutoCandidate& candidate) {
  const auto is_cast = [](const std::string& codec) { return codec.starts_with("cast("); };
  if (!candidate.plan.has_value()) return is_cast(candidate.what);
  return std::all_of(candidate.plan->buckets.begin(), candidate.plan->buckets.end(),
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
      watch_(options.drift),
      submitted_(tensors_.size()),
      debts_(tensors_) {
  decision_.candidates = {{.label = "dense", .what = "none"}};
}

Status AutoEngineImpl::start(const Result<std::optional<LauncherPlace>>& place) {
  // A device that can't be used is of one rank alone, which tells the others here.
  const Status opened = open_device().with_context("a device that can't be used");
  CORTADO_RETURN_IF_ERROR(check_agreement(communicator_, options_.to_spec(), {}, timeout(), opened));
  CORTADO_ASSIGN_OR_RETURN(const bool is_somewhere_on_device, agree_on_buffers());
  CORTADO_ASSIGN_OR_RETURN(placement_, find_placement(place, communicator_, timeout()));
  CORTADO_ASSIGN_OR_RETURN(cluster_, given_cluster(options_, placement_.topology, communicator_));
  // What calibrate() measures are codecs on the CPU, in a file too: that has been checked, but says nothing of a
  // device.
  if (is_somewhere_on_device) {
    cluster_.reset();
    options_.measure_s = 0;
  }
  CORTADO_ASSIGN_OR_RETURN(inner_, make_inner(decision_.candidates[0]));
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
  for (const EngineTensor& tensor : tensors_) bytes.push_back(tensor.size_bytes());
  copies_ = std::make_unique<DeviceSide>(std::move(device_.copies), std::move(bytes));
  return copies_->allocate(/*all=*/true);
}

// Where some rank does not hand over buffers in host memory, no rank's are summed whole. True: some rank's gradients
// are on a device.
Result<bool> AutoEngineImpl::agree_on_buffers() {
  if (communicator_->world_size() == 1) return is_on_device();
  const std::int64_t own[] = {!options_.takes_buffers || is_on_device(), is_on_device(), !options_.can_average};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> most,
                           largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout()));
  options_.takes_buffers = most[0] == 0;
  options_.can_average = most[2] == 0;
  return most[1] != 0;
}

std::chrono::nanoseconds AutoEngineImpl::timeout() const { return from_seconds(options_.timeout_s); }

Result<std::unique_ptr<Engine>> AutoEngineImpl::make_inner(const AutoCandidate& of) {
  EngineOptions options;
  std::unique_ptr<Engine> made;
  if (of.plan.has_value()) {
    options.random_seed = options_.random_seed;
    options.timeout_s = options_.timeout_s;
    CORTADO_ASSIGN_OR_RETURN(made, Engine::create(tensors_, *of.plan, options, communicator_, clock_, trace_));
    return made;
  }
  const bool is_dense = of.what == "none";
  CORTADO_ASSIGN_OR_RETURN(options, EngineOptions::parse(is_dense && !options_.takes_buffers ? kFusedDense : of.what));
  options.start_step = 0;  // dense steps have been made
  options.random_seed = options_.random_seed;
  options.timeout_s = options_.timeout_s;
  if (is_on_device() && !is_dense) {
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
  if (in_step_ && route_ != Route::kDirect) static_cast<void>(copies_->lead());
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
  const std::int64_t wanted = steps_of_block(median_of(dense_ns_));
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
    if (of.predicted_ns >= 0 && has_varying_payloads(of)) varying_.insert(static_cast<int>(c));
  }
  current_ = 0;
  std::vector<std::int64_t> predicted_ns;
  for (const AutoCandidate& candidate : decision_.candidates) predicted_ns.push_back(candidate.predicted_ns);
  begin_contest(std::move(predicted_ns), dense_ns_);
  recent_first_ready_ns_.clear();
  dense_was_passed_ = false;
  block_steps_ = steps_of_block(steps.dense_ns);
  phase_ = Phase::kTry;
  return next_trial();
}

// Arguments as of Contest.
void AutoEngineImpl::begin_contest(std::vector<std::int64_t> predicted_ns, std::span<const std::int64_t> dense_ns) {
  contest_.emplace(std::move(predicted_ns), dense_ns);
  lost_on_trial_ = false;
  predictions_ = TrialPredictions(decision_.candidates.size());
  trials_ns_.assign(decision_.candidates.size(), {});
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
    Result<std::vector<std::int64_t>> simulated_ns = predict_(of, samples_, TrialPredictions::kPaces);
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

double AutoEngineImpl::max_error_of(const AutoCandidate& of) const {
  return only_casts(of) ? std::min(kMostErrorOfCasts, options_.max_relative_error) : options_.max_relative_error;
}

// In the last step on trial. Of casts alone: others keep what they lose. Of a gradient that is not finite (NaN) a cast
// loses nothing that was there.
Result<bool> AutoEngineImpl::loses_too_much_on_trial() {
  if (!only_casts(current())) return false;
  const double error = inner_->report().relative_l2_error;
  const double own[] = {std::isnan(error) ? 0 : error}, max_error = max_error_of(current());
  CORTADO_ASSIGN_OR_RETURN(const std::vector<double> most,
                           largest_of_ranks(communicator_, std::span<const double>(own), timeout()));
  if (most[0] <= max_error) return false;
  say(current().label + " loses too much on trial: relative L2 error " + format_text("%.3f", most[0]) + " (limit " +
      format_text("%g", max_error) + "); it is not used again");
  refuse_current();
  return lost_on_trial_ = true;
}

// What it says is said before begin_running() forgets whether this was the first decision or another one.
Status AutoEngineImpl::decide() {
  forget_samples();
  record_trials();
  for (int winner = contest_->winner(options_.min_gain);; winner = contest_->winner(options_.min_gain)) {
    CORTADO_ASSIGN_OR_RETURN(const bool is_there, try_to_switch(winner));
    if (is_there) break;
    contest_->withdraw(winner);
  }
  decision_.decided = true;
  decision_.step = step_number();
  decision_.chosen = current_;
  decision_.reason = reason();
  say_at_step(decision_.reason + others_tried());
  if (current_ != 0) news_.push_back(inner_->describe());
  begin_running();
  return {};
}

// What the contest and the predictions know of each candidate, for callers.
void AutoEngineImpl::record_trials() {
  for (int c = 0; c < static_cast<int>(decision_.candidates.size()); ++c) {
    AutoCandidate& of = decision_.candidates[static_cast<std::size_t>(c)];
    const bool was_tried = contest_->steps(c) > (c == 0 && retried_.has_value() ? 1 : 0);
    if (!was_tried) continue;
    of.measured_ns = contest_->median_ns(c);
    of.steps = contest_->steps(c);
    of.trials_ns = trials_ns_[static_cast<std::size_t>(c)];
    if (!predictions_.is_simulated(c)) continue;
    of.simulated_ns = predictions_.simulated_ns(c);
    of.pace = predictions_.pace(c);
    of.predicted_at_pace_ns = predictions_.predicted_at_pace_ns(c);
  }
}

// ", predicted 3 ms (-2 %)", or nothing: what was said before the first trials tells nothing of the second ones.
std::string AutoEngineImpl::predicted(const AutoCandidate& of) const {
  if (of.predicted_ns < 0 || retried_.has_value()) return "";
  const auto error = [&of](std::int64_t predicted_ns) {
    const double over = as_double(predicted_ns) / as_double(std::max<std::int64_t>(1, of.measured_ns)) - 1;
    return format_text("%+.0f %%", over * 100);
  };
  std::string text = ", predicted " + milliseconds(of.predicted_ns) + " (" + error(of.predicted_ns);
  if (of.predicted_at_pace_ns > 0 && std::abs(of.pace - 1) > kOtherPace) {
    text += "; " + error(of.predicted_at_pace_ns) + " at the machine's speed then";
  }
  return text + ")";
}

// Of what runs now.
std::string AutoEngineImpl::reason() const {
  const AutoCandidate& dense = decision_.candidates[0];
  const auto gain = [&](const AutoCandidate& of) {
    return format_text("%.2fx", as_double(dense.measured_ns) / as_double(of.measured_ns));
  };
  if (current_ != 0) {
    return current().label + ": " + milliseconds(current().measured_ns) + " a step" + predicted(current()) +
           "; dense " + milliseconds(dense.measured_ns) + predicted(dense) + " (" + gain(current()) + ")";
  }
  const std::string start = "dense, " + milliseconds(dense.measured_ns) + " a step" + predicted(dense);
  if (const int best = contest_->best_other(); best != 0) {
    const AutoCandidate& other = decision_.candidates[static_cast<std::size_t>(best)];
    return start + ": compression does not pay here; the fastest setting allowed, " + other.label + ", takes " +
           milliseconds(other.measured_ns) + predicted(other) + " (" + gain(other) + "), and less than " +
           format_text("%g %%", options_.min_gain * 100) + " is no reason to lose anything";
  }
  if (lost_on_trial_) return start + ": what was tried loses too much";
  if (retried_.has_value()) return start + ": what was faster on trial can't be made any more";
  return start + ": no setting allowed is predicted to be faster";
}

// "; tried: cast(bf16) 3 ms, ...", or nothing.
std::string AutoEngineImpl::others_tried() const {
  std::string others;
  for (std::size_t c = 1; c < decision_.candidates.size(); ++c) {
    const AutoCandidate& of = decision_.candidates[c];
    if (static_cast<int>(c) == current_ || of.measured_ns < 0) continue;
    others += (others.empty() ? "; tried: " : ", ") + of.label + " " + milliseconds(of.measured_ns) + predicted(of);
  }
  return others;
}

// What the contest has chosen.
void AutoEngineImpl::begin_running() {
  phase_ = Phase::kRun;
  std::int64_t expected_ns = contest_->median_ns(current_);
  if (!retried_.has_value()) {
    first_ns_.clear();
    for (const AutoCandidate& candidate : decision_.candidates) first_ns_.push_back(candidate.measured_ns);
  } else if (current_ == retried_->candidate) {
    expected_ns = std::max(expected_ns, retried_->step_ns);  // fresh, it was faster than it stays
  }
  retried_.reset();
  std::int64_t& first_ns = first_ns_[static_cast<std::size_t>(current_)];
  if (first_ns < 0) first_ns = expected_ns;
  block_steps_ = std::clamp(kWatchNs / std::max<std::int64_t>(1, expected_ns), kWatchFewest, kWatchMost);
  // Of steps that will be passed nothing is known yet.
  const bool first_tells = current_ == 0 && options_.can_average && !dense_was_passed_;
  watch_.restart(first_tells ? Watch::kFirstTells : expected_ns, first_tells ? Watch::kFirstTells : first_ns);
  decision_.step_ns = -1;
}

// ---- between steps: watch -------------------------------------------------------------------------------------------

Status AutoEngineImpl::check_progress() {
  const EngineReport report = inner_->report();
  const double gradient = std::sqrt(gradient_squares_) / context_.gradient_scale;
  const Debts::Dropped dropped = debts_.drop_old(steps_);
  const double error = report.relative_l2_error;
  const double own[] = {only_casts(current()) && std::isnan(error) ? 0 : error,
                        gradient > 0 ? report.residual_l2 / gradient : 0, as_double(dropped.tensors),
                        as_double(dropped.last)};
  const std::int64_t own_step_ns[] = {median_of(times_ns_)};
  times_ns_.clear();
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> mean,
                           mean_of_ranks(communicator_, std::span<const std::int64_t>(own_step_ns), timeout()));
  CORTADO_ASSIGN_OR_RETURN(const std::vector<double> most,
                           largest_of_ranks(communicator_, std::span<const double>(own), timeout()));
  const std::int64_t step_ns = mean[0];
  const double relative_error = most[0], residual = most[1], max_error = max_error_of(current());
  tell_dropped({static_cast<std::int64_t>(most[2]), static_cast<std::int64_t>(most[3])});
  const bool is_lossy = current_ != 0 && (relative_error > max_error || residual > options_.max_residual);
  const Watch::Finding finding = watch_.note(step_ns, is_lossy, !faster_on_trial(step_ns).empty());
  decision_.step_ns = step_ns;
  decision_.drift = as_double(step_ns) / as_double(watch_.measured_ns()) - 1;
  decision_.relative_error = relative_error;
  decision_.residual = residual;

  switch (finding) {
    case Watch::Finding::kNothing:
      break;
    case Watch::Finding::kLossy:
      say_at_step(current().label + " loses too much: relative L2 error " + format_text("%.3f", relative_error) +
                  " (limit " + format_text("%g", max_error) + "), residual " + format_text("%.1f", residual) +
                  " gradients (limit " + format_text("%g", options_.max_residual) +
                  "); its residual is dropped, and it is not used again. Dense, and measuring again");
      refuse_current();
      CORTADO_RETURN_IF_ERROR(go_dense(/*keep_residual=*/false));
      begin_measuring();
      break;
    case Watch::Finding::kDrifted:
      say_at_step("a step takes " + milliseconds(step_ns) + ", expected " + milliseconds(watch_.measured_ns()) +
                  "; dense, and measuring again");
      CORTADO_RETURN_IF_ERROR(go_dense());
      begin_measuring();
      break;
    case Watch::Finding::kBeaten:
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
  say_at_step("a step takes " + milliseconds(step_ns) + ", expected " + milliseconds(watch_.expected_ns()) +
              ", and others took less on trial: " + others + "; trying them and " + current().label + " again");
  contestants.push_back(current_);
  retried_ = {.candidate = current_, .step_ns = step_ns};
  if (current_ == 0) candidates[0].measured_ns = step_ns;
  const std::int64_t dense_ns[] = {candidates[0].measured_ns};
  begin_contest(std::vector<std::int64_t>(candidates.size(), -1), dense_ns);
  contest_->keep_only(contestants);
  for (const int c : contestants) {
    if (c == 0) continue;
    AutoCandidate& of = candidates[static_cast<std::size_t>(c)];
    of = {.label = of.label, .what = of.what, .plan = of.plan, .predicted_ns = of.predicted_ns};
  }
  CORTADO_RETURN_IF_ERROR(go_dense());
  decision_.decided = false;
  decision_.chosen = 0;
  decision_.reason = "trying again";
  block_steps_ = steps_of_block(step_ns);
  phase_ = Phase::kTry;
  const Status status = next_trial();
  uncounted_ = std::max(uncounted_, Debts::kPieces);  // until what the one that ran for long owes is paid
  return status;
}

// ---- from engine to engine ------------------------------------------------------------------------------------------

// False: it can't be made, now and here. Models and settings are the same on all ranks, and where the device of one has
// too little memory all hear of it, so all of them go on without it. What ran before it has gone then: two engines may
// need more memory than there is.
Result<bool> AutoEngineImpl::try_to_switch(int candidate) {
  if (candidate != current_ && current_ != 0) CORTADO_RETURN_IF_ERROR(go_dense());
  if (candidate == current_) {
    CORTADO_RETURN_IF_ERROR(replace_inner(candidate, nullptr));
    return true;
  }
  const AutoCandidate& wanted = decision_.candidates[static_cast<std::size_t>(candidate)];
  Result<std::unique_ptr<Engine>> made = make_inner(wanted);
  if (made.ok()) {
    CORTADO_RETURN_IF_ERROR(replace_inner(candidate, std::move(made).value()));
    return true;
  }
  // What came damaged may have come so to this rank alone.
  if (made.status().is_fatal()) return made.status();
  say(wanted.label + " is left out: " + made.status().message());
  return false;
}

Status AutoEngineImpl::go_dense(bool keep_residual) {
  std::unique_ptr<Engine> made;
  if (current_ != 0) {
    CORTADO_ASSIGN_OR_RETURN(made, make_inner(decision_.candidates[0]));
  }
  return replace_inner(0, std::move(made), keep_residual);
}

// `made` is the candidate's engine; nothing if it runs already.
Status AutoEngineImpl::replace_inner(int candidate, std::unique_ptr<Engine> made, bool keep_residual) {
  // What is owed after some steps on trial is no more than these; after a long time it may be much.
  const int pieces = phase_ == Phase::kRun ? Debts::kPieces : 1;
  uncounted_ = std::max(kUncountedOnTrial, pieces);
  if (made == nullptr) return {};
  if (keep_residual) CORTADO_RETURN_IF_ERROR(harvest(inner_.get(), current(), pieces));
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

// What an engine of `of` still owes. It can't be used afterwards.
Status AutoEngineImpl::harvest(Engine* from, const AutoCandidate& of, int pieces) {
  if (of.what == "none") return {};
  if (of.plan.has_value()) {
    // A plan that encodes nothing has no residuals, so those there are become one sum for each tensor.
    Plan plan = *of.plan;
    const LevelRange all{0, static_cast<int>(plan.topology.levels.size()) - 1};
    for (PlanBucket& bucket : plan.buckets) {
      bucket.codec = "none";
      bucket.option.operations = {{.kind = OpKind::kAllReduce, .levels = all}};
    }
    CORTADO_RETURN_IF_ERROR(from->switch_plan(plan));
  }
  CORTADO_ASSIGN_OR_RETURN(const EngineState state, from->save_state());
  for (const TensorState& tensor : state.tensors) {
    const std::uint32_t t = find_tensor(tensors_, tensor.name).value();
    debts_.owe(t, tensor.residual, 1.0f, pieces, steps_);
    // Plans divide by the number of ranks before they encode.
    for (const PlaceState& place : tensor.places) {
      debts_.owe(t, place.values, static_cast<float>(communicator_->world_size()), pieces, steps_);
    }
  }
  return {};
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

}  // namespace cortado

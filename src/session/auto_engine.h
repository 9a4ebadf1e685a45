// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The flow. An engine runs inside; between steps it may be exchanged for another one.
//
//   kMeasure  dense steps, the first ones not counted; then links and codecs are measured and candidates come from the
//             planner (candidates.h)
//   kTry      each candidate for some steps, as the contest says (contest.h)
//   kRun      the winner. About every ten seconds all ranks gather how long steps took and what is lost, and go back to
//             kMeasure if the time has drifted or too much is lost, or to kTry if others were faster on trial than the
//             winner is now
//
// What an engine still owed when it was left (its residual) is paid with later gradients (debts.h).
//
// With gradients on a device settings run there, and dense steps and plans on the host. Gradients take one of three
// routes:
//
//   kDirect  the engine inside gets the gradients as they are
//   kHost    they are copied to the host, where the engine inside is, and the means are copied back
//   kBoth    the engine inside is on the device, but something here reads or changes gradients: they are copied to the
//            host, and back if they were changed, before it gets them
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collective/agreement.h"
#include "cortado/auto.h"
#include "engine/device_side.h"
#include "engine/submission.h"
#include "session/candidates.h"
#include "session/contest.h"
#include "session/debts.h"
#include "session/placement.h"
#include "session/trial_predictions.h"
#include "session/watch.h"

namespace cortado {

// Where gradients are; without make_engine on the host.
struct AutoDevice {
  EngineDevice copies;  // its queue
  // Of a setting, with gradients on the device. Every rank calls it.
  std::function<Result<std::unique_ptr<Engine>>(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                Communicator* communicator, const Clock* clock, TraceRecorder* trace)>
      make_engine;
};

class AutoEngineImpl final : public AutoEngine {
 public:
  // Steps before times count: the first has no start time, DDP lays out its buckets anew, caches are cold.
  static constexpr int kUncountedSteps = 3;

  AutoEngineImpl(std::vector<EngineTensor> tensors, const AutoOptions& options, Communicator* communicator,
                 const Clock* clock, AutoDevice device = {});
  ~AutoEngineImpl() override;
  Status start(const Result<std::optional<LauncherPlace>>& place = launcher_place());

  Status begin_step(const StepContext& context) override;
  Status submit(std::span<const Gradient> gradients) override;
  Status submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) override;
  Result<StepOutcome> finish_step(const LocalGradient& local_gradient) override;
  void set_first_step(std::int64_t step) override;
  void abandon(const std::string& why) override;

  const EngineOptions& options() const override { return inner_->options(); }
  const std::vector<EngineTensor>& tensors() const override { return tensors_; }
  bool is_on_device() const override { return device_.make_engine != nullptr; }
  EngineReport report() const override;
  void set_trace(TraceRecorder* trace) override;
  Trace trace() const override { return inner_->trace(); }
  std::string describe() const override;
  Status check_replicas(std::span<const ReplicaTensor> tensors) override;
  Result<EngineState> save_state() override;
  Result<std::string> load_state(const EngineState& state) override;

  bool may_pass() const override;
  Status pass_step() override;
  const AutoDecision& decision() const override { return decision_; }
  std::vector<std::string> take_news() override;
  std::string summary() const override;

 private:
  enum class Phase { kMeasure, kTry, kRun };
  enum class Route { kDirect, kHost, kBoth };

  struct Held {  // what submit() or submit_buffer() was given
    std::vector<Gradient> gradients;
    bool is_buffer = false;
    void* data = nullptr;
    std::int64_t elems = 0;
    DType dtype = DType::kFloat32;
  };

  std::chrono::nanoseconds timeout() const;
  const AutoCandidate& current() const { return decision_.candidates[static_cast<std::size_t>(current_)]; }
  std::int64_t step_number() const { return first_step_ + steps_; }
  bool sums_buffers() const { return inner_->options().method == EngineOptions::Method::kNone; }
  void release_gradients();
  Status fail(const Status& status);
  Status fail_if_cut_off(const Status& status) { return is_cut_off(status) ? fail(status) : status; }

  // -- set-up
  Status open_device();
  Result<bool> agree_on_buffers();

  // -- a step
  Status begin_inside();
  Status note_submission(std::span<const Gradient> gradients);
  Status submit_copied(std::span<const Gradient> gradients);
  Status take_copies();
  Status wait_for_copies();
  Status submit_held();
  Result<StepOutcome> finish_inside(const LocalGradient& local_gradient);
  bool is_last_of_block() const { return static_cast<std::int64_t>(times_ns_.size()) + 1 == block_steps_; }
  bool takes_samples() const {
    return (phase_ == Phase::kMeasure || !varying_.empty()) && uncounted_ == 0 && is_last_of_block();
  }
  // Times of neither step count for what is compared.
  bool takes_magnitudes() const {
    return phase_ == Phase::kMeasure && (uncounted_ == 1 || (uncounted_ == 0 && is_quiet_ && is_last_of_block()));
  }
  bool measures() const { return phase_ == Phase::kMeasure && uncounted_ == 0; }
  bool holds_back() const { return is_quiet_ && measures() && route_ == Route::kDirect; }
  bool adds_squares() const { return phase_ == Phase::kRun && uncounted_ == 0 && is_last_of_block(); }
  void note_gradients(std::span<const Gradient> gradients);
  void take_sample(const Gradient& gradient);
  bool sums_are_finite() const;
  Status after_step();
  Status agree_on_debts();
  void tell_dropped(const Debts::Dropped& most);

  // -- between steps
  void begin_measuring();
  void forget_samples();
  Status start_again();
  Status end_quiet_step();
  Status end_block();
  Status begin_trials();
  void begin_contest(std::vector<std::int64_t> predicted_ns, std::span<const std::int64_t> dense_ns);
  Status next_trial();
  Status predict_trial();
  Status simulate_setting();
  std::optional<double> pace_of_steps(std::vector<std::int64_t> first_ready_ns) const;
  double max_error_of(const AutoCandidate& of) const;
  Result<bool> loses_too_much_on_trial();
  Status decide();
  void record_trials();
  std::string predicted(const AutoCandidate& of) const;
  std::string reason() const;
  std::string others_tried() const;
  void begin_running();
  Status check_progress();
  std::vector<int> faster_on_trial(std::int64_t step_ns) const;
  Status try_again(std::int64_t step_ns);
  Result<bool> try_to_switch(int candidate);
  Status go_dense(bool keep_residual = true);
  Status replace_inner(int candidate, std::unique_ptr<Engine> made, bool keep_residual = true);
  void put_inside(std::unique_ptr<Engine> made, int candidate);
  Result<std::unique_ptr<Engine>> make_inner(const AutoCandidate& of);
  Status harvest(Engine* from, const AutoCandidate& of, int pieces);
  Status check_state(const EngineState& state) const;
  void refuse_current() { refused_.push_back(current().plan.has_value() ? "plan" : current().what); }
  void say(const std::string& text) { news_.push_back("cortado: " + text); }
  void say_at_step(const std::string& text) { say("auto, step " + std::to_string(step_number()) + ": " + text); }

  std::vector<EngineTensor> tensors_;
  AutoOptions options_;
  Communicator* communicator_;
  const Clock* clock_;
  TraceRecorder* trace_ = nullptr;
  AutoDevice device_;
  std::unique_ptr<DeviceSide> copies_;  // of gradients on the device
  Placement placement_;
  std::optional<Cluster> cluster_;  // given, to predict with
  std::unique_ptr<Engine> inner_;
  int current_ = 0;  // of the candidates

  Status failure_;
  AutoDecision decision_;
  std::vector<std::string> news_;
  std::vector<std::string> refused_;  // settings that lost too much
  bool lost_on_trial_ = false;        // of those on trial, since they began

  Phase phase_ = Phase::kMeasure;
  bool is_quiet_ = false;                                  // kMeasure: nothing travels during the backward pass
  std::vector<std::int64_t> dense_ns_;                     // of steps before that
  std::vector<std::vector<std::int64_t>> quiet_ready_ns_;  // of each step, by tensor: on the last rank
  std::vector<std::int64_t> quiet_first_ready_ns_;         // of each step, in the mean of the ranks
  std::vector<std::int64_t> dense_ready_ns_;               // when the last gradient of each was ready
  std::vector<std::int64_t> dense_first_ready_ns_;
  std::optional<Contest> contest_;
  TrialPredictions predictions_;                      // of candidates; kTry, again: of none
  std::vector<std::vector<std::int64_t>> trials_ns_;  // by candidate
  std::vector<std::int64_t> recent_first_ready_ns_;   // of the last trial, and of steps since
  bool owes_nothing_ = false;                         // no rank does, to gradients of dense steps: kTry and kRun
  bool was_passed_ = false;                           // the step before
  bool dense_was_passed_ = false;                     // kTry: times of dense are of steps that were passed
  decltype(Candidates::predict) predict_;
  std::set<int> varying_;               // candidates with payloads that vary, not tried yet
  int uncounted_ = kUncountedSteps;     // steps still to pass before times count
  std::int64_t block_steps_ = 0;        // steps whose times are wanted before the next exchange with the other ranks
  std::vector<std::int64_t> times_ns_;  // of this block
  // But for kRun, of the same steps: when their first gradients were ready; 0: not known.
  std::vector<std::int64_t> first_ready_ns_;
  Watch watch_;                         // kRun
  std::vector<std::int64_t> first_ns_;  // by candidate: on trial then; -1: not tried
  struct Retried {
    int candidate;
    std::int64_t step_ns;
  };
  std::optional<Retried> retried_;  // kTry, again: who ran, and what its steps took

  // -- the step in hand
  bool in_step_ = false;
  StepContext context_;
  Route route_ = Route::kDirect;
  bool is_inside_begun_ = false;
  std::vector<Gradient> empty_;  // tensors without elements that were submitted, but for the engine inside
  std::vector<SubmittedGradient> submitted_;
  std::vector<Gradient> arrived_;
  std::int64_t step_start_ns_ = -1;  // end of the step before
  std::int64_t own_ns_ = 0;          // spent in this engine since
  // But for kRun: when its first and its last gradients were ready.
  std::int64_t step_first_ready_ns_ = 0, last_ready_ns_ = 0;
  std::vector<Held> held_;              // holds_back(): for finish_step()
  std::vector<std::int64_t> ready_ns_;  // holds_back(): by tensor
  // Of gradients in the last step of a block, on rank 0, until the decision; and which tensors' they are.
  GradientSamples samples_;
  double largest_gradient_ = 0;  // kMeasure: of this rank, see MeasuredSteps
  std::map<std::uint32_t, std::size_t> sampled_;
  double gradient_squares_ = 0;
  Debts debts_;

  std::int64_t steps_ = 0;
  std::int64_t first_step_ = 0;  // what the first of them is called
  ReplicaHistory replicas_;
  std::int64_t measured_steps_ = 0, passed_steps_ = 0;
  // Of the engines before the one inside.
  std::int64_t non_finite_steps_ = 0;
  std::string last_non_finite_;
  std::int64_t stage_ns_[kStageCount] = {};
};

}  // namespace cortado

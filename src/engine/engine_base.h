// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What engines of both kinds, of one method (engine_impl.h) and of a plan (plan_engine.h), keep of their steps: which
// one is in hand and what was handed over in it, the error that ended them, and what is counted for reports and traces.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/agreement.h"
#include "cortado/engine.h"
#include "engine/submission.h"

namespace cortado {

class EngineBase : public Engine {
 public:
  const EngineOptions& options() const final { return options_; }
  const std::vector<EngineTensor>& tensors() const final { return tensors_; }
  void set_first_step(std::int64_t step) final { first_step_ = step - finished_steps_; }
  void set_trace(TraceRecorder* trace) override { trace_ = trace; }
  Trace trace() const final;
  Status check_replicas(std::span<const ReplicaTensor> tensors) final;
  void abandon(const std::string& why) final;

 protected:
  struct Interval {
    std::int64_t start_ns = 0;
    std::int64_t end_ns = 0;
  };
  struct SquareSums {  // of what all tensors had, lost, and keep as residuals
    double of_values = 0, of_errors = 0, of_residuals = 0;
  };

  EngineBase(std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator,
             const Clock* clock, TraceRecorder* trace)
      : tensors_(std::move(tensors)),
        options_(options),
        communicator_(communicator),
        clock_(clock),
        trace_(trace),
        submitted_(tensors_.size()) {}

  // For destructors to call, before anything goes that messages in flight may use: abandons the group within a step,
  // because those, and the caller's buffers, may be in flight.
  void leave_group();

  // The error that has ended the engine, or that a step is under way; `call` is what was called.
  Status check_between_steps(const char* call) const;
  // Likewise that none is.
  Status check_in_step(const char* call) const;
  // `where` the scale was found.
  static Status check_gradient_scale(const char* where, double scale);
  // What begin_step() and finish_step() have in common.
  Status begin_any_step(const StepContext& context, bool takes_scale_of_device);
  void end_step() {
    in_step_ = false;
    ++finished_steps_;
  }

  // The first error stays the engine's error; a step that failed on the way can't be repeated. Others are told.
  Status fail(const Status& status);
  Status fail_if_cut_off(const Status& status) { return is_cut_off(status) ? fail(status) : status; }
  Status not_submitted(std::uint32_t tensor) const;

  bool passes_through() const { return communicator_->world_size() == 1; }
  std::int64_t step_number() const { return first_step_ + finished_steps_; }
  std::chrono::nanoseconds timeout() const;

  void record(Stage stage, int message, int tensor, const Interval& interval, std::int64_t bytes,
              std::int32_t collective = -1);
  // `rank` -1: in the sum over ranks.
  void note_non_finite(const std::string& where, int rank = -1);
  // Whether the state is of these settings and, of as many ranks, of this one; between steps.
  Status check_origin(const EngineState& state) const;
  // What load_state() warns of: other ranks have saved it.
  std::string warning_of_ranks(const EngineState& state) const;
  std::vector<std::string> names() const;  // of tensors
  // All but what depends on what a tensor is sent as; `tensors` have names and elements.
  EngineReport begin_report() const;
  static void add_squares(const SquareSums& sums, EngineReport* report);

  std::vector<EngineTensor> tensors_;
  EngineOptions options_;
  Communicator* communicator_;
  const Clock* clock_;
  TraceRecorder* trace_;

  Status failure_;  // the first fatal error
  bool in_step_ = false;
  StepContext context_;
  std::vector<SubmittedGradient> submitted_;
  bool finite_ = true;     // of the step in hand
  std::int64_t step_ = 0;  // finite steps finished
  ReplicaHistory replicas_;

  // -- what reports tell
  std::int64_t finished_steps_ = 0;
  std::int64_t non_finite_steps_ = 0;
  std::int64_t last_payload_bytes_ = 0;
  std::int64_t last_messages_ = 0;

 private:
  std::int64_t first_step_ = 0;  // what the first of finished_steps_ is called
  std::string last_non_finite_;
  std::int64_t stage_ns_[kStageCount] = {};
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What auto saves and loads.
#include <algorithm>
#include <utility>

#include "core/hash.h"
#include "engine/find_tensor.h"
#include "engine/finite_state.h"
#include "session/auto_engine.h"
#include "session/saved_decision.h"

namespace cortado {

namespace {

constexpr std::int64_t kWatchOfState = 16;  // steps, after a state was loaded: what they take is not known

}  // namespace

Result<EngineState> AutoEngineImpl::save_state() {
  if (!failure_.ok()) return failure_;
  CORTADO_ASSIGN_OR_RETURN(EngineState state, inner_->save_state());
  state.spec =
      SavedDecision{.step = step_number(), .decided = decision_.decided, .refused = refused_, .what = current().what}
          .text();
  debts_.save(&state);
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
        if (find_tensor(tensors_, name).has_value()) continue;
        return make_error(StatusCode::kMismatch, "load_state: the state has a tensor \"%s\", this model has none",
                          name.c_str());
      }
    }
  }
  CORTADO_RETURN_IF_ERROR(debts_.check(state));
  return check_finite(state);
}

// Dense, and measuring, as after start().
Status AutoEngineImpl::start_again() {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> made, make_inner(decision_.candidates[0]));
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
    debts_.clear();
    refused_ = decision.refused;
    return "the state was saved by " + std::to_string(saved.world_size) + " ranks and is loaded by " +
           std::to_string(communicator_->world_size()) +
           ": auto measures again, and residuals start at zero (what they held is lost once)";
  }
  EngineState state = saved;
  Debts::remove_from(&state);
  CORTADO_ASSIGN_OR_RETURN(const AutoCandidate candidate, candidate_of(decision.what));
  Result<std::unique_ptr<Engine>> restored = make_inner(candidate);
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
  debts_.load(saved, steps_);
  refused_ = decision.refused;
  const std::string& label = candidate.label;
  const bool is_allowed = may_run(candidate, options_, refused_);
  const bool fits = !candidate.plan.has_value() || candidate.plan->topology == placement_.topology;
  if (!decision.decided || !is_allowed || !fits) {
    // What was on trial, or may not run here, is not resumed; what it owes is paid.
    Status status = harvest(made.get(), candidate, decision.decided ? Debts::kPieces : 1);
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
    decision_.candidates.push_back(candidate);
    decision_.chosen = 1;
  }
  decision_.reason = label + ", as in the checkpoint";
  current_ = decision_.chosen;
  phase_ = Phase::kRun;
  forget_samples();
  retried_.reset();
  watch_.restart(Watch::kFirstTells, Watch::kFirstTells);
  block_steps_ = kWatchOfState;
  return warning;
}

}  // namespace cortado

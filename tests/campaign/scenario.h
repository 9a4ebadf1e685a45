// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One run of a small training over in-process ranks, everything of it drawn from a seed: model, codec and settings, the
// order in which gradients become ready, and one thing that goes wrong on one rank at some point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cortado/engine.h"
#include "cortado/plan.h"

namespace cortado {

enum class Trouble {
  kNone,
  kShortDelay,     // a collective is reported late, within the timeout
  kLongDelay,      // beyond it
  kShortStall,     // the rank does nothing for a while, within the timeout
  kLongStall,      // beyond it
  kDrop,           // a collective and all after it never leave the rank
  kRefusal,        // a collective can't be started
  kCorruption,     // a bit of what the rank contributes is flipped on its way
  kTruncation,     // half of what it contributes is missing
  kArrival,        // a bit of what it alone receives in a gather is flipped
  kAbandon,        // the rank gives up, and says so
  kLeave,          // the rank's thread ends without a word
  kOtherSettings,  // it asks for something else than the others
  kOtherModel,     // one of its tensors has another shape, dtype or name, or is missing
  kMissingTensor,  // it does not hand over a gradient
  kTensorTwice,    // it hands one over twice
  kOtherState,     // it resumes from a state of its own
};
constexpr int kTroubleCount = 17;
const char* trouble_name(Trouble trouble);

struct Scenario {
  std::uint64_t seed = 0;
  int world_size = 2;
  EngineOptions options;
  std::optional<Plan> plan;       // instead of the options' codec
  std::optional<Plan> next_plan;  // to which all ranks switch
  int switched_after = 0;         // steps
  std::vector<EngineTensor> tensors;
  int steps = 2;
  StepContext context;
  int non_finite_step = -1;  // in which one rank's gradient holds an Inf
  int saved_after = 1;       // steps after which all ranks save their state

  Trouble trouble = Trouble::kNone;
  int victim = 0;
  std::uint64_t at = 0;  // where it happens: modulo the collectives, or the calls of the engine, that the victim makes
  std::int64_t pause_ns = 0;
  bool checks_collectives = false;  // over a checking communicator
  bool damages_sums = false;        // kArrival in sums too, to see that the judge sees it
};

Scenario make_scenario(std::uint64_t seed);
std::string describe(const Scenario& scenario);

// What happened on one rank.
struct RankOutcome {
  Status status;
  bool left = false;                                           // by kLeave
  std::vector<std::vector<std::vector<std::byte>>> delivered;  // [step][tensor]
  EngineState saved;
  bool has_saved = false;
  std::int64_t ended_ns = 0;  // virtual
  std::int64_t collectives = 0;
  std::int64_t calls = 0;
  bool may_be_unseen = false;  // of the victim: what kCorruption or kTruncation did nobody can see
};

enum class Verdict {
  kCorrect,  // every rank: what a run without trouble delivers, to the bit
  kError,    // every rank: an error that names the victim and the place, in time, or its last step done before
  kAlike,    // a contribution to a sum was damaged (adr/0017): every rank has the same, and nobody can know better.
             // With checks only where the sum is of 16-bit floats, or the damage no larger than rounding may be
  kWrong,    // anything else: a bug
};

struct Judgement {
  Verdict verdict = Verdict::kCorrect;
  std::string text;        // of kWrong: what; of kError: the first rank's error
  bool restarted = false;  // after the error all ranks resumed from their saved states, and ended as without trouble
};

// Runs the scenario without its trouble and with it, and once more from the saved states after an error.
Judgement judge(const Scenario& scenario);

}  // namespace cortado

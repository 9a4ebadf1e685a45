// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/auto_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/checksum.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"
#include "core/made_up_testing.h"
#include "core/temporary_directory_testing.h"
#include "cortado/calibrate.h"
#include "engine/emulated_message.h"
#include "engine/engine_impl.h"
#include "session/cluster_testing.h"

namespace cortado {
namespace {

// Time as the test wants it; one a rank.
class HandClock final : public Clock {
 public:
  explicit HandClock(bool runs = false) : runs_(runs) {}
  std::int64_t now_ns() const override { return now_ + (runs_ ? steady_clock()->now_ns() : 0); }
  void advance(std::int64_t ns) { now_ += ns; }

 private:
  bool runs_;  // by itself too
  std::int64_t now_ = 1'000'000;
};

std::vector<EngineTensor> model() {
  return {{.name = "embedding", .rows = 40, .cols = 24},
          {.name = "first.weight", .rows = 48, .cols = 33},
          {.name = "first.bias", .rows = 1, .cols = 48, .dimensions = 1},
          {.name = "last.weight", .rows = 17, .cols = 64}};
}

// What is seen of the engines that one rank makes on its device.
struct MadeEngines {
  std::function<bool(const EngineOptions& options, int made)> has_memory_for = nullptr;
  std::map<std::string, int> made = {};  // of each setting
  int alive = 0, most = 0;
  // What comes after what: "e<c" is an engine's queue that follows that of auto's copies, "c>g" those before
  // gradients'.
  std::string order = {};
  bool is_broken = false;  // the queue of auto's copies: its order can't be had any more
};

// Streams by their letters.
DeviceStream stream_of(char letter) { return reinterpret_cast<DeviceStream>(static_cast<std::uintptr_t>(letter)); }

class WatchedQueue : public EmulatedQueue {
 public:
  WatchedQueue(MadeEngines* engines, char letter, std::uint64_t most_bytes = std::uint64_t{1} << 30)
      : EmulatedQueue(stream_of(letter), most_bytes), engines_(engines), letter_(letter) {}
  Status follow(DeviceStream other) override { return note('<', other); }
  Status lead(DeviceStream other) override { return note('>', other); }

 protected:
  MadeEngines* const engines_;

 private:
  Status note(char relation, DeviceStream other) {
    if (engines_->is_broken && letter_ == 'c') return make_error(StatusCode::kInternal, "a broken device");
    engines_->order += std::string(engines_->order.empty() ? "" : " ") + letter_ + relation +
                       (other == nullptr ? '0' : static_cast<char>(reinterpret_cast<std::uintptr_t>(other)));
    return {};
  }

  const char letter_;
};

// Counts itself as long as it lives.
class CountedQueue final : public WatchedQueue {
 public:
  CountedQueue(MadeEngines* engines, std::uint64_t most_bytes) : WatchedQueue(engines, 'e', most_bytes) {
    engines_->most = std::max(engines_->most, ++engines_->alive);
  }
  ~CountedQueue() override { --engines_->alive; }
};

AutoDevice emulated_device(MadeEngines* engines) {
  const auto make_engine = [engines](std::vector<EngineTensor> tensors, const EngineOptions& options,
                                     Communicator* communicator, const Clock* clock, TraceRecorder* trace) {
    int& made = engines->made[options.to_spec()];
    const bool has_memory = !engines->has_memory_for || engines->has_memory_for(options, made);
    ++made;
    const std::uint64_t most_bytes = has_memory ? std::uint64_t{1} << 30 : 1000;
    return EngineImpl::make(std::move(tensors), options, communicator, clock, trace,
                            {.queue = std::make_unique<CountedQueue>(engines, most_bytes),
                             .make_message = make_emulated_message,
                             .make_matrices = make_emulated_matrices});
  };
  return {.copies = {.queue = std::make_unique<WatchedQueue>(engines, 'c')}, .make_engine = make_engine};
}

constexpr std::int64_t kMs = 1'000'000;

// Flips a bit of what one blocking gather brings. Counts the collectives that are started.
class WatchedCommunicator final : public PassingCommunicator {
 public:
  WatchedCommunicator(Communicator* inner, std::int64_t damaged) : PassingCommunicator(inner), damaged_(damaged) {}
  std::int64_t started() const { return started_; }
  Result<WorkId> start(const CollectiveCall& call) override {
    ++started_;
    return inner_->start(call);
  }
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    const Status status = inner_->all_gather(sent, received, timeout);
    if (gathers_++ == damaged_ && !received.empty()) received[sent.size() / 2] ^= std::byte{1};
    return status;
  }

 private:
  std::int64_t damaged_, gathers_ = 0, started_ = 0;
};

// Runs steps of auto on some ranks; how long a step takes depends on what runs inside.
struct Training {
  AutoOptions options = AutoOptions::parse("auto(measure_s=0)").value();
  int ranks = 2;
  std::int64_t steps = 110;
  std::function<std::int64_t(const std::string& what, std::int64_t step, int rank)> step_ns;
  // Until the first gradient, that of the last tensor, is submitted, before the others; none: with them.
  std::function<std::int64_t(const std::string& what, std::int64_t step)> first_ready_ns = nullptr;
  std::function<void(AutoEngine& engine, std::int64_t step)> after_step = nullptr;
  std::function<Status(AutoEngine& engine, const MadeEngines& engines)> before_finish = nullptr;
  bool in_buckets = true, polls = false;
  std::function<bool(std::size_t rank)> can_average = nullptr;  // who averages by itself where it may: what="passed"
  std::function<bool(std::size_t rank)> on_device = nullptr;    // whose gradients are on a device
  // Whether the rank's device has room for a setting's engine, that it has made so often before.
  std::function<bool(std::size_t rank, const EngineOptions& options, int made)> has_memory_for = nullptr;
  std::function<bool(std::int64_t step)> is_unused = nullptr;  // on rank 1: tensor 1, whose gradient is zero then
  bool clock_runs = false;
  std::int64_t damaged_gather = -1;  // of those made when engines are set up: a bit of what reaches rank 1 is flipped
  std::function<bool(const std::string& what, std::int64_t step)> poison = nullptr;  // rank 1 has Inf in such steps ...
  std::size_t poisoned_tensor = 1;                                                   // ... there
  bool keeps_gradients = false;  // beside those that are submitted, as DDP does without gradient_as_bucket_view
  float gradient_scale = 1;
  std::function<float(int rank, std::int64_t step, std::size_t tensor, std::size_t i)> value = made_up_value;
  std::function<float(std::int64_t step)> magnitude = nullptr;            // of gradients, about; none: 1
  std::function<float(std::int64_t step)> magnitude_of_rank_1 = nullptr;  // times that; none: 1
  std::int64_t shrinks_from = std::numeric_limits<std::int64_t>::max();   // step: next to zero but for first values
  std::int64_t is_zero_from = std::numeric_limits<std::int64_t>::max();   // step
  std::vector<LauncherPlace> places = {};                                 // by rank; none: the launcher tells nothing
  std::int64_t first_step = 0;         // gradients are those of this step and the following
  std::vector<EngineState> load = {};  // by rank
  std::int64_t load_before = 0;        // step, counted from the first
  std::int64_t save_after = -1;        // step

  std::vector<Status> statuses;
  std::vector<AutoDecision> decisions;
  std::vector<std::set<std::string>> orders;  // by rank: of steps, as in MadeEngines
  std::vector<int> most_engines;              // by rank: on its device at once
  std::vector<std::vector<std::string>> news;
  std::vector<EngineReport> reports;
  std::vector<std::string> descriptions, loaded;  // at the start; what load_state() said
  std::vector<std::string> insides;               // on rank 0, by step: what runs it
  std::vector<bool> is_sent_early;                // on rank 0, by step: before finish_step(); none of passed ones
  std::vector<EngineState> saved;
  std::vector<std::vector<std::uint64_t>> checksums;  // by rank and step: of all that was delivered
  // Sum over all steps that were not poisoned of what was delivered, and of the mean gradients; of rank 0's tensor 1.
  std::vector<double> delivered, expected;
  double gradient_squares = 0;  // of the mean gradients, added up over all steps

  void go();
};

// What runs inside, as far as the test can see it: "none", or the setting.
std::string inside(const AutoEngine& engine) {
  const std::string summary = engine.summary();
  const std::string label = summary.substr(summary.rfind(": ") + 2);
  const std::string measuring = "measuring, ";
  return label.starts_with(measuring) ? label.substr(measuring.size()) : label;
}

void Training::go() {
  orders.resize(static_cast<std::size_t>(ranks));
  most_engines.resize(static_cast<std::size_t>(ranks));
  decisions.resize(static_cast<std::size_t>(ranks));
  news.resize(static_cast<std::size_t>(ranks));
  reports.resize(static_cast<std::size_t>(ranks));
  descriptions.resize(static_cast<std::size_t>(ranks));
  loaded.resize(static_cast<std::size_t>(ranks));
  saved.resize(static_cast<std::size_t>(ranks));
  checksums.assign(static_cast<std::size_t>(ranks), {});
  const std::vector<EngineTensor> tensors = model();
  const auto elems = [&](std::size_t t) { return static_cast<std::size_t>(tensors[t].rows * tensors[t].cols); };
  delivered.assign(elems(1), 0);
  expected.assign(elems(1), 0);
  gradient_squares = 0;
  insides.clear();
  is_sent_early.clear();
  statuses = run_ranks(ranks, [&](Communicator& group) -> Status {
    const auto rank = static_cast<std::size_t>(group.rank());
    WatchedCommunicator communicator(&group, rank == 1 ? damaged_gather : -1);
    HandClock clock(clock_runs);
    AutoOptions own = options;
    own.takes_buffers = in_buckets;
    own.can_average = can_average && can_average(rank);
    const bool is_on_device = on_device && on_device(rank);
    MadeEngines engines;
    if (has_memory_for) {
      engines.has_memory_for = [&](const EngineOptions& what, int made) { return has_memory_for(rank, what, made); };
    }
    AutoEngineImpl made(tensors, own, &communicator, &clock, is_on_device ? emulated_device(&engines) : AutoDevice());
    const std::optional<LauncherPlace> place = places.empty() ? std::nullopt : std::optional(places[rank]);
    if (const Status s = made.start(place); !s.ok()) return s;
    AutoEngine& engine = made;
    descriptions[rank] = engine.describe();
    for (std::int64_t step = first_step; step < first_step + steps; ++step) {
      if (!load.empty() && step == first_step + load_before) {
        Result<std::string> said = engine.load_state(load[rank % load.size()]);
        if (!said.ok()) return said.status();
        loaded[rank] = said.value();
      }
      std::vector<float> buffer;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (std::size_t i = 0; i < elems(t); ++i) {
          const float share = step >= is_zero_from ? 0.0f : step >= shrinks_from && i > 0 ? 1e-6f : 1.0f;
          float size = magnitude ? magnitude(step) : 1.0f;
          if (rank == 1 && magnitude_of_rank_1) size *= magnitude_of_rank_1(step);
          buffer.push_back(size * share * gradient_scale * value(static_cast<int>(rank), step, t, i));
        }
      }
      std::vector<Gradient> gradients;
      float* at = buffer.data();
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        gradients.push_back({static_cast<std::uint32_t>(t), at});
        at += elems(t);
      }
      const auto tell = [&] {
        if (step == save_after) saved[rank] = engine.save_state().value();
        for (const std::string& line : engine.take_news()) news[rank].push_back(line);
        if (after_step) after_step(engine, step);
      };
      if (engine.may_pass()) {
        if (rank == 0) insides.push_back("passed");
        clock.advance(step_ns("passed", step, static_cast<int>(rank)));
        if (const Status s = engine.pass_step(); !s.ok()) return s;
        tell();
        continue;
      }
      const bool is_poisoned = poison && poison(inside(engine), step);
      if (is_poisoned && rank == 1) {
        *static_cast<float*>(gradients[poisoned_tensor].data) = INFINITY;
      }
      if (is_unused && rank == 1 && is_unused(step))
        std::fill_n(static_cast<float*>(gradients[1].data), elems(1), 0.0f);
      if (rank == 0) insides.push_back(inside(engine));
      const std::int64_t own_step_ns = step_ns(inside(engine), step, static_cast<int>(rank));
      const std::int64_t own_first_ready_ns = first_ready_ns ? first_ready_ns(inside(engine), step) : own_step_ns;
      clock.advance(own_first_ready_ns);
      StepContext context{.gradient_scale = gradient_scale, .holds_zero_gradients = is_unused != nullptr};
      context.keeps_local_gradients = keeps_gradients;
      if (is_on_device) context = {.device_stream = stream_of('g'), .device_gradient_scale = &gradient_scale};
      const std::vector<float> kept = keeps_gradients ? buffer : std::vector<float>();
      const auto kept_gradient = [&](std::uint32_t t) {
        return kept.data() + (static_cast<float*>(gradients[t].data) - buffer.data());
      };
      engines.order.clear();
      if (const Status s = engine.begin_step(context); !s.ok()) return s;
      const std::int64_t started = communicator.started();
      std::vector<Gradient> last_gradients = gradients;
      if (first_ready_ns) {
        if (const Status s = engine.submit({&gradients.back(), 1}); !s.ok()) return s;
        last_gradients.pop_back();
        clock.advance(own_step_ns - own_first_ready_ns);
      }
      const Status submitted = in_buckets && !is_on_device
                                   ? engine.submit_buffer(last_gradients, buffer.data(),
                                                          static_cast<std::int64_t>(buffer.size()), DType::kFloat32)
                                   : engine.submit(last_gradients);
      if (!submitted.ok()) return submitted;
      if (polls) {  // as adapters do while they wait for a device: nothing new, but what peers have sent is taken in
        const Status polled = in_buckets ? engine.submit_buffer({}, nullptr, 0, DType::kFloat32) : engine.submit({});
        if (!polled.ok()) return polled;
      }
      if (rank == 0) is_sent_early.push_back(communicator.started() > started);
      if (before_finish) CORTADO_RETURN_IF_ERROR(before_finish(engine, engines));
      const Result<StepOutcome> outcome = keeps_gradients ? engine.finish_step(kept_gradient) : engine.finish_step();
      if (!outcome.ok()) return outcome.status();
      orders[rank].insert(engines.order);
      for (std::size_t i = 0; rank == 0 && !is_poisoned && i < delivered.size(); ++i) {
        delivered[i] += static_cast<float*>(gradients[1].data)[i] / gradient_scale;
        double mean = 0;
        for (int r = 0; r < ranks; ++r) mean += value(r, step, 1, i) / static_cast<double>(ranks);
        expected[i] += mean;
        gradient_squares += mean * mean;
      }
      checksums[rank].push_back(checksum_64(std::as_bytes(std::span(buffer))));
      tell();
    }
    decisions[rank] = engine.decision();
    most_engines[rank] = engines.most;
    reports[rank] = engine.report();
    return {};
  });
}

void expect_ok(const Training& run) {
  for (const Status& status : run.statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const auto& of_rank : run.checksums) EXPECT_EQ(of_rank, run.checksums[0]) << "replicas differ";
}

// Of runs one after the other: the norm of what was not delivered, in gradients of one step.
double gradients_lost(std::initializer_list<const Training*> runs) {
  double gradient_squares = 0, squares = 0;
  std::size_t steps = 0;
  std::vector<double> lost((*runs.begin())->expected.size());
  for (const Training* run : runs) {
    for (std::size_t i = 0; i < lost.size(); ++i) lost[i] += run->expected[i] - run->delivered[i];
    gradient_squares += run->gradient_squares;
    steps += run->checksums[0].size();
  }
  for (const double value : lost) squares += value * value;
  return std::sqrt(squares / (gradient_squares / static_cast<double>(steps)));
}

std::string chosen(const AutoDecision& decision) {
  return decision.candidates[static_cast<std::size_t>(decision.chosen)].label;
}

bool says(const std::vector<std::string>& news, const std::string& text) {
  return std::any_of(news.begin(), news.end(),
                     [&](const std::string& line) { return line.find(text) != std::string::npos; });
}

TEST(AutoEngine, TakesTheFastestSettingOnAllRanks) {
  Training run;
  run.ranks = 3;
  run.step_ns = [](const std::string& what, std::int64_t, int rank) {
    // The ranks see different times; what counts is the mean.
    const std::int64_t own = rank == 1 ? 30 * kMs : 0;
    return (what == "cast(fp16)" ? 300 : what == "cast(bf16)" ? 400 : what == "dense" ? 900 : 700) * kMs + own;
  };
  run.go();
  expect_ok(run);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(run.decisions[rank].decided);
    EXPECT_EQ(chosen(run.decisions[rank]), "cast(fp16)");
    EXPECT_EQ(run.decisions[rank].candidates[0].measured_ns, 910 * kMs);
    EXPECT_EQ(run.decisions[rank].candidates[2].measured_ns, 310 * kMs);
    EXPECT_EQ(run.news[rank], run.news[0]);
  }
  EXPECT_TRUE(says(run.news[0], "cast(fp16): 310 ms a step; dense 910 ms (2.94x)"));
  EXPECT_EQ(run.reports[0].spec, "auto(quality=balanced): cast(fp16)");
}

TEST(AutoEngine, DeclinesWithTheReasonWhereNothingIsGained) {
  Training run;
  run.steps = 300;
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 490) * kMs; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(run.decisions[0].decided);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_TRUE(says(run.news[0], "compression does not pay here; the fastest setting allowed"));
  EXPECT_TRUE(says(run.news[0], "(1.02x)"));
}

std::int64_t count_of(const Training& run, const std::string& what) {
  return std::count(run.insides.begin(), run.insides.end(), what);
}

bool always(std::size_t) { return true; }

// Dense is as fast there as without an engine, and is measured as such: a setting faster than the engine's dense steps
// only is not taken.
TEST(AutoEngine, LeavesDenseStepsToACallerThatCanAverage) {
  Training run;
  run.ranks = 3;
  run.steps = 300;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" ? 500 : what == "passed" ? 450 : what == "cast(fp16)" ? 448 : 600) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_EQ(run.decisions[0].candidates[0].measured_ns, 450 * kMs);
  EXPECT_EQ(run.decisions[0].step_ns, 450 * kMs);
  EXPECT_EQ(run.decisions[0].drift, 0);
  EXPECT_EQ(run.insides.back(), "passed");
  EXPECT_EQ(run.reports[0].steps, 300);
  EXPECT_EQ(run.reports[0].passed_steps, count_of(run, "passed"));
  EXPECT_EQ(run.reports[0].payload_bytes, run.reports[0].dense_bytes);
  for (std::size_t rank = 1; rank < 3; ++rank) EXPECT_EQ(run.news[rank], run.news[0]);
}

TEST(AutoEngine, OfDenseOnlyStepsThatArePassedAreCompared) {
  Training run;
  run.steps = 100;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" ? 400 : what == "passed" ? 450 : 600) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(run.decisions[0].candidates[0].measured_ns, 450 * kMs);
  EXPECT_EQ(run.decisions[0].candidates[0].steps, 3);
  EXPECT_EQ(run.decisions[0].candidates[0].trials_ns, std::vector<std::int64_t>{450 * kMs});
}

// One rank that is slower than the others says little of the step.
TEST(AutoEngine, WatchesTheMeanOfTheRanks) {
  Training run;
  run.ranks = 4;
  run.steps = 300;
  run.step_ns = [](const std::string& what, std::int64_t step, int rank) {
    return (what == "cast(fp16)" ? 300 : 900) * kMs * (step >= 150 && rank == 3 ? 2 : 1);
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
  EXPECT_FALSE(says(run.news[0], "measuring again"));
  EXPECT_NEAR(run.decisions[0].drift, 0.25, 1e-9);
}

TEST(AutoEngine, LeavesNoStepsToCallersSomeOfWhichCanNotAverage) {
  Training run;
  run.steps = 200;
  run.can_average = [](std::size_t rank) { return rank == 0; };
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 490) * kMs; };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_EQ(count_of(run, "passed"), 0);
  EXPECT_EQ(run.reports[0].passed_steps, 0);
}

// Before a step is passed, all that settings on trial owe has been paid.
TEST(AutoEngine, NothingIsLostBeforeStepsThatArePassed) {
  for (const float scale : {1.0f, 64.0f}) {
    Training run;
    run.options.quality = Quality::kAggressive;
    run.gradient_scale = scale;
    run.steps = 200;
    run.can_average = always;
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "dense" || what == "passed" ? 500 : 800) * kMs;
    };
    run.go();
    expect_ok(run);
    ASSERT_EQ(chosen(run.decisions[0]), "dense");
    ASSERT_GT(run.decisions[0].candidates.size(), 5u);
    EXPECT_GT(count_of(run, "passed"), 50);
    EXPECT_LT(gradients_lost({&run}), 0.02) << "scale " << scale;
  }
}

// Dense had its turn before, when nobody owed anything.
TEST(AutoEngine, NothingIsLostOfASettingTriedBetweenDenseStepsThatArePassed) {
  Training run;
  run.options.quality = Quality::kAggressive;
  run.steps = 300;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" || what == "passed" ? 500 : what == "topk(density=0.01)" ? 510 : 2000) * kMs;
  };
  run.go();
  expect_ok(run);
  ASSERT_EQ(chosen(run.decisions[0]), "dense");
  const auto is_topk = [](const std::string& what) { return what == "topk(density=0.01)"; };
  const auto first_passed = std::find(run.insides.begin(), run.insides.end(), "passed");
  ASSERT_TRUE(std::any_of(first_passed, run.insides.end(), is_topk));
  EXPECT_FALSE(says(run.news[0], "is dropped"));
  EXPECT_LT(gradients_lost({&run}), 0.02);
}

// What a rank owes to a tensor that it does not use in a step waits, on that rank alone; no rank passes steps
// meanwhile.
TEST(AutoEngine, RanksPassTheSameStepsWhateverTheyOwe) {
  Training run;
  run.options = AutoOptions::parse("auto(measure_s=0, quality=aggressive, timeout_s=20)").value();
  run.ranks = 3;
  run.steps = 250;
  run.can_average = always;
  run.is_unused = [](std::int64_t step) { return step < 200 && step % 4 != 0; };
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" || what == "passed" ? 500 : 600) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_GT(count_of(run, "passed"), 50);
  EXPECT_EQ(run.reports[1].passed_steps, run.reports[0].passed_steps);
}

// A layer that is frozen while settings are tried would keep the caller from its steps for ever.
TEST(AutoEngine, WhatIsOwedWhereThereAreNoGradientsIsDropped) {
  for (const bool can_average : {true, false}) {
    Training run;
    run.options.quality = Quality::kAggressive;
    run.steps = 300;
    if (can_average) run.can_average = always;
    run.is_unused = [](std::int64_t step) { return step >= 20; };
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "dense" || what == "passed" ? 500 : 600) * kMs;
    };
    run.save_after = 299;
    run.go();
    expect_ok(run);
    EXPECT_EQ(chosen(run.decisions[0]), "dense");
    EXPECT_TRUE(says(run.news[0],
                     "\"first.weight\" has had no gradient for 100 steps: what is still owed there is "
                     "dropped"));
    EXPECT_EQ(run.news[1], run.news[0]);
    EXPECT_EQ(run.insides.back(), can_average ? "passed" : "dense");
    for (const EngineState& state : run.saved) EXPECT_TRUE(state.tensors.empty());
  }
}

TEST(AutoEngine, ComparesFromTheFirstPassedStepsWhereNothingWasTried) {
  Training run;
  run.options = AutoOptions::parse("auto(measure_s=0, quality=safe)").value();
  run.steps = 100;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" ? 900 : what == "passed" ? 500 : 2000) * kMs;  // a hook that costs more than any has
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_EQ(run.decisions[0].drift, 0);
  EXPECT_EQ(run.insides.back(), "passed");
  EXPECT_EQ(run.reports[0].messages, 0);
}

TEST(AutoEngine, WatchesStepsThatArePassed) {
  Training run;
  run.steps = 400;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (step < 150) return (what == "dense" || what == "passed" ? 500 : 800) * kMs;
    return (what == "cast(fp16)" ? 900 : 2000) * kMs;  // the link is slower now
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
  EXPECT_TRUE(says(run.news[0], "a step takes 2000 ms, expected 500 ms; dense, and measuring again"));
  EXPECT_EQ(run.insides.at(149), "passed");
  EXPECT_EQ(run.insides.back(), "cast(fp16)");
  EXPECT_EQ(run.news[1], run.news[0]);
}

TEST(AutoEngine, AStepThatIsNotTheCallersCanNotBePassed) {
  Training run;
  run.steps = 3;
  run.can_average = always;
  run.step_ns = [](const std::string&, std::int64_t, int) { return 500 * kMs; };
  run.after_step = [](AutoEngine& engine, std::int64_t) {
    ASSERT_FALSE(engine.may_pass());  // it measures
    EXPECT_EQ(engine.pass_step().code(), StatusCode::kFailedPrecondition);
  };
  run.go();
  expect_ok(run);
}

TEST(AutoEngine, QualitySaysWhatMayBeUsed) {
  for (const auto& [quality, most] : {std::pair(Quality::kSafe, std::string("cast(bf16)")),
                                      std::pair(Quality::kBalanced, std::string("compso(bound=4e-3)")),
                                      std::pair(Quality::kAggressive, std::string("topk(density=0.01)"))}) {
    Training run;
    run.options.quality = quality;
    run.steps = 120;
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "dense"                ? 900
              : what == "topk(density=0.01)" ? 100
              : what == "compso(bound=4e-3)" ? 300
              : what == "cast(bf16)"         ? 500
                                             : 700) *
             kMs;
    };
    run.go();
    expect_ok(run);
    EXPECT_EQ(chosen(run.decisions[0]), most) << quality_name(quality);
  }
}

// What settings on trial owe is paid in the steps after them.
TEST(AutoEngine, NothingIsLostByTrials) {
  for (const bool in_buckets : {true, false}) {
    for (const float scale : {1.0f, 64.0f}) {
      Training run;
      run.options.quality = Quality::kAggressive;
      run.in_buckets = in_buckets;
      run.gradient_scale = scale;
      run.steps = 120;
      run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
      run.go();
      expect_ok(run);
      ASSERT_EQ(chosen(run.decisions[0]), "dense");
      ASSERT_GT(run.decisions[0].candidates.size(), 5u);
      EXPECT_LT(gradients_lost({&run}), 0.02) << "in buckets " << in_buckets << ", scale " << scale;
    }
  }
}

// The fastest is `wanted`; of the others none owes anything.
Training training_of(const std::string& wanted) {
  Training run;
  run.options = AutoOptions::parse("auto(measure_s=0, quality=aggressive)").value();
  run.in_buckets = false;
  run.gradient_scale = 64;
  run.steps = 150;
  run.step_ns = [wanted](const std::string& what, std::int64_t, int) {
    return (what == wanted ? 100 : what == "dense" ? 500 : 800) * kMs;
  };
  return run;
}

// Of low rank: what is projected does not depend on how sums were rounded, as that of noise does.
float waves(int rank, std::int64_t step, std::size_t tensor, std::size_t i) {
  const double x =
      0.37 * static_cast<double>(i) + 1.3 * rank + 0.71 * static_cast<double>(step) + 2.1 * static_cast<double>(tensor);
  return static_cast<float>(std::sin(x) + 0.3 * std::cos(3.1 * x));
}

// Trials, the steps in which debts are paid, and comparisons included: all but low rank has the same bits there.
TEST(AutoEngine, RunsItsSettingsWhereGradientsAre) {
  for (const std::string wanted : {"topk(density=0.01)", "cast(bf16)", "dense", "acp(rank=4)"}) {
    const auto on_all = [](std::size_t) { return true; };
    const auto on_one = [](std::size_t rank) { return rank == 1; };
    Training on_host = training_of(wanted);
    on_host.value = waves;
    on_host.go();
    expect_ok(on_host);
    for (const std::function<bool(std::size_t)>& on_device :
         {std::function<bool(std::size_t)>(on_all), std::function<bool(std::size_t)>(on_one)}) {
      Training run = training_of(wanted);
      run.value = waves;
      run.on_device = on_device;
      run.go();
      expect_ok(run);
      EXPECT_EQ(chosen(run.decisions[0]), wanted);
      EXPECT_EQ(run.insides, on_host.insides);
      EXPECT_NEAR(gradients_lost({&run}), gradients_lost({&on_host}), wanted.starts_with("acp") ? 1e-2 : 1e-6);
      EXPECT_NEAR(run.decisions[1].relative_error, on_host.decisions[1].relative_error, 1e-3);
      EXPECT_NEAR(run.decisions[1].residual, on_host.decisions[1].residual, 1e-3 * on_host.decisions[1].residual);
      const bool is_here = wanted.starts_with("topk") || wanted.starts_with("acp");
      EXPECT_EQ(run.reports[1].host_reason.empty(), is_here) << run.reports[1].host_reason;
    }
  }
}

TEST(AutoEngine, HasTheBitsOfTheHostWithGradientsOnADevice) {
  Training on_host = training_of("compso(bound=4e-3)");
  on_host.options.quality = Quality::kBalanced;
  Training run = on_host;
  run.on_device = [](std::size_t) { return true; };
  on_host.go();
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "compso(bound=4e-3)");
  EXPECT_EQ(run.checksums, on_host.checksums);
}

// A rank that could sum whole buffers, beside one that has none in host memory.
TEST(AutoEngine, SumsNoBuffersWhereSomeRankHasNone) {
  Training run = training_of("cast(bf16)");
  run.in_buckets = true;
  run.on_device = [](std::size_t rank) { return rank == 1; };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
}

TEST(AutoEngine, ResumesOnADevice) {
  for (const std::int64_t saved_after : {40, 140}) {
    Training first = training_of("topk(density=0.01)");
    first.on_device = [](std::size_t) { return true; };
    first.steps = saved_after + 1;
    first.save_after = saved_after;
    first.go();
    expect_ok(first);
    Training second = training_of("topk(density=0.01)");
    second.on_device = first.on_device;
    second.first_step = first.steps;
    second.load = first.saved;
    second.go();
    expect_ok(second);
    EXPECT_EQ(chosen(second.decisions[0]), "topk(density=0.01)");
    EXPECT_LT(gradients_lost({&first, &second}), 12) << saved_after;
  }
}

TEST(AutoEngine, EveryRankHearsOfADeviceThatCanNotBeUsed) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    HandClock clock;
    MadeEngines engines;
    AutoDevice device;
    if (communicator.rank() == 1) {
      device = emulated_device(&engines);
      device.copies = {.queue = nullptr, .failure = make_error(StatusCode::kInternal, "no stream")};
    }
    AutoEngineImpl engine(model(), AutoOptions(), &communicator, &clock, std::move(device));
    return engine.start(std::optional<LauncherPlace>());
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.to_string(), "internal error: rank 1: a device that can't be used: no stream");
  }
}

// A setting for which one rank's device is too full is left out on all of them: before its first trial, or later, when
// it has won.
TEST(AutoEngine, GoesOnWithoutWhatADeviceHasNoMemoryFor) {
  for (const int makes : {0, 1}) {
    Training run = training_of("topk(density=0.01)");
    run.on_device = [](std::size_t) { return true; };
    run.has_memory_for = [&](std::size_t rank, const EngineOptions& options, int made) {
      return rank != 1 || !options.to_spec().starts_with("topk") || made < makes;
    };
    run.go();
    expect_ok(run);
    EXPECT_NE(chosen(run.decisions[0]), "topk(density=0.01)") << makes;
    EXPECT_TRUE(says(run.news[0], "topk(density=0.01) is left out: rank 1: a device that can't be used")) << makes;
    EXPECT_EQ(std::find(run.insides.begin(), run.insides.end(), "topk(density=0.01)") != run.insides.end(), makes > 0);
    EXPECT_LT(gradients_lost({&run}), 12) << makes;
  }
}

// Where a gather came damaged to one rank alone, that rank does not go on without the candidate while the others try
// it.
TEST(AutoEngine, DamageToOneRankWhileASettingIsSetUpEndsAll) {
  int ended = 0;
  for (std::int64_t gather = 0; gather < 60; ++gather) {
    Training run;
    run.damaged_gather = gather;
    run.step_ns = [](const std::string& what, std::int64_t, int) { return what == "none" ? 20 * kMs : 10 * kMs; };
    run.go();
    const bool is_ok = run.statuses[0].ok();
    ended += !is_ok;
    for (const Status& status : run.statuses) {
      EXPECT_EQ(status.ok(), is_ok) << gather << ": " << status.to_string();
      EXPECT_EQ(status.message().find("rank 0 started"), std::string::npos) << gather << ": " << status.to_string();
    }
    for (const auto& news : run.news) EXPECT_FALSE(says(news, "damaged")) << gather;
    if (is_ok) expect_ok(run);
  }
  EXPECT_GT(ended, 2);
}

// Two engines at once may be more than there is room for.
TEST(AutoEngine, HasOneEngineOnADeviceAtATime) {
  Training run = training_of("topk(density=0.01)");
  run.on_device = [](std::size_t) { return true; };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "topk(density=0.01)");
  EXPECT_EQ(run.most_engines, std::vector<int>({1, 1}));
}

// One order for each way that a step may go. The first that follows is for the scale of the loss, the last is the end.
TEST(AutoEngine, IsOrderedBehindAndBeforeTheStreamThatComputes) {
  Training run = training_of("topk(density=0.01)");
  run.on_device = [](std::size_t) { return true; };
  run.go();
  expect_ok(run);
  const std::set<std::string> expected = {"c<g c<g c<g c>g",                   // on the host
                                          "e<g e<g e<g e>g",                   // direct
                                          "c<g e<c c<g e<c c<g e<c e>c c>g"};  // both
  EXPECT_EQ(run.orders[0], expected);
  EXPECT_EQ(run.orders[1], expected);
}

// A step that is broken off may have given copies into gradients: who reads them next comes after these.
TEST(AutoEngine, AStreamMayReadGradientsOfAStepThatWasBrokenOff) {
  Training run = training_of("topk(density=0.01)");
  run.on_device = [](std::size_t) { return true; };
  std::atomic<int> broken_off = 0;
  run.before_finish = [&](AutoEngine& engine, const MadeEngines& engines) -> Status {
    if (engines.order.find("e<c") == std::string::npos) return {};
    engine.abandon("enough");
    ++broken_off;
    EXPECT_TRUE(engines.order.ends_with(" c>g")) << engines.order;
    return make_error(StatusCode::kFailedPrecondition, "broken off");
  };
  run.go();
  EXPECT_GE(broken_off, 1);  // the other may hear of it first
}

// Peers hear of it at once, wherever in a step it happens; here by what the rank has told its group.
TEST(AutoEngine, TellsItsPeersThatItsDeviceHasFailed) {
  for (const std::string when : {"begin_step", "finish_step", "scale"}) {
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      HandClock clock(true);
      MadeEngines engines;
      AutoEngineImpl engine(model(), AutoOptions(), &communicator, &clock, emulated_device(&engines));
      CORTADO_RETURN_IF_ERROR(engine.start(std::optional<LauncherPlace>()));
      const bool fails = communicator.rank() == 0;
      const float scale = fails && when == "scale" ? INFINITY : 1;
      std::vector<std::vector<float>> values;
      std::vector<Gradient> gradients;
      for (const EngineTensor& tensor : model()) {
        values.emplace_back(static_cast<std::size_t>(tensor.rows * tensor.cols), 1.0f);
        gradients.push_back({static_cast<std::uint32_t>(gradients.size()), values.back().data()});
      }
      const auto step = [&]() -> Status {
        engines.is_broken = fails && when == "begin_step";
        CORTADO_RETURN_IF_ERROR(engine.begin_step({.device_gradient_scale = &scale}));
        CORTADO_RETURN_IF_ERROR(engine.submit(gradients));
        engines.is_broken = fails && when == "finish_step";
        return engine.finish_step({}).status();
      };
      const Status status = step();
      if (!fails) return {};
      EXPECT_FALSE(status.ok()) << when;
      EXPECT_NE(status.message().find("device"), std::string::npos) << status.message();
      EXPECT_FALSE(communicator.peer_failure().ok()) << when;
      return status;
    });
    EXPECT_FALSE(statuses[0].ok()) << when;
  }
}

TEST(AutoEngine, DoesNotWaitForADeviceWhenAPeerHasFailed) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    MadeEngines engines;
    AutoDevice device = emulated_device(&engines);
    device.copies.queue = std::make_unique<StuckQueue>();
    AutoOptions options;
    options.timeout_s = 30;
    AutoEngineImpl engine(model(), options, &communicator, steady_clock(), std::move(device));
    CORTADO_RETURN_IF_ERROR(engine.start(std::optional<LauncherPlace>()));
    if (communicator.rank() == 1) return make_error(StatusCode::kInternal, "out of coffee");
    std::vector<float> values(40 * 24);
    const Gradient gradient{0, values.data()};
    CORTADO_RETURN_IF_ERROR(engine.begin_step({}));
    CORTADO_RETURN_IF_ERROR(engine.submit({&gradient, 1}));
    return engine.finish_step({}).status();
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kPeerFailed) << statuses[0].to_string();
  EXPECT_NE(statuses[0].message().find("out of coffee"), std::string::npos) << statuses[0].message();
}

TEST(AutoEngine, MeasuresAgainWhenTheLinkChanges) {
  Training run;
  run.options.quality = Quality::kSafe;
  run.steps = 620;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (step < 130) return (what == "dense" ? 500 : 495) * kMs;    // fast link: nothing is gained
    if (step < 340) return (what == "dense" ? 2000 : 1000) * kMs;  // slow
    return (what == "dense" ? 400 : 450) * kMs;                    // and fast again
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "expected 500 ms; dense, and measuring again"));
  EXPECT_TRUE(says(run.news[0], "(2.00x)"));
  EXPECT_EQ(chosen(run.decisions[0]), "dense");  // fell back when the gain was gone
  EXPECT_EQ(run.news[0], run.news[1]);
}

TEST(AutoEngine, ASlowSpellChangesNothing) {
  Training run;
  run.options.quality = Quality::kSafe;
  run.steps = 200;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    const std::int64_t slow = step >= 60 && step < 72 ? 4 : 1;
    return slow * (what == "dense" ? 900 : 400) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_FALSE(says(run.news[0], "measuring again"));
}

// Its payloads grow, say.
TEST(AutoEngine, TriesAgainWhatWasFasterOnTrial) {
  Training run;
  run.steps = 240;
  std::atomic<int> others_tried_again = 0;
  run.step_ns = [&](const std::string& what, std::int64_t step, int) {
    if (what == "cast(fp16)") return (step < 80 ? 400 : 480) * kMs;
    if (step >= 80) others_tried_again += what != "cast(bf16)" && what != "dense";
    return (what == "cast(bf16)" ? 440 : what == "dense" ? 900 : 700) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0],
                   "a step takes 480 ms, expected 400 ms, and others took less on trial: cast(bf16) 440 ms; "
                   "trying them and cast(fp16) again"));
  EXPECT_FALSE(says(run.news[0], "measuring again"));
  EXPECT_EQ(run.news[0], run.news[1]);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
  EXPECT_EQ(others_tried_again, 0);
  for (const AutoCandidate& candidate : run.decisions[0].candidates) EXPECT_GT(candidate.measured_ns, 0);
}

// Dense was faster on trial, too. What the setting owes is paid.
TEST(AutoEngine, GoesBackToDenseThatWasFasterOnTrial) {
  Training run;
  run.steps = 240;
  run.step_ns = [&](const std::string& what, std::int64_t step, int) {
    if (what == "quant(bits=4, round=dead_zone)") return (step < 80 ? 700 : 850) * kMs;
    return (what == "dense" ? 800 : 900) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0],
                   "others took less on trial: dense 800 ms; trying them and quant(bits=4, round=dead_zone) again"));
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_LT(gradients_lost({&run}), 0.02);
  const AutoCandidate& dense = run.decisions[0].candidates[0];
  ASSERT_FALSE(dense.trials_ns.empty());
  for (const std::int64_t trial_ns : dense.trials_ns) EXPECT_EQ(trial_ns, 800 * kMs);
}

// As long as the one that is slower now is still the fastest, it stays: others are as slow, or were slower on trial.
TEST(AutoEngine, TryingAgainMayChangeNothing) {
  for (const bool all_are_slower : {false, true}) {
    Training run;
    run.steps = 400;
    run.step_ns = [&](const std::string& what, std::int64_t step, int) {
      const double slower = step < 80 ? 1 : 1.2;
      if (what == "cast(fp16)") return static_cast<std::int64_t>(slower * 400) * kMs;
      const std::int64_t other = what == "cast(bf16)" && all_are_slower ? 440 : what == "dense" ? 900 : 700;
      return static_cast<std::int64_t>((all_are_slower ? slower : 1.0) * static_cast<double>(other)) * kMs;
    };
    run.go();
    expect_ok(run);
    EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
    const auto tried_again = std::count_if(run.news[0].begin(), run.news[0].end(), [](const std::string& line) {
      return line.find("trying them") != std::string::npos;
    });
    EXPECT_EQ(tried_again, all_are_slower ? 1 : 0);  // what it is now counts from then on
  }
}

// What dense takes now counts, not what it took on trial. So the setting that saves enough now is taken, once.
TEST(AutoEngine, DenseThatBecameSlowerIsLeft) {
  Training run;
  run.options = AutoOptions::parse("auto(quality=safe, measure_s=0, min_gain=0.5)").value();
  run.steps = 240;
  run.step_ns = [&](const std::string& what, std::int64_t step, int) {
    return (what == "dense" ? (step < 80 ? 800 : 1000) : what == "cast(fp16)" ? 480 : 700) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
  EXPECT_EQ(std::count_if(run.news[0].begin(), run.news[0].end(),
                          [](const std::string& line) { return line.find("trying them") != std::string::npos; }),
            1);
}

// Also where steps grow little by little, and what is fastest changes on the way.
TEST(AutoEngine, DriftIsAgainstWhatStepsTookWhenAllWasMeasured) {
  Training run;
  run.steps = 500;
  run.step_ns = [&](const std::string& what, std::int64_t step, int) {
    const double slower = step < 80 ? 1 : step < 160 ? 1.15 : 1.35;
    const std::int64_t own = what == "cast(fp16)" ? 400 : what == "cast(bf16)" ? 440 : what == "dense" ? 900 : 700;
    return static_cast<std::int64_t>(slower * static_cast<double>(own)) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "trying them"));
  EXPECT_TRUE(says(run.news[0], "a step takes 540 ms, expected 400 ms; dense, and measuring again"));
  EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
}

// What the one that ran for long owes is paid in eight parts before anybody is timed.
TEST(AutoEngine, OwesNothingWhenOthersAreTimedAgain) {
  Training run;
  run.options.quality = Quality::kAggressive;
  run.options.max_relative_error = 1;
  run.steps = 240;
  run.step_ns = [&](const std::string& what, std::int64_t step, int) {
    if (what == "sign(scale=mean_abs)") return (step < 80 ? 600 : 720) * kMs;
    return (what == "topk(density=0.01)" ? 660 : 900) * kMs;
  };
  run.go();
  expect_ok(run);
  std::size_t first = 80;  // step of the setting that is tried first
  while (run.insides.at(first) == "sign(scale=mean_abs)") ++first;
  EXPECT_EQ(run.insides.at(first), "topk(density=0.01)");
  std::size_t steps = 0;
  while (run.insides.at(first + steps) == "topk(density=0.01)") ++steps;
  EXPECT_EQ(steps, 8u + 3u);
  EXPECT_EQ(chosen(run.decisions[0]), "topk(density=0.01)");
}

TEST(AutoEngine, StepsBackFromASettingThatLosesTooMuch) {
  // What top-k of noise loses in a step, and owes after some: more than this.
  for (const bool by_residual : {false, true}) {
    Training run;
    run.options.quality = Quality::kAggressive;
    run.options.max_relative_error = by_residual ? 1 : 0.5;
    if (by_residual) run.options.max_residual = 1.5;
    run.steps = 400;
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "dense" ? 900 : what == "topk(density=0.01)" ? 100 : what == "cast(bf16)" ? 500 : 700) * kMs;
    };
    run.go();
    expect_ok(run);
    EXPECT_TRUE(says(run.news[0], "topk(density=0.01) loses too much: relative L2 error 0.9"));
    EXPECT_TRUE(says(run.news[0], by_residual ? "gradients (limit 1.5)" : "(limit 0.5)"));
    EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");  // topk is not used again
    EXPECT_GT(gradients_lost({&run}), 0.5) << "what it owed is dropped, not paid";
  }
}

// fp16 is the fastest, but gradients are such that a step could be lost.
TEST(AutoEngine, DoesNotTryFloat16WhereGradientsAreLarge) {
  const auto fast_fp16 = [](const std::string& what, std::int64_t, int) {
    return (what == "cast(fp16)" ? 100 : what == "cast(bf16)" ? 500 : 900) * kMs;
  };
  for (const bool is_scaled : {true, false}) {  // with a loss scale, which travels too, or by themselves
    Training run;
    run.options.quality = Quality::kSafe;
    run.step_ns = fast_fp16;
    run.gradient_scale = is_scaled ? 4096.0f : 1.0f;
    if (!is_scaled) run.magnitude = [](std::int64_t) { return 1e5f; };
    run.go();
    expect_ok(run);
    EXPECT_EQ(count_of(run, "cast(fp16)"), 0);
    EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
    EXPECT_TRUE(says(run.news[0], "cast(fp16) is left out, of plans too: fp16 ends at 65504"));
    EXPECT_EQ(run.news[1], run.news[0]);
  }
}

// What one rank alone has counts on all of them: else they would go different ways.
TEST(AutoEngine, CastsKeepToWhatTheGradientsOfAnyRankAllow) {
  const auto fast_fp16 = [](const std::string& what, std::int64_t, int) {
    return (what == "cast(fp16)" ? 100 : what == "cast(bf16)" ? 500 : 900) * kMs;
  };
  Training run;
  run.options.quality = Quality::kSafe;
  run.step_ns = fast_fp16;
  run.magnitude_of_rank_1 = [](std::int64_t) { return 1e5f; };
  run.go();
  expect_ok(run);
  EXPECT_EQ(count_of(run, "cast(fp16)"), 0);
  EXPECT_EQ(run.news[1], run.news[0]);
  // On trial, and while it runs.
  for (const std::int64_t from : {0, 100}) {
    run.steps = 400;
    run.magnitude_of_rank_1 = [from](std::int64_t step) { return step < from ? 1.0f : 1e-7f; };
    run.go();
    expect_ok(run);
    EXPECT_TRUE(says(run.news[0], from == 0 ? "cast(fp16) loses too much on trial: " : "cast(fp16) loses too much: "));
    EXPECT_EQ(run.news[1], run.news[0]);
    EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
  }
}

// As little as rounding takes may be too much.
TEST(AutoEngine, CastsOnTrialKeepToTheLimitThatWasAskedFor) {
  Training run;
  run.options.quality = Quality::kSafe;
  run.options.max_relative_error = 1e-5;
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 900 : 100) * kMs; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "cast(bf16) loses too much on trial: relative L2 error 0.00"));
  EXPECT_TRUE(says(run.news[0], "(limit 1e-05)"));
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_TRUE(says(run.news[0], ": what was tried loses too much"));
}

// What is beyond fp16, on either side, is lost for good.
TEST(AutoEngine, ACastThatLosesMoreThanRoundingIsLeft) {
  const auto fast_fp16 = [](const std::string& what, std::int64_t, int) {
    return (what == "cast(fp16)" ? 100 : what == "cast(bf16)" ? 500 : 900) * kMs;
  };
  Training run;
  run.options.quality = Quality::kSafe;
  run.step_ns = fast_fp16;
  run.magnitude = [](std::int64_t) { return 1e-7f; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "cast(fp16) loses too much on trial: relative L2 error 0."));
  EXPECT_TRUE(says(run.news[0], "(limit 0.05)"));
  EXPECT_EQ(count_of(run, "cast(fp16)"), 2 + 3) << "one trial";
  EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");

  // While it runs.
  for (const float later : {1e-7f, 1e6f}) {
    run.steps = 400;
    run.magnitude = [later](std::int64_t step) { return step < 100 ? 1.0f : later; };
    run.go();
    expect_ok(run);
    EXPECT_EQ(run.insides.at(99), "cast(fp16)");
    EXPECT_TRUE(says(run.news[0], "cast(fp16) loses too much: relative L2 error ")) << later;
    EXPECT_TRUE(says(run.news[0], "(limit 0.05)")) << later;
    EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
  }

  // Gradients that are not finite are no cast's fault.
  run.steps = 110;
  run.magnitude = nullptr;
  run.poison = [](const std::string& what, std::int64_t step) { return what.starts_with("cast") && step < 40; };
  run.go();
  expect_ok(run);
  EXPECT_EQ(chosen(run.decisions[0]), "cast(fp16)");
}

// The residual's norm is in gradients: top-k of noise, some steps after its start, owes several of them.
TEST(AutoEngine, TellsTheResidualInGradients) {
  for (const float scale : {1.0f, 1024.0f}) {
    Training run;
    run.options.quality = Quality::kAggressive;
    run.options.max_relative_error = 1;
    run.gradient_scale = scale;
    run.steps = 300;
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "topk(density=0.01)" ? 100 : 900) * kMs;
    };
    run.go();
    expect_ok(run);
    ASSERT_EQ(chosen(run.decisions[0]), "topk(density=0.01)");
    EXPECT_GT(run.decisions[0].residual, 1.0);
    EXPECT_LT(run.decisions[0].residual, 100.0);
    EXPECT_GT(run.decisions[0].relative_error, 0.5);
  }
}

// Saves `cluster` as a file of this machine and of as many ranks as it has.
std::string save_as_of_here(Cluster cluster, const std::string& name) {
  const std::string path = temporary_directory() / name;
  const auto statuses = run_ranks(cluster.topology().world_size(), [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const ClusterIdentity identity,
                             cluster_identity(&communicator, "", std::chrono::seconds(60)));
    if (communicator.rank() != 0) return {};
    cluster.fingerprint = identity.fingerprint;
    cluster.communicator = identity.communicator;
    return save_cluster(cluster, path);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return path;
}

// Two ranks on each of two machines (two_machines()), whose cluster file has the codecs of the quality.
Training on_two_machines(std::int64_t slow_ns, Quality quality) {
  Training run;
  run.options.quality = quality;
  const std::string file = "two_machines_" + std::to_string(slow_ns) + std::string(quality_name(quality)) + ".json";
  run.options.cluster = save_as_of_here(two_machines(slow_ns, auto_codecs(quality)), file);
  run.ranks = 4;
  run.places = {{0, 2}, {1, 2}, {0, 2}, {1, 2}};
  return run;
}

// A slow link between the machines, over which the planner's plan is predicted to be fastest, and is, until everything
// changes after step 100.
Training with_a_plan() {
  Training run = on_two_machines(20'000, Quality::kAggressive);
  run.options.max_relative_error = 1;
  run.steps = 260;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    const bool is_plan = what.starts_with("plan(");
    if (step < 100) return (is_plan ? 300 : what == "dense" ? 900 : 700) * kMs;
    return (what == "dense" ? 1500 : 2000) * kMs;
  };
  return run;
}

// Then half as many steps tell when gradients are ready with no transfers beside them; their results are as exact.
TEST(AutoEngine, HoldsTransfersBackAfterTheDenseStepsAreTimed) {
  for (const bool in_buckets : {true, false}) {
    for (const std::int64_t step_ms : {900, 10}) {
      Training run = with_a_plan();
      run.in_buckets = in_buckets;
      run.polls = true;
      run.steps = 20;
      run.step_ns = [step_ms](const std::string&, std::int64_t, int) { return step_ms * kMs; };
      run.go();
      expect_ok(run);
      const std::ptrdiff_t dense = step_ms == 900 ? 3 : 8, quiet = dense == 3 ? 3 : 7, first = 3 + dense;
      for (std::ptrdiff_t step = 0; step < first + quiet; ++step) {
        EXPECT_EQ(run.insides.at(static_cast<std::size_t>(step)), "dense");
        EXPECT_EQ(run.is_sent_early[static_cast<std::size_t>(step)], step < first) << in_buckets << " step " << step;
      }
      EXPECT_NE(run.insides.at(static_cast<std::size_t>(first + quiet)), "dense");
    }
  }
}

TEST(AutoEngine, RunsThePlannersPlan) {
  Training run = with_a_plan();
  run.save_after = 99;
  run.go();
  expect_ok(run);
  const std::string plan = run.insides.at(99);
  ASSERT_TRUE(plan.starts_with("plan(")) << plan;
  EXPECT_GE(std::count(run.insides.begin(), run.insides.begin() + 100, plan), 50);
  EXPECT_TRUE(says(run.news[0], plan + ": 300 ms a step, predicted "));
  // It has lossy codecs, on the link between machines, and owes something.
  const Plan made = plan_from_json(run.saved[0].spec.substr(run.saved[0].spec.find(": ") + 2)).value();
  EXPECT_TRUE(std::any_of(made.buckets.begin(), made.buckets.end(), [](const PlanBucket& bucket) {
    return bucket.option.encodes() > 0 && !bucket.codec.starts_with("cast");
  })) << run.saved[0].spec;
  EXPECT_TRUE(std::any_of(run.saved.begin(), run.saved.end(), [](const EngineState& state) {
    return std::any_of(state.tensors.begin(), state.tensors.end(),
                       [](const TensorState& of) { return !of.places.empty(); });
  }));
  // What it owed was paid after it was left.
  EXPECT_TRUE(run.decisions[0].decided);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_LT(gradients_lost({&run}), 0.02);
}

// Nor do ranks take different levels for theirs.
TEST(AutoEngine, DamageToWhereRanksSitEndsAll) {
  for (std::int64_t gather = 0; gather < 10; ++gather) {
    Training run = on_two_machines(20'000, Quality::kSafe);
    run.damaged_gather = gather;
    run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 400) * kMs; };
    run.go();
    for (const Status& status : run.statuses) EXPECT_FALSE(status.ok()) << gather;
    EXPECT_EQ(run.statuses[1].code(), StatusCode::kCorruptData) << gather << ": " << run.statuses[1].to_string();
  }
}

// A plan of casts keeps to the same limits as these, and goes by one name whichever it is.
TEST(AutoEngine, APlanOfCastsThatLosesTooMuchIsGivenUp) {
  Training run = on_two_machines(20'000, Quality::kSafe);
  run.options.max_relative_error = 1e-5;
  run.steps = 120;
  run.save_after = 119;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what.starts_with("plan(") ? 300 : what == "dense" ? 500 : 2000) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(std::any_of(run.news[0].begin(), run.news[0].end(), [](const std::string& line) {
    return line.find("plan(hash=") != std::string::npos && line.find("loses too much on trial") != std::string::npos &&
           line.find("(limit 1e-05)") != std::string::npos;
  }));
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  EXPECT_NE(run.saved[0].spec.find(", not plan"), std::string::npos) << run.saved[0].spec;
  Training after = run;
  after.load = run.saved;
  after.save_after = -1;
  after.go();
  expect_ok(after);
  EXPECT_EQ(after.insides.at(0), "dense");
}

// Gradients get sparser while settings are tried, and payloads that vary get smaller: what is predicted of a setting is
// of the last step before its trial.
TEST(AutoEngine, PredictsFromTheGradientsBeforeATrial) {
  const auto run_with = [&](std::int64_t shrinks_from, std::int64_t is_zero_from) {
    Training run = on_two_machines(20'000, Quality::kBalanced);
    std::vector<std::string> codecs = auto_codecs(Quality::kBalanced);  // of those that vary in size only compso's
    std::erase_if(codecs, [](const std::string& codec) { return codec.find("| rans") != std::string::npos; });
    run.options.cluster = save_as_of_here(two_machines(20'000, codecs), "two_machines_compso.json");
    run.step_ns = [](const std::string& what, std::int64_t, int) {
      return (what == "dense" ? 900 : what.starts_with("compso") ? 300 : 700) * kMs;
    };
    run.in_buckets = false;
    run.first_ready_ns = [](const std::string&, std::int64_t) { return 100 * kMs; };  // the machine's speed stays
    run.shrinks_from = shrinks_from;
    run.is_zero_from = is_zero_from;
    run.go();
    expect_ok(run);
    EXPECT_TRUE(run.decisions[0].decided);
    return run;
  };
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  const Training same = run_with(kNever, kNever);
  const auto first_on_trial = std::find_if(same.insides.begin(), same.insides.end(),
                                           [](const std::string& inside) { return inside != "dense"; });
  ASSERT_NE(first_on_trial, same.insides.end());
  EXPECT_FALSE(first_on_trial->starts_with("compso")) << "it comes right after the dense steps";
  const std::int64_t first_step = first_on_trial - same.insides.begin();
  const Training shrunk = run_with(first_step, kNever);

  const std::vector<AutoCandidate>& candidates = same.decisions[0].candidates;
  std::size_t smaller = 0;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const std::vector<AutoCandidate>& again = shrunk.decisions[rank].candidates;
    ASSERT_EQ(again.size(), candidates.size());
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      ASSERT_EQ(again[c].label, candidates[c].label);
      if (candidates[c].label.starts_with("compso")) {
        ASSERT_GT(again[c].simulated_ns, 0);
        EXPECT_LT(again[c].simulated_ns, candidates[c].simulated_ns * 9 / 10);
        ++smaller;
      } else {
        EXPECT_EQ(again[c].simulated_ns, candidates[c].simulated_ns) << candidates[c].label;
      }
    }
  }
  EXPECT_EQ(smaller, 4u);

  // Zeros tell nothing: what the dense steps have shown stays.
  const Training ends = run_with(kNever, first_step);
  const std::vector<AutoCandidate>& at_last = ends.decisions[0].candidates;
  const auto is_compso = [](const AutoCandidate& of) { return of.label.starts_with("compso"); };
  const auto known = std::find_if(at_last.begin(), at_last.end(), is_compso);
  const auto of_same = std::find_if(candidates.begin(), candidates.end(), is_compso);
  ASSERT_NE(known, at_last.end());
  EXPECT_NEAR(static_cast<double>(known->simulated_ns), static_cast<double>(of_same->simulated_ns), 1e6);
}

// An exchange waits for the last rank, whichever that is.
TEST(AutoEngine, PredictsForTheRankWhoseGradientsAreLast) {
  const auto predicted_with = [&](int late_rank) {
    Training run = on_two_machines(2000, Quality::kBalanced);
    run.step_ns = [late_rank](const std::string& what, std::int64_t, int rank) {
      return (what == "dense" ? 100 : 90) * kMs + (rank == late_rank ? 20 * kMs : 0);
    };
    run.in_buckets = false;
    run.steps = 600;  // until all is decided
    run.first_ready_ns = [](const std::string&, std::int64_t) { return 50 * kMs; };
    run.go();
    expect_ok(run);
    std::map<std::string, std::int64_t> predicted;
    for (const AutoCandidate& candidate : run.decisions[0].candidates) {
      const bool was_tried = candidate.measured_ns >= 0 && candidate.label != "dense";
      EXPECT_EQ(candidate.simulated_ns >= 0, was_tried) << candidate.label;
      const std::int64_t ns = was_tried ? candidate.simulated_ns : candidate.predicted_ns;
      if (!candidate.label.starts_with("plan(")) predicted[candidate.label] = ns;
    }
    return predicted;
  };
  const std::map<std::string, std::int64_t> none = predicted_with(-1), first = predicted_with(0),
                                            last = predicted_with(3);
  EXPECT_EQ(first, last);
  ASSERT_EQ(none.size(), last.size());
  for (const auto& [label, predicted_ns] : none) EXPECT_EQ(last.at(label) - predicted_ns, 20 * kMs) << label;
}

// Of three steps without transfers, whatever disturbs one of the others.
TEST(AutoEngine, PredictsFromTheStepInTheMiddle) {
  const auto predicted_with = [&](std::vector<std::int64_t> quiet_ms) {
    Training run = on_two_machines(2000, Quality::kBalanced);
    run.step_ns = [quiet_ms](const std::string& what, std::int64_t step, int) {
      const std::int64_t quiet = step - 6;  // behind three steps that do not count and three dense ones
      return (quiet >= 0 && quiet < 3 ? quiet_ms[static_cast<std::size_t>(quiet)] : what == "dense" ? 900 : 800) * kMs;
    };
    run.in_buckets = false;
    run.steps = 300;  // until all is decided
    run.first_ready_ns = [quiet_ms](const std::string&, std::int64_t step) {
      std::vector<std::int64_t> sorted = quiet_ms;
      std::sort(sorted.begin(), sorted.end());
      const std::int64_t quiet = step - 6;
      const bool is_disturbed = quiet >= 0 && quiet < 3 && quiet_ms[static_cast<std::size_t>(quiet)] != sorted[1];
      return (is_disturbed ? 90 : 50) * kMs;
    };
    run.go();
    expect_ok(run);
    EXPECT_TRUE(run.decisions[0].decided);
    return run.decisions[0].candidates.at(1).simulated_ns;
  };
  const std::int64_t middle_ns = predicted_with({500, 500, 500});
  EXPECT_EQ(predicted_with({900, 500, 100}), middle_ns);
  EXPECT_EQ(predicted_with({500, 100, 900}), middle_ns);
  EXPECT_EQ(predicted_with({900, 100, 900}) - middle_ns, 400 * kMs);
}

// The machine was slower in the steps of one setting on trial than in dense steps, and faster in those of another: the
// time until the first gradients tells. Before the steps of each trial that count its setting is predicted for the
// speed of the trial before and the two steps since, and as much longer or shorter as steps of the others were than
// what was simulated of them. `passes`: DDP makes dense steps by itself, which tell nothing then.
void expect_predictions_for_the_speed(bool passes) {
  const std::int64_t dense_ms = passes ? 300 : 900;  // so that it is tried, too
  const auto run_with = [&](const std::function<double(const std::string& what)>& pace) {
    Training run = on_two_machines(2000, Quality::kSafe);
    run.in_buckets = false;
    run.steps = 300;  // until all is decided
    if (passes) run.can_average = always;
    run.step_ns = [pace, dense_ms](const std::string& what, std::int64_t, int) {
      return std::llround(static_cast<double>(what == "dense" ? dense_ms : 300) * pace(what)) * kMs;
    };
    run.first_ready_ns = [pace](const std::string& what, std::int64_t step) {
      return step == 3 ? 250 * kMs : std::llround(100 * pace(what)) * kMs;  // of three dense steps that in the middle
    };
    run.go();
    expect_ok(run);
    return run;
  };
  const auto pace = [](const std::string& what) {
    return what == "cast(bf16)" ? 1.5 : what == "cast(fp16)" ? 0.8 : what == "dense" || what == "passed" ? 1.0 : 1.2;
  };
  const Training steady = run_with([](const std::string&) { return 1.0; }), run = run_with(pace);
  const AutoDecision& decision = run.decisions[0];
  ASSERT_TRUE(decision.decided);
  ASSERT_EQ(decision.candidates.size(), steady.decisions[0].candidates.size());
  // What is to be predicted in each trial: for the pace before it, which before the first is that of the two steps
  // alone. The backward pass of dense steps, and codecs, are as much longer or shorter; transfers are what they were.
  // TrialPredictions is told the same in the same order.
  const std::int64_t steps_of_trial = passes ? 7 : 5;  // two of them do not count
  const double dense_ns = static_cast<double>(dense_ms) * 1e6;
  const std::size_t count = decision.candidates.size();
  TrialPredictions expected(count);
  std::vector<std::int64_t> trials(count, 0);
  double pace_before = 0;
  std::int64_t of_trial = 0, dense_steps = 0;
  for (std::int64_t step = 0; step < decision.step; ++step) {
    const std::string& what = run.insides[static_cast<std::size_t>(step)];
    const bool goes_on = step > 0 && what == run.insides[static_cast<std::size_t>(step) - 1];
    of_trial = goes_on ? of_trial + 1 : 0;
    if (what == "dense" || what == "passed") {
      if (pace_before != 0) pace_before = passes ? 0 : pace(what);
      ++dense_steps;
      continue;
    }
    if (of_trial % steps_of_trial == 0) {
      const auto is_it = [&what](const AutoCandidate& of) { return of.label == what; };
      const auto found = std::find_if(decision.candidates.begin(), decision.candidates.end(), is_it);
      ASSERT_NE(found, decision.candidates.end());
      const auto c = static_cast<std::size_t>(found - decision.candidates.begin());
      if (trials[c]++ == 0) {
        std::vector<std::int64_t> simulated_ns;
        const auto as_dense_ns = static_cast<double>(steady.decisions[0].candidates[c].simulated_ns);
        for (const double p : TrialPredictions::kPaces) {
          simulated_ns.push_back(std::llround(as_dense_ns + dense_ns * (p - 1)));
        }
        expected.set_simulated(static_cast<int>(c), simulated_ns);
      }
      expected.begin_trial(static_cast<int>(c), pace_before == 0 ? pace(what) : pace_before);
      expected.end_trial(static_cast<int>(c), pace(what), found->measured_ns);
    }
    pace_before = pace(what);
  }
  int tried = 0, leaning = 0;
  for (int c = 1; c < static_cast<int>(count); ++c) {
    const AutoCandidate& candidate = decision.candidates[static_cast<std::size_t>(c)];
    ASSERT_EQ(candidate.label, steady.decisions[0].candidates[static_cast<std::size_t>(c)].label);
    ASSERT_EQ(candidate.steps, trials[static_cast<std::size_t>(c)] * (steps_of_trial - 2)) << candidate.label;
    ASSERT_EQ(std::ssize(candidate.trials_ns), trials[static_cast<std::size_t>(c)]) << candidate.label;
    for (const std::int64_t trial_ns : candidate.trials_ns) EXPECT_EQ(trial_ns, candidate.measured_ns);
    if (candidate.measured_ns < 0) continue;
    ++tried;
    const auto expect_near = [&](std::int64_t ns, std::int64_t expected_ns) {
      EXPECT_NEAR(static_cast<double>(ns), static_cast<double>(expected_ns), 6e6) << candidate.label;
    };
    expect_near(candidate.simulated_ns, expected.simulated_ns(c));
    expect_near(candidate.predicted_ns, expected.predicted_ns(c));
    expect_near(candidate.predicted_at_pace_ns, expected.predicted_at_pace_ns(c));
    EXPECT_NEAR(candidate.pace, expected.pace(c), 1e-9) << candidate.label;
    leaning += std::abs(candidate.predicted_ns - candidate.simulated_ns) > 12 * kMs;
    for (const AutoDecision& other : run.decisions) {
      const AutoCandidate& same = other.candidates[static_cast<std::size_t>(c)];
      EXPECT_EQ(same.pace, candidate.pace);
      EXPECT_EQ(same.simulated_ns, candidate.simulated_ns);
      EXPECT_EQ(same.predicted_ns, candidate.predicted_ns);
      EXPECT_EQ(same.predicted_at_pace_ns, candidate.predicted_at_pace_ns);
    }
  }
  EXPECT_GE(*std::max_element(trials.begin(), trials.end()), 2);
  EXPECT_EQ(dense_steps > 12, passes) << "or dense was not tried";
  EXPECT_GE(tried, 2);
  EXPECT_GE(leaning, 1);
  EXPECT_TRUE(says(run.news[0], " at the machine's speed then)")) << run.news[0].back();
}

TEST(AutoEngine, PredictsForTheSpeedOfTheMachine) { expect_predictions_for_the_speed(false); }

TEST(AutoEngine, PredictsForTheSpeedOfTheMachineBehindPassedSteps) { expect_predictions_for_the_speed(true); }

// In a slow spell of the machine, which its prediction knew of, a setting was far behind. As fast as in the dense steps
// it would be the fastest, so it gets another trial.
TEST(AutoEngine, TriesOnceMoreWhatWasSlowWithTheMachine) {
  Training run = on_two_machines(2000, Quality::kSafe);
  run.in_buckets = false;
  run.steps = 120;
  const auto is_slow = [](const std::string& what, std::int64_t step) {
    return what.starts_with("plan(") && step < 14;
  };
  run.step_ns = [is_slow](const std::string& what, std::int64_t step, int) {
    return (what == "dense" ? 900 : what.starts_with("plan(") ? (is_slow(what, step) ? 800 : 400) : 520) * kMs;
  };
  run.first_ready_ns = [is_slow](const std::string& what, std::int64_t step) {
    return (is_slow(what, step) ? 150 : 100) * kMs;
  };
  run.go();
  expect_ok(run);
  const AutoCandidate& plan = run.decisions[0].candidates[1];
  ASSERT_TRUE(plan.label.starts_with("plan("));
  ASSERT_GE(plan.trials_ns.size(), 2u);
  EXPECT_EQ(plan.trials_ns[0], 800 * kMs);
  EXPECT_EQ(plan.trials_ns[1], 400 * kMs);
  EXPECT_TRUE(chosen(run.decisions[0]).starts_with("plan("));
}

TEST(AutoEngine, TriesAPlanAgain) {
  Training run = on_two_machines(2000, Quality::kSafe);
  run.in_buckets = false;
  run.steps = 240;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (what.starts_with("plan(")) return (step < 80 ? 400 : 480) * kMs;
    return (what == "cast(bf16)" ? 440 : what == "dense" ? 900 : 700) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "cast(bf16) 440 ms; trying them and plan("));
  EXPECT_FALSE(says(run.news[0], "left out"));
  EXPECT_EQ(chosen(run.decisions[0]), "cast(bf16)");
}

// What was said of a setting on its first trials does not tell of those that come when it is tried again.
TEST(AutoEngine, SimulatesNothingOfWhatIsTriedAgain) {
  Training run = on_two_machines(2000, Quality::kSafe);
  run.in_buckets = false;
  run.first_ready_ns = [](const std::string&, std::int64_t) { return 100 * kMs; };
  run.steps = 240;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (what == "cast(fp16)") return (step < 80 ? 400 : 480) * kMs;
    return (what == "cast(bf16)" ? 440 : what == "dense" ? 900 : 700) * kMs;
  };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(says(run.news[0], "cast(bf16) 440 ms; trying them and cast(fp16) again"));
  int again = 0, others = 0;
  for (const AutoCandidate& candidate : run.decisions[0].candidates) {
    if (candidate.label == "dense" || candidate.measured_ns < 0) continue;
    EXPECT_GT(candidate.predicted_ns, 0) << candidate.label;
    const bool is_again = candidate.label.starts_with("cast(");
    ++(is_again ? again : others);
    EXPECT_EQ(candidate.simulated_ns > 0, !is_again) << candidate.label;
    EXPECT_EQ(candidate.predicted_at_pace_ns > 0, !is_again) << candidate.label;
    EXPECT_EQ(candidate.pace, is_again ? 0 : 1) << candidate.label;
    ASSERT_FALSE(candidate.trials_ns.empty()) << candidate.label;
    for (const std::int64_t trial_ns : candidate.trials_ns) EXPECT_EQ(trial_ns, candidate.measured_ns);
  }
  EXPECT_EQ(again, 2);
  EXPECT_GE(others, 1);
  EXPECT_EQ(run.decisions[0].candidates[0].measured_ns, 900 * kMs) << "dense is far behind, and not tried again";
}

// What a cluster file says of codecs is of those on the CPU: nothing is left out for it, and nothing planned.
TEST(AutoEngine, PredictsNothingForADevice) {
  Training run = with_a_plan();
  run.steps = 60;
  run.in_buckets = false;
  run.on_device = [](std::size_t rank) { return rank == 1; };
  run.go();
  expect_ok(run);
  ASSERT_EQ(run.decisions[0].candidates.size(), 11u);
  for (const AutoCandidate& candidate : run.decisions[0].candidates) {
    EXPECT_LT(candidate.predicted_ns, 0);
    EXPECT_EQ(candidate.pace, 0);
  }
  EXPECT_NE(run.descriptions[0].find("each of 10 settings"), std::string::npos) << run.descriptions[0];
}

TEST(AutoEngine, PredictsAndPlans) {
  Training run;
  run.steps = 300;
  run.options.measure_s = 0.5;
  run.clock_runs = true;
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 900 : 400) * kMs; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(run.decisions[0].decided);
  EXPECT_GE(run.decisions[0].candidates[0].predicted_ns, 0);
}

// Ranks that the launcher has not placed machine by machine, and groups of some ranks only: training goes on.
TEST(AutoEngine, AnyPlacementOfRanksTrains) {
  struct Case {
    std::vector<LauncherPlace> places;
    std::string note;
  };
  for (const Case& of : {Case{{{0, 2}, {1, 2}, {0, 1}}, "rank 0 shares its machine with 2 ranks in all, rank 2 with 1"},
                         Case{{{1, 4}, {3, 4}}, "rank 0 is number 1 of 4 on its machine, expected 0"},
                         Case{{{0, 4}, {1, 4}}, "2 ranks can't be divided among machines of 4 each"}}) {
    Training run;
    run.ranks = static_cast<int>(of.places.size());
    run.steps = 300;
    run.places = of.places;
    run.options.measure_s = 0.2;
    run.clock_runs = true;
    run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 900 : 400) * kMs; };
    run.go();
    expect_ok(run);
    EXPECT_TRUE(run.decisions[0].decided);
    EXPECT_GE(run.decisions[0].candidates[0].predicted_ns, 0);
    for (const std::string& text : run.descriptions) {
      EXPECT_NE(text.find("all links count as one level"), std::string::npos) << text;
      EXPECT_NE(text.find(of.note), std::string::npos) << text;
    }
  }
}

// What engines inside have counted is not lost with them.
TEST(AutoEngine, CountsNonFiniteStepsOfAllSettings) {
  Training run;
  run.options.quality = Quality::kAggressive;
  run.steps = 100;
  std::int64_t compressed_steps = 0;
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
  run.poison = [](const std::string& what, std::int64_t) { return what == "acp(rank=4)"; };
  run.go();
  expect_ok(run);
  for (const AutoCandidate& candidate : run.decisions[0].candidates) {
    if (candidate.label == "acp(rank=4)") compressed_steps = candidate.steps;
  }
  EXPECT_EQ(run.reports[0].non_finite_steps, compressed_steps + 2);  // two go before those that count
  EXPECT_NE(run.reports[0].last_non_finite.find("of acp(rank=4)"), std::string::npos) << run.reports[0].last_non_finite;
}

TEST(AutoEngine, OneRankHasNothingToDecide) {
  Training run;
  run.ranks = 1;
  run.step_ns = [](const std::string&, std::int64_t, int) { return kMs; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(run.decisions[0].decided);
  EXPECT_EQ(run.decisions[0].reason, "one rank: there is nothing to exchange");
}

TEST(AutoEngine, RanksMustAskForTheSame) {
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    AutoOptions options;
    options.quality = communicator.rank() == 0 ? Quality::kSafe : Quality::kBalanced;
    return AutoEngine::create(model(), options, &communicator).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("auto(quality=balanced)"), std::string::npos) << status.message();
  }
}

TEST(AutoEngine, AClusterFileOfAnotherMachineIsRefused) {
  const std::string path = temporary_directory() / "cluster.json";
  Cluster cluster;
  const auto calibrated = run_ranks(2, [&](Communicator& communicator) -> Status {
    Result<Cluster> measured =
        calibrate(&communicator, {.codecs = {"cast(bf16)"}, .budget_s = 0.2, .max_bytes = 65536, .max_elems = 4096});
    if (communicator.rank() == 0 && measured.ok()) cluster = measured.value();
    return measured.status();
  });
  for (const Status& status : calibrated) ASSERT_TRUE(status.ok()) << status.to_string();
  const auto create = [&] {
    return run_ranks(2, [&](Communicator& communicator) -> Status {
      AutoOptions options = AutoOptions::parse("auto(cluster=" + path + ")").value();
      return AutoEngine::create(model(), options, &communicator).status();
    });
  };
  ASSERT_TRUE(save_cluster(cluster, path).ok());
  for (const Status& status : create()) EXPECT_TRUE(status.ok()) << status.to_string();
  cluster.communicator = "mpi";
  ASSERT_TRUE(save_cluster(cluster, path).ok());
  for (const Status& status : create()) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("$.host.communicator: expected \"local\", as here, got \"mpi\""), std::string::npos)
        << status.message();
  }
  for (const Status& status : create()) EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
}

TEST(AutoEngine, SaysAtTheStartWhatItWillDo) {
  const auto describe = [&](const std::string& spec) {
    Training run;
    run.options = AutoOptions::parse(spec).value();
    run.ranks = 4;
    run.steps = 0;
    run.places = {{0, 2}, {1, 2}, {0, 2}, {1, 2}};
    run.go();
    expect_ok(run);
    return run.descriptions[0];
  };
  const std::string begin = "cortado: auto(quality=safe) over local, world size 4: dense for the first ";
  const std::string safe = "; may use none, cast(bf16), cast(fp16)";
  const std::string settings = "then at most 3 settings for some steps each" + safe + ", a plan";
  // Three that do not count, three to eight dense ones and, for predictions, as many more, of an odd number.
  EXPECT_EQ(describe("auto(safe)"), begin + "9 to 18 steps, then about 8 s for links and codecs, " + settings);
  EXPECT_EQ(describe("auto(safe, measure_s=0)"),
            begin + "6 to 11 steps, then each of 2 settings for some steps" + safe);
  EXPECT_NE(describe("auto(aggressive, measure_s=0)").find("then each of 10 settings for some steps; may"),
            std::string::npos);
  EXPECT_NE(describe("auto(aggressive, measure_s=2)")
                .find("then about 2 s for links and codecs, then at most 5 settings for some steps each (all 10 where "
                      "nothing can be predicted); may"),
            std::string::npos);
  const std::string path = save_as_of_here(two_machines(10, {}), "described.json");
  EXPECT_EQ(describe("auto(safe, cluster=" + path + ")"), begin + "9 to 18 steps, " + settings);
}

TEST(AutoEngine, ResumesFromACheckpoint) {
  std::vector<EngineState> states(2);
  const auto fast_topk = [](const std::string& what, std::int64_t, int) {
    return (what == "topk(density=0.01)" ? 100 : 900) * kMs;
  };
  Training run;
  run.options.quality = Quality::kAggressive;
  run.steps = 100;
  run.step_ns = fast_topk;
  run.after_step = [&](AutoEngine& engine, std::int64_t step) {
    if (step != 99) return;
    const EngineState state = engine.save_state().value();
    states[static_cast<std::size_t>(state.rank)] = state;
  };
  run.go();
  expect_ok(run);
  ASSERT_EQ(states[0].spec, "auto, step 100: topk(density=0.01)");
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    HandClock clock;
    Result<std::unique_ptr<AutoEngine>> made = AutoEngine::create(model(), run.options, &communicator, &clock);
    if (!made.ok()) return made.status();
    const EngineState& saved = states[static_cast<std::size_t>(communicator.rank())];
    const Result<std::string> loaded = made.value()->load_state(saved);
    if (!loaded.ok()) return loaded.status();
    EXPECT_EQ(loaded.value(), "");
    EXPECT_EQ(made.value()->summary(), "auto(quality=aggressive): topk(density=0.01)");
    const EngineState again = made.value()->save_state().value();
    EXPECT_EQ(again.tensors.size(), saved.tensors.size());
    for (std::size_t t = 0; t < std::min(again.tensors.size(), saved.tensors.size()); ++t) {
      EXPECT_EQ(again.tensors[t].residual, saved.tensors[t].residual);
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Found in review: each engine inside counted from 0, so that errors and events named steps that were long past.
TEST(AutoEngine, StepsAreNumberedThroughAllEnginesInside) {
  const std::vector<std::vector<std::byte>> parameters = {{std::byte{1}, std::byte{2}}, {std::byte{1}, std::byte{3}}};
  Training run;
  run.ranks = 2;
  run.options.quality = Quality::kAggressive;
  run.steps = 100;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "topk(density=0.01)" ? 100 : 900) * kMs;
  };
  run.poison = [](const std::string&, std::int64_t step) { return step == 95; };
  run.save_after = 99;
  std::atomic<int> rank = 0;  // of the thread that asks
  std::vector<Status> found(2);
  std::mutex mutex;
  run.after_step = [&](AutoEngine& engine, std::int64_t step) {
    if (step != 4 && step != 90) return;
    static thread_local int own = -1;
    if (own < 0) own = rank++;
    const bool differs = step == 90;
    const ReplicaTensor tensor{"weight", parameters[differs ? static_cast<std::size_t>(own) : 0]};
    const Status status = engine.check_replicas(std::span(&tensor, 1));
    const std::lock_guard lock(mutex);
    found[static_cast<std::size_t>(own)] = status;
  };
  run.go();
  expect_ok(run);
  for (const Status& status : found) {
    EXPECT_TRUE(status.message().starts_with("before step 91 replicas differ: ")) << status.message();
    EXPECT_TRUE(status.message().ends_with("all were equal before step 5")) << status.message();
  }
  EXPECT_TRUE(run.reports[0].last_non_finite.starts_with("step 95: ")) << run.reports[0].last_non_finite;

  Training after = run;
  after.first_step = 100;
  after.steps = 10;
  after.load = run.saved;
  after.after_step = nullptr;
  after.poison = [](const std::string&, std::int64_t step) { return step == 103; };
  after.go();
  expect_ok(after);
  EXPECT_TRUE(after.reports[0].last_non_finite.starts_with("step 103: ")) << after.reports[0].last_non_finite;
}

// Steps that the caller makes by itself count for the engine that goes on after them.
TEST(AutoEngine, StepsAreNumberedThroughPassedOnes) {
  Training run;
  run.in_buckets = false;
  run.steps = 200;
  run.can_average = always;
  run.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (step < 100) return (what == "dense" || what == "passed" ? 500 : 800) * kMs;
    return 2000 * kMs;  // the link is slower now
  };
  std::atomic<std::int64_t> first_poisoned = -1;  // every rank asks, and any may be the first
  run.poison = [&first_poisoned](const std::string& what, std::int64_t step) {
    if (step < 100 || what != "dense") return false;
    std::int64_t first = -1;
    return first_poisoned.compare_exchange_strong(first, step) || first == step;
  };
  run.go();
  expect_ok(run);
  const std::int64_t poisoned = first_poisoned;
  ASSERT_GT(poisoned, 100);
  EXPECT_EQ(run.insides.at(static_cast<std::size_t>(poisoned) - 1), "passed");
  EXPECT_TRUE(run.reports[0].last_non_finite.starts_with("step " + std::to_string(poisoned) + ": "))
      << run.reports[0].last_non_finite;
}

// The run again, in two parts with a checkpoint between them.
std::pair<Training, Training> with_checkpoint(const Training& whole, std::int64_t after_step) {
  Training before = whole;
  before.steps = after_step + 1;
  before.save_after = after_step;
  before.go();
  expect_ok(before);
  Training after = whole;
  after.first_step = after_step + 1;
  after.load = before.saved;
  after.go();
  expect_ok(after);
  return {std::move(before), std::move(after)};
}

// A state may be taken after any step: of a setting on trial too.
TEST(AutoEngine, ADenseStateLoadsWhetherBuffersAreSummedOrNot) {
  for (const bool in_buckets : {true, false}) {
    Training first;
    first.in_buckets = in_buckets;
    first.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
    first.save_after = first.steps - 1;
    first.go();
    expect_ok(first);
    ASSERT_EQ(first.saved[0].spec, "auto, step 110: none");
    Training second = first;
    second.in_buckets = !in_buckets;
    second.load = first.saved;
    second.save_after = -1;
    second.go();
    expect_ok(second);
    EXPECT_TRUE(second.decisions[0].decided);
    EXPECT_EQ(second.insides[0], "dense") << "no trial";

    // Of what ranks have saved at different times.
    second.load[1].spec = "auto, step 9, measuring: none";
    second.go();
    for (const Status& status : second.statuses) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch);
      EXPECT_NE(status.message().find("ranks differ in the state to load"), std::string::npos) << status.to_string();
    }
    second.load[1].spec = second.load[0].spec;

    for (EngineState& state : second.load) state.rank = 0;
    second.go();
    EXPECT_NE(second.statuses[1].message().find("this is the state of rank 0, here is rank 1"), std::string::npos)
        << second.statuses[1].to_string();
    EXPECT_EQ(second.statuses[0].code(), StatusCode::kMismatch);
  }
}

// Has tried what `aggressive` allows; nothing of it is faster.
Training that_decides_for_dense() {
  Training run;
  run.options.quality = Quality::kAggressive;
  run.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
  run.go();
  expect_ok(run);
  EXPECT_TRUE(run.decisions[0].decided);
  EXPECT_EQ(chosen(run.decisions[0]), "dense");
  return run;
}

// Found in review: with what a trial owes they came in one step; and two counted as paid where a tensor was submitted
// twice.
TEST(AutoEngine, WhatIsOwedInPartsStaysInParts) {
  const Training whole = that_decides_for_dense();
  const auto trial = std::find(whole.insides.begin(), whole.insides.end(), "topk(density=0.01)");
  ASSERT_NE(trial, whole.insides.end());
  Training before = whole;
  before.steps = trial - whole.insides.begin() + 3;
  before.save_after = before.steps - 1;
  before.go();
  expect_ok(before);
  Training after = whole;
  after.first_step = before.steps;
  after.steps = 1;
  after.load = before.saved;
  after.save_after = after.first_step;
  after.before_finish = [](AutoEngine& engine, const MadeEngines&) -> Status {
    std::vector<float> again(48 * 33, 1.0f);
    const Gradient gradient{1, again.data()};
    EXPECT_NE(engine.submit({&gradient, 1}).message().find("\"first.weight\" was submitted twice"), std::string::npos);
    return {};
  };
  for (EngineState& state : after.load) {
    const auto owes = std::find_if(state.tensors.begin(), state.tensors.end(),
                                   [](const auto& of) { return of.name == "first.weight"; });
    ASSERT_NE(owes, state.tensors.end());
    ASSERT_FALSE(owes->residual.empty());
    owes->places.push_back({.name = "auto", .begin = 8, .values = std::vector<float>(48 * 33, 1.0f)});
  }
  after.go();
  expect_ok(after);
  const auto& tensors = after.saved[0].tensors;
  const auto owes =
      std::find_if(tensors.begin(), tensors.end(), [](const auto& of) { return of.name == "first.weight"; });
  ASSERT_NE(owes, tensors.end());
  ASSERT_EQ(owes->places.size(), 1u);
  EXPECT_EQ(owes->places[0].begin, 7) << "one of eight parts is paid";

  // A step with Inf in a tensor that is owed nothing is skipped by callers that skip any.
  after.poison = [](const std::string&, std::int64_t) { return true; };
  after.poisoned_tensor = 2;
  after.go();
  expect_ok(after);
  for (const TensorState& tensor : after.saved[0].tensors) {
    EXPECT_NE(tensor.name, "first.bias");
    EXPECT_TRUE(tensor.name != "first.weight" || tensor.places.at(0).begin == 8);
  }
}

// What a setting owed is due in the first step of the next one. Callers skip a step that is not finite, and the engine
// takes back what it changed: from gradients that were added to, whether or not DDP has its own beside them.
TEST(AutoEngine, NothingIsLostByANonFiniteStepThatPaysDebts) {
  const Training whole = that_decides_for_dense();
  std::set<std::string> poisoned;
  for (std::size_t at = 1; at < static_cast<std::size_t>(whole.decisions[0].step); ++at) {
    if (whole.insides[at] == whole.insides[at - 1]) continue;
    for (const bool keeps : {false, true}) {
      Training run = whole;
      run.keeps_gradients = keeps;
      run.poison = [at](const std::string&, std::int64_t step) { return step == static_cast<std::int64_t>(at); };
      run.go();
      expect_ok(run);
      EXPECT_EQ(chosen(run.decisions[0]), "dense");
      EXPECT_LT(gradients_lost({&run}), 0.02)
          << whole.insides[at] << " behind " << whole.insides[at - 1] << ", " << (keeps ? "kept" : "not kept");
      poisoned.insert(run.insides[at]);
    }
  }
  EXPECT_GT(poisoned.size(), 3u) << "settings that were poisoned";
}

TEST(AutoEngine, NothingIsLostByACheckpointDuringTrials) {
  const Training whole = that_decides_for_dense();
  for (std::int64_t at = 5; at <= whole.decisions[0].step; at += 3) {
    const auto [before, after] = with_checkpoint(whole, at);
    EXPECT_EQ(chosen(after.decisions[0]), "dense");
    EXPECT_LT(gradients_lost({&before, &after}), 0.02) << "saved after step " << at << ": " << before.saved[0].spec;
  }
}

// Nor while what a setting owed is being paid, in pieces.
TEST(AutoEngine, NothingIsLostByACheckpointWhileDebtsArePaid) {
  Training whole;
  whole.options.quality = Quality::kAggressive;
  whole.options.max_relative_error = 1;
  whole.steps = 180;
  whole.step_ns = [](const std::string& what, std::int64_t step, int) {
    if (step < 80) return (what == "topk(density=0.01)" ? 600 : 900) * kMs;
    return (what == "dense" ? 1800 : 2700) * kMs;  // drifts: dense, measured again, and faster now
  };
  whole.go();
  expect_ok(whole);
  std::int64_t leaves_topk = 80;  // the last step of it
  while (whole.insides.at(static_cast<std::size_t>(leaves_topk + 1)) == "topk(density=0.01)") ++leaves_topk;
  ASSERT_EQ(whole.insides.at(80), "topk(density=0.01)");
  int within_debts = 0;
  for (std::int64_t at = leaves_topk; at < leaves_topk + 10; ++at) {
    const auto [before, after] = with_checkpoint(whole, at);
    EXPECT_EQ(chosen(after.decisions[0]), "dense");
    EXPECT_LT(gradients_lost({&before, &after}), 0.02) << "saved after step " << at << ": " << before.saved[0].spec;
    bool owes = false;
    for (const TensorState& tensor : before.saved[0].tensors) {
      for (const PlaceState& place : tensor.places) owes |= place.name == "auto" && place.begin < 8;
    }
    within_debts += owes;
  }
  EXPECT_EQ(within_debts, 7);  // all pieces but the first
}

// Nor by one while a plan is on trial, or has been running.
TEST(AutoEngine, NothingIsLostByACheckpointOfAPlan) {
  Training whole = with_a_plan();
  whole.go();
  expect_ok(whole);
  const auto first_of_plan = std::find(whole.insides.begin(), whole.insides.end(), whole.insides.at(99));
  for (const std::int64_t at : {first_of_plan - whole.insides.begin() + 2, std::ptrdiff_t{70}}) {
    const auto [before, after] = with_checkpoint(whole, at);
    EXPECT_NE(before.saved[0].spec.find("{"), std::string::npos) << before.saved[0].spec;
    EXPECT_EQ(after.insides.at(0), at < 50 ? "dense" : whole.insides.at(99));
    EXPECT_EQ(chosen(after.decisions[0]), "dense");
    EXPECT_LT(gradients_lost({&before, &after}), 0.02) << "saved after step " << at;
  }
}

// A state of topk(density=0.01), which only `aggressive` allows.
Training running_topk() {
  Training run;
  run.options.quality = Quality::kAggressive;
  run.options.max_relative_error = 1;
  run.steps = 100;
  run.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "topk(density=0.01)" ? 100 : what == "dense" ? 800 : 900) * kMs;
  };
  run.save_after = 99;
  run.go();
  expect_ok(run);
  EXPECT_EQ(run.saved[0].spec, "auto, step 100: topk(density=0.01)");
  return run;
}

TEST(AutoEngine, AStateOfAnotherQualityDoesNotRun) {
  const Training before = running_topk();
  Training after = before;
  after.options.quality = Quality::kSafe;
  after.first_step = 100;
  after.load = before.saved;
  after.save_after = 100;
  std::atomic<int> steps_of_topk = 0;
  after.step_ns = [&](const std::string& what, std::int64_t, int) {
    steps_of_topk += what == "topk(density=0.01)";
    return (what == "dense" ? 500 : 800) * kMs;
  };
  after.go();
  expect_ok(after);
  EXPECT_EQ(after.loaded[0],
            "the state was saved with topk(density=0.01), which is not allowed at quality=safe: auto measures again");
  EXPECT_EQ(steps_of_topk, 0);
  int in_parts = 0;  // it had run for long
  for (const TensorState& tensor : after.saved[0].tensors) {
    for (const PlaceState& place : tensor.places) in_parts += place.name == "auto" && place.begin == Debts::kPieces - 1;
  }
  EXPECT_GT(in_parts, 0);
  EXPECT_TRUE(after.decisions[0].decided);
  EXPECT_EQ(after.decisions[0].candidates.size(), 3u);
  EXPECT_LT(gradients_lost({&before, &after}), 0.02);  // what topk owed is paid
}

// 100 steps, of which the last ran a plan, saved behind that.
Training running_a_plan() {
  Training run = with_a_plan();
  run.steps = 100;
  run.save_after = 99;
  run.go();
  expect_ok(run);
  EXPECT_TRUE(run.insides.at(99).starts_with("plan("));
  return run;
}

// Nor does a plan whose levels are not those of the ranks here; what it owes is paid.
TEST(AutoEngine, APlanForAnotherPlacementOfTheRanksDoesNotRun) {
  const Training before = running_a_plan();
  Training after = before;
  after.options.cluster = "";
  after.places = {};  // all on one level
  after.first_step = 100;
  after.load = before.saved;
  after.save_after = -1;
  after.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
  after.go();
  expect_ok(after);
  EXPECT_EQ(after.loaded[0], "the state was saved with " + before.insides.at(99) +
                                 ", a plan for ranks that sit elsewhere on machines: auto measures again");
  EXPECT_EQ(after.insides.at(0), "dense");
  EXPECT_TRUE(after.decisions[0].decided);
  EXPECT_GT(after.decisions[0].step, 100);
  EXPECT_LT(gradients_lost({&before, &after}), 0.02);
}

TEST(AutoEngine, APlanOfAnotherQualityDoesNotRun) {
  const Training before = running_a_plan();
  Training after = before;
  after.options.quality = Quality::kSafe;
  after.first_step = 100;
  after.load = before.saved;
  after.save_after = -1;
  after.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "dense" ? 500 : 800) * kMs; };
  after.go();
  expect_ok(after);
  EXPECT_EQ(after.loaded[0], "the state was saved with " + before.insides.at(99) +
                                 ", which is not allowed at quality=safe: auto measures again");
  EXPECT_EQ(after.insides.at(0), "dense");
  EXPECT_LT(gradients_lost({&before, &after}), 0.05);  // casts on trial round
}

// What the engine inside has counted is not lost with it, whether auto goes on with a state or measures again.
TEST(AutoEngine, CountsNonFiniteStepsBeforeAStateWasLoaded) {
  for (const Quality quality : {Quality::kAggressive, Quality::kSafe}) {
    const Training before = running_topk();
    Training after = before;
    after.options.quality = quality;
    after.first_step = 100;
    after.load = before.saved;
    after.load_before = 2;
    after.in_buckets = false;  // engines that sum buffers do not look for Inf
    after.poison = [](const std::string&, std::int64_t step) { return step == 101; };
    after.go();
    expect_ok(after);
    EXPECT_EQ(after.reports[0].non_finite_steps, 1);
    EXPECT_NE(after.reports[0].last_non_finite.find("of dense"), std::string::npos) << after.reports[0].last_non_finite;
  }
}

TEST(AutoEngine, AStateOfAnotherNumberOfRanksIsMeasuredAgain) {
  const Training before = running_topk();
  Training after = before;
  after.ranks = 3;
  after.load = before.saved;
  after.step_ns = [](const std::string& what, std::int64_t, int) { return (what == "cast(bf16)" ? 300 : 600) * kMs; };
  // Into a fresh engine, and into one that has decided already.
  for (const std::int64_t load_at : {0, 90}) {
    after.load_before = load_at;
    after.steps = load_at + 90;
    after.go();
    expect_ok(after);
    EXPECT_NE(after.loaded[0].find("saved by 2 ranks and is loaded by 3: auto measures again"), std::string::npos);
    EXPECT_EQ(after.insides.at(static_cast<std::size_t>(load_at)), "dense");
    EXPECT_TRUE(after.decisions[0].decided);
    EXPECT_GT(after.decisions[0].step, load_at);
    EXPECT_EQ(chosen(after.decisions[0]), "cast(bf16)");
  }
}

// What was given up is not taken up again after a checkpoint.
TEST(AutoEngine, ACheckpointKeepsWhatWasGivenUp) {
  Training before;
  before.options.quality = Quality::kAggressive;
  before.options.max_relative_error = 0.5;
  before.steps = 340;
  before.save_after = 339;
  before.step_ns = [](const std::string& what, std::int64_t, int) {
    return (what == "dense" ? 900 : what == "topk(density=0.01)" ? 100 : what == "cast(bf16)" ? 500 : 700) * kMs;
  };
  before.go();
  expect_ok(before);
  ASSERT_EQ(before.saved[0].spec, "auto, step 340, not topk(density=0.01): cast(bf16)");
  Training after = before;
  after.first_step = 340;
  after.steps = 200;
  after.load = before.saved;
  after.save_after = 539;
  std::atomic<int> steps_of_topk = 0;
  after.step_ns = [&](const std::string& what, std::int64_t step, int rank) {
    steps_of_topk += what == "topk(density=0.01)";
    return (step < 380 ? 1 : 2) * before.step_ns(what, step, rank);  // drifts: measured again
  };
  after.go();
  expect_ok(after);
  EXPECT_TRUE(says(after.news[0], "measuring again"));
  EXPECT_EQ(after.saved[0].spec, "auto, step 540, not topk(density=0.01): cast(bf16)");
  EXPECT_EQ(steps_of_topk, 0);
  after.ranks = 3;
  after.go();
  expect_ok(after);
  EXPECT_EQ(after.saved[0].spec, "auto, step 540, not topk(density=0.01): cast(bf16)");
  EXPECT_EQ(steps_of_topk, 0);
}

TEST(AutoEngine, RefusesStatesThatAreNotItsOwn) {
  Training run;
  run.step_ns = [](const std::string&, std::int64_t, int) { return kMs; };
  const auto refused = [&](EngineState state, const std::string& text) {
    state.world_size = 2;
    run.load = {state, state};
    run.load[1].rank = 1;
    run.go();
    for (const Status& status : run.statuses) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch);
      EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    }
  };
  for (const char* spec :
       {"", "none", "auto", "auto topk: none", "automatic: none", "auto, step: none", "auto, step x: none",
        "auto, step -3: none", "auto, step 3x: none", "auto, measured: none"}) {
    refused({.spec = spec, .layout = {}, .tensors = {}}, "this engine of auto");
  }
  // As it was written once.
  refused({.spec = "auto, measuring", .layout = {}, .tensors = {}}, "leave the state out");
  EngineState other{.spec = "auto, measuring: none", .layout = {}, .tensors = {}};
  other.tensors.push_back(
      {.name = "unknown", .residual = {}, .basis = {}, .velocity = {}, .places = {{"auto", 0, {1, 2}}}});
  refused(other, "what \"unknown\" is still owed is of another model");
  other.tensors[0].places = {{"flat", 0, {1, NAN}}};
  refused(other, "\"unknown\": value 1 of the place flat is nan");
}

// One that the engine inside refuses, which is asked last.
TEST(AutoEngine, ARefusedStateChangesNothing) {
  const Training before = running_topk();
  Training run = before;
  run.steps = 5;
  run.first_step = 100;
  run.after_step = [&](AutoEngine& engine, std::int64_t step) {
    if (step != 103) return;
    const std::string text = engine.save_state().value().spec;
    EXPECT_TRUE(text.starts_with("auto, step 4, measuring")) << text;
    EngineState bad = before.saved[static_cast<std::size_t>(engine.trace().rank)];
    for (TensorState& tensor : bad.tensors) {
      if (!tensor.residual.empty()) tensor.residual.pop_back();
    }
    const Result<std::string> loaded = engine.load_state(bad);
    EXPECT_EQ(loaded.status().code(), StatusCode::kMismatch) << loaded.status().to_string();
    EXPECT_EQ(engine.save_state().value().spec, text);
  };
  run.go();
  expect_ok(run);
}

TEST(AutoEngine, LoadingAStateForgetsThatReplicasWereEqual) {
  const Training before = running_topk();
  Training run = before;
  run.steps = 3;
  for (const int ranks : {2, 3}) {
    run.ranks = ranks;
    run.after_step = [&](AutoEngine& engine, std::int64_t step) {
      if (step != 1) return;
      const int rank = engine.trace().rank;
      float parameter = 0;
      const ReplicaTensor tensor{"weight", std::as_bytes(std::span(&parameter, 1))};
      EXPECT_TRUE(engine.check_replicas({&tensor, 1}).ok());
      EXPECT_TRUE(engine.load_state(before.saved[static_cast<std::size_t>(rank % 2)]).ok());
      parameter = static_cast<float>(rank);
      const std::string text = engine.check_replicas({&tensor, 1}).message();
      EXPECT_NE(text.find("replicas differ"), std::string::npos) << text;
      EXPECT_EQ(text.find("all were equal before"), std::string::npos) << text;
    };
    run.go();
    expect_ok(run);
  }
}

TEST(AutoOptions, ReadsAndWrites) {
  const AutoOptions options = AutoOptions::parse("auto(aggressive, cluster=a/b.json, drift=0.5)").value();
  EXPECT_EQ(options.quality, Quality::kAggressive);
  EXPECT_EQ(options.cluster, "a/b.json");
  EXPECT_EQ(options.to_spec(), "auto(quality=aggressive, cluster=a/b.json, drift=0.5)");
  EXPECT_EQ(AutoOptions::parse(options.to_spec()).value().to_spec(), options.to_spec());
  EXPECT_EQ(AutoOptions::parse("auto").value().to_spec(), "auto(quality=balanced)");
  const AutoOptions limits = AutoOptions::parse(
                                 "auto(max_relative_error=0.5, max_residual=7, random_seed=3, "
                                 "min_gain=0.1, measure_s=2, timeout_s=9)")
                                 .value();
  EXPECT_EQ(limits.max_relative_error, 0.5);
  EXPECT_EQ(limits.max_residual, 7);
  EXPECT_EQ(limits.random_seed, 3u);
  EXPECT_EQ(limits.min_gain, 0.1);
  EXPECT_EQ(limits.measure_s, 2);
  EXPECT_EQ(limits.timeout_s, 9);
  // Ranks compare this, and must not differ in what they decide by.
  for (const char* said :
       {"max_relative_error=0.5", "max_residual=7", "random_seed=3", "min_gain=0.1", "measure_s=2"}) {
    EXPECT_NE(limits.to_spec().find(said), std::string::npos) << limits.to_spec();
  }
  const Status wrong = AutoOptions::parse("auto(quality=best)").status();
  EXPECT_EQ(wrong.message(), "auto(quality=best): quality must be safe, balanced or aggressive, got \"best\"");
  EXPECT_FALSE(AutoOptions::parse("auto | quant").ok());
  EXPECT_TRUE(is_auto_spec("auto"));
  EXPECT_TRUE(is_auto_spec(" auto(quality=safe)"));
  EXPECT_FALSE(is_auto_spec("autos"));
  EXPECT_FALSE(is_auto_spec("acp(rank=4)"));
}

TEST(AutoSettings, CanBeMade) {
  for (const AutoSetting& setting : auto_settings()) {
    EXPECT_TRUE(EngineOptions::parse(setting.spec).ok()) << setting.spec;
    EXPECT_FALSE(setting.evidence.empty()) << setting.spec;
  }
}

}  // namespace
}  // namespace cortado

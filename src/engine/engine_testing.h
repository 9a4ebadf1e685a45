// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a small model whose gradients are given, trained through one engine a rank; and what must hold of it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/late_communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/made_up_testing.h"
#include "cortado/engine.h"

namespace cortado {

// The gradients of one rank, one vector a tensor, all float32.
using Gradients = std::vector<std::vector<float>>;

inline std::vector<EngineTensor> small_model() {
  return {{.name = "embedding", .rows = 40, .cols = 24, .is_embedding = true},
          {.name = "first.weight", .rows = 48, .cols = 33},
          {.name = "first.bias", .rows = 1, .cols = 48, .dimensions = 1},
          {.name = "conv.weight", .rows = 20, .cols = 63, .dimensions = 4},
          {.name = "empty", .rows = 0, .cols = 8},
          {.name = "tiny.weight", .rows = 2, .cols = 3},
          {.name = "last.weight", .rows = 17, .cols = 64},
          {.name = "last.bias", .rows = 1, .cols = 2, .dimensions = 1}};
}

inline Gradients made_up_gradients(const std::vector<EngineTensor>& tensors, int rank, std::int64_t step) {
  Gradients gradients;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::vector<float>& values = gradients.emplace_back(static_cast<std::size_t>(tensors[t].rows * tensors[t].cols));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = made_up_value(rank, step, t, i);
  }
  return gradients;
}

// One step; tensors are submitted last to first in two bunches, as a backward pass would.
inline Result<StepOutcome> run_step_at(Engine& engine, const std::vector<void*>& gradients,
                                       const StepContext& context = {}, const LocalGradient& local = {}) {
  if (const Status status = engine.begin_step(context); !status.ok()) return status;
  std::vector<Gradient> bunch;
  for (std::size_t t = gradients.size(); t-- > 0;) {
    bunch.push_back({static_cast<std::uint32_t>(t), gradients[t]});
    if (t != gradients.size() / 2 && t != 0) continue;
    if (const Status status = engine.submit(bunch); !status.ok()) return status;
    bunch.clear();
  }
  return engine.finish_step(local);
}

// Goes one nanosecond forward whenever it is asked. One for each rank.
class CountingClock final : public Clock {
 public:
  std::int64_t now_ns() const override { return ++now_ns_; }

 private:
  mutable std::int64_t now_ns_ = 0;
};

// On success `gradients` holds the mean.
inline Result<StepOutcome> run_step(Engine& engine, Gradients& gradients, const StepContext& context = {},
                                    const LocalGradient& local = {}) {
  std::vector<void*> pointers;
  for (std::vector<float>& values : gradients) pointers.push_back(values.data());
  return run_step_at(engine, pointers, context, local);
}

inline EngineOptions low_rank(EngineOptions::Method method, int rank) {
  EngineOptions options;
  options.method = method;
  options.rank = rank;
  options.start_step = 0;
  options.min_compression_rate = 0;
  options.timeout_s = 20;
  return options;
}

// A codec as it is written, for every matrix.
inline EngineOptions coded(const std::string& spec) {
  EngineOptions options = EngineOptions::parse(spec).value();
  options.start_step = 0;
  options.min_compression_rate = 0;
  if (options.method == EngineOptions::Method::kCodec) options.min_elems = 0;
  options.timeout_s = 20;
  return options;
}

// What every rank delivered in every step, in rank order.
struct History {
  std::vector<std::vector<Gradients>> delivered;  // [rank][step]
  std::vector<std::vector<bool>> finite;          // [rank][step]
  std::vector<EngineState> states;
  std::vector<EngineReport> reports;
  std::vector<std::vector<RecordedCollective>> logs;
};

using MakeEngine = std::function<Result<std::unique_ptr<Engine>>(
    std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator)>;
using RunStep = std::function<Result<StepOutcome>(Engine& engine, Gradients& gradients, const StepContext& context,
                                                  const LocalGradient& local)>;
using MakeGradients = std::function<Gradients(int rank, std::int64_t step)>;

struct Training {
  std::vector<EngineTensor> tensors = small_model();
  EngineOptions options = {};
  int world_size = 3;
  std::int64_t steps = 6;
  MakeGradients gradients = nullptr;
  MakeEngine engine = nullptr;  // Engine::create()
  RunStep run_step = nullptr;   // run_step()
  StepContext context = {};
  std::function<double(std::int64_t step)> scale = [](std::int64_t) { return 1.0; };
  const History* resume_from = nullptr;  // its states are loaded first
  std::int64_t first_step = 0;
  // kSlow: all is on its way until it is waited for. kPrompt: nothing ever is.
  enum class Link { kAsItIs, kSlow, kPrompt };
  Link link = Link::kAsItIs;
};

inline History train(const Training& training) {
  History run;
  run.delivered.resize(training.world_size);
  run.finite.resize(training.world_size);
  run.states.resize(training.world_size);
  run.reports.resize(training.world_size);
  run.logs.resize(training.world_size);
  const std::vector<Status> statuses = run_ranks(training.world_size, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    RecordingCommunicator recording(&communicator);
    SlowCommunicator slow(&recording);
    PromptCommunicator prompt(&recording);
    Communicator* used = &recording;
    if (training.link == Training::Link::kSlow) used = &slow;
    if (training.link == Training::Link::kPrompt) used = &prompt;
    Result<std::unique_ptr<Engine>> made = training.engine ? training.engine(training.tensors, training.options, used)
                                                           : Engine::create(training.tensors, training.options, used);
    if (!made.ok()) return made.status();
    Engine& engine = *made.value();
    if (training.resume_from != nullptr) {
      const std::size_t source = static_cast<std::size_t>(rank) % training.resume_from->states.size();
      const Result<std::string> loaded = engine.load_state(training.resume_from->states[source]);
      if (!loaded.ok()) return loaded.status();
    }
    for (std::int64_t step = training.first_step; step < training.first_step + training.steps; ++step) {
      Gradients gradients =
          training.gradients ? training.gradients(rank, step) : made_up_gradients(training.tensors, rank, step);
      const Gradients kept = gradients;
      StepContext context = training.context;
      context.gradient_scale = training.scale(step);
      const LocalGradient local = [&](std::uint32_t t) { return kept[t].data(); };
      const Result<StepOutcome> outcome = training.run_step ? training.run_step(engine, gradients, context, local)
                                                            : run_step(engine, gradients, context, local);
      if (!outcome.ok()) return outcome.status();
      run.delivered[rank].push_back(std::move(gradients));
      run.finite[rank].push_back(outcome.value().finite);
    }
    Result<EngineState> state = engine.save_state();
    if (!state.ok()) return state.status();
    run.states[rank] = std::move(state).value();
    run.reports[rank] = engine.report();
    run.logs[rank] = recording.log();
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return run;
}

inline bool same_bits(const Gradients& a, const Gradients& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t t = 0; t < a.size(); ++t) {
    if (a[t].size() != b[t].size()) return false;
    if (!a[t].empty() && std::memcmp(a[t].data(), b[t].data(), a[t].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

inline void expect_replicas_agree(const History& run) {
  for (std::size_t rank = 1; rank < run.delivered.size(); ++rank) {
    ASSERT_EQ(run.delivered[rank].size(), run.delivered[0].size());
    EXPECT_EQ(run.logs[rank], run.logs[0]) << "ranks started different collectives";
    for (std::size_t step = 0; step < run.delivered[0].size(); ++step) {
      EXPECT_TRUE(same_bits(run.delivered[rank][step], run.delivered[0][step])) << "rank " << rank << " step " << step;
    }
    for (std::size_t t = 0; t < run.states[0].tensors.size(); ++t) {
      EXPECT_EQ(run.states[rank].tensors[t].basis, run.states[0].tensors[t].basis);
    }
  }
}

inline double squares_of_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return squares;
}

inline std::size_t tensor_index(const std::vector<EngineTensor>& tensors, const std::string& name) {
  for (std::size_t t = 0; t < tensors.size(); ++t)
    if (tensors[t].name == name) return t;
  ADD_FAILURE() << "no tensor " << name;
  return 0;
}

// sum over steps of what was delivered + the mean residual at the end = sum over steps of the mean gradient: nothing is
// lost or counted twice (oracle 3). The bound is relative to the local gradients, whose sum may cancel.
inline void expect_telescoping(const Training& training, const History& run, double bound) {
  const int world_size = training.world_size;
  for (std::size_t t = 0; t < training.tensors.size(); ++t) {
    const std::size_t elems = static_cast<std::size_t>(training.tensors[t].rows * training.tensors[t].cols);
    std::vector<double> got(elems), expected(elems);
    double squares = 0;
    for (std::int64_t step = 0; step < training.steps; ++step) {
      for (int rank = 0; rank < world_size; ++rank) {
        const Gradients local =
            training.gradients ? training.gradients(rank, step) : made_up_gradients(training.tensors, rank, step);
        for (std::size_t i = 0; i < elems; ++i) {
          expected[i] += static_cast<double>(local[t][i]) / world_size;
          squares += static_cast<double>(local[t][i]) * local[t][i] / world_size;
        }
      }
      for (std::size_t i = 0; i < elems; ++i) got[i] += run.delivered[0][step][t][i];
    }
    for (int rank = 0; rank < world_size; ++rank) {
      for (const TensorState& tensor : run.states[rank].tensors) {
        if (tensor.name != training.tensors[t].name) continue;
        for (std::size_t i = 0; i < elems && !tensor.residual.empty(); ++i) got[i] += tensor.residual[i] / world_size;
      }
    }
    if (elems > 0) {
      EXPECT_LT(std::sqrt(squares_of_difference(got, expected) / squares), bound) << training.tensors[t].name;
    }
  }
}

}  // namespace cortado

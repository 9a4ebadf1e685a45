// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <map>

#include "collective/emulated_scheme_device.h"
#include "collective/late_communicator_testing.h"
#include "core/check.h"
#include "core/counting_new.h"
#include "core/finite.h"
#include "core/float16.h"
#include "core/sanitized.h"
#include "cortado/plan.h"
#include "engine/plan_engine_testing.h"

namespace cortado {
namespace {

const Topology kTwoByTwo = {{{"intra", 2}, {"inter", 2}}};
const Topology kTwoByThree = {{{"intra", 2}, {"inter", 3}}};

Gradients zeros_like(const Gradients& gradients) {
  Gradients zeros;
  for (const std::vector<float>& tensor : gradients) zeros.emplace_back(tensor.size());
  return zeros;
}

using Sum = std::vector<std::vector<double>>;

void add(const Gradients& gradients, double factor, Sum* sum) {
  sum->resize(gradients.size());
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    (*sum)[t].resize(gradients[t].size());
    for (std::size_t i = 0; i < gradients[t].size(); ++i) (*sum)[t][i] += factor * static_cast<double>(gradients[t][i]);
  }
}

double largest_difference(const Sum& a, const Sum& b) {
  double largest = 0;
  for (std::size_t t = 0; t < a.size(); ++t) {
    for (std::size_t i = 0; i < a[t].size(); ++i) largest = std::max(largest, std::fabs(a[t][i] - b[t][i]));
  }
  return largest;
}

Sum mean_of_gradients(int ranks, std::int64_t steps) {
  Sum mean;
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) add(made_up_gradients(small_model(), rank, step), 1.0 / ranks, &mean);
  }
  return mean;
}

// All tensors by one option and one codec, with error feedback.
Plan uniform_plan(const Topology& topology, const std::string& codec, const std::string& option) {
  Plan plan = dense_plan(topology);
  for (PlanBucket& bucket : plan.buckets) {
    bucket.codec = codec;
    bucket.error_feedback = true;
    bucket.option = Option::parse(option, topology).value();
  }
  return plan;
}

constexpr const char* kFlatGather = "encode@cpu all_gather@flat decode@cpu";
constexpr const char* kFlatSum = "encode@cpu all_reduce@flat decode@cpu";

// Runs `body` as every rank of the topology; all must end well.
void on_ranks(const Topology& topology, const std::function<Status(Communicator&)>& body) {
  for (const Status& status : run_ranks(topology.world_size(), body)) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(PlanEngine, MixesOptionsAndGivesTheMean) {
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
    for (std::size_t seed = 0; seed < 40; ++seed) {
      const Plan plan = mixed_plan(topology, seed, kLossless);
      SCOPED_TRACE(plan_to_json(plan));
      std::vector<std::vector<Gradients>> delivered(static_cast<std::size_t>(topology.world_size()));
      on_ranks(topology, [&](Communicator& communicator) -> Status {
        CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
        for (std::int64_t step = 0; step < 2; ++step) {
          Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
          CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
          delivered[static_cast<std::size_t>(communicator.rank())].push_back(std::move(gradients));
        }
        return {};
      });
      ASSERT_FALSE(HasFailure());
      for (const std::vector<Gradients>& of_rank : delivered) {
        for (std::size_t step = 0; step < 2; ++step) EXPECT_TRUE(same_bits(of_rank[step], delivered[0][step]));
      }
      Sum got, expected;
      for (const Gradients& step : delivered[0]) add(step, 1, &got);
      EXPECT_LT(largest_difference(got, mean_of_gradients(topology.world_size(), 2)), 1e-5);
    }
  }
}

// Levels of one rank: several ranges have the same ranks, and what goes over any of them has one order on all ranks.
TEST(PlanEngine, RangesOfTheSameRanksShareTheirTurns) {
  for (const Topology& topology : {Topology{{{"intra", 1}, {"inter", 2}}}, Topology{{{"intra", 3}, {"inter", 1}}}}) {
    Plan plan = dense_plan(topology);
    for (std::size_t b = 1; b < plan.buckets.size(); b += 2) {
      plan.buckets[b].option = Option::parse("all_reduce@intra all_reduce@inter", topology).value();
    }
    Sum got;
    on_ranks(topology, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
      for (std::int64_t step = 0; step < 2; ++step) {
        Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
        if (communicator.rank() == 0) add(gradients, 1, &got);
      }
      return {};
    });
    EXPECT_LT(largest_difference(got, mean_of_gradients(topology.world_size(), 2)), 1e-5);
  }
}

// Whatever the place: of a sum over some ranks an error counts for as many gradients.
TEST(PlanEngine, ResidualsAreReportedInUnitsOfGradients) {
  struct Case {
    const char *codec, *option;
    std::map<std::string, double> units;  // by place
  };
  const Case cases[] = {
      {"topk(density=0.1)", "encode@cpu all_gather@flat decode@cpu", {{"flat", 1}}},
      {"randk(density=0.1)", "encode@cpu all_reduce@flat decode@cpu", {{"flat", 4}}},
      {"topk(density=0.1)",
       "encode@cpu all_gather@intra decode@cpu encode@cpu all_gather@inter decode@cpu",
       {{"intra", 1}, {"inter", 2}}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.option);
    Plan plan = dense_plan(kTwoByTwo);
    for (PlanBucket& bucket : plan.buckets) {
      bucket.codec = each.codec;
      bucket.error_feedback = true;
      bucket.option = Option::parse(each.option, kTwoByTwo).value();
    }
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
      Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
      CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
      double squares = 0;
      CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
      for (const TensorState& tensor : state.tensors) {
        for (const PlaceState& place : tensor.places) {
          for (const float value : place.values) squares += std::pow(value * each.units.at(place.name), 2);
        }
      }
      EXPECT_GT(squares, 0);
      EXPECT_NEAR(engine->report().residual_l2, std::sqrt(squares), 1e-5 * std::sqrt(squares));
      return {};
    });
  }
}

// A rank that has not heard the others can't tell what they do.
TEST(PlanEngine, ASwitchThatIsCutOffEndsTheEngine) {
  const Topology alone = {{{"all", 1}}};
  for (const bool switches : {true, false}) {
    LocalGroup group(1);
    LateGather transport(group.communicator(0));
    const auto engine = Engine::create(small_model(), dense_plan(alone), with_timeout(), &transport).value();
    Gradients gradients = made_up_gradients(small_model(), 0, 0);
    ASSERT_TRUE(run_plan_step(*engine, 0, gradients).ok());
    const EngineState state = engine->save_state().value();
    transport.is_late = true;
    const Status status = switches ? engine->switch_plan(dense_plan(alone)) : engine->load_state(state).status();
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
    transport.is_late = false;
    EXPECT_EQ(engine->begin_step({}).code(), StatusCode::kTimeout);
  }
}

// Loss scales that change, several plans: all ranks stay together, and a dense plan at the end owes nothing.
TEST(PlanEngine, SwitchesPlansUnderChangingLossScales) {
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
    const int ranks = topology.world_size();
    for (std::size_t seed = 0; seed < 20; ++seed) {
      std::vector<Sum> delivered(static_cast<std::size_t>(ranks));
      on_ranks(topology, [&](Communicator& communicator) -> Status {
        const int rank = communicator.rank();
        CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), mixed_plan(topology, seed, kLossy),
                                                                   with_timeout(), &communicator));
        for (std::int64_t step = 0; step < 6; ++step) {
          if (step == 2) CORTADO_RETURN_IF_ERROR(engine->switch_plan(mixed_plan(topology, seed + 100, kLossy)));
          if (step == 4) CORTADO_RETURN_IF_ERROR(engine->switch_plan(mixed_plan(topology, seed + 101, kLossy)));
          Gradients gradients = made_up_gradients(small_model(), rank, step);
          CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients, {.gradient_scale = 1.0 + step % 2}).status());
          add(gradients, 1, &delivered[static_cast<std::size_t>(rank)]);
        }
        CORTADO_RETURN_IF_ERROR(engine->switch_plan(dense_plan(topology)));
        Gradients nothing = zeros_like(made_up_gradients(small_model(), rank, 0));
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, nothing).status());
        add(nothing, 1, &delivered[static_cast<std::size_t>(rank)]);
        EXPECT_EQ(engine->report().residual_bytes, 0);
        return {};
      });
      ASSERT_FALSE(HasFailure());
      for (const Sum& of_rank : delivered) EXPECT_EQ(of_rank, delivered[0]);
    }
  }
}

// Whatever a plan has lost is delivered under the next ones; a dense plan behind the `steps` pays all debts. Gradients
// are scaled by `size` and, as the loss, by scale(step).
void expect_debts_are_paid(std::size_t seed, std::int64_t steps, const std::map<std::int64_t, Plan>& switches,
                           float size, const std::function<double(std::int64_t step)>& scale) {
  Sum delivered;
  on_ranks(kTwoByThree, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    Sum own;
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), mixed_plan(kTwoByThree, seed, kLossy),
                                                               with_timeout(), &communicator));
    for (std::int64_t step = 0; step <= steps; ++step) {
      const auto switched = switches.find(step);
      if (switched != switches.end()) CORTADO_RETURN_IF_ERROR(engine->switch_plan(switched->second));
      if (step == steps) CORTADO_RETURN_IF_ERROR(engine->switch_plan(dense_plan(kTwoByThree)));
      Gradients gradients = made_up_gradients(small_model(), rank, step);
      for (std::vector<float>& tensor : gradients) {
        for (float& value : tensor) value *= step < steps ? size * static_cast<float>(scale(step)) : 0.0f;
      }
      CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome,
                               run_plan_step(*engine, rank, gradients, {.gradient_scale = scale(step)}));
      EXPECT_TRUE(outcome.finite) << "step " << step;
      add(gradients, 1 / (scale(step) * static_cast<double>(size)), &own);
    }
    if (rank == 0) delivered = own;
    return {};
  });
  ASSERT_FALSE(testing::Test::HasFailure());
  EXPECT_LT(largest_difference(delivered, mean_of_gradients(6, steps)), 2e-5);
}

TEST(PlanEngine, CarriesResidualsOverFromPlanToPlan) {
  for (std::size_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const Plan next = mixed_plan(kTwoByThree, seed + 100, kLossy);
    expect_debts_are_paid(seed, 6, {{2, next}, {4, next}}, 1, [](std::int64_t) { return 1.0; });
  }
}

// The same where the loss scale, times the number of ranks, is above the largest float; gradients are finite with it.
TEST(PlanEngine, CarriesResidualsOverAtTheLargestLossScales) {
  for (std::size_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    const std::map<std::int64_t, Plan> switches = {{2, mixed_plan(kTwoByThree, seed + 100, kLossy)},
                                                   {5, mixed_plan(kTwoByThree, seed + 101, kLossy)}};
    expect_debts_are_paid(seed, 7, switches, 0x1p-12f,
                          [](std::int64_t step) { return step % 2 == 0 ? 0x1p116 : 0x1p127; });
  }
}

// What the plans before owe is paid by the first step that is finite.
TEST(PlanEngine, ANonFiniteStepBehindASwitchKeepsDebts) {
  for (std::size_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    Sum delivered;
    on_ranks(kTwoByThree, [&](Communicator& communicator) -> Status {
      const int rank = communicator.rank();
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), mixed_plan(kTwoByThree, seed, kLossy),
                                                                 with_timeout(), &communicator));
      Sum own;
      const auto step = [&](Gradients gradients, bool is_finite) -> Status {
        if (!is_finite && rank == 4) gradients[3][5] = std::numeric_limits<float>::infinity();
        CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_plan_step(*engine, rank, gradients));
        EXPECT_EQ(outcome.finite, is_finite);
        if (is_finite) add(gradients, 1, &own);
        return {};
      };
      const auto gradients = [&](std::int64_t at) { return made_up_gradients(small_model(), rank, at); };
      for (std::int64_t at = 0; at < 2; ++at) CORTADO_RETURN_IF_ERROR(step(gradients(at), true));
      CORTADO_RETURN_IF_ERROR(engine->switch_plan(mixed_plan(kTwoByThree, seed + 100, kLossy)));
      CORTADO_RETURN_IF_ERROR(step(gradients(9), false));
      CORTADO_RETURN_IF_ERROR(step(gradients(2), true));
      CORTADO_RETURN_IF_ERROR(engine->switch_plan(dense_plan(kTwoByThree)));
      CORTADO_RETURN_IF_ERROR(step(gradients(9), false));
      CORTADO_RETURN_IF_ERROR(step(zeros_like(gradients(0)), true));
      if (rank == 0) delivered = own;
      return {};
    });
    ASSERT_FALSE(HasFailure());
    EXPECT_LT(largest_difference(delivered, mean_of_gradients(6, 3)), 2e-5);
  }
}

// As EveryMethod.HoldsWhatItOwesToATensorThatNobodyUsed: also where it is encoded twice, and what was carried over.
TEST(PlanEngine, HoldsWhatItOwesToATensorThatNobodyUsed) {
  constexpr const char* kTwice = "encode@cpu all_gather@intra decode@cpu encode@cpu all_gather@inter decode@cpu";
  const std::pair<Plan, Plan> cases[] = {
      {uniform_plan(kTwoByTwo, "topk(density=0.1)", kFlatGather), {}},
      {uniform_plan(kTwoByTwo, "topk(density=0.1)", kTwice), {}},
      {uniform_plan(kTwoByTwo, "quant(bits=8, round=dither)", kTwice), {}},
      {uniform_plan(kTwoByTwo, "randk(density=0.2)", kFlatSum), {}},
      {uniform_plan(kTwoByTwo, "acp(rank=2)", kFlatSum), {}},
      {uniform_plan(kTwoByTwo, "power(rank=2)", kFlatSum), {}},
      {uniform_plan(kTwoByTwo, "topk(density=0.1)", kFlatGather), uniform_plan(kTwoByTwo, "sign", kTwice)},
      {uniform_plan(kTwoByTwo, "topk(density=0.1)", kFlatGather), uniform_plan(kTwoByTwo, "acp(rank=2)", kFlatSum)},
  };
  for (const auto& of_case : cases) {
    const Plan &plan = of_case.first, &next = of_case.second;
    SCOPED_TRACE(plan.buckets[0].codec + ", then " + (next.buckets.empty() ? "the same" : next.buckets[0].codec));
    Sum delivered;
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      const int rank = communicator.rank();
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
      Sum own;
      for (std::int64_t step = 0; step < 9; ++step) {
        if (step == 4 && !next.buckets.empty()) CORTADO_RETURN_IF_ERROR(engine->switch_plan(next));
        Gradients gradients = made_up_gradients(small_model(), rank, step);
        const bool is_unused = step % 3 == 1;
        if (is_unused) std::fill(gradients[1].begin(), gradients[1].end(), 0.0f);
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients, {.holds_zero_gradients = true}).status());
        const auto is_zero = [](float value) { return value == 0.0f; };
        EXPECT_EQ(std::all_of(gradients[1].begin(), gradients[1].end(), is_zero), is_unused) << "step " << step;
        add(gradients, 1, &own);
      }
      CORTADO_RETURN_IF_ERROR(engine->switch_plan(dense_plan(kTwoByTwo)));
      Gradients nothing = zeros_like(made_up_gradients(small_model(), rank, 0));
      CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, nothing).status());
      add(nothing, 1, &own);
      if (rank == 0) delivered = own;
      return {};
    });
    ASSERT_FALSE(HasFailure());
    Sum expected;
    for (std::int64_t step = 0; step < 9; ++step) {
      for (int rank = 0; rank < 4; ++rank) {
        Gradients gradients = made_up_gradients(small_model(), rank, step);
        if (step % 3 == 1) std::fill(gradients[1].begin(), gradients[1].end(), 0.0f);
        add(gradients, 0.25, &expected);
      }
    }
    EXPECT_LT(largest_difference(delivered, expected), 2e-5);
  }
}

// Places that were the same in each step would leave all others behind for ever.
TEST(PlanEngine, RandomPlacesChangeFromStepToStep) {
  const Plan plan = uniform_plan(kTwoByTwo, "randk(density=0.2)", kFlatSum);
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    std::vector<bool> has_arrived(48 * 33);
    for (std::int64_t step = 0; step < 20; ++step) {
      Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
      CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
      for (std::size_t i = 0; i < has_arrived.size(); ++i) has_arrived[i] = has_arrived[i] || gradients[1][i] != 0;
    }
    // Of 1584 values 1 % has not been drawn in 20 steps.
    EXPECT_GT(std::count(has_arrived.begin(), has_arrived.end(), true), 1540);
    return {};
  });
}

// Factors without a residual have no place for what an earlier plan still owes: it waits for the next plan.
TEST(PlanEngine, WhatCannotBeAddedStaysOwed) {
  const auto plan_with = [](const std::string& codec, const std::string& option, bool error_feedback) {
    Plan plan = dense_plan(kTwoByTwo);
    for (PlanBucket& bucket : plan.buckets) {
      bucket.codec = codec;
      bucket.option = Option::parse(option, kTwoByTwo).value();
      bucket.error_feedback = error_feedback;
    }
    return plan;
  };
  const Plan sparse = plan_with("topk(density=0.1)", "encode@cpu all_gather@flat decode@cpu", true);
  const Plan low_rank = plan_with("acp(rank=2)", "encode@cpu all_reduce@flat decode@cpu", false);
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), sparse, with_timeout(), &communicator));
    Sum delivered;
    for (int step = 0; step < 3; ++step) {
      if (step > 0) CORTADO_RETURN_IF_ERROR(engine->switch_plan(step == 1 ? low_rank : dense_plan(kTwoByTwo)));
      Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
      if (step > 0) gradients = zeros_like(gradients);
      CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
      add(gradients, 1, &delivered);
      EXPECT_EQ(largest_difference(delivered, mean_of_gradients(4, 1)) < 1e-5, step == 2);
    }
    return {};
  });
}

// Where factors are summed flat, matrices get the bits that the same codec gives them without a plan.
TEST(PlanEngine, LowRankCodecsKeepTheirBasesFromStepToStep) {
  for (const std::string codec : {"acp(rank=4)", "power(rank=4)"}) {
    Plan plan = dense_plan(kTwoByTwo);
    for (PlanBucket& bucket : plan.buckets) {
      bucket.codec = codec;
      bucket.option = Option::parse("encode@cpu all_reduce@flat decode@cpu", kTwoByTwo).value();
    }
    EngineOptions options = EngineOptions::parse(codec).value();
    options.start_step = 0;
    options.min_compression_rate = 1;
    options.timeout_s = 20;
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      const int rank = communicator.rank();
      CORTADO_ASSIGN_OR_RETURN(const auto planned, Engine::create(small_model(), plan, with_timeout(), &communicator));
      CORTADO_ASSIGN_OR_RETURN(const auto plain, Engine::create(small_model(), options, &communicator));
      for (std::int64_t step = 0; step < 4; ++step) {
        if (step == 2) CORTADO_RETURN_IF_ERROR(planned->switch_plan(plan));
        Gradients got = made_up_gradients(small_model(), rank, step), expected = got;
        CORTADO_RETURN_IF_ERROR(run_plan_step(*planned, rank, got).status());
        CORTADO_RETURN_IF_ERROR(run_step(*plain, expected).status());
        int compressed = 0;
        for (std::size_t t = 0; t < got.size(); ++t) {
          if (!plain->report().tensors[t].compressed) continue;
          ++compressed;
          EXPECT_EQ(got[t], expected[t]) << codec << ", step " << step << ", tensor " << t;
        }
        EXPECT_GT(compressed, 2);
      }
      EXPECT_GT(planned->report().factor_bytes, 0);
      return {};
    });
  }
}

TEST(PlanEngine, ASwitchToTheSamePlanChangesNothing) {
  const Plan plan = mixed_plan(kTwoByTwo, 5, kLossy);
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    std::vector<Gradients> runs[2];
    for (int run = 0; run < 2; ++run) {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
      for (std::int64_t step = 0; step < 4; ++step) {
        if (step == 2 && run == 1) CORTADO_RETURN_IF_ERROR(engine->switch_plan(plan));
        Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
        runs[run].push_back(std::move(gradients));
      }
    }
    for (std::size_t step = 0; step < 4; ++step) EXPECT_TRUE(same_bits(runs[0][step], runs[1][step])) << step;
    return {};
  });
}

// Steps of `plan` behind one with Inf and one with NaN are as if those had not been.
void expect_non_finite_steps_leave_no_trace(const Plan& plan) {
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    std::vector<Gradients> runs[2];
    for (int run = 0; run < 2; ++run) {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
      for (std::int64_t step = 0; step < 3; ++step) {
        if (step == 1 && run == 1) {
          for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
            Gradients gradients = made_up_gradients(small_model(), rank, 9);
            if (rank == 2) gradients[1][17] = bad;
            CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_plan_step(*engine, rank, gradients));
            EXPECT_FALSE(outcome.finite);
            EXPECT_TRUE(
                std::any_of(gradients[1].begin(), gradients[1].end(), [](float v) { return !std::isfinite(v); }));
          }
          EXPECT_EQ(engine->report().non_finite_steps, 2);
          EXPECT_EQ(engine->report().last_non_finite, "step 2: first.weight, in the sum over ranks");
        }
        Gradients gradients = made_up_gradients(small_model(), rank, step);
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
        runs[run].push_back(std::move(gradients));
      }
    }
    for (std::size_t step = 0; step < 3; ++step) EXPECT_TRUE(same_bits(runs[0][step], runs[1][step])) << step;
    return {};
  });
}

TEST(PlanEngine, ANonFiniteStepLeavesNoTrace) {
  expect_non_finite_steps_leave_no_trace(mixed_plan(kTwoByTwo, 3, kLossy));
  expect_non_finite_steps_leave_no_trace(uniform_plan(kTwoByTwo, "acp(rank=2)", kFlatSum));
  expect_non_finite_steps_leave_no_trace(uniform_plan(kTwoByTwo, "power(rank=2)", kFlatSum));
}

// As CodecDtypes.WhatOverflowsOnTheWayBackIsAStepThatNeverWas.
TEST(PlanEngine, WhatOverflowsOnTheWayBackIsANonFiniteStep) {
  const std::vector<EngineTensor> tensors = {{.name = "w", .dtype = DType::kFloat16, .rows = 8, .cols = 8}};
  const auto value = [](std::size_t i) { return (i % 2 == 0 ? 34e3f : -34e3f) + (i / 8 % 2 == 0 ? 3e4f : -3e4f); };
  for (const auto& [codec, option] : {std::pair{"topk(density=0.25)", "encode@cpu all_gather@flat decode@cpu"},
                                      std::pair{"acp(rank=2)", "encode@cpu all_reduce@flat decode@cpu"},
                                      std::pair{"randk(density=0.25)", "encode@cpu all_reduce@flat decode@cpu"}}) {
    SCOPED_TRACE(codec);
    Plan plan = dense_plan(kTwoByTwo);
    plan.buckets.resize(1);
    plan.buckets[0].tensors = {"w"};
    plan.buckets[0].codec = codec;
    plan.buckets[0].option = Option::parse(option, kTwoByTwo).value();
    std::atomic<int> overflows = 0;
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(tensors, plan, with_timeout(), &communicator));
      for (int step = 0; step < 12; ++step) {
        std::vector<std::uint16_t> gradient;
        for (std::size_t i = 0; i < 64; ++i) gradient.push_back(float_to_fp16(value(i)));
        CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_step_at(*engine, {gradient.data()}));
        EXPECT_EQ(outcome.finite, all_finite(gradient.data(), 64, DType::kFloat16)) << "step " << step;
        overflows += outcome.finite ? 0 : 1;
      }
      return {};
    });
    EXPECT_GT(overflows, 0);
  }
}

TEST(PlanEngine, SavedStatesResumeBitForBit) {
  const Plan plan = mixed_plan(kTwoByThree, 8, kLossy);
  on_ranks(kTwoByThree, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    const auto step_with = [&](Engine& engine, std::int64_t step, Gradients* gradients) -> Status {
      *gradients = made_up_gradients(small_model(), rank, step);
      return run_plan_step(engine, rank, *gradients).status();
    };
    CORTADO_ASSIGN_OR_RETURN(const auto first, Engine::create(small_model(), mixed_plan(kTwoByThree, 9, kLossy),
                                                              with_timeout(), &communicator));
    Gradients gradients, again;
    CORTADO_RETURN_IF_ERROR(step_with(*first, 0, &gradients));
    CORTADO_RETURN_IF_ERROR(first->switch_plan(plan));  // so that there is something carried
    CORTADO_ASSIGN_OR_RETURN(const EngineState carried, first->save_state());
    CORTADO_RETURN_IF_ERROR(step_with(*first, 1, &gradients));

    CORTADO_ASSIGN_OR_RETURN(const auto second, Engine::create(small_model(), plan, with_timeout(), &communicator));
    CORTADO_RETURN_IF_ERROR(step_with(*second, 7, &again));
    CORTADO_RETURN_IF_ERROR(second->load_state(carried).status());
    CORTADO_RETURN_IF_ERROR(step_with(*second, 1, &again));
    EXPECT_TRUE(same_bits(gradients, again));

    CORTADO_ASSIGN_OR_RETURN(EngineState state, second->save_state());
    EXPECT_EQ(state.step, 2);
    state.spec = "plan(hash=0, buckets=1)";
    EXPECT_EQ(second->load_state(state).status().code(), StatusCode::kMismatch);

    // What was only looked at leaves nothing behind.
    CORTADO_ASSIGN_OR_RETURN(const auto third, Engine::create(small_model(), plan, with_timeout(), &communicator));
    const std::int64_t held_bytes = third->report().residual_bytes;
    EngineState refused = carried;
    refused.tensors.back().places.push_back({"nowhere", 0, {1.0f}});
    EXPECT_EQ(third->load_state(refused).status().code(), StatusCode::kMismatch);
    EXPECT_EQ(third->report().residual_bytes, held_bytes);
    return {};
  });
}

TEST(PlanEngine, StatesThatAreNotFiniteAreRefusedEverywhere) {
  on_ranks(kTwoByThree, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), mixed_plan(kTwoByThree, 9, kLossy),
                                                               with_timeout(), &communicator));
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
    CORTADO_ASSIGN_OR_RETURN(EngineState state, engine->save_state());
    TensorState& changed = state.tensors.back();
    if (rank == 1) changed.places.at(0).values.at(0) = NAN;
    const Status refused = engine->load_state(state).status();
    EXPECT_EQ(refused.code(), StatusCode::kMismatch);
    const std::string text = "\"" + changed.name + "\": value 0 of the place " + changed.places[0].name + " is nan";
    EXPECT_TRUE(rank != 1 || refused.message().find(text) != std::string::npos) << refused.message();
    return {};
  });
}

// Of parameters that a checkpoint has replaced nothing is known; nor with an engine of one codec.
TEST(PlanEngine, LoadingAStateForgetsThatReplicasWereEqual) {
  for (const bool has_plan : {true, false}) {
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      std::unique_ptr<Engine> engine;
      if (has_plan) {
        CORTADO_ASSIGN_OR_RETURN(engine,
                                 Engine::create(small_model(), dense_plan(kTwoByTwo), with_timeout(), &communicator));
      } else {
        CORTADO_ASSIGN_OR_RETURN(engine, Engine::create(small_model(), coded("sign"), &communicator));
      }
      float parameter = 0;
      const ReplicaTensor tensor{"weight", std::as_bytes(std::span(&parameter, 1))};
      CORTADO_RETURN_IF_ERROR(engine->check_replicas({&tensor, 1}));
      CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
      CORTADO_RETURN_IF_ERROR(engine->load_state(state).status());
      parameter = static_cast<float>(communicator.rank());
      const std::string text = engine->check_replicas({&tensor, 1}).message();
      EXPECT_NE(text.find("replicas differ"), std::string::npos) << text;
      EXPECT_EQ(text.find("all were equal before"), std::string::npos) << text;
      return {};
    });
  }
}

TEST(PlanEngine, StatesWithOtherBasesAreRefusedEverywhere) {
  Plan plan = dense_plan(kTwoByTwo);
  for (PlanBucket& bucket : plan.buckets) {
    bucket.codec = "acp(rank=2)";
    bucket.option = Option::parse("encode@cpu all_reduce@flat decode@cpu", kTwoByTwo).value();
  }
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
    CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
    EXPECT_TRUE(engine->load_state(state).ok());
    EngineState changed = state;
    if (rank == 1) changed.tensors.back().basis[0] += 1.0f;
    EXPECT_EQ(engine->load_state(changed).status().code(), StatusCode::kMismatch) << "another run, saved at this step";
    changed = state;
    if (rank == 1) changed.tensors.pop_back();
    EXPECT_EQ(engine->load_state(changed).status().code(), StatusCode::kMismatch) << "a tensor is missing";
    return {};
  });
}

// ---- what is wrong is said on every rank ---------------------------------------------------------------------------

void expect_error_everywhere(const std::function<Plan(int rank)>& plan_of, StatusCode code, const std::string& text) {
  const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    return Engine::create(small_model(), plan_of(communicator.rank()), with_timeout(), &communicator).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  }
}

TEST(PlanEngine, RanksMustHaveTheSamePlan) {
  const Plan plan = mixed_plan(kTwoByTwo, 1, kLossy);
  expect_error_everywhere(
      [&](int rank) {
        Plan own = plan;
        if (rank == 2) own.buckets[0].codec = "sign(scale=two_means)";
        return own;
      },
      StatusCode::kMismatch, "rank 2 has \"plan(hash=");
}

TEST(PlanEngine, ThePlanMustFitTheModelAndTheRanks) {
  Plan plan = mixed_plan(kTwoByTwo, 1, kLossy);
  plan.buckets[0].tensors[0] = "other.weight";
  expect_error_everywhere(
      [&](int) { return plan; }, StatusCode::kMismatch,
      "the plan is of another model: $.buckets[0].tensors[0]: the model has no tensor \"other.weight\"");
  plan = mixed_plan(kTwoByTwo, 1, kLossy);
  plan.buckets[0].elems.assign(plan.buckets[0].tensors.size(), 7);
  expect_error_everywhere([&](int) { return plan; }, StatusCode::kMismatch,
                          "the plan is of another model: $.buckets[0].elems[0]: \"" + plan.buckets[0].tensors[0] +
                              "\" has 7 elements in the plan, ");
  plan = mixed_plan(kTwoByTwo, 1, kLossy);
  const std::string missing = plan.buckets.back().tensors.back();
  plan.buckets.pop_back();
  expect_error_everywhere([&](int) { return plan; }, StatusCode::kMismatch, "no bucket of it has the tensor");
  expect_error_everywhere([&](int) { return mixed_plan(kTwoByThree, 1, kLossy); }, StatusCode::kMismatch,
                          "the plan is for 6 ranks ($.levels), but 4 take part");
  plan = mixed_plan(kTwoByTwo, 1, {"none"});
  plan.buckets[1].codec = "topk(density=7)";
  expect_error_everywhere([&](int) { return plan; }, StatusCode::kInvalidArgument,
                          "$.buckets[1].codec: topk(density=7)");
}

TEST(PlanEngine, ASwitchThatRanksDisagreeOnChangesNothing) {
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    CORTADO_ASSIGN_OR_RETURN(const auto engine,
                             Engine::create(small_model(), dense_plan(kTwoByTwo), with_timeout(), &communicator));
    const Status status = engine->switch_plan(mixed_plan(kTwoByTwo, rank == 1 ? 1 : 2, kLossy));
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("ranks differ in the plan"), std::string::npos) << status.message();
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
    EXPECT_EQ(engine->switch_plan(mixed_plan(kTwoByThree, 2, kLossy)).code(), StatusCode::kMismatch);
    gradients = made_up_gradients(small_model(), rank, 1);
    return run_plan_step(*engine, rank, gradients).status();
  });
}

// Found in review: that rank kept the old plan, while the others had switched.
TEST(PlanEngine, ASwitchThatOneRankCanNotMakeChangesNothing) {
  class NoSubgroupOfOne final : public PassingCommunicator {
   public:
    using PassingCommunicator::PassingCommunicator;
    Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
      Result<std::unique_ptr<Communicator>> made = inner_->subgroup(ranks);
      if (rank() == 1) return make_error(StatusCode::kUnsupported, "no more connections");
      return made;
    }
  };
  const Topology flat = {{{"all", 4}}};
  on_ranks(flat, [&](Communicator& inner) -> Status {
    NoSubgroupOfOne communicator(&inner);
    const int rank = communicator.rank();
    CORTADO_ASSIGN_OR_RETURN(const auto engine,
                             Engine::create(small_model(), dense_plan(flat), with_timeout(), &communicator));
    const Status status = engine->switch_plan(mixed_plan(kTwoByTwo, 1, kLossy));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
    EXPECT_NE(status.message().find(rank == 1 ? "no more connections" : "rank 1: "), std::string::npos)
        << status.message();
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    return run_plan_step(*engine, rank, gradients).status();
  });
}

TEST(PlanEngine, WhatWasRefusedCanBeSubmittedAgain) {
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    const Plan plan = mixed_plan(kTwoByTwo, 1, kLossy);
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    CORTADO_RETURN_IF_ERROR(engine->begin_step({}));
    const std::vector<Gradient> null = {{0, gradients[0].data()}, {1, nullptr}};
    EXPECT_EQ(engine->submit(null).code(), StatusCode::kInvalidArgument);
    for (std::uint32_t t = 0; t < gradients.size(); ++t) {
      const Gradient gradient{t, gradients[t].data()};
      CORTADO_RETURN_IF_ERROR(engine->submit({&gradient, 1}));
    }
    return engine->finish_step().status();
  });
}

TEST(PlanEngine, DestroyedWithinAStepItTellsItsPeers) {
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    const Plan plan = dense_plan({{{"all", 2}}});
    CORTADO_ASSIGN_OR_RETURN(auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    if (communicator.rank() == 1) {
      CORTADO_RETURN_IF_ERROR(engine->begin_step({}));
      engine.reset();
      return {};
    }
    Gradients gradients = made_up_gradients(small_model(), 0, 0);
    return run_plan_step(*engine, 0, gradients).status();
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kPeerFailed) << statuses[0].to_string();
}

// One bit, at any collective of one rank: of values it may be delivered, of payloads never, and then to nobody.
TEST(PlanEngine, DamagedPayloadsAreRefusedByName) {
  const Topology three = {{{"all", 3}}};
  Plan plan = dense_plan(three);
  for (PlanBucket& bucket : plan.buckets) {
    bucket.codec = "quant(bits=4)";
    bucket.option = Option::parse("encode@cpu all_gather@all decode@cpu", three).value();
  }
  int refused = 0;
  for (std::int64_t at = 0; at < 12; ++at) {
    const std::vector<Status> statuses = run_ranks(3, [&](Communicator& plain) -> Status {
      std::vector<Fault> faults;
      if (plain.rank() == 1) faults.push_back({.at = at, .kind = Fault::Kind::kCorrupt});
      const std::unique_ptr<Communicator> communicator = make_faulty_communicator(&plain, faults);
      CORTADO_ASSIGN_OR_RETURN(const auto engine,
                               Engine::create(small_model(), plan, with_timeout(), communicator.get()));
      for (std::int64_t step = 0; step < 2; ++step) {
        Gradients gradients = made_up_gradients(small_model(), plain.rank(), step);
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, plain.rank(), gradients).status());
      }
      return {};
    });
    for (const Status& status : statuses) {
      EXPECT_EQ(status.ok(), statuses[0].ok()) << at << ": " << status.to_string();
      refused += status.message().find("what rank 1 sent of") != std::string::npos;
    }
  }
  EXPECT_GT(refused, 4);
}

TEST(PlanEngine, OtherEnginesHaveNoPlanToSwitch) {
  LocalGroup group(1);
  const auto engine =
      Engine::create(small_model(), EngineOptions::parse("sign").value(), group.communicator(0)).value();
  EXPECT_EQ(engine->switch_plan(dense_plan({{{"all", 1}}})).code(), StatusCode::kFailedPrecondition);
}

// ---- what a step costs ---------------------------------------------------------------------------------------------

TEST(PlanEngine, AllocatesNothingInSteadyState) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  const Plan plan = mixed_plan(kTwoByTwo, 4, {"topk(density=0.1)", "quant(bits=4)", "float_rans", "none"});
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    TraceRecorder recorder(10'000);
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator,
                                                               steady_clock(), &recorder));
    Gradients gradients = made_up_gradients(small_model(), rank, 0);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
    std::byte all[4];
    const std::byte mine{1};
    CORTADO_RETURN_IF_ERROR(communicator.all_gather({&mine, 1}, all, std::chrono::seconds(20)));
    const std::int64_t before = allocation_count();
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, rank, gradients).status());
    CORTADO_RETURN_IF_ERROR(communicator.all_gather({&mine, 1}, all, std::chrono::seconds(20)));
    EXPECT_EQ(allocation_count() - before, 0);
    EXPECT_EQ(recorder.dropped(), 0);
    return {};
  });
}

TEST(PlanEngine, ReportsBytesErrorsAndMessages) {
  Plan plan = dense_plan(kTwoByTwo);
  plan.buckets[0].option = Option::parse("encode@cpu all_gather@flat decode@cpu", kTwoByTwo).value();
  plan.buckets[0].codec = "cast(bf16)";
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
    const EngineReport report = engine->report();
    EXPECT_EQ(report.spec.find("plan(hash="), 0u) << report.spec;
    std::int64_t bytes = 0;
    for (const TensorReport& tensor : report.tensors) {
      bytes += tensor.payload_bytes;
      const bool in_first = std::find(plan.buckets[0].tensors.begin(), plan.buckets[0].tensors.end(), tensor.name) !=
                            plan.buckets[0].tensors.end();
      const std::int64_t check_bytes = in_first && tensor.elems > 0 ? 4 : 0;
      EXPECT_EQ(tensor.payload_bytes, tensor.elems * (in_first ? 2 : 4) + check_bytes);
      EXPECT_EQ(tensor.relative_l2_error > 0, in_first && tensor.elems > 0);
    }
    EXPECT_EQ(report.payload_bytes, bytes);
    EXPECT_GT(report.ratio, 1.0);
    EXPECT_LT(report.relative_l2_error, 0.005);
    EXPECT_NE(engine->describe().find("4 ranks"), std::string::npos) << engine->describe();
    return {};
  });
}

TEST(PlanEngine, SaysThatTheCpuEncodesWhatWasPlannedForTheGpu) {
  Plan plan = dense_plan(kTwoByTwo);
  plan.buckets[0].option = Option::parse("encode@gpu all_gather@flat decode@cpu", kTwoByTwo).value();
  plan.buckets[0].codec = "cast(bf16)";
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator));
    const std::string count = "1 of " + std::to_string(plan.buckets.size()) + " buckets the CPU does";
    EXPECT_NE(engine->report().host_reason.find(count), std::string::npos) << engine->report().host_reason;
    EXPECT_EQ(engine->report().fallbacks.size(), 1u);
    CORTADO_RETURN_IF_ERROR(engine->switch_plan(dense_plan(kTwoByTwo)));
    EXPECT_EQ(engine->report().host_reason, "");
    return {};
  });
}

// Ranks with and without a device, whatever the plan: the same steps, to the bit, and residuals that can be carried
// over.
TEST(PlanEngine, EncodesOnTheDeviceWhatIsPlannedForIt) {
  class Counted final : public EmulatedSchemeDevice {
   public:
    Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec,
                                                    std::span<const DeviceTensor> tensors) const override {
      Result<std::unique_ptr<DeviceBatch>> made = EmulatedSchemeDevice::make_batch(spec, tensors);
      batches += made.ok();
      return made;
    }
    mutable std::atomic<int> batches = 0;
  };
  std::vector<std::string> codecs = kLossy;
  codecs.push_back("float_rans");
  for (std::size_t seed = 0; seed < (kSanitized ? 3u : 12u); ++seed) {
    SCOPED_TRACE(seed);
    std::vector<Gradients> delivered[2][6];
    const auto device = std::make_shared<const Counted>();
    for (const bool has_device : {false, true}) {
      for (std::vector<Gradients>& of_step : delivered[has_device]) of_step.resize(6);
      on_ranks(kTwoByThree, [&](Communicator& communicator) -> Status {
        const int rank = communicator.rank();
        TraceRecorder trace(10'000);
        CORTADO_ASSIGN_OR_RETURN(
            const auto engine,
            Engine::create(small_model(), mixed_plan(kTwoByThree, seed, codecs), with_timeout(), &communicator,
                           steady_clock(), &trace, has_device && rank % 2 == 0 ? device : nullptr));
        for (std::int64_t step = 0; step < 6; ++step) {
          if (step == 2) CORTADO_RETURN_IF_ERROR(engine->switch_plan(mixed_plan(kTwoByThree, seed + 50, codecs)));
          Gradients gradients = made_up_gradients(small_model(), rank, step);
          if (step == 4 && rank == 1) gradients[0][0] = std::numeric_limits<float>::infinity();
          CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_plan_step(*engine, rank, gradients));
          EXPECT_EQ(outcome.finite, step != 4);
          const bool lacks_device = engine->report().host_reason.find("this engine has no device") != std::string::npos;
          EXPECT_TRUE(!lacks_device || !has_device || rank % 2 == 1) << engine->report().host_reason;
          delivered[has_device][step][static_cast<std::size_t>(rank)] = std::move(gradients);
        }
        return {};
      });
      ASSERT_FALSE(HasFailure());
    }
    EXPECT_GT(device->batches, 0);
    for (std::size_t step = 0; step < 6; ++step) {
      for (std::size_t rank = 0; rank < 6; ++rank) {
        EXPECT_TRUE(same_bits(delivered[1][step][rank], delivered[0][step][rank])) << "step " << step << ", " << rank;
      }
    }
  }
}

TEST(PlanEngine, SaysWhatTheDeviceCannotEncode) {
  const auto device = std::make_shared<const EmulatedSchemeDevice>();
  Plan plan = dense_plan(kTwoByTwo);
  plan.buckets[0].option = Option::parse("encode@gpu all_gather@flat decode@gpu", kTwoByTwo).value();
  plan.buckets[0].codec = "cast(bf16)";
  on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plan, with_timeout(), &communicator,
                                                               steady_clock(), nullptr, device));
    EXPECT_EQ(engine->report().host_reason, "");
    Plan other = plan;
    other.buckets[0].codec = "topk(density=0.1) | quant(bits=8)";
    CORTADO_RETURN_IF_ERROR(engine->switch_plan(other));
    EXPECT_NE(engine->report().host_reason.find("gives to the GPU: topk(density=0.1"), std::string::npos)
        << engine->report().host_reason;
    return {};
  });
}

TEST(PlanEngine, AStuckDeviceEndsTheStepOnAllRanks) {
  class Stuck final : public EmulatedSchemeDevice {
   public:
    Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
      return std::unique_ptr<DeviceQueue>(std::make_unique<StuckQueue>());
    }
  };
  Plan plan = dense_plan(kTwoByTwo);
  plan.buckets[0].option = Option::parse("encode@gpu all_gather@flat decode@gpu", kTwoByTwo).value();
  plan.buckets[0].codec = "cast(bf16)";
  const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    EngineOptions options;
    options.timeout_s = communicator.rank() == 2 ? 2 : 20;
    CORTADO_ASSIGN_OR_RETURN(const auto engine,
                             Engine::create(small_model(), plan, options, &communicator, steady_clock(), nullptr,
                                            communicator.rank() == 2 ? std::make_shared<const Stuck>() : nullptr));
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    return run_plan_step(*engine, communicator.rank(), gradients).status();
  });
  EXPECT_EQ(statuses[2].code(), StatusCode::kTimeout) << statuses[2].to_string();
  EXPECT_NE(statuses[2].message().find("rank 2: the device has not encoded and decoded"), std::string::npos)
      << statuses[2].message();
  for (const Status& status : statuses) EXPECT_FALSE(status.ok());
}

// ---- traces --------------------------------------------------------------------------------------------------------

// Two buckets of small_model() with one option and codec.
Plan two_buckets(const std::string& option, const std::string& codec) {
  Plan plan = dense_plan(kTwoByTwo);
  std::vector<PlanBucket> buckets(2);
  for (const EngineTensor& tensor : small_model()) {
    buckets[tensor.name < "first" ? 0 : 1].tensors.push_back(tensor.name);
  }
  for (PlanBucket& bucket : buckets) {
    bucket.option = Option::parse(option, kTwoByTwo).value();
    bucket.codec = codec;
  }
  plan.buckets = std::move(buckets);
  return plan;
}

struct TracedPlan {
  const char* option;
  const char* codec;
  std::vector<std::string> collectives;  // of a message
};

// Fixed sizes gathered, varying ones behind their sizes, encoded twice, sums on two levels, factors in two rounds.
const TracedPlan kTracedPlans[] = {
    {"encode@cpu all_gather@flat decode@cpu", "quant(bits=4)", {"all_gather@flat"}},
    {"encode@cpu all_gather@flat decode@cpu", "float_rans", {"all_gather@flat, sizes", "all_gather@flat"}},
    {"encode@cpu all_to_all@intra decode@cpu encode@cpu all_gather@inter decode@cpu all_gather@intra",
     "sign",
     {"all_to_all@intra", "all_gather@inter", "all_gather@intra"}},
    {"reduce_scatter@intra all_reduce@inter all_gather@intra",
     "none",
     {"reduce_scatter@intra", "all_reduce@inter", "all_gather@intra"}},
    {"encode@cpu all_reduce@flat decode@cpu", "power(rank=2)", {"all_reduce@flat", "all_reduce@flat"}},
};

TEST(PlanEngine, TracesWhatEachMessageSentAndEachTensorTook) {
  for (const TracedPlan& traced : kTracedPlans) {
    SCOPED_TRACE(std::string(traced.option) + ", " + traced.codec);
    const Plan plan = two_buckets(traced.option, traced.codec);
    on_ranks(kTwoByTwo, [&](Communicator& communicator) -> Status {
      const CountingClock clock;
      TraceRecorder recorder(1000);
      CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), dense_plan(kTwoByTwo), with_timeout(),
                                                                 &communicator, &clock));
      engine->set_trace(&recorder);
      CORTADO_RETURN_IF_ERROR(engine->switch_plan(plan));
      for (std::int64_t step = 0; step < 2; ++step) {
        Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
        recorder.clear();
        CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
        const EngineReport report = engine->report();
        const bool has_factors = report.factor_bytes > 0;
        std::int64_t sent_bytes = 0;
        std::vector<std::string> collectives[2];
        const Trace trace = engine->trace();
        std::vector<std::vector<std::int64_t>> stage_ns(small_model().size(), std::vector<std::int64_t>(kStageCount));
        std::vector<bool> coded(small_model().size());
        for (const TraceEvent& event : trace.events) {
          EXPECT_EQ(event.step, step);
          EXPECT_GT(event.end_ns, event.start_ns);
          if (event.stage == Stage::kCommunicate) {
            EXPECT_EQ(event.tensor, -1);
            EXPECT_GT(event.bytes, 0);
            sent_bytes += event.bytes;
            collectives[event.message].push_back(trace.collectives.at(static_cast<std::size_t>(event.collective)));
          } else if (event.tensor >= 0) {
            const auto t = static_cast<std::size_t>(event.tensor);
            const std::int64_t gradient_bytes = static_cast<std::int64_t>(gradients[t].size() * sizeof(float));
            EXPECT_EQ(event.bytes, event.stage == Stage::kOrthogonalise ? 0 : gradient_bytes);
            stage_ns[t][static_cast<std::size_t>(event.stage)] += event.end_ns - event.start_ns;
            coded[t] = coded[t] || (event.stage == Stage::kEncode && event.message >= 0);
            if (event.message >= 0) {
              const std::vector<std::string>& names = plan.buckets[static_cast<std::size_t>(event.message)].tensors;
              EXPECT_NE(std::find(names.begin(), names.end(), small_model()[t].name), names.end());
            } else {
              EXPECT_EQ(event.stage, Stage::kEncode);
            }
          } else {
            EXPECT_TRUE(event.stage == Stage::kWait || event.stage == Stage::kDecode);
          }
        }
        EXPECT_EQ(sent_bytes, report.payload_bytes);
        for (const auto& of_message : collectives) EXPECT_EQ(of_message, traced.collectives);
        for (std::size_t t = 0; t < gradients.size(); ++t) {
          const bool has_elems = !gradients[t].empty();
          EXPECT_EQ(stage_ns[t][static_cast<std::size_t>(Stage::kEncode)] > 0, has_elems) << small_model()[t].name;
          EXPECT_EQ(stage_ns[t][static_cast<std::size_t>(Stage::kDecode)] > 0, has_elems) << small_model()[t].name;
          EXPECT_EQ(coded[t], has_elems && report.tensors[t].compressed) << small_model()[t].name;
          EXPECT_EQ(stage_ns[t][static_cast<std::size_t>(Stage::kOrthogonalise)] > 0,
                    has_factors && report.tensors[t].compressed)
              << small_model()[t].name;
        }
      }
      return {};
    });
  }
}

}  // namespace
}  // namespace cortado

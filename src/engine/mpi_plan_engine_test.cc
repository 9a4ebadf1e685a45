// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Engines of a plan over MPI, two machines of two ranks:
//   mpirun -n 4 cortado_mpi_test --gtest_filter='MpiPlanEngine.*'
#include <iterator>

#include "collective/mpi_testing.h"
#include "engine/plan_engine_testing.h"

namespace cortado {
namespace {

const Topology kTwoByTwo = {{{"intra", 2}, {"inter", 2}}};

class MpiPlanEngine : public testing::Test {
 protected:
  void SetUp() override {
    world_ = make_mpi_world();
    ASSERT_EQ(world_->world_size(), kTwoByTwo.world_size());
  }

  std::unique_ptr<Communicator> world_;
};

Gradients integer_gradients(int rank, std::int64_t step) {
  Gradients gradients = made_up_gradients(small_model(), rank, step);
  for (std::vector<float>& tensor : gradients) {
    for (float& value : tensor) value = std::round(8 * value);
  }
  return gradients;
}

Gradients mean_of_integers(std::int64_t step) {
  Gradients mean = integer_gradients(0, step);
  for (int rank = 1; rank < kTwoByTwo.world_size(); ++rank) {
    const Gradients own = integer_gradients(rank, step);
    for (std::size_t t = 0; t < mean.size(); ++t) {
      for (std::size_t i = 0; i < mean[t].size(); ++i) mean[t][i] += own[t][i];
    }
  }
  for (std::vector<float>& tensor : mean) {
    for (float& value : tensor) value /= static_cast<float>(kTwoByTwo.world_size());
  }
  return mean;
}

TEST_F(MpiPlanEngine, GivesTheExactMeanUnderPlanAfterPlan) {
  const int rank = world_->rank();
  const auto engine = Engine::create(small_model(), dense_plan(kTwoByTwo), with_timeout(), world_.get());
  ASSERT_TRUE(engine.ok()) << engine.status().to_string();
  for (std::int64_t step = 0; step < 60; ++step) {
    if (step % 2 == 1) {
      const Plan plan = mixed_plan(kTwoByTwo, static_cast<std::size_t>(step), kLossless);
      const Status switched = engine.value()->switch_plan(plan);
      ASSERT_TRUE(switched.ok()) << switched.to_string();
    }
    Gradients gradients = integer_gradients(rank, step);
    const auto outcome = run_plan_step(*engine.value(), rank, gradients);
    ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
    EXPECT_EQ(gradients, mean_of_integers(step)) << engine.value()->report().spec << ", step " << step;
  }
}

// Whether its sums are of two floats, or in decode's order: then they don't depend on the communicator's.
bool has_one_order_of_sums(const Option& option) {
  return std::all_of(option.operations.begin(), option.operations.end(), [](const Operation& operation) {
    const bool sums = operation.kind == OpKind::kAllReduce || operation.kind == OpKind::kReduceScatter ||
                      operation.kind == OpKind::kReduce;
    return !sums || kTwoByTwo.group_size(operation.levels) == 2;
  });
}

// Six steps, the last three under another plan.
Status train_under_two_plans(Communicator& communicator, const Plan (&plans)[2], std::vector<Gradients>* delivered) {
  CORTADO_ASSIGN_OR_RETURN(const auto engine, Engine::create(small_model(), plans[0], with_timeout(), &communicator));
  for (std::int64_t step = 0; step < 6; ++step) {
    if (step == 3) CORTADO_RETURN_IF_ERROR(engine->switch_plan(plans[1]));
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
    CORTADO_RETURN_IF_ERROR(run_plan_step(*engine, communicator.rank(), gradients).status());
    delivered->push_back(std::move(gradients));
  }
  return {};
}

// Lossy codecs, whose residuals the second plan takes over: every rank has the bits of ranks that are threads.
TEST_F(MpiPlanEngine, GivesTheBitsOfLocalRanks) {
  std::vector<Option> options;
  std::copy_if(options_of_the_tree().begin(), options_of_the_tree().end(), std::back_inserter(options),
               has_one_order_of_sums);
  ASSERT_GT(options.size(), 1000u);
  std::vector<std::string> codecs = kLossy;  // factors are summed over all ranks
  std::erase_if(codecs, [](const std::string& codec) { return codec.find("rank=") != std::string::npos; });
  for (std::size_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    const Plan plans[] = {mixed_plan(kTwoByTwo, seed, codecs, options),
                          mixed_plan(kTwoByTwo, seed + 100, codecs, options)};
    std::vector<Gradients> delivered, of_threads[4];
    const Status status = train_under_two_plans(*world_, plans, &delivered);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const std::vector<Status> statuses = run_ranks(4, [&](Communicator& communicator) {
      return train_under_two_plans(communicator, plans, &of_threads[communicator.rank()]);
    });
    for (const Status& of_rank : statuses) EXPECT_TRUE(of_rank.ok()) << of_rank.to_string();
    for (std::size_t step = 0; step < delivered.size(); ++step) {
      EXPECT_TRUE(same_bits(delivered[step], of_threads[world_->rank()].at(step))) << "step " << step;
      for (const std::vector<float>& tensor : delivered[step]) {
        EXPECT_TRUE(is_same_on_every_rank(*world_, tensor)) << "step " << step;
      }
    }
  }
}

TEST_F(MpiPlanEngine, ASwitchThatRanksDisagreeOnChangesNothing) {
  const int rank = world_->rank();
  const auto engine = Engine::create(small_model(), mixed_plan(kTwoByTwo, 3, kLossless), with_timeout(), world_.get());
  ASSERT_TRUE(engine.ok()) << engine.status().to_string();
  const std::string before = engine.value()->report().spec;
  const Status status = engine.value()->switch_plan(mixed_plan(kTwoByTwo, rank == 1 ? 1 : 2, kLossless));
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("ranks differ in the plan"), std::string::npos) << status.message();
  EXPECT_EQ(engine.value()->report().spec, before);
  Gradients gradients = integer_gradients(rank, 0);
  const auto outcome = run_plan_step(*engine.value(), rank, gradients);
  ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
  EXPECT_EQ(gradients, mean_of_integers(0));
}

}  // namespace
}  // namespace cortado

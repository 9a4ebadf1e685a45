// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/sanitized.h"
#include "core/simd_target.h"
#include "planner/search/brute_force_testing.h"
#include "planner/search/strategies.h"

namespace cortado {
namespace {

using testing::brute_force_ns;
using testing::random_case;
using testing::RandomCase;

std::unique_ptr<Problem> problem_of(const RandomCase& example, const PlannerConstraints& constraints = {}) {
  return Problem::make(example.job, example.cluster, constraints).value();
}

struct Gaps {
  std::vector<double> percent;
  double median() { return at(percent.size() / 2); }
  double worst() { return at(percent.size() - 1); }
  double at(std::size_t i) { return std::sort(percent.begin(), percent.end()), percent[i]; }
};

// Distance from the best of all plans over the whole tree, and that no bound is above it.
Gaps gaps(int cases, int tensors, int levels, const std::vector<OpDevice>& devices, bool has_slow_sums = false,
          int first_seed = 0) {
  Gaps gaps;
  for (int seed = first_seed; seed < first_seed + cases; ++seed) {
    RandomCase example = random_case(static_cast<std::uint64_t>(seed), tensors, levels, devices);
    if (has_slow_sums) {
      for (ClusterLevel& level : example.cluster.levels) {
        level.float16_sum_factor = 1 + seed % 4;
        level.bfloat16_sum_factor = 1.5;
      }
      constexpr DType kDtypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
      for (std::size_t t = 0; t < example.job.tensors.size(); ++t) {
        example.job.tensors[t].dtype = kDtypes[(static_cast<std::size_t>(seed) + t) % 3];
      }
    }
    const std::unique_ptr<Problem> problem = problem_of(example);
    const SearchResult found = search(*problem);
    const std::int64_t best_ns = brute_force_ns(*problem);
    EXPECT_LE(found.bound.step_ns, best_ns) << "seed " << seed << ": " << found.bound.reason;
    EXPECT_GE(found.score.step_ns, best_ns) << "seed " << seed;
    gaps.percent.push_back(100.0 * static_cast<double>(found.score.step_ns - best_ns) / static_cast<double>(best_ns));
  }
  return gaps;
}

// benchmarks/planner/planner_exhaustive.cc does the same for thousands.
TEST(Search, IsWithinOnePercentOfExhaustiveSearch) {
  const int cases = kSanitized ? 10 : 60;
  for (const auto& [tensors, levels, device] :
       {std::tuple(4, 1, OpDevice::kGpu), std::tuple(2, 2, OpDevice::kGpu), std::tuple(4, 1, OpDevice::kCpu)}) {
    Gaps found = gaps(cases, tensors, levels, {device});
    EXPECT_EQ(found.median(), 0);
    EXPECT_LE(found.worst(), 1) << tensors << " tensors, " << levels << " levels";
  }
}

// Matrices and vectors, of which options take only some.
TEST(Search, OfLowRankIsNearTheBestAndAboveTheBound) {
  for (const std::string codec : {"power(rank=4)", "acp(rank=4)"}) {
    for (const int levels : {1, 2}) {
      Gaps gaps;
      for (int seed = 0; seed < (kSanitized ? 4 : 30); ++seed) {
        SCOPED_TRACE(codec + ", " + std::to_string(levels) + " levels, seed " + std::to_string(seed));
        RandomCase example = random_case(static_cast<std::uint64_t>(seed), 2, levels, {OpDevice::kGpu});
        for (CodecTimes& times : example.cluster.codecs) times.codec = codec;
        for (JobTensor& tensor : example.job.tensors) {
          if (&tensor != &example.job.tensors[0] || seed % 2 == 0) tensor.shape = {256, tensor.elems() / 256};
        }
        const std::unique_ptr<Problem> problem = problem_of(example);
        const SearchResult found = search(*problem);
        const std::int64_t best_ns = brute_force_ns(*problem);
        EXPECT_LE(found.bound.step_ns, best_ns) << found.bound.reason;
        EXPECT_GE(found.score.step_ns, best_ns);
        gaps.percent.push_back(100.0 * static_cast<double>(found.score.step_ns - best_ns) /
                               static_cast<double>(best_ns));
      }
      EXPECT_EQ(gaps.median(), 0);
      EXPECT_LE(gaps.worst(), 1);
    }
  }
}

// Where the search once stopped before it had tried everything, 6 % above the best; and where the bound was above it by
// the rounding of a collective's time.
TEST(Search, FindsTheBestOfCasesThatItOnceMissed) {
  EXPECT_EQ(gaps(1, 4, 1, {OpDevice::kCpu}, false, /*first_seed=*/441).worst(), 0);
  EXPECT_EQ(gaps(1, 1, 2, {OpDevice::kCpu, OpDevice::kGpu}, false, /*first_seed=*/840).worst(), 0);
}

// Of tensors of several types, which are summed at different speeds.
TEST(Search, HasABoundWhereSumsOfSixteenBitsTakeLonger) {
  const int cases = kSanitized ? 10 : 60;
  for (const auto& [tensors, levels, device] : {std::tuple(4, 1, OpDevice::kGpu), std::tuple(4, 1, OpDevice::kCpu)}) {
    const Gaps found = gaps(cases, tensors, levels, {device}, /*has_slow_sums=*/true);
    EXPECT_EQ(found.percent.size(), static_cast<std::size_t>(cases));
  }
}

TEST(Problem, KeepsACodecWhoseSumsAreFaster) {
  RandomCase example = random_case(1, 3, 1, {OpDevice::kGpu});
  example.cluster.codecs.clear();
  for (const char* codec : {"cast(bf16)", "cast(fp16)"}) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      example.cluster.codecs.push_back(
          {.codec = codec, .direction = direction, .curve = {{1, 1 << 20}, {1000, 100'000}}, .unknown = {}});
    }
  }
  const auto kept = [&] { return Problem::make(example.job, example.cluster, {}).value()->codecs().size(); };
  EXPECT_EQ(kept(), 1u);
  example.cluster.levels[0].float16_sum_factor = 1.75;
  example.cluster.levels[0].bfloat16_sum_factor = 1.15;
  EXPECT_EQ(kept(), 1u);  // bf16 is no slower anywhere
  example.cluster.codecs[2].curve.times_ns[1] = 90'000;
  EXPECT_EQ(kept(), 2u);
}

// Sums stay as large as one payload; what is gathered has one of every rank, though each is smaller.
TEST(Problem, KeepsACodecWhosePayloadsAreSummed) {
  RandomCase example = random_case(1, 3, 1, {OpDevice::kGpu});
  example.cluster.codecs.clear();
  for (const char* codec : {"sign(scale=mean_abs)", "randk(density=0.1)"}) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      example.cluster.codecs.push_back(
          {.codec = codec, .direction = direction, .curve = {{1, 1 << 20}, {1000, 100'000}}, .unknown = {}});
    }
  }
  const auto problem = Problem::make(example.job, example.cluster, {}).value();
  ASSERT_EQ(problem->codecs().size(), 2u);
  EXPECT_FALSE(problem->codecs()[0].sums);
  EXPECT_TRUE(problem->codecs()[1].sums);
}

TEST(Search, IsDeterministic) {
  const RandomCase example = random_case(5, 30, 2, {OpDevice::kCpu, OpDevice::kGpu});
  const std::unique_ptr<Problem> first = problem_of(example), second = problem_of(example);
  const SearchResult a = search(*first), b = search(*second);
  EXPECT_EQ(a.score, b.score);
  EXPECT_EQ(a.steps_done, b.steps_done);
  ASSERT_EQ(a.plan.size(), b.plan.size());
  for (std::size_t k = 0; k < a.plan.size(); ++k) {
    EXPECT_EQ(first->candidates()[a.plan[k].way->candidate], second->candidates()[b.plan[k].way->candidate]);
  }
}

// Buckets cover all tensors in order.
TEST(Search, PlansAreComplete) {
  for (int seed = 0; seed < 20; ++seed) {
    const RandomCase example =
        random_case(static_cast<std::uint64_t>(seed), 25, 1 + seed % 3, {OpDevice::kCpu, OpDevice::kGpu});
    const std::unique_ptr<Problem> problem = problem_of(example);
    int next = 0;
    for (const Placed& placed : search(*problem).plan) {
      EXPECT_EQ(placed.first, next);
      next = placed.last + 1;
    }
    EXPECT_EQ(next, 25);
  }
}

TEST(Search, IsNoWorseThanAnyComparatorAndNoBetterThanTheBound) {
  int compared = 0;
  for (int seed = 100; seed < 112; ++seed) {
    const RandomCase example = random_case(static_cast<std::uint64_t>(seed), 12, 2, {OpDevice::kCpu, OpDevice::kGpu});
    const std::unique_ptr<Problem> problem = problem_of(example);
    const SearchResult found = search(*problem);
    EXPECT_LE(found.bound.step_ns, found.score.step_ns);
    EXPECT_LE(found.score.step_ns, found.dense_ns);
    for (const char* strategy : strategy_names()) {
      if (std::string_view(strategy) == "bf16") continue;  // may use a codec that the search may not
      const Result<SearchResult> other = run_strategy(*problem, strategy);
      ASSERT_TRUE(other.ok()) << strategy << ", seed " << seed << ": " << other.status().to_string();
      ++compared;
      EXPECT_LE(found.score.step_ns, other.value().score.step_ns) << strategy << ", seed " << seed;
      EXPECT_LE(found.bound.step_ns, other.value().score.step_ns) << strategy << ", seed " << seed;
    }
  }
  EXPECT_EQ(compared, 12 * 9);
}

// Where every tensor should go by itself, starts were made of the ways that fewer buckets go.
TEST(Search, IsNoWorseThanEachTensorByItselfWhereThereAreMany) {
  Cluster cluster = load_cluster("tests/data/planner/clusters/pcie_25g.json").value();
  for (ClusterLevel& level : cluster.levels) level.ranks = 8;
  for (std::uint64_t seed = 3; seed <= 5; ++seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> magnitude(1, 6.5);
    Job job;
    job.name = "many";
    for (int t = 0; t < 400; ++t) {
      const auto elems = static_cast<std::int64_t>(std::pow(10, magnitude(random)));
      JobTensor& tensor = job.tensors.emplace_back();
      tensor.name = std::to_string(t);
      tensor.shape = {elems};
      tensor.ready_ns = std::int64_t{50000} * t;
    }
    const std::unique_ptr<Problem> problem = Problem::make(job, cluster, {}).value();
    const Score found = search(*problem).score;
    for (const char* strategy : {"compress_all", "myopic"}) {
      EXPECT_LE(found.step_ns, run_strategy(*problem, strategy).value().score.step_ns) << strategy << ", seed " << seed;
    }
  }
}

TEST(Search, KeepsToTheNumberOfLossyPasses) {
  const RandomCase example = random_case(3, 10, 2, {OpDevice::kGpu});
  for (const int passes : {0, 1}) {
    const std::unique_ptr<Problem> problem = problem_of(example, {.max_lossy_passes = passes});
    for (const Placed& placed : search(*problem).plan) EXPECT_LE(placed.way->chain.lossy_passes, passes);
  }
}

TEST(Search, KeepsToTheMemory) {
  const RandomCase example = random_case(3, 10, 2, {OpDevice::kGpu});
  const auto memory_of = [&](const PlannerConstraints& constraints) {
    const std::unique_ptr<Problem> problem = problem_of(example, constraints);
    std::int64_t bytes = 0;
    for (const Placed& placed : search(*problem).plan) bytes += placed.way->chain.memory_bytes;
    return bytes;
  };
  const std::int64_t unlimited = memory_of({});
  ASSERT_GT(unlimited, 0);
  for (const std::int64_t limit : {unlimited / 2, unlimited / 10, std::int64_t{0}}) {
    PlannerConstraints constraints;
    constraints.max_memory_bytes = limit;
    EXPECT_LE(memory_of(constraints), limit);
  }
}

TEST(Search, KeepsToTheErrors) {
  RandomCase example = random_case(3, 10, 2, {OpDevice::kGpu});
  const std::string codec = example.cluster.codecs[0].codec;
  for (std::size_t t = 0; t < example.job.tensors.size(); ++t) {
    example.job.tensors[t].rms = 1 + static_cast<double>(t);
    if (t != 4) example.job.tensors[t].errors = {{codec, 0.1 * static_cast<double>(t)}};
  }
  PlannerConstraints constraints;
  constraints.max_tensor_error = 0.5;
  {
    const std::unique_ptr<Problem> problem = problem_of(example, constraints);
    for (const Placed& placed : search(*problem).plan) {
      for (int t = placed.first; t <= placed.last && placed.way->chain.lossy_passes > 0; ++t) {
        EXPECT_NE(t, 4);  // never measured
        EXPECT_LE(0.1 * t * placed.way->chain.lossy_passes, 0.5 + 1e-12);
      }
    }
  }
  constraints = {};
  for (const double limit : {0.3, 0.05, 0.0}) {
    constraints.max_total_error = limit;
    const std::unique_ptr<Problem> problem = problem_of(example, constraints);
    double lost = 0;
    for (const Placed& placed : search(*problem).plan) lost += placed.way->squared_error;
    EXPECT_LE(std::sqrt(lost), limit + 1e-7);
  }
}

TEST(Search, TotalErrorNeedsTheNormOfAllTensorsOrOfNone) {
  RandomCase example = random_case(3, 10, 2, {OpDevice::kGpu});
  for (JobTensor& tensor : example.job.tensors) {
    tensor.rms = 1e-3;
    tensor.errors = {{example.cluster.codecs[0].codec, 0.1}};
  }
  PlannerConstraints constraints;
  constraints.max_total_error = 0.05;
  EXPECT_TRUE(Problem::make(example.job, example.cluster, constraints).ok());
  example.job.tensors[7].rms.reset();
  const Status status = Problem::make(example.job, example.cluster, constraints).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("$.tensors[7].rms (\"" + example.job.tensors[7].name), std::string::npos)
      << status.message();
  for (JobTensor& tensor : example.job.tensors) tensor.rms.reset();
  EXPECT_TRUE(Problem::make(example.job, example.cluster, constraints).ok());
}

// Fusion is for all to use: what a plan gains by it is no gain of compression.
TEST(Search, DensePlansAreSearchedForToo) {
  int improved = 0;
  for (int seed = 0; seed < 12; ++seed) {
    const RandomCase example = random_case(static_cast<std::uint64_t>(seed), 12, 2, {OpDevice::kGpu});
    const std::unique_ptr<Problem> problem = problem_of(example);
    std::int64_t best_by_size_ns = Simulator::kNever;
    LocalSearch local(problem.get());
    for (const std::int64_t cap : fusion_caps(*problem)) {
      best_by_size_ns = std::min(best_by_size_ns, local.score(dense_plan(*problem, cap)).step_ns);
    }
    const DensePlans dense = find_dense_plans(*problem, &local);
    EXPECT_EQ(dense.by_size_score.step_ns, best_by_size_ns) << "seed " << seed;
    EXPECT_LE(dense.fastest_score.step_ns, best_by_size_ns) << "seed " << seed;
    improved += dense.fastest_score.step_ns < best_by_size_ns;
    for (const Placed& placed : dense.fastest) EXPECT_FALSE(placed.way->is_encoded) << "seed " << seed;
    const std::int64_t found_ns = search(*problem_of(example)).dense_ns;
    EXPECT_EQ(found_ns, dense.fastest_score.step_ns) << "seed " << seed;
    EXPECT_EQ(found_ns, run_strategy(*problem_of(example), "dense").value().score.step_ns) << "seed " << seed;
    // A whole search that may not encode is hardly better.
    const std::int64_t searched_ns = search(*problem_of(example, {.max_lossy_passes = 0})).score.step_ns;
    EXPECT_LE(static_cast<double>(found_ns), 1.02 * static_cast<double>(searched_ns)) << "seed " << seed;
  }
  EXPECT_GT(improved, 0);
}

TEST(Problem, RefusesWhatItCannotWorkOn) {
  RandomCase example = random_case(1, 3, 2, {OpDevice::kGpu});
  const auto error = [&](const PlannerConstraints& constraints) {
    return Problem::make(example.job, example.cluster, constraints).status().message();
  };
  EXPECT_NE(error({.allowed_codecs = {"nonsense"}}).find("nonsense"), std::string::npos);
  EXPECT_NE(error({.max_lossy_passes = -1}).find("max_lossy_passes"), std::string::npos);
  EXPECT_NE(error({.search_steps = -1}).find("search_steps"), std::string::npos);
  EXPECT_NE(error({.search_steps = kMaxSearchSteps + 1}).find("search_steps"), std::string::npos);
  while (example.cluster.levels.size() < 5) {
    ClusterLevel level = example.cluster.levels[0];
    level.name += std::to_string(example.cluster.levels.size());
    example.cluster.levels.push_back(level);
  }
  EXPECT_NE(error({}).find("$.levels"), std::string::npos);
}

TEST(Pricing, FindsTheCheapestOfAllOptions) {
  for (int seed = 0; seed < 6; ++seed) {
    const RandomCase example = random_case(static_cast<std::uint64_t>(seed), 1, 2, {OpDevice::kCpu, OpDevice::kGpu});
    const std::unique_ptr<Problem> problem = problem_of(example);
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    PriceSets prices;
    for (Costs& costs : prices) {
      for (float& price : costs) price = std::uniform_real_distribution<float>(0, 1)(random);
    }
    const BucketShape shape = {.elems = 1 << 18};
    const Costs cheapest = problem->pricer(0).solve(shape, prices);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      EXPECT_EQ(problem->pricer(0).solve(shape, prices), cheapest) << "seed " << seed << ", target " << target;
    }
    std::array<double, kPriceSets> least;
    least.fill(1e30);
    for (const auto options = generate_options(problem->space_of(0)).value(); const Option& option : options) {
      OptionChain chain;
      ASSERT_TRUE(make_chain(problem->model(), &problem->codecs()[0], shape, option, &chain));
      for (int set = 0; set < kPriceSets; ++set) {
        double cost = 0;
        for (int r = 0; r < kMaxResources; ++r) cost += prices[r][set] * static_cast<double>(chain.loads[r]);
        least[set] = std::min(least[set], cost);
      }
    }
    for (int set = 0; set < kPriceSets; ++set) {
      EXPECT_NEAR(cheapest[set], least[set], least[set] * 1e-5);
      OptionChain chain;
      ASSERT_TRUE(make_chain(problem->model(), &problem->codecs()[0], shape, problem->pricer(0).option(set), &chain));
      double cost = 0;
      for (int r = 0; r < kMaxResources; ++r) cost += prices[r][set] * static_cast<double>(chain.loads[r]);
      EXPECT_NEAR(cost, least[set], least[set] * 1e-5);
    }
  }
}

TEST(Search, SaysThatAPlanIsExactOnlyWhereItIs) {
  int exact = 0;
  for (int seed = 0; seed < (kSanitized ? 10 : 60); ++seed) {
    const RandomCase example = random_case(static_cast<std::uint64_t>(seed), 4, 1, {OpDevice::kGpu});
    exact += search(*problem_of(example)).is_exact;
    PlannerConstraints constraints;
    constraints.search_steps = 1;
    const std::unique_ptr<Problem> problem = problem_of(example, constraints);
    const SearchResult found = search(*problem);
    if (found.is_exact) {
      EXPECT_EQ(found.score.step_ns, brute_force_ns(*problem)) << "seed " << seed;
    }
  }
  EXPECT_GT(exact, 0);
}

// Trying everything is for what ends: with few options many tensors look like little, too (1.7 million operations).
TEST(Search, DoesNotTryEverythingWhereThatDoesNotEnd) {
  const Cluster cluster = load_cluster("tests/data/planner/clusters/pcie_25g.json").value();
  const Job job = load_job("tests/data/planner/jobs/lstm.json").value();
  const auto problem = Problem::make(job, cluster, {.allowed_codecs = {"none"}}).value();
  const SearchResult found = search(*problem);
  EXPECT_FALSE(found.is_exact);
  EXPECT_LT(found.steps_done, 2 * search_steps(*problem));
}

}  // namespace
}  // namespace cortado

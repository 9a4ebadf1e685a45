// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/simulate/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace cortado::simulator_test {
namespace {

constexpr std::int64_t kUnit = 1000000;  // of the hand-made cases

std::int64_t units(double x) { return static_cast<std::int64_t>(x * kUnit + 0.5); }

using Chain = std::vector<Step>;

std::vector<SimulatedBucket> buckets_of(const std::vector<std::pair<std::int64_t, const Chain*>>& list) {
  std::vector<SimulatedBucket> buckets;
  for (const auto& [ready_ns, chain] : list) buckets.push_back({ready_ns, *chain, 1});
  return buckets;
}

// Two equal tensors, backward 1 each; encoding takes 0.1 on the GPU, which stands still meanwhile, or 1.5 on the CPU;
// either then travels for 5.
class LemmaOne : public ::testing::Test {
 protected:
  std::int64_t step(const Chain& first, const Chain& second) {
    Simulator simulator({.backward_ns = units(2), .gpu_slowdown_ppm = 1000000}, 1);
    return simulator.run(buckets_of({{units(1), &first}, {units(2), &second}}));
  }
  Chain gpu_ = {{units(0.1), kGpuCodec, 0}, {units(5), kLink, 1}};
  Chain cpu_ = {{units(1.5), kCpuCodec, 0}, {units(5), kLink, 1}};
};

// What encodes gradients in host memory runs in the thread of the backward pass, whatever the file says of another
// thread.
TEST(SimulatedJob, BackwardPassesStandStillWhileTheCpuEncodesItsOwnGradients) {
  Cluster cluster;
  cluster.cpu_codec_slows_backward = 0.25;
  Job job;
  job.device = OpDevice::kGpu;
  EXPECT_EQ(simulated_job(job, cluster).cpu_slowdown_ppm, 250000);
  EXPECT_FALSE(simulated_job(job, cluster).host_passes_on);
  job.device = OpDevice::kCpu;
  EXPECT_EQ(simulated_job(job, cluster).cpu_slowdown_ppm, 1000000);
  EXPECT_TRUE(simulated_job(job, cluster).host_passes_on);
  cluster.cpu_codec_workers = 3;
  EXPECT_EQ(simulated_job(job, cluster).cpu_workers, 1) << "that thread";
  job.device = OpDevice::kGpu;
  EXPECT_EQ(simulated_job(job, cluster).cpu_workers, 3);
}

TEST_F(LemmaOne, TheCounterexample) {
  EXPECT_EQ(step(cpu_, gpu_), units(12.1));  // as the lemma wants it
  EXPECT_EQ(step(gpu_, cpu_), units(11.1));  // better
  EXPECT_EQ(step(gpu_, gpu_), units(11.1));
  EXPECT_EQ(step(cpu_, cpu_), units(12.5));
}

TEST(Simulator, NothingToSendTakesTheComputationAlone) {
  const Chain none;
  Simulator simulator({.backward_ns = 100, .forward_ns = 50, .optimizer_ns = 7}, 1);
  EXPECT_EQ(simulator.run(buckets_of({{40, &none}, {100, &none}})), 157);
}

TEST(Simulator, ALinkServesInOrderOfReadiness) {
  // The second bucket overtakes the first one, which is still being encoded.
  const Chain slow = {{50, kCpuCodec, 0}, {20, kLink, 1}}, fast = {{30, kLink, 0}};
  Simulator simulator({.backward_ns = 20}, 1);
  std::vector<SimulatedEvent> events;
  EXPECT_EQ(simulator.run(buckets_of({{10, &slow}, {20, &fast}}), Simulator::kNever, &events), 80);
  std::vector<std::int32_t> order;
  for (const SimulatedEvent& event : events) {
    if (event.server == kLink && event.bucket >= 0) order.push_back(event.bucket);
  }
  EXPECT_EQ(order, (std::vector<std::int32_t>{1, 0}));
}

TEST(Simulator, LevelsAreLinksOfTheirOwn) {
  const Chain inner = {{100, kLink, 0}}, outer = {{100, kLink + 1, 0}};
  Simulator simulator({.backward_ns = 0}, 2);
  EXPECT_EQ(simulator.run(buckets_of({{0, &inner}, {0, &outer}})), 100);
  EXPECT_EQ(simulator.run(buckets_of({{0, &inner}, {0, &inner}})), 200);
}

TEST(Simulator, TheCpuHasWorkers) {
  const Chain chain = {{100, kCpuCodec, 0}};
  for (const auto& [workers, step_ns] : {std::pair(1, 300), std::pair(2, 200), std::pair(3, 100)}) {
    Simulator simulator({.backward_ns = 0, .cpu_workers = workers}, 1);
    EXPECT_EQ(simulator.run(buckets_of({{0, &chain}, {0, &chain}, {0, &chain}})), step_ns) << workers;
  }
}

TEST(Simulator, ACodecSlowsTheComputation) {
  // Codec from 10 to 50; the other bucket is due after 40 more of work.
  const Chain codec = {{40, kGpuCodec, 0}}, none;
  for (const auto& [ppm, step_ns] : {std::pair(0, 50), std::pair(500000, 70), std::pair(1000000, 90)}) {
    Simulator simulator({.backward_ns = 50, .gpu_slowdown_ppm = ppm}, 1);
    EXPECT_EQ(simulator.run(buckets_of({{10, &codec}, {50, &none}})), step_ns) << ppm;
  }
  // Ends in the middle of a codec: 10 of 40 at half speed take 20.
  Simulator simulator({.backward_ns = 20, .gpu_slowdown_ppm = 500000}, 1);
  const Chain travels = {{5, kLink, 0}};
  std::vector<SimulatedEvent> events;
  simulator.run(buckets_of({{10, &codec}, {20, &travels}}), Simulator::kNever, &events);
  for (const SimulatedEvent& event : events) {
    if (event.bucket == 1) {
      EXPECT_EQ(event.start_ns, 30);
    }
  }
}

TEST(Simulator, CodecsOnBothDevicesSlowTheComputationTogether) {
  const Chain both = {{40, kGpuCodec, 0}}, cpu = {{40, kCpuCodec, 0}}, none;
  Simulator simulator({.backward_ns = 50, .gpu_slowdown_ppm = 500000, .cpu_slowdown_ppm = 250000}, 1);
  // A quarter of the speed from 10 to 50: 10 of work; 30 are left.
  EXPECT_EQ(simulator.run(buckets_of({{10, &both}, {10, &cpu}, {50, &none}})), 80);
}

TEST(Simulator, ATransferSlowsTheComputation) {
  // A link is busy from 10 to 50, the other level's from 20 to 80: half the speed from 10 to 80.
  const Chain inner = {{40, kLink, 0}}, outer = {{10, kDeviceToHost, 0}, {60, kLink + 1, 1}}, none;
  for (const auto& [ppm, step_ns] : {std::pair(0, 100), std::pair(500000, 135), std::pair(1000000, 170)}) {
    Simulator simulator({.backward_ns = 100, .link_slowdown_ppm = ppm}, 2);
    EXPECT_EQ(simulator.run(buckets_of({{10, &inner}, {10, &outer}, {100, &none}})), step_ns) << ppm;
  }
}

TEST(Simulator, TheHostSeesWhatHasArrivedAtTheNextBucketOrBehindWhatItEncodes) {
  const Chain gathered = {{20, kLink, 0}, {5, kCpuCodec, 1}}, none, encoded = {{30, kCpuCodec, 0}},
              announced = {{50, kLink, 0}, {7, kLink, 0}};
  const auto start_of_second = [&](bool host_passes_on, const Chain& first, std::int64_t ready_ns,
                                   const Chain& second) {
    const SimulatedJob job = {.backward_ns = 100, .cpu_slowdown_ppm = 1000000, .host_passes_on = host_passes_on};
    std::vector<SimulatedEvent> events;
    Simulator(job, 1).run(buckets_of({{10, &first}, {ready_ns, &second}, {100, &none}}), Simulator::kNever, &events);
    for (const SimulatedEvent& event : events) {
      if (event.bucket == 0 && event.step == 1) return event.start_ns;
    }
    return std::int64_t{-1};
  };
  EXPECT_EQ(start_of_second(false, gathered, 100, none), 30);
  EXPECT_EQ(start_of_second(true, gathered, 100, none), 100);
  EXPECT_EQ(start_of_second(true, gathered, 70, none), 70);
  EXPECT_EQ(start_of_second(false, announced, 50, encoded), 60);
  EXPECT_EQ(start_of_second(true, announced, 50, encoded), 80) << "it encodes until then";
  EXPECT_EQ(start_of_second(true, announced, 61, encoded), 91) << "and encodes first";
}

// The thread of the backward pass has the processor for itself only while no link is busy, whatever it does.
TEST(Simulator, ATransferSlowsTheCodecsOfTheHost) {
  const auto end_of_encode = [](bool host_passes_on, std::int64_t link_ppm, std::int64_t encode_ns) {
    const Chain sent = {{.time_ns = 100, .resource = kLink}};
    const Chain encoded = {{.time_ns = encode_ns, .resource = kCpuCodec}};
    const std::vector<SimulatedBucket> buckets = {{10, sent, 1}, {10, encoded, 1}};
    const SimulatedJob job = {.backward_ns = 10,
                              .cpu_slowdown_ppm = 1000000,
                              .link_slowdown_ppm = link_ppm,
                              .host_passes_on = host_passes_on};
    return Simulator(job, 2).run(buckets);
  };
  EXPECT_EQ(end_of_encode(false, 500000, 200), 210);
  EXPECT_EQ(end_of_encode(true, 0, 200), 210);
  EXPECT_EQ(end_of_encode(true, 500000, 200), 260);  // until 110 half of 100 ns are done
  EXPECT_EQ(end_of_encode(true, 1000000, 200), 310);
  EXPECT_EQ(end_of_encode(true, 250000, 75), 110);  // all of it beside the transfer
  EXPECT_EQ(end_of_encode(true, 200000, 96), 10 + 100 + 16);
  EXPECT_EQ(end_of_encode(true, 1000000, 0), 110) << "a codec that takes no time is not held up";
}

// The engine starts what it has encoded before it decodes what has arrived meanwhile.
TEST(Simulator, TheTransferBehindAnEncodeSlowsTheDecodesThatFollow) {
  const Chain arrived = {{.time_ns = 50, .resource = kLink}, {.time_ns = 10, .resource = kCpuCodec}};
  const Chain sent = {{.time_ns = 100, .resource = kCpuCodec}, {.time_ns = 100, .resource = kLink}};
  std::vector<SimulatedEvent> events;
  Simulator({.backward_ns = 10, .cpu_slowdown_ppm = 1000000, .link_slowdown_ppm = 500000, .host_passes_on = true}, 2)
      .run(std::vector<SimulatedBucket>{{10, arrived, 1}, {10, sent, 1}}, Simulator::kNever, &events);
  // Encoding takes 50 ns beside the first transfer, which do 25, and 75 more.
  const auto decode = std::find_if(events.begin(), events.end(), [](const SimulatedEvent& event) {
    return event.bucket == 0 && event.step == 1 && event.server == kCpuCodec;
  });
  ASSERT_NE(decode, events.end());
  EXPECT_EQ(decode->start_ns, 135);
  EXPECT_EQ(decode->end_ns, 155);
}

TEST(Simulator, WhatTheHostSeesAtOnceItTakesUpInTheOrderOfBuckets) {
  const Chain slow = {{30, kLink, 0}, {5, kCpuCodec, 1}}, fast = {{20, kLink + 1, 0}, {7, kCpuCodec, 1}}, none;
  std::vector<SimulatedEvent> events;
  Simulator({.backward_ns = 100, .host_passes_on = true}, 2)
      .run(buckets_of({{10, &slow}, {10, &fast}, {100, &none}}), Simulator::kNever, &events);
  std::vector<std::int32_t> order;
  for (const SimulatedEvent& event : events) {
    if (event.server == kCpuCodec && event.bucket >= 0) order.push_back(event.bucket);
  }
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 1})) << "though the second bucket arrives first";
}

TEST(Simulator, TheForwardPassMayBeginBeforeAllHasArrived) {
  // The second tensor is needed at once, the first one after 60 of 100: it was ready at 40 of 100.
  const Chain first = {{100, kLink, 0}}, second = {{10, kLink, 0}};
  SimulatedJob job = {.backward_ns = 100, .forward_ns = 100};
  const auto buckets = buckets_of({{40, &first}, {100, &second}});
  EXPECT_EQ(Simulator(job, 1).run(buckets), 150 + 100);  // both have arrived at 150
  job.overlap_forward = true;
  EXPECT_EQ(Simulator(job, 1).run(buckets), 150 + 100);  // the second one arrives last and is needed first
  const auto swapped = buckets_of({{40, &second}, {100, &first}});
  EXPECT_EQ(Simulator(job, 1).run(swapped), 200 + 100);
  const Chain small = {{10, kLink, 0}}, large = {{145, kLink + 1, 0}};
  EXPECT_EQ(Simulator(job, 2).run(buckets_of({{40, &large}, {100, &small}})), 185 + 40);  // from 110 to 170, then waits
  job.overlap_forward = false;
  EXPECT_EQ(Simulator(job, 2).run(buckets_of({{40, &large}, {100, &small}})), 185 + 100);
}

TEST(Simulator, TheOptimizerIsSharedOutWhereTheForwardPassOverlaps) {
  const Chain chain = {{10, kLink, 0}};
  SimulatedJob job = {.backward_ns = 100, .forward_ns = 100, .optimizer_ns = 40, .overlap_forward = true};
  EXPECT_EQ(Simulator(job, 1).run(buckets_of({{50, &chain}, {100, &chain}})), 110 + 140);
}

// The last tensor, of three quarters of the elements, is updated before the first one is needed: after 100 + 50 + 30.
TEST(Simulator, TheOptimizerIsSharedOutByElements) {
  const Chain slow = {{200, kLink + 1, 0}}, fast = {{10, kLink, 0}};
  const SimulatedJob job = {.backward_ns = 100, .forward_ns = 100, .optimizer_ns = 40, .overlap_forward = true};
  const std::vector<SimulatedBucket> buckets = {{50, slow, 1}, {100, fast, 3}};
  EXPECT_EQ(Simulator(job, 2).run(buckets), 250 + 60);
}

// A random plan: buckets with chains over all resources.
struct RandomPlan {
  explicit RandomPlan(std::mt19937_64& random, int count) : chains(count) {
    std::int64_t ready_ns = 0;
    for (Chain& chain : chains) {
      fill(random, &chain);
      if (random() % 3 > 0) ready_ns += static_cast<std::int64_t>(random() % 1000);
      ready.push_back(ready_ns);
    }
  }
  static void fill(std::mt19937_64& random, Chain* chain) {
    chain->clear();
    for (std::uint64_t i = random() % 6; i > 0; --i) {
      chain->push_back(
          {static_cast<std::int64_t>(1 + random() % 2000), static_cast<std::uint8_t>(random() % (kLink + 2)), 0});
    }
    std::int64_t rest_ns = 0;
    for (auto step = chain->rbegin(); step != chain->rend(); ++step) {
      step->rest_ns = rest_ns;
      rest_ns += step->time_ns;
    }
  }
  std::vector<SimulatedBucket> buckets() const {
    std::vector<SimulatedBucket> list;
    for (std::size_t i = 0; i < chains.size(); ++i) list.push_back({ready[i], chains[i], 1});
    return list;
  }
  std::vector<Chain> chains;
  std::vector<std::int64_t> ready;
};

Loads loads_of(const Chain& chain) {
  Loads loads = {};
  for (const Step& step : chain) loads[step.resource] += step.time_ns;
  return loads;
}

SimulatedJob random_job(std::mt19937_64& random, const RandomPlan& plan) {
  return {.backward_ns = plan.ready.back() + static_cast<std::int64_t>(random() % 500),
          .forward_ns = static_cast<std::int64_t>(random() % 5000),
          .optimizer_ns = static_cast<std::int64_t>(random() % 500),
          .overlap_forward = random() % 2 == 0,
          .cpu_workers = 1 + static_cast<int>(random() % 3),
          .gpu_slowdown_ppm = static_cast<std::int64_t>(random() % 3) * 500000,
          .cpu_slowdown_ppm = static_cast<std::int64_t>(random() % 3) * 250000,
          .link_slowdown_ppm = static_cast<std::int64_t>(random() % 3) * 500000,
          .host_passes_on = random() % 2 == 0};
}

TEST(Simulator, ContinuingGivesWhatARunFromTheStartGives) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    RandomPlan plan(random, 1 + static_cast<int>(random() % 250));
    Simulator simulator(random_job(random, plan), 2);
    simulator.run_keeping(plan.buckets());
    for (int change = 0; change < 4; ++change) {
      const std::size_t at = random() % plan.chains.size();
      const Chain before = plan.chains[at];
      Loads difference = loads_of(before);
      RandomPlan::fill(random, &plan.chains[at]);
      const Loads after = loads_of(plan.chains[at]);
      for (int r = 0; r < kMaxResources; ++r) difference[r] = after[r] - difference[r];
      const std::int64_t whole_ns = simulator.run(plan.buckets());
      EXPECT_EQ(simulator.rerun(plan.buckets(), at, difference), whole_ns);
      EXPECT_EQ(simulator.rerun(plan.buckets(), at, difference, whole_ns), whole_ns);
      EXPECT_GT(simulator.rerun(plan.buckets(), at, difference, whole_ns - 1), whole_ns - 1);
      plan.chains[at] = before;
    }
  }
}

TEST(Simulator, ContinuesAfterBucketsWereMergedOrSplit) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    RandomPlan plan(random, 3 + static_cast<int>(random() % 120));
    Simulator simulator(random_job(random, plan), 2);
    simulator.run_keeping(plan.buckets());
    const std::size_t at = 1 + random() % (plan.chains.size() - 2);
    std::vector<SimulatedBucket> merged = plan.buckets();
    merged.erase(merged.begin() + static_cast<std::ptrdiff_t>(at));
    Loads difference = {};
    const Loads gone = loads_of(plan.chains[at]);
    for (int r = 0; r < kMaxResources; ++r) difference[r] = -gone[r];
    EXPECT_EQ(simulator.rerun(merged, at, difference), simulator.run(merged));
    // Split: a new bucket that is ready between the two others.
    std::vector<SimulatedBucket> split = plan.buckets();
    Chain chain;
    RandomPlan::fill(random, &chain);
    const SimulatedBucket extra = {(plan.ready[at - 1] + plan.ready[at]) / 2, chain, 1};
    split.insert(split.begin() + static_cast<std::ptrdiff_t>(at), extra);
    EXPECT_EQ(simulator.rerun(split, at - 1, loads_of(chain)), simulator.run(split));
  }
}

TEST(Simulator, KeepsTheStatesOfWhatItContinuedWith) {
  std::mt19937_64 random(17);
  for (int round = 0; round < 60; ++round) {
    // Around the numbers of buckets from which on fewer states are kept.
    RandomPlan plan(random, 3 + static_cast<int>(random() % 4) + static_cast<int>(random() % 3) * 92);
    const SimulatedJob job = random_job(random, plan);
    Simulator simulator(job, 2), fresh(job, 2);
    simulator.run_keeping(plan.buckets());
    for (int change = 0; change < 20; ++change) {
      enum Kind : std::uint8_t { kOtherChains, kSplit, kMerge, kShift };
      const auto kind = static_cast<Kind>(random() % 4);
      if (kind == kMerge && plan.chains.size() <= 3) continue;
      // Others than the last, where buckets change together.
      const std::size_t at = random() % (plan.chains.size() - (kind == kOtherChains ? 0 : 1));
      const auto place = static_cast<std::ptrdiff_t>(at);
      Loads difference = {};
      const auto add = [&](const Chain& chain, int sign) {
        const Loads loads = loads_of(chain);
        for (int r = 0; r < kMaxResources; ++r) difference[r] += sign * loads[r];
      };
      const std::int64_t before_ns = at > 0 ? plan.ready[at - 1] : 0;
      std::size_t from = at;
      if (kind == kMerge) {  // with the next one, which it was ready before
        add(plan.chains[at], -1);
        plan.chains.erase(plan.chains.begin() + place);
        plan.ready.erase(plan.ready.begin() + place);
      } else {
        for (std::size_t k = at; k < (kind == kShift ? at + 2 : at + 1); ++k) {
          if (kind != kSplit) add(plan.chains[k], -1);
          Chain chain;
          RandomPlan::fill(random, &chain);
          add(chain, 1);
          if (kind != kSplit) plan.chains[k] = chain;
          if (kind == kSplit) plan.chains.insert(plan.chains.begin() + place, chain);
        }
        // Ready earlier than what had that index: a state from before that is needed.
        const std::int64_t earlier_ns = (before_ns + plan.ready[at]) / 2;
        if (kind == kSplit) plan.ready.insert(plan.ready.begin() + place, earlier_ns);
        if (kind == kShift) plan.ready[at] = earlier_ns;
        if (kind != kOtherChains && from > 0) --from;
      }
      const std::vector<SimulatedBucket> buckets = plan.buckets();
      const std::int64_t step_ns = fresh.run(buckets);
      simulator.rerun(buckets, from, difference, step_ns - 1);  // given up on the way
      ASSERT_EQ(simulator.rerun_keeping(buckets, from, difference), step_ns) << "a change of kind " << int{kind};
      const std::size_t resumed = random() % buckets.size();
      ASSERT_EQ(simulator.rerun(buckets, resumed, {}), step_ns);
      ASSERT_EQ(simulator.rerun(buckets, resumed, {}, step_ns), step_ns);
    }
  }
}

TEST(Simulator, EventsFillTheStepWithoutOverlap) {
  std::mt19937_64 random(13);
  for (int round = 0; round < 50; ++round) {
    RandomPlan plan(random, 40);
    const SimulatedJob job = random_job(random, plan);
    Simulator simulator(job, 2);
    std::vector<SimulatedEvent> events;
    const std::int64_t step_ns = simulator.run(plan.buckets(), Simulator::kNever, &events);
    std::map<std::pair<int, int>, std::int64_t> free_ns;
    std::int64_t computed_until_ns = 0;
    std::size_t steps = 0;
    for (const SimulatedEvent& event : events) {
      EXPECT_LE(event.end_ns, step_ns);
      if (event.bucket < 0) {
        EXPECT_GE(event.start_ns, computed_until_ns);
        // The backward pass waits for nothing: it may be slow, but has no gaps.
        if (event.step == 0) {
          EXPECT_EQ(event.start_ns, computed_until_ns);
        }
        computed_until_ns = event.end_ns;
        continue;
      }
      ++steps;
      std::int64_t& free = free_ns[{event.server, event.worker}];
      EXPECT_GE(event.start_ns, free);
      free = event.end_ns;
    }
    EXPECT_GE(computed_until_ns, job.backward_ns);
    std::size_t expected = 0;
    for (const Chain& chain : plan.chains) expected += chain.size();
    EXPECT_EQ(steps, expected);
  }
}

}  // namespace
}  // namespace cortado::simulator_test

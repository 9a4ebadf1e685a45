// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Many collectives, several in flight, no allocation, and ranks that leave in the middle of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/counting_new.h"

namespace cortado::local_stress_test {
namespace {

constexpr std::chrono::seconds kLong(60);
constexpr int kElems = 129;

// Keeps `depth` all-reduces in flight, each on a buffer of its own. Allocates only when made.
class Pipeline {
 public:
  Pipeline(Communicator* communicator, int depth)
      : communicator_(*communicator), lanes_(static_cast<std::size_t>(depth)) {}

  // Collective `index` takes the lane of collective `index` - depth, which must end first.
  Status step(int index) {
    Lane& lane = lanes_[static_cast<std::size_t>(index) % lanes_.size()];
    CORTADO_RETURN_IF_ERROR(finish(lane));
    lane.index = index;
    lane.values.fill(static_cast<float>(index % 1000 + communicator_.rank()));
    CORTADO_ASSIGN_OR_RETURN(const WorkId work,
                             communicator_.start_all_reduce(lane.values.data(), kElems, DType::kFloat32));
    lane.work = work;
    lane.in_flight = true;
    return Status();
  }

  Status drain() {
    for (Lane& lane : lanes_) {
      CORTADO_RETURN_IF_ERROR(finish(lane));
    }
    return Status();
  }

 private:
  struct Lane {
    std::array<float, kElems> values{};
    int index = 0;
    WorkId work = 0;
    bool in_flight = false;
  };

  Status finish(Lane& lane) {
    if (!lane.in_flight) return Status();
    lane.in_flight = false;
    const bool polls = lane.index % 2 == 0;  // both ways to see the end, mixed
    Result<bool> done = polls ? communicator_.test(lane.work) : Result<bool>(false);
    if (!done.ok()) return done.status();
    if (!done.value()) {
      CORTADO_RETURN_IF_ERROR(communicator_.wait(lane.work, kLong));
    }
    const int world_size = communicator_.world_size();
    const int expected = world_size * (lane.index % 1000) + world_size * (world_size - 1) / 2;
    const auto is_wrong = [expected](float value) { return value != static_cast<float>(expected); };
    if (std::none_of(lane.values.begin(), lane.values.end(), is_wrong)) return Status();
    return make_error(StatusCode::kInternal, "wrong sum in collective %d", lane.index);
  }

  Communicator& communicator_;
  std::vector<Lane> lanes_;
};

TEST(LocalStress, ThousandCollectivesSeveralInFlight) {
  for (const int world_size : {2, 3, 5, 8}) {
    const auto statuses = run_ranks(world_size, [](Communicator& communicator) {
      Pipeline pipeline(&communicator, 1 + 3 * communicator.rank());  // ranks run ahead by different depths
      for (int index = 0; index < 1000; ++index) {
        if (index % 97 == communicator.rank()) std::this_thread::sleep_for(std::chrono::microseconds(300));
        CORTADO_RETURN_IF_ERROR(pipeline.step(index));
      }
      return pipeline.drain();
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(LocalStress, SteadyStateDoesNotAllocate) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  constexpr int kWarmUp = 100, kMeasured = 1000, kDepth = 32;  // within the slots a group begins with
  std::atomic<std::int64_t> allocations{-1};
  const auto statuses = run_ranks(3, [&allocations](Communicator& communicator) {
    Pipeline pipeline(&communicator, kDepth);
    std::array<std::byte, 3> gathered;
    const std::array<std::byte, 1> token{};
    std::int64_t before = 0;
    for (int index = 0; index < kWarmUp + kMeasured; ++index) {
      if (index == kWarmUp) {
        // All ranks have left the warm-up when one of them starts to count, and none has returned when it stops.
        CORTADO_RETURN_IF_ERROR(communicator.all_gather(token, gathered, kLong));
        before = allocation_count();
      }
      CORTADO_RETURN_IF_ERROR(pipeline.step(index));
    }
    CORTADO_RETURN_IF_ERROR(pipeline.drain());
    if (communicator.rank() == 0) allocations = allocation_count() - before;
    return communicator.all_gather(token, gathered, kLong);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(allocations, 0);
  const std::int64_t before = allocation_count();
  ::operator delete(::operator new(1));  // called by name: compilers may leave out new-expressions
  EXPECT_EQ(allocation_count() - before, 1) << "the counter works";
}

TEST(LocalStress, NoKindOfCollectiveAllocates) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  LocalGroup group(3);
  std::vector<std::vector<CheckedCollective>> of_rank(3);
  const std::vector<std::vector<std::int64_t>> counts{{4, 0, 3000}, {1, 2, 3}, {0, 5, 6}};
  for (int rank = 0; rank < 3; ++rank) {
    for (const CollectiveKind kind : kEveryKind) {
      const bool one_block =
          kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce;
      of_rank[rank].emplace_back(kind, DType::kBFloat16, 1, 100, std::vector<std::vector<std::int64_t>>(), false, rank,
                                 3);
      if (!one_block) of_rank[rank].emplace_back(kind, DType::kBFloat16, 1, 0, counts, false, rank, 3);
    }
  }
  const std::int64_t before = allocation_count();
  for (std::size_t k = 0; k < of_rank[0].size(); ++k) {
    for (const int rank : {0, 1, 2}) ASSERT_TRUE(group.communicator(rank)->start(of_rank[rank][k].call()).ok());
    for (const int rank : {0, 1, 2}) ASSERT_TRUE(group.communicator(rank)->wait(k, kLong).ok());
  }
  EXPECT_EQ(allocation_count() - before, 0);
  for (const auto& collectives : of_rank) {
    for (const CheckedCollective& collective : collectives) EXPECT_TRUE(collective.check().ok());
  }
}

// The buffers of a rank die as soon as it has an error: the address sanitizer sees any later use of them.
TEST(LocalStress, RanksLeavingMidwayEndEverybody) {
  for (int round = 0; round < 50; ++round) {
    const auto statuses = run_ranks(4, [round](Communicator& communicator) {
      Pipeline pipeline(&communicator, 6);
      for (int index = 0;; ++index) {
        if (communicator.rank() == round % 4 && index == 5 + round) {
          EXPECT_TRUE(communicator.abandon("leaves"));  // before the pipeline goes
          return Status(StatusCode::kInternal, "leaves");
        }
        CORTADO_RETURN_IF_ERROR(pipeline.step(index));
      }
    });
    for (int rank = 0; rank < 4; ++rank) {
      const StatusCode expected = rank == round % 4 ? StatusCode::kInternal : StatusCode::kPeerFailed;
      EXPECT_EQ(statuses[rank].code(), expected) << statuses[rank].to_string();
    }
  }
}

// Waits so short that timeouts, sums in progress and late starts meet; every rank must end, with the same error.
TEST(LocalStress, TimeoutsRaceWithArrivals) {
  for (int round = 0; round < 100; ++round) {
    const auto statuses = run_ranks(3, [round](Communicator& communicator) {
      std::vector<float> values(20000, 1);
      for (int index = 0; index < 50; ++index) {
        if (communicator.rank() == round % 3 && index == 10)
          std::this_thread::sleep_for(std::chrono::microseconds(500));
        CORTADO_ASSIGN_OR_RETURN(const WorkId work,
                                 communicator.start_all_reduce(values.data(), 20000, DType::kFloat32));
        const auto timeout = std::chrono::microseconds(450 + round);
        CORTADO_RETURN_IF_ERROR(communicator.wait(work, timeout));
      }
      return Status();
    });
    for (const Status& status : statuses) {
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kTimeout) << status.to_string();
    }
  }
}

}  // namespace
}  // namespace cortado::local_stress_test

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every rank runs the same tests in the same order:
//   mpirun -n 3 cortado_mpi_test --gtest_filter='Mpi.*'
//   mpirun -n 3 cortado_mpi_test --gtest_filter=MpiFault.StalledRankTimesOut
// After a fault MPI can't end in order, because collectives are in flight for good: one fault a run, which says at its
// end that all ranks passed, and aborts.
#include <gtest/gtest.h>
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/mpi_testing.h"
#include "core/check.h"
#include "cortado/mpi.h"

namespace cortado {

std::unique_ptr<Communicator> make_mpi_world() { return make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD)).value(); }

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kLong(30);

TEST(Mpi, EveryKindOfCollective) {
  const auto world = make_mpi_world();
  EXPECT_EQ(world->name(), "mpi");
  const Status status = check_every_collective(*world, kLong);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Mpi, ManyInFlightEndInAnyOrder) {
  const auto world = make_mpi_world();
  std::vector<CheckedCollective> collectives;
  collectives.reserve(2000);
  std::vector<WorkId> works;
  const Status started = for_each_collective(*world, [&](CheckedCollective& collective) {
    if (collectives.size() == 500) return Status();
    collectives.push_back(std::move(collective));
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, world->start(collectives.back().call()));
    EXPECT_EQ(work, collectives.size() - 1);
    works.push_back(work);
    return Status();
  });
  ASSERT_TRUE(started.ok()) << started.to_string();
  for (std::size_t i = 0; i < works.size(); ++i) {
    const std::size_t k = i % 2 == 0 ? works.size() - 1 - i / 2 : i / 2;  // from both ends
    const Status ended = world->wait(works[k], kLong);
    ASSERT_TRUE(ended.ok()) << ended.to_string();
    EXPECT_TRUE(world->test(works[k]).value());
    const Status right = collectives[k].check();
    EXPECT_TRUE(right.ok()) << right.to_string();
  }
}

TEST(Mpi, TestSeesTheEndWithoutWaiting) {
  const auto world = make_mpi_world();
  float value = 1;
  if (world->rank() == 0) std::this_thread::sleep_for(milliseconds(100));
  const WorkId work = world->start_all_reduce(&value, 1, DType::kFloat32).value();
  const auto deadline = steady_clock::now() + kLong;
  while (!world->test(work).value()) ASSERT_LT(steady_clock::now(), deadline);
  EXPECT_EQ(value, static_cast<float>(world->world_size()));
}

// 256 + 1 is no bf16: a sum that rounds at each of at most three additions is within three steps of 2 of the true one.
TEST(Mpi, SumsOfHalvesAreTakenInFloat32) {
  const auto world = make_mpi_world();
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const float start = dtype == DType::kBFloat16 ? 256 : 2048;
    const auto store = dtype == DType::kBFloat16 ? float_to_bf16 : float_to_fp16;
    const auto load = dtype == DType::kBFloat16 ? bf16_to_float : fp16_to_float;
    std::vector<std::uint16_t> values{store(world->rank() == 0 ? start : 3.0f),
                                      store(std::numeric_limits<float>::infinity()), store(1.0f)};
    const WorkId work = world->start_all_reduce(values.data(), 3, dtype).value();
    ASSERT_TRUE(world->wait(work, kLong).ok());
    const auto peers = static_cast<float>(world->world_size() - 1);
    EXPECT_NEAR(load(values[0]), start + 3 * peers, 2 * peers);
    EXPECT_EQ(load(values[1]), std::numeric_limits<float>::infinity());
    EXPECT_EQ(load(values[2]), peers + 1);
    std::vector<std::byte> everybodys(6 * static_cast<std::size_t>(world->world_size()));
    ASSERT_TRUE(world->all_gather(std::as_bytes(std::span(values)), everybodys, kLong).ok());
    for (int rank = 1; rank < world->world_size(); ++rank) {
      EXPECT_EQ(std::memcmp(everybodys.data(), everybodys.data() + 6 * rank, 6), 0) << "the same bytes everywhere";
    }
  }
}

TEST(Mpi, SubgroupsRunEveryKindOfCollective) {
  const auto world = make_mpi_world();
  std::vector<int> ranks;  // evens, and odds from the last to the first
  for (int rank = world->rank() % 2; rank < world->world_size(); rank += 2) {
    ranks.insert(world->rank() % 2 == 0 ? ranks.end() : ranks.begin(), rank);
  }
  const auto group = world->subgroup(ranks).value();
  EXPECT_EQ(ranks[static_cast<std::size_t>(group->rank())], world->rank());
  const Status status = check_every_collective(*group, kLong);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(world->subgroup(std::array{world->world_size()}).status().code(), StatusCode::kInvalidArgument);
}

TEST(Mpi, VerifiedCollectives) {
  const auto world = make_mpi_world();
  const auto verifying = make_verifying_communicator(world.get());
  const Status status = check_every_collective(*verifying, kLong);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Mpi, RefusesWrongArguments) {
  const auto world = make_mpi_world();
  float value = 1;
  EXPECT_EQ(world->start_all_reduce(nullptr, 1, DType::kFloat32).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(world->test(0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(world->wait(0, kLong).code(), StatusCode::kInvalidArgument);
  const Status too_long = world->start_all_reduce(&value, std::int64_t{1} << 31, DType::kFloat32).status();
  EXPECT_EQ(too_long.code(), StatusCode::kUnsupported);
  EXPECT_EQ(too_long.message(), "mpi: all_reduce fp32 2147483648: 2147483648 elements, at most 2^31 - 1 are possible");
  EXPECT_EQ(make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_NULL)).status().code(), StatusCode::kInvalidArgument);
}

// ---- faults --------------------------------------------------------------------------------------------------------

Status reduce_one(Communicator& communicator, std::chrono::nanoseconds timeout) {
  static float value = 1;  // stays MPI's
  CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start_all_reduce(&value, 1, DType::kFloat32));
  return communicator.wait(work, timeout);
}

void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

TEST(MpiFault, StalledRankTimesOut) {
  Communicator* world = make_mpi_world().release();
  ASSERT_TRUE(reduce_one(*world, kLong).ok());
  const int last = world->world_size() - 1;
  barrier();
  if (world->rank() == last) {
    std::this_thread::sleep_for(seconds(6));  // busy with something else
    const Status late = reduce_one(*world, kLong);
    EXPECT_EQ(late.code(), StatusCode::kTimeout) << late.to_string();
    return barrier();
  }
  const auto begin = steady_clock::now();
  const Status status = reduce_one(*world, world->rank() == 0 ? milliseconds(300) : milliseconds(20000));
  EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
  EXPECT_LT(steady_clock::now() - begin, milliseconds(2500)) << "a second for the roll call";
  EXPECT_EQ(status.message(), "collective 1 (all_reduce fp32 1) on mpi: rank 0 waited 0.3 s; rank " +
                                  std::to_string(last) + " did not answer within 1 s: gone, stuck, or in another step");
  EXPECT_EQ(reduce_one(*world, kLong).message(), status.message()) << "the first failure stays";
  barrier();
}

TEST(MpiFault, AbandonReachesEveryRank) {
  Communicator* world = make_mpi_world().release();
  const auto begin = steady_clock::now();
  Status status;
  if (world->rank() == 1) {
    EXPECT_FALSE(world->abandon("out of coffee")) << "MPI can't take back a collective";
    status = reduce_one(*world, kLong);
  } else {
    while (world->peer_failure().ok() && steady_clock::now() - begin < seconds(10)) continue;
    EXPECT_EQ(world->peer_failure().message(), "rank 1 has left the group: out of coffee");
    status = reduce_one(*world, kLong);
  }
  EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
  EXPECT_EQ(status.message(), "rank 1 has left the group: out of coffee");
  EXPECT_LT(steady_clock::now() - begin, seconds(10));
  barrier();
}

TEST(MpiFault, MismatchIsToldToEveryRank) {
  Communicator* world = make_mpi_world().release();
  Communicator* verifying = make_verifying_communicator(world).release();
  static float values[8] = {};
  const std::int64_t elems = world->rank() == 2 ? 5 : 4;
  const WorkId work = verifying->start_all_reduce(values, elems, DType::kFloat32).value();
  const Status status = verifying->wait(work, kLong);
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_EQ(status.message(), "collective 0: rank 0 started all_reduce fp32 4, rank 2 started all_reduce fp32 5");
  barrier();
}

TEST(MpiFault, FailureInASubgroupIsEverybodys) {
  Communicator* world = make_mpi_world().release();
  const bool paired = world->rank() < 2;
  std::vector<int> others;
  for (int rank = 2; rank < world->world_size(); ++rank) others.push_back(rank);
  Communicator* group = world->subgroup(paired ? std::vector<int>{0, 1} : others).value().release();
  if (world->rank() == 1) {
    std::this_thread::sleep_for(milliseconds(3000));  // does not come in time
    const Status late = reduce_one(*group, kLong);
    EXPECT_EQ(late.code(), StatusCode::kTimeout) << late.to_string();
  } else if (world->rank() == 0) {
    const Status status = reduce_one(*group, milliseconds(100));
    EXPECT_EQ(status.message(),
              "collective 0 of ranks 0, 1 (all_reduce fp32 1) on mpi: rank 0 waited 0.1 s; rank 1 did not "
              "answer within 1 s: gone, stuck, or in another step");
  } else {
    const Status status = reduce_one(*world, kLong);  // waits for all, in another group
    EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
    EXPECT_NE(status.message().find("collective 0 of ranks 0, 1"), std::string::npos) << status.message();
  }
  barrier();
}

// mpirun ends the whole job when a process dies; the others do not sit out their timeouts.
TEST(MpiFault, DeadRankEndsTheJob) {
  Communicator* world = make_mpi_world().release();
  ASSERT_TRUE(reduce_one(*world, kLong).ok());
  if (world->rank() == 1) {
    std::printf("rank 1 dies\n");
    std::fflush(stdout);
    std::this_thread::sleep_for(seconds(1));
    std::_Exit(3);
  }
  ADD_FAILURE() << reduce_one(*world, std::chrono::minutes(10)).to_string();
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  int failed = RUN_ALL_TESTS();
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  if (tests.successful_test_count() + tests.failed_test_count() == 0) failed = 1;
  const std::string filter = testing::GTEST_FLAG(filter);
  int rank = 0, ranks = 0, most = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Allreduce(&failed, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (filter.rfind("MpiFault", 0) == 0) {
    if (most == 0 && rank == 0) std::printf("all %d ranks passed %s\n", ranks, filter.c_str());
    std::fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    std::this_thread::sleep_for(std::chrono::seconds(1));  // mpirun drops what it has not read by then
    MPI_Abort(MPI_COMM_WORLD, most);
  }
  MPI_Finalize();
  return most;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/rank_threads.h"
#include "collective/virtual_clock.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado::faulty_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kLong(30);

std::unique_ptr<Communicator> with_fault(Communicator* inner, std::int64_t at, Fault::Kind kind,
                                         std::chrono::nanoseconds delay = {}) {
  return make_faulty_communicator(inner, {{.at = at, .kind = kind, .delay = delay}});
}

TEST(Faulty, WithoutFaultsItOnlyForwards) {
  LocalGroup group(1);
  const auto communicator = make_faulty_communicator(group.communicator(0), {});
  EXPECT_EQ(communicator->name(), "faulty(local)");
  EXPECT_EQ(communicator->rank(), 0);
  EXPECT_EQ(communicator->world_size(), 1);
  float value = 5;
  const WorkId work = communicator->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_TRUE(communicator->test(work).value());
  EXPECT_TRUE(communicator->wait(work, kLong).ok());
  const std::array<std::byte, 1> sent{std::byte(7)};
  std::array<std::byte, 1> received{};
  EXPECT_TRUE(communicator->all_gather(sent, received, kLong).ok());
  EXPECT_EQ(received[0], sent[0]);
}

TEST(Faulty, DelayHoldsBackTestAndWait) {
  LocalGroup group(1);
  const auto communicator = with_fault(group.communicator(0), 1, Fault::Kind::kDelay, milliseconds(40));
  float values[3] = {};
  std::vector<WorkId> works;
  const auto begin = steady_clock::now();
  for (float& value : values) works.push_back(communicator->start_all_reduce(&value, 1, DType::kFloat32).value());
  EXPECT_TRUE(communicator->test(works[0]).value());
  EXPECT_TRUE(communicator->test(works[2]).value());
  const bool delayed_done = communicator->test(works[1]).value();
  EXPECT_TRUE(!delayed_done || steady_clock::now() - begin >= milliseconds(40));
  EXPECT_TRUE(communicator->wait(works[1], kLong).ok());
  EXPECT_GE(steady_clock::now() - begin, milliseconds(40));
  EXPECT_TRUE(communicator->test(works[1]).value());
}

TEST(Faulty, DelayBeyondTheTimeoutIsATimeout) {
  LocalGroup group(1);
  const auto communicator = with_fault(group.communicator(0), 0, Fault::Kind::kDelay, std::chrono::minutes(10));
  float value = 1;
  const WorkId work = communicator->start_all_reduce(&value, 1, DType::kFloat32).value();
  const auto begin = steady_clock::now();
  EXPECT_EQ(communicator->wait(work, milliseconds(10)).code(), StatusCode::kTimeout);
  EXPECT_GE(steady_clock::now() - begin, milliseconds(10));
  EXPECT_LT(steady_clock::now() - begin, std::chrono::minutes(1));
}

// Reduces until an error comes, at most five times; the collective with index 2 must be the one that fails.
Status reduce_until_error(Communicator& communicator) {
  float values[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start_all_reduce(&values[i], 1, DType::kFloat32));
    if (Status status = communicator.wait(work, milliseconds(300)); !status.ok()) {
      return i == 2 ? status : make_error(StatusCode::kInternal, "collective %d: %s", i, status.message().c_str());
    }
  }
  return Status();
}

TEST(Faulty, DropTimesOutOnEveryRank) {
  Status of_dropper;
  VirtualClock clock(3);
  LocalGroup group(3, &clock);
  const auto statuses = run_ranks(group, 3, [&](Communicator& inner) {
    Status status;
    if (inner.rank() == 1) {  // no abandon: the peers are to find out by themselves
      of_dropper =
          reduce_until_error(*make_faulty_communicator(&inner, {{.at = 2, .kind = Fault::Kind::kDrop}}, &clock));
    } else {
      status = reduce_until_error(inner);
    }
    clock.leave();
    return status;
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), StatusCode::kTimeout) << statuses[rank].to_string();
    EXPECT_NE(statuses[rank].message().find("have not started it: 1"), std::string::npos) << statuses[rank].message();
  }
  EXPECT_EQ(of_dropper.code(), StatusCode::kTimeout);
  EXPECT_NE(of_dropper.message().find("rank 1 was dropped"), std::string::npos) << of_dropper.message();
}

TEST(Faulty, NothingAfterADropReachesThePeers) {
  LocalGroup group(2);
  const auto communicator = with_fault(group.communicator(0), 0, Fault::Kind::kDrop);
  float mine[2] = {1, 2}, theirs = 3;
  const WorkId dropped = communicator->start_all_reduce(&mine[0], 1, DType::kFloat32).value();
  const WorkId later = communicator->start_all_reduce(&mine[1], 1, DType::kFloat32).value();
  EXPECT_NE(dropped, later);
  ASSERT_TRUE(group.communicator(1)->start_all_reduce(&theirs, 1, DType::kFloat32).ok());
  EXPECT_FALSE(communicator->test(dropped).value());
  EXPECT_FALSE(communicator->test(later).value());
  EXPECT_EQ(communicator->wait(later, milliseconds(1)).code(), StatusCode::kTimeout);
  std::array<std::byte, 2> received{};
  EXPECT_EQ(communicator->all_gather({received.data(), 1}, received, milliseconds(1)).code(), StatusCode::kTimeout);
  EXPECT_EQ(theirs, 3);
}

TEST(Faulty, ErrorRefusesTheStart) {
  LocalGroup group(1);
  const auto communicator = with_fault(group.communicator(0), 1, Fault::Kind::kError);
  float value = 1;
  EXPECT_TRUE(communicator->start_all_reduce(&value, 1, DType::kFloat32).ok());
  const Status status = communicator->start_all_reduce(&value, 1, DType::kFloat32).status();
  EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
  EXPECT_NE(status.message().find("all_reduce 1 of rank 0"), std::string::npos) << status.message();
}

TEST(Faulty, CorruptChangesTheSumOfAllRanksAlike) {
  LocalGroup group(2);
  const auto communicator = with_fault(group.communicator(0), 0, Fault::Kind::kCorrupt);
  float mine[3] = {1, 1, 1}, theirs[3] = {1, 1, 1};
  ASSERT_TRUE(communicator->start_all_reduce(mine, 3, DType::kFloat32).ok());
  ASSERT_TRUE(group.communicator(1)->start_all_reduce(theirs, 3, DType::kFloat32).ok());
  for (const float* sums : {mine, theirs}) {
    EXPECT_EQ(sums[0], 2);
    EXPECT_EQ(sums[1], 2.5f);
    EXPECT_EQ(sums[2], 2);
  }
}

TEST(Faulty, GathersAreDelayedDroppedRefusedAndCorruptedToo) {
  LocalGroup group(2);
  const auto communicator = make_faulty_communicator(
      group.communicator(0), {{.at = 0, .kind = Fault::Kind::kCorrupt}, {.at = 2, .kind = Fault::Kind::kError}});
  const std::array<std::byte, 3> sent{std::byte(1), std::byte(2), std::byte(3)};
  std::array<std::byte, 6> mine{}, theirs{};
  ASSERT_TRUE(communicator->start_all_gather(sent, mine).ok());
  ASSERT_TRUE(group.communicator(1)->start_all_gather(sent, theirs).ok());
  EXPECT_EQ(mine, theirs);
  EXPECT_EQ(mine, (std::array{std::byte(1), std::byte(0x82), std::byte(3), std::byte(1), std::byte(2), std::byte(3)}));
  EXPECT_EQ(sent[1], std::byte(2)) << "only what travels is wrong";
  float value = 1;
  EXPECT_TRUE(communicator->start_all_reduce(&value, 1, DType::kFloat32).ok()) << "one count for both kinds";
  const Status refused = communicator->start_all_gather(sent, mine).status();
  EXPECT_EQ(refused.code(), StatusCode::kPeerFailed);
  EXPECT_NE(refused.message().find("all_gather 2 of rank 0"), std::string::npos) << refused.message();
}

TEST(Faulty, CorruptFlipsOneBitOfEveryDType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
    LocalGroup group(1);
    const auto communicator = with_fault(group.communicator(0), 0, Fault::Kind::kCorrupt);
    std::array<unsigned char, 12> bytes{};
    ASSERT_TRUE(communicator->start_all_reduce(bytes.data(), 3, dtype).ok());
    int flipped = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      flipped += __builtin_popcount(bytes[i]);
      const bool in_middle = i / dtype_bytes(dtype) == 1;
      EXPECT_TRUE(in_middle || bytes[i] == 0) << dtype_name(dtype);
    }
    EXPECT_EQ(flipped, 1) << dtype_name(dtype);
  }
}

TEST(Faulty, EveryKindIsDelayedDroppedRefusedAndCorrupted) {
  for (const CollectiveKind kind : kEveryKind) {
    for (const bool in_place : {false, true}) {
      LocalGroup group(2);
      const auto faulty = make_faulty_communicator(group.communicator(0), {{.at = 0, .kind = Fault::Kind::kCorrupt},
                                                                           {.at = 1, .kind = Fault::Kind::kError},
                                                                           {.at = 2, .kind = Fault::Kind::kDrop}});
      const bool has_place = kind != CollectiveKind::kReduceScatter && kind != CollectiveKind::kAllToAll;
      if (in_place && !has_place) continue;
      // Whatever the kind, the middle element of rank 0 goes to rank 1.
      const int root = kind == CollectiveKind::kBroadcast ? 0 : 1;
      CheckedCollective mine(kind, DType::kFloat32, root, 3, {}, in_place, 0, 2);
      CheckedCollective theirs(kind, DType::kFloat32, root, 3, {}, false, 1, 2);
      ASSERT_TRUE(faulty->start(mine.call()).ok());
      ASSERT_TRUE(group.communicator(1)->start(theirs.call()).ok());
      EXPECT_NE(theirs.check().message().find("wrong result"), std::string::npos) << describe(mine.call());
      const Status refused = faulty->start(mine.call()).status();
      EXPECT_EQ(refused.code(), StatusCode::kPeerFailed);
      EXPECT_NE(refused.message().find(std::string(collective_kind_name(kind)) + " 1 of rank 0"), std::string::npos)
          << refused.message();
      const WorkId dropped = faulty->start(mine.call()).value();
      EXPECT_FALSE(faulty->test(dropped).value());
      EXPECT_EQ(faulty->wait(dropped, milliseconds(1)).code(), StatusCode::kTimeout);
    }
  }
}

TEST(Faulty, TruncatedGathersEndInZerosAndTruncatedSumsDisagree) {
  LocalGroup group(2);
  const auto faulty = make_faulty_communicator(
      group.communicator(1), {{.at = 0, .kind = Fault::Kind::kTruncate}, {.at = 1, .kind = Fault::Kind::kTruncate}});
  const std::array<std::byte, 4> sent{std::byte(1), std::byte(2), std::byte(3), std::byte(4)};
  std::array<std::byte, 8> received[2] = {};
  ASSERT_TRUE(group.communicator(0)->start_all_gather(sent, received[0]).ok());
  ASSERT_TRUE(faulty->start_all_gather(sent, received[1]).ok());
  const std::array<std::byte, 8> expected{sent[0], sent[1], sent[2], sent[3], sent[0], sent[1]};
  EXPECT_EQ(received[0], expected);
  EXPECT_EQ(received[1], expected);
  EXPECT_EQ(sent[3], std::byte(4)) << "the caller's own bytes stay";

  float values[2][4] = {};
  ASSERT_TRUE(group.communicator(0)->start_all_reduce(values[0], 4, DType::kFloat32).ok());
  const Status status = faulty->start_all_reduce(values[1], 4, DType::kFloat32).status();
  EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
}

TEST(Faulty, SubgroupsShareTheFaults) {
  LocalGroup group(2);
  const auto faulty = make_faulty_communicator(
      group.communicator(0), {{.at = 1, .kind = Fault::Kind::kError}, {.at = 2, .kind = Fault::Kind::kDrop}});
  const auto subgroup = faulty->subgroup(std::array{0}).value();
  EXPECT_EQ(subgroup->name(), "faulty(local)");
  float value = 1;
  EXPECT_TRUE(subgroup->start_all_reduce(&value, 1, DType::kFloat32).ok());
  EXPECT_EQ(faulty->start_all_reduce(&value, 1, DType::kFloat32).status().code(), StatusCode::kPeerFailed);
  const WorkId dropped = subgroup->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_EQ(subgroup->wait(dropped, milliseconds(1)).code(), StatusCode::kTimeout);
  EXPECT_TRUE(subgroup->wait(0, kLong).ok()) << "what came before the drop";
  const WorkId later = faulty->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_EQ(faulty->wait(later, milliseconds(1)).code(), StatusCode::kTimeout) << "a rank hangs in all its groups";
}

}  // namespace
}  // namespace cortado::faulty_test

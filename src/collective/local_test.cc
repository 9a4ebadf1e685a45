// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "collective/collective_call.h"
#include "collective/communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/sanitized.h"
#include "cortado/communicator.h"

namespace cortado::local_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kLong(30);  // a test that needs it hangs

// ---- sums ----------------------------------------------------------------------------------------------------------

// A different small number for every rank, collective and element: sums of 64 of them are exact in every dtype.
int value_of(int rank, int collective, int elem) { return (7 * rank + 5 * collective + 3 * elem) % 4; }

std::vector<std::byte> contribution(DType dtype, int rank, int collective, int elems) {
  std::vector<int> values;
  for (int i = 0; i < elems; ++i) values.push_back(value_of(rank, collective, i));
  return encode_as(dtype, values);
}

std::vector<std::byte> expected_sum(DType dtype, int world_size, int collective, int elems) {
  std::vector<int> values(static_cast<std::size_t>(elems));
  for (int i = 0; i < elems; ++i) {
    for (int rank = 0; rank < world_size; ++rank) values[i] += value_of(rank, collective, i);
  }
  return encode_as(dtype, values);
}

// Sleeps 0 to 200 us, a different time for every rank and collective.
void dawdle(int rank, int collective) {
  const unsigned hash = (static_cast<unsigned>(rank) * 2654435761u) ^ (static_cast<unsigned>(collective) * 40503u);
  if (hash % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(hash / 7 % 200));
}

class LocalSums : public testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(LocalSums, AreRightWhateverTheTiming) {
  const auto [world_size, dtype] = GetParam();
  const auto statuses = run_ranks(world_size, [world_size = world_size, dtype = dtype](Communicator& communicator) {
    for (int collective = 0; collective < 20; ++collective) {
      const int elems = collective * collective * 11;  // 0 to 3971: several tiles
      auto buffer = contribution(dtype, communicator.rank(), collective, elems);
      dawdle(communicator.rank(), collective);
      CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start_all_reduce(buffer.data(), elems, dtype));
      CORTADO_RETURN_IF_ERROR(communicator.wait(work, kLong));
      if (buffer != expected_sum(dtype, world_size, collective, elems)) {
        return make_error(StatusCode::kInternal, "wrong sum in collective %d", collective);
      }
    }
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

INSTANTIATE_TEST_SUITE_P(All, LocalSums,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8),
                                          testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                                          DType::kUint8)));

TEST(Local, SumsInRankOrderInWhateverOrderRanksCome) {
  for (const std::array<int, 3> order : {std::array{0, 1, 2}, std::array{2, 1, 0}, std::array{1, 2, 0}}) {
    LocalGroup group(3);
    float values[] = {1e8f, 1, -1e8f};
    for (const int rank : order) {
      ASSERT_TRUE(group.communicator(rank)->start_all_reduce(&values[rank], 1, DType::kFloat32).ok());
    }
    for (const float value : values) EXPECT_EQ(value, 0);
  }
}

TEST(Local, SixtyFourRanks) {
  const auto statuses = run_ranks(64, [](Communicator& communicator) {
    float value = 1;
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start_all_reduce(&value, 1, DType::kFloat32));
    CORTADO_RETURN_IF_ERROR(communicator.wait(work, kLong));
    return value == 64 ? Status() : Status(StatusCode::kInternal, "wrong sum");
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// ---- order ---------------------------------------------------------------------------------------------------------

TEST(Local, RankMayRunAheadOfAllOthers) {
  constexpr int kAhead = 1024;
  LocalGroup group(2);
  std::vector<float> ahead(kAhead), behind(kAhead);
  for (int i = 0; i < kAhead; ++i) {
    ahead[i] = static_cast<float>(i);
    behind[i] = 0.5f;
    const Result<WorkId> work = group.communicator(0)->start_all_reduce(&ahead[i], 1, DType::kFloat32);
    ASSERT_TRUE(work.ok());
    EXPECT_EQ(work.value(), static_cast<WorkId>(i));
  }
  for (int i = 0; i < kAhead; ++i) {
    const auto work = static_cast<WorkId>(i);
    EXPECT_FALSE(group.communicator(0)->test(work).value());
    ASSERT_TRUE(group.communicator(1)->start_all_reduce(&behind[i], 1, DType::kFloat32).ok());
    EXPECT_TRUE(group.communicator(0)->test(work).value());
    EXPECT_EQ(ahead[i], i + 0.5f);
    EXPECT_EQ(behind[i], i + 0.5f);
  }
  EXPECT_TRUE(group.communicator(0)->wait(kAhead - 1, kLong).ok()) << "waits may come in any order";
  EXPECT_TRUE(group.communicator(0)->wait(0, kLong).ok());
  EXPECT_TRUE(group.communicator(0)->wait(0, kLong).ok()) << "and more than once";
}

// ---- failures ------------------------------------------------------------------------------------------------------

Status reduce_one(Communicator& communicator, std::chrono::nanoseconds timeout) {
  float value = 1;
  CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start_all_reduce(&value, 1, DType::kFloat32));
  return communicator.wait(work, timeout);
}

TEST(Local, TimeoutNamesTheRanksThatDidNotCome) {
  LocalGroup group(5);
  float values[5] = {};
  for (const int rank : {0, 2, 3}) {
    ASSERT_TRUE(group.communicator(rank)->start_all_reduce(&values[rank], 1, DType::kFloat32).ok());
  }
  const Status status = group.communicator(2)->wait(0, milliseconds(20));
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.message(),
            "collective 0 (all_reduce fp32 1): rank 2 waited 0.02 s; ranks that have not started it: 1, 4");
  for (const int rank : {0, 3}) {
    EXPECT_EQ(group.communicator(rank)->wait(0, kLong).message(), status.message()) << "the same on every rank";
  }
}

TEST(Local, TimeoutsEndEveryWaitingRank) {
  const auto statuses = run_ranks(3, [](Communicator& communicator) {
    return communicator.rank() == 1 ? Status() : reduce_one(communicator, milliseconds(30));
  });
  for (const int rank : {0, 2}) EXPECT_EQ(statuses[rank].code(), StatusCode::kTimeout) << statuses[rank].to_string();
}

TEST(Local, BufferOfARankThatTimedOutIsNotTouched) {
  LocalGroup group(2);
  float patient = 1, late = 2;
  const WorkId work = group.communicator(0)->start_all_reduce(&patient, 1, DType::kFloat32).value();
  EXPECT_EQ(group.communicator(0)->wait(work, milliseconds(1)).code(), StatusCode::kTimeout);
  EXPECT_EQ(group.communicator(1)->start_all_reduce(&late, 1, DType::kFloat32).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(group.communicator(0)->test(work).status().code(), StatusCode::kTimeout) << "and it stays dead";
  EXPECT_EQ(patient, 1);
  EXPECT_EQ(late, 2);
}

TEST(Local, AbandonEndsPresentAndLaterWaits) {
  const auto begin = steady_clock::now();
  const auto statuses = run_ranks(3, [](Communicator& communicator) {
    if (communicator.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(20));  // rank 0 waits by now
      return Status(StatusCode::kInternal, "out of coffee");
    }
    if (communicator.rank() == 2) std::this_thread::sleep_for(milliseconds(60));
    return reduce_one(communicator, kLong);
  });
  EXPECT_LT(steady_clock::now() - begin, seconds(10));
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), StatusCode::kPeerFailed);
    EXPECT_NE(statuses[rank].message().find("rank 1 has left the group"), std::string::npos);
    EXPECT_NE(statuses[rank].message().find("out of coffee"), std::string::npos);
  }
}

TEST(Local, WhatAllRanksStartedEndsWellAfterAFailure) {
  LocalGroup group(2);
  float first[] = {1, 2}, second = 1;
  const WorkId shared = group.communicator(0)->start_all_reduce(&first[0], 1, DType::kFloat32).value();
  const WorkId lonely = group.communicator(0)->start_all_reduce(&second, 1, DType::kFloat32).value();
  ASSERT_TRUE(group.communicator(1)->start_all_reduce(&first[1], 1, DType::kFloat32).ok());
  group.abandon(1, "its work is done");
  EXPECT_TRUE(group.communicator(0)->wait(shared, kLong).ok());
  EXPECT_EQ(first[0], 3);
  EXPECT_EQ(group.communicator(0)->wait(lonely, kLong).code(), StatusCode::kPeerFailed);
  group.abandon(0, "another reason");
  EXPECT_NE(group.communicator(0)->wait(lonely, kLong).message().find("rank 1"), std::string::npos)
      << "the first stays";
}

TEST(Local, TellsWithoutACollectiveThatAPeerHasFailed) {
  LocalGroup group(2);
  RecordingCommunicator decorated(group.communicator(0));
  const auto verifying = make_verifying_communicator(&decorated);
  const auto faulty = make_faulty_communicator(verifying.get(), {});
  const std::array ranks{0};
  const auto alone = faulty->subgroup(ranks).value();
  EXPECT_TRUE(faulty->peer_failure().ok());
  EXPECT_TRUE(alone->peer_failure().ok());
  group.abandon(1, "out of memory");
  for (Communicator* communicator : {faulty.get(), alone.get()}) {
    const Status status = communicator->peer_failure();
    EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
    EXPECT_EQ(status.message(), "rank 1 has left the group: out of memory");
  }
  EXPECT_TRUE(decorated.log().empty());
}

TEST(Local, AbandoningRankHasItsBuffersBack) {
  LocalGroup group(2);
  float mine = 1, theirs = 2;
  ASSERT_TRUE(group.communicator(0)->start_all_reduce(&mine, 1, DType::kFloat32).ok());
  EXPECT_TRUE(group.communicator(0)->abandon("enough"));
  const Status status = group.communicator(1)->start_all_reduce(&theirs, 1, DType::kFloat32).status();
  EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
  EXPECT_EQ(status.message(), "rank 0 has left the group: enough");
  EXPECT_EQ(mine, 1);
  EXPECT_EQ(theirs, 2);
}

// Rank 0 starts `a`, then rank 1 starts `b`: both must get kMismatch with both descriptions.
void expect_mismatch(DType a, std::int64_t a_elems, DType b, std::int64_t b_elems, const std::string& text) {
  LocalGroup group(2);
  std::array<std::byte, 64> memory[2] = {};
  const WorkId work = group.communicator(0)->start_all_reduce(memory[0].data(), a_elems, a).value();
  const Status of_1 = group.communicator(1)->start_all_reduce(memory[1].data(), b_elems, b).status();
  const Status of_0 = group.communicator(0)->wait(work, kLong);
  EXPECT_EQ(of_0.code(), StatusCode::kMismatch);
  EXPECT_EQ(of_1.code(), StatusCode::kMismatch);
  EXPECT_EQ(of_0.message(), text);
  EXPECT_EQ(of_1.message(), text);
}

TEST(Local, MismatchNamesBothRanksAndValues) {
  expect_mismatch(DType::kFloat32, 3, DType::kFloat32, 4,
                  "collective 0: rank 0 started all_reduce fp32 3, rank 1 started all_reduce fp32 4");
  expect_mismatch(DType::kFloat16, 3, DType::kBFloat16, 3,
                  "collective 0: rank 0 started all_reduce fp16 3, rank 1 started all_reduce bf16 3");
}

TEST(Local, MismatchOfKind) {
  const auto statuses = run_ranks(2, [](Communicator& communicator) {
    if (communicator.rank() == 0) return reduce_one(communicator, kLong);
    const std::array<std::byte, 4> sent{};
    std::array<std::byte, 8> received;
    return communicator.all_gather(sent, received, kLong);
  });
  for (const Status& status : statuses) EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
}

TEST(Local, RefusesWrongArgumentsAndStaysUsable) {
  LocalGroup group(1);
  Communicator& communicator = *group.communicator(0);
  float value = 1;
  std::array<std::byte, 3> bytes{};
  const auto code = [](const auto& result) { return result.status().code(); };
  EXPECT_EQ(code(communicator.start_all_reduce(nullptr, 1, DType::kFloat32)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(communicator.start_all_reduce(&value, -1, DType::kFloat32)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(communicator.start_all_reduce(&value, 1, static_cast<DType>(9))), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(communicator.test(0)), StatusCode::kInvalidArgument) << "not started";
  EXPECT_EQ(communicator.wait(0, kLong).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator.all_gather({bytes.data(), 2}, bytes, kLong).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(reduce_one(communicator, kLong).ok());
  EXPECT_TRUE(communicator.start_all_reduce(nullptr, 0, DType::kFloat32).ok()) << "an empty message is one too";
}

// ---- all kinds -----------------------------------------------------------------------------------------------------

TEST(Local, EveryKindOfCollective) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    if (kSanitized && world_size > 5) continue;
    const auto statuses =
        run_ranks(world_size, [](Communicator& communicator) { return check_every_collective(communicator, kLong); });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(Local, SumsOfOneRankKeepEveryBit) {
  LocalGroup group(1);
  const std::array<std::uint16_t, 3> values{0x7C01, 0xFC01, 0x8000};  // signalling NaNs, minus zero
  for (const CollectiveKind kind :
       {CollectiveKind::kAllReduce, CollectiveKind::kReduce, CollectiveKind::kReduceScatter}) {
    std::array<std::uint16_t, 3> sums{};
    const CollectiveCall call{
        .kind = kind, .dtype = DType::kFloat16, .sent = values.data(), .received = sums.data(), .elems = 3};
    ASSERT_TRUE(group.communicator(0)->start(call).ok());
    EXPECT_EQ(sums, values) << collective_kind_name(kind);
  }
}

TEST(Local, EverySumIsTakenInRankOrder) {
  for (const CollectiveKind kind : {CollectiveKind::kReduce, CollectiveKind::kReduceScatter}) {
    LocalGroup group(3);
    const float values[3][3] = {{1e8f, 1e8f, 1e8f}, {1, 1, 1}, {-1e8f, -1e8f, -1e8f}};
    float sums[3][3] = {{7, 7, 7}, {7, 7, 7}, {7, 7, 7}};
    for (const int rank : {2, 0, 1}) {
      const std::int64_t elems = kind == CollectiveKind::kReduce ? 3 : 1;
      const CollectiveCall call{.kind = kind,
                                .dtype = DType::kFloat32,
                                .root = 0,
                                .sent = values[rank],
                                .received = sums[rank],
                                .elems = elems};
      ASSERT_TRUE(group.communicator(rank)->start(call).ok());
    }
    EXPECT_EQ(sums[0][0], 0) << "(1e8 + 1) - 1e8";
  }
}

// What the ranks of two start, and what both must be told.
void expect_mismatch(const CollectiveCall& a, const CollectiveCall& b, const std::string& text) {
  for (const int first : {0, 1}) {
    LocalGroup group(2);
    const WorkId work = group.communicator(first)->start(first == 0 ? a : b).value();
    const Status of_second = group.communicator(1 - first)->start(first == 0 ? b : a).status();
    const Status of_first = group.communicator(first)->wait(work, kLong);
    EXPECT_EQ(of_first.code(), StatusCode::kMismatch);
    EXPECT_EQ(of_second.message(), of_first.message());
    EXPECT_TRUE(first == 1 || of_first.message() == text) << of_first.message() << "\nexpected\n" << text;
  }
}

TEST(Local, MismatchesOfEveryField) {
  std::array<std::byte, 64> memory[4] = {};
  const auto call = [&memory](CollectiveKind kind, int rank, std::int64_t elems) {
    return CollectiveCall{
        .kind = kind, .sent = memory[rank].data(), .received = memory[2 + rank].data(), .elems = elems};
  };
  for (const CollectiveKind kind : kEveryKind) {
    const std::string name(collective_kind_name(kind));
    const std::string root = is_rooted(kind) ? " of root 0" : "";
    expect_mismatch(
        call(kind, 0, 3), call(kind, 1, 4),
        "collective 0: rank 0 started " + name + " uint8 3" + root + ", rank 1 started " + name + " uint8 4" + root);
    const CollectiveKind other =
        kind == CollectiveKind::kAllReduce ? CollectiveKind::kReduceScatter : CollectiveKind::kAllReduce;
    expect_mismatch(call(kind, 0, 3), call(other, 1, 3),
                    "collective 0: rank 0 started " + name + " uint8 3" + root + ", rank 1 started " +
                        std::string(collective_kind_name(other)) + " uint8 3");
    CollectiveCall halves = call(kind, 1, 3);
    halves.dtype = DType::kBFloat16;
    expect_mismatch(
        call(kind, 0, 3), halves,
        "collective 0: rank 0 started " + name + " uint8 3" + root + ", rank 1 started " + name + " bf16 3" + root);
    if (!is_rooted(kind)) continue;
    CollectiveCall rooted = call(kind, 1, 3);
    rooted.root = 1;
    expect_mismatch(
        call(kind, 0, 3), rooted,
        "collective 0: rank 0 started " + name + " uint8 3 of root 0, rank 1 started " + name + " uint8 3 of root 1");
  }
}

TEST(Local, MismatchesOfCounts) {
  std::array<std::byte, 64> memory[4] = {};
  const std::array<std::int64_t, 2> a{1, 2}, b{1, 3};
  for (const CollectiveKind kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kGather}) {
    CollectiveCall first{.kind = kind, .sent = memory[0].data(), .received = memory[2].data(), .counts = a};
    CollectiveCall second{.kind = kind, .sent = memory[1].data(), .received = memory[3].data(), .counts = b};
    const std::string name(collective_kind_name(kind));
    const std::string root = is_rooted(kind) ? " of root 0" : "";
    expect_mismatch(first, second,
                    "collective 0: rank 0 started " + name + " uint8 1+2" + root + ", rank 1 started " + name +
                        " uint8 1+3" + root);
  }
  // Rank 1 expects 2 of rank 0, which sends it 3.
  const CollectiveKind kind = CollectiveKind::kAllToAll;
  const std::array<std::int64_t, 2> received{2, 3};
  expect_mismatch(
      {.kind = kind, .sent = memory[0].data(), .received = memory[2].data(), .counts = b, .received_counts = a},
      {.kind = kind,
       .sent = memory[1].data(),
       .received = memory[3].data(),
       .counts = received,
       .received_counts = received},
      "collective 0: rank 0 started all_to_all uint8 1+3 for 1+2, rank 1 started all_to_all uint8 2+3 for 2+3");
}

TEST(Local, CountsThatAreEqualAgreeWithOneSize) {
  LocalGroup group(2);
  const std::array<std::byte, 2> sent[2] = {{std::byte(1), std::byte(2)}, {std::byte(3), std::byte(4)}};
  std::array<std::byte, 4> received[2] = {};
  const std::array<std::int64_t, 2> counts{2, 2};
  const CollectiveKind kind = CollectiveKind::kAllGather;
  ASSERT_TRUE(group.communicator(0)
                  ->start({.kind = kind, .sent = sent[0].data(), .received = received[0].data(), .elems = 2})
                  .ok());
  ASSERT_TRUE(group.communicator(1)
                  ->start({.kind = kind, .sent = sent[1].data(), .received = received[1].data(), .counts = counts})
                  .ok());
  EXPECT_EQ(received[0], received[1]);
  EXPECT_EQ(received[0][3], std::byte(4));
}

// Every kind ends with an error on all ranks when one of them does not come, or leaves.
TEST(Local, EveryKindTimesOutAndIsAbandoned) {
  for (const CollectiveKind kind : kEveryKind) {
    for (const bool abandons : {false, true}) {
      LocalGroup group(3);
      std::vector<CheckedCollective> collectives;
      for (int rank = 0; rank < 3; ++rank) {
        collectives.emplace_back(kind, DType::kFloat32, 1, 100, std::vector<std::vector<std::int64_t>>(), false, rank,
                                 3);
      }
      for (const int rank : {0, 1}) ASSERT_TRUE(group.communicator(rank)->start(collectives[rank].call()).ok());
      if (abandons) group.abandon(2, "gone");
      const Status of_0 = group.communicator(0)->wait(0, abandons ? kLong : std::chrono::nanoseconds(milliseconds(1)));
      const Status of_1 = group.communicator(1)->wait(0, kLong);
      const Status of_2 = group.communicator(2)->start(collectives[2].call()).status();
      EXPECT_EQ(of_0.code(), abandons ? StatusCode::kPeerFailed : StatusCode::kTimeout) << of_0.to_string();
      EXPECT_NE(of_0.message().find(abandons ? "rank 2 has left" : "not started it: 2"), std::string::npos);
      EXPECT_EQ(of_0.message(), of_1.message());
      EXPECT_EQ(of_0.message(), of_2.message());
    }
  }
}

// ---- sub-groups ----------------------------------------------------------------------------------------------------

TEST(Local, SubgroupsRunEveryKindOfCollective) {
  const auto statuses = run_ranks(6, [](Communicator& whole) {
    // Evens and odds, the odds from the last to the first.
    const std::vector<int> ranks = whole.rank() % 2 == 0 ? std::vector<int>{0, 2, 4} : std::vector<int>{5, 3, 1};
    CORTADO_ASSIGN_OR_RETURN(const auto group, whole.subgroup(ranks));
    EXPECT_EQ(ranks[static_cast<std::size_t>(group->rank())], whole.rank());
    EXPECT_EQ(group->world_size(), 3);
    CORTADO_RETURN_IF_ERROR(check_every_collective(*group, kLong));
    CORTADO_ASSIGN_OR_RETURN(const auto pair, group->subgroup(std::array{group->rank()}));
    return check_every_collective(*pair, kLong);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Local, EachCallMakesAnotherSubgroup) {
  LocalGroup group(2);
  const std::array ranks{0, 1};
  float values[2][2] = {{1, 10}, {2, 20}};
  std::array<std::unique_ptr<Communicator>, 2> of_rank[2];
  for (int rank = 0; rank < 2; ++rank) {
    for (auto& made : of_rank[rank]) made = group.communicator(rank)->subgroup(ranks).value();
  }
  ASSERT_TRUE(of_rank[0][0]->start_all_reduce(&values[0][0], 1, DType::kFloat32).ok());
  ASSERT_TRUE(of_rank[1][1]->start_all_reduce(&values[1][1], 1, DType::kFloat32).ok());
  ASSERT_TRUE(of_rank[0][1]->start_all_reduce(&values[0][1], 1, DType::kFloat32).ok());
  ASSERT_TRUE(of_rank[1][0]->start_all_reduce(&values[1][0], 1, DType::kFloat32).ok());
  EXPECT_EQ(values[0][0], 3);
  EXPECT_EQ(values[1][1], 30);
}

TEST(Local, AFailureInASubgroupIsEverybodys) {
  LocalGroup group(4);
  std::unique_ptr<Communicator> of_rank[4];
  for (int rank = 0; rank < 4; ++rank) {
    const int first = rank / 2 * 2;
    of_rank[rank] = group.communicator(rank)->subgroup(std::array{first, first + 1}).value();
  }
  float values[4] = {};
  ASSERT_TRUE(of_rank[2]->start_all_reduce(&values[2], 1, DType::kFloat32).ok());
  const Status timeout = of_rank[2]->wait(0, milliseconds(1));
  EXPECT_EQ(timeout.message(),
            "collective 0 of ranks 2, 3 (all_reduce fp32 1): rank 2 waited 0.001 s; ranks that have not "
            "started it: 3");
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(of_rank[rank]->start_all_reduce(&values[rank], 1, DType::kFloat32).status().message(), timeout.message());
    EXPECT_EQ(group.communicator(rank)->start_all_reduce(&values[rank], 1, DType::kFloat32).status().message(),
              timeout.message());
  }
}

TEST(Local, AbandonOfASubgroupNamesTheRankOfTheWhole) {
  LocalGroup group(4);
  const auto pair = group.communicator(3)->subgroup(std::array{1, 3}).value();
  EXPECT_TRUE(pair->abandon("enough"));
  float value = 1;
  EXPECT_EQ(group.communicator(0)->start_all_reduce(&value, 1, DType::kFloat32).status().message(),
            "rank 3 has left the group: enough");
}

TEST(Local, RefusesWrongSubgroups) {
  LocalGroup group(3);
  const auto message = [&group](std::vector<int> ranks) {
    const auto made = group.communicator(1)->subgroup(ranks);
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
    return made.status().message();
  };
  EXPECT_EQ(message({0, 2}), "subgroup: rank 1 asks for a sub-group it is not in");
  EXPECT_EQ(message({1, 3}), "subgroup: rank 3 of 3 ranks");
  EXPECT_EQ(message({1, -1}), "subgroup: rank -1 of 3 ranks");
  EXPECT_EQ(message({1, 2, 1}), "subgroup: rank 1 is given twice");
  EXPECT_EQ(message({}), "subgroup: rank 1 asks for a sub-group it is not in");
}

// ---- all-gather ----------------------------------------------------------------------------------------------------

TEST(Local, AllGatherIsInRankOrderBetweenAllReduces) {
  for (const int world_size : {1, 2, 3, 5, 8}) {
    const auto statuses = run_ranks(world_size, [](Communicator& communicator) {
      CORTADO_RETURN_IF_ERROR(reduce_one(communicator, kLong));
      const std::array<std::byte, 2> sent{std::byte(communicator.rank()), std::byte(100)};
      std::vector<std::byte> received(2 * static_cast<std::size_t>(communicator.world_size()));
      dawdle(communicator.rank(), 0);
      CORTADO_RETURN_IF_ERROR(communicator.all_gather(sent, received, kLong));
      for (int rank = 0; rank < communicator.world_size(); ++rank) {
        const bool right = received[2 * rank] == std::byte(rank) && received[2 * rank + 1] == std::byte(100);
        if (!right) return Status(StatusCode::kInternal, "wrong bytes");
      }
      return reduce_one(communicator, kLong);
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// A rank may run ahead with gathers as with sums, its own bytes may lie at their place already, and test() sees the
// end.
TEST(Local, StartedGathersDoNotWait) {
  LocalGroup group(2);
  std::array<std::array<std::byte, 4>, 2> received[2] = {};
  std::vector<WorkId> works;
  for (int k = 0; k < 2; ++k) {
    received[0][k][0] = received[0][k][1] = std::byte(10 + k);
    const std::span<std::byte> all = received[0][k];
    works.push_back(group.communicator(0)->start_all_gather(all.first(2), all).value());
  }
  EXPECT_FALSE(group.communicator(0)->test(works[0]).value());
  for (int k = 0; k < 2; ++k) {
    const std::array<std::byte, 2> sent{std::byte(20 + k), std::byte(20 + k)};
    ASSERT_TRUE(group.communicator(1)->start_all_gather(sent, received[1][k]).ok());
    EXPECT_TRUE(group.communicator(0)->test(works[k]).value());
    EXPECT_EQ(received[0][k], received[1][k]);
    EXPECT_EQ(received[0][k], (std::array{std::byte(10 + k), std::byte(10 + k), sent[0], sent[1]}));
  }
  EXPECT_EQ(
      group.communicator(0)->start_all_gather({received[0][0].data(), 2}, {received[0][0].data(), 3}).status().code(),
      StatusCode::kInvalidArgument);
}

TEST(Local, AllGatherTimesOutAndIsAbandoned) {
  for (const bool abandons : {false, true}) {
    const auto statuses = run_ranks(2, [abandons](Communicator& communicator) {
      if (communicator.rank() == 1) return abandons ? Status(StatusCode::kInternal, "gone") : Status();
      const std::array<std::byte, 1> sent{};
      std::array<std::byte, 2> received;
      return communicator.all_gather(sent, received, abandons ? kLong : milliseconds(20));
    });
    EXPECT_EQ(statuses[0].code(), abandons ? StatusCode::kPeerFailed : StatusCode::kTimeout) << statuses[0].to_string();
  }
}

}  // namespace
}  // namespace cortado::local_test

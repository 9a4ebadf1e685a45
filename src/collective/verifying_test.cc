// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kLong(30);

// A transport that does not look: gathers of signatures work, anything else does nothing and never ends.
class Careless final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  std::string name() const override { return "careless"; }
  Result<WorkId> start(const CollectiveCall& call) override {
    gathers_ = !gathers_;  // every second one is of signatures
    return gathers_ ? inner_->start(call) : kNever;
  }
  Result<bool> test(WorkId work) override { return work == kNever ? false : inner_->test(work); }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    return work == kNever ? make_error(StatusCode::kTimeout, "never") : inner_->wait(work, timeout);
  }
  Status all_gather(std::span<const std::byte>, std::span<std::byte>, std::chrono::nanoseconds) override {
    return make_error(StatusCode::kUnsupported, "careless");
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
    auto careless = std::make_unique<Careless>(inner.get());
    careless->owned_ = std::move(inner);
    return std::unique_ptr<Communicator>(std::move(careless));
  }

 private:
  static constexpr WorkId kNever = 1 << 30;
  std::unique_ptr<Communicator> owned_;  // of a sub-group
  bool gathers_ = false;
};

TEST(Verifying, EveryKindOfCollectiveAlsoInSubgroups) {
  const auto statuses = run_ranks(3, [](Communicator& inner) {
    const auto communicator = make_verifying_communicator(&inner);
    EXPECT_EQ(communicator->name(), "verifying(local)");
    CORTADO_RETURN_IF_ERROR(check_every_collective(*communicator, kLong));
    CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(std::array{2, 0, 1}));
    return check_every_collective(*subgroup, kLong);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Verifying, ManyInFlight) {
  constexpr int kInFlight = 1000;
  const auto statuses = run_ranks(2, [](Communicator& inner) {
    const auto communicator = make_verifying_communicator(&inner);
    std::vector<float> values(kInFlight, 1);
    for (int i = 0; i < kInFlight; ++i) {
      CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(&values[i], 1, DType::kFloat32));
      EXPECT_EQ(work, static_cast<WorkId>(i));
    }
    CORTADO_RETURN_IF_ERROR(communicator->wait(kInFlight - 1, kLong));
    for (int i = 0; i < kInFlight; ++i) {
      CORTADO_RETURN_IF_ERROR(communicator->wait(static_cast<WorkId>(i), kLong));
      EXPECT_TRUE(communicator->test(static_cast<WorkId>(i)).value());
      EXPECT_EQ(values[i], 2);
    }
    EXPECT_EQ(communicator->test(kInFlight).status().code(), StatusCode::kInvalidArgument);
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Rank 0 starts `a` and rank 1 starts `b`, after one that fits; one of them finds out by test(), one by wait().
void expect_mismatch(const CollectiveCall& a, const CollectiveCall& b, const std::string& text) {
  LocalGroup group(2);
  std::array<Careless, 2> careless{Careless(group.communicator(0)), Careless(group.communicator(1))};
  const std::array ranks{make_verifying_communicator(&careless[0]), make_verifying_communicator(&careless[1])};
  const CollectiveCall fits{.kind = CollectiveKind::kAllGather};
  for (const auto& rank : ranks) ASSERT_TRUE(rank->start(fits).ok());
  ASSERT_EQ(ranks[0]->start(a).value(), 1u);
  EXPECT_FALSE(ranks[0]->test(1).value());
  ASSERT_TRUE(ranks[1]->start(b).ok());
  for (const Status& status : {ranks[0]->test(1).status(), ranks[1]->wait(1, kLong), ranks[1]->start(fits).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_EQ(status.message(), text);
  }
}

TEST(Verifying, MismatchesOfEveryField) {
  std::array<std::byte, 64> memory{};
  const auto call = [&memory](CollectiveKind kind, std::int64_t elems) {
    return CollectiveCall{.kind = kind, .sent = memory.data(), .received = memory.data() + 32, .elems = elems};
  };
  const CollectiveKind reduce = CollectiveKind::kReduce;
  expect_mismatch(call(reduce, 3), call(reduce, 4),
                  "collective 1: rank 0 started reduce uint8 3 of root 0, rank 1 started reduce uint8 4 of root 0");
  expect_mismatch(call(reduce, 3), call(CollectiveKind::kGather, 3),
                  "collective 1: rank 0 started reduce uint8 3 of root 0, rank 1 started gather uint8 3 of root 0");
  CollectiveCall other = call(reduce, 3);
  other.root = 1;
  expect_mismatch(call(reduce, 3), other,
                  "collective 1: rank 0 started reduce uint8 3 of root 0, rank 1 started reduce uint8 3 of root 1");
  other = call(reduce, 3);
  other.dtype = DType::kFloat16;
  expect_mismatch(call(reduce, 3), other,
                  "collective 1: rank 0 started reduce uint8 3 of root 0, rank 1 started reduce fp16 3 of root 0");
}

TEST(Verifying, MismatchesOfCounts) {
  std::array<std::byte, 64> memory{};
  const std::array<std::int64_t, 2> a{1, 2}, b{2, 1};
  const auto call = [&](CollectiveKind kind, std::span<const std::int64_t> counts,
                        std::span<const std::int64_t> received) {
    return CollectiveCall{.kind = kind,
                          .sent = memory.data(),
                          .received = memory.data() + 32,
                          .counts = counts,
                          .received_counts = received};
  };
  expect_mismatch(call(CollectiveKind::kAllGather, a, {}), call(CollectiveKind::kAllGather, b, {}),
                  "collective 1: rank 0 started all_gather uint8 1 in varying blocks, rank 1 started all_gather "
                  "uint8 1 in varying blocks");
  // Rank 0 sends 2 to rank 1, which expects 1; what it sends and receives in all is right.
  expect_mismatch(
      call(CollectiveKind::kAllToAll, a, a), call(CollectiveKind::kAllToAll, b, a),
      "collective 1: the ranks do not send what others expect: rank 0 all_to_all uint8 3 in varying blocks, rank 1 "
      "all_to_all uint8 3 in varying blocks");
}

TEST(Verifying, InASubgroupRanksHaveTheirNumbersInTheWhole) {
  const auto statuses = run_ranks(3, [](Communicator& inner) {
    Careless careless(&inner);
    const auto communicator = make_verifying_communicator(&careless);
    const int rank = communicator->rank();
    const std::vector<int> ranks = rank == 0 ? std::vector{0} : std::vector{2, 1};
    CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(ranks));
    std::array<float, 2> values{};
    if (rank == 0) return Status();
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, subgroup->start_all_reduce(values.data(), rank, DType::kFloat32));
    const Status status = subgroup->wait(work, kLong);
    EXPECT_NE(status.message().find("rank 2 started all_reduce fp32 2, rank 1 started all_reduce fp32 1"),
              std::string::npos)
        << status.to_string();
    EXPECT_NE(status.message().find("ranks 2, 1"), std::string::npos) << status.to_string();
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Verifying, TimesOutAndIsAbandonedAsTheInnerOne) {
  LocalGroup group(2);
  const auto communicator = make_verifying_communicator(group.communicator(0));
  float value = 1;
  const WorkId work = communicator->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_EQ(communicator->wait(work, milliseconds(5)).code(), StatusCode::kTimeout);
  EXPECT_EQ(communicator->test(work).status().code(), StatusCode::kTimeout);
  EXPECT_EQ(communicator->start_all_reduce(&value, 1, DType::kFloat32).status().code(), StatusCode::kTimeout);
  EXPECT_TRUE(communicator->abandon("enough"));
}

// Peers would write to where its signatures were.
TEST(Verifying, DestroyedWithinACollectiveItTellsItsPeers) {
  LocalGroup group(2);
  float values[2] = {1, 2};
  {
    const auto communicator = make_verifying_communicator(group.communicator(0));
    ASSERT_TRUE(communicator->start_all_reduce(&values[0], 1, DType::kFloat32).ok());
  }
  const auto communicator = make_verifying_communicator(group.communicator(1));
  const Status status = communicator->start_all_reduce(&values[1], 1, DType::kFloat32).status();
  EXPECT_EQ(status.code(), StatusCode::kPeerFailed) << status.to_string();
  EXPECT_NE(status.message().find("destroyed within a collective"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace cortado

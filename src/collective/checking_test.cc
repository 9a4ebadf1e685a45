// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "collective/collective_call.h"
#include "collective/communicator_testing.h"
#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "collective/virtual_clock.h"
#include "core/check.h"
#include "core/counting_new.h"
#include "cortado/communicator.h"

namespace cortado::checking_test {
namespace {

constexpr std::chrono::seconds kLong(30);

TEST(Checking, EveryKindOfCollectiveAlsoInSubgroups) {
  for (const int ranks : {1, 2, 3, 5}) {
    const auto statuses = run_ranks(ranks, [&](Communicator& inner) {
      const auto communicator = make_checking_communicator(&inner);
      EXPECT_EQ(communicator->name(), "local");
      CORTADO_RETURN_IF_ERROR(check_every_collective(*communicator, kLong));
      std::vector<int> reversed(static_cast<std::size_t>(ranks));
      std::iota(reversed.rbegin(), reversed.rend(), 0);
      CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(reversed));
      CORTADO_RETURN_IF_ERROR(check_every_collective(*subgroup, kLong));
      std::vector<std::byte> sent(7, std::byte(inner.rank())), received(7 * reversed.size());
      CORTADO_RETURN_IF_ERROR(communicator->all_gather(sent, received, kLong));
      for (std::size_t i = 0; i < received.size(); ++i) EXPECT_EQ(received[i], std::byte(i / 7));
      return Status();
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(Checking, ManyInFlightByTestAndByWait) {
  constexpr int kInFlight = 1000;
  const auto statuses = run_ranks(2, [](Communicator& inner) {
    const auto communicator = make_checking_communicator(&inner);
    std::vector<float> values(kInFlight, 1);
    for (int i = 0; i < kInFlight; ++i) {
      CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(&values[i], 1, DType::kFloat32));
      EXPECT_EQ(work, static_cast<WorkId>(i));
    }
    CORTADO_RETURN_IF_ERROR(communicator->wait(kInFlight - 1, kLong));
    for (int i = 0; i < kInFlight; ++i) {
      while (i % 2 == 0 && !communicator->test(static_cast<WorkId>(i)).value()) continue;
      CORTADO_RETURN_IF_ERROR(communicator->wait(static_cast<WorkId>(i), kLong));
      EXPECT_TRUE(communicator->test(static_cast<WorkId>(i)).value());
      EXPECT_EQ(values[i], 2);
    }
    EXPECT_EQ(communicator->test(kInFlight).status().code(), StatusCode::kInvalidArgument);
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Rank 1 of three damages what it sends of one collective, which is otherwise right.
std::vector<Status> run_damaged(const CollectiveKind kind, DType dtype, Fault::Kind fault, bool in_place) {
  return run_ranks(3, [&](Communicator& inner) -> Status {
    std::vector<Fault> faults;
    // Number 0 is the collective of checks, 1 that of the values.
    if (inner.rank() == 1) faults.push_back({.at = 1, .kind = fault});
    const auto faulty = make_faulty_communicator(&inner, faults);
    const auto communicator = make_checking_communicator(faulty.get());
    const bool is_sent_by_root = kind == CollectiveKind::kBroadcast;
    CheckedCollective collective(kind, dtype, is_sent_by_root ? 1 : 2, 3001, {}, in_place, inner.rank(), 3);
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start(collective.call()));
    const Status status = communicator->wait(work, kLong);
    if (!status.ok()) {
      EXPECT_EQ(communicator->start(collective.call()).status().to_string(), status.to_string());
    }
    return status;
  });
}

TEST(Checking, WhatMovesIsSeenByWhomItReachesAndItsRankNamed) {
  for (const CollectiveKind kind : kEveryKind) {
    if (is_sum(kind)) continue;
    for (const Fault::Kind fault : {Fault::Kind::kCorrupt, Fault::Kind::kTruncate}) {
      std::vector<int> reached{0, 1, 2};
      if (kind == CollectiveKind::kBroadcast) reached = {0, 2};  // the root receives nothing
      if (kind == CollectiveKind::kGather) reached = {2};
      // The middle is in the block of rank 1; the second half begins there.
      if (kind == CollectiveKind::kAllToAll) reached = {1};
      if (kind == CollectiveKind::kAllToAll && fault == Fault::Kind::kTruncate) reached = {1, 2};
      const auto statuses = run_damaged(kind, DType::kFloat32, fault, false);
      std::vector<int> seen;
      for (int rank = 0; rank < 3; ++rank) {
        const Status& status = statuses[static_cast<std::size_t>(rank)];
        if (status.code() != StatusCode::kCorruptData) continue;
        seen.push_back(rank);
        EXPECT_TRUE(status.message().starts_with("faulty(local), checked: collective 0, ")) << status.message();
        EXPECT_NE(status.message().find("what rank 1 sent was damaged or cut on its way"), std::string::npos)
            << status.message();
      }
      EXPECT_EQ(seen, reached) << collective_kind_name(kind);
    }
  }
}

TEST(Checking, DamagedSumsAreSeen) {
  for (const CollectiveKind kind :
       {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kReduce}) {
    for (const DType dtype : {DType::kFloat32, DType::kUint8}) {
      for (const bool in_place : {false, true}) {
        if (in_place && kind == CollectiveKind::kReduceScatter) continue;
        const auto statuses = run_damaged(kind, dtype, Fault::Kind::kCorrupt, in_place);
        int seen = 0;
        for (const Status& status : statuses) {
          if (status.code() != StatusCode::kCorruptData) continue;
          ++seen;
          EXPECT_NE(status.message().find("what one of ranks 0, 1, 2 sent or the result"), std::string::npos)
              << status.message();
        }
        EXPECT_EQ(seen, kind == CollectiveKind::kAllReduce ? 3 : 1)
            << collective_kind_name(kind) << " " << dtype_name(dtype) << " " << in_place;
      }
    }
  }
}

TEST(Checking, DamagedChecksAreDamageToo) {
  const auto statuses = run_ranks(2, [](Communicator& inner) -> Status {
    const auto faulty = make_faulty_communicator(
        &inner,
        inner.rank() == 0 ? std::vector<Fault>{{.at = 0, .kind = Fault::Kind::kCorrupt}} : std::vector<Fault>{});
    const auto communicator = make_checking_communicator(faulty.get());
    std::vector<float> values(2000, 1);
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(values.data(), 2000, DType::kFloat32));
    Result<bool> done = communicator->test(work);
    while (done.ok() && !done.value()) done = communicator->test(work);
    return done.status();
  });
  // The middle one of four numbers is the sum of the second block.
  for (const Status& status : statuses) {
    EXPECT_NE(status.message().find("the sum of values 1024 to 1999 is 1.95e+03"), std::string::npos)
        << status.to_string();
  }
}

TEST(Checking, SubgroupsNameRanksOfTheWhole) {
  const auto statuses = run_ranks(4, [](Communicator& inner) -> Status {
    const auto faulty = make_faulty_communicator(
        &inner,
        inner.rank() == 3 ? std::vector<Fault>{{.at = 1, .kind = Fault::Kind::kCorrupt}} : std::vector<Fault>{});
    const auto communicator = make_checking_communicator(faulty.get());
    const bool odd = inner.rank() % 2 == 1;
    CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(odd ? std::array{1, 3} : std::array{0, 2}));
    std::vector<std::byte> sent(100), received(200);
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, subgroup->start_all_gather(sent, received));
    return subgroup->wait(work, kLong);
  });
  EXPECT_EQ(statuses[1].to_string(),
            "corrupt data: faulty(local), checked: collective 0 of ranks 1, 3, all_gather uint8 100: what rank 3 sent "
            "was damaged or cut on its way");
}

TEST(Checking, TheBlockingGatherIsCheckedTooAndEndsAll) {
  class Damaging final : public PassingCommunicator {
   public:
    using PassingCommunicator::PassingCommunicator;
    Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                      std::chrono::nanoseconds timeout) override {
      const Status status = inner_->all_gather(sent, received, timeout);
      if (gathers_++ == 0) received[sent.size()] ^= std::byte{1};
      return status;
    }

   private:
    int gathers_ = 0;
  };
  const auto statuses = run_ranks(2, [](Communicator& inner) {
    Damaging damaging(&inner);
    const auto communicator = make_checking_communicator(&damaging);
    std::vector<std::byte> sent(16), received(32);
    const Status status = communicator->all_gather(sent, received, kLong);
    EXPECT_EQ(communicator->all_gather(sent, received, kLong).to_string(), status.to_string());
    EXPECT_EQ(communicator->start_all_gather(sent, received).status().to_string(), status.to_string());
    return status;
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.to_string(),
              "corrupt data: local, checked: all_gather of 16 bytes: what rank 1 sent was damaged or cut on its way");
  }
}

// A contribution of 16 bits that is far larger than the others'.
TEST(Checking, LargeDamageOfSixteenBitsIsSeen) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const auto statuses = run_ranks(3, [&](Communicator& inner) -> Status {
      class Enlarging final : public PassingCommunicator {
       public:
        using PassingCommunicator::PassingCommunicator;
        Result<WorkId> start(const CollectiveCall& call) override {
          if (rank() == 1 && dtype_bytes(call.dtype) == 2) {  // the top bit of an exponent
            static_cast<std::uint8_t*>(call.received)[2 * 700 + 1] ^= 0x40;
          }
          return inner_->start(call);
        }
      };
      Enlarging enlarging(&inner);
      const auto communicator = make_checking_communicator(&enlarging);
      const Bytes ones = encode_as(dtype, std::vector<int>(1000, 1));
      std::vector<std::uint16_t> values(1000);
      std::memcpy(values.data(), ones.data(), ones.size());
      CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(values.data(), 1000, dtype));
      return communicator->wait(work, kLong);
    });
    for (const Status& status : statuses) {
      EXPECT_NE(status.message().find("the sum of values 640 to 703 is"), std::string::npos) << status.to_string();
    }
  }
}

TEST(Checking, WhatIsInFlightWhenDamageIsSeenEndsWell) {
  const auto statuses = run_ranks(2, [](Communicator& inner) -> Status {
    const bool damages = inner.rank() == 0;
    const auto faulty = make_faulty_communicator(
        &inner, damages ? std::vector<Fault>{{.at = 1, .kind = Fault::Kind::kCorrupt}} : std::vector<Fault>{});
    const auto communicator = make_checking_communicator(faulty.get());
    std::array<std::vector<float>, 3> values;
    std::array<WorkId, 3> works{};
    for (std::size_t i = 0; i < 3; ++i) {
      values[i].assign(100, 1);
      CORTADO_ASSIGN_OR_RETURN(works[i], communicator->start_all_reduce(values[i].data(), 100, DType::kFloat32));
    }
    const Status status = communicator->wait(works[0], kLong);
    EXPECT_EQ(status.code(), StatusCode::kCorruptData);
    for (const std::size_t i : {1, 2}) {
      EXPECT_TRUE(communicator->wait(works[i], kLong).ok());
      EXPECT_EQ(values[i], std::vector<float>(100, 2));
    }
    EXPECT_EQ(communicator->wait(works[0], kLong).to_string(), status.to_string()) << "asked again";
    EXPECT_EQ(communicator->test(works[0]).status().to_string(), status.to_string());
    EXPECT_FALSE(communicator->start_all_reduce(values[0].data(), 100, DType::kFloat32).ok());
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Checking, DamageInASubgroupEndsTheWhole) {
  const auto statuses = run_ranks(2, [](Communicator& inner) -> Status {
    const bool damages = inner.rank() == 0;
    const auto faulty = make_faulty_communicator(
        &inner, damages ? std::vector<Fault>{{.at = 1, .kind = Fault::Kind::kCorrupt}} : std::vector<Fault>{});
    const auto communicator = make_checking_communicator(faulty.get());
    CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(std::array{0, 1}));
    std::vector<float> values(100, 1);
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, subgroup->start_all_reduce(values.data(), 100, DType::kFloat32));
    const Status status = subgroup->wait(work, kLong);
    EXPECT_EQ(communicator->start_all_reduce(values.data(), 100, DType::kFloat32).status().to_string(),
              status.to_string());
    return status;
  });
  for (const Status& status : statuses) EXPECT_EQ(status.code(), StatusCode::kCorruptData);
}

// The checks are on their way when the transport refuses the call itself.
TEST(Checking, AStartThatFailsHalfWayEndsAll) {
  class Refusing final : public PassingCommunicator {
   public:
    using PassingCommunicator::PassingCommunicator;
    Result<WorkId> start(const CollectiveCall& call) override {
      if (call.elems == 5000) return make_error(StatusCode::kUnsupported, "too large");
      return inner_->start(call);
    }
  };
  LocalGroup group(2);
  Refusing first(group.communicator(0)), second(group.communicator(1));
  const auto of_first = make_checking_communicator(&first), of_second = make_checking_communicator(&second);
  std::vector<float> values(5000, 1);
  for (const std::int64_t elems : {5000, 2500}) {
    for (Communicator* communicator : {of_first.get(), of_second.get()}) {
      const Status status = communicator->start_all_reduce(values.data(), elems, DType::kFloat32).status();
      EXPECT_EQ(status.to_string(), "unsupported: too large");
    }
  }
}

TEST(Checking, BothWaitsTogetherTakeOneTimeout) {
  VirtualClock clock(2);
  LocalGroup group(2, &clock);
  const auto statuses = run_ranks(group, 2, [&](Communicator& inner) -> Status {
    std::vector<Fault> faults;
    if (inner.rank() == 0) {
      for (const int at : {0, 1}) {
        faults.push_back({.at = at, .kind = Fault::Kind::kDelay, .delay = std::chrono::milliseconds(900 * (2 - at))});
      }
    }
    const auto faulty = make_faulty_communicator(&inner, faults, &clock);
    const auto communicator = make_checking_communicator(faulty.get(), &clock);
    std::vector<float> values(10, 1);
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(values.data(), 10, DType::kFloat32));
    const std::int64_t begin_ns = clock.now_ns();
    const Status status = communicator->wait(work, std::chrono::seconds(1));
    EXPECT_LE(clock.now_ns() - begin_ns, 1'000'000'000);
    clock.leave();
    return status;
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kTimeout) << statuses[0].to_string();
}

TEST(Checking, NoStepAllocates) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  LocalGroup group(1);
  const auto communicator = make_checking_communicator(group.communicator(0));
  std::vector<float> values(5000, 1);
  std::int64_t before = 0;
  for (int i = 0; i < 200; ++i) {
    if (i == 100) before = allocation_count();
    const Result<WorkId> work = communicator->start_all_reduce(values.data(), 5000, DType::kFloat32);
    ASSERT_TRUE(work.ok() && communicator->wait(work.value(), kLong).ok());
  }
  EXPECT_EQ(allocation_count() - before, 0);
}

}  // namespace
}  // namespace cortado::checking_test

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/agreement.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"

namespace cortado {
namespace {

TEST(LargestOfRanks, IsOfEachNumberTheSameOnAllRanks) {
  const std::vector<Status> statuses = run_ranks(3, [](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    const std::vector<std::int64_t> counts = {rank, -rank, rank == 1 ? 7 : 3};
    CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> most,
                             largest_of_ranks(&communicator, std::span(counts), std::chrono::seconds(60)));
    EXPECT_EQ(most, (std::vector<std::int64_t>{2, 0, 7}));
    const std::vector<double> shares = {rank / 4.0};
    CORTADO_ASSIGN_OR_RETURN(const std::vector<double> largest,
                             largest_of_ranks(&communicator, std::span(shares), std::chrono::seconds(60)));
    EXPECT_EQ(largest, std::vector<double>{0.5});
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(MeanOfRanks, IsOfEachNumberTheSameOnAllRanks) {
  const std::vector<Status> statuses = run_ranks(3, [](Communicator& communicator) -> Status {
    const int rank = communicator.rank();
    const std::vector<std::int64_t> own = {rank, rank == 1 ? 7 : 3};
    CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> mean,
                             mean_of_ranks(&communicator, own, std::chrono::seconds(60)));
    EXPECT_EQ(mean, (std::vector<std::int64_t>{1, 4})) << "rounded";
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// With and without tensors; of several, a fatal one, which no rank may go on after.
TEST(CheckAgreement, AllRanksGetWhatOneCanNotDo) {
  const Status full(StatusCode::kIoError, "no memory"), broken(StatusCode::kInternal, "no device");
  for (const std::vector<std::string>& tensors : {std::vector<std::string>(), {"weight 2 x 3"}}) {
    const std::vector<Status> statuses = run_ranks(3, [&](Communicator& communicator) -> Status {
      const auto agree = [&](const std::string& settings, const Status& first, const Status& second) {
        const int rank = communicator.rank();
        return check_agreement(&communicator, settings, tensors, std::chrono::seconds(60),
                               rank == 0   ? Status()
                               : rank == 1 ? first
                                           : second);
      };
      EXPECT_EQ(agree("sign", {}, full).to_string(), "input/output error: rank 2: no memory");
      EXPECT_EQ(agree("sign", full, broken).to_string(), "internal error: rank 2: no device");
      EXPECT_EQ(agree(communicator.rank() == 2 ? "topk" : "sign", full, {}).code(), StatusCode::kMismatch);
      return agree("sign", {}, {});
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// Flips a bit of what a gather brings of the next rank, so many bytes from its end.
class DamagingCommunicator final : public PassingCommunicator {
 public:
  DamagingCommunicator(Communicator* inner, std::size_t from_end) : PassingCommunicator(inner), from_end_(from_end) {}
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    const Status status = inner_->all_gather(sent, received, timeout);
    const auto next = static_cast<std::size_t>((rank() + 1) % world_size());
    received[(next + 1) * sent.size() - from_end_] ^= std::byte{4};
    return status;
  }

 private:
  std::size_t from_end_;
};

TEST(AgreeOnOutcome, WhatOneRankCannotDoIsAnErrorOfAllAndDamageIsSeen) {
  const auto outcomes = [](std::size_t from_end, const Status& of_rank_1) {
    return run_ranks(3, [&](Communicator& group) -> Status {
      DamagingCommunicator damaging(&group, from_end);
      Communicator& communicator = from_end > 0 ? static_cast<Communicator&>(damaging) : group;
      return agree_on_outcome(&communicator, "loading", group.rank() == 1 ? of_rank_1 : Status(),
                              std::chrono::seconds(60));
    });
  };
  for (const Status& status : outcomes(0, {})) EXPECT_TRUE(status.ok()) << status.to_string();
  const Status full(StatusCode::kIoError, "no memory");
  const std::vector<Status> told = outcomes(0, full);
  EXPECT_EQ(told[0].to_string(), "input/output error: loading: rank 1: no memory");
  EXPECT_EQ(told[1].to_string(), "input/output error: no memory");
  EXPECT_EQ(told[2].to_string(), told[0].to_string());
  // Who can't do it says so also where another one's came damaged.
  EXPECT_EQ(outcomes(9, full)[1].to_string(), "input/output error: no memory");
  // In the check, at the end of the text, which is zeros, and in the text before.
  for (const std::size_t from_end : {1, 9, 100}) {
    const std::vector<Status> damaged = outcomes(from_end, {});
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(damaged[rank].code(), StatusCode::kCorruptData);
      EXPECT_EQ(damaged[rank].message(),
                "comparing loading over all ranks: what rank " + std::to_string((rank + 1) % 3) + " sent was damaged");
    }
  }
}

// What ranks decide by: one that takes a damaged number for a true one goes another way than the others.
TEST(Agreement, DamagedNumbersAreSeen) {
  for (const std::size_t from_end : {1, 9, 16}) {
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& group) -> Status {
      DamagingCommunicator damaging(&group, from_end);
      const std::vector<std::int64_t> counts = {3, 4};
      const std::vector<double> shares = {0.5, 0.25};
      const std::chrono::seconds timeout(60);
      for (const Status& status :
           {largest_of_ranks(&damaging, std::span(counts), timeout).status(),
            largest_of_ranks(&damaging, std::span(shares), timeout).status(),
            mean_of_ranks(&damaging, counts, timeout).status(), check_same_number(&damaging, "step", 7, timeout)}) {
        EXPECT_EQ(status.code(), StatusCode::kCorruptData) << status.to_string();
        EXPECT_TRUE(status.message().ends_with("what rank " + std::to_string(1 - group.rank()) + " sent was damaged"));
      }
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// A flipped bit of a size may ask for more memory than there is.
TEST(TextOfRank0, DamageToItsSizeAndToItselfIsSeen) {
  class DamagedBroadcast final : public PassingCommunicator {
   public:
    using PassingCommunicator::PassingCommunicator;
    Result<WorkId> start(const CollectiveCall& call) override {
      text_ = static_cast<char*>(call.received);
      return PassingCommunicator::start(call);
    }
    Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
      const Status status = PassingCommunicator::wait(work, timeout);
      text_[1] ^= 1;
      return status;
    }

   private:
    char* text_ = nullptr;
  };
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& group) -> Status {
    const std::string own = group.rank() == 0 ? "a plan" : "";
    const std::chrono::seconds timeout(60);
    CORTADO_ASSIGN_OR_RETURN(const std::string text, text_of_rank_0(&group, own, timeout));
    EXPECT_EQ(text, "a plan");
    DamagingCommunicator damaging(&group, 19);  // the sixth byte of the size
    EXPECT_EQ(text_of_rank_0(&damaging, own, timeout).status().code(), StatusCode::kCorruptData);
    DamagedBroadcast damaged(&group);
    EXPECT_EQ(text_of_rank_0(&damaged, own, timeout).status().message(), "the text that rank 0 sent was damaged");
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// NaN is not lost among numbers, whichever rank has it: what is compared with a limit is then above it.
TEST(LargestOfRanks, NanIsInfinity) {
  const std::vector<Status> statuses = run_ranks(3, [](Communicator& communicator) -> Status {
    std::vector<double> own = {1, 2, 3, 4};
    own[static_cast<std::size_t>(communicator.rank())] = std::nan("");
    CORTADO_ASSIGN_OR_RETURN(const std::vector<double> largest,
                             largest_of_ranks(&communicator, std::span<const double>(own), std::chrono::seconds(60)));
    EXPECT_EQ(largest, (std::vector<double>{INFINITY, INFINITY, INFINITY, 4}));
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

}  // namespace
}  // namespace cortado

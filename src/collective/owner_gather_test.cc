// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/owner_gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/float16.h"
#include "core/philox.h"

namespace cortado {
namespace {

constexpr int kRanks = 3;

// Of different sizes and dtypes, one empty, one exact; rank 2 owns nothing.
std::vector<OwnedTensor> some_tensors() {
  return {{.name = "a", .rows = 40, .cols = 30, .owner = 1},
          {.name = "b", .dtype = DType::kBFloat16, .rows = 7, .cols = 9, .owner = 0},
          {.name = "values", .rows = 1, .cols = 13, .owner = 1, .is_exact = true},
          {.name = "nothing", .rows = 0, .cols = 5, .owner = 0},
          {.name = "c", .rows = 1, .cols = 500, .owner = 1}};
}

// The bytes of all tensors; of those of other ranks, something else.
using Values = std::vector<std::vector<std::byte>>;

Values fill(const std::vector<OwnedTensor>& tensors, int rank, std::uint64_t step) {
  Values values;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t elems = tensors[i].rows * tensors[i].cols;
    std::vector<float> normal(static_cast<std::size_t>(elems), -77.0f);
    if (tensors[i].owner == rank) philox_fill_normal(5, step, i, normal.data(), elems);
    values.emplace_back(normal.size() * dtype_bytes(tensors[i].dtype));
    for (std::size_t e = 0; e < normal.size(); ++e) {
      if (tensors[i].dtype == DType::kFloat32) {
        std::memcpy(values.back().data() + 4 * e, &normal[e], 4);
      } else {
        const std::uint16_t narrow = float_to_bf16(normal[e]);
        std::memcpy(values.back().data() + 2 * e, &narrow, 2);
      }
    }
  }
  return values;
}

std::vector<void*> addresses(Values* values) {
  std::vector<void*> all;
  for (auto& one : *values) all.push_back(one.data());
  return all;
}

float value_of(const Values& values, std::size_t tensor, std::size_t elem) {
  static const std::vector<OwnedTensor> tensors = some_tensors();
  if (tensors[tensor].dtype == DType::kBFloat16) {
    std::uint16_t narrow;
    std::memcpy(&narrow, values[tensor].data() + 2 * elem, 2);
    return bf16_to_float(narrow);
  }
  float value;
  std::memcpy(&value, values[tensor].data() + 4 * elem, 4);
  return value;
}

// [rank][step]
std::vector<std::vector<Values>> run(const OwnerGatherOptions& options, int steps,
                                     const std::function<void(OwnerGather&, int rank)>& at_end = {},
                                     std::vector<std::string>* log = nullptr) {
  std::vector<std::vector<Values>> all(kRanks);
  for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
         RecordingCommunicator recording(&communicator);
         const int rank = communicator.rank();
         CORTADO_ASSIGN_OR_RETURN(const auto gather, OwnerGather::create(some_tensors(), options, &recording));
         recording.clear();
         for (int step = 0; step < steps; ++step) {
           Values values = fill(gather->tensors(), rank, static_cast<std::uint64_t>(step));
           CORTADO_RETURN_IF_ERROR(gather->run(static_cast<std::uint64_t>(step), addresses(&values)));
           all[static_cast<std::size_t>(rank)].push_back(std::move(values));
         }
         if (at_end) at_end(*gather, rank);
         if (log != nullptr && rank == 0) {
           for (const RecordedCollective& one : recording.log()) log->push_back(one.kind);
         }
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  return all;
}

// What the owners had.
Values originals(std::uint64_t step) {
  const std::vector<OwnedTensor> tensors = some_tensors();
  Values values;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    values.push_back(fill(tensors, tensors[i].owner, step)[i]);
  }
  return values;
}

TEST(OwnerGather, WithoutLossEveryoneHasWhatTheOwnersHad) {
  for (const char* codec : {"none", "float_rans", "compso(bound=0)"}) {
    for (const int aggregate : {0, 1}) {
      std::vector<std::string> log;
      const auto got = run({.codec = codec, .use_error_feedback = true, .aggregate = aggregate}, 2, {}, &log);
      for (const auto& of_rank : got) {
        for (std::uint64_t step = 0; step < 2; ++step) EXPECT_EQ(of_rank[step], originals(step)) << codec;
      }
      // Sizes that vary are unknown in the first step.
      EXPECT_EQ(log.size(), std::string(codec) == "none" ? 2u : 3u) << codec;
    }
  }
}

TEST(OwnerGather, WithLossAllHaveTheSameAndExactTensorsAreExact) {
  for (const char* codec : {"compso(bound=0.02)", "compso(error=0.2, round=dead_zone)", "quant(bits=4)", "sign",
                            "topk(density=0.1)", "cast(bf16)"}) {
    OwnerGatherReport report;
    const auto got = run({.codec = codec}, 3, [&](OwnerGather& gather, int rank) {
      if (rank == 1) report = gather.report();
    });
    for (std::size_t step = 0; step < 3; ++step) {
      EXPECT_EQ(got[1][step], got[0][step]) << codec;
      EXPECT_EQ(got[2][step], got[0][step]) << codec;
      const Values exact = originals(step);
      EXPECT_EQ(got[0][step][2], exact[2]) << codec;
      EXPECT_NE(got[0][step][0], exact[0]) << codec;
    }
    EXPECT_EQ(report.dense_bytes, 4 * (1200 + 13 + 500));
    EXPECT_LT(report.payload_bytes, report.dense_bytes);
    EXPECT_EQ(report.collectives, 1) << codec;
    double lost = 0, total = 0;
    const Values last = originals(2);
    for (const std::size_t tensor : {0, 4}) {
      for (std::size_t e = 0; e < got[0][2][tensor].size() / 4; ++e) {
        const double value = value_of(last, tensor, e);
        lost += std::pow(value - static_cast<double>(value_of(got[0][2], tensor, e)), 2);
        total += value * value;
      }
    }
    EXPECT_NEAR(report.relative_l2_error, std::sqrt(lost / total), 1e-6) << codec;
  }
}

// Also not what a bf16 is too coarse for.
TEST(OwnerGather, WithFeedbackNothingIsLostForEver) {
  constexpr std::uint64_t kSteps = 30;
  std::array<std::vector<OwnerResidual>, kRanks> residuals;
  const auto got =
      run({.codec = "topk(density=0.05)", .use_error_feedback = true}, kSteps,
          [&](OwnerGather& gather, int rank) { residuals[static_cast<std::size_t>(rank)] = gather.save_residuals(); });
  std::vector<Values> had;
  for (std::uint64_t step = 0; step < kSteps; ++step) had.push_back(originals(step));
  const std::vector<OwnedTensor> tensors = some_tensors();
  for (const char* name : {"a", "b", "c"}) {
    const auto i = static_cast<std::size_t>(
        std::find_if(tensors.begin(), tensors.end(), [&](const OwnedTensor& one) { return one.name == name; }) -
        tensors.begin());
    const std::vector<OwnerResidual>& of_owner = residuals[static_cast<std::size_t>(tensors[i].owner)];
    const auto owed = std::find_if(of_owner.begin(), of_owner.end(),
                                   [&](const OwnerResidual& residual) { return residual.name == name; });
    ASSERT_NE(owed, of_owner.end()) << name;
    for (std::size_t e = 0; e < owed->values.size(); ++e) {
      double balance = owed->values[e];
      for (std::size_t step = 0; step < kSteps; ++step) {
        balance += static_cast<double>(value_of(got[0][step], i, e)) - static_cast<double>(value_of(had[step], i, e));
      }
      EXPECT_NEAR(balance, 0, 1e-4) << name << " " << e;
    }
  }
}

// Places that were the same in each step would leave all others behind for ever; and owners draw their own.
TEST(OwnerGather, RandomPlacesDifferFromStepToStepAndFromOwnerToOwner) {
  const std::vector<OwnedTensor> tensors = {{.name = "a", .rows = 1, .cols = 400, .owner = 0},
                                            {.name = "b", .rows = 1, .cols = 400, .owner = 1}};
  for (const Status& status : run_ranks(2, [&](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(const auto gather,
                                  OwnerGather::create(tensors, {.codec = "randk(density=0.1)"}, &communicator));
         std::set<std::vector<bool>> places;
         for (std::uint64_t step = 0; step < 3; ++step) {
           std::vector<float> values[2] = {std::vector<float>(400, 1.0f), std::vector<float>(400, 1.0f)};
           void* const data[] = {values[0].data(), values[1].data()};
           CORTADO_RETURN_IF_ERROR(gather->run(step, data));
           for (const std::vector<float>& of : values) {
             std::vector<bool> has_arrived;
             for (const float value : of) has_arrived.push_back(value != 0);
             EXPECT_EQ(std::count(has_arrived.begin(), has_arrived.end(), true), 40);
             places.insert(has_arrived);
           }
         }
         EXPECT_EQ(places.size(), 6u);
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// Nobody may apply it: zeros stand for a layer that was not used. Of both signs, and in a dtype that rounds, too.
TEST(OwnerGather, WhatIsOwedToATensorOfZerosStaysOwed) {
  for (const char* codec : {"topk(density=0.05)", "quant(bits=4)", "compso(bound=0.02)"}) {
    for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
           const int rank = communicator.rank();
           CORTADO_ASSIGN_OR_RETURN(
               const auto gather,
               OwnerGather::create(some_tensors(), {.codec = codec, .use_error_feedback = true}, &communicator));
           std::vector<std::vector<OwnerResidual>> owed;
           for (std::uint64_t step = 0; step < 3; ++step) {
             Values values = fill(gather->tensors(), rank, step);
             if (step == 1) {
               for (auto& tensor : values) std::fill(tensor.begin(), tensor.end(), std::byte{0});
               for (const std::size_t tensor : {0, 1, 4}) values[tensor].back() = std::byte{0x80};
             }
             CORTADO_RETURN_IF_ERROR(gather->run(step, addresses(&values)));
             owed.push_back(gather->save_residuals());
             if (step != 1) continue;
             for (const std::size_t tensor : {0, 1, 4}) {
               const std::size_t elems = values[tensor].size() / dtype_bytes(gather->tensors()[tensor].dtype);
               for (std::size_t e = 0; e < elems; ++e) EXPECT_EQ(value_of(values, tensor, e), 0) << codec;
             }
           }
           for (std::size_t i = 0; i < owed[0].size(); ++i) {
             EXPECT_EQ(owed[1][i].values, owed[0][i].values) << codec;
             EXPECT_NE(owed[2][i].values, owed[0][i].values) << codec;
           }
           EXPECT_EQ(owed[0].size(), rank == 2 ? 0u : rank == 1 ? 2u : 1u);
           return {};
         })) {
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

TEST(OwnerGather, ResidualsCanBeSavedAndLoaded) {
  const OwnerGatherOptions options = {.codec = "quant(bits=2)", .use_error_feedback = true};
  const auto whole = run(options, 4);
  for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(const auto first, OwnerGather::create(some_tensors(), options, &communicator));
         CORTADO_ASSIGN_OR_RETURN(const auto second, OwnerGather::create(some_tensors(), options, &communicator));
         const int rank = communicator.rank();
         for (std::uint64_t step = 0; step < 4; ++step) {
           Values values = fill(first->tensors(), rank, step);
           if (step == 2) CORTADO_RETURN_IF_ERROR(second->load_residuals(first->save_residuals()));
           CORTADO_RETURN_IF_ERROR((step < 2 ? first : second)->run(step, addresses(&values)));
           EXPECT_EQ(values, whole[static_cast<std::size_t>(rank)][step]);
         }
         if (rank == 1) {
           const Status status = second->load_residuals({{"a", {1, 2}}});
           EXPECT_EQ(status.code(), StatusCode::kMismatch);
           EXPECT_NE(status.message().find("residual of a has 2 values, the tensor has 1200"), std::string::npos);
         }
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(OwnerGather, OneRankNeedsNoMemory) {
  LocalGroup group(1);
  const std::vector<OwnedTensor> tensors = {{.name = "a", .rows = 40, .cols = 30},
                                            {.name = "b", .dtype = DType::kBFloat16, .rows = 7, .cols = 9},
                                            {.name = "values", .rows = 1, .cols = 13, .is_exact = true}};
  const OwnerGatherOptions options{.codec = "compso(bound=0.02)", .use_error_feedback = true};
  const auto gather = OwnerGather::create(tensors, options, group.communicator(0)).value();
  EXPECT_EQ(gather->report().memory_bytes, 0);
  const Values before = fill(tensors, 0, 0);
  Values values = before;
  ASSERT_TRUE(gather->run(0, addresses(&values)).ok());
  ASSERT_TRUE(gather->set_codec("quant(bits=4)").ok());
  ASSERT_TRUE(gather->run(1, addresses(&values)).ok());
  EXPECT_EQ(values, before);
  // States are as those of several ranks, which can load them.
  const std::vector<OwnerResidual> saved = gather->save_residuals();
  ASSERT_EQ(saved.size(), 2u);
  EXPECT_EQ(saved[0].values, std::vector<float>(1200));
  EXPECT_EQ(saved[1].values, std::vector<float>(63));
  EXPECT_TRUE(gather->load_residuals(saved).ok());
  EXPECT_EQ(gather->load_residuals({{"b", {1, 2}}}).code(), StatusCode::kMismatch);
  EXPECT_EQ(gather->report().memory_bytes, 0);
}

TEST(OwnerGather, NonFiniteTensorsReachAllAndNoResidual) {
  for (const char* codec : {"none", "topk(density=0.1)", "compso(bound=0.02)", "quant(bits=4)", "sign"}) {
    for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
           const int rank = communicator.rank();
           CORTADO_ASSIGN_OR_RETURN(
               const auto gather,
               OwnerGather::create(some_tensors(), {.codec = codec, .use_error_feedback = true}, &communicator));
           Values values = fill(gather->tensors(), rank, 0);
           CORTADO_RETURN_IF_ERROR(gather->run(0, addresses(&values)));
           const std::vector<OwnerResidual> before = gather->save_residuals();
           values = fill(gather->tensors(), rank, 1);
           if (rank == 1) {
             const float bad = std::numeric_limits<float>::infinity();
             std::memcpy(values[4].data() + 4 * 17, &bad, 4);
           }
           CORTADO_RETURN_IF_ERROR(gather->run(1, addresses(&values)));
           bool is_finite = true;
           for (std::size_t e = 0; e < 500; ++e) is_finite &= std::isfinite(value_of(values, 4, e));
           EXPECT_FALSE(is_finite) << codec;
           const std::vector<OwnerResidual> after = gather->save_residuals();
           for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(before[i].values, after[i].values) << codec;
           return {};
         })) {
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// Finite values that the codec makes Inf of: as if they had been Inf, and the next step is a good one.
TEST(OwnerGather, OverflowOfACodecIsSeenByAllAndReachesNoResidual) {
  for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
         const int rank = communicator.rank();
         const OwnerGatherOptions options{.codec = "cast(fp16)", .use_error_feedback = true};
         CORTADO_ASSIGN_OR_RETURN(const auto gather, OwnerGather::create(some_tensors(), options, &communicator));
         std::vector<std::vector<OwnerResidual>> residuals;
         for (std::uint64_t step = 0; step < 3; ++step) {
           Values values = fill(gather->tensors(), rank, step);
           const float large = 1e5f;
           if (rank == 1 && step == 1) std::memcpy(values[4].data() + 4 * 17, &large, 4);
           CORTADO_RETURN_IF_ERROR(gather->run(step, addresses(&values)));
           EXPECT_EQ(gather->report().finite, step != 1) << rank;
           EXPECT_EQ(std::isfinite(value_of(values, 4, 17)), step != 1) << rank;
           residuals.push_back(gather->save_residuals());
         }
         for (std::size_t i = 0; i < residuals[0].size(); ++i) {
           EXPECT_EQ(residuals[0][i].values, residuals[1][i].values);
           EXPECT_TRUE(std::all_of(residuals[2][i].values.begin(), residuals[2][i].values.end(),
                                   [](float value) { return std::isfinite(value); }));
         }
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// What a tensor owes is added in its own dtype, which may have no room for it.
TEST(OwnerGather, OverflowOfFeedbackIsSeenByAllWithAPlainCodecToo) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         const std::vector<OwnedTensor> tensors = {{.name = "a", .dtype = DType::kFloat16, .rows = 1, .cols = 4}};
         const OwnerGatherOptions options{.codec = "topk(density=0.25)", .use_error_feedback = true};
         CORTADO_ASSIGN_OR_RETURN(const auto gather, OwnerGather::create(tensors, options, &communicator));
         std::vector<OwnerResidual> before;
         for (std::uint64_t step = 0; step < 2; ++step) {
           std::array<std::uint16_t, 4> values;
           values.fill(float_to_fp16(60000));
           void* const address = values.data();
           CORTADO_RETURN_IF_ERROR(gather->run(step, {&address, 1}));
           EXPECT_EQ(gather->report().finite, step == 0);
           if (step == 0) before = gather->save_residuals();
           CORTADO_RETURN_IF_ERROR(gather->set_codec("none"));
         }
         const std::vector<OwnerResidual> after = gather->save_residuals();
         EXPECT_EQ(after.size(), communicator.rank() == 0 ? 1u : 0u);
         for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].values, before[i].values);
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// A schedule: payloads that grow beyond the capacity of the last step, and shrink again.
TEST(OwnerGather, CodecsThatChangeFromStepToStep) {
  std::vector<std::int64_t> collectives;
  for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(const auto gather,
                                  OwnerGather::create(some_tensors(), {.codec = "sign"}, &communicator));
         const std::vector<std::string> specs = {"sign", "sign", "none", "none", "compso(bound=0)", "sign"};
         for (std::uint64_t step = 0; step < specs.size(); ++step) {
           CORTADO_RETURN_IF_ERROR(gather->set_codec(specs[step]));
           Values values = fill(gather->tensors(), communicator.rank(), step);
           std::vector<OwnerNote> notes(kRanks);
           const auto rank = static_cast<double>(communicator.rank());
           CORTADO_RETURN_IF_ERROR(gather->run(step, addresses(&values), {rank, step}, notes));
           for (int r = 0; r < kRanks; ++r) {
             EXPECT_EQ(notes[static_cast<std::size_t>(r)].value, r);
             EXPECT_EQ(notes[static_cast<std::size_t>(r)].flags, step);
           }
           if (specs[step] != "sign") {
             EXPECT_EQ(values, originals(step)) << step;
           }
           if (rank == 0) collectives.push_back(gather->report().collectives);
         }
         EXPECT_EQ(gather->set_codec("sing").code(), StatusCode::kNotFound);
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  EXPECT_EQ(collectives, (std::vector<std::int64_t>{2, 1, 2, 1, 2, 1}));
}

// Payloads of one codec that go up and down: the room of the largest is kept for some steps, and given up in the end.
TEST(OwnerGather, PayloadsThatChangeFromStepToStep) {
  constexpr std::uint64_t kSteps = 80;
  std::vector<std::int64_t> collectives, bytes;
  for (const Status& status : run_ranks(kRanks, [&](Communicator& communicator) -> Status {
         RecordingCommunicator recording(&communicator);
         CORTADO_ASSIGN_OR_RETURN(const auto gather,
                                  OwnerGather::create(some_tensors(), {.codec = "float_rans"}, &recording));
         for (std::uint64_t step = 0; step < kSteps; ++step) {
           Values values = fill(gather->tensors(), communicator.rank(), step);
           if (step % 3 == 1 || step >= 30) {
             for (auto& tensor : values) std::fill(tensor.begin(), tensor.end(), std::byte{0});
           }
           CORTADO_RETURN_IF_ERROR(gather->run(step, addresses(&values)));
           if (communicator.rank() != 0) continue;
           collectives.push_back(gather->report().collectives);
           const std::vector<std::int64_t> counts = recording.log().back().counts;
           bytes.push_back(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
         }
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  EXPECT_EQ(collectives[0], 2);
  EXPECT_LE(std::count(collectives.begin(), collectives.end(), 2), 2);
  EXPECT_LT(bytes.back(), bytes[20]);
  EXPECT_EQ(bytes.back(), bytes[kSteps - 5]);  // nothing is left of it
}

TEST(OwnerGather, RanksThatDiffer) {
  const auto run_differing = [](const std::function<Status(OwnerGather&, int rank, Values*)>& act) {
    return run_ranks(kRanks, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto gather, OwnerGather::create(some_tensors(), {}, &communicator));
      Values values = fill(gather->tensors(), communicator.rank(), 0);
      const Status status = act(*gather, communicator.rank(), &values);
      EXPECT_EQ(gather->run(9, addresses(&values)).code(), status.code());  // it stays that way
      return status;
    });
  };
  for (const Status& status : run_differing([](OwnerGather&gather, int rank, Values*values) {
         return gather.run(rank == 2 ? 8 : 7, addresses(values));
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("has left out a step"), std::string::npos) << status.message();
  }
  for (const Status& status : run_differing([](OwnerGather&gather, int rank, Values*values) -> Status {
         if (rank == 1) CORTADO_RETURN_IF_ERROR(gather.set_codec("cast(bf16)"));
         return gather.run(7, addresses(values));
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
  }
  // Payloads that outgrow their room, which ranks with other codecs would have another size of.
  for (const Status& status : run_differing([](OwnerGather&gather, int rank, Values*values) -> Status {
         CORTADO_RETURN_IF_ERROR(gather.set_codec("quant(bits=2)"));
         CORTADO_RETURN_IF_ERROR(gather.run(6, addresses(values)));
         CORTADO_RETURN_IF_ERROR(gather.set_codec(rank == 1 ? "quant(bits=8)" : "quant(bits=4)"));
         return gather.run(7, addresses(values));
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("has encoded with another codec"), std::string::npos) << status.message();
  }
}

TEST(OwnerGather, WhatIsLostOnTheWayNamesStepTensorsAndRank) {
  const std::vector<Status> statuses = run_ranks(kRanks, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto gather, OwnerGather::create(some_tensors(), {}, &communicator));
    if (communicator.rank() == 1) return make_error(StatusCode::kInternal, "out of luck");
    Values values = fill(gather->tensors(), communicator.rank(), 0);
    return gather->run(4, addresses(&values));
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::string& text = statuses[static_cast<std::size_t>(rank)].message();
    if (rank == 1) continue;
    EXPECT_TRUE(text.starts_with("step 4: gather of \"a\" and 4 more: ")) << text;
    EXPECT_NE(text.find("rank 1 has left the group: internal error: out of luck"), std::string::npos) << text;
  }
}

TEST(OwnerGather, WrongArguments) {
  LocalGroup group(1);
  const auto refused = [&](std::vector<OwnedTensor> tensors) {
    const Status status = OwnerGather::create(std::move(tensors), {}, group.communicator(0)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(refused({{.name = "x", .owner = 1}}).find("owner must be a rank from 0 to 0, got 1"), std::string::npos);
  EXPECT_NE(refused({{.name = "x"}, {.name = "x"}}).find("two tensors have the name x"), std::string::npos);
  EXPECT_NE(refused({{.name = "x", .dtype = DType::kUint8, .rows = 1, .cols = 1}}).find("fp32, fp16 or bf16"),
            std::string::npos);
  EXPECT_NE(refused({{.name = "x", .rows = -1, .cols = 1}}).find("a shape that memory can hold"), std::string::npos);
  const auto gather = OwnerGather::create({{.name = "x", .rows = 1, .cols = 1}}, {}, group.communicator(0)).value();
  EXPECT_FALSE(gather->run(0, {}).ok());
  void* nothing = nullptr;
  EXPECT_FALSE(gather->run(0, {&nothing, 1}).ok());
}

}  // namespace
}  // namespace cortado

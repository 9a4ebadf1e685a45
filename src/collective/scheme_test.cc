// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every option of the tree is executed and compared with the exact sum; there is no list of schemes to keep up to date.
#include "collective/scheme.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "collective/passing_communicator_testing.h"
#include "collective/rank_threads.h"
#include "collective/scheme_testing.h"
#include "core/check.h"
#include "core/counting_new.h"
#include "core/float16.h"
#include "core/philox.h"
#include "core/sanitized.h"
#include "cortado/planner.h"

namespace cortado::scheme_test {
namespace {

// Sanitized builds, being slow, take one option in so many; the release build takes them all.
constexpr std::size_t kStride = kSanitized ? 37 : 1;

const Topology kTwoByTwo = {{{"intra", 2}, {"inter", 2}}};
const Topology kTwoByThree = {{{"intra", 2}, {"inter", 3}}};
const std::vector<SchemeTensor> kTensors = {{"a.weight", 5, 7}, {"a.bias", 1, 3}, {"b.weight", 4, 16}};

// The sum is exact, the same bytes on every rank.
void expect_exact_sum(SchemeRanks& ranks, const Option& option, const Codec* codec,
                      const std::vector<SchemeTensor>& tensors) {
  SCOPED_TRACE(option.to_string(ranks.topology()));
  SchemeRuns runs(ranks, {.option = option, .codec = codec, .tensors = tensors});
  ASSERT_TRUE(runs.status().ok()) << runs.status().to_string();
  for (int step = 0; step < 2; ++step) {
    const Status status = runs.step(step, integer_message);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const auto expected = exact_sum(tensors, ranks.size(), step, integer_message);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const Message sums = runs.sums(rank);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (std::size_t i = 0; i < sums[t].size(); ++i) {
          ASSERT_EQ(static_cast<double>(sums[t][i]), expected[t][i])
              << "step " << step << ", rank " << rank << ", " << tensors[t].name << "[" << i << "]";
        }
      }
    }
  }
}

void expect_exact_sums(const Topology& topology, const OptionSpace& space, const std::string& spec,
                       const std::vector<SchemeTensor>& tensors, std::size_t every = 1) {
  SchemeRanks ranks(topology);
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const std::vector<Option> options = generate_options(space).value();
  for (std::size_t i = 0; i < options.size(); i += every * kStride) {
    expect_exact_sum(ranks, options[i], codec.get(), tensors);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Scheme, AllOptionsGiveTheExactSumWithPayloadsOfOneSize) {
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) expect_exact_sums(topology, {}, "none", kTensors);
}

TEST(Scheme, AllOptionsGiveTheExactSumWithPayloadsOfVaryingSize) {
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) expect_exact_sums(topology, {}, "float_rans", kTensors);
}

TEST(Scheme, SumsOfPayloads) {
  const OptionSpace space = {.devices = {OpDevice::kCpu}, .sum_payloads = true};
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
    expect_exact_sums(topology, space, "none", kTensors);
    expect_exact_sums(topology, space, "cast(bf16)", kTensors);
    expect_exact_sums(topology, space, "randk(density=1)", kTensors);
  }
}

TEST(Scheme, ThreeLevels) {
  const Topology topology = {{{"socket", 2}, {"machine", 3}, {"rack", 2}}};
  const OptionSpace space = {.levels = 3, .devices = {OpDevice::kCpu}};
  expect_exact_sums(topology, space, "float_rans", kTensors, 101);
  OptionSpace linear = space;
  linear.sum_payloads = true;
  expect_exact_sums(topology, linear, "cast(fp16)", kTensors, 1009);
}

TEST(Scheme, OneRankAndLevelsOfOneRank) {
  for (const Topology& topology : {Topology{{{"all", 1}}}, Topology{{{"all", 3}}}}) {
    expect_exact_sums(topology, {.levels = 1}, "none", kTensors);
    expect_exact_sums(topology, {.levels = 1}, "float_rans", kTensors);
  }
  expect_exact_sums({{{"intra", 1}, {"inter", 1}}}, {}, "none", kTensors, 7);
  expect_exact_sums({{{"intra", 3}, {"inter", 1}}}, {}, "float_rans", kTensors, 11);
  expect_exact_sums({{{"intra", 1}, {"inter", 3}}}, {}, "float_rans", kTensors, 13);
}

TEST(Scheme, TensorsSmallerThanTheGroupAndEmptyOnes) {
  const std::vector<std::vector<SchemeTensor>> messages = {
      {{"one", 1, 1}}, {{"nothing", 0, 8}, {"two", 1, 2}, {"none", 1, 0}}, {{"empty", 0, 0}}, {}};
  for (const std::vector<SchemeTensor>& tensors : messages) {
    for (const char* spec : {"none", "float_rans"}) expect_exact_sums(kTwoByThree, {}, spec, tensors, 17);
    expect_exact_sums(kTwoByThree, {.sum_payloads = true}, "cast(bf16)", tensors, 171);
  }
}

// A byte a value however many ranks vote, and the same result as from the votes of all.
TEST(Scheme, VotesAreCountedOnTheWay) {
  SchemeRanks ranks({{{"all", 5}}});
  const std::unique_ptr<Codec> codec = make_codec("sign(scale=none, vote=majority)").value();
  Message results[2];
  const char* options[] = {"encode@cpu all_gather@all decode@cpu", "encode@gpu all_reduce@all decode@cpu"};
  for (int i = 0; i < 2; ++i) {
    const Option option = Option::parse(options[i], ranks.topology()).value();
    SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors});
    ASSERT_TRUE(runs.step(0, normal_like_message).ok());
    results[i] = runs.sums(0);
    if (i == 1) {
      EXPECT_EQ(runs.run(0).sent_bytes(), elems_of(kTensors) + static_cast<std::int64_t>(kTensors.size()));
    }
  }
  EXPECT_EQ(results[0], results[1]);
  const auto with_nan = [](const std::vector<SchemeTensor>& tensors, int rank, int step) {
    Message message = normal_like_message(tensors, rank, step);
    if (rank == 3) message[1][2] = std::numeric_limits<float>::quiet_NaN();
    return message;
  };
  const Option option = Option::parse(options[1], ranks.topology()).value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors});
  ASSERT_TRUE(runs.step(0, with_nan).ok());
  EXPECT_TRUE(std::isnan(runs.sums(0)[1][0]) && !std::isnan(runs.sums(0)[0][0]));
  SchemeRanks many({{{"all", 256}}});
  EXPECT_NE(SchemeRuns(many, {.option = Option::parse(options[1], many.topology()).value(),
                              .codec = codec.get(),
                              .tensors = kTensors})
                .status()
                .message()
                .find("can't be summed over 256 ranks"),
            std::string::npos);
}

TEST(Scheme, DeviceCopiesAreCounted) {
  SchemeRanks ranks(kTwoByTwo);
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  const Option option =
      Option::parse("encode@gpu all_to_all@flat decode@cpu encode@cpu all_gather@flat decode@gpu", kTwoByTwo).value();
  const std::vector<SchemeTensor> tensors = {{"w", 4, 16}};
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = tensors});
  ASSERT_TRUE(runs.step(0, integer_message).ok());
  const SchemeStatistics& statistics = runs.run(0).coder().statistics();
  // Encoded in 4 parts of 16 values: values there, payloads back. Decoded: 4 payloads there, the values back.
  EXPECT_EQ(statistics.copies_to_device, 4 + 4);
  EXPECT_EQ(statistics.bytes_to_device, 64 * 4 + 64 * 2);
  EXPECT_EQ(statistics.copies_to_host, 4 + 4);
  EXPECT_EQ(statistics.bytes_to_host, 64 * 2 + 64 * 4);
  constexpr std::int64_t kChecks = 5 * kPayloadCheckBytes;
  EXPECT_EQ(statistics.encoded_bytes, 64 * 2 + 16 * 2 + kChecks);
  EXPECT_EQ(runs.run(0).sent_bytes(), 64 * 2 + 16 * 2 + kChecks);
}

TEST(Scheme, AllocatesNothingInSteadyState) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  SchemeRanks ranks(kTwoByThree);
  for (const char* spec : {"none", "float_rans", "randk(density=0.2)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const std::vector<Option> options = generate_options({.sum_payloads = codec->row().traits.linear}).value();
    for (std::size_t i = 0; i < options.size(); i += 97) {
      SchemeRuns runs(ranks, {.option = options[i], .codec = codec.get(), .tensors = kTensors});
      const auto leave = [](const std::vector<SchemeTensor>&, int, int) { return Message(); };
      ASSERT_TRUE(runs.step(0, integer_message).ok());
      const std::int64_t before = allocation_count();
      ASSERT_TRUE(runs.step(1, leave).ok());
      ASSERT_EQ(allocation_count() - before, 0) << spec << " " << options[i].to_string(kTwoByThree);
    }
  }
}

// ---- lent memory ---------------------------------------------------------------------------------------------------

// Three steps bit for bit, and the buffers that it takes; counts the options that read, and write, what is lent.
void expect_same_from_lent_memory(SchemeRanks& ranks, SchemeSetup setup, int* readers, int* writers) {
  SchemeRuns copied(ranks, setup);
  setup.lends_memory = true;
  SchemeRuns lent(ranks, setup);
  ASSERT_TRUE(copied.status().ok() && lent.status().ok()) << lent.status().to_string();
  for (int step = 0; step < 3; ++step) {
    for (SchemeRuns* runs : {&copied, &lent}) {
      const Status status = runs->step(step, normal_like_message);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int rank = 0; rank < ranks.size(); ++rank) runs->run(rank).commit();
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      ASSERT_EQ(copied.sums(rank), lent.sums(rank)) << "step " << step << ", rank " << rank;
      for (int t = 0; t < static_cast<int>(setup.tensors.size()); ++t) {
        EXPECT_EQ(copied.run(rank).coder().squares(t).of_differences, lent.run(rank).coder().squares(t).of_differences);
      }
    }
  }
  *readers += lent.run(0).reads_lent();
  *writers += lent.run(0).writes_lent();
}

TEST(SchemeMemory, WhatIsLentGivesTheSameByAnyOption) {
  const std::vector<SchemeTensor> tensors = {
      {"a.weight", 50, 70}, {"a.bias", 1, 3}, {"nothing", 0, 2}, {"b.weight", 33, 63}};
  SchemeRanks ranks(kTwoByThree);
  for (const char* spec : {"none", "cast(fp16)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const std::vector<Option> options = generate_options({.sum_payloads = true}).value();
    int readers = 0, writers = 0;
    for (std::size_t i = 0; i < options.size(); i += 7 * kStride) {
      SCOPED_TRACE(options[i].to_string(ranks.topology()));
      expect_same_from_lent_memory(ranks,
                                   {.option = options[i],
                                    .codec = codec.get(),
                                    .tensors = tensors,
                                    .has_feedback = codec->row().traits.lossless ? false : i % 2 == 0,
                                    .averages = true},
                                   &readers, &writers);
      if (HasFatalFailure()) return;
    }
    EXPECT_GT(readers, 0);
    EXPECT_GT(writers, 0);
  }
}

TEST(SchemeMemory, OnlyElementwiseCodecsOnTheCpuTakeWhatIsLent) {
  SchemeRanks ranks(kTwoByTwo);
  const auto takes = [&](const char* spec, const char* option) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    SchemeRuns runs(ranks, {.option = Option::parse(option, kTwoByTwo).value(),
                            .codec = codec.get(),
                            .tensors = kTensors,
                            .lends_memory = true});
    return std::pair(runs.run(0).reads_lent(), runs.run(0).writes_lent());
  };
  EXPECT_EQ(takes("cast", "encode@cpu all_reduce@flat decode@cpu"), std::pair(true, true));
  EXPECT_EQ(takes("cast", "encode@gpu all_reduce@flat decode@cpu"), std::pair(false, true));
  EXPECT_EQ(takes("cast", "encode@cpu all_reduce@flat decode@gpu"), std::pair(true, false));
  EXPECT_EQ(takes("cast", "reduce_scatter@intra encode@cpu all_reduce@inter decode@cpu all_gather@intra"),
            std::pair(false, false));
  EXPECT_EQ(takes("randk(density=1)", "encode@cpu all_reduce@flat decode@cpu"), std::pair(false, false));
}

// Gradients of 16 bits with a scale and something to be added; the message needs no values of its own.
TEST(SchemeMemory, LentMemoryHasADtypeAndScales) {
  SchemeRanks ranks({{{"all", 2}}});
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  const std::vector<SchemeTensor> tensors = {{"w", 3, 1000}};
  SchemeRuns runs(ranks, {.option = Option::parse("encode@cpu all_gather@all decode@cpu", ranks.topology()).value(),
                          .codec = codec.get(),
                          .tensors = tensors,
                          .lends_memory = true});
  const std::vector<float> added(3000, 3.0f);
  std::vector<std::uint16_t> memory[2];
  const float values[] = {8, -2};
  for (const bool is_finite : {true, false}) {
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<std::uint16_t>& own = memory[rank];
      own.assign(3000, float_to_fp16(values[rank]));
      if (!is_finite && rank == 1) own[2999] = 0x7c00;
      runs.run(rank).lend(0, {.data = own.data(),
                              .dtype = DType::kFloat16,
                              .scale = 0.5f,
                              .added = rank == 0 ? added.data() : nullptr,
                              .added_scale = 2.0f,
                              .result_scale = 4.0f});
    }
    ASSERT_TRUE(runs.step_with_lent(0).ok());
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(memory[rank][0], float_to_fp16(4 * (8 * 0.5f + 3 * 2.0f - 2 * 0.5f)));
      EXPECT_EQ(memory[rank][2998], memory[rank][0]);
      EXPECT_EQ(runs.run(rank).coder().is_finite(0), is_finite);
    }
  }
  const std::int64_t payload_bytes = 3000 * 2 + kPayloadCheckBytes;
  EXPECT_EQ(runs.run(0).buffer_bytes(), payload_bytes + 2 * payload_bytes);
}

// In one pass each: the same as encode, decode and a comparison, and a look at what has been summed.
TEST(SchemeMemory, CastsOfLentMemoryAreMeasuredAndLookedAt) {
  SchemeRanks ranks({{{"all", 2}}});
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  constexpr std::int64_t kElems = 200'001;  // large enough to be written past the caches
  const std::vector<SchemeTensor> tensors = {{"w", 1, kElems}};
  SchemeRuns runs(ranks, {.option = Option::parse("encode@cpu all_reduce@all decode@cpu", ranks.topology()).value(),
                          .codec = codec.get(),
                          .tensors = tensors,
                          .averages = true,
                          .lends_memory = true});
  for (const bool is_finite : {true, false}) {
    std::vector<float> memory[2];
    double squares = 0, lost = 0;
    std::vector<float> expected(kElems);
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<float>& own = memory[rank];
      own.resize(kElems);
      philox_fill_normal(7, 0, static_cast<std::uint64_t>(rank), own.data(), kElems);
      for (std::size_t i = 0; i < own.size(); ++i) {
        const float half = own[i] / 2, rounded = bf16_to_float(float_to_bf16(half));
        squares += rank == 0 ? double{half} * half : 0;
        lost += rank == 0 ? double{half - rounded} * (half - rounded) : 0;
        expected[i] = bf16_to_float(float_to_bf16(expected[i] + rounded));
      }
      if (!is_finite && rank == 1) own[kElems - 1] = std::numeric_limits<float>::infinity();
      runs.run(rank).lend(0, {.data = own.data(), .dtype = DType::kFloat32});
    }
    ASSERT_TRUE(runs.step_with_lent(0).ok());
    for (int rank = 0; rank < 2; ++rank) {
      const auto last = static_cast<std::ptrdiff_t>(kElems) - 1;
      EXPECT_TRUE(std::equal(memory[rank].begin(), memory[rank].begin() + last, expected.begin()));
      EXPECT_EQ(runs.run(rank).coder().is_finite(0), is_finite);
    }
    const DifferenceSquares& measured = runs.run(0).coder().squares(0);
    EXPECT_NEAR(measured.of_values / squares, 1, 1e-5);
    EXPECT_NEAR(measured.of_differences / lost, 1, 1e-5);
  }
}

// Looks at what is given to be summed.
class WatchingCommunicator final : public PassingCommunicator {
 public:
  WatchingCommunicator(Communicator* inner, std::function<void(const CollectiveCall&)> look)
      : PassingCommunicator(inner), look_(std::move(look)) {}
  Result<WorkId> start(const CollectiveCall& call) override {
    look_(call);
    return inner_->start(call);
  }

 private:
  std::function<void(const CollectiveCall&)> look_;
};

// A header is no number: as one it might be so large that no check of the sum sees anything.
TEST(Scheme, HeadersAreZerosInSums) {
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.5)").value();
  const SumForm form = *codec->sum_form(1, 100, DType::kFloat32);
  ASSERT_GT(form.header_bytes, 0u);
  const Option option = {
      {{.kind = OpKind::kEncode}, {.kind = OpKind::kAllReduce, .encoded = true}, {.kind = OpKind::kDecode}}};
  const auto statuses = run_ranks(2, [&](Communicator& inner) -> Status {
    int sums = 0;
    WatchingCommunicator whole(&inner, [&](const CollectiveCall& call) {
      if (call.kind != CollectiveKind::kAllReduce) return;
      ++sums;
      for (std::size_t i = 0; i < form.header_bytes; ++i) {
        EXPECT_EQ(static_cast<const std::byte*>(call.sent)[i], std::byte{}) << i;
      }
    });
    CORTADO_ASSIGN_OR_RETURN(const LevelCommunicators levels, LevelCommunicators::create(&whole, {{{"all", 2}}}));
    CORTADO_ASSIGN_OR_RETURN(const auto run, SchemeRun::make({.levels = &levels,
                                                              .option = option,
                                                              .codec = codec.get(),
                                                              .tensors = {{.name = "w", .rows = 1, .cols = 100}}}));
    for (std::int64_t step = 0; step < 2; ++step) {
      std::fill(run->values(0).begin(), run->values(0).end(), 1.0f);
      CORTADO_RETURN_IF_ERROR(run->run(step, std::chrono::seconds(30)));
      const std::span<const float> result = run->sums(0);
      EXPECT_EQ(std::accumulate(result.begin(), result.end(), 0.0f), 100.0f) << "half of them, of each rank";
    }
    EXPECT_EQ(sums, 2);
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// ---- lossy codecs --------------------------------------------------------------------------------------------------

// `delivered` plus what all residuals hold, each counted once.
std::vector<std::vector<double>> with_residuals(SchemeRuns& runs, const std::vector<std::vector<double>>& delivered) {
  std::vector<std::vector<double>> total = delivered;
  for (std::size_t rank = 0; rank < runs.size(); ++rank) {
    for (const SchemeCoder::Residual& residual : runs.run(static_cast<int>(rank)).coder().residuals()) {
      for (std::size_t i = 0; i < residual.values.size(); ++i) {
        total[static_cast<std::size_t>(residual.tensor)][static_cast<std::size_t>(residual.begin) + i] +=
            static_cast<double>(residual.values[i]) * static_cast<double>(residual.share) / residual.replicas;
      }
    }
  }
  return total;
}

double norm_of_difference(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  double squares = 0;
  for (std::size_t t = 0; t < a.size(); ++t) {
    for (std::size_t i = 0; i < a[t].size(); ++i) squares += (a[t][i] - b[t][i]) * (a[t][i] - b[t][i]);
  }
  return std::sqrt(squares);
}

void add(const std::vector<std::vector<double>>& values, double factor, std::vector<std::vector<double>>* sum) {
  if (sum->empty()) sum->resize(values.size());
  for (std::size_t t = 0; t < values.size(); ++t) {
    (*sum)[t].resize(values[t].size());
    for (std::size_t i = 0; i < values[t].size(); ++i) (*sum)[t][i] += factor * values[t][i];
  }
}

std::vector<std::vector<double>> as_doubles(const Message& message) {
  std::vector<std::vector<double>> values;
  for (const std::vector<float>& tensor : message) values.emplace_back(tensor.begin(), tensor.end());
  return values;
}

void expect_same_bytes_everywhere(SchemeRuns& runs) {
  const Message first = runs.sums(0);
  for (std::size_t rank = 1; rank < runs.size(); ++rank) {
    const Message sums = runs.sums(static_cast<int>(rank));
    for (std::size_t t = 0; t < sums.size(); ++t) {
      ASSERT_EQ(std::memcmp(sums[t].data(), first[t].data(), sums[t].size() * sizeof(float)), 0)
          << "rank " << rank << ", tensor " << t;
    }
  }
}

// Nothing gets lost: in every step, what was delivered so far and what all residuals hold is the sum of what went in,
// to the rounding of `unit` a value.
void expect_telescoping(SchemeRanks& ranks, const Option& option, const Codec* codec, double unit,
                        bool averages = false) {
  SCOPED_TRACE(codec->spec() + ": " + option.to_string(ranks.topology()));
  SchemeRuns runs(ranks,
                  {.option = option, .codec = codec, .tensors = kTensors, .has_feedback = true, .averages = averages});
  // Of low rank one rank alone encodes what it has, as it does where nothing but a rooted sum comes before.
  const auto& ops = option.operations;
  const auto encode = std::find_if(ops.begin(), ops.end(), [](const auto& op) { return op.kind == OpKind::kEncode; });
  const bool is_alone = std::all_of(ops.begin(), encode, [](const auto& op) { return op.kind == OpKind::kReduce; }) &&
                        option.encodes() == 1;
  if (codec->row().traits.low_rank && !is_alone && !runs.status().ok()) {
    ASSERT_EQ(runs.status().code(), StatusCode::kUnsupported);
    ASSERT_NE(runs.status().message().find("encode the same sums"), std::string::npos) << runs.status().to_string();
    return;
  }
  ASSERT_TRUE(runs.status().ok()) << runs.status().to_string();
  std::vector<std::vector<double>> delivered, expected;
  for (int step = 0; step < 3; ++step) {
    const Status status = runs.step(step, normal_like_message);
    ASSERT_TRUE(status.ok()) << status.to_string();
    expect_same_bytes_everywhere(runs);
    const auto exact = exact_sum(kTensors, ranks.size(), step, normal_like_message);
    add(as_doubles(runs.sums(0)), runs.run(0).result_scale(), &delivered);
    add(exact, averages ? 1.0 / ranks.size() : 1.0, &expected);
    for (std::size_t rank = 0; rank < runs.size(); ++rank) runs.run(static_cast<int>(rank)).commit();
    const double scale = 10.0 * ranks.size() * std::sqrt(static_cast<double>(elems_of(kTensors)));
    ASSERT_LT(norm_of_difference(with_residuals(runs, delivered), expected), unit * scale * (step + 1));
  }
}

void expect_telescoping(const std::string& spec, const OptionSpace& space, double unit, std::size_t every) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const std::vector<Option> options = generate_options(space).value();
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
    SchemeRanks ranks(topology);
    for (std::size_t i = 0; i < options.size(); i += every * kStride) {
      if (options[i].encodes() == 0) continue;
      expect_telescoping(ranks, options[i], codec.get(), unit);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

constexpr double kFloat = 1e-6;

TEST(SchemeFeedback, NothingIsLostByAnyOptionWithASparseCodec) {
  expect_telescoping("topk(density=0.3)", {}, kFloat, 1);
}

TEST(SchemeFeedback, NothingIsLostByAnyOptionOnOneDevice) {
  const OptionSpace cpu = {.devices = {OpDevice::kCpu}};
  for (const char* spec :
       {"quant(bits=4)", "quant(bits=3, round=stochastic)", "sign", "cast(bf16)", "fp8(e4m3)", "randk(density=0.4)",
        "topk(density=0.5) | quant(bits=8) | rans", "compso", "acp(rank=2)", "power(rank=2)"}) {
    expect_telescoping(spec, cpu, kFloat, 1);
  }
}

// Sums of payloads of 16 bits are rounded on the way, where no residual can be kept.
TEST(SchemeFeedback, NothingIsLostWherePayloadsAreSummed) {
  const OptionSpace space = {.devices = {OpDevice::kCpu}, .sum_payloads = true};
  expect_telescoping("randk(density=0.4)", space, kFloat, 1);
  expect_telescoping("acp(rank=2)", space, 1e-5, 1);
  expect_telescoping("quant(abs_bound=2)", space, kFloat, 1);  // cuts off what a byte has no room for
  expect_telescoping("cast(fp16)", space, 1e-3, 1);
  expect_telescoping("cast(bf16)", space, 8e-3, 1);
}

TEST(SchemeFeedback, NothingIsLostOfMeans) {
  SchemeRanks ranks(kTwoByThree);
  for (const char* spec : {"topk(density=0.3)", "randk(density=0.4)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const OptionSpace space = {.devices = {OpDevice::kCpu}, .sum_payloads = codec->row().traits.linear};
    for (const auto options = generate_options(space).value(); const Option& option : options) {
      if (option.encodes() > 0) expect_telescoping(ranks, option, codec.get(), kFloat, /*averages=*/true);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(SchemeFeedback, NothingIsLostOverThreeLevels) {
  SchemeRanks ranks({{{"socket", 2}, {"machine", 2}, {"rack", 3}}});
  const std::vector<Option> options = generate_options({.levels = 3, .devices = {OpDevice::kCpu}}).value();
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.3)").value();
  for (std::size_t i = 0; i < options.size(); i += 211) expect_telescoping(ranks, options[i], codec.get(), kFloat);
}

// Without commit() a step leaves no trace: the same step gives the same bytes again.
TEST(SchemeFeedback, AStepThatIsNotCommittedHasNotBeen) {
  SchemeRanks ranks(kTwoByThree);
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.3)").value();
  const std::vector<Option> options = generate_options({.devices = {OpDevice::kCpu}}).value();
  for (const std::size_t i : {std::size_t{20}, std::size_t{100}, options.size() - 1}) {
    SchemeRuns runs(ranks, {.option = options[i], .codec = codec.get(), .tensors = kTensors, .has_feedback = true});
    ASSERT_TRUE(runs.step(0, normal_like_message).ok());
    for (std::size_t rank = 0; rank < runs.size(); ++rank) runs.run(static_cast<int>(rank)).commit();
    ASSERT_TRUE(runs.step(1, normal_like_message).ok());
    const Message first = runs.sums(0);
    ASSERT_TRUE(runs.step(1, normal_like_message).ok());
    EXPECT_EQ(runs.sums(0), first);
  }
}

TEST(SchemeFeedback, PlacesSayWhereSomethingIsLost) {
  SchemeRanks ranks(kTwoByTwo);
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.3)").value();
  const Option option = Option::parse(
                            "encode@cpu all_to_all@intra decode@cpu encode@cpu gather@inter decode@cpu "
                            "encode@cpu broadcast@inter decode@cpu encode@cpu all_gather@intra decode@cpu",
                            kTwoByTwo)
                            .value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = {{"w", 4, 16}}, .has_feedback = true});
  const auto places = [&](int rank) {
    std::string text;
    for (const SchemeCoder::Residual& residual : runs.run(rank).coder().residuals()) {
      text += std::string(residual.place) + ":" + std::to_string(residual.begin) + "+" +
              std::to_string(residual.values.size()) + "/" + std::to_string(residual.replicas) + " ";
    }
    return text;
  };
  EXPECT_EQ(places(0), "intra:0+64/1 inter:0+32/1 inter again:0+32/1 intra again:0+32/2 ");
  EXPECT_EQ(places(1), "intra:0+64/1 inter:32+32/1 inter again:32+32/1 intra again:32+32/2 ");
  EXPECT_EQ(places(3), "intra:0+64/1 inter:32+32/1 intra again:32+32/2 ");  // not the root between machines
}

// Each encode of 8 bits is off by at most half a step of the largest value of its block. And options that differ in
// nothing but devices give the same bits: 174 results for 4341 options.
TEST(Scheme, NoOptionIsFurtherOffThanItsEncodesMayBeOnWhicheverDevice) {
  const std::unique_ptr<Codec> codec = make_codec("quant(bits=8)").value();
  const std::vector<Option> options = generate_options({}).value();
  for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
    SchemeRanks ranks(topology);
    const auto exact = exact_sum(kTensors, ranks.size(), 0, normal_like_message);
    const double largest = 9.0 * ranks.size();  // of any sum; and of the values of all that encode side by side
    std::map<std::string, Message> results;     // by the option with every device the CPU
    for (std::size_t i = 0; i < options.size(); i += kStride) {
      const Option& option = options[i];
      SCOPED_TRACE(option.to_string(topology));
      SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors});
      ASSERT_TRUE(runs.step(0, normal_like_message).ok());
      const Message sums = runs.sums(0);
      double worst = 0;
      for (std::size_t t = 0; t < sums.size(); ++t) {
        for (std::size_t e = 0; e < sums[t].size(); ++e) {
          worst = std::max(worst, std::fabs(static_cast<double>(sums[t][e]) - exact[t][e]));
        }
      }
      ASSERT_LE(worst, option.encodes() * largest / 254 * 1.02 + 1e-4);
      if (option.encodes() > 0) {
        ASSERT_GT(worst, 0.0);
      }
      Option on_cpu = option;
      for (Operation& op : on_cpu.operations) op.device = OpDevice::kCpu;
      ASSERT_EQ(results.try_emplace(on_cpu.to_string(topology), sums).first->second, sums);
    }
    if (kStride == 1) {
      EXPECT_EQ(results.size(), 174u);
    }
  }
}

// What is encoded is a mean, in every option: codecs with a scale of their own do the same everywhere.
TEST(Scheme, MeansHaveTheSameScaleAtEveryPlace) {
  SchemeRanks ranks(kTwoByThree);
  const auto for_means = [&](const std::string& spec, const OptionSpace& space, const auto& check) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    for (const auto options = generate_options(space).value(); const Option& option : options) {
      if (option.encodes() == 0) continue;
      SCOPED_TRACE(spec + ": " + option.to_string(kTwoByThree));
      SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors, .averages = true});
      ASSERT_TRUE(runs.status().ok()) << runs.status().to_string();
      ASSERT_TRUE(runs.step(0, normal_like_message).ok());
      const auto exact = exact_sum(kTensors, ranks.size(), 0, normal_like_message);
      const Message sums = runs.sums(0);
      for (std::size_t t = 0; t < sums.size(); ++t) {
        for (std::size_t i = 0; i < sums[t].size(); ++i) {
          ASSERT_TRUE(
              check(option, static_cast<double>(sums[t][i] * runs.run(0).result_scale()), exact[t][i] / ranks.size()))
              << sums[t][i] << " " << exact[t][i];
        }
      }
    }
  };
  const OptionSpace cpu = {.devices = {OpDevice::kCpu}};
  OptionSpace linear = cpu;
  linear.sum_payloads = true;
  for (const char* spec : {"sign(scale=none)", "sign(scale=none, vote=majority)"}) {
    for_means(spec, cpu, [](const Option&, double mean, double) { return std::fabs(mean) <= 1 + 1e-6; });
  }
  for_means("quant(abs_bound=0.25)", cpu, [](const Option& option, double mean, double exact) {
    return std::fabs(mean - exact) <= option.encodes() * 0.25 * (1 + 1e-4);
  });
  // Codes of one scale are added as bytes.
  for (const char* spec : {"sign(scale=none)", "sign(scale=none, vote=majority)"}) {
    for_means(spec, linear, [](const Option&, double mean, double) { return std::fabs(mean) <= 1 + 1e-6; });
  }
  for_means("quant(abs_bound=0.5)", linear, [](const Option& option, double mean, double exact) {
    return std::fabs(mean - exact) <= option.encodes() * 0.5 * (1 + 1e-4);
  });
  for_means("float_rans", cpu,
            [](const Option&, double mean, double exact) { return std::fabs(mean - exact) <= 1e-5; });
  for_means("cast(fp16)", linear,
            [](const Option&, double mean, double exact) { return std::fabs(mean - exact) <= 0.05; });
}

// Processors of different kinds would make other bits of the same values.
TEST(Scheme, OfLowRankOneRankAloneEncodesWhatItHas) {
  SchemeRanks ranks(kTwoByThree);
  for (const char* spec : {"acp(rank=2)", "power(rank=2)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const auto status_of = [&](const char* option) {
      return SchemeRuns(
                 ranks,
                 {.option = Option::parse(option, kTwoByThree).value(), .codec = codec.get(), .tensors = {{"w", 6, 8}}})
          .status();
    };
    for (const char* refused : {"all_reduce@intra encode@cpu all_gather@inter decode@cpu",
                                "reduce@intra all_reduce@inter encode@cpu broadcast@intra decode@cpu",
                                "encode@cpu all_gather@intra decode@cpu encode@cpu all_gather@inter decode@cpu"}) {
      EXPECT_EQ(status_of(refused).code(), StatusCode::kUnsupported) << refused;
      EXPECT_NE(status_of(refused).message().find("several ranks would encode the same sums"), std::string::npos);
    }
    for (const char* taken : {"encode@cpu all_gather@flat decode@cpu",
                              "reduce@intra encode@cpu all_gather@inter decode@cpu broadcast@intra"}) {
      EXPECT_TRUE(status_of(taken).ok()) << taken << ": " << status_of(taken).to_string();
    }
  }
}

// What is encoded twice with one key would be scaled up twice.
TEST(Scheme, UnbiasedCodecsStaySoWhereTheyEncodeAgain) {
  constexpr int kSteps = 100;
  SchemeRanks ranks(kTwoByTwo);
  const std::unique_ptr<Codec> codec = make_codec("randk(density=0.5, scale=unbiased)").value();
  const auto same_in_each_step = [](const std::vector<SchemeTensor>& tensors, int rank, int) {
    return normal_like_message(tensors, rank, 0);
  };
  const auto exact = exact_sum(kTensors, ranks.size(), 0, same_in_each_step);
  const std::vector<Option> options = generate_options({.devices = {OpDevice::kCpu}, .sum_payloads = true}).value();
  for (std::size_t i = 0; i < options.size(); i += 3 * kStride) {
    if (options[i].encodes() == 0) continue;
    SCOPED_TRACE(options[i].to_string(kTwoByTwo));
    SchemeRuns runs(ranks, {.option = options[i], .codec = codec.get(), .tensors = kTensors, .averages = true});
    ASSERT_TRUE(runs.status().ok()) << runs.status().to_string();
    double along = 0, squares = 0;
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_TRUE(runs.step(step, same_in_each_step).ok());
      const Message sums = runs.sums(0);
      for (std::size_t t = 0; t < sums.size(); ++t) {
        for (std::size_t e = 0; e < sums[t].size(); ++e) {
          const double mean = exact[t][e] / ranks.size();
          along += static_cast<double>(sums[t][e] * runs.run(0).result_scale()) * mean;
          squares += mean * mean;
        }
      }
    }
    EXPECT_NEAR(along / squares, 1, 0.25);
  }
}

// What ranks round at random cancels out, unless they draw the same.
TEST(Scheme, ContributorsRoundIndependently) {
  constexpr int kRanks = 8;
  SchemeRanks ranks({{{"all", kRanks}}});
  const std::unique_ptr<Codec> codec = make_codec("quant(bits=3, round=stochastic)").value();
  const std::vector<SchemeTensor> tensors = {{"w", 40, 50}};
  const auto same_on_all_ranks = [](const std::vector<SchemeTensor>& of, int, int step) {
    return normal_like_message(of, 0, step);
  };
  const Option option = Option::parse("encode@cpu all_gather@all decode@cpu", ranks.topology()).value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = tensors});
  ASSERT_TRUE(runs.step(0, same_on_all_ranks).ok());
  const Message sums = runs.sums(0), values = normal_like_message(tensors, 0, 0);
  const DifferenceSquares& of_one = runs.run(0).coder().squares(0);
  double of_mean = 0;
  for (std::size_t e = 0; e < values[0].size(); ++e) of_mean += std::pow(sums[0][e] / kRanks - values[0][e], 2);
  EXPECT_GT(of_one.of_differences, 0);
  EXPECT_LT(of_mean, 2 * of_one.of_differences / kRanks);
}

TEST(Scheme, MajorityVoteTakesTheSignThatMostHave) {
  SchemeRanks ranks({{{"all", 3}}});
  const std::unique_ptr<Codec> codec = make_codec("sign(scale=none, vote=majority)").value();
  const std::vector<SchemeTensor> tensors = {{"w", 3, 11}};
  for (const auto options = generate_options({.levels = 1, .devices = {OpDevice::kCpu}}).value();
       const Option& option : options) {
    if (option.operations.front().kind != OpKind::kEncode) continue;
    SCOPED_TRACE(option.to_string(ranks.topology()));
    SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = tensors});
    ASSERT_TRUE(runs.step(0, integer_message).ok());
    expect_same_bytes_everywhere(runs);
    const Message sums = runs.sums(0);
    for (std::size_t i = 0; i < sums[0].size(); ++i) {
      int votes = 0;
      for (int rank = 0; rank < 3; ++rank) votes += integer_message(tensors, rank, 0)[0][i] < 0 ? -1 : 1;
      EXPECT_EQ(sums[0][i] > 0, votes > 0) << i;
    }
  }
}

}  // namespace
}  // namespace cortado::scheme_test

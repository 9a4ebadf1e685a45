// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/message_choice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cortado::message_choice_test {
namespace {

constexpr const char* kCoded = "compso(bound=0.004)";
constexpr const char* kPacked = "compso(bound=0.004, coder=none)";

// Four ranks whose collectives take `ns_per_byte`; codecs take 20 us a call and 6 or 4 ns a value.
Cluster four_ranks(std::int64_t ns_per_byte) {
  Cluster cluster;
  ClusterLevel level{.name = "all", .ranks = 4, .link = "", .collectives = {}, .unknown = {}};
  for (const OpKind kind : {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllToAll}) {
    level.collectives[kind] = {{1000, 1'000'000}, {1000 * ns_per_byte, 1'000'000 * ns_per_byte}};
  }
  cluster.levels = {level};
  for (const auto& [codec, ns] : {std::pair(kCoded, 6), std::pair(kPacked, 4)}) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      cluster.codecs.push_back({.codec = codec,
                                .device = OpDevice::kCpu,
                                .direction = direction,
                                .threads = 1,
                                .curve = {{1, 1'000'000}, {20'000 + ns, 20'000 + ns * 1'000'000}},
                                .unknown = {}});
    }
  }
  return cluster;
}

// Each of four ranks owns `count` tensors of `elems` values; payloads of 1/8 and 1/4 with a table of 100 bytes a call.
MessageShape gathered(int count, std::int64_t elems) {
  return {.ranks = {0, 1, 2, 3}, .elems = {4, std::vector<std::int64_t>(static_cast<std::size_t>(count), elems)}};
}

std::vector<MessageTrial> trials_of(int count, std::int64_t elems) {
  std::vector<MessageTrial> trials;
  for (const auto& [codec, ratio] : {std::pair(kCoded, 8), std::pair(kPacked, 4)}) {
    for (const std::int64_t aggregate : {0, 4, 1}) {
      const std::int64_t calls = aggregate == 0 ? 1 : (count + aggregate - 1) / aggregate;
      trials.push_back({codec, aggregate, count * elems * 4 / ratio + calls * 100});
    }
  }
  return trials;
}

MessageChoice choose(const MessageShape& shape, const std::vector<MessageTrial>& trials, const Cluster& cluster,
                     double min_gain = 0.05) {
  const Result<MessageChoice> choice = choose_codec(shape, trials, cluster, min_gain);
  EXPECT_TRUE(choice.ok()) << choice.status().to_string();
  return choice.value();
}

TEST(MessageChoice, Table) {
  struct Case {
    const char* what;
    std::int64_t ns_per_byte;
    int count;
    std::int64_t elems;
    int trial;
  };
  const Case cases[] = {
      {"a slow link: the smallest payload", 80, 8, 100'000, 0},
      {"a link where coding does not pay, packing does", 3, 8, 100'000, 3},
      {"a fast link: as it is", 1, 8, 100'000, -1},
      {"tiny tensors over a slow link: together, or calls would cost more than bytes", 80, 64, 500, 0},
      {"tiny tensors over a faster one: as they are", 1, 64, 500, -1},
  };
  for (const Case& c : cases) {
    const MessageChoice choice =
        choose(gathered(c.count, c.elems), trials_of(c.count, c.elems), four_ranks(c.ns_per_byte));
    EXPECT_EQ(choice.trial, c.trial) << c.what << ": " << choice.reason;
    EXPECT_EQ(choice.uncompressed_ns, 4 * c.count * c.elems * 4 * c.ns_per_byte) << c.what;
  }
}

// One tensor a call is what tiny tensors lose by: 20 us each, on the owner and for every decoder.
TEST(MessageChoice, TinyTensorsWantToBeTogether) {
  std::vector<MessageTrial> alone = trials_of(64, 500), both = alone;
  std::erase_if(alone, [](const MessageTrial& trial) { return trial.aggregate != 1; });
  EXPECT_EQ(choose(gathered(64, 500), alone, four_ranks(12)).trial, -1);
  EXPECT_EQ(choose(gathered(64, 500), both, four_ranks(12)).trial, 0);
  // Larger tables for all than for few would speak for few.
  both = trials_of(64, 100'000);
  for (MessageTrial& trial : both) trial.payload_bytes *= trial.aggregate == 0 ? 3 : 1;
  const MessageChoice few = choose(gathered(64, 100'000), both, four_ranks(80));
  EXPECT_EQ(both[static_cast<std::size_t>(few.trial)].aggregate, 4);
  EXPECT_EQ(few.reason.find("compso(bound=0.004), 4 together: "), 0u) << few.reason;
}

// By hand: 4 ranks, 1e6 values each, 80 ns a byte.
TEST(MessageChoice, PredictedTimes) {
  const MessageShape shape = gathered(1, 1'000'000);
  const std::vector<MessageTrial> trial = {{kCoded, 0, 500'000}};  // of each rank
  const MessageChoice choice = choose(shape, trial, four_ranks(80));
  EXPECT_EQ(choice.uncompressed_ns, 16'000'000 * 80);
  EXPECT_EQ(choice.predicted_ns, 5 * 6'020'000 + 2'000'000 * 80);
  EXPECT_EQ(choice.reason, "compso(bound=0.004), all tensors together: 190 ms predicted instead of 1.28e+03 ms");

  MessageShape sum = shape;
  sum.is_sum = true;
  const std::vector<MessageTrial> sent = {{kCoded, 0, 1'500'000}};  // by each rank, to three others
  const MessageChoice summed = choose(sum, sent, four_ranks(80));
  EXPECT_EQ(summed.uncompressed_ns, 16'000'000 * 80);
  EXPECT_EQ(summed.predicted_ns, (3 + 3 + 3) * 6'020'000 + 2'000'000 * 80 + 1000 * 80);

  MessageShape pair = shape;  // half of two ranks' bytes are another's, three quarters of four ranks'
  pair.ranks = {0, 2};
  pair.elems.resize(2);
  EXPECT_EQ(choose(pair, trial, four_ranks(90)).uncompressed_ns, 5'333'333 * 90);
}

// One of four ranks owns most: it takes as long as if all did.
TEST(MessageChoice, AGatherWaitsForTheLargestPart) {
  MessageShape shape = gathered(1, 1'000'000);
  for (std::size_t r = 1; r < 4; ++r) shape.elems[r] = {1000};
  const MessageChoice choice = choose(shape, {{kCoded, 0, 500'000}}, four_ranks(80));
  EXPECT_EQ(choice.uncompressed_ns, 16'000'000 * 80);
  EXPECT_GT(choice.predicted_ns, 4 * 500'000 * 80);
}

TEST(MessageChoice, Declines) {
  const MessageShape shape = gathered(1, 1'000'000);
  const std::vector<MessageTrial> trial = {{kCoded, 0, 500'000}};
  EXPECT_EQ(choose(shape, trial, four_ranks(80), 0.85).trial, 0);
  const MessageChoice close = choose(shape, trial, four_ranks(80), 0.86);  // it saves 85.1 %
  EXPECT_EQ(close.trial, -1);
  EXPECT_EQ(close.predicted_ns, 5 * 6'020'000 + 2'000'000 * 80);
  EXPECT_EQ(close.reason,
            "uncompressed: 1.28e+03 ms predicted, and with compso(bound=0.004), all tensors together 190 ms");
  const MessageChoice unknown = choose(shape, {{"quant(bits=8)", 0, 100}}, four_ranks(80));
  EXPECT_EQ(unknown.trial, -1);
  EXPECT_EQ(unknown.predicted_ns, 0);
  EXPECT_NE(unknown.reason.find("no times of it"), std::string::npos) << unknown.reason;
  EXPECT_EQ(choose(shape, {}, four_ranks(80)).reason, "uncompressed: there is no candidate");
}

TEST(MessageChoice, ACodecWithoutTimesHasThoseOfAnother) {
  const MessageTrial trial = {"compso(bound=0.02)", 0, 100'000};
  MessageTrial timed = trial;
  timed.timed_as = kCoded;
  EXPECT_EQ(choose(gathered(8, 100'000), {trial}, four_ranks(80)).trial, -1);
  const MessageChoice choice = choose(gathered(8, 100'000), {timed}, four_ranks(80));
  EXPECT_EQ(choice.trial, 0) << choice.reason;
  EXPECT_EQ(choice.predicted_ns, choose(gathered(8, 100'000), {{kCoded, 0, 100'000}}, four_ranks(80)).predicted_ns);
}

}  // namespace
}  // namespace cortado::message_choice_test

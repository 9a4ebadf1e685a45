// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "bucket/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "bucket/model_shapes.h"

namespace cortado {
namespace {

constexpr double kMiB = 1 << 20;
constexpr std::int64_t kElemBytes = 4;

FusionBudget scaled_mib(std::int64_t mib) { return {FusionBudget::Kind::kScaled, mib << 20}; }

std::vector<std::uint32_t> reverse_order(std::size_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.rbegin(), order.rend(), 0u);
  return order;
}

std::vector<SlotKind> all_matrices(const std::vector<LayoutTensor>& tensors, SlotKind kind) {
  std::vector<SlotKind> kinds;
  for (const LayoutTensor& tensor : tensors) kinds.push_back(tensor.rank > 0 ? kind : SlotKind::kDense);
  return kinds;
}

Layout layout_of(const std::vector<LayoutTensor>& tensors, SlotKind kind, const FusionBudget& budget) {
  return make_layout(tensors, reverse_order(tensors.size()), all_matrices(tensors, kind), {}, budget, kElemBytes);
}

std::string fixed(double value, int decimals) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

std::string mib(std::int64_t elems, int decimals) {
  return fixed(static_cast<double>(elems * kElemBytes) / kMiB, decimals);
}

// The figures of the ACP-SGD notes (sections 4 and 5.3) for one model at one rank, as they are printed there.
struct Published {
  const char* name;
  ModelShapes (*model)();
  int rank;
  std::int64_t tensors, matrices, elems, vector_elems, row_factor_elems, col_factor_elems;
  const char *dense_mib, *row_step_mib, *col_step_mib, *power_mib;
  const char *power_ratio, *row_step_ratio, *col_step_ratio, *mean_ratio;
  const char* row_budget_mib;
  int row_messages;
  const char* row_largest_mib;
  const char* col_budget_mib;
  int col_messages;
  const char* col_largest_mib;
  int dense_messages;
  const char* dense_largest_mib;
};

// clang-format off
const Published kPublished[] = {
    {"ResNet50", resnet50, 4, 161, 54, 25'557'032, 54'120, 110'240, 219'724,
     "97.5", "0.63", "1.04", "1.47", "66.5", "155.5", "93.3", "116.6",
     "0.1608", 4, "0.160", "0.2679", 4, "0.268", 5, "24.855"},
    {"ResNet152", resnet152, 4, 467, 156, 60'192'808, 152'424, 306'848, 678'476,
     "229.6", "1.75", "3.17", "4.34", "52.9", "131.1", "72.4", "93.3",
     "0.1908", 10, "0.189", "0.3451", 10, "0.340", 10, "24.855"},
    {"BertBase", bert_base, 32, 206, 78, 110'111'042, 154'946, 3'696'648, 2'755'584,
     "420.0", "14.69", "11.10", "25.20", "16.7", "28.6", "37.8", "32.6",
     "0.8745", 15, "3.727", "0.6608", 25, "0.586", 16, "89.438"},
    {"BertLarge", bert_large, 32, 398, 150, 336'232'258, 356'162, 8'136'712, 7'213'056,
     "1282.6", "32.40", "28.87", "59.91", "21.4", "39.6", "44.4", "41.9",
     "0.6315", 73, "3.727", "0.5628", 73, "0.523", 50, "119.250"},
    {"BertLarge", bert_large, 64, 398, 150, 336'232'258, 356'162, 16'273'416, 14'422'016,
     "1282.6", "63.44", "56.37", "118.45", "10.8", "20.2", "22.8", "21.4",
     "1.2365", 73, "7.453", "1.0988", 73, "1.023", 50, "119.250"},
    {"BertLarge", bert_large, 128, 398, 150, 336'232'258, 356'162, 32'546'824, 28'839'936,
     "1282.6", "125.51", "111.37", "235.53", "5.4", "10.2", "11.5", "10.8",
     "2.4464", 73, "14.906", "2.1708", 73, "2.023", 50, "119.250"},
    {"BertLarge", bert_large, 256, 398, 150, 336'232'258, 356'162, 65'093'640, 57'675'776,
     "1282.6", "249.67", "221.37", "469.69", "2.7", "5.1", "5.8", "5.4",
     "4.8664", 73, "29.812", "4.3149", 73, "4.023", 50, "119.250"},
    {"Vgg16Cifar", vgg16_cifar, 4, 54, 14, 14'728'266, 12'682, 16'936, 135'788,
     "56.2", "0.11", "0.57", "0.63", "89.0", "497.3", "99.2", "165.4",
     "0.0503", 3, "0.050", "0.2520", 3, "0.242", 3, "20.135"},
    // Section 5.3 has no row for this model: sizes only.
    {"ResNet18Cifar", resnet18_cifar, 4, 62, 21, 11'173'962, 9'610, 19'240, 126'060,
     "42.6", "0.11", "0.52", "0.59", "72.1", "387.3", "82.4", "135.8",
     nullptr, 0, nullptr, nullptr, 0, nullptr, 0, nullptr},
};
// clang-format on

class PublishedModel : public ::testing::TestWithParam<Published> {
 protected:
  const Published& published() const { return GetParam(); }
  std::vector<LayoutTensor> tensors() const { return layout_tensors(published().model(), published().rank); }
  Layout layout(SlotKind kind) const { return layout_of(tensors(), kind, scaled_mib(25)); }
};

TEST_P(PublishedModel, HasTheElements) {
  std::int64_t matrices = 0, elems = 0, vector_elems = 0, row_factor_elems = 0, col_factor_elems = 0;
  for (const LayoutTensor& tensor : tensors()) {
    elems += tensor.elems();
    if (tensor.rank == 0) vector_elems += tensor.elems();
    if (tensor.rank == 0) continue;
    ++matrices;
    row_factor_elems += tensor.slot_elems(SlotKind::kRowFactor);
    col_factor_elems += tensor.slot_elems(SlotKind::kColFactor);
  }
  EXPECT_EQ(static_cast<std::int64_t>(tensors().size()), published().tensors);
  EXPECT_EQ(matrices, published().matrices);
  EXPECT_EQ(elems, published().elems);
  EXPECT_EQ(vector_elems, published().vector_elems);
  EXPECT_EQ(row_factor_elems, published().row_factor_elems);
  EXPECT_EQ(col_factor_elems, published().col_factor_elems);
}

TEST_P(PublishedModel, HasTheBytesAndRatios) {
  const std::int64_t dense = layout(SlotKind::kDense).elems();
  const std::int64_t rows = layout(SlotKind::kRowFactor).elems();
  const std::int64_t cols = layout(SlotKind::kColFactor).elems();
  const std::int64_t power = rows + cols - published().vector_elems;  // vectors travel once
  EXPECT_EQ(mib(dense, 1), published().dense_mib);
  EXPECT_EQ(mib(rows, 2), published().row_step_mib);
  EXPECT_EQ(mib(cols, 2), published().col_step_mib);
  EXPECT_EQ(mib(power, 2), published().power_mib);
  const auto ratio = [&](double sent) { return fixed(static_cast<double>(dense) / sent, 1); };
  EXPECT_EQ(ratio(static_cast<double>(power)), published().power_ratio);
  EXPECT_EQ(ratio(static_cast<double>(rows)), published().row_step_ratio);
  EXPECT_EQ(ratio(static_cast<double>(cols)), published().col_step_ratio);
  EXPECT_EQ(ratio(static_cast<double>(rows + cols) / 2), published().mean_ratio);
}

class PublishedMessages : public PublishedModel {};

TEST_P(PublishedMessages, AreAsPrinted) {
  const auto budget = [&](const Layout& layout) {
    return fixed(
        static_cast<double>(budget_bytes(scaled_mib(25), layout.elems() * kElemBytes, published().elems * kElemBytes)) /
            kMiB,
        4);
  };
  const Layout rows = layout(SlotKind::kRowFactor);
  EXPECT_EQ(budget(rows), published().row_budget_mib);
  EXPECT_EQ(static_cast<int>(rows.messages.size()), published().row_messages);
  EXPECT_EQ(mib(rows.largest_message_elems(), 3), published().row_largest_mib);

  const Layout cols = layout(SlotKind::kColFactor);
  EXPECT_EQ(budget(cols), published().col_budget_mib);
  EXPECT_EQ(static_cast<int>(cols.messages.size()), published().col_messages);
  EXPECT_EQ(mib(cols.largest_message_elems(), 3), published().col_largest_mib);

  const Layout dense = layout(SlotKind::kDense);
  EXPECT_EQ(budget(dense), "25.0000");
  EXPECT_EQ(static_cast<int>(dense.messages.size()), published().dense_messages);
  EXPECT_EQ(mib(dense.largest_message_elems(), 3), published().dense_largest_mib);
}

std::string name_of(const ::testing::TestParamInfo<Published>& info) {
  return std::string(info.param.name) + "Rank" + std::to_string(info.param.rank);
}
INSTANTIATE_TEST_SUITE_P(Layout, PublishedModel, ::testing::ValuesIn(kPublished), name_of);
INSTANTIATE_TEST_SUITE_P(Layout, PublishedMessages,
                         ::testing::ValuesIn(std::begin(kPublished), std::end(kPublished) - 1), name_of);

TEST(Layout, WordEmbeddingIsTheLastMessageAndAlone) {
  for (const auto model : {bert_base, bert_large}) {
    const Layout rows = layout_of(layout_tensors(model(), 32), SlotKind::kRowFactor, scaled_mib(25));
    ASSERT_EQ(rows.messages.back().slots.size(), 1u);
    EXPECT_EQ(rows.messages.back().slots[0].tensor, 0u);
    EXPECT_EQ(rows.messages.back().elems, rows.largest_message_elems());
  }
}

// ---- which matrices pay
// ----------------------------------------------------------------------------------------------

TEST(EffectiveRank, IsAtMostTheShape) {
  struct Case {
    std::int64_t rows, cols;
    int rank, expected;
  };
  for (const Case& c : {Case{8, 5, 4, 4}, {8, 5, 5, 5}, {8, 5, 6, 5}, {3, 100, 4, 3}, {1, 1, 4, 1}, {0, 5, 4, 0}}) {
    EXPECT_EQ(effective_rank(c.rows, c.cols, c.rank, 0), c.expected) << c.rows << "x" << c.cols << " rank " << c.rank;
  }
}

TEST(EffectiveRank, NeedsMoreThanTheRate) {
  EXPECT_EQ(effective_rank(8, 8, 2, 2), 0) << "64 elements against 2 * 2 * 16";
  EXPECT_EQ(effective_rank(8, 9, 2, 2), 2) << "72 elements against 2 * 2 * 17";
  EXPECT_EQ(effective_rank(8, 8, 2, 1.9), 2);
}

TEST(EffectiveRank, LeavesBertLargeMatricesDense) {
  const auto too_small = [](int rank) {
    int matrices = 0, dense = 0;
    for (const ModelTensor& tensor : bert_large()) {
      matrices += tensor.is_matrix;
      dense += tensor.is_matrix && effective_rank(tensor.rows, tensor.cols, rank, 2) == 0;
    }
    EXPECT_EQ(matrices, 150);
    return dense;
  };
  EXPECT_EQ(too_small(32), 2);
  EXPECT_EQ(too_small(256), 101);
}

// ---- sides
// -----------------------------------------------------------------------------------------------------------

std::int64_t sent_elems(const std::vector<LayoutTensor>& tensors, const std::vector<SlotKind>& kinds) {
  std::int64_t total = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) total += tensors[t].slot_elems(kinds[t]);
  return total;
}

std::vector<SlotKind> other_sides(std::vector<SlotKind> sides) {
  for (SlotKind& side : sides) {
    if (side == SlotKind::kRowFactor) {
      side = SlotKind::kColFactor;
    } else if (side == SlotKind::kColFactor) {
      side = SlotKind::kRowFactor;
    }
  }
  return sides;
}

// What one parity sends more than the other.
std::int64_t surplus_elems(const std::vector<LayoutTensor>& tensors, bool balanced) {
  const std::vector<SlotKind> sides = choose_sides(tensors, balanced);
  return std::abs(sent_elems(tensors, sides) - sent_elems(tensors, other_sides(sides)));
}

TEST(Sides, BeginWithRowsUnlessBalanced) {
  const std::vector<LayoutTensor> tensors = {{8, 4, 2}, {1, 7, 0}, {4, 80, 2}};
  EXPECT_EQ(choose_sides(tensors, false), (std::vector{SlotKind::kRowFactor, SlotKind::kDense, SlotKind::kRowFactor}));
}

TEST(Sides, BalanceTheLargestFirst) {
  // Surpluses of the row factor: 4, 10, -7. The 10 goes first, the -7 against it, the 4 against the 3 that are left.
  const std::vector<LayoutTensor> tensors = {{5, 1, 1}, {11, 1, 1}, {1, 8, 1}};
  EXPECT_EQ(choose_sides(tensors, true),
            (std::vector{SlotKind::kColFactor, SlotKind::kRowFactor, SlotKind::kRowFactor}));
  EXPECT_EQ(surplus_elems(tensors, true), 1);
}

TEST(Sides, AreBalancedInEveryModel) {
  struct Case {
    const char* name;
    ModelShapes (*model)();
    int rank;
    std::int64_t rows_first_surplus, balanced_surplus;  // elements that one parity sends more than the other
  };
  for (const Case& c : {Case{"ResNet-50", resnet50, 4, 109'484, 236},
                        {"ResNet-152", resnet152, 4, 371'628, 236},
                        {"BERT-Base", bert_base, 32, 941'064, 56'328},
                        {"BERT-Large", bert_large, 32, 923'656, 18'440},
                        {"BERT-Large", bert_large, 256, 7'417'864, 176'136},
                        {"VGG-16 CIFAR", vgg16_cifar, 4, 118'852, 1'172},
                        {"ResNet-18 CIFAR", resnet18_cifar, 4, 106'820, 108}}) {
    const std::vector<LayoutTensor> tensors = layout_tensors(c.model(), c.rank);
    const std::int64_t surplus = surplus_elems(tensors, true);
    EXPECT_EQ(surplus_elems(tensors, false), c.rows_first_surplus) << c.name;
    EXPECT_EQ(surplus, c.balanced_surplus) << c.name;
    EXPECT_LE(surplus * 50, sent_elems(tensors, choose_sides(tensors, true))) << c.name << ": within 2 %";
    std::int64_t most_lopsided = 0;
    for (const LayoutTensor& t : tensors) most_lopsided = std::max(most_lopsided, std::abs(t.rows - t.cols) * t.rank);
    EXPECT_LE(surplus, most_lopsided) << c.name;
  }
}

// ---- messages
// --------------------------------------------------------------------------------------------------------

// The tensors of each message, as "1 0 | 2".
std::string tensors_of(const Layout& layout) {
  std::string text;
  for (const Message& message : layout.messages) {
    if (!text.empty()) text += "| ";
    for (const Slot& slot : message.slots) text += std::to_string(slot.tensor) + " ";
  }
  if (!text.empty()) text.pop_back();
  return text;
}

Layout dense_layout(const std::vector<std::int64_t>& elems, const FusionBudget& budget) {
  std::vector<LayoutTensor> tensors;
  for (const std::int64_t count : elems) tensors.push_back({1, count, 0});
  return layout_of(tensors, SlotKind::kDense, budget);
}

TEST(Messages, OneATensorWithoutBudget) {
  EXPECT_EQ(tensors_of(dense_layout({1, 1, 1}, {FusionBudget::Kind::kNone, 1 << 20})), "2 | 1 | 0");
  const Layout resnet = layout_of(layout_tensors(resnet50(), 4), SlotKind::kRowFactor, {FusionBudget::Kind::kNone, 0});
  EXPECT_EQ(resnet.messages.size(), 161u);
}

TEST(Messages, OneInAllWithALargeBudget) {
  for (const SlotKind kind : {SlotKind::kDense, SlotKind::kRowFactor, SlotKind::kColFactor}) {
    const Layout layout = layout_of(layout_tensors(bert_large(), 32), kind, scaled_mib(1500));
    EXPECT_EQ(layout.messages.size(), 1u);
    EXPECT_EQ(layout.largest_message_elems(), layout.elems());
  }
}

TEST(Messages, FillUpToTheBudget) {
  const FusionBudget ten_elems{FusionBudget::Kind::kScaled, 10 * kElemBytes};
  EXPECT_EQ(tensors_of(dense_layout({5, 5, 5, 5}, ten_elems)), "3 2 | 1 0");
  EXPECT_EQ(tensors_of(dense_layout({5, 6, 5, 5}, ten_elems)), "3 2 | 1 | 0");
}

TEST(Messages, OversizeTensorIsAlone) {
  const FusionBudget ten_elems{FusionBudget::Kind::kScaled, 10 * kElemBytes};
  EXPECT_EQ(tensors_of(dense_layout({1, 1, 11, 1, 1}, ten_elems)), "4 3 | 2 | 1 0");
}

// An MLP of 7 layers of 4 MiB and a small one in front, the last one to be ready: as DDP's buckets, whose first one
// leaves early. Whatever the wire: 25 MiB are those of gradients, in the dtype that DDP has them in.
TEST(Messages, BucketsEndWithTheTensorThatFillsThem) {
  constexpr std::int64_t kLayer = 1 << 20;
  const FusionBudget buckets{FusionBudget::Kind::kBuckets, std::int64_t{25} << 20};
  const std::vector<std::int64_t> mlp = {kLayer / 2, kLayer, kLayer, kLayer, kLayer, kLayer, kLayer, kLayer, 1000};
  EXPECT_EQ(tensors_of(dense_layout(mlp, buckets)), "8 7 | 6 5 4 3 2 1 0");
  std::vector<LayoutTensor> tensors;
  for (const std::int64_t elems : mlp) tensors.push_back({1, elems, 0});
  const std::vector<std::uint32_t> order = {8, 7, 6, 5, 4, 3, 2, 1, 0};
  const Layout narrow = make_layout(tensors, order, std::vector<SlotKind>(9, SlotKind::kDense), {}, buckets, 2);
  EXPECT_EQ(tensors_of(narrow), "8 7 | 6 5 4 3 2 1 0");
  for (LayoutTensor& tensor : tensors) {
    tensor.cols *= 2;
    tensor.gradient_elem_bytes = 2;
  }
  for (const std::int64_t wire_bytes : {2, 4}) {
    const Layout layout =
        make_layout(tensors, order, std::vector<SlotKind>(9, SlotKind::kDense), {}, buckets, wire_bytes);
    EXPECT_EQ(tensors_of(layout), "8 7 | 6 5 4 3 2 1 0") << wire_bytes;
  }

  EXPECT_EQ(tensors_of(dense_layout({kLayer, kLayer, 30 * kLayer, kLayer, 1, kLayer, 1, 1}, buckets)),
            "7 6 5 | 4 3 2 | 1 0");
  const FusionBudget four_bytes{FusionBudget::Kind::kBuckets, 4};
  EXPECT_EQ(tensors_of(dense_layout({1, 0, 5, 1}, four_bytes)), "3 | 2 | 0");
}

TEST(Messages, LeaveOutEmptyAndSkippedTensors) {
  EXPECT_EQ(tensors_of(dense_layout({0, 3, 0, 4}, scaled_mib(1))), "3 1");
  EXPECT_EQ(tensors_of(dense_layout({0, 0}, scaled_mib(1))), "");
  EXPECT_EQ(tensors_of(dense_layout({}, {})), "");
  const std::vector<LayoutTensor> tensors = {{1, 3, 0}, {8, 4, 2}, {1, 5, 0}};
  const Layout second_round = make_layout(tensors, {2, 1, 0}, all_matrices(tensors, SlotKind::kColFactor),
                                          {true, false, true}, scaled_mib(1), kElemBytes);
  EXPECT_EQ(tensors_of(second_round), "1");
}

TEST(Messages, SlotsFollowEachOther) {
  const std::vector<LayoutTensor> tensors = {{8, 4, 2}, {1, 7, 0}, {3, 5, 2}};
  const Layout layout = make_layout(tensors, {2, 0, 1}, {SlotKind::kRowFactor, SlotKind::kDense, SlotKind::kColFactor},
                                    {}, scaled_mib(1), kElemBytes);
  ASSERT_EQ(layout.messages.size(), 1u);
  const std::vector<Slot>& slots = layout.messages[0].slots;
  ASSERT_EQ(slots.size(), 3u);
  const Slot expected[] = {
      {2, SlotKind::kColFactor, 0, 10}, {0, SlotKind::kRowFactor, 10, 16}, {1, SlotKind::kDense, 26, 7}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(slots[i].tensor, expected[i].tensor);
    EXPECT_EQ(slots[i].kind, expected[i].kind);
    EXPECT_EQ(slots[i].offset_elems, expected[i].offset_elems);
    EXPECT_EQ(slots[i].elems, expected[i].elems);
  }
  EXPECT_EQ(layout.messages[0].elems, 33);
}

// Sums and gathers fill messages of their own; a message comes in the sequence where its last tensor becomes ready.
TEST(Messages, OfBothCollectivesAreOneSequence) {
  std::vector<LayoutTensor> tensors(6, {1, 40, 0, 10});
  const SlotKind d = SlotKind::kDense, p = SlotKind::kPayload;
  const auto layout = [&](std::vector<SlotKind> kinds, std::int64_t cap_bytes) {
    std::int64_t sent_bytes = 0;
    for (const SlotKind kind : kinds) sent_bytes += kind == p ? 10 : kind == d ? 160 : 40;
    const FusionBudget budget{FusionBudget::Kind::kScaled, cap_bytes * 6 * 160 / sent_bytes + 1};
    return make_layout(tensors, {5, 4, 3, 2, 1, 0}, kinds, {}, budget, kElemBytes);
  };
  const Layout mixed = layout({d, p, p, d, p, p}, 320);
  EXPECT_EQ(tensors_of(mixed), "5 4 2 1 | 3 0") << "the sum waits for tensor 0";
  EXPECT_EQ(mixed.messages[0].collective, Collective::kAllGather);
  EXPECT_EQ(mixed.messages[1].collective, Collective::kAllReduce);
  EXPECT_EQ(mixed.messages[0].elems, 40) << "bytes";
  EXPECT_EQ(mixed.messages[0].slots[2].offset_elems, 20);
  EXPECT_EQ(mixed.messages[1].elems, 80);
  EXPECT_EQ(tensors_of(layout({p, d, p, d, p, d}, 20)), "5 | 3 | 4 2 | 1 | 0");
  EXPECT_EQ(tensors_of(layout({p, d, SlotKind::kValues, d, p, d}, 200)), "5 | 3 2 | 1 | 4 0") << "values are summed";
}

TEST(Messages, LatencyBudgetGrowsWithTheRootOfTheBytes) {
  const FusionBudget latency{FusionBudget::Kind::kLatency, 0};
  const std::int64_t of_1_mb = budget_bytes(latency, 1'000'000, 1'000'000'000);
  EXPECT_NEAR(static_cast<double>(of_1_mb), 288'097, 1) << "sqrt(1 MB * 83 kB)";
  EXPECT_NEAR(static_cast<double>(budget_bytes(latency, 4'000'000, 0)), 2.0 * static_cast<double>(of_1_mb), 2);
  EXPECT_EQ(budget_bytes(latency, 0, 0), 0);
}

TEST(Messages, OfTheLatencyBudgetEndWithDdpsBuckets) {
  // 20 MiB each, so that DDP's buckets are 7, then 6 5, 4 3, 2 1, and 0.
  const std::vector<LayoutTensor> tensors(8, LayoutTensor{2048, 2560, 4});
  const auto layout = [&](int rank) {
    std::vector<LayoutTensor> of_rank = tensors;
    for (LayoutTensor& tensor : of_rank) tensor.rank = rank;
    return tensors_of(layout_of(of_rank, SlotKind::kRowFactor, {FusionBudget::Kind::kLatency, 0}));
  };
  // Budgets of 74, 147, 295 and 590 KB.
  EXPECT_EQ(layout(1), "7 6 5 4 3 | 2 1 0") << "8 KB each: 25 KB are too little to end with a bucket";
  EXPECT_EQ(layout(4), "7 6 5 | 4 3 2 1 | 0") << "33 KB each";
  EXPECT_EQ(layout(16), "7 6 5 | 4 3 | 2 1 | 0") << "131 KB each: the first message is larger than its budget";
  EXPECT_EQ(layout(64), "7 | 6 | 5 | 4 | 3 | 2 | 1 | 0") << "524 KB each";
}

TEST(Messages, BudgetOfAnEmptyModelIsZero) {
  EXPECT_EQ(budget_bytes(scaled_mib(25), 0, 0), 0);
  EXPECT_EQ(budget_bytes({FusionBudget::Kind::kNone, 1 << 20}, 100, 100), 0);
}

// ---- names
// -----------------------------------------------------------------------------------------------------------

using MessageNames = std::vector<std::vector<std::string>>;

class LayoutNames : public ::testing::Test {
 protected:
  const std::vector<std::string> names_ = {"a", "b", "c", "empty"};
  const std::vector<LayoutTensor> tensors_ = {{8, 4, 2}, {1, 7, 0}, {3, 5, 2}, {0, 5, 0}};
  const Layout layout_ = layout_of(tensors_, SlotKind::kRowFactor, {FusionBudget::Kind::kNone, 0});
};

TEST_F(LayoutNames, ComeBackAsTheSameLayout) {
  const MessageNames names = layout_names(layout_, names_);
  EXPECT_EQ(names, (MessageNames{{"c"}, {"b"}, {"a"}}));
  const Result<Layout> back = layout_from_names(names, layout_, names_);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(layout_names(back.value(), names_), names);
  EXPECT_EQ(back.value().elems(), layout_.elems());
}

TEST_F(LayoutNames, MayBeGroupedOtherwise) {
  const Result<Layout> back = layout_from_names({{"a", "c"}, {"b"}}, layout_, names_);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(tensors_of(back.value()), "0 2 | 1");
  const Slot& second = back.value().messages[0].slots[1];
  EXPECT_EQ(second.kind, SlotKind::kRowFactor);
  EXPECT_EQ(second.offset_elems, 16);
  EXPECT_EQ(second.elems, 6);
  EXPECT_EQ(back.value().messages[0].elems, 22);
}

TEST_F(LayoutNames, AreRefused) {
  struct Case {
    MessageNames messages;
    const char* message;
  };
  for (const Case& c : {Case{{{"a", "b"}, {"x"}}, "tensor \"x\" is unknown, occurs twice or does not travel"},
                        {{{"a", "b"}, {"c", "a"}}, "tensor \"a\" is unknown, occurs twice or does not travel"},
                        {{{"a", "b", "c", "empty"}}, "tensor \"empty\" is unknown, occurs twice or does not travel"},
                        {{{"b"}}, "tensor \"c\" is in no message"},
                        {{}, "tensor \"c\" is in no message"},
                        {{{"a", "b"}, {}, {"c"}}, "message 1 is empty"}}) {
    const Result<Layout> back = layout_from_names(c.messages, layout_, names_);
    ASSERT_FALSE(back.ok()) << c.message;
    EXPECT_EQ(back.status().code(), StatusCode::kMismatch);
    EXPECT_EQ(back.status().message(), std::string("layout of the state: ") + c.message);
  }
}

}  // namespace
}  // namespace cortado

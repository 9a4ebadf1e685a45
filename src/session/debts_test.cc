// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/debts.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace cortado {
namespace {

constexpr std::int64_t kElems = 6;

std::vector<EngineTensor> two_tensors() {
  return {{.name = "w", .rows = 2, .cols = 3}, {.name = "b", .rows = 1, .cols = kElems}};
}

// Steps with gradients of zeros, settled; what arrived in each.
std::vector<float> arrived_in_steps(Debts& debts, std::uint32_t tensor, int steps, const StepContext& context = {}) {
  std::vector<float> arrived;
  for (int step = 0; step < steps; ++step) {
    std::vector<float> gradient(kElems, 0.0f);
    debts.begin_step();
    debts.pay({tensor, gradient.data()}, context, step);
    debts.settle();
    arrived.push_back(gradient[1]);
  }
  return arrived;
}

const std::vector<float> kOnes(kElems, 1.0f);

TEST(Debts, ArePaidAtOnceOrInPieces) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 3.0f, 1, 0);
  debts.owe(1, kOnes, 4.0f, Debts::kPieces, 0);
  EXPECT_EQ(arrived_in_steps(debts, 0, 2), (std::vector<float>{3, 0}));
  EXPECT_FALSE(debts.empty());
  const std::vector<float> in_pieces = arrived_in_steps(debts, 1, Debts::kPieces + 1, {.gradient_scale = 2});
  EXPECT_EQ(in_pieces[0], 1.0f);  // an eighth of 4, of gradients that are scaled by 2
  EXPECT_EQ(std::accumulate(in_pieces.begin(), in_pieces.end(), 0.0f), 8.0f);
  EXPECT_EQ(in_pieces.back(), 0.0f);
  EXPECT_TRUE(debts.empty());
}

// What a step that was not finite was given is still owed.
TEST(Debts, StayUntilSettled) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 1.0f, 1, 0);
  std::vector<float> gradient(kElems, 0.5f);
  debts.begin_step();
  debts.pay({0, gradient.data()}, {}, 0);
  EXPECT_EQ(gradient, std::vector<float>(kElems, 1.5f));
  ASSERT_EQ(debts.paid().size(), 1u);
  EXPECT_EQ(debts.paid()[0].tensor, 0u);
  EXPECT_EQ(arrived_in_steps(debts, 0, 2), (std::vector<float>{1, 0}));
}

// Half of a debt in pieces has been paid when more is owed: the rest and the new are spread anew.
TEST(Debts, AddUp) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 8.0f, Debts::kPieces, 0);
  arrived_in_steps(debts, 0, 4);
  debts.owe(0, kOnes, 12.0f, 1, 4);
  const std::vector<float> arrived = arrived_in_steps(debts, 0, Debts::kPieces + 1);
  EXPECT_EQ(arrived[0], 2.0f);
  EXPECT_EQ(std::accumulate(arrived.begin(), arrived.end(), 0.0f), 16.0f);
  debts.owe(0, std::vector<float>(kElems, 0.0f), 1.0f, 1, 0);
  debts.owe(0, {}, 1.0f, 1, 0);
  EXPECT_TRUE(debts.empty());
}

TEST(Debts, WaitForATensorThatIsNotUsed) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 1.0f, 1, 0);
  EXPECT_EQ(arrived_in_steps(debts, 0, 3, {.holds_zero_gradients = true}), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(debts.drop_old(Debts::kStepsWithoutGradient - 1).tensors, 0);
  const Debts::Dropped dropped = debts.drop_old(Debts::kStepsWithoutGradient);
  EXPECT_EQ(dropped.tensors, 1);
  EXPECT_EQ(dropped.last, 0);
  EXPECT_TRUE(debts.empty());
}

TEST(Debts, GoIntoStatesAndBack) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 2.0f, 1, 0);
  debts.owe(1, kOnes, 8.0f, Debts::kPieces, 0);
  arrived_in_steps(debts, 1, 3);
  EngineState state{
      .spec = "", .layout = {}, .tensors = {{.name = "b", .residual = kOnes, .basis = {}, .velocity = {}}}};
  debts.save(&state);
  ASSERT_TRUE(debts.check(state).ok());

  Debts loaded(tensors);
  loaded.owe(0, kOnes, 100.0f, 1, 0);
  loaded.load(state, 7);
  EXPECT_EQ(loaded.drop_old(Debts::kStepsWithoutGradient + 6).tensors, 0);
  EXPECT_EQ(arrived_in_steps(loaded, 0, 2), (std::vector<float>{2, 0}));
  EXPECT_EQ(arrived_in_steps(loaded, 1, 6), (std::vector<float>{1, 1, 1, 1, 1, 0}));

  Debts::remove_from(&state);
  ASSERT_EQ(state.tensors.size(), 1u);
  EXPECT_EQ(state.tensors[0].name, "b");
  EXPECT_TRUE(state.tensors[0].places.empty());
}

TEST(Debts, OfAnotherModelAreRefused) {
  const std::vector<EngineTensor> tensors = two_tensors();
  Debts debts(tensors);
  debts.owe(0, kOnes, 8.0f, Debts::kPieces, 0);
  EngineState state{.spec = "", .layout = {}, .tensors = {}};
  debts.save(&state);
  ASSERT_EQ(state.tensors.size(), 1u);
  for (const std::int64_t pieces : {-1, Debts::kPieces + 1}) {
    EngineState bad = state;
    bad.tensors[0].places[0].begin = pieces;
    EXPECT_EQ(debts.check(bad).code(), StatusCode::kMismatch) << pieces;
  }
  EngineState bad = state;
  bad.tensors[0].places[0].values.pop_back();
  EXPECT_EQ(debts.check(bad).code(), StatusCode::kMismatch);
  bad = state;
  bad.tensors[0].name = "other";
  EXPECT_NE(debts.check(bad).message().find("what \"other\" is still owed"), std::string::npos);
}

}  // namespace
}  // namespace cortado

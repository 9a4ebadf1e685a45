// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/contest.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

using Times = std::vector<std::int64_t>;

Times unpredicted(std::size_t contestants) { return Times(contestants, -1); }

// Gives everybody the same time whenever it is tried, and returns who was tried in which order.
std::vector<int> run(Contest& contest, const std::vector<std::int64_t>& time_of) {
  std::vector<int> tried;
  while (contest.next() >= 0) {
    tried.push_back(contest.next());
    const std::int64_t time = time_of[static_cast<std::size_t>(contest.next())];
    contest.note(Times{time, time, time});
  }
  return tried;
}

TEST(Contest, SlowDenseIsNotTriedAgain) {
  Contest contest(unpredicted(3), Times{1000, 1000});
  EXPECT_EQ(run(contest, {1000, 510, 400}), (std::vector<int>{1, 2}));
  EXPECT_EQ(contest.winner(0.03), 2);
  EXPECT_EQ(contest.steps(0), 2);
}

TEST(Contest, WhoCanNotBeMadeAgainHasNotWon) {
  Contest contest(unpredicted(3), Times{1000, 1000});
  run(contest, {1000, 510, 300});
  contest.withdraw(2);
  EXPECT_EQ(contest.winner(0.03), 1);
  EXPECT_EQ(contest.next(), -1);
  contest.withdraw(1);
  EXPECT_EQ(contest.winner(0.03), 0);
  EXPECT_EQ(contest.best_other(), 0);
}

TEST(Contest, CloseOnesAreTriedAgainInOppositeOrder) {
  Contest contest(unpredicted(3), Times{1000});
  const std::vector<int> tried = run(contest, {1000, 960, 940});
  // Dense is 6.4 % behind the best, which is close for four rounds; of all eight rounds is who is 2.1 % behind.
  EXPECT_EQ(std::vector<int>(tried.begin(), tried.begin() + 16),
            (std::vector<int>{1, 2, 0, 2, 1, 0, 0, 1, 2, 2, 1, 0, 1, 2, 2, 1}));
  EXPECT_EQ(tried.size(), 20u);
  EXPECT_EQ(contest.winner(0.03), 2);
  EXPECT_EQ(contest.winner(0.07), 0);  // asks for more than there is
  EXPECT_EQ(contest.best_other(), 2);
}

// Much slower than it is when it was tried first, dense has not lost for good.
TEST(Contest, WhoWinsByLittleMeetsDenseAgain) {
  Contest contest(unpredicted(2), Times{1000});
  std::vector<int> tried;
  for (int of_dense = 0; contest.next() >= 0;) {
    tried.push_back(contest.next());
    const std::int64_t time = contest.next() == 1 ? 1000 : of_dense++ < 1 ? 1280 : 990;
    contest.note(Times{time, time, time});
  }
  EXPECT_EQ(std::vector<int>(tried.begin(), tried.begin() + 8), (std::vector<int>{1, 0, 1, 0, 0, 1, 1, 0}));
  EXPECT_EQ(contest.winner(0.03), 0);
}

// 1 was predicted to be the fastest, and was tried while the machine was slow.
TEST(Contest, WhoWasPredictedToBeFasterThanTheBestIsTriedOnceMore) {
  Contest contest(Times{1000, 400, 450, 600}, Times{1000});
  std::vector<int> tried;
  for (int of_1 = 0; contest.next() >= 0;) {
    tried.push_back(contest.next());
    const std::int64_t time = contest.next() == 1 ? (of_1++ < 1 ? 900 : 400) : contest.next() == 2 ? 500 : 700;
    contest.note(Times{time, time, time});
  }
  EXPECT_EQ(std::vector<int>(tried.begin(), tried.begin() + 5), (std::vector<int>{1, 2, 3, 2, 1}));
  EXPECT_EQ(contest.winner(0.03), 1);
}

TEST(Contest, TheLatestPredictionCounts) {
  Contest contest(Times{1000, 450, 400}, Times{1000});
  contest.predict(1, 350);
  EXPECT_EQ(run(contest, {1000, 900, 500}), (std::vector<int>{1, 2, 2, 1}));
  Contest other(Times{1000, 350, 400}, Times{1000});
  other.predict(1, 450);
  EXPECT_EQ(run(other, {1000, 900, 500}), (std::vector<int>{1, 2}));
}

TEST(Contest, OneSecondChanceIsAll) {
  Contest contest(Times{1000, 400, 450}, Times{1000});
  EXPECT_EQ(run(contest, {1000, 900, 500}), (std::vector<int>{1, 2, 2, 1}));
  EXPECT_EQ(contest.winner(0.03), 2);
}

TEST(Contest, WhatIsCloseGetsLess) {
  Contest contest(unpredicted(4), Times{1000});
  EXPECT_EQ(run(contest, {1000, 500, 540, 610}), (std::vector<int>{1, 2, 3, 3, 2, 1, 1, 2, 2, 1}));
}

TEST(Contest, ALaterRoundCanChangeTheWinner) {
  Contest contest(unpredicted(3), Times{1000, 1000});
  contest.note(Times{500});
  contest.note(Times{520});
  ASSERT_EQ(contest.next(), 2);
  contest.note(Times{400, 400});
  ASSERT_EQ(contest.next(), 1);
  contest.note(Times{500, 500});
  EXPECT_EQ(contest.winner(0.03), 2);
}

TEST(Contest, NobodyToTry) {
  Contest contest(unpredicted(1), Times{1000});
  EXPECT_EQ(contest.next(), -1);
  EXPECT_EQ(contest.winner(0.03), 0);
  EXPECT_EQ(contest.median_ns(0), 1000);
}

TEST(Contest, WhoCanNotBeMadeIsOut) {
  Contest contest(unpredicted(3), Times{1000});
  contest.drop();
  EXPECT_EQ(run(contest, {1000, 1, 500}), (std::vector<int>{2}));
  EXPECT_EQ(contest.median_ns(1), -1);
  EXPECT_EQ(contest.winner(0.03), 2);
  Contest all_out(unpredicted(2), Times{1000});
  all_out.drop();
  EXPECT_EQ(all_out.next(), -1);
  EXPECT_EQ(all_out.winner(0), 0);
}

TEST(Contest, AmongSomeOfThem) {
  Contest contest(unpredicted(4), Times{1000});
  const int some[] = {3, 1};
  contest.keep_only(some);
  EXPECT_EQ(run(contest, {1000, 600, 100, 400}), (std::vector<int>{1, 3}));
  EXPECT_EQ(contest.median_ns(2), -1);
  EXPECT_EQ(contest.winner(0.03), 3);
}

}  // namespace
}  // namespace cortado

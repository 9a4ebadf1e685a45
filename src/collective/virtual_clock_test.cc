// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/virtual_clock.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "cortado/communicator.h"

namespace cortado {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::nanoseconds;

TEST(VirtualClock, StandsStillUntilAllWait) {
  VirtualClock clock(2);
  std::vector<std::int64_t> woken(2);
  std::thread sleeper([&] {
    clock.sleep(hours(2));
    woken[0] = clock.now_ns();
    clock.leave();
  });
  EXPECT_EQ(clock.now_ns(), 0) << "this thread runs";
  clock.sleep(hours(1));
  woken[1] = clock.now_ns();
  EXPECT_EQ(woken[1], nanoseconds(hours(1)).count());
  clock.sleep(nanoseconds(-5));
  EXPECT_EQ(clock.now_ns(), woken[1]);
  clock.leave();
  sleeper.join();
  EXPECT_EQ(woken[0], nanoseconds(hours(2)).count());
}

TEST(VirtualClock, ATimeoutOfHoursTakesNoTime) {
  VirtualClock clock(2);
  LocalGroup group(2, &clock);
  float values[2] = {1, 2};
  std::thread late([&] {
    clock.sleep(hours(3));
    EXPECT_EQ(group.communicator(1)->start_all_reduce(&values[1], 1, DType::kFloat32).status().code(),
              StatusCode::kTimeout);
    clock.leave();
  });
  ASSERT_TRUE(group.communicator(0)->start_all_reduce(&values[0], 1, DType::kFloat32).ok());
  const Status status = group.communicator(0)->wait(0, hours(2));
  EXPECT_EQ(status.message(),
            "collective 0 (all_reduce fp32 1): rank 0 waited 7.2e+03 s; ranks that have not started it: 1");
  EXPECT_EQ(clock.now_ns(), nanoseconds(hours(2)).count());
  clock.leave();
  late.join();
}

// However long the machine takes for it, nobody's time runs out while somebody works.
TEST(VirtualClock, NoTimeoutWhileAPeerWorks) {
  VirtualClock clock(2);
  LocalGroup group(2, &clock);
  float values[2] = {1, 2};
  std::thread slow([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(group.communicator(1)->start_all_reduce(&values[1], 1, DType::kFloat32).ok());
    clock.leave();
  });
  ASSERT_TRUE(group.communicator(0)->start_all_reduce(&values[0], 1, DType::kFloat32).ok());
  EXPECT_TRUE(group.communicator(0)->wait(0, nanoseconds(1)).ok());
  EXPECT_EQ(clock.now_ns(), 0);
  clock.leave();
  slow.join();
}

TEST(VirtualClock, FaultsRunOnIt) {
  VirtualClock clock(1);
  LocalGroup group(1, &clock);
  const auto faulty = make_faulty_communicator(
      group.communicator(0),
      {{.at = 0, .kind = Fault::Kind::kDelay, .delay = minutes(5)}, {.at = 1, .kind = Fault::Kind::kDrop}}, &clock);
  float value = 1;
  const WorkId delayed = faulty->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_FALSE(faulty->test(delayed).value());
  EXPECT_TRUE(faulty->wait(delayed, hours(1)).ok());
  EXPECT_EQ(clock.now_ns(), nanoseconds(minutes(5)).count());
  EXPECT_TRUE(faulty->test(delayed).value());
  const WorkId dropped = faulty->start_all_reduce(&value, 1, DType::kFloat32).value();
  EXPECT_EQ(faulty->wait(dropped, hours(1)).code(), StatusCode::kTimeout);
  EXPECT_EQ(clock.now_ns(), nanoseconds(minutes(65)).count());
}

TEST(VirtualClockDeathTest, RanksThatWaitForEachOtherForEverAreFound) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        VirtualClock clock(1);
        Mutex mutex;
        MutexLock lock(mutex);
        (void)clock.wait_until(mutex, &mutex, VirtualClock::kNever);
      },
      "all 1 ranks wait for each other");
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace cortado {
namespace {

TEST(ThreadPool, CallsEachIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t count : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
      for (const std::atomic<int>& number : calls) EXPECT_EQ(number, 1) << threads << " threads, count " << count;
    }
  }
}

TEST(ThreadPool, OneThreadWorksInTheCallerInOrder) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<std::int64_t> order;
  pool.parallel_for(4, [&](std::int64_t i) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    order.push_back(i);
  });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(ThreadPool, OtherThreadsTakePart) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  // Each call waits until three threads are in one at once, so the test ends only if they are.
  std::atomic<int> inside{0};
  pool.parallel_for(3, [&](std::int64_t) {
    ++inside;
    while (inside < 3) std::this_thread::yield();
    const std::lock_guard<std::mutex> lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 3u);
}

TEST(ThreadPool, WhatTheBodiesWroteIsVisibleAfterwards) {
  ThreadPool pool(4);
  std::vector<std::int64_t> values(64);
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(64, [&](std::int64_t i) { values[static_cast<std::size_t>(i)] += i; });
  }
  for (std::int64_t i = 0; i < 64; ++i) EXPECT_EQ(values[static_cast<std::size_t>(i)], 2000 * i);
}

TEST(ThreadPool, MayBeUsedFromOneThreadAfterAnother) {
  ThreadPool pool(2);
  std::atomic<int> calls{0};
  for (int i = 0; i < 3; ++i) {
    std::thread([&] { pool.parallel_for(10, [&](std::int64_t) { ++calls; }); }).join();
  }
  EXPECT_EQ(calls, 30);
}

TEST(ThreadPool, IdleThreadsSleep) {
  ThreadPool pool(4);
  pool.parallel_for(8, [](std::int64_t) {});
  // Threads spin for a while before they sleep; how long that takes on a busy machine nobody knows.
  std::clock_t used = CLOCKS_PER_SEC;
  for (int tries = 0; tries < 50 && used >= CLOCKS_PER_SEC / 20; ++tries) {
    const std::clock_t before = std::clock();  // processor time of all threads
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    used = std::clock() - before;
  }
  EXPECT_LT(used, CLOCKS_PER_SEC / 20);
}

// A child has the pool's memory, but none of its threads: a process that loads data, say.
TEST(ThreadPool, WorksAndEndsInAForkedChild) {
  auto pool = std::make_unique<ThreadPool>(3);
  pool->parallel_for(8, [](std::int64_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its threads wait now
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::int64_t sum = 0;
    for (int round = 0; round < 3; ++round) pool->parallel_for(10, [&sum](std::int64_t i) { sum += i; });
    pool.reset();
    _exit(sum == 135 ? 0 : 1);
  }
  int status = -1;
  pid_t ended = 0;
  for (int tries = 0; tries < 1000 && ended == 0; ++tries) {
    ended = waitpid(child, &status, WNOHANG);
    if (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (ended == 0) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  EXPECT_EQ(ended, child) << "it hangs";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;

  std::atomic<int> calls{0};
  pool->parallel_for(10, [&](std::int64_t) { ++calls; });
  EXPECT_EQ(calls, 10);
}

}  // namespace
}  // namespace cortado

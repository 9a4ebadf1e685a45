// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// That the emulation shows what a GPU would: kernels whose threads do not wait for each other where they must.
#include "core/device_emulation.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

namespace cortado {
namespace {

constexpr int kThreads = 96;
using Numbers = std::array<int, kThreads>;

template <class Kernel>
Numbers run(const Kernel& kernel, EmulatedOrder order) {
  Numbers result = {};
  Kernel bound = kernel;
  bound.to = result.data();
  EmulatedDevice::order() = order;
  EmulatedDevice(nullptr).launch(1, bound);
  EmulatedDevice::order() = EmulatedOrder::kForwards;
  return result;
}

template <class Kernel>
bool is_the_same_in_both_orders(const Kernel& kernel) {
  return run(kernel, EmulatedOrder::kForwards) == run(kernel, EmulatedOrder::kBackwards);
}

struct WithShared {
  static constexpr int kThreads = cortado::kThreads;
  int* to = nullptr;
  bool waits = true;

  struct Shared {
    int values[kThreads];
    int chosen;
  };
};

// Each thread reads what one of another warp has written in the phase before.
struct Reverse : WithShared {
  template <class Block>
  void operator()(Block& block, Shared& shared) const {
    const auto write = [&](int t) { shared.values[t] = t; };
    waits ? block.each(write) : block.each_in_warp(write);
    block.each([&](int t) { to[t] = shared.values[kThreads - 1 - t]; });
  }
};

TEST(DeviceEmulation, ShowsThatAWarpDidNotWaitForTheOthers) {
  Numbers reversed;
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  EXPECT_EQ(run(Reverse{}, EmulatedOrder::kForwards), reversed);
  EXPECT_EQ(run(Reverse{}, EmulatedOrder::kBackwards), reversed);
  EXPECT_FALSE(is_the_same_in_both_orders(Reverse{{.waits = false}}));
}

// A variable in Shared is written again right after it was read.
struct ReadAndWrite : WithShared {
  template <class Block>
  void operator()(Block& block, Shared& shared) const {
    block.each([&](int t) {
      if (t == 0) shared.chosen = 7;
    });
    const int chosen = waits ? block.uniform(shared.chosen) : shared.chosen;
    block.each([&](int t) {
      if (t % 32 == 0) shared.chosen = t;
      to[t] = chosen;
    });
  }
};

TEST(DeviceEmulation, ShowsThatUniformIsMissing) {
  EXPECT_TRUE(is_the_same_in_both_orders(ReadAndWrite{}));
  EXPECT_FALSE(is_the_same_in_both_orders(ReadAndWrite{{.waits = false}}));
}

struct Collectives : WithShared {
  template <class Block>
  void operator()(Block& block, Shared&) const {
    typename Block::template PerThread<int> x, y, z;
    typename Block::template PerThread<std::uint32_t> odd;
    block.each_in_warp([&](int t) {
      x[t] = t;
      y[t] = 1;
      z[t] = t;
      odd[t] = t % 2;
    });
    const int all = block.exclusive_sum(x);
    const int count = block.exclusive_sum(y);
    block.ballot(odd);
    block.exchange(z, 4);
    block.butterfly(y, kWarpThreads, [](int a, int b) { return a > b ? a : b; });
    block.each([&](int t) {
      const bool is_right = x[t] == t * (t - 1) / 2 && all == kThreads * (kThreads - 1) / 2 && count == kThreads &&
                            odd[t] == 0xaaaaaaaau && y[t] == t / kWarpThreads * kWarpThreads + kWarpThreads - 1 &&
                            z[t] == (t ^ 4);
      to[t] = is_right ? 1 : 0;
    });
  }
};

TEST(DeviceEmulation, CollectivesAreThoseOfAllThreadsOrOfAWarp) {
  Numbers ones;
  ones.fill(1);
  EXPECT_EQ(run(Collectives{}, EmulatedOrder::kForwards), ones);
  EXPECT_EQ(run(Collectives{}, EmulatedOrder::kBackwards), ones);
}

// Some threads wait, others have gone.
struct EndsEarly : WithShared {
  template <class Block>
  void operator()(Block& block, Shared& shared) const {
    block.each([&](int t) { shared.values[t] = t; });
    bool goes = false;
    block.each_in_warp([&](int t) { goes = t < kWarpThreads; });
    if (goes) return;
    block.each([](int) {});
  }
};

TEST(DeviceEmulationDeathTest, NoWarpEndsWhileOthersWait) {
  EXPECT_DEATH(run(EndsEarly{}, EmulatedOrder::kForwards), "1 of 3 warps have ended");
}

struct Launches : WithShared {
  template <class Block>
  void operator()(Block& block, Shared& shared) const {
    block.each([&](int t) { shared.values[t] = t; });
    EmulatedDevice(nullptr).launch(1, EndsEarly{});
  }
};

TEST(DeviceEmulationDeathTest, NoKernelLaunchesAnother) {
  EXPECT_DEATH(run(Launches{}, EmulatedOrder::kForwards), "a kernel launches another one");
}

}  // namespace
}  // namespace cortado

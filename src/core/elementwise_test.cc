// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/elementwise.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "core/simd_target.h"
#include "core/streaming.h"

namespace cortado {
namespace elementwise_test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 3, 15, 16, 17, 63, 64, 1000, 1024, 5000};
constexpr float kBehind = 7.0f;  // what lies behind the end, and stays

// `elems` values of N(0, 1), from an odd multiple of 4 bytes on, and one more behind them.
class Values {
 public:
  Values(std::int64_t elems, std::uint64_t stream) : storage_(static_cast<std::size_t>(elems) + 2, kBehind) {
    philox_fill_normal(1, 0, stream, data(), elems);
  }
  float* data() { return storage_.data() + 1; }
  float& operator[](std::int64_t i) { return data()[i]; }

 private:
  std::vector<float> storage_;
};

std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }

template <typename Act>
void on_every_target(Act&& act) {
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    SCOPED_TRACE(simd_target_name(target));
    for (const std::int64_t elems : kLengths) {
      SCOPED_TRACE(elems);
      act(elems);
    }
  }
}

TEST(Elementwise, AddsValues) {
  on_every_target([](std::int64_t elems) {
    Values values(elems, 0), sum(elems, 1), before(elems, 1);
    add_values(values.data(), elems, sum.data());
    for (std::int64_t i = 0; i < elems; ++i) ASSERT_EQ(bits(sum[i]), bits(before[i] + values[i])) << i;
    EXPECT_EQ(sum[elems], kBehind);
  });
}

TEST(Elementwise, ScalesValuesInPlaceElsewhereAndPastTheCaches) {
  on_every_target([](std::int64_t elems) {
    const float scale = 1.0f / 3;
    Values values(elems, 0), scaled(elems, 1), streamed(elems, 2), in_place(elems, 0);
    scale_values(values.data(), scale, elems, scaled.data());
    scale_values(values.data(), scale, elems, streamed.data(), /*streams=*/true);
    finish_streams();
    scale_values(in_place.data(), scale, elems, in_place.data());
    for (std::int64_t i = 0; i < elems; ++i) {
      const std::uint32_t expected = bits(values[i] * scale);
      ASSERT_EQ(bits(scaled[i]), expected) << i;
      ASSERT_EQ(bits(streamed[i]), expected) << i;
      ASSERT_EQ(bits(in_place[i]), expected) << i;
    }
    for (Values* behind : {&scaled, &streamed, &in_place}) EXPECT_EQ((*behind)[elems], kBehind);
  });
}

TEST(Elementwise, AddsWhatIsBelowALimitAndTellsOfTheRest) {
  constexpr float kLimit = 100, kScale = 0.3f;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  on_every_target([&](std::int64_t elems) {
    Values values(elems, 0), before(elems, 1);
    for (const float odd : {0.0f, nan, inf, -inf, kLimit, -kLimit}) {
      for (const std::int64_t at : {std::int64_t{0}, elems / 2, elems - 1}) {
        if (at < 0 || at >= elems) continue;
        Values now(elems, 0), sum(elems, 1);
        now[at] = odd;
        EXPECT_EQ(add_values_below(kLimit, now.data(), kScale, elems, sum.data()), odd == 0) << odd << " at " << at;
        for (std::int64_t i = 0; i < elems; ++i) {
          const float added = now[i] * kScale;  // rounded before it is added
          const float expected = i == at && odd != 0 ? before[i] : before[i] + added;
          ASSERT_EQ(bits(sum[i]), bits(expected)) << i;
        }
        EXPECT_EQ(sum[elems], kBehind);
      }
    }
  });
}

// As payloads' bytes may lie.
TEST(Elementwise, TakesAnyAddress) {
  on_every_target([](std::int64_t elems) {
    Values values(elems, 0), before(elems, 1);
    std::vector<std::byte> storage(static_cast<std::size_t>(elems) * sizeof(float) + 1);
    const std::size_t bytes = static_cast<std::size_t>(elems) * sizeof(float);
    auto* const odd = reinterpret_cast<float*>(storage.data() + 1);
    for (const bool streams : {false, true}) {
      std::memcpy(static_cast<void*>(storage.data() + 1), before.data(), bytes);
      add_values(values.data(), elems, odd);
      scale_values(odd, 0.5f, elems, odd, streams);
      for (std::int64_t i = 0; i < elems; ++i) {
        float value;
        std::memcpy(&value, storage.data() + 1 + i * sizeof(float), sizeof(value));
        ASSERT_EQ(value, (before[i] + values[i]) * 0.5f) << i;
      }
    }
  });
}

}  // namespace
}  // namespace elementwise_test
}  // namespace cortado

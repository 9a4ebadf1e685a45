// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/float_passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/loss_scale.h"
#include "core/philox.h"
#include "core/simd_target.h"
#include "core/streaming.h"

namespace cortado {
namespace float_passes_test {
namespace {

constexpr std::int64_t kLengths[] = {0, 1, 3, 15, 16, 17, 63, 64, 1000, 1024, 5000};

// `elems` values of N(0, 1), from an odd multiple of 4 bytes on, or from one byte further, between bytes that stay.
class Values {
 public:
  Values(std::int64_t elems, std::uint64_t stream, std::size_t shift = 0)
      : elems_(elems), shift_(shift), storage_(bytes() + 2 * kGuard, kUntouched) {
    std::vector<float> drawn(static_cast<std::size_t>(elems) + 1);  // memcpy takes no null
    philox_fill_normal(1, 0, stream, drawn.data(), elems);
    std::memcpy(begin(), drawn.data(), bytes());
  }
  float* data() { return reinterpret_cast<float*>(begin()); }
  float operator[](std::int64_t i) {
    float value;
    std::memcpy(&value, begin() + i * static_cast<std::int64_t>(sizeof(value)), sizeof(value));
    return value;
  }
  void set(std::int64_t i, float value) {
    std::memcpy(begin() + i * static_cast<std::int64_t>(sizeof(value)), &value, sizeof(value));
  }
  bool stays_within() {
    const std::size_t before = kGuard - 4 + shift_;
    const auto is_untouched = [](std::byte byte) { return byte == kUntouched; };
    return std::all_of(storage_.begin(), storage_.begin() + static_cast<std::ptrdiff_t>(before), is_untouched) &&
           std::all_of(storage_.begin() + static_cast<std::ptrdiff_t>(before + bytes()), storage_.end(), is_untouched);
  }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr std::byte kUntouched{0x5a};
  std::size_t bytes() const { return static_cast<std::size_t>(elems_) * sizeof(float); }
  std::byte* begin() { return storage_.data() + kGuard - 4 + shift_; }

  std::int64_t elems_;
  std::size_t shift_;
  std::vector<std::byte> storage_;
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

TEST(FloatPasses, AddsValues) {
  on_every_target([](std::int64_t elems) {
    for (const std::size_t shift : {0, 1}) {
      Values values(elems, 0), sum(elems, 1, shift), before(elems, 1);
      add_values(values.data(), elems, sum.data());
      for (std::int64_t i = 0; i < elems; ++i) ASSERT_EQ(bits(sum[i]), bits(before[i] + values[i])) << i;
      EXPECT_TRUE(sum.stays_within());
    }
  });
}

TEST(FloatPasses, ScalesValuesInPlaceElsewhereAndPastTheCaches) {
  on_every_target([](std::int64_t elems) {
    const float scale = 1.0f / 3;
    for (const bool streams : {false, true}) {
      for (const std::size_t shift : {0, 1}) {
        Values values(elems, 0), shifted(elems, 0, 1), scaled(elems, 1, shift), in_place(elems, 0, shift);
        scale_values(streams ? shifted.data() : values.data(), scale, elems, scaled.data(), streams);
        scale_values(in_place.data(), scale, elems, in_place.data(), streams);
        finish_streams();
        for (std::int64_t i = 0; i < elems; ++i) {
          ASSERT_EQ(bits(scaled[i]), bits(values[i] * scale)) << i;
          ASSERT_EQ(bits(in_place[i]), bits(values[i] * scale)) << i;
        }
        EXPECT_TRUE(scaled.stays_within());
        EXPECT_TRUE(in_place.stays_within());
      }
    }
  });
}

TEST(FloatPasses, AddsWhatIsBelowALimitAndTellsOfTheRest) {
  constexpr float kLimit = 100, kScale = 0.3f;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  on_every_target([&](std::int64_t elems) {
    for (const float odd : {0.0f, nan, inf, -inf, kLimit, -kLimit}) {
      for (const std::int64_t at : {std::int64_t{0}, elems / 2, elems - 1}) {
        if (at < 0 || at >= elems) continue;
        Values values(elems, 0, 1), sum(elems, 1), before(elems, 1);
        values.set(at, odd);
        for (Values* of : {&sum, &before}) of->set(at, -0.0f);
        EXPECT_EQ(add_values_below(kLimit, values.data(), kScale, elems, sum.data()), odd == 0) << odd << " at " << at;
        for (std::int64_t i = 0; i < elems; ++i) {
          const float added = i == at ? 0.0f : values[i] * kScale;  // rounded before it is added
          ASSERT_EQ(bits(sum[i]), bits(before[i] + added)) << i;
        }
        EXPECT_TRUE(sum.stays_within());
      }
    }
  });
}

TEST(FloatPasses, TakesBackWhatItAddedAndNoRounding) {
  constexpr float kLimit = 1e9f, kScale = 0.3f;
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  on_every_target([&](std::int64_t elems) {
    for (const float odd : {0.0f, nan, inf, -kLimit, 1e8f}) {
      for (const std::int64_t at : {std::int64_t{0}, elems / 2, elems - 1}) {
        if (at < 0 || at >= elems) continue;
        Values values(elems, 0, 1), sum(elems, 1), before(elems, 1);
        values.set(at, odd);
        sum.set(at, 1.0f + (odd == 1e8f ? odd * kScale : 0.0f));
        before.set(at, sum[at]);
        Values elsewhere(elems, 2);
        AlignedBuffer<float> on_lines(static_cast<std::size_t>(elems) + 1);
        for (float* to : {elsewhere.data(), on_lines.data(), sum.data()}) {
          take_values_back_below(kLimit, values.data(), kScale, elems, sum.data(), to);
        }
        finish_streams();
        for (std::int64_t i = 0; i < elems; ++i) {
          const float added = values[i] * kScale, left = before[i] - added;
          const bool is_rounding = std::fabs(left) <= kRoundingShare * std::fabs(added);
          const float expected = i == at && odd != 0 ? (odd == 1e8f ? 0.0f : 1.0f) : is_rounding ? 0.0f : left;
          for (const float found : {sum[i], elsewhere[i], on_lines[static_cast<std::size_t>(i)]}) {
            ASSERT_EQ(bits(found), bits(expected)) << i << " of " << odd << " at " << at;
          }
        }
        EXPECT_TRUE(sum.stays_within() && elsewhere.stays_within());
        EXPECT_EQ(on_lines[static_cast<std::size_t>(elems)], 0);
      }
    }
  });
}

}  // namespace
}  // namespace float_passes_test
}  // namespace cortado

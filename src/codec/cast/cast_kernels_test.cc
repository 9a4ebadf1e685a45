// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast_kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/float16.h"
#include "core/philox.h"
#include "core/simd_target.h"
#include "core/streaming.h"

namespace cortado {
namespace {

using Narrow = void (*)(const float*, std::int64_t, std::uint16_t*, bool);
using Widen = void (*)(const std::uint16_t*, std::int64_t, float*, bool);
using ScaledNarrow = void (*)(const float*, float, std::int64_t, std::uint16_t*);
using NarrowOne = std::uint16_t (*)(float);
using WidenOne = float (*)(std::uint16_t);

struct Format {
  const char* name;
  Narrow narrow;
  ScaledNarrow scaled;
  Widen widen;
  NarrowOne narrow_one;
  WidenOne widen_one;
};
constexpr Format kFormats[] = {
    {"bf16", fp32_to_bf16, scale_and_cast_bf16, bf16_to_fp32, float_to_bf16, bf16_to_float},
    {"fp16", fp32_to_fp16, scale_and_cast_fp16, fp16_to_fp32, float_to_fp16, fp16_to_float},
};

template <typename Check>
void on_every_target(const Check& check) {
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    SCOPED_TRACE(simd_target_name(target));
    ASSERT_EQ(simd_target(), target);
    for (const Format& format : kFormats) {
      SCOPED_TRACE(format.name);
      check(format);
    }
  }
}

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// All signs, exponents and upper mantissas, with the lower halves around the places where rounding changes, and
// random bits.
std::vector<float> telling_values() {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      values.push_back(from_bits(upper << 16 | lower));
  }
  for (std::uint64_t block = 0; block < 5000; ++block) {
    for (const std::uint32_t bits : philox_block(1, 0, 0, block)) values.push_back(from_bits(bits));
  }
  return values;
}

TEST(CastKernels, NarrowingGivesTheBytesOfTheReference) {
  const std::vector<float> values = telling_values();
  on_every_target([&](const Format& format) {
    for (const bool streams : {false, true}) {
      AlignedBuffer<std::uint16_t> output(values.size());
      format.narrow(values.data(), static_cast<std::int64_t>(values.size()), output.data(), streams);
      finish_streams();
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(output[i], format.narrow_one(values[i])) << std::hex << std::bit_cast<std::uint32_t>(values[i]);
      }
    }
  });
}

TEST(CastKernels, WideningGivesTheBitsOfTheReference) {
  std::vector<std::uint16_t> values(0x10000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i);
  on_every_target([&](const Format& format) {
    for (const bool streams : {false, true}) {
      AlignedBuffer<float> output(values.size());
      format.widen(values.data(), static_cast<std::int64_t>(values.size()), output.data(), streams);
      finish_streams();
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(output[i]), std::bit_cast<std::uint32_t>(format.widen_one(values[i])))
            << i;
      }
    }
  });
}

TEST(CastKernels, ScalingRoundsTheProductToFloat32First) {
  const std::vector<float> values = telling_values();
  std::vector<std::uint16_t> output(values.size());
  on_every_target([&](const Format& format) {
    for (const float scale : {1.0f, 0.2f, -3.0f, 0x1p-120f, 65536.0f}) {
      format.scaled(values.data(), scale, static_cast<std::int64_t>(values.size()), output.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(output[i], format.narrow_one(values[i] * scale))
            << std::hex << std::bit_cast<std::uint32_t>(values[i]) << " * " << scale;
      }
    }
  });
}

// 16 sums side by side.
CastSquares squares_of(const std::vector<float>& values, const std::uint16_t* sent, WidenOne widen, float unscale) {
  float of_values[16] = {}, of_differences[16] = {};
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float difference = values[i] - widen(sent[i]) * unscale;
    of_values[i % 16] += values[i] * values[i];
    of_differences[i % 16] += difference * difference;
  }
  CastSquares sums;
  for (std::size_t k = 0; k < 16; ++k) sums.of_values += of_values[k], sums.of_differences += of_differences[k];
  return sums;
}

TEST(CastKernels, MeasuringChangesNoByteAndAddsInOneOrder) {
  on_every_target([&](const Format& format) {
    const auto measured = std::string_view(format.name) == "bf16" ? measured_cast_bf16 : measured_cast_fp16;
    for (const std::int64_t elems : {0, 1, 15, 16, 17, 48, 100, 1000, 1024}) {
      const auto count = static_cast<std::size_t>(elems);
      std::vector<float> values(count);
      philox_fill_normal(5, 0, 0, values.data(), elems);
      std::vector<std::uint16_t> expected(count + 1, 0xa5a5), output(count + 1, 0xa5a5);
      format.scaled(values.data(), 0.25f, elems, expected.data());
      const CastSquares squares = measured(values.data(), 0.25f, 4, elems, output.data());
      EXPECT_EQ(output, expected) << elems;
      const CastSquares reference = squares_of(values, expected.data(), format.widen_one, 4);
      EXPECT_EQ(squares.of_values, reference.of_values) << elems;
      EXPECT_EQ(squares.of_differences, reference.of_differences) << elems;
      EXPECT_TRUE(elems == 0 || squares.of_differences > 0);
    }
  });
}

TEST(CastKernels, MeasuringShowsWhatIsNotFinite) {
  on_every_target([&](const Format& format) {
    const auto measured = std::string_view(format.name) == "bf16" ? measured_cast_bf16 : measured_cast_fp16;
    const float largest = format.widen_one(static_cast<std::uint16_t>(format.narrow_one(INFINITY) - 1));
    for (const float bad : {INFINITY, -INFINITY, std::nanf(""), largest * 1.01f}) {
      for (const std::size_t at : {0u, 7u, 31u, 36u}) {
        std::vector<float> values(37, 0.5f);
        values[at] = bad;
        std::vector<std::uint16_t> output(37);
        const CastSquares squares = measured(values.data(), 1, 1, 37, output.data());
        EXPECT_FALSE(std::isfinite(squares.of_values) && std::isfinite(squares.of_differences)) << bad << " at " << at;
      }
    }
  });
}

// Every length around the vector sizes, at addresses that are not multiples of the element size; guards behind.
TEST(CastKernels, AnyLengthAndAddressAndNothingBehind) {
  constexpr std::int64_t kLongest = 70;
  constexpr std::byte kGuard{0xa5};
  std::vector<std::byte> wide(kLongest * 4 + 1), narrow(kLongest * 2 + 3), back(kLongest * 4 + 5);
  on_every_target([&](const Format& format) {
    for (std::int64_t elems = 0; elems <= kLongest; ++elems) {
      const auto count = static_cast<std::size_t>(elems);
      std::vector<float> values(kLongest), expected(kLongest);
      philox_fill_normal(3, 0, 0, values.data(), elems);
      for (std::size_t i = 0; i < count; ++i) expected[i] = format.widen_one(format.narrow_one(values[i]));
      std::memcpy(wide.data() + 1, values.data(), count * 4);
      std::fill(narrow.begin(), narrow.end(), kGuard);
      std::fill(back.begin(), back.end(), kGuard);
      format.narrow(reinterpret_cast<const float*>(wide.data() + 1), elems,
                    reinterpret_cast<std::uint16_t*>(narrow.data() + 1), true);
      format.widen(reinterpret_cast<const std::uint16_t*>(narrow.data() + 1), elems,
                   reinterpret_cast<float*>(back.data() + 1), true);
      ASSERT_EQ(std::memcmp(back.data() + 1, expected.data(), count * 4), 0) << elems;
      EXPECT_EQ(narrow[0], kGuard);
      EXPECT_EQ(narrow[1 + count * 2], kGuard) << elems;
      EXPECT_EQ(back[0], kGuard);
      EXPECT_EQ(back[1 + count * 4], kGuard) << elems;
    }
  });
}

#if defined(__x86_64__)
// Training programs switch this on for speed (torch.set_flush_denormal).
TEST(CastKernels, FlushingDenormalsChangesNoPlainCast) {
  const std::vector<float> values = telling_values();
  std::vector<std::uint16_t> expected(values.size()), output(values.size());
  std::vector<float> widened(0x10000), widened_flushing(0x10000);
  std::vector<std::uint16_t> all(0x10000);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned mode = __builtin_ia32_stmxcsr();
  on_every_target([&](const Format& format) {
    format.narrow(values.data(), static_cast<std::int64_t>(values.size()), expected.data(), false);
    format.widen(all.data(), 0x10000, widened.data(), false);
    __builtin_ia32_ldmxcsr(mode | kFlushToZero | kDenormalsAreZero);
    format.narrow(values.data(), static_cast<std::int64_t>(values.size()), output.data(), false);
    format.widen(all.data(), 0x10000, widened_flushing.data(), false);
    __builtin_ia32_ldmxcsr(mode);
    EXPECT_EQ(output, expected);
    EXPECT_EQ(std::memcmp(widened.data(), widened_flushing.data(), widened.size() * sizeof(float)), 0);
  });
}
#endif

}  // namespace
}  // namespace cortado

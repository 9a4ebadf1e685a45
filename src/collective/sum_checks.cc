// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/sum_checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "collective/sum_checks.cc"
#include "core/simd.h"
// After simd.h, which it needs.
#include "core/float16_simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Of one block, summed in double.
template <class Elements>
void check_floats(const void* block, std::int64_t elems, float* block_sum, float* block_magnitude) {
  using Raw = typename Elements::Raw;
  const hn::ScalableTag<double> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(dd));
  auto sum_even = hn::Zero(dd), sum_odd = hn::Zero(dd), magnitude_even = hn::Zero(dd), magnitude_odd = hn::Zero(dd);
  const auto* values = static_cast<const std::byte*>(block);
  const auto load = [&](std::int64_t at) {
    Raw raw[hn::MaxLanes(df)];
    std::memcpy(raw, values + at * static_cast<std::int64_t>(sizeof(Raw)), hn::Lanes(df) * sizeof(Raw));
    return hn::PromoteTo(dd, Elements::load(df, raw));
  };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= elems; i += 2 * lanes) {
    const auto even = load(i), odd = load(i + lanes);
    sum_even = hn::Add(sum_even, even);
    sum_odd = hn::Add(sum_odd, odd);
    magnitude_even = hn::Add(magnitude_even, hn::Abs(even));
    magnitude_odd = hn::Add(magnitude_odd, hn::Abs(odd));
  }
  double sum = hn::GetLane(hn::SumOfLanes(dd, hn::Add(sum_even, sum_odd)));
  double magnitude = hn::GetLane(hn::SumOfLanes(dd, hn::Add(magnitude_even, magnitude_odd)));
  for (; i < elems; ++i) {
    Raw raw[hn::MaxLanes(df)] = {};
    std::memcpy(raw, values + i * static_cast<std::int64_t>(sizeof(Raw)), sizeof(Raw));
    const double value = hn::GetLane(hn::PromoteTo(dd, Elements::load(df, raw)));
    sum += value;
    magnitude += std::abs(value);
  }
  *block_sum = static_cast<float>(sum);
  *block_magnitude = static_cast<float>(magnitude);
}

void CheckFloats(const void* block, DType dtype, std::int64_t elems, float* sum, float* magnitude) {
  switch (dtype) {
    case DType::kFloat16:
      return check_floats<Fp16Elements>(block, elems, sum, magnitude);
    case DType::kBFloat16:
      return check_floats<Bf16Elements>(block, elems, sum, magnitude);
    default:
      return check_floats<Fp32Elements>(block, elems, sum, magnitude);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(CheckFloats);

namespace {

// As they travel.
struct FloatCheck {
  float sum = 0;
  float magnitude = 0;
};
static_assert(std::is_trivially_copyable_v<FloatCheck> && sizeof(FloatCheck) == 2 * sizeof(float));
constexpr std::int64_t kBytesOfBlock = 4096;
constexpr int kPositionBits = 12;
using ByteCheck = std::array<std::uint8_t, 1 + kPositionBits>;

// The error that goes unseen grows with the square of the ranks, so that many have smaller blocks.
std::int64_t block_elems(DType dtype, int ranks) {
  if (dtype == DType::kUint8) return kBytesOfBlock;
  return dtype == DType::kFloat32 ? std::clamp<std::int64_t>(8192 / ranks, 64, 1024) : 64;
}

std::size_t check_bytes(DType dtype) { return dtype == DType::kUint8 ? sizeof(ByteCheck) : sizeof(FloatCheck); }

FloatCheck check_float_block(const std::byte* block, DType dtype, std::int64_t elems) {
  FloatCheck check;
  HWY_DYNAMIC_DISPATCH(CheckFloats)(block, dtype, elems, &check.sum, &check.magnitude);
  return check;
}

ByteCheck check_byte_block(const std::byte* block, std::int64_t elems) {
  ByteCheck check{};
  for (std::int64_t i = 0; i < elems; ++i) {
    const auto value = std::to_integer<std::uint8_t>(block[i]);
    check[0] = static_cast<std::uint8_t>(check[0] + value);
    for (int k = 0; k < kPositionBits; ++k) {
      check[1 + k] = static_cast<std::uint8_t>(check[1 + k] + value * (i >> k & 1));
    }
  }
  return check;
}

template <typename Visit>  // visit(number, first value, values) returns a Status
Status for_each_block(DType dtype, std::int64_t elems, int ranks, Visit&& visit) {
  const std::int64_t most = block_elems(dtype, ranks);
  std::int64_t number = 0;
  for (std::int64_t begin = 0; begin < elems; begin += most, ++number) {
    CORTADO_RETURN_IF_ERROR(visit(number, begin, std::min(most, elems - begin)));
  }
  return {};
}

// Of a format: the distance from 1 to the next number, the largest finite one, and what arithmetic may take for zero.
struct Format {
  double epsilon, largest, tiny;
};
Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {0x1p-10, 65504, 0x1p-24};
    case DType::kBFloat16:
      return {0x1p-7, 0x1.fep127, 0x1p-126};
    default:
      return {0x1p-23, std::numeric_limits<float>::max(), 0x1p-126};
  }
}

Status compare_floats(const FloatCheck& found, const FloatCheck& expected, DType dtype, std::int64_t begin,
                      std::int64_t elems, int ranks) {
  if (!std::isfinite(expected.sum) || !std::isfinite(expected.magnitude)) return {};
  const Format format = format_of(dtype);
  const double magnitude = expected.magnitude;
  const bool may_overflow = magnitude * (1 + (ranks + 1) * format.epsilon) >= format.largest;
  if (may_overflow && !std::isfinite(found.magnitude)) return {};
  const double bound = (ranks + 1) * (format.epsilon * magnitude + format.tiny * static_cast<double>(elems));
  const double off = std::abs(static_cast<double>(found.sum) - static_cast<double>(expected.sum));
  if (off <= bound) return {};  // no NaN is
  return make_error(StatusCode::kCorruptData,
                    "the sum of values %lld to %lld is %.3g where the contributions sum up to %.3g (rounding: %.2g)",
                    static_cast<long long>(begin), static_cast<long long>(begin + elems - 1),
                    static_cast<double>(found.sum), static_cast<double>(expected.sum), bound);
}

}  // namespace

DType sum_check_dtype(DType dtype) { return dtype == DType::kUint8 ? DType::kUint8 : DType::kFloat32; }

std::int64_t sum_check_elems(DType dtype, std::int64_t elems, int ranks) {
  const std::int64_t most = block_elems(dtype, ranks);
  const std::int64_t blocks = elems / most + (elems % most != 0);
  return blocks * static_cast<std::int64_t>(check_bytes(dtype) / dtype_bytes(sum_check_dtype(dtype)));
}

void write_sum_checks(const void* values, DType dtype, std::int64_t elems, int ranks, void* checks) {
  const auto* from = static_cast<const std::byte*>(values);
  auto* to = static_cast<std::byte*>(checks);
  const auto value_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  (void)for_each_block(dtype, elems, ranks, [&](std::int64_t number, std::int64_t begin, std::int64_t count) {
    const std::byte* block = from + begin * value_bytes;
    std::byte* check = to + static_cast<std::size_t>(number) * check_bytes(dtype);
    if (dtype == DType::kUint8) {
      const ByteCheck bytes = check_byte_block(block, count);
      std::memcpy(check, bytes.data(), bytes.size());
    } else {
      const FloatCheck floats = check_float_block(block, dtype, count);
      std::memcpy(check, &floats, sizeof(floats));
    }
    return Status();
  });
}

Status compare_with_sum_checks(const void* sums, DType dtype, std::int64_t elems, const void* checks, int ranks) {
  const auto* from = static_cast<const std::byte*>(sums);
  const auto value_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  return for_each_block(
      dtype, elems, ranks, [&](std::int64_t number, std::int64_t begin, std::int64_t count) -> Status {
        const std::byte* block = from + begin * value_bytes;
        const std::byte* check =
            static_cast<const std::byte*>(checks) + static_cast<std::size_t>(number) * check_bytes(dtype);
        if (dtype != DType::kUint8) {
          FloatCheck expected;
          std::memcpy(&expected, check, sizeof(expected));
          return compare_floats(check_float_block(block, dtype, count), expected, dtype, begin, count, ranks);
        }
        const ByteCheck found = check_byte_block(block, count);
        if (std::memcmp(found.data(), check, found.size()) == 0) return {};
        return make_error(StatusCode::kCorruptData, "the sum of bytes %lld to %lld is not that of the contributions",
                          static_cast<long long>(begin), static_cast<long long>(begin + count - 1));
      });
}

}  // namespace cortado
#endif

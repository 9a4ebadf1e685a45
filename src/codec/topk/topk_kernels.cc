// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_kernels.h"

#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/topk/topk_kernels.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using I32 = hn::CappedTag<std::int32_t, 16>;
using VI32 = hn::Vec<I32>;

constexpr std::int64_t kGroupElems = 64;  // a bit each in a word

HWY_INLINE VI32 load_magnitudes(const float* input) {
  const I32 d;
  return hn::And(hn::LoadU(d, reinterpret_cast<const std::int32_t*>(input)), hn::Set(d, 0x7fffffff));
}

// Bit i is set if the magnitude of input[i] is larger than `above`.
HWY_INLINE std::uint64_t group_mask(const float* input, VI32 above) {
  const I32 d;
  const std::size_t lanes = hn::Lanes(d);
  std::uint64_t mask = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(kGroupElems); i += lanes) {
    std::uint8_t bits[8] = {};
    hn::StoreMaskBits(d, hn::Gt(load_magnitudes(input + i), above), bits);
    std::uint64_t part = 0;
    std::memcpy(&part, bits, sizeof(bits));
    mask |= (part & ((std::uint64_t{1} << lanes) - 1)) << i;
  }
  return mask;
}

struct Collected {
  float* values;
  std::int64_t* positions;
  std::int64_t count;

  HWY_INLINE void append(const float* group, std::uint64_t mask, std::int64_t first) {
    const int bit = std::countr_zero(mask);
    std::memcpy(values + count, group + bit, sizeof(float));
    positions[count] = first + bit;
    ++count;
  }
};

HWY_INLINE void collect_group(const float* group, std::uint64_t mask, std::int64_t first, Collected& list) {
  // PERF: at 1 % most groups have none, one or two: these two are written unseen, without a branch that would often
  // be predicted wrongly (3.3 instead of 3.6 ms for 2^24 values, which is what reading them takes).
  const std::int64_t end = list.count + std::popcount(mask);
  constexpr std::uint64_t kStop = std::uint64_t{1} << 63;
  list.append(group, mask | kStop, first);
  mask &= mask - 1;
  list.append(group, mask | kStop, first);
  mask &= mask - 1;
  for (; mask != 0; mask &= mask - 1) list.append(group, mask, first);
  list.count = end;
}

std::int64_t CollectAbove(const float* input, std::int64_t elems, MagnitudeBound above, std::int64_t first,
                          std::int64_t capacity, float* values, std::int64_t* positions) {
  const VI32 bound = hn::Set(I32(), above);
  Collected list{values, positions, 0};
  std::int64_t i = 0;
  for (; i + kGroupElems <= elems && list.count <= capacity; i += kGroupElems) {
    collect_group(input + i, group_mask(input + i, bound), first + i, list);
  }
  if (i < elems && list.count <= capacity) {
    float rest[kGroupElems] = {};
    std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(float));
    const std::uint64_t valid = (std::uint64_t{1} << (elems - i)) - 1;
    collect_group(rest, group_mask(rest, bound) & valid, first + i, list);
  }
  return list.count;
}

// The sum of -1 for every lane that is above.
HWY_INLINE VI32 count_vector(const float* input, VI32 above, VI32 sum) {
  const I32 d;
  return hn::Add(sum, hn::VecFromMask(d, hn::Gt(load_magnitudes(input), above)));
}

std::int64_t CountAbove(const float* input, std::int64_t elems, MagnitudeBound above) {
  const I32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VI32 bound = hn::Set(d, above);
  constexpr std::int64_t kPieceElems = std::int64_t{1} << 30;  // whose sums fit 32 bits
  std::int64_t count = 0;
  std::int64_t i = 0;
  while (i + lanes <= elems) {
    const std::int64_t end = HWY_MIN(elems, i + kPieceElems);
    VI32 sum = hn::Zero(d), other = hn::Zero(d);
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      sum = count_vector(input + i, bound, sum);
      other = count_vector(input + i + lanes, bound, other);
    }
    if (i + lanes <= end) {
      sum = count_vector(input + i, bound, sum);
      i += lanes;
    }
    count -= hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, other)));
  }
  for (; i < elems; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, input + i, sizeof(bits));
    count += (bits & 0x7fffffff) > above;
  }
  return count;
}

MagnitudeBound LargestMagnitude(const float* input, std::int64_t elems) {
  const I32 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  VI32 largest = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= elems; i += lanes) largest = hn::Max(largest, load_magnitudes(input + i));
  float rest[16] = {};
  std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(float));
  largest = hn::Max(largest, load_magnitudes(rest));
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

MagnitudeBound BoundOfLargest(const float* input, std::int64_t elems, std::int64_t k, MagnitudeBound lowest) {
  std::int64_t low = lowest, high = LargestMagnitude(input, elems);  // more than k, fewer than k are above
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    const std::int64_t count = CountAbove(input, elems, static_cast<MagnitudeBound>(middle));
    if (count == k) return static_cast<MagnitudeBound>(middle);
    (count > k ? low : high) = middle;
  }
  return static_cast<MagnitudeBound>(low);
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(CollectAbove);
HWY_EXPORT(CountAbove);
HWY_EXPORT(BoundOfLargest);

std::int64_t collect_above(const float* input, std::int64_t elems, MagnitudeBound above, std::int64_t first,
                           std::int64_t capacity, float* values, std::int64_t* positions) {
  return HWY_DYNAMIC_DISPATCH(CollectAbove)(input, elems, above, first, capacity, values, positions);
}
std::int64_t count_above(const float* input, std::int64_t elems, MagnitudeBound above) {
  return HWY_DYNAMIC_DISPATCH(CountAbove)(input, elems, above);
}
MagnitudeBound bound_of_largest(const float* input, std::int64_t elems, std::int64_t k, MagnitudeBound lowest) {
  return HWY_DYNAMIC_DISPATCH(BoundOfLargest)(input, elems, k, lowest);
}

}  // namespace cortado
#endif

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// READ FIRST: no include guard of the usual kind: a kernel file includes this after core/simd.h and gets it once for
// every instruction set. The blocks of core/philox.h for 16 counters at a time.
#if defined(CORTADO_CORE_PHILOX_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CORTADO_CORE_PHILOX_SIMD_H_
#undef CORTADO_CORE_PHILOX_SIMD_H_
#else
#define CORTADO_CORE_PHILOX_SIMD_H_
#endif

#include <cstdint>

#include "core/philox.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

// The four words of the blocks first, first + 1 ... of one stream, a block a lane.
struct PhiloxLanes {
  using U32 = hwy::HWY_NAMESPACE::CappedTag<std::uint32_t, 16>;
  hwy::HWY_NAMESPACE::Vec<U32> words[4];
};

// `first` is such that no lane carries out of its lower 32 bits (a multiple of the lanes is).
HWY_INLINE PhiloxLanes philox_lanes(const PhiloxKey& key, std::uint64_t step, std::uint64_t first) {
  namespace hn = hwy::HWY_NAMESPACE;
#if HWY_TARGET == HWY_SCALAR  // one lane, which has no even and odd
  const PhiloxBlock block = philox4x32_10({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(first >> 32),
                                           static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
                                          key);
  PhiloxLanes lanes;
  for (std::size_t word = 0; word < 4; ++word) lanes.words[word] = hn::Set(PhiloxLanes::U32(), block[word]);
  return lanes;
#else
  const PhiloxLanes::U32 d32;
  const hn::Repartition<std::uint64_t, PhiloxLanes::U32> d64;
  using V = hn::Vec<decltype(d64)>;
  // A 64-bit lane holds one word in its lower half, which is all that MulEven reads; what the upper half holds is of no
  // account. Even and odd counters are two vectors, interleaved at the end.
  const auto multiply = [&](V a, V b) { return hn::MulEven(hn::BitCast(d32, a), hn::BitCast(d32, b)); };
  const V multiplier0 = hn::Set(d64, 0xD2511F53u), multiplier1 = hn::Set(d64, 0xCD9E8D57u);
  V x[2][4];
  for (int odd = 0; odd < 2; ++odd) {
    const V twice = hn::Iota(d64, 0);
    x[odd][0] = hn::Add(hn::Add(twice, twice), hn::Set(d64, (first & 0xffffffffu) + static_cast<unsigned>(odd)));
    x[odd][1] = hn::Set(d64, first >> 32);
    x[odd][2] = hn::Set(d64, step);
    x[odd][3] = hn::Set(d64, step >> 32);
  }
  std::uint32_t key0 = key[0], key1 = key[1];
  HWY_UNROLL(10)
  for (int round = 0; round < 10; ++round) {
    HWY_UNROLL(2)
    for (int odd = 0; odd < 2; ++odd) {
      const V product0 = multiply(x[odd][0], multiplier0), product1 = multiply(x[odd][2], multiplier1);
      x[odd][0] = hn::Xor(hn::Xor(hn::ShiftRight<32>(product1), x[odd][1]), hn::Set(d64, key0));
      x[odd][2] = hn::Xor(hn::Xor(hn::ShiftRight<32>(product0), x[odd][3]), hn::Set(d64, key1));
      x[odd][1] = product1;
      x[odd][3] = product0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  PhiloxLanes lanes;
  const V lower = hn::Set(d64, 0xffffffffu);
  for (int word = 0; word < 4; ++word) {
    lanes.words[word] = hn::BitCast(d32, hn::OrAnd(hn::ShiftLeft<32>(x[1][word]), x[0][word], lower));
  }
  return lanes;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

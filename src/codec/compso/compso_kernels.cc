// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso_kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/compso/compso_kernels.cc"
#include "core/simd.h"
// After simd.h, which it needs.
#include "codec/quant/quant_rows.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

// ---- statistics ----------------------------------------------------------------------------------------------------

struct RangeRow {
  VF32 low[kParts], high[kParts];
  VU32 magnitude[kParts];

  HWY_INLINE explicit RangeRow(float value) {
    for (std::size_t p = 0; p < kParts; ++p) {
      low[p] = high[p] = hn::Set(F32(), value);
      magnitude[p] = hn::Zero(U32());
    }
  }
  HWY_INLINE void add(const float* values) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const VF32 v = hn::LoadU(F32(), values + p * kPartElems);
      low[p] = hn::Min(low[p], v);
      high[p] = hn::Max(high[p], v);
      magnitude[p] = hn::Max(magnitude[p], hn::And(hn::BitCast(U32(), v), hn::Set(U32(), 0x7fffffffu)));
    }
  }
  HWY_INLINE CompsoRange result() const {
    VF32 least = low[0], most = high[0];
    VU32 largest = magnitude[0];
    for (std::size_t p = 1; p < kParts; ++p) {
      least = hn::Min(least, low[p]);
      most = hn::Max(most, high[p]);
      largest = hn::Max(largest, magnitude[p]);
    }
    return {.low = hn::GetLane(hn::MinOfLanes(F32(), least)),
            .high = hn::GetLane(hn::MaxOfLanes(F32(), most)),
            .max_magnitude = hn::GetLane(hn::MaxOfLanes(U32(), largest))};
  }
};

// What min and max make of NaN does not matter: the magnitude tells.
CompsoRange MeasureRange(const float* values, std::int64_t elems, std::int64_t prefetch_elems) {
  float first;  // values need not be aligned
  std::memcpy(&first, values, sizeof(first));
  RangeRow row(first);
  std::int64_t i = 0;
  for (; i + kRowElems <= elems; i += kRowElems) {
    __builtin_prefetch(values + i + prefetch_elems);
    row.add(values + i);
  }
  if (i < elems) {
    float rest[kRowElems];
    std::fill_n(rest, kRowElems, first);
    std::memcpy(rest, values + i, static_cast<std::size_t>(elems - i) * sizeof(float));
    row.add(rest);
  }
  return row.result();
}

// ---- values to codes -----------------------------------------------------------------------------------------------

// Codes are counted so many behind those that are made, which would have to be waited for.
constexpr std::int64_t kCountedBehind = 4 * kRowElems;

template <class Round, bool kFilters, bool kWide>
struct CompsoQuantiseRow {
  Round round;
  const float* values;
  std::int64_t prefetch_elems;
  CompsoCodes codes;
  CompsoCounts counts;

  HWY_INLINE void prefetch(std::int64_t at) const { __builtin_prefetch(values + at + prefetch_elems); }

  HWY_INLINE void operator()(const BlockGrid& block, std::int64_t at, VF32 one_and_r) const {
    const F32 d;
    const U32 du;
    if (fetches_itself<Round>(at)) prefetch(at);
    const VF32 v = hn::LoadU(d, values + at);
    VF32 q = hn::Mul(v, hn::Set(d, block.inverse));
    if constexpr (kFilters) q = hn::IfThenElseZero(hn::Gt(hn::Abs(v), hn::Set(d, block.threshold)), q);
    q = hn::Min(hn::Max(q, hn::Set(d, -block.reach)), hn::Set(d, block.reach));
    // As in quant_kernels.cc: the sum's lower bits are the level, here with that of code 0, which is even, so that ties
    // go where they went. Bits above the code fall off.
    const float magic = 0x1.8p23f + (kWide ? kCompsoWideZeroCode : kCompsoZeroCode);
    const VU32 code = hn::BitCast(du, hn::Add(round(q, one_and_r), hn::Set(d, magic)));
    hn::StoreU(hn::TruncateTo(U8(), code), U8(), codes.low + at);
    if constexpr (kWide) hn::StoreU(hn::TruncateTo(U8(), hn::ShiftRight<8>(code)), U8(), codes.high + at);
    if (at >= kCountedBehind) count<kPartElems>(at - kCountedBehind);
  }

  template <std::int64_t kElems>
  HWY_INLINE void count(std::int64_t at) const {
    if (counts.low != nullptr) counts.low->add<kElems>(codes.low + at);
    if (kWide && counts.high != nullptr) counts.high->add<kElems>(codes.high + at);
  }
  HWY_INLINE void count_last(std::int64_t elems) const {
    for (std::int64_t at = std::max<std::int64_t>(0, elems - kCountedBehind); at < elems; at += kRowElems) {
      count<kRowElems>(at);
    }
  }
};

template <bool kFilters, bool kWide>
void quantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
              std::int64_t prefetch_elems, CompsoCodes codes, CompsoCounts counts) {
  if (counts.low != nullptr) counts.low->make_room(piece.elems);
  if (counts.high != nullptr) counts.high->make_room(piece.elems);
  const auto run = [&]<class Round>(Round round) HWY_ATTR {
    const CompsoQuantiseRow<Round, kFilters, kWide> row{round, values, prefetch_elems, codes, counts};
    if constexpr (std::is_same_v<Round, Random>) {
      for_random_rows(piece, random, row);
    } else {
      for_rows(piece, row);
    }
    row.count_last(piece.elems);
  };
  switch (levels.rounding) {
    case Rounding::kNearest:
      return run(Nearest(0));
    case Rounding::kDeadZone:
      return run(TowardsZero(levels.dead_zone));
    case Rounding::kStochastic:
    case Rounding::kDither:
      return run(Random(0));
  }
}

void CompsoQuantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                    std::int64_t prefetch_elems, CompsoCodes codes, CompsoCounts counts) {
  if (codes.high != nullptr) {
    return levels.filters ? quantise<true, true>(levels, piece, random, values, prefetch_elems, codes, counts)
                          : quantise<false, true>(levels, piece, random, values, prefetch_elems, codes, counts);
  }
  levels.filters ? quantise<true, false>(levels, piece, random, values, prefetch_elems, codes, counts)
                 : quantise<false, false>(levels, piece, random, values, prefetch_elems, codes, counts);
}

// ---- codes to values -----------------------------------------------------------------------------------------------

template <Rounding kRounding, bool kWide, bool kStreams>
struct CompsoDequantiseRow {
  std::int32_t first_level;
  DeadZone dead_zone;
  CompsoCodes codes;
  float* values;

  HWY_INLINE VF32 value(VF32 level, VF32 one_and_r) const {
    const F32 d;
    if constexpr (kRounding == Rounding::kDither) {
      // level - u, u = (1 + r) - 3/2, every difference exact.
      return hn::Sub(level, hn::Sub(one_and_r, hn::Set(d, 1.5f)));
    }
    return kRounding == Rounding::kDeadZone ? outwards(level, dead_zone) : level;
  }

  HWY_INLINE void operator()(const BlockGrid& block, std::int64_t at, VF32 one_and_r) const {
    const F32 d;
    const I32 di;
    VI32 code = hn::PromoteTo(di, hn::LoadU(U8(), codes.low + at));
    if constexpr (kWide) code = hn::Or(code, hn::ShiftLeft<8>(hn::PromoteTo(di, hn::LoadU(U8(), codes.high + at))));
    const VI32 first = hn::Set(di, first_level);
    const VI32 offset = hn::Sub(code, hn::Add(first, hn::Set(di, kWide ? kCompsoWideZeroCode : kCompsoZeroCode)));
    const VI32 level = hn::Add(first, hn::And(offset, hn::Set(di, kWide ? 0xffff : 0xff)));
    const VF32 v = hn::Mul(value(hn::ConvertTo(d, level), one_and_r), hn::Set(d, block.step));
    if constexpr (kStreams) {
      hn::Stream(v, d, values + at);
    } else {
      hn::StoreU(v, d, values + at);
    }
  }
};

template <bool kWide, bool kStreams>
void dequantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, std::int32_t first_level,
                CompsoCodes codes, float* values) {
  const auto row = [&]<Rounding kRounding>() {
    return CompsoDequantiseRow<kRounding, kWide, kStreams>{first_level, levels.dead_zone, codes, values};
  };
  switch (levels.rounding) {
    case Rounding::kNearest:
    case Rounding::kStochastic:
      return for_rows(piece, row.template operator()<Rounding::kNearest>());
    case Rounding::kDeadZone:
      return for_rows(piece, row.template operator()<Rounding::kDeadZone>());
    case Rounding::kDither:
      return for_random_rows(piece, random, row.template operator()<Rounding::kDither>());
  }
}

void CompsoDequantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, std::int32_t first_level,
                      CompsoCodes codes, bool streams, float* values) {
  if (codes.high != nullptr) {
    return streams ? dequantise<true, true>(levels, piece, random, first_level, codes, values)
                   : dequantise<true, false>(levels, piece, random, first_level, codes, values);
  }
  streams ? dequantise<false, true>(levels, piece, random, first_level, codes, values)
          : dequantise<false, false>(levels, piece, random, first_level, codes, values);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(MeasureRange);
HWY_EXPORT(CompsoQuantise);
HWY_EXPORT(CompsoDequantise);

CompsoRange measure_range(const float* values, std::int64_t elems, std::int64_t prefetch_elems) {
  return HWY_DYNAMIC_DISPATCH(MeasureRange)(values, elems, prefetch_elems);
}

void compso_quantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                     std::int64_t prefetch_elems, CompsoCodes codes, CompsoCounts counts) {
  HWY_DYNAMIC_DISPATCH(CompsoQuantise)(levels, piece, random, values, prefetch_elems, codes, counts);
}

void compso_dequantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, std::int32_t first_level,
                       CompsoCodes codes, bool streams, float* values) {
  HWY_DYNAMIC_DISPATCH(CompsoDequantise)
  (levels, piece, random, first_level, codes, streams && is_stream_aligned(values), values);
}

}  // namespace cortado
#endif

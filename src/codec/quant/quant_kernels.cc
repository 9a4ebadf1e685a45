// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_kernels.h"

#include <algorithm>
#include <bit>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/quant_kernels.cc"
#include "core/simd.h"
// After simd.h, which it needs.
#include "codec/quant/quant_rows.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

// ---- statistics ----------------------------------------------------------------------------------------------------

// Sums over rows, 16 of them side by side.
struct RowSums {
  VF32 parts[kParts];

  HWY_INLINE void clear() {
    for (VF32& part : parts) part = hn::Zero(F32());
  }
  HWY_INLINE double sum() const {
    float lanes[kRowElems];
    for (std::size_t p = 0; p < kParts; ++p) hn::StoreU(parts[p], F32(), lanes + p * kPartElems);
    double each[kRowElems];
    std::copy(lanes, lanes + kRowElems, each);
    for (int apart = 8; apart > 0; apart /= 2)
      for (int i = 0; i < apart; ++i) each[i] += each[i + apart];
    return each[0];
  }
};

// Of (v * 2^-k)^2, times 4^k, where 2^k is about the largest magnitude: float32 then neither overflows nor loses what
// counts.
HWY_INLINE double sum_squares(const float* values, std::int64_t elems, std::uint32_t max_magnitude) {
  const std::uint32_t exponent = std::clamp(max_magnitude >> 23, 2u, 252u);
  const VF32 scale = hn::Set(F32(), std::bit_cast<float>((254u - exponent) << 23));
  RowSums squares;
  squares.clear();
  for (std::int64_t i = 0; i < elems; i += kRowElems) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const VF32 v = hn::Mul(hn::LoadU(F32(), values + i + static_cast<std::int64_t>(p) * kPartElems), scale);
      squares.parts[p] = hn::Add(squares.parts[p], hn::Mul(v, v));
    }
  }
  const double unit = std::bit_cast<float>(exponent << 23);
  return squares.sum() * unit * unit;
}

template <BlockScale kScale>
struct Measure {
  VU32 magnitude[kParts];
  VF32 low[kParts], high[kParts];

  HWY_INLINE void add_row(const float* values) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const VF32 v = hn::LoadU(F32(), values + p * kPartElems);
      magnitude[p] = hn::Max(magnitude[p], hn::And(hn::BitCast(U32(), v), hn::Set(U32(), 0x7fffffffu)));
      if constexpr (kScale == BlockScale::kRange) {
        low[p] = hn::Min(low[p], v);
        high[p] = hn::Max(high[p], v);
      }
    }
  }

  HWY_INLINE BlockStats run(const float* values, std::int64_t elems) {
    for (std::size_t p = 0; p < kParts; ++p) {
      magnitude[p] = hn::Zero(U32());
      low[p] = high[p] = hn::Zero(F32());
    }
    for (std::int64_t i = 0; i < elems; i += kRowElems) add_row(values + i);
    BlockStats stats = result();
    if constexpr (kScale == BlockScale::kRms) stats.squares = sum_squares(values, elems, stats.max_magnitude);
    return stats;
  }

  HWY_INLINE BlockStats result() const {
    BlockStats stats;
    VU32 largest = magnitude[0];
    for (std::size_t p = 1; p < kParts; ++p) largest = hn::Max(largest, magnitude[p]);
    stats.max_magnitude = hn::GetLane(hn::MaxOfLanes(U32(), largest));
    if constexpr (kScale == BlockScale::kRange) {
      VF32 least = low[0], most = high[0];
      for (std::size_t p = 1; p < kParts; ++p) least = hn::Min(least, low[p]), most = hn::Max(most, high[p]);
      stats.low = hn::GetLane(hn::MinOfLanes(F32(), least));
      stats.high = hn::GetLane(hn::MaxOfLanes(F32(), most));
    }
    return stats;
  }
};

template <BlockScale kScale>
void measure(const float* values, std::int64_t elems, std::int64_t block_elems, BlockStats* stats) {
  for (std::int64_t i = 0; i < elems; i += block_elems) {
    *stats++ = Measure<kScale>().run(values + i, std::min(block_elems, elems - i));
  }
}

void MeasureBlocks(BlockScale scale, const float* values, std::int64_t elems, std::int64_t block_elems,
                   BlockStats* stats) {
  switch (scale) {
    case BlockScale::kMax:
      return measure<BlockScale::kMax>(values, elems, block_elems, stats);
    case BlockScale::kRms:
    case BlockScale::kL2:
      return measure<BlockScale::kRms>(values, elems, block_elems, stats);
    case BlockScale::kRange:
      return measure<BlockScale::kRange>(values, elems, block_elems, stats);
  }
}

// ---- values to codes -----------------------------------------------------------------------------------------------

// One bit has its levels at -1/2 and 1/2.
float shift_of(const Levels& levels) { return levels.largest < 1 ? 0.5f : 0.0f; }

template <class Round, bool kFilters>
struct QuantiseRow {
  Round round;
  float largest_level;
  std::uint32_t bits_of_code_0;
  const float* values;
  std::int64_t prefetch_elems;
  std::uint8_t* codes;

  QuantiseRow(Round rounding, const Levels& levels, const float* from, std::int64_t ahead, std::uint8_t* to)
      : round(rounding),
        largest_level(levels.largest),
        bits_of_code_0(0x4b400000u - static_cast<std::uint32_t>(levels.largest + shift_of(levels))),
        values(from),
        prefetch_elems(ahead),
        codes(to) {}

  HWY_INLINE void prefetch(std::int64_t at) const { __builtin_prefetch(values + at + prefetch_elems); }

  HWY_INLINE void operator()(const BlockGrid& block, std::int64_t at, VF32 one_and_r) const {
    const F32 d;
    if (fetches_itself<Round>(at)) prefetch(at);
    const VF32 v = hn::LoadU(d, values + at);
    VF32 q = hn::Mul(v, hn::Set(d, block.inverse));
    if constexpr (kFilters) q = hn::IfThenElseZero(hn::Gt(hn::Abs(v), hn::Set(d, block.threshold)), q);
    q = hn::Min(hn::Max(q, hn::Set(d, -largest_level)), hn::Set(d, largest_level));
    // Rounds to nearest, ties to even: a sum with 1.5 * 2^23 has a last place of 1 and the integer in its lower bits.
    const VF32 sum = hn::Add(round(q, one_and_r), hn::Set(d, 0x1.8p23f));
    const VU32 code = hn::Sub(hn::BitCast(U32(), sum), hn::Set(U32(), bits_of_code_0));
    hn::StoreU(hn::U8FromU32(code), U8(), codes + at);
  }
};

// ---- codes to values -----------------------------------------------------------------------------------------------

template <Rounding kRounding, bool kStreams>
struct DequantiseRow {
  float largest_level;
  const std::uint8_t* codes;
  float* values;

  HWY_INLINE VF32 value(VF32 code, VF32 one_and_r) const {
    const F32 d;
    if constexpr (kRounding == Rounding::kDither) {
      // level - u = code - (1 + r) - (largest_level - 3/2), every difference exact.
      return hn::Sub(hn::Sub(code, one_and_r), hn::Set(d, largest_level - 1.5f));
    }
    const VF32 level = hn::Sub(code, hn::Set(d, largest_level));
    return kRounding == Rounding::kDeadZone ? outwards(level, kDeadZone) : level;
  }

  HWY_INLINE void operator()(const BlockGrid& block, std::int64_t at, VF32 one_and_r) const {
    const F32 d;
    const VF32 code = hn::ConvertTo(d, hn::PromoteTo(I32(), hn::LoadU(U8(), codes + at)));
    const VF32 v = hn::Mul(value(code, one_and_r), hn::Set(d, block.step));
    if constexpr (kStreams) {
      hn::Stream(v, d, values + at);
    } else {
      hn::StoreU(v, d, values + at);
    }
  }
};

// ---- errors --------------------------------------------------------------------------------------------------------

// q: a magnitude; errors of -q are the same.
template <Rounding kRounding>
HWY_INLINE VF32 squared_error(VF32 q) {
  const F32 d;
  const VF32 magic = hn::Set(d, 0x1.8p23f);
  // Beyond 2^21 steps, where the sum with `magic` does not round, the error is negligible.
  q = hn::Min(q, hn::Set(d, 0x1p21f));
  const VF32 nudged = kRounding == Rounding::kDeadZone ? hn::Sub(q, hn::Set(d, kDeadZone.shift)) : q;
  VF32 decoded = hn::Sub(hn::Add(nudged, magic), magic);
  if constexpr (kRounding == Rounding::kDeadZone) {
    decoded = hn::Add(decoded, hn::IfThenZeroElse(hn::Eq(decoded, hn::Zero(d)), hn::Set(d, kDeadZone.outwards)));
  }
  const VF32 e = hn::Sub(q, decoded);
  // Stochastic: a fraction f is rounded away by f with probability 1 - f, and by 1 - f with probability f.
  return kRounding == Rounding::kStochastic ? hn::Sub(hn::Abs(e), hn::Mul(e, e)) : hn::Mul(e, e);
}

template <Rounding kRounding>
double sum_squared_errors(float inverse, const float* values, std::int64_t elems) {
  RowSums errors;
  errors.clear();
  for (std::int64_t i = 0; i < elems; i += kRowElems) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const VF32 v = hn::LoadU(F32(), values + i + static_cast<std::int64_t>(p) * kPartElems);
      errors.parts[p] =
          hn::Add(errors.parts[p], squared_error<kRounding>(hn::Abs(hn::Mul(v, hn::Set(F32(), inverse)))));
    }
  }
  return errors.sum();
}

double SumSquaredErrors(Rounding rounding, float step, const float* values, std::int64_t elems) {
  const float inverse = 1 / step;
  switch (rounding) {
    case Rounding::kNearest:
      return sum_squared_errors<Rounding::kNearest>(inverse, values, elems);
    case Rounding::kDeadZone:
      return sum_squared_errors<Rounding::kDeadZone>(inverse, values, elems);
    case Rounding::kStochastic:
      return sum_squared_errors<Rounding::kStochastic>(inverse, values, elems);
    case Rounding::kDither:
      return static_cast<double>(elems) / 12;
  }
  return 0;
}

DeadZoneSums SumDeadZone(float shift, float step, const float* values, std::int64_t elems) {
  const F32 d;
  const VF32 magic = hn::Set(d, 0x1.8p23f), most = hn::Set(d, 0x1p21f), inverse = hn::Set(d, 1 / step);
  RowSums zeros, offsets, squares, others;
  for (RowSums* sums : {&zeros, &offsets, &squares, &others}) sums->clear();
  for (std::int64_t i = 0; i < elems; i += kRowElems) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const VF32 v = hn::LoadU(d, values + i + static_cast<std::int64_t>(p) * kPartElems);
      const VF32 q = hn::Min(hn::Abs(hn::Mul(v, inverse)), most);
      const VF32 level = hn::Sub(hn::Add(hn::Sub(q, hn::Set(d, shift)), magic), magic);
      const auto is_zero = hn::Eq(level, hn::Zero(d));
      const VF32 offset = hn::Sub(q, level), square = hn::Mul(offset, offset);
      const auto add = [&](RowSums& sums, VF32 what) HWY_ATTR { sums.parts[p] = hn::Add(sums.parts[p], what); };
      add(zeros, hn::IfThenElseZero(is_zero, square));
      add(offsets, hn::IfThenZeroElse(is_zero, offset));
      add(squares, hn::IfThenZeroElse(is_zero, square));
      add(others, hn::IfThenZeroElse(is_zero, hn::Set(d, 1)));
    }
  }
  return {zeros.sum(), offsets.sum(), squares.sum(), others.sum()};
}

// ---- the loops -----------------------------------------------------------------------------------------------------

template <bool kFilters>
void quantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
              std::int64_t ahead, std::uint8_t* codes) {
  const auto row = [&]<class Round>(Round round) {
    return QuantiseRow<Round, kFilters>(round, levels, values, ahead, codes);
  };
  switch (levels.rounding) {
    case Rounding::kNearest:
      return for_rows(piece, row(Nearest(shift_of(levels))));
    case Rounding::kDeadZone:
      return for_rows(piece, row(TowardsZero(levels.dead_zone)));
    case Rounding::kStochastic:
    case Rounding::kDither:
      return for_random_rows(piece, random, row(Random(shift_of(levels))));
  }
}

void QuantiseValues(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                    std::int64_t ahead, std::uint8_t* codes) {
  levels.filters ? quantise<true>(levels, piece, random, values, ahead, codes)
                 : quantise<false>(levels, piece, random, values, ahead, codes);
}

template <bool kStreams>
void dequantise(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const std::uint8_t* codes,
                float* values) {
  switch (levels.rounding) {
    case Rounding::kNearest:
    case Rounding::kStochastic:
      return for_rows(piece, DequantiseRow<Rounding::kNearest, kStreams>{levels.largest, codes, values});
    case Rounding::kDeadZone:
      return for_rows(piece, DequantiseRow<Rounding::kDeadZone, kStreams>{levels.largest, codes, values});
    case Rounding::kDither:
      return for_random_rows(piece, random, DequantiseRow<Rounding::kDither, kStreams>{levels.largest, codes, values});
  }
}

void DequantiseValues(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const std::uint8_t* codes,
                      bool streams, float* values) {
  streams ? dequantise<true>(levels, piece, random, codes, values)
          : dequantise<false>(levels, piece, random, codes, values);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(MeasureBlocks);
HWY_EXPORT(QuantiseValues);
HWY_EXPORT(DequantiseValues);
HWY_EXPORT(SumSquaredErrors);
HWY_EXPORT(SumDeadZone);

void measure_blocks(BlockScale scale, const float* values, std::int64_t elems, std::int64_t block_elems,
                    BlockStats* stats) {
  HWY_DYNAMIC_DISPATCH(MeasureBlocks)(scale, values, elems, block_elems, stats);
}

void quantise_values(const Levels& levels, const BlockPiece& piece, const RandomKey& random, const float* values,
                     std::int64_t prefetch_elems, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(QuantiseValues)(levels, piece, random, values, prefetch_elems, codes);
}

void dequantise_values(const Levels& levels, const BlockPiece& piece, const RandomKey& random,
                       const std::uint8_t* codes, bool streams, float* values) {
  HWY_DYNAMIC_DISPATCH(DequantiseValues)
  (levels, piece, random, codes, streams && is_stream_aligned(values), values);
}

DeadZoneSums sum_dead_zone(float shift, float step, const float* values, std::int64_t elems) {
  return HWY_DYNAMIC_DISPATCH(SumDeadZone)(shift, step, values, elems);
}

double sum_squared_errors(Rounding rounding, float step, const float* values, std::int64_t elems) {
  return HWY_DYNAMIC_DISPATCH(SumSquaredErrors)(rounding, step, values, elems);
}

}  // namespace cortado
#endif

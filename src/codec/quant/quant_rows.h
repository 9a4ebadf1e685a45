// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// READ FIRST: no include guard of the usual kind, as in core/philox_simd.h. What the kernels of `quant` and of codecs
// that round as it does are made of: the walk over rows with their random numbers, and the roundings.
//
// Values come in rows of 16 (a vector, or the parts of a row on narrower machines) and tiles of 16 rows, which one
// Philox block a lane serves with a byte for every value.
#if defined(CORTADO_CODEC_QUANT_ROWS_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CORTADO_CODEC_QUANT_ROWS_H_
#undef CORTADO_CODEC_QUANT_ROWS_H_
#else
#define CORTADO_CODEC_QUANT_ROWS_H_
#endif

#include <cstdint>
#include <type_traits>

#include "codec/pieces.h"
#include "codec/quant/quant_kernels.h"
#include "core/philox_simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using F64 = hn::CappedTag<double, 8>;
using F32OfF64 = hn::Rebind<float, F64>;  // as many lanes
using VF32 = hn::Vec<F32>;
using VU32 = hn::Vec<U32>;
using VI32 = hn::Vec<I32>;
using VF64 = hn::Vec<F64>;

constexpr std::int64_t kTileRows = 16, kTileElems = kRowElems * kTileRows;
constexpr std::size_t kParts = kRowElems / hn::MaxLanes(F32());
constexpr std::int64_t kPartElems = hn::MaxLanes(F32());

// ---- roundings -----------------------------------------------------------------------------------------------------

// 1 + (byte + 1/2) / 256 of the byte kByte of each word: the byte and the half become the upper mantissa bits of 1.
template <int kByte>
HWY_INLINE VF32 one_and_fraction(VU32 words) {
  VU32 placed;
  if constexpr (kByte < 2) {
    placed = hn::ShiftLeft<15 - 8 * kByte>(words);
  } else {
    placed = hn::ShiftRight<8 * kByte - 15>(words);
  }
  return hn::BitCast(F32(), hn::OrAnd(hn::Set(U32(), 0x3f804000u), placed, hn::Set(U32(), 0x007f8000u)));
}

// Clipped values in units of the step, to the numbers whose nearest integers are code - offset.
struct Nearest {
  float shift;
  explicit Nearest(float shift_of_levels) : shift(shift_of_levels) {}
  HWY_INLINE VF32 operator()(VF32 q, VF32) const { return hn::Sub(q, hn::Set(F32(), shift)); }
};
struct TowardsZero {
  float shift;
  explicit TowardsZero(const DeadZone& dead_zone) : shift(dead_zone.shift) {}
  HWY_INLINE VF32 operator()(VF32 q, VF32) const { return hn::Sub(q, hn::CopySignToAbs(hn::Set(F32(), shift), q)); }
};
struct Random {
  float centre;  // of 1 + r
  explicit Random(float shift_of_levels) : centre(1.5f + shift_of_levels) {}
  HWY_INLINE VF32 operator()(VF32 q, VF32 one_and_r) const {
    return hn::Add(q, hn::Sub(one_and_r, hn::Set(F32(), centre)));
  }
};

// Levels of a dead zone as they are decoded, nearer to the middle of what they stand for.
HWY_INLINE VF32 outwards(VF32 level, const DeadZone& dead_zone) {
  const F32 d;
  const VF32 nudge = hn::Xor(hn::Set(d, dead_zone.outwards), hn::And(level, hn::SignBit(d)));
  return hn::Add(level, hn::IfThenZeroElse(hn::Eq(level, hn::Zero(d)), nudge));
}

// Whether a body fetches for the row at `at`, or draw() does.
template <class Round>
constexpr bool fetches_itself(std::int64_t at) {
  return !std::is_same_v<Round, Random> || at / kRowElems % 2 != 0;
}

// ---- the walk over rows --------------------------------------------------------------------------------------------

// What they take, they take by value: otherwise every store to a code could change it, as far as the compiler knows.
template <class RowBody>
HWY_INLINE void for_rows(const BlockPiece piece, const RowBody body) {
  const VF32 none = hn::Zero(F32());
  for (std::int64_t at = 0; at < piece.elems; at += kRowElems) {
    const BlockGrid& block = piece.blocks[at >> piece.log2_block_elems];
    for (std::int64_t part = 0; part < kRowElems; part += kPartElems) body(block, at + part, none);
  }
}

// A byte of `words` a value, in the order of drawing: word w of a tile has the bytes of its rows 4 w to 4 w + 3.
// Drawing leaves the memory idle: where `body` has a prefetch(), it is called here for the rows that are even, and body
// itself fetches for the odd ones what comes after the piece. All at once would be more than can be under way.
template <class RowBody>
HWY_INLINE void draw(const RandomKey random, std::uint64_t first_block, std::int64_t tiles, const RowBody body,
                     std::uint32_t* words) {
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    if constexpr (requires { body.prefetch(0); }) {
      for (std::int64_t row = 0; row < kTileRows; row += 2) body.prefetch(tile * kTileElems + row * kRowElems);
    }
    for (std::int64_t part = 0; part < kRowElems; part += kPartElems) {
      const PhiloxLanes drawn = philox_lanes(random.key, random.step, first_block + static_cast<std::uint64_t>(part));
      for (std::int64_t w = 0; w < 4; ++w) hn::StoreU(drawn.words[w], U32(), words + kRowElems * w + part);
    }
    first_block += kTileRows;
    words += 4 * kRowElems;
  }
}

template <class RowBody>
HWY_INLINE void for_random_rows(const BlockPiece piece, const RandomKey random, const RowBody body) {
  alignas(64) std::uint32_t words[kMaxPieceElems / 4];
  const std::int64_t tiles = (piece.elems + kTileElems - 1) / kTileElems;
  draw(random, static_cast<std::uint64_t>(piece.first / kRowElems), tiles, body, words);
  for (std::int64_t first = 0; first < piece.elems; first += 4 * kRowElems) {
    for (std::int64_t part = 0; part < kRowElems; part += kPartElems) {
      const VU32 word = hn::LoadU(U32(), words + first / 4 + part);
      const auto row = [&](std::int64_t number, VF32 one_and_r) HWY_ATTR {
        const std::int64_t at = first + number * kRowElems;
        if (at < piece.elems) body(piece.blocks[at >> piece.log2_block_elems], at + part, one_and_r);
      };
      row(0, one_and_fraction<0>(word));
      row(1, one_and_fraction<1>(word));
      row(2, one_and_fraction<2>(word));
      row(3, one_and_fraction<3>(word));
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#endif

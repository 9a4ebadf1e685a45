// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8_kernels.h"

#include <bit>

#include "codec/fp8/fp8_grid.h"
#include "codec/pieces.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/fp8/fp8_kernels.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using VF32 = hn::Vec<F32>;
using VU32 = hn::Vec<U32>;

constexpr std::int64_t kPartElems = hn::MaxLanes(F32());

template <int kMantissaBits, int kBias>
struct Fp8 {
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr std::uint32_t kRebias = (127u - kBias) << 23;
  static constexpr float kSmallestNormal = power_of_two(1 - kBias);
  static constexpr float kSmallestDenormal = power_of_two(1 - kBias - kMantissaBits);

  // The sum of a magnitude and a power of two whose last place is that of the result does the rounding: what it adds to
  // the power are mantissa bits, the leading one included, on which the exponent is put. Denormals have the exponent of
  // the smallest normal number and no leading bit, so that they need no case of their own.
  static HWY_INLINE VU32 narrow(VF32 value) {
    const U32 d;
    const F32 df;
    const VU32 bits = hn::BitCast(d, value);
    const VF32 magnitude = hn::Abs(value);
    const VU32 smallest = hn::BitCast(d, hn::Set(df, kSmallestNormal));
    const VU32 exponent = hn::Max(hn::And(bits, hn::Set(d, 0x7f800000u)), smallest);
    const VU32 power = hn::Add(exponent, hn::Set(d, static_cast<std::uint32_t>(kDropped) << 23));
    const VU32 mantissa = hn::Sub(hn::BitCast(d, hn::Add(magnitude, hn::BitCast(df, power))), power);
    const VU32 rounded = hn::Add(mantissa, hn::ShiftRight<kDropped>(hn::Sub(exponent, smallest)));
    return hn::OrAnd(rounded, hn::ShiftRight<24>(bits), hn::Set(d, 0x80u));
  }

  static HWY_INLINE VF32 widen(VU32 code) {
    const U32 d;
    const I32 di;
    const F32 df;
    const VU32 magnitude = hn::And(code, hn::Set(d, 0x7fu));
    const VU32 normal = hn::Add(hn::ShiftLeft<kDropped>(magnitude), hn::Set(d, kRebias));
    const VU32 denormal =
        hn::BitCast(d, hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)), hn::Set(df, kSmallestDenormal)));
    const auto is_small = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 1 << kMantissaBits));
    const VU32 widened = hn::IfThenElse(hn::RebindMask(d, is_small), denormal, normal);
    return hn::BitCast(df, hn::OrAnd(widened, hn::ShiftLeft<24>(code), hn::Set(d, 0x80000000u)));
  }
};
using E4M3 = Fp8<3, 7>;
using E5M2 = Fp8<2, 15>;

// By value: otherwise every store to a code could change the piece, as far as the compiler knows.
template <class Format>
void narrow_rows(const BlockPiece piece, const float* values, std::int64_t prefetch_elems, std::uint8_t* codes) {
  for (std::int64_t at = 0; at < piece.elems; at += kPartElems) {
    const BlockGrid& block = piece.blocks[at >> piece.log2_block_elems];
    __builtin_prefetch(values + at + prefetch_elems);
    const VF32 v = hn::Mul(hn::LoadU(F32(), values + at), hn::Set(F32(), block.inverse));
    hn::StoreU(hn::U8FromU32(Format::narrow(v)), U8(), codes + at);
  }
}

template <class Format, bool kStreams>
void widen_rows(const BlockPiece piece, const std::uint8_t* codes, float* values) {
  for (std::int64_t at = 0; at < piece.elems; at += kPartElems) {
    const BlockGrid& block = piece.blocks[at >> piece.log2_block_elems];
    const VF32 widened = Format::widen(hn::PromoteTo(U32(), hn::LoadU(U8(), codes + at)));
    const VF32 v = hn::Mul(widened, hn::Set(F32(), block.step));
    if constexpr (kStreams) {
      hn::Stream(v, F32(), values + at);
    } else {
      hn::StoreU(v, F32(), values + at);
    }
  }
}

void ToFp8(const Fp8Format& format, const BlockPiece& piece, const float* values, std::int64_t prefetch_elems,
           std::uint8_t* codes) {
  format == kE4M3 ? narrow_rows<E4M3>(piece, values, prefetch_elems, codes)
                  : narrow_rows<E5M2>(piece, values, prefetch_elems, codes);
}

template <class Format>
void widen(const BlockPiece& piece, const std::uint8_t* codes, bool streams, float* values) {
  streams ? widen_rows<Format, true>(piece, codes, values) : widen_rows<Format, false>(piece, codes, values);
}

void FromFp8(const Fp8Format& format, const BlockPiece& piece, const std::uint8_t* codes, bool streams, float* values) {
  format == kE4M3 ? widen<E4M3>(piece, codes, streams, values) : widen<E5M2>(piece, codes, streams, values);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(ToFp8);
HWY_EXPORT(FromFp8);

void to_fp8(const Fp8Format& format, const BlockPiece& piece, const float* values, std::int64_t prefetch_elems,
            std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(ToFp8)(format, piece, values, prefetch_elems, codes);
}

void from_fp8(const Fp8Format& format, const BlockPiece& piece, const std::uint8_t* codes, bool streams,
              float* values) {
  HWY_DYNAMIC_DISPATCH(FromFp8)(format, piece, codes, streams && is_stream_aligned(values), values);
}

}  // namespace cortado
#endif

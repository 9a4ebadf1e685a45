// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// READ FIRST: no include guard of the usual kind, as in core/philox_simd.h: one namespace for each SIMD target.
//
// 16-bit floats in vectors: core/float16.h for all lanes at once, the same bits, NaN included, whether denormals are
// flushed or not. Integer arithmetic on 32-bit lanes, but for fp16 where x86 has instructions.
#if defined(CORTADO_CORE_FLOAT16_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CORTADO_CORE_FLOAT16_SIMD_H_
#undef CORTADO_CORE_FLOAT16_SIMD_H_
#else
#define CORTADO_CORE_FLOAT16_SIMD_H_
#endif

#include <cstdint>

#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#undef CORTADO_HAS_FP16_CONVERSIONS
#define CORTADO_HAS_FP16_CONVERSIONS (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)

template <class D>  // of float
using HalfLanes = hn::Rebind<std::uint16_t, D>;
template <class D>
using VecOfHalves = hn::Vec<HalfLanes<D>>;

// The low halves of 32-bit lanes; values are below 65536, so the saturation of DemoteTo changes none.
template <class D, class V>
HWY_INLINE VecOfHalves<D> lower_halves(D, V value) {
  return hn::DemoteTo(HalfLanes<D>(), hn::BitCast(hn::Rebind<std::int32_t, D>(), value));
}

struct Bf16 {
  template <class D>
  static HWY_INLINE hn::Vec<D> widen(D df, VecOfHalves<D> value) {
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(hn::Rebind<std::uint32_t, D>(), value)));
  }

  template <class D>
  static HWY_INLINE VecOfHalves<D> narrow(D df, hn::Vec<D> value) {
    const hn::Rebind<std::uint32_t, D> d;
    const auto bits = hn::BitCast(d, value);
    const auto upper = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(upper, hn::Set(d, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(d, 0x7fffu), odd)));
    const auto quiet_nan = hn::Or(upper, hn::Set(d, 0x0040u));
    return lower_halves(df, hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), quiet_nan, rounded));
  }
};

struct Fp16 {
#if CORTADO_HAS_FP16_CONVERSIONS
  template <class D>
  static HWY_INLINE hn::Vec<D> widen(D df, VecOfHalves<D> value) {
    return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), value));
  }

  template <class D>
  static HWY_INLINE VecOfHalves<D> narrow(D, hn::Vec<D> value) {
    return hn::BitCast(HalfLanes<D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value));
  }
#else
  template <class D>
  static HWY_INLINE hn::Vec<D> widen(D df, VecOfHalves<D> narrow) {
    const hn::Rebind<std::uint32_t, D> d;
    const hn::Rebind<std::int32_t, D> di;
    const auto value = hn::PromoteTo(d, narrow);
    const auto magnitude = hn::And(value, hn::Set(d, 0x7fffu));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(value, magnitude));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(d, 112u << 23));
    const auto denormal = hn::BitCast(d, hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)), hn::Set(df, 0x1p-24f)));
    // The exponent of Inf and NaN is moved to float32's; NaN become quiet.
    const auto special = hn::Add(shifted, hn::Set(d, 224u << 23));
    const auto quiet = hn::Or(special, hn::Set(d, 0x00400000u));

    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const auto is_denormal = hn::Lt(signed_magnitude, hn::Set(di, 0x0400));
    const auto is_special = hn::Gt(signed_magnitude, hn::Set(di, 0x7bff));
    const auto is_nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7c00));
    auto result = hn::IfThenElse(hn::RebindMask(d, is_denormal), denormal, normal);
    result = hn::IfThenElse(hn::RebindMask(d, is_special), special, result);
    result = hn::IfThenElse(hn::RebindMask(d, is_nan), quiet, result);
    return hn::BitCast(df, hn::Or(sign, result));
  }

  template <class D>
  static HWY_INLINE VecOfHalves<D> narrow(D df, hn::Vec<D> value) {
    const hn::Rebind<std::uint32_t, D> d;
    const hn::Rebind<std::int32_t, D> di;
    const auto bits = hn::BitCast(d, value);
    const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
    const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
    // Normal numbers; what carries past the largest one, and all above, is Inf.
    const auto rebiased = hn::Sub(magnitude, hn::Set(d, 112u << 23));
    const auto odd = hn::And(hn::ShiftRight<13>(rebiased), hn::Set(d, 1u));
    const auto rounded = hn::ShiftRight<13>(hn::Add(rebiased, hn::Add(hn::Set(d, 0x0fffu), odd)));
    const auto normal = hn::Min(rounded, hn::Set(d, 0x7c00u));
    // Denormals: the sum with 0.5 has a last place of 2^-24, so the addition does the rounding.
    const auto aligned = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
    const auto denormal = hn::Sub(hn::BitCast(d, aligned), hn::Set(d, 0x3f000000u));
    const auto nan = hn::Or(hn::Set(d, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x01ffu)));

    const auto is_small = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 113 << 23));
    const auto finite = hn::IfThenElse(hn::RebindMask(d, is_small), denormal, normal);
    return lower_halves(df, hn::Or(sign, hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), nan, finite)));
  }
#endif
};

// How elements of a format are read and written: as float vectors of any number of lanes.
struct Fp32Elements {
  using Raw = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D df, const Raw* from) {
    return hn::LoadU(df, from);
  }
};
template <class Format>
struct HalfElements {
  using Raw = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D df, const Raw* from) {
    return Format::widen(df, hn::LoadU(HalfLanes<D>(), from));
  }
};
using Bf16Elements = HalfElements<Bf16>;
using Fp16Elements = HalfElements<Fp16>;

#undef CORTADO_HAS_FP16_CONVERSIONS

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#endif

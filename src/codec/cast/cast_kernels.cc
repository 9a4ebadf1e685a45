// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast_kernels.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/cast/cast_kernels.cc"
#include "core/simd.h"

// Integer arithmetic on 32-bit lanes throughout, also where a machine has a conversion instruction: the kernels are
// bound by memory, and one path is one thing to prove.

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;  // as many lanes: half a vector
using VF32 = hn::Vec<F32>;
using VU32 = hn::Vec<U32>;

constexpr std::size_t kMaxLanes = 16;

// Both have the narrow value in the low half of each 32-bit lane.
struct ToBf16 {
  HWY_INLINE VU32 operator()(VF32 value) const {
    const U32 d;
    const VU32 bits = hn::BitCast(d, value);
    const VU32 upper = hn::ShiftRight<16>(bits);
    const VU32 odd = hn::And(upper, hn::Set(d, 1u));
    const VU32 rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(hn::Set(d, 0x7fffu), odd)));
    const VU32 quiet_nan = hn::Or(upper, hn::Set(d, 0x0040u));
    return hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), quiet_nan, rounded);
  }
};

struct ToFp16 {
  HWY_INLINE VU32 operator()(VF32 value) const {
    const U32 d;
    const I32 di;
    const F32 df;
    const VU32 bits = hn::BitCast(d, value);
    const VU32 magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
    const VU32 sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
    // Normal numbers; what carries past the largest one, and all above, is Inf.
    const VU32 rebiased = hn::Sub(magnitude, hn::Set(d, 112u << 23));
    const VU32 odd = hn::And(hn::ShiftRight<13>(rebiased), hn::Set(d, 1u));
    const VU32 rounded = hn::ShiftRight<13>(hn::Add(rebiased, hn::Add(hn::Set(d, 0x0fffu), odd)));
    const VU32 normal = hn::Min(rounded, hn::Set(d, 0x7c00u));
    // Denormals: the sum with 0.5 has a last place of 2^-24, so the addition does the rounding.
    const VF32 aligned = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
    const VU32 denormal = hn::Sub(hn::BitCast(d, aligned), hn::Set(d, 0x3f000000u));
    const VU32 nan = hn::Or(hn::Set(d, 0x7e00u), hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x01ffu)));

    const auto is_small = hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 113 << 23));
    const VU32 finite = hn::IfThenElse(hn::RebindMask(d, is_small), denormal, normal);
    return hn::Or(sign, hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), nan, finite));
  }
};

template <class Narrow>
struct Scaled {
  float scale;
  HWY_INLINE VU32 operator()(VF32 value) const {
    const F32 df;
    return Narrow()(hn::Mul(value, hn::Set(df, scale)));
  }
};

struct FromBf16 {
  HWY_INLINE VF32 operator()(VU32 value) const { return hn::BitCast(F32(), hn::ShiftLeft<16>(value)); }
};

struct FromFp16 {
  HWY_INLINE VF32 operator()(VU32 value) const {
    const U32 d;
    const I32 di;
    const F32 df;
    const VU32 magnitude = hn::And(value, hn::Set(d, 0x7fffu));
    const VU32 sign = hn::ShiftLeft<16>(hn::Xor(value, magnitude));
    const VU32 shifted = hn::ShiftLeft<13>(magnitude);
    const VU32 normal = hn::Add(shifted, hn::Set(d, 112u << 23));
    const VU32 denormal = hn::BitCast(d, hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)), hn::Set(df, 0x1p-24f)));
    // The exponent of Inf and NaN is moved to float32's; NaN become quiet.
    const VU32 special = hn::Add(shifted, hn::Set(d, 224u << 23));
    const VU32 quiet = hn::Or(special, hn::Set(d, 0x00400000u));

    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const auto is_denormal = hn::Lt(signed_magnitude, hn::Set(di, 0x0400));
    const auto is_special = hn::Gt(signed_magnitude, hn::Set(di, 0x7bff));
    const auto is_nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7c00));
    VU32 result = hn::IfThenElse(hn::RebindMask(d, is_denormal), denormal, normal);
    result = hn::IfThenElse(hn::RebindMask(d, is_special), special, result);
    result = hn::IfThenElse(hn::RebindMask(d, is_nan), quiet, result);
    return hn::BitCast(df, hn::Or(sign, result));
  }
};

template <class Narrow>
HWY_INLINE void narrow_vector(const float* input, std::uint16_t* output, const Narrow& narrow) {
  // Values are below 65536, so the saturation of DemoteTo changes none.
  const U16 d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(I32(), narrow(hn::LoadU(F32(), input)))), d16, output);
}

template <class Narrow>
HWY_INLINE void narrow_all(const float* input, std::int64_t elems, std::uint16_t* output, const Narrow& narrow) {
  const auto step = static_cast<std::int64_t>(hn::Lanes(F32()));
  std::int64_t i = 0;
  for (; i + step <= elems; i += step) narrow_vector(input + i, output + i, narrow);
  if (i == elems) return;
  float rest[kMaxLanes] = {};
  std::uint16_t narrowed[kMaxLanes];
  std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(float));
  narrow_vector(rest, narrowed, narrow);
  std::memcpy(output + i, narrowed, static_cast<std::size_t>(elems - i) * sizeof(std::uint16_t));
}

template <class Widen>
HWY_INLINE void widen_all(const std::uint16_t* input, std::int64_t elems, float* output, const Widen& widen) {
  const F32 df;
  const U32 d32;
  const U16 d16;
  const auto step = static_cast<std::int64_t>(hn::Lanes(df));
  std::int64_t i = 0;
  for (; i + step <= elems; i += step) {
    hn::StoreU(widen(hn::PromoteTo(d32, hn::LoadU(d16, input + i))), df, output + i);
  }
  if (i == elems) return;
  std::uint16_t rest[kMaxLanes] = {};
  float widened[kMaxLanes];
  std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(std::uint16_t));
  hn::StoreU(widen(hn::PromoteTo(d32, hn::LoadU(d16, rest))), df, widened);
  std::memcpy(output + i, widened, static_cast<std::size_t>(elems - i) * sizeof(float));
}

void Fp32ToBf16(const float* input, std::int64_t elems, std::uint16_t* output) {
  narrow_all(input, elems, output, ToBf16());
}
void Fp32ToFp16(const float* input, std::int64_t elems, std::uint16_t* output) {
  narrow_all(input, elems, output, ToFp16());
}
void ScaledToBf16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  narrow_all(input, elems, output, Scaled<ToBf16>{scale});
}
void ScaledToFp16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  narrow_all(input, elems, output, Scaled<ToFp16>{scale});
}
void Bf16ToFp32(const std::uint16_t* input, std::int64_t elems, float* output) {
  widen_all(input, elems, output, FromBf16());
}
void Fp16ToFp32(const std::uint16_t* input, std::int64_t elems, float* output) {
  widen_all(input, elems, output, FromFp16());
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(Fp32ToBf16);
HWY_EXPORT(Fp32ToFp16);
HWY_EXPORT(ScaledToBf16);
HWY_EXPORT(ScaledToFp16);
HWY_EXPORT(Bf16ToFp32);
HWY_EXPORT(Fp16ToFp32);

void fp32_to_bf16(const float* input, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(Fp32ToBf16)(input, elems, output);
}
void fp32_to_fp16(const float* input, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(Fp32ToFp16)(input, elems, output);
}
void scale_and_cast_bf16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(ScaledToBf16)(input, scale, elems, output);
}
void scale_and_cast_fp16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(ScaledToFp16)(input, scale, elems, output);
}
void bf16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output) {
  HWY_DYNAMIC_DISPATCH(Bf16ToFp32)(input, elems, output);
}
void fp16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output) {
  HWY_DYNAMIC_DISPATCH(Fp16ToFp32)(input, elems, output);
}

}  // namespace cortado
#endif

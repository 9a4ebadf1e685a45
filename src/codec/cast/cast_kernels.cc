// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast_kernels.h"

#include <cstring>

#include "core/streaming.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/cast/cast_kernels.cc"
#include "core/simd.h"

// After simd.h, which it needs.
#include "core/float16_simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::CappedTag<float, 16>;
using U16 = HalfLanes<F32>;  // as many lanes: half a vector

constexpr std::size_t kMaxLanes = 16;

template <class Format>
struct Narrow {
  HWY_INLINE hn::Vec<U16> operator()(hn::Vec<F32> value) const { return Format::narrow(F32(), value); }
};
template <class Format>
struct ScaleAndNarrow {
  float scale;
  HWY_INLINE hn::Vec<U16> operator()(hn::Vec<F32> value) const {
    return Format::narrow(F32(), hn::Mul(value, hn::Set(F32(), scale)));
  }
};

// Output elements of a vector, with or without streaming, of which there is none for parts of a vector.
template <bool kStreams, class D, class V>
HWY_INLINE void store(D d, V vector, hn::TFromD<D>* output) {
  if constexpr (kStreams && hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) >= 16) {
    hn::Stream(vector, d, output);
  } else {
    hn::StoreU(vector, d, output);
  }
}

template <bool kStreams, class Function>
HWY_INLINE void narrow_all(const float* input, std::int64_t elems, std::uint16_t* output, const Function& narrow) {
  const auto step = static_cast<std::int64_t>(hn::Lanes(F32()));
  std::int64_t i = 0;
  for (; i + step <= elems; i += step) store<kStreams>(U16(), narrow(hn::LoadU(F32(), input + i)), output + i);
  if (i == elems) return;
  float rest[kMaxLanes] = {};
  std::uint16_t narrowed[kMaxLanes];
  std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(float));
  hn::StoreU(narrow(hn::LoadU(F32(), rest)), U16(), narrowed);
  std::memcpy(output + i, narrowed, static_cast<std::size_t>(elems - i) * sizeof(std::uint16_t));
}

template <bool kStreams, class Elements>
HWY_INLINE void widen_all(const std::uint16_t* input, std::int64_t elems, float* output) {
  const F32 df;
  const auto step = static_cast<std::int64_t>(hn::Lanes(df));
  std::int64_t i = 0;
  for (; i + step <= elems; i += step) store<kStreams>(df, Elements::load(df, input + i), output + i);
  if (i == elems) return;
  std::uint16_t rest[kMaxLanes] = {};
  float widened[kMaxLanes];
  std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(std::uint16_t));
  hn::StoreU(Elements::load(df, rest), df, widened);
  std::memcpy(output + i, widened, static_cast<std::size_t>(elems - i) * sizeof(float));
}

template <class Format>
void narrow_format(const float* input, std::int64_t elems, std::uint16_t* output, bool streams) {
  streams ? narrow_all<true>(input, elems, output, Narrow<Format>())
          : narrow_all<false>(input, elems, output, Narrow<Format>());
}
template <class Elements>
void widen_format(const std::uint16_t* input, std::int64_t elems, float* output, bool streams) {
  streams ? widen_all<true, Elements>(input, elems, output) : widen_all<false, Elements>(input, elems, output);
}

constexpr std::size_t kSums = 16;

template <class Format>
struct MeasuredCast {
  float scale, unscale;

  // 16 elements. The sums lie in memory because the number of lanes is known only at run time on some targets.
  HWY_INLINE void sixteen(const float* input, std::uint16_t* output, float* HWY_RESTRICT of_values,
                          float* HWY_RESTRICT of_differences) const {
    const F32 df;
    const std::size_t lanes = hn::Lanes(df);
    for (std::size_t i = 0; i < kSums; i += lanes) {
      const auto value = hn::LoadU(df, input + i);
      const auto narrow = Format::narrow(df, hn::Mul(value, hn::Set(df, scale)));
      hn::StoreU(narrow, U16(), output + i);
      const auto difference = hn::Sub(value, hn::Mul(Format::widen(df, narrow), hn::Set(df, unscale)));
      hn::StoreU(hn::Add(hn::LoadU(df, of_values + i), hn::Mul(value, value)), df, of_values + i);
      hn::StoreU(hn::Add(hn::LoadU(df, of_differences + i), hn::Mul(difference, difference)), df, of_differences + i);
    }
  }

  HWY_INLINE CastSquares all(const float* input, std::int64_t elems, std::uint16_t* output) const {
    float of_values[kSums] = {}, of_differences[kSums] = {};
    constexpr auto kStep = static_cast<std::int64_t>(kSums);
    std::int64_t i = 0;
    for (; i + kStep <= elems; i += kStep) sixteen(input + i, output + i, of_values, of_differences);
    if (i < elems) {
      float rest[kSums] = {};
      std::uint16_t narrowed[kSums];
      std::memcpy(rest, input + i, static_cast<std::size_t>(elems - i) * sizeof(float));
      sixteen(rest, narrowed, of_values, of_differences);
      std::memcpy(output + i, narrowed, static_cast<std::size_t>(elems - i) * sizeof(std::uint16_t));
    }
    CastSquares squares;
    for (std::size_t k = 0; k < kSums; ++k) {
      squares.of_values += of_values[k];
      squares.of_differences += of_differences[k];
    }
    return squares;
  }
};

CastSquares MeasuredBf16(const float* input, float scale, float unscale, std::int64_t elems, std::uint16_t* output) {
  return MeasuredCast<Bf16>{scale, unscale}.all(input, elems, output);
}
CastSquares MeasuredFp16(const float* input, float scale, float unscale, std::int64_t elems, std::uint16_t* output) {
  return MeasuredCast<Fp16>{scale, unscale}.all(input, elems, output);
}

void Fp32ToBf16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams) {
  narrow_format<Bf16>(input, elems, output, streams);
}
void Fp32ToFp16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams) {
  narrow_format<Fp16>(input, elems, output, streams);
}
void ScaledToBf16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  narrow_all<false>(input, elems, output, ScaleAndNarrow<Bf16>{scale});
}
void ScaledToFp16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  narrow_all<false>(input, elems, output, ScaleAndNarrow<Fp16>{scale});
}
void Bf16ToFp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams) {
  widen_format<Bf16Elements>(input, elems, output, streams);
}
void Fp16ToFp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams) {
  widen_format<Fp16Elements>(input, elems, output, streams);
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
HWY_EXPORT(MeasuredBf16);
HWY_EXPORT(MeasuredFp16);
HWY_EXPORT(Bf16ToFp32);
HWY_EXPORT(Fp16ToFp32);

void fp32_to_bf16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams) {
  HWY_DYNAMIC_DISPATCH(Fp32ToBf16)(input, elems, output, streams && is_stream_aligned(output));
}
void fp32_to_fp16(const float* input, std::int64_t elems, std::uint16_t* output, bool streams) {
  HWY_DYNAMIC_DISPATCH(Fp32ToFp16)(input, elems, output, streams && is_stream_aligned(output));
}
void scale_and_cast_bf16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(ScaledToBf16)(input, scale, elems, output);
}
void scale_and_cast_fp16(const float* input, float scale, std::int64_t elems, std::uint16_t* output) {
  HWY_DYNAMIC_DISPATCH(ScaledToFp16)(input, scale, elems, output);
}
CastSquares measured_cast_bf16(const float* input, float scale, float unscale, std::int64_t elems,
                               std::uint16_t* output) {
  return HWY_DYNAMIC_DISPATCH(MeasuredBf16)(input, scale, unscale, elems, output);
}
CastSquares measured_cast_fp16(const float* input, float scale, float unscale, std::int64_t elems,
                               std::uint16_t* output) {
  return HWY_DYNAMIC_DISPATCH(MeasuredFp16)(input, scale, unscale, elems, output);
}
void bf16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams) {
  HWY_DYNAMIC_DISPATCH(Bf16ToFp32)(input, elems, output, streams && is_stream_aligned(output));
}
void fp16_to_fp32(const std::uint16_t* input, std::int64_t elems, float* output, bool streams) {
  HWY_DYNAMIC_DISPATCH(Fp16ToFp32)(input, elems, output, streams && is_stream_aligned(output));
}

}  // namespace cortado
#endif

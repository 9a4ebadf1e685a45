// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sign/sign_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/float16.h"
#include "core/streaming.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/sign/sign_kernels.cc"
#include "core/simd.h"
// After simd.h, which it needs.
#include "core/float16_simd.h"

// Signs need no scale, so encoding reads the tensor once. Sums are float64 in 16 lanes: no finite float32 tensor
// overflows them, and 2^31 values cost no accuracy.

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kLanes = 16;  // values whose signs are two bytes

// Of the values of one block, value i in lane i % 16; `positive` holds the magnitudes of all values for kMeanAbs.
struct BlockSums {
  double positive[kLanes] = {};
  double negative[kLanes] = {};
  std::int64_t negatives = 0;
};

inline double sum_of(double* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <bool kTwoMeans>
struct Accumulator {
  using D = hn::CappedTag<double, kLanes>;
  static constexpr std::size_t kStep = hn::MaxLanes(D());
  static constexpr std::size_t kVectors = kLanes / kStep;

  HWY_INLINE explicit Accumulator(const BlockSums& sums) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      positive[v] = hn::LoadU(D(), sums.positive + v * kStep);
      negative[v] = hn::LoadU(D(), sums.negative + v * kStep);
    }
  }

  // Values of the lanes v * kStep ..., in as many lanes.
  template <class V>
  HWY_INLINE void add(std::size_t v, V values) {
    const D d;
    if constexpr (kTwoMeans) {
      // PERF: a choice between two sums becomes one masked addition on AVX-512.
      const auto value = hn::PromoteTo(d, values);
      const auto is_negative = hn::Lt(value, hn::Zero(d));
      positive[v] = hn::IfThenElse(is_negative, positive[v], hn::Add(positive[v], value));
      negative[v] = hn::IfThenElse(is_negative, hn::Add(negative[v], value), negative[v]);
    } else {
      positive[v] = hn::Add(positive[v], hn::PromoteTo(d, hn::Abs(values)));
    }
  }

  HWY_INLINE void store(BlockSums& sums) const {
    for (std::size_t v = 0; v < kVectors; ++v) {
      hn::StoreU(positive[v], D(), sums.positive + v * kStep);
      hn::StoreU(negative[v], D(), sums.negative + v * kStep);
    }
  }

  hn::Vec<D> positive[kVectors], negative[kVectors];
};

// Adds 16 values up and returns their signs, the first one in the lowest bit.
template <class Elements, bool kTwoMeans>
HWY_INLINE std::uint16_t add_sixteen(const typename Elements::Raw* values, Accumulator<kTwoMeans>& accumulator) {
  using D = hn::CappedTag<float, kLanes>;
  const D d;
  constexpr std::size_t kStep = hn::MaxLanes(D());
  std::uint32_t signs = 0;
  for (std::size_t i = 0; i < kLanes; i += kStep) {
    const auto v = Elements::load(d, values + i);
#if HWY_TARGET == HWY_SCALAR
    accumulator.add(i, v);
#else  // a vector has half as many doubles
    const hn::Half<D> half;
    accumulator.add(2 * i / kStep, hn::LowerHalf(half, v));
    accumulator.add(2 * i / kStep + 1, hn::UpperHalf(half, v));
#endif
    std::uint8_t mask_bytes[8] = {};  // StoreMaskBits may write that many
    hn::StoreMaskBits(d, hn::Lt(v, hn::Zero(d)), mask_bytes);
    signs |= static_cast<std::uint32_t>(mask_bytes[0] | mask_bytes[1] << 8) << i;
  }
  return static_cast<std::uint16_t>(signs);
}

template <class Elements, bool kTwoMeans>
HWY_INLINE BlockSums add_and_pack(const std::byte* input, std::int64_t begin, std::int64_t end, std::byte* bits) {
  using Raw = typename Elements::Raw;
  const auto* values = reinterpret_cast<const Raw*>(input) + begin;
  const std::int64_t elems = end - begin;
  BlockSums sums;
  Accumulator<kTwoMeans> accumulator(sums);
  const auto pack = [&](const Raw* sixteen, std::byte* to, std::size_t bytes) HWY_ATTR {
    const std::uint16_t signs = add_sixteen<Elements>(sixteen, accumulator);
    if constexpr (kTwoMeans) sums.negatives += std::popcount(signs);
    std::memcpy(to, &signs, bytes);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= elems; i += kLanes) pack(values + i, bits + i / 8, 2);
  if (i < elems) {
    Raw rest[kLanes] = {};  // zeros add nothing and have a sign of 0
    std::memcpy(rest, values + i, static_cast<std::size_t>(elems - i) * sizeof(Raw));
    pack(rest, bits + i / 8, static_cast<std::size_t>(elems - i + 7) / 8);
  }
  accumulator.store(sums);
  return sums;
}

template <bool kTwoMeans>
HWY_INLINE BlockSums encode_block(const std::byte* input, DType dtype, std::int64_t begin, std::int64_t end,
                                  std::byte* bits) {
  bits += begin / 8;
  if (dtype == DType::kFloat32) return add_and_pack<Fp32Elements, kTwoMeans>(input, begin, end, bits);
  if (dtype == DType::kBFloat16) return add_and_pack<Bf16Elements, kTwoMeans>(input, begin, end, bits);
  return add_and_pack<Fp16Elements, kTwoMeans>(input, begin, end, bits);
}

// Of a block: sums of its parts, part p in sum p mod kSignSums, then in a tree. One part is its own sum.
class PartSums {
 public:
  void add(std::int64_t part, double sum) {
    if (part == 0) sums_[0] = 0;
    if (part == 1) std::fill(sums_ + 1, sums_ + kSignSums, 0.0);  // most blocks have one part
    sums_[part % kSignSums] += sum;
    parts_ = part + 1;
  }
  double sum() {
    for (std::int64_t half = parts_ == 1 ? 0 : kSignSums / 2; half > 0; half /= 2) {
      for (std::int64_t i = 0; i < half; ++i) sums_[i] += sums_[i + half];
    }
    return sums_[0];
  }

 private:
  double sums_[kSignSums];
  std::int64_t parts_ = 0;
};

template <bool kTwoMeans>
void put_block(const std::byte* input, DType dtype, std::int64_t begin, std::int64_t count, SignScale scale,
               std::byte* to, std::byte* bits) {
  PartSums positive, negative;
  std::int64_t negatives = 0;
  for (std::int64_t first = 0; first < count; first += kSignPartElems) {
    const std::int64_t end = std::min(first + kSignPartElems, count), part = first / kSignPartElems;
    BlockSums sums = encode_block<kTwoMeans>(input, dtype, begin + first, begin + end, bits);
    positive.add(part, sum_of(sums.positive));
    if constexpr (kTwoMeans) negative.add(part, sum_of(sums.negative));
    negatives += sums.negatives;
  }
  float means[2] = {sign_mean(positive.sum(), count - negatives), 0};
  if constexpr (kTwoMeans) means[1] = sign_mean(negative.sum(), negatives);
  if (scale == SignScale::kNone) means[0] = sign_of_mean(means[0]);
  std::memcpy(to, means, static_cast<std::size_t>(sign_scale_bytes(scale)));
}

void Encode(const std::byte* input, DType dtype, std::int64_t elems, std::int64_t block_elems, SignScale scale,
            std::byte* scales, std::byte* bits) {
  for (std::int64_t begin = 0; begin < elems;) {
    const std::int64_t count = std::min(block_elems, elems - begin);
    scale == SignScale::kTwoMeans ? put_block<true>(input, dtype, begin, count, scale, scales, bits)
                                  : put_block<false>(input, dtype, begin, count, scale, scales, bits);
    scales += sign_scale_bytes(scale);
    begin += count;
  }
}

// One of two patterns a value, chosen by its bit.
template <bool kStreams, typename T>
HWY_INLINE void unpack_to(const std::byte* bits, std::int64_t elems, T positive, T negative, std::byte* output) {
  using D = hn::CappedTag<T, kLanes>;
  const D d;
  constexpr std::size_t kStep = hn::MaxLanes(D());
  T bit_of_lane[kStep];
  for (std::size_t i = 0; i < kStep; ++i) bit_of_lane[i] = static_cast<T>(T{1} << i);
  const auto lane_bits = hn::LoadU(d, bit_of_lane);
  const auto positives = hn::Set(d, positive);
  const auto negatives = hn::Set(d, negative);
  const auto unpack_lanes = [&](auto streams, std::uint32_t signs, T* to) HWY_ATTR {
    for (std::size_t i = 0; i < kLanes; i += kStep) {
      const auto is_negative = hn::TestBit(hn::Set(d, static_cast<T>(signs >> i)), lane_bits);
      const auto chosen = hn::IfThenElse(is_negative, negatives, positives);
      if constexpr (streams) {
        hn::Stream(chosen, d, to + i);
      } else {
        hn::StoreU(chosen, d, to + i);
      }
    }
  };
  auto* to = reinterpret_cast<T*>(output);
  std::uint16_t signs = 0;
  std::int64_t i = 0;
  for (; i + kLanes <= elems; i += kLanes) {
    std::memcpy(&signs, bits + i / 8, sizeof(signs));
    unpack_lanes(std::bool_constant<kStreams>(), signs, to + i);
  }
  if (i == elems) return;
  T rest[kLanes];
  signs = 0;
  std::memcpy(&signs, bits + i / 8, static_cast<std::size_t>(elems - i + 7) / 8);
  unpack_lanes(std::false_type(), signs, rest);
  std::memcpy(to + i, rest, static_cast<std::size_t>(elems - i) * sizeof(T));
}

template <typename T>
HWY_INLINE void unpack(const std::byte* bits, std::int64_t elems, T positive, T negative, bool streams,
                       std::byte* output) {
  streams&& is_stream_aligned(output) ? unpack_to<true>(bits, elems, positive, negative, output)
                                      : unpack_to<false>(bits, elems, positive, negative, output);
}

inline std::uint16_t narrow(float value, DType dtype) {
  return dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
}

void Decode(const std::byte* scales, const std::byte* bits, SignScale scale, std::int64_t block_elems,
            std::byte* output, DType dtype, std::int64_t elems) {
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  const bool streams = elems * elem_bytes >= kLeastStreamedBytes;
  for (std::int64_t i = 0, count = 0, block = 0; i < elems; i += count, ++block) {
    count = std::min(block_elems, elems - i);
    const auto [positive, negative] = read_sign_levels(scales, block, scale);
    if (dtype == DType::kFloat32) {
      unpack(bits + i / 8, count, std::bit_cast<std::uint32_t>(positive), std::bit_cast<std::uint32_t>(negative),
             streams, output + i * elem_bytes);
    } else {
      unpack(bits + i / 8, count, narrow(positive, dtype), narrow(negative, dtype), streams, output + i * elem_bytes);
    }
  }
  if (streams) finish_streams();
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(Encode);
HWY_EXPORT(Decode);

void sign_encode(const void* input, DType dtype, std::int64_t elems, std::int64_t block_elems, SignScale scale,
                 std::byte* scales, std::byte* bits) {
  HWY_DYNAMIC_DISPATCH(Encode)
  (static_cast<const std::byte*>(input), dtype, elems, block_elems, scale, scales, bits);
}

void sign_decode(const std::byte* scales, const std::byte* bits, SignScale scale, std::int64_t block_elems,
                 void* output, DType dtype, std::int64_t elems) {
  HWY_DYNAMIC_DISPATCH(Decode)
  (scales, bits, scale, block_elems, static_cast<std::byte*>(output), dtype, elems);
}

}  // namespace cortado
#endif

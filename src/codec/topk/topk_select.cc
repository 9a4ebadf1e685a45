// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "codec/cast/cast_kernels.h"

namespace cortado {

namespace {

constexpr std::int64_t kPieceElems = 4096;      // stays in the first-level cache
constexpr std::int64_t kSearchElems = 1 << 21;  // up to here some twenty reads of the cache beat three histograms
constexpr std::int64_t kSampledRank = 512;      // wanted of the k-th value among the sample; its error is 1 / sqrt(512)
constexpr std::int64_t kLeastEvery = 32;        // a value in 32 at most is sampled,
constexpr std::int64_t kSampleElems = 65536;    // and about this many at most
// PERF: neighbours are in one cache line; single values cost 60 ns each, out of cache, runs of 8 cost 7 ns a value.
static_assert(kSampleRun == 8);

// What is kept: all above `magnitude` and the first `ties` of it.
struct Cut {
  MagnitudeBound magnitude;
  std::int64_t ties;
};

MagnitudeBound magnitude_of(float value) {
  return static_cast<MagnitudeBound>(std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
}

// f(values, count, position of the first) for pieces in order, until it returns false.
template <class F>
void for_each_piece(ConstTensorView input, const F& f) {
  float wide[kPieceElems];
  const std::int64_t elems = input.elems();
  for (std::int64_t i = 0; i < elems; i += kPieceElems) {
    const std::int64_t count = std::min(kPieceElems, elems - i);
    const void* const piece = elements_of(input, i, count).data;
    const float* values = wide;
    if (input.dtype == DType::kFloat32) values = static_cast<const float*>(piece);
    if (input.dtype == DType::kFloat16) fp16_to_fp32(static_cast<const std::uint16_t*>(piece), count, wide);
    if (input.dtype == DType::kBFloat16) bf16_to_fp32(static_cast<const std::uint16_t*>(piece), count, wide);
    if (!f(values, count, i)) return;
  }
}

// Three digits of the magnitude, the upper one first; each pass counts the digits of those that have the ones before.
Cut histogram_cut(ConstTensorView input, std::int64_t k) {
  std::uint32_t magnitude = 0;
  int shift = 31;
  for (const int bits : {11, 10, 10}) {
    const int above = shift;
    shift -= bits;
    std::int64_t counts[1 << 11] = {};
    for_each_piece(input, [&](const float* values, std::int64_t count, std::int64_t) {
      for (std::int64_t i = 0; i < count; ++i) {
        const auto bits_of_value = static_cast<std::uint32_t>(magnitude_of(read_element<DType::kFloat32>(values, i)));
        if (bits_of_value >> above == magnitude) ++counts[bits_of_value >> shift & ((1u << bits) - 1)];
      }
      return true;
    });
    std::uint32_t digit = (1u << bits) - 1;
    while (counts[digit] < k) k -= counts[digit--];
    magnitude = magnitude << bits | digit;
  }
  return {static_cast<MagnitudeBound>(magnitude), k};
}

// The cut that keeps exactly k >= 1 of at least as many that are above `lowest`.
Cut exact_cut(ConstTensorView input, std::int64_t k, MagnitudeBound lowest) {
  if (input.dtype != DType::kFloat32 || input.elems() > kSearchElems) return histogram_cut(input, k);
  const auto* values = static_cast<const float*>(input.data);
  const MagnitudeBound bound = bound_of_largest(values, input.elems(), k, lowest);
  if (count_above(values, input.elems(), bound) == k) return {bound, 0};
  return {bound + 1, k - count_above(values, input.elems(), bound + 1)};
}

// Takes from the list, from entry `begin` on, what the cut does not keep.
void drop(KeptList& list, std::int64_t begin, Cut& cut) {
  std::int64_t kept = begin;
  for (std::int64_t i = begin; i < list.count; ++i) {
    const MagnitudeBound magnitude = magnitude_of(list.values[i]);
    const bool is_kept_tie = magnitude == cut.magnitude && cut.ties > 0;
    list.values[kept] = list.values[i];
    list.positions[kept] = list.positions[i];
    cut.ties -= is_kept_tie;
    kept += is_kept_tie || magnitude > cut.magnitude;
  }
  list.count = kept;
}

// False, with a list of no use, if there are more than `capacity`.
bool collect(ConstTensorView unit, MagnitudeBound above, std::int64_t first, std::int64_t capacity, KeptList& list) {
  const std::int64_t end = list.count + capacity;
  for_each_piece(unit, [&](const float* values, std::int64_t count, std::int64_t i) {
    list.count += collect_above(values, count, above, first + i, end - list.count, list.values + list.count,
                                list.positions + list.count);
    return list.count <= end;
  });
  return list.count <= end;
}

void collect_cut(ConstTensorView unit, Cut cut, std::int64_t first, KeptList& list) {
  for_each_piece(unit, [&](const float* values, std::int64_t count, std::int64_t i) {
    const std::int64_t begin = list.count;
    const MagnitudeBound above = cut.ties > 0 ? cut.magnitude - 1 : cut.magnitude;
    list.count += collect_above(values, count, above, first + i, count, list.values + begin, list.positions + begin);
    if (cut.ties > 0) drop(list, begin, cut);
    return true;
  });
}

// Some of a unit's values, kSampleRun neighbours at a random place of every stride of as many runs as fit.
struct Sample {
  float* values;
  std::int64_t count;
  SampleRanks ranks;
};

Sample take_sample(ConstTensorView unit, std::int64_t first, std::int64_t least, const PhiloxStream& stream,
                   float* values) {
  const std::int64_t every = sample_every(unit.elems(), least);
  const std::int64_t stride = every * kSampleRun;
  const std::int64_t runs = unit.elems() / stride;
  with_dtype(unit.dtype, [&]<DType kDType>() {
    std::array<std::uint16_t, sizeof(PhiloxBlock) / sizeof(std::uint16_t)> places{};
    for (std::int64_t i = 0; i < runs; ++i) {
      const auto j = static_cast<std::size_t>(i) % places.size();
      if (j == 0) places = std::bit_cast<decltype(places)>(stream.block(static_cast<std::uint64_t>(first + i)));
      const std::int64_t at = i * stride + (places[j] * (stride - kSampleRun + 1) >> 16);
      for (std::int64_t r = 0; r < kSampleRun; ++r) {
        values[i * kSampleRun + r] = read_element<kDType>(unit.data, at + r);
      }
    }
  });
  return {values, runs * kSampleRun, sample_ranks(every, least)};
}

// So that the sample has `rank` values above it, or more where values are equal; -1 where it has not so many.
MagnitudeBound bound_of(const Sample& sample, double rank) {
  const auto k = static_cast<std::int64_t>(std::ceil(rank));
  return k < sample.count ? bound_of_largest(sample.values, sample.count, k, -1) : -1;
}

// Where the sample misled: mostly because very many values are equal, often 0, so that is looked at first.
Cut cut_without_sample(ConstTensorView unit, std::int64_t k, MagnitudeBound bound) {
  const std::int64_t above = count_above(unit, bound + 1);
  if (above < k && k <= count_above(unit, bound)) return {bound + 1, k - above};
  return exact_cut(unit, k, -1);
}

Cut cut_of_piece(ConstTensorView unit, std::int64_t k) {
  Cut cut{};
  for_each_piece(unit, [&](const float* values, std::int64_t count, std::int64_t) {
    cut = exact_cut({values, DType::kFloat32, 1, count}, k, -1);
    return true;
  });
  return cut;
}

}  // namespace

std::int64_t sample_every(std::int64_t elems, std::int64_t least) {
  return std::max({kLeastEvery, least / kSampledRank, elems / kSampleElems});
}

SampleRanks sample_ranks(std::int64_t every, std::int64_t least) {
  const double expected = static_cast<double>(least) / static_cast<double>(every);
  // Three standard deviations to the safe side: too many candidates cost less than a second pass.
  const double first = expected + 3 * std::sqrt(expected) + 1;
  return {first, first * 1.5, first * 0.67};
}

std::int64_t most_candidates(std::int64_t elems, std::int64_t least) {
  return std::min(elems, 2 * least + 2 * kPieceElems);
}

std::int64_t count_above(ConstTensorView input, MagnitudeBound above) {
  std::int64_t sum = 0;
  for_each_piece(input, [&](const float* values, std::int64_t count, std::int64_t) {
    sum += count_above(values, count, above);
    return true;
  });
  return sum;
}

std::int64_t select_list_elems(std::int64_t elems, std::int64_t least) {
  return most_candidates(elems, least) + kCollectSlack;
}

std::int64_t select_sample_elems(std::int64_t elems) {
  // elems / kSampleElems rounds down, by at most 1 of kLeastEvery or more.
  return elems <= kUnsampledElems ? 0 : std::min(elems / kLeastEvery, kSampleElems + kSampleElems / kLeastEvery);
}

void select_largest(ConstTensorView input, std::int64_t first, std::int64_t elems, KeepRange keep,
                    const PhiloxStream& stream, KeptList& list) {
  const ConstTensorView unit = elements_of(input, first, elems);
  if (elems <= kUnsampledElems) return collect_cut(unit, cut_of_piece(unit, keep.least), first, list);

  const std::int64_t begin = list.count;
  const Sample sample = take_sample(unit, first, keep.least, stream, list.sample);
  MagnitudeBound bound = bound_of(sample, sample.ranks.first);
  for (int attempt = 0;; ++attempt) {
    const bool fits = collect(unit, bound, first, most_candidates(elems, keep.least), list);
    const std::int64_t count = list.count - begin;
    if (fits && count >= keep.least) {
      if (count <= keep.most) return;
      Cut cut = exact_cut({list.values + begin, DType::kFloat32, 1, count}, keep.least, bound);
      return drop(list, begin, cut);
    }
    list.count = begin;
    if (attempt == 1) break;
    const MagnitudeBound other = bound_of(sample, fits ? sample.ranks.wider : sample.ranks.narrower);
    if (other == bound) break;  // so many equal values that no bound between them is right
    bound = other;
  }
  collect_cut(unit, cut_without_sample(unit, keep.least, bound), first, list);
}

}  // namespace cortado

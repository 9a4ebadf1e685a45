// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "codec/rans/rans_shuffles.h"

// Ice Lake and Zen 4 compress and expand 16-bit lanes and look up bytes in 128 of them; the other targets shuffle eight
// lanes at a time and look codes up in memory.
#ifndef HWY_WANT_AVX3_DL
#define HWY_WANT_AVX3_DL
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/rans/rans_kernels.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// ---- one lane ------------------------------------------------------------------------------------------------------

constexpr std::uint32_t kFirstState = 1u << 16;

HWY_INLINE std::uint16_t load_word(const std::byte* at) {
  std::uint16_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

HWY_INLINE std::byte* encode_lane(std::uint32_t interval, std::uint32_t* state, std::byte* at) {
  const std::uint32_t frequency = interval & 0xffff, start = interval >> 16;
  if (*state >> 16 >= frequency) {
    at -= 2;
    const auto word = static_cast<std::uint16_t>(*state);
    std::memcpy(at, &word, sizeof(word));
    *state >>= 16;
  }
  *state = (*state / frequency << 16) + *state % frequency + start;
  return at;
}

// What one slot says.
struct FoundSlot {
  std::uint8_t code;
  std::uint32_t frequency, offset;
};
HWY_INLINE FoundSlot find_slot(const std::uint32_t* entries, std::uint32_t last_coarse_slot, std::uint32_t slot) {
  const std::uint32_t entry = entries[rans_entry_index(slot, last_coarse_slot)];
  const std::uint32_t first = rans_entry_first(entry), second = rans_entry_second(entry);
  const auto code = static_cast<std::uint8_t>(entry);
  if (slot > last_coarse_slot) return {code, second / 16, first / 16};
  return {code, second, slot - first};
}

// Where there is no word left, 0 is read.
HWY_INLINE const std::byte* decode_lane(const RansDecodeTable& table, const std::byte* end, std::uint32_t* state,
                                        const std::byte* at, std::uint8_t* code) {
  const FoundSlot found = find_slot(table.entries, table.last_coarse_slot, *state & 0xffff);
  *code = found.code;
  *state = found.frequency * (*state >> 16) + found.offset;
  if (*state >> 16 != 0) return at;
  *state = *state << 16 | (end - at >= 2 ? load_word(at) : 0);
  return at + 2;
}

// At most RansCounts::kMaxRecent codes.
HWY_INLINE void count_recent(const std::uint8_t* codes, std::int64_t elems, RansCounts* counts) {
  counts->make_room(elems);
  std::int64_t i = 0;
  for (; i + 16 <= elems; i += 16) counts->add<16>(codes + i);
  for (; i < elems; ++i) counts->add<1>(codes + i);
}

#if HWY_TARGET != HWY_SCALAR

// ---- 32 lanes ------------------------------------------------------------------------------------------------------

constexpr std::size_t kMaxVectorLanes = HWY_TARGET == HWY_AVX3_DL ? 32 : 16;
using U16 = hn::CappedTag<std::uint16_t, kMaxVectorLanes>;
using I16 = hn::RebindToSigned<U16>;
using U8 = hn::Repartition<std::uint8_t, U16>;
using Codes = hn::Rebind<std::uint8_t, U16>;                                // as many lanes as U16: half a vector
using Symbols = hn::CappedTag<std::uint8_t, HWY_MAX(16, kMaxVectorLanes)>;  // a table of 16, once in each 128 bits
using U32 = hn::RepartitionToWide<U16>;
using I32 = hn::RebindToSigned<U32>;
using F32 = hn::Rebind<float, U32>;
using VU16 = hn::Vec<U16>;
using VU32 = hn::Vec<U32>;
using VF32 = hn::Vec<F32>;
using Mask = hn::Mask<U16>;
constexpr std::size_t kVectorLanes = hn::MaxLanes(U16());
constexpr std::size_t kVectors = kRansLanes / kVectorLanes;
constexpr std::size_t kAtOnce = kRansChunksAtOnce;

// Lane i of vector v is lane v * kVectorLanes + i of the 32, and code number that of a group of 32 codes.
struct States {
  VU16 low[kVectors], high[kVectors];
};

HWY_INLINE std::uint32_t set_bits(std::uint32_t bits) { return static_cast<std::uint32_t>(std::popcount(bits)); }

HWY_INLINE std::uint32_t bits_of(Mask mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(U16(), mask, bytes);
  std::uint32_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

// The lanes of the mask to the words that end at `end`, in order; returns where they begin. May write up to 16 bytes
// before `end`.
HWY_INLINE std::byte* store_packed(VU16 words, Mask mask, std::byte* end) {
  const std::uint32_t bits = bits_of(mask);
#if HWY_TARGET == HWY_AVX3_DL
  const std::uint32_t count = set_bits(bits);
  hn::BlendedStore(hn::Compress(words, mask), hn::FirstN(U16(), count), U16(),
                   reinterpret_cast<std::uint16_t*>(end - 2 * count));
  return end - 2 * count;
#else
  std::uint16_t lanes[kVectorLanes];
  hn::StoreU(words, U16(), lanes);
  const hn::Full128<std::uint8_t> d8;
  for (std::size_t eighth = kVectorLanes / 8; eighth-- > 0;) {
    const std::uint32_t set = bits >> (8 * eighth) & 0xff;
    const auto shuffle = hn::Load(d8, kPackToTop[set].bytes);
    const auto part = hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(lanes + 8 * eighth));
    hn::StoreU(hn::TableLookupBytes(part, shuffle), d8, reinterpret_cast<std::uint8_t*>(end) - 16);
    end -= 2 * set_bits(set);
  }
  return end;
#endif
}

// The words at `at` spread over the lanes of the mask, in order; other lanes hold anything. Reads up to 64 bytes.
template <class D = U16>  // so that only the branch for its width is compiled
HWY_INLINE VU16 load_spread(Mask mask, const std::byte** at) {
  const std::uint32_t bits = bits_of(mask);
#if HWY_TARGET == HWY_AVX3_DL
  const VU16 words = hn::LoadU(U16(), reinterpret_cast<const std::uint16_t*>(*at));
  *at += 2 * set_bits(bits);
  return VU16{_mm512_maskz_expand_epi16(mask.raw, words.raw)};
#else
  const hn::Full128<std::uint8_t> d8;
  const auto spread = [&](std::uint32_t set) HWY_ATTR {
    const auto words = hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(*at));
    *at += 2 * set_bits(set);
    return hn::TableLookupBytes(words, hn::Load(d8, kSpread[set].bytes));
  };
  if constexpr (kVectorLanes == 8) {
    return hn::BitCast(D(), spread(bits & 0xff));
  } else {
    const auto lower = spread(bits & 0xff);
    return hn::BitCast(D(), hn::Combine(hn::Repartition<std::uint8_t, D>(), spread(bits >> 8), lower));
  }
#endif
}

// Unsigned comparisons; before AVX-512, a maximum is cheaper than flipping signs.
HWY_INLINE Mask less(VU16 a, VU16 b) {
  return HWY_TARGET <= HWY_AVX3 ? hn::Lt(a, b) : hn::Not(hn::Eq(hn::Max(a, b), a));
}
HWY_INLINE Mask at_least(VU16 a, VU16 b) {
#if HWY_TARGET == HWY_AVX3_DL
  return Mask{_mm512_cmpge_epu16_mask(a.raw, b.raw)};
#else
  return HWY_TARGET <= HWY_AVX3 ? hn::Not(hn::Lt(a, b)) : hn::Eq(hn::Max(a, b), a);
#endif
}

HWY_INLINE VU16 increment_where(Mask mask, VU16 a) { return hn::IfThenElse(mask, hn::Add(a, hn::Set(U16(), 1)), a); }
HWY_INLINE VU16 subtract_where(Mask mask, VU16 a, VU16 b) { return hn::IfThenElse(mask, hn::Sub(a, b), a); }

// Vectors that are loaded soon: put together in a register, since a load can't take its bytes from several stores that
// are still under way.
HWY_INLINE void store_four(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d, std::uint32_t* to) {
#if HWY_ARCH_X86
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_setr_epi32(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c), static_cast<int>(d)));
#else
  to[0] = a, to[1] = b, to[2] = c, to[3] = d;
#endif
}

// ---- frequencies and starts of 32 codes ----------------------------------------------------------------------------

struct Intervals {
  VU16 frequency[kVectors], start[kVectors];
};

// From 32 words with the start in the upper half.
HWY_INLINE Intervals split_intervals(const std::uint32_t* words) {
  Intervals result;
  for (std::size_t v = 0; v < kVectors; ++v) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(words + v * kVectorLanes);
    const VU16 lower = hn::LoadU(U16(), from), upper = hn::LoadU(U16(), from + kVectorLanes);
    result.frequency[v] = hn::ConcatEven(U16(), upper, lower);
    result.start[v] = hn::ConcatOdd(U16(), upper, lower);
  }
  return result;
}

// What follows looks up the codes of a group for each job: out[j] for the 32 codes at codes[j].

// In registers.
struct NarrowIntervals {
  explicit NarrowIntervals(const RansEncodeTable& table) : first_symbol(table.first_symbol) {
    for (int byte = 0; byte < 4; ++byte) tables[byte] = hn::LoadDup128(U8(), table.interval_bytes[byte]);
  }

  template <std::size_t kJobs>
  HWY_INLINE void look_up(const std::uint8_t* const (&codes)[kJobs], Intervals (&out)[kJobs]) const {
    for (std::size_t j = 0; j < kJobs; ++j) out[j] = look_up_group(codes[j]);
  }

  HWY_INLINE Intervals look_up_group(const std::uint8_t* codes) const {
    const U16 d;
    Intervals result;
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto symbols = hn::PromoteTo(d, hn::LoadU(Codes(), codes + v * kVectorLanes));
      const VU16 index = hn::Sub(symbols, hn::Set(d, first_symbol));
      const auto for_lower = hn::BitCast(U8(), hn::Or(index, hn::Set(d, 0x8000)));
      const auto for_upper = hn::BitCast(U8(), hn::Or(hn::ShiftLeft<8>(index), hn::Set(d, 0x0080)));
      const auto both = [&](int byte) HWY_ATTR {
        return hn::BitCast(d, hn::Or(hn::TableLookupBytesOr0(tables[byte], for_lower),
                                     hn::TableLookupBytesOr0(tables[byte + 1], for_upper)));
      };
      result.frequency[v] = both(0);
      result.start[v] = both(2);
    }
    return result;
  }

  hn::Vec<U8> tables[4];
  std::uint16_t first_symbol;
};

#if HWY_TARGET == HWY_AVX3_DL

// In four planes of bytes, each in four registers: two instructions look up 64 codes in half a plane each. They are
// those of two jobs, so that interleaving the bytes gives a register for either.
struct WideIntervals {
  explicit WideIntervals(const RansEncodeTable& table) : planes(table.interval_bytes) {}

  template <std::size_t kJobs>
  HWY_INLINE void look_up(const std::uint8_t* const (&codes)[kJobs], Intervals (&out)[kJobs]) const {
    for (std::size_t j = 0; j < kJobs; j += 2) {
      const std::size_t other = std::min(j + 1, kJobs - 1);
      const auto index = interleave_eights(codes[j], codes[other]);
      const auto bytes_0 = look_up_in(planes[0], index), bytes_1 = look_up_in(planes[1], index);
      const auto bytes_2 = look_up_in(planes[2], index), bytes_3 = look_up_in(planes[3], index);
      out[j].frequency[0] = hn::BitCast(U16(), hn::InterleaveLower(U8(), bytes_0, bytes_1));
      out[j].start[0] = hn::BitCast(U16(), hn::InterleaveLower(U8(), bytes_2, bytes_3));
      out[other].frequency[0] = hn::BitCast(U16(), hn::InterleaveUpper(U8(), bytes_0, bytes_1));
      out[other].start[0] = hn::BitCast(U16(), hn::InterleaveUpper(U8(), bytes_2, bytes_3));
    }
  }

  // Eight codes of a, eight of b, and so on.
  static HWY_INLINE hn::Vec<U8> interleave_eights(const std::uint8_t* a, const std::uint8_t* b) {
    const auto load = [](const std::uint8_t* codes) HWY_ATTR {
      return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    };
    return hn::Vec<U8>{_mm512_permutex2var_epi64(load(a), _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), load(b))};
  }

  static HWY_INLINE hn::Vec<U8> look_up_in(const std::uint8_t (&plane)[256], hn::Vec<U8> index) {
    const auto in_half = [&](const std::uint8_t* half) HWY_ATTR {
      return hn::Vec<U8>{_mm512_permutex2var_epi8(hn::Load(U8(), half).raw, index.raw, hn::Load(U8(), half + 64).raw)};
    };
    const hn::Mask<U8> is_upper{_mm512_movepi8_mask(index.raw)};
    return hn::IfThenElse(is_upper, in_half(plane + 128), in_half(plane));
  }

  const std::uint8_t (*planes)[256];
};

#else

// In memory, one by one: quicker than gather instructions on most machines.
struct WideIntervals {
  explicit WideIntervals(const RansEncodeTable& table) : intervals(table.intervals.data()) {}

  template <std::size_t kJobs>
  HWY_INLINE void look_up(const std::uint8_t* const (&codes)[kJobs], Intervals (&out)[kJobs]) const {
    alignas(64) std::uint32_t words[kJobs][kRansLanes];
    for (std::size_t j = 0; j < kJobs; ++j) {
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kRansLanes; i += 4) {
        const std::uint8_t* at = codes[j] + i;
        store_four(intervals[at[0]], intervals[at[1]], intervals[at[2]], intervals[at[3]], words[j] + i);
      }
    }
    for (std::size_t j = 0; j < kJobs; ++j) out[j] = split_intervals(words[j]);
  }

  const std::uint32_t* intervals;
};

#endif

// ---- encode --------------------------------------------------------------------------------------------------------

// floor(state / frequency), or one less; it is below 2^16. Adding 2^23 - 1 leaves the rounded sum less 1 in the lower
// bits of a float; the division errs by less than 2^-6.
HWY_INLINE VU16 estimate_quotient(VU16 low, VU16 high, VU16 frequency) {
  const U32 d32;
  const F32 df;
  const VU32 low32 = hn::BitCast(d32, low), high32 = hn::BitCast(d32, high), frequency32 = hn::BitCast(d32, frequency);
  const VU32 lower_half = hn::Set(d32, 0xffff);
  const auto divide = [&](VU32 state, VU32 by) HWY_ATTR {
    const VF32 dividend = hn::ConvertTo(df, state), divisor = hn::ConvertTo(df, hn::BitCast(I32(), by));
#if HWY_TARGET <= HWY_AVX3
    // A reciprocal of 14 bits and a Newton step are quicker than a division, and as good here.
    const VF32 rough = hn::ApproximateReciprocal(divisor);
    const VF32 reciprocal = hn::MulAdd(rough, hn::NegMulAdd(divisor, rough, hn::Set(df, 1)), rough);
    return hn::BitCast(d32, hn::MulAdd(dividend, reciprocal, hn::Set(df, 0x1p23f - 1)));
#else
    return hn::BitCast(d32, hn::Add(hn::Div(dividend, divisor), hn::Set(df, 0x1p23f - 1)));
#endif
  };
  const VU32 even =
      divide(hn::Or(hn::ShiftLeft<16>(high32), hn::And(low32, lower_half)), hn::And(frequency32, lower_half));
  const VU32 odd =
      divide(hn::Or(hn::AndNot(lower_half, high32), hn::ShiftRight<16>(low32)), hn::ShiftRight<16>(frequency32));
  return hn::BitCast(U16(), hn::Or(hn::And(even, lower_half), hn::ShiftLeft<16>(odd)));
}

// One chunk being encoded.
struct Writer {
  States states;
  std::byte* at;
};

// kHalf: no frequency is above half the total, so that what a division leaves, less than two frequencies, has 16 bits.
template <bool kHalf>
HWY_INLINE void encode_group(const Intervals& intervals, Writer* writer) {
  for (std::size_t v = kVectors; v-- > 0;) {
    const VU16 frequency = intervals.frequency[v];
    VU16 low = writer->states.low[v], high = writer->states.high[v];
    const Mask is_full = at_least(high, frequency);
    writer->at = store_packed(low, is_full, writer->at);
    low = hn::IfThenElse(is_full, high, low);
    high = hn::IfThenZeroElse(is_full, high);

    const VU16 estimate = estimate_quotient(low, high, frequency);
    const VU16 product = hn::Mul(estimate, frequency);
    const VU16 rest_low = hn::Sub(low, product);
    Mask is_short = at_least(rest_low, frequency);
    if constexpr (!kHalf) {
      const VU16 product_high = increment_where(less(low, product), hn::MulHigh(estimate, frequency));
      is_short = hn::Or(is_short, hn::Ne(high, product_high));
    }
    writer->states.high[v] = increment_where(is_short, estimate);
    writer->states.low[v] = hn::Add(intervals.start[v], subtract_where(is_short, rest_low, frequency));
  }
}

// The states lie in memory lane by lane.
HWY_INLINE States load_states(const std::byte* bytes) {
  std::uint32_t words[kRansLanes];
  std::memcpy(words, bytes, sizeof(words));
  const Intervals planes = split_intervals(words);
  States states;
  for (std::size_t v = 0; v < kVectors; ++v) {
    states.low[v] = planes.frequency[v];
    states.high[v] = planes.start[v];
  }
  return states;
}

HWY_INLINE void store_states(const States& states, std::uint32_t* words) {
  std::uint16_t low[kRansLanes], high[kRansLanes];
  for (std::size_t v = 0; v < kVectors; ++v) {
    hn::StoreU(states.low[v], U16(), low + v * kVectorLanes);
    hn::StoreU(states.high[v], U16(), high + v * kVectorLanes);
  }
  for (std::int64_t i = 0; i < kRansLanes; ++i) words[i] = static_cast<std::uint32_t>(high[i]) << 16 | low[i];
}

template <std::size_t kJobs, bool kHalf, class Lookup>
HWY_INLINE void encode_jobs(const RansEncodeTable& table, const Lookup& lookup, RansEncodeJob* jobs) {
  const std::int64_t groups = jobs[0].elems / kRansLanes;
  Writer writers[kJobs];
  for (std::size_t j = 0; j < kJobs; ++j) {
    std::uint32_t words[kRansLanes];
    for (std::uint32_t& word : words) word = kFirstState;
    std::byte* at = jobs[j].room_end;
    for (std::int64_t i = jobs[j].elems; i-- > groups * kRansLanes;) {
      at = encode_lane(table.intervals[jobs[j].codes[i]], &words[i % kRansLanes], at);
    }
    writers[j] = {load_states(reinterpret_cast<const std::byte*>(words)), at};
  }
  for (std::int64_t g = groups; g-- > 0;) {
    const std::uint8_t* codes[kJobs];
    for (std::size_t j = 0; j < kJobs; ++j) codes[j] = jobs[j].codes + g * kRansLanes;
    Intervals intervals[kJobs];
    lookup.look_up(codes, intervals);
    for (std::size_t j = 0; j < kJobs; ++j) encode_group<kHalf>(intervals[j], &writers[j]);
  }
  for (std::size_t j = 0; j < kJobs; ++j) {
    std::uint32_t words[kRansLanes];
    store_states(writers[j].states, words);
    jobs[j].begin = writers[j].at - kRansStateBytes;
    std::memcpy(jobs[j].begin, words, sizeof(words));
  }
}

// ---- decode --------------------------------------------------------------------------------------------------------

// What a slot says: the symbol's frequency and the slot's distance from its start. The symbols go to `codes`.
struct Found {
  VU16 frequency[kVectors], offset[kVectors];
};

// Bisects the starts in registers, four levels for 16 symbols. Signed comparisons, which all targets have: slots and
// starts have their upper bit flipped, and the difference of two such is that of the originals.
struct NarrowSymbols {
  explicit NarrowSymbols(const RansDecodeTable& table) {
    std::uint16_t level_3[8] = {}, level_4[8], lower_start[8], lower_frequency[8], upper_frequency[8];
    const auto flipped = [&](int i) { return static_cast<std::uint16_t>(table.starts[i] ^ 0x8000); };
    for (int i = 0; i < 8; ++i) {
      if (i % 2 == 0) level_3[i] = flipped(2 * i + 2);
      level_4[i] = flipped(2 * i + 1);
      lower_start[i] = flipped(2 * i);
      lower_frequency[i] = table.frequencies[2 * i];
      upper_frequency[i] = table.frequencies[2 * i + 1];
    }
    const auto load = [](const std::uint16_t* words)
                          HWY_ATTR { return hn::BitCast(U8(), hn::LoadDup128(U16(), words)); };
    start_8 = hn::Set(U16(), flipped(8));
    start_4 = hn::Set(U16(), flipped(4));
    start_12 = hn::Set(U16(), flipped(12));
    level_3_starts = load(level_3);
    level_4_starts = load(level_4);
    lower_starts = load(lower_start);
    lower_frequencies = load(lower_frequency);
    upper_frequencies = load(upper_frequency);
    symbols = hn::LoadDup128(Symbols(), table.symbols);
  }

  HWY_INLINE void fetch(const States&, std::uint32_t*) const {}

  HWY_INLINE Found find(const States& states, const std::uint32_t*, std::uint8_t* codes) const {
    const U16 d;
    Found found;
    for (std::size_t v = 0; v < kVectors; ++v) {
      const VU16 slot = hn::Xor(states.low[v], hn::Set(d, 0x8000));
      const auto below = [&](VU16 start) HWY_ATTR {
        return hn::RebindMask(d, hn::Lt(hn::BitCast(I16(), slot), hn::BitCast(I16(), start)));
      };
      // Byte indices of a 16-bit table entry i: 2 i and 2 i + 1.
      const auto lookup = [&](hn::Vec<U8> entries, VU16 index) HWY_ATTR {
        return hn::BitCast(d, hn::TableLookupBytes(entries, hn::BitCast(U8(), index)));
      };
      const Mask below_8 = below(start_8);
      const Mask below_half = below(hn::IfThenElse(below_8, start_4, start_12));
      const VU16 half = hn::IfThenElse(below_8, hn::Set(d, 0x0100), hn::Set(d, 0x0908));
      const VU16 quarter = hn::IfThenElse(below_half, half, hn::Add(half, hn::Set(d, 0x0404)));
      const Mask below_quarter = below(lookup(level_3_starts, quarter));
      const VU16 pair = hn::IfThenElse(below_quarter, quarter, hn::Add(quarter, hn::Set(d, 0x0202)));
      const VU16 upper_start = lookup(level_4_starts, pair);
      const Mask is_lower = below(upper_start);
      const VU16 start = hn::IfThenElse(is_lower, lookup(lower_starts, pair), upper_start);
      found.frequency[v] = hn::IfThenElse(is_lower, lookup(lower_frequencies, pair), lookup(upper_frequencies, pair));
      found.offset[v] = hn::Sub(slot, start);

      const VU16 lower_number = hn::And(pair, hn::Set(d, 0x000f));
      const VU16 number = hn::IfThenElse(is_lower, lower_number, hn::Add(lower_number, hn::Set(d, 1)));
      const auto narrow = hn::DemoteTo(Codes(), hn::BitCast(I16(), number));
      hn::StoreU(hn::TableLookupBytes(symbols, narrow), Codes(), codes + v * kVectorLanes);
    }
    return found;
  }

  VU16 start_8, start_4, start_12;
  hn::Vec<U8> level_3_starts, level_4_starts, lower_starts, lower_frequencies, upper_frequencies;
  hn::Vec<Symbols> symbols;
};

// Looks slots up in memory, one by one.
struct WideSymbols {
  explicit WideSymbols(const RansDecodeTable& table)
      : entries(table.entries), last_coarse_slot(hn::Set(U16(), table.last_coarse_slot)) {}

  HWY_INLINE void fetch(const States& states, std::uint32_t* fetched) const {
    std::uint16_t indices[kRansLanes];
    for (std::size_t v = 0; v < kVectors; ++v) {
      const VU16 slot = states.low[v];
      const VU16 coarse = hn::ShiftRight<4>(hn::Min(slot, last_coarse_slot));
      const VU16 index = hn::Add(coarse, hn::SaturatedSub(slot, last_coarse_slot));
      hn::StoreU(index, U16(), indices + v * kVectorLanes);
    }
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kRansLanes; i += 4) {
      std::uint64_t four;
      std::memcpy(&four, indices + i, sizeof(four));
      store_four(entries[four & 0xffff], entries[four >> 16 & 0xffff], entries[four >> 32 & 0xffff],
                 entries[four >> 48], fetched + i);
    }
  }

  HWY_INLINE Found find(const States& states, const std::uint32_t* fetched, std::uint8_t* codes) const {
    const U16 d;
    const Intervals halves = split_intervals(fetched);
    Found found;
    for (std::size_t v = 0; v < kVectors; ++v) {
      const VU16 lower = halves.frequency[v], upper = halves.start[v], slot = states.low[v];
      const VU16 first = hn::IfVecThenElse(hn::Set(d, 0xff00), lower, hn::ShiftLeft<4>(upper));
      const VU16 second = hn::And(upper, hn::Set(d, 0xfff0));
      const Mask is_rare = less(last_coarse_slot, slot);
      found.frequency[v] = hn::IfThenElse(is_rare, hn::ShiftRight<4>(second), second);
      found.offset[v] = hn::IfThenElse(is_rare, hn::ShiftRight<4>(first), hn::Sub(slot, first));
      store_bytes(hn::And(lower, hn::Set(d, 0x00ff)), codes + v * kVectorLanes);
    }
    return found;
  }

  static HWY_INLINE void store_bytes(VU16 codes, std::uint8_t* to) {
    hn::StoreU(hn::DemoteTo(Codes(), hn::BitCast(I16(), codes)), Codes(), to);
  }

  const std::uint32_t* entries;
  VU16 last_coarse_slot;
};

// Most slots belong to 16 symbols. All are looked up in registers as if there were no others; lanes for which that is
// wrong are corrected one by one.
struct MostlyNarrowSymbols {
  explicit MostlyNarrowSymbols(const RansDecodeTable& table)
      : narrow(table),
        first_slot(hn::Set(U16(), table.starts[0])),
        narrow_slots(hn::Set(U16(), static_cast<std::uint16_t>(table.narrow_slots))),
        entries(table.entries),
        last_coarse_slot(table.last_coarse_slot) {}

  HWY_INLINE void fetch(const States&, std::uint32_t*) const {}

  HWY_INLINE Found find(const States& states, const std::uint32_t* fetched, std::uint8_t* codes) const {
    Found found = narrow.find(states, fetched, codes);
    for (std::size_t v = 0; v < kVectors; ++v) {
      const Mask others = at_least(hn::Sub(states.low[v], first_slot), narrow_slots);
      if (HWY_LIKELY(hn::AllFalse(U16(), others))) continue;
      std::uint16_t lanes[kVectorLanes];
      hn::StoreU(states.low[v], U16(), lanes);
      for (std::uint32_t left = bits_of(others); left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        const FoundSlot other = find_slot(entries, last_coarse_slot, lanes[lane]);
        const Mask here = hn::Eq(hn::Iota(U16(), 0), hn::Set(U16(), static_cast<std::uint16_t>(lane)));
        const auto put = [&](std::uint32_t value, VU16* to) HWY_ATTR {
          *to = hn::IfThenElse(here, hn::Set(U16(), static_cast<std::uint16_t>(value)), *to);
        };
        put(other.frequency, &found.frequency[v]);
        put(other.offset, &found.offset[v]);
        codes[v * kVectorLanes + static_cast<std::size_t>(lane)] = other.code;
      }
    }
    return found;
  }

  NarrowSymbols narrow;
  VU16 first_slot, narrow_slots;
  const std::uint32_t* entries;
  std::uint32_t last_coarse_slot;
};

// One chunk being decoded.
struct Reader {
  States states;
  const std::byte* at;
  std::uint8_t* codes;
};

template <class Lookup>
HWY_INLINE void decode_group(const Lookup& lookup, const std::uint32_t* fetched, Reader* reader) {
  const U16 d;
  const Found found = lookup.find(reader->states, fetched, reader->codes);
  for (std::size_t v = 0; v < kVectors; ++v) {
    const VU16 frequency = found.frequency[v], high = reader->states.high[v];
    const VU16 product = hn::Mul(frequency, high);
    const VU16 low = hn::Add(product, found.offset[v]);
    const VU16 next = increment_where(less(low, product), hn::MulHigh(frequency, high));
    const Mask is_short = hn::Eq(next, hn::Zero(d));
    const VU16 words = load_spread(is_short, &reader->at);
    reader->states.high[v] = hn::IfThenElse(is_short, low, next);
    reader->states.low[v] = hn::IfThenElse(is_short, words, low);
  }
  reader->codes += kRansLanes;
}

constexpr std::ptrdiff_t kGroupReadBytes = 2 * kRansLanes;  // what a group may read

// The groups from `group` on, the last ones from a copy of the readable bytes with room behind, then single lanes.
template <class Lookup>
HWY_INLINE void finish_job(const RansDecodeTable& table, const Lookup& lookup, const std::byte* readable_end,
                           std::int64_t group, Reader* reader, RansDecodeJob* job) {
  const std::int64_t groups = job->elems / kRansLanes;
  const auto one_group = [&]() HWY_ATTR {
    alignas(64) std::uint32_t fetched[kRansLanes];
    lookup.fetch(reader->states, fetched);
    decode_group(lookup, fetched, reader);
  };
  for (; group < groups && readable_end - reader->at >= kGroupReadBytes; ++group) one_group();
  std::byte rest[2 * kGroupReadBytes] = {};
  const std::byte* at = reader->at;
  if (group < groups) {
    std::memcpy(rest, at, static_cast<std::size_t>(readable_end - at));
    reader->at = rest;
    for (; group < groups && reader->at <= rest + kGroupReadBytes; ++group) one_group();
    at += reader->at - rest;
  }
  std::uint32_t words[kRansLanes];
  store_states(reader->states, words);
  // After an overrun the codes left are decoded too, from zeros.
  for (std::int64_t i = group * kRansLanes; i < job->elems; ++i) {
    at = decode_lane(table, job->end, &words[i % kRansLanes], at, &job->codes[i]);
  }
  job->is_whole = at == job->end;
  for (const std::uint32_t word : words) job->is_whole = job->is_whole && word == kFirstState;
}

template <std::size_t kJobs, class Lookup>
HWY_INLINE void decode_jobs(const RansDecodeTable& table, const Lookup& lookup, const std::byte* readable_end,
                            RansDecodeJob* jobs) {
  const Lookup in_registers = lookup;
  Reader readers[kJobs];
  for (std::size_t j = 0; j < kJobs; ++j) {
    readers[j] = {load_states(jobs[j].begin), jobs[j].begin + kRansStateBytes, jobs[j].codes};
  }
  std::int64_t group = 0;
  if (kJobs > 1) {
    const std::int64_t groups = jobs[0].elems / kRansLanes;
    for (; group < groups; ++group) {
      bool is_readable = true;
      for (const Reader& reader : readers) is_readable &= readable_end - reader.at >= kGroupReadBytes;
      if (!is_readable) break;
      alignas(64) std::uint32_t fetched[kJobs][kRansLanes];
#pragma GCC unroll 8
      for (std::size_t j = 0; j < kJobs; ++j) in_registers.fetch(readers[j].states, fetched[j]);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < kJobs; ++j) decode_group(in_registers, fetched[j], &readers[j]);
    }
  }
  for (std::size_t j = 0; j < kJobs; ++j) finish_job(table, in_registers, readable_end, group, &readers[j], &jobs[j]);
}

// Calls run(n, jobs), n a std::integral_constant, for n jobs that have equally many codes: four, else two, else one.
template <class Job, class Run>
HWY_INLINE void in_groups(std::span<Job> jobs, const Run& run) {
  const auto are_equal = [&](std::size_t count) {
    return jobs.size() >= count &&
           std::all_of(jobs.begin(), jobs.begin() + count, [&](const Job& job) { return job.elems == jobs[0].elems; });
  };
  while (!jobs.empty()) {
    const std::size_t count = are_equal(kAtOnce) ? kAtOnce : are_equal(2) ? 2 : 1;
    if (count == kAtOnce) run(std::integral_constant<std::size_t, kAtOnce>(), jobs.data());
    if (count == 2) run(std::integral_constant<std::size_t, 2>(), jobs.data());
    if (count == 1) run(std::integral_constant<std::size_t, 1>(), jobs.data());
    jobs = jobs.subspan(count);
  }
}

template <class Lookup, bool kHalf>
void encode_with(const RansEncodeTable& table, std::span<RansEncodeJob> jobs) {
  const Lookup lookup(table);
  in_groups(jobs, [&](auto count, RansEncodeJob* group) HWY_ATTR { encode_jobs<count, kHalf>(table, lookup, group); });
}

template <class Lookup>
void decode_with(const RansDecodeTable& table, std::span<RansDecodeJob> jobs, const std::byte* readable_end) {
  const Lookup lookup(table);
  in_groups(jobs,
            [&](auto count, RansDecodeJob* group) HWY_ATTR { decode_jobs<count>(table, lookup, readable_end, group); });
}

void EncodeChunks(const RansEncodeTable& table, std::span<RansEncodeJob> jobs) {
  if (table.is_narrow) {
    return table.is_half ? encode_with<NarrowIntervals, true>(table, jobs)
                         : encode_with<NarrowIntervals, false>(table, jobs);
  }
  table.is_half ? encode_with<WideIntervals, true>(table, jobs) : encode_with<WideIntervals, false>(table, jobs);
}

void DecodeChunks(const RansDecodeTable& table, std::span<RansDecodeJob> jobs, const std::byte* readable_end) {
  if (table.is_narrow()) return decode_with<NarrowSymbols>(table, jobs, readable_end);
  table.is_mostly_narrow() ? decode_with<MostlyNarrowSymbols>(table, jobs, readable_end)
                           : decode_with<WideSymbols>(table, jobs, readable_end);
}

// ---- count ---------------------------------------------------------------------------------------------------------

using Bytes = hn::CappedTag<std::uint8_t, 64>;
using VBytes = hn::Vec<Bytes>;
constexpr std::int64_t kByteLanes = hn::MaxLanes(Bytes());
constexpr std::int64_t kBlockCodes = 255 * kByteLanes;  // so that counters of one byte suffice
static_assert(kBlockCodes <= RansCounts::kMaxRecent);

// How often `symbol` ... `symbol + 3` are among the codes; elems is a multiple of kByteLanes.
HWY_INLINE void count_four(const std::uint8_t* codes, std::int64_t elems, int symbol, std::uint64_t* counts) {
  const Bytes d;
  const VBytes one = hn::Set(d, 1);
  VBytes sums[4], symbols[4];
  for (int i = 0; i < 4; ++i) {
    sums[i] = hn::Zero(d);
    symbols[i] = hn::Set(d, static_cast<std::uint8_t>(symbol + i));
  }
  for (std::int64_t i = 0; i < elems; i += kByteLanes) {
    const VBytes values = hn::LoadU(d, codes + i);
    for (int j = 0; j < 4; ++j) {
      sums[j] = hn::IfThenElse(hn::Eq(values, symbols[j]), hn::Add(sums[j], one), sums[j]);
    }
  }
  for (int i = 0; i < 4 && symbol + i < 256; ++i) {
    const hn::Repartition<std::uint64_t, Bytes> d64;
    counts[symbol + i] += hn::GetLane(hn::SumOfLanes(d64, hn::SumsOf8(sums[i])));
  }
}

void CountCodes(const std::uint8_t* codes, std::int64_t elems, RansCounts* counts) {
  const Bytes d;
  while (elems >= kByteLanes) {
    const std::int64_t block = std::min(kBlockCodes, elems / kByteLanes * kByteLanes);
    VBytes least = hn::LoadU(d, codes), most = least;
    for (std::int64_t i = 0; i < block; i += kByteLanes) {
      const VBytes values = hn::LoadU(d, codes + i);
      least = hn::Min(least, values);
      most = hn::Max(most, values);
    }
    std::uint8_t lanes[2 * kByteLanes];
    hn::StoreU(least, d, lanes);
    hn::StoreU(most, d, lanes + kByteLanes);
    const int first = *std::min_element(lanes, lanes + kByteLanes);
    const int last = *std::max_element(lanes + kByteLanes, lanes + 2 * kByteLanes);
    if (last - first < kRansNarrow) {
      for (int symbol = first; symbol <= last; symbol += 4) count_four(codes, block, symbol, counts->sums);
    } else {
      count_recent(codes, block, counts);
    }
    codes += block;
    elems -= block;
  }
  count_recent(codes, elems, counts);
}

#else  // HWY_TARGET == HWY_SCALAR

void CountCodes(const std::uint8_t* codes, std::int64_t elems, RansCounts* counts) {
  for (; elems > 0; elems -= RansCounts::kMaxRecent, codes += RansCounts::kMaxRecent) {
    count_recent(codes, std::min(elems, RansCounts::kMaxRecent), counts);
  }
}

void EncodeChunks(const RansEncodeTable& table, std::span<RansEncodeJob> jobs) {
  for (RansEncodeJob& job : jobs) {
    std::uint32_t words[kRansLanes];
    for (std::uint32_t& word : words) word = kFirstState;
    std::byte* at = job.room_end;
    for (std::int64_t i = job.elems; i-- > 0;) {
      at = encode_lane(table.intervals[job.codes[i]], &words[i % kRansLanes], at);
    }
    job.begin = at - kRansStateBytes;
    std::memcpy(job.begin, words, sizeof(words));
  }
}

void DecodeChunks(const RansDecodeTable& table, std::span<RansDecodeJob> jobs, const std::byte*) {
  for (RansDecodeJob& job : jobs) {
    std::uint32_t words[kRansLanes];
    std::memcpy(words, job.begin, sizeof(words));
    const std::byte* at = job.begin + kRansStateBytes;
    for (std::int64_t i = 0; i < job.elems; ++i) {
      at = decode_lane(table, job.end, &words[i % kRansLanes], at, &job.codes[i]);
    }
    job.is_whole = at == job.end;
    for (const std::uint32_t word : words) job.is_whole = job.is_whole && word == kFirstState;
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(EncodeChunks);
HWY_EXPORT(DecodeChunks);
HWY_EXPORT(CountCodes);

void rans_encode_chunks(const RansEncodeTable& table, std::span<RansEncodeJob> jobs) {
  HWY_DYNAMIC_DISPATCH(EncodeChunks)(table, jobs);
}
void rans_decode_chunks(const RansDecodeTable& table, std::span<RansDecodeJob> jobs, const std::byte* readable_end) {
  HWY_DYNAMIC_DISPATCH(DecodeChunks)(table, jobs, readable_end);
}

void rans_count(const std::uint8_t* codes, std::int64_t elems, RansCounts* counts) {
  HWY_DYNAMIC_DISPATCH(CountCodes)(codes, elems, counts);
}

void RansCounts::settle() {
  for (std::size_t code = 0; code < 256; ++code) {
    for (auto& counters : recent) sums[code] += std::exchange(counters[code], std::uint16_t{0});
  }
  recent_codes = 0;
}

}  // namespace cortado
#endif

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The model of a message: how often each symbol occurs, in parts of 2^16, and what encoder and decoder look up.
//
// A frequency is either below 16 (a rare symbol) or a multiple of 16, and the slots of rare symbols come last. So one
// small table tells the symbol of every slot: an entry for each 16 slots up to the rare ones, then one for each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cortado {

constexpr std::uint32_t kRansTotal = 1u << 16;
constexpr std::uint32_t kRansCoarse = 16;
constexpr int kRansNarrow = 16;  // alphabets of so many symbols fit the tables of a byte shuffle
// Of an alphabet with more, 16 that have so many slots are worth it: looking all codes up in memory is as quick at
// 65290 slots with AVX-512 and at 65050 with AVX2. At 65280, 88 % of groups of 32 codes hold no other symbol.
constexpr std::uint32_t kRansMostlyNarrow = 65280;

// Of symbols 0 to 255: they add up to kRansTotal, at least two are not 0, and each is below kRansCoarse or a multiple
// of it.
using RansFrequencies = std::array<std::uint16_t, 256>;

// At least two counts are not 0, and their sum is below 2^47. A symbol that occurs has a frequency of at least 1.
RansFrequencies rans_frequencies(const std::uint64_t counts[256]);

// The least and the greatest symbol that occur.
struct RansRange {
  std::size_t first, last;
};
RansRange rans_range(const RansFrequencies& frequencies);

// The slots of a symbol are start ... start + frequency - 1; both in one word, start in the upper half.
using RansIntervals = std::array<std::uint32_t, 256>;

struct RansEncodeTable {
  RansIntervals intervals;
  bool is_narrow;             // all symbols lie within first_symbol ... first_symbol + 15
  bool is_half;               // no frequency is above half of kRansTotal
  std::uint8_t first_symbol;  // 0 if not narrow
  // Lowest bytes first: those of the interval of first_symbol + i.
  alignas(64) std::uint8_t interval_bytes[4][256];
};

RansEncodeTable make_rans_encode_table(const RansFrequencies& frequencies);

struct RansDecodeTable {
  static constexpr std::size_t kMaxEntries = kRansTotal / kRansCoarse + 255 * (kRansCoarse - 1);
  std::uint32_t entries[kMaxEntries];
  std::uint16_t last_coarse_slot;  // slots above it belong to rare symbols

  // At most 16 symbols whose slots follow one another: all that occur, or the 16 that have the most slots together.
  // Places that are left repeat the last one.
  std::uint8_t symbols[kRansNarrow];
  std::uint16_t starts[kRansNarrow];
  std::uint16_t frequencies[kRansNarrow];
  std::uint32_t narrow_slots;  // of these symbols together

  bool is_narrow() const { return narrow_slots == kRansTotal; }
  bool is_mostly_narrow() const { return narrow_slots >= kRansMostlyNarrow; }
};

void make_rans_decode_table(const RansFrequencies& frequencies, RansDecodeTable* table);

// Where the entry of a slot is.
constexpr std::uint32_t rans_entry_index(std::uint32_t slot, std::uint32_t last_coarse_slot) {
  return slot <= last_coarse_slot ? slot / kRansCoarse : last_coarse_slot / kRansCoarse + (slot - last_coarse_slot);
}

// An entry: a symbol and two numbers, multiples of 16 below 2^16. They are the symbol's start and frequency; in the
// entry of a rare symbol, 16 times the slot's distance from start, and 16 times the frequency.
// Bits 0-7: symbol; 8-15, 16-19: upper and lower bits of the first number; 20-31: the second.
constexpr std::uint32_t rans_entry(std::uint32_t symbol, std::uint32_t first, std::uint32_t second) {
  return symbol | (first & 0xff00) | (first >> 4 & 0xf) << 16 | second << 16;
}
constexpr std::uint32_t rans_entry_first(std::uint32_t entry) { return (entry & 0xff00) | (entry >> 12 & 0xf0); }
constexpr std::uint32_t rans_entry_second(std::uint32_t entry) { return entry >> 16 & 0xfff0; }

}  // namespace cortado

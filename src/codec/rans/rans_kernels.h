// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Chunks of codes to streams of 16-bit words and back, by 32 interleaved rANS coders; spec.md says what the bytes are.
//
// A state x has 32 bits and is kept as two planes, high = x >> 16 and low = x & 0xffff. As frequencies add up to 2^16,
// `low` is the slot, which names the symbol, and decoding it is x = frequency * high + low - start: 16-bit arithmetic,
// all 32 lanes in one AVX-512 register. Chunks know nothing of each other; four are in hand at a time, so that the
// latency of one hides behind the work of the others.
#pragma once

#include <cstdint>
#include <span>

#include "codec/rans/rans_table.h"

namespace cortado {

constexpr std::int64_t kRansLanes = 32;
constexpr std::int64_t kRansChunksAtOnce = 4;
constexpr std::uint64_t kRansStateBytes = 4 * kRansLanes;  // before the words of a chunk

// The most bytes one chunk of `elems` codes can take.
constexpr std::uint64_t max_rans_chunk_bytes(std::int64_t elems) {
  return kRansStateBytes + 2 * static_cast<std::uint64_t>(elems);
}

struct RansEncodeJob {
  const std::uint8_t* codes;
  std::int64_t elems;
  std::byte* room_end;         // the chunk is written before it; max_rans_chunk_bytes(elems) are there
  std::byte* begin = nullptr;  // out: where the chunk begins

  std::uint64_t bytes() const { return static_cast<std::uint64_t>(room_end - begin); }
};

// Precondition: every code of every job has a frequency.
void rans_encode_chunks(const RansEncodeTable& table, std::span<RansEncodeJob> jobs);

struct RansDecodeJob {
  const std::byte* begin;  // at least kRansStateBytes before `end`
  const std::byte* end;
  std::uint8_t* codes;
  std::int64_t elems;
  bool is_whole = false;  // out: the words were used up and all states came home
};

// Bytes from a chunk's end to `readable_end` may be read, though nothing depends on them. `codes` are written whatever
// the bytes are: an unlawful stream gives other codes of the table.
void rans_decode_chunks(const RansDecodeTable& table, std::span<RansDecodeJob> jobs, const std::byte* readable_end);

// How often each code occurs, counted piece by piece. Adding to a counter has to wait for the addition before, and
// equal codes often follow one another: four small counters for each code, taken in turn, and now and then their sums.
struct RansCounts {
  static constexpr std::int64_t kMaxRecent = 65535;

  std::uint64_t sums[256] = {};
  std::uint16_t recent[4][256] = {};
  std::int64_t recent_codes = 0;  // at most kMaxRecent

  // Adds the small counters to the sums, which are then those of all codes counted.
  void settle();
  // Before add() for so many codes, at most kMaxRecent.
  void make_room(std::int64_t elems) {
    if (recent_codes + elems > kMaxRecent) settle();
    recent_codes += elems;
  }
  template <std::int64_t kElems>
  void add(const std::uint8_t* codes) {
    for (std::int64_t i = 0; i < kElems; ++i) ++recent[i % 4][codes[i]];
  }
};

// Adds any number of codes.
void rans_count(const std::uint8_t* codes, std::int64_t elems, RansCounts* counts);

}  // namespace cortado

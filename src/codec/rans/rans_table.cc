// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans_table.h"

#include <algorithm>

namespace cortado {

namespace {

bool is_rare(std::uint32_t frequency) { return frequency < kRansCoarse; }

// Calls each(symbol, start, frequency) for the symbols that occur, in the order of their slots.
template <typename Each>
void for_each_interval(const RansFrequencies& frequencies, const Each& each) {
  std::uint32_t start = 0;
  for (const bool rare : {false, true}) {
    for (std::uint32_t symbol = 0; symbol < 256; ++symbol) {
      const std::uint32_t frequency = frequencies[symbol];
      if (frequency == 0 || is_rare(frequency) != rare) continue;
      each(symbol, start, frequency);
      start += frequency;
    }
  }
}

RansIntervals intervals_of(const RansFrequencies& frequencies) {
  RansIntervals intervals = {};
  for_each_interval(frequencies, [&](std::uint32_t symbol, std::uint32_t start, std::uint32_t frequency) {
    intervals[symbol] = start << 16 | frequency;
  });
  return intervals;
}

}  // namespace

RansFrequencies rans_frequencies(const std::uint64_t counts[256]) {
  std::uint64_t total = 0;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) total += counts[symbol];
  // Rare symbols: rounded, but neither to 0 nor to 16.
  RansFrequencies frequencies = {};
  std::uint64_t coarse_count = 0;
  std::uint32_t rare_slots = 0;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    const std::uint64_t nearest = (counts[symbol] * kRansTotal + total / 2) / total;
    if (nearest >= kRansCoarse + kRansCoarse / 2) {
      coarse_count += counts[symbol];
    } else if (counts[symbol] > 0) {
      frequencies[symbol] = static_cast<std::uint16_t>(std::clamp<std::uint64_t>(nearest, 1, kRansCoarse - 1));
      rare_slots += frequencies[symbol];
    }
  }
  // Their sum is made a multiple of 16 by raising the largest; one that reaches 16 is rare no more.
  while (rare_slots % kRansCoarse != 0) {
    const auto largest = std::max_element(frequencies.begin(), frequencies.end(),
                                          [](auto a, auto b) { return a % kRansCoarse < b % kRansCoarse; });
    const std::uint32_t raise = kRansCoarse - std::max<std::uint32_t>(*largest, rare_slots % kRansCoarse);
    *largest = static_cast<std::uint16_t>(*largest + raise);
    rare_slots += raise;
  }
  // The others share what is left in steps of 16. Their starts are rounded rather than their frequencies, so the sum
  // comes out right; none gets less than 16, as none was due less than 23.4.
  const std::uint64_t steps = (kRansTotal - rare_slots) / kRansCoarse;
  std::uint64_t count = 0, start = 0;
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    if (counts[symbol] == 0 || frequencies[symbol] != 0) continue;
    count += counts[symbol];
    const std::uint64_t end = (count * steps + coarse_count / 2) / coarse_count;
    frequencies[symbol] = static_cast<std::uint16_t>((end - start) * kRansCoarse);
    start = end;
  }
  return frequencies;
}

RansRange rans_range(const RansFrequencies& frequencies) {
  RansRange range = {0, 255};
  while (frequencies[range.first] == 0) ++range.first;
  while (frequencies[range.last] == 0) --range.last;
  return range;
}

RansEncodeTable make_rans_encode_table(const RansFrequencies& frequencies) {
  RansEncodeTable table = {};
  table.intervals = intervals_of(frequencies);
  const auto [first, last] = rans_range(frequencies);
  table.is_narrow = last - first < kRansNarrow;
  table.is_half = *std::max_element(frequencies.begin(), frequencies.end()) <= kRansTotal / 2;
  const std::size_t begin = table.is_narrow ? first : 0;
  table.first_symbol = static_cast<std::uint8_t>(begin);
  for (std::size_t symbol = begin; symbol <= last; ++symbol) {
    for (std::size_t byte = 0; byte < 4; ++byte) {
      table.interval_bytes[byte][symbol - begin] = static_cast<std::uint8_t>(table.intervals[symbol] >> 8 * byte);
    }
  }
  return table;
}

void make_rans_decode_table(const RansFrequencies& frequencies, RansDecodeTable* table) {
  struct Interval {
    std::uint32_t symbol, start, frequency;
  };
  Interval intervals[256];
  int occurring = 0;
  std::uint32_t* entry = table->entries;
  table->last_coarse_slot = kRansTotal - 1;
  for_each_interval(frequencies, [&](std::uint32_t symbol, std::uint32_t start, std::uint32_t frequency) {
    if (is_rare(frequency)) {
      table->last_coarse_slot = std::min(table->last_coarse_slot, static_cast<std::uint16_t>(start - 1));
      for (std::uint32_t i = 0; i < frequency; ++i) {
        *entry++ = rans_entry(symbol, i * kRansCoarse, frequency * kRansCoarse);
      }
    } else {
      entry = std::fill_n(entry, frequency / kRansCoarse, rans_entry(symbol, start, frequency));
    }
    intervals[occurring++] = {symbol, start, frequency};
  });
  const int count = std::min(occurring, kRansNarrow);
  int first = 0;
  table->narrow_slots = 0;
  for (int i = 0; i + count <= occurring; ++i) {
    const Interval& last = intervals[i + count - 1];
    const std::uint32_t slots = last.start + last.frequency - intervals[i].start;
    if (slots <= table->narrow_slots) continue;
    table->narrow_slots = slots;
    first = i;
  }
  for (int i = 0; i < kRansNarrow; ++i) {
    const Interval& interval = intervals[first + std::min(i, count - 1)];
    table->symbols[i] = static_cast<std::uint8_t>(interval.symbol);
    table->starts[i] = static_cast<std::uint16_t>(interval.start);
    table->frequencies[i] = static_cast<std::uint16_t>(interval.frequency);
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// spec.md as a program: one code after the other, everything looked up the slow way, nothing shared with the kernels.
// For tests and benchmarks; the decoder believes what it reads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace cortado::reference {

using RansBytes = std::vector<std::uint8_t>;

struct RansModel {
  std::array<std::uint32_t, 256> frequency = {}, start = {};

  // Rare symbols have the last slots.
  void set_starts() {
    std::uint32_t next = 0;
    for (int s = 0; s < 256; ++s) {
      if (frequency[s] >= 16) start[s] = next, next += frequency[s];
    }
    for (int s = 0; s < 256; ++s) {
      if (frequency[s] < 16) start[s] = next, next += frequency[s];
    }
  }
  int symbol_of(std::uint32_t slot) const {
    int s = 0;
    while (!(frequency[s] > 0 && slot >= start[s] && slot < start[s] + frequency[s])) ++s;
    return s;
  }
};

inline RansModel rans_model(const RansBytes& codes) {
  std::array<std::uint64_t, 256> count = {};
  for (const std::uint8_t code : codes) ++count[code];
  const std::uint64_t total = codes.size();
  RansModel model;
  std::uint64_t coarse = 0;
  std::uint32_t rare = 0;
  std::array<bool, 256> is_coarse = {};
  for (int s = 0; s < 256; ++s) {
    if (count[s] == 0) continue;
    const std::uint64_t rounded = (count[s] * 65536 + total / 2) / total;
    is_coarse[s] = rounded >= 24;
    if (is_coarse[s]) {
      coarse += count[s];
    } else {
      model.frequency[s] = static_cast<std::uint32_t>(rounded < 1 ? 1 : rounded > 15 ? 15 : rounded);
      rare += model.frequency[s];
    }
  }
  while (rare % 16 != 0) {
    int largest = 0;
    for (int s = 0; s < 256; ++s) {
      if (model.frequency[s] % 16 > model.frequency[largest] % 16) largest = s;
    }
    const std::uint32_t more = std::min(16 - model.frequency[largest], 16 - rare % 16);
    model.frequency[largest] += more;
    rare += more;
  }
  std::uint64_t before = 0, end_before = 0;
  for (int s = 0; s < 256; ++s) {
    if (!is_coarse[s]) continue;
    before += count[s];
    const std::uint64_t end = (before * ((65536 - rare) / 16) + coarse / 2) / coarse;
    model.frequency[s] = static_cast<std::uint32_t>(16 * (end - end_before));
    end_before = end;
  }
  model.set_starts();
  return model;
}

inline RansBytes rans_encode_chunk(const RansModel& model, const std::uint8_t* codes, std::size_t elems) {
  std::vector<std::uint16_t> words;  // the last one first
  std::array<std::uint64_t, 32> state;
  state.fill(65536);
  for (std::size_t i = elems; i-- > 0;) {
    const std::uint64_t frequency = model.frequency[codes[i]], start = model.start[codes[i]];
    std::uint64_t& x = state[i % 32];
    if (x >= frequency << 16) {
      words.push_back(static_cast<std::uint16_t>(x));
      x >>= 16;
    }
    x = (x / frequency << 16) + x % frequency + start;
  }
  RansBytes bytes;
  for (const std::uint64_t x : state) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::uint8_t>(x >> shift));
  }
  for (std::size_t i = words.size(); i-- > 0;) {
    bytes.push_back(static_cast<std::uint8_t>(words[i]));
    bytes.push_back(static_cast<std::uint8_t>(words[i] >> 8));
  }
  return bytes;
}

inline RansBytes rans_encode(const RansBytes& codes, std::size_t chunk_codes) {
  if (codes.empty()) return {};
  if (std::all_of(codes.begin(), codes.end(), [&](auto code) { return code == codes[0]; })) return {1, codes[0]};
  const RansModel model = rans_model(codes);
  const auto [first, last] = std::minmax_element(codes.begin(), codes.end());
  int chunk_bits = 0;
  while (std::size_t{1} << chunk_bits < chunk_codes) ++chunk_bits;
  RansBytes payload = {2, static_cast<std::uint8_t>(chunk_bits), *first, *last};
  for (int s = *first; s <= *last; ++s) {
    const std::uint32_t f = model.frequency[s], code = f < 16 ? f : 15 + f / 16;
    if (code >= 128) payload.push_back(static_cast<std::uint8_t>(code % 128 + 128));
    payload.push_back(static_cast<std::uint8_t>(code >= 128 ? code / 128 : code));
  }
  while (payload.size() % 8 != 0) payload.push_back(0);
  RansBytes chunks;
  for (std::size_t begin = 0; begin < codes.size(); begin += chunk_codes) {
    const RansBytes chunk = rans_encode_chunk(model, codes.data() + begin, std::min(chunk_codes, codes.size() - begin));
    chunks.insert(chunks.end(), chunk.begin(), chunk.end());
    for (int shift = 0; shift < 64; shift += 8) payload.push_back(static_cast<std::uint8_t>(chunks.size() >> shift));
  }
  payload.insert(payload.end(), chunks.begin(), chunks.end());
  if (payload.size() <= codes.size()) return payload;
  payload = {0};
  payload.insert(payload.end(), codes.begin(), codes.end());
  return payload;
}

inline RansBytes rans_decode(const RansBytes& payload, std::size_t elems) {
  if (elems == 0) return {};
  if (payload[0] == 0) return RansBytes(payload.begin() + 1, payload.end());
  if (payload[0] == 1) return RansBytes(elems, payload[1]);
  const std::size_t chunk_codes = std::size_t{1} << payload[1];
  RansModel model;
  std::size_t at = 4;
  for (int s = payload[2]; s <= payload[3]; ++s) {
    std::uint32_t code = payload[at++];
    if (code >= 128) code = code - 128 + 128u * payload[at++];
    model.frequency[s] = code < 16 ? code : 16 * (code - 15);
  }
  model.set_starts();
  at = (at + 7) / 8 * 8;
  at += 8 * ((elems + chunk_codes - 1) / chunk_codes);  // chunks follow one another, so the directory is not needed
  RansBytes codes;
  const auto number = [&](int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= static_cast<std::uint64_t>(payload[at++]) << 8 * i;
    return value;
  };
  while (codes.size() < elems) {
    const std::size_t count = std::min(chunk_codes, elems - codes.size());
    std::array<std::uint64_t, 32> state;
    for (std::uint64_t& x : state) x = number(4);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t& x = state[i % 32];
      const auto slot = static_cast<std::uint32_t>(x % 65536);
      const int s = model.symbol_of(slot);
      codes.push_back(static_cast<std::uint8_t>(s));
      x = model.frequency[s] * (x / 65536) + slot - model.start[s];
      if (x < 65536) x = x * 65536 + number(2);
    }
  }
  return codes;
}

}  // namespace cortado::reference

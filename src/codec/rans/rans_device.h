// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `rans` on a device, for all codecs that put it behind theirs. A warp codes a chunk, a lane each thread; eight chunks
// of a message share a block of threads and its table. Encoding is six launches: codes are counted, each message gets a
// model, chunks are coded into memory of their own, sizes are added up, the mode is chosen, chunks are moved to their
// places. Decoding is two: headers are read and checked, chunks are decoded.
#pragma once

#include <bit>

#include "codec/device_workspace.h"
#include "codec/rans/rans_table.h"
#include "core/device_bits.h"

namespace cortado {

constexpr int kRansBlockChunks = 8, kRansBlockThreads = kRansBlockChunks * kWarpThreads;
constexpr int kRansMostHeadBytes = 520;  // header and table, with the zeros behind it
constexpr int kRansHeaderBytes = 4;
constexpr std::int64_t kRansChunkStateBytes = 4 * kWarpThreads;

enum class RansDeviceMode : std::uint32_t { kStored = 0, kConstant = 1, kCoded = 2, kBroken = 3 };

// Codes that have a payload of their own; in device memory.
struct RansMessage {
  std::uint8_t* codes;
  std::byte* payload;
  std::int64_t elems;
  std::int64_t code_base, chunk_base;  // codes and chunks of the messages before, or more
  std::int64_t tensor;
};

// What kernels find out of a message.
struct RansState {
  std::uint32_t intervals[256];  // start, and frequency in the lower half
  std::uint32_t inverses[256];   // floor(2^32 / frequency)
  std::byte head[kRansMostHeadBytes];
  std::uint32_t head_bytes;
  RansDeviceMode mode;
  std::uint32_t first_symbol;
  std::uint64_t payload_bytes;
  // Decoding.
  std::int64_t chunk_codes;
  std::uint32_t last_coarse_slot;
  std::uint32_t entries[RansDecodeTable::kMaxEntries];
};

// Of all messages of a batch. A tile of `blocks` is kRansBlockChunks chunks; its "tensors" are messages. Where messages
// are made on the device, so is this tiling, and tiles without a message say -1.
struct RansTable {
  const RansMessage* messages;
  const std::uint64_t* counts;  // 256 a message
  RansState* states;
  Tiling blocks;
  std::int64_t chunk_codes;
  std::byte* slots;            // memory for coded chunks
  std::uint64_t* chunk_bytes;  // of every chunk, then where it ends in its message
};

CORTADO_HD constexpr std::int64_t rans_chunks(std::int64_t elems, std::int64_t chunk_codes) {
  return (elems + chunk_codes - 1) / chunk_codes;
}
// A chunk's slot ends here: states, then words, from the end backwards.
CORTADO_HD constexpr std::int64_t rans_slot_end(const RansMessage& message, std::int64_t chunk,
                                                std::int64_t chunk_codes) {
  const std::int64_t codes = (chunk + 1) * chunk_codes;
  return 2 * (message.code_base + (codes < message.elems ? codes : message.elems)) +
         kRansChunkStateBytes * (message.chunk_base + chunk + 1);
}
constexpr std::uint64_t rans_slots_bytes(std::int64_t codes, std::int64_t chunks) {
  return static_cast<std::uint64_t>(2 * codes + kRansChunkStateBytes * chunks);
}

// ---- encode --------------------------------------------------------------------------------------------------------

// Counts codes; a histogram a warp keeps threads out of each other's way.
struct RansCount {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileCodes = 16384;

  const RansMessage* messages;
  std::uint64_t* counts;  // 256 a message, 0 before
  Tiling tiling;          // of messages

  struct Shared {
    std::uint32_t counts[kThreads / kWarpThreads][256];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const std::uint8_t* const codes = messages[tile.tensor].codes + tile.first;
    block.each([&](int t) {
      for (auto& of_warp : shared.counts) of_warp[t] = 0;
    });
    block.each([&](int t) {
      std::uint32_t(&of_warp)[256] = shared.counts[t / kWarpThreads];
      if (is_aligned(codes, 16) && tile.elems == kTileCodes) {
        for (std::int64_t i = t; i < kTileCodes / 16; i += kThreads) {
          const Bytes16 sixteen = reinterpret_cast<const Bytes16*>(codes)[i];
          for (const std::uint32_t word : sixteen.words) {
            for (int byte = 0; byte < 4; ++byte) block.add(&of_warp[word >> (8 * byte) & 0xff], 1u);
          }
        }
      } else {
        for (std::int64_t i = t; i < tile.elems; i += kThreads) block.add(&of_warp[codes[i]], 1u);
      }
    });
    block.each([&](int t) {
      std::uint64_t sum = 0;
      for (const auto& of_warp : shared.counts) sum += of_warp[t];
      if (sum > 0) block.add(&counts[tile.tensor * 256 + t], sum);
    });
  }
};

// From counts to frequencies, intervals and what stands before the directory; spec.md has the rules. A thread a symbol.
struct RansModel {
  static constexpr int kThreads = 256;

  const RansMessage* messages;
  const std::uint64_t* counts;
  RansState* states;
  std::int64_t chunk_codes;

  struct Shared {
    std::uint32_t frequency[kThreads];
    std::uint32_t rare;  // slots of rare symbols
    std::uint32_t first, last;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const RansMessage& message = messages[block.number()];
    RansState& state = states[block.number()];
    const auto total = static_cast<std::uint64_t>(message.elems);
    if (total == 0) {
      block.each([&](int t) {
        if (t == 0) state.mode = RansDeviceMode::kStored;
      });
      return;
    }
    typename Block::template PerThread<std::uint64_t> count, coarse_before;
    typename Block::template PerThread<std::uint32_t> occurs, number, coarse_start, rare_start, length;
    block.each([&](int t) {
      count[t] = counts[block.number() * 256 + t];
      occurs[t] = count[t] > 0;
      number[t] = occurs[t];
      if (t > 0) return;
      shared.first = 0;
      shared.last = 0;
      shared.rare = 0;
    });
    const std::uint32_t symbols = block.exclusive_sum(number);
    block.each([&](int t) {
      if (!occurs[t]) return;
      block.raise(&shared.first, 255u - static_cast<std::uint32_t>(t));
      block.raise(&shared.last, static_cast<std::uint32_t>(t));
    });
    const std::uint32_t first = 255 - block.uniform(shared.first), last = block.uniform(shared.last);
    if (symbols == 1) {
      block.each([&](int t) {
        if (t > 0) return;
        state.mode = RansDeviceMode::kConstant;
        state.first_symbol = first;
      });
      return;
    }
    // Rare symbols: rounded, but neither to 0 nor to 16.
    block.each([&](int t) {
      const std::uint64_t nearest = (count[t] * kRansTotal + total / 2) / total;
      const bool is_coarse = nearest >= kRansCoarse + kRansCoarse / 2;
      shared.frequency[t] = 0;
      coarse_before[t] = is_coarse ? count[t] : 0;
      if (occurs[t] && !is_coarse) {
        shared.frequency[t] = static_cast<std::uint32_t>(nearest < 1 ? 1 : nearest < kRansCoarse ? nearest : 15);
        block.add(&shared.rare, shared.frequency[t]);
      }
    });
    const std::uint64_t coarse_count = block.exclusive_sum(coarse_before);
    // Their sum is made a multiple of 16 by raising the largest; one that reaches 16 is rare no more.
    block.each([&](int t) {
      if (t > 0) return;
      while (shared.rare % kRansCoarse != 0) {
        int largest = 0;
        for (int s = 1; s < kThreads; ++s) {
          if (shared.frequency[s] % kRansCoarse > shared.frequency[largest] % kRansCoarse) largest = s;
        }
        const std::uint32_t rest = shared.rare % kRansCoarse, of_largest = shared.frequency[largest];
        const std::uint32_t raise = kRansCoarse - (of_largest > rest ? of_largest : rest);
        shared.frequency[largest] += raise;
        shared.rare += raise;
      }
    });
    // The others share what is left in steps of 16.
    block.each([&](int t) {
      const std::uint64_t steps = (kRansTotal - shared.rare) / kRansCoarse;
      if (occurs[t] && shared.frequency[t] == 0) {
        const std::uint64_t end = ((coarse_before[t] + count[t]) * steps + coarse_count / 2) / coarse_count;
        const std::uint64_t begin = (coarse_before[t] * steps + coarse_count / 2) / coarse_count;
        shared.frequency[t] = static_cast<std::uint32_t>((end - begin) * kRansCoarse);
      }
      const std::uint32_t frequency = shared.frequency[t];
      coarse_start[t] = frequency < kRansCoarse ? 0 : frequency;
      rare_start[t] = frequency < kRansCoarse ? frequency : 0;
      const bool is_told = static_cast<std::uint32_t>(t) >= first && static_cast<std::uint32_t>(t) <= last;
      length[t] = !is_told ? 0 : wire_code(frequency) < 128 ? 1 : 2;
    });
    const std::uint32_t coarse_slots = block.exclusive_sum(coarse_start);
    block.exclusive_sum(rare_start);
    const std::uint32_t table_bytes = block.exclusive_sum(length);
    const std::uint32_t head_bytes = (kRansHeaderBytes + table_bytes + 7) / 8 * 8;
    block.each([&](int t) {
      const std::uint32_t frequency = shared.frequency[t];
      const std::uint32_t start = frequency < kRansCoarse ? coarse_slots + rare_start[t] : coarse_start[t];
      state.intervals[t] = start << 16 | frequency;
      state.inverses[t] =
          frequency < 2 ? 0xffffffffu : static_cast<std::uint32_t>((std::uint64_t{1} << 32) / frequency);
      if (static_cast<std::uint32_t>(t) >= first && static_cast<std::uint32_t>(t) <= last) {
        const std::uint32_t code = wire_code(frequency);
        std::byte* const to = state.head + kRansHeaderBytes + length[t];
        to[0] = static_cast<std::byte>(code < 128 ? code : code % 128 + 128);
        if (code >= 128) to[1] = static_cast<std::byte>(code / 128);
      }
      if (static_cast<std::uint32_t>(t) < head_bytes - kRansHeaderBytes - table_bytes) {
        state.head[kRansHeaderBytes + table_bytes + t] = std::byte{0};
      }
      if (t > 0) return;
      state.head[0] = static_cast<std::byte>(RansDeviceMode::kCoded);
      state.head[1] = static_cast<std::byte>(trailing_zeros(static_cast<std::uint64_t>(chunk_codes)));
      state.head[2] = static_cast<std::byte>(first);
      state.head[3] = static_cast<std::byte>(last);
      state.head_bytes = head_bytes;
      state.mode = RansDeviceMode::kCoded;
    });
  }

  CORTADO_HD static std::uint32_t wire_code(std::uint32_t frequency) {
    return frequency < kRansCoarse ? frequency : kRansCoarse - 1 + frequency / kRansCoarse;
  }
};

// A warp writes a chunk backwards into its slot.
struct RansEncodeChunks {
  static constexpr int kThreads = kRansBlockThreads;

  RansTable table;

  struct Shared {
    std::uint32_t intervals[256], inverses[256];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    if (table.blocks.tensor_of_tile[block.number()] < 0) return;
    const Tile tile = table.blocks.tile(block.number());
    const RansMessage& message = table.messages[tile.tensor];
    const RansState& state = table.states[tile.tensor];
    if (state.mode != RansDeviceMode::kCoded) return;
    block.each([&](int t) {
      shared.intervals[t] = state.intervals[t];
      shared.inverses[t] = state.inverses[t];
    });
    typename Block::template PerThread<std::uint32_t> x, needs;
    typename Block::template PerThread<const std::uint8_t*> codes;
    typename Block::template PerThread<std::int64_t> elems;
    typename Block::template PerThread<std::byte*> end;  // of what is not written yet
    block.each_in_warp([&](int t) {
      const std::int64_t chunk = tile.number * kRansBlockChunks + t / kWarpThreads;
      const std::int64_t first = chunk * table.chunk_codes, left = message.elems - first;
      elems[t] = left < 0 ? 0 : left < table.chunk_codes ? left : table.chunk_codes;
      codes[t] = message.codes + first;
      end[t] = table.slots + (elems[t] > 0 ? rans_slot_end(message, chunk, table.chunk_codes) : 0);
      x[t] = 1u << 16;
    });
    const std::int64_t most = tile.elems < table.chunk_codes ? tile.elems : table.chunk_codes;
    for (std::int64_t group = (most + kWarpThreads - 1) / kWarpThreads - 1; group >= 0; --group) {
      typename Block::template PerThread<std::uint32_t> symbol;
      block.each_in_warp([&](int t) {
        const std::int64_t i = group * kWarpThreads + t % kWarpThreads;
        symbol[t] = i < elems[t] ? codes[t][i] : 256;
        needs[t] = i < elems[t] && x[t] >= shared.intervals[symbol[t]] << 16;
      });
      block.ballot(needs);
      block.each_in_warp([&](int t) {
        const int lane = t % kWarpThreads;
        if (symbol[t] < 256) {
          if ((needs[t] >> lane & 1) != 0) {
            std::byte* const word = end[t] - 2 * count_ones(needs[t] >> lane);
            *reinterpret_cast<std::uint16_t*>(word) = static_cast<std::uint16_t>(x[t]);
            x[t] >>= 16;
          }
          const std::uint32_t interval = shared.intervals[symbol[t]], frequency = interval & 0xffff;
          std::uint32_t quotient = static_cast<std::uint32_t>((std::uint64_t{x[t]} * shared.inverses[symbol[t]]) >> 32);
          std::uint32_t rest = x[t] - quotient * frequency;
          if (rest >= frequency) ++quotient, rest -= frequency;
          x[t] = (quotient << 16) + rest + (interval >> 16);
        }
        end[t] -= 2 * count_ones(needs[t]);
      });
    }
    block.each_in_warp([&](int t) {
      if (elems[t] == 0) return;
      const std::int64_t chunk = tile.number * kRansBlockChunks + t / kWarpThreads;
      std::byte* const begin = end[t] - kRansChunkStateBytes;
      std::byte* const to = begin + 4 * (t % kWarpThreads);
      reinterpret_cast<std::uint16_t*>(to)[0] = static_cast<std::uint16_t>(x[t]);
      reinterpret_cast<std::uint16_t*>(to)[1] = static_cast<std::uint16_t>(x[t] >> 16);
      if (t % kWarpThreads == 0) {
        table.chunk_bytes[message.chunk_base + chunk] =
            static_cast<std::uint64_t>(table.slots + rans_slot_end(message, chunk, table.chunk_codes) - begin);
      }
    });
  }
};

// Where chunks end, whether all that takes less than the codes as they are, and the size of the payload.
struct RansMeasure {
  static constexpr int kThreads = 256;

  RansTable table;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const RansMessage& message = table.messages[block.number()];
    RansState& state = table.states[block.number()];
    const std::int64_t chunks = rans_chunks(message.elems, table.chunk_codes);
    const auto elems = static_cast<std::uint64_t>(message.elems);
    const bool was_coded = state.mode == RansDeviceMode::kCoded;
    const bool is_constant = state.mode == RansDeviceMode::kConstant;
    std::uint64_t bytes = 0;
    for (std::int64_t first = 0; was_coded && first < chunks; first += kThreads) {
      typename Block::template PerThread<std::uint64_t> own, before;
      block.each([&](int t) {
        own[t] = first + t < chunks ? table.chunk_bytes[message.chunk_base + first + t] : 0;
        before[t] = own[t];
      });
      const std::uint64_t sum = block.exclusive_sum(before);
      block.each([&](int t) {
        if (first + t < chunks) table.chunk_bytes[message.chunk_base + first + t] = bytes + before[t] + own[t];
      });
      bytes += sum;
    }
    const std::uint64_t coded_bytes = state.head_bytes + 8 * static_cast<std::uint64_t>(chunks) + bytes;
    block.each([&](int t) {
      if (t > 0) return;
      const bool is_stored = !is_constant && (!was_coded || coded_bytes > elems);
      if (is_stored) state.mode = RansDeviceMode::kStored;
      state.payload_bytes = elems == 0 ? 0 : is_constant ? 2 : is_stored ? 1 + elems : coded_bytes;
    });
  }
};

// Payloads, from their parts.
struct RansPlace {
  static constexpr int kThreads = kRansBlockThreads;

  RansTable table;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    if (table.blocks.tensor_of_tile[block.number()] < 0) return;
    const Tile tile = table.blocks.tile(block.number());
    const RansMessage& message = table.messages[tile.tensor];
    const RansState& state = table.states[tile.tensor];
    const bool is_first = tile.number == 0;
    if (state.mode != RansDeviceMode::kCoded) {
      const bool is_stored = state.mode == RansDeviceMode::kStored;
      block.each([&](int t) {
        if (is_first && t == 0) message.payload[0] = static_cast<std::byte>(state.mode);
        if (is_first && t == 0 && !is_stored) message.payload[1] = static_cast<std::byte>(state.first_symbol);
        if (is_stored) {
          copy_share(reinterpret_cast<const std::byte*>(message.codes) + tile.first, tile.elems,
                     message.payload + 1 + tile.first, t, kThreads);
        }
      });
      return;
    }
    const std::int64_t chunks = rans_chunks(message.elems, table.chunk_codes);
    std::byte* const directory = message.payload + state.head_bytes;
    const std::uint64_t* const ends = table.chunk_bytes + message.chunk_base;
    block.each([&](int t) {
      if (is_first) copy_share(state.head, state.head_bytes, message.payload, t, kThreads);
      const std::int64_t begin = tile.number * kRansBlockChunks;
      if (t < kRansBlockChunks && begin + t < chunks) store_bytes(ends[begin + t], directory + 8 * (begin + t));
      for (std::int64_t chunk = begin; chunk < begin + kRansBlockChunks && chunk < chunks; ++chunk) {
        const std::uint64_t before = chunk == 0 ? 0 : ends[chunk - 1];
        const auto bytes = static_cast<std::int64_t>(ends[chunk] - before);
        copy_share(table.slots + rans_slot_end(message, chunk, table.chunk_codes) - bytes, bytes,
                   directory + 8 * chunks + before, t, kThreads);
      }
    });
  }
};

// ---- decode --------------------------------------------------------------------------------------------------------

// Reads and checks all that stands before the chunks. `payload_bytes` of a state is the payload's size before.
struct RansRead {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  const RansMessage* messages;
  RansState* states;

  struct Shared {
    std::uint32_t frequency[kThreads], start[kThreads];
    std::uint32_t is_broken;
    std::uint32_t table_end;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const RansMessage& message = messages[block.number()];
    RansState& state = states[block.number()];
    const std::uint64_t bytes = state.payload_bytes;
    block.each([&](int t) {
      if (t == 0) shared.is_broken = is_whole(message, bytes) ? 0 : 1;
    });
    if (block.uniform(shared.is_broken) == 0 && message.elems > 0 &&
        static_cast<RansDeviceMode>(message.payload[0]) == RansDeviceMode::kCoded) {
      read_coded(block, shared, message, state, bytes);
    }
    block.each([&](int t) {
      if (t > 0) return;
      const bool is_broken = shared.is_broken != 0;
      state.mode = is_broken            ? RansDeviceMode::kBroken
                   : message.elems == 0 ? RansDeviceMode::kStored
                                        : static_cast<RansDeviceMode>(message.payload[0]);
      if (is_broken) block.set_bits(&tensors.faults[message.tensor], kCorruptPayload);
    });
  }

 private:
  // Of other modes than coded, all there is to check.
  CORTADO_HD static bool is_whole(const RansMessage& message, std::uint64_t bytes) {
    const auto elems = static_cast<std::uint64_t>(message.elems);
    if (elems == 0) return bytes == 0;
    if (bytes == 0) return false;
    switch (static_cast<RansDeviceMode>(message.payload[0])) {
      case RansDeviceMode::kStored:
        return bytes == 1 + elems;
      case RansDeviceMode::kConstant:
        return bytes == 2;
      case RansDeviceMode::kCoded:
        return bytes >= kRansHeaderBytes;
      default:
        return false;
    }
  }

  // One thread reads the table, since symbols take one or two bytes; false if it breaks a rule.
  CORTADO_HD static bool read_table(const RansMessage& message, std::uint64_t bytes, Shared& shared) {
    const auto at_byte = [&](std::uint64_t at) { return std::to_integer<std::uint32_t>(message.payload[at]); };
    const std::uint32_t chunk_bits = at_byte(1), first = at_byte(2), last = at_byte(3);
    if (chunk_bits > 18 || chunk_bits < 12 || first >= last) return false;
    for (std::uint32_t& frequency : shared.frequency) frequency = 0;
    std::uint64_t at = kRansHeaderBytes;
    std::uint32_t sum = 0;
    for (std::uint32_t symbol = first; symbol <= last; ++symbol) {
      if (at >= bytes) return false;
      std::uint32_t code = at_byte(at++);
      if (code >= 128) {
        if (at >= bytes) return false;
        const std::uint32_t upper = at_byte(at++);
        if (upper == 0) return false;
        code = code % 128 + 128 * upper;
      }
      const std::uint32_t frequency = code < kRansCoarse ? code : (code - kRansCoarse + 1) * kRansCoarse;
      if (frequency >= kRansTotal || (frequency == 0 && (symbol == first || symbol == last))) return false;
      shared.frequency[symbol] = frequency;
      sum += frequency;
    }
    shared.table_end = static_cast<std::uint32_t>(at);
    return sum == kRansTotal;
  }

  template <class Block>
  CORTADO_HD static void read_coded(Block& block, Shared& shared, const RansMessage& message, RansState& state,
                                    std::uint64_t bytes) {
    block.each([&](int t) {
      if (t == 0 && !read_table(message, bytes, shared)) shared.is_broken = 1;
    });
    if (block.uniform(shared.is_broken) != 0) return;
    const std::int64_t chunk_codes = std::int64_t{1} << std::to_integer<int>(message.payload[1]);
    const std::int64_t chunks = rans_chunks(message.elems, chunk_codes);
    const std::uint64_t directory_at = (std::uint64_t{shared.table_end} + 7) / 8 * 8;
    const std::uint64_t chunks_at = directory_at + 8 * static_cast<std::uint64_t>(chunks);
    typename Block::template PerThread<std::uint32_t> coarse_start, rare_start;
    block.each([&](int t) {
      const std::uint32_t frequency = shared.frequency[t];
      coarse_start[t] = frequency < kRansCoarse ? 0 : frequency;
      rare_start[t] = frequency < kRansCoarse ? frequency : 0;
      if (t == 0 && bytes < chunks_at) shared.is_broken = 1;
    });
    const std::uint32_t coarse_slots = block.exclusive_sum(coarse_start);
    block.exclusive_sum(rare_start);
    if (block.uniform(shared.is_broken) != 0) return;
    block.each([&](int t) {
      const bool is_rare = shared.frequency[t] < kRansCoarse;
      shared.start[t] = is_rare ? coarse_slots + rare_start[t] : coarse_start[t];
      if (t == 0) {
        state.chunk_codes = chunk_codes;
        state.head_bytes = static_cast<std::uint32_t>(directory_at);
        state.last_coarse_slot = coarse_slots - 1;
      }
      for (std::int64_t chunk = t; chunk < chunks; chunk += kThreads) {
        const std::byte* const entry = message.payload + directory_at + 8 * chunk;
        const std::uint64_t begin = chunk == 0 ? 0 : load_bytes<std::uint64_t>(entry - 8);
        const auto end = load_bytes<std::uint64_t>(entry);
        const std::int64_t left = message.elems - chunk * chunk_codes;
        const auto codes = static_cast<std::uint64_t>(left < chunk_codes ? left : chunk_codes);
        const bool is_whole = end >= begin && end <= bytes - chunks_at && end - begin >= kRansChunkStateBytes &&
                              end - begin <= kRansChunkStateBytes + 2 * codes &&
                              (chunk + 1 < chunks || end == bytes - chunks_at);
        if (!is_whole) block.set_bits(&shared.is_broken, 1);
      }
    });
    block.each([&](int t) {
      for (std::uint32_t symbol = 0; symbol < kThreads; ++symbol) {
        const std::uint32_t frequency = shared.frequency[symbol], start = shared.start[symbol];
        if (frequency >= kRansCoarse) {
          for (std::uint32_t i = t; i < frequency / kRansCoarse; i += kThreads) {
            state.entries[start / kRansCoarse + i] = rans_entry(symbol, start, frequency);
          }
        } else if (static_cast<std::uint32_t>(t) < frequency) {
          state.entries[coarse_slots / kRansCoarse + start - coarse_slots + t] =
              rans_entry(symbol, t * kRansCoarse, frequency * kRansCoarse);
        }
      }
    });
  }
};

struct RansDecodeChunks {
  static constexpr int kThreads = kRansBlockThreads;

  TensorTable tensors;
  const RansMessage* messages;
  RansState* states;
  Tiling blocks;  // as for encoding; where a payload has smaller chunks, a block decodes more of them

  struct Shared {
    std::uint32_t entries[RansDecodeTable::kMaxEntries];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    if (blocks.tensor_of_tile[block.number()] < 0) return;
    const Tile tile = blocks.tile(block.number());
    const RansMessage& message = messages[tile.tensor];
    const RansState& state = states[tile.tensor];
    if (state.mode == RansDeviceMode::kBroken) return;
    if (state.mode != RansDeviceMode::kCoded) {
      const bool is_stored = state.mode == RansDeviceMode::kStored;
      auto* const codes = reinterpret_cast<std::byte*>(message.codes) + tile.first;
      block.each([&](int t) {
        if (is_stored) copy_share(message.payload + 1 + tile.first, tile.elems, codes, t, kThreads);
        for (std::int64_t i = t; !is_stored && i < tile.elems; i += kThreads) codes[i] = message.payload[1];
      });
      return;
    }
    const std::uint32_t last_coarse_slot = state.last_coarse_slot;
    const std::uint32_t entries = rans_entry_index(kRansTotal - 1, last_coarse_slot) + 1;
    block.each([&](int t) {
      for (std::uint32_t i = t; i < entries; i += kThreads) shared.entries[i] = state.entries[i];
    });
    const std::int64_t chunks = rans_chunks(message.elems, state.chunk_codes);
    const std::int64_t of_message = (message.elems + blocks.tile_elems - 1) / blocks.tile_elems;
    for (std::int64_t first = tile.number * kRansBlockChunks; first < chunks; first += of_message * kRansBlockChunks) {
      decode(block, shared, message, state, tile.tensor, chunks, first);
    }
  }

 private:
  template <class Block>
  CORTADO_HD void decode(Block& block, Shared& shared, const RansMessage& message, const RansState& state,
                         std::int64_t number, std::int64_t chunks, std::int64_t first) const {
    const std::byte* const directory = message.payload + state.head_bytes;
    const std::byte* const first_chunk = directory + 8 * chunks;
    typename Block::template PerThread<std::uint32_t> x, needs;
    typename Block::template PerThread<std::uint8_t*> codes;
    typename Block::template PerThread<std::int64_t> elems;
    typename Block::template PerThread<const std::byte*> at, end;
    block.each_in_warp([&](int t) {
      const std::int64_t chunk = first + t / kWarpThreads;
      const std::int64_t left = message.elems - chunk * state.chunk_codes;
      elems[t] = chunk >= chunks ? 0 : left < state.chunk_codes ? left : state.chunk_codes;
      codes[t] = message.codes + chunk * state.chunk_codes;
      x[t] = 0;
      if (elems[t] == 0) return;
      const auto begin = chunk == 0 ? 0 : load_bytes<std::uint64_t>(directory + 8 * (chunk - 1));
      end[t] = first_chunk + load_bytes<std::uint64_t>(directory + 8 * chunk);
      at[t] = first_chunk + begin + kRansChunkStateBytes;
      x[t] = load_bytes<std::uint32_t>(first_chunk + begin + 4 * (t % kWarpThreads));
    });
    const std::int64_t left = message.elems - first * state.chunk_codes;
    const std::int64_t most = left < state.chunk_codes ? left : state.chunk_codes;
    for (std::int64_t group = 0; group * kWarpThreads < most; ++group) {
      block.each_in_warp([&](int t) {
        const std::int64_t i = group * kWarpThreads + t % kWarpThreads;
        needs[t] = 0;
        if (i >= elems[t]) return;
        const std::uint32_t slot = x[t] & 0xffff, upper = x[t] >> 16;
        const std::uint32_t entry = shared.entries[rans_entry_index(slot, state.last_coarse_slot)];
        const std::uint32_t a = rans_entry_first(entry), b = rans_entry_second(entry);
        x[t] = slot <= state.last_coarse_slot ? b * upper + slot - a : b / kRansCoarse * upper + a / kRansCoarse;
        codes[t][i] = static_cast<std::uint8_t>(entry);
        needs[t] = x[t] < 1u << 16;
      });
      block.ballot(needs);
      block.each_in_warp([&](int t) {
        const int lane = t % kWarpThreads;
        if (elems[t] == 0) return;
        if ((needs[t] >> lane & 1) != 0) {
          const std::byte* const word = at[t] + 2 * count_ones(needs[t] & ((1u << lane) - 1));
          x[t] = x[t] << 16 | (word + 2 <= end[t] ? load_bytes<std::uint16_t>(word) : 0u);
        }
        at[t] += 2 * count_ones(needs[t]);
      });
    }
    block.each_in_warp([&](int t) {
      if (elems[t] == 0 || (at[t] == end[t] && x[t] == 1u << 16)) return;
      block.set_bits(&tensors.faults[messages[number].tensor], kCorruptPayload);
    });
  }
};

// The messages of tensors that have one each, behind `rest` bytes of their payload.
struct RansMessages {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  std::int64_t count;
  const std::int64_t* code_bases;
  const std::int64_t* chunk_bases;
  std::uint8_t* codes;  // of all tensors; nullptr: the tensors are codes
  bool encodes;
  RansMessage* messages;
  RansState* states;

  struct Shared {};

  // Of a float, what is not its code.
  CORTADO_HD static std::int64_t rest_bytes(const TensorEntry& tensor, bool are_codes) {
    return are_codes ? 0 : tensor.elems * (static_cast<std::int64_t>(dtype_bytes(tensor.dtype)) - 1);
  }

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t i = block.number() * kThreads + t;
      if (i >= count) return;
      const TensorEntry tensor = tensors.entries[i];
      const std::int64_t rest = rest_bytes(tensor, codes == nullptr);
      RansMessage message = {};
      message.codes = codes == nullptr ? static_cast<std::uint8_t*>(tensor.data) : codes + code_bases[i];
      message.payload = tensor.payload + rest;
      message.elems = tensor.elems;
      message.code_base = code_bases[i];
      message.chunk_base = chunk_bases[i];
      message.tensor = i;
      if (!encodes) {
        const std::uint64_t bytes = tensors.payload_bytes[i];
        const bool is_short = bytes < static_cast<std::uint64_t>(rest) || bytes > tensor.max_payload_bytes;
        // Nothing of a payload that is too long is looked at, as its memory may end before.
        if (is_short) block.set_bits(&tensors.faults[i], kCorruptPayload);
        states[i].payload_bytes = is_short ? 0 : bytes - static_cast<std::uint64_t>(rest);
      }
      messages[i] = message;
    });
  }
};

// After RansMeasure.
struct RansPayloadBytes {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  std::int64_t count;
  const RansState* states;
  bool are_codes;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t i = block.number() * kThreads + t;
      if (i >= count) return;
      tensors.payload_bytes[i] =
          static_cast<std::uint64_t>(RansMessages::rest_bytes(tensors.entries[i], are_codes)) + states[i].payload_bytes;
    });
  }
};

// Messages of one batch, whoever makes them.
struct RansPlaces {
  std::int64_t chunk_codes = 0;
  std::int64_t messages_count = 0;
  WorkspaceSlot<RansMessage> messages;
  WorkspaceSlot<std::uint64_t> counts;  // 256 a message; for whoever counts to make 0
  WorkspaceSlot<RansState> states;
  WorkspaceSlot<std::byte> slots;
  WorkspaceSlot<std::uint64_t> chunk_bytes;

  // Models and coded chunks of messages whose codes are made and counted; not yet where they belong.
  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w, const Tiling& blocks) const {
    const RansTable table = table_of(w, blocks);
    device.launch(messages_count, RansModel{table.messages, table.counts, table.states, chunk_codes});
    device.launch(blocks.tiles, RansEncodeChunks{table});
    device.launch(messages_count, RansMeasure{table});
  }
  template <class Device>
  void place(Device& device, const DeviceWorkspace& w, const Tiling& blocks) const {
    device.launch(blocks.tiles, RansPlace{table_of(w, blocks)});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w, const Tiling& blocks) const {
    device.launch(messages_count, RansRead{w.tensors, w.at(messages), w.at(states)});
    device.launch(blocks.tiles, RansDecodeChunks{w.tensors, w.at(messages), w.at(states), blocks});
  }

  RansTable table_of(const DeviceWorkspace& w, const Tiling& blocks) const {
    return {w.at(messages), w.at(counts), w.at(states), blocks, chunk_codes, w.at(slots), w.at(chunk_bytes)};
  }
};

struct RansPlan {
  static constexpr bool kTakesCodes = true;
  static Result<RansPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    begin(device, w, nullptr, true);
    encode_messages(device, w, true);
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    begin(device, w, nullptr, false);
    places.decode(device, w, w.tiling(blocks));
  }

  template <class Device>
  void begin(Device& device, const DeviceWorkspace& w, std::uint8_t* codes, bool encodes) const {
    const std::int64_t groups = (w.tensor_count + RansMessages::kThreads - 1) / RansMessages::kThreads;
    device.launch(groups, RansMessages{w.tensors, w.tensor_count, w.at(code_bases), w.at(chunk_bases), codes, encodes,
                                       w.at(places.messages), w.at(places.states)});
  }
  template <class Device>
  void encode_messages(Device& device, const DeviceWorkspace& w, bool are_codes) const {
    RansState* const states = w.at(places.states);
    std::uint64_t* const counts = w.at(places.counts);
    device.fill(counts, 0, static_cast<std::uint64_t>(w.tensor_count) * 256 * sizeof(std::uint64_t));
    device.launch(counted.tiles, RansCount{w.at(places.messages), counts, w.tiling(counted)});
    places.encode(device, w, w.tiling(blocks));
    const std::int64_t groups = (w.tensor_count + RansPayloadBytes::kThreads - 1) / RansPayloadBytes::kThreads;
    device.launch(groups, RansPayloadBytes{w.tensors, w.tensor_count, states, are_codes});
    places.place(device, w, w.tiling(blocks));
  }

  RansPlaces places;
  TilingSlots counted, blocks;
  WorkspaceSlot<std::int64_t> code_bases, chunk_bases;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `compso` on a device, a payload for each tensor: ranges of blocks, their grids, then one pass that filters, rounds,
// makes codes and counts them; groups of zeros left out; where sections end, from the counts; and `rans`. Not yet:
// `error`, which searches the step. Payloads with more sections than our encoders write are for the CPU, and set a
// fault.
#pragma once

#include "codec/compso/compso_entropy.h"
#include "codec/compso/compso_grid.h"
#include "codec/compso/compso_groups.h"
#include "codec/float_rans/float_rans_device.h"
#include "codec/quant/block_device.h"
#include "codec/quant/quant_device.h"
#include "codec/rans/rans_device.h"

namespace cortado {

constexpr std::int64_t kCompsoCountedUnits = 2;  // of a tile

// Bits whose maximum is wanted; those of `low` complemented.
struct CompsoRangeBits {
  std::uint32_t low, high, magnitude;
};

struct CompsoBlockPlan {
  BlockGrid grid;
  std::int32_t first_level;
};

// Where things of one tensor are.
struct CompsoTensor {
  std::int64_t first_block;    // of all blocks of the batch
  std::int64_t first_unit;     // of all units
  std::int64_t first_code;     // of all codes
  std::int64_t first_group;    // of all groups
  std::int64_t first_message;  // a section at most for each unit, then the high codes
  std::int64_t first_chunk;    // of all chunks there may be
  std::int64_t first_tile;     // of all blocks of chunks there may be
  std::int64_t tiles;
  std::int64_t blocks, units, block_elems;
  std::int64_t groups;  // 0 where all codes are kept
};

struct CompsoTables {
  TensorTable tensors;
  CompsoSettings settings;
  const CompsoTensor* places;
  CompsoBlockPlan* plans;
  std::uint32_t* is_wide;  // of a tensor
  std::uint8_t* low;
  std::uint8_t* high;
  std::uint8_t* kept_low;  // of those that are not left out
  std::uint8_t* kept_high;
  std::uint32_t* is_kept;  // of a group
  std::int64_t* group_at;  // codes kept of the tensor before a group
  std::int64_t* kept;      // codes of a tensor that are not left out
  RansMessage* messages;
  RansState* states;
  std::uint64_t* counts;  // of messages
  // The tiling of RansTable, made here.
  std::int32_t* message_of_tile;
  std::int64_t* first_tile_of_message;
  std::int64_t* elems_of_message;
  std::int64_t high_code_base;  // high codes are numbered behind all low ones

  CORTADO_HD std::int64_t steps_at() const {
    return 8 + (settings.rounding == Rounding::kDither ? static_cast<std::int64_t>(sizeof(RandomKey)) : 0);
  }
  CORTADO_HD std::int64_t first_levels_at(const CompsoTensor& place) const { return steps_at() + 4 * place.blocks; }
  CORTADO_HD std::int64_t codes_at(const CompsoTensor& place) const { return steps_at() + 8 * place.blocks; }
  CORTADO_HD std::int32_t zero_code(std::int64_t tensor) const {
    return is_wide[tensor] != 0 ? kCompsoWideZeroCode : kCompsoZeroCode;
  }
};

// Once it is known which groups of a tensor are kept: where their codes are.
template <class Block>
CORTADO_HD void place_groups(Block& block, const CompsoTables& tables, std::int64_t tensor) {
  const CompsoTensor place = tables.places[tensor];
  const std::int64_t elems = tables.tensors.entries[tensor].elems;
  std::int64_t kept = 0;
  for (std::int64_t first = 0; first < place.groups; first += Block::kThreads) {
    typename Block::template PerThread<std::uint64_t> before;
    block.each([&](int t) {
      const std::int64_t group = first + t;
      const bool is_kept = group < place.groups && tables.is_kept[place.first_group + group] != 0;
      before[t] = is_kept ? static_cast<std::uint64_t>(compso_elems_of_group(elems, group)) : 0;
    });
    const std::uint64_t all = block.exclusive_sum(before);
    block.each([&](int t) {
      if (first + t < place.groups) {
        tables.group_at[place.first_group + first + t] = kept + static_cast<std::int64_t>(before[t]);
      }
    });
    kept += static_cast<std::int64_t>(all);
  }
  block.each([&](int t) {
    if (t == 0) tables.kept[tensor] = place.groups == 0 ? elems : kept;
  });
}

// A tile lies in one block: tiles are numbered through blocks, each with as many as the first.
struct CompsoTile {
  std::int64_t tensor, block;
  Tile values;

  CORTADO_HD static std::int64_t tiles_of_block(const CompsoTensor& place) {
    return (place.block_elems + kBlockTileElems - 1) / kBlockTileElems;
  }
  CORTADO_HD static CompsoTile of(const CompsoTables& tables, const Tiling& tiling, std::int64_t number) {
    const Tile tile = tiling.tile(number);
    const CompsoTensor place = tables.places[tile.tensor];
    const std::int64_t of_block = tiles_of_block(place);
    const std::int64_t block = tile.number / of_block, in_block = tile.number % of_block * kBlockTileElems;
    const std::int64_t first = block * place.block_elems + in_block;
    const std::int64_t left = place.block_elems - in_block,
                       of_tensor = tables.tensors.entries[tile.tensor].elems - first;
    const std::int64_t elems = left < of_tensor ? left : of_tensor;
    return {tile.tensor, block, {tile.tensor, number, first, elems < kBlockTileElems ? elems : kBlockTileElems}};
  }
};

// ---- encode --------------------------------------------------------------------------------------------------------

struct CompsoMeasure {
  static constexpr int kThreads = kBlockTileThreads;

  CompsoTables tables;
  Tiling tiling;
  CompsoRangeBits* ranges;  // of blocks; 0 before

  using Shared = CompsoRangeBits;

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const CompsoTile tile = CompsoTile::of(tables, tiling, block.number());
    if (tile.values.elems <= 0) return;
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    block.each([&](int t) {
      if (t == 0) shared = {0, 0, 0};
    });
    block.each([&](int t) {
      CompsoRangeBits bits = {0, 0, 0};
      float values[kBlockRows];
      const std::int64_t rows = (tile.values.elems - t + kThreads - 1) / kThreads;
      load_values<kBlockRows>(tensor.data, tensor.dtype, tile.values.first + t, kThreads, rows, values);
      for (int row = 0; row < kBlockRows; ++row) {
        if (row >= rows) continue;
        const float v = values[row];
        bits.low = std::max(bits.low, ~ordered_bits(v));
        bits.high = std::max(bits.high, ordered_bits(v));
        bits.magnitude = std::max(bits.magnitude, std::bit_cast<std::uint32_t>(v) & 0x7fffffffu);
      }
      block.raise(&shared.low, bits.low);
      block.raise(&shared.high, bits.high);
      block.raise(&shared.magnitude, bits.magnitude);
    });
    block.each([&](int t) {
      if (t > 0) return;
      CompsoRangeBits& range = ranges[tables.places[tile.tensor].first_block + tile.block];
      block.raise(&range.low, shared.low);
      block.raise(&range.high, shared.high);
      block.raise(&range.magnitude, shared.magnitude);
    });
  }
};

// Grids, and the header but for its first word.
struct CompsoChoose {
  static constexpr int kThreads = 128;

  CompsoTables tables;
  Tiling tiling;  // of blocks
  const CompsoRangeBits* ranges;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const CompsoTensor place = tables.places[tile.tensor];
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    block.each([&](int t) {
      if (t >= tile.elems) return;
      const std::int64_t number = tile.first + t;
      const CompsoRangeBits& bits = ranges[place.first_block + number];
      CompsoBlockPlan plan = {};
      plan.grid.step = std::bit_cast<float>(kCompsoNanStep);
      CompsoLevels levels;
      if (bits.magnitude < kInfinityBits) {
        const CompsoBlockRange range = {
            .low = from_ordered_bits(~bits.low), .high = from_ordered_bits(bits.high), .is_finite = true};
        const float step = compso_step_of_bound(tables.settings, range);
        plan.grid = compso_grid(step, dead_zone(), tables.settings, range, tensor.dtype);
        levels = compso_levels(plan.grid, tables.settings, range);
      }
      plan.first_level = levels.first;
      tables.plans[place.first_block + number] = plan;
      if (levels.last - levels.first > 255) block.set_bits(&tables.is_wide[tile.tensor], 1u);
      store_bytes(plan.grid.step, tensor.payload + tables.steps_at() + 4 * number);
      store_bytes(levels.first, tensor.payload + tables.first_levels_at(place) + 4 * number);
      if (number == 0 && tables.settings.rounding == Rounding::kDither) {
        store_bytes(RandomKey{tensor.key, *tables.tensors.step}, tensor.payload + 8);
      }
    });
  }

  CORTADO_HD static DeadZone dead_zone() { return kDeadZone; }
};

struct CompsoQuantise {
  static constexpr int kThreads = kBlockTileThreads, kHistograms = 4;
  static constexpr std::int64_t kTileGroups = kBlockTileElems / kCompsoGroupElems;
  static_assert(kBlockLanes * kBlockRows == kCompsoGroupElems);

  CompsoTables tables;
  Tiling tiling;
  std::uint32_t* unit_counts;  // 256 a unit of low codes; 0 before
  std::uint64_t* high_counts;  // 256 a tensor; 0 before

  struct Shared {
    alignas(16) std::byte low[kBlockTileElems];
    alignas(16) std::byte high[kBlockTileElems];
    std::uint32_t low_counts[kCompsoCountedUnits][kHistograms][256];
    std::uint32_t high_counts[kHistograms][256];
    std::uint32_t is_kept[kTileGroups];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const CompsoTile tile = CompsoTile::of(tables, tiling, block.number());
    if (tile.values.elems <= 0) return;
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const CompsoTensor place = tables.places[tile.tensor];
    const CompsoSettings& settings = tables.settings;
    const BlockGrid grid = tables.plans[place.first_block + tile.block].grid;
    const bool is_wide = tables.is_wide[tile.tensor] != 0;
    const bool is_nan = grid.step != grid.step;
    const bool is_random = settings.rounding == Rounding::kStochastic || settings.rounding == Rounding::kDither;
    const float magic = 0x1.8p23f + static_cast<float>(tables.zero_code(tile.tensor));
    PhiloxStream stream = {};
    if (is_random) stream = tables.tensors.stream_of(tile.tensor);
    block.each([&](int t) {
      for (auto& of_unit : shared.low_counts)
        for (auto& histogram : of_unit) histogram[t] = 0;
      for (auto& histogram : shared.high_counts) histogram[t] = 0;
      if (t < kTileGroups) shared.is_kept[t] = place.groups == 0 ? 1 : 0;
    });
    const auto zero_code = static_cast<std::uint32_t>(tables.zero_code(tile.tensor));
    block.each([&](int t) {
      const LaneValues values = load_lane(tensor, tile.values, t);
      PhiloxBlock random = {};
      if (is_random) random = random_of_lane(stream, tile.values.first, t);
      bool is_zero = true;
      for (int row = 0; row < kBlockRows; ++row) {
        const std::int64_t i = first_of_thread(t) + row * kBlockLanes;
        if (i >= tile.values.elems) break;
        const float v = values.rows[row];
        float q = v * grid.inverse;
        if (settings.filter > 0 && !(fabsf(v) > grid.threshold)) q = 0;
        q = q < -grid.reach ? -grid.reach : q > grid.reach ? grid.reach : q;
        const float sum = nudged(settings.rounding, kDeadZone, q, 0, random_byte(random, row)) + magic;
        const std::uint32_t code =
            is_nan ? static_cast<std::uint32_t>(kCompsoWideZeroCode) : std::bit_cast<std::uint32_t>(sum);
        const std::uint32_t low = code & 0xff, high = code >> 8 & 0xff;
        shared.low[i] = static_cast<std::byte>(low);
        if (is_wide) shared.high[i] = static_cast<std::byte>(high);
        is_zero = is_zero && (code & (is_wide ? 0xffffu : 0xffu)) == zero_code;
      }
      // All values of a thread lie in one group.
      if (!is_zero) block.set_bits(&shared.is_kept[first_of_thread(t) / kCompsoGroupElems], 1u);
    });
    block.each([&](int t) {
      if (!settings.is_coded) return;
      for (int row = 0; row < kBlockRows; ++row) {
        const std::int64_t i = first_of_thread(t) + row * kBlockLanes;
        if (i >= tile.values.elems) return;
        if (shared.is_kept[i / kCompsoGroupElems] == 0) continue;
        const std::int64_t unit = (tile.values.first + i) / kUnitCodes - tile.values.first / kUnitCodes;
        block.add(&shared.low_counts[unit][t % kHistograms][static_cast<std::uint32_t>(shared.low[i])], 1u);
        if (is_wide) block.add(&shared.high_counts[t % kHistograms][static_cast<std::uint32_t>(shared.high[i])], 1u);
      }
    });
    block.each([&](int t) {
      std::byte* const payload = tensor.payload + tables.codes_at(place) + tile.values.first;
      std::byte* const low =
          settings.is_coded ? reinterpret_cast<std::byte*>(tables.low) + place.first_code + tile.values.first : payload;
      std::byte* const high = settings.is_coded
                                  ? reinterpret_cast<std::byte*>(tables.high) + place.first_code + tile.values.first
                                  : payload + tensor.elems;
      copy_share(shared.low, tile.values.elems, low, t, kThreads);
      if (is_wide) copy_share(shared.high, tile.values.elems, high, t, kThreads);
      if (!settings.is_coded) return;
      if (place.groups > 0 && t < compso_groups(tile.values.elems)) {
        tables.is_kept[place.first_group + tile.values.first / kCompsoGroupElems + t] = shared.is_kept[t];
      }
      for (std::int64_t unit = 0; unit < kCompsoCountedUnits; ++unit) {
        std::uint32_t sum = 0;
        for (const auto& histogram : shared.low_counts[unit]) sum += histogram[t];
        if (sum == 0) continue;
        block.add(&unit_counts[(place.first_unit + tile.values.first / kUnitCodes + unit) * 256 + t], sum);
      }
      std::uint64_t sum = 0;
      for (const auto& histogram : shared.high_counts) sum += histogram[t];
      if (is_wide && sum > 0) block.add(&high_counts[tile.tensor * 256 + t], sum);
    });
  }
};

struct CompsoPlaceGroups {
  static constexpr int kThreads = 256;

  CompsoTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    place_groups(block, tables, block.number());
  }
};

// Codes of groups that are kept, where something is left out.
struct CompsoKeep {
  static constexpr int kThreads = kBlockTileThreads;

  CompsoTables tables;
  Tiling tiling;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const CompsoTile tile = CompsoTile::of(tables, tiling, block.number());
    if (tile.values.elems <= 0) return;
    const CompsoTensor place = tables.places[tile.tensor];
    if (tables.kept[tile.tensor] == tables.tensors.entries[tile.tensor].elems) return;
    const bool is_wide = tables.is_wide[tile.tensor] != 0;
    block.each([&](int t) {
      for (std::int64_t i = t; i < tile.values.elems; i += kThreads) {
        const std::int64_t at = tile.values.first + i, group = place.first_group + at / kCompsoGroupElems;
        if (tables.is_kept[group] == 0) continue;
        const std::int64_t to = place.first_code + tables.group_at[group] + at % kCompsoGroupElems;
        tables.kept_low[to] = tables.low[place.first_code + at];
        if (is_wide) tables.kept_high[to] = tables.high[place.first_code + at];
      }
    });
  }
};

// Messages of a tensor, and the blocks of chunks that code them. For code that one thread runs.
struct CompsoMessageWriter {
  const CompsoTables& tables;
  const CompsoTensor& place;
  std::int64_t tensor;
  std::int64_t chunk, tile;  // next, of the tensor's

  CORTADO_HD void put(std::int64_t number, std::uint8_t* codes, std::byte* payload, std::int64_t elems,
                      std::int64_t code_base) {
    const std::int64_t chunk_codes = tables.settings.chunk_codes;
    const std::int64_t message = place.first_message + number;
    tables.messages[message] = {codes, payload, elems, code_base, place.first_chunk + chunk, tensor};
    tables.first_tile_of_message[message] = place.first_tile + tile;
    tables.elems_of_message[message] = elems;
    const std::int64_t chunks = rans_chunks(elems, chunk_codes);
    const std::int64_t tiles = rans_chunks(chunks, kRansBlockChunks);
    for (std::int64_t i = 0; i < tiles; ++i) {
      tables.message_of_tile[place.first_tile + tile + i] = static_cast<std::int32_t>(message);
    }
    chunk += chunks;
    tile += tiles;
  }
  // The rest of the tensor's messages, from `number` to before `end`.
  CORTADO_HD void put_none(std::int64_t number, std::int64_t end) {
    for (; number < end; ++number) put(number, nullptr, nullptr, 0, 0);
  }
  CORTADO_HD void finish() {
    for (; tile < place.tiles; ++tile) tables.message_of_tile[place.first_tile + tile] = -1;
  }
};

// Cuts a tensor's codes into sections; as SectionEncoder. A thread a symbol.
struct CompsoSections {
  static constexpr int kThreads = 256;

  CompsoTables tables;
  const std::uint32_t* unit_counts;
  const std::uint64_t* high_counts;
  std::int64_t* sections;  // of a tensor

  struct Shared {
    double together[kThreads], alone[kThreads];
    std::uint32_t first, last;  // of the unit's symbols, the first one complemented
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const std::int64_t tensor = block.number();
    const CompsoTensor place = tables.places[tensor];
    const TensorEntry entry = tables.tensors.entries[tensor];
    CompsoMessageWriter writer = {tables, place, tensor, 0, 0};
    typename Block::template PerThread<std::uint64_t> of_section, of_unit;
    block.each([&](int t) { of_section[t] = 0; });
    const std::int64_t kept = tables.kept[tensor];
    std::int64_t begin = 0, at = 0, count = 0;  // codes that are kept
    double section_bits = 0;
    for (std::int64_t unit = 0; unit < place.units; ++unit) {
      block.each([&](int t) {
        if (t == 0) shared.first = shared.last = 0;
      });
      block.each([&](int t) {
        of_unit[t] = unit_counts[(place.first_unit + unit) * 256 + t];
        shared.together[t] = bits_of_count(of_section[t] + of_unit[t]);
        shared.alone[t] = bits_of_count(of_unit[t]);
        if (of_unit[t] == 0) return;
        block.raise(&shared.first, 255u - static_cast<std::uint32_t>(t));
        block.raise(&shared.last, static_cast<std::uint32_t>(t));
      });
      for (int apart = kThreads / 2; apart > 0; apart /= 2) {
        block.each([&](int t) {
          if (t >= apart) return;
          shared.together[t] += shared.together[t + apart];
          shared.alone[t] += shared.alone[t + apart];
        });
      }
      typename Block::template PerThread<std::uint64_t> before;
      block.each([&](int t) { before[t] = of_unit[t]; });
      const auto elems = static_cast<std::int64_t>(block.exclusive_sum(before));
      const auto of_all = static_cast<std::uint64_t>(at - begin + elems);
      const double together = bits_of_count(of_all) - shared.together[0];
      const double alone = bits_of_count(static_cast<std::uint64_t>(elems)) - shared.alone[0];
      const double cost = section_cost_bits(255 - shared.first, shared.last);
      const bool is_new = at > begin && elems > 0 && together - section_bits - alone > cost;
      if (is_new) {
        put_section(block, writer, of_section, count, begin, at);
        ++count;
        begin = at;
      }
      section_bits = is_new ? alone : together;
      block.each([&](int t) { of_section[t] = (is_new ? 0 : of_section[t]) + of_unit[t]; });
      at += elems;
    }
    if (place.units > 0) {
      put_section(block, writer, of_section, count, begin, kept);
      ++count;
    }
    const bool is_wide = tables.is_wide[tensor] != 0;
    block.each([&](int t) {
      tables.counts[(place.first_message + place.units) * 256 + t] = high_counts[tensor * 256 + t];
      if (t > 0) return;
      writer.put_none(count, place.units);
      writer.put(place.units, (kept < entry.elems ? tables.kept_high : tables.high) + place.first_code, nullptr,
                 is_wide ? kept : 0, tables.high_code_base + place.first_code);
      writer.finish();
      sections[tensor] = count;
    });
  }

 private:
  template <class Block>
  CORTADO_HD void put_section(Block& block, CompsoMessageWriter& writer,
                              typename Block::template PerThread<std::uint64_t>& counts, std::int64_t number,
                              std::int64_t begin, std::int64_t end) const {
    const CompsoTensor& place = writer.place;
    const bool leaves_out = tables.kept[writer.tensor] < tables.tensors.entries[writer.tensor].elems;
    std::uint8_t* const codes = (leaves_out ? tables.kept_low : tables.low) + place.first_code + begin;
    block.each([&](int t) {
      tables.counts[(place.first_message + number) * 256 + t] = counts[t];
      if (t == 0) writer.put(number, codes, nullptr, end - begin, place.first_code + begin);
    });
  }
};

// Once sizes are known: where payloads of sections begin, their heads, the first word and the size of all.
struct CompsoPlace {
  static constexpr int kThreads = 32;

  CompsoTables tables;
  const std::int64_t* sections;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t tensor = block.number();
    const TensorEntry entry = tables.tensors.entries[tensor];
    const CompsoTensor place = tables.places[tensor];
    block.each([&](int t) {
      if (t > 0) return;
      if (entry.elems == 0) {
        tables.tensors.payload_bytes[tensor] = 0;
        return;
      }
      const bool is_wide = tables.is_wide[tensor] != 0;
      std::byte* to = entry.payload + tables.codes_at(place);
      std::uint64_t word = is_wide ? 2 : 1;
      if (tables.settings.is_coded) {
        const std::int64_t count = sections[tensor];
        for (std::int64_t i = 0; i < count; ++i) {
          RansMessage& message = tables.messages[place.first_message + i];
          const std::uint64_t bytes = tables.states[place.first_message + i].payload_bytes;
          if (i + 1 < count) {
            store_bytes(static_cast<std::uint64_t>(message.elems), to);
            to += 8;
          }
          store_bytes(bytes, to);
          message.payload = to + 8;
          to += 8 + bytes;
        }
        tables.messages[place.first_message + place.units].payload = to;
        if (is_wide) to += tables.states[place.first_message + place.units].payload_bytes;
        word += static_cast<std::uint64_t>(count - 1) << 8;
        if (tables.kept[tensor] < entry.elems) {
          word += kCompsoLeavesOut;
          to += compso_group_flag_bytes(place.groups);
        }
      } else {
        to += is_wide ? 2 * entry.elems : entry.elems;
      }
      store_bytes(word, entry.payload);
      tables.tensors.payload_bytes[tensor] = static_cast<std::uint64_t>(to - entry.payload);
    });
    block.each([&](int t) {
      if (!tables.settings.is_coded || tables.kept[tensor] == entry.elems) return;
      const auto bytes = static_cast<std::int64_t>(compso_group_flag_bytes(place.groups));
      std::byte* const flags = entry.payload + tables.tensors.payload_bytes[tensor] - bytes;
      for (std::int64_t i = t; i < bytes; i += kThreads) {
        std::uint32_t bits = 0;
        for (std::int64_t bit = 0; bit < 8 && 8 * i + bit < place.groups; ++bit) {
          if (tables.is_kept[place.first_group + 8 * i + bit] != 0) bits |= 1u << bit;
        }
        flags[i] = static_cast<std::byte>(bits);
      }
    });
  }
};

// ---- decode --------------------------------------------------------------------------------------------------------

// Reads and checks the header and the heads of sections.
struct CompsoRead {
  static constexpr int kThreads = 256;

  CompsoTables tables;

  struct Shared {
    std::uint32_t is_broken, leaves_out;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const std::int64_t tensor = block.number();
    const TensorEntry entry = tables.tensors.entries[tensor];
    const CompsoTensor place = tables.places[tensor];
    const std::uint64_t bytes = tables.tensors.payload_bytes[tensor];
    const auto codes_at = static_cast<std::uint64_t>(tables.codes_at(place));
    const bool is_whole = entry.elems == 0 ? bytes == 0 : bytes >= codes_at && bytes <= entry.max_payload_bytes;
    block.each([&](int t) {
      if (t > 0) return;
      shared.is_broken = is_whole ? 0 : 1;
      shared.leaves_out = 0;
      if (!is_whole || place.groups == 0 || (load_bytes<std::uint64_t>(entry.payload) & kCompsoLeavesOut) == 0) return;
      const std::uint64_t flag_bytes = compso_group_flag_bytes(place.groups);
      shared.leaves_out = 1;
      if (bytes < codes_at + flag_bytes || has_flags_beyond(entry.payload + bytes - flag_bytes, place.groups)) {
        shared.is_broken = 1;
      }
    });
    const bool leaves_out = block.uniform(shared.leaves_out) != 0 && block.uniform(shared.is_broken) == 0;
    const std::uint64_t flag_bytes = leaves_out ? compso_group_flag_bytes(place.groups) : 0;
    block.each([&](int t) {
      for (std::int64_t group = t; group < place.groups; group += kThreads) {
        tables.is_kept[place.first_group + group] =
            !leaves_out || is_group_kept(entry.payload + bytes - flag_bytes, group) ? 1 : 0;
      }
    });
    if (tables.settings.is_coded) place_groups(block, tables, tensor);
    block.each([&](int t) {
      if (!is_whole || entry.elems == 0) return;
      for (std::int64_t i = t; i < place.blocks; i += kThreads) {
        const auto step = load_bytes<float>(entry.payload + tables.steps_at() + 4 * i);
        const auto first_level = load_bytes<std::int32_t>(entry.payload + tables.first_levels_at(place) + 4 * i);
        if (!is_compso_step(step) || first_level <= -kCompsoLevelLimit || first_level >= kCompsoLevelLimit) {
          block.set_bits(&shared.is_broken, 1u);
        }
        CompsoBlockPlan plan = {};
        plan.grid.step = step;
        plan.first_level = first_level;
        tables.plans[place.first_block + i] = plan;
      }
    });
    block.each([&](int t) {
      if (t > 0) return;
      bool is_read = shared.is_broken == 0;
      if (is_read && entry.elems > 0) {
        is_read = read_codes(tensor, entry, place, bytes - flag_bytes, codes_at, leaves_out);
      }
      if (!is_read) block.set_bits(&tables.tensors.faults[tensor], kCorruptPayload);
      if (!tables.settings.is_coded || (is_read && entry.elems > 0)) return;
      CompsoMessageWriter writer = {tables, place, tensor, 0, 0};
      put_nothing(writer, place, 0);
    });
  }

 private:
  // No message from `number` on. A payload of nothing is a message's that has no codes.
  CORTADO_HD void put_nothing(CompsoMessageWriter& writer, const CompsoTensor& place, std::int64_t number) const {
    for (std::int64_t i = number; i <= place.units; ++i) tables.states[place.first_message + i].payload_bytes = 0;
    writer.put_none(number, place.units + 1);
    writer.finish();
  }

  CORTADO_HD bool read_codes(std::int64_t tensor, const TensorEntry& entry, const CompsoTensor& place,
                             std::uint64_t bytes, std::uint64_t at, bool leaves_out) const {
    const bool is_coded = tables.settings.is_coded;
    const auto elems = static_cast<std::uint64_t>(is_coded ? tables.kept[tensor] : entry.elems);
    const auto word = load_bytes<std::uint64_t>(entry.payload);
    const std::uint64_t code_bytes = (is_coded ? word & 0xff : word) - (leaves_out ? kCompsoLeavesOut : 0);
    if (code_bytes != 1 && !(code_bytes == 2 && compso_may_be_wide(tables.settings))) return false;
    tables.is_wide[tensor] = code_bytes == 2 ? 1 : 0;
    if (!is_coded) return bytes - at == code_bytes * elems;
    const std::uint64_t sections = 1 + (word >> 8);
    if (sections > static_cast<std::uint64_t>(place.units)) return false;
    CompsoMessageWriter writer = {tables, place, tensor, 0, 0};
    std::uint64_t done = 0;
    for (std::uint64_t i = 0; i < sections; ++i) {
      const bool is_last = i + 1 == sections;
      const std::uint64_t head = is_last ? 8 : 16;
      if (bytes - at < head) return false;
      std::uint64_t of_section = elems - done;
      if (!is_last) {
        of_section = load_bytes<std::uint64_t>(entry.payload + at);
        if (of_section == 0 || of_section >= elems - done) return false;
      }
      const auto of_payload = load_bytes<std::uint64_t>(entry.payload + at + head - 8);
      at += head;
      if (of_payload > bytes - at) return false;
      put(writer, static_cast<std::int64_t>(i), tables.low + place.first_code + done, entry.payload + at, of_section,
          of_payload);
      at += of_payload;
      done += of_section;
    }
    for (std::int64_t i = static_cast<std::int64_t>(sections); i < place.units; ++i) {
      tables.states[place.first_message + i].payload_bytes = 0;
    }
    writer.put_none(static_cast<std::int64_t>(sections), place.units);
    put(writer, place.units, tables.high + place.first_code, entry.payload + at, code_bytes == 2 ? elems : 0,
        bytes - at);
    writer.finish();
    return true;
  }

  CORTADO_HD void put(CompsoMessageWriter& writer, std::int64_t number, std::uint8_t* codes, std::byte* payload,
                      std::uint64_t elems, std::uint64_t bytes) const {
    writer.put(number, codes, payload, static_cast<std::int64_t>(elems), 0);
    tables.states[writer.place.first_message + number].payload_bytes = bytes;
  }
};

struct CompsoDequantise {
  static constexpr int kThreads = kBlockTileThreads;

  CompsoTables tables;
  Tiling tiling;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const CompsoTile tile = CompsoTile::of(tables, tiling, block.number());
    if (tile.values.elems <= 0) return;
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const CompsoTensor place = tables.places[tile.tensor];
    const CompsoSettings& settings = tables.settings;
    if ((tables.tensors.faults[tile.tensor] & kCorruptPayload) != 0) return;
    const CompsoBlockPlan plan = tables.plans[place.first_block + tile.block];
    const bool is_wide = tables.is_wide[tile.tensor] != 0;
    const auto* const payload = reinterpret_cast<const std::uint8_t*>(tensor.payload) + tables.codes_at(place);
    const std::uint8_t* const low = settings.is_coded ? tables.low + place.first_code : payload;
    const std::uint8_t* const high = settings.is_coded ? tables.high + place.first_code : payload + tensor.elems;
    const bool leaves_out = settings.is_coded && tables.kept[tile.tensor] < tensor.elems;
    const bool is_dither = settings.rounding == Rounding::kDither;
    PhiloxStream stream = {};
    if (is_dither) {
      const auto key = load_bytes<RandomKey>(tensor.payload + 8);
      stream = {key.key, key.step};
    }
    block.each([&](int t) {
      PhiloxBlock random = {};
      if (is_dither) random = random_of_lane(stream, tile.values.first, t);
      for (int row = 0; row < kBlockRows; ++row) {
        const std::int64_t i = first_of_thread(t) + row * kBlockLanes;
        if (i >= tile.values.elems) return;
        std::int64_t at = tile.values.first + i;
        std::int32_t code = tables.zero_code(tile.tensor);
        bool is_kept = true;
        if (leaves_out) {
          const std::int64_t group = place.first_group + at / kCompsoGroupElems;
          is_kept = tables.is_kept[group] != 0;
          at = tables.group_at[group] + at % kCompsoGroupElems;
        }
        if (is_kept) code = low[at] | (is_wide ? high[at] << 8 : 0);
        const std::int32_t offset = code - (plan.first_level + tables.zero_code(tile.tensor));
        const auto level = static_cast<float>(plan.first_level + (offset & (is_wide ? 0xffff : 0xff)));
        float value = level;
        if (is_dither) value = level - (one_and_fraction(random_byte(random, row)) - 1.5f);
        if (settings.rounding == Rounding::kDeadZone) value = outwards(level, kDeadZone);
        store_value(times_step(value, plan.grid.step), tensor.data, tensor.dtype, tile.values.first + i);
      }
    });
  }
};

struct CompsoPlan {
  static constexpr bool kTakesCodes = false;
  static Result<CompsoPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    if (settings.is_lossless()) return lossless.encode(device, w);
    const CompsoTables tables = tables_of(w);
    const auto tensors = static_cast<std::uint64_t>(w.tensor_count);
    device.fill(w.at(ranges), 0, static_cast<std::uint64_t>(blocks) * sizeof(CompsoRangeBits));
    device.fill(w.at(is_wide), 0, tensors * sizeof(std::uint32_t));
    device.launch(tiles.tiles, CompsoMeasure{tables, w.tiling(tiles), w.at(ranges)});
    device.launch(block_tiles.tiles, CompsoChoose{tables, w.tiling(block_tiles), w.at(ranges)});
    if (settings.is_coded) {
      device.fill(w.at(unit_counts), 0, static_cast<std::uint64_t>(units) * 256 * sizeof(std::uint32_t));
      device.fill(w.at(high_counts), 0, tensors * 256 * sizeof(std::uint64_t));
    }
    device.launch(tiles.tiles, CompsoQuantise{tables, w.tiling(tiles), w.at(unit_counts), w.at(high_counts)});
    if (settings.is_coded) {
      device.launch(w.tensor_count, CompsoPlaceGroups{tables});
      device.launch(tiles.tiles, CompsoKeep{tables, w.tiling(tiles)});
      device.launch(w.tensor_count, CompsoSections{tables, w.at(unit_counts), w.at(high_counts), w.at(sections)});
      places.encode(device, w, chunk_tiling(w));
    }
    device.launch(w.tensor_count, CompsoPlace{tables, w.at(sections)});
    if (settings.is_coded) places.place(device, w, chunk_tiling(w));
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    if (settings.is_lossless()) return lossless.decode(device, w);
    const CompsoTables tables = tables_of(w);
    device.launch(w.tensor_count, CompsoRead{tables});
    if (settings.is_coded) places.decode(device, w, chunk_tiling(w));
    device.launch(tiles.tiles, CompsoDequantise{tables, w.tiling(tiles)});
  }

  CompsoTables tables_of(const DeviceWorkspace& w) const {
    return {w.tensors,
            settings,
            w.at(tensor_places),
            w.at(plans),
            w.at(is_wide),
            w.at(low),
            w.at(high),
            w.at(kept_low),
            w.at(kept_high),
            w.at(is_kept),
            w.at(group_at),
            w.at(kept),
            w.at(places.messages),
            w.at(places.states),
            w.at(places.counts),
            w.at(message_of_tile),
            w.at(first_tile_of_message),
            w.at(elems_of_message),
            high_code_base};
  }
  // Of messages, as the device makes them.
  Tiling chunk_tiling(const DeviceWorkspace& w) const {
    return {w.at(message_of_tile), w.at(first_tile_of_message), w.at(elems_of_message), chunk_tiles,
            kRansBlockChunks * settings.chunk_codes};
  }

  CompsoSettings settings;
  FloatRansPlan lossless;
  std::int64_t blocks = 0, units = 0, chunk_tiles = 0, high_code_base = 0;
  TilingSlots tiles, block_tiles;
  WorkspaceSlot<CompsoTensor> tensor_places;
  WorkspaceSlot<CompsoRangeBits> ranges;
  WorkspaceSlot<CompsoBlockPlan> plans;
  WorkspaceSlot<std::uint32_t> is_wide, unit_counts, is_kept;
  WorkspaceSlot<std::uint64_t> high_counts;
  WorkspaceSlot<std::uint8_t> low, high, kept_low, kept_high;
  WorkspaceSlot<std::int64_t> group_at, kept, sections, first_tile_of_message, elems_of_message;
  WorkspaceSlot<std::int32_t> message_of_tile;
  RansPlaces places;
};

}  // namespace cortado

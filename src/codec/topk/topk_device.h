// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `topk` on a device, for block=tensor. What is kept is found as spec.md has it: with a threshold from a sample, and
// where that misleads, or for select=exact, by a radix select of three digits (11, 10 and 10 bits of the magnitude).
// Then tiles are counted, counts summed, and what is kept collected in order; the index section is made from the list.
// All decisions are taken on the device: a launch that is not needed ends at once.
#pragma once

#include <bit>

#include "codec/device_workspace.h"
#include "codec/topk/topk_rice.h"
#include "core/device_bits.h"

namespace cortado {

constexpr int kTopkThreads = 256, kTopkValues = 16;  // of a thread, neighbours
constexpr std::int64_t kTopkTileElems = std::int64_t{kTopkThreads} * kTopkValues;
constexpr int kTopkBins = 2048;  // of the widest digit
constexpr std::int64_t kTopkListTile = 1024;
constexpr std::int64_t kTopkHeaderBytes = kIndexHeaderBytes;

// Of one tensor, from the host.
struct TopkTensor {
  std::int64_t least, most, candidates;
  std::int64_t sample_base, sample_runs, sample_stride;  // no runs: no sample
  std::int64_t ranks[3];
  std::int64_t list_base, list_elems;  // in the lists of kept values
  std::int64_t bits_base, bits_bytes;  // room for the unary part or the bitmap; multiples of 4
};

// What kernels find out of a tensor.
constexpr std::uint32_t kSettled = 1;      // the cut is final, and the tiles are counted
constexpr std::uint32_t kNotBySample = 2;  // until the attempts with the sample are over

struct TopkState {
  std::int32_t bounds[3];  // of the sample
  std::int32_t magnitude;  // kept are those above it, and the first `ties` of it
  std::int64_t ties;
  std::uint64_t above;  // magnitudes above it
  std::int64_t wanted;  // of those that share the digits found
  std::uint32_t is_settled;
  std::int64_t kept;
  // The index section.
  IndexKind kind;
  std::int32_t rice;
  std::int64_t low_bytes, stream_bytes;  // behind the header: lower bits, then the unary part or the bitmap
  std::uint64_t index_bytes;
};

struct TopkTables {
  TensorTable tensors;
  const TopkTensor* places;
  TopkState* states;
  Tiling tiles;  // of values
  std::uint64_t* tile_above;
  std::uint64_t* tile_equal;  // then, of a tile, how many are kept before it
  Tiling lists;               // of kept values
  std::uint64_t* list_sums;   // of a tile
  float* values;
  std::int64_t* positions;
  std::uint32_t* sample;
  std::byte* bits;
  IndexKind index;
  DType value_dtype;
};

CORTADO_HD inline std::int32_t magnitude_bits(float value) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
}
// ---- radix select --------------------------------------------------------------------------------------------------

struct TopkDigit {
  int shift, bits;

  CORTADO_HD static TopkDigit of(int pass) {
    constexpr int kShifts[] = {20, 10, 0}, kBits[] = {11, 10, 10};
    return {kShifts[pass], kBits[pass]};
  }
  // Whether a magnitude has the digits that were found, and its next one.
  CORTADO_HD bool has(std::int32_t magnitude, std::int32_t found) const {
    return magnitude >> (shift + bits) == found >> (shift + bits);
  }
  CORTADO_HD int digit(std::int32_t magnitude) const { return magnitude >> shift & ((1 << bits) - 1); }
};

// Finds the digit of the k-th largest among counted ones; `k` becomes its rank among those with that digit.
struct TopkPicked {
  std::int32_t digit;
  std::int64_t k;
};
template <class Block, typename Count>
CORTADO_HD void pick_digit(Block& block, const Count* counts, std::int64_t k, TopkPicked* picked) {
  constexpr int kBinsAThread = kTopkBins / kTopkThreads;
  typename Block::template PerThread<std::uint64_t> before, own;
  block.each([&](int t) {
    own[t] = 0;
    for (int i = 0; i < kBinsAThread; ++i) own[t] += counts[kTopkBins - 1 - (t * kBinsAThread + i)];
    before[t] = own[t];
  });
  block.exclusive_sum(before);
  block.each([&](int t) {
    auto left = k - static_cast<std::int64_t>(before[t]);
    if (left <= 0 || left > static_cast<std::int64_t>(own[t])) return;
    int bin = kTopkBins - 1 - t * kBinsAThread;
    while (static_cast<std::int64_t>(counts[bin]) < left) left -= static_cast<std::int64_t>(counts[bin--]);
    *picked = {bin, left};
  });
}

struct TopkBegin {
  static constexpr int kThreads = 32;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    TopkState& state = tables.states[block.number()];
    const TopkTensor& place = tables.places[block.number()];
    block.each([&](int t) {
      if (t > 0) return;
      state = {};
      state.wanted = place.least;
      state.is_settled = place.least == 0 ? kSettled : 0;
    });
  }
};

// ---- the sample ----------------------------------------------------------------------------------------------------

struct TopkSample {
  static constexpr int kThreads = 256, kRun = 8;

  TopkTables tables;
  Tiling tiling;  // of runs

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const TopkTensor& place = tables.places[tile.tensor];
    const PhiloxStream stream = tables.tensors.stream_of(tile.tensor);
    block.each([&](int t) {
      const std::int64_t i = tile.first + t;
      if (t >= tile.elems) return;
      const PhiloxBlock random = stream.block(static_cast<std::uint64_t>(i - i % 8));
      const std::int64_t half = random[static_cast<std::size_t>(i % 8 / 2)] >> (i % 2 * 16) & 0xffff;
      const std::int64_t at = i * place.sample_stride + (half * (place.sample_stride - kRun + 1) >> 16);
      for (int r = 0; r < kRun; ++r) {
        const float value = load_value(tensor.data, tensor.dtype, at + r);
        tables.sample[place.sample_base + i * kRun + r] = static_cast<std::uint32_t>(magnitude_bits(value));
      }
    });
  }
};

// The bounds of three ranks. The bisection of the specification, without counting: its course follows from the k-th
// and the next largest of the sample.
struct TopkSampleBounds {
  static constexpr int kThreads = kTopkThreads;

  TopkTables tables;

  struct Shared {
    std::uint32_t counts[kTopkBins];
    std::uint32_t largest, next;
    TopkPicked picked;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const TopkTensor& place = tables.places[block.number()];
    TopkState& state = tables.states[block.number()];
    const std::int64_t count = place.sample_runs * TopkSample::kRun;
    const std::uint32_t* const sample = tables.sample + place.sample_base;
    if (count == 0) return;
    for (int which = 0; which < 3; ++which) {
      const std::int64_t k = place.ranks[which];
      std::int32_t bound = -1;
      if (k < count) bound = bound_of(block, shared, sample, count, k);
      block.each([&](int t) {
        if (t > 0) return;
        state.bounds[which] = bound;
        if (which == 0) state.magnitude = bound;
      });
    }
  }

 private:
  template <class Block>
  CORTADO_HD static std::int32_t bound_of(Block& block, Shared& shared, const std::uint32_t* sample, std::int64_t count,
                                          std::int64_t k) {
    std::int32_t found = 0;
    std::int64_t left = k;
    bool is_tied = false;  // the next largest is equal
    for (int pass = 0; pass < 3; ++pass) {
      const TopkDigit digit = TopkDigit::of(pass);
      block.each([&](int t) {
        for (int i = t; i < kTopkBins; i += kThreads) shared.counts[i] = 0;
        if (t == 0) shared.largest = shared.next = 0;
      });
      block.each([&](int t) {
        for (std::int64_t i = t; i < count; i += kThreads) {
          const auto magnitude = static_cast<std::int32_t>(sample[i]);
          if (digit.has(magnitude, found)) block.add(&shared.counts[digit.digit(magnitude)], 1u);
        }
      });
      pick_digit(block, shared.counts, left, &shared.picked);
      found |= shared.picked.digit << digit.shift;
      left = shared.picked.k;
      is_tied = static_cast<std::int64_t>(shared.counts[shared.picked.digit]) > left;
      block.each([](int) {});  // before counts are cleared
    }
    block.each([&](int t) {
      std::uint32_t largest = 0, next = 0;
      for (std::int64_t i = t; i < count; i += kThreads) {
        largest = largest > sample[i] ? largest : sample[i];
        if (sample[i] < static_cast<std::uint32_t>(found) && sample[i] >= next) next = sample[i];
      }
      block.raise(&shared.largest, largest);
      block.raise(&shared.next, next);
    });
    const std::int64_t of_k = found, after_k = is_tied ? found : static_cast<std::int64_t>(shared.next);
    std::int64_t low = -1, high = shared.largest;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      if (middle >= after_k && middle < of_k) return static_cast<std::int32_t>(middle);
      (middle < after_k ? low : high) = middle;
    }
    return static_cast<std::int32_t>(low);
  }
};

// ---- counting and deciding -----------------------------------------------------------------------------------------

// Of every tile, how many magnitudes are above the cut's and how many are equal.
struct TopkCount {
  static constexpr int kThreads = kTopkThreads;

  TopkTables tables;
  bool of_sample;  // only tensors that have one

  struct Shared {
    std::uint32_t above, equal;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tables.tiles.tile(block.number());
    TopkState& state = tables.states[tile.tensor];
    if (state.is_settled != 0 || (of_sample && tables.places[tile.tensor].sample_runs == 0)) return;
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const std::int32_t cut = state.magnitude;
    block.each([&](int t) {
      if (t == 0) shared.above = shared.equal = 0;
    });
    block.each([&](int t) {
      std::uint32_t above = 0, equal = 0;
      for (std::int64_t i = t; i < tile.elems; i += kThreads) {
        const std::int32_t magnitude = magnitude_bits(load_value(tensor.data, tensor.dtype, tile.first + i));
        above += magnitude > cut ? 1 : 0;
        equal += magnitude == cut ? 1 : 0;
      }
      block.add(&shared.above, above);
      block.add(&shared.equal, equal);
    });
    block.each([&](int t) {
      if (t > 0) return;
      tables.tile_above[block.number()] = shared.above;
      tables.tile_equal[block.number()] = shared.equal;
      if (of_sample) block.add(&state.above, std::uint64_t{shared.above});
    });
  }
};

// Whether what is above the sampled bound will do, and otherwise what to try next.
struct TopkDecide {
  static constexpr int kThreads = 32;

  TopkTables tables;
  int attempt;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    TopkState& state = tables.states[block.number()];
    const TopkTensor& place = tables.places[block.number()];
    block.each([&](int t) {
      if (t > 0 || place.sample_runs == 0 || state.is_settled != 0) return;
      const auto count = static_cast<std::int64_t>(state.above);
      const bool fits = count <= place.candidates;
      if (fits && count >= place.least && count <= place.most) {
        state.is_settled = kSettled;
        state.ties = 0;
        return;
      }
      state.above = 0;
      const std::int32_t other = state.bounds[fits ? 1 : 2];
      const bool is_hopeless = (fits && count >= place.least) || other == state.magnitude;
      if (attempt > 0) return;
      if (is_hopeless) {
        state.is_settled = kNotBySample;
      } else {
        state.magnitude = other;
      }
    });
  }
};

// After the sample: what it did not settle is for the radix select.
struct TopkUnsettle {
  static constexpr int kThreads = 32;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    TopkState& state = tables.states[block.number()];
    block.each([&](int t) {
      if (t > 0 || state.is_settled == kSettled) return;
      state.is_settled = 0;
      state.magnitude = 0;
    });
  }
};

// A digit of the radix select.
struct TopkHistogram {
  static constexpr int kThreads = kTopkThreads;

  TopkTables tables;
  int pass;
  std::uint64_t* counts;  // kTopkBins a tensor; 0 before

  struct Shared {
    std::uint32_t counts[kTopkBins];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tables.tiles.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    if (state.is_settled != 0) return;
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const TopkDigit digit = TopkDigit::of(pass);
    block.each([&](int t) {
      for (int i = t; i < kTopkBins; i += kThreads) shared.counts[i] = 0;
    });
    block.each([&](int t) {
      for (std::int64_t i = t; i < tile.elems; i += kThreads) {
        const std::int32_t magnitude = magnitude_bits(load_value(tensor.data, tensor.dtype, tile.first + i));
        if (digit.has(magnitude, state.magnitude)) block.add(&shared.counts[digit.digit(magnitude)], 1u);
      }
    });
    block.each([&](int t) {
      for (int i = t; i < kTopkBins; i += kThreads) {
        if (shared.counts[i] > 0) block.add(&counts[tile.tensor * kTopkBins + i], std::uint64_t{shared.counts[i]});
      }
    });
  }
};

struct TopkPick {
  static constexpr int kThreads = kTopkThreads;

  TopkTables tables;
  int pass;
  std::uint64_t* counts;

  struct Shared {
    TopkPicked picked;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    TopkState& state = tables.states[block.number()];
    std::uint64_t* const own = counts + block.number() * kTopkBins;
    if (state.is_settled != 0) return;
    pick_digit(block, own, state.wanted, &shared.picked);
    block.each([&](int t) {
      for (int i = t; i < kTopkBins; i += kThreads) own[i] = 0;
      if (t > 0) return;
      state.magnitude |= shared.picked.digit << TopkDigit::of(pass).shift;
      state.wanted = shared.picked.k;
      state.ties = shared.picked.k;
    });
  }
};

// ---- collecting ----------------------------------------------------------------------------------------------------

// Counts of tiles become places in the list.
struct TopkScan {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t tensor = block.number();
    TopkState& state = tables.states[tensor];
    const std::int64_t first_tile = tables.tiles.first_tile[tensor];
    const std::int64_t elems = tables.tensors.entries[tensor].elems;
    const std::int64_t tiles = (elems + kTopkTileElems - 1) / kTopkTileElems;
    const auto ties = static_cast<std::uint64_t>(state.ties);
    std::uint64_t above_before = 0, equal_before = 0;
    for (std::int64_t first = 0; first < tiles; first += kThreads) {
      typename Block::template PerThread<std::uint64_t> above, equal;
      block.each([&](int t) {
        const bool is_one = first + t < tiles;
        above[t] = is_one ? tables.tile_above[first_tile + first + t] : 0;
        equal[t] = is_one ? tables.tile_equal[first_tile + first + t] : 0;
      });
      const std::uint64_t all_above = block.exclusive_sum(above), all_equal = block.exclusive_sum(equal);
      block.each([&](int t) {
        if (first + t >= tiles) return;
        tables.tile_above[first_tile + first + t] = above_before + above[t];
        tables.tile_equal[first_tile + first + t] = equal_before + equal[t];
      });
      above_before += all_above;
      equal_before += all_equal;
    }
    block.each([&](int t) {
      if (t == 0) state.kept = static_cast<std::int64_t>(above_before + (equal_before < ties ? equal_before : ties));
    });
  }
};

struct TopkCollect {
  static constexpr int kThreads = kTopkThreads;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.tiles.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const TopkTensor& place = tables.places[tile.tensor];
    const auto ties = static_cast<std::uint64_t>(state.ties);
    typename Block::template PerThread<std::uint32_t> above, equal;
    typename Block::template PerThread<Values> values;
    block.each([&](int t) {
      above[t] = equal[t] = 0;
      for (int i = 0; i < kTopkValues; ++i) {
        const std::int64_t at = std::int64_t{t} * kTopkValues + i;
        const bool is_one = at < tile.elems;
        values[t].each[i] = is_one ? load_value(tensor.data, tensor.dtype, tile.first + at) : 0.0f;
        const std::int32_t magnitude = magnitude_bits(values[t].each[i]);
        above[t] += is_one && magnitude > state.magnitude ? 1 : 0;
        equal[t] += is_one && magnitude == state.magnitude ? 1 : 0;
      }
    });
    block.exclusive_sum(above);
    block.exclusive_sum(equal);
    block.each([&](int t) {
      std::uint64_t above_before = tables.tile_above[block.number()] + above[t];
      std::uint64_t equal_before = tables.tile_equal[block.number()] + equal[t];
      for (int i = 0; i < kTopkValues; ++i) {
        const std::int64_t at = std::int64_t{t} * kTopkValues + i;
        const std::int32_t magnitude = magnitude_bits(values[t].each[i]);
        const bool is_above = magnitude > state.magnitude, is_equal = magnitude == state.magnitude;
        if (at < tile.elems && (is_above || (is_equal && equal_before < ties))) {
          const std::uint64_t ties_before = equal_before < ties ? equal_before : ties;
          const auto to = place.list_base + static_cast<std::int64_t>(above_before + ties_before);
          tables.values[to] = values[t].each[i];
          tables.positions[to] = tile.first + at;
        }
        above_before += is_above ? 1 : 0;
        equal_before += is_equal ? 1 : 0;
      }
    });
  }

 private:
  struct Values {
    float each[kTopkValues];
  };
};

// ---- the index section ---------------------------------------------------------------------------------------------

CORTADO_HD inline std::int64_t gap_before(const std::int64_t* positions, std::int64_t i) {
  return positions[i] - (i == 0 ? 0 : positions[i - 1] + 1);
}

// Bits that the unary part takes for a tile of the list.
struct TopkUnarySums {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.lists.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const int rice = rice_bits(tables.tensors.entries[tile.tensor].elems, state.kept);
    const std::int64_t* const positions = tables.positions + tables.places[tile.tensor].list_base;
    typename Block::template PerThread<std::uint64_t> sum;
    block.each([&](int t) {
      sum[t] = 0;
      for (std::int64_t i = tile.first + t; i < tile.first + kTopkListTile && i < state.kept; i += kThreads) {
        sum[t] += static_cast<std::uint64_t>((gap_before(positions, i) >> rice) + 1);
      }
    });
    const std::uint64_t all = block.exclusive_sum(sum);
    block.each([&](int t) {
      if (t == 0) tables.list_sums[block.number()] = all;
    });
  }
};

// Sums before each tile of a tensor's list; returns that of all.
template <class Block>
CORTADO_HD std::uint64_t scan_list(Block& block, const TopkTables& tables, std::int64_t tensor) {
  constexpr int kThreads = Block::kThreads;
  const std::int64_t first_tile = tables.lists.first_tile[tensor];
  const std::int64_t tiles = (tables.places[tensor].list_elems + kTopkListTile - 1) / kTopkListTile;
  std::uint64_t before = 0;
  for (std::int64_t first = 0; first < tiles; first += kThreads) {
    typename Block::template PerThread<std::uint64_t> sum;
    block.each([&](int t) { sum[t] = first + t < tiles ? tables.list_sums[first_tile + first + t] : 0; });
    const std::uint64_t all = block.exclusive_sum(sum);
    block.each([&](int t) {
      if (first + t < tiles) tables.list_sums[first_tile + first + t] = before + sum[t];
    });
    before += all;
  }
  return before;
}

// The kind of the section and all sizes.
struct TopkShapeIndex {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t tensor = block.number();
    const std::uint64_t unary_bits = scan_list(block, tables, tensor);
    block.each([&](int t) {
      if (t > 0) return;
      TopkState& state = tables.states[tensor];
      const std::int64_t elems = tables.tensors.entries[tensor].elems;
      if (elems == 0) {
        tables.tensors.payload_bytes[tensor] = 0;
        return;
      }
      state.rice = rice_bits(elems, state.kept);
      const std::uint64_t low = bytes_of_bits(state.kept * state.rice);
      const std::uint64_t unary = bytes_of_bits(static_cast<std::int64_t>(unary_bits));
      const std::uint64_t bitmap = bytes_of_bits(elems);
      state.kind = tables.index != IndexKind::kSmaller ? tables.index
                   : low + unary <= bitmap             ? IndexKind::kDelta
                                                       : IndexKind::kBitmap;
      const bool is_delta = state.kind == IndexKind::kDelta;
      state.low_bytes = is_delta ? static_cast<std::int64_t>(low) : 0;
      state.stream_bytes = static_cast<std::int64_t>(is_delta ? unary : bitmap);
      state.index_bytes = static_cast<std::uint64_t>(kTopkHeaderBytes + state.low_bytes + state.stream_bytes);
      tables.tensors.payload_bytes[tensor] =
          state.index_bytes + static_cast<std::uint64_t>(state.kept) * dtype_bytes(tables.value_dtype);
    });
  }
};

// Sets the 1 bits of the unary part or of the bitmap; they are 0 before.
struct TopkSetBits {
  static constexpr int kThreads = 256, kRounds = kTopkListTile / kThreads;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.lists.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const TopkTensor& place = tables.places[tile.tensor];
    const std::int64_t* const positions = tables.positions + place.list_base;
    auto* const words = reinterpret_cast<std::uint32_t*>(tables.bits + place.bits_base);
    std::uint64_t before = tables.list_sums[block.number()];
    for (int round = 0; round < kRounds; ++round) {
      typename Block::template PerThread<std::uint64_t> own, sum;
      const std::int64_t first = tile.first + round * kThreads;
      block.each([&](int t) {
        own[t] = first + t < state.kept
                     ? static_cast<std::uint64_t>((gap_before(positions, first + t) >> state.rice) + 1)
                     : 0;
        sum[t] = own[t];
      });
      const std::uint64_t all = block.exclusive_sum(sum);
      block.each([&](int t) {
        if (first + t >= state.kept) return;
        const std::uint64_t bit = state.kind == IndexKind::kDelta ? before + sum[t] + own[t] - 1
                                                                  : static_cast<std::uint64_t>(positions[first + t]);
        block.set_bits(&words[bit / 32], 1u << (bit % 32));
      });
      before += all;
    }
  }
};

// Header, lower bits, the stream and the values, to their places.
struct TopkWrite {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileBytes = 4096;

  TopkTables tables;
  Tiling tiling;  // of bytes of the largest payloads

  struct Shared {};

  CORTADO_HD static std::byte low_byte(const std::int64_t* positions, std::int64_t kept, int rice, std::int64_t at) {
    std::uint32_t byte = 0;
    const std::int64_t first_bit = 8 * at;
    for (std::int64_t i = first_bit / rice; i < kept && i * rice < first_bit + 8; ++i) {
      const auto field = static_cast<std::uint64_t>(gap_before(positions, i)) & ((std::uint64_t{1} << rice) - 1);
      const std::int64_t shift = i * rice - first_bit;
      byte |= static_cast<std::uint32_t>(shift >= 0 ? field << shift : field >> -shift);
    }
    return static_cast<std::byte>(byte);
  }

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const TopkTensor& place = tables.places[tile.tensor];
    const std::int64_t* const positions = tables.positions + place.list_base;
    const float* const values = tables.values + place.list_base;
    std::byte* const payload = tables.tensors.entries[tile.tensor].payload;
    const auto bytes = static_cast<std::int64_t>(tables.tensors.payload_bytes[tile.tensor]);
    const auto index_bytes = static_cast<std::int64_t>(state.index_bytes);
    const std::int64_t end = bytes < tile.first + tile.elems ? bytes : tile.first + tile.elems;
    block.each([&](int t) {
      for (std::int64_t at = tile.first + t; at < end; at += kThreads) {
        const std::int64_t in_index = at - kTopkHeaderBytes, in_values = at - index_bytes;
        if (at == 0) {
          payload[at] = static_cast<std::byte>(state.kind);
        } else if (in_index < 0) {
          payload[at] = static_cast<std::byte>(static_cast<std::uint64_t>(state.kept) >> (8 * (at - 1)));
        } else if (in_index < state.low_bytes) {
          payload[at] = low_byte(positions, state.kept, state.rice, in_index);
        } else if (in_values < 0) {
          payload[at] = tables.bits[place.bits_base + in_index - state.low_bytes];
        } else if (tables.value_dtype == DType::kFloat16) {
          payload[at] = static_cast<std::byte>(float_to_fp16(values[in_values / 2]) >> (8 * (in_values % 2)));
        } else {
          payload[at] =
              static_cast<std::byte>(std::bit_cast<std::uint32_t>(values[in_values / 4]) >> (8 * (in_values % 4)));
        }
      }
    });
  }
};

// ---- decode --------------------------------------------------------------------------------------------------------

// Reads and checks the header and all sizes; a payload that is broken keeps nothing.
struct TopkRead {
  static constexpr int kThreads = 32;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t tensor = block.number();
    block.each([&](int t) {
      if (t > 0) return;
      TopkState& state = tables.states[tensor];
      const TensorEntry entry = tables.tensors.entries[tensor];
      state = {};
      if (read(entry, tables.places[tensor], tables.tensors.payload_bytes[tensor], state)) return;
      state.kept = state.stream_bytes = 0;
      block.set_bits(&tables.tensors.faults[tensor], kCorruptPayload);
    });
  }

 private:
  CORTADO_HD bool read(const TensorEntry& entry, const TopkTensor& place, std::uint64_t bytes, TopkState& state) const {
    if (entry.elems == 0) return bytes == 0;
    if (bytes < kTopkHeaderBytes || bytes > entry.max_payload_bytes) return false;
    state.kind = static_cast<IndexKind>(entry.payload[0]);
    const bool is_delta = state.kind == IndexKind::kDelta;
    if (!is_delta && state.kind != IndexKind::kBitmap) return false;
    if (tables.index != IndexKind::kSmaller && state.kind != tables.index) return false;
    state.kept = load_bytes<std::int64_t>(entry.payload + 1);
    if (state.kept < place.least || state.kept > place.most) return false;
    const std::uint64_t value_bytes = static_cast<std::uint64_t>(state.kept) * dtype_bytes(tables.value_dtype);
    if (bytes < kTopkHeaderBytes + value_bytes) return false;
    state.index_bytes = bytes - value_bytes;
    const auto body = static_cast<std::int64_t>(state.index_bytes) - kTopkHeaderBytes;
    if (!is_delta) {
      state.stream_bytes = body;
      const bool has_rest = entry.elems % 8 != 0;
      if (body != static_cast<std::int64_t>(bytes_of_bits(entry.elems))) return false;
      return !has_rest || (entry.payload[state.index_bytes - 1] >> (entry.elems % 8)) == std::byte{0};
    }
    state.rice = rice_bits(entry.elems, state.kept);
    const std::int64_t low_bits = state.kept * state.rice;
    state.low_bytes = static_cast<std::int64_t>(bytes_of_bits(low_bits));
    state.stream_bytes = body - state.low_bytes;
    const std::int64_t most_bits = state.kept + ((entry.elems - state.kept) >> state.rice);
    if (state.stream_bytes < static_cast<std::int64_t>(bytes_of_bits(state.kept)) ||
        state.stream_bytes > static_cast<std::int64_t>(bytes_of_bits(most_bits))) {
      return false;
    }
    if (entry.payload[state.index_bytes - 1] == std::byte{0}) return false;
    return low_bits % 8 == 0 ||
           (entry.payload[kTopkHeaderBytes + state.low_bytes - 1] >> (low_bits % 8)) == std::byte{0};
  }
};

CORTADO_HD inline std::int64_t low_field(const std::byte* low, std::int64_t i, int rice) {
  std::uint64_t field = 0;
  const std::int64_t first = i * rice;
  for (std::int64_t byte = first / 8; byte * 8 < first + rice; ++byte) {
    const std::int64_t shift = byte * 8 - first;
    const auto bits = std::to_integer<std::uint64_t>(low[byte]);
    field |= shift >= 0 ? bits << shift : bits >> -shift;
  }
  return static_cast<std::int64_t>(field & ((std::uint64_t{1} << rice) - 1));
}

// 1 bits of every tile of the streams; then, once those are summed, where each of them lies.
struct TopkFindBits {
  static constexpr int kThreads = 256, kBytes = 16;  // of a thread
  static constexpr std::int64_t kTileBytes = std::int64_t{kThreads} * kBytes;

  TopkTables tables;
  Tiling tiling;  // of bytes of the longest streams
  std::uint64_t* counts;
  bool finds;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const TopkTensor& place = tables.places[tile.tensor];
    const std::byte* const stream = tables.tensors.entries[tile.tensor].payload + kTopkHeaderBytes + state.low_bytes;
    typename Block::template PerThread<std::uint64_t> count;
    block.each([&](int t) {
      count[t] = 0;
      for (int i = 0; i < kBytes; ++i) {
        const std::int64_t at = tile.first + std::int64_t{t} * kBytes + i;
        if (at < state.stream_bytes) {
          count[t] += static_cast<std::uint64_t>(count_ones(std::to_integer<std::uint32_t>(stream[at])));
        }
      }
    });
    const std::uint64_t all = block.exclusive_sum(count);
    if (!finds) {
      block.each([&](int t) {
        if (t == 0) counts[block.number()] = all;
      });
      return;
    }
    if (state.kept == 0) return;  // broken
    block.each([&](int t) {
      std::uint64_t number = counts[block.number()] + count[t];
      for (int i = 0; i < kBytes; ++i) {
        const std::int64_t at = tile.first + std::int64_t{t} * kBytes + i;
        if (at >= state.stream_bytes) break;
        for (auto bits = std::to_integer<std::uint32_t>(stream[at]); bits != 0; bits &= bits - 1) {
          tables.positions[place.list_base + static_cast<std::int64_t>(number++)] = 8 * at + trailing_zeros(bits);
        }
      }
    });
  }
};

struct TopkScanBits {
  static constexpr int kThreads = 256;

  TopkTables tables;
  Tiling tiling;
  std::uint64_t* counts;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::int64_t tensor = block.number();
    TopkState& state = tables.states[tensor];
    const std::int64_t first_tile = tiling.first_tile[tensor];
    const std::int64_t tiles = (tiling.tensor_elems[tensor] + tiling.tile_elems - 1) / tiling.tile_elems;
    std::uint64_t before = 0;
    for (std::int64_t first = 0; first < tiles; first += kThreads) {
      typename Block::template PerThread<std::uint64_t> sum;
      block.each([&](int t) { sum[t] = first + t < tiles ? counts[first_tile + first + t] : 0; });
      const std::uint64_t all = block.exclusive_sum(sum);
      block.each([&](int t) {
        if (first + t < tiles) counts[first_tile + first + t] = before + sum[t];
      });
      before += all;
    }
    block.each([&](int t) {
      if (t > 0 || before == static_cast<std::uint64_t>(state.kept)) return;
      state.kept = state.stream_bytes = 0;
      block.set_bits(&tables.tensors.faults[tensor], kCorruptPayload);
    });
  }
};

// Sums of the lower parts of gaps, of every tile of the list.
struct TopkLowSums {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.lists.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const std::byte* const low = tables.tensors.entries[tile.tensor].payload + kTopkHeaderBytes;
    typename Block::template PerThread<std::uint64_t> sum;
    block.each([&](int t) {
      sum[t] = 0;
      for (std::int64_t i = tile.first + t; i < tile.first + kTopkListTile && i < state.kept; i += kThreads) {
        sum[t] += static_cast<std::uint64_t>(low_field(low, i, state.rice) + 1);
      }
    });
    const std::uint64_t all = block.exclusive_sum(sum);
    block.each([&](int t) {
      if (t == 0) tables.list_sums[block.number()] = all;
    });
  }
};

struct TopkScanLow {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    scan_list(block, tables, block.number());
  }
};

struct TopkZero {
  static constexpr int kThreads = 256;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.tiles.tile(block.number());
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    block.each([&](int t) {
      for (std::int64_t i = t; i < tile.elems; i += kThreads) {
        store_value(0, tensor.data, tensor.dtype, tile.first + i);
      }
    });
  }
};

// Values to their positions.
struct TopkScatter {
  static constexpr int kThreads = 256, kRounds = kTopkListTile / kThreads;

  TopkTables tables;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tables.lists.tile(block.number());
    const TopkState& state = tables.states[tile.tensor];
    const TensorEntry tensor = tables.tensors.entries[tile.tensor];
    const std::int64_t* const ones = tables.positions + tables.places[tile.tensor].list_base;
    const std::byte* const low = tensor.payload + kTopkHeaderBytes;
    const std::byte* const values = tensor.payload + state.index_bytes;
    const bool is_delta = state.kind == IndexKind::kDelta;
    std::uint64_t before = tables.list_sums[block.number()];
    for (int round = 0; round < kRounds; ++round) {
      typename Block::template PerThread<std::uint64_t> own, sum;
      const std::int64_t first = tile.first + round * kThreads;
      block.each([&](int t) {
        own[t] = is_delta && first + t < state.kept
                     ? static_cast<std::uint64_t>(low_field(low, first + t, state.rice) + 1)
                     : 0;
        sum[t] = own[t];
      });
      const std::uint64_t all = block.exclusive_sum(sum);
      block.each([&](int t) {
        const std::int64_t i = first + t;
        if (i >= state.kept) return;
        const std::int64_t position =
            is_delta ? ((ones[i] - i) << state.rice) + static_cast<std::int64_t>(before + sum[t] + own[t]) - 1
                     : ones[i];
        if (position >= tensor.elems) {
          block.set_bits(&tables.tensors.faults[tile.tensor], kCorruptPayload);
          return;
        }
        const float value = tables.value_dtype == DType::kFloat16
                                ? fp16_to_float(load_bytes<std::uint16_t>(values + 2 * i))
                                : load_bytes<float>(values + 4 * i);
        store_value(value, tensor.data, tensor.dtype, position);
      });
      before += all;
    }
  }
};

struct TopkPlan {
  static constexpr bool kTakesCodes = false;
  static Result<TopkPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    const TopkTables tables = tables_of(w);
    const std::int64_t count = w.tensor_count;
    device.launch(count, TopkBegin{tables});
    if (is_sampled) {
      device.launch(runs.tiles, TopkSample{tables, w.tiling(runs)});
      device.launch(count, TopkSampleBounds{tables});
      for (int attempt = 0; attempt < 2; ++attempt) {
        device.launch(tiles.tiles, TopkCount{tables, true});
        device.launch(count, TopkDecide{tables, attempt});
      }
      device.launch(count, TopkUnsettle{tables});
    }
    std::uint64_t* const bins = w.at(histograms);
    device.fill(bins, 0, static_cast<std::uint64_t>(count) * kTopkBins * sizeof(std::uint64_t));
    for (int pass = 0; pass < 3; ++pass) {
      device.launch(tiles.tiles, TopkHistogram{tables, pass, bins});
      device.launch(count, TopkPick{tables, pass, bins});
    }
    device.launch(tiles.tiles, TopkCount{tables, false});
    device.launch(count, TopkScan{tables});
    device.launch(tiles.tiles, TopkCollect{tables});
    device.fill(w.at(bits), 0, bits_bytes);
    device.launch(lists.tiles, TopkUnarySums{tables});
    device.launch(count, TopkShapeIndex{tables});
    device.launch(lists.tiles, TopkSetBits{tables});
    device.launch(payloads.tiles, TopkWrite{tables, w.tiling(payloads)});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    const TopkTables tables = tables_of(w);
    const Tiling of_streams = w.tiling(streams);
    std::uint64_t* const counts = w.at(stream_counts);
    device.launch(tiles.tiles, TopkZero{tables});
    device.launch(w.tensor_count, TopkRead{tables});
    device.launch(streams.tiles, TopkFindBits{tables, of_streams, counts, false});
    device.launch(w.tensor_count, TopkScanBits{tables, of_streams, counts});
    device.launch(streams.tiles, TopkFindBits{tables, of_streams, counts, true});
    device.launch(lists.tiles, TopkLowSums{tables});
    device.launch(w.tensor_count, TopkScanLow{tables});
    device.launch(lists.tiles, TopkScatter{tables});
  }

  TopkTables tables_of(const DeviceWorkspace& w) const {
    return {w.tensors,        w.at(places),    w.at(states),    w.tiling(tiles), w.at(tile_above),
            w.at(tile_equal), w.tiling(lists), w.at(list_sums), w.at(values),    w.at(positions),
            w.at(sample),     w.at(bits),      index,           value_dtype};
  }

  bool is_sampled = false;
  IndexKind index = IndexKind::kSmaller;
  DType value_dtype = DType::kFloat32;
  std::uint64_t bits_bytes = 0;
  TilingSlots tiles, runs, lists, payloads, streams;
  WorkspaceSlot<TopkTensor> places;
  WorkspaceSlot<TopkState> states;
  WorkspaceSlot<std::uint64_t> tile_above, tile_equal, list_sums, histograms, stream_counts;
  WorkspaceSlot<float> values;
  WorkspaceSlot<std::int64_t> positions;
  WorkspaceSlot<std::uint32_t> sample;
  WorkspaceSlot<std::byte> bits;
};

}  // namespace cortado

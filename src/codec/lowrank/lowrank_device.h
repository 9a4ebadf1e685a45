// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Low rank on a device, batched over tensors: the one-pass projections of lowrank_kernels.h, orthogonalisation and
// reconstruction. Projections keep the bound of spec.md and give the same bytes in every run, as partial sums are added
// in order; the other two give the bytes of the CPU (but for which NaN a product with NaN is).
//
// A pass reads the gradient and the residual once: a thread has a column of a tile, and a block walks over four tiles
// along the side that is summed, so that partial sums are few. One for both factors walks along the rows.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "codec/device_workspace.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/device_bits.h"
#include "core/exponent.h"
#include "core/loss_scale.h"

namespace cortado {

constexpr int kLowRankThreads = 256;
constexpr std::int64_t kLowRankTileRows = 16, kLowRankTileCols = kLowRankThreads;
constexpr std::int64_t kLowRankWalk = 4;  // tiles of a block
constexpr int kLowRankChunk = 4;          // ranks at once

// One tensor of a batch; float matrices are row-major. Row factors are rows x rank, column factors rank x cols.
struct LowRankEntry {
  std::int64_t rows, cols;
  int rank;
  DType dtype;           // of gradient and output
  const void* gradient;  // nullptr: zeros
  float gradient_scale;
  const float* loss_scale;   // in device memory: what the scale is made of, in its place
  const float* residual_in;  // as ResidualPass; nullptr: zeros
  float* residual_out;       // may be residual_in; nullptr: not kept
  const float* sent_row;     // subtracted from residual_in
  const float* sent_col;
  int sent_rank;
  float* row;           // row factor: made by projecting rows, or the basis that columns are projected on
  float* col;           // column factor, likewise
  float* spare;         // rank x rows, for orthogonalising the row factor
  float* partial_rows;  // row_partial_elems() floats, of LowRankProject narrow_row_factor_parts() * rows * rank
  float* partial_cols;
  std::uint32_t* fault;  // set where a gradient was not finite
  void* output;          // of reconstruction

  // Of LowRankProject, which makes the factor of each basis that is there.
  const float* row_basis;  // rows x rank
  const float* col_basis;  // rank x cols
};

// What a pass learns of a tensor, or of a block's part of it.
struct LowRankSums {
  double squares;              // of A, to the rounding of sums of 16
  std::uint32_t has_gradient;  // 0: all its bits were
  std::uint32_t not_finite;    // of a tensor only
};

CORTADO_HD constexpr std::int64_t low_rank_tiles(std::int64_t elems, std::int64_t tile) {
  return (elems + tile - 1) / tile;
}
// Stretches that are summed apart: of columns for the row factor, of rows for the column factor.
CORTADO_HD constexpr std::int64_t row_factor_parts(std::int64_t cols) {
  return low_rank_tiles(cols, kLowRankTileCols * kLowRankWalk);
}
CORTADO_HD constexpr std::int64_t col_factor_parts(std::int64_t rows) {
  return low_rank_tiles(rows, kLowRankTileRows * kLowRankWalk);
}
// Of LowRankProject, whose blocks are one tile wide.
CORTADO_HD constexpr std::int64_t narrow_row_factor_parts(std::int64_t cols) {
  return low_rank_tiles(cols, kLowRankTileCols);
}
constexpr std::int64_t row_partial_elems(std::int64_t rows, std::int64_t cols, std::int64_t rank) {
  return row_factor_parts(cols) * rows * rank;
}
constexpr std::int64_t col_partial_elems(std::int64_t rows, std::int64_t cols, std::int64_t rank) {
  return col_factor_parts(rows) * cols * rank;
}

// ---- projections ---------------------------------------------------------------------------------------------------

// A of one column of a tile, and of a tile.
struct LowRankColumn {
  float rows[kLowRankTileRows];
};
struct LowRankTile {
  float rows[kLowRankTileRows][kLowRankTileCols];
};

// Loops over rows and ranks have constant bounds here, so that what they index stays in registers.

CORTADO_HD inline float scale_of(const LowRankEntry& entry) {
  return entry.loss_scale == nullptr ? entry.gradient_scale : unscale_of(*entry.loss_scale);
}

// What all passes do: A = gradient * scale + (residual - sent), kept where it is asked for. Returns the bits of the
// gradient, or-ed.
template <class Block>
CORTADO_HD std::uint32_t load_column(const LowRankEntry& entry, std::int64_t row, std::int64_t col,
                                     LowRankColumn* column, Block& block) {
  const float scale = scale_of(entry), limit = gradient_limit_of(scale);
  const std::int64_t rows = entry.rows - row < kLowRankTileRows ? entry.rows - row : kLowRankTileRows;
  const std::int64_t at = row * entry.cols + col;
  float kept[kLowRankTileRows] = {};
  if (entry.residual_in != nullptr) load_rows<kLowRankTileRows>(entry.residual_in + at, entry.cols, rows, kept);
  for (int i = 0; i < kLowRankTileRows; ++i) column->rows[i] = kept[i];
  for (int k = 0; k < entry.sent_rank; ++k) {
    const float factor = entry.sent_col[k * entry.cols + col];
    float sent[kLowRankTileRows];
    load_rows<kLowRankTileRows>(entry.sent_row + row * entry.sent_rank + k, entry.sent_rank, rows, sent);
    for (int i = 0; i < kLowRankTileRows; ++i) column->rows[i] = fmaf(-sent[i], factor, column->rows[i]);
  }
  std::uint32_t bits = 0;
  if (entry.gradient != nullptr) {
    bool is_finite = true;
    float gradient[kLowRankTileRows];
    load_values<kLowRankTileRows>(entry.gradient, entry.dtype, at, entry.cols, rows, gradient);
    for (int i = 0; i < kLowRankTileRows; ++i) {
      bits |= std::bit_cast<std::uint32_t>(gradient[i]);
      const bool ok = fabsf(gradient[i]) < limit;
      is_finite = is_finite && ok;
      column->rows[i] = ok ? fmaf(gradient[i], scale, column->rows[i]) : kept[i];
    }
    if (!is_finite) block.set_bits(entry.fault, 1u);
  }
  if (entry.residual_out != nullptr) {
    store_rows<kLowRankTileRows>(column->rows, entry.residual_out + at, entry.cols, rows);
  }
  return bits;
}

// Where a tile is added.
struct LowRankPart {
  std::int64_t row, col;  // of the tile
  std::int64_t number;    // of the partial sum
  bool is_first;          // of its tiles
};

// Of the rows of a warp, kLowRankChunk ranks each.
struct LowRankRowSums {
  static constexpr int kRows = kLowRankTileRows / (kLowRankThreads / kWarpThreads);
  float values[kRows * kLowRankChunk];
};

// sums += tile * transpose(basis), for kLowRankChunk ranks from k0 on: of the columns of each thread.
template <class Block>
CORTADO_HD void add_to_row_sums(Block& block, const LowRankTile& tile, const LowRankEntry& entry, const float* basis,
                                const LowRankPart& part, int k0,
                                typename Block::template PerThread<LowRankRowSums>& sums) {
  constexpr int kRowsAWarp = LowRankRowSums::kRows;
  const int count = entry.rank - k0 < kLowRankChunk ? entry.rank - k0 : kLowRankChunk;
  block.each_in_warp([&](int t) {
    LowRankRowSums sum = sums[t];
    for (int j = t % kWarpThreads; j < kLowRankTileCols && part.col + j < entry.cols; j += kWarpThreads) {
      for (int k = 0; k < kLowRankChunk; ++k) {
        const float value = k < count ? basis[(k0 + k) * entry.cols + part.col + j] : 0.0f;
        for (int i = 0; i < kRowsAWarp; ++i) {
          float& of_row = sum.values[i * kLowRankChunk + k];
          of_row = fmaf(tile.rows[t / kWarpThreads * kRowsAWarp + i][j], value, of_row);
        }
      }
    }
    sums[t] = sum;
  });
}

// Of the sums that a thread has, it keeps a half and gives the other one away.
template <int kCount, class Block>
CORTADO_HD void halve_row_sums(Block& block, typename Block::template PerThread<LowRankRowSums>& sums, int apart) {
  constexpr int kHalf = kCount / 2;
  struct Half {
    float values[kHalf];
  };
  typename Block::template PerThread<Half> given;
  block.each_in_warp([&](int t) {
    const bool is_upper = (t & apart) != 0;
    for (int i = 0; i < kHalf; ++i) {
      const float low = sums[t].values[i], high = sums[t].values[kHalf + i];
      given[t].values[i] = is_upper ? low : high;
      sums[t].values[i] = is_upper ? high : low;
    }
  });
  block.exchange(given, apart);
  block.each_in_warp([&](int t) {
    for (int i = 0; i < kHalf; ++i) sums[t].values[i] += given[t].values[i];
  });
}

// partial_rows (+)= the sums of a warp's threads. They are eight and the threads 32: each step halves what a thread has
// to add, until four threads have the same sum.
template <class Block>
CORTADO_HD void put_row_sums(Block& block, const LowRankEntry& entry, const LowRankPart& part, int k0,
                             typename Block::template PerThread<LowRankRowSums>& sums) {
  static_assert(LowRankRowSums::kRows * kLowRankChunk == 8 && kWarpThreads == 32);
  halve_row_sums<8>(block, sums, 16);
  halve_row_sums<4>(block, sums, 8);
  halve_row_sums<2>(block, sums, 4);
  typename Block::template PerThread<float> sum;
  block.each_in_warp([&](int t) { sum[t] = sums[t].values[0]; });
  block.butterfly(sum, 4, [](float a, float b) { return a + b; });
  block.each_in_warp([&](int t) {
    const int number = t % kWarpThreads / 4, k = k0 + number % kLowRankChunk;
    const std::int64_t row = part.row + t / kWarpThreads * LowRankRowSums::kRows + number / kLowRankChunk;
    if (t % 4 != 0 || row >= entry.rows || k >= entry.rank) return;
    float& to = entry.partial_rows[(part.number * entry.rows + row) * entry.rank + k];
    to = part.is_first ? sum[t] : to + sum[t];
  });
}

// Both, for the ranks from k0 on.
template <class Block>
CORTADO_HD void add_to_row_factor(Block& block, const LowRankTile& tile, const LowRankEntry& entry, const float* basis,
                                  const LowRankPart& part, int k0) {
  for (; k0 < entry.rank; k0 += kLowRankChunk) {
    typename Block::template PerThread<LowRankRowSums> sums;
    block.each_in_warp([&](int t) { sums[t] = {}; });
    add_to_row_sums(block, tile, entry, basis, part, k0, sums);
    put_row_sums(block, entry, part, k0, sums);
  }
}

// partial_cols += transpose(basis) * column, of one thread.
CORTADO_HD inline void add_to_col_factor(const LowRankColumn& column, const LowRankEntry& entry, const float* basis,
                                         const LowRankPart& part) {
  for (int k0 = 0; k0 < entry.rank; k0 += kLowRankChunk) {
    const int count = entry.rank - k0 < kLowRankChunk ? entry.rank - k0 : kLowRankChunk;
    float sums[kLowRankChunk] = {};
    for (int k = 0; k < kLowRankChunk; ++k) {
      if (k >= count) break;
      float of_rows[kLowRankTileRows];
      load_rows<kLowRankTileRows>(basis + part.row * entry.rank + k0 + k, entry.rank, entry.rows - part.row, of_rows);
      for (int i = 0; i < kLowRankTileRows; ++i) sums[k] = fmaf(of_rows[i], column.rows[i], sums[k]);
    }
    for (int k = 0; k < kLowRankChunk; ++k) {
      if (k >= count) break;
      float* const to = entry.partial_cols + (part.number * entry.rank + k0 + k) * entry.cols + part.col;
      *to = part.is_first ? sums[k] : *to + sums[k];
    }
  }
}

// The row factor, A * transpose(entry.col), in parts: a block takes 16 rows and four tiles of columns.
struct LowRankProjectRows {
  static constexpr int kThreads = kLowRankThreads;

  const LowRankEntry* entries;
  Tiling tiling;  // of row tiles x parts

  struct Shared {
    LowRankTile tile;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    const std::int64_t parts = row_factor_parts(entry.cols), part = tile.number % parts;
    const std::int64_t row = tile.number / parts * kLowRankTileRows;
    const std::int64_t begin = part * kLowRankTileCols * kLowRankWalk;
    // Those of the first ranks stay in registers on the way; others are added to in memory, tile after tile.
    typename Block::template PerThread<LowRankRowSums> sums;
    block.each_in_warp([&](int t) { sums[t] = {}; });
    for (std::int64_t first = begin; first < begin + kLowRankTileCols * kLowRankWalk && first < entry.cols;
         first += kLowRankTileCols) {
      block.each([&](int t) {
        LowRankColumn column = {};
        if (first + t < entry.cols) load_column(entry, row, first + t, &column, block);
        for (int i = 0; i < kLowRankTileRows; ++i) shared.tile.rows[i][t] = column.rows[i];
      });
      const LowRankPart here = {row, first, part, first == begin};
      add_to_row_sums(block, shared.tile, entry, entry.col, here, 0, sums);
      add_to_row_factor(block, shared.tile, entry, entry.col, here, kLowRankChunk);
      block.each([](int) {});  // before the tile is written again
    }
    put_row_sums(block, entry, {row, begin, part, true}, 0, sums);
  }
};

// The column factor, transpose(entry.row) * A, in parts: a block takes 256 columns and four tiles of rows.
struct LowRankProjectCols {
  static constexpr int kThreads = kLowRankThreads;

  const LowRankEntry* entries;
  Tiling tiling;  // of column tiles x parts

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    const std::int64_t parts = col_factor_parts(entry.rows), part = tile.number % parts;
    const std::int64_t begin = part * kLowRankTileRows * kLowRankWalk;
    block.each([&](int t) {
      const std::int64_t col = tile.number / parts * kLowRankTileCols + t;
      if (col >= entry.cols) return;
      for (std::int64_t row = begin; row < begin + kLowRankTileRows * kLowRankWalk && row < entry.rows;
           row += kLowRankTileRows) {
        LowRankColumn column = {};
        load_column(entry, row, col, &column, block);
        add_to_col_factor(column, entry, entry.row, {row, col, part, row == begin});
      }
    });
  }
};

// Of values above 1e18, whose squares have no float.
CORTADO_HD inline double squares_of_large(const LowRankColumn& column) {
  double squares = 0;
  for (int i = 0; i < kLowRankTileRows; ++i) {
    const double a = column.rows[i];
    if (a - a == 0) squares += a * a;  // finite
  }
  return squares;
}

// Both factors, or that of the one basis that is there, in one pass: a block takes 256 columns and four tiles of rows.
// Without a basis only the residual is written.
struct LowRankProject {
  static constexpr int kThreads = kLowRankThreads;
  static constexpr int kWarps = kThreads / kWarpThreads;

  const LowRankEntry* entries;
  Tiling tiling;         // as of LowRankProjectCols
  LowRankSums* of_tile;  // a block each

  struct Shared {
    LowRankTile tile;
    LowRankSums of_warp[kWarps];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    const std::int64_t parts = col_factor_parts(entry.rows), part = tile.number % parts;
    const std::int64_t begin = part * kLowRankTileRows * kLowRankWalk;
    const std::int64_t across = tile.number / parts, first = across * kLowRankTileCols;
    typename Block::template PerThread<LowRankSums> sums;
    block.each_in_warp([&](int t) { sums[t] = {}; });
    for (std::int64_t row = begin; row < begin + kLowRankTileRows * kLowRankWalk && row < entry.rows;
         row += kLowRankTileRows) {
      block.each([&](int t) {
        LowRankColumn column = {};
        if (first + t < entry.cols) {
          sums[t].has_gradient |= load_column(entry, row, first + t, &column, block);
          if (entry.row_basis != nullptr) {
            add_to_col_factor(column, entry, entry.row_basis, {row, first + t, part, row == begin});
          }
        }
        float squares = 0;
        for (int i = 0; i < kLowRankTileRows; ++i) {
          squares += column.rows[i] * column.rows[i];
          shared.tile.rows[i][t] = column.rows[i];
        }
        const bool fits = squares <= std::numeric_limits<float>::max();
        sums[t].squares += fits ? static_cast<double>(squares) : squares_of_large(column);
      });
      if (entry.col_basis != nullptr) {
        add_to_row_factor(block, shared.tile, entry, entry.col_basis, {row, first, across, true}, 0);
      }
      block.each([](int) {});  // before the tile is written again
    }
    block.butterfly(sums, kWarpThreads, [](const LowRankSums& a, const LowRankSums& b) {
      return LowRankSums{a.squares + b.squares, a.has_gradient | b.has_gradient, 0};
    });
    block.each([&](int t) {
      if (t % kWarpThreads == 0) shared.of_warp[t / kWarpThreads] = sums[t];
    });
    block.each([&](int t) {
      if (t != 0) return;
      LowRankSums total = {};
      for (const LowRankSums& warp : shared.of_warp) {
        total.squares += warp.squares;
        total.has_gradient |= warp.has_gradient;
      }
      of_tile[block.number()] = total;
    });
  }
};

// A block each tensor.
struct LowRankAddSums {
  static constexpr int kThreads = 256;

  const LowRankEntry* entries;
  Tiling tiling;  // of LowRankProject
  const LowRankSums* of_tile;
  LowRankSums* of_tensor;

  struct Shared {
    LowRankSums of_thread[kThreads];
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const std::int64_t tensor = block.number();
    const LowRankSums* const sums = of_tile + tiling.first_tile[tensor];
    const std::int64_t tiles = tiling.tensor_elems[tensor];
    block.each([&](int t) {
      LowRankSums own = {};
      for (std::int64_t i = t; i < tiles; i += kThreads) {
        own.squares += sums[i].squares;
        own.has_gradient |= sums[i].has_gradient;
      }
      shared.of_thread[t] = own;
    });
    block.each([&](int t) {
      if (t != 0) return;
      LowRankSums total = {};
      for (const LowRankSums& own : shared.of_thread) {
        total.squares += own.squares;
        total.has_gradient |= own.has_gradient;
      }
      total.not_finite = *entries[tensor].fault;
      of_tensor[tensor] = total;
    });
  }
};

// undo_pass(), of entries that keep a residual.
struct LowRankUndo {
  static constexpr int kThreads = kLowRankThreads;

  const LowRankEntry* entries;
  Tiling tiling;  // of row tiles x column tiles

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    const std::int64_t col_tiles = low_rank_tiles(entry.cols, kLowRankTileCols);
    const std::int64_t first = tile.number / col_tiles * kLowRankTileRows;
    const float scale = scale_of(entry), limit = gradient_limit_of(scale);
    block.each([&](int t) {
      const std::int64_t col = tile.number % col_tiles * kLowRankTileCols + t;
      if (col >= entry.cols || entry.residual_out == nullptr) return;
      for (std::int64_t row = first; row < first + kLowRankTileRows && row < entry.rows; ++row) {
        float& residual = entry.residual_out[row * entry.cols + col];
        const float g = load_value(entry.gradient, entry.dtype, row * entry.cols + col);
        if (fabsf(g) < limit) {
          const float before = fmaf(-g, scale, residual);
          residual = fabsf(before) <= 0x1p-20f * fabsf(g * scale) ? 0.0f : before;
          continue;
        }
        for (int k = 0; k < entry.sent_rank; ++k) {
          residual = fmaf(-entry.sent_row[row * entry.sent_rank + k], entry.sent_col[k * entry.cols + col], residual);
        }
      }
    });
  }
};

// The parts of a factor, added in order; the first value tells of what was not finite.
struct LowRankAddParts {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 1024;

  const LowRankEntry* entries;
  Tiling tiling;         // of factor elements
  bool rows;             // the row factor
  bool is_both = false;  // of LowRankProject

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    if (is_both && (rows ? entry.col_basis : entry.row_basis) == nullptr) return;
    const std::int64_t row_parts = is_both ? narrow_row_factor_parts(entry.cols) : row_factor_parts(entry.cols);
    const std::int64_t parts = rows ? row_parts : col_factor_parts(entry.rows);
    const std::int64_t elems = entry.rank * (rows ? entry.rows : entry.cols);
    const float* const partial = rows ? entry.partial_rows : entry.partial_cols;
    float* const factor = rows ? entry.row : entry.col;
    block.each([&](int t) {
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        float sum = 0;
        for (std::int64_t part = 0; part < parts; ++part) sum += partial[part * elems + i];
        factor[i] = i == 0 && *entry.fault != 0 ? std::bit_cast<float>(0x7fc00000u) : sum;
      }
    });
  }
};

// ---- orthogonalisation ---------------------------------------------------------------------------------------------

enum class LowRankSide : std::uint8_t { kRows, kCols };

// orthogonalise(), a block each tensor: of the column factor as it lies, of the row factor through `spare`.
struct LowRankOrthogonalise {
  static constexpr int kThreads = 256, kLanes = 16;
  static constexpr int kRows = 16;  // that a thread has at once
  static constexpr std::int64_t kPieceElems = kThreads * kRows;

  const LowRankEntry* entries;
  const BasisKey* keys;
  const std::uint64_t* step;  // in place of that of the keys, or nullptr
  LowRankSide side;
  bool is_random;  // random_basis(): begins with normal numbers

  struct Shared {
    float products[kPieceElems];
    float lanes[kLanes];
    std::uint32_t magnitude;
  };

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared& shared) const {
    const LowRankEntry entry = entries[block.number()];
    BasisKey key = keys[block.number()];
    if (step != nullptr) key.step = *step;
    const bool is_row = side == LowRankSide::kRows;
    const std::int64_t length = is_row ? entry.rows : entry.cols;
    float* const vectors = is_row ? entry.spare : entry.col;
    if (is_row) {
      for (int k = 0; k < entry.rank; ++k)
        copy_vector(block, entry.row + k, entry.rank, vectors + k * length, 1, length);
    }
    for (int k = 0; k < entry.rank; ++k) {
      float* const v = vectors + k * length;
      if (is_random) fill_random(block, v, length, key, k, 0);
      bool is_done = k < length && orthonormalise_one(block, shared, vectors, length, k);
      for (int attempt = 0; attempt < kReplacementTries && !is_done && k < length; ++attempt) {
        fill_random(block, v, length, key, k, attempt);
        is_done = orthonormalise_one(block, shared, vectors, length, k);
      }
      if (is_done) continue;
      block.each([&](int t) {
        for (std::int64_t i = t; i < length; i += kThreads) v[i] = 0;
      });
    }
    if (is_row) {
      for (int k = 0; k < entry.rank; ++k)
        copy_vector(block, vectors + k * length, 1, entry.row + k, entry.rank, length);
    }
  }

 private:
  template <class Block>
  CORTADO_HD static void copy_vector(Block& block, const float* from, int from_stride, float* to, int to_stride,
                                     std::int64_t length) {
    block.each([&](int t) {
      for (std::int64_t first = t; first < length; first += kPieceElems) {
        float x[kRows];
        const std::int64_t rows = (length - first + kThreads - 1) / kThreads;
        load_rows<kRows>(from + first * from_stride, std::int64_t{kThreads} * from_stride, rows, x);
        store_rows<kRows>(x, to + first * to_stride, std::int64_t{kThreads} * to_stride, rows);
      }
    });
  }
  template <class Block>
  CORTADO_HD static void fill_random(Block& block, float* v, std::int64_t length, const BasisKey& key, int k,
                                     int attempt) {
    const PhiloxStream stream = {philox_key(key.seed, random_vector(key, k, attempt)), key.step};
    block.each([&](int t) {
      for (std::int64_t i = 2 * t; i < length; i += 2 * kThreads) {
        const PhiloxBlock random = stream.block(static_cast<std::uint64_t>(i / 2));
        v[i] = normal_from(random[0], random[1]);
        if (i + 1 < length) v[i + 1] = normal_from(random[2], random[3]);
      }
    });
  }

  // Products are rounded in parallel and added in the order of the specification, 16 threads a lane each.
  template <class Block>
  CORTADO_HD static float dot(Block& block, Shared& shared, const float* a, const float* b, std::int64_t length) {
    block.each([&](int t) {
      if (t < kLanes) shared.lanes[t] = 0;
    });
    for (std::int64_t first = 0; first < length; first += kPieceElems) {
      const std::int64_t elems = length - first < kPieceElems ? length - first : kPieceElems;
      block.each([&](int t) {
        float x[kRows], y[kRows];
        const std::int64_t rows = (elems - t + kThreads - 1) / kThreads;
        load_rows<kRows>(a + first + t, kThreads, rows, x);
        load_rows<kRows>(b + first + t, kThreads, rows, y);
        for (int row = 0; row < kRows; ++row) x[row] *= y[row];
        store_rows<kRows>(x, shared.products + t, kThreads, rows);
      });
      block.each([&](int t) {
        if (t >= kLanes) return;
        float sum = shared.lanes[t];
        for (std::int64_t i = t; i < elems; i += kRows * kLanes) {
          float products[kRows];
          load_rows<kRows>(shared.products + i, kLanes, (elems - i + kLanes - 1) / kLanes, products);
          for (const float product : products) sum += product;  // beyond the end zeros, which change no sum
        }
        shared.lanes[t] = sum;
      });
    }
    for (int width = kLanes / 2; width >= 1; width /= 2) {
      block.each([&](int t) {
        if (t < width) shared.lanes[t] += shared.lanes[t + width];
      });
    }
    return block.uniform(shared.lanes[0]);
  }

  // v = change(v, other), value by value.
  template <class Block, class Change>
  CORTADO_HD static void change_each(Block& block, float* v, const float* other, std::int64_t length,
                                     const Change& change) {
    block.each([&](int t) {
      for (std::int64_t first = t; first < length; first += kPieceElems) {
        float x[kRows], y[kRows];
        const std::int64_t rows = (length - first + kThreads - 1) / kThreads;
        load_rows<kRows>(v + first, kThreads, rows, x);
        load_rows<kRows>(other + first, kThreads, rows, y);
        for (int row = 0; row < kRows; ++row) x[row] = change(x[row], y[row]);
        store_rows<kRows>(x, v + first, kThreads, rows);
      }
    });
  }
  template <class Block>
  CORTADO_HD static void scale(Block& block, float* v, float factor, std::int64_t length) {
    change_each(block, v, v, length, [&](float x, float) { return x * factor; });
  }

  // The largest magnitude to [1, 2); false if the vector is zero or not finite.
  template <class Block>
  CORTADO_HD static bool bring_to_unit_range(Block& block, Shared& shared, float* v, std::int64_t length) {
    block.each([&](int t) {
      if (t == 0) shared.magnitude = 0;
    });
    block.each([&](int t) {
      std::uint32_t most = 0;
      for (std::int64_t first = t; first < length; first += kPieceElems) {
        float x[kRows];
        load_rows<kRows>(v + first, kThreads, (length - first + kThreads - 1) / kThreads, x);
        for (const float value : x) {
          const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
          most = magnitude > most ? magnitude : most;
        }
      }
      block.raise(&shared.magnitude, most);
    });
    const std::uint32_t largest = block.uniform(shared.magnitude);
    if (largest == 0 || largest >= 0x7f800000u) return false;
    const int exponent = largest >= 1u << 23 ? static_cast<int>(largest >> 23) - 127
                                             : -149 + 31 - leading_zeros(largest);  // of a denormal
    const float one = power_of_two(-exponent / 2), other = power_of_two(-exponent + exponent / 2);
    change_each(block, v, v, length, [&](float x, float) { return x * one * other; });
    return true;
  }

  template <class Block>
  CORTADO_HD static bool orthonormalise_one(Block& block, Shared& shared, float* vectors, std::int64_t length, int k) {
    float* const v = vectors + k * length;
    if (!bring_to_unit_range(block, shared, v, length)) return false;
    const float before = sqrtf(dot(block, shared, v, v, length));
    for (int pass = 0; pass < 2; ++pass) {
      for (int j = 0; j < k; ++j) {
        const float* const q = vectors + j * length;
        const float overlap = dot(block, shared, q, v, length);
        change_each(block, v, q, length, [&](float x, float y) { return x - overlap * y; });
      }
    }
    const float after = sqrtf(dot(block, shared, v, v, length));
    if (!(after > kDependent * before)) return false;
    scale(block, v, 1.0f / after, length);
    return true;
  }
};

// ---- reconstruction ------------------------------------------------------------------------------------------------

// output = scale * row * col, as reconstruct(): products of scaled rows, added in the order of k.
struct LowRankReconstruct {
  static constexpr int kThreads = kLowRankThreads;

  const LowRankEntry* entries;
  Tiling tiling;                // of row tiles x column tiles
  const std::uint32_t* faults;  // tensors with one are left alone
  float scale;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    const std::int64_t col_tiles = low_rank_tiles(entry.cols, kLowRankTileCols);
    const std::int64_t row = tile.number / col_tiles * kLowRankTileRows;
    const int rows = entry.rows - row < kLowRankTileRows ? static_cast<int>(entry.rows - row) : kLowRankTileRows;
    if (faults != nullptr && faults[tile.tensor] != 0) return;
    block.each([&](int t) {
      const std::int64_t col = tile.number % col_tiles * kLowRankTileCols + t;
      if (col >= entry.cols) return;
      float sums[kLowRankTileRows] = {};
      for (int k = 0; k < entry.rank; ++k) {
        const float factor = entry.col[k * entry.cols + col];
        float of_rows[kLowRankTileRows];
        load_rows<kLowRankTileRows>(entry.row + row * entry.rank + k, entry.rank, rows, of_rows);
        for (int i = 0; i < kLowRankTileRows; ++i) {
          const float product = of_rows[i] * scale * factor;
          sums[i] = k == 0 ? product : sums[i] + product;
        }
      }
      store_values<kLowRankTileRows>(sums, entry.output, entry.dtype, row * entry.cols + col, entry.cols, rows);
    });
  }
};

// ---- launches ------------------------------------------------------------------------------------------------------

// The tilings of a batch of entries, for whoever has them in device memory: codecs and the engine.
struct LowRankLaunches {
  template <class Device>
  void project_rows(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries) const {
    device.launch(row_tiles.tiles, LowRankProjectRows{entries, w.tiling(row_tiles)});
    device.launch(row_factors.tiles, LowRankAddParts{entries, w.tiling(row_factors), true});
  }
  template <class Device>
  void project_cols(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries) const {
    device.launch(col_tiles.tiles, LowRankProjectCols{entries, w.tiling(col_tiles)});
    device.launch(col_factors.tiles, LowRankAddParts{entries, w.tiling(col_factors), false});
  }
  template <class Device>
  void orthogonalise(Device& device, const LowRankEntry* entries, const BasisKey* keys, const std::uint64_t* step,
                     LowRankSide side, bool is_random) const {
    device.launch(entries_count, LowRankOrthogonalise{entries, keys, step, side, is_random});
  }
  template <class Device>
  void reconstruct(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries, const std::uint32_t* faults,
                   float scale) const {
    device.launch(tiles.tiles, LowRankReconstruct{entries, w.tiling(tiles), faults, scale});
  }

  std::int64_t entries_count = 0;
  TilingSlots row_tiles, col_tiles, row_factors, col_factors, tiles;
};

// The launches of training, for entries that were uploaded: LowRankBatch (lowrank_batch.h).
struct LowRankSteps {
  template <class Device>
  void project(Device& device, const DeviceWorkspace& w, LowRankSide side) const {
    device.fill(w.tensors.faults, 0, static_cast<std::uint64_t>(w.tensor_count) * sizeof(std::uint32_t));
    side == LowRankSide::kRows ? launches.project_rows(device, w, w.at(entries))
                               : launches.project_cols(device, w, w.at(entries));
  }
  template <class Device>
  void orthogonalise(Device& device, const DeviceWorkspace& w, LowRankSide side) const {
    launches.orthogonalise(device, w.at(entries), w.at(keys), w.tensors.step, side, false);
  }
  template <class Device>
  void random_basis(Device& device, const DeviceWorkspace& w) const {
    launches.orthogonalise(device, w.at(entries), w.at(keys), w.tensors.step, LowRankSide::kCols, true);
  }
  template <class Device>
  void reconstruct(Device& device, const DeviceWorkspace& w, float scale) const {
    launches.reconstruct(device, w, w.at(entries), nullptr, scale);
  }

  LowRankLaunches launches;
  WorkspaceSlot<LowRankEntry> entries;
  WorkspaceSlot<BasisKey> keys;
};

// The launches of an engine's matrices (engine/device_matrices.h), for entries that are uploaded for each of them.
struct LowRankPasses {
  template <class Device>
  void project(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries, LowRankSums* sums) const {
    device.fill(w.tensors.faults, 0, static_cast<std::uint64_t>(w.tensor_count) * sizeof(std::uint32_t));
    const Tiling tiling = w.tiling(launches.col_tiles);
    device.launch(tiling.tiles, LowRankProject{entries, tiling, w.at(of_tile)});
    device.launch(launches.row_factors.tiles, LowRankAddParts{entries, w.tiling(launches.row_factors), true, true});
    device.launch(launches.col_factors.tiles, LowRankAddParts{entries, w.tiling(launches.col_factors), false, true});
    device.launch(w.tensor_count, LowRankAddSums{entries, tiling, w.at(of_tile), sums});
  }
  template <class Device>
  void undo(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries) const {
    device.launch(launches.tiles.tiles, LowRankUndo{entries, w.tiling(launches.tiles)});
  }
  template <class Device>
  void reconstruct(Device& device, const DeviceWorkspace& w, const LowRankEntry* entries, float scale) const {
    launches.reconstruct(device, w, entries, nullptr, scale);
  }

  LowRankLaunches launches;
  WorkspaceSlot<LowRankSums> of_tile;
};

// ---- the codecs `acp` and `power` ----------------------------------------------------------------------------------

// Entries and keys from tensors, payloads and scratch memory; a payload's header is written, or read and checked.
struct LowRankBegin {
  static constexpr int kThreads = 32;

  TensorTable tensors;
  bool is_power, encodes;
  std::int64_t wanted_rank;
  const std::int64_t* float_bases;  // of a tensor's floats in `floats`
  float* floats;
  LowRankEntry* entries;
  BasisKey* keys;
  std::uint32_t* not_finite;

  struct Shared {};

  CORTADO_HD static std::int64_t rank_of(std::int64_t wanted, const TensorEntry& tensor) {
    const std::int64_t least = tensor.rows < tensor.cols ? tensor.rows : tensor.cols;
    return wanted < least ? wanted : least;
  }

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const TensorEntry tensor = tensors.entries[block.number()];
    block.each([&](int t) {
      if (t > 0) return;
      const std::int64_t rank = rank_of(wanted_rank, tensor);
      LowRankEntry entry = {};
      entry.rows = tensor.rows, entry.cols = tensor.cols, entry.rank = static_cast<int>(rank);
      entry.dtype = tensor.dtype;
      entry.gradient = tensor.data;
      entry.gradient_scale = 1;
      entry.row = floats + float_bases[block.number()];
      entry.spare = entry.row + rank * tensor.rows;
      entry.col = entry.spare + rank * tensor.rows;
      entry.partial_rows = entry.col + rank * tensor.cols;
      entry.partial_cols = entry.partial_rows + row_partial_elems(tensor.rows, tensor.cols, rank);
      entry.fault = not_finite + block.number();
      entry.output = tensor.data;
      entries[block.number()] = entry;
      *entry.fault = 0;
      BasisKey& key = keys[block.number()];
      key = {.seed = tensor.seed, .step = *tensors.step, .tensor = tensor.number};
      if (rank == 0) return;
      if (encodes) {
        store_bytes(static_cast<std::uint64_t>(rank), tensor.payload);
        if (!is_power) store_bytes(key, tensor.payload + 8);
      } else {
        if (load_bytes<std::uint64_t>(tensor.payload) != static_cast<std::uint64_t>(rank)) {
          block.set_bits(&tensors.faults[block.number()], kCorruptPayload);
        }
        if (!is_power) key = load_bytes<BasisKey>(tensor.payload + 8);
      }
    });
  }
};

// Factors to or from the payload, which need not be aligned.
struct LowRankCopyFactors {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTileElems = 4096;

  TensorTable tensors;
  Tiling tiling;  // of the factors' elements in the payload
  const LowRankEntry* entries;
  bool is_power, encodes;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const Tile tile = tiling.tile(block.number());
    const LowRankEntry entry = entries[tile.tensor];
    std::byte* const payload = tensors.entries[tile.tensor].payload + (is_power ? 8 : 32);
    const std::int64_t row_elems = entry.rows * entry.rank;
    block.each([&](int t) {
      for (std::int64_t i = tile.first + t; i < tile.first + tile.elems; i += kThreads) {
        float* const value = i < row_elems ? entry.row + i : entry.col + (i - row_elems);
        std::byte* const bytes = payload + 4 * i;
        if (encodes) {
          store_bytes(*value, bytes);
        } else {
          *value = load_bytes<float>(bytes);
        }
      }
    });
  }
};

struct LowRankPlan {
  static constexpr bool kTakesCodes = false;
  static Result<LowRankPlan> make(const ParameterValues& values, DeviceLayout& layout);

  template <class Device>
  void encode(Device& device, const DeviceWorkspace& w) const {
    const LowRankEntry* const entries = begin(device, w, true);
    const BasisKey* const keys = w.at(this->keys);
    launches.orthogonalise(device, entries, keys, nullptr, LowRankSide::kCols, true);
    launches.project_rows(device, w, entries);
    if (is_power) {
      launches.orthogonalise(device, entries, keys, nullptr, LowRankSide::kRows, false);
      launches.project_cols(device, w, entries);
    }
    device.launch(copied.tiles, LowRankCopyFactors{w.tensors, w.tiling(copied), entries, is_power, true});
  }
  template <class Device>
  void decode(Device& device, const DeviceWorkspace& w) const {
    const LowRankEntry* const entries = begin(device, w, false);
    if (!is_power) launches.orthogonalise(device, entries, w.at(keys), nullptr, LowRankSide::kCols, true);
    device.launch(copied.tiles, LowRankCopyFactors{w.tensors, w.tiling(copied), entries, is_power, false});
    launches.reconstruct(device, w, entries, w.tensors.faults, 1.0f);
  }

  template <class Device>
  const LowRankEntry* begin(Device& device, const DeviceWorkspace& w, bool encodes) const {
    device.launch(w.tensor_count, LowRankBegin{w.tensors, is_power, encodes, rank, w.at(float_bases), w.at(floats),
                                               w.at(entries), w.at(keys), w.at(not_finite)});
    return w.at(entries);
  }

  bool is_power = false;
  std::int64_t rank = 0;
  LowRankLaunches launches;
  TilingSlots copied;
  WorkspaceSlot<std::int64_t> float_bases;
  WorkspaceSlot<float> floats;
  WorkspaceSlot<LowRankEntry> entries;
  WorkspaceSlot<BasisKey> keys;
  WorkspaceSlot<std::uint32_t> not_finite;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>

#include "codec/cast/cast_kernels.h"
#include "core/float16.h"
#include "core/streaming.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/lowrank/lowrank_kernels.cc"
#include "core/simd.h"

// How a pass walks: blocks of kRowBlock rows, each block in tiles of kTileCols columns, so that rows are streamed once
// and a tile of S stays in the first-level cache between the update and the projection. Ranks are handled kChunk at a
// time, which keeps the kRowBlock x kChunk factors in registers.

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

constexpr int kRowBlock = 4;
constexpr int kChunk = 4;
constexpr std::int64_t kTileCols = 512;
constexpr int kReads = 0, kToSecondLevel = 2;  // of __builtin_prefetch

// Rows of one block within one tile.
template <int B>
struct Tile {
  const float* gradient[B];
  const float* residual_in[B];
  float* updated[B];  // A: in residual_out, or in a local buffer
  std::int64_t cols;
  float scale;  // of the gradient
  float limit;  // gradients from this magnitude on count as not finite

  // Where the next tile's rows lie in memory, to be fetched while this one is worked on. PERF: short rows end before
  // the hardware's prefetcher follows them. Into the second-level cache: the first one is too small for this tile, the
  // next and the factors (benchmarks/codec/lowrank_bench.cc, Zen 4, rank 4: to the first level 1536 x 384 moves 17 to
  // 18 GB/s, 4096 x 4096 20 to 22; to the second 28 to 33 and 23 to 28).
  const std::byte* next_gradient[B];
  const float* next_residual[B];
  std::int64_t gradient_elem_bytes;
};

// updated = source - row * col for K ranks beginning at k0. `source` and updated may be the same.
template <int B, int K>
HWY_INLINE void subtract_chunk(const float* const* source, float* const* updated, std::int64_t cols, const float* row,
                               int rank, const float* col, std::int64_t col_stride) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  V factor[B][K];
  for (int b = 0; b < B; ++b)
    for (int k = 0; k < K; ++k) factor[b][k] = hn::Set(d, row[b * rank + k]);
  std::int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) {
    V e[B];
    for (int b = 0; b < B; ++b) e[b] = hn::LoadU(d, source[b] + j);
    for (int k = 0; k < K; ++k) {
      const V c = hn::LoadU(d, col + k * col_stride + j);
      for (int b = 0; b < B; ++b) e[b] = hn::NegMulAdd(factor[b][k], c, e[b]);
    }
    for (int b = 0; b < B; ++b) hn::StoreU(e[b], d, updated[b] + j);
  }
  for (; j < cols; ++j) {
    for (int b = 0; b < B; ++b) {
      float e = source[b][j];
      for (int k = 0; k < K; ++k) e = std::fma(-row[b * rank + k], col[k * col_stride + j], e);
      updated[b][j] = e;
    }
  }
}

// The last (usually the only) chunk: subtracts and adds the gradient, keeping what S held where G is not finite.
// Returns false if some element was not finite; adds the squares of A.
template <int B, int K>
HWY_INLINE bool subtract_and_add(const Tile<B>& tile, const float* const* source, const float* row, int rank,
                                 const float* col, std::int64_t col_stride, double* sum_squares) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  V factor[B][K > 0 ? K : 1];
  for (int b = 0; b < B; ++b)
    for (int k = 0; k < K; ++k) factor[b][k] = hn::Set(d, row[b * rank + k]);
  const V limit = hn::Set(d, tile.limit);
  const V vscale = hn::Set(d, tile.scale);
  V squares = hn::Zero(d);
  auto all_finite = hn::Eq(squares, squares);
  bool finite = true;
  std::int64_t j = 0;
  for (; j + lanes <= tile.cols; j += lanes) {
    V e[B];
    for (int b = 0; b < B; ++b) e[b] = hn::LoadU(d, source[b] + j);
    for (int k = 0; k < K; ++k) {
      const V c = hn::LoadU(d, col + k * col_stride + j);
      for (int b = 0; b < B; ++b) e[b] = hn::NegMulAdd(factor[b][k], c, e[b]);
    }
    for (int b = 0; b < B; ++b) {
      __builtin_prefetch(tile.next_residual[b] + j, kReads, kToSecondLevel);
      __builtin_prefetch(tile.next_gradient[b] + j * tile.gradient_elem_bytes, kReads, kToSecondLevel);
      const V g = hn::LoadU(d, tile.gradient[b] + j);
      const auto ok = hn::Lt(hn::Abs(g), limit);
      all_finite = hn::And(all_finite, ok);
      const V a = hn::IfThenElse(ok, hn::MulAdd(g, vscale, e[b]), hn::LoadU(d, tile.residual_in[b] + j));
      squares = hn::MulAdd(a, a, squares);
      hn::StoreU(a, d, tile.updated[b] + j);
    }
  }
  finite = hn::AllTrue(d, all_finite);
  double tail_squares = 0;
  for (; j < tile.cols; ++j) {
    for (int b = 0; b < B; ++b) {
      float e = source[b][j];
      for (int k = 0; k < K; ++k) e = std::fma(-row[b * rank + k], col[k * col_stride + j], e);
      const float g = tile.gradient[b][j];
      const bool ok = std::fabs(g) < tile.limit;
      const float a = ok ? std::fma(g, tile.scale, e) : tile.residual_in[b][j];
      finite = finite && ok;
      tail_squares += static_cast<double>(a) * a;
      tile.updated[b][j] = a;
    }
  }
  *sum_squares += hn::GetLane(hn::SumOfLanes(d, squares)) + tail_squares;
  return finite;
}

template <int B>
HWY_INLINE void subtract_up_to_four(int count, const float* const* source, float* const* updated, std::int64_t cols,
                                    const float* row, int rank, const float* col, std::int64_t col_stride) {
  switch (count) {
    case 1:
      return subtract_chunk<B, 1>(source, updated, cols, row, rank, col, col_stride);
    case 2:
      return subtract_chunk<B, 2>(source, updated, cols, row, rank, col, col_stride);
    case 3:
      return subtract_chunk<B, 3>(source, updated, cols, row, rank, col, col_stride);
    default:
      return subtract_chunk<B, 4>(source, updated, cols, row, rank, col, col_stride);
  }
}

// Everything about A for one tile: several chunks of the pair, then the gradient.
template <int B>
bool update_tile(const Tile<B>& tile, const float* row, int rank, const float* col, std::int64_t col_stride,
                 double* sum_squares) {
  const float* source[B];
  for (int b = 0; b < B; ++b) source[b] = tile.residual_in[b];
  // residual_in must survive for the elements that are not finite, so a pair of more than one chunk goes through a
  // buffer when S is updated in place.
  alignas(64) float buffer[B][kTileCols];
  float* partial[B];
  for (int b = 0; b < B; ++b) partial[b] = buffer[b];
  int k = 0;
  for (; rank - k > kChunk; k += kChunk) {
    subtract_chunk<B, kChunk>(source, partial, tile.cols, row + k, rank, col + k * col_stride, col_stride);
    for (int b = 0; b < B; ++b) source[b] = partial[b];
  }
  row += k;
  col += k * col_stride;
  switch (rank - k) {
    case 0:
      return subtract_and_add<B, 0>(tile, source, row, rank, col, col_stride, sum_squares);
    case 1:
      return subtract_and_add<B, 1>(tile, source, row, rank, col, col_stride, sum_squares);
    case 2:
      return subtract_and_add<B, 2>(tile, source, row, rank, col, col_stride, sum_squares);
    case 3:
      return subtract_and_add<B, 3>(tile, source, row, rank, col, col_stride, sum_squares);
    default:
      return subtract_and_add<B, 4>(tile, source, row, rank, col, col_stride, sum_squares);
  }
}

// sums[b * rank + k] += <updated row b, basis row k> over one tile.
template <int B, int K>
HWY_INLINE void dot_chunk(const float* const* updated, std::int64_t cols, const float* basis, std::int64_t stride,
                          int rank, float* sums) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  V sum[B][K];
  for (int b = 0; b < B; ++b)
    for (int k = 0; k < K; ++k) sum[b][k] = hn::Zero(d);
  std::int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) {
    V a[B];
    for (int b = 0; b < B; ++b) a[b] = hn::LoadU(d, updated[b] + j);
    for (int k = 0; k < K; ++k) {
      const V q = hn::LoadU(d, basis + k * stride + j);
      for (int b = 0; b < B; ++b) sum[b][k] = hn::MulAdd(a[b], q, sum[b][k]);
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int k = 0; k < K; ++k) {
      float total = hn::GetLane(hn::SumOfLanes(d, sum[b][k]));
      for (std::int64_t t = j; t < cols; ++t) total = std::fma(updated[b][t], basis[k * stride + t], total);
      sums[b * rank + k] += total;
    }
  }
}

// factor[k * stride + j] += sum over b of basis[b * rank + k] * updated[b][j] over one tile.
template <int B, int K>
HWY_INLINE void outer_chunk(const float* const* updated, std::int64_t cols, const float* basis, int rank,
                            std::int64_t stride, float* factor) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  V p[B][K];
  for (int b = 0; b < B; ++b)
    for (int k = 0; k < K; ++k) p[b][k] = hn::Set(d, basis[b * rank + k]);
  std::int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) {
    V a[B];
    for (int b = 0; b < B; ++b) a[b] = hn::LoadU(d, updated[b] + j);
    for (int k = 0; k < K; ++k) {
      V q = hn::LoadU(d, factor + k * stride + j);
      for (int b = 0; b < B; ++b) q = hn::MulAdd(p[b][k], a[b], q);
      hn::StoreU(q, d, factor + k * stride + j);
    }
  }
  for (; j < cols; ++j) {
    for (int k = 0; k < K; ++k) {
      float q = factor[k * stride + j];
      for (int b = 0; b < B; ++b) q = std::fma(basis[b * rank + k], updated[b][j], q);
      factor[k * stride + j] = q;
    }
  }
}

// ---- the walk ------------------------------------------------------------------------------------------------------

enum class Side { kRows, kCols };

struct Projection {
  Side side;
  const float* basis;  // kRows: rank x cols; kCols: rows x rank
  int rank;
  float* factor;  // kRows: rows x rank; kCols: rank x cols
};

template <int B>
HWY_INLINE void project_tile(const Tile<B>& tile, const ResidualPass& pass, const Projection& to, std::int64_t row,
                             std::int64_t col) {
  const float* updated[B];
  for (int b = 0; b < B; ++b) updated[b] = tile.updated[b];
  for (int k = 0; k < to.rank; k += kChunk) {
    const int count = std::min(kChunk, to.rank - k);
    if (to.side == Side::kRows) {
      const float* basis = to.basis + k * pass.cols + col;
      float* sums = to.factor + row * to.rank + k;
      switch (count) {
        case 1:
          dot_chunk<B, 1>(updated, tile.cols, basis, pass.cols, to.rank, sums);
          break;
        case 2:
          dot_chunk<B, 2>(updated, tile.cols, basis, pass.cols, to.rank, sums);
          break;
        case 3:
          dot_chunk<B, 3>(updated, tile.cols, basis, pass.cols, to.rank, sums);
          break;
        default:
          dot_chunk<B, 4>(updated, tile.cols, basis, pass.cols, to.rank, sums);
          break;
      }
    } else {
      const float* basis = to.basis + row * to.rank + k;
      float* factor = to.factor + k * pass.cols + col;
      switch (count) {
        case 1:
          outer_chunk<B, 1>(updated, tile.cols, basis, to.rank, pass.cols, factor);
          break;
        case 2:
          outer_chunk<B, 2>(updated, tile.cols, basis, to.rank, pass.cols, factor);
          break;
        case 3:
          outer_chunk<B, 3>(updated, tile.cols, basis, to.rank, pass.cols, factor);
          break;
        default:
          outer_chunk<B, 4>(updated, tile.cols, basis, to.rank, pass.cols, factor);
          break;
      }
    }
  }
}

bool is_aligned_float(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % alignof(float) == 0; }

// A tile's worth of gradient as float32; `buffer` is used for narrower dtypes and for odd addresses.
HWY_INLINE const float* load_gradient(const ResidualPass& pass, std::int64_t offset, std::int64_t cols, float* buffer) {
  const std::byte* source = static_cast<const std::byte*>(pass.gradient) +
                            offset * static_cast<std::int64_t>(dtype_bytes(pass.gradient_dtype));
  switch (pass.gradient_dtype) {
    case DType::kFloat16:
      fp16_to_fp32(reinterpret_cast<const std::uint16_t*>(source), cols, buffer);
      return buffer;
    case DType::kBFloat16:
      bf16_to_fp32(reinterpret_cast<const std::uint16_t*>(source), cols, buffer);
      return buffer;
    default:
      if (is_aligned_float(source)) return reinterpret_cast<const float*>(source);
      std::memcpy(buffer, source, static_cast<std::size_t>(cols) * sizeof(float));
      return buffer;
  }
}

alignas(64) constexpr float kZeros[kTileCols] = {};

// From the tile at (row, col) to the one that is read after it; 0 if that is narrower or there is none.
HWY_INLINE std::int64_t elems_to_next_tile(const ResidualPass& pass, std::int64_t row, std::int64_t col, int block) {
  if (col + 2 * kTileCols <= pass.cols) return kTileCols;
  const bool is_last_of_row = col + kTileCols >= pass.cols;
  return is_last_of_row && row + 2 * block <= pass.rows ? block * pass.cols - col : 0;
}

// Of values above 1e18, whose squares have no float: again.
HWY_NOINLINE double squares_of_large(const float* const* rows, int count, std::int64_t cols) {
  double squares = 0;
  for (int b = 0; b < count; ++b) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const double a = rows[b][j];
      squares += std::isfinite(a) ? a * a : 0;
    }
  }
  return squares;
}

template <int B>
void walk_block(const ResidualPass& pass, std::span<const Projection> projections, std::int64_t row,
                PassResult* result) {
  alignas(64) float gradient_buffer[B][kTileCols];
  alignas(64) float updated_buffer[B][kTileCols];
  for (std::int64_t col = 0; col < pass.cols; col += kTileCols) {
    Tile<B> tile;
    tile.cols = std::min(kTileCols, pass.cols - col);
    tile.scale = pass.gradient_scale;
    tile.limit = pass.gradient_limit();
    const std::int64_t ahead = elems_to_next_tile(pass, row, col, B);
    tile.gradient_elem_bytes = static_cast<std::int64_t>(dtype_bytes(pass.gradient_dtype));
    for (int b = 0; b < B; ++b) {
      const std::int64_t offset = (row + b) * pass.cols + col;
      tile.gradient[b] = pass.gradient == nullptr ? kZeros : load_gradient(pass, offset, tile.cols, gradient_buffer[b]);
      tile.residual_in[b] = pass.residual_in == nullptr ? kZeros : pass.residual_in + offset;
      tile.updated[b] = pass.residual_out == nullptr ? updated_buffer[b] : pass.residual_out + offset;
      tile.next_residual[b] = pass.residual_in == nullptr ? kZeros : tile.residual_in[b] + ahead;
      tile.next_gradient[b] = pass.gradient == nullptr ? reinterpret_cast<const std::byte*>(kZeros)
                                                       : static_cast<const std::byte*>(pass.gradient) +
                                                             (offset + ahead) * tile.gradient_elem_bytes;
    }
    const float* sent_row = pass.sent.rank == 0 ? nullptr : pass.sent.row + row * pass.sent.rank;
    const float* sent_col = pass.sent.rank == 0 ? nullptr : pass.sent.col + col;
    double squares = 0;
    if (!update_tile<B>(tile, sent_row, pass.sent.rank, sent_col, pass.cols, &squares)) result->finite = false;
    result->sum_squares += std::isfinite(squares) ? squares : squares_of_large(tile.updated, B, tile.cols);
    for (const Projection& to : projections) project_tile<B>(tile, pass, to, row, col);
  }
}

void walk(const ResidualPass& pass, std::span<const Projection> projections, PassResult* result) {
  for (const Projection& to : projections) {
    std::fill_n(to.factor, (to.side == Side::kRows ? pass.rows : pass.cols) * to.rank, 0.0f);
  }
  std::int64_t row = 0;
  for (; row + kRowBlock <= pass.rows; row += kRowBlock) walk_block<kRowBlock>(pass, projections, row, result);
  for (; row < pass.rows; ++row) walk_block<1>(pass, projections, row, result);
}

void ProjectRows(const ResidualPass& pass, const float* col_basis, int rank, float* row_factor, PassResult* result) {
  const Projection to[] = {{Side::kRows, col_basis, rank, row_factor}};
  walk(pass, to, result);
}

void ProjectCols(const ResidualPass& pass, const float* row_basis, int rank, float* col_factor, PassResult* result) {
  const Projection to[] = {{Side::kCols, row_basis, rank, col_factor}};
  walk(pass, to, result);
}

void ProjectBoth(const ResidualPass& pass, const BothBases& bases, const BothFactors& factors, PassResult* result) {
  const Projection to[] = {{Side::kRows, bases.col, bases.rank, factors.row},
                           {Side::kCols, bases.row, bases.rank, factors.col}};
  walk(pass, to, result);
}

// ---- reconstruction ------------------------------------------------------------------------------------------------

// output[b] = source[b] (nullptr: nothing) + sum over K ranks, in the order of k, multiply and add rounded separately.
// `source` and output may be the same. kStreams: output begins at a cache line.
template <bool kStreams, int B, int K>
HWY_INLINE void reconstruct_chunk(const float* const* source, const float* scaled_row, int rank, const float* col,
                                  std::int64_t stride, std::int64_t cols, float* const* output) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  V p[B][K];
  for (int b = 0; b < B; ++b)
    for (int k = 0; k < K; ++k) p[b][k] = hn::Set(d, scaled_row[b * rank + k]);
  std::int64_t j = 0;
  for (; j + lanes <= cols; j += lanes) {
    V sum[B];
    const V c0 = hn::LoadU(d, col + j);
    for (int b = 0; b < B; ++b) {
      const V product = hn::Mul(p[b][0], c0);
      sum[b] = source == nullptr ? product : hn::Add(hn::LoadU(d, source[b] + j), product);
    }
    for (int k = 1; k < K; ++k) {
      const V c = hn::LoadU(d, col + k * stride + j);
      for (int b = 0; b < B; ++b) sum[b] = hn::Add(sum[b], hn::Mul(p[b][k], c));
    }
    for (int b = 0; b < B; ++b) {
      if constexpr (kStreams) {
        hn::Stream(sum[b], d, output[b] + j);
      } else {
        hn::StoreU(sum[b], d, output[b] + j);
      }
    }
  }
  for (; j < cols; ++j) {
    for (int b = 0; b < B; ++b) {
      float sum = source == nullptr ? 0.0f : source[b][j];
      for (int k = 0; k < K; ++k) {
        const float product = scaled_row[b * rank + k] * col[k * stride + j];
        sum = source == nullptr && k == 0 ? product : sum + product;
      }
      output[b][j] = sum;
    }
  }
}

template <bool kStreams, int B>
HWY_INLINE void reconstruct_up_to_four(int count, const float* const* source, const float* row, int rank,
                                       const float* col, std::int64_t stride, std::int64_t cols, float* const* output) {
  switch (count) {
    case 1:
      return reconstruct_chunk<kStreams, B, 1>(source, row, rank, col, stride, cols, output);
    case 2:
      return reconstruct_chunk<kStreams, B, 2>(source, row, rank, col, stride, cols, output);
    case 3:
      return reconstruct_chunk<kStreams, B, 3>(source, row, rank, col, stride, cols, output);
    default:
      return reconstruct_chunk<kStreams, B, 4>(source, row, rank, col, stride, cols, output);
  }
}

// A finished tile row from the buffer to its place.
HWY_INLINE void store_output(const float* buffer, std::int64_t cols, std::byte* output, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return fp32_to_fp16(buffer, cols, reinterpret_cast<std::uint16_t*>(output));
    case DType::kBFloat16:
      return fp32_to_bf16(buffer, cols, reinterpret_cast<std::uint16_t*>(output));
    default:
      std::memcpy(output, buffer, static_cast<std::size_t>(cols) * sizeof(float));
  }
}

// Sums that more ranks are added to stay in a buffer; the last chunk of ranks writes the output.
template <bool kStreams, int B>
void reconstruct_tile(const FactorPair& pair, std::int64_t row, std::int64_t col, std::int64_t cols,
                      std::int64_t tile_cols, float scale, float (*buffer)[kTileCols], float* const* output) {
  float* partial[B];
  for (int b = 0; b < B; ++b) partial[b] = buffer[b];
  for (int k = 0; k < pair.rank; k += kChunk) {
    const int count = std::min(kChunk, pair.rank - k);
    float scaled[B * kChunk];
    for (int b = 0; b < B; ++b)
      for (int i = 0; i < count; ++i) scaled[b * count + i] = pair.row[(row + b) * pair.rank + k + i] * scale;
    const float* const* source = k == 0 ? nullptr : partial;
    const float* factor = pair.col + k * cols + col;
    if (k + count < pair.rank) {
      reconstruct_up_to_four<false, B>(count, source, scaled, count, factor, cols, tile_cols, partial);
    } else {
      reconstruct_up_to_four<kStreams, B>(count, source, scaled, count, factor, cols, tile_cols, output);
    }
  }
}

template <bool kStreams, int B>
void reconstruct_block(const FactorPair& pair, std::int64_t row, std::int64_t cols, float scale, void* output,
                       DType dtype) {
  alignas(64) float buffer[B][kTileCols];
  const bool in_place = dtype == DType::kFloat32 && is_aligned_float(output);
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  // Of streamed rows, which all begin as far from a cache line, the first tile ends where one begins.
  const std::int64_t to_line =
      kStreams ? bytes_to_stream_alignment(output) / static_cast<std::int64_t>(sizeof(float)) : 0;
  std::int64_t tile_cols = 0;
  for (std::int64_t col = 0; col < cols; col += tile_cols) {
    const bool ends_at_line = col == 0 && to_line > 0;
    tile_cols = std::min(ends_at_line ? to_line : kTileCols, cols - col);
    std::byte* place[B];
    float* target[B];
    for (int b = 0; b < B; ++b) {
      place[b] = static_cast<std::byte*>(output) + ((row + b) * cols + col) * elem_bytes;
      target[b] = in_place ? reinterpret_cast<float*>(place[b]) : buffer[b];
    }
    ends_at_line ? reconstruct_tile<false, B>(pair, row, col, cols, tile_cols, scale, buffer, target)
                 : reconstruct_tile<kStreams, B>(pair, row, col, cols, tile_cols, scale, buffer, target);
    for (int b = 0; b < B && !in_place; ++b) store_output(buffer[b], tile_cols, place[b], dtype);
  }
}

template <bool kStreams>
void reconstruct_rows(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output,
                      DType dtype) {
  std::int64_t row = 0;
  for (; row + kRowBlock <= rows; row += kRowBlock) {
    reconstruct_block<kStreams, kRowBlock>(pair, row, cols, scale, output, dtype);
  }
  for (; row < rows; ++row) reconstruct_block<kStreams, 1>(pair, row, cols, scale, output, dtype);
}

void Reconstruct(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output, DType dtype,
                 bool streams) {
  constexpr std::int64_t kFloatsALine = kStreamAlignBytes / sizeof(float);
  const bool is_large = rows * cols * static_cast<std::int64_t>(sizeof(float)) >= kLeastStreamedGradientBytes;
  const bool in_lines = dtype == DType::kFloat32 && is_aligned_float(output) && cols % kFloatsALine == 0;
  if (!streams || !is_large || !in_lines) return reconstruct_rows<false>(pair, rows, cols, scale, output, dtype);
  reconstruct_rows<true>(pair, rows, cols, scale, output, dtype);
  finish_streams();
}

void Materialise(std::int64_t rows, std::int64_t cols, const FactorPair& sent, float* residual) {
  for (std::int64_t row = 0; row < rows; ++row) {
    float* line[1] = {residual + row * cols};
    const float* source[1] = {line[0]};
    for (int k = 0; k < sent.rank; k += kChunk) {
      subtract_up_to_four<1>(std::min(kChunk, sent.rank - k), source, line, cols, sent.row + row * sent.rank + k,
                             sent.rank, sent.col + k * cols, cols);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(ProjectRows);
HWY_EXPORT(ProjectCols);
HWY_EXPORT(ProjectBoth);
HWY_EXPORT(Reconstruct);
HWY_EXPORT(Materialise);

namespace {

float element(const void* values, std::int64_t offset_bytes, DType dtype) {
  const std::byte* source = static_cast<const std::byte*>(values) + offset_bytes;
  std::uint16_t half = 0;
  float value = 0;
  if (dtype == DType::kFloat32) {
    std::memcpy(&value, source, sizeof(value));
    return value;
  }
  std::memcpy(&half, source, sizeof(half));
  return dtype == DType::kFloat16 ? fp16_to_float(half) : bf16_to_float(half);
}

}  // namespace

PassResult project_rows(const ResidualPass& pass, const float* col_basis, int rank, float* row_factor) {
  PassResult result;
  HWY_DYNAMIC_DISPATCH(ProjectRows)(pass, col_basis, rank, row_factor, &result);
  if (!result.finite) row_factor[0] = std::numeric_limits<float>::quiet_NaN();
  return result;
}

PassResult project_cols(const ResidualPass& pass, const float* row_basis, int rank, float* col_factor) {
  PassResult result;
  HWY_DYNAMIC_DISPATCH(ProjectCols)(pass, row_basis, rank, col_factor, &result);
  if (!result.finite) col_factor[0] = std::numeric_limits<float>::quiet_NaN();
  return result;
}

PassResult project_both(const ResidualPass& pass, const BothBases& bases, const BothFactors& factors) {
  PassResult result;
  HWY_DYNAMIC_DISPATCH(ProjectBoth)(pass, bases, factors, &result);
  if (!result.finite) factors.row[0] = std::numeric_limits<float>::quiet_NaN();
  return result;
}

void reconstruct(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output, DType dtype,
                 bool streams) {
  if (pair.rank == 0) {
    std::fill_n(static_cast<std::byte*>(output), rows * cols * static_cast<std::int64_t>(dtype_bytes(dtype)),
                std::byte{});
    return;
  }
  HWY_DYNAMIC_DISPATCH(Reconstruct)(pair, rows, cols, scale, output, dtype, streams);
}

void materialise(std::int64_t rows, std::int64_t cols, const FactorPair& sent, float* residual) {
  HWY_DYNAMIC_DISPATCH(Materialise)(rows, cols, sent, residual);
}

// Only after a non-finite step, so plain code: a few such steps in a run are not worth a kernel.
void undo_pass(const ResidualPass& pass, float* residual) {
  const auto elem_bytes = static_cast<std::int64_t>(dtype_bytes(pass.gradient_dtype));
  const float limit = pass.gradient_limit();
  for (std::int64_t i = 0; i < pass.rows; ++i) {
    for (std::int64_t j = 0; j < pass.cols; ++j) {
      const std::int64_t at = i * pass.cols + j;
      const float g = pass.gradient == nullptr ? 0.0f : element(pass.gradient, at * elem_bytes, pass.gradient_dtype);
      if (std::fabs(g) < limit) {
        const float before = std::fma(-g, pass.gradient_scale, residual[at]);
        // Beside a gradient that exploded, what is left is rounding, not residual; it must not be fed back.
        const bool is_rounding = std::fabs(before) <= 0x1p-20f * std::fabs(g * pass.gradient_scale);
        residual[at] = is_rounding ? 0.0f : before;
      } else {
        for (int k = 0; k < pass.sent.rank; ++k) {
          residual[at] =
              std::fma(-pass.sent.row[i * pass.sent.rank + k], pass.sent.col[k * pass.cols + j], residual[at]);
        }
      }
    }
  }
}

}  // namespace cortado
#endif  // HWY_ONCE

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/cast/cast_kernels.h"

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

// Rows of one block within one tile.
template <int B>
struct Tile {
  const float* gradient[B];
  const float* residual_in[B];
  float* updated[B];  // A: in residual_out, or in a local buffer
  std::int64_t cols;
  float scale;  // of the gradient
  float limit;  // gradients from this magnitude on count as not finite
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

// A tile's worth of gradient as float32; `buffer` is used for narrower dtypes.
HWY_INLINE const float* load_gradient(const ResidualPass& pass, std::int64_t offset, std::int64_t cols, float* buffer) {
  switch (pass.gradient_dtype) {
    case DType::kFloat16:
      fp16_to_fp32(static_cast<const std::uint16_t*>(pass.gradient) + offset, cols, buffer);
      return buffer;
    case DType::kBFloat16:
      bf16_to_fp32(static_cast<const std::uint16_t*>(pass.gradient) + offset, cols, buffer);
      return buffer;
    default:
      return static_cast<const float*>(pass.gradient) + offset;
  }
}

alignas(64) constexpr float kZeros[kTileCols] = {};

template <int B>
void walk_block(const ResidualPass& pass, const Projection& to, std::int64_t row, PassResult* result) {
  alignas(64) float gradient_buffer[B][kTileCols];
  alignas(64) float updated_buffer[B][kTileCols];
  for (std::int64_t col = 0; col < pass.cols; col += kTileCols) {
    Tile<B> tile;
    tile.cols = std::min(kTileCols, pass.cols - col);
    tile.scale = pass.gradient_scale;
    tile.limit = pass.gradient_limit();
    for (int b = 0; b < B; ++b) {
      const std::int64_t offset = (row + b) * pass.cols + col;
      tile.gradient[b] = pass.gradient == nullptr ? kZeros : load_gradient(pass, offset, tile.cols, gradient_buffer[b]);
      tile.residual_in[b] = pass.residual_in == nullptr ? kZeros : pass.residual_in + offset;
      tile.updated[b] = pass.residual_out == nullptr ? updated_buffer[b] : pass.residual_out + offset;
    }
    const float* sent_row = pass.sent.rank == 0 ? nullptr : pass.sent.row + row * pass.sent.rank;
    const float* sent_col = pass.sent.rank == 0 ? nullptr : pass.sent.col + col;
    if (!update_tile<B>(tile, sent_row, pass.sent.rank, sent_col, pass.cols, &result->sum_squares)) {
      result->finite = false;
    }
    project_tile<B>(tile, pass, to, row, col);
  }
}

void walk(const ResidualPass& pass, const Projection& to, PassResult* result) {
  std::int64_t row = 0;
  for (; row + kRowBlock <= pass.rows; row += kRowBlock) walk_block<kRowBlock>(pass, to, row, result);
  for (; row < pass.rows; ++row) walk_block<1>(pass, to, row, result);
}

void ProjectRows(const ResidualPass& pass, const float* col_basis, int rank, float* row_factor, PassResult* result) {
  std::memset(row_factor, 0, sizeof(float) * pass.rows * rank);
  walk(pass, {Side::kRows, col_basis, rank, row_factor}, result);
}

void ProjectCols(const ResidualPass& pass, const float* row_basis, int rank, float* col_factor, PassResult* result) {
  std::memset(col_factor, 0, sizeof(float) * pass.cols * rank);
  walk(pass, {Side::kCols, row_basis, rank, col_factor}, result);
}

// ---- reconstruction ------------------------------------------------------------------------------------------------

// output[b] = (first ? 0 : output[b]) + sum over K ranks, in the order of k, multiply and add rounded separately.
template <int B, int K>
HWY_INLINE void reconstruct_chunk(bool first, const float* scaled_row, int rank, const float* col, std::int64_t stride,
                                  std::int64_t cols, float* const* output) {
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
      sum[b] = first ? product : hn::Add(hn::LoadU(d, output[b] + j), product);
    }
    for (int k = 1; k < K; ++k) {
      const V c = hn::LoadU(d, col + k * stride + j);
      for (int b = 0; b < B; ++b) sum[b] = hn::Add(sum[b], hn::Mul(p[b][k], c));
    }
    for (int b = 0; b < B; ++b) hn::StoreU(sum[b], d, output[b] + j);
  }
  for (; j < cols; ++j) {
    for (int b = 0; b < B; ++b) {
      float sum = first ? 0.0f : output[b][j];
      for (int k = 0; k < K; ++k) {
        const float product = scaled_row[b * rank + k] * col[k * stride + j];
        sum = first && k == 0 ? product : sum + product;
      }
      output[b][j] = sum;
    }
  }
}

template <int B>
void reconstruct_tile(const float* scaled_row, int rank, const float* col, std::int64_t stride, std::int64_t cols,
                      float* const* output) {
  for (int k = 0; k < rank; k += kChunk) {
    const float* row = scaled_row + k;
    const float* c = col + k * stride;
    switch (std::min(kChunk, rank - k)) {
      case 1:
        reconstruct_chunk<B, 1>(k == 0, row, rank, c, stride, cols, output);
        break;
      case 2:
        reconstruct_chunk<B, 2>(k == 0, row, rank, c, stride, cols, output);
        break;
      case 3:
        reconstruct_chunk<B, 3>(k == 0, row, rank, c, stride, cols, output);
        break;
      default:
        reconstruct_chunk<B, 4>(k == 0, row, rank, c, stride, cols, output);
        break;
    }
  }
}

template <int B>
void reconstruct_block(const FactorPair& pair, std::int64_t row, std::int64_t cols, float scale, void* output,
                       DType dtype) {
  constexpr int kMaxRankOnStack = 256;
  alignas(64) float buffer[B][kTileCols];
  float scaled[B * kMaxRankOnStack];
  // Ranks beyond the stack buffer are added in further sweeps over the same tile; the order of k does not change.
  for (std::int64_t col = 0; col < cols; col += kTileCols) {
    const std::int64_t tile_cols = std::min(kTileCols, cols - col);
    float* target[B];
    for (int b = 0; b < B; ++b) {
      target[b] = dtype == DType::kFloat32 ? static_cast<float*>(output) + (row + b) * cols + col : buffer[b];
    }
    for (int k0 = 0; k0 < pair.rank; k0 += kMaxRankOnStack) {
      const int count = std::min(kMaxRankOnStack, pair.rank - k0);
      for (int b = 0; b < B; ++b)
        for (int k = 0; k < count; ++k) scaled[b * count + k] = pair.row[(row + b) * pair.rank + k0 + k] * scale;
      const float* c = pair.col + k0 * cols + col;
      if (k0 == 0) {
        reconstruct_tile<B>(scaled, count, c, cols, tile_cols, target);
      } else {
        for (int k = 0; k < count; ++k) {
          float* t[B];
          for (int b = 0; b < B; ++b) t[b] = target[b];
          reconstruct_chunk<B, 1>(false, scaled + k, count, c + k * cols, cols, tile_cols, t);
        }
      }
    }
    for (int b = 0; b < B && dtype != DType::kFloat32; ++b) {
      auto* narrow = static_cast<std::uint16_t*>(output) + (row + b) * cols + col;
      if (dtype == DType::kFloat16) {
        fp32_to_fp16(buffer[b], tile_cols, narrow);
      } else {
        fp32_to_bf16(buffer[b], tile_cols, narrow);
      }
    }
  }
}

void Reconstruct(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output, DType dtype) {
  std::int64_t row = 0;
  for (; row + kRowBlock <= rows; row += kRowBlock) reconstruct_block<kRowBlock>(pair, row, cols, scale, output, dtype);
  for (; row < rows; ++row) reconstruct_block<1>(pair, row, cols, scale, output, dtype);
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
HWY_EXPORT(Reconstruct);
HWY_EXPORT(Materialise);

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

void reconstruct(const FactorPair& pair, std::int64_t rows, std::int64_t cols, float scale, void* output, DType dtype) {
  if (pair.rank == 0) {
    std::memset(output, 0, static_cast<std::size_t>(rows * cols) * dtype_bytes(dtype));
    return;
  }
  HWY_DYNAMIC_DISPATCH(Reconstruct)(pair, rows, cols, scale, output, dtype);
}

void materialise(std::int64_t rows, std::int64_t cols, const FactorPair& sent, float* residual) {
  HWY_DYNAMIC_DISPATCH(Materialise)(rows, cols, sent, residual);
}

// Only after a non-finite step, so plain code: a few such steps in a run are not worth a kernel.
void undo_pass(const ResidualPass& pass, float* residual) {
  for (std::int64_t i = 0; i < pass.rows; ++i) {
    for (std::int64_t j = 0; j < pass.cols; ++j) {
      const std::int64_t at = i * pass.cols + j;
      float g = 0;
      if (pass.gradient != nullptr) {
        switch (pass.gradient_dtype) {
          case DType::kFloat16:
            fp16_to_fp32(static_cast<const std::uint16_t*>(pass.gradient) + at, 1, &g);
            break;
          case DType::kBFloat16:
            bf16_to_fp32(static_cast<const std::uint16_t*>(pass.gradient) + at, 1, &g);
            break;
          default:
            g = static_cast<const float*>(pass.gradient)[at];
        }
      }
      if (std::fabs(g) < pass.gradient_limit()) {
        residual[at] = std::fma(-g, pass.gradient_scale, residual[at]);
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

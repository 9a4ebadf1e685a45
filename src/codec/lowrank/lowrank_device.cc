// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank_device.h"

#include "codec/device_layout.h"
#include "codec/lowrank/lowrank_layout.h"

namespace cortado {

LowRankLaunches make_low_rank_launches(std::span<const LowRankShape> shapes, DeviceLayout& layout) {
  std::vector<std::int64_t> row_tiles, col_tiles, row_factors, col_factors, tiles;
  for (const auto& [rows, cols, rank] : shapes) {
    const std::int64_t down = low_rank_tiles(rows, kLowRankTileRows), across = low_rank_tiles(cols, kLowRankTileCols);
    row_tiles.push_back(down * row_factor_parts(cols));
    col_tiles.push_back(across * col_factor_parts(rows));
    row_factors.push_back(rows * rank);
    col_factors.push_back(cols * rank);
    tiles.push_back(down * across);
  }
  LowRankLaunches launches;
  launches.entries_count = static_cast<std::int64_t>(shapes.size());
  launches.row_tiles = layout.tile(row_tiles, 1);
  launches.col_tiles = layout.tile(col_tiles, 1);
  launches.row_factors = layout.tile(row_factors, LowRankAddParts::kTileElems);
  launches.col_factors = layout.tile(col_factors, LowRankAddParts::kTileElems);
  launches.tiles = layout.tile(tiles, 1);
  return launches;
}

LowRankPasses make_low_rank_passes(std::span<const LowRankShape> shapes, DeviceLayout& layout) {
  LowRankPasses passes;
  passes.launches = make_low_rank_launches(shapes, layout);
  passes.of_tile = layout.scratch<LowRankSums>(static_cast<std::uint64_t>(passes.launches.col_tiles.tiles));
  return passes;
}

Result<LowRankPlan> LowRankPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  LowRankPlan plan;
  plan.is_power = layout.codec().row().traits.rounds == 2;
  plan.rank = values.integer("rank");
  std::vector<LowRankShape> shapes;
  std::vector<std::int64_t> float_bases, copied;
  std::int64_t floats = 0;
  for (const TensorEntry& tensor : layout.tensors()) {
    const std::int64_t rank = LowRankBegin::rank_of(plan.rank, tensor);
    const std::int64_t rows = rank == 0 ? 0 : tensor.rows, cols = rank == 0 ? 0 : tensor.cols;
    shapes.push_back({rows, cols, rank});
    float_bases.push_back(floats);
    copied.push_back(rank * (rows + (plan.is_power ? cols : 0)));
    floats += rank * (2 * rows + cols) + row_partial_elems(rows, cols, rank) + col_partial_elems(rows, cols, rank);
    floats = (floats + 63) / 64 * 64;
  }
  plan.launches = make_low_rank_launches(shapes, layout);
  plan.copied = layout.tile(copied, LowRankCopyFactors::kTileElems);
  plan.float_bases = layout.table<std::int64_t>(float_bases);
  plan.floats = layout.scratch<float>(static_cast<std::uint64_t>(floats));
  plan.entries = layout.scratch<LowRankEntry>(shapes.size());
  plan.keys = layout.scratch<BasisKey>(shapes.size());
  plan.not_finite = layout.scratch<std::uint32_t>(shapes.size());
  return plan;
}

}  // namespace cortado

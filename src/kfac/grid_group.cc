// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/grid_group.h"

#include <vector>

#include "core/check.h"

namespace cortado {

namespace {

std::vector<int> ranks_of(const KfacGrid& grid, int rank, bool is_column) {
  std::vector<int> ranks;
  const int count = is_column ? grid.workers : grid.columns;
  for (int i = 0; i < count; ++i) {
    ranks.push_back(is_column ? i * grid.columns + grid.column_of(rank) : grid.row_of(rank) * grid.columns + i);
  }
  return ranks;
}

}  // namespace

Result<std::unique_ptr<GridGroup>> GridGroup::create(Communicator* world, const KfacGrid& grid, bool is_column) {
  auto group = std::make_unique<GridGroup>();
  const std::vector<int> ranks = ranks_of(grid, world->rank(), is_column);
  if (static_cast<int>(ranks.size()) == world->world_size()) {
    group->communicator_ = world;
  } else if (ranks.size() == 1) {
    group->alone_ = std::make_unique<LocalGroup>(1);
    group->communicator_ = group->alone_->communicator(0);
  } else {
    CORTADO_ASSIGN_OR_RETURN(group->subgroup_, world->subgroup(ranks));
    group->communicator_ = group->subgroup_.get();
  }
  return group;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "cortado/communicator.h"
#include "cortado/kfac.h"
#include "cortado/status.h"

namespace cortado {

// A communicator for the ranks of this rank's column, or row: the whole one if that is all of them, one of its own if
// the rank is alone there.
class GridGroup {
 public:
  // Every rank of `world` makes the same groups in the same order.
  static Result<std::unique_ptr<GridGroup>> create(Communicator* world, const KfacGrid& grid, bool is_column);

  Communicator* get() const { return communicator_; }
  bool is_alone() const { return communicator_->world_size() == 1; }

 private:
  Communicator* communicator_ = nullptr;
  std::unique_ptr<LocalGroup> alone_;
  std::unique_ptr<Communicator> subgroup_;
};

}  // namespace cortado

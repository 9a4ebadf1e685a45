// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "cortado/engine.h"

namespace cortado {

// How one tensor travels: as factors of `rank` columns, or dense (rank 0) for a reason that is reported.
struct Treatment {
  int rank = 0;
  std::string reason;
};

// Pure: the same on every rank. Fails if a name in options.dense matches no tensor, or names are empty or not unique.
Result<std::vector<Treatment>> choose_treatments(const std::vector<EngineTensor>& tensors,
                                                 const EngineOptions& options);

}  // namespace cortado

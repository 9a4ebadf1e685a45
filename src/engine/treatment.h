// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "cortado/engine.h"
#include "engine/trained_codec.h"

namespace cortado {

// How one tensor travels: as factors of `rank` columns, as `payload_elems` of a codec (bytes at most, or values), or
// dense for a reason that is reported.
struct Treatment {
  int rank = 0;
  std::int64_t payload_elems = 0;
  DType encoded = DType::kFloat32;  // what the codec gets
  std::string reason = {};

  bool is_compressed() const { return rank > 0 || payload_elems > 0; }
};

// That a string could say them, or of kCodec that its numbers are in the range of engine_parameters().
Status check_options(const EngineOptions& options);

// That names are there and unique, and shapes and dtypes legal.
Status check_tensors(const std::vector<EngineTensor>& tensors);

// Pure: the same on every rank. Fails if a name in options.dense matches no tensor, or names are empty or not unique.
// `codec` is that of kCodec.
Result<std::vector<Treatment>> choose_treatments(const std::vector<EngineTensor>& tensors, const EngineOptions& options,
                                                 const TrainedCodec& codec);

}  // namespace cortado

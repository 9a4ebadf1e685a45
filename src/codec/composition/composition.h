// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cortado/codec.h"

namespace cortado {

constexpr std::size_t kMaxStages = 8;

// "topk | quant | rans": sparsifiers, each taking what the one before kept, then at most one codec of float32 values,
// then `rans` if that one is a quantiser. See spec.md. Takes 2 to kMaxStages codecs; an illegal pair is
// kInvalidArgument with both names and what may follow.
Result<std::unique_ptr<Codec>> make_composition(std::vector<std::unique_ptr<Codec>> stages);

}  // namespace cortado

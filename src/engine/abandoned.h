// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cinttypes>
#include <string>
#include <vector>

#include "core/format.h"
#include "cortado/engine.h"
#include "cortado/status.h"

namespace cortado {

// The error of a rank that has given up within or before a step: which tensors it had not submitted yet, or that it had
// submitted all. TensorStep: what an engine keeps of a tensor's step.
template <typename TensorStep>
Status abandoned_step(int rank, std::int64_t step, const std::vector<EngineTensor>& tensors,
                      const std::vector<TensorStep>& of_step, bool in_step, const std::string& why) {
  std::size_t missing = 0, first = 0;
  for (std::size_t t = tensors.size(); t-- > 0;) {
    if (in_step && of_step[t].submitted) continue;
    first = t;
    ++missing;
  }
  const std::string name =
      name_tensors(tensors.empty() ? "" : tensors[first].name, missing > 0 ? missing : tensors.size());
  return make_error(StatusCode::kFailedPrecondition, "rank %d abandoned step %" PRId64 " %s %s were submitted: %s",
                    rank, step, missing > 0 ? "before" : "after", name.c_str(), why.c_str());
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What every engine asks of gradients that are handed over in a step.
#pragma once

#include <span>
#include <vector>

#include "cortado/engine.h"

namespace cortado {

// Notes them in `steps`, one entry a tensor with the fields `gradient` and `submitted`: known tensors, each once a
// step, with memory where they have elements. After an error none of them is noted.
template <typename TensorStep>
Status note_submitted(std::span<const Gradient> gradients, const std::vector<EngineTensor>& tensors,
                      std::vector<TensorStep>* steps) {
  const auto check = [&](const Gradient& gradient) -> Status {
    if (gradient.tensor >= tensors.size()) {
      return make_error(StatusCode::kInvalidArgument, "submit: there is no tensor %u, only %zu", gradient.tensor,
                        tensors.size());
    }
    const EngineTensor& tensor = tensors[gradient.tensor];
    if ((*steps)[gradient.tensor].submitted) {
      return make_error(StatusCode::kFailedPrecondition, "submit: \"%s\" was submitted twice in one step",
                        tensor.name.c_str());
    }
    if (gradient.data == nullptr && tensor.elems() != 0) {
      return make_error(StatusCode::kInvalidArgument, "submit: the gradient of \"%s\" is a null pointer",
                        tensor.name.c_str());
    }
    return {};
  };
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (const Status status = check(gradients[i]); !status.ok()) {
      for (const Gradient& noted : gradients.first(i)) (*steps)[noted.tensor] = {};
      return status;
    }
    TensorStep& step = (*steps)[gradients[i].tensor];
    step.gradient = gradients[i].data;
    step.submitted = true;
  }
  return {};
}

}  // namespace cortado

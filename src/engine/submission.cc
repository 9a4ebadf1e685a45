// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/submission.h"

namespace cortado {

Status note_submitted(std::span<const Gradient> gradients, const std::vector<EngineTensor>& tensors,
                      std::vector<SubmittedGradient>* submitted) {
  const auto check = [&](const Gradient& gradient) -> Status {
    if (gradient.tensor >= tensors.size()) {
      return make_error(StatusCode::kInvalidArgument, "submit: there is no tensor %u, only %zu", gradient.tensor,
                        tensors.size());
    }
    const EngineTensor& tensor = tensors[gradient.tensor];
    if ((*submitted)[gradient.tensor].submitted) {
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
      for (const Gradient& noted : gradients.first(i)) (*submitted)[noted.tensor] = {};
      return status;
    }
    (*submitted)[gradients[i].tensor] = {gradients[i].data, true};
  }
  return {};
}

}  // namespace cortado

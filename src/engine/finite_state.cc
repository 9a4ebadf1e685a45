// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/finite_state.h"

#include <cmath>

#include "core/check.h"
#include "core/finite.h"

namespace cortado {

namespace {

Status check_finite(const std::string& tensor, const std::string& what, const std::vector<float>& values) {
  if (all_finite(values.data(), static_cast<std::int64_t>(values.size()), DType::kFloat32)) return {};
  std::size_t at = 0;
  while (std::isfinite(values[at])) ++at;
  return make_error(StatusCode::kMismatch, "load_state: \"%s\": value %zu of the %s is %f, expected finite ones",
                    tensor.c_str(), at, what.c_str(), static_cast<double>(values[at]));
}

}  // namespace

Status check_finite(const EngineState& state) {
  for (const TensorState& tensor : state.tensors) {
    CORTADO_RETURN_IF_ERROR(check_finite(tensor.name, "residual", tensor.residual));
    CORTADO_RETURN_IF_ERROR(check_finite(tensor.name, "velocity", tensor.velocity));
    CORTADO_RETURN_IF_ERROR(check_finite(tensor.name, "basis", tensor.basis));
    for (const PlaceState& place : tensor.places) {
      CORTADO_RETURN_IF_ERROR(check_finite(tensor.name, "place " + place.name, place.values));
    }
  }
  return {};
}

}  // namespace cortado

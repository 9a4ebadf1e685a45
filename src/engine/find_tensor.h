// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cortado/engine.h"

namespace cortado {

// The index of the tensor of that name. It looks at one after the other.
inline std::optional<std::uint32_t> find_tensor(const std::vector<EngineTensor>& tensors, std::string_view name) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const EngineTensor& t) { return t.name == name; });
  if (found == tensors.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - tensors.begin());
}

}  // namespace cortado

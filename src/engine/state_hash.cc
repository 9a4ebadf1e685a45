// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/state_hash.h"

#include <string_view>

#include "core/hash.h"

namespace cortado {

namespace {

std::uint64_t hash_of(const std::vector<float>& values) {
  return fnv1a_64(std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
}

}  // namespace

std::uint64_t state_hash(const EngineState& state) {
  std::uint64_t hash = fnv1a_64(state.spec);
  const auto add = [&hash](std::uint64_t value) { hash = hash * 1099511628211ull ^ value; };
  add(static_cast<std::uint64_t>(state.step));
  add(static_cast<std::uint64_t>(state.phase_step));
  for (const auto& phase : state.layout) {
    add(phase.size());
    for (const auto& message : phase) {
      add(message.size());
      for (const std::string& name : message) add(fnv1a_64(name));
    }
  }
  for (const TensorState& tensor : state.tensors) {
    if (tensor.basis.empty()) continue;
    add(fnv1a_64(tensor.name));
    add(hash_of(tensor.basis));
    for (const PlaceState& place : tensor.places) {
      if (place.name == kOtherBasis) add(hash_of(place.values));
    }
  }
  return hash;
}

}  // namespace cortado

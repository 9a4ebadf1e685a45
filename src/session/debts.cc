// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/debts.h"

#include <algorithm>
#include <optional>
#include <string>

#include "codec/cast/float_chunks.h"
#include "core/finite.h"
#include "engine/find_tensor.h"

namespace cortado {

namespace {

// The place of a tensor's state that holds its debt; `begin` is the number of pieces left, 0: all in the next step.
constexpr const char* kDebt = "auto";

}  // namespace

void Debts::pay(const Gradient& gradient, const StepContext& context, std::int64_t step) {
  const auto found = debts_.find(gradient.tensor);
  if (found == debts_.end()) return;
  Debt& debt = found->second;
  const EngineTensor& tensor = tensors_[gradient.tensor];
  // A parameter that was not used: what arrives for it is dropped.
  if (context.holds_zero_gradients && all_bits_zero(gradient.data, tensor.size_bytes())) return;
  debt.last_gradient = step + 1;
  const float factor = static_cast<float>(context.gradient_scale / debt.pieces);
  float buffer[kChunkElems], sums[kChunkElems];
  for_chunks(tensor.elems(), [&](std::int64_t at, std::int64_t count) {
    const float* values = load_floats(gradient.data, tensor.dtype, at, count, buffer);
    for (std::int64_t i = 0; i < count; ++i) sums[i] = values[i] + debt.values.data()[at + i] * factor;
    store_floats(sums, 1.0f, count, gradient.data, tensor.dtype, at);
  });
  paid_.push_back(gradient);
}

void Debts::settle() {
  for (const Gradient& gradient : paid_) {
    const auto found = debts_.find(gradient.tensor);
    if (--found->second.pieces_left == 0) debts_.erase(found);
  }
}

void Debts::owe(std::uint32_t tensor, std::span<const float> values, float factor, int pieces, std::int64_t steps) {
  if (values.empty() || std::all_of(values.begin(), values.end(), [](float value) { return value == 0; })) return;
  Debt& debt = debts_[tensor];
  if (debt.values.empty()) debt.values = AlignedBuffer<float>(values.size());
  const float left = static_cast<float>(debt.pieces_left) / static_cast<float>(debt.pieces);
  if (debt.pieces_left > pieces) pieces = kPieces;  // what was spread stays so
  for (std::size_t i = 0; i < values.size(); ++i) {
    debt.values.data()[i] = debt.values.data()[i] * left + values[i] * factor;
  }
  debt.pieces = debt.pieces_left = pieces;
  debt.last_gradient = steps;
}

Debts::Dropped Debts::drop_old(std::int64_t steps) {
  Dropped dropped;
  dropped.tensors = static_cast<std::int64_t>(std::erase_if(debts_, [&](const auto& entry) {
    const bool is_old = steps - entry.second.last_gradient >= kStepsWithoutGradient;
    if (is_old) dropped.last = entry.first;
    return is_old;
  }));
  return dropped;
}

void Debts::save(EngineState* state) const {
  for (const auto& [t, debt] : debts_) {
    const std::string& name = tensors_[t].name;
    auto tensor = std::find_if(state->tensors.begin(), state->tensors.end(),
                               [&name](const TensorState& s) { return s.name == name; });
    if (tensor == state->tensors.end()) {
      state->tensors.push_back({.name = name, .residual = {}, .basis = {}, .velocity = {}});
      tensor = state->tensors.end() - 1;
    }
    tensor->places.push_back(
        {kDebt, debt.pieces == 1 ? 0 : debt.pieces_left, std::vector<float>(debt.values.begin(), debt.values.end())});
  }
}

Status Debts::check(const EngineState& state) const {
  for (const TensorState& tensor : state.tensors) {
    const std::optional<std::uint32_t> t = find_tensor(tensors_, tensor.name);
    for (const PlaceState& place : tensor.places) {
      if (place.name != kDebt) continue;
      if (!t.has_value() || place.begin < 0 || place.begin > kPieces ||
          static_cast<std::int64_t>(place.values.size()) != tensors_[*t].elems()) {
        return make_error(StatusCode::kMismatch, "load_state: what \"%s\" is still owed is of another model",
                          tensor.name.c_str());
      }
    }
  }
  return {};
}

void Debts::load(const EngineState& checked, std::int64_t steps) {
  debts_.clear();
  for (const TensorState& tensor : checked.tensors) {
    for (const PlaceState& place : tensor.places) {
      if (place.name != kDebt) continue;
      const std::uint32_t t = find_tensor(tensors_, tensor.name).value();
      owe(t, place.values, 1.0f, place.begin > 0 ? kPieces : 1, steps);
      const auto debt = debts_.find(t);
      if (place.begin > 0 && debt != debts_.end()) debt->second.pieces_left = static_cast<int>(place.begin);
    }
  }
}

void Debts::remove_from(EngineState* state) {
  for (TensorState& tensor : state->tensors) {
    std::erase_if(tensor.places, [](const PlaceState& place) { return place.name == kDebt; });
  }
  std::erase_if(state->tensors, [](const TensorState& tensor) {
    return tensor.residual.empty() && tensor.basis.empty() && tensor.velocity.empty() && tensor.places.empty();
  });
}

}  // namespace cortado

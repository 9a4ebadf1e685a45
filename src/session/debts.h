// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Debts: what an engine that was left kept back of the gradients (its residuals). It is paid with later gradients: all
// of it with the next one of a tensor or, if the engine ran for long and it may be much, in kPieces, with the next
// kPieces of them. Values are in unscaled units. Debts are this rank's alone; what is said of them must be agreed on.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/aligned_buffer.h"
#include "cortado/engine.h"

namespace cortado {

class Debts {
 public:
  static constexpr int kPieces = 8;
  static constexpr std::int64_t kStepsWithoutGradient = 100;  // of a tensor, until its debt is dropped

  // What this rank owes no longer, unpaid.
  struct Dropped {
    std::int64_t tensors = 0, last = -1;
  };

  // `tensors` outlive this.
  explicit Debts(const std::vector<EngineTensor>& tensors) : tensors_(tensors) {}

  bool empty() const { return debts_.empty(); }

  // -- a step

  void begin_step() { paid_.clear(); }

  // Adds to a gradient in host memory what is due now. `step`: how many have been made before this one.
  void pay(const Gradient& gradient, const StepContext& context, std::int64_t step);

  // Gradients of this step that were added to.
  std::span<const Gradient> paid() const { return paid_; }

  // Once the sums of this step, finite, are there: what was paid in it is owed no longer.
  void settle();

  // -- between steps, after `steps` of them

  // More of a tensor: `values`, a row-major matrix, times `factor`, in 1 or kPieces. What is owed there already is
  // added to it.
  void owe(std::uint32_t tensor, std::span<const float> values, float factor, int pieces, std::int64_t steps);

  // A layer that was frozen, say, has no gradient any more with which its debt could be paid.
  Dropped drop_old(std::int64_t steps);

  void clear() { debts_.clear(); }

  // -- checkpoints: places of tensors' states

  void save(EngineState* state) const;
  Status check(const EngineState& state) const;               // that a state's debts are of these tensors
  void load(const EngineState& checked, std::int64_t steps);  // in place of those there are
  static void remove_from(EngineState* state);                // for the engine inside, which knows none

 private:
  struct Debt {
    AlignedBuffer<float> values;
    int pieces = 1, pieces_left = 0;
    std::int64_t last_gradient = 0;  // steps after the last one in which the tensor had one, or when this began
  };

  const std::vector<EngineTensor>& tensors_;
  std::map<std::uint32_t, Debt> debts_;
  std::vector<Gradient> paid_;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The passes of error feedback over one tensor, for codecs that know nothing of it:
//
//   add_gradient   residual += gradient            what the codec encodes
//   subtract_sent  residual -= what was decoded    what the codec lost, kept for the next step
//   take_back      undoes add_gradient             what a step that was not finite leaves
//
// With a velocity buffer the residual accumulates the momentum instead of the gradient, and both are cleared where
// something was sent: momentum correction and factor masking of Deep Gradient Compression (Lin et al., ICLR 2018,
// section 3.2). The optimiser must then have no momentum of its own.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/differences.h"
#include "core/loss_scale.h"
#include "cortado/tensor_view.h"

namespace cortado {

// What is kept of one tensor, `elems` float32 values each, in unscaled units.
struct FeedbackMemory {
  float* residual = nullptr;
  float* velocity = nullptr;  // nullptr: no momentum correction

  bool empty() const { return residual == nullptr; }
};

struct FeedbackPass {
  std::int64_t elems = 0;
  const void* gradient = nullptr;  // nullptr, in take_back(): zeros
  DType dtype = DType::kFloat32;
  float gradient_scale = 1.0f;  // makes unscaled units of the gradient's
  float momentum = 0.0f;        // of the velocity

  float gradient_limit() const { return gradient_limit_of(gradient_scale); }
};

// What is left of a sum that `taken` is taken from. Beside a gradient that exploded it is rounding, which must not be
// fed back.
CORTADO_HD inline float without_rounding(float left, float taken) {
  const float magnitude = left < 0 ? -left : left, bound = kRoundingShare * (taken < 0 ? -taken : taken);
  return magnitude <= bound ? 0.0f : left;
}

// What `to` keeps after the gradient, from what `from` keeps before it; both may be the same memory:
//   velocity = momentum * velocity + gradient, residual += velocity    (without velocity: residual += gradient)
// Returns false if an element of the gradient was not finite. There `to` keeps what `from` did.
bool add_gradient(const FeedbackPass& pass, const FeedbackMemory& from, const FeedbackMemory& to);

// Takes one add_gradient() back, from what it left in `from` alone: exact to one rounding of each value; a value
// smaller than kRoundingShare of the gradient beside it is taken for rounding and becomes zero. Both may be the same
// memory.
void take_back(const FeedbackPass& pass, const FeedbackMemory& from, const FeedbackMemory& to);

// residual -= sent; the velocity becomes zero where `sent` is not. Squares of what was to be sent and of what was lost.
DifferenceSquares subtract_sent(const float* sent, std::int64_t elems, const FeedbackMemory& memory);

// Changes nothing: squares of `values` and of what `sent` differs from them by.
DifferenceSquares compare_sent(const void* values, DType values_dtype, const void* sent, DType sent_dtype,
                               std::int64_t elems);

}  // namespace cortado

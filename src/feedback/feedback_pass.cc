// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "feedback/feedback_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/cast/float_chunks.h"
#include "core/float_passes.h"
#include "core/streaming.h"

namespace cortado {

namespace {

// With a velocity. In place, so that the loop has one pointer to each buffer and vectorises.
bool add_chunk(const float* gradient, const FeedbackPass& pass, std::int64_t count, float* residual, float* velocity) {
  const float scale = pass.gradient_scale;
  const float momentum = pass.momentum;
  const float limit = pass.gradient_limit();
  int bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool finite = std::fabs(gradient[i]) < limit;  // false for NaN
    const float moved = momentum * velocity[i] + gradient[i] * scale;
    residual[i] += finite ? moved : 0.0f;
    velocity[i] = finite ? moved : velocity[i];
    bad |= !finite;
  }
  return bad == 0;
}

void copy_chunk(const float* from, float* to, std::int64_t at, std::int64_t count) {
  if (from != to) std::memcpy(to + at, from + at, static_cast<std::size_t>(count) * sizeof(float));
}

}  // namespace

bool add_gradient(const FeedbackPass& pass, const FeedbackMemory& from, const FeedbackMemory& to) {
  bool finite = true;
  float buffer[kChunkElems];
  for_chunks(pass.elems, [&](std::int64_t at, std::int64_t count) {
    const float* gradient = load_floats(pass.gradient, pass.dtype, at, count, buffer);
    copy_chunk(from.residual, to.residual, at, count);
    if (to.velocity == nullptr) {
      float* const residual = to.residual + at;
      finite = add_values_below(pass.gradient_limit(), gradient, pass.gradient_scale, count, residual) && finite;
    } else {
      copy_chunk(from.velocity, to.velocity, at, count);
      finite = add_chunk(gradient, pass, count, to.residual + at, to.velocity + at) && finite;
    }
  });
  return finite;
}

void take_back(const FeedbackPass& pass, const FeedbackMemory& from, const FeedbackMemory& to) {
  const float limit = pass.gradient_limit();
  float buffer[kChunkElems] = {};
  for_chunks(pass.elems, [&](std::int64_t at, std::int64_t count) {
    const float* gradient =
        pass.gradient == nullptr ? buffer : load_floats(pass.gradient, pass.dtype, at, count, buffer);
    if (to.velocity == nullptr) {
      take_values_back_below(limit, gradient, pass.gradient_scale, count, from.residual + at, to.residual + at);
      return;
    }
    copy_chunk(from.residual, to.residual, at, count);
    copy_chunk(from.velocity, to.velocity, at, count);
    for (std::int64_t i = 0; i < count; ++i) {
      if (!(std::fabs(gradient[i]) < limit)) continue;
      const float added = gradient[i] * pass.gradient_scale;
      float &velocity = to.velocity[at + i], &residual = to.residual[at + i];
      const float moved = velocity;
      velocity = pass.momentum > 0 ? without_rounding(moved - added, added) / pass.momentum : 0.0f;
      residual = without_rounding(residual - moved, moved);
    }
  });
  if (from.residual != to.residual) finish_streams();
}

DifferenceSquares subtract_sent(const float* sent, std::int64_t elems, const FeedbackMemory& memory) {
  if (float* const velocity = memory.velocity; velocity != nullptr) {
    for (std::int64_t i = 0; i < elems; ++i) velocity[i] = sent[i] != 0.0f ? 0.0f : velocity[i];
  }
  return take_differences(memory.residual, sent, elems, memory.residual);
}

DifferenceSquares compare_sent(const void* values, DType values_dtype, const void* sent, DType sent_dtype,
                               std::int64_t elems) {
  DifferenceSquares total;
  float value_buffer[kChunkElems], sent_buffer[kChunkElems];
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    const DifferenceSquares squares =
        take_differences(load_floats(values, values_dtype, at, count, value_buffer),
                         load_floats(sent, sent_dtype, at, count, sent_buffer), count, nullptr);
    total.of_values += squares.of_values;
    total.of_differences += squares.of_differences;
  });
  return total;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a small model whose gradients are given, trained through one engine a rank.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cortado/engine.h"

namespace cortado {

// The gradients of one rank, one vector a tensor, all float32.
using Gradients = std::vector<std::vector<float>>;

inline std::vector<EngineTensor> small_model() {
  return {{.name = "embedding", .rows = 40, .cols = 24, .is_embedding = true},
          {.name = "first.weight", .rows = 48, .cols = 33},
          {.name = "first.bias", .rows = 1, .cols = 48, .dimensions = 1},
          {.name = "conv.weight", .rows = 20, .cols = 63, .dimensions = 4},
          {.name = "empty", .rows = 0, .cols = 8},
          {.name = "tiny.weight", .rows = 2, .cols = 3},
          {.name = "last.weight", .rows = 17, .cols = 64},
          {.name = "last.bias", .rows = 1, .cols = 2, .dimensions = 1}};
}

// Different for each rank, step and tensor, of full rank as a matrix.
inline float made_up_value(int rank, std::int64_t step, std::size_t tensor, std::size_t i) {
  const double x = 0.37 * static_cast<double>(i) + 0.013 * static_cast<double>(i * i % 1009) + 1.3 * rank +
                   0.71 * static_cast<double>(step) + 2.1 * static_cast<double>(tensor);
  return static_cast<float>(std::sin(x) + 0.3 * std::cos(3.1 * x + rank));
}

inline Gradients made_up_gradients(const std::vector<EngineTensor>& tensors, int rank, std::int64_t step) {
  Gradients gradients;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::vector<float>& values = gradients.emplace_back(static_cast<std::size_t>(tensors[t].rows * tensors[t].cols));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = made_up_value(rank, step, t, i);
  }
  return gradients;
}

// One step; tensors are submitted last to first in two bunches, as a backward pass would. On success `gradients` holds
// the mean.
inline Result<StepOutcome> run_step(Engine& engine, Gradients& gradients, const StepContext& context = {},
                                    const LocalGradient& local = {}) {
  if (const Status status = engine.begin_step(context); !status.ok()) return status;
  std::vector<Gradient> bunch;
  for (std::size_t t = gradients.size(); t-- > 0;) {
    bunch.push_back({static_cast<std::uint32_t>(t), gradients[t].data()});
    if (t != gradients.size() / 2 && t != 0) continue;
    if (const Status status = engine.submit(bunch); !status.ok()) return status;
    bunch.clear();
  }
  return engine.finish_step(local);
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a small job of three layers whose batches depend on step and rank, run on the ranks of a LocalGroup, and
// the same job in double precision on one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/device_emulation.h"
#include "core/philox.h"
#include "cortado/kfac.h"
#include "kfac/emulated_kfac_device.h"

namespace cortado {

inline std::vector<KfacLayer> small_job() {
  return {{.name = "conv",
           .inputs = 2 * 9,
           .outputs = 4,
           .has_bias = true,
           .is_convolution = true,
           .window = {{3, 1, 1, 1, 1}, {3, 1, 1, 1, 1}}},
          {.name = "grouped",
           .inputs = 2 * 4,
           .outputs = 3,
           .groups = 2,
           .is_convolution = true,
           .window = {{2, 2, 1, 0, 0}, {2, 2, 1, 0, 0}}},
          {.name = "fc", .inputs = 10, .outputs = 7, .has_bias = true},
          {.name = "head", .inputs = 7, .outputs = 5}};
}

constexpr std::int64_t kSmallImages = 6, kSmallSide = 4;

inline std::vector<float> normal_values(std::int64_t elems, std::uint64_t seed, std::uint64_t step,
                                        std::uint64_t tensor) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, step, tensor, values.data(), elems);
  return values;
}

struct SmallBatch {
  std::vector<float> values;
  KfacBatch batch() const { return {values.data(), DType::kFloat32, kSmallImages, high, high}; }
  std::int64_t high = 1;
};

inline SmallBatch activations_of(const KfacLayer& layer, int rank, std::int64_t step, std::uint64_t tensor) {
  const std::int64_t side = layer.is_convolution ? kSmallSide : 1;
  const std::int64_t elems = kSmallImages * layer.groups * layer.channels() * side * side;
  return {normal_values(elems, 100 + static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(step), tensor), side};
}

inline SmallBatch output_gradients_of(const KfacLayer& layer, int rank, std::int64_t step, std::uint64_t tensor) {
  const std::int64_t side = !layer.is_convolution ? 1 : layer.window[0].stride == 2 ? kSmallSide / 2 : kSmallSide;
  const std::int64_t elems = kSmallImages * layer.groups * layer.outputs * side * side;
  return {normal_values(elems, 200 + static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(step), tensor), side};
}

// Gradients of all layers of one rank, the weight's and behind it the bias's.
using Gradients = std::vector<std::vector<float>>;

// The mean over ranks if `rank` is negative.
inline Gradients gradients_of(const std::vector<KfacLayer>& layers, int world_size, int rank, std::int64_t step) {
  Gradients all;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    std::vector<float> sum(static_cast<std::size_t>(layers[i].gradient_elems()));
    for (int r = 0; r < world_size; ++r) {
      if (rank >= 0 && r != rank) continue;
      const std::vector<float> one = normal_values(layers[i].gradient_elems(), 300 + static_cast<std::uint64_t>(r),
                                                   static_cast<std::uint64_t>(step), i);
      const float share = rank >= 0 ? 1.0f : 1.0f / static_cast<float>(world_size);
      for (std::size_t e = 0; e < one.size(); ++e) sum[e] += one[e] * share;
    }
    all.push_back(std::move(sum));
  }
  return all;
}

inline std::vector<KfacGradient> addresses_of(const std::vector<KfacLayer>& layers, Gradients* gradients) {
  std::vector<KfacGradient> addresses;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    float* data = (*gradients)[i].data();
    addresses.push_back(
        {.weight = data,
         .bias = layers[i].has_bias ? data + layers[i].groups * layers[i].outputs * layers[i].inputs : nullptr});
  }
  return addresses;
}

inline Status add_batches(Kfac& kfac, int rank, std::int64_t step) {
  for (std::size_t i = 0; i < kfac.layers().size(); ++i) {
    const SmallBatch x = activations_of(kfac.layers()[i], rank, step, i);
    const SmallBatch d = output_gradients_of(kfac.layers()[i], rank, step, i);
    CORTADO_RETURN_IF_ERROR(kfac.add_activations(i, x.batch()));
    CORTADO_RETURN_IF_ERROR(kfac.add_output_gradients(i, d.batch()));
  }
  return {};
}

struct SmallRun {
  int world_size = 4;
  KfacOptions options;
  KfacHyperparameters values;
  int factor_update_steps = 1, inv_update_steps = 1;
  bool reduces = false;  // gradients come unaveraged
  bool on_device = false;
  std::vector<int> device_ranks = {};  // with on_device; empty: all
  bool backwards = false;              // the order in which the emulated device runs blocks and threads
};

// One step; returns the preconditioned gradients.
inline Result<Gradients> run_step(Kfac& kfac, const SmallRun& run, int rank, std::int64_t step) {
  KfacHyperparameters values = run.values;
  values.update_factors = step % run.factor_update_steps == 0;
  values.update_inverses = step % run.inv_update_steps == 0;
  if (values.update_factors) CORTADO_RETURN_IF_ERROR(add_batches(kfac, rank, step));
  Gradients gradients = gradients_of(kfac.layers(), run.world_size, run.reduces ? rank : -1, step);
  const std::vector<KfacGradient> addresses = addresses_of(kfac.layers(), &gradients);
  if (run.reduces) CORTADO_RETURN_IF_ERROR(kfac.reduce_gradients(addresses));
  const Result<KfacOutcome> outcome = kfac.step(values, addresses);
  if (!outcome.ok()) return outcome.status();
  return gradients;
}

// [rank][step]: what every rank had after each step.
using History = std::vector<std::vector<Gradients>>;

inline History run_job(const SmallRun& run, int steps, const std::function<void(Kfac&, int rank)>& at_end = {}) {
  History history(static_cast<std::size_t>(run.world_size));
  const std::vector<Status> statuses = run_ranks(run.world_size, [&](Communicator& communicator) -> Status {
    KfacOptions options = run.options;
    EmulatedDevice::order() = run.backwards ? EmulatedOrder::kBackwards : EmulatedOrder::kForwards;
    const std::vector<int>& there = run.device_ranks;
    if (run.on_device && (there.empty() || std::find(there.begin(), there.end(), communicator.rank()) != there.end())) {
      options.device = make_emulated_kfac_device();
    }
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Kfac> kfac, Kfac::create(small_job(), options, &communicator));
    for (std::int64_t step = 0; step < steps; ++step) {
      CORTADO_ASSIGN_OR_RETURN(Gradients after, run_step(*kfac, run, communicator.rank(), step));
      history[static_cast<std::size_t>(communicator.rank())].push_back(std::move(after));
    }
    if (at_end) at_end(*kfac, communicator.rank());
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  return history;
}

inline void expect_replicas_are_equal(const History& history) {
  for (std::size_t rank = 1; rank < history.size(); ++rank) {
    EXPECT_EQ(history[rank], history[0]) << "rank " << rank;  // floats, of which none is a NaN
  }
}

// Relative, L2.
inline double distance(const Gradients& got, const Gradients& expected) {
  double lost = 0, total = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    for (std::size_t e = 0; e < got[i].size(); ++e) {
      lost += std::pow(static_cast<double>(got[i][e]) - static_cast<double>(expected[i][e]), 2);
      total += std::pow(static_cast<double>(expected[i][e]), 2);
    }
  }
  return std::sqrt(lost / total);
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests of engines of a plan: plans for the small model.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "cortado/codec.h"
#include "cortado/plan.h"
#include "cortado/planner.h"
#include "engine/engine_testing.h"

namespace cortado {

inline const std::vector<Option>& options_of_the_tree() {
  static const std::vector<Option> options = generate_options({}).value();
  return options;
}

// Every bucket has another option and another codec; buckets of one to three tensors.
inline Plan mixed_plan(const Topology& topology, std::size_t seed, const std::vector<std::string>& codecs,
                       const std::vector<Option>& options = options_of_the_tree()) {
  std::vector<std::string> names;
  for (const EngineTensor& tensor : small_model()) names.push_back(tensor.name);
  std::rotate(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(seed % names.size()), names.end());
  Plan plan{.job = "small", .cluster = "test", .topology = topology, .buckets = {}, .notes = {}, .unknown = {}};
  for (std::size_t b = 0, next = 0; next < names.size(); ++b) {
    const std::size_t count = std::min(names.size() - next, 1 + (b + seed) % 3);
    PlanBucket& bucket = plan.buckets.emplace_back();
    for (std::size_t i = 0; i < count; ++i) bucket.tensors.push_back(names[next++]);
    bucket.option = options[(seed * 7919 + b * 1543) % options.size()];
    bucket.codec = codecs[(seed + b) % codecs.size()];
    if (!find_codec(bucket.codec.substr(0, bucket.codec.find('(')))->traits.low_rank) continue;
    const bool has_vectors = std::any_of(bucket.tensors.begin(), bucket.tensors.end(), [](const std::string& name) {
      const auto tensors = small_model();
      return std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; })->dimensions <
             2;
    });
    const bool of_two_levels = topology.levels.size() == 2 && seed % 3 == 0 && !has_vectors;
    const char* const option = of_two_levels ? "reduce@intra encode@cpu all_gather@inter decode@cpu broadcast@intra"
                                             : "encode@cpu all_reduce@flat decode@cpu";
    bucket.option = Option::parse(option, topology).value();
  }
  return plan;
}

inline Plan dense_plan(const Topology& topology) {
  Plan plan = mixed_plan(topology, 0, {"none"});
  const std::string all = topology.range_name({0, static_cast<int>(topology.levels.size()) - 1});
  for (PlanBucket& bucket : plan.buckets) bucket.option = Option::parse("all_reduce@" + all, topology).value();
  return plan;
}

inline const std::vector<std::string> kLossless = {"none", "float_rans"};
inline const std::vector<std::string> kLossy = {
    "topk(density=0.1)", "quant(bits=4)",      "sign",
    "cast(bf16)",        "randk(density=0.2)", "topk(density=0.3) | quant(bits=8)",
    "acp(rank=2)",       "power(rank=2)"};

inline EngineOptions with_timeout() {
  EngineOptions options;
  options.timeout_s = 20;
  return options;
}

// What `rank` submits last to first, or first to last: ranks differ.
inline Result<StepOutcome> run_plan_step(Engine& engine, int rank, Gradients& gradients,
                                         const StepContext& context = {}) {
  CORTADO_RETURN_IF_ERROR(engine.begin_step(context));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::size_t t = rank % 2 == 0 ? gradients.size() - 1 - i : i;
    const Gradient gradient{static_cast<std::uint32_t>(t), gradients[t].data()};
    CORTADO_RETURN_IF_ERROR(engine.submit({&gradient, 1}));
  }
  return engine.finish_step();
}

}  // namespace cortado

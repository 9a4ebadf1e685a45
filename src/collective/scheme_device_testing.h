// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What tests of schemes on a device run, emulated and on a real one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/scheme_testing.h"
#include "cortado/planner.h"

namespace cortado {

inline bool is_for_gpu(const Operation& op) { return !is_collective(op.kind) && op.device == OpDevice::kGpu; }

inline bool has_gpu(const Option& option) {
  return std::any_of(option.operations.begin(), option.operations.end(), is_for_gpu);
}

inline bool have_same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

// Steps of values, of which the second is not committed, and the last has a tensor that no rank has a gradient of.
inline Message step_message(const std::vector<SchemeTensor>& tensors, int rank, int step) {
  Message message = normal_like_message(tensors, rank, step);
  if (step == 2) std::fill(message[0].begin(), message[0].end(), 0.0f);
  return message;
}

// Ranks with the device, beside ranks without one, sum and keep what ranks without one do, to the bit; and it was used.
inline void expect_results_of_the_cpu(const SchemeDevice& device, SchemeRanks& ranks, const Option& option,
                                      const Codec* codec, const std::vector<SchemeTensor>& tensors) {
  SCOPED_TRACE(codec->spec() + ": " + option.to_string(ranks.topology()));
  const SchemeSetup setup = {
      .option = option, .codec = codec, .tensors = tensors, .has_feedback = true, .averages = true, .seed = 7};
  SchemeRuns on_cpu(ranks, setup), on_device(ranks, setup, &device);
  for (int step = 0; step < 3; ++step) {
    for (SchemeRuns* runs : {&on_cpu, &on_device}) {
      for (int rank = 0; rank < ranks.size(); ++rank) runs->run(rank).coder().hold_zeros(true);
      const Status status = runs->step(step, step_message);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (int rank = 0; rank < ranks.size() && step != 1; ++rank) runs->run(rank).commit();
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const Message expected_sums = on_cpu.sums(rank), found_sums = on_device.sums(rank);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        ASSERT_TRUE(have_same_bits(found_sums[t], expected_sums[t])) << "step " << step << ", rank " << rank;
      }
      const auto expected = on_cpu.run(rank).coder().residuals(), found = on_device.run(rank).coder().residuals();
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_TRUE(have_same_bits(found[i].values, expected[i].values))
            << "step " << step << ", rank " << rank << ", residual " << found[i].place;
      }
    }
  }
  for (int rank = 0; rank < ranks.size(); rank += 2) {
    const SchemeRun& run = on_device.run(rank);
    ASSERT_EQ(run.coder().host_reason(), "");
    for (const SchemeStep& step : run.program().steps) {
      const bool has_work = step.active && (!step.units.empty() || !step.result_units.empty());
      ASSERT_EQ(run.coder().runs_on_device(step), is_for_gpu(step.op) && has_work);
    }
  }
}

// All options of the tree with a GPU in them, or one in so many.
inline void expect_results_of_the_cpu(const SchemeDevice& device, const Topology& topology, const std::string& spec,
                                      std::size_t every = 1) {
  const std::vector<SchemeTensor> tensors = {{"a.weight", 5, 7}, {"a.bias", 1, 3}, {"b.weight", 4, 16}};
  SchemeRanks ranks(topology);
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const std::vector<Option> options = generate_options({}).value();
  std::size_t tried = 0;
  for (const Option& option : options) {
    if (!has_gpu(option) || tried++ % every != 0) continue;
    expect_results_of_the_cpu(device, ranks, option, codec.get(), tensors);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(tried, 4000u);
}

// Codecs of fixed and of varying size, with and without loss, that draw, sum payloads, vote.
inline const std::vector<std::string> kDeviceSpecs = {
    "cast(bf16)",        "float_rans",         "quant(bits=4)", "sign(vote=majority)",
    "topk(density=0.2)", "randk(density=0.3)", "fp8",           "compso"};

}  // namespace cortado

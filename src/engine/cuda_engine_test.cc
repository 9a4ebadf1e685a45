// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Ranks whose gradients are on a CUDA device: what is delivered and kept are the bits of the engine on the CPU; of low
// rank, whose projections are held to a bound, they are close. Part of cortado_cuda_test, which runs nothing where
// there is no device.
#include "cortado/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/cuda_queue.h"
#include "engine/engine_testing.h"

namespace cortado {
namespace {

// The stream that computes one rank's gradients, and their memory; of the rank's thread.
class Compute {
 public:
  static Result<StepOutcome> run_step(Engine& engine, Gradients& gradients, const StepContext& context,
                                      const LocalGradient&) {
    thread_local Compute compute;
    if (compute.queue_ == nullptr) CORTADO_RETURN_IF_ERROR(compute.open(gradients));
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      std::memcpy(compute.on_host_[t], gradients[t].data(), gradients[t].size() * sizeof(float));
      CORTADO_RETURN_IF_ERROR(compute.queue_->copy_to_device(static_cast<std::byte*>(compute.on_device_[t]),
                                                             compute.on_host_[t], gradients[t].size() * sizeof(float)));
    }
    StepContext own = context;
    own.device_stream = compute.queue_->stream();
    CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_step_at(engine, compute.on_device_, own));
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      CORTADO_RETURN_IF_ERROR(compute.queue_->copy_to_host(compute.on_host_[t],
                                                           static_cast<const std::byte*>(compute.on_device_[t]),
                                                           gradients[t].size() * sizeof(float)));
    }
    CORTADO_RETURN_IF_ERROR(compute.queue_->record(compute.event_));
    for (bool is_there = false; !is_there;) {
      CORTADO_ASSIGN_OR_RETURN(is_there, compute.queue_->reached(compute.event_));
    }
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      std::memcpy(gradients[t].data(), compute.on_host_[t], gradients[t].size() * sizeof(float));
    }
    return outcome;
  }

 private:
  Status open(const Gradients& gradients) {
    CORTADO_ASSIGN_OR_RETURN(queue_, make_cuda_queue(0));
    CORTADO_ASSIGN_OR_RETURN(event_, queue_->make_event());
    for (const std::vector<float>& values : gradients) {
      CORTADO_ASSIGN_OR_RETURN(on_device_.emplace_back(), queue_->allocate_on_device(values.size() * sizeof(float)));
      CORTADO_ASSIGN_OR_RETURN(on_host_.emplace_back(), queue_->allocate_on_host(values.size() * sizeof(float)));
    }
    return {};
  }

  std::unique_ptr<DeviceQueue> queue_;
  DeviceQueue::Event event_ = 0;
  std::vector<void*> on_device_;
  std::vector<std::byte*> on_host_;
};

Gradients with_a_bad_step(int rank, std::int64_t step) {
  Gradients gradients = made_up_gradients(small_model(), rank, step);
  const std::size_t matrix = tensor_index(small_model(), "first.weight");
  if (step == 3 && rank == 1) gradients[matrix][17] = std::numeric_limits<float>::infinity();
  return gradients;
}

class CudaEngine : public testing::TestWithParam<const char*> {};

double norm(const std::vector<float>& values) {
  return std::sqrt(squares_of_difference({values.begin(), values.end()}, std::vector<double>(values.size())));
}

// To a part of the norm of what is compared, or of what it is a small rest of.
void expect_close(const std::vector<float>& found, const std::vector<float>& expected, const std::string& what,
                  double norm_of_whole = 0) {
  const std::vector<double> a(found.begin(), found.end()), b(expected.begin(), expected.end());
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_LE(std::sqrt(squares_of_difference(a, b)), std::max(1e-4 * norm(expected), 1e-6 * norm_of_whole)) << what;
}

TEST_P(CudaEngine, HasTheResultsOfTheEngineOnTheCpu) {
  Training training{.options = coded(GetParam()), .gradients = with_a_bad_step};
  training.options.start_step = 1;
  const History expected = train(training);
  training.engine = [](std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator) {
    return create_cuda_engine(std::move(tensors), options, communicator, /*device=*/0);
  };
  training.run_step = Compute::run_step;
  const History found = train(training);
  expect_replicas_agree(found);
  EXPECT_EQ(found.finite, expected.finite);
  const EngineOptions::Method method = training.options.method;
  const bool is_exact = method != EngineOptions::Method::kAcp && method != EngineOptions::Method::kPower;
  for (std::size_t rank = 0; rank < found.delivered.size(); ++rank) {
    for (std::size_t step = 0; step < found.delivered[rank].size(); ++step) {
      if (!expected.finite[rank][step]) continue;
      const std::string where = "rank " + std::to_string(rank) + ", step " + std::to_string(step);
      if (is_exact) {
        EXPECT_TRUE(same_bits(found.delivered[rank][step], expected.delivered[rank][step])) << where;
        continue;
      }
      for (std::size_t t = 0; t < found.delivered[rank][step].size(); ++t) {
        expect_close(found.delivered[rank][step][t], expected.delivered[rank][step][t], where);
      }
    }
    for (std::size_t t = 0; t < found.states[rank].tensors.size(); ++t) {
      const TensorState &a = found.states[rank].tensors[t], &b = expected.states[rank].tensors[t];
      if (is_exact) {
        EXPECT_EQ(a.residual, b.residual);
      } else {
        expect_close(a.residual, b.residual, a.name, norm(expected.delivered[rank].back()[t]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CudaEngine,
                         testing::Values("sign", "sign(scale=two_means, bucket_cap_mib=0)", "fp8(e4m3)",
                                         "quant(bits=4, round=stochastic)", "quant(bits=3, feedback=none)",
                                         "topk(density=0.1)", "topk(density=0.05, select=sampled)", "compso",
                                         "float_rans", "randk(density=0.2)", "topk(density=0.1) | quant(bits=4)",
                                         "acp(rank=2)", "acp(rank=2, sides=alternate)", "power(rank=2)", "cast(bf16)"));

}  // namespace
}  // namespace cortado

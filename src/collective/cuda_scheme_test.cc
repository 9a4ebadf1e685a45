// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every option of the tree that has a GPU in it, executed on one, with a codec of fixed and one of varying size, and
// one option in 23 with the others: sums and residuals of the CPU's variant, to the bit.
#include "collective/scheme_device_testing.h"
#include "core/cuda_device.h"
#include "cortado/cuda.h"

namespace cortado {
namespace {

class CudaScheme : public testing::TestWithParam<std::string> {};

TEST_P(CudaScheme, GivesTheResultsOfTheCpu) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const std::shared_ptr<const SchemeDevice> device = create_cuda_scheme_device(/*device=*/0);
  const bool takes_all = GetParam() == "cast(bf16)" || GetParam() == "float_rans";
  for (const Topology& topology : {Topology{{{"intra", 2}, {"inter", 2}}}, Topology{{{"intra", 2}, {"inter", 3}}}}) {
    expect_results_of_the_cpu(*device, topology, GetParam(), takes_all ? 1 : 23);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaScheme, testing::ValuesIn(kDeviceSpecs),
                         [](const auto& info) { return info.param.substr(0, info.param.find('(')); });

}  // namespace
}  // namespace cortado

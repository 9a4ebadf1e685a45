// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The batches of device_cases.h on a CUDA device: payloads and values are those of the codecs, byte for byte. Without a
// device nothing is run, and the program says so.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "codec/device_cases.h"
#include "codec/device_testing.h"
#include "core/cuda_device.h"

namespace cortado {
namespace {

class CudaMemory final : public TestMemory {
 public:
  ~CudaMemory() override {
    for (void* const block : blocks_) cudaFree(block);
  }

  std::byte* allocate(std::uint64_t bytes) override {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes + 1), cudaSuccess);
    EXPECT_EQ(cudaMemset(memory, 0xa5, bytes + 1), cudaSuccess);
    blocks_.push_back(memory);
    return static_cast<std::byte*>(memory);
  }
  void to_device(std::byte* to, std::span<const std::byte> from) override {
    EXPECT_EQ(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  void from_device(std::span<std::byte> to, const std::byte* from) override {
    EXPECT_EQ(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  }
  Result<std::unique_ptr<DeviceBatch>> make(std::string_view spec, std::span<const DeviceTensor> tensors) override {
    return make_cuda_batch(spec, tensors);
  }
  bool has_nan_of_cpu() const override { return false; }

 private:
  std::vector<void*> blocks_;
};

class CudaBatch : public testing::TestWithParam<BatchCase> {};

TEST_P(CudaBatch, GivesTheBytesOfTheCodec) {
  CudaMemory memory;
  BatchCheck check(memory, GetParam());
  ASSERT_NO_FATAL_FAILURE(check.run());
  for (int round = 0; round < kDamageRounds; ++round) {
    ASSERT_NO_FATAL_FAILURE(
        check.run_damaged([round](std::size_t i, std::vector<std::byte>& payload) { damage(round, i, payload); }));
  }
}

// An error of the application before is neither ours nor taken from it.
TEST(CudaDevice, LeavesOtherErrorsAlone) {
  CudaMemory memory;
  BatchCheck check(memory, device_cases()[0]);
  ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  ASSERT_NO_FATAL_FAILURE(check.run());
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaBatch, testing::ValuesIn(device_cases()),
                         [](const auto& info) { return name_of_case(info.param, info.index); });

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests) && cortado::cuda_device_count() == 0) {
    std::puts("no CUDA device: none of the device tests was run");
    return 0;
  }
  return RUN_ALL_TESTS();
}

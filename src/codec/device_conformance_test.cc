// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The kernels of the device variants, run on the CPU: payloads and values are those of the codecs, byte for byte, over
// random shapes; damaged payloads are noticed where the codec notices them.
#include <gtest/gtest.h>

#include <new>

#include "codec/device_cases.h"
#include "codec/device_registry.h"
#include "codec/device_testing.h"
#include "core/device_emulation.h"

namespace cortado {
namespace {

class HostMemory final : public TestMemory {
 public:
  std::byte* allocate(std::uint64_t bytes) override {
    blocks_.push_back(std::make_unique<Block[]>(bytes / sizeof(Block) + 1));
    auto* memory = reinterpret_cast<std::byte*>(blocks_.back().get());
    std::memset(memory, 0xa5, bytes);
    return memory;
  }
  void to_device(std::byte* to, std::span<const std::byte> from) override {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  void from_device(std::span<std::byte> to, const std::byte* from) override {
    if (!to.empty()) std::memcpy(to.data(), from, to.size());
  }
  Result<std::unique_ptr<DeviceBatch>> make(std::string_view spec, std::span<const DeviceTensor> tensors) override {
    return make_batch<EmulatedDevice>(spec, tensors);
  }

 private:
  struct alignas(256) Block {
    std::byte bytes[256];
  };
  std::vector<std::unique_ptr<Block[]>> blocks_;
};

class EmulatedBatch : public testing::TestWithParam<BatchCase> {};

TEST_P(EmulatedBatch, GivesTheBytesOfTheCodec) {
  for (const EmulatedOrder order : {EmulatedOrder::kForwards, EmulatedOrder::kBackwards}) {
    EmulatedDevice::order() = order;
    HostMemory memory;
    BatchCheck check(memory, GetParam());
    ASSERT_NO_FATAL_FAILURE(check.run());
    check.run_damaged(damage_of(GetParam()));
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
}

INSTANTIATE_TEST_SUITE_P(Device, EmulatedBatch, testing::ValuesIn(device_cases()),
                         [](const auto& info) { return name_of_case(info.param, info.index); });

TEST(DeviceRegistry, EveryRowIsACodecOfThatName) {
  for (const DeviceRow& row : kDeviceRows<EmulatedDevice>) EXPECT_NE(find_codec(row.codec), nullptr) << row.codec;
}

TEST(DeviceRegistry, SaysWhatHasNoVariant) {
  const Result<std::unique_ptr<DeviceBatch>> made = make_batch<EmulatedDevice>("topk | quant", {});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(made.status().message().find("by themselves: cast"), std::string::npos) << made.status().message();
}

TEST(DeviceRegistry, RefusesOtherTensorsThanTheBatchWasMadeFor) {
  DeviceTensor tensor = {.rows = 3, .cols = 4};
  std::unique_ptr<DeviceBatch> batch = make_batch<EmulatedDevice>("cast", {&tensor, 1}).value();
  const std::uint64_t step = 0;
  std::vector<std::byte> workspace(batch->workspace_bytes()), payload(100);
  alignas(16) float values[12] = {};
  EXPECT_FALSE(batch->set_up({&tensor, 1}, {.seed = 1, .step = &step}, workspace.data(), nullptr).ok());
  tensor.data = values;
  tensor.payload = payload.data();
  EXPECT_TRUE(batch->set_up({&tensor, 1}, {.seed = 1, .step = &step}, workspace.data(), nullptr).ok());
  tensor.rows = 4;
  EXPECT_FALSE(batch->set_up({&tensor, 1}, {.seed = 1, .step = &step}, workspace.data(), nullptr).ok());
  tensor.rows = 3;
  tensor.data = reinterpret_cast<std::byte*>(values) + 1;
  EXPECT_FALSE(batch->set_up({&tensor, 1}, {.seed = 1, .step = &step}, workspace.data(), nullptr).ok());
}

}  // namespace
}  // namespace cortado

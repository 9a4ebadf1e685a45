// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The kernels of the device variants, run on the CPU: payloads and values are those of the codecs, byte for byte, over
// random shapes; damaged payloads are noticed where the codec notices them.
#include <gtest/gtest.h>

#include <new>
#include <utility>

#include "codec/device_batch.h"
#include "codec/device_cases.h"
#include "codec/device_testing.h"
#include "core/device_emulation.h"

namespace cortado {
namespace {

// Each block of memory ends where it was asked to, for sanitizers.
class HostMemory final : public TestMemory {
 public:
  std::byte* allocate(std::uint64_t bytes) override {
    auto* memory = static_cast<std::byte*>(::operator new(bytes, kAlign));
    blocks_.emplace_back(memory);
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
  static constexpr std::align_val_t kAlign{kWorkspaceAlignBytes};
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };
  std::vector<std::unique_ptr<std::byte, Delete>> blocks_;
};

class EmulatedBatch : public testing::TestWithParam<BatchCase> {};

TEST_P(EmulatedBatch, GivesTheBytesOfTheCodec) {
  for (const EmulatedOrder order : {EmulatedOrder::kForwards, EmulatedOrder::kBackwards}) {
    EmulatedDevice::order() = order;
    HostMemory memory;
    BatchCheck check(memory, GetParam());
    ASSERT_NO_FATAL_FAILURE(check.run());
    for (int round = static_cast<int>(order); round < kDamageRounds; round += 2) {
      ASSERT_NO_FATAL_FAILURE(
          check.run_damaged([round](std::size_t i, std::vector<std::byte>& payload) { damage(round, i, payload); }));
    }
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
}

INSTANTIATE_TEST_SUITE_P(Device, EmulatedBatch, testing::ValuesIn(device_cases()),
                         [](const auto& info) { return name_of_case(info.param, info.index); });

TEST(DeviceRegistry, SaysWhatHasNoVariant) {
  const Result<std::unique_ptr<DeviceBatch>> made = make_batch<EmulatedDevice>("topk | quant", {});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(made.status().message().find("by themselves: cast"), std::string::npos) << made.status().message();
}

TEST(DeviceRegistry, RefusesTensorsThatNoMemoryHolds) {
  const std::int64_t side = std::int64_t{1} << 32;
  for (const auto& [rows, cols] : {std::pair(side, side), std::pair(side, side / 4), std::pair(-side, side)}) {
    const DeviceTensor tensor = {.rows = rows, .cols = cols};
    EXPECT_EQ(make_batch<EmulatedDevice>("cast", {&tensor, 1}).status().code(), StatusCode::kUnsupported);
  }
}

TEST(DeviceRegistry, RefusesOtherTensorsThanTheBatchWasMadeFor) {
  DeviceTensor tensor = {.rows = 3, .cols = 4};
  std::unique_ptr<DeviceBatch> batch = make_batch<EmulatedDevice>("cast", {&tensor, 1}).value();
  const std::uint64_t step = 0;
  HostMemory memory;
  std::byte* workspace = memory.allocate(batch->workspace_bytes() + 16);
  const auto set_up = [&] { return batch->set_up({&tensor, 1}, {.seed = 1, .step = &step}, workspace, nullptr); };
  EXPECT_FALSE(set_up().ok());
  std::byte* values = memory.allocate(13 * sizeof(float));
  tensor.data = values;
  tensor.payload = memory.allocate(100);
  EXPECT_TRUE(set_up().ok());
  tensor.rows = 4;
  EXPECT_FALSE(set_up().ok());
  tensor.rows = 3;
  tensor.data = values + 1;
  EXPECT_FALSE(set_up().ok());
  tensor.data = values;
  workspace += 16;
  EXPECT_NE(set_up().message().find("aligned"), std::string::npos);
}

// Codecs of a fixed size look at sizes too.
TEST(DeviceRegistry, RefusesPayloadsOfAnotherSizeThanTheFixedOne) {
  DeviceTensor tensors[2] = {{.rows = 3, .cols = 4}, {.rows = 5, .cols = 1}};
  std::unique_ptr<DeviceBatch> batch = make_batch<EmulatedDevice>("cast", tensors).value();
  HostMemory memory;
  for (DeviceTensor& tensor : tensors) {
    tensor.data = memory.allocate(12 * sizeof(float));
    tensor.payload = memory.allocate(100);
  }
  const std::uint64_t step = 0;
  const Status status =
      batch->set_up(tensors, {.seed = 1, .step = &step}, memory.allocate(batch->workspace_bytes()), nullptr);
  ASSERT_TRUE(status.ok()) << status.to_string();
  ASSERT_TRUE(batch->decode(nullptr).ok());
  EXPECT_EQ(batch->faults()[0] | batch->faults()[1], 0u);
  batch->payload_bytes()[1] -= 1;
  ASSERT_TRUE(batch->decode(nullptr).ok());
  EXPECT_EQ(batch->faults()[0], 0u);
  EXPECT_NE(batch->faults()[1], 0u);
}

}  // namespace
}  // namespace cortado

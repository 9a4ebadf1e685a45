// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the host decides of launches: tiles, grids and memory, also of tensors that no test has memory for.
#include "codec/device_layout.h"

#include <gtest/gtest.h>

#include "codec/device_registry.h"
#include "core/device_emulation.h"

namespace cortado {
namespace {

// Notes launches and runs none.
class CountingDevice {
 public:
  explicit CountingDevice(DeviceStream) {}
  template <class Kernel>
  void launch(std::int64_t blocks, const Kernel&) {
    launches().push_back(blocks);
    static_assert(Kernel::kThreads % kWarpThreads == 0 && Kernel::kThreads <= 1024);
    // What a block may have without asking for more.
    static_assert(sizeof(typename Kernel::Shared) <= 48 * 1024);
    // What CUDA takes as arguments of a kernel.
    static_assert(sizeof(Kernel) <= 4096);
  }
  void fill(void*, int, std::uint64_t) {}
  void upload(void*, const void*, std::uint64_t) {}
  Status status() const { return {}; }

  static std::vector<std::int64_t>& launches() {
    static std::vector<std::int64_t> value;
    return value;
  }
};

TEST(DeviceLayout, TilesCoverEveryTensorOnce) {
  const std::unique_ptr<Codec> codec = make_codec("cast").value();
  const std::vector<DeviceTensor> tensors = {
      {.rows = 1, .cols = 10}, {.rows = 0, .cols = 3}, {.rows = 5, .cols = 5}, {.rows = 1, .cols = 8}};
  DeviceLayout layout(*codec, tensors);
  const TilingSlots slots = layout.tile(8);
  ASSERT_EQ(slots.tiles, 2 + 0 + 4 + 1);
  std::vector<std::byte> memory(layout.tables().begin(), layout.tables().end());
  const Tiling tiling = layout.workspace(memory.data(), nullptr).tiling(slots);
  std::vector<std::int64_t> covered(tensors.size());
  for (std::int64_t i = 0; i < slots.tiles; ++i) {
    const Tile tile = tiling.tile(i);
    EXPECT_EQ(tile.first, covered[static_cast<std::size_t>(tile.tensor)]);
    EXPECT_EQ(tile.first, tile.number * 8);
    EXPECT_GE(tile.elems, 1);
    covered[static_cast<std::size_t>(tile.tensor)] += tile.elems;
  }
  EXPECT_EQ(covered, (std::vector<std::int64_t>{10, 0, 25, 8}));
}

TEST(DeviceLayout, TilesBeyondFourBillionElements) {
  const std::unique_ptr<Codec> codec = make_codec("cast").value();
  const std::int64_t rows = 3, cols = (std::int64_t{1} << 32) + 7;
  const DeviceTensor tensor = {.rows = rows, .cols = cols};
  DeviceLayout layout(*codec, {&tensor, 1});
  const TilingSlots slots = layout.tile(1 << 20);
  EXPECT_EQ(slots.tiles, 3 * 4096 + 1);
  std::vector<std::byte> memory(layout.tables().begin(), layout.tables().end());
  const Tile last = layout.workspace(memory.data(), nullptr).tiling(slots).tile(slots.tiles - 1);
  EXPECT_EQ(last.first, std::int64_t{3} << 32);
  EXPECT_EQ(last.elems, 21);
}

TEST(DeviceLayout, SlotsDoNotOverlapAndAreAligned) {
  const std::unique_ptr<Codec> codec = make_codec("cast").value();
  DeviceLayout layout(*codec, {});
  const std::vector<std::int32_t> numbers = {1, 2, 3};
  const WorkspaceSlot<std::int32_t> table = layout.table<std::int32_t>(numbers);
  const WorkspaceSlot<double> first = layout.scratch<double>(3), second = layout.scratch<double>(1);
  std::vector<std::byte> memory(layout.workspace_bytes());
  const DeviceWorkspace workspace = layout.workspace(memory.data(), nullptr);
  EXPECT_EQ(reinterpret_cast<std::byte*>(workspace.at(second)) - reinterpret_cast<std::byte*>(workspace.at(first)),
            256);
  EXPECT_GE(reinterpret_cast<std::byte*>(workspace.at(first)) - reinterpret_cast<std::byte*>(workspace.at(table)), 256);
  EXPECT_EQ(layout.workspace_bytes() % 256, 0u);
  EXPECT_LE(reinterpret_cast<std::byte*>(workspace.at(second)) + 256, memory.data() + memory.size());
}

TEST(DeviceRegistry, EveryRowIsACodecOfThatName) {
  for (const DeviceRow& row : kDeviceRows<CountingDevice>) EXPECT_NE(find_codec(row.codec), nullptr) << row.codec;
}

// Every row: what CUDA can launch, and memory in proportion, for a layer of a large model and one beyond 2^31 values.
TEST(DeviceLaunches, FitOneGridHoweverLargeTheTensor) {
  for (const DeviceRow& row : kDeviceRows<CountingDevice>) {
    SCOPED_TRACE(row.codec);
    const bool are_codes = std::string_view(row.codec) == "rans";
    const DType dtype = are_codes ? DType::kUint8 : DType::kFloat32;
    std::uint64_t bytes_before = 0;
    for (const std::int64_t cols : {std::int64_t{1} << 12, std::int64_t{1} << 20}) {
      const DeviceTensor tensor = {.dtype = dtype, .rows = 4099, .cols = cols};
      Result<std::unique_ptr<DeviceBatch>> made = make_batch<CountingDevice>(row.codec, {&tensor, 1});
      ASSERT_TRUE(made.ok()) << made.status().to_string();
      CountingDevice::launches().clear();
      ASSERT_TRUE(made.value()->encode(nullptr).ok());
      ASSERT_TRUE(made.value()->decode(nullptr).ok());
      EXPECT_GE(CountingDevice::launches().size(), 2u);
      for (const std::int64_t blocks : CountingDevice::launches()) {
        EXPECT_GE(blocks, 0);
        EXPECT_LE(blocks, kMostBlocks);
      }
      const std::uint64_t bytes = made.value()->workspace_bytes();
      EXPECT_LE(bytes, 16 * static_cast<std::uint64_t>(tensor.rows * cols)) << "of " << tensor.rows * cols << " values";
      EXPECT_GE(bytes, bytes_before);
      bytes_before = bytes;
    }
  }
}

TEST(DeviceLaunches, AsManyForTwoHundredTensorsAsForTwo) {
  for (const DeviceRow& row : kDeviceRows<CountingDevice>) {
    SCOPED_TRACE(row.codec);
    const DType dtype = std::string_view(row.codec) == "rans" ? DType::kUint8 : DType::kFloat32;
    std::size_t launches = 0;
    for (const std::size_t count : {std::size_t{2}, std::size_t{200}}) {
      const std::vector<DeviceTensor> tensors(count, {.dtype = dtype, .rows = 100, .cols = 1000});
      std::unique_ptr<DeviceBatch> batch = make_batch<CountingDevice>(row.codec, tensors).value();
      CountingDevice::launches().clear();
      ASSERT_TRUE(batch->encode(nullptr).ok());
      if (count == 2) launches = CountingDevice::launches().size();
      EXPECT_EQ(CountingDevice::launches().size(), launches);
    }
  }
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>

#include "cortado/communicator.h"

namespace cortado::recording_test {
namespace {

constexpr std::chrono::seconds kLong(30);

TEST(Recording, LogsWhatWasStartedAndCountsWaits) {
  LocalGroup group(1);
  RecordingCommunicator communicator(group.communicator(0));
  float values[2] = {1, 2};
  std::array<std::byte, 3> sent{}, received{};
  const WorkId work = communicator.start_all_reduce(values, 2, DType::kFloat32).value();
  EXPECT_TRUE(communicator.test(work).value());
  EXPECT_TRUE(communicator.wait(work, kLong).ok());
  EXPECT_TRUE(communicator.all_gather(sent, received, kLong).ok());
  EXPECT_TRUE(communicator.start_all_reduce(values, 1, DType::kBFloat16).ok());
  EXPECT_TRUE(communicator.start_all_gather({sent.data(), 2}, {received.data(), 2}).ok());

  const std::vector<RecordedCollective> expected{{"all_reduce", DType::kFloat32, 2},
                                                 {"all_gather", DType::kUint8, 3},
                                                 {"all_reduce", DType::kBFloat16, 1},
                                                 {"all_gather", DType::kUint8, 2}};
  EXPECT_EQ(communicator.log(), expected);
  EXPECT_EQ(communicator.waits(), 1);
  EXPECT_EQ(communicator.name(), "recording(local)");
  EXPECT_EQ(communicator.rank(), 0);
  EXPECT_EQ(communicator.world_size(), 1);

  communicator.clear();
  EXPECT_TRUE(communicator.log().empty());
  EXPECT_EQ(communicator.waits(), 0);
}

TEST(Recording, LogsRootsCountsAndSubgroups) {
  LocalGroup group(1);
  RecordingCommunicator communicator(group.communicator(0));
  std::array<std::byte, 3> sent{}, received{};
  const std::array<std::int64_t, 1> counts{3};
  ASSERT_TRUE(communicator
                  .start({.kind = CollectiveKind::kAllToAll,
                          .sent = sent.data(),
                          .received = received.data(),
                          .counts = counts,
                          .received_counts = counts})
                  .ok());
  const auto subgroup = communicator.subgroup(std::array{0}).value();
  EXPECT_EQ(subgroup->name(), "recording(local)");
  const WorkId work =
      subgroup->start({.kind = CollectiveKind::kBroadcast, .dtype = DType::kBFloat16, .sent = sent.data(), .elems = 1})
          .value();
  EXPECT_TRUE(subgroup->wait(work, kLong).ok());

  const std::vector<RecordedCollective> expected{
      {.kind = "all_to_all", .dtype = DType::kUint8, .elems = 0, .counts = {3}, .received_counts = {3}},
      {.kind = "broadcast", .dtype = DType::kBFloat16, .elems = 1, .ranks = {0}}};
  EXPECT_EQ(communicator.log(), expected);
  EXPECT_EQ(communicator.waits(), 1);
  EXPECT_EQ(communicator.abandon("done"), true);
}

}  // namespace
}  // namespace cortado::recording_test

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado::level_communicators_test {
namespace {

constexpr std::chrono::seconds kLong(30);

// The ranks of a group, as found by gathering the numbers they have in the whole.
Result<std::vector<int>> members(Communicator& group, int own) {
  std::vector<std::byte> numbers(static_cast<std::size_t>(group.world_size()));
  const std::byte number{static_cast<unsigned char>(own)};
  CORTADO_ASSIGN_OR_RETURN(const WorkId work, group.start_all_gather({&number, 1}, numbers));
  CORTADO_RETURN_IF_ERROR(group.wait(work, kLong));
  std::vector<int> found;
  for (const std::byte value : numbers) found.push_back(static_cast<int>(value));
  return found;
}

TEST(LevelCommunicators, RunAmongTheRanksThatDifferInTheseLevels) {
  const Topology topology{{{"socket", 2}, {"machine", 1}, {"rack", 3}}};
  const auto statuses = run_ranks(6, [&topology](Communicator& whole) {
    CORTADO_ASSIGN_OR_RETURN(const LevelCommunicators levels, LevelCommunicators::create(&whole, topology));
    for (int first = 0; first < 3; ++first) {
      for (int last = first; last < 3; ++last) {
        Communicator& group = *levels.of({first, last});
        EXPECT_EQ(group.rank(), topology.rank_in_group(whole.rank(), {first, last}));
        CORTADO_ASSIGN_OR_RETURN(const std::vector<int> found, members(group, whole.rank()));
        EXPECT_EQ(found, topology.group_of(whole.rank(), {first, last})) << first << ".." << last;
      }
    }
    EXPECT_EQ(levels.of({0, 2}), &whole);
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(LevelCommunicators, AreSharedByRangesThatDifferInLevelsOfOneRankOnly) {
  const Topology topology = {{{"intra", 2}, {"rack", 1}, {"inter", 2}}};
  const auto statuses = run_ranks(4, [&](Communicator& whole) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const LevelCommunicators levels, LevelCommunicators::create(&whole, topology));
    EXPECT_EQ(levels.of({0, 0}), levels.of({0, 1}));
    EXPECT_EQ(levels.of({1, 2}), levels.of({2, 2}));
    EXPECT_NE(levels.of({0, 0}), levels.of({2, 2}));
    EXPECT_EQ(levels.of({1, 1})->world_size(), 1);
    EXPECT_EQ(levels.of({0, 2}), &whole);
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(LevelCommunicators, RefuseATopologyOfAnotherSize) {
  LocalGroup group(4);
  const Topology topology{{{"intra", 2}, {"inter", 3}}};
  const Status status = LevelCommunicators::create(group.communicator(0), topology).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "a topology of 6 ranks for local of 4");
}

// What every rank of a job finds when the launcher has told it `places[rank]`.
std::vector<Result<Topology>> agreed(const std::vector<std::optional<LauncherPlace>>& places) {
  std::vector<Result<Topology>> topologies(places.size(), Result<Topology>(Topology{}));
  const auto statuses = run_ranks(static_cast<int>(places.size()), [&](Communicator& whole) {
    const auto rank = static_cast<std::size_t>(whole.rank());
    topologies[rank] = agree_on_topology(&whole, places[rank], kLong);
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok());
  return topologies;
}

TEST(AgreeOnTopology, MachinesOfEqualSize) {
  for (const auto& topology : agreed({{{0, 3}}, {{1, 3}}, {{2, 3}}, {{0, 3}}, {{1, 3}}, {{2, 3}}})) {
    ASSERT_EQ(topology.value().levels.size(), 2u);
    EXPECT_EQ(topology.value().levels[0].ranks, 3);
    EXPECT_EQ(topology.value().levels[1].ranks, 2);
  }
  for (const auto& places : {std::vector<std::optional<LauncherPlace>>{{{0, 2}}, {{1, 2}}},
                             std::vector<std::optional<LauncherPlace>>{std::nullopt, std::nullopt}}) {
    for (const auto& topology : agreed(places)) {
      ASSERT_EQ(topology.value().levels.size(), 1u);
      EXPECT_EQ(topology.value().levels[0].ranks, 2);
    }
  }
}

TEST(AgreeOnTopology, RefusesOnEveryRankWhatIsNotUniform) {
  const auto expect = [](const std::vector<std::optional<LauncherPlace>>& places, const std::string& text) {
    for (const auto& topology : agreed(places)) {
      EXPECT_EQ(topology.status().code(), StatusCode::kMismatch);
      EXPECT_EQ(topology.status().message(), text);
    }
  };
  expect(
      {{{0, 2}}, {{1, 2}}, {{0, 1}}},
      "topology: rank 0 shares its machine with 2 ranks in all, rank 2 with 1; all machines must have the same number "
      "(0: the launcher told nothing)");
  expect(
      {{{0, 1}}, std::nullopt},
      "topology: rank 0 shares its machine with 1 ranks in all, rank 1 with 0; all machines must have the same number "
      "(0: the launcher told nothing)");
  expect({{{0, 2}}, {{0, 2}}, {{1, 2}}, {{1, 2}}},  // placed in turns
         "topology: rank 1 is number 0 of 2 on its machine, expected 1; ranks must be numbered machine by machine");
}

}  // namespace
}  // namespace cortado::level_communicators_test

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vector>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
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

TEST(LevelCommunicators, RefuseATopologyOfAnotherSize) {
  LocalGroup group(4);
  const Topology topology{{{"intra", 2}, {"inter", 3}}};
  const Status status = LevelCommunicators::create(group.communicator(0), topology).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "a topology of 6 ranks for local of 4");
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/topology.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

const Topology kThreeLevels = {{{"intra", 2}, {"inter", 3}, {"site", 4}}};

TEST(Topology, GroupsOfLevels) {
  EXPECT_EQ(kThreeLevels.world_size(), 24);
  EXPECT_EQ(kThreeLevels.group_size({0, 1}), 6);
  EXPECT_EQ(kThreeLevels.group_of(9, {0, 0}), (std::vector<int>{8, 9}));
  EXPECT_EQ(kThreeLevels.group_of(9, {1, 1}), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(kThreeLevels.group_of(9, {2, 2}), (std::vector<int>{3, 9, 15, 21}));
  EXPECT_EQ(kThreeLevels.group_of(9, {0, 1}), (std::vector<int>{6, 7, 8, 9, 10, 11}));
  for (int first = 0; first < 3; ++first) {
    for (int last = first; last < 3; ++last) {
      for (int rank = 0; rank < 24; ++rank) {
        const std::vector<int> group = kThreeLevels.group_of(rank, {first, last});
        EXPECT_EQ(group[static_cast<std::size_t>(kThreeLevels.rank_in_group(rank, {first, last}))], rank);
      }
    }
  }
}

TEST(Topology, NamesOfRanges) {
  EXPECT_EQ(kThreeLevels.range_name({0, 2}), "flat");
  EXPECT_EQ(kThreeLevels.range_name({1, 2}), "inter..site");
  EXPECT_EQ(kThreeLevels.range_name({1, 1}), "inter");
  EXPECT_EQ(kThreeLevels.parse_range("inter..site").value(), (LevelRange{1, 2}));
  EXPECT_EQ(kThreeLevels.parse_range("all").status().message(),
            "topology: no levels \"all\"; there are intra, intra..inter, flat, inter, inter..site, site");
}

TEST(Topology, TwoLevels) {
  EXPECT_EQ(Topology::two_levels(8, 4).value().levels.size(), 2u);
  EXPECT_EQ(Topology::two_levels(4, 4).value().levels.size(), 1u);
  EXPECT_EQ(Topology::two_levels(4, 1).value().levels.size(), 1u);
  EXPECT_EQ(Topology::two_levels(6, 4).status().message(),
            "topology: 6 ranks can't be divided among machines of 4 each; expected a multiple");
}

TEST(Topology, RefusesWhatMakesNoSense) {
  EXPECT_FALSE(Topology{}.check().ok());
  EXPECT_EQ((Topology{{{"a", 2}, {"a", 2}}}.check().message()), "topology: levels 0 and 1 are both named a");
  EXPECT_EQ((Topology{{{"a", 0}}}.check().message()), "topology: level 0 (a) has 0 ranks; expected at least 1");
  EXPECT_FALSE((Topology{{{"a", 1 << 16}, {"b", 1 << 16}}}.check().ok()));
  EXPECT_TRUE(kThreeLevels.check().ok());
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/topology.h"

#include <limits>

#include "core/check.h"

namespace cortado {

Result<Topology> Topology::two_levels(int world_size, int ranks_per_machine) {
  if (world_size < 1 || ranks_per_machine < 1 || world_size % ranks_per_machine != 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "topology: %d ranks can't be divided among machines of %d each; expected a multiple", world_size,
                      ranks_per_machine);
  }
  const int machines = world_size / ranks_per_machine;
  if (machines == 1 || ranks_per_machine == 1) return Topology{{{"all", world_size}}};
  return Topology{{{"intra", ranks_per_machine}, {"inter", machines}}};
}

Status Topology::check() const {
  if (levels.empty()) return make_error(StatusCode::kInvalidArgument, "topology: no levels; expected at least one");
  std::int64_t world = 1;
  for (std::size_t l = 0; l < levels.size(); ++l) {
    const TopologyLevel& level = levels[l];
    if (level.name.empty()) {
      return make_error(StatusCode::kInvalidArgument, "topology: level %zu has no name", l);
    }
    if (level.ranks < 1) {
      return make_error(StatusCode::kInvalidArgument, "topology: level %zu (%s) has %d ranks; expected at least 1", l,
                        level.name.c_str(), level.ranks);
    }
    for (std::size_t other = 0; other < l; ++other) {
      if (levels[other].name == level.name) {
        return make_error(StatusCode::kInvalidArgument, "topology: levels %zu and %zu are both named %s", other, l,
                          level.name.c_str());
      }
    }
    world *= level.ranks;
    if (world > std::numeric_limits<int>::max()) {
      return make_error(StatusCode::kInvalidArgument, "topology: more than 2^31 - 1 ranks up to level %zu (%s)", l,
                        level.name.c_str());
    }
  }
  return {};
}

int Topology::world_size() const { return group_size({0, static_cast<int>(levels.size()) - 1}); }

int Topology::group_size(LevelRange range) const {
  int size = 1;
  for (int l = range.first; l <= range.last; ++l) size *= levels[static_cast<std::size_t>(l)].ranks;
  return size;
}

int Topology::rank_in_group(int rank, LevelRange range) const {
  return rank / group_size({0, range.first - 1}) % group_size(range);
}

std::vector<int> Topology::group_of(int rank, LevelRange range) const {
  const int stride = group_size({0, range.first - 1});
  const int first = rank - rank_in_group(rank, range) * stride;
  std::vector<int> ranks(static_cast<std::size_t>(group_size(range)));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = first + static_cast<int>(i) * stride;
  return ranks;
}

std::string Topology::range_name(LevelRange range) const {
  const std::string& first = levels[static_cast<std::size_t>(range.first)].name;
  if (range.first == range.last) return first;
  if (range.first == 0 && range.last + 1 == static_cast<int>(levels.size())) return "flat";
  return first + ".." + levels[static_cast<std::size_t>(range.last)].name;
}

Result<LevelRange> Topology::parse_range(const std::string& name) const {
  std::string known;
  for (int first = 0; first < static_cast<int>(levels.size()); ++first) {
    for (int last = first; last < static_cast<int>(levels.size()); ++last) {
      if (range_name({first, last}) == name) return LevelRange{first, last};
      known += (known.empty() ? "" : ", ") + range_name({first, last});
    }
  }
  return make_error(StatusCode::kInvalidArgument, "topology: no levels \"%s\"; there are %s", name.c_str(),
                    known.c_str());
}

}  // namespace cortado

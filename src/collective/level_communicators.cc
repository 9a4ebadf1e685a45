// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <array>
#include <map>
#include <span>
#include <vector>

#include "collective/agreement.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {

Result<Topology> agree_on_topology(Communicator* whole, const std::optional<LauncherPlace>& place,
                                   std::chrono::nanoseconds timeout) {
  using Numbers = std::array<std::int32_t, 2>;
  const Numbers own{place ? place->rank_on_machine : -1, place ? place->ranks_on_machine : 0};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Numbers> all,
                           gather_checked(whole, "places on machines", std::span<const Numbers>(&own, 1), timeout));
  const std::int32_t ranks_on_machine = all[0][1];
  for (int rank = 0; rank < whole->world_size(); ++rank) {
    const auto [rank_on_machine, of_ranks] = all[static_cast<std::size_t>(rank)];
    if (of_ranks != ranks_on_machine) {
      return make_error(StatusCode::kMismatch,
                        "topology: rank 0 shares its machine with %d ranks in all, rank %d with %d; all machines must "
                        "have the same number (0: the launcher told nothing)",
                        ranks_on_machine, rank, of_ranks);
    }
    if (ranks_on_machine > 0 && rank_on_machine != rank % ranks_on_machine) {
      return make_error(
          StatusCode::kMismatch,
          "topology: rank %d is number %d of %d on its machine, expected %d; ranks must be numbered machine "
          "by machine",
          rank, rank_on_machine, ranks_on_machine, rank % ranks_on_machine);
    }
  }
  return Topology::two_levels(whole->world_size(), ranks_on_machine > 0 ? ranks_on_machine : 1);
}

Result<LevelCommunicators> LevelCommunicators::create(Communicator* whole, const Topology& topology) {
  CORTADO_RETURN_IF_ERROR(topology.check());
  if (topology.world_size() != whole->world_size()) {
    return make_error(StatusCode::kInvalidArgument, "a topology of %d ranks for %s of %d", topology.world_size(),
                      whole->name().c_str(), whole->world_size());
  }
  LevelCommunicators made;
  made.topology_ = topology;
  const int levels = static_cast<int>(topology.levels.size());
  // Where levels have one rank, ranges have the same groups, and share what is made of them.
  std::map<std::vector<int>, Communicator*> of_ranks = {{topology.group_of(whole->rank(), {0, levels - 1}), whole}};
  made.of_range_.resize(topology.levels.size() * topology.levels.size());
  for (int first = 0; first < levels; ++first) {
    for (int last = first; last < levels; ++last) {
      const std::vector<int> ranks = topology.group_of(whole->rank(), {first, last});
      Communicator*& communicator = of_ranks[ranks];
      if (communicator == nullptr) {
        CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> subgroup, whole->subgroup(ranks));
        communicator = made.subgroups_.emplace_back(std::move(subgroup)).get();
      }
      made.of_range_[static_cast<std::size_t>(first * levels + last)] = communicator;
    }
  }
  return made;
}

Communicator* LevelCommunicators::of(LevelRange range) const {
  const int levels = static_cast<int>(topology_.levels.size());
  CORTADO_CHECK(range.first >= 0 && range.first <= range.last && range.last < levels, "levels %d to %d of %d",
                range.first, range.last, levels);
  return of_range_[static_cast<std::size_t>(range.first * levels + range.last)];
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {

Result<LevelCommunicators> LevelCommunicators::create(Communicator* whole, const Topology& topology) {
  CORTADO_RETURN_IF_ERROR(topology.check());
  if (topology.world_size() != whole->world_size()) {
    return make_error(StatusCode::kInvalidArgument, "a topology of %d ranks for %s of %d", topology.world_size(),
                      whole->name().c_str(), whole->world_size());
  }
  LevelCommunicators made;
  made.topology_ = topology;
  const int levels = static_cast<int>(topology.levels.size());
  made.of_range_.resize(topology.levels.size() * topology.levels.size());
  for (int first = 0; first < levels; ++first) {
    for (int last = first; last < levels; ++last) {
      Communicator*& of_range = made.of_range_[static_cast<std::size_t>(first * levels + last)];
      of_range = whole;
      if (first == 0 && last == levels - 1) continue;
      const std::vector<int> ranks = topology.group_of(whole->rank(), {first, last});
      CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> subgroup, whole->subgroup(ranks));
      of_range = made.subgroups_.emplace_back(std::move(subgroup)).get();
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

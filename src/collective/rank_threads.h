// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: runs one function as every rank of a LocalGroup, each in a thread of its own.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "cortado/communicator.h"
#include "cortado/status.h"

namespace cortado {

using RankFunction = std::function<Status(Communicator& communicator)>;

// What `function` returned on each rank, in rank order. A rank that returns an error abandons the group, so the others
// end soon; one that returns ok without taking part leaves them to their timeouts. READ FIRST: what `function` owns is
// gone when its rank is abandoned, so a function that leaves collectives in flight calls communicator.abandon() itself.
inline std::vector<Status> run_ranks(LocalGroup& group, int world_size, const RankFunction& function) {
  std::vector<Status> statuses(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&group, &function, &statuses, rank] {
      Status status = function(*group.communicator(rank));
      if (!status.ok()) group.abandon(rank, status.to_string());
      statuses[static_cast<std::size_t>(rank)] = std::move(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

inline std::vector<Status> run_ranks(int world_size, const RankFunction& function) {
  LocalGroup group(world_size);
  return run_ranks(group, world_size, function);
}

}  // namespace cortado

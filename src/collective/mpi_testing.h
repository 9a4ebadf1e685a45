// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests over MPI, whose main() is in mpi_communicator_test.cc: every process is one rank and runs every test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "cortado/communicator.h"

namespace cortado {

// All ranks that mpirun started.
std::unique_ptr<Communicator> make_mpi_world();

// Whether every rank calls it with the same bytes, as many on each.
inline bool is_same_on_every_rank(Communicator& world, std::span<const float> values) {
  const std::span<const std::byte> mine = std::as_bytes(values);
  std::vector<std::byte> everybodys(mine.size() * static_cast<std::size_t>(world.world_size()));
  const Status status = world.all_gather(mine, everybodys, std::chrono::seconds(30));
  EXPECT_TRUE(status.ok()) << status.to_string();
  for (std::size_t begin = 0; begin < everybodys.size(); begin += mine.size()) {
    if (std::memcmp(everybodys.data() + begin, mine.data(), mine.size()) != 0) return false;
  }
  return status.ok();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which elements randk keeps: one run of neighbours in each of `runs` strata of about equal size, the whole turned by
// a random distance, so that every element is kept with the same probability. Needs no memory and is sequential.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/randk/randk_runs.h"
#include "codec/sparse.h"

namespace cortado {

struct RandkPattern {
  std::int64_t elems = 0;
  std::int64_t runs = 0;
  std::int64_t run_elems = 0;

  // At least kept_elems(density, elems), in runs of `block`.
  static RandkPattern of(double density, std::int64_t block, std::int64_t elems) {
    if (elems == 0) return {};
    const std::int64_t run_elems = std::min(block, elems);
    const std::int64_t runs = (kept_elems(density, elems) + run_elems - 1) / run_elems;
    return runs > (elems - 1) / run_elems ? RandkPattern{elems, 1, elems} : RandkPattern{elems, runs, run_elems};
  }

  std::int64_t kept() const { return runs * run_elems; }

  // Calls f(position, count) for all pieces of kept neighbours, in the order of their values on the wire, and
  // ahead(position, count) for all elements, a tile at a time, before f() comes to them.
  template <class Ahead, class F>
  void walk(const PhiloxStream& stream, const Ahead& ahead, const F& f) const {
    const bool keeps_all = kept() == elems;
    const PhiloxBlock turn = keeps_all ? PhiloxBlock{} : stream.block(0);
    // Positions go from `distance` to distance + elems, those from `elems` on count from 0 again.
    const std::int64_t distance = randk_scaled(std::uint64_t{turn[1]} << 32 | turn[0], elems, 64);
    std::int64_t reached = distance;
    const auto reach = [&](std::int64_t end) {
      while (reached < end) {
        const std::int64_t position = reached < elems ? reached : reached - elems;
        const std::int64_t count = std::min({kTileElems, elems - position, distance + elems - reached});
        ahead(position, count);
        reached += count;
      }
    };
    const std::int64_t stratum_elems = elems / runs, rest = elems % runs;
    PhiloxBlock numbers{};
    std::int64_t begin = 0, fraction = 0;  // begin + fraction / runs = i * elems / runs
    for (std::int64_t i = 0; i < runs; ++i) {
      const auto word = static_cast<std::size_t>(i % 4);
      if (word == 0) numbers = stream.block(1 + static_cast<std::uint64_t>(i / 4));
      fraction += rest;
      const std::int64_t end = begin + stratum_elems + (fraction >= runs ? 1 : 0);
      if (fraction >= runs) fraction -= runs;
      const std::int64_t turned = distance + begin + randk_scaled(numbers[word], end - begin - run_elems + 1, 32);
      reach(turned + run_elems);
      const std::int64_t position = turned < elems ? turned : turned - elems;
      const std::int64_t count = std::min(run_elems, elems - position);
      f(position, count);
      if (count < run_elems) f(std::int64_t{0}, run_elems - count);
      begin = end;
    }
    reach(distance + elems);
  }

 private:
  static constexpr std::int64_t kTileElems = 4096;  // stays in the first-level cache
};

}  // namespace cortado

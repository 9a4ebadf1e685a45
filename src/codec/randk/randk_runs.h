// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Where a run of `randk` lies, by its number alone: what the walk of randk_pattern.h comes to, for threads that begin
// anywhere.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "core/philox.h"

namespace cortado {

// floor(number * range / 2^bits)
CORTADO_HD inline std::int64_t randk_scaled(std::uint64_t number, std::int64_t range, int bits) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(Wide{number} * static_cast<std::uint64_t>(range) >> bits);
}

struct RandkRuns {
  std::int64_t elems, runs, run_elems;

  CORTADO_HD std::int64_t kept() const { return runs * run_elems; }

  // Of all runs; 0 if everything is kept.
  CORTADO_HD std::int64_t turn(const PhiloxStream& stream) const {
    if (kept() == elems) return 0;
    const PhiloxBlock random = stream.block(0);
    return randk_scaled(std::uint64_t{random[1]} << 32 | random[0], elems, 64);
  }

  // The first element of run i, which goes on at the first of the tensor behind its last.
  CORTADO_HD std::int64_t begin_of(const PhiloxStream& stream, std::int64_t turned, std::int64_t i) const {
    const std::int64_t begin = stratum(i), end = stratum(i + 1);
    const PhiloxBlock random = stream.block(1 + static_cast<std::uint64_t>(i / 4));
    const std::int64_t at =
        turned + begin + randk_scaled(random[static_cast<std::size_t>(i % 4)], end - begin - run_elems + 1, 32);
    return at < elems ? at : at - elems;
  }

 private:
  // floor(i elems / runs), without a product that overflows.
  CORTADO_HD std::int64_t stratum(std::int64_t i) const {
    __extension__ using Wide = unsigned __int128;
    const auto rest = static_cast<std::uint64_t>(elems % runs);
    return i * (elems / runs) +
           static_cast<std::int64_t>(Wide{rest} * static_cast<std::uint64_t>(i) / static_cast<std::uint64_t>(runs));
  }
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cortado {

// XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): near the speed of memory, for checks in every
// step. Finds every change within one 8-byte word, and any other but for one in 2^64. Not for hostile collisions.
std::uint64_t checksum_64(std::span<const std::byte> bytes);

}  // namespace cortado

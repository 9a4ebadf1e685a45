// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Streaming stores go past the caches: what is written is not read from memory first, and nothing else has to leave.
// They pay for outputs that caches could not keep.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cortado {

constexpr std::int64_t kLeastStreamedBytes = std::int64_t{8} << 20;
constexpr std::size_t kStreamAlignBytes = 64;  // a cache line

// Where kernels may stream to, vector by vector.
inline bool is_stream_aligned(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) % kStreamAlignBytes == 0;
}

// memcpy, whole cache lines of `to` past the caches. What follows `to` may be copied next: a line that two calls share
// goes through the caches.
void stream_copy(const void* from, std::size_t bytes, void* to);

// After the last streaming store, before others may read.
void finish_streams();

}  // namespace cortado

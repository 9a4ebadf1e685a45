// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Streaming stores go past the caches: what is written is not read from memory first, and nothing else has to leave.
// They pay for outputs that caches could not keep.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cortado {

constexpr std::int64_t kLeastStreamedBytes = std::int64_t{8} << 20;
// Of a gradient that is written into its place: those of a model follow one another, and together caches don't keep
// them until the optimizer comes.
constexpr std::int64_t kLeastStreamedGradientBytes = std::int64_t{512} << 10;
constexpr std::size_t kStreamAlignBytes = 64;  // a cache line

// Where kernels may stream to, vector by vector.
inline bool is_stream_aligned(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory) % kStreamAlignBytes == 0;
}

// From `memory` to where kernels may begin to stream.
inline std::int64_t bytes_to_stream_alignment(const void* memory) {
  const std::uintptr_t past_line = reinterpret_cast<std::uintptr_t>(memory) % kStreamAlignBytes;
  return static_cast<std::int64_t>((kStreamAlignBytes - past_line) % kStreamAlignBytes);
}

// memcpy, whole cache lines of `to` past the caches. What follows `to` may be copied next: a line that two calls share
// goes through the caches.
void stream_copy(const void* from, std::size_t bytes, void* to);

// After the last streaming store, before others may read.
void finish_streams();

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Streaming stores go past the caches: what is written is not read from memory first, and nothing else has to leave.
// They pay for outputs that caches could not keep.
#pragma once

#include <cstdint>

namespace cortado {

constexpr std::int64_t kLeastStreamedBytes = std::int64_t{8} << 20;

// Where kernels may stream to, vector by vector.
inline bool is_stream_aligned(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % 64 == 0; }

// After the last streaming store, before others may read.
void finish_streams();

}  // namespace cortado

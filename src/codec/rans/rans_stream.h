// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Codes of one byte each to the payload of `rans` and back, for that codec and for all that put it behind theirs.
// Nothing allocates but the text of an error. Chunks share nothing but the table, so with a pool its threads share
// them; the bytes do not depend on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/rans/rans_kernels.h"
#include "core/thread_pool.h"
#include "cortado/codec.h"
#include "cortado/status.h"

namespace cortado {

// Powers of two.
constexpr std::int64_t kMinRansChunkCodes = 4096;
constexpr std::int64_t kMaxRansChunkCodes = 262144;

Parameter chunk_codes_parameter(const char* meaning);
// kInvalidArgument, for "rans(chunk_codes=5000)" and the like.
Status check_chunk_codes(const char* codec, std::int64_t chunk_codes);

// Codes of a tensor may not be more, so that sums of sizes need no check.
constexpr std::int64_t kMaxRansCodes = std::int64_t{1} << 46;

// The most encode_codes() writes; what both need of scratch memory (any alignment). 0 <= elems <= kMaxRansCodes.
std::uint64_t max_rans_bytes(std::int64_t elems);
std::uint64_t rans_scratch_bytes(std::int64_t elems, std::int64_t chunk_codes);

// Returns the bytes written to `payload`, which has room for max_rans_bytes(). `counts`, if given, are those of all the
// codes: whoever makes the codes counts them while they are in the cache.
std::uint64_t encode_codes(const std::uint8_t* codes, std::int64_t elems, std::int64_t chunk_codes, std::byte* payload,
                           std::byte* scratch, ThreadPool* pool = nullptr, RansCounts* counts = nullptr);

// The inverse; the payload says what its chunks are. kCorruptData, with where and what, for anything that can't have
// been written for `elems` codes.
Status decode_codes(std::span<const std::byte> payload, std::uint8_t* codes, std::int64_t elems, std::byte* scratch,
                    ThreadPool* pool = nullptr);

// What the bytes of such a payload are, whatever they are; see Codec::explain. Allocates.
std::vector<PayloadSection> explain_codes(std::span<const std::byte> payload, std::int64_t elems);

}  // namespace cortado

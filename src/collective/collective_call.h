// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What every communicator needs to know of a CollectiveCall: whether it is right by itself, how long its blocks are,
// and its name in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cortado/communicator.h"
#include "cortado/option.h"
#include "cortado/status.h"

namespace cortado {

// kInvalidArgument with what is wrong, in the words of the caller; ok otherwise. Does not allocate when ok.
Status check_call(const CollectiveCall& call, int rank, int world_size);

// The collective that an operation of an option is; not for encode and decode.
CollectiveKind collective_of(OpKind kind);

// True for the kinds that have a root, and for those that add.
bool is_rooted(CollectiveKind kind);
bool is_sum(CollectiveKind kind);

// True if a rank reads `sent` (as rank `rank`), or writes `received`.
bool reads_sent(const CollectiveCall& call, int rank);
bool writes_received(const CollectiveCall& call, int rank);

// Sizes of a checked call, in elements. For kinds without blocks (all_reduce, broadcast, reduce) there is one block.
std::int64_t block_elems(const CollectiveCall& call, int peer);           // of `sent`, or of both sides
std::int64_t received_block_elems(const CollectiveCall& call, int peer);  // all_to_all: what comes from `peer`
std::int64_t sent_elems(const CollectiveCall& call, int rank, int world_size);
std::int64_t received_elems(const CollectiveCall& call, int rank, int world_size);

// Of Communicator::subgroup: the place of `rank` in the list, or kInvalidArgument where it is missing, or where ranks
// are out of range or given twice.
Result<int> index_in_subgroup(std::span<const int> ranks, int rank, int world_size);

// "all_reduce bf16 1024", "broadcast uint8 64 of root 2", "all_gather uint8 16+0+12", "all_to_all uint8 1+2 for 2+2".
std::string describe(const CollectiveCall& call);

// "collective 3", or "collective 3 of ranks 0, 2" where the ranks of a sub-group are given.
std::string describe_place(WorkId work, std::span<const int> subgroup);

}  // namespace cortado

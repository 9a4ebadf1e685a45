// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/collective_call.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "core/check.h"

namespace cortado {
namespace {

bool has_blocks(CollectiveKind kind) {
  return kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllGather ||
         kind == CollectiveKind::kAllToAll || kind == CollectiveKind::kGather;
}

std::int64_t sum_elems(std::span<const std::int64_t> counts, std::int64_t elems, int world_size) {
  if (counts.empty()) return elems * world_size;
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::string join(std::span<const std::int64_t> counts) {
  std::string text;
  for (const std::int64_t count : counts) text += (text.empty() ? "" : "+") + std::to_string(count);
  return text;
}

Status check_counts(const CollectiveCall& call, const char* which, std::span<const std::int64_t> counts,
                    int world_size) {
  const std::string_view kind = collective_kind_name(call.kind);
  if (counts.size() != static_cast<std::size_t>(world_size)) {
    return make_error(StatusCode::kInvalidArgument, "%.*s: %zu %s, expected one for each of %d ranks",
                      static_cast<int>(kind.size()), kind.data(), counts.size(), which, world_size);
  }
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() / 4 / world_size;  // of bytes in all
  for (int rank = 0; rank < world_size; ++rank) {
    const std::int64_t count = counts[static_cast<std::size_t>(rank)];
    if (count >= 0 && count <= most) continue;
    return make_error(StatusCode::kInvalidArgument, "%.*s: %lld elements in %s of rank %d",
                      static_cast<int>(kind.size()), kind.data(), static_cast<long long>(count), which, rank);
  }
  return Status();
}

}  // namespace

Status check_call(const CollectiveCall& call, int rank, int world_size) {
  const std::string_view kind = collective_kind_name(call.kind);
  const int kind_chars = static_cast<int>(kind.size());
  if (kind.empty()) {
    return make_error(StatusCode::kInvalidArgument, "unknown kind of collective %d", static_cast<int>(call.kind));
  }
  if (dtype_bytes(call.dtype) == 0) {
    return make_error(StatusCode::kInvalidArgument, "%.*s: unknown dtype %d", kind_chars, kind.data(),
                      static_cast<int>(call.dtype));
  }
  if (call.elems < 0 || call.elems > std::numeric_limits<std::int64_t>::max() / 4 / world_size) {
    return make_error(StatusCode::kInvalidArgument, "%.*s: %lld elements", kind_chars, kind.data(),
                      static_cast<long long>(call.elems));
  }
  if (is_rooted(call.kind) && (call.root < 0 || call.root >= world_size)) {
    return make_error(StatusCode::kInvalidArgument, "%.*s: root %d of %d ranks", kind_chars, kind.data(), call.root,
                      world_size);
  }
  if (!call.counts.empty() && !has_blocks(call.kind)) {
    return make_error(StatusCode::kInvalidArgument, "%.*s takes one size, not counts", kind_chars, kind.data());
  }
  if (call.received_counts.empty() != (call.counts.empty() || call.kind != CollectiveKind::kAllToAll)) {
    return make_error(StatusCode::kInvalidArgument, "%.*s: received_counts %s", kind_chars, kind.data(),
                      call.received_counts.empty() ? "missing" : "given, expected none");
  }
  if (!call.counts.empty()) {
    CORTADO_RETURN_IF_ERROR(check_counts(call, "counts", call.counts, world_size));
  }
  if (!call.received_counts.empty()) {
    CORTADO_RETURN_IF_ERROR(check_counts(call, "received_counts", call.received_counts, world_size));
  }
  const bool sent_missing = call.sent == nullptr && reads_sent(call, rank) && sent_elems(call, rank, world_size) > 0;
  const bool received_missing =
      call.received == nullptr && writes_received(call, rank) && received_elems(call, rank, world_size) > 0;
  if (sent_missing || received_missing) {
    return make_error(StatusCode::kInvalidArgument, "%s: `%s` is null", describe(call).c_str(),
                      sent_missing ? "sent" : "received");
  }
  return Status();
}

CollectiveKind collective_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return CollectiveKind::kAllReduce;
    case OpKind::kReduceScatter:
      return CollectiveKind::kReduceScatter;
    case OpKind::kAllGather:
      return CollectiveKind::kAllGather;
    case OpKind::kAllToAll:
      return CollectiveKind::kAllToAll;
    case OpKind::kReduce:
      return CollectiveKind::kReduce;
    case OpKind::kBroadcast:
      return CollectiveKind::kBroadcast;
    case OpKind::kGather:
      return CollectiveKind::kGather;
    case OpKind::kEncode:
    case OpKind::kDecode:
      break;
  }
  CORTADO_CHECK(false, "%s is no collective", std::string(op_kind_name(kind)).c_str());
}

bool is_rooted(CollectiveKind kind) {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce || kind == CollectiveKind::kGather;
}

bool is_sum(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter ||
         kind == CollectiveKind::kReduce;
}

bool reads_sent(const CollectiveCall& call, int rank) {
  return call.kind != CollectiveKind::kBroadcast || rank == call.root;
}

bool writes_received(const CollectiveCall& call, int rank) {
  if (call.kind == CollectiveKind::kBroadcast) return rank != call.root;
  return !is_rooted(call.kind) || rank == call.root;
}

std::int64_t block_elems(const CollectiveCall& call, int peer) {
  return call.counts.empty() ? call.elems : call.counts[static_cast<std::size_t>(peer)];
}

std::int64_t received_block_elems(const CollectiveCall& call, int peer) {
  return call.received_counts.empty() ? block_elems(call, peer) : call.received_counts[static_cast<std::size_t>(peer)];
}

std::int64_t sent_elems(const CollectiveCall& call, int rank, int world_size) {
  const bool block_for_each = call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllToAll;
  return block_for_each ? sum_elems(call.counts, call.elems, world_size) : block_elems(call, rank);
}

std::int64_t received_elems(const CollectiveCall& call, int rank, int world_size) {
  switch (call.kind) {
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      return sum_elems(call.counts, call.elems, world_size);
    case CollectiveKind::kAllToAll:
      return sum_elems(call.received_counts, call.elems, world_size);
    default:
      return block_elems(call, rank);
  }
}

Result<int> index_in_subgroup(std::span<const int> ranks, int rank, int world_size) {
  int own = -1;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= world_size) {
      return make_error(StatusCode::kInvalidArgument, "subgroup: rank %d of %d ranks", ranks[i], world_size);
    }
    if (std::find(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(i), ranks[i]) !=
        ranks.begin() + static_cast<std::ptrdiff_t>(i)) {
      return make_error(StatusCode::kInvalidArgument, "subgroup: rank %d is given twice", ranks[i]);
    }
    if (ranks[i] == rank) own = static_cast<int>(i);
  }
  if (own >= 0) return own;
  return make_error(StatusCode::kInvalidArgument, "subgroup: rank %d asks for a sub-group it is not in", rank);
}

std::string describe(const CollectiveCall& call) {
  std::string text(collective_kind_name(call.kind));
  text.append(" ").append(dtype_name(call.dtype)).append(" ");
  text += call.counts.empty() ? std::to_string(call.elems) : join(call.counts);
  if (!call.received_counts.empty()) text += " for " + join(call.received_counts);
  if (is_rooted(call.kind)) text += " of root " + std::to_string(call.root);
  return text;
}

std::string describe_place(WorkId work, std::span<const int> subgroup) {
  std::string text = "collective " + std::to_string(work);
  for (std::size_t i = 0; i < subgroup.size(); ++i) {
    if (i == 0) text += subgroup.size() == 1 ? " of rank " : " of ranks ";
    text += (i == 0 ? "" : ", ") + std::to_string(subgroup[i]);
  }
  return text;
}

}  // namespace cortado

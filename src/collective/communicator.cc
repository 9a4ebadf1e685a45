// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/communicator.h"

namespace cortado {

std::string_view collective_kind_name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kGather:
      return "gather";
  }
  return "";
}

Result<WorkId> Communicator::start_all_reduce(void* data, std::int64_t elems, DType dtype) {
  return start({.kind = CollectiveKind::kAllReduce, .dtype = dtype, .sent = data, .received = data, .elems = elems});
}

Result<WorkId> Communicator::start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received) {
  if (received.size() != sent.size() * static_cast<std::size_t>(world_size())) {
    return make_error(StatusCode::kInvalidArgument, "%s: all_gather: %zu bytes to receive, expected %d ranks x %zu",
                      name().c_str(), received.size(), world_size(), sent.size());
  }
  return start({.kind = CollectiveKind::kAllGather,
                .sent = sent.data(),
                .received = received.data(),
                .elems = static_cast<std::int64_t>(sent.size())});
}

Result<std::unique_ptr<Communicator>> Communicator::subgroup(std::span<const int> ranks) {
  return make_error(StatusCode::kUnsupported, "%s: makes no sub-groups (asked for one of %zu ranks)", name().c_str(),
                    ranks.size());
}

}  // namespace cortado

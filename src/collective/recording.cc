// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/communicator.h"

#include "core/check.h"

namespace cortado {

// A call is written down before it is made: an attempt that failed is part of the order too.
Result<WorkId> RecordingCommunicator::start(const CollectiveCall& call) {
  whole_->log_.push_back({.kind = std::string(collective_kind_name(call.kind)),
                          .dtype = call.dtype,
                          .elems = call.elems,
                          .root = call.root,
                          .counts = {call.counts.begin(), call.counts.end()},
                          .received_counts = {call.received_counts.begin(), call.received_counts.end()},
                          .ranks = ranks_});
  return inner_->start(call);
}

Status RecordingCommunicator::wait(WorkId work, std::chrono::nanoseconds timeout) {
  ++whole_->waits_;
  return inner_->wait(work, timeout);
}

Status RecordingCommunicator::all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                                         std::chrono::nanoseconds timeout) {
  whole_->log_.push_back({.kind = std::string(collective_kind_name(CollectiveKind::kAllGather)),
                          .dtype = DType::kUint8,
                          .elems = static_cast<std::int64_t>(sent.size()),
                          .ranks = ranks_});
  return inner_->all_gather(sent, received, timeout);
}

Result<std::unique_ptr<Communicator>> RecordingCommunicator::subgroup(std::span<const int> ranks) {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
  auto recording = std::make_unique<RecordingCommunicator>(inner.get());
  recording->owned_ = std::move(inner);
  recording->whole_ = whole_;
  for (const int rank : ranks) {
    recording->ranks_.push_back(ranks_.empty() ? rank : ranks_[static_cast<std::size_t>(rank)]);
  }
  return std::unique_ptr<Communicator>(std::move(recording));
}

}  // namespace cortado

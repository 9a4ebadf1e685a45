// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/communicator.h"

namespace cortado {

// A call is written down before it is made: an attempt that failed is part of the order too.
Result<WorkId> RecordingCommunicator::start_all_reduce(void* data, std::int64_t elems, DType dtype) {
  log_.push_back({"all_reduce", dtype, elems});
  return inner_->start_all_reduce(data, elems, dtype);
}

Result<WorkId> RecordingCommunicator::start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received) {
  log_.push_back({"all_gather", DType::kUint8, static_cast<std::int64_t>(sent.size())});
  return inner_->start_all_gather(sent, received);
}

Status RecordingCommunicator::wait(WorkId work, std::chrono::nanoseconds timeout) {
  ++waits_;
  return inner_->wait(work, timeout);
}

Status RecordingCommunicator::all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                                         std::chrono::nanoseconds timeout) {
  log_.push_back({"all_gather", DType::kUint8, static_cast<std::int64_t>(sent.size())});
  return inner_->all_gather(sent, received, timeout);
}

}  // namespace cortado

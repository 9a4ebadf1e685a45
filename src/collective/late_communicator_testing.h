// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: transports that are late, in one way or another.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>

#include "collective/collective_call.h"
#include "collective/passing_communicator_testing.h"
#include "core/check.h"

namespace cortado {

// Can't take a collective back: says of one that it has not ended in time; it reads and writes its buffers all the
// same, once it is asked to. The address sanitizer sees it if they have been freed.
class LateCommunicator final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  // The collective that comes after so many others, counted from now.
  void be_late(int after = 0) { others_first_ = after; }

  Result<WorkId> start(const CollectiveCall& call) override {
    if (others_first_-- != 0) return PassingCommunicator::start(call);
    const auto bytes = [&](std::int64_t elems) { return static_cast<std::size_t>(elems) * dtype_bytes(call.dtype); };
    if (reads_sent(call, rank())) {
      sent_ = {static_cast<const std::byte*>(call.sent), bytes(sent_elems(call, rank(), world_size()))};
    }
    if (writes_received(call, rank())) {
      received_ = {static_cast<std::byte*>(call.received), bytes(received_elems(call, rank(), world_size()))};
    }
    return kLate;
  }
  Result<bool> test(WorkId work) override { return work == kLate ? false : PassingCommunicator::test(work); }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    return work == kLate ? make_error(StatusCode::kTimeout, "late") : PassingCommunicator::wait(work, timeout);
  }
  bool abandon(const std::string& why) override {
    PassingCommunicator::abandon(why);
    return false;
  }

  // How many bytes it writes.
  std::size_t go_on() {
    const auto sum = std::accumulate(sent_.begin(), sent_.end(), 0,
                                     [](int so_far, std::byte byte) { return so_far + static_cast<int>(byte); });
    std::fill(received_.begin(), received_.end(), static_cast<std::byte>(sum));
    return received_.size();
  }

 private:
  static constexpr WorkId kLate = 1 << 20;
  int others_first_ = -1;  // -1 and below: none is late any more
  std::span<const std::byte> sent_;
  std::span<std::byte> received_;
};

// Says of every collective, as long as nobody waits for it, that it is on its way.
class SlowCommunicator final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  Result<bool> test(WorkId) override { return false; }
};

// Waits for what it is asked about, so that nothing is on its way then.
class PromptCommunicator final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  Result<bool> test(WorkId work) override {
    CORTADO_RETURN_IF_ERROR(wait(work, std::chrono::seconds(20)));
    return true;
  }
};

// Says of every gather, while is_late, that it has not ended in time; it has.
class LateGather final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    const Status status = PassingCommunicator::all_gather(sent, received, timeout);
    return is_late ? make_error(StatusCode::kTimeout, "late") : status;
  }
  bool is_late = false;
};

}  // namespace cortado

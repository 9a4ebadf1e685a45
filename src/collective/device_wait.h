// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceWait: how a rank waits for its device. It looks at the device every 50 us, and calls pause() in between, which
// says when to give up: at the timeout, or when a peer has failed, for which the device may itself be waiting.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "core/check.h"
#include "cortado/communicator.h"
#include "cortado/trace.h"

namespace cortado {

class DeviceWait {
 public:
  // `what`: that the device has not done when it takes too long, "computed its gradients".
  DeviceWait(Communicator* communicator, const Clock* clock, std::chrono::nanoseconds timeout, const char* what)
      : communicator_(communicator), clock_(clock), timeout_(timeout), what_(what), start_ns_(clock->now_ns()) {}

  // Until the next look.
  Status pause() {
    const std::int64_t waited_ns = clock_->now_ns() - start_ns_;
    if (waited_ns >= ask_peers_ns_) {
      CORTADO_RETURN_IF_ERROR(communicator_->peer_failure().with_context("while waiting for the device"));
      ask_peers_ns_ = waited_ns + kPeersNs;
    }
    if (waited_ns >= timeout_.count()) {
      return make_error(StatusCode::kTimeout, "rank %d: the device has not %s within %g s", communicator_->rank(),
                        what_, std::chrono::duration<double>(timeout_).count());
    }
    std::this_thread::sleep_for(kLook);
    return {};
  }

 private:
  static constexpr std::chrono::microseconds kLook{50};
  static constexpr std::int64_t kPeersNs = 1'000'000'000;

  Communicator* communicator_;
  const Clock* clock_;
  std::chrono::nanoseconds timeout_;
  const char* what_;
  std::int64_t start_ns_;
  std::int64_t ask_peers_ns_ = kPeersNs;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What all DeviceWork does with memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>

#include "core/check.h"
#include "core/device_queue.h"
#include "core/seconds.h"

namespace cortado {

// Residuals to and from memory that is not pinned, through some that is. Every call waits for the queue.
class ResidualCopies {
 public:
  // open() before all others; nothing else of it is needed without feedback.
  Status open(DeviceQueue* queue, bool has_feedback, double timeout_s) {
    queue_ = queue;
    timeout_s_ = timeout_s;
    bytes_ = has_feedback ? kPieceElems * sizeof(float) : 0;
    CORTADO_ASSIGN_OR_RETURN(piece_, queue_->allocate_on_host(bytes_));
    CORTADO_ASSIGN_OR_RETURN(event_, queue_->make_event());
    return {};
  }
  Status wait_for_queue() {
    CORTADO_RETURN_IF_ERROR(queue_->record(event_));
    const auto deadline = std::chrono::steady_clock::now() + from_seconds(timeout_s_);
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool is_reached, queue_->reached(event_));
      if (is_reached) return {};
      if (std::chrono::steady_clock::now() >= deadline) {
        return make_error(StatusCode::kTimeout, "the device has not come to the residuals within %g s", timeout_s_);
      }
      std::this_thread::sleep_for(kLook);
    }
  }
  Status read(const std::byte* from, std::span<float> residual) {
    return in_pieces(residual.size(), [&](std::size_t first, std::size_t count) -> Status {
      CORTADO_RETURN_IF_ERROR(queue_->copy_to_host(piece_, from + first * sizeof(float), count * sizeof(float)));
      CORTADO_RETURN_IF_ERROR(wait_for_queue());
      std::memcpy(residual.data() + first, piece_, count * sizeof(float));
      return {};
    });
  }
  Status write(std::byte* to, std::span<const float> residual) {
    return in_pieces(residual.size(), [&](std::size_t first, std::size_t count) -> Status {
      std::memcpy(piece_, residual.data() + first, count * sizeof(float));
      CORTADO_RETURN_IF_ERROR(queue_->copy_to_device(to + first * sizeof(float), piece_, count * sizeof(float)));
      return wait_for_queue();
    });
  }
  std::int64_t host_bytes() const { return static_cast<std::int64_t>(bytes_); }

 private:
  static constexpr std::size_t kPieceElems = std::size_t{1} << 20;
  static constexpr std::chrono::microseconds kLook{50};  // between two looks at the queue

  template <typename Act>
  static Status in_pieces(std::size_t elems, const Act& act) {
    for (std::size_t first = 0; first < elems; first += kPieceElems) {
      CORTADO_RETURN_IF_ERROR(act(first, std::min(kPieceElems, elems - first)));
    }
    return {};
  }

  DeviceQueue* queue_ = nullptr;
  double timeout_s_ = 0;
  std::byte* piece_ = nullptr;
  std::uint64_t bytes_ = 0;
  DeviceQueue::Event event_ = 0;
};

}  // namespace cortado

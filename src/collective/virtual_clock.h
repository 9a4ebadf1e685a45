// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// VirtualClock: time for the ranks of a LocalGroup in tests. It stands still while any of their threads runs; once all
// of them wait, it jumps to the earliest moment that one of them waits for. So timeouts of minutes cost nothing, none
// ends early because the machine is busy, and ranks that would wait for each other for ever are found out at once: that
// ends the process with a message.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/thread_annotations.h"
#include "cortado/trace.h"

namespace cortado {

class VirtualClock final : public Clock {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  // `threads` take part, one a rank. None may wait on anything else than this clock and what is given it.
  explicit VirtualClock(int threads) : threads_(threads) {}

  std::int64_t now_ns() const override;

  // The calling thread does nothing for that long.
  void sleep(std::chrono::nanoseconds duration);

  // The calling thread takes no further part; each calls it once, at its end.
  void leave();

  // As CondVar::wait_until with an event of the caller's: gives up `mutex` until notify_all(event) or the deadline;
  // false if that has passed.
  bool wait_until(Mutex& mutex, const void* event, std::int64_t deadline_ns) REQUIRES(mutex);
  void notify_all(const void* event);

 private:
  struct Waiter {
    const void* event = nullptr;
    std::int64_t deadline_ns = kNever;
    bool awake = false;
    bool timed_out = false;
  };

  void wait(Waiter* waiter) REQUIRES(mutex_);
  void advance_if_all_wait() REQUIRES(mutex_);

  mutable Mutex mutex_;
  CondVar awake_;
  int threads_ GUARDED_BY(mutex_);
  std::int64_t now_ns_ GUARDED_BY(mutex_) = 0;
  std::vector<Waiter*> waiters_ GUARDED_BY(mutex_);  // those that are not awake
};

}  // namespace cortado

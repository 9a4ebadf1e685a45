// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/virtual_clock.h"

#include <algorithm>

#include "core/check.h"

namespace cortado {

std::int64_t VirtualClock::now_ns() const {
  MutexLock lock(mutex_);
  return now_ns_;
}

void VirtualClock::sleep(std::chrono::nanoseconds duration) {
  if (duration.count() <= 0) return;
  MutexLock lock(mutex_);
  Waiter waiter{.deadline_ns = now_ns_ + duration.count()};
  wait(&waiter);
}

void VirtualClock::leave() {
  MutexLock lock(mutex_);
  --threads_;
  advance_if_all_wait();
}

bool VirtualClock::wait_until(Mutex& mutex, const void* event, std::int64_t deadline_ns) {
  Waiter waiter{.event = event, .deadline_ns = deadline_ns};
  {
    MutexLock lock(mutex_);
    // Whoever notifies holds `mutex`, so nothing is missed before this thread is on the list.
    mutex.unlock();
    if (deadline_ns > now_ns_) {
      wait(&waiter);
    } else {
      waiter.timed_out = true;
    }
  }
  mutex.lock();
  return !waiter.timed_out;
}

void VirtualClock::notify_all(const void* event) {
  MutexLock lock(mutex_);
  std::erase_if(waiters_, [event](Waiter* waiter) { return waiter->awake = waiter->event == event; });
  awake_.notify_all();
}

void VirtualClock::wait(Waiter* waiter) {
  waiters_.push_back(waiter);
  advance_if_all_wait();
  while (!waiter->awake) awake_.wait(mutex_);
}

void VirtualClock::advance_if_all_wait() {
  if (waiters_.empty() || waiters_.size() < static_cast<std::size_t>(threads_)) return;
  std::int64_t earliest_ns = kNever;
  for (const Waiter* waiter : waiters_) earliest_ns = std::min(earliest_ns, waiter->deadline_ns);
  CORTADO_CHECK(earliest_ns < kNever, "all %d ranks wait for each other", threads_);
  now_ns_ = earliest_ns;
  std::erase_if(waiters_, [earliest_ns](Waiter* waiter) {
    return waiter->awake = waiter->timed_out = waiter->deadline_ns <= earliest_ns;
  });
  awake_.notify_all();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <unistd.h>

#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/keep_for_ever.h"

namespace cortado {

ThreadPool::ThreadPool(int threads) : shared_(std::make_unique<Shared>()), process_(getpid()) {
  CORTADO_CHECK(threads >= 1, "%d threads", threads);
  shared_->workers.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) shared_->workers.emplace_back([shared = shared_.get()] { shared->work(); });
  } catch (const std::system_error&) {
    // Out of threads: results do not depend on their number.
  }
}

// After a fork nobody can be joined, and a condition variable would wait for those that wait for it.
ThreadPool::~ThreadPool() {
  if (was_forked()) {
    keep_for_ever(std::move(shared_));
    return;
  }
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->changed.notify_all();
  for (std::thread& worker : shared_->workers) worker.join();
}

bool ThreadPool::was_forked() const { return !shared_->workers.empty() && getpid() != process_; }

void ThreadPool::Loop::run() {
  for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
       i = next.fetch_add(1, std::memory_order_relaxed)) {
    body(i);
  }
}

void ThreadPool::parallel_for(std::int64_t count, FunctionRef<void(std::int64_t)> body) {
  Shared& shared = *shared_;
  if (shared.workers.empty() || count <= 1 || was_forked()) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{.body = body, .count = count};
  {
    MutexLock lock(shared.mutex);
    shared.loop = &loop;
    ++shared.loops_begun;
  }
  shared.changed.notify_all();
  loop.run();
  MutexLock lock(shared.mutex);
  shared.loop = nullptr;
  while (shared.workers_inside > 0) shared.changed.wait(shared.mutex);
}

void ThreadPool::Shared::work() {
  std::uint64_t last_loop = 0;
  MutexLock lock(mutex);
  for (;;) {
    while (!stopping && (loop == nullptr || loops_begun == last_loop)) changed.wait(mutex);
    if (stopping) return;
    Loop* const in_hand = loop;
    last_loop = loops_begun;
    ++workers_inside;
    mutex.unlock();
    in_hand->run();
    mutex.lock();
    if (--workers_inside == 0) changed.notify_all();
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <system_error>

#include "core/check.h"

namespace cortado {

ThreadPool::ThreadPool(int threads) {
  CORTADO_CHECK(threads >= 1, "%d threads", threads);
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // Out of threads: results do not depend on their number.
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Loop::run() {
  for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
       i = next.fetch_add(1, std::memory_order_relaxed)) {
    body(i);
  }
}

void ThreadPool::parallel_for(std::int64_t count, FunctionRef<void(std::int64_t)> body) {
  if (workers_.empty() || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop{.body = body, .count = count};
  {
    MutexLock lock(mutex_);
    loop_ = &loop;
    ++loops_begun_;
  }
  changed_.notify_all();
  loop.run();
  MutexLock lock(mutex_);
  loop_ = nullptr;
  while (workers_inside_ > 0) changed_.wait(mutex_);
}

void ThreadPool::work() {
  std::uint64_t last_loop = 0;
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopping_ && (loop_ == nullptr || loops_begun_ == last_loop)) changed_.wait(mutex_);
    if (stopping_) return;
    Loop* const loop = loop_;
    last_loop = loops_begun_;
    ++workers_inside_;
    mutex_.unlock();
    loop->run();
    mutex_.lock();
    if (--workers_inside_ == 0) changed_.notify_all();
  }
}

}  // namespace cortado

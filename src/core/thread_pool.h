// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// ThreadPool: a stated number of threads, the caller's included, that share the calls of one loop.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "core/function_ref.h"
#include "core/thread_annotations.h"

namespace cortado {

// Used by one thread at a time. Threads that have nothing to do sleep; a pool of one thread starts none. In a process
// that was forked meanwhile, where its threads are not, a pool works in the caller alone.
class ThreadPool {
 public:
  // Starts threads - 1 (at least 1 in all). If the system refuses some, the pool works with those it got.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(shared_->workers.size()) + 1; }

  // Calls body(0) ... body(count - 1), each once, in any order and on any of the threads, and returns when all have
  // returned. The caller works too; with one thread or one call everything happens in it, in order. `body` must not
  // throw nor use this pool. Allocates nothing.
  void parallel_for(std::int64_t count, FunctionRef<void(std::int64_t)> body);

 private:
  struct Loop {
    FunctionRef<void(std::int64_t)> body;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};

    void run();
  };

  // The loop in hand lies on the caller's stack: it is taken out of `loop` first and dies only once no worker is in it.
  struct Shared {
    Mutex mutex;
    CondVar changed;
    Loop* loop GUARDED_BY(mutex) = nullptr;
    std::uint64_t loops_begun GUARDED_BY(mutex) = 0;  // by which a worker tells a new loop from the one it left
    int workers_inside GUARDED_BY(mutex) = 0;
    bool stopping GUARDED_BY(mutex) = false;
    std::vector<std::thread> workers;

    void work();
  };

  bool was_forked() const;

  std::unique_ptr<Shared> shared_;
  std::int64_t process_;  // where the workers are
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Mutex, MutexLock and CondVar: the standard ones, annotated so that clang -Wthread-safety proves at compile time that
// every member marked GUARDED_BY(mutex) is touched only with that mutex held. Other compilers see plain code.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define CORTADO_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define CORTADO_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) CORTADO_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY CORTADO_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) CORTADO_THREAD_ATTRIBUTE(guarded_by(mutex))
#define REQUIRES(...) CORTADO_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) CORTADO_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) CORTADO_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace cortado {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits give up the mutex meanwhile and hold it again when they return; they may return early, so callers loop.
class CondVar {
 public:
  void notify_all() { condition_.notify_all(); }

  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // False when `deadline` has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_until(lock, deadline);
    lock.release();
    return status == std::cv_status::no_timeout;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace cortado

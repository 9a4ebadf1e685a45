// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Rendezvous: where the ranks of a LocalGroup meet. The k-th contribution a rank posts belongs to collective k; the
// rank that posts last combines all contributions in its own thread.
//
// Invariants (all under mutex_)
//   posted_[r]  collectives that rank r has posted, so r takes part in collective k if k < posted_[r].
//   complete_   smallest posted_: collectives below it have all contributions. Ranks post in order, so collectives
//               become complete in order.
//   retired_    collectives below it have their result in place; those in [retired_, complete_) have it when their
//               done flag is set (two ranks may combine two collectives at once).
//   failure_    once set, nothing more is posted and complete_ stands still: collectives below it end well, those at or
//               above it are dead and their buffers are never touched again.
// A failure is handed out only while combining_ is 0. So a rank that got one may free all its buffers.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "collective/combine.h"
#include "core/thread_annotations.h"
#include "cortado/communicator.h"
#include "cortado/status.h"

namespace cortado {

// Safe for use by several threads, one per rank. Calls allocate only when more collectives are outstanding than ever
// before, or to make an error.
class Rendezvous {
 public:
  explicit Rendezvous(int world_size);

  int world_size() const { return world_size_; }

  // Never waits for a peer to post. After an error nothing was posted.
  Result<WorkId> post(int rank, const Contribution& contribution);

  // True once the result of `work` is in place.
  Result<bool> test(int rank, WorkId work);

  // A timeout is a failure of the whole group: all ranks get the same text, which names those that did not come.
  Status wait(int rank, WorkId work, std::chrono::nanoseconds timeout);

  // The first failure stays. Returns when no buffer is being read or written.
  void fail(const Status& why);

 private:
  struct Collective {
    std::vector<Contribution> of_rank;
    int arrived = 0;
    bool done = false;
  };

  Collective& collective(WorkId work) REQUIRES(mutex_) { return *ring_[work % ring_.size()]; }
  void reserve_slot(WorkId work) REQUIRES(mutex_);
  Status check_agreement(int rank, WorkId work, const Contribution& contribution) REQUIRES(mutex_);
  void finish(Collective* combined) REQUIRES(mutex_);
  bool is_done(WorkId work) REQUIRES(mutex_);
  void fail_locked(const Status& why) REQUIRES(mutex_);
  Status settled_failure() REQUIRES(mutex_);
  Status check_started(int rank, WorkId work) REQUIRES(mutex_);
  Status timeout_error(int rank, WorkId work, std::chrono::nanoseconds timeout) REQUIRES(mutex_);

  const int world_size_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<WorkId> posted_ GUARDED_BY(mutex_);
  WorkId complete_ GUARDED_BY(mutex_) = 0;
  WorkId retired_ GUARDED_BY(mutex_) = 0;
  int combining_ GUARDED_BY(mutex_) = 0;
  Status failure_ GUARDED_BY(mutex_);
  // Collective k lies at k modulo the size. By pointer: combine() reads one without the mutex while the ring may grow.
  std::vector<std::unique_ptr<Collective>> ring_ GUARDED_BY(mutex_);
};

}  // namespace cortado

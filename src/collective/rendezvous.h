// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Rendezvous: where the ranks of a LocalGroup, or of one of its sub-groups, meet. The k-th call a rank posts belongs to
// collective k; the rank that posts last combines the calls of all in its own thread.
//
// Invariants (all under shared_.mutex, which a group has in common with its sub-groups)
//   posted_[r]  collectives that rank r has posted, so r takes part in collective k if k < posted_[r].
//   complete_   smallest posted_: collectives below it have all contributions. Ranks post in order, so collectives
//               become complete in order.
//   retired_    collectives below it have their result in place; those in [retired_, complete_) have it when their
//               done flag is set (two ranks may combine two collectives at once).
//   failure     of all groups that share: once set, nothing more is posted and complete_ stands still: collectives
//   below
//               it end well, those at or above it are dead and their buffers are never touched again.
// A failure is handed out only while nothing is being combined in any group. So a rank that got one may free all its
// buffers.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collective/virtual_clock.h"
#include "core/thread_annotations.h"
#include "cortado/communicator.h"
#include "cortado/status.h"

namespace cortado {

// What a group and its sub-groups have in common.
class RendezvousShared {
 public:
  // `virtual_clock` may be null: then time is the machine's.
  explicit RendezvousShared(VirtualClock* virtual_clock) : virtual_clock_(virtual_clock) {}

  // What a rank waits for: collective `work` of a group with these names and calls posted. Null: nothing.
  struct Wait {
    const std::vector<int>* names = nullptr;
    const std::vector<WorkId>* posted = nullptr;
    WorkId work = 0;

    std::vector<int> missing() const;  // names of those that have not come
  };

  Mutex mutex;
  int combining GUARDED_BY(mutex) = 0;
  Status failure GUARDED_BY(mutex);
  std::vector<Wait> waits GUARDED_BY(mutex);  // by name

  // Something that ranks may wait for has happened.
  void notify_all() REQUIRES(mutex);
  void wait() REQUIRES(mutex);
  // False when the deadline has passed.
  bool wait_until(std::int64_t deadline_ns) REQUIRES(mutex);
  std::int64_t deadline_after(std::chrono::nanoseconds timeout) const;

 private:
  VirtualClock* const virtual_clock_;
  CondVar changed_;
};

// Safe for use by several threads, one per rank. Calls allocate only when more collectives are outstanding than ever
// before, or to make an error.
class Rendezvous {
 public:
  // `names[r]`: what rank r is called in messages, its number in the whole group. `shared` outlives it.
  Rendezvous(RendezvousShared* shared, std::vector<int> names, bool is_subgroup);

  int world_size() const { return static_cast<int>(names_.size()); }
  const std::vector<int>& names() const { return names_; }

  // Never waits for a peer to post. The call has been checked. After an error nothing was posted.
  Result<WorkId> post(int rank, const CollectiveCall& call);

  // True once the result of `work` is in place.
  Result<bool> test(int rank, WorkId work);

  // A timeout is a failure of all groups that share: all ranks get the same text, which names those that did not come,
  // and those that these wait for themselves.
  Status wait(int rank, WorkId work, std::chrono::nanoseconds timeout);

  // The first failure, if there was one.
  Status failure();

  // The first failure stays. Returns when no buffer is being read or written.
  void fail(const Status& why);

 private:
  struct Collective {
    std::vector<CollectiveCall> of_rank;
    int arrived = 0;
    bool done = false;
  };

  Collective& collective(WorkId work) REQUIRES(shared_.mutex) { return *ring_[work % ring_.size()]; }
  void reserve_slot(WorkId work) REQUIRES(shared_.mutex);
  Status check_agreement(int rank, WorkId work, const CollectiveCall& call) REQUIRES(shared_.mutex);
  void finish(Collective* combined) REQUIRES(shared_.mutex);
  bool is_done(WorkId work) REQUIRES(shared_.mutex);
  void fail_locked(const Status& why) REQUIRES(shared_.mutex);
  Status settled_failure() REQUIRES(shared_.mutex);
  Status check_started(int rank, WorkId work) REQUIRES(shared_.mutex);
  Status wait_locked(int rank, WorkId work, std::int64_t deadline_ns, std::chrono::nanoseconds timeout)
      REQUIRES(shared_.mutex);
  Status timeout_error(int rank, WorkId work, std::chrono::nanoseconds timeout) REQUIRES(shared_.mutex);
  std::string describe_place(WorkId work) const;

  const std::vector<int> names_;
  const bool is_subgroup_;
  RendezvousShared& shared_;
  std::vector<WorkId> posted_ GUARDED_BY(shared_.mutex);
  WorkId complete_ GUARDED_BY(shared_.mutex) = 0;
  WorkId retired_ GUARDED_BY(shared_.mutex) = 0;
  // Collective k lies at k modulo the size. By pointer: combine() reads one without the mutex while the ring may grow.
  std::vector<std::unique_ptr<Collective>> ring_ GUARDED_BY(shared_.mutex);
};

}  // namespace cortado

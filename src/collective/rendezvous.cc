// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/rendezvous.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace cortado {
namespace {

constexpr std::size_t kInitialSlots = 256;  // more than an engine usually has in flight

std::chrono::steady_clock::time_point deadline_after(std::chrono::nanoseconds timeout) {
  // now() + nanoseconds::max() would overflow.
  constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + std::clamp(timeout, std::chrono::nanoseconds(0), kForever);
}

}  // namespace

Rendezvous::Rendezvous(int world_size) : world_size_(world_size) {
  CORTADO_CHECK(world_size >= 1, "world size %d", world_size);
  MutexLock lock(mutex_);
  posted_.resize(static_cast<std::size_t>(world_size));
  reserve_slot(kInitialSlots - 1);
}

Result<WorkId> Rendezvous::post(int rank, const Contribution& contribution) {
  WorkId work = 0;
  Collective* complete = nullptr;
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return settled_failure();
    work = posted_[rank];
    if (Status status = check_agreement(rank, work, contribution); !status.ok()) {
      fail_locked(status);
      return settled_failure();
    }
    reserve_slot(work);
    Collective& mine = collective(work);
    mine.of_rank[rank] = contribution;
    ++posted_[rank];
    if (++mine.arrived < world_size_) return work;
    ++complete_;
    ++combining_;
    complete = &mine;
  }
  combine(complete->of_rank);  // nobody else touches it until it is done

  MutexLock lock(mutex_);
  finish(complete);
  return work;
}

Result<bool> Rendezvous::test(int rank, WorkId work) {
  MutexLock lock(mutex_);
  CORTADO_RETURN_IF_ERROR(check_started(rank, work));
  if (is_done(work)) return true;
  const bool dead = work >= complete_ && !failure_.ok();
  if (!dead || combining_ > 0) return false;
  return failure_;
}

Status Rendezvous::wait(int rank, WorkId work, std::chrono::nanoseconds timeout) {
  const auto deadline = deadline_after(timeout);
  MutexLock lock(mutex_);
  CORTADO_RETURN_IF_ERROR(check_started(rank, work));
  while (!is_done(work)) {
    if (work < complete_) {
      changed_.wait(mutex_);  // a peer's thread is writing the result; that needs nobody else, so it ends soon
    } else if (!failure_.ok()) {
      return settled_failure();
    } else if (!changed_.wait_until(mutex_, deadline) && work >= complete_ && failure_.ok()) {
      fail_locked(timeout_error(rank, work, timeout));
    }
  }
  return Status();
}

void Rendezvous::fail(const Status& why) {
  MutexLock lock(mutex_);
  fail_locked(why);
  (void)settled_failure();
}

void Rendezvous::reserve_slot(WorkId work) {
  const std::size_t needed = work - retired_ + 1;
  if (needed <= ring_.size()) return;
  std::vector<std::unique_ptr<Collective>> bigger(std::max(needed, 2 * ring_.size()));
  for (WorkId k = retired_; k < retired_ + ring_.size(); ++k) {
    bigger[k % bigger.size()] = std::move(ring_[k % ring_.size()]);
  }
  for (auto& slot : bigger) {
    if (slot == nullptr) slot = std::make_unique<Collective>();
    slot->of_rank.resize(static_cast<std::size_t>(world_size_));
  }
  ring_ = std::move(bigger);
}

Status Rendezvous::check_agreement(int rank, WorkId work, const Contribution& contribution) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (posted_[peer] <= work) continue;
    const Contribution& theirs = collective(work).of_rank[peer];
    if (agree(contribution, theirs)) return Status();  // and so with every other rank that has posted
    return make_error(StatusCode::kMismatch, "collective %llu: rank %d started %s, rank %d started %s",
                      static_cast<unsigned long long>(work), peer, describe(theirs).c_str(), rank,
                      describe(contribution).c_str());
  }
  return Status();
}

void Rendezvous::finish(Collective* combined) {
  combined->done = true;
  --combining_;
  while (retired_ < complete_ && collective(retired_).done) {
    collective(retired_).done = false;
    collective(retired_).arrived = 0;
    ++retired_;
  }
  changed_.notify_all();
}

bool Rendezvous::is_done(WorkId work) { return work < retired_ || (work < complete_ && collective(work).done); }

void Rendezvous::fail_locked(const Status& why) {
  if (!failure_.ok()) return;
  failure_ = why;
  changed_.notify_all();
}

Status Rendezvous::settled_failure() {
  while (combining_ > 0) changed_.wait(mutex_);
  return failure_;
}

Status Rendezvous::check_started(int rank, WorkId work) {
  if (work < posted_[rank]) return Status();
  return make_error(StatusCode::kInvalidArgument, "rank %d asks for collective %llu but has started only %llu", rank,
                    static_cast<unsigned long long>(work), static_cast<unsigned long long>(posted_[rank]));
}

Status Rendezvous::timeout_error(int rank, WorkId work, std::chrono::nanoseconds timeout) {
  std::string missing;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (posted_[peer] > work) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
  }
  return make_error(StatusCode::kTimeout,
                    "collective %llu (%s): rank %d waited %.3g s; ranks that have not started it: %s",
                    static_cast<unsigned long long>(work), describe(collective(work).of_rank[rank]).c_str(), rank,
                    std::chrono::duration<double>(timeout).count(), missing.c_str());
}

}  // namespace cortado

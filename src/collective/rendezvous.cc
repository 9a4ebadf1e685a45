// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/rendezvous.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "collective/collective_call.h"
#include "collective/combine.h"
#include "core/check.h"

namespace cortado {
namespace {

constexpr std::size_t kInitialSlots = 256;  // more than an engine usually has in flight

}  // namespace

std::vector<int> RendezvousShared::Wait::missing() const {
  std::vector<int> missing;
  for (std::size_t peer = 0; peer < posted->size(); ++peer) {
    if ((*posted)[peer] <= work) missing.push_back((*names)[peer]);
  }
  return missing;
}

void RendezvousShared::notify_all() {
  virtual_clock_ == nullptr ? changed_.notify_all() : virtual_clock_->notify_all(this);
}

void RendezvousShared::wait() {
  if (virtual_clock_ == nullptr) return changed_.wait(mutex);
  (void)virtual_clock_->wait_until(mutex, this, VirtualClock::kNever);
}

bool RendezvousShared::wait_until(std::int64_t deadline_ns) {
  if (virtual_clock_ != nullptr) return virtual_clock_->wait_until(mutex, this, deadline_ns);
  return changed_.wait_until(mutex, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns)));
}

std::int64_t RendezvousShared::deadline_after(std::chrono::nanoseconds timeout) const {
  // now + nanoseconds::max() would overflow.
  constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24 * 365);
  const Clock* clock = virtual_clock_ == nullptr ? steady_clock() : virtual_clock_;
  return clock->now_ns() + std::clamp(timeout, std::chrono::nanoseconds(0), kForever).count();
}

Rendezvous::Rendezvous(RendezvousShared* shared, std::vector<int> names, bool is_subgroup)
    : names_(std::move(names)), is_subgroup_(is_subgroup), shared_(*shared) {
  CORTADO_CHECK(!names_.empty(), "a group without ranks");
  MutexLock lock(shared_.mutex);
  posted_.resize(names_.size());
  const auto most_names = static_cast<std::size_t>(*std::max_element(names_.begin(), names_.end())) + 1;
  if (shared_.waits.size() < most_names) shared_.waits.resize(most_names);
  reserve_slot(kInitialSlots - 1);
}

Result<WorkId> Rendezvous::post(int rank, const CollectiveCall& call) {
  WorkId work = 0;
  Collective* complete = nullptr;
  {
    MutexLock lock(shared_.mutex);
    if (!shared_.failure.ok()) return settled_failure();
    work = posted_[rank];
    if (Status status = check_agreement(rank, work, call); !status.ok()) {
      fail_locked(status);
      return settled_failure();
    }
    reserve_slot(work);
    Collective& mine = collective(work);
    mine.of_rank[rank] = call;
    ++posted_[rank];
    if (++mine.arrived < world_size()) return work;
    ++complete_;
    ++shared_.combining;
    complete = &mine;
  }
  combine(complete->of_rank);  // nobody else touches it until it is done

  MutexLock lock(shared_.mutex);
  finish(complete);
  return work;
}

Result<bool> Rendezvous::test(int rank, WorkId work) {
  MutexLock lock(shared_.mutex);
  CORTADO_RETURN_IF_ERROR(check_started(rank, work));
  if (is_done(work)) return true;
  const bool dead = work >= complete_ && !shared_.failure.ok();
  if (!dead || shared_.combining > 0) return false;
  return shared_.failure;
}

Status Rendezvous::wait(int rank, WorkId work, std::chrono::nanoseconds timeout) {
  const std::int64_t deadline_ns = shared_.deadline_after(timeout);
  MutexLock lock(shared_.mutex);
  CORTADO_RETURN_IF_ERROR(check_started(rank, work));
  shared_.waits[static_cast<std::size_t>(names_[rank])] = {&names_, &posted_, work};
  Status status = wait_locked(rank, work, deadline_ns, timeout);
  shared_.waits[static_cast<std::size_t>(names_[rank])] = {};
  return status;
}

Status Rendezvous::wait_locked(int rank, WorkId work, std::int64_t deadline_ns, std::chrono::nanoseconds timeout) {
  while (!is_done(work)) {
    if (work < complete_) {
      shared_.wait();  // a peer's thread is writing the result; that needs nobody else, so it ends soon
    } else if (!shared_.failure.ok()) {
      return settled_failure();
    } else if (!shared_.wait_until(deadline_ns) && work >= complete_ && shared_.failure.ok()) {
      fail_locked(timeout_error(rank, work, timeout));
    }
  }
  return Status();
}

Status Rendezvous::failure() {
  MutexLock lock(shared_.mutex);
  return shared_.failure.ok() ? Status() : settled_failure();
}

void Rendezvous::fail(const Status& why) {
  MutexLock lock(shared_.mutex);
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
    slot->of_rank.resize(names_.size());
  }
  ring_ = std::move(bigger);
}

Status Rendezvous::check_agreement(int rank, WorkId work, const CollectiveCall& call) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (posted_[peer] <= work) continue;
    const CollectiveCall& theirs = collective(work).of_rank[peer];
    if (!agree(theirs, peer, call, rank, world_size())) {
      return make_error(StatusCode::kMismatch, "%s: rank %d started %s, rank %d started %s",
                        describe_place(work).c_str(), names_[peer], describe(theirs).c_str(), names_[rank],
                        describe(call).c_str());
    }
    // What agrees with one rank agrees with all that have posted, but for what only pairs of ranks exchange.
    if (call.kind != CollectiveKind::kAllToAll) return Status();
  }
  return Status();
}

void Rendezvous::finish(Collective* combined) {
  combined->done = true;
  --shared_.combining;
  while (retired_ < complete_ && collective(retired_).done) {
    collective(retired_).done = false;
    collective(retired_).arrived = 0;
    ++retired_;
  }
  shared_.notify_all();
}

bool Rendezvous::is_done(WorkId work) { return work < retired_ || (work < complete_ && collective(work).done); }

void Rendezvous::fail_locked(const Status& why) {
  if (!shared_.failure.ok()) return;
  shared_.failure = why;
  shared_.notify_all();
}

Status Rendezvous::settled_failure() {
  while (shared_.combining > 0) shared_.wait();
  return shared_.failure;
}

Status Rendezvous::check_started(int rank, WorkId work) {
  if (work < posted_[rank]) return Status();
  return make_error(StatusCode::kInvalidArgument, "rank %d asks for %s but has started only %llu", names_[rank],
                    describe_place(work).c_str(), static_cast<unsigned long long>(posted_[rank]));
}

Status Rendezvous::timeout_error(int rank, WorkId work, std::chrono::nanoseconds timeout) {
  std::vector<int> late = RendezvousShared::Wait{&names_, &posted_, work}.missing();
  std::string missing, in_turn;
  for (const int name : late) missing += (missing.empty() ? "" : ", ") + std::to_string(name);
  for (std::size_t i = 0; i < late.size(); ++i) {  // grows
    const RendezvousShared::Wait& theirs = shared_.waits[static_cast<std::size_t>(late[i])];
    if (theirs.names == nullptr) continue;
    for (const int name : theirs.missing()) {
      in_turn += "; rank " + std::to_string(late[i]) + " waits for rank " + std::to_string(name);
      if (std::find(late.begin(), late.end(), name) == late.end()) late.push_back(name);
    }
  }
  return make_error(StatusCode::kTimeout, "%s (%s): rank %d waited %.3g s; ranks that have not started it: %s%s",
                    describe_place(work).c_str(), describe(collective(work).of_rank[rank]).c_str(), names_[rank],
                    std::chrono::duration<double>(timeout).count(), missing.c_str(), in_turn.c_str());
}

std::string Rendezvous::describe_place(WorkId work) const {
  return cortado::describe_place(work, is_subgroup_ ? names_ : std::span<const int>());
}

}  // namespace cortado

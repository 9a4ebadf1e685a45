// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "tests/campaign/virtual_time.h"

#include <algorithm>

#include "collective/collective_call.h"
#include "core/check.h"

namespace cortado {

std::int64_t VirtualTime::now_ns() const {
  MutexLock lock(mutex_);
  return now_ns_;
}

void VirtualTime::leave() {
  MutexLock lock(mutex_);
  --running_;
  advance();
}

std::uint64_t VirtualTime::changes() const {
  MutexLock lock(mutex_);
  return changes_;
}

void VirtualTime::announce_change() {
  MutexLock lock(mutex_);
  ++changes_;
  for (Sleeper* sleeper : sleepers_) sleeper->awake = true;
  running_ += static_cast<int>(sleepers_.size());
  sleepers_.clear();
  woken_.notify_all();
}

void VirtualTime::sleep(std::uint64_t seen, std::int64_t until_ns) {
  MutexLock lock(mutex_);
  if (changes_ != seen || now_ns_ >= until_ns) return;
  Sleeper own{until_ns};
  sleepers_.push_back(&own);
  --running_;
  advance();
  while (!own.awake) woken_.wait(mutex_);
}

void VirtualTime::sleep_until(std::int64_t until_ns) {
  while (now_ns() < until_ns) sleep(changes(), until_ns);
}

// Whoever is woken counts as running from now on, though its thread may get a processor only later.
void VirtualTime::advance() {
  if (running_ > 0 || sleepers_.empty()) return;
  const auto earlier = [](const Sleeper* a, const Sleeper* b) { return a->until_ns < b->until_ns; };
  now_ns_ = std::max(now_ns_, (*std::min_element(sleepers_.begin(), sleepers_.end(), earlier))->until_ns);
  std::erase_if(sleepers_, [&](Sleeper* sleeper) REQUIRES(mutex_) {
    sleeper->awake = sleeper->until_ns <= now_ns_;
    running_ += sleeper->awake;
    return sleeper->awake;
  });
  woken_.notify_all();
}

// ---- communicator --------------------------------------------------------------------------------------------------

Result<WorkId> VirtualCommunicator::start(const CollectiveCall& call) {
  const bool is_sum = call.kind == CollectiveKind::kAllReduce;
  const bool is_damaged = starts_++ == damage_.at && (damage_.of_sums || !is_sum);
  Result<WorkId> work = inner_->start(call);
  if (is_damaged && work.ok()) {
    const auto elems = static_cast<std::size_t>(received_elems(call, rank(), world_size()));
    damaged_ = {static_cast<std::byte*>(call.received), elems * dtype_bytes(call.dtype)};
    damaged_work_ = work.value();
  }
  time_->announce_change();
  return work;
}

Result<bool> VirtualCommunicator::test(WorkId work) {
  Result<bool> done = inner_->test(work);
  if (done.ok() && done.value()) arrive(work);
  return done;
}

void VirtualCommunicator::arrive(WorkId work) {
  if (damaged_.empty() || work != damaged_work_) return;
  const std::uint64_t bit = damage_.bit % (8 * damaged_.size());
  damaged_[bit / 8] ^= std::byte{1} << (bit % 8);
  damaged_ = {};
}

Status VirtualCommunicator::wait(WorkId work, std::chrono::nanoseconds timeout) {
  // A faulty communicator's delays end without anybody announcing it.
  constexpr std::int64_t kLook_ns = 1'000'000'000;
  const std::int64_t deadline_ns = time_->now_ns() + timeout.count();
  while (true) {
    const std::uint64_t seen = time_->changes();
    CORTADO_ASSIGN_OR_RETURN(const bool done, test(work));
    if (done) return {};
    const std::int64_t now_ns = time_->now_ns();
    if (now_ns >= deadline_ns) break;
    time_->sleep(seen, std::min(deadline_ns, now_ns + kLook_ns));
  }
  const Status status = inner_->wait(work, std::chrono::nanoseconds(0));
  time_->announce_change();
  return status;
}

Status VirtualCommunicator::all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                                       std::chrono::nanoseconds timeout) {
  CORTADO_ASSIGN_OR_RETURN(const WorkId work, start_all_gather(sent, received));
  const Status status = wait(work, timeout);
  // The buffers are free when this returns; a dropped gather's were never taken.
  if (!status.ok()) inner_->abandon(status.message());
  return status;
}

Result<std::unique_ptr<Communicator>> VirtualCommunicator::subgroup(std::span<const int> ranks) {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
  return std::unique_ptr<Communicator>(std::make_unique<VirtualCommunicator>(std::move(inner), time_));
}

bool VirtualCommunicator::abandon(const std::string& why) {
  const bool settled = inner_->abandon(why);
  time_->announce_change();
  return settled;
}

}  // namespace cortado

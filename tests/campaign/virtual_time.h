// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Time that passes only when nobody has anything to do: so a wait of half an hour takes microseconds, and how long
// anything took does not depend on the machine.
//
// Every thread that takes part is counted. Time stands still while one of them runs; when all are asleep it jumps to
// the earliest moment at which one wants to wake.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_annotations.h"
#include "cortado/communicator.h"
#include "cortado/trace.h"

namespace cortado {

class VirtualTime final : public Clock {
 public:
  // `threads` are running now; each must call leave() at its end.
  explicit VirtualTime(int threads) : running_(threads) {}

  std::int64_t now_ns() const override;

  void leave();

  // Counts what other threads may be waiting for.
  std::uint64_t changes() const;
  void announce_change();

  // Sleeps until announce_change() has been called since `seen` was read, or until `until_ns`, whichever is first.
  void sleep(std::uint64_t seen, std::int64_t until_ns);
  // Sleeps until then.
  void sleep_until(std::int64_t until_ns);

 private:
  struct Sleeper {
    std::int64_t until_ns;
    bool awake = false;
  };
  void advance() REQUIRES(mutex_);

  mutable Mutex mutex_;
  CondVar woken_;
  int running_ GUARDED_BY(mutex_);
  std::int64_t now_ns_ GUARDED_BY(mutex_) = 1'000'000'000;
  std::uint64_t changes_ GUARDED_BY(mutex_) = 0;
  std::vector<Sleeper*> sleepers_ GUARDED_BY(mutex_);
};

// A communicator over `inner` whose waits and timeouts run on a VirtualTime that all ranks of the group share. Of
// `inner` only test() is waited with, so that it may be a faulty one with this clock.
class VirtualCommunicator final : public Communicator {
 public:
  VirtualCommunicator(Communicator* inner, VirtualTime* time) : inner_(inner), time_(time) {}
  VirtualCommunicator(std::unique_ptr<Communicator> inner, VirtualTime* time)
      : owned_(std::move(inner)), inner_(owned_.get()), time_(time) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }
  Result<WorkId> start(const CollectiveCall& call) override;
  Result<bool> test(WorkId work) override;
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override;
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override;
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override;
  bool abandon(const std::string& why) override;

  std::int64_t starts() const { return starts_; }

  // One bit of what this rank receives of its collective number `at` is flipped when it has come. Sums only where asked
  // for: nobody can see that in them.
  struct Damage {
    std::int64_t at = -1;
    std::uint64_t bit = 0;  // modulo those received
    bool of_sums = false;
  };
  void damage_arrival(const Damage& damage) { damage_ = damage; }

 private:
  void arrive(WorkId work);

  std::unique_ptr<Communicator> owned_;  // of a sub-group
  Communicator* inner_;
  VirtualTime* time_;
  std::int64_t starts_ = 0;
  Damage damage_;
  WorkId damaged_work_ = 0;
  std::span<std::byte> damaged_;  // empty: nothing is to be damaged any more
};

}  // namespace cortado

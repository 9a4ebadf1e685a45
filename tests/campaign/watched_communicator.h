// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "collective/collective_call.h"
#include "cortado/communicator.h"

namespace cortado {

// Counts the collectives that a rank starts, those of sub-groups too, and can flip a bit of what the rank receives.
class WatchedCommunicator final : public Communicator {
 public:
  struct Watch {
    std::int64_t starts = 0;
    // One bit of what is received of this collective is flipped when it has come; of a sum, and of values that travel
    // as they are, only where asked for, because nobody can see it there.
    std::int64_t damaged = -1;
    std::uint64_t bit = 0;  // modulo those received
    bool damages_sums = false;
    // Of the collective with this number: whether what the rank contributes is added, or moved, without a check.
    std::int64_t asked = -1;
    bool asked_has_no_check = false;
  };
  WatchedCommunicator(std::unique_ptr<Communicator> inner, Watch* watch) : inner_(std::move(inner)), watch_(watch) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }

  Result<WorkId> start(const CollectiveCall& call) override {
    const bool is_sum = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter ||
                        call.kind == CollectiveKind::kReduce;
    const bool has_check = call.dtype == DType::kUint8 && !is_sum;
    const bool receives = (call.kind != CollectiveKind::kBroadcast || rank() != call.root) &&
                          (call.kind != CollectiveKind::kGather || rank() == call.root);
    if (watch_->starts == watch_->asked) watch_->asked_has_no_check = !has_check;
    const bool is_damaged = watch_->starts++ == watch_->damaged && receives && (watch_->damages_sums || has_check);
    Result<WorkId> work = inner_->start(call);
    if (is_damaged && work.ok()) {
      const auto elems = static_cast<std::size_t>(received_elems(call, rank(), world_size()));
      damaged_ = {static_cast<std::byte*>(call.received), elems * dtype_bytes(call.dtype)};
      damaged_work_ = work.value();
    }
    return work;
  }

  Result<bool> test(WorkId work) override {
    Result<bool> done = inner_->test(work);
    if (done.ok() && done.value()) arrive(work);
    return done;
  }

  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    Status status = inner_->wait(work, timeout);
    if (status.ok()) arrive(work);
    return status;
  }

  // By the two others, so that it counts.
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    const Result<WorkId> work = start_all_gather(sent, received);
    Status status = work.ok() ? wait(work.value(), timeout) : work.status();
    if (!status.ok()) inner_->abandon(status.message());  // the buffers are free when this returns
    return status;
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    Result<std::unique_ptr<Communicator>> inner = inner_->subgroup(ranks);
    if (!inner.ok()) return inner;
    return std::unique_ptr<Communicator>(std::make_unique<WatchedCommunicator>(std::move(inner).value(), watch_));
  }

  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 private:
  void arrive(WorkId work) {
    if (damaged_.empty() || work != damaged_work_) return;
    const std::uint64_t bit = watch_->bit % (8 * damaged_.size());
    damaged_[bit / 8] ^= std::byte{1} << (bit % 8);
    damaged_ = {};
  }

  std::unique_ptr<Communicator> inner_;
  Watch* watch_;
  std::span<std::byte> damaged_;  // empty: nothing is to be damaged any more
  WorkId damaged_work_ = 0;
};

}  // namespace cortado

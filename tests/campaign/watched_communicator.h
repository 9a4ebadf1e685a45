// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
    bool is_checked = false;  // by a communicator above this one: then values that travel as they are have a check, too
    // Of the collective with this number: whether what the rank contributes is added, or moved, without a check; and of
    // a sum how large the values are that Fault::kCorrupt (the middle one) and kTruncate (the second half) change, as a
    // share of the rank's largest: 0 of 16-bit floats, whose checks see only what is larger than all others.
    std::int64_t asked = -1;
    bool asked_has_no_check = false;
    double corrupted_share = 1, truncated_share = 1;
  };
  WatchedCommunicator(std::unique_ptr<Communicator> inner, Watch* watch) : inner_(std::move(inner)), watch_(watch) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }

  Result<WorkId> start(const CollectiveCall& call) override {
    const bool is_added = is_sum(call.kind);
    const bool has_check = (call.dtype == DType::kUint8 || watch_->is_checked) && !is_added;
    const bool receives = (call.kind != CollectiveKind::kBroadcast || rank() != call.root) &&
                          (call.kind != CollectiveKind::kGather || rank() == call.root);
    if (watch_->starts == watch_->asked) {
      watch_->asked_has_no_check = !has_check;
      if (is_added) measure_shares(call);
    }
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
  void measure_shares(const CollectiveCall& call) {
    if (call.dtype == DType::kUint8) return;  // checked exactly
    watch_->corrupted_share = watch_->truncated_share = 0;
    if (call.dtype != DType::kFloat32) return;
    std::vector<float> values(static_cast<std::size_t>(sent_elems(call, rank(), world_size())));
    if (values.empty()) return;
    std::memcpy(values.data(), call.sent, values.size() * sizeof(float));
    const auto largest = [&](std::size_t begin, std::size_t end) {
      double magnitude = 0;
      for (std::size_t i = begin; i < end; ++i) magnitude = std::max<double>(magnitude, std::abs(values[i]));
      return magnitude;
    };
    const std::size_t middle = values.size() / 2;
    const double all = largest(0, values.size());
    if (all == 0) return;
    watch_->corrupted_share = largest(middle, middle + 1) / all;
    watch_->truncated_share = largest(middle, values.size()) / all;
  }

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

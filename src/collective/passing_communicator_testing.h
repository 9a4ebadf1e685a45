// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "cortado/communicator.h"

namespace cortado {

// For tests: hands everything on to another communicator. A test overrides what it wants to see or to be different;
// sub-groups are the other's own.
class PassingCommunicator : public Communicator {
 public:
  explicit PassingCommunicator(Communicator* inner) : inner_(inner) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }
  Result<WorkId> start(const CollectiveCall& call) override { return inner_->start(call); }
  Result<bool> test(WorkId work) override { return inner_->test(work); }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override { return inner_->wait(work, timeout); }
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    return inner_->all_gather(sent, received, timeout);
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    return inner_->subgroup(ranks);
  }
  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 protected:
  Communicator* const inner_;
};

}  // namespace cortado

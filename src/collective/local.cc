// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "collective/collective_call.h"
#include "collective/rendezvous.h"
#include "core/check.h"
#include "core/thread_annotations.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

// The sub-groups that have been made of a group. Ranks ask one after the other; the first makes it.
class Subgroups {
 public:
  explicit Subgroups(RendezvousShared* shared) : shared_(shared) {}

  // The next sub-group of these ranks that rank number `own` of the list has not been given yet.
  Rendezvous* take(const std::vector<int>& names, std::size_t own) {
    MutexLock lock(mutex_);
    const auto is_next = [&](const Subgroup& made) { return made.rendezvous->names() == names && !made.taken[own]; };
    auto found = std::find_if(made_.begin(), made_.end(), is_next);
    if (found == made_.end()) {
      made_.push_back({std::make_unique<Rendezvous>(shared_, names, true), std::vector<bool>(names.size())});
      found = std::prev(made_.end());
    }
    found->taken[own] = true;
    return found->rendezvous.get();
  }

 private:
  struct Subgroup {
    std::unique_ptr<Rendezvous> rendezvous;
    std::vector<bool> taken;  // by each rank of it
  };

  RendezvousShared* shared_;
  Mutex mutex_;
  std::vector<Subgroup> made_ GUARDED_BY(mutex_);
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Rendezvous* rendezvous, Subgroups* subgroups, int rank)
      : rendezvous_(rendezvous), subgroups_(subgroups), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return rendezvous_->world_size(); }
  std::string name() const override { return "local"; }

  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(check_call(call, rank_, world_size()));
    return rendezvous_->post(rank_, call);
  }

  Result<bool> test(WorkId work) override { return rendezvous_->test(rank_, work); }

  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    return rendezvous_->wait(rank_, work, timeout);
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, start_all_gather(sent, received));
    return wait(work, timeout);
  }

  Status peer_failure() override { return rendezvous_->failure(); }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(const int own, index_in_subgroup(ranks, rank_, world_size()));
    std::vector<int> names;
    for (const int rank : ranks) names.push_back(rendezvous_->names()[static_cast<std::size_t>(rank)]);
    Rendezvous* rendezvous = subgroups_->take(names, static_cast<std::size_t>(own));
    return std::unique_ptr<Communicator>(std::make_unique<LocalCommunicator>(rendezvous, subgroups_, own));
  }

  bool abandon(const std::string& why) override {
    const int name = rendezvous_->names()[static_cast<std::size_t>(rank_)];
    rendezvous_->fail(make_error(StatusCode::kPeerFailed, "rank %d has left the group: %s", name, why.c_str()));
    return true;
  }

 private:
  Rendezvous* rendezvous_;
  Subgroups* subgroups_;
  int rank_;
};

}  // namespace

struct LocalGroup::State {
  State(int world_size, VirtualClock* clock) : shared(clock), rendezvous(&shared, first_ranks(world_size), false) {
    communicators.reserve(static_cast<std::size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) communicators.emplace_back(&rendezvous, &subgroups, rank);
  }

  static std::vector<int> first_ranks(int world_size) {
    CORTADO_CHECK(world_size >= 1, "world size %d", world_size);
    std::vector<int> ranks(static_cast<std::size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  RendezvousShared shared;
  Rendezvous rendezvous;
  Subgroups subgroups{&shared};
  std::vector<LocalCommunicator> communicators;
};

LocalGroup::LocalGroup(int world_size, VirtualClock* clock) : state_(std::make_unique<State>(world_size, clock)) {}

LocalGroup::~LocalGroup() = default;

Communicator* LocalGroup::communicator(int rank) {
  CORTADO_CHECK(rank >= 0 && rank < state_->rendezvous.world_size(), "rank %d", rank);
  return &state_->communicators[static_cast<std::size_t>(rank)];
}

void LocalGroup::abandon(int rank, const std::string& why) { communicator(rank)->abandon(why); }

}  // namespace cortado

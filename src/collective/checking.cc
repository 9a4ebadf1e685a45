// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective_call.h"
#include "collective/sum_checks.h"
#include "collective/work_ring.h"
#include "core/check.h"
#include "core/checksum.h"
#include "core/keep_for_ever.h"
#include "cortado/communicator.h"
#include "cortado/trace.h"

namespace cortado {
namespace {

using std::chrono::nanoseconds;

// The blocks of different ranks that one side of a call consists of, one after the other in memory.
struct Blocks {
  const std::byte* data = nullptr;
  int first_rank = 0;  // of which the first one is, the others follow
  int count = 0;
  bool are_received = false;
};

Blocks sent_blocks(const CollectiveCall& call, int rank, int world_size) {
  const auto* sent = static_cast<const std::byte*>(call.sent);
  switch (call.kind) {
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
      return {.data = sent, .count = world_size};
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
      return {.data = sent, .first_rank = rank, .count = 1};
    default:
      return {.data = sent, .count = reads_sent(call, rank) ? 1 : 0};
  }
}

Blocks received_blocks(const CollectiveCall& call, int rank, int world_size) {
  if (!writes_received(call, rank)) return {};
  const auto* received = static_cast<const std::byte*>(call.received);
  switch (call.kind) {
    case CollectiveKind::kAllGather:
    case CollectiveKind::kGather:
    case CollectiveKind::kAllToAll:
      return {.data = received, .count = world_size, .are_received = true};
    case CollectiveKind::kReduceScatter:
      return {.data = received, .first_rank = rank, .count = 1, .are_received = true};
    case CollectiveKind::kBroadcast:
      return {.data = received, .first_rank = call.root, .count = 1, .are_received = true};
    default:
      return {.data = received, .count = 1, .are_received = true};
  }
}

class CheckingCommunicator final : public Communicator {
 public:
  CheckingCommunicator(Communicator* inner, const Clock* clock) : inner_(inner), clock_(clock) {}
  // A sub-group of `whole`: the ranks of it.
  CheckingCommunicator(std::unique_ptr<Communicator> inner, const CheckingCommunicator& whole, std::vector<int> ranks)
      : owned_(std::move(inner)),
        inner_(owned_.get()),
        clock_(whole.clock_),
        subgroup_(std::move(ranks)),
        failure_(whole.failure_) {}

  ~CheckingCommunicator() override {
    bool in_flight = false;
    started_.for_each([&](const Started& started) { in_flight = in_flight || !started.has_ended(); });
    if (in_flight && !inner_->abandon("its communicator was destroyed within a collective")) {
      keep_for_ever(std::move(started_));
    }
  }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  // Of the transport, by which measurements of it are told apart.
  std::string name() const override { return inner_->name(); }

  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(*failure_);
    CORTADO_RETURN_IF_ERROR(check_call(call, rank(), world_size()));
    Started& started = started_.take(next_work_, [](const Started& before) { return before.has_ended(); });
    started.call = call;
    started.status = {};
    CORTADO_ASSIGN_OR_RETURN(started.checks.work, inner_->start(prepare_checks(call, &started)));
    started.checks.has_ended = false;
    const WorkId work = next_work_++;
    const Result<WorkId> of_call = inner_->start(call);
    if (!of_call.ok()) return *failure_ = of_call.status();  // the checks are on their way
    started.values = {.work = of_call.value(), .has_ended = false};
    return work;
  }

  Result<bool> test(WorkId work) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    Started* started = started_.find(work);
    if (started == nullptr) return true;
    for (Part* part : {&started->values, &started->checks}) {
      if (part->has_ended) continue;
      CORTADO_ASSIGN_OR_RETURN(part->has_ended, inner_->test(part->work));
      if (!part->has_ended) return false;
      if (started->has_ended()) compare(started);
    }
    CORTADO_RETURN_IF_ERROR(started->status);
    return true;
  }

  Status wait(WorkId work, nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    Started* started = started_.find(work);
    if (started == nullptr) return {};
    const std::int64_t begin_ns = clock_->now_ns();
    for (Part* part : {&started->values, &started->checks}) {
      if (part->has_ended) continue;
      CORTADO_RETURN_IF_ERROR(inner_->wait(part->work, rest_of(timeout, begin_ns)));
      part->has_ended = true;
      if (started->has_ended()) compare(started);
    }
    return started->status;
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received, nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(*failure_);
    const std::int64_t begin_ns = clock_->now_ns();
    const std::uint64_t own = checksum_64(sent);
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(world_size()));
    CORTADO_RETURN_IF_ERROR(inner_->all_gather(sent, received, timeout));
    CORTADO_RETURN_IF_ERROR(inner_->all_gather(
        std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(expected)), rest_of(timeout, begin_ns)));
    for (int peer = 0; peer < world_size(); ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (checksum_64(received.subspan(p * sent.size(), sent.size())) == expected[p]) continue;
      return *failure_ = damaged(peer, "all_gather of " + std::to_string(sent.size()) + " bytes");
    }
    return {};
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
    std::vector<int> whole;
    for (const int rank : ranks) whole.push_back(rank_in_whole(rank));
    return std::unique_ptr<Communicator>(
        std::make_unique<CheckingCommunicator>(std::move(inner), *this, std::move(whole)));
  }

  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 private:
  struct Part {
    WorkId work = 0;  // the inner communicator's
    bool has_ended = true;
  };
  struct Started {
    WorkId work = 0;
    Part values, checks;
    Status status;  // once both have ended: whether they fit
    CollectiveCall call;
    std::vector<std::uint64_t> sent, received;  // checks: of what is summed those of sum_checks.h, else a hash a block
    std::vector<std::int64_t> counts;           // of a reduce_scatter in varying blocks

    bool has_ended() const { return values.has_ended && checks.has_ended; }
  };

  std::int64_t block_elems_of(const CollectiveCall& call, const Blocks& blocks, int peer) const {
    return blocks.are_received && call.kind == CollectiveKind::kAllToAll ? received_block_elems(call, peer)
                                                                         : block_elems(call, peer);
  }

  // visit(rank, data, elements) for each, which returns a Status.
  template <typename Visit>
  Status for_each_block(const CollectiveCall& call, const Blocks& blocks, Visit&& visit) const {
    const std::byte* data = blocks.data;
    for (int peer = blocks.first_rank; peer < blocks.first_rank + blocks.count; ++peer) {
      const std::int64_t elems = block_elems_of(call, blocks, peer);
      CORTADO_RETURN_IF_ERROR(visit(peer, data, elems));
      if (elems > 0) data += static_cast<std::size_t>(elems) * dtype_bytes(call.dtype);
    }
    return {};
  }

  // The collective of the checks: of the same kind, over memory of `started`.
  CollectiveCall prepare_checks(const CollectiveCall& call, Started* started) const {
    const bool sums = is_sum(call.kind);
    const DType dtype = sums ? sum_check_dtype(call.dtype) : DType::kUint8;
    const auto check_elems = [&](std::int64_t elems) {
      return sums ? sum_check_elems(call.dtype, elems, world_size()) : static_cast<std::int64_t>(sizeof(std::uint64_t));
    };
    const auto make_room = [&](const Blocks& blocks, std::vector<std::uint64_t>* checks) {
      std::size_t bytes = 0;
      (void)for_each_block(call, blocks, [&](int, const std::byte*, std::int64_t elems) {
        bytes += static_cast<std::size_t>(check_elems(elems)) * dtype_bytes(dtype);
        return Status();
      });
      checks->resize((bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
    };
    const Blocks sent = sent_blocks(call, rank(), world_size());
    make_room(sent, &started->sent);
    make_room(received_blocks(call, rank(), world_size()), &started->received);

    auto* to = reinterpret_cast<std::byte*>(started->sent.data());
    (void)for_each_block(call, sent, [&](int, const std::byte* data, std::int64_t elems) {
      const auto value_bytes = static_cast<std::size_t>(elems) * dtype_bytes(call.dtype);
      if (sums) {
        write_sum_checks(data, call.dtype, elems, world_size(), to);
      } else {
        const std::uint64_t hash = checksum_64({data, value_bytes});
        std::copy_n(reinterpret_cast<const std::byte*>(&hash), sizeof(hash), to);
      }
      to += static_cast<std::size_t>(check_elems(elems)) * dtype_bytes(dtype);
      return Status();
    });
    started->counts.clear();
    for (std::size_t peer = 0; sums && peer < call.counts.size(); ++peer) {
      started->counts.push_back(check_elems(call.counts[peer]));
    }
    return {.kind = call.kind,
            .dtype = dtype,
            .root = call.root,
            .sent = started->sent.data(),
            .received = started->received.data(),
            .elems = started->counts.empty() ? check_elems(call.elems) : 0,
            .counts = started->counts};
  }

  // Both parts have ended.
  void compare(Started* started) {
    const CollectiveCall& call = started->call;
    const auto* expected = reinterpret_cast<const std::byte*>(started->received.data());
    const auto compare_block = [&](int peer, const std::byte* data, std::int64_t elems) -> Status {
      if (is_sum(call.kind)) {
        const Status status = compare_with_sum_checks(data, call.dtype, elems, expected, world_size());
        return status.ok() ? status : damaged_sum(status, *started);
      }
      std::uint64_t hash;
      std::copy_n(expected, sizeof(hash), reinterpret_cast<std::byte*>(&hash));
      expected += sizeof(hash);
      const auto bytes = static_cast<std::size_t>(elems) * dtype_bytes(call.dtype);
      return checksum_64({data, bytes}) == hash ? Status() : damaged(peer, what(*started));
    };
    started->status = for_each_block(call, received_blocks(call, rank(), world_size()), compare_block);
    if (!started->status.ok()) *failure_ = started->status;
  }

  std::string what(const Started& started) const {
    return describe_place(started.work, subgroup_) + ", " + describe(started.call);
  }

  Status damaged(int peer, const std::string& what) const {
    return make_error(StatusCode::kCorruptData, "%s, checked: %s: what rank %d sent was damaged or cut on its way",
                      name().c_str(), what.c_str(), rank_in_whole(peer));
  }

  Status damaged_sum(const Status& found, const Started& started) const {
    std::string ranks;
    for (int peer = 0; peer < world_size(); ++peer) {
      ranks += (peer == 0 ? "" : ", ") + std::to_string(rank_in_whole(peer));
    }
    return make_error(StatusCode::kCorruptData,
                      "%s, checked: %s: damaged on its way, what one of ranks %s sent or the result: %s",
                      name().c_str(), what(started).c_str(), ranks.c_str(), found.message().c_str());
  }

  int rank_in_whole(int rank) const { return subgroup_.empty() ? rank : subgroup_[static_cast<std::size_t>(rank)]; }

  nanoseconds rest_of(nanoseconds timeout, std::int64_t begin_ns) const {
    return std::max(nanoseconds(0), timeout - nanoseconds(clock_->now_ns() - begin_ns));
  }

  Status check_started(WorkId work) const {
    if (work < next_work_) return {};
    return make_error(StatusCode::kInvalidArgument, "%s: rank %d asks for collective %llu but has started only %llu",
                      name().c_str(), rank(), static_cast<unsigned long long>(work),
                      static_cast<unsigned long long>(next_work_));
  }

  std::unique_ptr<Communicator> owned_;  // of a sub-group
  Communicator* inner_;
  const Clock* clock_;
  std::vector<int> subgroup_;  // ranks of the whole; empty: all of them
  WorkId next_work_ = 0;
  std::shared_ptr<Status> failure_ = std::make_shared<Status>();  // of the whole and all its sub-groups
  WorkRing<Started> started_;
};

}  // namespace

std::unique_ptr<Communicator> make_checking_communicator(Communicator* inner, const Clock* clock) {
  return std::make_unique<CheckingCommunicator>(inner, clock == nullptr ? steady_clock() : clock);
}

}  // namespace cortado

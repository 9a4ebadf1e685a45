// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "collective/collective_call.h"
#include "collective/work_ring.h"
#include "core/check.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// What a rank says of a call, as bytes on the wire between ranks of one build.
struct Signature {
  std::uint64_t sizes_hash = 0;  // of all blocks; all ranks the same
  std::uint64_t balance = 0;     // all_to_all: what this rank sends less what it expects; over all ranks 0
  std::int64_t elems = 0;        // in all
  std::int32_t root = 0;
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t varying = 0;
  std::uint8_t zero = 0;

  bool agrees(const Signature& other) const {
    return sizes_hash == other.sizes_hash && root == other.root && kind == other.kind && dtype == other.dtype;
  }

  std::string text() const {
    const CollectiveCall call{
        .kind = static_cast<CollectiveKind>(kind), .dtype = static_cast<DType>(dtype), .root = root, .elems = elems};
    return describe(call) + (varying != 0 ? " in varying blocks" : "");
  }
};
static_assert(std::has_unique_object_representations_v<Signature>, "travels as bytes");

template <typename... Numbers>
std::uint64_t hash_of(Numbers... numbers) {
  const std::array<std::int64_t, sizeof...(numbers)> list{static_cast<std::int64_t>(numbers)...};
  return fnv1a_64({reinterpret_cast<const char*>(list.data()), sizeof(list)});
}

Signature sign(const CollectiveCall& call, int rank, int world_size) {
  Signature signature{.root = is_rooted(call.kind) ? call.root : 0,
                      .kind = static_cast<std::uint8_t>(call.kind),
                      .dtype = static_cast<std::uint8_t>(call.dtype),
                      .varying = !call.counts.empty()};
  signature.elems = call.counts.empty() ? call.elems : sent_elems(call, rank, world_size);
  for (int peer = 0; peer < world_size; ++peer) {
    if (call.kind == CollectiveKind::kAllToAll) {
      signature.balance += hash_of(rank, peer, block_elems(call, peer));
      signature.balance -= hash_of(peer, rank, received_block_elems(call, peer));
    } else {
      signature.sizes_hash = hash_of(signature.sizes_hash, block_elems(call, peer));
    }
  }
  return signature;
}

class VerifyingCommunicator final : public Communicator {
 public:
  explicit VerifyingCommunicator(Communicator* inner) : inner_(inner) {}
  // A sub-group: the ranks of it, in the whole.
  VerifyingCommunicator(std::unique_ptr<Communicator> inner, std::vector<int> ranks)
      : owned_(std::move(inner)), inner_(owned_.get()), subgroup_(std::move(ranks)) {}
  ~VerifyingCommunicator() override {
    bool in_flight = false;
    started_.for_each([&](const Started& started) {
      if (!started.are_signatures_under_way) return;
      const Result<bool> ended = inner_->test(started.signatures);
      in_flight = in_flight || !ended.ok() || !ended.value();
    });
    if (in_flight && !inner_->abandon("its communicator was destroyed within a collective")) {
      keep_for_ever(std::move(started_));
    }
  }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return "verifying(" + inner_->name() + ")"; }

  // The signatures travel first: whatever a mismatch does to the transport, they have arrived.
  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(failure_);
    CORTADO_RETURN_IF_ERROR(check_call(call, rank(), world_size()));
    Started& started = started_.take(next_work_, [this](const Started& before) { return has_ended(before); });
    started.own = sign(call, rank(), world_size());
    started.all.resize(static_cast<std::size_t>(world_size()));
    const Result<WorkId> of_signatures = inner_->start_all_gather(std::as_bytes(std::span(&started.own, 1)),
                                                                  std::as_writable_bytes(std::span(started.all)));
    started.are_signatures_under_way = of_signatures.ok();
    CORTADO_RETURN_IF_ERROR(of_signatures.status());
    started.signatures = of_signatures.value();
    const WorkId work = next_work_++;
    const Result<WorkId> of_call = inner_->start(call);
    if (!of_call.ok()) return failure_ = of_call.status();  // the signatures are on their way
    started.call = of_call.value();
    return work;
  }

  Result<bool> test(WorkId work) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    while (verified_ <= work) {
      CORTADO_RETURN_IF_ERROR(failure_);
      CORTADO_ASSIGN_OR_RETURN(const bool arrived, inner_->test(started_.find(verified_)->signatures));
      if (!arrived) return false;
      CORTADO_RETURN_IF_ERROR(verify());
    }
    const Started* started = started_.find(work);
    return started != nullptr ? inner_->test(started->call) : true;
  }

  Status wait(WorkId work, nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    const auto begin = steady_clock::now();
    const auto left = [&] { return std::max(nanoseconds(0), timeout - nanoseconds(steady_clock::now() - begin)); };
    while (verified_ <= work) {
      CORTADO_RETURN_IF_ERROR(failure_);
      CORTADO_RETURN_IF_ERROR(inner_->wait(started_.find(verified_)->signatures, left()));
      CORTADO_RETURN_IF_ERROR(verify());
    }
    const Started* started = started_.find(work);
    return started != nullptr ? inner_->wait(started->call, left()) : Status();
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received, nanoseconds timeout) override {
    return inner_->all_gather(sent, received, timeout);
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
    std::vector<int> whole;
    for (const int rank : ranks) whole.push_back(rank_in_whole(rank));
    return std::unique_ptr<Communicator>(std::make_unique<VerifyingCommunicator>(std::move(inner), std::move(whole)));
  }

  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 private:
  struct Started {
    WorkId work = 0, signatures = 0, call = 0;  // the last two are the inner communicator's
    bool are_signatures_under_way = false;      // or have come
    Signature own;
    std::vector<Signature> all;
  };

  bool has_ended(const Started& started) {
    if (started.work >= verified_) return false;
    const Result<bool> ended = inner_->test(started.call);
    return ended.ok() && ended.value();
  }

  // Of collective number verified_, whose signatures have arrived.
  Status verify() {
    const Started& started = *started_.find(verified_);
    std::uint64_t balance = 0;
    for (int peer = 0; peer < world_size(); ++peer) {
      const Signature& theirs = started.all[static_cast<std::size_t>(peer)];
      balance += theirs.balance;
      if (theirs.agrees(started.all[0])) continue;
      return failure_ = make_error(StatusCode::kMismatch, "%s: rank %d started %s, rank %d started %s",
                                   describe_place(started.work, subgroup_).c_str(), rank_in_whole(0),
                                   started.all[0].text().c_str(), rank_in_whole(peer), theirs.text().c_str());
    }
    if (balance != 0) {
      std::string texts;
      for (int peer = 0; peer < world_size(); ++peer) {
        texts += (peer == 0 ? "rank " : ", rank ") + std::to_string(rank_in_whole(peer)) + " " +
                 started.all[static_cast<std::size_t>(peer)].text();
      }
      return failure_ = make_error(StatusCode::kMismatch, "%s: the ranks do not send what others expect: %s",
                                   describe_place(started.work, subgroup_).c_str(), texts.c_str());
    }
    ++verified_;
    return Status();
  }

  int rank_in_whole(int rank) const { return subgroup_.empty() ? rank : subgroup_[static_cast<std::size_t>(rank)]; }

  Status check_started(WorkId work) const {
    if (work < next_work_) return Status();
    return make_error(StatusCode::kInvalidArgument, "%s: rank %d asks for collective %llu but has started only %llu",
                      name().c_str(), rank(), static_cast<unsigned long long>(work),
                      static_cast<unsigned long long>(next_work_));
  }

  std::unique_ptr<Communicator> owned_;  // of a sub-group
  Communicator* inner_;
  std::vector<int> subgroup_;  // ranks of the whole; empty: all of them
  WorkId next_work_ = 0;
  WorkId verified_ = 0;  // collectives below it are
  Status failure_;
  WorkRing<Started> started_;
};

}  // namespace

std::unique_ptr<Communicator> make_verifying_communicator(Communicator* inner) {
  return std::make_unique<VerifyingCommunicator>(inner);
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "collective/rendezvous.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

Status check_buffer(const void* data, std::int64_t elems, DType dtype) {
  if (dtype_bytes(dtype) == 0) {
    return make_error(StatusCode::kInvalidArgument, "all_reduce: unknown dtype %d", static_cast<int>(dtype));
  }
  if (elems < 0 || (elems > 0 && data == nullptr)) {
    return make_error(StatusCode::kInvalidArgument, "all_reduce: %lld elements at %p", static_cast<long long>(elems),
                      data);
  }
  return Status();
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Rendezvous* rendezvous, int rank) : rendezvous_(rendezvous), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return rendezvous_->world_size(); }
  std::string name() const override { return "local"; }

  Result<WorkId> start_all_reduce(void* data, std::int64_t elems, DType dtype) override {
    CORTADO_RETURN_IF_ERROR(check_buffer(data, elems, dtype));
    return rendezvous_->post(rank_, {Contribution::Kind::kAllReduce, dtype, elems, data, data});
  }

  Result<WorkId> start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received) override {
    if (received.size() != sent.size() * static_cast<std::size_t>(world_size())) {
      return make_error(StatusCode::kInvalidArgument, "all_gather: %zu bytes to receive, expected %d ranks x %zu",
                        received.size(), world_size(), sent.size());
    }
    const auto elems = static_cast<std::int64_t>(sent.size());
    return rendezvous_->post(rank_,
                             {Contribution::Kind::kAllGather, DType::kUint8, elems, sent.data(), received.data()});
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

  bool abandon(const std::string& why) override {
    rendezvous_->fail(make_error(StatusCode::kPeerFailed, "rank %d has left the group: %s", rank_, why.c_str()));
    return true;
  }

 private:
  Rendezvous* rendezvous_;
  int rank_;
};

}  // namespace

struct LocalGroup::State {
  explicit State(int world_size) : rendezvous(world_size) {
    communicators.reserve(static_cast<std::size_t>(world_size));
    for (int rank = 0; rank < world_size; ++rank) communicators.emplace_back(&rendezvous, rank);
  }

  Rendezvous rendezvous;
  std::vector<LocalCommunicator> communicators;
};

LocalGroup::LocalGroup(int world_size) : state_(std::make_unique<State>(world_size)) {}

LocalGroup::~LocalGroup() = default;

Communicator* LocalGroup::communicator(int rank) {
  CORTADO_CHECK(rank >= 0 && rank < state_->rendezvous.world_size(), "rank %d", rank);
  return &state_->communicators[static_cast<std::size_t>(rank)];
}

void LocalGroup::abandon(int rank, const std::string& why) { communicator(rank)->abandon(why); }

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <array>

#include "collective/collective_call.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

// Where a function leaves its message. Zeroed first and cut at the end, whatever the function did.
class ErrorText {
 public:
  char* data() { return text_.data(); }
  std::size_t bytes() const { return text_.size(); }

  Status to_status(int code, const std::string& context) {
    text_.back() = '\0';
    const std::string message =
        text_[0] != '\0' ? text_.data() : "error " + std::to_string(code) + " without a message";
    const bool timed_out = code == CommunicatorCallbacks::kTimedOut;
    return Status(timed_out ? StatusCode::kTimeout : StatusCode::kPeerFailed, message).with_context(context);
  }

 private:
  std::array<char, 1024> text_{};
};

class CallbackCommunicator final : public Communicator {
 public:
  explicit CallbackCommunicator(const CommunicatorCallbacks& callbacks)
      : callbacks_(callbacks), name_(callbacks.name) {}

  int rank() const override { return callbacks_.rank; }
  int world_size() const override { return callbacks_.world_size; }
  std::string name() const override { return name_ == "callback" ? name_ : "callback(" + name_ + ")"; }

  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(check_call(call, rank(), world_size()));
    const WorkId work = next_work_++;
    recent_[work % recent_.size()] = {work, call.kind, sent_elems(call, rank(), world_size()), call.dtype};
    ErrorText error;
    const int code = callbacks_.start(callbacks_.context, &call, work, error.data(), error.bytes());
    if (code != 0) return error.to_status(code, "start of " + describe(work));
    return work;
  }

  Result<bool> test(WorkId work) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    ErrorText error;
    int done = 0;
    const int code = callbacks_.test(callbacks_.context, work, &done, error.data(), error.bytes());
    if (code != 0) return error.to_status(code, "test of " + describe(work));
    return done != 0;
  }

  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(check_started(work));
    ErrorText error;
    const int code = callbacks_.wait(callbacks_.context, work, timeout.count(), error.data(), error.bytes());
    return code == 0 ? Status() : error.to_status(code, "wait for " + describe(work));
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(check_sizes(sent, received));
    ErrorText error;
    const int code = callbacks_.all_gather(callbacks_.context, sent.data(), static_cast<std::int64_t>(sent.size()),
                                           received.data(), timeout.count(), error.data(), error.bytes());
    if (code == 0) return Status();
    return error.to_status(code, "all_gather uint8 " + std::to_string(sent.size()) + " on " + name());
  }

  Status peer_failure() override {
    if (callbacks_.check_peers == nullptr) return {};
    ErrorText error;
    const int code = callbacks_.check_peers(callbacks_.context, error.data(), error.bytes());
    return code == 0 ? Status() : error.to_status(code, name());
  }

  bool abandon(const std::string& why) override {
    if (callbacks_.abandon != nullptr) callbacks_.abandon(callbacks_.context, why.c_str());
    return false;
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_RETURN_IF_ERROR(index_in_subgroup(ranks, rank(), world_size()).status());
    if (callbacks_.subgroup == nullptr) return Communicator::subgroup(ranks);
    CommunicatorCallbacks table;
    ErrorText error;
    const int code = callbacks_.subgroup(callbacks_.context, ranks.data(), static_cast<std::int64_t>(ranks.size()),
                                         &table, error.data(), error.bytes());
    if (code != 0) return error.to_status(code, "sub-group of " + name());
    return make_callback_communicator(table);
  }

 private:
  struct Recent {
    WorkId work = 0;
    CollectiveKind kind = CollectiveKind::kAllReduce;
    std::int64_t elems = 0;  // that this rank sends
    DType dtype = DType::kFloat32;
  };

  Status check_sizes(std::span<const std::byte> sent, std::span<std::byte> received) const {
    if (received.size() == sent.size() * static_cast<std::size_t>(world_size())) return Status();
    return make_error(StatusCode::kInvalidArgument, "%s: all_gather: %zu bytes to receive, expected %d ranks x %zu",
                      name().c_str(), received.size(), world_size(), sent.size());
  }

  Status check_started(WorkId work) const {
    if (work < next_work_) return Status();
    return make_error(StatusCode::kInvalidArgument, "%s: rank %d asks for collective %llu but has started only %llu",
                      name().c_str(), rank(), static_cast<unsigned long long>(work),
                      static_cast<unsigned long long>(next_work_));
  }

  // "all_reduce bf16 1024 (collective 3) on callback(gloo)"; without the first three if it was started long ago.
  std::string describe(WorkId work) const {
    const Recent& recent = recent_[work % recent_.size()];
    const std::string number = "collective " + std::to_string(work);
    if (recent.work != work) return number + " on " + name();
    return std::string(collective_kind_name(recent.kind)) + " " + std::string(dtype_name(recent.dtype)) + " " +
           std::to_string(recent.elems) + " (" + number + ") on " + name();
  }

  CommunicatorCallbacks callbacks_;
  std::string name_;
  WorkId next_work_ = 0;
  std::array<Recent, 256> recent_;  // for messages only
};

Status validate(const CommunicatorCallbacks& callbacks) {
  const auto missing = [](const char* what) {
    return make_error(StatusCode::kInvalidArgument, "communicator callbacks: %s is null", what);
  };
  if (callbacks.name == nullptr) return missing("name");
  if (callbacks.start == nullptr) return missing("start");
  if (callbacks.test == nullptr) return missing("test");
  if (callbacks.wait == nullptr) return missing("wait");
  if (callbacks.all_gather == nullptr) return missing("all_gather");
  if (callbacks.world_size < 1 || callbacks.rank < 0 || callbacks.rank >= callbacks.world_size) {
    return make_error(StatusCode::kInvalidArgument, "communicator callbacks: rank %d of world_size %d", callbacks.rank,
                      callbacks.world_size);
  }
  return Status();
}

}  // namespace

Result<std::unique_ptr<Communicator>> make_callback_communicator(const CommunicatorCallbacks& callbacks) {
  CORTADO_RETURN_IF_ERROR(validate(callbacks));
  return std::unique_ptr<Communicator>(std::make_unique<CallbackCommunicator>(callbacks));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "collective/collective_call.h"
#include "collective/virtual_clock.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

using std::chrono::nanoseconds;

// The first mantissa bit (uint8: the top bit) of the middle element: the value changes by a quarter of itself or more
// and stays finite, so that a test sees it in the sum.
void flip_bit(void* data, std::int64_t elems, DType dtype) {
  if (elems <= 0) return;
  auto* bytes = static_cast<unsigned char*>(data) + static_cast<std::size_t>(elems / 2) * dtype_bytes(dtype);
  switch (dtype) {
    case DType::kFloat32:
      bytes[2] ^= 0x40;
      return;
    case DType::kFloat16:
      bytes[1] ^= 0x02;
      return;
    case DType::kBFloat16:
      bytes[0] ^= 0x40;
      return;
    case DType::kUint8:
      bytes[0] ^= 0x80;
      return;
  }
}

// What a communicator and its sub-groups have in common.
struct FaultPlan {
  std::vector<Fault> faults;
  VirtualClock* virtual_clock = nullptr;
  std::int64_t starts = 0;
  bool dropped = false;

  nanoseconds now() const { return nanoseconds((virtual_clock == nullptr ? steady_clock() : virtual_clock)->now_ns()); }

  void sleep(nanoseconds duration) const {
    virtual_clock == nullptr ? std::this_thread::sleep_for(duration) : virtual_clock->sleep(duration);
  }

  const Fault* find(std::int64_t index, Fault::Kind kind) const {
    for (const Fault& fault : faults) {
      if (fault.at == index && fault.kind == kind) return &fault;
    }
    return nullptr;
  }
};

// After a drop nothing of this rank reaches the others any more: a later collective that did would be taken by them for
// the dropped one.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(Communicator* inner, std::shared_ptr<FaultPlan> plan) : inner_(inner), plan_(std::move(plan)) {}
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<FaultPlan> plan)
      : owned_(std::move(inner)), inner_(owned_.get()), plan_(std::move(plan)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return "faulty(" + inner_->name() + ")"; }

  Result<WorkId> start(const CollectiveCall& call) override {
    const std::int64_t index = plan_->starts++;
    if (plan_->find(index, Fault::Kind::kError) != nullptr) {
      return make_error(StatusCode::kPeerFailed, "fault: %s %lld of rank %d refused",
                        std::string(collective_kind_name(call.kind)).c_str(), static_cast<long long>(index), rank());
    }
    if (plan_->find(index, Fault::Kind::kDrop) != nullptr) plan_->dropped = true;
    if (plan_->dropped) {
      if (!first_dropped_.has_value()) first_dropped_ = next_work_;
      return next_work_++;
    }

    Result<WorkId> work = start_damaged(call, index);
    if (!work.ok()) return work;
    next_work_ = work.value() + 1;
    if (const Fault* fault = plan_->find(index, Fault::Kind::kDelay); fault != nullptr) {
      delayed_.push_back({work.value(), plan_->now() + fault->delay});
    }
    return work;
  }

  Result<bool> test(WorkId work) override {
    if (is_dropped(work)) return false;
    Result<bool> done = inner_->test(work);
    if (!done.ok() || !done.value()) return done;
    return plan_->now() >= reported_at(work);
  }

  Status wait(WorkId work, nanoseconds timeout) override {
    const auto begin = plan_->now();
    if (is_dropped(work)) return sleep_out(timeout, "dropped");
    // The inner wait first: when a delay outlasts the timeout, the buffer is at rest before the caller gets it back.
    CORTADO_RETURN_IF_ERROR(inner_->wait(work, timeout));
    const auto remaining = reported_at(work) - plan_->now();
    const auto left = timeout - (plan_->now() - begin);
    if (remaining > left) return sleep_out(left, "delayed");
    plan_->sleep(remaining);
    return Status();
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received, nanoseconds timeout) override {
    if (plan_->dropped) return sleep_out(timeout, "dropped");
    return inner_->all_gather(sent, received, timeout);
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, inner_->subgroup(ranks));
    return std::unique_ptr<Communicator>(std::make_unique<FaultyCommunicator>(std::move(inner), plan_));
  }

  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 private:
  struct Delayed {
    WorkId work;
    nanoseconds until;
  };

  Result<WorkId> start_damaged(const CollectiveCall& call, std::int64_t index) {
    if (plan_->find(index, Fault::Kind::kCorrupt) != nullptr) return start_corrupted(call);
    if (plan_->find(index, Fault::Kind::kTruncate) != nullptr) return start_truncated(call);
    return inner_->start(call);
  }

  // In place where the caller gets the result in the same memory. Otherwise what is sent is the caller's and stays as
  // it is: only what travels is wrong.
  Result<WorkId> start_corrupted(CollectiveCall call) {
    if (!reads_sent(call, rank())) return inner_->start(call);
    const std::int64_t elems = sent_elems(call, rank(), world_size());
    if (call.sent == call.received && call.kind != CollectiveKind::kAllGather && call.kind != CollectiveKind::kGather) {
      flip_bit(call.received, elems, call.dtype);
      return inner_->start(call);
    }
    flip_bit(replace_sent(&call).data(), elems, call.dtype);
    return inner_->start(call);
  }

  Result<WorkId> start_truncated(CollectiveCall call) {
    if (!reads_sent(call, rank())) return inner_->start(call);
    if (call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduce) {
      call.elems /= 2;
    } else {
      std::vector<std::byte>& changed = replace_sent(&call);
      std::fill(changed.begin() + static_cast<std::ptrdiff_t>(changed.size() / 2), changed.end(), std::byte{0});
    }
    return inner_->start(call);
  }

  // A copy of what is sent, to be sent instead.
  std::vector<std::byte>& replace_sent(CollectiveCall* call) {
    const auto* sent = static_cast<const std::byte*>(call->sent);
    const auto elems = static_cast<std::size_t>(sent_elems(*call, rank(), world_size()));
    std::vector<std::byte>& copy = damaged_.emplace_back(sent, sent + elems * dtype_bytes(call->dtype));
    call->sent = copy.data();
    return copy;
  }

  bool is_dropped(WorkId work) const { return first_dropped_.has_value() && work >= *first_dropped_; }

  nanoseconds reported_at(WorkId work) const {
    for (const Delayed& delayed : delayed_) {
      if (delayed.work == work) return delayed.until;
    }
    return nanoseconds(0);  // long past
  }

  Status sleep_out(nanoseconds timeout, const char* what) const {
    plan_->sleep(timeout);
    return make_error(StatusCode::kTimeout, "fault: a collective of rank %d was %s", rank(), what);
  }

  std::unique_ptr<Communicator> owned_;  // of a sub-group
  Communicator* inner_;
  std::shared_ptr<FaultPlan> plan_;
  std::vector<Delayed> delayed_;
  std::deque<std::vector<std::byte>> damaged_;  // their memory stays where it is
  WorkId next_work_ = 0;
  std::optional<WorkId> first_dropped_;
};

}  // namespace

std::unique_ptr<Communicator> make_faulty_communicator(Communicator* inner, std::vector<Fault> faults,
                                                       VirtualClock* clock) {
  auto plan = std::make_shared<FaultPlan>(FaultPlan{.faults = std::move(faults), .virtual_clock = clock});
  return std::make_unique<FaultyCommunicator>(inner, std::move(plan));
}

}  // namespace cortado

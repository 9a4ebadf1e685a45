// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/collective_call.h"
#include "core/check.h"
#include "cortado/nccl.h"

namespace cortado {
namespace {

using std::chrono::steady_clock;

bool is_error(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

Status nccl_status(ncclResult_t result, const std::string& context) {
  if (!is_error(result)) return Status();
  return make_error(StatusCode::kPeerFailed, "%s: %s", context.c_str(), ncclGetErrorString(result));
}

Status cuda_status(cudaError_t error, const std::string& context) {
  if (error == cudaSuccess) return Status();
  return make_error(StatusCode::kInternal, "%s: %s", context.c_str(), cudaGetErrorString(error));
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kUint8:
      return ncclUint8;
  }
  return ncclUint8;
}

// Memory of the GPU for as long as this lives.
struct DeviceBytes {
  void* data = nullptr;
  ~DeviceBytes() { cudaFree(data); }
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ncclComm_t comm, cudaStream_t stream) : comm_(comm), stream_(stream), ring_(kInitialSlots) {
    ncclCommUserRank(comm_, &rank_);
    ncclCommCount(comm_, &world_size_);
  }

  ~NcclCommunicator() override {
    for (const Work& work : ring_) {
      if (work.ended != nullptr) cudaEventDestroy(work.ended);
    }
    if (comm_ == nullptr) return;
    failure_.ok() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string name() const override { return "nccl"; }

  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(check_call(call, rank_, world_size_));
    CORTADO_RETURN_IF_ERROR(failure_);
    Work& work = slot_for(next_work_);
    work.id = next_work_;
    work.in_flight = true;
    // Texts are made of errors only: they allocate.
    if (work.ended == nullptr) {
      const cudaError_t made = cudaEventCreateWithFlags(&work.ended, cudaEventDisableTiming);
      if (made != cudaSuccess) return fail(cuda_status(made, start_context(call)));
    }
    const ncclResult_t queued = enqueue(call);
    if (is_error(queued)) return fail(nccl_status(queued, start_context(call)));
    const cudaError_t noted = cudaEventRecord(work.ended, stream_);
    if (noted != cudaSuccess) return fail(cuda_status(noted, start_context(call)));
    return next_work_++;
  }

  Result<bool> test(WorkId id) override {
    CORTADO_RETURN_IF_ERROR(check_started(id));
    Work& work = ring_[id % ring_.size()];
    if (work.id != id || !work.in_flight) return true;
    CORTADO_RETURN_IF_ERROR(failure_);
    const cudaError_t state = cudaEventQuery(work.ended);
    if (state == cudaErrorNotReady) {
      ncclResult_t report = ncclSuccess;
      ncclCommGetAsyncError(comm_, &report);
      if (is_error(report)) return fail(nccl_status(report, describe_place(id, {}) + " on nccl"));
      return false;
    }
    if (state != cudaSuccess) return fail(cuda_status(state, describe_place(id, {}) + " on nccl"));
    work.in_flight = false;
    return true;
  }

  Status wait(WorkId id, std::chrono::nanoseconds timeout) override {
    const auto begin = steady_clock::now();
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool done, test(id));
      if (done) return Status();
      const auto waited = steady_clock::now() - begin;
      if (waited >= timeout) {
        return fail(make_error(StatusCode::kTimeout, "%s on nccl: rank %d waited %.3g s",
                               describe_place(id, {}).c_str(), rank_, std::chrono::duration<double>(timeout).count()));
      }
      if (waited > std::chrono::microseconds(100)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    DeviceBytes own, everything;
    const std::string context = "all_gather of host memory on nccl";
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMalloc(&own.data, sent.size()), context));
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMalloc(&everything.data, received.size()), context));
    CORTADO_RETURN_IF_ERROR(
        cuda_status(cudaMemcpyAsync(own.data, sent.data(), sent.size(), cudaMemcpyHostToDevice, stream_), context));
    CORTADO_ASSIGN_OR_RETURN(const WorkId work,
                             start_all_gather({static_cast<std::byte*>(own.data), sent.size()},
                                              {static_cast<std::byte*>(everything.data), received.size()}));
    if (Status status = wait(work, timeout); !status.ok()) {
      abandon(status.message());  // or freeing the memory would wait for the kernel
      return status;
    }
    return cuda_status(cudaMemcpy(received.data(), everything.data, received.size(), cudaMemcpyDeviceToHost), context);
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(const int own, index_in_subgroup(ranks, rank_, world_size_));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 1)
    ncclComm_t made = nullptr;
    const int color = *std::min_element(ranks.begin(), ranks.end());
    CORTADO_RETURN_IF_ERROR(nccl_status(ncclCommSplit(comm_, color, own, &made, nullptr), "sub-group of nccl"));
    return std::unique_ptr<Communicator>(std::make_unique<NcclCommunicator>(made, stream_));
#else
    (void)own;
    return Communicator::subgroup(ranks);
#endif
  }

  Status peer_failure() override {
    CORTADO_RETURN_IF_ERROR(failure_);
    ncclResult_t report = ncclSuccess;
    ncclCommGetAsyncError(comm_, &report);
    return fail(nccl_status(report, "nccl"));
  }

  bool abandon(const std::string& why) override {
    (void)fail(make_error(StatusCode::kPeerFailed, "rank %d has left the group: %s", rank_, why.c_str()));
    if (comm_ != nullptr) ncclCommAbort(std::exchange(comm_, nullptr));
    cudaStreamSynchronize(stream_);
    return true;
  }

 private:
  static constexpr std::size_t kInitialSlots = 64;

  struct Work {
    WorkId id = 0;
    bool in_flight = false;
    cudaEvent_t ended = nullptr;
  };

  // The first failure stays.
  Status fail(Status status) {
    if (!status.ok() && failure_.ok()) failure_ = status;
    return status;
  }

  Status check_started(WorkId id) const {
    if (id < next_work_) return Status();
    return make_error(StatusCode::kInvalidArgument, "nccl: rank %d asks for collective %llu but has started only %llu",
                      rank_, static_cast<unsigned long long>(id), static_cast<unsigned long long>(next_work_));
  }

  std::string start_context(const CollectiveCall& call) const {
    return "start of " + describe_place(next_work_, {}) + " (" + describe(call) + ") on nccl";
  }

  // The slot has the next collective with the same place only when this one has ended.
  Work& slot_for(WorkId id) {
    Work& work = ring_[id % ring_.size()];
    if (!work.in_flight || cudaEventQuery(work.ended) == cudaSuccess) return work;
    std::vector<Work> bigger(2 * ring_.size());
    for (const Work& old : ring_) bigger[old.id % bigger.size()] = old;
    ring_ = std::move(bigger);
    return ring_[id % ring_.size()];
  }

  ncclResult_t enqueue(const CollectiveCall& call);
  ncclResult_t enqueue_blocks(const CollectiveCall& call);

  ncclComm_t comm_;
  const cudaStream_t stream_;
  int rank_ = 0, world_size_ = 1;
  WorkId next_work_ = 0;
  Status failure_;
  std::vector<Work> ring_;  // collective k lies at k modulo the size
};

ncclResult_t NcclCommunicator::enqueue(const CollectiveCall& call) {
  const ncclDataType_t type = nccl_type(call.dtype);
  const auto elems = static_cast<std::size_t>(call.elems);
  const bool equal = call.counts.empty();
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return ncclAllReduce(call.sent, call.received, elems, type, ncclSum, comm_, stream_);
    case CollectiveKind::kReduceScatter:
      if (equal) return ncclReduceScatter(call.sent, call.received, elems, type, ncclSum, comm_, stream_);
      return enqueue_blocks(call);
    case CollectiveKind::kAllGather:
      if (equal) return ncclAllGather(call.sent, call.received, elems, type, comm_, stream_);
      return enqueue_blocks(call);
    case CollectiveKind::kBroadcast: {
      void* received = rank_ == call.root ? const_cast<void*>(call.sent) : call.received;
      return ncclBroadcast(call.sent, received, elems, type, call.root, comm_, stream_);
    }
    case CollectiveKind::kReduce:
      return ncclReduce(call.sent, call.received, elems, type, ncclSum, call.root, comm_, stream_);
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kGather:
      return enqueue_blocks(call);
  }
  return ncclInvalidArgument;
}

// What NCCL has no collective for, as one group of smaller ones: a reduction or broadcast for each block, or a message
// for each pair of ranks.
ncclResult_t NcclCommunicator::enqueue_blocks(const CollectiveCall& call) {
  const ncclDataType_t type = nccl_type(call.dtype);
  const auto bytes_each = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const auto* sent = static_cast<const std::byte*>(call.sent);
  auto* received = static_cast<std::byte*>(call.received);
  const auto own = static_cast<std::size_t>(block_elems(call, rank_));
  ncclResult_t result = ncclGroupStart();
  for (int peer = 0; peer < world_size_ && result == ncclSuccess; ++peer) {
    const auto to = static_cast<std::size_t>(block_elems(call, peer));
    const auto from = static_cast<std::size_t>(received_block_elems(call, peer));
    switch (call.kind) {
      case CollectiveKind::kReduceScatter:
        result = ncclReduce(sent, received, to, type, ncclSum, peer, comm_, stream_);
        sent += static_cast<std::int64_t>(to) * bytes_each;
        break;
      case CollectiveKind::kAllGather:
        result = ncclBroadcast(peer == rank_ ? call.sent : received, received, to, type, peer, comm_, stream_);
        received += static_cast<std::int64_t>(to) * bytes_each;
        break;
      case CollectiveKind::kGather:
        if (peer == call.root) result = ncclSend(sent, own, type, peer, comm_, stream_);
        if (rank_ == call.root && result == ncclSuccess) {
          result = ncclRecv(received, to, type, peer, comm_, stream_);
          received += static_cast<std::int64_t>(to) * bytes_each;
        }
        break;
      default:  // all_to_all
        result = ncclSend(sent, to, type, peer, comm_, stream_);
        if (result == ncclSuccess) result = ncclRecv(received, from, type, peer, comm_, stream_);
        sent += static_cast<std::int64_t>(to) * bytes_each;
        received += static_cast<std::int64_t>(from) * bytes_each;
    }
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

}  // namespace

Result<std::unique_ptr<Communicator>> make_nccl_communicator(void* nccl_comm, void* cuda_stream) {
  if (nccl_comm == nullptr) return make_error(StatusCode::kInvalidArgument, "nccl: the communicator is null");
  return std::unique_ptr<Communicator>(
      std::make_unique<NcclCommunicator>(static_cast<ncclComm_t>(nccl_comm), static_cast<cudaStream_t>(cuda_stream)));
}

}  // namespace cortado

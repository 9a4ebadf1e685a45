// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "collective/collective_call.h"
#include "collective/mpi_job.h"
#include "core/check.h"
#include "core/keep_for_ever.h"
#include "cortado/mpi.h"

namespace cortado {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kInitialSlots = 64;

// Blocks as MPI wants them. Their memory is MPI's until the collective has ended.
struct MpiBlocks {
  std::vector<int> counts, offsets;

  // `elems` of each of `world_size` ranks, one after the other.
  template <typename Elems>
  void set(int world_size, Elems elems) {
    counts.resize(static_cast<std::size_t>(world_size));
    offsets.resize(counts.size());
    int offset = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      counts[static_cast<std::size_t>(rank)] = static_cast<int>(elems(rank));
      offsets[static_cast<std::size_t>(rank)] = offset;
      offset += counts[static_cast<std::size_t>(rank)];
    }
  }
};

// A collective that has been started.
struct MpiWork {
  WorkId id = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  CollectiveCall call;
  MpiBlocks sent, received;
};

class MpiCommunicator final : public Communicator {
 public:
  // Takes `comm`. `names`: the ranks of a sub-group by their number in the whole, otherwise empty.
  MpiCommunicator(MPI_Comm comm, std::shared_ptr<MpiJob> job, std::vector<int> names)
      : comm_(comm), job_(std::move(job)), names_(std::move(names)), ring_(kInitialSlots) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &world_size_);
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    if (job_->failure().ok()) {
      MPI_Comm_free(&comm_);
    } else {  // collectives, and what the job has announced, may be under way
      keep_for_ever(std::move(ring_));
      keep_for_ever(std::move(job_));
    }
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string name() const override { return "mpi"; }

  Result<WorkId> start(const CollectiveCall& call) override {
    CORTADO_RETURN_IF_ERROR(check_call(call, rank_, world_size_));
    CORTADO_RETURN_IF_ERROR(check_sizes(call));
    CORTADO_RETURN_IF_ERROR(job_->failure());
    MpiWork& work = slot_for(next_work_);
    work.id = next_work_;
    work.call = call;
    if (const int code = start_in_mpi(&work); code != MPI_SUCCESS) {
      return job_->fail(mpi_status(code, "start of " + describe_work(work)));
    }
    return next_work_++;
  }

  Result<bool> test(WorkId id) override {
    CORTADO_RETURN_IF_ERROR(check_started(id));
    CORTADO_ASSIGN_OR_RETURN(const bool done, has_ended(id));
    if (done) return true;
    CORTADO_RETURN_IF_ERROR(job_->failure());
    return false;
  }

  Status wait(WorkId id, std::chrono::nanoseconds timeout) override {
    CORTADO_RETURN_IF_ERROR(check_started(id));
    const auto begin = steady_clock::now();
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool done, has_ended(id));
      if (done) return Status();
      if (!job_->failure().ok()) return job_->fail(job_->failure());
      const auto waited = steady_clock::now() - begin;
      if (waited >= timeout) {
        return job_->fail(make_error(StatusCode::kTimeout, "%s: rank %d waited %.3g s",
                                     describe_work(ring_[id % ring_.size()]).c_str(), job_->rank(),
                                     std::chrono::duration<double>(timeout).count()));
      }
      // Ranks may share a core: who has waited a little lets others run.
      if (waited > std::chrono::microseconds(100)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    // In memory of its own, which stays MPI's if it fails.
    struct Copies {
      std::vector<std::byte> sent, received;
    };
    auto copies = std::make_unique<Copies>(Copies{{sent.begin(), sent.end()}, std::vector<std::byte>(received.size())});
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, start_all_gather(copies->sent, copies->received));
    if (Status status = wait(work, timeout); !status.ok()) {
      keep_for_ever(std::move(copies));
      return status;
    }
    std::copy(copies->received.begin(), copies->received.end(), received.begin());
    return Status();
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_RETURN_IF_ERROR(index_in_subgroup(ranks, rank_, world_size_).status());
    MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    int code = MPI_Comm_group(comm_, &all);
    if (code == MPI_SUCCESS) code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(comm_, some, 0, &comm);
    if (all != MPI_GROUP_NULL) MPI_Group_free(&all);
    if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
    CORTADO_RETURN_IF_ERROR(mpi_status(code, "sub-group of mpi"));
    std::vector<int> names;
    for (const int rank : ranks) names.push_back(names_.empty() ? rank : names_[static_cast<std::size_t>(rank)]);
    return std::unique_ptr<Communicator>(std::make_unique<MpiCommunicator>(comm, job_, std::move(names)));
  }

  Status peer_failure() override { return job_->failure(); }

  bool abandon(const std::string& why) override {
    (void)job_->fail(make_error(StatusCode::kPeerFailed, "rank %d has left the group: %s", job_->rank(), why.c_str()));
    return false;
  }

 private:
  Status check_sizes(const CollectiveCall& call) const {
    const std::int64_t most = std::max(sent_elems(call, rank_, world_size_), received_elems(call, rank_, world_size_));
    if (most <= std::numeric_limits<int>::max()) return Status();
    return make_error(StatusCode::kUnsupported, "mpi: %s: %lld elements, at most 2^31 - 1 are possible",
                      describe(call).c_str(), static_cast<long long>(most));
  }

  Status check_started(WorkId id) const {
    if (id < next_work_) return Status();
    return make_error(StatusCode::kInvalidArgument, "mpi: rank %d asks for collective %llu but has started only %llu",
                      rank_, static_cast<unsigned long long>(id), static_cast<unsigned long long>(next_work_));
  }

  std::string describe_work(const MpiWork& work) const {
    return describe_place(work.id, names_) + " (" + describe(work.call) + ") on mpi";
  }

  // The slot has the next collective with the same place only when this one has ended.
  Result<bool> has_ended(WorkId id) {
    MpiWork& work = ring_[id % ring_.size()];
    if (work.id != id || work.request == MPI_REQUEST_NULL) return true;
    int done = 0;
    if (const int code = MPI_Test(&work.request, &done, MPI_STATUS_IGNORE); code != MPI_SUCCESS) {
      return job_->fail(mpi_status(code, describe_work(work)));
    }
    return done != 0;
  }

  MpiWork& slot_for(WorkId id) {
    MpiWork& work = ring_[id % ring_.size()];
    if (work.request == MPI_REQUEST_NULL) return work;
    if (Result<bool> done = has_ended(work.id); done.ok() && done.value()) return work;
    // Moved, not copied: MPI may hold addresses of counts.
    std::vector<MpiWork> bigger(2 * ring_.size());
    for (MpiWork& old : ring_) bigger[old.id % bigger.size()] = std::move(old);
    ring_ = std::move(bigger);
    return ring_[id % ring_.size()];
  }

  int start_in_mpi(MpiWork* work);

  MPI_Comm comm_;
  std::shared_ptr<MpiJob> job_;
  const std::vector<int> names_;
  int rank_ = 0, world_size_ = 1;
  WorkId next_work_ = 0;
  std::vector<MpiWork> ring_;  // collective k lies at k modulo the size
};

MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return MPI_FLOAT;
    case DType::kFloat16:
    case DType::kBFloat16:
      return MPI_UINT16_T;
    case DType::kUint8:
      return MPI_UINT8_T;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op mpi_sum(DType dtype, const MpiJob& job) {
  if (dtype == DType::kFloat16) return job.sum_fp16();
  if (dtype == DType::kBFloat16) return job.sum_bf16();
  return MPI_SUM;
}

int MpiCommunicator::start_in_mpi(MpiWork* work) {
  const CollectiveCall& call = work->call;
  const MPI_Datatype type = mpi_type(call.dtype);
  const MPI_Op sum = mpi_sum(call.dtype, *job_);
  const int elems = static_cast<int>(call.elems);
  const bool varying = !call.counts.empty();
  if (varying) {
    work->sent.set(world_size_, [&](int rank) { return block_elems(call, rank); });
    work->received.set(world_size_, [&](int rank) { return received_block_elems(call, rank); });
  }
  const int* counts = work->sent.counts.data();
  const int* offsets = work->sent.offsets.data();
  const int own = varying ? work->sent.counts[static_cast<std::size_t>(rank_)] : elems;

  // MPI wants a word for "in place", not the same address twice.
  const bool gathers = call.kind == CollectiveKind::kAllGather || call.kind == CollectiveKind::kGather;
  const bool may_be_in_place =
      gathers || call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduce;
  std::int64_t place = 0;
  if (gathers) place = varying ? offsets[rank_] : std::int64_t{elems} * rank_;
  place *= static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const bool in_place = may_be_in_place && writes_received(call, rank_) && call.sent != nullptr &&
                        call.sent == static_cast<const std::byte*>(call.received) + place;
  const void* sent = in_place ? MPI_IN_PLACE : call.sent;

  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return MPI_Iallreduce(sent, call.received, elems, type, sum, comm_, &work->request);
    case CollectiveKind::kReduceScatter:
      if (!varying) return MPI_Ireduce_scatter_block(sent, call.received, elems, type, sum, comm_, &work->request);
      return MPI_Ireduce_scatter(sent, call.received, counts, type, sum, comm_, &work->request);
    case CollectiveKind::kAllGather:
      if (!varying) return MPI_Iallgather(sent, elems, type, call.received, elems, type, comm_, &work->request);
      return MPI_Iallgatherv(sent, own, type, call.received, counts, offsets, type, comm_, &work->request);
    case CollectiveKind::kAllToAll:
      if (!varying) return MPI_Ialltoall(sent, elems, type, call.received, elems, type, comm_, &work->request);
      return MPI_Ialltoallv(sent, counts, offsets, type, call.received, work->received.counts.data(),
                            work->received.offsets.data(), type, comm_, &work->request);
    case CollectiveKind::kBroadcast: {
      void* data = rank_ == call.root ? const_cast<void*>(call.sent) : call.received;
      return MPI_Ibcast(data, elems, type, call.root, comm_, &work->request);
    }
    case CollectiveKind::kReduce:
      return MPI_Ireduce(sent, call.received, elems, type, sum, call.root, comm_, &work->request);
    case CollectiveKind::kGather:
      if (!varying) return MPI_Igather(sent, elems, type, call.received, elems, type, call.root, comm_, &work->request);
      return MPI_Igatherv(sent, own, type, call.received, counts, offsets, type, call.root, comm_, &work->request);
  }
  return MPI_ERR_OTHER;
}

}  // namespace

Result<std::unique_ptr<Communicator>> make_mpi_communicator(int fortran_handle) {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    return make_error(StatusCode::kFailedPrecondition, "mpi: %s",
                      initialized == 0 ? "MPI_Init has not been called" : "MPI_Finalize has been called");
  }
  const MPI_Comm parent = MPI_Comm_f2c(fortran_handle);
  if (parent == MPI_COMM_NULL) {
    return make_error(StatusCode::kInvalidArgument, "mpi: handle %d is no communicator", fortran_handle);
  }
  CORTADO_ASSIGN_OR_RETURN(std::shared_ptr<MpiJob> job, MpiJob::create(parent));
  MPI_Comm comm = MPI_COMM_NULL;
  CORTADO_RETURN_IF_ERROR(mpi_status(MPI_Comm_dup(parent, &comm), "MPI_Comm_dup"));
  return std::unique_ptr<Communicator>(std::make_unique<MpiCommunicator>(comm, std::move(job), std::vector<int>()));
}

}  // namespace cortado

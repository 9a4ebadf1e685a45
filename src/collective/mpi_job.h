// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// MpiJob: what an MPI communicator and its sub-groups have in common: the operations on 16-bit floats, and a channel on
// which a rank that fails tells all others. MPI itself has no word for "I give up" short of ending the whole job.
#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// "MPI_ERR_TRUNCATE: message truncated" as kPeerFailed, `context` in front; ok for MPI_SUCCESS.
Status mpi_status(int code, const std::string& context);

class MpiJob {
 public:
  // Collective over `parent`.
  static Result<std::shared_ptr<MpiJob>> create(MPI_Comm parent);
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  int rank() const { return rank_; }
  MPI_Op sum_fp16() const { return sum_fp16_; }
  MPI_Op sum_bf16() const { return sum_bf16_; }

  // The first failure, of this rank or one it has heard of; looks for news, does not wait.
  const Status& failure();

  // The first failure is `why`, unless there was one already; the others are told. After a timeout, waits up to a
  // second for the others to tell of themselves, and names in the text those that don't. Returns the first failure.
  const Status& fail(const Status& why);

 private:
  explicit MpiJob(MPI_Comm control) : control_(control) {}
  void set_failure(const Status& why);
  std::string call_roll();

  const MPI_Comm control_;
  int rank_ = 0;
  int world_size_ = 1;
  MPI_Op sum_fp16_ = MPI_OP_NULL;
  MPI_Op sum_bf16_ = MPI_OP_NULL;
  Status failure_;
  bool roll_called_ = false;
  std::vector<bool> heard_;     // of each rank, that it has failed
  std::vector<char> outgoing_;  // what MPI still sends
};

}  // namespace cortado

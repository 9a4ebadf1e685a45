// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The communicator over NCCL, for gradients in GPU memory. In the library cortado_nccl, which is built where NCCL and
// the CUDA toolkit are found. This header needs neither nccl.h nor CUDA's.
#pragma once

#include <memory>

#include "cortado/communicator.h"
#include "cortado/status.h"

namespace cortado {

// Over `nccl_comm` (an ncclComm_t), which it takes and destroys, on `cuda_stream` (a cudaStream_t), which must outlive
// it: collectives run in the order of that stream. Buffers are memory of the communicator's GPU, but for all_gather(),
// which takes host memory; counts are host memory. What is sent must have been written by work that the stream is
// ordered after. test() and wait() tell the host; what reads a result on another stream waits for them, or for an event
// the caller records on `cuda_stream` after start().
//
// Sums    NCCL adds fp16 and bf16 in their own format, rounding at every addition.
// Errors  What NCCL reports asynchronously ends waits with kPeerFailed. abandon() aborts the communicator: its kernels
//         end, the buffers are free at once, the peers find out by their timeouts. Sub-groups need NCCL 2.18.
Result<std::unique_ptr<Communicator>> make_nccl_communicator(void* nccl_comm, void* cuda_stream);

}  // namespace cortado

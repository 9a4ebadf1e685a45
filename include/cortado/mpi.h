// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The communicator over MPI, for programs that have one. In the library cortado_mpi, which is built where MPI is found.
// This header needs no mpi.h.
#pragma once

#include <memory>

#include "cortado/communicator.h"
#include "cortado/status.h"

namespace cortado {

// Over the ranks of an MPI communicator, given as its Fortran handle, the one form that is the same type everywhere:
//
//   make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD))
//
// All its ranks call it together, after MPI_Init; Cortado works on duplicates, so that the caller's own messages never
// meet Cortado's. Destroy it on all ranks before MPI_Finalize. Used by more than one thread, or by another one than
// called MPI_Init, MPI must have been started with MPI_THREAD_SERIALIZED or more. kFailedPrecondition where MPI is not
// running.
//
// Sums    fp16 and bf16 are added in float32 and rounded at every addition; the order is MPI's.
// Sizes   at most 2^31 - 1 elements in all blocks of a call together, otherwise kUnsupported.
// Errors  A rank that gives up, or whose wait runs out, tells all others, also those of other sub-groups: their waits
//         end with the same code and its text. After a timeout each rank calls the roll for up to a second more and
//         names those that did not answer. MPI can't take back a collective, so after an error buffers in flight stay
//         taken for good, and MPI_Finalize may wait for them: end the program with MPI_Abort. Mismatching calls are
//         undefined in MPI; make_verifying_communicator finds them.
// Progress only inside of test() and wait().
Result<std::unique_ptr<Communicator>> make_mpi_communicator(int fortran_handle);

}  // namespace cortado

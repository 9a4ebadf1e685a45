// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The decompositions of linalg.h on a CUDA device, over cuSOLVER and cuBLAS: matrices are float32, row-major, in device
// memory; only the lower triangle is read, and of inverses written.
//
// Calls give work to the stream; cuSOLVER may wait for eigenvectors, the others are not waited for. They allocate, in
// the order of the stream, where a matrix is larger than those before. What came of a decomposition is in `infos` when
// the stream gets there: 0, or LAPACK's number. An object is used by one thread at a time. Results are near those of
// the CPU, not their bytes: other libraries add in other orders.
#pragma once

#include <cstdint>
#include <memory>

#include "core/device.h"
#include "cortado/status.h"

namespace cortado {

class CudaLinalg {
 public:
  // kUnsupported where there is no device.
  static Result<std::unique_ptr<CudaLinalg>> create(DeviceStream stream);
  virtual ~CudaLinalg() = default;

  // Takes the memory that the calls below need for so many matrices or fewer, so that they don't.
  virtual Status reserve_symmetric_eigen(std::int64_t n, std::int64_t count) = 0;
  virtual Status reserve_invert_positive_definite(std::int64_t n, std::int64_t count) = 0;
  virtual std::int64_t workspace_bytes() const = 0;  // without what the libraries take for themselves

  // Of `count` matrices, one behind the other. Eigenvalues in ascending order to `values` (n of each); eigenvector i
  // becomes row i of its matrix.
  virtual Status symmetric_eigen(std::int64_t n, std::int64_t count, float* matrices, float* values, int* infos) = 0;

  // The inverses of `count` positive definite matrices, one behind the other, by Cholesky decomposition. An info above
  // 0: its matrix is not positive definite, and holds unspecified values.
  virtual Status invert_positive_definite(std::int64_t n, std::int64_t count, float* matrices, int* infos) = 0;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Who inverts the factors of a step: threads of the CPU (inverse.h), or a CUDA device (cuda_inverter.cc).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// One matrix, and what came of it. What can't be inverted keeps the inverse it had.
struct InverseJob {
  std::int64_t n = 0;
  const float* triangle = nullptr;  // finite; kfac/triangle.h
  float* inverse = nullptr;         // n x n: eigenvectors as rows; with `values` null the damped inverse
  float* values = nullptr;          // n eigenvalues, in ascending order, those below 0 as 0
  double damping = 0;               // of the damped inverse

  bool is_indefinite = false;  // as compute_eigenvectors() says
  int raised = 0;              // how often damping was, until the matrix was positive definite
  bool failed = false;
};

class KfacInverter {
 public:
  virtual ~KfacInverter() = default;
  // Takes the memory for jobs of these sizes and kinds, before somebody else has it; nothing else of a job is read.
  virtual Status reserve(std::span<const InverseJob> jobs) = 0;
  // For one thread at a time, but for one that says otherwise (cortado/kfac_cuda.h). Results are there when it returns.
  // Errors are those of the device, not of a matrix. kTimeout: the device has not ended within `timeout`, what
  // cuSOLVER waits for eigenvectors in its own call aside; it may still be at work, and every further call is that
  // error too.
  virtual Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds timeout) = 0;
  virtual std::int64_t scratch_bytes() const = 0;
};

// By `threads` threads, the caller's included. Results do not depend on their number.
std::unique_ptr<KfacInverter> make_cpu_inverter(int threads);

}  // namespace cortado

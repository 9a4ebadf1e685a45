// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Job: what one training step of a model is made of, as measured on one rank: its gradients in the order in which the
// backward pass makes them, and the times of its passes. The file is `cortado.job/1` (docs/planner.md). A plain value:
// any thread may read it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/option.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/unknown_fields.h"

namespace cortado {

// What a codec loses of a gradient, measured on real gradients.
struct MeasuredError {
  std::string codec;       // its specification
  double relative_l2 = 0;  // |decoded - gradient| / |gradient|
};

struct JobTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // empty: one value
  DType dtype = DType::kFloat32;
  std::int64_t ready_ns = 0;  // gradient complete, from the start of the backward pass, nothing else running
  std::optional<double> rms;  // root mean square of the gradient's values
  std::vector<MeasuredError> errors;
  UnknownFields unknown;

  // Of the matrix that codecs see: rows = the first dimension, cols = the rest; a vector has one row.
  std::int64_t rows() const;
  std::int64_t cols() const;
  std::int64_t elems() const { return rows() * cols(); }
  std::int64_t size_bytes() const { return elems() * static_cast<std::int64_t>(dtype_bytes(dtype)); }
};

struct Job {
  std::string name;
  std::string description;
  OpDevice device = OpDevice::kGpu;          // where the gradients are made and needed
  std::optional<std::int64_t> forward_ns;    // not measured: counts as 0, and the plan says so
  std::optional<std::int64_t> backward_ns;   // not measured: the last ready time
  std::optional<std::int64_t> optimizer_ns;  // not measured: counts as 0
  // False: the next forward pass begins when all gradients have arrived, as with an optimizer that steps once. True:
  // each part of it begins as soon as the gradients of its own tensors have.
  bool overlap_forward = false;
  std::vector<JobTensor> tensors;  // by ready time
  UnknownFields unknown;

  // End of the backward pass.
  std::int64_t backward_end_ns() const;

  // Times not negative and in order, names there and different, shapes that fit into memory, errors finite. The message
  // begins with the path of the place in the file: "$.tensors[3].ready_ns: ...".
  Status check() const;
};

// The JSON text, one line a tensor, and back. What is wrong, missing or of the wrong type is refused with its path,
// what was expected and what was found; a job that was read has passed check(). kUnsupported: of another version.
std::string job_to_json(const Job& job);
Result<Job> job_from_json(std::string_view json);

Status save_job(const Job& job, const std::string& path);
Result<Job> load_job(const std::string& path);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// LowRankBatch: the steps of low-rank training on a device, batched over tensors: what lowrank_kernels.h and
// orthogonalise.h do for one matrix on the CPU. As for DeviceBatch, everything is sized and uploaded before, and the
// steps only give work to a stream. An engine that sends another factor in every other step has a batch for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "codec/device_batch.h"
#include "codec/lowrank/lowrank_kernels.h"

namespace cortado {

// Pointers are to device memory, aligned as their types are.
struct LowRankTensor {
  // rows, cols, gradient and residual of the pass; `sent` is subtracted. Not looked at but for projections.
  ResidualPass pass;
  int rank = 0;
  float* row = nullptr;      // rows x rank: what rows are projected to, or the basis for columns
  float* col = nullptr;      // rank x cols, likewise
  void* output = nullptr;    // of reconstruct(), rows x cols of pass.gradient_dtype; may be the gradient
  std::uint64_t number = 0;  // of the tensor, for random vectors
};

class LowRankBatch {
 public:
  virtual ~LowRankBatch() = default;

  virtual std::uint64_t workspace_bytes() const = 0;  // aligned to kWorkspaceAlignBytes
  // kInvalidArgument for other shapes, ranks or dtypes than the batch was made for, and for pointers that are not
  // aligned, or null where the tensor has elements: factors (unless the rank is 0), `sent` of a rank, the output.
  virtual Status set_up(std::span<const LowRankTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                        DeviceStream stream) = 0;

  // A in one pass over memory, and the factor of it: row = A * transpose(col), or col = transpose(row) * A. Where an
  // element was not finite, the factor begins with NaN and faults() of the tensor is set.
  virtual Status project_rows(DeviceStream stream) = 0;
  virtual Status project_cols(DeviceStream stream) = 0;

  // The bytes of orthogonalise_rows(), orthogonalise() and random_basis().
  virtual Status orthogonalise_rows(DeviceStream stream) = 0;
  virtual Status orthogonalise_cols(DeviceStream stream) = 0;
  virtual Status random_col_basis(DeviceStream stream) = 0;

  // output = scale * row * col, the bytes of reconstruct().
  virtual Status reconstruct(float scale, DeviceStream stream) = 0;

  virtual const std::uint32_t* faults() const = 0;  // device memory; of the last projection
};

// Of tensors of these shapes, ranks and dtypes; pointers are not looked at yet.
Result<std::unique_ptr<LowRankBatch>> make_cuda_low_rank_batch(std::span<const LowRankTensor> tensors);

}  // namespace cortado

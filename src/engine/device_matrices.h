// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceMatrices: matrices of one message of factors, whose gradients and residuals are on a device. The passes over
// them (lowrank_kernels.h) run there, each in one launch for all; factors, which are small, come to the host, where
// LowRankTensor keeps them, puts them on the wire and makes the next bases of what arrives. One step:
//
//   encode()                  bases and the pair that the residual still has to lose go to the device; the pass; the
//                             factors come back
//   encoded(), write()        to the message
//   encode_second_round()     Power-SGD, once the sums of the first round have been received: likewise, of the other
//                             factor; again encoded() and write()
//   take()                    the sum of what all ranks wrote, before commit() of its tensor: the pair of the mean
//   decode()                  once the verdict is known: a step that was not finite is taken back from the residual;
//                             the gradients get the mean
//
// Factors keep the bound of the projections (codec/lowrank/spec.md); means are those of the CPU to the bit, given the
// sums, so that ranks with and without a device may be mixed.
#pragma once

#include <memory>
#include <vector>

#include "core/device_queue.h"
#include "engine/device_work.h"
#include "engine/lowrank_tensor.h"

namespace cortado {

class DeviceMatrices : public DeviceWork {
 public:
  struct Setup {
    std::vector<LowRankTensor*> tensors;  // outlive the work; of one world size and wire
    bool has_feedback = false;
    double timeout_s = 1800;       // of waits for the queue
    DeviceQueue* queue = nullptr;  // outlives the work
  };

  // Before encode(): what a slot sends in this step.
  virtual void set_kind(int slot, SlotKind kind) = 0;

  // After encoded(): the factor to `to`, in the wire's dtype. Returns false if the gradient was not finite.
  // holds_zero_gradients: as StepContext's. Slots may be written by several threads.
  virtual bool write(int slot, bool holds_zero_gradients, void* to) = 0;

  virtual Status encode_second_round() = 0;

  // Of the last round. Slots may be taken by several threads.
  virtual void take(int slot, const void* summed) = 0;
};

// On the CUDA device of the queue, in the library cortado_cuda.
Result<std::unique_ptr<DeviceMatrices>> make_cuda_matrices(const DeviceMatrices::Setup& setup);

}  // namespace cortado

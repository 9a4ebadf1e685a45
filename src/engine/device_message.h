// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceMessage: tensors of one message, whose gradients and residuals are on a device, and are encoded and decoded
// there. What leaves the device are payloads, and one word a tensor that says whether its gradient was finite. One
// step:
//
//   encode()            gives the work to the queue: feedback, codec, and the copy of the payloads to the host, or, if
//                       they vary in size, of their sizes
//   encoded()           gives the copy of payloads whose sizes have come to the queue. True once they are there:
//                       payload() and finite() may be called
//   take(), take_sum()  what each rank sent, as it arrives
//   decode()            once the verdict on the step is known: gives the rest to the queue. The gradients get the mean,
//                       NaN in slots that were not finite on some rank; a step that was not finite changes no residual
//   decoded()           true once it has been done; what was wrong with a payload is said here
//
// Payloads, means and residuals are those of CodecTensor (codec_tensor.h) to the bit, so ranks with and without a
// device may be mixed. Decoding waits for the verdict, because on a device it costs less than a residual more would.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device_queue.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "engine/device_work.h"
#include "feedback/feedback_pass.h"

namespace cortado {

class DeviceMessage : public DeviceWork {
 public:
  struct Tensor {
    std::string name;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    DType dtype = DType::kFloat32;    // of the gradient
    DType encoded = DType::kFloat32;  // of what is encoded: `dtype`, or fp32; fp32 with feedback
    std::uint64_t number = 0;         // EncodeContext::tensor
  };
  struct Setup {
    std::string codec;
    std::vector<Tensor> tensors;
    int world_size = 1;
    int rank = 0;
    bool has_feedback = false;
    bool is_exact = false;         // a step that was not finite is undone to the bit, from a second residual
    std::uint64_t seed = 0;        // EncodeContext::seed, of this rank
    double timeout_s = 1800;       // of waits for the queue
    DeviceQueue* queue = nullptr;  // outlives the message
  };

  // After encoded().
  virtual std::span<const std::byte> payload(int slot) const = 0;
  virtual bool finite(int slot) const = 0;
  // False: all its bits were zero. Then a payload of zeros may be sent and taken instead, and the residual waits.
  virtual bool has_gradient(int slot) const = 0;
  // Before decode(): whether that is what happens in this step (StepContext::holds_zero_gradients).
  virtual void hold_zeros(bool holds) = 0;

  // Copies the payload. kCorruptData if its size can't be. Slots may be taken by several threads.
  virtual Status take(int rank, int slot, std::span<const std::byte> payload) = 0;

  // Of a sparsifier whose places all ranks share, in place of payload() and take(): the values, float32, and their sum
  // over the ranks. sent_zeros: instead of values(slot).
  virtual std::span<const std::byte> values(int slot) const = 0;
  virtual void take_sum(int slot, bool sent_zeros, std::span<const float> sum) = 0;

  // Of the last finite step, after decoded(): of what was encoded, and of what that lost.
  virtual DifferenceSquares squares(int slot) const = 0;
};

// On the CUDA device of the queue, in the library cortado_cuda. kUnsupported, with the reason, for codecs that have no
// device variant and for majority votes: such messages are compressed on the CPU.
Result<std::unique_ptr<DeviceMessage>> make_cuda_message(const DeviceMessage::Setup& setup);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// CodecTensor: what one tensor under an ordinary codec keeps between steps, and the changes a step makes to it. Two
// ways over the wire:
//
//   GatheredTensor  every rank's payload goes to every rank, which decodes all and takes the mean in rank order
//   SummedTensor    the values of a sparsifier whose places all ranks share are summed on the way
//
// With error feedback the tensor that is encoded stands in the residual's memory (float32, unscaled); what the ranks
// decode of it is subtracted there once. That happens while decoding where it can be undone, else in commit(). Without
// feedback the gradient itself is encoded, in its own scale and, where the codec takes that, its own dtype.
//
// As with LowRankTensor: until commit() the state before the step can be had again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "codec/stage.h"
#include "core/function_ref.h"
#include "cortado/engine.h"
#include "engine/codec_scratch.h"
#include "feedback/feedback_pass.h"

namespace cortado {

// A rank's payload of the tensor; `joint` is used if it lies in two pieces.
using PayloadOfRank = FunctionRef<std::span<const std::byte>(int rank, std::span<std::byte> joint)>;

class CodecTensor {
 public:
  struct Setup {
    const Codec* codec = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    DType dtype = DType::kFloat32;    // of the gradient
    DType encoded = DType::kFloat32;  // of what is encoded: float32 with feedback
    int world_size = 1;
    int rank = 0;
    bool has_feedback = false;
    float momentum = 0;  // of the velocity, if there is one
    EncodeContext key;   // without the step
  };
  virtual ~CodecTensor() = default;

  CodecScratchSizes scratch_sizes() const;

  // With feedback: zeroed memory; with `spare` (or its parts null) a rollback is bit-exact.
  void set_memory(const FeedbackMemory& memory, const FeedbackMemory& spare);
  const FeedbackMemory& memory() const { return memory_; }

  struct Encoded {
    std::uint64_t bytes = 0;  // written to the slot
    bool finite = true;       // the gradient was
  };
  // gradient == nullptr: the tensor has nothing to send in this step; the payload is that of zeros, the residual waits.
  virtual Result<Encoded> encode(const void* gradient, double gradient_scale, std::int64_t step,
                                 std::span<std::byte> slot, CodecScratch& scratch) = 0;

  // What may happen to the residual while decoding.
  enum class Settle {
    kNever,       // the step will be rolled back
    kIfUndoable,  // the verdict is not known yet
    kYes,         // the step is finite
  };
  struct Arrived {
    PayloadOfRank payload;          // GatheredTensor
    std::span<const float> summed;  // SummedTensor
    bool finite = true;             // as all ranks' flags say
  };
  // `gradient_and_output` holds this rank's gradient and gets the mean.
  virtual Status decode(const Arrived& arrived, double gradient_scale, Settle settle, void* gradient_and_output,
                        CodecScratch& scratch) = 0;

  // Before decode() overwrites a gradient that nobody keeps: writes to `rolled_back`, which has the parts that memory()
  // has, what a rollback would leave there; rollback() then copies it. Needs feedback, and no spare residual.
  void prepare_rollback(const FeedbackMemory& rolled_back);

  // Both may need the step's payload once more.
  Status commit(PayloadOfRank payload, CodecScratch& scratch);
  // The gradient as encode() read it (nullptr: zeros); needed unless there is a spare residual or prepare_rollback()
  // was called.
  Status rollback(const void* gradient, PayloadOfRank payload, CodecScratch& scratch);

  // Whether payloads hold fp16, where what is finite in float32 may become Inf: then what is decoded must be looked at.
  bool narrows() const { return narrows_; }

  double sum_squares() const { return squares_.of_values; }  // of what was encoded in the last step
  double error_squares() const { return squares_.of_differences; }
  virtual std::int64_t bytes() const { return 0; }  // held beside the feedback's memory

 protected:
  explicit CodecTensor(const Setup& setup)
      : setup_(setup), narrows_(setup.codec->spec().find("fp16") != std::string::npos) {}

  const Setup& setup() const { return setup_; }
  std::int64_t elems() const { return setup_.rows * setup_.cols; }
  TensorView view_of(void* data) const { return {data, setup_.encoded, setup_.rows, setup_.cols}; }
  EncodeContext context(std::int64_t step) const;

  struct Prepared {
    ConstTensorView input;
    bool finite = true;
  };
  Prepared prepare(const void* gradient, double gradient_scale, CodecScratch& scratch);

  // What makes the mean of a sum, in the units of the output.
  float mean_scale(double gradient_scale) const;
  void settle_if(Settle settle, const float* own);
  void keep_error(const DifferenceSquares& squares) { squares_ = squares; }

  // This rank's own tensor as the others decode it, in scratch.decoded.
  virtual Status decode_own(PayloadOfRank payload, CodecScratch& scratch) = 0;
  virtual std::size_t codec_scratch_bytes() const;

 private:
  const FeedbackMemory& fresh() const { return spare_.empty() ? memory_ : spare_; }

  Setup setup_;
  bool narrows_;
  FeedbackMemory memory_;
  FeedbackMemory spare_;
  FeedbackMemory rolled_back_;  // what prepare_rollback() wrote in the step in hand
  FeedbackPass pass_;
  bool settled_ = false;
  bool is_held_ = false;  // in the step in hand
  DifferenceSquares squares_;
  DifferenceSquares rolled_back_squares_;
};

class GatheredTensor final : public CodecTensor {
 public:
  explicit GatheredTensor(const Setup& setup) : CodecTensor(setup) {}

  Result<Encoded> encode(const void* gradient, double gradient_scale, std::int64_t step, std::span<std::byte> slot,
                         CodecScratch& scratch) override;
  Status decode(const Arrived& arrived, double gradient_scale, Settle settle, void* gradient_and_output,
                CodecScratch& scratch) override;

 private:
  Status decode_own(PayloadOfRank payload, CodecScratch& scratch) override;
  Status decode_rank(int rank, PayloadOfRank payload, float* decoded, CodecScratch& scratch);
  Status add_decoded_rank(int rank, PayloadOfRank payload, CodecScratch& scratch);
  void add_rank(int rank, float mean_scale, void* output, CodecScratch& scratch) const;
  bool streams_mean() const;  // into a gradient that caches would not keep
};

class SummedTensor final : public CodecTensor {
 public:
  explicit SummedTensor(const Setup& setup);

  Result<Encoded> encode(const void* gradient, double gradient_scale, std::int64_t step, std::span<std::byte> slot,
                         CodecScratch& scratch) override;
  Status decode(const Arrived& arrived, double gradient_scale, Settle settle, void* gradient_and_output,
                CodecScratch& scratch) override;
  std::int64_t bytes() const override;

 private:
  Status decode_own(PayloadOfRank payload, CodecScratch& scratch) override;
  std::size_t codec_scratch_bytes() const override;

  const Sparsifier& sparsifier_;
  std::vector<float> own_values_;
  std::vector<std::byte> index_;
  Selection selection_;
};
}  // namespace cortado

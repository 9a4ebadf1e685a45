// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "core/aligned_buffer.h"
#include "engine/lowrank_tensor.h"
#include "engine/plan_message.h"
#include "feedback/residual_store.h"

namespace cortado {

// Factors of matrices, with bases that stay from step to step: one all-reduce for `acp` (both factors, of half the
// rank), two for `power`. Vectors and matrices that factors would not make smaller travel whole in the first one, as
// values / world size. A gradient that is not finite poisons its slot, so that every rank sees it.
class LowRankMessage final : public PlanMessage {
 public:
  static Result<std::unique_ptr<PlanMessage>> make(const Setup& setup);
  ~LowRankMessage() override;

  void begin_step(const StepContext& context) override;
  bool takes_carried(int slot) const override { return slots_[static_cast<std::size_t>(slot)].matrix == nullptr; }
  void write(int slot, void* gradient, const float* carried) override;
  Status begin(std::int64_t step) override;
  SchemeState state() const override { return state_; }
  Status start() override;
  Result<bool> test() override;
  Status wait(std::chrono::nanoseconds timeout) override;
  Status proceed() override;
  const std::vector<TraceEvent>& work() const override { return work_.events(); }
  bool read(int slot, void* gradient) override;
  void commit() override;

  const std::vector<SchemeCollective>& collectives() const override { return collectives_; }
  const SchemeCollective& collective() const override { return collectives_[round_]; }

  std::vector<MessageResidual> residuals() override;
  std::span<float> basis(int slot) override;
  bool absorb(int slot, const float* carried) override;

  bool is_compressed(int slot) const override { return slots_[static_cast<std::size_t>(slot)].matrix != nullptr; }
  std::int64_t payload_bytes(int slot) const override;
  DifferenceSquares squares(int slot) const override;
  double lost_squares(int slot) const override { return squares(slot).of_differences; }
  std::int64_t sent_bytes() const override { return sent_bytes_; }
  std::int64_t residual_bytes() const override { return residuals_.bytes(); }
  std::int64_t factor_bytes() const override;
  std::int64_t buffer_bytes() const override;
  bool uses_device() const override { return false; }
  std::string host_reason() const override { return "factors that all ranks sum are made on the CPU"; }

 private:
  struct Slot {
    EngineTensor tensor;
    std::unique_ptr<LowRankTensor> matrix;       // null: travels whole
    std::int64_t offset[2] = {}, elems[2] = {};  // in the message of each round
  };
  LowRankMessage() = default;

  Status fail(const Status& status);
  void note_work(Stage stage, int slot, std::int64_t start_ns);
  bool is_power() const { return kind_ == SlotKind::kRowFactor; }

  std::vector<Slot> slots_;
  SlotKind kind_ = SlotKind::kBothFactors;  // of the first round
  Communicator* communicator_ = nullptr;
  std::vector<SchemeCollective> collectives_;
  AlignedBuffer<float> messages_[2];  // of the rounds
  ResidualStore residuals_;
  StepContext context_;
  SchemeState state_ = SchemeState::kIdle;
  std::size_t round_ = 0;
  std::int64_t step_ = 0;
  WorkId in_flight_ = 0;
  std::int64_t sent_bytes_ = 0;
  const Clock* clock_ = nullptr;
  TraceRecorder work_{0};
};

}  // namespace cortado

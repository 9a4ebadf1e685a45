// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "engine/plan_message.h"

namespace cortado {

// Options that do not encode sum gradients / world size, as DDP does. Others encode means over the ranks summed so far:
// with residuals in unscaled units, so that the loss scale may change between steps; without them as the gradients
// come, because the loss scale keeps small values in the range of narrow formats. Elementwise codecs read and write the
// gradients where they lie, if the option lets them (SchemeRun::reads_lent(), writes_lent()).
class SchemeMessage final : public PlanMessage {
 public:
  static Result<std::unique_ptr<PlanMessage>> make(const Setup& setup);

  void begin_step(const StepContext& context) override;
  bool takes_carried(int) const override { return true; }
  void write(int slot, void* gradient, const float* carried) override;
  Status begin(std::int64_t step) override { return run_->begin(step); }
  SchemeState state() const override { return run_->state(); }
  Status start() override { return run_->start(); }
  Result<bool> test() override { return run_->test(); }
  Status wait(std::chrono::nanoseconds timeout) override { return run_->wait(timeout); }
  Status proceed() override { return run_->proceed(); }
  const std::vector<TraceEvent>& work() const override { return run_->coder().work(); }
  bool read(int slot, void* gradient) override;
  void commit() override { run_->commit(); }

  const std::vector<SchemeCollective>& collectives() const override { return run_->collectives(); }
  const SchemeCollective& collective() const override { return run_->collective(); }

  std::vector<MessageResidual> residuals() override;
  std::span<float> basis(int) override { return {}; }
  bool absorb(int, const float*) override { return false; }

  bool is_compressed(int) const override { return codec_ != nullptr; }
  std::int64_t payload_bytes(int slot) const override;
  DifferenceSquares squares(int slot) const override { return run_->coder().squares(slot); }
  double lost_squares(int slot) const override {
    return run_->coder().lost_squares(slot) * static_cast<double>(world_size_) * world_size_;
  }
  std::int64_t sent_bytes() const override { return run_->sent_bytes(); }
  std::int64_t residual_bytes() const override { return run_->coder().residual_bytes(); }
  std::int64_t factor_bytes() const override { return 0; }
  std::int64_t buffer_bytes() const override { return run_->buffer_bytes() + run_->coder().scratch_bytes(); }
  bool uses_device() const override { return run_->coder().uses_device(); }
  std::string host_reason() const override { return run_->coder().host_reason(); }

 private:
  SchemeMessage() = default;
  float loss_scale() const;  // that is taken out of the values while they travel
  float unscale() const;     // of what arrives

  std::vector<EngineTensor> tensors_;
  std::unique_ptr<Codec> codec_;  // null if the option does not encode
  bool has_feedback_ = false;
  std::unique_ptr<SchemeRun> run_;
  int world_size_ = 1;
  StepContext context_;
};

}  // namespace cortado

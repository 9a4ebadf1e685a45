// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// PlanMessage: a bucket of a plan, which travels as its option says. One step:
//
//   begin_step() --write() each tensor--> begin() --> ready --start()--> in flight --> arrived --proceed()--> ... done
//   then read() each tensor, and commit() if the step was finite on all ranks; without it the step leaves no trace
//
//   SchemeMessage   any option with any codec, by the interpreter of schemes
//   LowRankMessage  acp and power, where all ranks sum factors: they keep their bases from step to step
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/scheme.h"
#include "cortado/engine.h"
#include "cortado/plan.h"

namespace cortado {

// What is kept of one tensor at one place; `values` begin at element `begin` of the tensor.
struct MessageResidual {
  int slot = 0;
  std::string_view place;
  std::int64_t begin = 0;
  std::span<float> values;
  float share = 1;  // what one of its values stands for in the mean gradient, of which `replicas` keep the same
  int replicas = 1;
};

class PlanMessage {
 public:
  struct Setup {
    const PlanBucket* bucket = nullptr;
    std::vector<EngineTensor> tensors;           // of the bucket, in its order: the slots
    const LevelCommunicators* levels = nullptr;  // outlives the message
    std::uint64_t seed = 0;
    const Clock* clock = nullptr;
    const SchemeDevice* device = nullptr;  // null: there is none; outlives the message
  };
  static Result<std::unique_ptr<PlanMessage>> make(const Setup& setup);
  virtual ~PlanMessage() = default;

  virtual void begin_step(const StepContext& context) = 0;
  // Whether write() can add anything to a slot's gradient.
  virtual bool takes_carried(int slot) const = 0;
  // Each slot that has elements once. `carried`: null, or values to be added, which stand for themselves in the mean.
  // Both are read now or in begin(); the mean may be written to `gradient` before read() is called.
  virtual void write(int slot, void* gradient, const float* carried) = 0;
  virtual Status begin(std::int64_t step) = 0;
  virtual SchemeState state() const = 0;  // on device: in flight, but no collective is
  virtual Status start() = 0;
  virtual Result<bool> test() = 0;
  virtual Status wait(std::chrono::nanoseconds timeout) = 0;
  virtual Status proceed() = 0;
  // Of begin() or proceed(), whichever was last: stage, slot (TraceEvent::tensor) and times.
  virtual const std::vector<TraceEvent>& work() const = 0;
  // Writes the mean; false if it is not finite, on every rank alike.
  virtual bool read(int slot, void* gradient) = 0;
  virtual void commit() = 0;

  virtual const std::vector<SchemeCollective>& collectives() const = 0;
  virtual const SchemeCollective& collective() const = 0;  // that is ready, in flight or has arrived

  // -- between steps
  virtual std::vector<MessageResidual> residuals() = 0;
  virtual std::span<float> basis(int slot) = 0;  // empty if there is none
  // Adds to the slot's residual what stands for itself in the mean; false where there is no residual of this rank
  // alone.
  virtual bool absorb(int slot, const float* carried) = 0;

  // -- the last step
  virtual bool is_compressed(int slot) const = 0;
  virtual std::int64_t payload_bytes(int slot) const = 0;
  virtual DifferenceSquares squares(int slot) const = 0;
  virtual double lost_squares(int slot) const = 0;  // what was lost, in the units of this rank's unscaled gradient
  virtual std::int64_t sent_bytes() const = 0;      // so far
  virtual std::int64_t residual_bytes() const = 0;
  virtual std::int64_t factor_bytes() const = 0;
  virtual std::int64_t buffer_bytes() const = 0;
  virtual bool uses_device() const = 0;
  virtual std::string host_reason() const = 0;  // why the CPU does what the plan gives to a GPU that there is
};

// Whether a bucket's payloads are factors that all ranks sum, each with all the others.
bool sums_factors(const PlanBucket& bucket, int levels);

}  // namespace cortado

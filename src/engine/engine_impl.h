// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The engine's flow. One step:
//
//   submit      encode each tensor into its slot, start complete messages, absorb those that have ended
//   finish_step wait for the rest, absorb it; then the verdict: commit, or roll back when anything was not finite
//
// absorb = look for Inf and NaN, decode if that may be done before the verdict, and make the received factor the next
// basis, all while later messages still travel. Gathered payloads that must wait for the verdict are nevertheless
// decoded while finish_step() waits for later messages; what a rollback would leave is computed first, from the
// gradient that decoding overwrites. Power-SGD has a second round, which starts once all of the first has been
// submitted: only then do all ranks issue the same collectives in the same order. So do the rests of payloads that were
// longer than expected (round.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/thread_pool.h"
#include "cortado/engine.h"
#include "engine/codec_scratch.h"
#include "engine/codec_tensor.h"
#include "engine/device_side.h"
#include "engine/engine_base.h"
#include "engine/lowrank_tensor.h"
#include "engine/round.h"
#include "engine/trained_codec.h"
#include "engine/treatment.h"
#include "feedback/residual_store.h"

namespace cortado {

class EngineImpl final : public EngineBase {
 public:
  EngineImpl(std::vector<EngineTensor> tensors, const EngineOptions& options, TrainedCodec codec,
             std::vector<Treatment> treatments, Communicator* communicator, const Clock* clock, TraceRecorder* trace);

  // Engine::create(), with gradients on `device` if it has a queue. Every rank calls it; devices may differ.
  static Result<std::unique_ptr<Engine>> make(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                              Communicator* communicator, const Clock* clock, TraceRecorder* trace,
                                              EngineDevice device);

  ~EngineImpl() override { leave_group(); }

  Status begin_step(const StepContext& context) override;
  Status submit(std::span<const Gradient> gradients) override;
  Status submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) override;
  Result<StepOutcome> finish_step(const LocalGradient& local_gradient) override;
  bool is_on_device() const override { return device_ != nullptr; }
  EngineReport report() const override;
  std::string describe() const override;
  Result<EngineState> save_state() override;
  Result<std::string> load_state(const EngineState& state) override;

 private:
  struct TensorStep {                 // one tensor in the step in hand
    bool finite = true;               // what this rank wrote
    bool held = false;                // coded on a device: zeros were sent (StepContext::holds_zero_gradients)
    bool finite_on_all = true;        // of gathered slots
    double sum_squares = 0;           // of what it wrote from, residual included
    double error_squares = 0;         // of what writing lost
    std::uint64_t payload_bytes = 0;  // of a gathered slot
    bool decoded = false;
    bool overflowed = false;  // what was decoded is finite in float32, but not in the gradient's dtype
    Status status;            // of encoding or decoding, on whichever thread
    Interval encode, decode, orthogonalise;
  };
  struct BufferRun {  // method kNone
    void* data;
    std::int64_t elems;
    DType dtype;
    std::uint32_t first_tensor;  // of those whose gradients are in it
    std::size_t tensors;         // how many; 0: the caller did not say
    std::int64_t bytes() const { return elems * static_cast<std::int64_t>(dtype_bytes(dtype)); }
    WorkId work = 0;
    std::int64_t start_ns = 0;
  };

  // -- set-up
  void make_tensors();
  void make_low_rank_tensor(std::size_t tensor);
  void make_codec_tensor(std::size_t tensor);
  std::uint64_t codec_seed() const;
  void make_rounds();
  Status open_device(EngineDevice device);
  Status add_device_message(const Message& message);
  Status add_device_matrices(const Message& message);
  void allocate_feedback();
  void allocate_rolled_back();
  void release_rolled_back();
  // Whether what is decoded may be beyond what its dtype, or that of its payload, can hold.
  bool may_overflow(std::uint32_t t) const {
    const bool narrows = codec_tensors_[t] != nullptr && codec_tensors_[t]->narrows();
    return treatments_[t].is_compressed() && (narrows || tensors_[t].dtype == DType::kFloat16);
  }
  Status agree_on_overflow();
  bool in_warm_up() const { return step_ < options_.start_step && compresses(); }
  bool compresses() const {  // or else sends every tensor dense
    return options_.method != EngineOptions::Method::kNone && options_.method != EngineOptions::Method::kCast;
  }
  bool has_feedback() const;
  bool is_exact() const { return options_.rollback == EngineOptions::Rollback::kExact; }
  // Whether the tensor has something to save.
  bool is_stateful(std::uint32_t tensor) const;

  // -- a step
  Round& first_round() { return warm_up_ != nullptr ? *warm_up_ : *first_; }
  std::size_t count_to_message(std::span<const Gradient> gradients);
  Status encode_and_start(std::span<const Gradient> gradients);
  bool is_on_device(std::uint32_t tensor) const { return device_ != nullptr && device_->encodes(tensor); }
  bool is_factored_on_device(std::uint32_t tensor) const {
    return is_on_device(tensor) && low_rank_[tensor] != nullptr;
  }
  Status begin_step_on_device();
  Status submit_on_device(std::span<const Gradient> gradients);
  Status take_from_device();
  Status know_gradient_scale();
  void write_factors(const DeviceSide::Arrival& arrival);
  Status encode_second_round_on_device(int message);
  Status wait_for_arrivals();
  Status take_slot(Round& round, int message, const Slot& slot);
  Status finish_on_device();
  Status wait_until_finished();
  Status start_buffer(std::size_t buffer);
  std::string name_of_buffer(std::size_t buffer) const;
  void encode(std::uint32_t tensor);
  Status encode_payload(std::uint32_t tensor, Round& round);
  Status poll();
  Status wait_for(Round& round, int message);
  Status decode_while_waiting(Round& round, int message);
  Status absorb(Round& round, int message);
  void look_for_non_finite(Round& round, int message);
  void receive_slot(Round& round, int message, const Slot& slot);
  Status check_payloads(Round& round, int message, const Slot& slot);
  void decode_slot(Round& round, int message, const Slot& slot, CodecTensor::Settle settle);
  void prepare_rollback(std::uint32_t tensor);
  void record_decode(int message, const Slot& slot);
  void decode_values(Round& round, int message, const Slot& slot, CodecTensor::Settle settle, void* output);
  Status decode_payload(Round& round, int message, const Slot& slot, CodecTensor::Settle settle, void* output);
  // Calls act(slot) for the slots of a message, on all threads; the first error that one left in its tensor's status.
  template <typename Act>
  Status for_slots(Round& round, int message, Act&& act);
  // Calls act(codec tensor, payload, scratch), which returns a Status, for a slot of a codec.
  template <typename Act>
  Status with_payload(Round& round, int message, const Slot& slot, Act&& act);
  bool may_decode_early() const;
  Status run_second_round();
  Status gather_rests();
  Status look_for_overflow(Round& round);
  Status decode_after_verdict(Round& round);
  Status commit(Round& last);
  Status roll_back(Round& last, const LocalGradient& local_gradient);
  Status finish_rounds(const LocalGradient& local_gradient);
  Status finish_buffers();

  // -- state and report
  SlotKind kind_at(std::uint32_t tensor, std::int64_t phase_step) const;
  FeedbackMemory feedback_memory(std::uint32_t tensor) const;
  Status check_state(const EngineState& state, std::vector<Layout>* layouts) const;
  std::int64_t message_bytes() const;
  std::int64_t residual_bytes_on_device() const;
  std::int64_t payload_bytes(std::uint32_t tensor) const;

  // -- bookkeeping
  void record_message(Round& round, int message);
  bool is_held(std::uint32_t tensor) const;  // sends nothing in this step (StepContext::holds_zero_gradients)

  std::vector<Treatment> treatments_;
  ThreadPool pool_;

  TrainedCodec codec_;
  std::vector<std::unique_ptr<LowRankTensor>> low_rank_;  // null for tensors that are treated otherwise
  std::vector<std::unique_ptr<CodecTensor>> codec_tensors_;
  CodecScratchPool scratch_;
  std::unique_ptr<Round> warm_up_;  // dense steps; gone after the last one
  std::unique_ptr<Round> first_;
  std::unique_ptr<Round> second_;  // Power-SGD
  ResidualStore residuals_;
  ResidualStore velocities_;  // feedback=dgc

  std::unique_ptr<DeviceSide> device_;  // null: gradients are on the host
  std::string device_fallback_;         // why codecs run on the CPU all the same
  std::vector<Gradient> arrived_;       // from the device, to be encoded here

  std::vector<TensorStep> steps_;
  // Payloads that have arrived and are to be decoded after the verdict, or before it while later ones are awaited, in
  // the order in which they became complete. The first next_waiting_ were decoded.
  struct WaitingPayload {
    int message;
    const Slot* slot;
  };
  std::vector<WaitingPayload> waiting_;
  std::size_t next_waiting_ = 0;
  std::vector<AlignedBuffer<float>> rolled_back_;  // by tensor, of those that may be decoded while others are awaited
  bool has_rolled_back_ = false;

  std::vector<BufferRun> buffers_;
  std::vector<Gradient> deferred_;  // with overlap=off: what finish_step() encodes
  std::vector<std::byte> trial_;    // of one fp16 tensor, decoded before the verdict
  bool looks_for_overflow_ = true;  // in what is decoded to fp16, or from it
  std::int64_t phase_step_ = 0;     // finite compressed steps finished

  std::int64_t warm_up_steps_ = 0;
  bool last_step_compressed_ = false;
};

}  // namespace cortado

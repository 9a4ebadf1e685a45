// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// PlanEngine: the engine that executes a plan. Each bucket is one message (plan_message.h).
//
//   submit      writes gradients to their messages; the last one of a message begins it: it encodes, and is ready for
//               its first collective
//   progress    starts the collectives whose turn it is, and lets those messages go on whose collective has ended
//   finish_step progress, waiting, until all messages are done; then commit, unless some sum was not finite. All ranks
//               have the same sums, so they all decide the same; a step that is not committed leaves no trace
//
// Turns: collectives of one communicator must be started in one order that all ranks share, whatever becomes ready
// first. Each collective of a plan has a time, bucket + kLag * (collectives before it in the option), and those of a
// communicator are started by time. So the way back of a bucket is started when the way there of the next ones has
// been. A rank that waits, waits for what is earliest, so no ranks wait for each other.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/aligned_buffer.h"
#include "cortado/engine.h"
#include "cortado/plan.h"
#include "engine/engine_base.h"
#include "engine/plan_message.h"

namespace cortado {

// "plan(hash=..., buckets=...)": what engines of a plan have for a specification.
std::string plan_summary(const Plan& plan);

class PlanEngine final : public EngineBase {
 public:
  // After check_plan() and check_agreement(). Every rank calls it. `device` may be null.
  static Result<std::unique_ptr<PlanEngine>> make(std::vector<EngineTensor> tensors, const Plan& plan,
                                                  const EngineOptions& options, Communicator* communicator,
                                                  const Clock* clock, TraceRecorder* trace,
                                                  std::shared_ptr<const SchemeDevice> device);

  ~PlanEngine() override { leave_group(); }

  Status begin_step(const StepContext& context) override;
  Status submit(std::span<const Gradient> gradients) override;
  Status submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) override;
  Result<StepOutcome> finish_step(const LocalGradient& local_gradient) override;
  EngineReport report() const override;
  void set_trace(TraceRecorder* trace) override;
  std::string describe() const override;
  Result<EngineState> save_state() override;
  Result<std::string> load_state(const EngineState& state) override;
  Status switch_plan(const Plan& plan) override;

 private:
  static constexpr std::int64_t kLag = 2;

  struct Bucket {
    std::vector<std::uint32_t> tensors;
    std::unique_ptr<PlanMessage> message;  // null: nothing to send, because all tensors are empty
    int missing = 0;                       // tensors not yet submitted in this step
    std::vector<std::int32_t> names;       // of its collectives in the trace
    std::int64_t in_flight_ns = 0;         // when the collective in flight was started
    std::int64_t in_flight_bytes = 0;      // what this rank handed over to it
    std::int64_t gradient_bytes = 0;
  };
  struct Place {
    int bucket = -1;
    int slot = 0;
  };
  // The collectives of one communicator in the order of their turns.
  struct Turn {
    std::int64_t time = 0;
    int bucket = 0;
    int ordinal = 0;
  };
  struct Lane {
    const Communicator* communicator = nullptr;  // of all ranges of levels that have these ranks
    std::vector<Turn> turns;
    std::size_t next = 0;   // to be started
    std::size_t ended = 0;  // so many have; below it all
  };

  PlanEngine(std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator,
             const Clock* clock, TraceRecorder* trace);

  // -- set-up
  struct Schedule {
    Plan plan;
    std::shared_ptr<const LevelCommunicators> levels;  // also that of the plan before, if the topology is the same
    std::vector<Bucket> buckets;
    std::vector<Place> places;  // of tensors
    std::vector<Lane> lanes;
    bool uses_device = false;  // some message does
  };
  Result<std::unique_ptr<Schedule>> make_schedule(const Plan& plan);
  Result<Bucket> make_bucket(const PlanBucket& bucket, Schedule* schedule) const;
  void make_lanes(Schedule* schedule) const;
  Status check_places(const Plan& plan, std::vector<Place>* places) const;

  // -- a step
  Status write(std::uint32_t tensor, void* gradient);
  Status progress();
  Status start_turns(bool* moved);
  Status begin_message(Bucket& bucket);
  Status test_oldest(bool* moved);
  Status take_from_device(bool* moved);
  static bool is_on_device(const Bucket& bucket);
  bool awaits_device() const;
  Status wait_for_earliest();
  Status wait_for_device();
  void report_devices(EngineReport* report) const;
  Status proceed(Bucket& bucket);
  void deliver(Bucket& bucket);
  void commit();

  // -- residuals of plans that have been left
  void carry_over(Schedule* next);
  void carry_basis_over(Schedule* next, std::uint32_t tensor);
  Bucket& bucket_of(std::uint32_t tensor) { return bucket_of(schedule_.get(), tensor); }
  static Bucket& bucket_of(Schedule* schedule, std::uint32_t tensor) {
    return schedule->buckets[static_cast<std::size_t>(schedule->places[tensor].bucket)];
  }
  Bucket& bucket_of(const Turn& turn) { return schedule_->buckets[static_cast<std::size_t>(turn.bucket)]; }
  int slot_of(std::uint32_t tensor) const { return schedule_->places[tensor].slot; }
  float* carried_values(std::uint32_t tensor);
  Status check_state(const EngineState& state);
  template <typename Act>
  Status for_values(const EngineState& state, bool with_places, Act&& act);
  static std::vector<MessageResidual> residuals_of(Bucket& bucket);

  void name_collectives();
  void record_work(const Bucket& bucket);
  int index_of(const Bucket& bucket) const { return static_cast<int>(&bucket - schedule_->buckets.data()); }

  std::shared_ptr<const SchemeDevice> device_;  // outlives the messages
  std::unique_ptr<Schedule> schedule_;
  // By tensor: what an earlier plan lost and this rank still has to deliver, as it stands in the mean. Added to the
  // next gradient that is committed.
  std::map<std::uint32_t, AlignedBuffer<float>> carried_;

  std::vector<bool> delivers_carried_;  // by tensor; not where nothing may be added (StepContext::holds_zero_gradients)
  int undelivered_ = 0;                 // messages
};

}  // namespace cortado

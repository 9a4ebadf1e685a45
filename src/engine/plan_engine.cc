// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/plan_engine.h"

#include <algorithm>
#include <cinttypes>
#include <utility>

#include "collective/device_wait.h"
#include "core/check.h"
#include "core/finite.h"
#include "engine/find_tensor.h"

namespace cortado {

bool PlanEngine::is_on_device(const Bucket& bucket) {
  return bucket.message != nullptr && bucket.message->state() == SchemeState::kOnDevice;
}

// ---- set-up --------------------------------------------------------------------------------------------------------

PlanEngine::PlanEngine(std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator,
                       const Clock* clock, TraceRecorder* trace)
    : EngineBase(std::move(tensors), options, communicator, clock, trace), delivers_carried_(tensors_.size()) {}

Result<std::unique_ptr<PlanEngine>> PlanEngine::make(std::vector<EngineTensor> tensors, const Plan& plan,
                                                     const EngineOptions& options, Communicator* communicator,
                                                     const Clock* clock, TraceRecorder* trace,
                                                     std::shared_ptr<const SchemeDevice> device) {
  std::unique_ptr<PlanEngine> engine(new PlanEngine(std::move(tensors), options, communicator, clock, trace));
  engine->device_ = std::move(device);
  CORTADO_ASSIGN_OR_RETURN(engine->schedule_, engine->make_schedule(plan));
  engine->name_collectives();
  return engine;
}

// Which bucket each tensor is in; the plan and the model must know the same ones.
Status PlanEngine::check_places(const Plan& plan, std::vector<Place>* places) const {
  std::map<std::string_view, std::uint32_t> by_name;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) by_name[tensors_[t].name] = t;
  places->assign(tensors_.size(), {});
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<std::string>& names = plan.buckets[b].tensors;
    for (std::size_t slot = 0; slot < names.size(); ++slot) {
      const auto found = by_name.find(names[slot]);
      if (found == by_name.end()) {
        return make_error(StatusCode::kMismatch,
                          "the plan is of another model: $.buckets[%zu].tensors[%zu]: the model has no tensor \"%s\"",
                          b, slot, names[slot].c_str());
      }
      const std::int64_t in_model = tensors_[found->second].elems();
      const std::vector<std::int64_t>& elems = plan.buckets[b].elems;
      if (!elems.empty() && elems[slot] != in_model) {
        return make_error(StatusCode::kMismatch,
                          "the plan is of another model: $.buckets[%zu].elems[%zu]: \"%s\" has %" PRId64
                          " elements in the plan, %" PRId64 " in the model",
                          b, slot, names[slot].c_str(), elems[slot], in_model);
      }
      (*places)[found->second] = {static_cast<int>(b), static_cast<int>(slot)};
    }
  }
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    if ((*places)[t].bucket >= 0) continue;
    return make_error(
        StatusCode::kMismatch,
        "the plan is of another model: $.buckets: expected each tensor of the model in one, but no bucket "
        "of it has the tensor \"%s\"",
        tensors_[t].name.c_str());
  }
  return {};
}

Result<std::unique_ptr<PlanEngine::Schedule>> PlanEngine::make_schedule(const Plan& plan) {
  CORTADO_RETURN_IF_ERROR(check_plan(plan));
  if (plan.topology.world_size() != communicator_->world_size()) {
    return make_error(StatusCode::kMismatch, "the plan is for %d ranks ($.levels), but %d take part",
                      plan.topology.world_size(), communicator_->world_size());
  }
  auto schedule = std::make_unique<Schedule>();
  CORTADO_RETURN_IF_ERROR(check_places(plan, &schedule->places));
  schedule->plan = plan;
  if (schedule_ != nullptr && schedule_->plan.topology == plan.topology) {
    schedule->levels = schedule_->levels;
  } else {
    CORTADO_ASSIGN_OR_RETURN(LevelCommunicators levels, LevelCommunicators::create(communicator_, plan.topology));
    schedule->levels = std::make_shared<const LevelCommunicators>(std::move(levels));
  }
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    Result<Bucket> bucket = make_bucket(plan.buckets[b], schedule.get());
    if (!bucket.ok()) return bucket.status().with_context("$.buckets[" + std::to_string(b) + "]");
    const PlanMessage* const message = bucket.value().message.get();
    schedule->uses_device = schedule->uses_device || (message != nullptr && message->uses_device());
    schedule->buckets.push_back(std::move(bucket).value());
  }
  make_lanes(schedule.get());
  return schedule;
}

Result<PlanEngine::Bucket> PlanEngine::make_bucket(const PlanBucket& planned, Schedule* schedule) const {
  Bucket bucket;
  PlanMessage::Setup setup{.bucket = &planned,
                           .tensors = {},
                           .levels = schedule->levels.get(),
                           .seed = options_.random_seed,
                           .clock = clock_,
                           .device = device_.get()};
  for (const std::string& name : planned.tensors) {
    const std::uint32_t t = find_tensor(tensors_, name).value();
    bucket.tensors.push_back(t);
    setup.tensors.push_back(tensors_[t]);
    bucket.gradient_bytes += tensors_[t].size_bytes();
  }
  if (bucket.gradient_bytes == 0 || passes_through()) return bucket;
  CORTADO_ASSIGN_OR_RETURN(bucket.message, PlanMessage::make(setup));
  return bucket;
}

void PlanEngine::make_lanes(Schedule* schedule) const {
  for (std::size_t b = 0; b < schedule->buckets.size(); ++b) {
    if (schedule->buckets[b].message == nullptr) continue;
    for (const SchemeCollective& collective : schedule->buckets[b].message->collectives()) {
      const Communicator* const communicator = schedule->levels->of(collective.levels);
      auto lane = std::find_if(schedule->lanes.begin(), schedule->lanes.end(),
                               [&](const Lane& l) { return l.communicator == communicator; });
      if (lane == schedule->lanes.end()) {
        lane = schedule->lanes.insert(lane, Lane{.communicator = communicator, .turns = {}});
      }
      lane->turns.push_back(
          {static_cast<std::int64_t>(b) + kLag * collective.ordinal, static_cast<int>(b), collective.ordinal});
    }
  }
  for (Lane& lane : schedule->lanes) {
    std::sort(lane.turns.begin(), lane.turns.end(),
              [](const Turn& a, const Turn& b) { return std::pair(a.time, a.bucket) < std::pair(b.time, b.bucket); });
  }
}

// ---- bookkeeping ---------------------------------------------------------------------------------------------------

void PlanEngine::name_collectives() {
  if (trace_ == nullptr) return;
  for (Bucket& bucket : schedule_->buckets) {
    bucket.names.clear();
    if (bucket.message == nullptr) continue;
    for (const SchemeCollective& collective : bucket.message->collectives()) {
      bucket.names.push_back(trace_->name_collective(collective.name));
    }
  }
}

void PlanEngine::set_trace(TraceRecorder* trace) {
  trace_ = trace;
  name_collectives();
}

// What a message has encoded, decoded and orthogonalised, tensor by tensor.
void PlanEngine::record_work(const Bucket& bucket) {
  for (const TraceEvent& work : bucket.message->work()) {
    const std::uint32_t t = bucket.tensors[static_cast<std::size_t>(work.tensor)];
    record(work.stage, index_of(bucket), static_cast<int>(t), {work.start_ns, work.end_ns},
           work.stage == Stage::kOrthogonalise ? 0 : tensors_[t].size_bytes());
  }
}

// ---- submit --------------------------------------------------------------------------------------------------------

Status PlanEngine::begin_step(const StepContext& context) {
  CORTADO_RETURN_IF_ERROR(begin_any_step(context, /*takes_scale_of_device=*/false));
  delivers_carried_.assign(tensors_.size(), false);
  for (Lane& lane : schedule_->lanes) lane.next = lane.ended = 0;
  undelivered_ = 0;
  for (Bucket& bucket : schedule_->buckets) {
    bucket.missing = 0;
    for (const std::uint32_t t : bucket.tensors) bucket.missing += tensors_[t].elems() > 0;
    if (bucket.message == nullptr) continue;
    ++undelivered_;
    bucket.message->begin_step(context);
  }
  return {};
}

Status PlanEngine::write(std::uint32_t t, void* gradient) {
  if (tensors_[t].elems() == 0) return {};
  Bucket& bucket = bucket_of(t);
  const bool held = context_.holds_zero_gradients && all_bits_zero(gradient, tensors_[t].size_bytes());
  const auto carried = carried_.find(t);
  delivers_carried_[t] = carried != carried_.end() && !held && bucket.message->takes_carried(slot_of(t));
  Interval interval{.start_ns = clock_->now_ns()};
  bucket.message->write(slot_of(t), gradient, delivers_carried_[t] ? carried->second.data() : nullptr);
  interval.end_ns = clock_->now_ns();
  record(Stage::kEncode, -1, static_cast<int>(t), interval, tensors_[t].size_bytes());
  return --bucket.missing == 0 ? begin_message(bucket) : Status();
}

Status PlanEngine::begin_message(Bucket& bucket) {
  CORTADO_RETURN_IF_ERROR(bucket.message->begin(step_));
  record_work(bucket);
  if (bucket.message->state() == SchemeState::kDone) deliver(bucket);
  return {};
}

Status PlanEngine::submit(std::span<const Gradient> gradients) {
  CORTADO_RETURN_IF_ERROR(check_in_step("submit"));
  CORTADO_RETURN_IF_ERROR(note_submitted(gradients, tensors_, &submitted_));
  if (passes_through()) return {};
  for (const Gradient& gradient : gradients) {
    if (const Status status = write(gradient.tensor, gradient.data); !status.ok()) return fail(status);
    // What is complete leaves before the next gradient is read.
    bool moved = false;
    if (const Status status = start_turns(&moved); !status.ok()) return fail(status);
  }
  return progress();
}

Status PlanEngine::submit_buffer(std::span<const Gradient>, void*, std::int64_t, DType) {
  return make_error(StatusCode::kFailedPrecondition,
                    "submit_buffer: a plan sends no buffers of the caller's; use submit");
}

// ---- collectives ---------------------------------------------------------------------------------------------------

Status PlanEngine::progress() {
  for (bool moved = true; moved;) {
    moved = false;
    if (const Status status = start_turns(&moved); !status.ok()) return fail(status);
    if (const Status status = test_oldest(&moved); !status.ok()) return fail(status);
    if (const Status status = take_from_device(&moved); !status.ok()) return fail(status);
  }
  return {};
}

// Lets those messages go on that the device has encoded or decoded.
Status PlanEngine::take_from_device(bool* moved) {
  if (!schedule_->uses_device) return {};
  for (Bucket& bucket : schedule_->buckets) {
    if (!is_on_device(bucket)) continue;
    CORTADO_ASSIGN_OR_RETURN(const bool ended, bucket.message->test());
    if (!ended) continue;
    *moved = true;
    CORTADO_RETURN_IF_ERROR(bucket.message->proceed());
    record_work(bucket);
    if (bucket.message->state() == SchemeState::kDone) deliver(bucket);
  }
  return {};
}

Status PlanEngine::start_turns(bool* moved) {
  for (Lane& lane : schedule_->lanes) {
    for (; lane.next < lane.turns.size(); ++lane.next) {
      const Turn& turn = lane.turns[lane.next];
      Bucket& bucket = bucket_of(turn);
      const bool is_next = bucket.missing == 0 && bucket.message->state() == SchemeState::kReady &&
                           bucket.message->collective().ordinal == turn.ordinal;
      if (!is_next) break;
      bucket.in_flight_ns = clock_->now_ns();
      bucket.in_flight_bytes = -bucket.message->sent_bytes();
      CORTADO_RETURN_IF_ERROR(bucket.message->start());
      bucket.in_flight_bytes += bucket.message->sent_bytes();
      *moved = true;
    }
  }
  return {};
}

// Collectives of one communicator end in the order in which they were started, or nearly: only the oldest is asked for.
Status PlanEngine::test_oldest(bool* moved) {
  for (Lane& lane : schedule_->lanes) {
    for (; lane.ended < lane.next; ++lane.ended) {
      Bucket& bucket = bucket_of(lane.turns[lane.ended]);
      if (bucket.message->state() == SchemeState::kInFlight) CORTADO_RETURN_IF_ERROR(bucket.message->test().status());
      if (bucket.message->state() != SchemeState::kArrived) break;
      *moved = true;
      CORTADO_RETURN_IF_ERROR(proceed(bucket));
    }
  }
  return {};
}

Status PlanEngine::proceed(Bucket& bucket) {
  Interval interval{.start_ns = clock_->now_ns()};
  const SchemeCollective& collective = bucket.message->collective();
  const auto place = static_cast<std::size_t>(&collective - bucket.message->collectives().data());
  record(Stage::kCommunicate, index_of(bucket), -1, {bucket.in_flight_ns, interval.start_ns}, bucket.in_flight_bytes,
         trace_ == nullptr ? -1 : bucket.names[place]);
  CORTADO_RETURN_IF_ERROR(bucket.message->proceed());
  if (collective.is_checked) {
    const std::vector<TraceEvent>& work = bucket.message->work();
    interval.end_ns = work.empty() ? clock_->now_ns() : work.front().start_ns;
    record(Stage::kDecode, index_of(bucket), -1, interval, bucket.gradient_bytes);
  }
  record_work(bucket);
  if (bucket.message->state() == SchemeState::kDone) deliver(bucket);
  return {};
}

Status PlanEngine::wait_for_earliest() {
  const Turn* earliest = nullptr;
  for (const Lane& lane : schedule_->lanes) {
    if (lane.ended == lane.next) continue;
    const Turn& oldest = lane.turns[lane.ended];
    if (earliest == nullptr || oldest.time < earliest->time) earliest = &oldest;
  }
  CORTADO_CHECK(earliest != nullptr, "no message can go on");
  Bucket& bucket = bucket_of(*earliest);
  Interval interval{.start_ns = clock_->now_ns()};
  CORTADO_RETURN_IF_ERROR(bucket.message->wait(timeout()));
  interval.end_ns = clock_->now_ns();
  record(Stage::kWait, index_of(bucket), -1, interval, 0);
  return {};
}

bool PlanEngine::awaits_device() const {
  return schedule_->uses_device && std::any_of(schedule_->buckets.begin(), schedule_->buckets.end(), is_on_device);
}

// A rank that waited for a peer meanwhile would keep others from what they wait for.
Status PlanEngine::wait_for_device() {
  if (!awaits_device()) return {};
  Interval interval{.start_ns = clock_->now_ns()};
  interval.end_ns = interval.start_ns;
  while (awaits_device()) {
    DeviceWait wait(communicator_, clock_, timeout(), "encoded and decoded its part of the step");
    for (bool moved = false; !moved && awaits_device();) {
      const std::int64_t pause_ns = clock_->now_ns();
      if (const Status status = wait.pause(); !status.ok()) return fail(status);
      interval.end_ns += clock_->now_ns() - pause_ns;  // of the pauses alone: the rest is recorded as what it is
      if (const Status status = take_from_device(&moved); !status.ok()) return fail(status);
      CORTADO_RETURN_IF_ERROR(progress());
    }
  }
  record(Stage::kWait, -1, -1, interval, 0);
  return {};
}

void PlanEngine::deliver(Bucket& bucket) {
  for (std::size_t slot = 0; slot < bucket.tensors.size(); ++slot) {
    const std::uint32_t t = bucket.tensors[slot];
    if (tensors_[t].elems() == 0) continue;
    Interval interval{.start_ns = clock_->now_ns()};
    bool is_finite = bucket.message->read(static_cast<int>(slot), submitted_[t].data);
    if (tensors_[t].dtype == DType::kFloat16) {  // what residuals add up to may be above the largest
      const std::int64_t elems = tensors_[t].elems();
      is_finite = is_finite && all_finite(submitted_[t].data, elems, DType::kFloat16);
    }
    interval.end_ns = clock_->now_ns();
    record(Stage::kDecode, index_of(bucket), static_cast<int>(t), interval, tensors_[t].size_bytes());
    if (!is_finite) note_non_finite(tensors_[t].name);
  }
  --undelivered_;
}

// ---- finish --------------------------------------------------------------------------------------------------------

Result<StepOutcome> PlanEngine::finish_step(const LocalGradient&) {
  CORTADO_RETURN_IF_ERROR(check_in_step("finish_step"));
  last_payload_bytes_ = 0;
  last_messages_ = 0;
  if (!passes_through()) {
    for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
      if (submitted_[t].submitted || tensors_[t].elems() == 0) continue;
      return fail(not_submitted(t));
    }
    while (undelivered_ > 0) {
      CORTADO_RETURN_IF_ERROR(progress());
      CORTADO_RETURN_IF_ERROR(wait_for_device());
      if (undelivered_ == 0) break;
      if (const Status status = wait_for_earliest(); !status.ok()) return fail(status);
    }
    for (const Bucket& bucket : schedule_->buckets) {
      if (bucket.message == nullptr) continue;
      last_payload_bytes_ += bucket.message->sent_bytes();
      last_messages_ += static_cast<std::int64_t>(bucket.message->collectives().size());
    }
  }
  finite_ ? commit() : static_cast<void>(++non_finite_steps_);
  end_step();
  return StepOutcome{.finite = finite_};
}

void PlanEngine::commit() {
  ++step_;
  for (Bucket& bucket : schedule_->buckets) {
    if (bucket.message != nullptr) bucket.message->commit();
  }
  std::erase_if(carried_, [&](const auto& entry) { return delivers_carried_[entry.first]; });
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cinttypes>

#include "core/check.h"
#include "core/finite.h"
#include "core/format.h"
#include "engine/dense_slot.h"
#include "engine/engine_impl.h"

namespace cortado {

using Method = EngineOptions::Method;

// ---- bookkeeping ---------------------------------------------------------------------------------------------------

void EngineImpl::record_message(Round& round, int message) {
  record(Stage::kCommunicate, message, -1, {round.start_ns(message), clock_->now_ns()}, round.last_sent_bytes(message));
}

// ---- submit: encode and start --------------------------------------------------------------------------------------

Status EngineImpl::begin_step(const StepContext& context) {
  CORTADO_RETURN_IF_ERROR(begin_any_step(context, /*takes_scale_of_device=*/device_ != nullptr || passes_through()));
  std::fill(steps_.begin(), steps_.end(), TensorStep{});
  buffers_.clear();
  deferred_.clear();
  waiting_.clear();
  next_waiting_ = 0;
  if (passes_through() || options_.method == Method::kNone) return {};
  if (!in_warm_up() && warm_up_ != nullptr) {
    warm_up_.reset();
    allocate_feedback();
  }
  if (const bool needs = warm_up_ == nullptr && device_ == nullptr && !may_decode_early(); needs != has_rolled_back_) {
    needs ? allocate_rolled_back() : release_rolled_back();
  }
  Round& round = first_round();
  round.begin(round.layouts().of_parity.size() == 2 ? static_cast<int>(phase_step_ & 1) : 0);
  if (second_ != nullptr) second_->begin(0);
  return device_ != nullptr ? begin_step_on_device() : Status();
}

bool EngineImpl::is_held(std::uint32_t t) const {
  if (is_on_device(t)) return steps_[t].held;
  return context_.holds_zero_gradients && all_bits_zero(submitted_[t].data, tensors_[t].size_bytes());
}

void EngineImpl::encode(std::uint32_t t) {
  Round& round = first_round();
  const Slot* slot = round.find_slot(t);
  if (slot == nullptr) return;  // no elements
  TensorStep& step = steps_[t];
  step.encode.start_ns = clock_->now_ns();
  void* data = round.slot_data(t);
  if (codec_tensors_[t] != nullptr && slot->kind != SlotKind::kDense) {
    step.status = encode_payload(t, round);
  } else if (slot->kind == SlotKind::kDense) {
    const DenseSlotResult result = write_dense_slot(submitted_[t].data, tensors_[t].dtype, slot->elems,
                                                    communicator_->world_size(), data, round.layouts().dtype);
    step.finite = result.finite;
    step.sum_squares = result.sum_squares;
    step.error_squares = result.error_squares;
  } else {
    if (is_held(t)) {
      low_rank_[t]->hold(slot->kind, data);
    } else {
      step.finite = low_rank_[t]->encode(slot->kind, submitted_[t].data, context_.gradient_scale, data);
    }
  }
  step.encode.end_ns = clock_->now_ns();
}

Status EngineImpl::encode_payload(std::uint32_t t, Round& round) {
  TensorStep& step = steps_[t];
  const Result<CodecTensor::Encoded> encoded = scratch_.with([&](CodecScratch& scratch) {
    return codec_tensors_[t]->encode(is_held(t) ? nullptr : submitted_[t].data, context_.gradient_scale, phase_step_,
                                     round.slot_bytes(t), scratch);
  });
  if (!encoded.ok()) return encoded.status().with_context("encode of \"" + tensors_[t].name + "\"");
  step.payload_bytes = encoded.value().bytes;
  step.finite = encoded.value().finite;
  return {};
}

Status EngineImpl::submit(std::span<const Gradient> gradients) {
  if (options_.method == Method::kNone && !passes_through()) {
    return make_error(StatusCode::kFailedPrecondition, "submit: codec none takes whole buffers (submit_buffer)");
  }
  CORTADO_RETURN_IF_ERROR(check_in_step("submit"));
  CORTADO_RETURN_IF_ERROR(note_submitted(gradients, tensors_, &submitted_));
  if (passes_through()) return {};
  if (options_.overlap) return device_ != nullptr ? submit_on_device(gradients) : encode_and_start(gradients);
  deferred_.insert(deferred_.end(), gradients.begin(), gradients.end());
  return {};
}

// How many of `gradients` it takes until a message can leave and all threads have had work: in sum so many times the
// largest tensor as there are threads. All if it does not come to that.
std::size_t EngineImpl::count_to_message(std::span<const Gradient> gradients) {
  const Round& round = first_round();
  const int next = round.next_to_start();
  int written = 0;  // of its tensors
  bool can_leave = false;
  std::int64_t elems = 0, largest = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const std::uint32_t t = gradients[i].tensor;
    const int message = round.message_of(t);
    if (message < 0) continue;
    can_leave = can_leave || (message == next && ++written == round.missing(next));
    elems += tensors_[t].elems();
    largest = std::max(largest, tensors_[t].elems());
    if (can_leave && elems >= pool_.threads() * largest) return i + 1;
  }
  return gradients.size();
}

Status EngineImpl::encode_and_start(std::span<const Gradient> gradients) {
  // A message leaves when it is complete, while what was submitted with it is still to be encoded; one that is complete
  // already, at once.
  if (const Status status = first_round().start_ready(); !status.ok()) return fail(status);
  while (!gradients.empty()) {
    const std::span<const Gradient> now = gradients.first(count_to_message(gradients));
    gradients = gradients.subspan(now.size());
    // One thread encodes a tensor, however many there are, so results don't depend on their number.
    pool_.parallel_for(static_cast<std::int64_t>(now.size()),
                       [&](std::int64_t i) { encode(now[static_cast<std::size_t>(i)].tensor); });
    for (const Gradient& gradient : now) {
      const std::uint32_t t = gradient.tensor;
      if (first_round().find_slot(t) == nullptr) continue;
      if (!steps_[t].status.ok()) return fail(steps_[t].status);
      record(Stage::kEncode, -1, static_cast<int>(t), steps_[t].encode, tensors_[t].size_bytes());
      first_round().mark_written(t, steps_[t].finite, steps_[t].payload_bytes);
    }
    if (const Status status = first_round().start_ready(); !status.ok()) return fail(status);
  }
  return poll();
}

// ---- absorb: what arrives ------------------------------------------------------------------------------------------

// Absorbs messages that have ended, in order. With a second round there is nothing to gain: it must not start before
// all of the first has been started (run_second_round).
Status EngineImpl::poll() {
  if (second_ != nullptr && warm_up_ == nullptr) return {};
  Round& round = first_round();
  for (int m = 0; m < round.message_count(); ++m) {
    if (round.state(m) == MessageState::kDone || round.state(m) == MessageState::kArrived) continue;
    if (round.state(m) != MessageState::kInFlight) break;
    const Result<bool> ended = round.test(m);
    if (!ended.ok()) return fail(ended.status());
    if (!ended.value()) break;
    CORTADO_RETURN_IF_ERROR(absorb(round, m));
  }
  return {};
}

Status EngineImpl::wait_for(Round& round, int message) {
  if (round.state(message) != MessageState::kInFlight) return {};
  CORTADO_RETURN_IF_ERROR(decode_while_waiting(round, message));
  if (round.state(message) == MessageState::kInFlight) {
    Interval interval{.start_ns = clock_->now_ns()};
    if (const Status status = round.wait(message, timeout()); !status.ok()) return fail(status);
    interval.end_ns = clock_->now_ns();
    record(Stage::kWait, message, -1, interval, 0);
  }
  return absorb(round, message);
}

// As long as `message` is on its way there is nothing else to do: decodes what waits for the verdict, one tensor a
// thread at a time. (Where a transport goes on only when it is asked, it stands still for as long.)
Status EngineImpl::decode_while_waiting(Round& round, int message) {
  while (finite_ && next_waiting_ < waiting_.size()) {
    const Result<bool> ended = round.test(message);
    if (!ended.ok()) return fail(ended.status());
    if (ended.value()) return {};
    const auto left = std::span(waiting_).subspan(next_waiting_);
    const auto now = left.first(std::min(left.size(), static_cast<std::size_t>(pool_.threads())));
    next_waiting_ += now.size();
    pool_.parallel_for(static_cast<std::int64_t>(now.size()), [&](std::int64_t i) {
      const WaitingPayload& payload = now[static_cast<std::size_t>(i)];
      const std::int64_t start_ns = clock_->now_ns();
      prepare_rollback(payload.slot->tensor);
      decode_slot(round, payload.message, *payload.slot, CodecTensor::Settle::kIfUndoable);
      steps_[payload.slot->tensor].decode.start_ns = start_ns;
    });
    for (const WaitingPayload& payload : now) {
      if (!steps_[payload.slot->tensor].status.ok()) return fail(steps_[payload.slot->tensor].status);
    }
  }
  return {};
}

void EngineImpl::prepare_rollback(std::uint32_t t) {
  CodecTensor& tensor = *codec_tensors_[t];
  float* const memory = rolled_back_[t].data();
  tensor.prepare_rollback(
      {.residual = memory, .velocity = tensor.memory().velocity == nullptr ? nullptr : memory + tensors_[t].elems()});
}

// Without error feedback, or with a spare residual, a rollback needs no gradient; nor does it if the caller keeps one.
bool EngineImpl::may_decode_early() const { return context_.keeps_local_gradients || !has_feedback() || is_exact(); }

// The verdict is taken from what arrived, which is the same on every rank.
void EngineImpl::look_for_non_finite(Round& round, int message) {
  const std::vector<Slot>& slots = round.layout().messages[message].slots;
  if (round.is_gathered(message)) {
    for (std::size_t s = 0; s < slots.size(); ++s) {
      const int rank = round.non_finite_rank(message, static_cast<int>(s));
      if (rank >= 0) note_non_finite(tensors_[slots[s].tensor].name, rank);
      steps_[slots[s].tensor].finite_on_all = rank < 0;
    }
    return;
  }
  const int rank = round.non_finite_rank(message);
  for (const Slot& slot : slots) {
    if (!all_finite(round.slot_data(message, slot), slot.elems, round.layouts().dtype)) {
      note_non_finite(tensors_[slot.tensor].name, rank);
    }
  }
  if (rank >= 0) note_non_finite("message " + std::to_string(message), rank);
}

template <typename Act>
Status EngineImpl::with_payload(Round& round, int message, const Slot& slot, Act&& act) {
  const int index = round.slot_index(slot.tensor);
  const auto payload = [&](int rank, std::span<std::byte> joint) { return round.payload(message, index, rank, joint); };
  const Status status = scratch_.with(
      [&](CodecScratch& scratch) { return act(*codec_tensors_[slot.tensor], PayloadOfRank(payload), scratch); });
  return status.ok()
             ? status
             : status.with_context(round.name_of(message) + ": decode of \"" + tensors_[slot.tensor].name + "\"");
}

template <typename Act>
Status EngineImpl::for_slots(Round& round, int message, Act&& act) {
  const std::vector<Slot>& slots = round.layout().messages[message].slots;
  pool_.parallel_for(static_cast<std::int64_t>(slots.size()),
                     [&](std::int64_t s) { act(slots[static_cast<std::size_t>(s)]); });
  for (const Slot& slot : slots)
    if (!steps_[slot.tensor].status.ok()) return fail(steps_[slot.tensor].status);
  return {};
}

Status EngineImpl::decode_payload(Round& round, int message, const Slot& slot, CodecTensor::Settle settle,
                                  void* output) {
  return with_payload(round, message, slot, [&](CodecTensor& tensor, PayloadOfRank payload, CodecScratch& scratch) {
    CodecTensor::Arrived arrived{.payload = payload, .summed = {}};
    if (slot.kind == SlotKind::kValues) {
      arrived.summed = {static_cast<const float*>(round.slot_data(message, slot)),
                        static_cast<std::size_t>(slot.elems)};
      arrived.finite = all_finite(arrived.summed.data(), slot.elems, DType::kFloat32);
    } else {
      arrived.finite = round.non_finite_rank(message, round.slot_index(slot.tensor)) < 0;
    }
    return tensor.decode(arrived, context_.gradient_scale, settle, output, scratch);
  });
}

// What every rank received of one slot, before anything is made of it.
Status EngineImpl::check_payloads(Round& round, int message, const Slot& slot) {
  const int index = round.slot_index(slot.tensor);
  return with_payload(round, message, slot, [&](CodecTensor&, PayloadOfRank payload, CodecScratch& scratch) -> Status {
    for (int rank = 0; rank < communicator_->world_size(); ++rank) {
      const auto bytes = payload(rank, scratch.joint.span());
      CORTADO_RETURN_IF_ERROR(round.check_payload(message, index, rank, bytes));
    }
    return {};
  });
}

void EngineImpl::decode_values(Round& round, int message, const Slot& slot, CodecTensor::Settle settle, void* output) {
  TensorStep& step = steps_[slot.tensor];
  if (codec_tensors_[slot.tensor] != nullptr) {
    step.status = decode_payload(round, message, slot, settle, output);
  } else {
    low_rank_[slot.tensor]->decode(slot.kind, round.slot_data(message, slot), context_.gradient_scale, output);
  }
  // What residuals add up to may be above the largest fp16. Of bfloat16, that is as large as of float32.
  const EngineTensor& tensor = tensors_[slot.tensor];
  step.overflowed =
      looks_for_overflow_ && may_overflow(slot.tensor) && !all_finite(output, tensor.elems(), tensor.dtype);
}

void EngineImpl::record_decode(int message, const Slot& slot) {
  record(Stage::kDecode, message, static_cast<int>(slot.tensor), steps_[slot.tensor].decode,
         tensors_[slot.tensor].size_bytes());
}

void EngineImpl::decode_slot(Round& round, int message, const Slot& slot, CodecTensor::Settle settle) {
  TensorStep& step = steps_[slot.tensor];
  step.decode.start_ns = clock_->now_ns();
  if (slot.kind == SlotKind::kDense) {
    read_dense_slot(round.slot_data(message, slot), round.layouts().dtype, slot.elems, communicator_->world_size(),
                    submitted_[slot.tensor].data, tensors_[slot.tensor].dtype);
  } else {
    decode_values(round, message, slot, settle, submitted_[slot.tensor].data);
  }
  step.decoded = true;
  step.decode.end_ns = clock_->now_ns();
}

// To the device, which decodes after the verdict.
Status EngineImpl::take_slot(Round& round, int message, const Slot& slot) {
  return with_payload(round, message, slot, [&](CodecTensor&, PayloadOfRank payload, CodecScratch& scratch) -> Status {
    for (int rank = 0; rank < communicator_->world_size(); ++rank) {
      CORTADO_RETURN_IF_ERROR(device_->take(slot.tensor, rank, payload(rank, scratch.joint.span())));
    }
    return {};
  });
}

void EngineImpl::receive_slot(Round& round, int message, const Slot& slot) {
  if (slot.kind == SlotKind::kPayload && is_on_device(slot.tensor)) {
    steps_[slot.tensor].status = take_slot(round, message, slot);
    return;
  }
  if (slot.kind == SlotKind::kValues && is_on_device(slot.tensor)) {
    const auto* const sums = static_cast<const float*>(round.slot_data(message, slot));
    device_->take_sum(slot.tensor, steps_[slot.tensor].held, {sums, static_cast<std::size_t>(slot.elems)});
    return;
  }
  const bool first_of_two = second_ != nullptr && &round != second_.get();
  if (slot.kind != SlotKind::kDense && is_factored_on_device(slot.tensor)) {
    if (!first_of_two) {
      device_->matrices_of(slot.tensor).take(device_->slot_of(slot.tensor), round.slot_data(message, slot));
    }
  } else if (slot.kind == SlotKind::kDense || (!first_of_two && may_decode_early())) {
    decode_slot(round, message, slot, finite_ ? CodecTensor::Settle::kIfUndoable : CodecTensor::Settle::kNever);
  }
  if (low_rank_[slot.tensor] == nullptr || slot.kind == SlotKind::kDense) return;
  LowRankTensor& tensor = *low_rank_[slot.tensor];
  const void* data = round.slot_data(message, slot);
  Interval& interval = steps_[slot.tensor].orthogonalise;
  interval.start_ns = clock_->now_ns();
  if (first_of_two) {
    tensor.receive_first_round(data, phase_step_);
  } else {
    tensor.receive(slot.kind, data, phase_step_);
  }
  interval.end_ns = clock_->now_ns();
}

Status EngineImpl::absorb(Round& round, int message) {
  record_message(round, message);
  if (round.is_gathered(message)) {
    if (const Status status = round.check_headers(message); !status.ok()) return fail(status);
  }
  look_for_non_finite(round, message);
  if (round.is_gathered(message) && round.lacks_rest(message)) return {};
  if (round.is_gathered(message)) {
    CORTADO_RETURN_IF_ERROR(for_slots(
        round, message, [&](const Slot& slot) { steps_[slot.tensor].status = check_payloads(round, message, slot); }));
  }
  CORTADO_RETURN_IF_ERROR(for_slots(round, message, [&](const Slot& slot) { receive_slot(round, message, slot); }));
  for (const Slot& slot : round.layout().messages[message].slots) {
    const TensorStep& step = steps_[slot.tensor];
    if (step.decode.end_ns != 0) record_decode(message, slot);
    if (step.orthogonalise.end_ns != 0) {
      record(Stage::kOrthogonalise, message, static_cast<int>(slot.tensor), step.orthogonalise, 0);
    }
    if (!step.decoded && !rolled_back_[slot.tensor].empty()) waiting_.push_back({message, &slot});
    if (step.overflowed) note_non_finite(tensors_[slot.tensor].name);
  }
  round.mark_done(message);
  return {};
}

// Decoding a step's sums in place leaves no gradient to roll back with, so what may be too large is decoded elsewhere
// first.
Status EngineImpl::look_for_overflow(Round& round) {
  for (int m = 0; m < round.message_count(); ++m) {
    for (const Slot& slot : round.layout().messages[m].slots) {
      if (slot.kind == SlotKind::kDense || is_on_device(slot.tensor) || !may_overflow(slot.tensor)) continue;
      if (!steps_[slot.tensor].decoded) {
        trial_.resize(std::max(trial_.size(), static_cast<std::size_t>(tensors_[slot.tensor].size_bytes())));
        decode_values(round, m, slot, CodecTensor::Settle::kNever, trial_.data());
        if (!steps_[slot.tensor].status.ok()) return fail(steps_[slot.tensor].status);
      }
      if (steps_[slot.tensor].overflowed) note_non_finite(tensors_[slot.tensor].name);
    }
  }
  return {};
}

Status EngineImpl::decode_after_verdict(Round& round) {
  const CodecTensor::Settle settle = finite_ ? CodecTensor::Settle::kYes : CodecTensor::Settle::kNever;
  const auto was_to_wait = [&](const Slot& slot) {
    return slot.kind != SlotKind::kDense && !is_on_device(slot.tensor);
  };
  for (int m = 0; m < round.message_count(); ++m) {
    CORTADO_RETURN_IF_ERROR(for_slots(round, m, [&](const Slot& slot) {
      if (was_to_wait(slot) && !steps_[slot.tensor].decoded) decode_slot(round, m, slot, settle);
    }));
    for (const Slot& slot : round.layout().messages[m].slots) {
      if (was_to_wait(slot)) record_decode(m, slot);
    }
  }
  return {};
}

// ---- finish --------------------------------------------------------------------------------------------------------

// Power-SGD: the column factors, on the basis that the first round's sums give. All messages of the first round were
// started before the first of these on every rank, and both run in layout order.
Status EngineImpl::run_second_round() {
  const bool is_on_device = device_ != nullptr && device_fallback_.empty();
  for (int m = 0; m < first_->message_count(); ++m) {
    CORTADO_RETURN_IF_ERROR(wait_for(*first_, m));
    if (is_on_device) {
      CORTADO_RETURN_IF_ERROR(encode_second_round_on_device(m));
      continue;
    }
    for (const Slot& slot : first_->layout().messages[m].slots) {
      if (slot.kind == SlotKind::kDense) continue;
      Interval interval{.start_ns = clock_->now_ns()};
      const bool finite = low_rank_[slot.tensor]->encode_second_round(second_->slot_data(slot.tensor));
      interval.end_ns = clock_->now_ns();
      record(Stage::kEncode, m, static_cast<int>(slot.tensor), interval, tensors_[slot.tensor].size_bytes());
      second_->mark_written(slot.tensor, finite);
    }
    if (const Status status = second_->start_ready(); !status.ok()) return fail(status);
  }
  if (is_on_device) CORTADO_RETURN_IF_ERROR(wait_for_arrivals());
  for (int m = 0; m < second_->message_count(); ++m) CORTADO_RETURN_IF_ERROR(wait_for(*second_, m));
  return {};
}

// What did not fit its message's capacity. On every rank all messages were started before the first of these.
Status EngineImpl::gather_rests() {
  for (int m = 0; m < first_->message_count(); ++m) {
    CORTADO_RETURN_IF_ERROR(wait_for(*first_, m));
    if (first_->state(m) != MessageState::kArrived) continue;
    if (const Status status = first_->start_rest(m); !status.ok()) return fail(status);
  }
  for (int m = 0; m < first_->message_count(); ++m) CORTADO_RETURN_IF_ERROR(wait_for(*first_, m));
  return {};
}

// A step that is finite on all ranks becomes the state; any other leaves none behind.
Status EngineImpl::commit(Round& last) {
  for (int m = 0; m < last.message_count(); ++m) {
    CORTADO_RETURN_IF_ERROR(for_slots(last, m, [&](const Slot& slot) {
      if (slot.kind == SlotKind::kDense) return;
      if (low_rank_[slot.tensor] != nullptr) return low_rank_[slot.tensor]->commit(slot.kind);
      if (is_on_device(slot.tensor)) return;
      steps_[slot.tensor].status =
          with_payload(last, m, slot, [&](CodecTensor& tensor, PayloadOfRank payload, CodecScratch& scratch) {
            return tensor.commit(payload, scratch);
          });
    }));
  }
  ++step_;
  if (last_step_compressed_) ++phase_step_;
  return {};
}

Status EngineImpl::roll_back(Round& last, const LocalGradient& local_gradient) {
  ++non_finite_steps_;
  for (int m = 0; m < last.message_count(); ++m) {
    for (const Slot& slot : last.layout().messages[m].slots) {
      if (slot.kind == SlotKind::kDense || is_on_device(slot.tensor)) continue;
      const bool overwritten = steps_[slot.tensor].decoded && context_.keeps_local_gradients;
      const void* gradient = overwritten ? local_gradient(slot.tensor) : submitted_[slot.tensor].data;
      if (low_rank_[slot.tensor] != nullptr) {
        low_rank_[slot.tensor]->rollback(gradient);
        continue;
      }
      const Status status =
          with_payload(last, m, slot, [&](CodecTensor& tensor, PayloadOfRank payload, CodecScratch& scratch) {
            return tensor.rollback(gradient, payload, scratch);
          });
      if (!status.ok()) return fail(status);
    }
  }
  return {};
}

Status EngineImpl::submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) {
  CORTADO_RETURN_IF_ERROR(check_in_step("submit_buffer"));
  if (options_.method != Method::kNone) {
    return make_error(StatusCode::kFailedPrecondition, "submit_buffer: only codec none sends the caller's own buffers");
  }
  for (const Gradient& gradient : gradients) {
    if (gradient.tensor >= tensors_.size()) {
      return make_error(StatusCode::kInvalidArgument, "submit_buffer: there is no tensor %u, only %zu", gradient.tensor,
                        tensors_.size());
    }
    submitted_[gradient.tensor].submitted = true;
  }
  if (passes_through() || elems == 0) return {};
  buffers_.push_back({data, elems, dtype, gradients.empty() ? 0 : gradients.front().tensor, gradients.size()});
  return options_.overlap ? start_buffer(buffers_.size() - 1) : Status();
}

std::string EngineImpl::name_of_buffer(std::size_t buffer) const {
  const BufferRun& run = buffers_[buffer];
  const std::string name = "buffer " + std::to_string(buffer);
  return run.tensors == 0 ? name : name + " (" + name_tensors(tensors_[run.first_tensor].name, run.tensors) + ")";
}

Status EngineImpl::start_buffer(std::size_t buffer) {
  BufferRun& run = buffers_[buffer];
  Interval interval{.start_ns = clock_->now_ns()};
  scale_in_place(run.data, run.elems, run.dtype, communicator_->world_size());
  interval.end_ns = clock_->now_ns();
  record(Stage::kEncode, static_cast<int>(buffer), -1, interval, run.bytes());
  const Result<WorkId> work = communicator_->start_all_reduce(run.data, run.elems, run.dtype);
  if (!work.ok()) return fail(work.status().with_context(name_of_buffer(buffer) + ": communicate"));
  run.work = work.value();
  run.start_ns = interval.end_ns;
  return {};
}

Status EngineImpl::finish_buffers() {
  for (std::size_t b = 0; !options_.overlap && b < buffers_.size(); ++b) CORTADO_RETURN_IF_ERROR(start_buffer(b));
  for (std::size_t b = 0; b < buffers_.size(); ++b) {
    Interval interval{.start_ns = clock_->now_ns()};
    if (const Status status = communicator_->wait(buffers_[b].work, timeout()); !status.ok()) {
      return fail(status.with_context(name_of_buffer(b) + ": communicate"));
    }
    interval.end_ns = clock_->now_ns();
    record(Stage::kWait, static_cast<int>(b), -1, interval, 0);
    record(Stage::kCommunicate, static_cast<int>(b), -1, {buffers_[b].start_ns, interval.end_ns}, buffers_[b].bytes());
  }
  return {};
}

Result<StepOutcome> EngineImpl::finish_step(const LocalGradient& local_gradient) {
  CORTADO_RETURN_IF_ERROR(check_in_step("finish_step"));
  if (context_.keeps_local_gradients && !local_gradient) {
    return make_error(StatusCode::kInvalidArgument,
                      "finish_step: keeps_local_gradients was promised, no function given");
  }
  last_payload_bytes_ = 0;
  last_messages_ = 0;
  if (!passes_through() && options_.method == Method::kNone) {
    CORTADO_RETURN_IF_ERROR(finish_buffers());
    for (const BufferRun& run : buffers_) last_payload_bytes_ += run.bytes();
    last_messages_ = static_cast<std::int64_t>(buffers_.size());
    ++step_;
  } else if (!passes_through()) {
    for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
      if (!submitted_[t].submitted && first_round().find_slot(t) != nullptr) {
        return fail(not_submitted(t));
      }
    }
    if (!options_.overlap) {
      CORTADO_RETURN_IF_ERROR(device_ != nullptr ? submit_on_device(deferred_) : encode_and_start(deferred_));
    }
    if (device_ != nullptr) CORTADO_RETURN_IF_ERROR(wait_for_arrivals());
    CORTADO_RETURN_IF_ERROR(finish_rounds(local_gradient));
  } else {
    ++step_;
  }
  end_step();
  return StepOutcome{.finite = finite_};
}

Status EngineImpl::finish_rounds(const LocalGradient& local_gradient) {
  const bool two_rounds = second_ != nullptr && warm_up_ == nullptr;
  Round& last = two_rounds ? *second_ : first_round();
  if (two_rounds) {
    CORTADO_RETURN_IF_ERROR(run_second_round());
  } else if (warm_up_ == nullptr) {
    CORTADO_RETURN_IF_ERROR(gather_rests());
  } else {
    for (int m = 0; m < last.message_count(); ++m) CORTADO_RETURN_IF_ERROR(wait_for(last, m));
  }
  last_payload_bytes_ = first_round().sent_bytes() + (two_rounds ? second_->sent_bytes() : 0);
  last_messages_ = first_round().collectives() + (two_rounds ? second_->collectives() : 0);
  last_step_compressed_ = warm_up_ == nullptr && compresses();
  if (warm_up_ != nullptr) ++warm_up_steps_;
  if (finite_ && looks_for_overflow_ && !may_decode_early()) CORTADO_RETURN_IF_ERROR(look_for_overflow(last));
  // Reads the gradients that decoding overwrites.
  if (!finite_) CORTADO_RETURN_IF_ERROR(roll_back(last, local_gradient));
  if (!may_decode_early()) CORTADO_RETURN_IF_ERROR(decode_after_verdict(last));
  if (finite_) CORTADO_RETURN_IF_ERROR(commit(last));
  if (device_ != nullptr) CORTADO_RETURN_IF_ERROR(finish_on_device());
  last.adapt_capacities();
  return {};
}

}  // namespace cortado

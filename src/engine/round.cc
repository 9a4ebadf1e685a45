// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/round.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/float16.h"

namespace cortado {

namespace {

constexpr std::int64_t kAlignmentBytes = 64;

std::int64_t align_up(std::int64_t bytes) { return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes; }

void store_flag(void* flags, int index, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<std::uint16_t*>(flags)[index] = float_to_fp16(value);
      break;
    case DType::kBFloat16:
      static_cast<std::uint16_t*>(flags)[index] = float_to_bf16(value);
      break;
    default:
      static_cast<float*>(flags)[index] = value;
  }
}

bool flag_is_set(const void* flags, int index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(flags)[index] != 0.0f;
  return (static_cast<const std::uint16_t*>(flags)[index] & 0x7fff) != 0;
}

}  // namespace

const char* message_state_name(MessageState state) {
  constexpr const char* kNames[] = {"filling", "ready", "in flight", "arrived", "done", "failed"};
  return kNames[static_cast<int>(state)];
}

bool is_legal_transition(MessageState from, MessageState to) {
  if (to == MessageState::kFailed) return from != MessageState::kFailed;
  return static_cast<int>(to) == static_cast<int>(from) + 1 && from != MessageState::kDone;
}

Round::Round(Layouts layouts, Communicator* communicator, const Clock* clock)
    : layouts_(std::move(layouts)),
      communicator_(communicator),
      clock_(clock),
      elem_bytes_(static_cast<std::int64_t>(dtype_bytes(layouts_.dtype))) {
  index_layouts();
}

Round::~Round() {
  bool in_flight = false;
  for (const Run& run : runs_) {
    in_flight = in_flight || run.state == MessageState::kInFlight || run.state == MessageState::kFailed;
  }
  if (in_flight && !communicator_->abandon("the engine was destroyed within a step")) {
    new AlignedBuffer<std::byte>(std::move(buffer_));
  }
}

void Round::index_layouts() {
  std::int64_t largest_bytes = 0;
  std::size_t most_messages = 0;
  places_.assign(layouts_.of_parity.size(), std::vector<Place>(layouts_.tensor_count));
  for (std::size_t parity = 0; parity < layouts_.of_parity.size(); ++parity) {
    const std::vector<Message>& messages = layouts_.of_parity[parity].messages;
    std::int64_t bytes = 0;
    for (std::size_t m = 0; m < messages.size(); ++m) {
      bytes += align_up((messages[m].elems + communicator_->world_size()) * elem_bytes_);
      for (std::size_t s = 0; s < messages[m].slots.size(); ++s) {
        places_[parity][messages[m].slots[s].tensor] = {static_cast<std::int32_t>(m), static_cast<std::int32_t>(s)};
      }
    }
    largest_bytes = std::max(largest_bytes, bytes);
    most_messages = std::max(most_messages, messages.size());
  }
  buffer_ = AlignedBuffer<std::byte>(static_cast<std::size_t>(largest_bytes));
  runs_.reserve(most_messages);
}

void Round::replace_layouts(std::vector<Layout> of_parity) {
  layouts_.of_parity = std::move(of_parity);
  index_layouts();
}

void Round::begin(int parity) {
  parity_ = parity;
  next_to_start_ = 0;
  runs_.resize(layout().messages.size());
  std::int64_t offset_bytes = 0;
  for (int m = 0; m < message_count(); ++m) {
    runs_[m] = Run{};
    runs_[m].missing = static_cast<int>(layout().messages[m].slots.size());
    runs_[m].offset_bytes = offset_bytes;
    offset_bytes += align_up(sent_elems(m) * elem_bytes_);
  }
}

std::int64_t Round::sent_elems(int message) const {
  return layout().messages[message].elems + communicator_->world_size();
}

std::int64_t Round::sent_bytes() const {
  std::int64_t bytes = 0;
  for (int m = 0; m < message_count(); ++m) bytes += sent_elems(m) * elem_bytes_;
  return bytes;
}

const Slot* Round::find_slot(std::uint32_t tensor) const {
  const Place place = places_[parity_][tensor];
  return place.message < 0 ? nullptr : &layout().messages[place.message].slots[place.slot];
}

void* Round::slot_data(int message, const Slot& slot) {
  return buffer_.data() + runs_[message].offset_bytes + slot.offset_elems * elem_bytes_;
}

void* Round::slot_data(std::uint32_t tensor) {
  const Place place = places_[parity_][tensor];
  return slot_data(place.message, layout().messages[place.message].slots[place.slot]);
}

void* Round::flags(int message) {
  return buffer_.data() + runs_[message].offset_bytes + layout().messages[message].elems * elem_bytes_;
}

const void* Round::flags(int message) const { return const_cast<Round*>(this)->flags(message); }

void Round::move(int message, MessageState to) {
  CORTADO_CHECK(is_legal_transition(runs_[message].state, to), "message %d can't go from %s to %s", message,
                message_state_name(runs_[message].state), message_state_name(to));
  runs_[message].state = to;
}

void Round::mark_written(std::uint32_t tensor, bool finite) {
  const int message = places_[parity_][tensor].message;
  Run& run = runs_[message];
  run.finite = run.finite && finite;
  if (--run.missing == 0) move(message, MessageState::kReady);
}

void Round::write_flags(int message) {
  for (int rank = 0; rank < communicator_->world_size(); ++rank) {
    const bool set = rank == communicator_->rank() && !runs_[message].finite;
    store_flag(flags(message), rank, layouts_.dtype, set ? 1.0f : 0.0f);
  }
}

Status Round::start_ready() {
  while (next_to_start_ < message_count() && runs_[next_to_start_].state == MessageState::kReady) {
    Run& run = runs_[next_to_start_];
    write_flags(next_to_start_);
    run.start_ns = clock_->now_ns();
    Result<WorkId> work =
        communicator_->start_all_reduce(buffer_.data() + run.offset_bytes, sent_elems(next_to_start_), layouts_.dtype);
    if (!work.ok()) {
      move(next_to_start_, MessageState::kFailed);
      return work.status().with_context("message " + std::to_string(next_to_start_));
    }
    run.work = work.value();
    move(next_to_start_++, MessageState::kInFlight);
  }
  return {};
}

Result<bool> Round::test(int message) {
  Result<bool> done = communicator_->test(runs_[message].work);
  if (!done.ok()) {
    move(message, MessageState::kFailed);
    return done.status().with_context("message " + std::to_string(message));
  }
  if (done.value()) move(message, MessageState::kArrived);
  return done;
}

Status Round::wait(int message, std::chrono::nanoseconds timeout) {
  const Status status = communicator_->wait(runs_[message].work, timeout);
  move(message, status.ok() ? MessageState::kArrived : MessageState::kFailed);
  return status.ok() ? status : status.with_context("message " + std::to_string(message));
}

int Round::non_finite_rank(int message) const {
  for (int rank = 0; rank < communicator_->world_size(); ++rank)
    if (flag_is_set(flags(message), rank, layouts_.dtype)) return rank;
  return -1;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/round.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstring>

#include "core/check.h"
#include "core/checksum.h"
#include "core/float16.h"
#include "core/format.h"
#include "core/keep_for_ever.h"

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

// A header: bytes of the payload in bits 0 to 39, a check in bits 40 to 62, not finite in bit 63.
constexpr std::uint64_t kNotFiniteBit = std::uint64_t{1} << 63;
constexpr int kCheckShift = 40;
constexpr std::uint64_t kBytesMask = (std::uint64_t{1} << kCheckShift) - 1;
constexpr std::int64_t kHeaderBytes = sizeof(std::uint64_t);  // a slot

static_assert(std::endian::native == std::endian::little, "headers are little-endian");

std::int64_t header_bytes(const Message& message) {
  return static_cast<std::int64_t>(message.slots.size()) * kHeaderBytes;
}

std::uint64_t load_header(const std::byte* stream, int slot) {
  std::uint64_t header;
  std::memcpy(&header, stream + slot * kHeaderBytes, sizeof(header));
  return header;
}

std::uint64_t header_of(std::span<const std::byte> payload, bool finite) {
  const std::uint64_t flag = finite ? 0 : kNotFiniteBit;
  const std::uint64_t check = (checksum_64(payload) ^ flag) >> (kCheckShift + 1);  // its upper 23 bits
  return flag | check << kCheckShift | payload.size();
}

void store_header(std::byte* stream, int slot, std::uint64_t header) {
  std::memcpy(stream + slot * kHeaderBytes, &header, sizeof(header));
}

const char* message_state_name(MessageState state) {
  constexpr const char* kNames[] = {"filling", "ready", "in flight", "arrived", "done", "failed"};
  return kNames[static_cast<int>(state)];
}

// True if a message may go from one state to the other; the table of the drawing in round.h.
bool is_legal_transition(MessageState from, MessageState to) {
  if (to == MessageState::kFailed) return from != MessageState::kFailed;
  if (from == MessageState::kArrived && to == MessageState::kInFlight) return true;
  return static_cast<int>(to) == static_cast<int>(from) + 1 && from != MessageState::kDone;
}

}  // namespace

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
    keep_for_ever(std::move(buffer_));
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------

std::int64_t Round::largest_stream_bytes(const Message& message) const { return header_bytes(message) + message.elems; }

// Where a message's buffers begin, given where the one before ended; returns where they end.
std::int64_t Round::place_buffers(const Message& message, std::int64_t begin_bytes, Run* run) const {
  run->offset_bytes = begin_bytes;
  if (message.collective == Collective::kAllReduce) {
    return begin_bytes + align_up((message.elems + communicator_->world_size()) * elem_bytes_);
  }
  run->received_offset_bytes = begin_bytes + align_up(largest_stream_bytes(message));
  return run->received_offset_bytes + align_up(largest_stream_bytes(message) * communicator_->world_size());
}

void Round::index_layouts() {
  std::int64_t largest_bytes = 0;
  std::size_t most_messages = 0;
  places_.assign(layouts_.of_parity.size(), std::vector<Place>(layouts_.tensor_count));
  for (std::size_t parity = 0; parity < layouts_.of_parity.size(); ++parity) {
    const std::vector<Message>& messages = layouts_.of_parity[parity].messages;
    std::int64_t bytes = 0;
    for (std::size_t m = 0; m < messages.size(); ++m) {
      Run run;
      bytes = place_buffers(messages[m], bytes, &run);
      for (std::size_t s = 0; s < messages[m].slots.size(); ++s) {
        places_[parity][messages[m].slots[s].tensor] = {static_cast<std::int32_t>(m), static_cast<std::int32_t>(s)};
      }
    }
    largest_bytes = std::max(largest_bytes, bytes);
    most_messages = std::max(most_messages, messages.size());
  }
  buffer_ = AlignedBuffer<std::byte>(static_cast<std::size_t>(largest_bytes));
  runs_.reserve(most_messages);
  reset_capacities();
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
    const Message& message = layout().messages[m];
    runs_[m] = Run{};
    runs_[m].missing = static_cast<int>(message.slots.size());
    runs_[m].capacity_bytes = capacities_bytes_[parity][m];
    offset_bytes = place_buffers(message, offset_bytes, &runs_[m]);
  }
}

std::int64_t Round::sent_bytes() const {
  std::int64_t bytes = 0;
  for (const Run& run : runs_) bytes += run.sent_bytes;
  return bytes;
}

int Round::collectives() const {
  int count = message_count();
  for (const Run& run : runs_) count += run.rest_bytes > 0;
  return count;
}

const Slot* Round::find_slot(std::uint32_t tensor) const {
  const Place place = places_[parity_][tensor];
  return place.message < 0 ? nullptr : &layout().messages[place.message].slots[place.slot];
}

void* Round::slot_data(int message, const Slot& slot) {
  std::byte* begin = buffer_.data() + runs_[message].offset_bytes;
  return is_gathered(message) ? begin + header_bytes(layout().messages[message]) + slot.offset_elems
                              : begin + slot.offset_elems * elem_bytes_;
}

void* Round::slot_data(std::uint32_t tensor) {
  const Place place = places_[parity_][tensor];
  return slot_data(place.message, layout().messages[place.message].slots[place.slot]);
}

std::span<std::byte> Round::slot_bytes(std::uint32_t tensor) {
  const Place place = places_[parity_][tensor];
  const std::int64_t elems = layout().messages[place.message].slots[place.slot].elems;
  const std::int64_t bytes = is_gathered(place.message) ? elems : elems * elem_bytes_;
  return {static_cast<std::byte*>(slot_data(tensor)), static_cast<std::size_t>(bytes)};
}

void* Round::flags(int message) {
  return buffer_.data() + runs_[message].offset_bytes + layout().messages[message].elems * elem_bytes_;
}

const void* Round::flags(int message) const { return const_cast<Round*>(this)->flags(message); }

// ---- the life of a message -----------------------------------------------------------------------------------------

void Round::move(int message, MessageState to) {
  CORTADO_CHECK(is_legal_transition(runs_[message].state, to), "message %d can't go from %s to %s", message,
                message_state_name(runs_[message].state), message_state_name(to));
  runs_[message].state = to;
}

void Round::mark_written(std::uint32_t tensor, bool finite, std::uint64_t payload_bytes) {
  const Place place = places_[parity_][tensor];
  Run& run = runs_[place.message];
  run.finite = run.finite && finite;
  if (is_gathered(place.message)) {
    const std::span<const std::byte> payload = slot_bytes(tensor).first(payload_bytes);
    store_header(buffer_.data() + run.offset_bytes, place.slot, header_of(payload, finite));
  }
  if (--run.missing == 0) move(place.message, MessageState::kReady);
}

void Round::write_flags(int message) {
  for (int rank = 0; rank < communicator_->world_size(); ++rank) {
    const bool set = rank == communicator_->rank() && !runs_[message].finite;
    store_flag(flags(message), rank, layouts_.dtype, set ? 1.0f : 0.0f);
  }
}

// Payloads were written where the largest ones would begin; now they close up.
void Round::pack_stream(int message) {
  const Message& packed = layout().messages[message];
  std::byte* stream = buffer_.data() + runs_[message].offset_bytes;
  std::byte* to = stream + header_bytes(packed);
  for (std::size_t s = 0; s < packed.slots.size(); ++s) {
    const std::uint64_t bytes = load_header(stream, static_cast<int>(s)) & kBytesMask;
    const void* from = slot_data(message, packed.slots[s]);
    if (from != to) std::memmove(to, from, bytes);
    to += bytes;
  }
}

Result<WorkId> Round::start(int message) {
  Run& run = runs_[message];
  std::byte* data = buffer_.data() + run.offset_bytes;
  run.start_ns = clock_->now_ns();
  if (!is_gathered(message)) {
    write_flags(message);
    const std::int64_t elems = layout().messages[message].elems + communicator_->world_size();
    run.sent_bytes = elems * elem_bytes_;
    return communicator_->start_all_reduce(data, elems, layouts_.dtype);
  }
  pack_stream(message);
  run.sent_bytes = run.capacity_bytes;
  const auto bytes = static_cast<std::size_t>(run.capacity_bytes);
  const auto ranks = static_cast<std::size_t>(communicator_->world_size());
  return communicator_->start_all_gather({data, bytes}, {buffer_.data() + run.received_offset_bytes, bytes * ranks});
}

Status Round::start_ready() {
  while (next_to_start_ < message_count() && runs_[next_to_start_].state == MessageState::kReady) {
    const Result<WorkId> work = start(next_to_start_);
    if (!work.ok()) {
      move(next_to_start_, MessageState::kFailed);
      return in_communication(next_to_start_, work.status());
    }
    runs_[next_to_start_].work = work.value();
    move(next_to_start_++, MessageState::kInFlight);
  }
  return {};
}

Result<bool> Round::test(int message) {
  Result<bool> done = communicator_->test(runs_[message].work);
  if (!done.ok()) {
    move(message, MessageState::kFailed);
    return in_communication(message, done.status());
  }
  if (done.value()) move(message, MessageState::kArrived);
  return done;
}

Status Round::wait(int message, std::chrono::nanoseconds timeout) {
  const Status status = communicator_->wait(runs_[message].work, timeout);
  move(message, status.ok() ? MessageState::kArrived : MessageState::kFailed);
  return status.ok() ? status : in_communication(message, status);
}

std::string Round::name_of(int message) const {
  std::string name = (runs_[message].rest_bytes > 0 ? "rest of message " : "message ") + std::to_string(message);
  if (layouts_.names.empty()) return name;
  const std::vector<Slot>& slots = layout().messages[message].slots;
  return name + " (" + name_tensors(layouts_.names[slots.front().tensor], slots.size()) + ")";
}

Status Round::in_communication(int message, const Status& status) const {
  return status.with_context(name_of(message) + ": communicate");
}

int Round::non_finite_rank(int message) const {
  for (int rank = 0; rank < communicator_->world_size(); ++rank)
    if (flag_is_set(flags(message), rank, layouts_.dtype)) return rank;
  return -1;
}

// ---- payloads ------------------------------------------------------------------------------------------------------

std::uint64_t Round::header(int message, int rank, int slot) const {
  const Run& run = runs_[message];
  return load_header(buffer_.data() + run.received_offset_bytes + rank * run.capacity_bytes, slot);
}

Status Round::check_headers(int message) const {
  const std::vector<Slot>& slots = layout().messages[message].slots;
  for (int rank = 0; rank < communicator_->world_size(); ++rank) {
    for (std::size_t s = 0; s < slots.size(); ++s) {
      const std::uint64_t bytes = header(message, rank, static_cast<int>(s)) & kBytesMask;
      if (bytes <= static_cast<std::uint64_t>(slots[s].elems)) continue;
      return make_error(StatusCode::kCorruptData,
                        "%s: communicate: rank %d announces %" PRIu64 " bytes of \"%s\", which has at most %" PRId64,
                        name_of(message).c_str(), rank, bytes,
                        layouts_.names.empty() ? "" : layouts_.names[slots[s].tensor].c_str(), slots[s].elems);
    }
  }
  return {};
}

Status Round::check_payload(int message, int slot, int rank, std::span<const std::byte> payload) const {
  const std::uint64_t announced = header(message, rank, slot);
  if (header_of(payload, (announced & kNotFiniteBit) == 0) == announced) return {};
  return make_error(StatusCode::kCorruptData, "the payload of rank %d (%zu bytes) was damaged or cut on its way", rank,
                    payload.size());
}

int Round::non_finite_rank(int message, int slot) const {
  for (int rank = 0; rank < communicator_->world_size(); ++rank)
    if ((header(message, rank, slot) & kNotFiniteBit) != 0) return rank;
  return -1;
}

std::int64_t Round::stream_bytes(int message, int rank) const {
  const Message& sent = layout().messages[message];
  std::int64_t bytes = header_bytes(sent);
  for (std::size_t s = 0; s < sent.slots.size(); ++s) {
    bytes += static_cast<std::int64_t>(header(message, rank, static_cast<int>(s)) & kBytesMask);
  }
  return bytes;
}

std::int64_t Round::longest_stream_bytes(int message) const {
  std::int64_t longest = 0;
  for (int rank = 0; rank < communicator_->world_size(); ++rank) {
    longest = std::max(longest, stream_bytes(message, rank));
  }
  return longest;
}

bool Round::lacks_rest(int message) const {
  const Run& run = runs_[message];
  return run.rest_bytes == 0 && longest_stream_bytes(message) > run.capacity_bytes;
}

Status Round::start_rest(int message) {
  Run& run = runs_[message];
  run.rest_bytes = longest_stream_bytes(message) - run.capacity_bytes;
  run.sent_bytes += run.rest_bytes;
  run.start_ns = clock_->now_ns();
  const auto bytes = static_cast<std::size_t>(run.rest_bytes);
  const int ranks = communicator_->world_size();
  std::byte* received = buffer_.data() + run.received_offset_bytes + ranks * run.capacity_bytes;
  const Result<WorkId> work =
      communicator_->start_all_gather({buffer_.data() + run.offset_bytes + run.capacity_bytes, bytes},
                                      {received, bytes * static_cast<std::size_t>(ranks)});
  move(message, work.ok() ? MessageState::kInFlight : MessageState::kFailed);
  if (work.ok()) run.work = work.value();
  return work.ok() ? Status() : in_communication(message, work.status());
}

std::span<const std::byte> Round::payload(int message, int slot, int rank, std::span<std::byte> joint) const {
  const Run& run = runs_[message];
  std::int64_t begin = header_bytes(layout().messages[message]);
  for (int s = 0; s < slot; ++s) begin += static_cast<std::int64_t>(header(message, rank, s) & kBytesMask);
  const auto bytes = static_cast<std::int64_t>(header(message, rank, slot) & kBytesMask);
  const std::byte* received = buffer_.data() + run.received_offset_bytes;
  const std::byte* head = received + rank * run.capacity_bytes + begin;
  const std::byte* rest = received + communicator_->world_size() * run.capacity_bytes + rank * run.rest_bytes;
  const std::int64_t in_head = std::clamp<std::int64_t>(run.capacity_bytes - begin, 0, bytes);
  if (in_head == bytes) return {head, static_cast<std::size_t>(bytes)};
  if (in_head == 0) return {rest + (begin - run.capacity_bytes), static_cast<std::size_t>(bytes)};
  std::memcpy(joint.data(), head, static_cast<std::size_t>(in_head));
  std::memcpy(joint.data() + in_head, rest, static_cast<std::size_t>(bytes - in_head));
  return joint.first(static_cast<std::size_t>(bytes));
}

// A margin for sizes that vary from step to step; and capacities stay while they fit, so that transports see the same
// sizes again.
void Round::adapt_capacities() {
  for (int m = 0; m < message_count(); ++m) {
    if (!is_gathered(m)) continue;
    const std::int64_t needed = longest_stream_bytes(m);
    const std::int64_t wanted = std::min(largest_stream_bytes(layout().messages[m]), align_up(needed + needed / 32));
    std::int64_t& capacity = capacities_bytes_[parity_][m];
    if (needed > capacity || wanted < capacity - capacity / 8) capacity = wanted;
  }
}

void Round::reset_capacities() {
  capacities_bytes_.clear();
  for (const Layout& layout : layouts_.of_parity) {
    std::vector<std::int64_t>& capacities = capacities_bytes_.emplace_back();
    for (const Message& message : layout.messages) capacities.push_back(largest_stream_bytes(message));
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Round: one encode-collective-decode pass of a step over all messages of one layout. It owns the message buffers and
// the state of each message; what is in the slots is the engine's business.
//
//   filling --all slots written--> ready --start--> in flight --ended--> arrived --decoded--> done
//                                                       ^----- rest ----'
//   any state --error--> failed
//
// Messages are started in their order in the layout, which all ranks share, however the slots became ready.
//
// A message of sums is the slots and then one flag for each rank, in the dtype of the round: not 0 if what that rank
// wrote was not finite.
//
// A message of payloads is gathered. Each rank contributes the head of its stream:
//
//   header    one little-endian u64 a slot: bytes of the payload (bits 0 to 39), a check of it (40 to 62), and whether
//             the gradient was not finite (63)
//   payloads  one after the other, in the order of the slots
//
// How much of it, the capacity, is the same on all ranks and follows from what they saw in the step before (the first
// time: all there can be). A stream that is longer than its capacity is completed by a second gather, the rest, whose
// size follows from the headers. Rests start when all messages have been started, in message order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bucket/layout.h"
#include "core/aligned_buffer.h"
#include "cortado/communicator.h"
#include "cortado/trace.h"

namespace cortado {

enum class MessageState : std::uint8_t { kFilling, kReady, kInFlight, kArrived, kDone, kFailed };

class Round {
 public:
  struct Layouts {
    std::vector<Layout> of_parity;  // one, or two that take turns
    std::size_t tensor_count = 0;
    DType dtype = DType::kFloat32;        // of sums
    std::vector<std::string> names = {};  // of the tensors, for errors
  };
  Round(Layouts layouts, Communicator* communicator, const Clock* clock);
  // With messages in flight: abandons the group, and if their buffer stays in use even so, leaves it allocated for
  // ever, because a transport that writes to it later must not hit somebody else's memory.
  ~Round();
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  // Makes the messages of that parity's layout empty; no message may be in flight.
  void begin(int parity);

  const Layout& layout() const { return layouts_.of_parity[parity_]; }
  const Layouts& layouts() const { return layouts_; }
  // Replaces the layouts by others of the same slots in another order or grouping.
  void replace_layouts(std::vector<Layout> of_parity);

  int message_count() const { return static_cast<int>(layout().messages.size()); }
  MessageState state(int message) const { return runs_[message].state; }
  bool is_gathered(int message) const { return layout().messages[message].collective == Collective::kAllGather; }
  // In the collective that was started last: the message with flags and headers, or its rest.
  std::int64_t last_sent_bytes(int message) const {
    return runs_[message].rest_bytes > 0 ? runs_[message].rest_bytes : runs_[message].sent_bytes;
  }
  std::int64_t sent_bytes() const;  // of all messages of this step
  int collectives() const;
  std::int64_t buffer_bytes() const { return static_cast<std::int64_t>(buffer_.size()); }
  std::int64_t start_ns(int message) const { return runs_[message].start_ns; }

  // The slot of a tensor in the current layout; nullptr if it does not travel in this round.
  const Slot* find_slot(std::uint32_t tensor) const;
  void* slot_data(int message, const Slot& slot);
  void* slot_data(std::uint32_t tensor);

  std::span<std::byte> slot_bytes(std::uint32_t tensor);

  // The slot of `tensor` has been written; `finite` says whether its gradient was. payload_bytes: of gathered slots.
  void mark_written(std::uint32_t tensor, bool finite, std::uint64_t payload_bytes = 0);

  // The message a tensor travels in; -1: none. And how many of a message's slots are still to be written.
  int message_of(std::uint32_t tensor) const { return places_[parity_][tensor].message; }
  int missing(int message) const { return runs_[message].missing; }

  // Starts every message that is ready and next in order. next_to_start(): the first that has not been started.
  Status start_ready();
  int next_to_start() const { return next_to_start_; }

  // kInFlight -> kArrived if it has ended; test() does not wait, wait() does.
  Result<bool> test(int message);
  Status wait(int message, std::chrono::nanoseconds timeout);

  // The first rank whose flag is set in an arrived message of sums, or -1.
  int non_finite_rank(int message) const;

  // -- arrived messages of payloads
  // kCorruptData if some rank's header can't be: to be asked before anything else.
  Status check_headers(int message) const;
  // kCorruptData unless `payload` is what `rank` wrote to the slot, to all but one in 2^23.
  Status check_payload(int message, int slot, int rank, std::span<const std::byte> payload) const;
  // The first rank whose gradient was not finite, or -1.
  int non_finite_rank(int message, int slot) const;
  // True if some rank's stream is not complete yet.
  bool lacks_rest(int message) const;
  // kArrived -> kInFlight.
  Status start_rest(int message);
  // What `rank` wrote to a slot; copied to `joint` if it lies in two pieces.
  std::span<const std::byte> payload(int message, int slot, int rank, std::span<std::byte> joint) const;
  // "message 2 ("a.weight" and 3 more)"
  std::string name_of(int message) const;
  int slot_index(std::uint32_t tensor) const { return places_[parity_][tensor].slot; }

  // The step has ended on all ranks: what was seen of it decides the capacities of the next.
  void adapt_capacities();
  // As before the first step.
  void reset_capacities();

  void mark_done(int message) { move(message, MessageState::kDone); }

 private:
  struct Run {
    MessageState state = MessageState::kFilling;
    int missing = 0;     // slots not yet written
    bool finite = true;  // of what this rank wrote
    WorkId work = 0;
    std::int64_t start_ns = 0;
    std::int64_t sent_bytes = 0;
    std::int64_t offset_bytes = 0;
    // -- of payloads
    std::int64_t received_offset_bytes = 0;
    std::int64_t capacity_bytes = 0;
    std::int64_t rest_bytes = 0;  // 0 until the rest was started
  };
  struct Place {
    std::int32_t message = -1;
    std::int32_t slot = -1;
  };

  void index_layouts();
  std::int64_t place_buffers(const Message& message, std::int64_t begin_bytes, Run* run) const;
  void move(int message, MessageState to);
  void* flags(int message);
  const void* flags(int message) const;
  void write_flags(int message);
  void pack_stream(int message);
  Result<WorkId> start(int message);
  Status in_communication(int message, const Status& status) const;
  std::int64_t largest_stream_bytes(const Message& message) const;
  std::uint64_t header(int message, int rank, int slot) const;
  std::int64_t stream_bytes(int message, int rank) const;
  std::int64_t longest_stream_bytes(int message) const;

  Layouts layouts_;
  Communicator* communicator_;
  const Clock* clock_;
  std::int64_t elem_bytes_;
  int parity_ = 0;
  int next_to_start_ = 0;
  AlignedBuffer<std::byte> buffer_;
  std::vector<Run> runs_;
  std::vector<std::vector<Place>> places_;                   // [parity][tensor]
  std::vector<std::vector<std::int64_t>> capacities_bytes_;  // [parity][message], of payloads
};

}  // namespace cortado

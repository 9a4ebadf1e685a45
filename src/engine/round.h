// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Round: one encode-collective-decode pass of a step over all messages of one layout. It owns the message buffers and
// the state of each message; what is in the slots is the engine's business.
//
//   filling --all slots written--> ready --start_all_reduce--> in flight --ended--> arrived --decoded--> done
//   any state --error--> failed
//
// Messages are started in their order in the layout, which all ranks share, however the slots became ready.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bucket/layout.h"
#include "core/aligned_buffer.h"
#include "cortado/communicator.h"
#include "cortado/trace.h"

namespace cortado {

enum class MessageState : std::uint8_t { kFilling, kReady, kInFlight, kArrived, kDone, kFailed };

const char* message_state_name(MessageState state);

// True if a message may go from one state to the other; the table of the drawing above.
bool is_legal_transition(MessageState from, MessageState to);

class Round {
 public:
  // Every message is followed by one flag for each rank, in the dtype of the message: not 0 if what that rank wrote was
  // not finite.
  struct Layouts {
    std::vector<Layout> of_parity;  // one, or two that take turns
    std::size_t tensor_count = 0;
    DType dtype = DType::kFloat32;
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
  std::int64_t sent_elems(int message) const;
  std::int64_t sent_bytes() const;  // of all messages of this step, flags included
  std::int64_t buffer_bytes() const { return static_cast<std::int64_t>(buffer_.size()); }
  std::int64_t start_ns(int message) const { return runs_[message].start_ns; }

  // The slot of a tensor in the current layout; nullptr if it does not travel in this round.
  const Slot* find_slot(std::uint32_t tensor) const;
  void* slot_data(int message, const Slot& slot);
  void* slot_data(std::uint32_t tensor);

  // The slot of `tensor` has been written; `finite` says whether its gradient was.
  void mark_written(std::uint32_t tensor, bool finite);

  // Starts every message that is ready and next in order.
  Status start_ready();

  // kInFlight -> kArrived if it has ended; test() does not wait, wait() does.
  Result<bool> test(int message);
  Status wait(int message, std::chrono::nanoseconds timeout);

  // The first rank whose flag is set in an arrived message, or -1.
  int non_finite_rank(int message) const;

  void mark_done(int message) { move(message, MessageState::kDone); }

 private:
  struct Run {
    MessageState state = MessageState::kFilling;
    int missing = 0;     // slots not yet written
    bool finite = true;  // of what this rank wrote
    WorkId work = 0;
    std::int64_t start_ns = 0;
    std::int64_t offset_bytes = 0;
  };
  struct Place {
    std::int32_t message = -1;
    std::int32_t slot = -1;
  };

  void index_layouts();
  void move(int message, MessageState to);
  void* flags(int message);
  const void* flags(int message) const;
  void write_flags(int message);

  Layouts layouts_;
  Communicator* communicator_;
  const Clock* clock_;
  std::int64_t elem_bytes_;
  int parity_ = 0;
  int next_to_start_ = 0;
  AlignedBuffer<std::byte> buffer_;
  std::vector<Run> runs_;
  std::vector<std::vector<Place>> places_;  // [parity][tensor]
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// SchemeRun: executes one option for one message (a tensor, or several in one bucket) on one rank, step after step. It
// is the only way options are executed; what it does is the data of scheme_program.h.
//
//   begin() --> ready --start()--> in flight --test(), wait()--> arrived --proceed()--> ready ... --> done
//
// begin() and proceed() encode and decode until the next collective or the end; no call allocates. Values are float32.
// Every rank ends with the same bytes. With a device (scheme_device.h) either may end on device instead, while it
// encodes or decodes: test() and wait() ask for its end as for that of a collective, and proceed() goes on.
//
// Payloads of codecs whose sizes vary travel behind their sizes: two collectives of the same kind, the first of one u64
// for each payload. Payloads that are summed on the way (Codec::sum_form) travel with zeros for headers; then the
// headers, which are equal on all ranks, are put back.
//
// Without a device gpu is the CPU's variant working in memory of its own; what is copied there and back is counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/scheme_coder.h"
#include "collective/scheme_program.h"
#include "core/aligned_buffer.h"
#include "cortado/communicator.h"

namespace cortado {

struct SchemeSetup {
  const LevelCommunicators* levels = nullptr;  // must outlive the run
  Option option = {};
  const Codec* codec = nullptr;  // may be null if the option encodes nothing; must outlive the run
  std::vector<SchemeTensor> tensors = {};
  bool has_feedback = false;             // what an encode loses is added to what it encodes in the next step
  bool averages = false;                 // encode means, see compile_scheme()
  std::uint64_t seed = 0;                // of codecs that draw; the same on all ranks
  const Clock* clock = nullptr;          // null: encodes and decodes are not timed
  const SchemeDevice* device = nullptr;  // null: there is none; must outlive the run
  bool lends_memory = false;             // where reads_lent() or writes_lent(), the caller lends each tensor's memory
};

enum class SchemeState : std::uint8_t { kIdle, kReady, kInFlight, kOnDevice, kArrived, kDone, kFailed };

struct SchemeCollective {
  LevelRange levels;
  int ordinal = 0;          // among the collectives of all ranks; a rank that sits some of them out lacks these numbers
  bool is_checked = false;  // what arrives, payloads or their sizes
  std::string name;         // "all_gather@intra", "all_gather@intra, sizes"
};

class SchemeRun {
 public:
  static Result<std::unique_ptr<SchemeRun>> make(const SchemeSetup& setup);
  // In flight: abandons the group, and leaves memory that may still be written to allocated for ever.
  ~SchemeRun();
  SchemeRun(const SchemeRun&) = delete;
  SchemeRun& operator=(const SchemeRun&) = delete;

  // Whether the first operation reads the tensors where lend() says, in place of values(); and whether the last one
  // writes what sums() would be, times TensorMemory::result_scale, in its place.
  bool reads_lent() const { return !program_.steps.empty() && is_lent(program_.steps.front(), OpKind::kEncode); }
  bool writes_lent() const { return !program_.steps.empty() && is_lent(program_.steps.back(), OpKind::kDecode); }
  void lend(int tensor, const TensorMemory& memory) { coder_.lend(tensor, memory); }
  // Where a tensor's values are to be written before begin(), which uses them up.
  std::span<float> values(int tensor) { return tensor_in(values_[0], tensor); }
  // Once done: the sum over all ranks; times result_scale(), the mean if that was asked for. Stays until begin().
  std::span<float> sums(int tensor) { return tensor_in(values_[result_at_], tensor); }
  float result_scale() const { return program_.result_scale; }

  // `step` is a key of random numbers. After it the run is ready, or done if nothing has to travel.
  Status begin(std::int64_t step);
  SchemeState state() const { return state_; }
  Status start();                                 // ready: starts the next collective
  Result<bool> test();                            // in flight, on device: whether it has ended, and so has arrived
  Status wait(std::chrono::nanoseconds timeout);  // in flight, on device: until it has
  Status proceed();                               // arrived
  Status run(std::int64_t step, std::chrono::nanoseconds timeout);  // all of it

  // Of a step, in the order in which this rank starts them; and which of them is ready, in flight or has arrived.
  const std::vector<SchemeCollective>& collectives() const { return collectives_; }
  const SchemeCollective& collective() const { return collectives_[next_collective_]; }

  // What the last step lost is kept; without it the residuals stay what they were before the step.
  void commit() { coder_.commit(); }
  SchemeCoder& coder() { return coder_; }
  const SchemeCoder& coder() const { return coder_; }

  std::int64_t sent_bytes() const { return sent_bytes_; }  // handed to collectives in the last step
  std::int64_t buffer_bytes() const;
  const SchemeProgram& program() const { return program_; }

 private:
  // Which of the two buffers of values and of payloads a step reads and writes.
  struct StepMemory {
    int values = 0, values_after = 0;
    int payloads = 0, payloads_after = 0;
    bool restores_headers = false;  // of summed payloads
  };

  SchemeRun(const SchemeSetup& setup, SchemeProgram program);

  // -- set-up
  bool is_lent(const SchemeStep& step, OpKind kind) const { return step.op.kind == kind && coder_.takes_lent(step); }
  bool needs_values() const;
  void plan_memory();
  bool has_headers(const SchemeStep& step);
  void list_collectives();
  std::span<float> tensor_in(AlignedBuffer<float>& values, int tensor);

  // -- a step
  Status advance();
  Status code();
  Result<bool> ended_on_device();
  Status wait_for_device(std::chrono::nanoseconds timeout);
  Status fail(const Status& status);
  void prepare_payloads();
  void reorder();
  template <typename Check>
  Status check_received(Check&& check) const;
  int rank_of(int member) const;
  Status check_sizes() const;
  Status check_payloads() const;
  std::size_t header_bytes_of(std::span<const PayloadUnit> units) const;
  void set_headers_aside();
  void restore_headers();

  CollectiveCall values_call();
  CollectiveCall sizes_call();
  CollectiveCall payload_call();
  template <typename ElemsOf>
  void set_blocks(CollectiveCall* call, bool vary, ElemsOf&& elems_of);
  std::size_t first_entry_of_block(const std::vector<std::size_t>& first_entry, int member) const;
  std::int64_t block_entries(const std::vector<std::size_t>& first_entry, int member) const;
  std::int64_t block_bytes(const PayloadSet& set, const std::vector<std::size_t>& first_entry, int member) const;
  std::int64_t sent_bytes_of(const CollectiveCall& call) const;

  const SchemeStep& step() const { return program_.steps[next_]; }
  const StepMemory& memory() const { return memory_[next_]; }
  bool is_root_of_broadcast() const;
  std::string name_of_step() const;

  SchemeSetup setup_;
  SchemeProgram program_;
  SchemeCoder coder_;
  std::vector<std::int64_t> offsets_;  // of tensors in the message
  std::vector<StepMemory> memory_;     // of steps
  std::vector<SchemeCollective> collectives_;
  AlignedBuffer<float> values_[2];
  AlignedBuffer<std::byte> payloads_[2];
  DType sum_dtype_ = DType::kFloat32;  // of summed payloads
  int result_at_ = 0;                  // which of values_ holds the sums

  SchemeState state_ = SchemeState::kIdle;
  std::size_t next_ = 0;  // step in hand
  std::size_t next_collective_ = 0;
  bool sizes_first_ = false;  // the collective in hand is that of the sizes
  WorkId work_ = 0;
  PayloadSet held_, received_;
  std::vector<std::byte> headers_;  // of the payloads that are being summed
  std::vector<std::int64_t> counts_, received_counts_;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace cortado

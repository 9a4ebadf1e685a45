// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// SchemeCoder: the encodes and decodes of one message on one rank, with their error feedback and devices.
//
//   encode   values += residual of the place; payload = encode(values); new residual = values - decode(payload)
//   decode   values = decoded payloads of all contributors, added in their order, so equal on all ranks; of a codec
//            with majority vote: the sign of the sum of their signs times the sum of their magnitudes
//
// A new residual replaces the old one in commit(). Never allocates in a step.
//
// Elementwise codecs go through a piece a chunk at a time, on the CPU: what is read stays in the first-level cache
// until its loss is kept. The first operation of an option, if it is such an encode, can read a tensor in its owner's
// memory, and the last one, if it is such a decode, write it there, so that nothing is copied (lends_memory, lend()).
//
// What runs on a device (runs_on_device) is given to it by start_on_device(); once ended_on_device() says so, encode()
// or decode() of the same step takes what has come of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/scheme_device.h"
#include "collective/scheme_program.h"
#include "core/aligned_buffer.h"
#include "core/differences.h"
#include "cortado/trace.h"

namespace cortado {

// Whether a payload with its check behind it (PayloadForm::kChecked) is what was encoded; kCorruptData if not.
Status check_payload(std::span<const std::byte> payload);

// The payloads of some units in memory: one entry for each piece of each unit, one after the other.
struct PayloadSet {
  std::vector<std::uint64_t> bytes, offsets;
  std::uint64_t total_bytes = 0;

  // Offsets from sizes.
  void place();
};

// A tensor where its owner keeps it.
struct TensorMemory {
  void* data = nullptr;  // dense, of `dtype`
  DType dtype = DType::kFloat32;
  float scale = 1;               // of what is read
  const float* added = nullptr;  // null, or what is added to each value times added_scale
  float added_scale = 0;
  float result_scale = 1;  // of what is written
};

// Of this rank, in the step in hand or the last one.
struct SchemeStatistics : DeviceCopies {
  std::int64_t encoded_bytes = 0;  // payloads written
};

class SchemeCoder {
 public:
  struct Setup {
    const Codec* codec = nullptr;
    std::vector<SchemeTensor> tensors;
    bool has_feedback = false;
    std::uint64_t seed = 0;
    const Clock* clock = nullptr;  // null: work() stays empty
    bool lends_memory = false;
  };
  SchemeCoder(Setup setup, const SchemeProgram* program);

  // Before the first step, if there is one: from now on what says gpu runs there. What can't, because of the codec or
  // of the device's memory, is left to the CPU's variant, and host_reason() says why. It must outlive the coder.
  void open_device(const SchemeDevice& device);
  const std::string& host_reason() const { return host_reason_; }
  bool uses_device() const { return !device_encodes_.empty(); }

  bool fixed_size() const { return fixed_size_; }

  // Whether a piece whose values are all zeros is encoded as that, while its residual waits.
  void hold_zeros(bool hold) { holds_zeros_ = hold; }
  // Whether an operation reads or writes the tensors' own memory.
  bool takes_lent(const SchemeStep& step) const;
  // Before begin(), each time; the memory must last until the step has ended.
  void lend(int tensor, const TensorMemory& memory) { lent_[static_cast<std::size_t>(tensor)] = memory; }
  // Of what was written to lent memory.
  bool is_finite(int tensor) const { return finite_[static_cast<std::size_t>(tensor)] != 0; }
  void begin(std::int64_t step);
  // Writes the payloads of step.result_units to `memory` and what they are to `set`, which has room. `values` is the
  // message; null where nothing needs it.
  Status encode(const SchemeStep& step, float* values, std::byte* memory, PayloadSet* set);
  Status decode(const SchemeStep& step, const PayloadSet& set, const std::byte* memory, float* values);

  bool runs_on_device(const SchemeStep& step) const { return encode_of(step) != nullptr || decode_of(step) != nullptr; }
  Status start_on_device(const SchemeStep& step, const PayloadSet& set, const std::byte* memory, float* values);
  Result<bool> ended_on_device(const SchemeStep& step);

  // What was encoded and decoded since begin() or forget_work(), piece by piece: stage, tensor and times.
  const std::vector<TraceEvent>& work() const { return work_.events(); }
  void forget_work() { work_.clear(); }

  // What the last step lost replaces what was kept.
  void commit();

  // What is kept of one tensor at one place; `values` begin at element `begin` of the tensor.
  struct Residual {
    int tensor = 0;
    std::string_view place;
    std::int64_t begin = 0;
    std::span<float> values;
    float share = 1;   // what one of its values stands for in the result
    int replicas = 1;  // ranks that keep the same, because they encode the same sums
  };
  std::vector<Residual> residuals();
  std::int64_t residual_bytes() const;
  std::int64_t scratch_bytes() const;  // on a device and pinned, too

  // Squares of what this rank encoded of a tensor in the last step, and of what that lost.
  const DifferenceSquares& squares(int tensor) const { return squares_[static_cast<std::size_t>(tensor)]; }
  // Of what was lost of it in the last step, as the result has it: each place's share of it.
  double lost_squares(int tensor) const { return lost_squares_[static_cast<std::size_t>(tensor)]; }
  std::int64_t encoded_bytes(int tensor) const { return encoded_bytes_[static_cast<std::size_t>(tensor)]; }
  const SchemeStatistics& statistics() const { return statistics_; }

 private:
  const Cell& cell_of(const PayloadUnit& unit) const { return program_->cells[static_cast<std::size_t>(unit.cell)]; }
  EncodeContext context_of(const SchemeStep& step, const Piece& piece) const;
  std::uint64_t seed_of(const SchemeStep& step) const;
  std::uint64_t number_of(const Piece& piece) const;
  std::size_t index_of(const SchemeStep& step) const {
    return static_cast<std::size_t>(&step - program_->steps.data());
  }
  DeviceEncode* encode_of(const SchemeStep& step) const;
  DeviceDecode* decode_of(const SchemeStep& step) const;
  Status open_steps(const SchemeDevice& device);
  Status open_step(const SchemeDevice& device, const SchemeStep& step);
  const float* decoded_on_device(const DeviceEncode& device, const SchemeStep& step, const Piece& piece) const;
  void take_sums(const SchemeStep& step, const DeviceDecode& device, float* values);
  template <typename Act>
  Status for_contributions(const SchemeStep& step, Act&& act) const;
  std::string name_of(const Piece& piece, int contributor) const;
  Result<std::uint64_t> encode_piece(const SchemeStep& step, const Cell& cell, const Piece& piece, float* values,
                                     std::byte* slot);
  // Makes of a payload what travels, in `slot`, where it may already be. `decoded`: null, or what it decodes to.
  Result<std::uint64_t> finish_piece(const SchemeStep& step, const Cell& cell, const Piece& piece,
                                     std::span<const std::byte> payload, bool held, const float* values,
                                     const float* decoded, std::byte* slot);
  // Of an elementwise codec, on the CPU.
  bool goes_by_chunks(const SchemeStep& step) const { return elementwise_ && step.op.device == OpDevice::kCpu; }
  Result<std::uint64_t> encode_chunks(const SchemeStep& step, const Cell& cell, const Piece& piece, float* message,
                                      std::byte* slot);
  template <typename PayloadOf>
  Status decode_chunks(const SchemeStep& step, const Piece& piece, float* message, PayloadOf&& payload_of);
  TensorMemory memory_of(const SchemeStep& step, const Piece& piece, float* message) const;
  bool add_residual(const SchemeStep& step, const Piece& piece, float* values);
  // What of the residual of the step's place belongs to the piece.
  float* residual_of(std::vector<AlignedBuffer<float>>& residuals, const SchemeStep& step, const Piece& piece) const;
  void keep_loss(const SchemeStep& step, const Piece& piece, const float* values, const float* decoded);
  void note_squares(const SchemeStep& step, const Piece& piece, const DifferenceSquares& squares);
  // `payload`: what a contributor has made of the piece.
  Status decode_piece(const SchemeStep& step, const Cell& cell, const Piece& piece, std::span<const std::byte> payload,
                      int contributor, float* values);
  void add(int contributor, int contributors, const float* decoded, std::int64_t elems, float* sum);
  std::int64_t now_ns() const { return setup_.clock == nullptr ? 0 : setup_.clock->now_ns(); }
  void note_work(Stage stage, const Piece& piece, std::int64_t start_ns);
  void copy_to_device(const void* from, void* to, std::uint64_t bytes);
  void copy_to_host(const void* from, void* to, std::uint64_t bytes);

  Setup setup_;
  const SchemeProgram* program_;
  std::vector<std::uint64_t> keys_;  // of tensors
  bool fixed_size_ = true;
  bool lossy_ = false;
  bool elementwise_ = false;
  std::uint64_t value_bytes_ = 0;  // of an elementwise codec, in payloads
  DType cast_ = DType::kFloat32;   // 16 bits, of a codec that casts
  bool shares_key_ = false;        // all contributors draw the same numbers, so that their payloads can be added
  bool scales_up_ = false;         // what it keeps (Sparsifier::scales_up)
  bool votes_ = false;
  bool holds_zeros_ = false;
  bool says_gpu_ = false;  // some operation does
  std::int64_t step_ = 0;
  AlignedBuffer<float> decoded_, magnitude_, device_values_;
  AlignedBuffer<std::byte> scratch_, payload_, device_payload_;
  std::vector<AlignedBuffer<float>> kept_, fresh_;  // of places
  std::vector<TensorMemory> lent_;                  // of tensors
  std::vector<char> finite_;
  std::vector<DifferenceSquares> squares_;
  std::vector<double> lost_squares_;
  std::vector<std::int64_t> encoded_bytes_;  // of tensors
  SchemeStatistics statistics_;
  TraceRecorder work_{0};

  // A queue and its operations, by step of the program; none without a device.
  std::unique_ptr<DeviceQueue> queue_;
  std::vector<std::unique_ptr<DeviceEncode>> device_encodes_;
  std::vector<std::unique_ptr<DeviceDecode>> device_decodes_;
  std::vector<char> held_;  // of the pieces that the device encodes
  std::string host_reason_;
};

}  // namespace cortado

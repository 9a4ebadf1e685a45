// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// SchemeDevice: the GPU of a rank, for the encodes and decodes of schemes that say gpu. Payloads and sums are those of
// the CPU's variant to the bit, so ranks with and without a device may be mixed.
//
// The values of a message are in host memory. An encode copies its region there, and the payloads back, with the
// decoded values where something was lost; a decode copies payloads there and the sum back. Work is given to a queue of
// the message by start(), which does not wait; ended() asks.
//
//   DeviceEncode   one encode of a scheme: all its pieces in one batch
//   DeviceDecode   one decode: the payloads of one contributor after the other, added in that order
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codec/device_batch.h"
#include "codec/device_layout.h"
#include "codec/payload_moves.h"
#include "collective/add_term.h"
#include "core/device_queue.h"

namespace cortado {

class SchemeDevice {
 public:
  virtual ~SchemeDevice() = default;

  virtual Result<std::unique_ptr<DeviceQueue>> make_queue() const = 0;
  // kUnsupported: codecs that have no device variant.
  virtual Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec,
                                                          std::span<const DeviceTensor> tensors) const = 0;
  // Kernels. kUnsupported: they were not built for this device.
  virtual Status add(DeviceStream stream, const AddTerm& term) const = 0;
  virtual Status move(DeviceStream stream, std::int64_t blocks, const MovePayloads& moves) const = 0;
};

// With the kernels of `Device`.
template <class Device>
class SchemeDeviceOf : public SchemeDevice {
 public:
  Status add(DeviceStream stream, const AddTerm& term) const override { return launch(stream, term.blocks(), term); }
  Status move(DeviceStream stream, std::int64_t blocks, const MovePayloads& moves) const override {
    return launch(stream, blocks, moves);
  }

 private:
  template <class Kernel>
  static Status launch(DeviceStream stream, std::int64_t blocks, const Kernel& kernel) {
    Device device(stream);
    device.launch(blocks, kernel);
    return device.status();
  }
};

struct DeviceCopies {
  std::int64_t copies_to_device = 0, bytes_to_device = 0;
  std::int64_t copies_to_host = 0, bytes_to_host = 0;

  DeviceCopies& operator+=(const DeviceCopies& other);
};

// A tensor, or a part of one, that is encoded by itself.
struct DevicePiece {
  std::string name;
  std::int64_t offset = 0;  // in the region, which its pieces fill
  std::int64_t rows = 0, cols = 0;
  std::uint64_t number = 0;  // EncodeContext::tensor

  std::int64_t elems() const { return rows * cols; }
};

struct DeviceOperationSetup {
  const SchemeDevice* device = nullptr;
  DeviceQueue* queue = nullptr;  // outlives the operation, as the codec does
  const Codec* codec = nullptr;
  std::vector<DevicePiece> pieces;
  std::int64_t elems = 0;  // of the region
};

// What both have in common: pieces, the room for their payloads, and copies that are counted. Payloads whose sizes vary
// are copied close together, and moved from or to their room on the device.
class DeviceOperation {
 public:
  const DeviceCopies& copies() const { return copies_; }  // since start()
  std::int64_t memory_bytes() const { return static_cast<std::int64_t>(on_device_.bytes() + on_host_.bytes()); }

 protected:
  // `sets` of payloads of all pieces are moved in a step.
  DeviceOperation(const DeviceOperationSetup& setup, std::size_t sets);
  ~DeviceOperation() = default;

  std::size_t count() const { return setup_.pieces.size(); }
  std::uint64_t region_bytes() const { return static_cast<std::uint64_t>(setup_.elems) * sizeof(float); }
  std::uint64_t stride() const { return payloads_.bytes(); }  // room for the payloads of all pieces
  DeviceQueue& queue() { return *setup_.queue; }
  // After all that the operation itself needs was added to on_device_ and on_host_: takes the memory, makes the batch.
  Status open(std::uint64_t values, std::uint64_t seed);
  void begin_counting() { copies_ = {}; }
  Status to_device(std::byte* to, const std::byte* from, std::uint64_t bytes);
  Status to_host(std::byte* to, const std::byte* from, std::uint64_t bytes);
  PayloadMove* moves(std::size_t set) { return reinterpret_cast<PayloadMove*>(host_ + moves_on_host_) + set * count(); }
  Status move(std::size_t set, const std::byte* from, std::byte* to);
  static std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 15) / 16 * 16; }  // as copies are fastest

  const DeviceOperationSetup setup_;
  const bool is_fixed_;                        // payloads have the size that there is room for
  std::vector<std::uint64_t> room_, offsets_;  // of each payload: bytes, and where in all of them
  DevicePieces on_device_, on_host_;
  std::byte *device_ = nullptr, *host_ = nullptr;
  std::unique_ptr<DeviceBatch> batch_;
  std::uint64_t payloads_at_ = 0, packed_ = 0, step_ = 0;  // on the device

 private:
  std::vector<DeviceTensor> tensors(std::byte* values, std::byte* payloads) const;

  DevicePieces payloads_;
  DeviceLayout layout_;
  TilingSlots tiles_;
  WorkspaceSlot<PayloadMove> moves_;
  DeviceWorkspace workspace_ = {};
  std::uint64_t tables_ = 0;  // on the device
  std::uint64_t moves_on_host_ = 0, tables_on_host_ = 0;
  DeviceCopies copies_;
};

class DeviceEncode final : public DeviceOperation {
 public:
  // `seed` is EncodeContext::seed.
  static Result<std::unique_ptr<DeviceEncode>> make(const DeviceOperationSetup& setup, std::uint64_t seed,
                                                    bool is_lossy);

  // Copies the values of the region; `step` is EncodeContext::step.
  Status start(const float* values, std::uint64_t step);
  Result<bool> ended();
  // Once it has ended, until the next start(). decoded(): of the whole region; null for lossless codecs.
  std::span<const std::byte> payload(std::size_t piece) const;
  const float* decoded() const { return is_lossy_ ? reinterpret_cast<const float*>(host_ + values_on_host_) : nullptr; }

 private:
  DeviceEncode(const DeviceOperationSetup& setup, bool is_lossy) : DeviceOperation(setup, 1), is_lossy_(is_lossy) {}
  Status fetch_payloads();
  std::uint64_t* sizes() const { return reinterpret_cast<std::uint64_t*>(host_ + sizes_on_host_); }

  const bool is_lossy_;
  std::uint64_t values_ = 0;  // on the device
  std::uint64_t values_on_host_ = 0, payloads_on_host_ = 0, sizes_on_host_ = 0, step_on_host_ = 0;
  std::vector<std::uint64_t> found_at_;  // each payload in those on the host
  DeviceQueue::Event sized_ = 0, ended_ = 0;
  bool sizes_are_known_ = false;
};

class DeviceDecode final : public DeviceOperation {
 public:
  // `terms` contributors of every piece.
  static Result<std::unique_ptr<DeviceDecode>> make(const DeviceOperationSetup& setup, int terms);

  int terms() const { return terms_; }

  // Copies a payload; of each contributor in turn all pieces in their order, before start(). kCorruptData if its size
  // can't be.
  Status put(std::size_t piece, int term, std::span<const std::byte> payload);
  Status start();
  // kCorruptData if a decoder refused a payload, with its name and contributor.
  Result<bool> ended();
  // Once it has ended: of the whole region.
  const float* sums() const { return reinterpret_cast<const float*>(host_ + sums_on_host_); }

 private:
  DeviceDecode(const DeviceOperationSetup& setup, int terms)
      : DeviceOperation(setup, static_cast<std::size_t>(terms)), terms_(terms) {}
  std::uint64_t* sizes(int term) const {
    return reinterpret_cast<std::uint64_t*>(host_ + sizes_on_host_) + static_cast<std::size_t>(term) * count();
  }
  std::uint32_t* faults(int term) const {
    return reinterpret_cast<std::uint32_t*>(host_ + faults_on_host_) + static_cast<std::size_t>(term) * count();
  }
  std::byte* payloads_on_host(int term) const {
    return host_ + payloads_on_host_ + static_cast<std::uint64_t>(term) * stride();
  }
  Status upload(int term);

  const int terms_;
  bool is_vote_ = false;
  std::uint64_t sums_ = 0, decoded_ = 0, magnitude_ = 0;  // on the device
  std::uint64_t payloads_on_host_ = 0, sizes_on_host_ = 0, faults_on_host_ = 0, sums_on_host_ = 0;
  std::vector<std::uint64_t> packed_bytes_;  // of each term, of what was put
  DeviceQueue::Event ended_ = 0;
};

}  // namespace cortado

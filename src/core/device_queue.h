// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceQueue: one stream of a device, with the memory that its work is done in. Work is done in the order it is given;
// nothing here waits for it. What has been done is seen by events: reached() asks, and never waits.
//
// Memory that is copied to the host may be read, and memory that is copied from there may be changed, once an event
// that was recorded behind the copy has been reached.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.h"
#include "cortado/status.h"

namespace cortado {

class DeviceQueue {
 public:
  using Event = int;

  virtual ~DeviceQueue() = default;

  virtual DeviceStream stream() const = 0;

  // Both zeroed, aligned to 256 bytes, and there as long as the queue. Before the first step: they may wait for the
  // device.
  virtual Result<std::byte*> allocate_on_device(std::uint64_t bytes) = 0;
  virtual Result<std::byte*> allocate_on_host(std::uint64_t bytes) = 0;
  virtual Result<Event> make_event() = 0;

  // Host memory is that of allocate_on_host().
  virtual Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  virtual Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;

  // What this queue is given from now on comes after what `other` has been given so far; and the other way round.
  virtual Status follow(DeviceStream other) = 0;
  virtual Status lead(DeviceStream other) = 0;

  // Behind everything given so far; an event that is recorded again is another one.
  virtual Status record(Event event) = 0;
  virtual Result<bool> reached(Event event) = 0;
};

// Pieces of one allocation, aligned as allocations are.
class DevicePieces {
 public:
  std::uint64_t add(std::uint64_t bytes) {
    const std::uint64_t offset = bytes_;
    bytes_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return offset;
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  static constexpr std::uint64_t kAlignBytes = 256;

  std::uint64_t bytes_ = 0;
};

}  // namespace cortado

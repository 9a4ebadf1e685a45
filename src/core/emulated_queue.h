// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: a DeviceQueue whose device is the CPU (EmulatedDevice runs the kernels at once), and whose copies to the
// host are late: until an event behind them is reached their target holds 0xa5, and an event is reached only when it
// has been asked for some times. Copies to the device are done at once, and the memory that was copied from is filled
// with 0xa5 when an event behind the copy is reached, because it is free to be changed from then on.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/device_queue.h"

namespace cortado {

class EmulatedQueue : public DeviceQueue {
 public:
  static constexpr int kLooks = 2;  // at an event in vain
  static constexpr int kPoison = 0xa5;

  explicit EmulatedQueue(DeviceStream stream = nullptr, std::uint64_t most_bytes = ~std::uint64_t{0})
      : stream_(stream), bytes_left_(most_bytes) {}

  DeviceStream stream() const override { return stream_; }

  Result<std::byte*> allocate_on_device(std::uint64_t bytes) override {
    if (bytes > bytes_left_) return Status(StatusCode::kIoError, "emulated: device memory: out of memory");
    bytes_left_ -= bytes;
    return allocate(bytes);
  }
  Result<std::byte*> allocate_on_host(std::uint64_t bytes) override { return allocate(bytes); }
  Result<Event> make_event() override {
    events_.push_back({});
    return static_cast<Event>(events_.size() - 1);
  }

  Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    const std::vector<std::byte> kept(from, from + bytes);
    std::memset(to, kPoison, bytes);
    work_.push_back([=] {
      if (!kept.empty()) std::memcpy(to, kept.data(), kept.size());
    });
    return {};
  }
  Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
    auto* const source = const_cast<std::byte*>(from);
    work_.push_back([=] { std::memset(source, kPoison, bytes); });
    return {};
  }

  // Kernels and copies to the device are done at once, so nothing is left to wait for; which streams is noted.
  Status follow(DeviceStream other) override {
    followed_.push_back(other);
    return {};
  }
  Status lead(DeviceStream other) override {
    led_.push_back(other);
    return {};
  }
  const std::vector<DeviceStream>& followed() const { return followed_; }
  const std::vector<DeviceStream>& led() const { return led_; }

  Status record(Event event) override {
    events_[static_cast<std::size_t>(event)] = {work_.size(), 0};
    return {};
  }
  Result<bool> reached(Event event) override {
    if (hangs_) return false;
    Recorded& recorded = events_[static_cast<std::size_t>(event)];
    if (++recorded.looks <= kLooks) return false;
    for (; done_ < recorded.position; ++done_) std::exchange(work_[done_], nullptr)();
    return true;
  }

  // From now on nothing ends.
  void hang() { hangs_ = true; }

  std::uint64_t allocations() const { return blocks_.size(); }

 private:
  struct Recorded {
    std::size_t position = 0;
    int looks = 0;
  };
  static constexpr std::align_val_t kAlign{256};
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };

  std::byte* allocate(std::uint64_t bytes) {
    blocks_.emplace_back(static_cast<std::byte*>(::operator new(bytes, kAlign)));
    std::memset(blocks_.back().get(), 0, bytes);
    return blocks_.back().get();
  }

  DeviceStream stream_;
  std::uint64_t bytes_left_;                 // on the device
  std::vector<std::function<void()>> work_;  // copies in order
  std::size_t done_ = 0;
  bool hangs_ = false;
  std::vector<DeviceStream> followed_, led_;
  std::vector<Recorded> events_;
  std::vector<std::unique_ptr<std::byte, Delete>> blocks_;
};

// A device whose work never ends.
class StuckQueue final : public DeviceQueue {
 public:
  DeviceStream stream() const override { return nullptr; }
  Result<std::byte*> allocate_on_device(std::uint64_t bytes) override { return inner_.allocate_on_device(bytes); }
  Result<std::byte*> allocate_on_host(std::uint64_t bytes) override { return inner_.allocate_on_host(bytes); }
  Result<Event> make_event() override { return inner_.make_event(); }
  Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return inner_.copy_to_host(to, from, bytes);
  }
  Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return inner_.copy_to_device(to, from, bytes);
  }
  Status follow(DeviceStream other) override { return inner_.follow(other); }
  Status lead(DeviceStream other) override { return inner_.lead(other); }
  Status record(Event event) override { return inner_.record(event); }
  Result<bool> reached(Event) override { return false; }

 private:
  EmulatedQueue inner_;
};

}  // namespace cortado

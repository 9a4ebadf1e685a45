// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For device_emulation.h: the warps of a block take turns, each on a stack of its own, so that one can stop in the
// middle of the kernel until the others have come as far.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "core/check.h"

#if defined(__has_feature)
#define CORTADO_ADDRESS_SANITIZER __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define CORTADO_ADDRESS_SANITIZER 1
#else
#define CORTADO_ADDRESS_SANITIZER 0
#endif
#if CORTADO_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace cortado {

class EmulatedWarps {
 public:
  explicit EmulatedWarps(int count) {
    for (int i = 0; i < count; ++i) warps_.push_back(std::make_unique<Warp>());
  }

  // body(warp) for every warp, from barrier to barrier: the first one goes on until it waits, then the second ...
  template <class Body>
  void run(bool forwards, const Body& body) {
    const auto call = [&body](int warp) { body(warp); };
    call_ = [](const void* of, int warp) { (*static_cast<const decltype(call)*>(of))(warp); };
    body_ = &call;
    const int count = static_cast<int>(warps_.size());
    for (int i = 0; i < count; ++i) begin(i);
    for (int ended = 0; ended == 0;) {
      for (int i = 0; i < count; ++i) ended += resume(forwards ? i : count - 1 - i);
      CORTADO_CHECK(ended == 0 || ended == count, "%d of %d warps have ended, the others wait for them", ended, count);
    }
  }

  // Of the warp whose turn it is: until all others wait too.
  void wait() { leave(false); }

  // What warps tell each other.
  static constexpr std::size_t kNoteBytes = 16;
  std::byte* note(int warp) { return warps_[static_cast<std::size_t>(warp)]->note; }

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;
  struct Warp {
    std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
    ucontext_t context = {};
    bool has_ended = false;
    void* fake_stack = nullptr;  // of the address sanitizer
    alignas(kNoteBytes) std::byte note[kNoteBytes];
  };

  void begin(int number) {
    Warp& warp = *warps_[static_cast<std::size_t>(number)];
    warp.has_ended = false;
    warp.fake_stack = nullptr;
    getcontext(&warp.context);
    warp.context.uc_stack.ss_sp = warp.stack.get();
    warp.context.uc_stack.ss_size = kStackBytes;
    makecontext(&warp.context, enter, 0);
  }

  bool resume(int number) {
    Warp& warp = *warps_[static_cast<std::size_t>(number)];
    current_ = number;
    entered() = this;
#if CORTADO_ADDRESS_SANITIZER
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, warp.stack.get(), kStackBytes);
    swapcontext(&own_, &warp.context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    swapcontext(&own_, &warp.context);
#endif
    return warp.has_ended;
  }

  // These two do not return when a warp ends: ThreadSanitizer, which counts calls and returns of a thread whatever
  // stack it is on, would run out of room for its own.
  __attribute__((noinline, no_sanitize("thread"))) void leave(bool has_ended) {
    Warp& warp = *warps_[static_cast<std::size_t>(current_)];
    warp.has_ended = has_ended;
#if CORTADO_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(has_ended ? nullptr : &warp.fake_stack, own_stack_, own_stack_bytes_);
    swapcontext(&warp.context, &own_);
    __sanitizer_finish_switch_fiber(warp.fake_stack, nullptr, nullptr);
#else
    swapcontext(&warp.context, &own_);
#endif
  }

  __attribute__((noinline, no_sanitize("thread"))) static void enter() {
    EmulatedWarps& warps = *entered();
#if CORTADO_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &warps.own_stack_, &warps.own_stack_bytes_);
#endif
    warps.call_(warps.body_, warps.current_);
    warps.leave(true);
  }

  // A context takes no pointer.
  static EmulatedWarps*& entered() {
    thread_local EmulatedWarps* value = nullptr;
    return value;
  }

  std::vector<std::unique_ptr<Warp>> warps_;
  ucontext_t own_ = {};
  [[maybe_unused]] const void* own_stack_ = nullptr;  // AddressSanitizer wants to know
  [[maybe_unused]] std::size_t own_stack_bytes_ = 0;
  int current_ = 0;
  void (*call_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
};

}  // namespace cortado

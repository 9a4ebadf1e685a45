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

// clang has the compilers' jumps for x86 only.
#if !defined(CORTADO_HAS_JUMPS)
#if defined(__x86_64__) || !defined(__clang__)
#define CORTADO_HAS_JUMPS 1
#else
#define CORTADO_HAS_JUMPS 0
#endif
#endif

// Of functions that leave a stack or enter one: sanitizers are to think nothing of them. clang keeps on counting calls
// and returns for ThreadSanitizer where it is merely told not to look at memory.
#if defined(__has_attribute)
#if __has_attribute(disable_sanitizer_instrumentation)
#define CORTADO_UNSEEN disable_sanitizer_instrumentation,
#endif
#endif
#if !defined(CORTADO_UNSEEN)
#define CORTADO_UNSEEN
#endif

namespace cortado {

class EmulatedWarps {
 public:
  // Of this thread, which keeps them from launch to launch.
  static EmulatedWarps& of_thread() {
    thread_local EmulatedWarps warps;
    return warps;
  }

  // body(warp) for `count` warps, from barrier to barrier: the first one goes on until it waits, then the second ...
  template <class Body>
  void run(int count, bool forwards, const Body& body) {
    CORTADO_CHECK(body_ == nullptr, "a kernel launches another one");
    const auto call = [&body](int warp) { body(warp); };
    call_ = [](const void* of, int warp) { (*static_cast<const decltype(call)*>(of))(warp); };
    body_ = &call;
    while (static_cast<int>(warps_.size()) < count) warps_.push_back(std::make_unique<Warp>());
    for (int i = 0; i < count; ++i) warps_[static_cast<std::size_t>(i)]->has_ended = false;
    for (int ended = 0; ended == 0;) {
      for (int i = 0; i < count; ++i) ended += resume(forwards ? i : count - 1 - i);
      CORTADO_CHECK(ended == 0 || ended == count, "%d of %d warps have ended, the others wait for them", ended, count);
    }
    body_ = nullptr;
  }

  // Of the warp whose turn it is: until all others wait too.
  void wait() { leave(); }

  // What warps tell each other.
  static constexpr std::size_t kNoteBytes = 16;
  std::byte* note(int warp) { return warps_[static_cast<std::size_t>(warp)]->note; }

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;
  // A place to jump to. Unlike swapcontext(), which made half of the time of the tests, the compilers' jumps ask the
  // kernel for nothing.
#if CORTADO_HAS_JUMPS
  struct Place {
    void* words[5];
  };
#else
  using Place = ucontext_t;
#endif
  struct Warp {
    std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
    Place place = {};
    bool has_begun = false;
    bool has_ended = false;
    void* fake_stack = nullptr;  // of the address sanitizer
    alignas(kNoteBytes) std::byte note[kNoteBytes];
  };

  bool resume(int number) {
    Warp& warp = *warps_[static_cast<std::size_t>(number)];
    current_ = number;
#if CORTADO_ADDRESS_SANITIZER
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, warp.stack.get(), kStackBytes);
    jump_to(warp);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    jump_to(warp);
#endif
    return warp.has_ended;
  }

  // Functions that jump save all registers, since they do not know where the next jump comes from. Sanitizers are to
  // think nothing of them: ThreadSanitizer counts calls and returns of a thread whatever stack it is on.
#if CORTADO_HAS_JUMPS
  __attribute__((CORTADO_UNSEEN noinline, no_sanitize("address", "thread"))) void jump_to(Warp& warp) {
    if (__builtin_setjmp(own_.words) != 0) return;
    if (warp.has_begun) go_on(warp.place);
    ucontext_t context;
    begin(warp, &context);
    setcontext(&context);
  }
  __attribute__((CORTADO_UNSEEN noinline, no_sanitize("address", "thread"))) void jump_back(Warp& warp) {
    if (__builtin_setjmp(warp.place.words) == 0) go_on(own_);
  }
  // Apart, since gcc can't have both in one function.
  [[noreturn]] __attribute__((CORTADO_UNSEEN noinline, no_sanitize("address", "thread"))) static void go_on(
      Place& place) {
    __builtin_longjmp(place.words, 1);
  }
#else
  void jump_to(Warp& warp) {
    if (!warp.has_begun) begin(warp, &warp.place);
    swapcontext(&own_, &warp.place);
  }
  void jump_back(Warp& warp) { swapcontext(&warp.place, &own_); }
#endif

  void begin(Warp& warp, ucontext_t* context) {
    warp.has_begun = true;
    entered() = this;
    getcontext(context);
    context->uc_stack.ss_sp = warp.stack.get();
    context->uc_stack.ss_size = kStackBytes;
    makecontext(context, enter, 0);
  }

  __attribute__((CORTADO_UNSEEN noinline, no_sanitize("thread"))) void leave() {
    Warp& warp = *warps_[static_cast<std::size_t>(current_)];
#if CORTADO_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(&warp.fake_stack, own_stack_, own_stack_bytes_);
    jump_back(warp);
    __sanitizer_finish_switch_fiber(warp.fake_stack, nullptr, nullptr);
#else
    jump_back(warp);
#endif
  }

  // Of a warp's stack the first function, and the only one between two kernels.
  __attribute__((CORTADO_UNSEEN noinline, no_sanitize("thread"))) static void enter() {
    EmulatedWarps& warps = *entered();
#if CORTADO_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &warps.own_stack_, &warps.own_stack_bytes_);
#endif
    for (;;) {
      warps.call_(warps.body_, warps.current_);
      warps.warps_[static_cast<std::size_t>(warps.current_)]->has_ended = true;
      warps.leave();
    }
  }

  // A context takes no pointer.
  static EmulatedWarps*& entered() {
    thread_local EmulatedWarps* value = nullptr;
    return value;
  }

  std::vector<std::unique_ptr<Warp>> warps_;
  Place own_ = {};
  [[maybe_unused]] const void* own_stack_ = nullptr;  // AddressSanitizer wants to know
  [[maybe_unused]] std::size_t own_stack_bytes_ = 0;
  int current_ = 0;
  void (*call_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
};

}  // namespace cortado

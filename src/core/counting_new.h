// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: counts every operator new of the program, so that a test can prove that a loop allocates nothing. Include
// it in the test that counts; several files of one program may do so (the definitions are weak, the count is shared).
//
//   if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
//   const std::int64_t before = allocation_count();
//   ... the loop ...
//   EXPECT_EQ(allocation_count() - before, 0);
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "core/sanitized.h"

namespace cortado {

inline constexpr bool kCountsAllocations = !kSanitized;
inline std::atomic<std::int64_t> counted_allocations{0};

// Allocations of all threads since the program began.
inline std::int64_t allocation_count() { return counted_allocations.load(std::memory_order_relaxed); }

// The library does not handle lack of memory, so a test does not either.
inline void* count_allocation(void* memory) {
  counted_allocations.fetch_add(1, std::memory_order_relaxed);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace cortado

#if !CORTADO_SANITIZED
// The array and nothrow forms of the standard library call these.
[[gnu::weak]] void* operator new(std::size_t bytes) {
  return cortado::count_allocation(std::malloc(bytes == 0 ? 1 : bytes));
}
[[gnu::weak]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  return cortado::count_allocation(std::aligned_alloc(align, (bytes + align - 1) / align * align));
}
[[gnu::weak]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::weak]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::weak]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::weak]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

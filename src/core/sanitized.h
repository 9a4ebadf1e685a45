// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: whether this is a build with AddressSanitizer or ThreadSanitizer, in which everything takes several times
// as long. A test that repeats itself for the sake of numbers, not of paths, may do fewer rounds there.
#pragma once

#if defined(__has_feature)
#define CORTADO_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CORTADO_SANITIZED 1
#else
#define CORTADO_SANITIZED 0
#endif

namespace cortado {

inline constexpr bool kSanitized = CORTADO_SANITIZED;

}  // namespace cortado

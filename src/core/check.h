// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// CORTADO_CHECK: for broken invariants of Cortado itself, never for input. Ends the process with the place, the
// condition and an optional printf-like text; stays on in release builds, so keep it out of inner loops.
//
//   CORTADO_CHECK(slot < slots.size(), "slot %zu of %zu", slot, slots.size());
//
// CORTADO_RETURN_IF_ERROR and CORTADO_ASSIGN_OR_RETURN: hand an error on to the caller.
//
//   CORTADO_RETURN_IF_ERROR(check_shape(view));
//   CORTADO_ASSIGN_OR_RETURN(const Layout layout, make_layout(tensors));
#pragma once

#include <utility>

#include "cortado/status.h"

namespace cortado {

[[noreturn]] void check_failed(const char* file, int line, const char* condition);
[[noreturn, gnu::format(printf, 4, 5)]] void check_failed(const char* file, int line, const char* condition,
                                                          const char* format, ...);

}  // namespace cortado

#define CORTADO_CHECK(condition, ...)                                                     \
  do {                                                                                    \
    if (!(condition)) [[unlikely]]                                                        \
      ::cortado::check_failed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

// The expression comes as __VA_ARGS__, so that commas of template arguments in it need no parentheses.
#define CORTADO_RETURN_IF_ERROR(...)                                                         \
  do {                                                                                       \
    if (::cortado::Status cortado_status = (__VA_ARGS__); !cortado_status.ok()) [[unlikely]] \
      return cortado_status;                                                                 \
  } while (false)

#define CORTADO_ASSIGN_OR_RETURN(target, ...) \
  CORTADO_ASSIGN_OR_RETURN_NAMED(CORTADO_CONCATENATE(cortado_result_, __LINE__), target, __VA_ARGS__)
#define CORTADO_ASSIGN_OR_RETURN_NAMED(result, target, ...) \
  auto result = (__VA_ARGS__);                              \
  if (!result.ok()) [[unlikely]]                            \
    return result.status();                                 \
  target = std::move(result).value()
#define CORTADO_CONCATENATE(a, b) CORTADO_CONCATENATE_EXPANDED(a, b)
#define CORTADO_CONCATENATE_EXPANDED(a, b) a##b

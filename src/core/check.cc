// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace cortado {

void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, condition);
  std::abort();
}

void check_failed(const char* file, int line, const char* condition, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s: ", file, line, condition);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace cortado

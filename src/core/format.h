// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdarg>
#include <string>

namespace cortado {

// What printf would print, of any length.
[[gnu::format(printf, 1, 2)]] std::string format_text(const char* format, ...);
std::string format_arguments(const char* format, std::va_list arguments);

}  // namespace cortado

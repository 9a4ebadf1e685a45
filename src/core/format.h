// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdarg>
#include <cstddef>
#include <string>
#include <string_view>

#include "cortado/printable.h"

namespace cortado {

// What printf would print, of any length.
[[gnu::format(printf, 1, 2)]] std::string format_text(const char* format, ...);
std::string format_arguments(const char* format, std::va_list arguments);

// The shortest decimal that reads back to `value`.
std::string number_text(double value);

// For messages: `text` if it has at most `longest` bytes, otherwise what is whole of its UTF-8 characters in as many,
// and "..." behind.
std::string shorten(std::string_view text, std::size_t longest);

// What errors call a message of `count` tensors: `"a.weight" and 2 more`; of none: `no tensor`.
std::string name_tensors(std::string_view first, std::size_t count);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdarg>
#include <cstddef>
#include <string>
#include <string_view>

namespace cortado {

// What printf would print, of any length.
[[gnu::format(printf, 1, 2)]] std::string format_text(const char* format, ...);
std::string format_arguments(const char* format, std::va_list arguments);

// For messages: `text` if it has at most `longest` bytes, otherwise what is whole of its UTF-8 characters in as many,
// and "..." behind.
std::string shorten(std::string_view text, std::size_t longest);

// Of a text that may be anything: without control characters, which a terminal would obey.
std::string printable(std::string_view text);

// What errors call a message of `count` tensors: `"a.weight" and 2 more`; of none: `no tensor`.
std::string name_tensors(std::string_view first, std::size_t count);

}  // namespace cortado

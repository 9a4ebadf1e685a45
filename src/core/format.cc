// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/format.h"

#include <charconv>
#include <cstdio>

namespace cortado {

std::string format_text(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  return text;
}

std::string format_arguments(const char* format, std::va_list arguments) {
  std::va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  std::string text(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

std::string shorten(std::string_view text, std::size_t longest) {
  if (text.size() <= longest) return std::string(text);
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
  while (longest > 0 && continues(text[longest])) --longest;
  return std::string(text.substr(0, longest)) + "...";
}

std::string printable(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(at < text.size() ? text[at] : 0); };
    const bool is_c1 = byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0;
    if (is_c1) ++i;
    result += is_c1 || byte(i) < 0x20 || byte(i) == 0x7f ? '?' : text[i];
  }
  return result;
}

std::string name_tensors(std::string_view first, std::size_t count) {
  if (count == 0) return "no tensor";
  std::string name = "\"" + std::string(first) + "\"";
  if (count > 1) name += " and " + std::to_string(count - 1) + " more";
  return name;
}

std::string number_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

}  // namespace cortado

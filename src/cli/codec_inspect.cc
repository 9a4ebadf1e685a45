// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado codec inspect`: what every byte of a file of a compressed tensor is.
#include <algorithm>
#include <cstdio>

#include "cli/codec_commands.h"
#include "cli/json.h"
#include "cortado/codec_file.h"
#include "cortado/files.h"

namespace cortado::cli {

namespace {

// "43 52 54 46", the first bytes of a section.
std::string hex_of(std::span<const std::byte> bytes) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(bytes.size(), kShown); ++i) {
    char byte[4];
    std::snprintf(byte, sizeof(byte), "%s%02x", i > 0 ? " " : "", static_cast<unsigned>(bytes[i]));
    text += byte;
  }
  return bytes.size() > kShown ? text + " .." : text;
}

int name_width(const std::vector<PayloadSection>& sections) {
  std::size_t width = 0;
  for (const PayloadSection& section : sections) width = std::max(width, section.name.size());
  return static_cast<int>(width);
}

void print_section(const PayloadSection& section, std::span<const std::byte> file, int width, bool as_json) {
  const std::string hex = hex_of(file.subspan(section.offset, section.bytes));
  const auto offset = static_cast<unsigned long long>(section.offset);
  const auto bytes = static_cast<unsigned long long>(section.bytes);
  if (as_json) {
    std::printf("{\"offset\": %llu, \"bytes\": %llu, \"name\": %s, \"meaning\": %s, \"first_bytes\": %s}\n", offset,
                bytes, json_text(section.name).c_str(), json_text(section.meaning).c_str(), json_text(hex).c_str());
  } else {
    std::printf("%10llu %10llu  %-26s  %-*s  %s\n", offset, bytes, hex.c_str(), width, section.name.c_str(),
                section.meaning.c_str());
  }
}

}  // namespace

int inspect_file(const std::string& path, bool as_json) {
  const Result<std::unique_ptr<InputFile>> input = InputFile::open(path);
  if (!input.ok()) return report_error(path, input.status());
  const std::span<const std::byte> file = input.value()->bytes();
  std::vector<PayloadSection> sections;
  const Status status = explain_codec_file(file, &sections);
  const int width = name_width(sections);
  if (!as_json && !sections.empty()) {
    std::printf("%10s %10s  %-26s  %-*s  %s\n", "offset", "bytes", "first bytes", width, "name", "meaning");
  }
  for (const PayloadSection& section : sections) print_section(section, file, width, as_json);
  if (status.ok()) return kDone;
  std::fflush(stdout);
  const std::string whole = sections.empty() ? "Nothing of it can be read."
                                             : "What stands above is whole; decompressing the file would fail.";
  return report_error(path, status, whole);
}

}  // namespace cortado::cli

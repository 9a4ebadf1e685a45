// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Input files of commands.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cli/codec_commands.h"
#include "cortado/files.h"
#include "cortado/status.h"

namespace cortado::cli {

// Reads a file with the function of its format. Of none the error has been reported and `code` is the exit code: a file
// of another format or version is as useless as a damaged one.
template <typename Value>
std::unique_ptr<Value> read_input(const std::string& path, Result<Value> (*parse)(std::string_view), int* code) {
  const Result<std::string> text = read_file(path);
  if (!text.ok()) return *code = report_error(path, text.status()), nullptr;
  Result<Value> value = parse(text.value());
  if (!value.ok()) {
    report_error(path, value.status());
    *code = kDamagedFile;
    return nullptr;
  }
  return std::make_unique<Value>(std::move(value).value());
}

}  // namespace cortado::cli

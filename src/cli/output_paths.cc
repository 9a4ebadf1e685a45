// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/output_paths.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "cli/codec_commands.h"
#include "cortado/files.h"

namespace cortado::cli {

namespace {

namespace fs = std::filesystem;

// One file, or what will be one. A terminal and /dev/null may be read and written, and written twice.
bool is_same(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code ignored, of_a, of_b;
  if (fs::exists(a, ignored) && fs::exists(b, ignored)) {  // pipes, too, of which there is no canonical path
    return !fs::is_character_file(a, ignored) && fs::equivalent(a, b, ignored);
  }
  return fs::weakly_canonical(a, of_a) == fs::weakly_canonical(b, of_b) && !of_a && !of_b;
}

}  // namespace

int check_outputs(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs) {
  std::vector<NamedPath> taken = inputs;
  for (const NamedPath& output : outputs) {
    const auto same =
        std::find_if(taken.begin(), taken.end(), [&](const auto& other) { return is_same(output.path, other.path); });
    if (same != taken.end()) {
      return report_error(output.name + " " + output.path,
                          Status(StatusCode::kInvalidArgument, "is the file of " + same->name + " " + same->path +
                                                                   ", which it would be written over: name another"));
    }
    taken.push_back(output);
  }
  return kDone;
}

std::FILE* text_stream(const std::vector<std::string>& outputs) {
  const auto is_stdout = [](const std::string& path) { return !path.empty() && descriptor_of(path) == 1; };
  return std::any_of(outputs.begin(), outputs.end(), is_stdout) ? stderr : stdout;
}

}  // namespace cortado::cli

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado options`.
#pragma once

#include <string>
#include <vector>

namespace cortado::cli {

struct OptionListOptions {
  int levels = 2;
  std::vector<std::string> codecs;  // none: whatever the codec
  std::string device;               // "cpu", "gpu"; empty: both
  bool rooted = true;
  bool only_count = false;
  bool as_json = false;  // one object a line
};

// Returns the exit code of the program.
int list_options(const OptionListOptions& options);

}  // namespace cortado::cli

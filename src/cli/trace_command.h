// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace cortado::cli {

struct TraceOptions {
  std::string path;
  std::string summary;      // "stage", "tensor" or empty: the drawing
  std::string chrome_path;  // written if not empty; alone it prints nothing
};

// The exit code, as the codec commands.
int show_trace(const TraceOptions& options);

}  // namespace cortado::cli

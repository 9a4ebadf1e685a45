// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado trace`: the views of a stored trace.
#include "cli/trace_command.h"

#include <cstdio>

#include "cli/codec_commands.h"
#include "cli/input.h"
#include "cli/output_paths.h"
#include "cortado/files.h"
#include "cortado/trace.h"

namespace cortado::cli {

int show_trace(const TraceOptions& options) {
  int code = check_outputs({{"FILE", options.path}}, {{"--chrome", options.chrome_path}});
  if (code != kDone) return code;
  const auto trace = read_input<Trace>(options.path, parse_trace, &code);
  if (trace == nullptr) return code;
  if (!options.chrome_path.empty()) {
    const Status status = write_file(options.chrome_path, trace_to_chrome(*trace));
    if (!status.ok()) return report_error(options.chrome_path, status);
  }
  std::FILE* const out = text_stream({options.chrome_path});
  if (options.summary == "stage") {
    std::fputs(summarize_by_stage(*trace).c_str(), out);
  } else if (options.summary == "tensor") {
    std::fputs(summarize_by_tensor(*trace).c_str(), out);
  } else if (options.chrome_path.empty()) {
    std::fputs(trace_to_text(*trace).c_str(), out);
  }
  return kDone;
}

}  // namespace cortado::cli

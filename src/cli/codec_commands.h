// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The commands behind `cortado codec`. Each returns the exit code of the program and says on stderr what went wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado::cli {

enum ExitCode {
  kDone = 0,
  kIoFailed = 1,        // a file or the output could not be read or written
  kBadCommandLine = 2,  // the command line, a specification, or an input that can't be compressed
  kDamagedFile = 3,     // a file is cut short, damaged or no file of this kind
};

// "cortado: PLACE: error" on stderr, with what to do next if there is something; returns the exit code.
int report_error(const std::string& place, const Status& status, const std::string& next_step = "");
// The same for what --codec said.
int report_wrong_codec(const Status& status);

// How files of raw values are to be read; .npy files say it themselves.
struct InputOptions {
  std::optional<DType> dtype;
  std::vector<std::int64_t> shape;
};

struct CompressOptions {
  std::string spec, input_path, output_path;
  InputOptions input;
  std::int64_t chunk_elems = 0;
  std::uint64_t seed = 0;
};

struct BenchOptions {
  std::vector<std::string> specs, paths;
  InputOptions input;
  bool as_json = false;
};

int list_codecs(bool as_json);
int check_codec(const std::string& spec);
int compress_file(const CompressOptions& options);
int decompress_file(const std::string& input_path, const std::string& output_path);
int inspect_file(const std::string& path, bool as_json);
int bench_codecs(const BenchOptions& options);

}  // namespace cortado::cli

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Where a command writes, before it does.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace cortado::cli {

struct NamedPath {
  std::string name, path;  // "--html"; an empty path is none
};

// kDone, or the exit code where an output would be written over an input or another output; said on stderr.
int check_outputs(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs);

// Where the text goes for people: to stderr where an output goes through stdout.
std::FILE* text_stream(const std::vector<std::string>& outputs);

}  // namespace cortado::cli

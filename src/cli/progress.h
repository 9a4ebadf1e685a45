// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace cortado::cli {

constexpr int kBarWidth = 30;  // characters, of all bars

// Overwrites the last line of stderr, a terminal, with as much of the text as fits.
void show_line(const std::string& text);

// One line on stderr, "compress x.npy  [####----]  45 %  1.23 GB/s", for work on large files; nothing for small ones
// and where stderr is no terminal.
class Progress {
 public:
  Progress(std::string what, std::uint64_t total_bytes);
  ~Progress();  // wipes the line

  void update(std::uint64_t done_bytes);

 private:
  std::string what_;
  std::uint64_t total_bytes_;
  bool shown_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace cortado::cli

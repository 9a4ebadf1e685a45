// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

namespace cortado::cli {

namespace {

constexpr std::uint64_t kLargeBytes = std::uint64_t{64} << 20;

std::size_t terminal_columns() {
  winsize size = {};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

void show_line(const std::string& text) {
  std::fprintf(stderr, "\r%s\033[K", text.substr(0, terminal_columns() - 1).c_str());
  std::fflush(stderr);
}

Progress::Progress(std::string what, std::uint64_t total_bytes)
    : what_(std::move(what)),
      total_bytes_(total_bytes),
      shown_(total_bytes >= kLargeBytes && ::isatty(STDERR_FILENO) == 1) {
  update(0);
}

Progress::~Progress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void Progress::update(std::uint64_t done_bytes) {
  if (!shown_) return;
  const double share = static_cast<double>(done_bytes) / static_cast<double>(total_bytes_);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
  const std::string bar(static_cast<std::size_t>(share * kBarWidth), '#');
  const double rate = done_bytes > 0 ? static_cast<double>(done_bytes) / seconds.count() * 1e-9 : 0;
  char text[120];
  std::snprintf(text, sizeof(text), "%.28s  [%-*s] %3.0f %%  %.2f GB/s", what_.c_str(), kBarWidth, bar.c_str(),
                100 * share, rate);
  show_line(text);
}

}  // namespace cortado::cli

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <unistd.h>

#include <cstdio>

namespace cortado::cli {

namespace {

constexpr std::uint64_t kLargeBytes = std::uint64_t{64} << 20;

}  // namespace

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
  std::fprintf(stderr, "\r%.40s  [%-*s] %3.0f %%", what_.c_str(), kBarWidth, bar.c_str(), 100 * share);
  if (done_bytes > 0) std::fprintf(stderr, "  %.2f GB/s", static_cast<double>(done_bytes) / seconds.count() * 1e-9);
  std::fputs("\033[K", stderr);
  std::fflush(stderr);
}

}  // namespace cortado::cli

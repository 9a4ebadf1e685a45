// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the benchmark programs of codecs share: options, timing, conditions, data.
//
// Contenders are timed in turn, round after round, and the medians compared, so that a change in the machine's speed
// hits all of them. Times of one thread are processor time, which other processes disturb less.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "core/simd_target.h"
#include "cortado/codec.h"

namespace cortado {

// Two of Google Benchmark's options, as tools/bench gives them: --benchmark_filter=REGEX chooses rows,
// --benchmark_min_time=... (any) asks for one round only. --rounds=N are more or fewer than the program's own number.
// What is left are the program's own arguments.
struct BenchOptions {
  int rounds;
  std::string filter_text = ".";
  std::vector<std::string> arguments = {};

  BenchOptions(int argc, char** argv, int default_rounds) : rounds(default_rounds) {
    constexpr std::string_view kFilter = "--benchmark_filter=", kMinTime = "--benchmark_min_time=",
                               kRounds = "--rounds=";
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (argument.starts_with(kFilter)) {
        filter_text = argument.substr(kFilter.size());
      } else if (argument.starts_with(kMinTime)) {
        rounds = 1;
      } else if (argument.starts_with(kRounds)) {
        rounds = std::max(1, std::atoi(argv[i] + kRounds.size()));
      } else {
        arguments.emplace_back(argument);
      }
    }
    filter_ = std::regex(filter_text);
  }

  bool wants(const std::string& row) const { return std::regex_search(row, filter_); }

 private:
  std::regex filter_;
};

// Seconds of what is timed again and again.
class Samples {
 public:
  // Processor time of all threads.
  template <class Call>
  void add(const Call& call) {
    const std::clock_t begin = std::clock();
    call();
    seconds_.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }

  // What passes on the clock: for several threads.
  template <class Call>
  void add_elapsed(const Call& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    seconds_.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }

  double median_s() const { return median(seconds_); }
  // Of the ratios of samples that were taken in turn: what slows the machine down slows both.
  double median_ratio_to(const Samples& other) const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < seconds_.size(); ++i) ratios.push_back(seconds_[i] / other.seconds_[i]);
    return median(std::move(ratios));
  }
  double median_ms() const { return median_s() * 1e3; }
  double gb_per_s(double bytes) const { return bytes / median_s() / 1e9; }

 private:
  static double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  std::vector<double> seconds_;
};

// The line a table begins with.
inline void print_conditions(const BenchOptions& options) {
  std::string model = "unknown processor", line;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, line) && !line.starts_with("model name")) {
  }
  if (const auto colon = line.find(": "); cpuinfo && colon != std::string::npos) model = line.substr(colon + 2);
  const std::time_t now = std::time(nullptr);
  char date[sizeof("2026-01-01")] = {};
  std::strftime(date, sizeof(date), "%F", std::localtime(&now));
#ifdef __clang__
  constexpr const char* kCompiler = "clang " __clang_version__;
#else
  constexpr const char* kCompiler = "gcc " __VERSION__;
#endif
  std::printf("%s, %s, %s, %s; one thread where nothing else is said, medians of %d rounds\n", model.c_str(),
              simd_target_name(simd_target()), kCompiler, date, options.rounds);
}

// Between fp32 and tensors of a float dtype: they are the payloads of this codec.
inline std::unique_ptr<Codec> caster(DType dtype) {
  return make_codec(dtype == DType::kFloat32 ? "none" : "cast(" + std::string(dtype_name(dtype)) + ")").value();
}

inline double relative_l2_error(const float* values, const float* decoded, std::int64_t elems) {
  double lost = 0, all = 0;
  for (std::int64_t i = 0; i < elems; ++i) {
    const double x = values[i], error = x - decoded[i];
    lost += error * error;
    all += x * x;
  }
  return all > 0 ? std::sqrt(lost / all) : 0;
}

// The values of a float32 .npy file; none if it is something else.
inline std::vector<float> read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  char start[10] = {};
  file.read(start, sizeof(start));
  const auto header_bytes = static_cast<std::size_t>(static_cast<unsigned char>(start[8])) +
                            256 * static_cast<std::size_t>(static_cast<unsigned char>(start[9]));
  std::string header(header_bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  if (!file || header.find("'<f4'") == std::string::npos) return {};
  const std::size_t begin = sizeof(start) + header_bytes;
  std::vector<float> values((std::filesystem::file_size(path) - begin) / sizeof(float));
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  return values;
}

// What capture.py wrote to a folder: model-moment-parameter.npy.
struct CapturedGradient {
  std::string moment;  // model-moment
  std::string parameter;
  std::vector<float> values;
};

inline std::vector<CapturedGradient> read_gradients(const std::filesystem::path& folder) {
  std::vector<CapturedGradient> gradients;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().stem().string();
    const std::size_t dash = name.find('-', name.find('-') + 1);
    if (entry.path().extension() != ".npy" || dash == std::string::npos) continue;
    gradients.push_back({name.substr(0, dash), name.substr(dash + 1), read_npy(entry.path())});
  }
  std::sort(gradients.begin(), gradients.end(), [](const CapturedGradient& a, const CapturedGradient& b) {
    return a.moment + a.parameter < b.moment + b.parameter;
  });
  return gradients;
}

}  // namespace cortado

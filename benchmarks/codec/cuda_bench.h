// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the benchmarks on a CUDA device share: memory there, and the time of what a stream does. A program that can't go
// on says why and ends with 1.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cortado/status.h"

namespace cortado {

inline void require(bool is_met, const std::string& what) {
  if (is_met) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}
inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) require(false, std::string(what) + ": " + cudaGetErrorString(error));
}
inline void require(const Status& status) {
  if (!status.ok()) require(false, status.to_string());
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t bytes) { require(cudaMalloc(&memory_, bytes + 1), "cudaMalloc"); }
  ~DeviceMemory() { cudaFree(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <typename T = std::byte>
  T* get() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
};

template <typename T>
void to_device(void* to, const std::vector<T>& from) {
  require(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "to the device");
}

template <typename T>
std::vector<T> from_device(const void* from, std::uint64_t elems) {
  std::vector<T> values(elems);
  require(cudaMemcpy(values.data(), from, elems * sizeof(T), cudaMemcpyDeviceToHost), "from the device");
  return values;
}

// Relative L2 distance. NaN where a value is.
inline double relative_distance(const std::vector<float>& found, const std::vector<float>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto x = static_cast<double>(found[i]), y = static_cast<double>(expected[i]);
    difference += (x - y) * (x - y), norm += y * y;
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1));
}

struct Seconds {
  double median, slowest;
};

// Of one call, measured by events around each of many.
inline Seconds time_of(cudaStream_t stream, const std::function<void()>& call) {
  constexpr int kWarmUp = 5, kRuns = 40;
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int run = 0; run < kWarmUp + kRuns; ++run) {
    require(cudaEventRecord(begin, stream), "record");
    call();
    require(cudaEventRecord(end, stream), "record");
    require(cudaEventSynchronize(end), "wait");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    if (run >= kWarmUp) times.push_back(static_cast<double>(milliseconds) / 1e3);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.back()};
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy are encode and decode of `sign`?
//
// One call moves the tensor and its payload; the copy beside it moves as many bytes, half of them read and half of them
// written. All walk pools of memory many times the size of the last-level cache, are timed in turn, round after round,
// in one thread, in processor time; the medians are printed. Nearly all of an encode's bytes are reads and nearly all
// of a decode's are writes, so a share can be above or below what the copy's even mix would give.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/philox.h"
#include "core/simd_target.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr std::int64_t kElems = std::int64_t{16} << 20;
constexpr std::int64_t kPoolTensors = 8;  // 512 MiB of float32
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr const char* kSpecs[] = {"sign", "sign(block=256)", "sign(two_means)", "sign(two_means, block=256)",
                                  "sign(none)"};

// One thing to time, and its samples. `call` takes the number of a tensor of the pools.
struct Contender {
  std::function<void(std::int64_t)> call;
  std::vector<double> seconds = {};

  void sample(std::int64_t tensor) {
    const std::clock_t begin = std::clock();
    call(tensor);
    seconds.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  double median_s() {
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
  }
};

struct Pools {
  AlignedBuffer<float> inputs{kElems * kPoolTensors};
  AlignedBuffer<float> outputs{kElems * kPoolTensors};
};

void measure(const char* spec, DType dtype, int rounds, Pools& pools) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const std::int64_t tensor_bytes = kElems * static_cast<std::int64_t>(dtype_bytes(dtype));
  const auto payload_bytes = static_cast<std::int64_t>(codec->max_payload_bytes(1, kElems, dtype));
  const auto copied_bytes = static_cast<std::size_t>(tensor_bytes + payload_bytes) / 2;
  AlignedBuffer<std::byte> payload_pool(static_cast<std::size_t>(payload_bytes * kPoolTensors));
  const auto input = [&](std::int64_t i) {
    return reinterpret_cast<std::byte*>(pools.inputs.data()) + i * tensor_bytes;
  };
  const auto output = [&](std::int64_t i) {
    return reinterpret_cast<std::byte*>(pools.outputs.data()) + i * tensor_bytes;
  };
  const auto payload = [&](std::int64_t i) {
    return payload_pool.span().subspan(static_cast<std::size_t>(i * payload_bytes),
                                       static_cast<std::size_t>(payload_bytes));
  };
  AlignedBuffer<float> values(kElems);
  philox_fill_normal(1, 0, 0, values.data(), kElems);
  const bool is_fp32 = dtype == DType::kFloat32;
  const std::string format = is_fp32 ? "none" : "cast(" + std::string(dtype_name(dtype)) + ")";
  const std::unique_ptr<Codec> narrow = make_codec(format).value();
  for (std::int64_t i = 0; i < kPoolTensors; ++i) {
    // A payload of cast is a tensor of that dtype.
    (void)narrow->encode({values.data(), DType::kFloat32, 1, kElems}, {},
                         {input(i), static_cast<std::size_t>(tensor_bytes)}, {});
  }
  Contender copy{[&](std::int64_t i) { std::memcpy(output(i), input(i), copied_bytes); }};
  Contender encode{[&](std::int64_t i) {
    (void)codec->encode({input(i), dtype, 1, kElems}, {}, payload(i), {}).value();
  }};
  Contender decode{[&](std::int64_t i) { (void)codec->decode(payload(i), {output(i), dtype, 1, kElems}, {}); }};
  for (int round = 0; round < rounds; ++round) {
    for (Contender* contender : {&copy, &encode, &decode}) contender->sample(round % kPoolTensors);
  }
  const double moved = static_cast<double>(tensor_bytes + payload_bytes) * 1e-9;
  std::printf("%-28s %-5s  %6.2f", spec, std::string(dtype_name(dtype)).c_str(), moved / copy.median_s());
  for (Contender* contender : {&encode, &decode}) {
    std::printf("   %7.3f %6.2f %4.0f%%", contender->median_s() * 1e3, moved / contender->median_s(),
                100 * copy.median_s() / contender->median_s());
  }
  std::printf("\n");
  std::fflush(stdout);
}

int run(int rounds, const std::regex& filter) {
  Pools pools;
  std::printf("one thread, %s, %lld values, medians of %d rounds; GB/s moved and share of memcpy's\n",
              simd_target_name(simd_target()), static_cast<long long>(kElems), rounds);
  std::printf("%-28s %-5s  %6s   %20s   %20s\n", "", "dtype", "memcpy", "encode ms   GB/s    %",
              "decode ms   GB/s    %");
  for (const char* spec : kSpecs) {
    for (const DType dtype : kDTypes) {
      if (std::regex_search(std::string(spec) + " " + std::string(dtype_name(dtype)), filter)) {
        measure(spec, dtype, rounds, pools);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace cortado

// Takes two of Google Benchmark's options, as tools/bench gives them: --benchmark_filter=REGEX chooses rows,
// --benchmark_min_time=... (any) asks for one round only.
int main(int argc, char** argv) {
  int rounds = 21;
  std::string filter = ".";
  constexpr std::string_view kFilter = "--benchmark_filter=", kMinTime = "--benchmark_min_time=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kFilter)) filter = argument.substr(kFilter.size());
    if (argument.starts_with(kMinTime)) rounds = 1;
  }
  return cortado::run(rounds, std::regex(filter));
}

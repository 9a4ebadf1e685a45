// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy do the quantisers come, encoding and decoding?
//
// A tensor of 2^25 fp32 values of about N(0, 1), out of cache, one thread. A share is (bytes of the tensor + bytes of
// the payload) / time over (bytes read + bytes written) / time of a memory copy of the tensor; where the step of a block
// depends on the whole tensor, encoding has a second read to count, 4 bytes a value more. Copy, encoding and decoding are
// timed in turn, round after round, in processor time (other processes then matter less); the medians are printed.
// Beside each ratio stands its relative L2 error.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
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

constexpr std::int64_t kElems = std::int64_t{1} << 25;
constexpr std::uint64_t kTensorBytes = kElems * sizeof(float);

struct Workload {
  const char* spec;
  bool reads_twice = false;
};
constexpr Workload kWorkloads[] = {
    {"quant(4)"},
    {"quant(4, round=dead_zone)"},
    {"quant(4, filter=0.05)"},
    {"quant(4, filter=0.05, round=stochastic)"},
    {"quant(4, round=stochastic)"},
    {"quant(4, round=dither)"},
    {"quant(1)"},
    {"quant(2)"},
    {"quant(3)"},
    {"quant(5)"},
    {"quant(6)"},
    {"quant(7)"},
    {"quant(8)"},
    {"quant(8, round=dead_zone)"},
    {"quant(8, round=stochastic)"},
    {"quant(8, round=dither)"},
    {"quant(4, block=32)"},
    {"quant(4, block=64)"},
    {"quant(4, block=1024)"},
    {"quant(4, block=4096)"},
    {"quant(4, block=65536)"},
    {"quant(4, block=tensor)", true},
    {"quant(4, scale=rms)"},
    {"quant(4, scale=range)"},
    {"quant(4, block=512, scale=l2, round=stochastic)"},
    {"quant(2, block=tensor, round=stochastic)", true},
    {"quant(abs_bound=0.05)"},
    {"quant(error=0.1)", true},
    {"fp8(e4m3)"},
    {"fp8(e5m2)"},
    {"fp8(e4m3, block=32)"},
};

struct Timing {
  std::vector<double> ms = {};

  void sample(const std::function<void()>& call) {
    const std::clock_t begin = std::clock();
    call();
    ms.push_back(static_cast<double>(std::clock() - begin) * 1e3 / CLOCKS_PER_SEC);
  }
  double median_ms() {
    std::nth_element(ms.begin(), ms.begin() + static_cast<std::ptrdiff_t>(ms.size() / 2), ms.end());
    return ms[ms.size() / 2];
  }
  double gb_per_s(double bytes) { return bytes / median_ms() / 1e6; }
};

double relative_l2(const float* a, const float* b) {
  double difference = 0, reference = 0;
  for (std::int64_t i = 0; i < kElems; ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    reference += static_cast<double>(a[i]) * a[i];
  }
  return std::sqrt(difference / reference);
}

struct Memory {
  AlignedBuffer<float> input{kElems}, output{kElems};
  AlignedBuffer<std::byte> payload{kTensorBytes};
};

bool measure(const Workload& workload, int rounds, Memory& memory) {
  const std::unique_ptr<Codec> codec = make_codec(workload.spec).value();
  const ConstTensorView input{memory.input.data(), DType::kFloat32, 1, kElems};
  const TensorView output{memory.output.data(), DType::kFloat32, 1, kElems};
  const std::span<std::byte> room(memory.payload.data(), kTensorBytes);
  std::vector<std::byte> scratch(codec->scratch_bytes(1, kElems, DType::kFloat32));
  std::uint64_t payload_bytes = 0;
  bool ok = true;
  Timing copy, encode, decode;
  for (int round = 0; round < rounds; ++round) {
    copy.sample([&] { std::memcpy(memory.output.data(), memory.input.data(), kTensorBytes); });
    encode.sample([&] { payload_bytes = codec->encode(input, {.seed = 1}, room, scratch).value(); });
    decode.sample([&] { ok &= codec->decode(room.first(payload_bytes), output, scratch).ok(); });
  }
  const double bytes = static_cast<double>(kTensorBytes + payload_bytes);
  const double copy_rate = copy.gb_per_s(2.0 * kTensorBytes);
  const double encode_rate = encode.gb_per_s(bytes + (workload.reads_twice ? kTensorBytes : 0));
  const double decode_rate = decode.gb_per_s(bytes);
  std::printf("%-48s  %6.2f  %.5f  %6.2f  %6.2f %4.0f%%  %6.2f %4.0f%%\n", workload.spec,
              static_cast<double>(kTensorBytes) / static_cast<double>(payload_bytes),
              relative_l2(memory.input.data(), memory.output.data()), copy_rate, encode_rate,
              100 * encode_rate / copy_rate, decode_rate, 100 * decode_rate / copy_rate);
  std::fflush(stdout);
  return ok;
}

int run(int rounds, const std::regex& filter) {
  Memory memory;
  philox_fill_normal(1, 0, 0, memory.input.data(), kElems);
  std::fill_n(memory.output.data(), kElems, 0.0f);
  std::fill_n(memory.payload.data(), kTensorBytes, std::byte{});
  std::printf("one thread, %s, medians of %d rounds, 2^25 fp32 values; GB/s read and written, and share of memcpy's\n",
              simd_target_name(simd_target()), rounds);
  std::printf("%-48s  %6s  %-7s  %6s  %12s  %12s\n", "", "ratio", "error", "memcpy", "encode", "decode");
  for (const Workload& workload : kWorkloads) {
    if (!std::regex_search(workload.spec, filter)) continue;
    if (!measure(workload, rounds, memory)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace cortado

// Takes two of Google Benchmark's options, as tools/bench gives them: --benchmark_filter=REGEX chooses rows,
// --benchmark_min_time=... (any) asks for one round only.
int main(int argc, char** argv) {
  int rounds = 11;
  std::string filter = ".";
  constexpr std::string_view kFilter = "--benchmark_filter=", kMinTime = "--benchmark_min_time=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kFilter)) filter = argument.substr(kFilter.size());
    if (argument.starts_with(kMinTime)) rounds = 1;
  }
  return cortado::run(rounds, std::regex(filter));
}

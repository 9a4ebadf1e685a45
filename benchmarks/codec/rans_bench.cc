// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How fast are the entropy coder and the lossless float codec, and how close to the entropy?
//
// Codes are those of N(0, 1), rounded to multiples of 8 / 2^bits and cut off at 2^bits levels, one a byte; speeds count
// codes (float_rans: bytes of floats) a second of one thread, counting and building the table included, medians of
// the rounds. The copy moves the codes once. zstd -1 and lz4 are the public references, where their headers are
// installed. The last two columns are the speed of two threads over that of one. Every payload is decoded and compared
// before anything is timed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "codec/rans/rans_stream.h"
#include "core/float16.h"
#include "core/philox.h"
#include "core/simd_target.h"
#include "core/thread_pool.h"
#include "cortado/codec.h"

#ifdef CORTADO_HAS_ZSTD
#include <zstd.h>
#endif
#ifdef CORTADO_HAS_LZ4
#include <lz4.h>
#endif

namespace cortado {
namespace {

constexpr std::int64_t kElems = std::int64_t{1} << 24;

std::vector<float> normal_values() {
  std::vector<float> values(kElems);
  philox_fill_normal(1, 0, 0, values.data(), kElems);
  return values;
}

std::vector<std::uint8_t> codes_of(const std::vector<float>& values, int bits) {
  const float scale = std::ldexp(1.0f, bits) / 8, half = std::ldexp(1.0f, bits - 1);
  std::vector<std::uint8_t> codes(values.size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<std::uint8_t>(std::clamp(std::nearbyint(values[i] * scale), -half, half - 1) + half);
  }
  return codes;
}

double entropy_bits(const std::vector<std::uint8_t>& codes) {
  double counts[256] = {}, bits = 0;
  for (const std::uint8_t code : codes) ++counts[code];
  for (const double count : counts) {
    if (count > 0) bits += count * std::log2(static_cast<double>(codes.size()) / count);
  }
  return bits / static_cast<double>(codes.size());
}

template <typename Call>
double median_seconds(int rounds, const Call& call) {
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + rounds / 2, seconds.end());
  return seconds[static_cast<std::size_t>(rounds / 2)];
}

double gb_per_s(std::size_t bytes, double seconds) { return static_cast<double>(bytes) / seconds / 1e9; }

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: decoding does not give back what was encoded\n", what.c_str());
  std::exit(1);
}

struct Speed {
  double encode_gb_per_s, decode_gb_per_s;
  std::size_t payload_bytes;
};

// Codes through the stream of rans, with a number of threads.
Speed measure_rans(const std::vector<std::uint8_t>& codes, std::int64_t chunk_codes, int threads, int rounds) {
  ThreadPool pool(threads);
  std::vector<std::byte> payload(max_rans_bytes(kElems)), scratch(rans_scratch_bytes(kElems, chunk_codes));
  std::vector<std::uint8_t> output(codes.size());
  std::size_t bytes = 0;
  const auto encode = [&] {
    bytes = encode_codes(codes.data(), kElems, chunk_codes, payload.data(), scratch.data(), &pool);
  };
  const auto decode = [&] {
    return decode_codes(std::span(payload).first(bytes), output.data(), kElems, scratch.data(), &pool).ok();
  };
  encode();
  if (!decode() || output != codes) fail("rans");
  return {gb_per_s(codes.size(), median_seconds(rounds, encode)),
          gb_per_s(codes.size(), median_seconds(rounds, decode)), bytes};
}

// A public codec, compressing `codes` into a buffer of `room` bytes.
template <typename Compress, typename Decompress>
void print_reference(const char* name, const std::vector<std::uint8_t>& codes, std::size_t room, int rounds,
                     const Compress& compress, const Decompress& decompress) {
  std::vector<char> payload(room);
  std::vector<std::uint8_t> output(codes.size());
  std::size_t bytes = 0;
  const auto encode = [&] { bytes = static_cast<std::size_t>(compress(codes, payload)); };
  const auto decode = [&] { decompress(payload, bytes, output); };
  encode();
  decode();
  if (output != codes) fail(name);
  std::printf("  %-6s %6.3f bits/code  encode %5.2f  decode %5.2f GB/s\n", name,
              8.0 * static_cast<double>(bytes) / static_cast<double>(codes.size()),
              gb_per_s(codes.size(), median_seconds(rounds, encode)),
              gb_per_s(codes.size(), median_seconds(rounds, decode)));
}

void print_references([[maybe_unused]] const std::vector<std::uint8_t>& codes, [[maybe_unused]] int rounds) {
#ifdef CORTADO_HAS_ZSTD
  print_reference(
      "zstd-1", codes, ZSTD_compressBound(codes.size()), rounds,
      [](const auto& from, auto& to) { return ZSTD_compress(to.data(), to.size(), from.data(), from.size(), 1); },
      [](const auto& from, std::size_t bytes, auto& to) { ZSTD_decompress(to.data(), to.size(), from.data(), bytes); });
#endif
#ifdef CORTADO_HAS_LZ4
  print_reference(
      "lz4", codes, static_cast<std::size_t>(LZ4_compressBound(static_cast<int>(codes.size()))), rounds,
      [](const auto& from, auto& to) {
        return LZ4_compress_default(reinterpret_cast<const char*>(from.data()), to.data(),
                                    static_cast<int>(from.size()), static_cast<int>(to.size()));
      },
      [](const auto& from, std::size_t bytes, auto& to) {
        LZ4_decompress_safe(from.data(), reinterpret_cast<char*>(to.data()), static_cast<int>(bytes),
                            static_cast<int>(to.size()));
      });
#endif
}

void measure_codes(const std::vector<float>& values, int rounds, const std::regex& filter) {
  std::printf("%4s %8s %8s %9s %8s | %7s %7s %7s | %9s\n", "bits", "chunk", "entropy", "bits/code", "over it", "memcpy",
              "encode", "decode", "2 threads");
  for (int bits = 1; bits <= 8; ++bits) {
    if (!std::regex_search("rans " + std::to_string(bits) + " bits", filter)) continue;
    const std::vector<std::uint8_t> codes = codes_of(values, bits);
    std::vector<std::uint8_t> copy(codes.size());
    const double entropy = entropy_bits(codes);
    const double copy_gb_per_s =
        gb_per_s(codes.size(), median_seconds(rounds, [&] { std::memcpy(copy.data(), codes.data(), codes.size()); }));
    for (const std::int64_t chunk_codes : {4096, 16384, 65536, 262144}) {
      if (chunk_codes != 65536 && bits % 4 != 0) continue;
      const Speed one = measure_rans(codes, chunk_codes, 1, rounds), two = measure_rans(codes, chunk_codes, 2, rounds);
      const double coded_bits = 8.0 * static_cast<double>(one.payload_bytes) / static_cast<double>(codes.size());
      std::printf("%4d %8lld %8.4f %9.4f %+7.2f%% | %7.2f %7.2f %7.2f | %3.2fx %3.2fx\n", bits,
                  static_cast<long long>(chunk_codes), entropy, coded_bits, 100 * (coded_bits / entropy - 1),
                  copy_gb_per_s, one.encode_gb_per_s, one.decode_gb_per_s, two.encode_gb_per_s / one.encode_gb_per_s,
                  two.decode_gb_per_s / one.decode_gb_per_s);
    }
    print_references(codes, rounds);
    std::fflush(stdout);
  }
}

void measure_floats(const std::vector<float>& values, int rounds, const std::regex& filter) {
  const auto codec = make_codec("float_rans").value();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::string name = "float_rans " + std::string(dtype_name(dtype));
    if (!std::regex_search(name, filter)) continue;
    const std::size_t width = dtype_bytes(dtype);
    std::vector<std::byte> input(values.size() * width), output(input.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint32_t bits = std::bit_cast<std::uint32_t>(values[i]);
      if (dtype == DType::kFloat16) bits = float_to_fp16(values[i]);
      if (dtype == DType::kBFloat16) bits = float_to_bf16(values[i]);
      std::memcpy(input.data() + i * width, &bits, width);
    }
    std::vector<std::byte> payload(codec->max_payload_bytes(1, kElems, dtype));
    std::vector<std::byte> scratch(codec->scratch_bytes(1, kElems, dtype));
    std::size_t bytes = 0;
    const auto encode = [&] { bytes = codec->encode({input.data(), dtype, 1, kElems}, {}, payload, scratch).value(); };
    const auto decode = [&] {
      return codec->decode(std::span(payload).first(bytes), {output.data(), dtype, 1, kElems}, scratch).ok();
    };
    encode();
    if (!decode() || output != input) fail(name);
    std::printf(
        "%-16s ratio %.4f, error 0; memcpy %5.2f  encode %5.2f  decode %5.2f GB/s of floats\n", name.c_str(),
        static_cast<double>(input.size()) / static_cast<double>(bytes),
        gb_per_s(input.size(), median_seconds(rounds, [&] { std::memcpy(output.data(), input.data(), input.size()); })),
        gb_per_s(input.size(), median_seconds(rounds, encode)), gb_per_s(input.size(), median_seconds(rounds, decode)));
    std::fflush(stdout);
  }
}

int run(int rounds, const std::regex& filter) {
  std::printf("%s, medians of %d rounds, %lld values; GB/s of one thread\n", simd_target_name(simd_target()), rounds,
              static_cast<long long>(kElems));
#if !defined(CORTADO_HAS_ZSTD) || !defined(CORTADO_HAS_LZ4)
  std::printf("zstd or lz4 is not installed with its header and left out\n");
#endif
  const std::vector<float> values = normal_values();
  measure_codes(values, rounds, filter);
  measure_floats(values, rounds, filter);
  return 0;
}

}  // namespace
}  // namespace cortado

// Takes two of Google Benchmark's options, as tools/bench gives them: --benchmark_filter=REGEX chooses rows,
// --benchmark_min_time=... (any) asks for one round only.
int main(int argc, char** argv) {
  int rounds = 7;
  std::string filter = ".";
  constexpr std::string_view kFilter = "--benchmark_filter=", kMinTime = "--benchmark_min_time=";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kFilter)) filter = argument.substr(kFilter.size());
    if (argument.starts_with(kMinTime)) rounds = 1;
  }
  return cortado::run(rounds, std::regex(filter));
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Do codecs work with more elements than 32 bits can count?
//
//   many_elements_bench 'quant(4)' fp16      2^31 + 1 elements of fp32, fp16, bf16 or uint8
//
// Without arguments it does nothing. The tensor repeats 2^24 values of N(0, 1) (uint8: 4-bit codes of them); the last
// one is 1000 (uint8: 255) and must come back near that. Decoding overwrites the tensor, which saves memory: a run
// takes the tensor, the largest payload and the scratch memory, and prints their sum.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "benchmarks/codec/bench_program.h"
#include "core/philox.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr std::int64_t kElems = (std::int64_t{1} << 31) + 1;
constexpr std::int64_t kTileElems = std::int64_t{1} << 24;
constexpr float kLast = 1000;

// Memory that is not touched before it is used.
struct Memory {
  explicit Memory(std::uint64_t size) : bytes(size), data(static_cast<std::byte*>(std::malloc(size))) {
    if (data != nullptr) return;
    std::fprintf(stderr, "no memory for %.1f GiB\n", static_cast<double>(size) / (1 << 30));
    std::exit(1);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data); }

  std::uint64_t bytes;
  std::byte* data;
};

// Between values and a tensor's elements. Codes are values of uint8.
class Conversion {
 public:
  explicit Conversion(DType dtype) : dtype_(dtype) {
    if (dtype != DType::kUint8) caster_ = caster(dtype);
  }

  void write(const float* values, std::int64_t elems, std::byte* to) const {
    if (caster_ != nullptr) {
      (void)caster_->encode({values, DType::kFloat32, 1, elems}, {}, {to, bytes(elems)}, {}).value();
      return;
    }
    for (std::int64_t i = 0; i < elems; ++i) {
      to[i] = static_cast<std::byte>(std::clamp(std::nearbyint(values[i] * 2) + 8, 0.0f, 255.0f));
    }
  }
  void read(const std::byte* from, std::int64_t elems, float* values) const {
    if (caster_ != nullptr) {
      (void)caster_->decode({from, bytes(elems)}, {values, DType::kFloat32, 1, elems}, {});
      return;
    }
    for (std::int64_t i = 0; i < elems; ++i) values[i] = static_cast<float>(std::to_integer<int>(from[i]));
  }
  std::size_t bytes(std::int64_t elems) const { return static_cast<std::size_t>(elems) * dtype_bytes(dtype_); }

 private:
  DType dtype_;
  std::unique_ptr<Codec> caster_;
};

int run(const std::string& spec, DType dtype) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const Conversion conversion(dtype);
  std::vector<float> values(kTileElems), decoded(kTileElems);
  philox_fill_normal(1, 0, 0, values.data(), kTileElems);
  Memory tile(conversion.bytes(kTileElems)), tensor(conversion.bytes(kElems));
  Memory payload(codec->max_payload_bytes(1, kElems, dtype)), scratch(codec->scratch_bytes(1, kElems, dtype));
  conversion.write(values.data(), kTileElems, tile.data);
  conversion.read(tile.data, kTileElems, values.data());
  for (std::int64_t at = 0; at < kElems; at += kTileElems) {
    std::memcpy(tensor.data + conversion.bytes(at), tile.data, conversion.bytes(std::min(kTileElems, kElems - at)));
  }
  conversion.write(&kLast, 1, tensor.data + conversion.bytes(kElems - 1));

  std::uint64_t payload_bytes = 0;
  Status status;
  Samples encode, decode;
  encode.add([&] {
    const auto result = codec->encode({tensor.data, dtype, 1, kElems}, {.seed = 1}, {payload.data, payload.bytes},
                                      {scratch.data, scratch.bytes});
    status = result.status();
    if (status.ok()) payload_bytes = result.value();
  });
  if (status.ok()) {
    std::memset(tensor.data, 0x5a, tensor.bytes);
    decode.add([&] {
      status =
          codec->decode({payload.data, payload_bytes}, {tensor.data, dtype, 1, kElems}, {scratch.data, scratch.bytes});
    });
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", spec.c_str(), status.to_string().c_str());
    return 1;
  }
  double lost = 0, energy = 0;
  for (std::int64_t at = 0; at + kTileElems < kElems; at += kTileElems) {
    conversion.read(tensor.data + conversion.bytes(at), kTileElems, decoded.data());
    for (std::int64_t i = 0; i < kTileElems; ++i) {
      const double x = values[static_cast<std::size_t>(i)], error = x - decoded[static_cast<std::size_t>(i)];
      lost += error * error;
      energy += x * x;
    }
  }
  float last = 0;
  conversion.read(tensor.data + conversion.bytes(kElems - 1), 1, &last);
  constexpr double kGiB = 1 << 30;
  const auto input_bytes = static_cast<double>(tensor.bytes);
  std::printf(
      "%s, %s: %lld elements, ratio %.3f, relative L2 error %.5f, the last one is %g; encode %.1f s, decode %.1f s, "
      "%.1f GiB\n",
      spec.c_str(), std::string(dtype_name(dtype)).c_str(), static_cast<long long>(kElems),
      input_bytes / static_cast<double>(payload_bytes), std::sqrt(lost / energy), static_cast<double>(last),
      encode.median_s(), decode.median_s(), static_cast<double>(tensor.bytes + payload.bytes + scratch.bytes) / kGiB);
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  using namespace cortado;
  const BenchOptions options(argc, argv, 1);
  if (options.arguments.size() != 2) {
    std::printf("usage: many_elements_bench SPEC DTYPE\n");
    return options.arguments.empty() ? 0 : 2;
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
    if (dtype_name(dtype) == options.arguments[1]) return run(options.arguments[0], dtype);
  }
  std::fprintf(stderr, "dtype %s: expected fp32, fp16, bf16 or uint8\n", options.arguments[1].c_str());
  return 2;
}

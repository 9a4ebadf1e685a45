// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Do codecs work with more elements than 32 bits can count?
//
//   many_elements_bench 'quant(4)' fp16           2^31 + 1 elements of fp32, fp16, bf16 or uint8
//   many_elements_bench 'quant(8)' fp16 0.01      for a codec that has no bound here: the largest error allowed
//
// The tensor repeats 2^24 values of N(0, 1) (uint8: 4-bit codes of them); the last one is 1000 (uint8: 255). It ends
// with 1 where the error or the last value is further off than the codec's bound. Decoding overwrites the tensor, which
// saves memory: a run takes the tensor, the largest payload and the scratch memory, and prints their sum.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>

#include "benchmarks/codec/bench_program.h"
#include "core/philox.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr std::int64_t kElems = (std::int64_t{1} << 31) + 1;
constexpr std::int64_t kTileElems = std::int64_t{1} << 24;
constexpr float kLast = 1000;

// What the codec may lose.
struct Bound {
  std::string_view spec;
  double most_error;     // relative L2
  double most_last_off;  // of the last value, as a share of it
};
constexpr double kAnyLast = 1e9;  // it need not come back: one of many in a block, or not chosen
// Lossy ones somewhat above what theory says of normal values: sign sqrt(1 - 2/pi) with one scale, topk and randk what
// is left out, quant and compso a step of a block's range, and with error= what was asked for.
constexpr Bound kBounds[] = {
    {"cast(bf16)", 0.003, 0.004},
    {"sign", 0.61, kAnyLast},
    {"quant(4)", 0.12, 0.08},
    {"quant(4, round=stochastic)", 0.18, 0.15},
    {"quant(error=0.1) | rans", 0.105, 0.02},
    {"fp8(e4m3)", 0.03, 0.0625},
    {"topk(density=0.01)", 0.97, 0},
    {"randk(density=0.01)", 0.996, kAnyLast},
    {"compso(bound=1e-4)", 0.06, 0.001},
    {"compso(error=0.1, round=dead_zone)", 0.105, 0.02},
    {"float_rans", 0, 0},
    {"rans", 0, 0},
};

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

int run(const std::string& spec, DType dtype, const Bound& bound) {
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
  const double error = std::sqrt(lost / energy), last_value = dtype == DType::kUint8 ? 255 : kLast;
  const double last_off = std::abs(last - last_value) / last_value;
  constexpr double kGiB = 1 << 30;
  const auto input_bytes = static_cast<double>(tensor.bytes);
  std::printf(
      "%s, %s: %lld elements, ratio %.3f, relative L2 error %.5f, the last one is %g; encode %.1f s, decode %.1f s, "
      "%.1f GiB\n",
      spec.c_str(), std::string(dtype_name(dtype)).c_str(), static_cast<long long>(kElems),
      input_bytes / static_cast<double>(payload_bytes), error, static_cast<double>(last), encode.median_s(),
      decode.median_s(), static_cast<double>(tensor.bytes + payload.bytes + scratch.bytes) / kGiB);
  // So that what is not a number is no pass.
  if (error <= bound.most_error && last_off <= bound.most_last_off) return 0;
  std::fprintf(stderr, "%s: an error of %.5f and a last value %.5f off; at most %.5f and %.5f are allowed\n",
               spec.c_str(), error, last_off, bound.most_error, bound.most_last_off);
  return 1;
}

// The one of kBounds, or the one given behind the dtype.
std::optional<Bound> bound_of(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3) return Bound{arguments[0], std::atof(arguments[2].c_str()), kAnyLast};
  const auto* const found = std::find_if(std::begin(kBounds), std::end(kBounds),
                                         [&](const Bound& bound) { return bound.spec == arguments[0]; });
  if (found == std::end(kBounds)) return std::nullopt;
  return *found;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  using namespace cortado;
  const BenchOptions options(argc, argv, 1);
  if (options.arguments.size() != 2 && options.arguments.size() != 3) {
    std::fprintf(stderr, "usage: many_elements_bench SPEC DTYPE [MOST_ERROR]\n");
    return 2;
  }
  const std::optional<Bound> bound = bound_of(options.arguments);
  if (!bound) {
    std::fprintf(stderr, "%s: no bound is known; give the largest relative L2 error behind the dtype\n",
                 options.arguments[0].c_str());
    return 2;
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
    if (dtype_name(dtype) == options.arguments[1]) return run(options.arguments[0], dtype, *bound);
  }
  std::fprintf(stderr, "dtype %s: expected fp32, fp16, bf16 or uint8\n", options.arguments[1].c_str());
  return 2;
}

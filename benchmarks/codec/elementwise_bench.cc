// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy do the codecs come that treat every value alike: cast, sign, quant, fp8?
//
//   elementwise_bench                  values of N(0, 1)
//   elementwise_bench cubes            their cubes, whose tails are heavy
//   elementwise_bench FILE.npy         those of the file, again and again
//   elementwise_bench two-threads      what two threads gain, of these and other codecs
//
// One call moves the tensor and its payload; the copy beside it moves as many bytes, half of them read and half of them
// written. All walk pools of memory many times the size of the last-level cache. A share is bytes moved / time over
// that of the copy. Nearly all of an encode's bytes are reads and nearly all of a decode's are writes, so a share can
// be above what the copy's even mix gives. Where the scale belongs to the whole tensor, encoding has a second read to
// count, 4 bytes (of 16-bit floats 2) a value more: those rows are marked "2 reads". Beside each ratio stands its
// relative L2 error.
//
// A codec takes one tensor on one thread; the engine gives each thread tensors of its own. So do two threads here,
// which encode, or decode, two tensors at once: a gain is the elapsed time of one thread for both over that of two.
// Beside it stands the gain of two threads that copy as many bytes.
#include <cstring>
#include <memory>
#include <span>

#include "benchmarks/codec/bench_program.h"
#include "core/aligned_buffer.h"
#include "core/philox.h"
#include "core/thread_pool.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr std::int64_t kElems = std::int64_t{16} << 20;
constexpr std::int64_t kPoolTensors = 8;  // 512 MiB of float32

struct Workload {
  const char* spec;
  bool reads_twice = false;
  bool all_dtypes = false;
};
constexpr Workload kWorkloads[] = {
    {"cast(bf16)"},
    {"cast(fp16)"},
    {"fp8(e4m3)", false, true},
    {"fp8(e5m2)", false, true},
    {"fp8(e4m3, block=32)"},
    {"sign", false, true},
    {"sign(block=256)", false, true},
    {"sign(two_means)", false, true},
    {"sign(two_means, block=256)", false, true},
    {"sign(none)", false, true},
    {"quant(4)", false, true},
    {"quant(4, round=dead_zone)", false, true},
    {"quant(4, filter=0.05)", false, true},
    {"quant(4, round=stochastic)", false, true},
    {"quant(4, filter=0.05, round=stochastic)"},
    {"quant(4, round=dither)", false, true},
    {"quant(1)"},
    {"quant(2)"},
    {"quant(3)"},
    {"quant(5)"},
    {"quant(6)"},
    {"quant(7)"},
    {"quant(8)", false, true},
    {"quant(8, round=dead_zone)"},
    {"quant(8, round=stochastic)"},
    {"quant(8, round=dither)"},
    {"quant(4, block=32)"},
    {"quant(4, block=64)"},
    {"quant(4, block=1024)"},
    {"quant(4, block=4096)"},
    {"quant(4, block=65536)"},
    {"quant(4, block=tensor)", true},
    {"quant(8, block=tensor)", true},
    {"quant(4, scale=rms)"},
    {"quant(4, scale=range)"},
    {"quant(4, block=512, scale=l2, round=stochastic)"},
    {"quant(2, block=tensor, round=stochastic)", true},
    {"quant(abs_bound=0.05)"},
};

constexpr const char* kOnTwoThreads[] = {
    "cast(bf16)",
    "cast(fp16)",
    "fp8(e4m3)",
    "sign",
    "quant(4)",
    "quant(4, round=dead_zone)",
    "quant(4, round=stochastic)",
    "quant(4, round=dither)",
    "quant(8)",
    "quant(4, block=tensor)",
    "topk(density=0.01)",
    "topk(density=0.01, select=sampled)",
    "randk(density=0.01)",
    "float_rans",
    "compso(bound=4e-3)",
    "compso(error=0.1, round=dead_zone)",
};

// Tensors of one pool, all alike.
class Pool {
 public:
  explicit Pool(std::size_t tensor_bytes) : tensor_bytes_(tensor_bytes), memory_(tensor_bytes * kPoolTensors) {}
  std::span<std::byte> tensor(std::int64_t i) {
    return memory_.span().subspan(static_cast<std::size_t>(i % kPoolTensors) * tensor_bytes_, tensor_bytes_);
  }

 private:
  std::size_t tensor_bytes_;
  AlignedBuffer<std::byte> memory_;
};

double error_of(DType dtype, std::span<std::byte> original, std::span<std::byte> decoded) {
  std::vector<float> a(kElems), b(kElems);
  bool ok = caster(dtype)->decode(original, {a.data(), DType::kFloat32, 1, kElems}, {}).ok();
  ok &= caster(dtype)->decode(decoded, {b.data(), DType::kFloat32, 1, kElems}, {}).ok();
  return ok ? relative_l2_error(a.data(), b.data(), kElems) : -1;
}

// kElems values of what the argument names.
std::vector<float> values_of(const std::string& data) {
  std::vector<float> values(kElems);
  if (data.ends_with(".npy")) {
    const std::vector<float> read = read_npy(data);
    for (std::size_t i = 0; i < values.size() && !read.empty(); ++i) values[i] = read[i % read.size()];
    return read.empty() ? read : values;
  }
  philox_fill_normal(1, 0, 0, values.data(), kElems);
  if (data == "cubes") {
    for (float& x : values) x *= x * x;
  }
  return values;
}

bool fill(Pool& pool, const std::vector<float>& values, DType dtype) {
  bool ok = true;
  for (std::int64_t i = 0; i < kPoolTensors; ++i) {
    const ConstTensorView view(values.data(), DType::kFloat32, 1, kElems);
    ok &= caster(dtype)->encode(view, {}, pool.tensor(i), {}).ok();
  }
  return ok;
}

bool measure(const Workload& w, DType dtype, const std::vector<float>& values, int rounds) {
  const std::unique_ptr<Codec> codec = make_codec(w.spec).value();
  const std::size_t tensor_bytes = kElems * dtype_bytes(dtype);
  const std::size_t payload_bytes = codec->max_payload_bytes(1, kElems, dtype);
  const std::size_t encode_bytes = tensor_bytes * (w.reads_twice ? 2 : 1) + payload_bytes;
  Pool inputs(tensor_bytes), outputs(tensor_bytes), payloads(payload_bytes);
  std::vector<std::byte> scratch(codec->scratch_bytes(1, kElems, dtype));
  if (!fill(inputs, values, dtype)) return false;
  bool ok = true;
  const auto copy = [&](std::int64_t i, std::size_t bytes) {
    std::memcpy(outputs.tensor(i).data(), inputs.tensor(i).data(), std::min(bytes / 2, tensor_bytes));
  };
  Samples encode_copy, decode_copy, encode, decode;
  for (int i = 0; i < rounds; ++i) {
    encode_copy.add([&] { copy(i, encode_bytes); });
    encode.add([&] {
      ok &= codec->encode({inputs.tensor(i).data(), dtype, 1, kElems}, {.seed = 1}, payloads.tensor(i), scratch).ok();
    });
    decode_copy.add([&] { copy(i + 4, tensor_bytes + payload_bytes); });
    decode.add([&] {
      ok &= codec->decode(payloads.tensor(i), {outputs.tensor(i).data(), dtype, 1, kElems}, scratch).ok();
    });
  }
  const double shares[] = {encode_copy.median_s() / encode.median_s(), decode_copy.median_s() / decode.median_s()};
  std::printf("%-48s %-4s %6.2f %8.5f %7.2f  %7.3f %4.0f%%  %7.3f %4.0f%%%s\n", w.spec,
              std::string(dtype_name(dtype)).c_str(),
              static_cast<double>(tensor_bytes) / static_cast<double>(payload_bytes),
              error_of(dtype, inputs.tensor(rounds - 1), outputs.tensor(rounds - 1)),
              decode_copy.gb_per_s(static_cast<double>(tensor_bytes + payload_bytes)), encode.median_ms(),
              100 * shares[0], decode.median_ms(), 100 * shares[1], w.reads_twice ? "  2 reads" : "");
  std::fflush(stdout);
  return ok;
}

// Elapsed times of a loop of two calls, on one thread and on two.
class Gain {
 public:
  void add(FunctionRef<void(std::int64_t)> body, ThreadPool& one, ThreadPool& two) {
    on_one_.add_elapsed([&] { one.parallel_for(2, body); });
    on_two_.add_elapsed([&] { two.parallel_for(2, body); });
  }
  double ms_of_one() const { return on_one_.median_ms() / 2; }
  double ratio() const { return on_one_.median_s() / on_two_.median_s(); }

 private:
  Samples on_one_, on_two_;
};

bool measure_two_threads(const char* spec, const std::vector<float>& values, int rounds) {
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  constexpr std::size_t kTensorBytes = kElems * sizeof(float);
  const std::size_t max_bytes = codec->max_payload_bytes(1, kElems, DType::kFloat32);
  Pool inputs(kTensorBytes), outputs(kTensorBytes), payloads(max_bytes);
  std::vector<std::byte> scratch[2];
  for (auto& each : scratch) each.resize(codec->scratch_bytes(1, kElems, DType::kFloat32));
  if (!fill(inputs, values, DType::kFloat32)) return false;
  ThreadPool one(1), two(2);
  Gain encode, encode_copy, decode, decode_copy;
  std::uint64_t payload_bytes[2] = {};
  bool ok[2] = {true, true};
  for (std::int64_t i = 0; i < 2 * rounds; i += 2) {
    const auto copy = [&](std::int64_t half) {
      std::memcpy(outputs.tensor(i + half + 4).data(), inputs.tensor(i + half + 4).data(),
                  (kTensorBytes + payload_bytes[0]) / 2);
    };
    encode.add(
        [&](std::int64_t half) {
          const Result<std::uint64_t> bytes =
              codec->encode({inputs.tensor(i + half).data(), DType::kFloat32, 1, kElems}, {.seed = 1},
                            payloads.tensor(i + half), scratch[half]);
          ok[half] &= bytes.ok();
          payload_bytes[half] = bytes.ok() ? bytes.value() : 0;
        },
        one, two);
    encode_copy.add(copy, one, two);
    decode.add(
        [&](std::int64_t half) {
          ok[half] &= codec
                          ->decode(payloads.tensor(i + half).first(payload_bytes[half]),
                                   {outputs.tensor(i + half).data(), DType::kFloat32, 1, kElems}, scratch[half])
                          .ok();
        },
        one, two);
    decode_copy.add(copy, one, two);
  }
  std::printf("%-48s %6.2f %8.5f  %7.2f %5.2fx %5.2fx  %7.2f %5.2fx %5.2fx\n", spec,
              static_cast<double>(kTensorBytes) / static_cast<double>(payload_bytes[0]),
              error_of(DType::kFloat32, inputs.tensor(0), outputs.tensor(2 * rounds - 2)), encode.ms_of_one(),
              encode.ratio(), encode_copy.ratio(), decode.ms_of_one(), decode.ratio(), decode_copy.ratio());
  std::fflush(stdout);
  return ok[0] && ok[1];
}

int run_two_threads(const BenchOptions& options, const std::vector<float>& values) {
  std::printf("milliseconds a tensor on one thread, gains of two threads, of two that copy\n");
  std::printf("%-48s %6s %8s  %21s  %21s\n", "", "ratio", "error", "encode ms, gain, copy", "decode ms, gain, copy");
  for (const char* spec : kOnTwoThreads) {
    if (options.wants(spec) && !measure_two_threads(spec, values, std::min(options.rounds, 7))) return 1;
  }
  return 0;
}

int run(const BenchOptions& options) {
  const std::string data = options.arguments.empty() ? "normal" : options.arguments[0];
  const std::vector<float> values = values_of(data);
  if (values.empty()) {
    std::fprintf(stderr, "%s: expected an .npy file of float32\n", data.c_str());
    return 2;
  }
  print_conditions(options);
  if (data == "two-threads") return run_two_threads(options, values);
  const std::string name = data == "normal"  ? "N(0, 1)"
                           : data == "cubes" ? "cubes of N(0, 1)"
                                             : std::filesystem::path(data).filename().string();
  std::printf("%lld values of %s, out of cache; memcpy in GB/s read and written\n", static_cast<long long>(kElems),
              name.c_str());
  std::printf("%-48s %-4s %6s %8s %7s  %13s  %13s\n", "", "", "ratio", "error", "memcpy", "encode ms", "decode ms");
  for (const Workload& w : kWorkloads) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype != DType::kFloat32 && !w.all_dtypes) continue;
      if (!options.wants(std::string(w.spec) + " " + std::string(dtype_name(dtype)))) continue;
      if (!measure(w, dtype, values, options.rounds)) return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 21)); }

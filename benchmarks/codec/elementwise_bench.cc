// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy do the codecs come that treat every value alike: cast, sign, quant, fp8?
//
// One call moves the tensor and its payload; the copy beside it moves as many bytes, half of them read and half of them
// written. All walk pools of memory many times the size of the last-level cache. A share is bytes moved / time over
// that of the copy. Nearly all of an encode's bytes are reads and nearly all of a decode's are writes, so a share can
// be above what the copy's even mix gives. Where the scale belongs to the whole tensor, encoding has a second read to
// count, 4 bytes (of 16-bit floats 2) a value more: those rows are marked "2 reads". Beside each ratio stands its
// relative L2 error.
#include <cstring>
#include <memory>
#include <span>

#include "benchmarks/codec/bench_program.h"
#include "core/aligned_buffer.h"
#include "core/philox.h"
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
    {"quant(4, scale=rms)"},
    {"quant(4, scale=range)"},
    {"quant(4, block=512, scale=l2, round=stochastic)"},
    {"quant(2, block=tensor, round=stochastic)", true},
    {"quant(abs_bound=0.05)"},
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

bool measure(const Workload& w, DType dtype, int rounds) {
  const std::unique_ptr<Codec> codec = make_codec(w.spec).value();
  const std::size_t tensor_bytes = kElems * dtype_bytes(dtype);
  const std::size_t payload_bytes = codec->max_payload_bytes(1, kElems, dtype);
  const std::size_t encode_bytes = tensor_bytes * (w.reads_twice ? 2 : 1) + payload_bytes;
  Pool inputs(tensor_bytes), outputs(tensor_bytes), payloads(payload_bytes);
  std::vector<std::byte> scratch(codec->scratch_bytes(1, kElems, dtype));
  {
    std::vector<float> values(kElems);
    philox_fill_normal(1, 0, 0, values.data(), kElems);
    for (std::int64_t i = 0; i < kPoolTensors; ++i) {
      const ConstTensorView view(values.data(), DType::kFloat32, 1, kElems);
      if (!caster(dtype)->encode(view, {}, inputs.tensor(i), {}).ok()) return false;
    }
  }
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

int run(const BenchOptions& options) {
  print_conditions(options);
  std::printf("%lld values of N(0, 1), out of cache; memcpy in GB/s read and written\n",
              static_cast<long long>(kElems));
  std::printf("%-48s %-4s %6s %8s %7s  %13s  %13s\n", "", "", "ratio", "error", "memcpy", "encode ms", "decode ms");
  for (const Workload& w : kWorkloads) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype != DType::kFloat32 && !w.all_dtypes) continue;
      if (!options.wants(std::string(w.spec) + " " + std::string(dtype_name(dtype)))) continue;
      if (!measure(w, dtype, options.rounds)) return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 21)); }

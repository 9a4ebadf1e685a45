// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy are the sparse codecs?
//
// A share of 100 % is a memcpy that moves as many bytes as the call must: the tensor once and the payload once. Tensors
// lie in a pool many times the size of the last-level cache and are walked one after the other. Everything is timed in
// turn, round after round, in one thread, in processor time; the medians are printed. Every row is first checked:
// decoding gives the input's values or 0, and none that is dropped is larger than one that is kept (topk).
#include <cstring>
#include <memory>

#include "benchmarks/codec/bench_program.h"
#include "core/aligned_buffer.h"
#include "core/philox.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr std::int64_t kPoolTensors = 6;

enum class Data { kNormal, kHeavyTailed, kMostlyZero };
constexpr const char* kDataNames[] = {"normal", "heavy-tailed", "mostly zero"};

struct Workload {
  const char* spec;
  std::int64_t elems = std::int64_t{1} << 24;
  Data data = Data::kNormal;
};
constexpr Workload kWorkloads[] = {
    {"topk(density=0.01)"},
    {"topk(density=0.01, select=sampled)"},
    {"topk(density=0.001)"},
    {"topk(density=0.001, select=sampled)"},
    {"topk(density=0.1)"},
    {"topk(density=0.1, select=sampled)"},
    {"topk(density=0.01, block=4096)"},
    {"topk(density=0.01, block=65536)"},
    {"topk(density=0.01, index=bitmap)"},
    {"topk(density=0.01, values=fp16)"},
    {"topk(density=0.01)", 1 << 20},
    {"topk(density=0.01, select=sampled)", 1 << 20},
    {"topk(density=0.01)", std::int64_t{1} << 24, Data::kHeavyTailed},
    {"topk(density=0.01, select=sampled)", std::int64_t{1} << 24, Data::kHeavyTailed},
    {"topk(density=0.01)", std::int64_t{1} << 24, Data::kMostlyZero},
    {"randk(density=0.01)"},
    {"randk(density=0.1)"},
    {"randk(density=0.01, block=256)"},
};

std::string row_name(const Workload& w) {
  return std::string(w.spec) + " " + std::to_string(w.elems) + " " + kDataNames[static_cast<int>(w.data)];
}

// Normal values; their cubes; or one in 200 of them, the others 0.
void fill(Data data, std::int64_t elems, float* values) {
  philox_fill_normal(1, 0, 0, values, elems);
  for (std::int64_t i = 0; i < elems; ++i) {
    if (data == Data::kHeavyTailed) values[i] *= values[i] * values[i];
    if (data == Data::kMostlyZero && i * 2654435761u % 200 != 0) values[i] = 0;
  }
}

class Experiment {
 public:
  explicit Experiment(const Workload& workload)
      : w_(workload),
        codec_(make_codec(w_.spec).value()),
        inputs_(w_.elems * kPoolTensors),
        outputs_(w_.elems * kPoolTensors),
        payload_(codec_->max_payload_bytes(1, w_.elems, DType::kFloat32)),
        scratch_(codec_->scratch_bytes(1, w_.elems, DType::kFloat32)) {
    fill(w_.data, w_.elems, inputs_.data());
    for (std::int64_t i = 0; i < kPoolTensors; ++i) {
      if (i > 0) std::memcpy(input(i), inputs_.data(), tensor_bytes());
      std::memset(output(i), 0xff, tensor_bytes());
    }
  }

  std::size_t tensor_bytes() const { return static_cast<std::size_t>(w_.elems) * sizeof(float); }
  std::uint64_t payload_bytes() const { return payload_bytes_; }
  double relative_error() const { return relative_error_; }

  void encode(std::int64_t i) {
    payload_bytes_ = codec_->encode({input(i), DType::kFloat32, 1, w_.elems}, {1, 2, 3}, payload_, scratch_).value();
  }
  bool decode(std::int64_t i) {
    const TensorView view{output(i), DType::kFloat32, 1, w_.elems};
    return codec_->decode(std::span(payload_).first(payload_bytes_), view, scratch_).ok();
  }
  void copy(std::int64_t i) { std::memcpy(output(i), input(i), (tensor_bytes() + payload_bytes_) / 2); }

  bool check() {
    encode(0);
    if (!decode(0)) return false;
    const bool rounds = std::string_view(w_.spec).find("fp16") != std::string_view::npos;
    const bool is_global_topk = w_.spec[0] == 't' && std::string_view(w_.spec).find("block") == std::string_view::npos;
    float least_kept = INFINITY, largest_dropped = 0;
    double lost = 0, sum = 0;
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < w_.elems; ++i) {
      const float x = input(0)[i], y = output(0)[i];
      const bool is_kept = y != 0;
      if (is_kept && !(rounds ? std::abs(y - x) <= std::abs(x) * 0x1p-11f : y == x)) return false;
      kept += is_kept;
      float& extreme = is_kept ? least_kept : largest_dropped;
      extreme = is_kept ? std::min(extreme, std::abs(x)) : std::max(extreme, std::abs(x));
      lost += std::pow(static_cast<double>(x) - y, 2);
      sum += std::pow(static_cast<double>(x), 2);
    }
    relative_error_ = std::sqrt(lost / sum);
    return kept > 0 && (!is_global_topk || least_kept >= largest_dropped);
  }

 private:
  float* input(std::int64_t i) { return inputs_.data() + i % kPoolTensors * w_.elems; }
  float* output(std::int64_t i) { return outputs_.data() + i % kPoolTensors * w_.elems; }

  Workload w_;
  std::unique_ptr<Codec> codec_;
  AlignedBuffer<float> inputs_, outputs_;
  std::vector<std::byte> payload_, scratch_;
  std::uint64_t payload_bytes_ = 0;
  double relative_error_ = 0;
};

bool measure(const Workload& w, int rounds) {
  Experiment experiment(w);
  if (!experiment.check()) {
    std::fprintf(stderr, "%s: decoding does not give what encoding must keep\n", row_name(w).c_str());
    return false;
  }
  const std::int64_t calls = std::max<std::int64_t>(1, (std::int64_t{1} << 24) / w.elems);
  Samples copies, encodes, decodes;
  for (int round = 0; round < rounds; ++round) {
    const auto sample = [&](Samples& samples, const auto& call) {
      samples.add([&] {
        for (std::int64_t i = 0; i < calls; ++i) call(round + i);
      });
    };
    sample(copies, [&](std::int64_t i) { experiment.copy(i); });
    sample(encodes, [&](std::int64_t i) { experiment.encode(i + 2); });
    sample(decodes, [&](std::int64_t i) { experiment.decode(i + 4); });
  }
  const auto ms_a_call = [&](const Samples& samples) { return samples.median_ms() / static_cast<double>(calls); };
  const double copy = ms_a_call(copies), encode = ms_a_call(encodes), decode = ms_a_call(decodes);
  const auto bytes = static_cast<double>(experiment.tensor_bytes());
  std::printf("%-35s %8lld %-12s %7.2f %6.3f  %7.3f %8.3f %4.0f%% %8.3f %4.0f%%\n", w.spec,
              static_cast<long long>(w.elems), kDataNames[static_cast<int>(w.data)],
              bytes / static_cast<double>(experiment.payload_bytes()), experiment.relative_error(), copy, encode,
              100 * copy / encode, decode, 100 * copy / decode);
  std::fflush(stdout);
  return true;
}

int run(const BenchOptions& options) {
  print_conditions(options);
  std::printf("milliseconds, out of cache\n%-35s %8s %-12s %7s %6s  %7s %8s %5s %8s %5s\n", "codec", "elems", "data",
              "ratio", "error", "memcpy", "encode", "share", "decode", "share");
  for (const Workload& w : kWorkloads) {
    if (options.wants(row_name(w)) && !measure(w, options.rounds)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 11)); }

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does the entropy coder of `compso` gain over a general one? Encode and decode beside the same quantiser followed
// by zstd -1 and by lz4, and beside a memory copy.
//
//   compso_bench                  25 M values of N(0, 1)
//   compso_bench gradients        and what capture.py wrote there, the layers of a model and moment in one message
//   compso_bench gradients 0.01   at another bound
//
// GB/s are of the values; a share is (bytes of the values and of the payload) / time over (bytes read and written) /
// time of the copy. Sizes and errors are those of the same calls.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "benchmarks/codec/bench_program.h"
#include "benchmarks/codec/reference_coders.h"
#include "codec/compso/compso_layers.h"
#include "core/aligned_buffer.h"
#include "core/philox.h"

namespace cortado {
namespace {

// The layers of one message, one after the other in memory.
struct Data {
  std::string name;
  std::vector<float> values;
  std::vector<std::int64_t> layer_elems;
};

struct Contender {
  std::string name;
  std::function<std::uint64_t()> encode;  // returns the bytes of the payload
  std::function<bool()> decode;
  std::uint64_t payload_bytes = 0;
  Samples encode_times = {}, decode_times = {};
};

class Experiment {
 public:
  Experiment(const Data& data, double bound) : data_(data), coded_{.bound = bound, .filter = bound}, plain_(coded_) {
    plain_.is_coded = false;
    std::int64_t at = 0;
    for (const std::int64_t layer : data.layer_elems) {
      inputs_.emplace_back(data.values.data() + at, DType::kFloat32, 1, layer);
      outputs_.push_back({decoded_.data() + at, DType::kFloat32, 1, layer});
      at += layer;
    }
    add(
        "compso", [this] { return encode_layers(coded_, inputs_, {}, payload_.data(), scratch_.data()); },
        [this] { return decode_layers(coded_, payload(0), outputs_, scratch_.data()).ok(); });
    add(
        "memory copy", [this] { return copy(); }, [this] { return copy() > 0; });
    for (const ReferenceCoder& coder : reference_coders()) {
      add(
          std::string("quantiser, ") + coder.name,
          [this, coder] {
            quantise();
            return coder.compress(codes(), payload_);
          },
          [this, coder] {
            return coder.decompress(payload(current_), std::span(codes_).first(code_bytes_)) && dequantise();
          });
    }
  }

  bool run(int rounds) {
    bool ok = true;
    for (int round = 0; round < rounds; ++round) {
      for (current_ = 0; current_ < contenders_.size(); ++current_) {
        Contender& contender = contenders_[current_];
        contender.encode_times.add([&] { contender.payload_bytes = contender.encode(); });
        contender.decode_times.add([&] { ok &= contender.decode(); });
        if (current_ == 0) error_ = relative_l2_error(data_.values.data(), decoded_.data(), elems());
      }
    }
    return ok;
  }

  void print() {
    const double input_bytes = static_cast<double>(value_bytes());
    const double copy_bytes_per_s = 2 * input_bytes / contenders_[1].encode_times.median_s();
    std::printf("\n%s: %lld values in %zu layers, bound %g, relative L2 error %.4f\n", data_.name.c_str(),
                static_cast<long long>(elems()), data_.layer_elems.size(), coded_.bound, error_);
    std::printf("%-20s %7s  %9s %6s %6s  %9s %6s %6s\n", "", "ratio", "encode ms", "GB/s", "share", "decode ms", "GB/s",
                "share");
    for (const Contender& contender : contenders_) {
      const double moved = input_bytes + static_cast<double>(contender.payload_bytes);
      std::printf("%-20s %7.2f", contender.name.c_str(), input_bytes / static_cast<double>(contender.payload_bytes));
      for (const Samples* times : {&contender.encode_times, &contender.decode_times}) {
        std::printf("  %9.2f %6.2f %5.0f%%", times->median_ms(), times->gb_per_s(input_bytes),
                    100 * moved / times->median_s() / copy_bytes_per_s);
      }
      std::printf("\n");
    }
    print_entropies();
    std::fflush(stdout);
  }

 private:
  void add(std::string name, std::function<std::uint64_t()> encode, std::function<bool()> decode) {
    contenders_.push_back({std::move(name), std::move(encode), std::move(decode)});
  }

  // What a table for the whole message, as compso has it, a table a layer, and a table for each 128 KiB, about as zstd
  // has them, could give at best, tables not counted.
  void print_entropies() {
    quantise();
    if (std::to_integer<int>(codes()[0]) != 1) return;  // two bytes a code
    const Bytes all = codes().last(data_.values.size());
    const std::span codes_of_values(reinterpret_cast<const std::uint8_t*>(all.data()), all.size());
    constexpr std::size_t kPart = 128 << 10;
    double layer_bits = 0, part_bits = 0;
    std::size_t at = 0;
    for (const std::int64_t layer : data_.layer_elems) {
      layer_bits += order0_bits(codes_of_values.subspan(at, static_cast<std::size_t>(layer)));
      at += static_cast<std::size_t>(layer);
    }
    for (at = 0; at < all.size(); at += kPart) {
      part_bits += order0_bits(codes_of_values.subspan(at, std::min(kPart, all.size() - at)));
    }
    const double bits = 8 * static_cast<double>(value_bytes());
    std::printf(
        "order-0 entropy: ratio %.2f with one table for all, %.2f with one a layer, %.2f with one for 128 KiB\n",
        bits / order0_bits(codes_of_values), bits / layer_bits, bits / part_bits);
  }

  std::int64_t elems() const { return static_cast<std::int64_t>(data_.values.size()); }
  std::size_t value_bytes() const { return data_.values.size() * sizeof(float); }
  Bytes codes() const { return std::span(codes_).first(code_bytes_); }
  std::span<const std::byte> payload(std::size_t contender) const {
    return std::span(payload_).first(contenders_[contender].payload_bytes);
  }

  std::uint64_t copy() {
    std::memcpy(decoded_.data(), data_.values.data(), value_bytes());
    return value_bytes();
  }
  void quantise() { code_bytes_ = encode_layers(plain_, inputs_, {}, codes_.data(), scratch_.data()); }
  bool dequantise() { return decode_layers(plain_, codes(), outputs_, scratch_.data()).ok(); }

  const Data& data_;
  CompsoSettings coded_, plain_;
  AlignedBuffer<float> decoded_{data_.values.size()};
  std::vector<ConstTensorView> inputs_;
  std::vector<TensorView> outputs_;
  std::vector<std::byte> codes_{max_compso_bytes(plain_, data_.layer_elems, DType::kFloat32)};
  // Room for what does not compress, too.
  std::vector<std::byte> payload_ =
      std::vector<std::byte>(max_compso_bytes(coded_, data_.layer_elems, DType::kFloat32) * 9 / 8 + 1024);
  std::vector<std::byte> scratch_ = std::vector<std::byte>(compso_scratch_bytes(coded_, data_.layer_elems));
  std::vector<Contender> contenders_;
  std::size_t current_ = 0;
  std::uint64_t code_bytes_ = 0;
  double error_ = 0;
};

bool measure(const Data& data, double bound, int rounds) {
  Experiment experiment(data, bound);
  if (!experiment.run(rounds)) return false;
  experiment.print();
  return true;
}

Data normal_values() {
  constexpr std::int64_t kElems = 25'000'000;
  Data data = {"N(0, 1)", std::vector<float>(kElems), {kElems}};
  philox_fill_normal(1, 0, 0, data.values.data(), kElems);
  return data;
}

int run(const BenchOptions& options) {
  const double bound = options.arguments.size() > 1 ? std::atof(options.arguments[1].c_str()) : 4e-3;
  print_conditions(options);
  bool ok = !options.wants("N(0, 1)") || measure(normal_values(), bound, options.rounds);
  std::map<std::string, Data> messages;
  if (!options.arguments.empty()) {
    for (const CapturedGradient& gradient : read_gradients(options.arguments[0])) {
      Data& data = messages[gradient.moment];
      data.name = gradient.moment;
      data.values.insert(data.values.end(), gradient.values.begin(), gradient.values.end());
      data.layer_elems.push_back(static_cast<std::int64_t>(gradient.values.size()));
    }
  }
  for (const auto& [moment, data] : messages) {
    if (options.wants(moment)) ok = ok && measure(data, bound, options.rounds);
  }
  if (!ok) std::fprintf(stderr, "a payload could not be decoded\n");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 7)); }

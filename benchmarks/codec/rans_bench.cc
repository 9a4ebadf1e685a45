// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How fast are the entropy coder and the lossless float codec, and how close to the entropy?
//
//   rans_bench              codes of N(0, 1), rounded to multiples of 8 / 2^bits, cut off at 2^bits levels
//   rans_bench gradients    and those that quant makes of what capture.py wrote there, a model and moment in one row
//
// Codes are one a byte; speeds count codes (float_rans: bytes of floats) a second, counting and building the table
// included. "over it": bits a code over the entropy. "spared": bytes below 1 % over the entropy + 256 + 136 a chunk.
// The last two columns are the elapsed time of one thread over that of two; the line below the table's head says what
// the machine gives two threads that only add numbers in registers, and two that copy memory. zstd -1 and lz4 are the
// public references, where their headers were installed. Every payload is decoded and compared before anything is
// timed.
#include <bit>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "benchmarks/codec/bench_program.h"
#include "benchmarks/codec/reference_coders.h"
#include "codec/rans/rans_stream.h"
#include "codec/stage.h"
#include "core/float16.h"
#include "core/philox.h"
#include "core/thread_pool.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

using Codes = std::vector<std::uint8_t>;

constexpr std::int64_t kElems = std::int64_t{1} << 24;

std::vector<float> normal_values() {
  std::vector<float> values(kElems);
  philox_fill_normal(1, 0, 0, values.data(), kElems);
  return values;
}

Codes codes_of(const std::vector<float>& values, int bits) {
  const float scale = std::ldexp(1.0f, bits) / 8, half = std::ldexp(1.0f, bits - 1);
  Codes codes(values.size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<std::uint8_t>(std::clamp(std::nearbyint(values[i] * scale), -half, half - 1) + half);
  }
  return codes;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s: decoding does not give back what was encoded\n", what.c_str());
  std::exit(1);
}

// One way to pack codes, checked.
class Contender {
 public:
  using Encode = std::function<std::size_t(const Codes&, std::vector<char>&)>;
  using Decode = std::function<void(const std::vector<char>&, std::size_t, Codes&)>;

  Contender(const char* name, const Codes& codes, std::size_t room, Encode encode, Decode decode)
      : codes_(codes), encode_(std::move(encode)), decode_(std::move(decode)), payload_(room), output_(codes.size()) {
    bytes_ = encode_(codes_, payload_);
    decode_(payload_, bytes_, output_);
    if (output_ != codes_) fail(name);
  }

  std::size_t bytes() const { return bytes_; }
  void encode() { bytes_ = encode_(codes_, payload_); }
  void decode() { decode_(payload_, bytes_, output_); }

  Samples encode_times = {}, decode_times = {};

 private:
  const Codes& codes_;
  Encode encode_;
  Decode decode_;
  std::vector<char> payload_;
  Codes output_;
  std::size_t bytes_ = 0;
};

// `pool` and the scratch memory live as long as the contender.
Contender make_rans(const Codes& codes, std::int64_t chunk_codes, ThreadPool& pool, std::vector<std::byte>& scratch) {
  const auto elems = static_cast<std::int64_t>(codes.size());
  scratch.resize(rans_scratch_bytes(elems, chunk_codes));
  return Contender(
      "rans", codes, max_rans_bytes(elems),
      [&, elems, chunk_codes](const Codes& from, std::vector<char>& to) {
        return encode_codes(from.data(), elems, chunk_codes, reinterpret_cast<std::byte*>(to.data()), scratch.data(),
                            &pool);
      },
      [&, elems](const std::vector<char>& from, std::size_t bytes, Codes& to) {
        (void)decode_codes(std::as_bytes(std::span(from)).first(bytes), to.data(), elems, scratch.data(), &pool);
      });
}

// What no memory limits: eight additions at a time, in registers.
std::uint64_t add_numbers() {
  std::uint64_t sums[8] = {};
  for (std::uint64_t i = 0; i < 10'000'000; ++i) {
    for (std::uint64_t& sum : sums) asm volatile("add %1, %0" : "+r"(sum) : "r"(i));
  }
  return sums[0];
}

// The elapsed time of one thread over that of two, for work in two halves.
void print_machine(int rounds) {
  ThreadPool one(1), two(2);
  Codes from(std::size_t{1} << 28), to(from.size());
  const auto add = [](std::int64_t) { add_numbers(); };
  const auto copy = [&](std::int64_t half) {
    const std::size_t bytes = from.size() / 2;
    std::memcpy(to.data() + static_cast<std::size_t>(half) * bytes,
                from.data() + static_cast<std::size_t>(half) * bytes, bytes);
  };
  Samples add_one, add_two, copy_one, copy_two;
  for (int round = 0; round < rounds; ++round) {
    add_one.add_elapsed([&] { one.parallel_for(2, add); });
    add_two.add_elapsed([&] { two.parallel_for(2, add); });
    copy_one.add_elapsed([&] { one.parallel_for(2, copy); });
    copy_two.add_elapsed([&] { two.parallel_for(2, copy); });
  }
  std::printf("two threads: additions in registers %.2fx, copies %.2fx of one\n",
              add_one.median_s() / add_two.median_s(), copy_one.median_s() / copy_two.median_s());
}

void print_rans(const std::string& name, const Codes& codes, std::int64_t chunk_codes, int rounds) {
  ThreadPool one(1), two(2);
  std::vector<std::byte> scratch_of_one, scratch_of_two;
  Contender single = make_rans(codes, chunk_codes, one, scratch_of_one);
  Contender shared = make_rans(codes, chunk_codes, two, scratch_of_two);
  Codes copied(codes.size());
  Samples copy, single_encode, single_decode;
  for (int round = 0; round < rounds; ++round) {
    copy.add([&] { std::memcpy(copied.data(), codes.data(), codes.size()); });
    single.encode_times.add([&] { single.encode(); });
    single.decode_times.add([&] { single.decode(); });
    single_encode.add_elapsed([&] { single.encode(); });
    shared.encode_times.add_elapsed([&] { shared.encode(); });
    single_decode.add_elapsed([&] { single.decode(); });
    shared.decode_times.add_elapsed([&] { shared.decode(); });
  }
  const auto elems = static_cast<double>(codes.size()), bytes = static_cast<double>(single.bytes());
  const double entropy = order0_bits(codes) / elems, chunks = std::ceil(elems / static_cast<double>(chunk_codes));
  std::printf("%-14s %8lld %8.4f %9.4f %+7.2f%% %8.0f | %7.2f %7.2f %7.2f | %4.2fx %4.2fx\n", name.c_str(),
              static_cast<long long>(chunk_codes), entropy, 8 * bytes / elems, 100 * (8 * bytes / elems / entropy - 1),
              1.01 * entropy / 8 * elems + 256 + 136 * chunks - bytes, copy.gb_per_s(elems),
              single.encode_times.gb_per_s(elems), single.decode_times.gb_per_s(elems),
              single_encode.median_s() / shared.encode_times.median_s(),
              single_decode.median_s() / shared.decode_times.median_s());
  std::fflush(stdout);
}

void print_references(const Codes& codes, int rounds) {
  for (const ReferenceCoder& coder : reference_coders()) {
    Contender contender(
        coder.name, codes, coder.max_bytes(codes.size()),
        [&](const Codes& from, std::vector<char>& to) {
          return coder.compress(std::as_bytes(std::span(from)), std::as_writable_bytes(std::span(to)));
        },
        [&](const std::vector<char>& from, std::size_t bytes, Codes& to) {
          coder.decompress(std::as_bytes(std::span(from)).first(bytes), std::as_writable_bytes(std::span(to)));
        });
    for (int round = 0; round < rounds; ++round) {
      contender.encode_times.add([&] { contender.encode(); });
      contender.decode_times.add([&] { contender.decode(); });
    }
    const auto elems = static_cast<double>(codes.size());
    std::printf("  %-30s %9.4f %26s | %7.2f %7.2f |\n", coder.name, 8 * static_cast<double>(contender.bytes()) / elems,
                "", contender.encode_times.gb_per_s(elems), contender.decode_times.gb_per_s(elems));
  }
  std::fflush(stdout);
}

void print_normal(const std::vector<float>& values, const BenchOptions& options) {
  for (int bits = 1; bits <= 8; ++bits) {
    const std::string name = "N(0, 1) " + std::to_string(bits) + " bits";
    if (!options.wants(name)) continue;
    const Codes codes = codes_of(values, bits);
    for (const std::int64_t chunk_codes : {4096, 16384, 65536, 262144}) {
      if (chunk_codes == 65536 || bits % 4 == 0) print_rans(name, codes, chunk_codes, options.rounds);
    }
    print_references(codes, options.rounds);
  }
}

// What `quant` makes of the tensors of a model and moment, one behind the other.
void print_captured(const std::filesystem::path& folder, const BenchOptions& options) {
  const std::unique_ptr<Codec> codec = make_codec("quant(4)").value();
  const Quantiser& quantiser = *codec->quantiser();
  std::map<std::string, Codes> messages;
  for (const CapturedGradient& gradient : read_gradients(folder)) {
    const auto elems = static_cast<std::int64_t>(gradient.values.size());
    Codes codes(gradient.values.size());
    std::vector<std::byte> side(quantiser.max_side_bytes(1, elems));
    (void)quantiser.quantise({gradient.values.data(), DType::kFloat32, 1, elems}, {}, codes, side, {}).value();
    Codes& all = messages[gradient.moment];
    all.insert(all.end(), codes.begin(), codes.end());
  }
  for (const auto& [moment, codes] : messages) {
    if (!options.wants(moment)) continue;
    print_rans(moment, codes, 65536, options.rounds);
    print_references(codes, options.rounds);
  }
}

void print_floats(const std::vector<float>& values, const BenchOptions& options) {
  const auto codec = make_codec("float_rans").value();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const std::string name = "float_rans " + std::string(dtype_name(dtype));
    if (!options.wants(name)) continue;
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
    Samples copy, encode_times, decode_times;
    for (int round = 0; round < options.rounds; ++round) {
      copy.add([&] { std::memcpy(output.data(), input.data(), input.size()); });
      encode_times.add(encode);
      decode_times.add(decode);
    }
    const auto input_bytes = static_cast<double>(input.size());
    std::printf("%-16s ratio %.4f, error 0; memcpy %5.2f  encode %5.2f  decode %5.2f GB/s of floats\n", name.c_str(),
                input_bytes / static_cast<double>(bytes), copy.gb_per_s(input_bytes),
                encode_times.gb_per_s(input_bytes), decode_times.gb_per_s(input_bytes));
    std::fflush(stdout);
  }
}

int run(const BenchOptions& options) {
  print_conditions(options);
  const std::vector<float> values = normal_values();
  std::printf("%-14s %8s %8s %9s %8s %8s | %7s %7s %7s | %11s\n", "", "chunk", "entropy", "bits/code", "over it",
              "spared", "memcpy", "encode", "decode", "two threads");
  print_machine(options.rounds);
  print_normal(values, options);
  if (!options.arguments.empty()) print_captured(options.arguments[0], options);
  print_floats(values, options);
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 7)); }

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does the entropy coder of `compso` gain over a general one? Encode and decode beside the same quantiser followed
// by zstd -1, and beside a memory copy of as many bytes.
//
//   compso_bench                  25 M values of N(0, 1)
//   compso_bench gradients        and what capture.py wrote there, the layers of a model and moment in one message
//   compso_bench gradients 0.01   at another bound
//
// One thread, processor time, medians; every contender is timed in turn, round after round. Sizes and errors are those
// of the same calls. libzstd is looked for when the program starts.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "codec/compso/compso_layers.h"
#include "core/aligned_buffer.h"

namespace cortado {
namespace {

constexpr int kRounds = 7;

struct Zstd {
  std::size_t (*compress)(void*, void*, std::size_t, const void*, std::size_t, int) = nullptr;
  std::size_t (*decompress)(void*, void*, std::size_t, const void*, std::size_t) = nullptr;
  void* compress_context = nullptr;
  void* decompress_context = nullptr;

  static Zstd open() {
    Zstd zstd;
    void* library = dlopen("libzstd.so.1", RTLD_NOW);
    if (library == nullptr) return zstd;
    const auto make = [&](const char* name) { return reinterpret_cast<void* (*)()>(dlsym(library, name))(); };
    zstd.compress = reinterpret_cast<decltype(zstd.compress)>(dlsym(library, "ZSTD_compressCCtx"));
    zstd.decompress = reinterpret_cast<decltype(zstd.decompress)>(dlsym(library, "ZSTD_decompressDCtx"));
    zstd.compress_context = make("ZSTD_createCCtx");
    zstd.decompress_context = make("ZSTD_createDCtx");
    return zstd;
  }
};

// The layers of one message, one after the other in memory.
struct Data {
  std::string name;
  std::vector<float> values;
  std::vector<std::int64_t> layer_elems;
};

struct Contender {
  std::string name;
  std::function<void()> encode, decode;
  std::uint64_t payload_bytes = 0;
  std::vector<double> encode_s = {}, decode_s = {};
};

void time_call(const std::function<void()>& call, std::vector<double>& seconds) {
  const std::clock_t begin = std::clock();
  call();
  seconds.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
}

double median(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double relative_error(const std::vector<float>& values, const float* decoded) {
  double lost = 0, all = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    lost += std::pow(static_cast<double>(values[i]) - static_cast<double>(decoded[i]), 2);
    all += std::pow(static_cast<double>(values[i]), 2);
  }
  return std::sqrt(lost / all);
}

void measure(const Data& data, double bound, Zstd& zstd) {
  const CompsoSettings coded = {.bound = bound, .filter = bound};
  CompsoSettings plain = coded;
  plain.is_coded = false;
  const auto elems = static_cast<std::int64_t>(data.values.size());
  AlignedBuffer<float> decoded(elems);
  std::vector<ConstTensorView> inputs;
  std::vector<TensorView> outputs;
  std::int64_t at = 0;
  for (const std::int64_t layer : data.layer_elems) {
    inputs.emplace_back(data.values.data() + at, DType::kFloat32, 1, layer);
    outputs.push_back({decoded.data() + at, DType::kFloat32, 1, layer});
    at += layer;
  }
  const auto room = [&](const CompsoSettings& settings) {
    return static_cast<std::size_t>(max_compso_bytes(settings, data.layer_elems, DType::kFloat32));
  };
  std::vector<std::byte> payload(room(coded)), codes(room(plain)), zstd_payload(2 * room(plain) + 1024);
  std::vector<std::byte> scratch(static_cast<std::size_t>(compso_scratch_bytes(coded, data.layer_elems)));
  std::uint64_t code_bytes = 0;
  const auto check = [](const Status& status) {
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  };

  std::vector<Contender> contenders(zstd.compress != nullptr ? 3 : 2);
  Contender &ours = contenders[0], &copy = contenders[1], &peer = contenders.back();
  ours.name = "compso";
  ours.encode = [&] { ours.payload_bytes = encode_layers(coded, inputs, {}, payload.data(), scratch.data()); };
  ours.decode = [&] {
    check(decode_layers(coded, std::span(payload).first(ours.payload_bytes), outputs, scratch.data()));
  };
  copy.name = "memory copy";
  copy.encode = [&] { std::memcpy(decoded.data(), data.values.data(), data.values.size() * sizeof(float)); };
  copy.decode = copy.encode;
  copy.payload_bytes = data.values.size() * sizeof(float);
  if (zstd.compress != nullptr) {
    peer.name = "quantiser, zstd -1";
    peer.encode = [&] {
      code_bytes = encode_layers(plain, inputs, {}, codes.data(), scratch.data());
      peer.payload_bytes =
          zstd.compress(zstd.compress_context, zstd_payload.data(), zstd_payload.size(), codes.data(), code_bytes, 1);
    };
    peer.decode = [&] {
      zstd.decompress(zstd.decompress_context, codes.data(), codes.size(), zstd_payload.data(), peer.payload_bytes);
      check(decode_layers(plain, std::span(codes).first(code_bytes), outputs, scratch.data()));
    };
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& contender : contenders) {
      time_call(contender.encode, contender.encode_s);
      time_call(contender.decode, contender.decode_s);
    }
  }
  const double input_bytes = static_cast<double>(elems) * sizeof(float);
  const double copy_bytes_per_s = 2 * input_bytes / median(contenders[1].encode_s);
  ours.encode();
  ours.decode();
  std::printf("\n%s: %lld values in %zu layers, bound %g, relative L2 error %.4f\n", data.name.c_str(),
              static_cast<long long>(elems), data.layer_elems.size(), bound,
              relative_error(data.values, decoded.data()));
  std::printf("%-20s %7s %12s %12s %14s %14s\n", "", "ratio", "encode GB/s", "decode GB/s", "share of copy", "of copy");
  for (const Contender& contender : contenders) {
    const double encode_s = median(contender.encode_s), decode_s = median(contender.decode_s);
    const double moved = input_bytes + static_cast<double>(contender.payload_bytes);
    std::printf("%-20s %7.2f %12.2f %12.2f %13.0f%% %13.0f%%\n", contender.name.c_str(),
                input_bytes / static_cast<double>(contender.payload_bytes), input_bytes / encode_s / 1e9,
                input_bytes / decode_s / 1e9, 100 * moved / encode_s / copy_bytes_per_s,
                100 * moved / decode_s / copy_bytes_per_s);
  }
}

Data normal_values() {
  Data data = {"N(0, 1)", std::vector<float>(25'000'000), {25'000'000}};
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (float& value : data.values) value = normal(generator);
  return data;
}

// The values of a float32 .npy file; none if it is something else.
std::vector<float> read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  char start[10] = {};
  file.read(start, sizeof(start));
  const auto header_bytes = static_cast<std::size_t>(static_cast<unsigned char>(start[8])) +
                            256 * static_cast<std::size_t>(static_cast<unsigned char>(start[9]));
  std::string header(header_bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  if (!file || header.find("'<f4'") == std::string::npos) return {};
  const std::size_t begin = sizeof(start) + header_bytes;
  std::vector<float> values((std::filesystem::file_size(path) - begin) / sizeof(float));
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  return values;
}

// model-moment-parameter.npy
std::map<std::string, Data> read_gradients(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::map<std::string, Data> models;
  for (const std::filesystem::path& path : paths) {
    if (path.extension() != ".npy") continue;
    const std::string name = path.stem().string();
    const std::string model = name.substr(0, name.find('-', name.find('-') + 1));
    const std::vector<float> values = read_npy(path);
    Data& data = models[model];
    data.name = model;
    data.values.insert(data.values.end(), values.begin(), values.end());
    data.layer_elems.push_back(static_cast<std::int64_t>(values.size()));
  }
  return models;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  using namespace cortado;
  Zstd zstd = Zstd::open();
  if (zstd.compress == nullptr) std::printf("no libzstd.so.1 here: zstd is left out\n");
  const double bound = argc > 2 ? std::atof(argv[2]) : 4e-3;
  measure(normal_values(), bound, zstd);
  if (argc > 1) {
    for (const auto& [name, data] : read_gradients(argv[1])) measure(data, bound, zstd);
  }
  return 0;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the conformance suite and the fuzzers iterate over: example specifications of every registered codec, shapes,
// values, and memory that shows writes beside it. Made from the registry's rows, so a new row needs nothing here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/float16.h"
#include "core/philox.h"
#include "cortado/codec.h"

namespace cortado {

// The legal extremes of one parameter, as written in a specification; every choice of a kChoice.
inline std::vector<std::string> extremes_of(const Parameter& parameter) {
  std::vector<std::string> values;
  std::string_view choices = parameter.choices;
  while (!choices.empty()) {
    const std::size_t end = choices.find('|');
    values.emplace_back(choices.substr(0, end));
    choices = end == std::string_view::npos ? "" : choices.substr(end + 1);
  }
  if (parameter.kind == ParameterKind::kBool) values = {"true", "false"};
  if (parameter.kind == ParameterKind::kInteger || parameter.kind == ParameterKind::kReal) {
    for (const double extreme : {parameter.min, parameter.max}) {
      char text[40];
      std::snprintf(text, sizeof(text), "%.17g", extreme);
      values.emplace_back(text);
    }
  }
  return values;
}

// The row's default and, one at a time, the extremes of each parameter: "cast", "cast(dtype=bf16)" ...
inline std::vector<std::string> example_specs(const CodecRow& row) {
  std::vector<std::string> specs = {row.name};
  for (const Parameter& parameter : row.parameters) {
    for (const std::string& value : extremes_of(parameter)) {
      specs.push_back(std::string(row.name) + "(" + parameter.name + "=" + value + ")");
    }
  }
  return specs;
}

// Compositions of the rows there are: every sparsifier with every codec that may follow it and with every coded
// quantiser, every quantiser with its coder, and all sparsifiers in one.
inline std::vector<std::string> example_compositions() {
  std::vector<std::string> sparsifiers, followers, specs;
  const char* coder = " | rans";
  for (const CodecRow& row : codec_registry()) {
    const std::unique_ptr<Codec> codec = make_codec(row.name).value();
    if (codec->sparsifier() != nullptr) sparsifiers.emplace_back(row.name);
    if (row.traits.low_rank || row.name == std::string_view("rans")) continue;
    followers.emplace_back(row.name);
    if (codec->quantiser() == nullptr || find_codec("rans") == nullptr) continue;
    specs.push_back(std::string(row.name) + coder);
    followers.push_back(specs.back());
  }
  std::string all;
  for (const std::string& sparsifier : sparsifiers) {
    for (const std::string& follower : followers) specs.push_back(sparsifier + " | " + follower);
    all += sparsifier + " | ";
  }
  if (sparsifiers.size() > 2 && !followers.empty()) specs.push_back(all + followers.back());
  return specs;
}

// What the conformance suite iterates over.
inline std::vector<std::string> all_examples() {
  std::vector<std::string> examples;
  for (const CodecRow& row : codec_registry()) {
    for (std::string& spec : example_specs(row)) examples.push_back(std::move(spec));
  }
  for (std::string& spec : example_compositions()) examples.push_back(std::move(spec));
  return examples;
}

// Formats that no example shows: all widths of codes, two bytes a code, several chunks, long compositions.
inline constexpr const char* kMoreFormats[] = {
    "quant(bits=1, round=dither)",
    "quant(bits=3, round=dither)",
    "quant(bits=5, round=stochastic)",
    "quant(bits=6, round=dead_zone)",
    "quant(bits=7, block=32)",
    "quant(bits=3, round=dither) | rans",
    "quant(bits=4) | rans(chunk_codes=4096)",
    "fp8(e5m2, block=32) | rans",
    "compso(bound=0.001, round=dither)",
    "compso(bound=0.001, coder=none)",
    "compso(error=0.2, round=dead_zone)",
    "topk(density=0.3) | quant(bits=4) | rans",
    "topk(density=0.3) | fp8(e5m2) | rans",
    "topk(density=0.3, select=sampled) | compso(bound=0.02)",
    "randk(density=0.2, block=7) | sign(scale=two_means)",
    "randk(density=0.5) | topk(density=0.2) | quant(bits=3)",
};
// The examples and kMoreFormats with all their parameters, each once: what the golden payloads and the fuzzers cover.
inline std::set<std::string> golden_specs() {
  std::set<std::string> specs;
  for (const std::string& example : all_examples()) specs.insert(make_codec(example).value()->spec());
  for (const char* example : kMoreFormats) specs.insert(make_codec(example).value()->spec());
  return specs;
}

struct Shape {
  std::int64_t rows, cols;
};

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8};
inline constexpr Shape kEmptyShapes[] = {{0, 0}, {0, 5}, {5, 0}};
inline constexpr Shape kShapes[] = {{1, 1}, {1, 7}, {7, 1}, {1, 1000}, {129, 3}, {3, 131}, {17, 33}, {64, 64}};

// The nearest in `dtype`; a signalling NaN stays one in bf16, and uint8 takes some bits.
inline std::vector<std::byte> bytes_of(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    std::uint32_t element = bits;
    if (dtype == DType::kFloat16) element = float_to_fp16(values[i]);
    if (dtype == DType::kBFloat16) element = bits >> 16;
    if (dtype == DType::kUint8) element = bits >> 13;
    std::memcpy(bytes.data() + i * dtype_bytes(dtype), &element, dtype_bytes(dtype));
  }
  return bytes;
}

// elems values of about N(0, 1), in `dtype`; with `special`, every kind of unusual value is among them (as far as
// there is room).
inline std::vector<std::byte> make_values(DType dtype, std::int64_t elems, bool special, std::uint64_t seed = 1) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, 0, 0, values.data(), elems);
  if (special) {
    // -0, a denormal, Inf, -Inf, quiet and signalling NaN with payloads, the largest and the smallest finite value.
    constexpr std::uint32_t kSpecial[] = {0x80000000u, 0x00000123u, 0x7f800000u, 0xff800000u, 0x7fc12345u,
                                          0xffa54321u, 0x7f7fffffu, 0x00000001u, 0x33800000u};
    for (std::size_t i = 0; i < values.size(); i += 2) values[i] = std::bit_cast<float>(kSpecial[i / 2 % 9]);
  }
  return bytes_of(values, dtype);
}

// Memory of a size between guards, beginning `shift` bytes after an address that is a multiple of 16.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::uint64_t bytes, std::size_t shift = 0)
      : memory_(bytes + shift + 2 * kGuardBytes + 16, kGuard) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuardBytes;
    begin_ = kGuardBytes + (16 - address % 16) % 16 + shift;
    bytes_ = bytes;
  }

  std::span<std::byte> span() { return {memory_.data() + begin_, bytes_}; }
  std::byte* data() { return memory_.data() + begin_; }

  bool guards_are_whole() const {
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(begin_);
    return std::all_of(memory_.begin(), begin, is_guard) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), is_guard);
  }

 private:
  static constexpr std::byte kGuard{0xa5};
  static constexpr std::size_t kGuardBytes = 64;
  std::vector<std::byte> memory_;
  std::size_t begin_, bytes_;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The batches that tests of device variants run, emulated and on a device: all settings of all rows, on shapes around
// the borders of tiles and on random ones.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "codec/device_testing.h"
#include "core/philox.h"
#include "core/sanitized.h"

namespace cortado {

inline std::string name_of_case(const BatchCase& the_case, std::size_t index) {
  constexpr const char* kNames[] = {"", "_special", "_uneven", "_coarse"};
  std::string name = std::to_string(index) + "_";
  for (const char c : the_case.spec) name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name + "_" + std::string(dtype_name(the_case.dtype)) + kNames[static_cast<std::size_t>(the_case.values)];
}

// What is done to payloads for BatchCheck::run_damaged(), by round. In the first one four bytes are turned round, at
// the beginning or in the middle; in the others one byte of the first 600, where headers, tables and lengths lie. Of
// eight payloads two are cut short besides, and one is longer by a byte.
constexpr int kDamageRounds = kSanitized ? 4 : 20;

inline void damage(int round, std::size_t tensor, std::vector<std::byte>& payload) {
  const PhiloxBlock random = philox_block(/*seed=*/91, static_cast<std::uint64_t>(round), tensor, 0);
  const std::size_t kind = (static_cast<std::size_t>(round) + tensor) % 8;
  if (kind == 3) payload.push_back(static_cast<std::byte>(random[0] & 1));
  if (kind % 4 == 1 && !payload.empty()) payload.resize(random[0] % payload.size());
  if (payload.empty()) return;
  if (round == 0) {
    const std::size_t begin = tensor % 2 == 0 ? 0 : payload.size() / 2;
    for (std::size_t i = begin; i < std::min(payload.size(), begin + 4); ++i) payload[i] ^= std::byte{0xff};
    return;
  }
  payload[random[1] % std::min<std::size_t>(payload.size(), 600)] ^= static_cast<std::byte>(1 + random[2] % 255);
}

// Empty ones, one value, borders of rows, groups and tiles, and some random ones.
inline std::vector<BatchShape> device_shapes(std::uint64_t seed, std::int64_t largest = 9000) {
  std::vector<BatchShape> shapes = {{0, 5}, {1, 1}, {3, 5}, {1, 127}, {2, 64}, {1, 4096}, {17, 241}, {1, 8193}};
  for (std::uint64_t i = 0; i < 4; ++i) {
    const PhiloxBlock random = philox_block(seed, 0, 0, i);
    const std::int64_t rows = 1 + random[0] % 40;
    shapes.push_back({rows, 1 + static_cast<std::int64_t>(random[1]) % (largest / rows)});
  }
  return shapes;
}

inline std::vector<BatchCase> device_cases() {
  struct Example {
    const char* spec;
    bool are_codes = false;
    double relative_l2_bound = 0;
  };
  const Example examples[] = {
      {"cast(bf16)"},
      {"cast(fp16)"},
      {"fp8(e4m3)"},
      {"fp8(e5m2, block=tensor)"},
      {"acp(rank=4)", false, 1e-5},
      {"acp(rank=7)", false, 1e-5},
      {"power(rank=2)", false, 1e-5},
      {"sign"},
      {"sign(scale=two_means)"},
      {"sign(scale=none)"},
      {"sign(block=272)"},
      {"sign(scale=two_means, block=2064)"},
      {"topk"},
      {"topk(density=0.3, index=bitmap, values=fp16)"},
      {"topk(density=0.6)"},
      {"topk(density=0.02, select=sampled, index=delta)"},
      {"topk(density=0.2, select=sampled)"},
      {"randk"},
      {"randk(density=0.3, block=7, scale=unbiased)"},
      {"randk(density=0.9, block=1000)"},
      {"quant(bits=4)"},
      {"quant(bits=1, block=32, round=stochastic)"},
      {"quant(bits=3, block=64, round=dither)"},
      {"quant(bits=5, block=tensor, scale=rms, round=dead_zone)"},
      {"quant(bits=8, block=512, scale=l2)"},
      {"quant(bits=2, block=2048, scale=rms, round=stochastic)"},
      {"quant(bits=7, block=4096, scale=range, filter=0.1)"},
      {"quant(bits=6, block=8192, scale=l2, round=dither)"},
      {"quant(bound=0.1, scale=range, block=tensor, filter=0.02, round=stochastic)"},
      {"quant(abs_bound=0.01)"},
      {"rans(chunk_codes=4096)", true},
      {"rans", true},
      {"float_rans(chunk_codes=4096)"},
      {"float_rans"},
      {"compso"},
      {"compso(bound=0)"},
      {"compso(bound=0.0005, chunk_codes=4096)"},
      {"compso(bound=0.01, filter=off, round=dither, block=1024)"},
      {"compso(bound=0.002, round=dead_zone, coder=none, block=3072)"},
      {"compso(bound=0.05, filter=0.1, round=nearest, chunk_codes=8192)"},
  };
  std::vector<BatchCase> cases;
  for (const Example& example : examples) {
    for (const DType dtype : kAllDTypes) {
      if ((dtype == DType::kUint8) != example.are_codes) continue;
      for (const TestValues values : {TestValues::kNormal, TestValues::kSpecial}) {
        if (kSanitized && values == TestValues::kNormal && dtype != DType::kFloat32 && !example.are_codes) continue;
        constexpr std::uint64_t kShifts[] = {0, 4, 7};
        const std::uint64_t number = cases.size();
        cases.push_back({.spec = example.spec,
                         .dtype = dtype,
                         .shapes = device_shapes(number),
                         .values = values,
                         .shift_bytes = kShifts[number % 3],
                         .relative_l2_bound = example.relative_l2_bound});
      }
    }
  }
  // Several blocks of chunks, sections, sampled units, sums of parts, and values that mislead a sample.
  std::vector<BatchShape> large = {{1, 300000}, {3, 5}, {500, 301}};
  if (kSanitized) large = {{1, 140000}, {3, 5}};
  // More than the 256 sums that parts of a block are added to (sign_levels.h).
  const std::vector<BatchShape> of_sign = kSanitized ? std::vector<BatchShape>{{1, 270000}} : large;
  for (const char* const spec :
       {"sign", "quant(bits=3, block=tensor, scale=l2)", "rans(chunk_codes=4096)", "float_rans(chunk_codes=8192)",
        "compso(chunk_codes=8192)", "compso(bound=0.0005, round=nearest)", "topk(density=0.003)",
        "topk(density=0.01, select=sampled)", "topk(density=0.3, select=sampled)", "randk(density=0.02)"}) {
    const bool are_codes = std::string_view(spec).starts_with("rans");
    for (const TestValues values : {TestValues::kNormal, TestValues::kUneven, TestValues::kCoarse}) {
      cases.push_back({.spec = spec,
                       .dtype = are_codes ? DType::kUint8 : DType::kFloat32,
                       .shapes = std::string_view(spec) == "sign" ? of_sign : large,
                       .values = values});
    }
  }
  // More tensors than a block has threads.
  std::vector<BatchShape> many;
  for (std::int64_t i = 0; i < 300; ++i) many.push_back({i % 3, i % 50});
  for (const char* const spec : {"cast", "sign", "acp", "float_rans", "compso", "topk", "randk"}) {
    cases.push_back({.spec = spec, .shapes = many, .relative_l2_bound = spec == std::string_view("acp") ? 1e-5 : 0.0});
  }
  return cases;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The same bytes to the reference and to every SIMD target of the cast kernels; the first difference ends the run.
//
// Input: a float32 scale, then the values, as float32 and again as 16-bit numbers.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "codec/cast/cast_kernels.h"
#include "core/check.h"
#include "core/float16.h"
#include "core/simd_target.h"

namespace {

using namespace cortado;

using Narrow16 = std::vector<std::uint16_t>;

struct Format {
  void (*narrow)(const float*, std::int64_t, std::uint16_t*, bool);
  void (*scaled)(const float*, float, std::int64_t, std::uint16_t*);
  void (*widen)(const std::uint16_t*, std::int64_t, float*, bool);
  std::uint16_t (*narrow_one)(float);
  float (*widen_one)(std::uint16_t);
};
constexpr Format kFormats[] = {
    {fp32_to_bf16, scale_and_cast_bf16, bf16_to_fp32, float_to_bf16, bf16_to_float},
    {fp32_to_fp16, scale_and_cast_fp16, fp16_to_fp32, float_to_fp16, fp16_to_float},
};

void check_narrow(const Format& format, const std::vector<float>& values, float scale) {
  const auto elems = static_cast<std::int64_t>(values.size());
  Narrow16 plain(values.size()), scaled(values.size());
  format.narrow(values.data(), elems, plain.data(), false);
  if (std::isfinite(scale) && scale != 0) format.scaled(values.data(), scale, elems, scaled.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    CORTADO_CHECK(plain[i] == format.narrow_one(values[i]), "value %zu: %08x -> %04x", i, bits, plain[i]);
    if (!std::isfinite(scale) || scale == 0) continue;
    CORTADO_CHECK(scaled[i] == format.narrow_one(values[i] * scale), "value %zu: %08x * %a -> %04x", i, bits,
                  static_cast<double>(scale), scaled[i]);
  }
}

void check_widen(const Format& format, const Narrow16& values) {
  std::vector<float> wide(values.size());
  format.widen(values.data(), static_cast<std::int64_t>(values.size()), wide.data(), false);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto got = std::bit_cast<std::uint32_t>(wide[i]);
    CORTADO_CHECK(got == std::bit_cast<std::uint32_t>(format.widen_one(values[i])), "value %zu: %04x -> %08x", i,
                  values[i], got);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  float scale = 1;
  if (size < sizeof(scale)) return 0;
  std::memcpy(&scale, data, sizeof(scale));
  const std::size_t bytes = size - sizeof(scale);
  std::vector<float> wide(bytes / sizeof(float));
  Narrow16 narrow(bytes / sizeof(std::uint16_t));
  if (!wide.empty()) std::memcpy(wide.data(), data + sizeof(scale), wide.size() * sizeof(float));
  if (!narrow.empty()) std::memcpy(narrow.data(), data + sizeof(scale), narrow.size() * sizeof(std::uint16_t));

  // Asking the processor is slow in virtual machines.
  static const std::vector<std::int64_t> targets = simd_targets();
  for (const std::int64_t target : targets) {
    const ForcedSimdTarget forced(target);
    for (const Format& format : kFormats) {
      check_narrow(format, wide, scale);
      check_widen(format, narrow);
    }
  }
  return 0;
}

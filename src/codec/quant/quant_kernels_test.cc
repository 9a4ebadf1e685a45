// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Encoders and decoders against the reference, on every SIMD target.
#include "codec/quant/quant_kernels.h"

#include <gtest/gtest.h>

#include <vector>

#include "codec/conformance_cases.h"
#include "codec/quant/quant_reference.h"
#include "codec/quant/quant_search.h"
#include "codec/quant/quant_settings.h"
#include "codec/stage.h"
#include "core/aligned_buffer.h"
#include "core/float16.h"
#include "core/simd_target.h"

namespace cortado::quant_kernels_test {
namespace {

constexpr EncodeContext kContext = {.seed = 5, .step = (std::uint64_t{7} << 32) + 8, .tensor = 9};

QuantSettings settings_of(const std::string& spec) {
  const std::vector<SpecStage> stages = parse_spec(spec).value();
  return read_quant_settings(ParameterValues::read("quant", stages.front().arguments, quant_parameters()).value())
      .value();
}

// Blocks of very different size; zeros, denormals, the largest values and others that are not finite, a block each.
std::vector<float> telling_values(std::int64_t elems) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(3, 0, 0, values.data(), elems);
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (i / 700 % 8) {
      case 1:
        values[i] *= 0x1p-60f;
        break;
      case 2:
        values[i] = i % 3 == 0 ? -0.0f : 0.0f;
        break;
      case 3:
        values[i] *= 0x1p-128f;
        break;
      case 4:
        values[i] = std::clamp(values[i], -1.0f, 1.0f) * std::numeric_limits<float>::max();
        break;
      case 5:
        if (i % 701 == 0) values[i] = std::numeric_limits<float>::infinity();
        if (i % 702 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
        break;
      case 6:
        values[i] = static_cast<float>(static_cast<int>(i % 7) - 3);  // ties
        break;
      default:
        break;
    }
  }
  return values;
}

struct Payload {
  RandomKey random;
  std::vector<BlockGrid> grids;
  std::vector<std::uint8_t> codes;
  reference::Bytes bytes;
};

Payload expected_payload(const QuantSettings& s, const std::vector<float>& values) {
  Payload p;
  p.random = {philox_key(kContext.seed, kContext.tensor), kContext.step};
  float tensor_step = 0;
  if (s.rule == QuantRule::StepRule::kError) {
    const auto elems = static_cast<std::int64_t>(values.size());
    tensor_step = find_step(s.rounding, s.error, {values.data(), DType::kFloat32, 1, elems});
  }
  p.grids = reference::grids_of(s, values, tensor_step, std::numeric_limits<float>::max());
  p.codes = reference::codes_of(s, values, p.grids, p.random);
  if (s.rounding == Rounding::kDither) {
    p.bytes.resize(sizeof(RandomKey));
    std::memcpy(p.bytes.data(), &p.random, sizeof(RandomKey));
  }
  for (const BlockGrid& grid : p.grids) {
    const auto* step = reinterpret_cast<const std::byte*>(&grid.step);
    p.bytes.insert(p.bytes.end(), step, step + sizeof(float));
  }
  const reference::Bytes packed = reference::packed(p.codes, s.bits);
  p.bytes.insert(p.bytes.end(), packed.begin(), packed.end());
  return p;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float v : values) bits.push_back(std::bit_cast<std::uint32_t>(v));
  return bits;
}

void expect_the_reference(const std::string& spec, std::int64_t elems) {
  SCOPED_TRACE(spec + ", " + std::to_string(elems) + " values");
  const std::unique_ptr<Codec> codec = make_codec(spec).value();
  const QuantSettings settings = settings_of(spec);
  const std::vector<float> values = telling_values(elems);
  const Payload expected = expected_payload(settings, values);
  const std::vector<float> expected_values =
      reference::values_of(settings, expected.codes, expected.grids, expected.random);
  for (const std::int64_t target : simd_targets()) {
    const ForcedSimdTarget forced(target);
    SCOPED_TRACE(simd_target_name(target));
    reference::Bytes payload(codec->max_payload_bytes(1, elems, DType::kFloat32));
    ASSERT_EQ(codec->encode({values.data(), DType::kFloat32, 1, elems}, kContext, payload, {}).value(), payload.size());
    ASSERT_EQ(payload, expected.bytes);
    std::vector<float> output(values.size());
    ASSERT_TRUE(codec->decode(payload, {output.data(), DType::kFloat32, 1, elems}, {}).ok());
    ASSERT_EQ(bits_of(output), bits_of(expected_values));

    std::vector<std::uint8_t> codes(values.size());
    reference::Bytes side(codec->quantiser()->max_side_bytes(1, elems));
    const ConstTensorView input(values.data(), DType::kFloat32, 1, elems);
    ASSERT_EQ(codec->quantiser()->quantise(input, kContext, codes, side, {}).value(), side.size());
    ASSERT_EQ(codes, expected.codes);
    ASSERT_TRUE(std::equal(side.begin(), side.end(), payload.begin()));
    ASSERT_TRUE(codec->quantiser()->dequantise(codes, side, {output.data(), DType::kFloat32, 1, elems}, {}).ok());
    ASSERT_EQ(bits_of(output), bits_of(expected_values));
  }
}

constexpr const char* kRoundings[] = {"nearest", "dead_zone", "stochastic", "dither"};

TEST(QuantKernels, GiveTheBytesOfTheReferenceForAllBitsAndRoundings) {
  for (const char* round : kRoundings) {
    for (int bits = 1; bits <= 8; ++bits) {
      if (bits == 1 && round == std::string("dead_zone")) continue;
      expect_the_reference("quant(" + std::to_string(bits) + ", block=128, round=" + round + ")", 6001);
    }
  }
}

TEST(QuantKernels, GiveTheBytesOfTheReferenceForAllBlocksAndScales) {
  for (const char* scale : {"max", "rms", "l2", "range"}) {
    for (const char* block : {"32", "64", "256", "1024", "2048", "4096", "tensor"}) {
      for (const char* round : {"nearest", "dither"}) {
        expect_the_reference(std::string("quant(5, scale=") + scale + ", block=" + block + ", round=" + round + ")",
                             5600);
      }
    }
  }
}

TEST(QuantKernels, GiveTheBytesOfTheReferenceForAllLengths) {
  for (const std::int64_t elems : {1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 257, 1023, 1024, 1025, 2049}) {
    for (const char* round : kRoundings) {
      for (const char* bits : {"3", "8"}) {
        expect_the_reference(std::string("quant(") + bits + ", block=32, round=" + round + ")", elems);
      }
    }
  }
}

TEST(QuantKernels, GiveTheBytesOfTheReferenceForFiltersAndBounds) {
  for (const char* spec :
       {"quant(4, filter=0.1)", "quant(3, filter=0.3, round=stochastic, scale=range)", "quant(4, filter=0)",
        "quant(bound=0.1, round=dead_zone)", "quant(bound=0.02, round=stochastic, block=tensor)",
        "quant(bound=0.6, scale=rms, round=dither)", "quant(abs_bound=0.01)", "quant(abs_bound=1e30)",
        "quant(abs_bound=0.1, bits=3, block=64)", "quant(error=0.1)", "quant(error=0.5, round=stochastic)"}) {
    expect_the_reference(spec, 5600);
  }
}

// fp16 and bf16 are seen as float32, and what is decoded is rounded to them; blocks larger than a piece are read twice.
TEST(QuantKernels, NarrowDtypesAreFloat32WithLessRoom) {
  constexpr std::int64_t kElems = 3000;
  for (const char* spec : {"quant(4, block=64)", "quant(6, block=2048, round=dither)", "quant(error=0.1)"}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      SCOPED_TRACE(spec);
      const std::unique_ptr<Codec> codec = make_codec(spec).value();
      const std::vector<std::byte> narrow = make_values(dtype, kElems, false);
      std::vector<float> wide;
      for (std::size_t i = 0; i < kElems; ++i) {
        std::uint16_t element;
        std::memcpy(&element, narrow.data() + 2 * i, 2);
        wide.push_back(dtype == DType::kFloat16 ? fp16_to_float(element) : bf16_to_float(element));
      }
      reference::Bytes payload(codec->max_payload_bytes(1, kElems, dtype)), wide_payload(payload.size());
      ASSERT_TRUE(codec->encode({narrow.data(), dtype, 1, kElems}, kContext, payload, {}).ok());
      ASSERT_TRUE(codec->encode({wide.data(), DType::kFloat32, 1, kElems}, kContext, wide_payload, {}).ok());
      EXPECT_EQ(payload, wide_payload);
      std::vector<std::uint16_t> output(kElems);
      std::vector<float> wide_output(kElems);
      ASSERT_TRUE(codec->decode(payload, {output.data(), dtype, 1, kElems}, {}).ok());
      ASSERT_TRUE(codec->decode(payload, {wide_output.data(), DType::kFloat32, 1, kElems}, {}).ok());
      for (std::size_t i = 0; i < kElems; ++i) {
        const float v = wide_output[i];
        ASSERT_EQ(output[i], dtype == DType::kFloat16 ? float_to_fp16(v) : float_to_bf16(v)) << i;
      }
    }
  }
}

// Large tensors are written past the caches where they are aligned.
TEST(QuantKernels, LargeTensorsDecodeTheSameAtAnyAddress) {
  constexpr std::int64_t kElems = (std::int64_t{2} << 20) + 37;
  const std::unique_ptr<Codec> codec = make_codec("quant(4, round=dither)").value();
  std::vector<float> values(kElems), output(kElems + 32);
  philox_fill_normal(3, 0, 0, values.data(), kElems);
  reference::Bytes payload(codec->max_payload_bytes(1, kElems, DType::kFloat32));
  ASSERT_TRUE(codec->encode({values.data(), DType::kFloat32, 1, kElems}, kContext, payload, {}).ok());
  const auto misaligned = reinterpret_cast<std::uintptr_t>(output.data()) % 64 / 4;
  float* const aligned = output.data() + (16 - misaligned) % 16;
  ASSERT_TRUE(codec->decode(payload, {aligned, DType::kFloat32, 1, kElems}, {}).ok());
  const std::vector<float> expected(aligned, aligned + kElems);
  ASSERT_TRUE(codec->decode(payload, {aligned + 1, DType::kFloat32, 1, kElems}, {}).ok());
  EXPECT_EQ(std::memcmp(aligned + 1, expected.data(), kElems * sizeof(float)), 0);
}

// Codes are streamed where they lie in whole cache lines.
TEST(QuantKernels, LargePayloadsAreTheSameAtAnyAddress) {
  constexpr std::int64_t kElems = (std::int64_t{16} << 20) + 37;
  std::vector<float> values(kElems);
  philox_fill_normal(3, 0, 0, values.data(), kElems);
  for (const char* spec : {"quant(4)", "quant(5, round=dither)", "quant(8)", "fp8(e4m3)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const std::size_t bytes = codec->max_payload_bytes(1, kElems, DType::kFloat32);
    const std::size_t aligned = 64 - codec->quantiser()->max_side_bytes(1, kElems) % 64;
    AlignedBuffer<std::byte> streamed(bytes + 64), stored(bytes + 64);
    const auto encode_to = [&](std::byte* payload) {
      return codec->encode({values.data(), DType::kFloat32, 1, kElems}, kContext, {payload, bytes}, {}).ok();
    };
    ASSERT_TRUE(encode_to(streamed.data() + aligned));
    ASSERT_TRUE(encode_to(stored.data() + aligned % 64 + 1));
    EXPECT_EQ(std::memcmp(streamed.data() + aligned, stored.data() + aligned % 64 + 1, bytes), 0) << spec;
  }
}

#if defined(__x86_64__)
// Training programs switch this on for speed (torch.set_flush_denormal).
TEST(QuantKernels, FlushingDenormalsChangesNothing) {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned mode = __builtin_ia32_stmxcsr();
  std::vector<float> values = telling_values(5600);
  for (float& v : values) {
    if (std::fabs(v) > 0x1p100f) v = 1;  // steps from 2^126 on have denormal inverses
  }
  const auto elems = static_cast<std::int64_t>(values.size());
  for (const char* spec : {"quant(4)", "quant(8, round=stochastic)", "quant(8, round=dither, scale=rms)",
                           "quant(4, scale=range, filter=0.1)", "fp8(e4m3)", "fp8(e5m2, block=32)"}) {
    SCOPED_TRACE(spec);
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    reference::Bytes payload(codec->max_payload_bytes(1, elems, DType::kFloat32)), flushed(payload.size());
    std::vector<float> output(values.size()), flushed_output(values.size());
    ASSERT_TRUE(codec->encode({values.data(), DType::kFloat32, 1, elems}, kContext, payload, {}).ok());
    ASSERT_TRUE(codec->decode(payload, {output.data(), DType::kFloat32, 1, elems}, {}).ok());
    __builtin_ia32_ldmxcsr(mode | kFlushToZero | kDenormalsAreZero);
    const bool encoded = codec->encode({values.data(), DType::kFloat32, 1, elems}, kContext, flushed, {}).ok();
    const bool decoded = codec->decode(payload, {flushed_output.data(), DType::kFloat32, 1, elems}, {}).ok();
    __builtin_ia32_ldmxcsr(mode);
    ASSERT_TRUE(encoded && decoded);
    EXPECT_EQ(flushed, payload);
    EXPECT_EQ(bits_of(flushed_output), bits_of(output));
  }
}
#endif

}  // namespace
}  // namespace cortado::quant_kernels_test

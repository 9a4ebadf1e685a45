// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What spec.md says: where every bit goes, sizes, ratios, errors. Round trips over all shapes and addresses, special
// values among them, are in codec/conformance_test.cc.
#include "codec/float_rans/float_rans.h"

#include <gtest/gtest.h>

#include <bit>
#include <string>

#include "codec/conformance_cases.h"
#include "codec/rans/rans_reference.h"
#include "core/simd_target.h"

namespace cortado::float_rans_test {
namespace {

using Bytes = std::vector<std::uint8_t>;

struct Link {
  explicit Link(DType dtype_, std::int64_t elems_, const char* spec = "float_rans")
      : codec(make_codec(spec).value()), dtype(dtype_), elems(elems_), scratch(codec->scratch_bytes(1, elems, dtype)) {}

  Bytes encode(const Bytes& values) {
    Bytes payload(codec->max_payload_bytes(1, elems, dtype));
    payload.resize(
        codec->encode({values.data(), dtype, 1, elems}, {}, std::as_writable_bytes(std::span(payload)), scratch)
            .value());
    return payload;
  }
  Status decode(const Bytes& payload, Bytes* values) {
    values->assign(static_cast<std::size_t>(elems) * dtype_bytes(dtype), 0);
    return codec->decode(std::as_bytes(std::span(payload)), {values->data(), dtype, 1, elems}, scratch);
  }

  std::unique_ptr<Codec> codec;
  DType dtype;
  std::int64_t elems;
  std::vector<std::byte> scratch;
};

Bytes normal_values(DType dtype, std::int64_t elems, bool special = false) {
  const std::vector<std::byte> bytes = make_values(dtype, elems, special);
  Bytes values(bytes.size());
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The spec, value by value.
Bytes expected_payload(const Bytes& values, DType dtype, std::size_t chunk_codes) {
  const std::size_t width = dtype_bytes(dtype), elems = values.size() / width;
  Bytes halves, bytes, codes;
  for (std::size_t i = 0; i < elems; ++i) {
    std::uint32_t value = 0;
    std::memcpy(&value, values.data() + i * width, width);
    if (dtype == DType::kFloat32) {
      value = std::rotl(value, 1);
      halves.push_back(static_cast<std::uint8_t>(value));
      halves.push_back(static_cast<std::uint8_t>(value >> 8));
      bytes.push_back(static_cast<std::uint8_t>(value >> 16));
      codes.push_back(static_cast<std::uint8_t>(value >> 24));
    } else {
      const std::uint16_t rotated = std::rotl(static_cast<std::uint16_t>(value), 1);
      bytes.push_back(static_cast<std::uint8_t>(rotated));
      codes.push_back(static_cast<std::uint8_t>(rotated >> 8));
    }
  }
  Bytes payload = halves;
  payload.insert(payload.end(), bytes.begin(), bytes.end());
  const Bytes coded = reference::rans_encode(codes, chunk_codes);
  payload.insert(payload.end(), coded.begin(), coded.end());
  return payload;
}

constexpr DType kFloats[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

TEST(FloatRans, BytesAreThoseOfTheSpecOnEveryTarget) {
  for (const DType dtype : kFloats) {
    for (const std::int64_t elems : {1, 2, 15, 16, 17, 31, 33, 4095, 4097, 20000}) {
      for (const bool special : {false, true}) {
        Link link(dtype, elems, "float_rans(chunk_codes=4096)");
        const Bytes values = normal_values(dtype, elems, special);
        const Bytes expected = expected_payload(values, dtype, 4096);
        for (const std::int64_t target : simd_targets()) {
          const ForcedSimdTarget forced(target);
          ASSERT_EQ(link.encode(values), expected) << elems << " " << simd_target_name(target);
          Bytes output;
          ASSERT_TRUE(link.decode(expected, &output).ok());
          ASSERT_EQ(output, values) << elems << " " << simd_target_name(target);
        }
      }
    }
  }
}

// Ratios of N(0, 1), error 0: as in spec.md.
TEST(FloatRans, WhatItSavesOfNormalValues) {
  constexpr std::int64_t kElems = 1 << 20;
  const struct {
    DType dtype;
    double ratio;
  } cases[] = {{DType::kFloat32, 1.206}, {DType::kFloat16, 1.190}, {DType::kBFloat16, 1.519}};
  for (const auto& [dtype, ratio] : cases) {
    const Bytes values = normal_values(dtype, kElems);
    const double bytes = static_cast<double>(Link(dtype, kElems).encode(values).size());
    EXPECT_NEAR(static_cast<double>(values.size()) / bytes, ratio, 0.003) << dtype_name(dtype);
  }
}

TEST(FloatRans, NoiseTakesOneByteMoreAndZerosNoCodes) {
  constexpr std::int64_t kElems = 100000;
  Bytes noise(4 * kElems);
  for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::uint8_t>(philox_block(1, 2, 3, i)[0]);
  EXPECT_EQ(Link(DType::kFloat32, kElems).encode(noise).size(), noise.size() + 1);
  EXPECT_EQ(Link(DType::kFloat32, kElems).encode(Bytes(4 * kElems)).size(), 3u * kElems + 2);
  EXPECT_EQ(Link(DType::kBFloat16, kElems).encode(Bytes(2 * kElems)).size(), 1u * kElems + 2);
}

TEST(FloatRans, TheWorkedExampleOfItsSpec) {
  // 1 and -2.5
  const Bytes values = {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x20, 0xc0};
  EXPECT_EQ(Link(DType::kFloat32, 2).encode(values), (Bytes{0x00, 0x00, 0x01, 0x00, 0x00, 0x40, 0x00, 0x7f, 0x80}));
  EXPECT_EQ(Link(DType::kBFloat16, 2).encode({0x80, 0x3f, 0x20, 0xc0}), (Bytes{0x00, 0x41, 0x00, 0x7f, 0x80}));
  EXPECT_EQ(Link(DType::kFloat16, 2).encode({0x00, 0x3c, 0x00, 0xc1}), (Bytes{0x00, 0x01, 0x00, 0x78, 0x82}));
}

TEST(FloatRans, EveryTruncationIsAnError) {
  constexpr std::int64_t kElems = 5000;
  for (const DType dtype : kFloats) {
    Link link(dtype, kElems, "float_rans(chunk_codes=4096)");
    const Bytes payload = link.encode(normal_values(dtype, kElems));
    Bytes output;
    for (std::size_t bytes = 0; bytes < payload.size(); bytes += 1 + bytes % 7) {
      const Status status =
          link.decode({payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(bytes)}, &output);
      ASSERT_EQ(status.code(), StatusCode::kCorruptData) << bytes;
      ASSERT_EQ(status.message().find("float_rans(chunk_codes=4096): "), 0u) << status.message();
    }
  }
}

TEST(FloatRans, TakesNoCodes) {
  const auto codec = make_codec("float_rans").value();
  EXPECT_EQ(codec->encode({nullptr, DType::kUint8, 0, 0}, {}, {}, {}).status().message(),
            "float_rans(chunk_codes=65536) takes fp32, fp16 and bf16; rans takes codes, got uint8");
  EXPECT_FALSE(make_codec("float_rans(chunk_codes=10000)").ok());
}

}  // namespace
}  // namespace cortado::float_rans_test

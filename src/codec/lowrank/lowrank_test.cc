// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What spec.md says of values, sizes and errors. Round trips over all shapes, addresses, dtypes and damaged payloads in
// general are in codec/conformance_test.cc.
#include "codec/lowrank/lowrank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "codec/lowrank/lowrank_reference.h"
#include "codec/lowrank/orthogonalise.h"

namespace cortado {
namespace {

using reference::Doubles;
using reference::Floats;
using reference::Gradient;
using reference::random_floats;
using reference::relative_error;
using Bytes = std::vector<std::byte>;

constexpr EncodeContext kContext{.seed = 1, .step = 2, .tensor = 3};

std::unique_ptr<Codec> codec_of(const CodecRow& row, int rank) {
  const Result<ParameterValues> values =
      ParameterValues::read(row.name, {{"rank", std::to_string(rank)}}, row.parameters);
  return row.make(values.value()).value();
}

// A codec, one shape and the memory for it.
struct Link {
  Link(const CodecRow& row, int rank, std::int64_t rows_, std::int64_t cols_)
      : codec(codec_of(row, rank)),
        rows(rows_),
        cols(cols_),
        payload(codec->max_payload_bytes(rows, cols, DType::kFloat32)),
        scratch(codec->scratch_bytes(rows, cols, DType::kFloat32)) {}

  void encode(const Gradient& input, const EncodeContext& context = kContext) {
    const Result<std::uint64_t> bytes =
        codec->encode({input.data(), input.dtype, rows, cols}, context, payload, scratch);
    ASSERT_TRUE(bytes.ok()) << bytes.status().message();
    EXPECT_EQ(bytes.value(), payload.size());
  }
  Status decode(const Bytes& from) {
    return codec->decode(from, {output.data(), DType::kFloat32, rows, cols}, scratch);
  }
  const Floats& decoded() {
    const Status status = decode(payload);
    EXPECT_TRUE(status.ok()) << status.message();
    return output;
  }

  std::unique_ptr<Codec> codec;
  std::int64_t rows, cols;
  Bytes payload, scratch;
  Floats output = Floats(static_cast<std::size_t>(rows * cols));
};

Gradient random_matrix(std::int64_t rows, std::int64_t cols, DType dtype = DType::kFloat32) {
  return Gradient(random_floats(rows * cols, 9), dtype);
}

// Two factors' product.
Gradient matrix_of_rank(int rank, std::int64_t rows, std::int64_t cols) {
  const Doubles product =
      reference::product(random_floats(rows * rank, 1), random_floats(rank * cols, 2), rows, rank, cols);
  return Gradient(Floats(product.begin(), product.end()), DType::kFloat32);
}

Doubles doubles(const Floats& values) { return Doubles(values.begin(), values.end()); }

TEST(LowRankCodec, TheWorkedExamplesOfItsSpec) {
  const struct {
    const CodecRow& row;
    std::vector<std::uint8_t> payload;
    Floats decoded;
  } examples[] = {{acp_row(),
                   {1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0,    0,    0,    0,    2,    0,    0,    0,
                    0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0x0e, 0x0a, 0x64, 0x3e, 0xb4, 0x06, 0x98, 0x3e},
                   {0.0165309627f, 0.0419943258f, 0.218073606f, 0.0220412835f, 0.0559924357f, 0.290764809f}},
                  {power_row(),
                   {1,    0,    0, 0, 0,    0,    0, 0, 0x9a, 0x99, 0x19, 0x3f, 0xcd, 0xcc,
                    0x4c, 0x3f, 0, 0, 0xa0, 0x40, 0, 0, 0,    0,    0,    0,    0,    0},
                   {3, 0, 0, 4, 0, 0}}};
  for (const auto& [row, payload, decoded] : examples) {
    Link link(row, 1, 2, 3);
    link.encode(Gradient({3, 0, 0, 4, 0, 0}, DType::kFloat32));
    ASSERT_EQ(link.payload.size(), payload.size()) << row.name;
    EXPECT_EQ(std::memcmp(link.payload.data(), payload.data(), payload.size()), 0) << row.name;
    EXPECT_EQ(link.decoded(), decoded) << row.name;
  }
}

TEST(LowRankCodec, SizesAreThoseOfTheSpec) {
  struct Case {
    std::int64_t rows, cols;
    int rank;
    std::uint64_t acp, power, scratch;
  };
  for (const Case& c : {Case{10, 7, 4, 32 + 160, 8 + 160 + 112, 320 + 112 + 63},
                        {10, 7, 9, 32 + 280, 8 + 280 + 196, 560 + 196 + 63},  // rank 7
                        {3, 7, 4096, 32 + 36, 8 + 36 + 84, 72 + 84 + 63},     // rank 3
                        {1, 1, 1, 32 + 4, 8 + 8, 8 + 4 + 63},
                        {0, 7, 4, 0, 0, 0},
                        {7, 0, 4, 0, 0, 0}}) {
    const auto acp = codec_of(acp_row(), c.rank), power = codec_of(power_row(), c.rank);
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      EXPECT_EQ(acp->max_payload_bytes(c.rows, c.cols, dtype), c.acp);
      EXPECT_EQ(power->max_payload_bytes(c.rows, c.cols, dtype), c.power);
      EXPECT_EQ(acp->scratch_bytes(c.rows, c.cols, dtype), c.scratch);
      EXPECT_EQ(power->scratch_bytes(c.rows, c.cols, dtype), c.scratch);
    }
  }
}

TEST(LowRankCodec, ImpossibleShapesNeedImpossibleMemory) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  constexpr std::int64_t kHuge = std::int64_t{1} << 40, kLong = std::int64_t{1} << 61;
  const auto codec = codec_of(power_row(), 4096);
  EXPECT_EQ(codec->scratch_bytes(kHuge, kHuge, DType::kFloat16), kMost);
  EXPECT_EQ(codec->max_payload_bytes(kLong, 1, DType::kFloat16), kMost);
  EXPECT_EQ(codec->max_payload_bytes(-1, 5, DType::kFloat32), 0u);
  float element = 0;
  EXPECT_EQ(codec->decode({}, {&element, DType::kFloat16, kLong, 1}, {}).code(), StatusCode::kInvalidArgument);
}

TEST(LowRankCodec, AcpProjectsOnTheKeyedBasis) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Link link(acp_row(), 3, 20, 30);
    const Gradient input = random_matrix(20, 30, dtype);
    link.encode(input);
    Floats basis(3 * 30);
    random_basis(basis.data(), 30, 3, {.seed = 1, .step = 2, .tensor = 3});
    const Doubles factor = reference::product(input.values, reference::transposed(basis, 3, 30), 20, 30, 3);
    EXPECT_LE(relative_error(link.decoded(), reference::product(factor, basis, 20, 3, 30)), 1e-5);
  }
}

TEST(LowRankCodec, PowerIsExactUpToItsRank) {
  for (const int rank : {1, 3, 4}) {
    Link link(power_row(), 4, 20, 30);
    const Gradient input = matrix_of_rank(rank, 20, 30);
    link.encode(input);
    EXPECT_LE(relative_error(link.decoded(), doubles(input.values)), 1e-5) << "rank " << rank;
  }
}

TEST(LowRankCodec, FullRankIsExact) {
  const struct {
    const CodecRow& row;
    std::int64_t rows, cols;
  } cases[] = {{acp_row(), 9, 5}, {power_row(), 9, 5}, {power_row(), 5, 9}, {acp_row(), 1, 1}, {power_row(), 1, 1}};
  for (const auto& [row, rows, cols] : cases) {
    Link link(row, 4096, rows, cols);
    const Gradient input = random_matrix(rows, cols);
    link.encode(input);
    EXPECT_LE(relative_error(link.decoded(), doubles(input.values)), 1e-5) << row.name << rows << "x" << cols;
  }
}

TEST(LowRankCodec, PowerIsNearerThanAcp) {
  Gradient input = matrix_of_rank(4, 40, 60);
  const Floats noise = random_floats(40 * 60, 5);
  for (std::size_t i = 0; i < noise.size(); ++i) input.set(i, input.values[i] + 0.1f * noise[i]);
  Link acp(acp_row(), 4, 40, 60), power(power_row(), 4, 40, 60);
  acp.encode(input);
  power.encode(input);
  EXPECT_LE(relative_error(power.decoded(), doubles(input.values)), 0.3);
  EXPECT_GE(relative_error(acp.decoded(), doubles(input.values)), 0.8) << "a random basis without warm start";
}

TEST(LowRankCodec, SumOfAcpFactorsDecodesToTheSum) {
  constexpr std::size_t kHeaderBytes = 32;
  Link a(acp_row(), 2, 6, 8), b(acp_row(), 2, 6, 8);
  a.encode(Gradient(random_floats(48, 1), DType::kFloat32));
  b.encode(Gradient(random_floats(48, 2), DType::kFloat32));
  Doubles expected = doubles(a.decoded());
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += b.decoded()[i];
  for (std::size_t at = kHeaderBytes; at < a.payload.size(); at += sizeof(float)) {
    float x, y;
    std::memcpy(&x, a.payload.data() + at, sizeof(x));
    std::memcpy(&y, b.payload.data() + at, sizeof(y));
    x += y;
    std::memcpy(a.payload.data() + at, &x, sizeof(x));
  }
  EXPECT_LE(relative_error(a.decoded(), expected), 1e-6);
}

TEST(LowRankCodec, EveryPartOfTheContextIsAKey) {
  Link link(acp_row(), 2, 6, 8);
  const Gradient input = random_matrix(6, 8);
  link.encode(input);
  const Bytes first = link.payload;
  for (const EncodeContext& other : {EncodeContext{9, 2, 3}, EncodeContext{1, 9, 3}, EncodeContext{1, 2, 9}}) {
    link.encode(input, other);
    EXPECT_FALSE(std::equal(first.begin() + 32, first.end(), link.payload.begin() + 32));
  }
  link.encode(input);
  EXPECT_EQ(link.payload, first);
}

TEST(LowRankCodec, NonFiniteInputDecodesToNonFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const CodecRow* row : {&acp_row(), &power_row()}) {
    for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(), 2e38f}) {
      Link link(*row, 2, 6, 8);
      Gradient input = random_matrix(6, 8);
      input.set(29, bad);
      link.encode(input);
      EXPECT_FALSE(std::all_of(link.decoded().begin(), link.decoded().end(), [](float f) { return std::isfinite(f); }))
          << row->name << " of " << bad;
    }
  }
}

TEST(LowRankCodec, ForeignPayloadsAreRefused) {
  for (const CodecRow* row : {&acp_row(), &power_row()}) {
    Link link(*row, 2, 6, 8);
    link.encode(random_matrix(6, 8));
    const auto with_byte = [&](std::size_t at, int value) {
      Bytes damaged = link.payload;
      damaged[at] = static_cast<std::byte>(value);
      return damaged;
    };
    Bytes cut = link.payload, longer = link.payload;
    cut.pop_back();
    longer.push_back(std::byte{0});
    const struct {
      const char* what;
      Bytes payload;
    } cases[] = {{"rank 3", with_byte(0, 3)},
                 {"rank 0", with_byte(0, 0)},
                 {"a huge rank", with_byte(3, 0xff)},
                 {"second word", with_byte(7, 1)},
                 {"cut", cut},
                 {"longer", longer},
                 {"empty", {}},
                 {"header only", Bytes(link.payload.begin(), link.payload.begin() + 8)}};
    for (const auto& [what, payload] : cases) {
      EXPECT_EQ(link.decode(payload).code(), StatusCode::kCorruptData) << row->name << ": " << what;
    }
    EXPECT_EQ(link.decode(with_byte(0, 3)).message(), link.codec->spec() +
                                                          ": decode of 6 x 8: the payload begins with rank 3 and 0, "
                                                          "expected 2 and 0");
  }
}

TEST(LowRankCodec, ParametersAndRows) {
  EXPECT_EQ(acp_row().wire_id, 3);
  EXPECT_EQ(power_row().wire_id, 4);
  EXPECT_EQ(acp_row().traits.rounds, 1);
  EXPECT_EQ(power_row().traits.rounds, 2);
  for (const CodecRow* row : {&acp_row(), &power_row()}) {
    EXPECT_TRUE(row->traits.linear && row->traits.needs_residual && !row->traits.lossless);
    EXPECT_EQ(codec_of(*row, 7)->spec(), std::string(row->name) + "(rank=7)");
    const ParameterValues defaults = ParameterValues::read(row->name, {}, row->parameters).value();
    EXPECT_EQ(row->make(defaults).value()->spec(), std::string(row->name) + "(rank=4)");
    for (const char* rank : {"0", "4097", "-1", "1.5", "x"}) {
      EXPECT_FALSE(ParameterValues::read(row->name, {{"rank", rank}}, row->parameters).ok()) << rank;
    }
  }
}

TEST(LowRankCodec, BytesAreNoGradient) {
  Link link(acp_row(), 2, 6, 8);
  const std::vector<std::uint8_t> bytes(48);
  const auto encoded = link.codec->encode({bytes.data(), DType::kUint8, 6, 8}, kContext, link.payload, link.scratch);
  EXPECT_EQ(encoded.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace cortado

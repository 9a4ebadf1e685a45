// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "codec/sparse.h"
#include "codec/stage.h"
#include "codec/topk/topk_reference.h"
#include "core/format.h"
#include "core/sanitized.h"
#include "core/simd_target.h"

namespace cortado::topk_test {
namespace {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ConstTensorView view_of(const Floats& values) {
  return {values.data(), DType::kFloat32, 1, static_cast<std::int64_t>(values.size())};
}

Bytes encode(const Codec& codec, ConstTensorView input, std::uint64_t step = 0) {
  Bytes payload(codec.max_payload_bytes(input.rows, input.cols, input.dtype));
  Bytes scratch(codec.scratch_bytes(input.rows, input.cols, input.dtype));
  payload.resize(codec.encode(input, {.seed = 1, .step = step, .tensor = 2}, payload, scratch).value());
  return payload;
}

Floats decode(const Codec& codec, const Bytes& payload, std::size_t elems) {
  Floats output(elems, -1.0f);
  const TensorView view{output.data(), DType::kFloat32, 1, static_cast<std::int64_t>(elems)};
  Bytes scratch(codec.scratch_bytes(1, view.cols, DType::kFloat32));
  const Status status = codec.decode(payload, view, scratch);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return output;
}

std::int64_t kept_in(const Bytes& payload) {
  std::int64_t kept;
  std::memcpy(&kept, payload.data() + 1, sizeof(kept));
  return kept;
}

struct Distribution {
  const char* name;
  Floats (*make)(std::int64_t elems);
};

Floats normal(std::int64_t elems) {
  Floats values(static_cast<std::size_t>(elems));
  philox_fill_normal(5, 0, 0, values.data(), elems);
  return values;
}

template <class F>
Floats changed_normal(std::int64_t elems, const F& change) {
  Floats values = normal(elems);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = change(values[i], i);
  return values;
}

const Distribution kDistributions[] = {
    {"normal", normal},
    {"heavy-tailed",
     [](std::int64_t n) { return changed_normal(n, [](float x, std::size_t) { return std::pow(x, 7.0f); }); }},
    {"constant", [](std::int64_t n) { return Floats(static_cast<std::size_t>(n), -2.5f); }},
    {"zeros", [](std::int64_t n) { return Floats(static_cast<std::size_t>(n), 0.0f); }},
    {"one in 1000 not zero",
     [](std::int64_t n) { return changed_normal(n, [](float x, std::size_t i) { return i % 1000 == 1 ? x : 0.0f; }); }},
    {"one in 30 not zero",
     [](std::int64_t n) { return changed_normal(n, [](float x, std::size_t i) { return i % 30 == 7 ? x : -0.0f; }); }},
    {"few levels",
     [](std::int64_t n) { return changed_normal(n, [](float x, std::size_t) { return std::round(2 * x); }); }},
    {"ascending",
     [](std::int64_t n) { return changed_normal(n, [](float, std::size_t i) { return static_cast<float>(i); }); }},
    {"descending",
     [](std::int64_t n) {
       return changed_normal(n, [n](float, std::size_t i) { return static_cast<float>(n) - static_cast<float>(i); });
     }},
    {"large in one place",
     [](std::int64_t n) {
       return changed_normal(
           n, [n](float x, std::size_t i) { return static_cast<std::int64_t>(i) / 128 == n / 300 ? 1e6f * x : x; });
     }},
    {"large where a sample of every 256th looks",
     [](std::int64_t n) {
       return changed_normal(n, [](float x, std::size_t i) { return i % 256 < 8 ? 100 + x : x; });
     }},
    {"with Inf, NaN and denormals",
     [](std::int64_t n) {
       return changed_normal(n, [](float x, std::size_t i) {
         if (i % 997 == 3) return i % 2 == 0 ? kInfinity : -kInfinity;
         if (i % 1501 == 4) return std::bit_cast<float>(0x7fc00000u | static_cast<std::uint32_t>(i % 7));
         return i % 5 == 0 ? x * 1e-42f : x;
       });
     }},
};

// Sizes above this take most of the time of a test. Under a sanitizer one distribution goes through the paths of those.
bool left_to_release(const Distribution& distribution, std::int64_t elems) {
  return kSanitized && elems > 20000 && &distribution != &kDistributions[0];
}

TEST(Topk, TheWorkedExampleOfItsSpec) {
  const Floats values = {0.5f, -3.0f, 0.25f, 2.0f, 1.0f, -1.0f, 0.0f, -0.125f, 1.5f, -2.0f};
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.3)").value();
  const Bytes payload = encode(*codec, view_of(values));
  const int expected[] = {0x01, 0x03, 0, 0, 0, 0, 0, 0, 0, 0x07, 0x13, 0, 0, 0x40, 0xc0, 0, 0, 0, 0x40, 0, 0, 0, 0xc0};
  std::string got, wanted;
  for (const std::byte b : payload) got += std::to_string(std::to_integer<int>(b)) + " ";
  for (const int b : expected) wanted += std::to_string(b) + " ";
  EXPECT_EQ(got, wanted);
  EXPECT_EQ(decode(*codec, payload, values.size()), (Floats{0, -3, 0, 2, 0, 0, 0, 0, 0, -2}));
  std::string explained;
  for (const PayloadSection& section : codec->explain(payload, 1, 10, DType::kFloat32)) {
    explained += std::to_string(section.bytes) + " " + section.name + ": " + section.meaning + "\n";
  }
  EXPECT_EQ(explained,
            "1 index kind: delta\n8 kept: 3 of 10 values\n1 gaps, lower bits: 1 bits each\n"
            "1 gaps, upper parts: in unary; positions 1, 3, 9\n12 values: -3, 2, -2\n");
}

// The whole payload, on all instruction sets, for sizes on both sides of every change of method.
TEST(Topk, ExactIsTheReference) {
  for (const Distribution& distribution : kDistributions) {
    for (const std::int64_t elems : {1, 63, 1024, 1025, 4097, 20000, 300001}) {
      if (left_to_release(distribution, elems)) continue;
      const Floats values = distribution.make(elems);
      for (const double density : {1e-6, 0.001, 0.01, 0.3, 1.0}) {
        SCOPED_TRACE(std::string(distribution.name) + ", " + std::to_string(elems) + " at " + number_text(density));
        const std::int64_t k = kept_elems(density, elems);
        const std::vector<std::int64_t> positions = reference::largest(values, 0, elems, k);
        Bytes expected = reference::index_section(IndexKind::kSmaller, positions, elems);
        for (const std::int64_t position : positions) {
          const auto* value = reinterpret_cast<const std::byte*>(&values[static_cast<std::size_t>(position)]);
          expected.insert(expected.end(), value, value + sizeof(float));
        }
        const std::unique_ptr<Codec> codec = make_codec("topk(density=" + number_text(density) + ")").value();
        for (const std::int64_t target : simd_targets()) {
          const ForcedSimdTarget forced(target);
          ASSERT_TRUE(encode(*codec, view_of(values)) == expected) << simd_target_name(target);
        }
        const Floats output = decode(*codec, expected, values.size());
        Floats sparse(values.size(), 0.0f);
        for (const std::int64_t i : positions)
          sparse[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>(i)];
        ASSERT_EQ(std::memcmp(output.data(), sparse.data(), sparse.size() * sizeof(float)), 0);
      }
    }
  }
}

// More values than are searched in cache, of which the sample says nothing: three histograms.
TEST(Topk, ExactIsTheReferenceWhereHistogramsAreNeeded) {
  constexpr std::int64_t kElems = (std::int64_t{1} << 21) + 12345;
  // Every 40th magnitude is large in a way that few samples are needed to miss or to find too often.
  const Floats values =
      changed_normal(kElems, [](float x, std::size_t i) { return i / 50000 % 40 == 7 ? x * 1000 : std::round(x); });
  for (const double density : {0.02, 0.025, 0.1, 0.6}) {
    const std::int64_t k = kept_elems(density, kElems);
    const std::unique_ptr<Codec> codec = make_codec("topk(index=bitmap, density=" + number_text(density) + ")").value();
    const Bytes expected =
        reference::index_section(IndexKind::kBitmap, reference::largest(values, 0, kElems, k), kElems);
    const Bytes payload = encode(*codec, view_of(values));
    EXPECT_EQ(std::memcmp(payload.data(), expected.data(), expected.size()), 0) << density;
  }
}

TEST(Topk, BlocksKeepTheirOwn) {
  for (const Distribution& distribution : kDistributions) {
    for (const std::int64_t block : {64, 1000, 5000}) {
      const Floats values = distribution.make(23456);
      const auto elems = static_cast<std::int64_t>(values.size());
      std::vector<std::int64_t> positions;
      for (std::int64_t first = 0; first < elems; first += block) {
        const std::int64_t count = std::min(block, elems - first);
        const auto part = reference::largest(values, first, count, kept_elems(0.02, count));
        positions.insert(positions.end(), part.begin(), part.end());
      }
      const Bytes expected = reference::index_section(IndexKind::kSmaller, positions, elems);
      const std::unique_ptr<Codec> codec =
          make_codec("topk(density=0.02, block=" + std::to_string(block) + ")").value();
      const Bytes payload = encode(*codec, view_of(values));
      ASSERT_EQ(payload.size(), expected.size() + 4 * positions.size()) << distribution.name << " " << block;
      EXPECT_EQ(std::memcmp(payload.data(), expected.data(), expected.size()), 0) << distribution.name << " " << block;
    }
  }
}

TEST(Topk, SixteenBitInputsAreChosenByTheSameRule) {
  Floats values = normal(5000);
  std::vector<std::uint16_t> narrow(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    narrow[i] = float_to_bf16(values[i]);
    values[i] = bf16_to_float(narrow[i]);  // many equal ones
  }
  for (const char* spec : {"topk", "topk(select=sampled)", "topk(block=700)", "topk(density=0.4)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    EXPECT_EQ(encode(*codec, {narrow.data(), DType::kBFloat16, 1, 5000}), encode(*codec, view_of(values))) << spec;
  }
}

TEST(Topk, SampledKeepsTheLargestAndAtMostAQuarterMore) {
  for (const Distribution& distribution : kDistributions) {
    for (const std::int64_t elems : {100, 1025, 20000, 300001}) {
      if (left_to_release(distribution, elems)) continue;
      const Floats values = distribution.make(elems);
      for (const double density : {0.001, 0.01, 0.3}) {
        const std::unique_ptr<Codec> codec =
            make_codec("topk(select=sampled, index=bitmap, density=" + number_text(density) + ")").value();
        const std::int64_t least = kept_elems(density, elems);
        for (std::uint64_t step = 0; step < 5; ++step) {
          SCOPED_TRACE(std::string(distribution.name) + ", " + std::to_string(elems) + " at " + number_text(density));
          const Bytes payload = encode(*codec, view_of(values), step);
          const std::int64_t kept = kept_in(payload);
          EXPECT_GE(kept, least);
          EXPECT_LE(kept, least + least / 4);
          EXPECT_LE(kept, codec->sparsifier()->max_kept(1, elems));
          const Bytes expected =
              reference::index_section(IndexKind::kBitmap, reference::largest(values, 0, elems, kept), elems);
          EXPECT_EQ(std::memcmp(payload.data(), expected.data(), expected.size()), 0);
        }
      }
    }
  }
}

// The sample is good enough that one pass is enough: mostly more than k are kept, and not many more.
TEST(Topk, SampledThresholdsAreNear) {
  const Floats values = normal(1 << 20);
  const std::unique_ptr<Codec> codec = make_codec("topk(select=sampled)").value();
  double sum = 0;
  for (std::uint64_t step = 0; step < 20; ++step)
    sum += static_cast<double>(kept_in(encode(*codec, view_of(values), step)));
  const double mean_excess = sum / 20 / static_cast<double>(kept_elems(0.01, 1 << 20));
  EXPECT_GT(mean_excess, 1.05);
  EXPECT_LT(mean_excess, 1.25);
}

TEST(Topk, ContractsByAtLeastTheDensity) {
  for (const Distribution& distribution : kDistributions) {
    const Floats values = distribution.make(30000);
    double sum = 0;
    for (const float x : values) sum += static_cast<double>(x) * x;
    if (!std::isfinite(sum)) continue;
    for (const char* select : {"exact", "sampled"}) {
      const std::unique_ptr<Codec> codec = make_codec(std::string("topk(density=0.05, select=") + select + ")").value();
      const Floats output = decode(*codec, encode(*codec, view_of(values)), values.size());
      double lost = 0;
      for (std::size_t i = 0; i < values.size(); ++i) lost += std::pow(static_cast<double>(values[i]) - output[i], 2);
      EXPECT_LE(lost, (1 - 0.05) * sum * (1 + 1e-12)) << distribution.name << " " << select;
    }
  }
}

TEST(Topk, WhatIsNotFiniteIsAmongTheKept) {
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const char* spec : {"topk(density=1e-6)", "topk(density=1e-6, select=sampled)", "topk(block=128)",
                             "topk(density=1e-6, values=fp16)"}) {
      Floats values = normal(70000);
      values[54321] = bad;
      const std::unique_ptr<Codec> codec = make_codec(spec).value();
      EXPECT_FALSE(std::isfinite(decode(*codec, encode(*codec, view_of(values)), values.size())[54321])) << spec;
    }
  }
}

TEST(Topk, Fp16ValuesAreThoseOfCast) {
  const Floats values = {70000.0f, 0.1f, 0.0f, -1.0f};
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.75, values=fp16)").value();
  EXPECT_EQ(decode(*codec, encode(*codec, view_of(values)), 4), (Floats{kInfinity, 0.0999755859375f, 0, -1}));
}

TEST(Topk, KeptElemsAreRoundedUp) {
  EXPECT_EQ(kept_elems(0.01, 0), 0);
  EXPECT_EQ(kept_elems(0.01, 1), 1);
  EXPECT_EQ(kept_elems(0.01, 100), 1);
  EXPECT_EQ(kept_elems(0.01, 101), 2);
  EXPECT_EQ(kept_elems(0.07, 100), 7);  // 0.07 * 100 is 7.000000000000001
  EXPECT_EQ(kept_elems(0.1, 30), 3);
  EXPECT_EQ(kept_elems(1.0, (std::int64_t{1} << 31) + 1), (std::int64_t{1} << 31) + 1);
  EXPECT_EQ(kept_elems(0.01, (std::int64_t{1} << 31) + 1), 21474837);
}

TEST(Topk, AsAStageItGivesTheValuesOfItsPayload) {
  const Floats values = normal(10000);
  for (const char* spec : {"topk", "topk(select=sampled, density=0.2)", "topk(block=1000)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const Sparsifier* stage = codec->sparsifier();
    ASSERT_NE(stage, nullptr);
    EXPECT_FALSE(stage->is_shared());
    const Bytes payload = encode(*codec, view_of(values), 7);
    Floats kept(static_cast<std::size_t>(stage->max_kept(1, 10000)));
    Bytes index(stage->max_index_bytes(1, 10000));
    Bytes scratch(stage->select_scratch_bytes(1, 10000, DType::kFloat32));
    const EncodeContext context{.seed = 1, .step = 7, .tensor = 2};
    const Selection selection = stage->select(view_of(values), context, kept, index, scratch).value();
    kept.resize(static_cast<std::size_t>(selection.kept));
    index.resize(selection.index_bytes);
    ASSERT_EQ(payload.size(), index.size() + kept.size() * sizeof(float)) << spec;
    EXPECT_EQ(std::memcmp(payload.data(), index.data(), index.size()), 0) << spec;
    EXPECT_EQ(std::memcmp(payload.data() + index.size(), kept.data(), kept.size() * sizeof(float)), 0) << spec;
    EXPECT_EQ(stage->check_index(index, 1, 10000).value(), selection.kept) << spec;
    Floats output(values.size(), -1.0f);
    const TensorView view{output.data(), DType::kFloat32, 1, 10000};
    EXPECT_TRUE(stage->scatter(index, kept, view, {}).ok());
    EXPECT_EQ(output, decode(*codec, payload, values.size())) << spec;
    EXPECT_EQ(stage->check_index(std::span(index).first(5), 1, 10000).status().code(), StatusCode::kCorruptData);
    EXPECT_EQ(stage->select(view_of(values), context, std::span(kept).first(1), index, scratch).status().code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(make_codec("topk(values=fp16)").value()->sparsifier(), nullptr);
}

TEST(Topk, ErrorsSayWhatWasExpected) {
  const std::unique_ptr<Codec> codec = make_codec("topk(density=0.02)").value();
  const Floats values = normal(100);
  Bytes payload = encode(*codec, view_of(values)), scratch(codec->scratch_bytes(1, 100, DType::kFloat32));
  Floats output(100);
  const auto error = [&](const Bytes& bytes) {
    return codec->decode(bytes, {output.data(), DType::kFloat32, 4, 25}, scratch).to_string();
  };
  const std::string place =
      "corrupt data: topk(density=0.02, select=exact, block=tensor, index=auto, values=fp32): decode of 4 x 25: ";
  EXPECT_EQ(error({}), place + "0 bytes, expected at least the 9 of the index header");
  EXPECT_EQ(error(Bytes(payload.begin(), payload.begin() + 12)),
            place + "the payload has 12 bytes, 2 values alone have 8");
  payload[1] = std::byte{3};
  EXPECT_EQ(error(payload), place + "3 kept values, expected 2 to 2");
  EXPECT_EQ(make_codec("topk(density=0)").status().message(),
            "topk(density=0): density must be a number from 1e-06 to 1, got \"0\"");
}

// Found in review: a payload with an index of nothing was read at its last byte.
TEST(Topk, APayloadOfAnEmptyTensorIsNotRead) {
  std::vector<std::byte> payload(9);
  payload[0] = std::byte{1};
  const std::unique_ptr<Codec> codec = make_codec("topk").value();
  const std::vector<PayloadSection> sections = codec->explain(payload, 0, 0, DType::kFloat32);
  ASSERT_EQ(sections.size(), 1u);
  EXPECT_EQ(sections[0].meaning, "an empty tensor has none");
}

}  // namespace
}  // namespace cortado::topk_test

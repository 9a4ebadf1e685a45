// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The composition itself, over stages so simple that every byte can be written down. Compositions of real codecs are
// in the conformance suite.
#include "codec/composition/composition.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "codec/binding.h"
#include "codec/stage.h"
#include "core/check.h"

namespace cortado::composition_test {
namespace {

using Bytes = std::vector<std::uint8_t>;

// The parts of Codec that a stage is never asked for.
class FakeCodec : public Codec {
 public:
  FakeCodec(const char* name, std::uint8_t wire_id, CodecTraits traits) {
    row_.name = name;
    row_.wire_id = wire_id;
    row_.version = 7;
    row_.traits = traits;
  }
  std::string spec() const override { return row_.name; }
  const CodecRow& row() const override { return row_; }
  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    return static_cast<std::uint64_t>(rows * cols);
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }
  Result<std::uint64_t> encode(ConstTensorView, const EncodeContext&, std::span<std::byte>,
                               std::span<std::byte>) const override {
    return make_error(StatusCode::kInternal, "not as a stage");
  }
  Status decode(std::span<const std::byte>, TensorView, std::span<std::byte>) const override {
    return make_error(StatusCode::kInternal, "not as a stage");
  }
  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t, std::int64_t,
                                      DType) const override {
    return section_of(payload, "payload");
  }

 protected:
  static std::vector<PayloadSection> section_of(std::span<const std::byte> bytes, const char* name) {
    if (bytes.empty()) return {};
    return {{.offset = 0, .bytes = bytes.size(), .name = name, .meaning = "all of it"}};
  }

 private:
  CodecRow row_ = {};
};

// Keeps magnitudes of at least `threshold`; the index is a byte a value.
class Threshold final : public FakeCodec, public Sparsifier {
 public:
  explicit Threshold(float threshold)
      : FakeCodec("threshold", 101, {.unbiased = true, .sparse = true, .needs_residual = true}),
        threshold_(threshold) {}

  const Sparsifier* sparsifier() const override { return this; }
  std::int64_t max_kept(std::int64_t rows, std::int64_t cols) const override { return rows * cols; }
  std::uint64_t max_index_bytes(std::int64_t rows, std::int64_t cols) const override {
    return static_cast<std::uint64_t>(rows * cols);
  }
  std::uint64_t select_scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 3; }
  bool is_shared() const override { return false; }

  Result<Selection> select(ConstTensorView input, const EncodeContext& context, std::span<float> values,
                           std::span<std::byte> index, std::span<std::byte> scratch) const override {
    EXPECT_GE(scratch.size(), 3u);
    EXPECT_EQ(values.size(), static_cast<std::size_t>(input.elems()));
    seed = context.seed;
    Selection selection;
    for (std::int64_t i = 0; i < input.elems(); ++i) {
      const float value = static_cast<const float*>(input.data)[i];
      const bool is_kept = std::fabs(value) >= threshold_;
      index[static_cast<std::size_t>(i)] = std::byte{is_kept};
      if (is_kept) values[static_cast<std::size_t>(selection.kept++)] = value;
    }
    selection.index_bytes = static_cast<std::uint64_t>(input.elems());
    return selection;
  }

  Result<std::int64_t> check_index(std::span<const std::byte> index, std::int64_t rows,
                                   std::int64_t cols) const override {
    if (static_cast<std::int64_t>(index.size()) != rows * cols)
      return make_error(StatusCode::kCorruptData, "bad index");
    std::int64_t kept = 0;
    for (const std::byte b : index) kept += std::to_integer<int>(b);
    return kept;
  }

  std::vector<PayloadSection> explain_index(std::span<const std::byte> index, std::int64_t,
                                            std::int64_t) const override {
    return section_of(index, "places");
  }

  Status scatter(std::span<const std::byte> index, std::span<const float> values, TensorView output,
                 std::span<std::byte>) const override {
    std::size_t next = 0;
    for (std::size_t i = 0; i < index.size(); ++i) {
      static_cast<float*>(output.data)[i] = index[i] == std::byte{0} ? 0.0f : values[next++];
    }
    return {};
  }

  mutable std::uint64_t seed = 0;  // of the last call

 private:
  float threshold_;
};

// Codes are 128 + the value; the side section is one byte.
class Whole final : public FakeCodec, public Quantiser {
 public:
  Whole() : FakeCodec("whole", 102, {.unbiased = true, .divisible = true}) {}

  const Quantiser* quantiser() const override { return this; }
  int code_bits() const override { return 8; }
  std::uint64_t max_side_bytes(std::int64_t, std::int64_t) const override { return 1; }
  std::uint64_t quantise_scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 5; }

  Result<std::uint64_t> quantise(ConstTensorView input, const EncodeContext& context, std::span<std::uint8_t> codes,
                                 std::span<std::byte> side, std::span<std::byte> scratch) const override {
    EXPECT_GE(scratch.size(), 5u);
    EXPECT_EQ(codes.size(), static_cast<std::size_t>(input.elems()));
    seed = context.seed;
    side[0] = std::byte{0x51};
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<std::uint8_t>(128.0f + static_cast<const float*>(input.data)[i]);
    }
    return std::uint64_t{1};
  }

  Status dequantise(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView output,
                    std::span<std::byte>) const override {
    if (side.size() != 1 || side[0] != std::byte{0x51}) return make_error(StatusCode::kCorruptData, "bad side");
    for (std::size_t i = 0; i < codes.size(); ++i) static_cast<float*>(output.data)[i] = codes[i] - 128.0f;
    return {};
  }

  std::vector<PayloadSection> explain_side(std::span<const std::byte> side, std::int64_t, std::int64_t) const override {
    return section_of(side, "mark");
  }

  mutable std::uint64_t seed = 0;
};

// Stores codes as they are, backwards, under the name that makes it a coder.
class Backwards final : public FakeCodec {
 public:
  Backwards() : FakeCodec("rans", 103, {.lossless = true, .divisible = true}) {}

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte>) const override {
    const auto* codes = static_cast<const std::byte*>(input.data);
    std::reverse_copy(codes, codes + input.elems(), payload.begin());
    return static_cast<std::uint64_t>(input.elems());
  }
  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte>) const override {
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, static_cast<std::uint64_t>(output.elems())));
    std::reverse_copy(payload.begin(), payload.end(), static_cast<std::byte*>(output.data));
    return {};
  }
};

template <typename... Stages>
Result<std::unique_ptr<Codec>> compose(std::unique_ptr<Stages>... stages) {
  std::vector<std::unique_ptr<Codec>> list;
  (list.push_back(std::move(stages)), ...);
  return make_composition(std::move(list));
}

std::unique_ptr<Codec> named(const char* spec) { return make_codec(spec).value(); }

const std::vector<float> kValues = {0.5f, -3, 2, 0, 7, -1};

Bytes encode(const Codec& codec, const std::vector<float>& values, const EncodeContext& context = {}) {
  const auto cols = static_cast<std::int64_t>(values.size());
  Bytes payload(codec.max_payload_bytes(1, cols, DType::kFloat32));
  std::vector<std::byte> scratch(codec.scratch_bytes(1, cols, DType::kFloat32));
  const Result<std::uint64_t> bytes = codec.encode({values.data(), DType::kFloat32, 1, cols}, context,
                                                   std::as_writable_bytes(std::span(payload)), scratch);
  EXPECT_TRUE(bytes.ok()) << bytes.status().to_string();
  payload.resize(bytes.value());
  return payload;
}

Status decode(const Codec& codec, const Bytes& payload, std::vector<float>* values) {
  const auto cols = static_cast<std::int64_t>(values->size());
  std::vector<std::byte> scratch(codec.scratch_bytes(1, cols, DType::kFloat32));
  return codec.decode(std::as_bytes(std::span(payload)), {values->data(), DType::kFloat32, 1, cols}, scratch);
}

std::string decode_error(const Codec& codec, const Bytes& payload) {
  std::vector<float> values(kValues.size());
  return decode(codec, payload, &values).to_string();
}

// The worked example of spec.md.
TEST(Composition, LaysItsSectionsOut) {
  const auto codec = compose(std::make_unique<Threshold>(1), std::make_unique<Threshold>(2), std::make_unique<Whole>(),
                             std::make_unique<Backwards>())
                         .value();
  EXPECT_EQ(codec->spec(), "threshold | threshold | whole | rans");
  const Bytes expected = {101,  7,   101, 7, 102, 7, 103, 7,  // stages: wire id, payload version
                          6,    0,   0,   0, 0,   0, 0,   0,  // first index section
                          4,    0,   0,   0, 0,   0, 0,   0,  // second
                          1,    0,   0,   0, 0,   0, 0,   0,  // side section
                          0,    1,   1,   0, 1,   1,          // kept -3 2 7 -1
                          1,    1,   1,   0,                  // kept -3 2 7
                          0x51,                               //
                          135,  130, 125};
  EXPECT_EQ(encode(*codec, kValues), expected);
  std::vector<float> values(kValues.size());
  ASSERT_TRUE(decode(*codec, expected, &values).ok());
  EXPECT_EQ(values, (std::vector<float>{0, -3, 2, 0, 7, 0}));
}

TEST(Composition, ValuesWithoutACodecOfTheirOwnTravelAsFloat32) {
  const auto codec = compose(std::make_unique<Threshold>(1), std::make_unique<Threshold>(5)).value();
  const Bytes payload = encode(*codec, kValues);
  ASSERT_EQ(payload.size(), 4u + 16 + 6 + 4 + 4);
  float value;
  std::memcpy(&value, payload.data() + payload.size() - 4, 4);
  EXPECT_EQ(value, 7);
  std::vector<float> values(kValues.size());
  ASSERT_TRUE(decode(*codec, payload, &values).ok());
  EXPECT_EQ(values, (std::vector<float>{0, 0, 0, 0, 7, 0}));
}

TEST(Composition, ATensorOfWhichNothingIsKeptIsZero) {
  const auto codec = compose(std::make_unique<Threshold>(10), std::make_unique<Threshold>(1), std::make_unique<Whole>(),
                             std::make_unique<Backwards>())
                         .value();
  const Bytes payload = encode(*codec, kValues);
  EXPECT_EQ(payload.size(), 8u + 24 + 6);
  std::vector<float> values(kValues.size(), 1);
  ASSERT_TRUE(decode(*codec, payload, &values).ok());
  EXPECT_EQ(values, std::vector<float>(kValues.size(), 0));
}

TEST(Composition, StagesDrawFromStreamsOfTheirOwn) {
  auto first = std::make_unique<Threshold>(1), second = std::make_unique<Threshold>(2);
  auto third = std::make_unique<Whole>();
  const auto &a = *first, &b = *second;
  const auto& c = *third;
  const auto codec = compose(std::move(first), std::move(second), std::move(third), std::make_unique<Backwards>());
  encode(*codec.value(), kValues, {.seed = 5, .step = 1, .tensor = 2});
  EXPECT_EQ(a.seed, 5u);
  EXPECT_EQ(b.seed, 5u + 0x9e3779b97f4a7c15u);
  EXPECT_EQ(c.seed, 5u + 2 * 0x9e3779b97f4a7c15u);
}

TEST(Composition, TraitsAreThoseOfItsStages) {
  const auto whole = compose(std::make_unique<Whole>(), std::make_unique<Backwards>()).value();
  const CodecTraits& coded = whole->row().traits;
  EXPECT_TRUE(coded.unbiased && coded.divisible);
  EXPECT_FALSE(coded.lossless || coded.sparse || coded.linear || coded.needs_residual);
  const auto pair = compose(std::make_unique<Threshold>(1), named("cast")).value();
  const CodecTraits& sparse = pair->row().traits;
  EXPECT_TRUE(sparse.sparse && sparse.needs_residual);
  EXPECT_FALSE(sparse.unbiased || sparse.divisible || sparse.lossless);
  EXPECT_EQ(sparse.rounds, 1);
  EXPECT_EQ(pair->row().wire_id, 13);
}

TEST(Composition, IllegalPairsAreRefusedByName) {
  const auto error = [](auto... stages) { return compose(std::move(stages)...).status().to_string(); };
  const auto threshold = [] { return std::make_unique<Threshold>(1); };
  const auto whole = [] { return std::make_unique<Whole>(); };
  const auto rans = [] { return std::make_unique<Backwards>(); };
  EXPECT_EQ(error(rans(), threshold()), "invalid argument: rans | threshold: rans codes integers and must come last");
  EXPECT_EQ(error(rans(), rans()), "invalid argument: rans | rans: rans codes integers and must come last");
  EXPECT_EQ(error(threshold(), named("acp")), "invalid argument: threshold | acp: low-rank codecs stand alone");
  EXPECT_EQ(error(named("power"), threshold()), "invalid argument: power | threshold: low-rank codecs stand alone");
  EXPECT_EQ(error(whole(), threshold()), "invalid argument: whole | threshold: only rans may follow a quantiser");
  EXPECT_EQ(
      error(threshold(), named("cast"), rans()),
      "invalid argument: cast | rans: nothing may follow a codec that, as set, is neither sparsifier nor quantiser");
  EXPECT_EQ(error(threshold(), rans()),
            "invalid argument: threshold | rans: rans codes the integers of a quantiser; behind a sparsifier may come "
            "sparsifiers, quantisers or other codecs of floats, such as float_rans");
  std::vector<std::unique_ptr<Codec>> nine;
  while (nine.size() <= kMaxStages) nine.push_back(threshold());
  EXPECT_EQ(make_composition(std::move(nine)).status().to_string(),
            "invalid argument: 9 codecs in a composition, expected at most 8");
}

TEST(Composition, ACoderThatIsAParameterIsAStage) {
  const auto full = [](const char* spec) { return make_codec(spec).value()->spec(); };
  EXPECT_EQ(full("quant(bits=3, coder=rans)"), full("quant(bits=3) | rans"));
  EXPECT_EQ(full("topk | quant(coder=rans)"), full("topk | quant | rans"));
  EXPECT_EQ(make_codec("quant(coder=rans) | rans").status().message(),
            "rans | rans: rans codes integers and must come last");
}

TEST(Composition, SectionsAreChecked) {
  const auto codec = compose(std::make_unique<Threshold>(1), std::make_unique<Whole>(), std::make_unique<Backwards>());
  const Codec& whole = *codec.value();
  const Bytes good = encode(whole, kValues);
  const std::string where = "corrupt data: threshold | whole | rans: decode: ";
  const auto damaged = [&](std::size_t at, std::uint8_t byte) {
    Bytes bytes = good;
    bytes[at] = byte;
    return decode_error(whole, bytes);
  };
  EXPECT_EQ(decode_error(whole, {}), where + "the payload has 0 bytes, expected at least 22");
  EXPECT_EQ(damaged(2, 8), where + "stage 1 was made by codec 8, payload version 7, expected 102 (whole), version 7");
  EXPECT_EQ(damaged(5, 8), where + "stage 2 was made by codec 103, payload version 8, expected 103 (rans), version 7");
  EXPECT_EQ(damaged(13, 1), where + "a section of 72057594037927942 bytes, only 11 are left");
  EXPECT_EQ(damaged(14, 99), where + "a section of 99 bytes, only 5 are left");
  EXPECT_EQ(damaged(22, 200), where + "threshold kept 204 values, expected at most 6");
  EXPECT_NE(damaged(28, 0).find("corrupt data: threshold | whole | rans: bad side"), std::string::npos);
  EXPECT_NE(damaged(22, 1).find("rans: decode of 1 x 5 uint8: the payload has 4 bytes, expected 5"), std::string::npos);
}

TEST(Composition, OfNoValuesItsSectionsAreEmpty) {
  const auto codec = compose(std::make_unique<Threshold>(10), std::make_unique<Threshold>(1), std::make_unique<Whole>(),
                             std::make_unique<Backwards>())
                         .value();
  Bytes payload = encode(*codec, kValues);
  payload.push_back(0);
  EXPECT_NE(decode_error(*codec, payload).find("the payload has 1 bytes, expected 0"), std::string::npos);
  payload[16] = 1;
  EXPECT_NE(decode_error(*codec, payload).find("an index of 1 bytes of no values"), std::string::npos);
  payload[16] = 0;
  payload[24] = 1;
  EXPECT_NE(decode_error(*codec, payload).find("a side section of 1 bytes of no values"), std::string::npos);
}

}  // namespace
}  // namespace cortado::composition_test

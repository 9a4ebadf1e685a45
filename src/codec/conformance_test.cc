// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What every codec of the registry promises, tested for each row with its default and with the extremes of its
// parameters, and for compositions. A codec's own tests need not repeat any of it; they test what its spec.md says of
// values and errors.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "codec/conformance_cases.h"
#include "core/aligned_buffer.h"
#include "core/counting_new.h"
#include "core/sanitized.h"
#include "core/simd_target.h"
#include "core/streaming.h"

namespace cortado::conformance_test {
namespace {

constexpr EncodeContext kContext = {.seed = 11, .step = 12, .tensor = 13};

// Codecs whose encoders may round differently from target to target, by at most this relative L2 distance of the
// decoded tensors; their payloads are summed over ranks anyway. Decoders are exempt nowhere.
struct Exemption {
  const char* codec;
  double relative_l2_bound;
};
constexpr Exemption kEncodersWithABound[] = {{"acp", 1e-5}, {"power", 1e-5}};

std::optional<double> encoder_bound(const CodecRow& row) {
  for (const Exemption& exemption : kEncodersWithABound) {
    if (std::string_view(row.name) == exemption.codec) return exemption.relative_l2_bound;
  }
  return std::nullopt;
}

// What a value near a tie may differ by, relative, once it is rounded to `dtype`.
double last_place(DType dtype) {
  if (dtype == DType::kFloat16) return 0x1p-10;
  return dtype == DType::kBFloat16 ? 0x1p-7 : 0;
}

std::vector<float> floats_of(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> values(bytes.size() / dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t element = 0;
    std::memcpy(&element, bytes.data() + i * dtype_bytes(dtype), dtype_bytes(dtype));
    values[i] = static_cast<float>(element);
    if (dtype == DType::kFloat32) values[i] = std::bit_cast<float>(element);
    if (dtype == DType::kFloat16) values[i] = fp16_to_float(static_cast<std::uint16_t>(element));
    if (dtype == DType::kBFloat16) values[i] = bf16_to_float(static_cast<std::uint16_t>(element));
  }
  return values;
}

class Conformance : public testing::TestWithParam<std::string> {
 protected:
  Conformance() : codec_(make_codec(GetParam()).value()), row_(codec_->row()) {}

  bool takes(DType dtype) const {
    std::vector<std::byte> input = make_values(dtype, 1, false);
    std::vector<std::byte> payload(codec_->max_payload_bytes(1, 1, dtype)), scratch(codec_->scratch_bytes(1, 1, dtype));
    const Status status = codec_->encode({input.data(), dtype, 1, 1}, kContext, payload, scratch).status();
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kUnsupported) << status.to_string();
    return status.ok();
  }

  // Runs `check` on every shape of every dtype that the codec takes.
  template <typename Check>
  void for_each_case(const Check& check) {
    for (const DType dtype : kAllDTypes) {
      if (!takes(dtype)) continue;
      for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.cols) + " " +
                     std::string(dtype_name(dtype)));
        check(shape, dtype);
        if (HasFatalFailure()) return;
      }
    }
  }

  // -0 and NaN have signs, too.
  bool sends_signs_only() const { return codec_->spec().find("scale=none") != std::string::npos; }

  std::vector<std::byte> scratch_for(Shape shape, DType dtype) const {
    return std::vector<std::byte>(codec_->scratch_bytes(shape.rows, shape.cols, dtype));
  }

  std::vector<std::byte> encode(const std::vector<std::byte>& input, Shape shape, DType dtype) const {
    std::vector<std::byte> payload(codec_->max_payload_bytes(shape.rows, shape.cols, dtype));
    std::vector<std::byte> scratch = scratch_for(shape, dtype);
    const ConstTensorView view(input.data(), dtype, shape.rows, shape.cols);
    const Result<std::uint64_t> bytes = codec_->encode(view, kContext, payload, scratch);
    EXPECT_TRUE(bytes.ok()) << bytes.status().to_string();
    EXPECT_LE(bytes.value(), payload.size());
    payload.resize(bytes.value());
    return payload;
  }

  // The vector has the payload's exact size, so that the address sanitizer sees every read beyond it.
  Status decode(const std::vector<std::byte>& payload, Shape shape, DType dtype, std::vector<std::byte>* output) const {
    output->assign(static_cast<std::size_t>(shape.rows * shape.cols) * dtype_bytes(dtype), std::byte{0});
    std::vector<std::byte> scratch = scratch_for(shape, dtype);
    return codec_->decode(payload, {output->data(), dtype, shape.rows, shape.cols}, scratch);
  }

  const std::unique_ptr<Codec> codec_;
  const CodecRow& row_;
};

TEST_P(Conformance, ItsSpecMakesAnEqualCodec) {
  const Result<std::unique_ptr<Codec>> again = make_codec(codec_->spec());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(again.value()->spec(), codec_->spec());
  EXPECT_EQ(again.value()->row().wire_id, row_.wire_id);
}

TEST_P(Conformance, TakesSomeDtypeAndRefusesTheOthersByName) {
  int taken = 0;
  for (const DType dtype : kAllDTypes) {
    if (takes(dtype)) {
      ++taken;
      continue;
    }
    std::vector<std::byte> output;
    const Status status = decode({}, {0, 0}, dtype, &output);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find(dtype_name(dtype)), std::string::npos) << status.to_string();
  }
  EXPECT_GT(taken, 0);
}

TEST_P(Conformance, EmptyTensorsHaveEmptyPayloads) {
  for (const DType dtype : kAllDTypes) {
    if (!takes(dtype)) continue;
    for (const Shape& shape : kEmptyShapes) {
      EXPECT_EQ(codec_->max_payload_bytes(shape.rows, shape.cols, dtype), 0u);
      std::vector<std::byte> scratch = scratch_for(shape, dtype);
      EXPECT_EQ(codec_->encode({nullptr, dtype, shape.rows, shape.cols}, kContext, {}, scratch).value(), 0u);
      EXPECT_TRUE(codec_->decode({}, {nullptr, dtype, shape.rows, shape.cols}, scratch).ok());
    }
  }
}

TEST_P(Conformance, RoundTripKeepsWhatTheTraitsPromise) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::vector<std::byte> input = make_values(dtype, shape.rows * shape.cols, true);
    std::vector<std::byte> output;
    const Status status = decode(encode(input, shape, dtype), shape, dtype, &output);
    ASSERT_TRUE(status.ok()) << status.to_string();
    if (row_.traits.lossless) {
      EXPECT_EQ(output, input);
    }
  });
}

// Tensors without a range: zeros of both signs, a constant, a denormal.
TEST_P(Conformance, ConstantsStayFiniteAndZerosZero) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols;
    for (const std::uint32_t bits : {0u, 0x80000000u, std::bit_cast<std::uint32_t>(0.75f), 0x00000123u}) {
      const std::vector<std::byte> input =
          bytes_of(std::vector<float>(static_cast<std::size_t>(elems), std::bit_cast<float>(bits)), dtype);
      std::vector<std::byte> output;
      const Status status = decode(encode(input, shape, dtype), shape, dtype, &output);
      ASSERT_TRUE(status.ok()) << status.to_string();
      if (row_.traits.lossless) {
        EXPECT_EQ(output, input);
      }
      for (const float value : floats_of(output, dtype)) {
        ASSERT_TRUE(std::isfinite(value)) << std::hex << bits;
        if (bits << 1 == 0 && !sends_signs_only()) {
          ASSERT_EQ(value, 0) << std::hex << bits;
        }
      }
    }
  });
}

// Inf and NaN, wherever they stand, leave a tensor that is not finite, also where a codec would not send their place.
TEST_P(Conformance, NonFiniteValuesAreNotLost) {
  for_each_case([&](Shape shape, DType dtype) {
    if (dtype == DType::kUint8) return;
    const std::int64_t elems = shape.rows * shape.cols;
    for (const std::uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
      for (const std::int64_t at : {std::int64_t{0}, elems / 2, elems - 1}) {
        if (kSanitized && at != elems / 2) continue;
        std::vector<std::byte> input = make_values(dtype, elems, false);
        const std::vector<std::byte> bad = bytes_of({std::bit_cast<float>(bits)}, dtype);
        std::copy(bad.begin(), bad.end(), input.begin() + at * static_cast<std::int64_t>(bad.size()));
        std::vector<std::byte> output;
        const Status status = decode(encode(input, shape, dtype), shape, dtype, &output);
        ASSERT_TRUE(status.ok()) << status.to_string();
        const std::vector<float> values = floats_of(output, dtype);
        const bool finite = std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
        EXPECT_FALSE(finite) << std::hex << bits << " at " << at;
        if (HasFailure()) return;
      }
    }
  });
}

TEST_P(Conformance, PayloadsHaveTheSizeAndTheSumThatTraitsPromise) {
  const std::optional<SumForm> of_matrix = codec_->sum_form(8, 8, DType::kFloat32);
  EXPECT_EQ(of_matrix.has_value() && of_matrix->is_payload, row_.traits.linear && row_.traits.rounds == 1);
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols;
    const std::vector<std::byte> payload = encode(make_values(dtype, elems, false, 1), shape, dtype);
    const std::vector<std::byte> other = encode(make_values(dtype, elems, false, 2), shape, dtype);
    const std::uint64_t max_bytes = codec_->max_payload_bytes(shape.rows, shape.cols, dtype);
    if (row_.traits.fixed_size) {
      EXPECT_EQ(payload.size(), max_bytes);
    }
    const std::optional<SumForm> form = codec_->sum_form(shape.rows, shape.cols, dtype);
    if (!form.has_value() || !form->is_payload) return;
    const std::size_t header = form->header_bytes;
    ASSERT_EQ(header + static_cast<std::size_t>(form->elems) * dtype_bytes(form->dtype), max_bytes);
    EXPECT_TRUE(std::equal(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(header), other.begin()));
    std::vector<std::byte> sum = payload;
    const std::vector<float> mine = floats_of(std::span(payload).subspan(header), form->dtype);
    const std::vector<float> theirs = floats_of(std::span(other).subspan(header), form->dtype);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const float added = mine[i] + theirs[i];
      auto element = std::bit_cast<std::uint32_t>(added);
      if (form->dtype == DType::kFloat16) element = float_to_fp16(added);
      if (form->dtype == DType::kBFloat16) element = float_to_bf16(added);
      std::memcpy(sum.data() + header + i * dtype_bytes(form->dtype), &element, dtype_bytes(form->dtype));
    }
    std::vector<std::byte> decoded, first, second;
    ASSERT_TRUE(decode(sum, shape, dtype, &decoded).ok());
    ASSERT_TRUE(decode(payload, shape, dtype, &first).ok());
    ASSERT_TRUE(decode(other, shape, dtype, &second).ok());
    const std::vector<float> a = floats_of(first, dtype), b = floats_of(second, dtype), ab = floats_of(decoded, dtype);
    const double unit = std::max({1e-5, last_place(dtype), last_place(form->dtype)});
    for (std::size_t i = 0; i < ab.size(); ++i) {
      EXPECT_NEAR(ab[i], a[i] + b[i], 2 * unit * (1 + std::fabs(a[i]) + std::fabs(b[i]))) << i;
    }
  });
}

TEST_P(Conformance, ElementwisePayloadsAreThoseOfTheirParts) {
  if (!row_.traits.elementwise) return;
  EXPECT_TRUE(row_.traits.fixed_size && row_.traits.divisible);
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols, head = elems / 3;
    const std::vector<std::byte> input = make_values(dtype, elems, true);
    const auto split = input.begin() + head * static_cast<std::ptrdiff_t>(dtype_bytes(dtype));
    std::vector<std::byte> payload = encode({input.begin(), split}, {1, head}, dtype);
    const std::vector<std::byte> rest = encode({split, input.end()}, {1, elems - head}, dtype);
    payload.insert(payload.end(), rest.begin(), rest.end());
    EXPECT_EQ(payload, encode(input, shape, dtype));
  });
}

// Two tensors that fit the codes of as many terms.
TEST_P(Conformance, SumFormsAddUpToTheSumOfTheTensors) {
  for (const Shape& shape : kShapes) {
    const std::optional<SumForm> form = codec_->sum_form(shape.rows, shape.cols, DType::kFloat32);
    if (!form.has_value() || form->is_payload) return;
    const std::int64_t elems = shape.rows * shape.cols;
    std::vector<std::byte> sum(static_cast<std::size_t>(form->elems)), part = sum;
    std::vector<float> values(static_cast<std::size_t>(elems)), expected = values, magnitudes = values;
    ASSERT_EQ(form->dtype, DType::kUint8);
    for (const int terms : {1, 2}) {
      const std::vector<std::byte> input =
          make_values(DType::kFloat32, elems, false, static_cast<std::uint64_t>(terms));
      const std::vector<std::byte> payload = encode(input, shape, DType::kFloat32);
      ASSERT_TRUE(codec_->to_sum_form(payload, shape.rows, shape.cols, 2, part, values).ok());
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] = static_cast<std::byte>(std::to_integer<int>(sum[i]) + std::to_integer<int>(part[i]));
      }
      const TensorView output = {values.data(), DType::kFloat32, shape.rows, shape.cols};
      ASSERT_TRUE(codec_->decode_sum(part, {2, 1}, output).ok());
      for (std::size_t i = 0; i < values.size(); ++i) expected[i] += values[i], magnitudes[i] += std::fabs(values[i]);
      const Status status = codec_->decode_sum(sum, {2, terms}, output);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float sign = static_cast<float>((expected[i] > 0) - (expected[i] < 0));
        EXPECT_NEAR(values[i], codec_->is_majority_vote() ? sign * magnitudes[i] : expected[i], 1e-4) << i;
      }
    }
    // What is not finite on one rank is so for all.
    std::vector<std::byte> input = make_values(DType::kFloat32, elems, false);
    const auto add_to_sum = [&] {
      const std::vector<std::byte> payload = encode(input, shape, DType::kFloat32);
      ASSERT_TRUE(codec_->to_sum_form(payload, shape.rows, shape.cols, 2, part, values).ok());
      for (std::size_t i = 0; i < sum.size(); ++i) {
        sum[i] = static_cast<std::byte>(std::to_integer<int>(sum[i]) + std::to_integer<int>(part[i]));
      }
    };
    std::ranges::fill(sum, std::byte{0});
    ASSERT_NO_FATAL_FAILURE(add_to_sum());
    std::ranges::copy(bytes_of({std::numeric_limits<float>::quiet_NaN()}, DType::kFloat32), input.begin());
    ASSERT_NO_FATAL_FAILURE(add_to_sum());
    ASSERT_TRUE(codec_->decode_sum(sum, {2, 2}, {values.data(), DType::kFloat32, shape.rows, shape.cols}).ok());
    EXPECT_TRUE(std::ranges::all_of(values, [](float value) { return std::isnan(value); }));
    sum[0] = std::byte{255};
    EXPECT_EQ(codec_->decode_sum(sum, {2, 1}, {values.data(), DType::kFloat32, shape.rows, shape.cols}).code(),
              StatusCode::kCorruptData);
    sum.pop_back();
    EXPECT_EQ(codec_->decode_sum(sum, {2, 2}, {values.data(), DType::kFloat32, shape.rows, shape.cols}).code(),
              StatusCode::kCorruptData);
  }
}

TEST_P(Conformance, EqualCallsGiveEqualBytes) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::vector<std::byte> input = make_values(dtype, shape.rows * shape.cols, true);
    const std::vector<std::byte> payload = encode(input, shape, dtype);
    EXPECT_EQ(encode(input, shape, dtype), payload);
    std::vector<std::byte> first, second;
    ASSERT_TRUE(decode(payload, shape, dtype, &first).ok());
    ASSERT_TRUE(decode(payload, shape, dtype, &second).ok());
    EXPECT_EQ(first, second);
  });
}

TEST_P(Conformance, AnyAddressWillDoAndNothingBesideIsWritten) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols;
    const std::vector<std::byte> values = make_values(dtype, elems, false);
    const std::vector<std::byte> expected = encode(values, shape, dtype);
    std::vector<std::byte> expected_output;
    ASSERT_TRUE(decode(expected, shape, dtype, &expected_output).ok());
    for (const std::size_t shift : {0, 1, 3, 4}) {
      GuardedBytes input(values.size(), shift), output(values.size(), shift);
      GuardedBytes payload(codec_->max_payload_bytes(shape.rows, shape.cols, dtype), shift);
      GuardedBytes scratch(codec_->scratch_bytes(shape.rows, shape.cols, dtype), shift);
      std::memcpy(input.data(), values.data(), values.size());
      const Result<std::uint64_t> bytes =
          codec_->encode({input.data(), dtype, shape.rows, shape.cols}, kContext, payload.span(), scratch.span());
      ASSERT_TRUE(bytes.ok()) << bytes.status().to_string();
      const std::span<const std::byte> used = payload.span().first(bytes.value());
      EXPECT_TRUE(std::equal(used.begin(), used.end(), expected.begin(), expected.end())) << "shift " << shift;
      ASSERT_TRUE(codec_->decode(used, {output.data(), dtype, shape.rows, shape.cols}, scratch.span()).ok());
      EXPECT_EQ(std::memcmp(output.data(), expected_output.data(), values.size()), 0) << "shift " << shift;
      EXPECT_EQ(std::memcmp(input.data(), values.data(), values.size()), 0) << "the input was written to";
      EXPECT_TRUE(input.guards_are_whole() && payload.guards_are_whole() && output.guards_are_whole() &&
                  scratch.guards_are_whole());
    }
  });
}

TEST_P(Conformance, WhatIsAddedIsWhatIsDecoded) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols;
    const std::vector<std::byte> payload = encode(make_values(dtype, elems, false), shape, dtype);
    std::vector<std::byte> decoded, scratch = scratch_for(shape, dtype);
    ASSERT_TRUE(decode(payload, shape, dtype, &decoded).ok());
    for (const std::size_t shift : {0, 1}) {
      GuardedBytes sum(decoded.size(), shift);
      std::vector<std::byte> expected = make_values(dtype, elems, true);
      std::memcpy(sum.data(), expected.data(), expected.size());
      const Status status = codec_->decode_add(payload, {sum.data(), dtype, shape.rows, shape.cols}, scratch);
      if (!codec_->can_add() || dtype != DType::kFloat32) {
        EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.to_string();
        continue;
      }
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (std::size_t at = 0; at < decoded.size(); at += sizeof(float)) {
        float value, more;
        std::memcpy(&value, &expected[at], sizeof(value));
        std::memcpy(&more, &decoded[at], sizeof(more));
        value += more;
        std::memcpy(&expected[at], &value, sizeof(value));
      }
      EXPECT_EQ(std::memcmp(sum.data(), expected.data(), expected.size()), 0) << "shift " << shift;
      EXPECT_TRUE(sum.guards_are_whole());
    }
  });
}

TEST_P(Conformance, AllocatesNothing) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  for_each_case([&](Shape shape, DType dtype) {
    const std::vector<std::byte> input = make_values(dtype, shape.rows * shape.cols, false);
    std::vector<std::byte> payload(codec_->max_payload_bytes(shape.rows, shape.cols, dtype)), output(input.size());
    std::vector<std::byte> scratch = scratch_for(shape, dtype);
    const std::int64_t before = allocation_count();
    const Result<std::uint64_t> bytes =
        codec_->encode({input.data(), dtype, shape.rows, shape.cols}, kContext, payload, scratch);
    const Status status = codec_->decode(std::span(payload).first(bytes.value()),
                                         {output.data(), dtype, shape.rows, shape.cols}, scratch);
    EXPECT_EQ(allocation_count() - before, 0);
    EXPECT_TRUE(status.ok()) << status.to_string();
  });
}

// The message must say which codec, which call and what was wrong.
void expect_refused(const Status& status, const Codec& codec, const char* what) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_EQ(status.message().find(codec.spec() + ": "), 0u) << status.message();
  EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
}

TEST_P(Conformance, WrongArgumentsAreRefused) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::int64_t elems = shape.rows * shape.cols;
    std::vector<std::byte> input = make_values(dtype, elems, false), scratch = scratch_for(shape, dtype);
    std::vector<std::byte> payload(codec_->max_payload_bytes(shape.rows, shape.cols, dtype));
    std::vector<std::byte> both(std::max(input.size(), payload.size()));
    const TensorView view{input.data(), dtype, shape.rows, shape.cols};
    const auto encode_status = [&](ConstTensorView tensor, std::span<std::byte> to, std::span<std::byte> with) {
      return codec_->encode(tensor, kContext, to, with).status();
    };
    const TensorView shared{both.data(), dtype, shape.rows, shape.cols};
    expect_refused(encode_status(shared, both, scratch), *codec_, "overlap");
    expect_refused(codec_->decode(std::span(both).first(payload.size()), shared, scratch), *codec_, "overlap");
    expect_refused(encode_status(view, std::span(payload).first(payload.size() - 1), scratch), *codec_, "payload has");
    if (!scratch.empty()) {
      const auto part = std::span(scratch).first(scratch.size() - 1);
      expect_refused(encode_status(view, payload, part), *codec_, "scratch has");
      expect_refused(codec_->decode(payload, view, part), *codec_, "scratch has");
    }
    expect_refused(encode_status({nullptr, dtype, shape.rows, shape.cols}, payload, scratch), *codec_, "null");
    expect_refused(codec_->decode(payload, {nullptr, dtype, shape.rows, shape.cols}, scratch), *codec_, "null");
    expect_refused(encode_status({input.data(), dtype, -1, shape.cols}, payload, scratch), *codec_, "-1 x");
    constexpr std::int64_t kHuge = std::int64_t{1} << 40;
    expect_refused(encode_status({input.data(), dtype, kHuge, kHuge}, payload, scratch), *codec_, "1099511627776 x");
    expect_refused(codec_->decode(payload, {input.data(), dtype, kHuge, kHuge}, scratch), *codec_, "1099511627776 x");
  });
}

TEST_P(Conformance, DamagedPayloadsGiveAnErrorOrSomeTensor) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::vector<std::byte> payload = encode(make_values(dtype, shape.rows * shape.cols, false), shape, dtype);
    std::vector<std::byte> output;
    const auto expect_defined = [&](const std::vector<std::byte>& damaged, const char* how, std::size_t at) {
      const Status status = decode(damaged, shape, dtype, &output);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kCorruptData) << how << at << ": " << status.to_string();
      if (codec_->can_add() && dtype == DType::kFloat32) {
        std::vector<std::byte> scratch = scratch_for(shape, dtype);
        const Status added = codec_->decode_add(damaged, {output.data(), dtype, shape.rows, shape.cols}, scratch);
        EXPECT_EQ(added.to_string(), status.to_string()) << how << at;
      }
      return status.ok();
    };
    // Every length of a small payload, about a hundred of a large one.
    for (std::size_t length = 0; length < payload.size(); length += 1 + payload.size() / 100) {
      const auto end = payload.begin() + static_cast<std::ptrdiff_t>(length);
      const bool ok = expect_defined({payload.begin(), end}, "cut to ", length);
      EXPECT_TRUE(length > 0 || !ok) << "an empty payload of a tensor that is not empty";
    }
    std::vector<std::byte> longer = payload;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(expect_defined(longer, "one byte more than ", payload.size()));
    for (std::uint64_t i = 0; i < 200; ++i) {
      const std::uint32_t bit = philox_block(1, 2, 3, i)[0] % static_cast<std::uint32_t>(8 * payload.size());
      std::vector<std::byte> flipped = payload;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      expect_defined(flipped, "flipped bit ", bit);
    }
  });
}

TEST_P(Conformance, ExplainsEveryByteOfAnyPayload) {
  for_each_case([&](Shape shape, DType dtype) {
    std::vector<std::byte> payload = encode(make_values(dtype, shape.rows * shape.cols, true), shape, dtype);
    const auto expect_covered = [&](const std::vector<std::byte>& bytes) {
      std::uint64_t at = 0;
      for (const PayloadSection& section : codec_->explain(bytes, shape.rows, shape.cols, dtype)) {
        EXPECT_EQ(section.offset, at) << section.name;
        EXPECT_GT(section.bytes, 0u) << section.name;
        EXPECT_FALSE(section.name.empty() || section.meaning.empty());
        at += section.bytes;
      }
      EXPECT_EQ(at, bytes.size());
    };
    for (std::size_t length = 0; length < payload.size(); length += 1 + payload.size() / 50) {
      expect_covered({payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(length)});
    }
    expect_covered(payload);
    for (std::size_t i = 0; i < payload.size(); i += 1 + payload.size() / 50) {
      std::vector<std::byte> damaged = payload;
      damaged[i] = ~damaged[i];
      expect_covered(damaged);
    }
    payload.resize(payload.size() + 3);
    expect_covered(payload);
  });
}

TEST_P(Conformance, DamagedFramesGiveAnErrorOrSomeTensor) {
  for_each_case([&](Shape shape, DType dtype) {
    const std::vector<std::byte> input = make_values(dtype, shape.rows * shape.cols, false);
    std::vector<std::byte> output(input.size()), scratch = scratch_for(shape, dtype);
    std::vector<std::byte> frame(kFrameHeaderBytes + codec_->max_payload_bytes(shape.rows, shape.cols, dtype));
    const ConstTensorView view(input.data(), dtype, shape.rows, shape.cols);
    frame.resize(encode_frame(row_, *codec_, view, kContext, frame, scratch).value());
    const auto decode_status = [&](const std::vector<std::byte>& bytes) {
      return decode_frame(*codec_, row_, bytes, {output.data(), dtype, shape.rows, shape.cols}, scratch);
    };
    ASSERT_TRUE(decode_status(frame).ok());
    if (row_.traits.lossless) {
      EXPECT_EQ(output, input);
    }
    for (std::size_t length = 0; length < frame.size(); length += 1 + frame.size() / 100) {
      const auto end = frame.begin() + static_cast<std::ptrdiff_t>(length);
      EXPECT_EQ(decode_status({frame.begin(), end}).code(), StatusCode::kCorruptData) << "cut to " << length;
    }
    for (std::uint64_t i = 0; i < 100; ++i) {
      const std::uint32_t bit = philox_block(1, 2, 4, i)[0] % static_cast<std::uint32_t>(8 * frame.size());
      std::vector<std::byte> flipped = frame;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      const Status status = decode_status(flipped);
      EXPECT_TRUE(bit >= 8 * kFrameHeaderBytes || !status.ok()) << "bit " << bit << " of the header";
    }
  });
}

TEST_P(Conformance, EverySimdTargetGivesTheSameBytes) {
  const std::optional<double> bound = encoder_bound(row_);
  for_each_case([&](Shape shape, DType dtype) {
    // A bound on a distance says nothing about NaN.
    const std::vector<std::byte> input = make_values(dtype, shape.rows * shape.cols, !bound.has_value());
    const std::vector<std::byte> payload = encode(input, shape, dtype);
    std::vector<std::byte> expected, output;
    ASSERT_TRUE(decode(payload, shape, dtype, &expected).ok());
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      ASSERT_EQ(simd_target(), target);
      ASSERT_TRUE(decode(payload, shape, dtype, &output).ok());
      EXPECT_EQ(output, expected) << "decoded by " << simd_target_name(target);
      const std::vector<std::byte> own_payload = encode(input, shape, dtype);
      if (!bound.has_value()) {
        EXPECT_EQ(own_payload, payload) << "encoded by " << simd_target_name(target);
        continue;
      }
      ASSERT_TRUE(decode(own_payload, shape, dtype, &output).ok());
      double difference = 0, reference = 0;
      const std::vector<float> a = floats_of(output, dtype), b = floats_of(expected, dtype);
      for (std::size_t i = 0; i < a.size(); ++i) {
        difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
        reference += std::pow(static_cast<double>(b[i]), 2);
      }
      EXPECT_LE(std::sqrt(difference), (*bound + last_place(dtype)) * std::sqrt(reference))
          << "encoded by " << simd_target_name(target);
    }
  });
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name;
  for (const char c : info.param) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      name += c;
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(EveryCodec, Conformance, testing::ValuesIn(all_examples()), test_name);

// ---- tensors that caches do not hold -------------------------------------------------------------------------------

// Larger than every piece, sample and threshold of a kernel, in every dtype of floats.
constexpr Shape kLargeShape = {1031, 4099};
static_assert(2 * kLargeShape.rows * kLargeShape.cols > kLeastStreamedBytes);

class LargeTensors : public Conformance {};

// Kernels stream to aligned memory, and to no other.
TEST_P(LargeTensors, AreTheSameStreamedOrNotAndAllocateNothing) {
  for (const DType dtype : kAllDTypes) {
    if (!takes(dtype)) continue;
    SCOPED_TRACE(std::string(dtype_name(dtype)));
    const auto [rows, cols] = kLargeShape;
    const std::vector<std::byte> input = make_values(dtype, rows * cols, false);
    std::vector<std::byte> payload(codec_->max_payload_bytes(rows, cols, dtype));
    std::vector<std::byte> scratch = scratch_for(kLargeShape, dtype);
    AlignedBuffer<std::byte> streamed(input.size()), stored(input.size() + 1);
    const std::int64_t before = allocation_count();
    const Result<std::uint64_t> bytes = codec_->encode({input.data(), dtype, rows, cols}, kContext, payload, scratch);
    ASSERT_TRUE(bytes.ok());
    const auto used = std::span<const std::byte>(payload).first(bytes.value());
    ASSERT_TRUE(codec_->decode(used, {stored.data() + 1, dtype, rows, cols}, scratch).ok());
    EXPECT_EQ(allocation_count() - before, 0);
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      std::memset(streamed.data(), 0, streamed.size());
      ASSERT_TRUE(codec_->decode(used, {streamed.data(), dtype, rows, cols}, scratch).ok());
      EXPECT_EQ(std::memcmp(streamed.data(), stored.data() + 1, input.size()), 0) << simd_target_name(target);
    }
    if (!codec_->can_add() || dtype != DType::kFloat32) continue;
    std::memset(streamed.data(), 0, streamed.size());
    const std::int64_t before_adding = allocation_count();
    ASSERT_TRUE(codec_->decode_add(used, {streamed.data(), dtype, rows, cols}, scratch).ok());
    EXPECT_EQ(allocation_count() - before_adding, 0);
    std::vector<float> expected = floats_of({stored.data() + 1, input.size()}, dtype);
    for (float& value : expected) value = 0.0f + value;
    EXPECT_EQ(std::memcmp(streamed.data(), expected.data(), input.size()), 0) << "added";
  }
}

std::vector<std::string> names_of_rows() {
  std::vector<std::string> names;
  for (const CodecRow& row : codec_registry()) names.emplace_back(row.name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(EveryCodec, LargeTensors, testing::ValuesIn(names_of_rows()), test_name);

}  // namespace
}  // namespace cortado::conformance_test

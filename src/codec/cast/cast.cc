// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast.h"

#include <algorithm>
#include <cstring>

#include "codec/binding.h"
#include "codec/cast/cast_kernels.h"
#include "codec/explain.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/streaming.h"

namespace cortado {

namespace {

void widen(const std::byte* input, DType from, std::int64_t elems, float* output, bool streams) {
  const auto* values = reinterpret_cast<const std::uint16_t*>(input);
  from == DType::kFloat16 ? fp16_to_fp32(values, elems, output, streams) : bf16_to_fp32(values, elems, output, streams);
}

void narrow(const float* input, std::int64_t elems, std::byte* output, DType to, bool streams) {
  auto* values = reinterpret_cast<std::uint16_t*>(output);
  to == DType::kFloat16 ? fp32_to_fp16(input, elems, values, streams) : fp32_to_bf16(input, elems, values, streams);
}

// Between the two 16-bit formats: through float32, a piece that stays in cache at a time.
void convert_16_bit(const std::byte* input, DType from, std::int64_t elems, std::byte* output, DType to, bool streams) {
  constexpr std::int64_t kPieceElems = 1024;
  float piece[kPieceElems];
  for (std::int64_t i = 0; i < elems; i += kPieceElems) {
    const std::int64_t count = std::min(kPieceElems, elems - i);
    widen(input + 2 * i, from, count, piece, false);
    narrow(piece, count, output + 2 * i, to, streams);
  }
}

// Pointers need no alignment; elems > 0.
void convert(const void* input, DType from, std::int64_t elems, void* output, DType to) {
  const auto* source = static_cast<const std::byte*>(input);
  auto* target = static_cast<std::byte*>(output);
  const std::int64_t target_bytes = elems * static_cast<std::int64_t>(dtype_bytes(to));
  const bool streams = target_bytes >= kLeastStreamedBytes;
  if (from == to) {
    std::memcpy(target, source, static_cast<std::size_t>(target_bytes));
  } else if (from == DType::kFloat32) {
    narrow(static_cast<const float*>(input), elems, target, to, streams);
  } else if (to == DType::kFloat32) {
    widen(source, from, elems, static_cast<float*>(output), streams);
  } else {
    convert_16_bit(source, from, elems, target, to, streams);
  }
  if (streams) finish_streams();
}

class CastCodec final : public Codec {
 public:
  explicit CastCodec(DType narrow) : narrow_(narrow) {}

  DType narrow() const { return narrow_; }

  std::string spec() const override { return "cast(" + std::string(dtype_name(narrow_)) + ")"; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    return static_cast<std::uint64_t>(checked_size_bytes(rows, cols, narrow_).value_or(0));
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    if (input.elems() > 0) convert(input.data, input.dtype, input.elems(), payload.data(), narrow_);
    return max_payload_bytes(input.rows, input.cols, input.dtype);
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const std::uint64_t bytes = max_payload_bytes(output.rows, output.cols, output.dtype);
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, bytes));
    if (output.elems() > 0) convert(payload.data(), narrow_, output.elems(), output.data, output.dtype);
    return {};
  }

  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType) const override {
    return SumForm{.dtype = narrow_, .elems = checked_elems(rows, cols).value_or(0)};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType dtype) const override {
    PayloadExplainer explainer(payload);
    explainer.take(max_payload_bytes(rows, cols, dtype), "values", explain_matrix(payload, rows, cols, narrow_));
    return std::move(explainer).finish();
  }

 private:
  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  DType narrow_;
};

Result<std::unique_ptr<Codec>> make_cast(const ParameterValues& values) {
  const DType narrow = values.word("dtype") == "fp16" ? DType::kFloat16 : DType::kBFloat16;
  return std::unique_ptr<Codec>(std::make_unique<CastCodec>(narrow));
}

}  // namespace

DType cast_dtype(const Codec& codec) {
  const auto* cast = dynamic_cast<const CastCodec*>(&codec);
  return cast == nullptr ? DType::kFloat32 : cast->narrow();
}

const CodecRow& cast_row() {
  static const CodecRow row = {
      .name = "cast",
      .wire_id = 2,
      .version = 1,
      .traits = {.linear = true, .divisible = true, .fixed_size = true, .elementwise = true},
      .summary = "every value as a 16-bit float",
      .parameters = {{.name = "dtype",
                      .kind = ParameterKind::kChoice,
                      .default_text = "bf16",
                      .choices = "bf16|fp16",
                      .meaning = "what travels; fp16 is more exact, bf16 has float32's range"}},
      .make = make_cast,
  };
  return row;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/none/none.h"

#include <cstring>

#include "codec/binding.h"
#include "codec/explain.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

class NoneCodec final : public Codec {
 public:
  std::string spec() const override { return "none"; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    return static_cast<std::uint64_t>(checked_size_bytes(rows, cols, dtype).value_or(0));
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    const auto bytes = static_cast<std::uint64_t>(input.size_bytes());
    if (bytes > 0) std::memcpy(payload.data(), input.data, bytes);
    return bytes;
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const auto bytes = static_cast<std::uint64_t>(output.size_bytes());
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, bytes));
    if (bytes > 0) std::memcpy(output.data, payload.data(), bytes);
    return {};
  }

  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    if (dtype == DType::kUint8) return std::nullopt;  // sums wrap
    return SumForm{.dtype = dtype, .elems = checked_elems(rows, cols).value_or(0)};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType dtype) const override {
    PayloadExplainer explainer(payload);
    explainer.take(max_payload_bytes(rows, cols, dtype), "values", explain_matrix(payload, rows, cols, dtype));
    return std::move(explainer).finish();
  }
};

Result<std::unique_ptr<Codec>> make_none(const ParameterValues&) {
  return std::unique_ptr<Codec>(std::make_unique<NoneCodec>());
}

}  // namespace

const CodecRow& none_row() {
  static const CodecRow row = {
      .name = "none",
      .wire_id = 1,
      .version = 1,
      .traits = {.lossless = true,
                 .unbiased = true,
                 .linear = true,
                 .divisible = true,
                 .fixed_size = true,
                 .elementwise = true},
      .summary = "dense: every bit as it is",
      .parameters = {},
      .make = make_none,
  };
  return row;
}

}  // namespace cortado

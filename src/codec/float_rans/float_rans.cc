// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/float_rans/float_rans.h"

#include <limits>

#include "codec/binding.h"
#include "codec/explain.h"
#include "codec/float_rans/float_rans_kernels.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

constexpr std::uint64_t kNoMemoryHoldsIt = std::numeric_limits<std::uint64_t>::max();

// The codes lie in scratch memory, before that of the coder.
class FloatRansCodec final : public Codec {
 public:
  explicit FloatRansCodec(std::int64_t chunk_codes) : chunk_codes_(chunk_codes) {}

  std::string spec() const override { return "float_rans(chunk_codes=" + std::to_string(chunk_codes_) + ")"; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    const std::int64_t elems = elems_of(rows, cols);
    return elems > kMaxRansCodes ? kNoMemoryHoldsIt : rest_bytes(elems, dtype) + max_rans_bytes(elems);
  }
  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::int64_t elems = elems_of(rows, cols);
    if (elems > kMaxRansCodes) return kNoMemoryHoldsIt;
    return static_cast<std::uint64_t>(elems) + rans_scratch_bytes(elems, chunk_codes_);
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    const std::int64_t elems = input.elems();
    if (elems == 0) return 0;
    const auto* values = static_cast<const std::byte*>(input.data);
    auto* codes = reinterpret_cast<std::uint8_t*>(scratch.data());
    const auto split = input.dtype == DType::kFloat32 ? split_floats_32 : split_floats_16;
    split(values, elems, codes, payload.data());
    const std::uint64_t rest = rest_bytes(elems, input.dtype);
    return rest + encode_codes(codes, elems, chunk_codes_, payload.data() + rest, scratch.data() + elems);
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const std::int64_t elems = output.elems();
    const std::uint64_t rest = rest_bytes(elems, output.dtype);
    if (payload.size() < rest) {
      return make_error(StatusCode::kCorruptData, "%s: the payload has %zu bytes, expected at least %llu",
                        spec().c_str(), payload.size(), static_cast<unsigned long long>(rest));
    }
    auto* codes = reinterpret_cast<std::uint8_t*>(scratch.data());
    const Status status = decode_codes(payload.subspan(rest), codes, elems, scratch.data() + elems);
    if (!status.ok()) return status.with_context(spec());
    if (elems == 0) return {};
    const auto merge = output.dtype == DType::kFloat32 ? merge_floats_32 : merge_floats_16;
    merge(codes, payload.data(), elems, static_cast<std::byte*>(output.data));
    return {};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType dtype) const override {
    PayloadExplainer explainer(payload);
    const std::int64_t elems = elems_of(rows, cols);
    const auto bytes = static_cast<std::uint64_t>(elems);
    const bool is_wide = dtype == DType::kFloat32;
    if (is_wide) explainer.take(2 * bytes, "lower halves", "bits 0 to 15 of the values rotated left by one");
    explainer.take(bytes, "middle bytes",
                   is_wide ? "bits 16 to 23 of the same" : "bits 0 to 7 of the values rotated left by one");
    explainer.append(explain_codes(explainer.rest(), elems), "upper bytes: ");
    return std::move(explainer).finish();
  }

 private:
  static std::int64_t elems_of(std::int64_t rows, std::int64_t cols) { return checked_elems(rows, cols).value_or(0); }
  static std::uint64_t rest_bytes(std::int64_t elems, DType dtype) {
    return static_cast<std::uint64_t>(elems) * (dtype_bytes(dtype) - 1);
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16; rans takes codes");
  }

  std::int64_t chunk_codes_;
};

Result<std::unique_ptr<Codec>> make_float_rans(const ParameterValues& values) {
  const std::int64_t chunk_codes = values.integer("chunk_codes");
  CORTADO_RETURN_IF_ERROR(check_chunk_codes("float_rans", chunk_codes));
  return std::unique_ptr<Codec>(std::make_unique<FloatRansCodec>(chunk_codes));
}

}  // namespace

const CodecRow& float_rans_row() {
  static const CodecRow row = {
      .name = "float_rans",
      .wire_id = 11,
      .version = 1,
      .traits = {.lossless = true, .unbiased = true, .divisible = true},
      .summary = "every bit of a float, exponents entropy-coded",
      .parameters = {chunk_codes_parameter("values coded together, a power of two; 4096 to 16384 where a GPU decodes")},
      .make = make_float_rans,
  };
  return row;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans.h"

#include <limits>

#include "codec/binding.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

constexpr std::uint64_t kNoMemoryHoldsIt = std::numeric_limits<std::uint64_t>::max();

class RansCodec final : public Codec {
 public:
  explicit RansCodec(std::int64_t chunk_codes) : chunk_codes_(chunk_codes) {}

  std::string spec() const override { return "rans(chunk_codes=" + std::to_string(chunk_codes_) + ")"; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::int64_t elems = elems_of(rows, cols);
    return elems > kMaxRansCodes ? kNoMemoryHoldsIt : max_rans_bytes(elems);
  }
  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::int64_t elems = elems_of(rows, cols);
    return elems > kMaxRansCodes ? kNoMemoryHoldsIt : rans_scratch_bytes(elems, chunk_codes_);
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    return encode_codes(static_cast<const std::uint8_t*>(input.data), input.elems(), chunk_codes_, payload.data(),
                        scratch.data());
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    Status status = decode_codes(payload, static_cast<std::uint8_t*>(output.data), output.elems(), scratch.data());
    return status.ok() ? status : status.with_context(spec());
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    return explain_codes(payload, elems_of(rows, cols));
  }

 private:
  static std::int64_t elems_of(std::int64_t rows, std::int64_t cols) { return checked_elems(rows, cols).value_or(0); }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kUint8) return {};
    return unsupported_dtype(*this, dtype, "uint8, one code a byte; float_rans takes floats");
  }

  std::int64_t chunk_codes_;
};

Result<std::unique_ptr<Codec>> make_rans(const ParameterValues& values) {
  const std::int64_t chunk_codes = values.integer("chunk_codes");
  CORTADO_RETURN_IF_ERROR(check_chunk_codes("rans", chunk_codes));
  return std::unique_ptr<Codec>(std::make_unique<RansCodec>(chunk_codes));
}

}  // namespace

const CodecRow& rans_row() {
  static const CodecRow row = {
      .name = "rans",
      .wire_id = 10,
      .version = 1,
      .traits = {.lossless = true, .unbiased = true, .divisible = true},
      .summary = "codes of 1 to 8 bits, entropy-coded",
      .parameters = {chunk_codes_parameter("codes coded together, a power of two; 4096 to 16384 where a GPU decodes")},
      .make = make_rans,
  };
  return row;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "codec/binding.h"
#include "codec/pieces.h"
#include "codec/quant/bit_packing.h"
#include "codec/quant/quant_kernels.h"
#include "codec/quant/quant_search.h"
#include "codec/quant/quant_settings.h"
#include "codec/stage.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

constexpr std::int64_t kMaxBlocksAPiece = kMaxPieceElems / 32;
constexpr std::int64_t kPrefetchElems = 1024;
// Decoded tensors of this size and more go past the caches, which could not keep them.
constexpr std::int64_t kStreamBytes = std::int64_t{8} << 20;

// What dither decodes with; the first bytes of its side section.
struct RandomKey {
  PhiloxKey key = {};
  std::uint64_t step = 0;
};
static_assert(sizeof(RandomKey) == 16);

// Codes of a tensor: one a byte, or packed.
struct CodeSink {
  std::uint8_t* bytes;
  std::byte* packed;
  int bits;

  std::uint8_t* target(std::int64_t first, std::int64_t elems, std::uint8_t* buffer) const {
    return bytes != nullptr && elems % kRowElems == 0 ? bytes + first : buffer;
  }
  void take(const std::uint8_t* codes, std::int64_t first, std::int64_t elems) const {
    if (bytes == nullptr) {
      pack_codes(codes, elems, bits, packed + packed_bytes(first, bits));
    } else if (codes != bytes + first) {
      std::memcpy(bytes + first, codes, static_cast<std::size_t>(elems));
    }
  }
};

struct CodeSource {
  const std::uint8_t* bytes;
  const std::byte* packed;
  int bits;

  // Whole rows of codes, zeros behind the last; nullptr if the last byte holds more than codes.
  const std::uint8_t* piece(std::int64_t first, std::int64_t elems, std::uint8_t* buffer) const {
    if (bytes != nullptr && elems % kRowElems == 0) return bytes + first;
    bool ok = true;
    if (bytes != nullptr) {
      std::memcpy(buffer, bytes + first, static_cast<std::size_t>(elems));
    } else {
      ok = unpack_codes(packed + packed_bytes(first, bits), elems, bits, buffer);
    }
    std::fill(buffer + elems, buffer + whole_rows(elems), std::uint8_t{0});
    return ok ? buffer : nullptr;
  }
};

// The walk over a tensor, piece after piece, and the grids of the piece in hand.
class Quantisation {
 public:
  Quantisation(const QuantSettings& settings, const RandomKey& random, DType dtype, std::int64_t elems)
      : settings_(settings),
        random_(random),
        largest_value_(largest_finite(dtype)),
        elems_(elems),
        block_elems_(std::min(settings.block_elems, elems)) {}

  void encode(ConstTensorView input, std::byte* steps, const CodeSink& sink) {
    if (settings_.rule == QuantSettings::StepRule::kError) {
      absolute_step_ = find_step(settings_.rounding, settings_.error, input);
    }
    for (std::int64_t first = 0; first < elems_; first += kMaxPieceElems) {
      const std::int64_t elems = std::min(kMaxPieceElems, elems_ - first);
      // Of the piece two further on, or of the next one.
      const std::int64_t ahead = elems_ - first >= kPrefetchElems + kMaxPieceElems ? kPrefetchElems : 0;
      if (block_elems_ > kMaxPieceElems && first % block_elems_ == 0) {
        measure_large_block(input, first);
        steps = put_steps(1, steps);
      }
      const float* values = load_piece(input, first, elems, values_);
      if (block_elems_ <= kMaxPieceElems) steps = put_steps(measure(values, elems), steps);
      values = tamed(values, elems);
      std::uint8_t* codes = sink.target(first, elems, codes_);
      quantise_values(piece(first, elems), values, ahead, codes);
      sink.take(codes, first, elems);
    }
  }

  // What is wrong, or nullptr.
  const char* decode(const std::byte* steps, const CodeSource& source, TensorView output) {
    const bool streams = output.size_bytes() >= kStreamBytes;
    const char* wrong = nullptr;
    for (std::int64_t first = 0; first < elems_ && wrong == nullptr; first += kMaxPieceElems) {
      const std::int64_t elems = std::min(kMaxPieceElems, elems_ - first);
      if (block_elems_ > kMaxPieceElems) {
        if (first % block_elems_ == 0) wrong = take_steps(1, &steps);
      } else {
        wrong = take_steps((elems - 1) / block_elems_ + 1, &steps);
      }
      const std::uint8_t* codes = source.piece(first, elems, codes_);
      if (codes == nullptr) return "bits behind the last code are not 0";
      if (largest_code(codes, whole_rows(elems)) > settings_.largest_code()) return "a code is beyond the last level";
      float* values = piece_target(output, first, elems, values_);
      dequantise_values(piece(first, elems), codes, streams && values != values_, values);
      store_piece(values, output, first, elems);
    }
    if (streams) finish_streams();
    return wrong;
  }

 private:
  QuantPiece piece(std::int64_t first, std::int64_t elems) const {
    return {.rounding = settings_.rounding,
            .filters = settings_.filter >= 0,
            .largest_level = settings_.largest_level(),
            .log2_block_elems = std::countr_zero(static_cast<std::uint64_t>(settings_.block_elems)),
            .blocks = grids_,
            .key = random_.key,
            .step = random_.step,
            .first = first,
            .elems = whole_rows(elems)};
  }

  BlockGrid grid(const BlockStats& stats, std::int64_t elems) const {
    return settings_.block_grid(stats, elems, absolute_step_, largest_value_);
  }

  void measure_large_block(ConstTensorView input, std::int64_t first) {
    const std::int64_t end = first + std::min(block_elems_, elems_ - first);
    BlockStats stats;
    for (std::int64_t at = first; at < end; at += kMaxPieceElems) {
      const std::int64_t elems = std::min(kMaxPieceElems, end - at);
      BlockStats part;
      measure_blocks(settings_.scale, load_piece(input, at, elems, values_), whole_rows(elems), kMaxPieceElems, 0,
                     &part);
      stats = joined(stats, part);
    }
    grids_[0] = grid(stats, end - first);
  }

  // Returns how many blocks there are in the piece.
  std::int64_t measure(const float* values, std::int64_t elems) {
    BlockStats stats[kMaxBlocksAPiece];
    measure_blocks(settings_.scale, values, whole_rows(elems), settings_.block_elems, 0, stats);
    const std::int64_t blocks = (elems - 1) / settings_.block_elems + 1;
    for (std::int64_t i = 0; i < blocks; ++i) {
      grids_[i] = grid(stats[i], std::min(settings_.block_elems, elems - i * settings_.block_elems));
    }
    return blocks;
  }

  // The values, or a copy in which those of blocks that are not finite are 0 and others are within their block's reach.
  const float* tamed(const float* values, std::int64_t elems) {
    const std::int64_t block_elems = std::min(settings_.block_elems, kMaxPieceElems);
    const std::int64_t rows = whole_rows(elems);
    bool tame = true;
    for (std::int64_t i = 0; i * block_elems < rows; ++i) {
      tame &= std::isinf(grids_[i].reach) && !std::isnan(grids_[i].step);
    }
    if (tame) return values;
    if (values != values_) std::memcpy(values_, values, static_cast<std::size_t>(rows) * sizeof(float));
    for (std::int64_t i = 0; i < rows; ++i) {
      const BlockGrid& block = grids_[i / block_elems];
      values_[i] = std::isnan(block.step) ? 0.0f : std::clamp(values_[i], -block.reach, block.reach);
    }
    return values_;
  }

  std::byte* put_steps(std::int64_t blocks, std::byte* steps) const {
    for (std::int64_t i = 0; i < blocks; ++i) std::memcpy(steps + i * 4, &grids_[i].step, 4);
    return steps + blocks * 4;
  }

  const char* take_steps(std::int64_t blocks, const std::byte** steps) {
    bool legal = true;
    for (std::int64_t i = 0; i < blocks; ++i) {
      std::memcpy(&grids_[i].step, *steps + i * 4, 4);
      legal &= settings_.is_legal_step(grids_[i].step, largest_value_);
    }
    *steps += blocks * 4;
    return legal ? nullptr : "a step is neither 0 nor NaN nor a number from 2^-116 to the dtype's largest";
  }

  const QuantSettings& settings_;
  const RandomKey random_;
  const float largest_value_;
  const std::int64_t elems_, block_elems_;
  float absolute_step_ = 0;
  BlockGrid grids_[kMaxBlocksAPiece];
  alignas(64) float values_[kMaxPieceElems];
  alignas(64) std::uint8_t codes_[kMaxPieceElems];
};

class QuantCodec final : public Codec, public Quantiser {
 public:
  explicit QuantCodec(QuantSettings settings) : settings_(std::move(settings)) {}

  std::string spec() const override { return settings_.spec; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    return max_side_bytes(rows, cols) + packed_bytes(elems, settings_.bits);
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    const std::uint64_t side_bytes = max_side_bytes(input.rows, input.cols);
    encode_to(input, context, payload.data(), sink_at(payload.data() + side_bytes));
    return max_payload_bytes(input.rows, input.cols, input.dtype);
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const std::uint64_t bytes = max_payload_bytes(output.rows, output.cols, output.dtype);
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, bytes));
    const std::byte* packed = payload.data() + max_side_bytes(output.rows, output.cols);
    const bool is_bytes = settings_.bits == 8;
    return decode_from(payload.data(),
                       {is_bytes ? reinterpret_cast<const std::uint8_t*>(packed) : nullptr, packed, settings_.bits},
                       output);
  }

  const Quantiser* quantiser() const override { return this; }

  int code_bits() const override { return settings_.bits; }
  std::uint64_t max_side_bytes(std::int64_t rows, std::int64_t cols) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    if (elems == 0) return 0;
    const auto blocks = static_cast<std::uint64_t>((elems - 1) / settings_.block_elems + 1);
    return (carries_key() ? sizeof(RandomKey) : 0) + blocks * sizeof(float);
  }
  std::uint64_t quantise_scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> quantise(ConstTensorView input, const EncodeContext& context, std::span<std::uint8_t> codes,
                                 std::span<std::byte> side, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_quantise(*this, *this, input, codes, side, scratch));
    encode_to(input, context, side.data(), {codes.data(), nullptr, settings_.bits});
    return max_side_bytes(input.rows, input.cols);
  }

  Status dequantise(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView output,
                    std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_dequantise(*this, *this, codes, side, output, scratch));
    return decode_from(side.data(), {codes.data(), nullptr, settings_.bits}, output);
  }

 private:
  bool carries_key() const { return settings_.rounding == Rounding::kDither; }

  CodeSink sink_at(std::byte* packed) const {
    return {settings_.bits == 8 ? reinterpret_cast<std::uint8_t*>(packed) : nullptr, packed, settings_.bits};
  }

  void encode_to(ConstTensorView input, const EncodeContext& context, std::byte* side, const CodeSink& sink) const {
    if (input.elems() == 0) return;
    RandomKey random;
    if (settings_.is_random()) random = {philox_key(context.seed, context.tensor), context.step};
    if (carries_key()) {
      std::memcpy(side, &random, sizeof(random));
      side += sizeof(random);
    }
    Quantisation(settings_, random, input.dtype, input.elems()).encode(input, side, sink);
  }

  Status decode_from(const std::byte* side, const CodeSource& source, TensorView output) const {
    if (output.elems() == 0) return {};
    RandomKey random;
    if (carries_key()) {
      std::memcpy(&random, side, sizeof(random));
      side += sizeof(random);
    }
    const char* wrong = Quantisation(settings_, random, output.dtype, output.elems()).decode(side, source, output);
    return wrong == nullptr ? Status() : corrupt_payload(*this, output, wrong);
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  const QuantSettings settings_;
};

Result<std::unique_ptr<Codec>> make_quant(const ParameterValues& values) {
  CORTADO_ASSIGN_OR_RETURN(QuantSettings settings, read_quant_settings(values));
  return std::unique_ptr<Codec>(std::make_unique<QuantCodec>(std::move(settings)));
}

}  // namespace

const CodecRow& quant_row() {
  static const CodecRow row = {
      .name = "quant",
      .wire_id = 8,
      .version = 1,
      .traits = {.divisible = true, .needs_residual = true},
      .summary = "every value as one of up to 2^bits levels, a step a block (QSGD, TernGrad and others are settings)",
      .parameters = quant_parameters(),
      .make = make_quant,
  };
  return row;
}

}  // namespace cortado

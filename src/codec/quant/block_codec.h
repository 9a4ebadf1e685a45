// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// BlockCodec: the binding of codecs that give every value a code of up to 8 bits on the grid of its block, with a few
// bytes a block beside the codes. A tensor is walked in pieces of kMaxPieceElems, which stay in the first-level cache
// from measuring to packing. A Scheme is the rest:
//
//   static constexpr std::int64_t kSideBytesABlock;
//   static constexpr const char* kSideName;
//   static std::string explain(std::span<const std::byte> side);  of blocks, as for Codec::explain
//
//   const std::string& spec() const;
//   int bits() const;                          of a code
//   std::int64_t block_elems() const;          a power of two from 32 on
//   BlockScale scale() const;                  which statistics grid() needs
//   bool is_random() const;                    codes depend on the key
//   bool carries_key() const;                  decoding needs it, and the payload begins with it
//   float shared_step() const;                 of all blocks of all tensors, but for values out of reach; 0: none
//   float tensor_step(ConstTensorView) const;  what grid() is told of the whole tensor
//   BlockGrid grid(const BlockStats&, std::int64_t elems, float tensor_step, float largest_value) const;
//   void put(const BlockGrid&, std::byte*) const;
//   const char* take(const std::byte*, float largest_value, BlockGrid*) const;  what is wrong with it, or nullptr
//   void quantise(const BlockPiece&, const RandomKey&, const float* values, std::int64_t prefetch_elems,
//                 std::uint8_t* codes) const;
//   void dequantise(const BlockPiece&, const RandomKey&, const std::uint8_t* codes, bool streams, float* values) const;
//   std::uint8_t largest_code() const;                                    of packed codes
//   bool are_legal(const std::uint8_t* codes, std::int64_t elems) const;  of codes of one byte each
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "codec/binding.h"
#include "codec/code_sums.h"
#include "codec/explain.h"
#include "codec/pieces.h"
#include "codec/quant/bit_packing.h"
#include "codec/quant/quant_kernels.h"
#include "codec/stage.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/streaming.h"

namespace cortado {

constexpr std::int64_t kWholeTensor = std::int64_t{1} << 62;  // as block_elems()

// The parameter `block`, a number or "tensor", and what it means; `automatic` is for "auto".
Parameter block_parameter(const char* default_text, const char* meaning);
Result<std::int64_t> read_block_elems(const char* codec, const ParameterValues& values, std::int64_t automatic);
std::string block_text(std::int64_t block_elems);

// Codes of a tensor, one a byte (`packed` is nullptr) or packed. Packed codes of 8 bits are bytes.
template <typename Byte, typename Code>
struct CodeSpan {
  Code* bytes;
  Byte* packed;
  int bits;
  bool streams = false;  // codes are written past the caches

  static CodeSpan of_payload(Byte* payload, int bits) {
    return bits == 8 ? CodeSpan{reinterpret_cast<Code*>(payload), nullptr, bits} : CodeSpan{nullptr, payload, bits};
  }
  Byte* packed_at(std::int64_t first) const { return packed + packed_bytes(first, bits); }
  // Whole rows of bytes are used where they lie.
  bool is_direct(std::int64_t elems) const { return packed == nullptr && elems % kRowElems == 0; }
};
using CodeSink = CodeSpan<std::byte, std::uint8_t>;
using CodeSource = CodeSpan<const std::byte, const std::uint8_t>;

template <class Scheme>
class BlockCodec final : public Codec, public Quantiser {
 public:
  explicit BlockCodec(Scheme scheme) : scheme_(std::move(scheme)) {}

  std::string spec() const override { return scheme_.spec(); }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    return max_side_bytes(rows, cols) + packed_bytes(checked_elems(rows, cols).value_or(0), scheme_.bits());
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    std::byte* codes = payload.data() + max_side_bytes(input.rows, input.cols);
    CodeSink sink = CodeSink::of_payload(codes, scheme_.bits());
    sink.streams = packed_bytes(input.elems(), scheme_.bits()) >= static_cast<std::uint64_t>(kLeastStreamedBytes);
    encode_to(input, context, payload.data(), sink);
    return max_payload_bytes(input.rows, input.cols, input.dtype);
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    return decode_to(payload, output, scratch, /*adds=*/false);
  }

  bool can_add() const override { return true; }
  Status decode_add(std::span<const std::byte> payload, TensorView sum, std::span<std::byte> scratch) const override {
    if (sum.dtype != DType::kFloat32) return Codec::decode_add(payload, sum, scratch);
    return decode_to(payload, sum, scratch, /*adds=*/true);
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    PayloadExplainer explainer(payload);
    explainer.append(explain_side(explainer.next(max_side_bytes(rows, cols)), rows, cols));
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    explainer.take(packed_bytes(elems, scheme_.bits()), "codes",
                   std::to_string(scheme_.bits()) + " bits each: " + first_codes(explainer.rest(), elems));
    return std::move(explainer).finish();
  }

  // Where all blocks of all ranks have one step, unless a value is out of reach: levels count from the lowest.
  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    if (scheme_.shared_step() == 0 || dtype != DType::kFloat32) return std::nullopt;
    return code_sum_form(rows, cols, kLargestCodeSum / 2);
  }

  Status to_sum_form(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols, int planned,
                     std::span<std::byte> form, std::span<float> values) const override {
    const std::int64_t elems = rows * cols;
    if (elems == 0) return {};
    CORTADO_CHECK(form.size() == static_cast<std::size_t>(elems) + 1);
    CORTADO_RETURN_IF_ERROR(decode(payload, {values.data(), DType::kFloat32, rows, cols}, {}));
    const auto most = static_cast<float>(levels_of_sum(planned));
    bool is_finite = true;
    for (std::int64_t i = 0; i < elems; ++i) {
      const float level = std::nearbyint(values[i] / scheme_.shared_step());
      is_finite = is_finite && !std::isnan(level);
      form[i] = static_cast<std::byte>(std::isnan(level) ? most : std::clamp(level, -most, most) + most);
    }
    form.back() = is_finite ? std::byte{0} : std::byte{1};
    return {};
  }

  Status decode_sum(std::span<const std::byte> form, SumTerms terms, TensorView output) const override {
    const int most = levels_of_sum(terms.planned);
    return decode_code_sums(*this, form, terms, 2 * most, output, [&](int sum) {
      return static_cast<float>(sum - most * terms.added) * scheme_.shared_step();
    });
  }

  const Quantiser* quantiser() const override { return this; }

  int code_bits() const override { return scheme_.bits(); }
  std::uint64_t max_side_bytes(std::int64_t rows, std::int64_t cols) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    if (elems == 0) return 0;
    const auto blocks = static_cast<std::uint64_t>((elems - 1) / scheme_.block_elems() + 1);
    return (scheme_.carries_key() ? sizeof(RandomKey) : 0) + blocks * Scheme::kSideBytesABlock;
  }
  std::uint64_t quantise_scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> quantise(ConstTensorView input, const EncodeContext& context, std::span<std::uint8_t> codes,
                                 std::span<std::byte> side, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_quantise(*this, *this, input, codes, side, scratch));
    encode_to(input, context, side.data(), {codes.data(), nullptr, scheme_.bits()});
    return max_side_bytes(input.rows, input.cols);
  }

  Status dequantise(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView output,
                    std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_dequantise(*this, *this, codes, side, output, scratch));
    return decode_from(side.data(), {codes.data(), nullptr, scheme_.bits()}, output, /*adds=*/false);
  }

  Status dequantise_add(std::span<const std::uint8_t> codes, std::span<const std::byte> side, TensorView sum,
                        std::span<std::byte> scratch) const override {
    CORTADO_CHECK(sum.dtype == DType::kFloat32);
    CORTADO_RETURN_IF_ERROR(check_dequantise(*this, *this, codes, side, sum, scratch));
    return decode_from(side.data(), {codes.data(), nullptr, scheme_.bits()}, sum, /*adds=*/true);
  }

  std::vector<PayloadSection> explain_side(std::span<const std::byte> side, std::int64_t rows,
                                           std::int64_t cols) const override {
    PayloadExplainer explainer(side);
    std::uint64_t bytes = max_side_bytes(rows, cols);
    if (scheme_.carries_key() && bytes > 0) {
      explainer.take_random_key("of seed and tensor; decoding draws the dither with it");
      bytes -= sizeof(RandomKey);
    }
    explainer.take(bytes, Scheme::kSideName, "a block each: " + Scheme::explain(explainer.next(bytes)));
    return std::move(explainer).finish();
  }

 private:
  // On either side of 0, so that `planned` codes fit a byte.
  static int levels_of_sum(int planned) { return std::max(1, kLargestCodeSum / 2 / planned); }

  static constexpr std::int64_t kSideBytes = Scheme::kSideBytesABlock;
  static constexpr std::int64_t kMaxBlocks = kMaxPieceElems / kSmallestBlockElems;
  static constexpr const char* kIllegalCode = "a code stands for no level";
  static constexpr std::int64_t kLargestCachedBlock = 65536;

  // One tensor, and the piece of it in hand.
  struct Walk {
    Walk(const Scheme& scheme, ConstTensorView tensor)
        : elems(tensor.elems()),
          block_elems(std::min(scheme.block_elems(), elems)),
          largest_value(largest_finite(tensor.dtype)) {}

    std::int64_t elems;
    std::int64_t block_elems;  // at most elems
    float largest_value;
    RandomKey random;
    float tensor_step = 0;
    bool tame = true;  // all grids take all values
    BlockGrid grids[kMaxBlocks];
    alignas(64) float values[kMaxPieceElems];
    alignas(64) std::uint8_t codes[kMaxPieceElems];
    alignas(64) std::byte packed[kMaxPieceElems];

    bool has_large_blocks() const { return block_elems > kMaxPieceElems; }
    std::int64_t piece_elems(std::int64_t first) const { return std::min(kMaxPieceElems, elems - first); }
    // Of blocks that begin in the piece.
    std::int64_t blocks_in(std::int64_t first) const {
      if (has_large_blocks()) return first % block_elems == 0 ? 1 : 0;
      return (piece_elems(first) - 1) / block_elems + 1;
    }
  };

  BlockPiece piece(const Walk& w, std::int64_t first) const {
    return {.log2_block_elems = std::countr_zero(static_cast<std::uint64_t>(scheme_.block_elems())),
            .blocks = w.grids,
            .first = first,
            .elems = whole_rows(w.piece_elems(first))};
  }

  void encode_to(ConstTensorView input, const EncodeContext& context, std::byte* side, const CodeSink& sink) const {
    if (input.elems() == 0) return;
    Walk w(scheme_, input);
    if (scheme_.is_random()) w.random = {philox_key(context.seed, context.tensor), context.step};
    if (scheme_.carries_key()) {
      std::memcpy(side, &w.random, sizeof(w.random));
      side += sizeof(w.random);
    }
    w.tensor_step = scheme_.tensor_step(input);
    // What is read next: the next piece, or the next block, unless a block is more than a cache holds.
    const std::int64_t ahead =
        w.block_elems <= kLargestCachedBlock ? std::max(kMaxPieceElems, w.block_elems) : kMaxPieceElems;
    for (std::int64_t first = 0; first < w.elems; first += kMaxPieceElems) {
      const std::int64_t elems = w.piece_elems(first), blocks = w.blocks_in(first);
      if (w.has_large_blocks() && blocks > 0) measure_large_block(input, first, w);
      const float* values = load_piece(input, first, elems, w.values);
      if (!w.has_large_blocks()) measure_small_blocks(values, elems, w);
      for (std::int64_t i = 0; i < blocks; ++i) scheme_.put(w.grids[i], side + i * kSideBytes);
      side += blocks * kSideBytes;
      const bool more = w.elems - first >= ahead + kMaxPieceElems;
      std::uint8_t* codes = sink.is_direct(elems) && !sink.streams ? sink.bytes + first : w.codes;
      scheme_.quantise(piece(w, first), w.random, tamed(values, elems, w), more ? ahead : 0, codes);
      put_codes(codes, first, elems, sink, w);
    }
    if (sink.streams) finish_streams();
  }

  // The codes of a piece to where they belong.
  static void put_codes(const std::uint8_t* codes, std::int64_t first, std::int64_t elems, const CodeSink& sink,
                        Walk& w) {
    if (sink.packed != nullptr) {
      std::byte* const to = sink.packed_at(first);
      pack_codes(codes, elems, sink.bits, sink.streams ? w.packed : to);
      if (sink.streams) stream_copy(w.packed, packed_bytes(elems, sink.bits), to);
    } else if (sink.streams) {
      stream_copy(codes, static_cast<std::size_t>(elems), sink.bytes + first);
    } else if (codes == w.codes) {
      std::memcpy(sink.bytes + first, codes, static_cast<std::size_t>(elems));
    }
  }

  // For blocks larger than a piece: a pass of its own.
  void measure_large_block(ConstTensorView input, std::int64_t first, Walk& w) const {
    const std::int64_t end = first + std::min(w.block_elems, w.elems - first);
    BlockStats stats;
    for (std::int64_t at = first; at < end; at += kMaxPieceElems) {
      const std::int64_t elems = std::min(kMaxPieceElems, end - at);
      BlockStats part;
      const float* values = load_piece(input, at, elems, w.values);
      measure_blocks(scheme_.scale(), values, whole_rows(elems), kMaxPieceElems, &part);
      stats = joined(stats, part);
    }
    w.grids[0] = scheme_.grid(stats, end - first, w.tensor_step, w.largest_value);
    w.tame = w.grids[0].takes_all();
  }

  void measure_small_blocks(const float* values, std::int64_t elems, Walk& w) const {
    const std::int64_t block_elems = scheme_.block_elems();
    BlockStats stats[kMaxBlocks];
    measure_blocks(scheme_.scale(), values, whole_rows(elems), block_elems, stats);
    w.tame = true;
    for (std::int64_t i = 0; i * block_elems < elems; ++i) {
      const std::int64_t count = std::min(block_elems, elems - i * block_elems);
      w.grids[i] = scheme_.grid(stats[i], count, w.tensor_step, w.largest_value);
      w.tame &= w.grids[i].takes_all();
    }
  }

  // The values, or a copy in which blocks that are not finite are 0 and the others within their reach.
  static const float* tamed(const float* values, std::int64_t elems, Walk& w) {
    if (w.tame) return values;
    const std::int64_t block_elems = std::min(w.block_elems, kMaxPieceElems);
    if (values != w.values) std::memcpy(w.values, values, static_cast<std::size_t>(elems) * sizeof(float));
    for (std::int64_t i = 0; i < elems; ++i) {
      const BlockGrid& grid = w.grids[i / block_elems];
      w.values[i] = std::isnan(grid.step) ? 0.0f : std::clamp(w.values[i], -grid.reach, grid.reach);
    }
    return w.values;
  }

  Status decode_to(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch,
                   bool adds) const {
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const std::uint64_t bytes = max_payload_bytes(output.rows, output.cols, output.dtype);
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, bytes));
    const std::byte* codes = payload.data() + max_side_bytes(output.rows, output.cols);
    return decode_from(payload.data(), CodeSource::of_payload(codes, scheme_.bits()), output, adds);
  }

  // `adds`: to `output`, which is fp32.
  Status decode_from(const std::byte* side, const CodeSource& source, TensorView output, bool adds) const {
    if (output.elems() == 0) return {};
    Walk w(scheme_, output);
    if (scheme_.carries_key()) {
      std::memcpy(&w.random, side, sizeof(w.random));
      side += sizeof(w.random);
    }
    const bool streams = !adds && output.size_bytes() >= kLeastStreamedBytes;
    const char* wrong = nullptr;
    for (std::int64_t first = 0; first < w.elems && wrong == nullptr; first += kMaxPieceElems) {
      const std::int64_t elems = w.piece_elems(first), blocks = w.blocks_in(first);
      for (std::int64_t i = 0; i < blocks && wrong == nullptr; ++i) {
        wrong = scheme_.take(side + i * kSideBytes, w.largest_value, &w.grids[i]);
      }
      side += blocks * kSideBytes;
      const std::uint8_t* codes = take_codes(source, first, elems, w, &wrong);
      float* values = adds ? w.values : piece_target(output, first, elems, w.values);
      scheme_.dequantise(piece(w, first), w.random, codes, streams && values != w.values, values);
      adds ? add_piece(values, first, elems, output) : store_piece(values, output, first, elems, streams);
    }
    if (streams) finish_streams();
    return wrong == nullptr ? Status() : corrupt_payload(*this, output, wrong);
  }

  // "14, 4, 7, ...", as far as the first codes are all there.
  std::string first_codes(std::span<const std::byte> packed, std::int64_t elems) const {
    const std::int64_t count = std::min(elems, kPackedGroupElems);
    if (packed.size() < packed_bytes(count, scheme_.bits())) return "not all there";
    std::byte codes[kPackedGroupElems];
    unpack_codes(packed.data(), count, scheme_.bits(), reinterpret_cast<std::uint8_t*>(codes));
    return first_values({codes, static_cast<std::size_t>(count)}, DType::kUint8);
  }

  // Whole rows of codes.
  const std::uint8_t* take_codes(const CodeSource& source, std::int64_t first, std::int64_t elems, Walk& w,
                                 const char** wrong) const {
    if (source.packed != nullptr) {
      const UnpackedCodes unpacked = unpack_codes(source.packed_at(first), elems, source.bits, w.codes);
      if (!unpacked.rest_is_zero) *wrong = "the bits behind the last code are not 0";
      if (unpacked.largest > scheme_.largest_code()) *wrong = kIllegalCode;
    } else {
      if (!scheme_.are_legal(source.bytes + first, elems)) *wrong = kIllegalCode;
      if (source.is_direct(elems)) return source.bytes + first;
      std::memcpy(w.codes, source.bytes + first, static_cast<std::size_t>(elems));
    }
    std::fill(w.codes + elems, w.codes + whole_rows(elems), std::uint8_t{0});
    return w.codes;
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  const Scheme scheme_;
};

}  // namespace cortado

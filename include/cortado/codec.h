// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Codec: turns a tensor into a payload and back. Codecs are found by name in one registry; everything that lists codecs
// (conformance tests, fuzzers, benchmarks, command line, documentation) iterates over its rows.
//
// A codec object is immutable once made and keeps nothing between calls: any number of threads may use it at once.
// encode and decode check their arguments, never allocate and never read or write outside the spans they are given.
// What must live between steps (residual, warm-start factors) is owned by the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/spec.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

struct CodecTraits {
  bool lossless = false;
  bool unbiased = false;  // the expectation of decode(encode(x)) is x
  bool linear = false;    // payloads of equal settings can be summed by an all-reduce before decoding
  bool sparse = false;
  bool divisible = false;       // any contiguous part of a tensor can be encoded by itself
  bool fixed_size = false;      // payloads of a shape all have max_payload_bytes()
  bool elementwise = false;     // element i of a payload is made of value i alone; fixed_size, and no key counts
  bool needs_residual = false;  // biased: training needs error feedback
  bool low_rank = false;        // sends factors of the matrix as a whole: no stage of a composition
  int rounds = 1;               // encode-collective-decode passes in one step
};

// Keys of the counter-based random numbers, so that every variant and every rank draws the same ones.
struct EncodeContext {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t tensor = 0;
};

// What some bytes of a payload are, for `cortado codec inspect`.
struct PayloadSection {
  std::uint64_t offset = 0;  // from the first byte of the payload
  std::uint64_t bytes = 0;
  std::string name;
  std::string meaning;  // what the bytes say, in words and values
};

// How payloads can be added up by a collective before they are decoded: `header_bytes` that are the same on all ranks
// which encode with one key, then `elems` values of `dtype`, which are added one by one. Decoded, the sum is the sum of
// the decoded tensors (to the rounding of the sum).
struct SumForm {
  std::uint64_t header_bytes = 0;
  DType dtype = DType::kFloat32;
  std::int64_t elems = 0;
  int max_terms = 1 << 30;  // so many may be added
  bool is_payload = true;   // false: another form of a payload, made by to_sum_form() and decoded by decode_sum()
};

// Of a sum form that is no payload: how many shall be added in all, and how many have been.
struct SumTerms {
  int planned = 1;
  int added = 1;
};

struct CodecRow;
class Sparsifier;  // what compositions ask of their stages: src/codec/stage.h
class Quantiser;

class Codec {
 public:
  virtual ~Codec() = default;

  // The whole specification with every parameter, e.g. "acp(rank=4)"; parses back to an equal codec.
  virtual std::string spec() const = 0;

  // Its row of the registry; of a composition a row of its own, with the traits that its stages give it.
  // Not for inner loops: finding it may allocate.
  virtual const CodecRow& row() const;

  // Upper bound of what encode writes, and of the scratch memory that encode and decode need, in bytes; pure functions
  // of the shape. Zero-element tensors have a payload of 0 bytes.
  virtual std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const = 0;
  virtual std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const = 0;

  // Writes at most max_payload_bytes() bytes to `payload` and returns how many. `input` must not overlap `payload`.
  virtual Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context,
                                       std::span<std::byte> payload, std::span<std::byte> scratch) const = 0;

  // The inverse, for a tensor of output's shape and dtype. Any byte sequence is safe: it is decoded, or refused with
  // kCorruptData, and then `output` holds unspecified values. Some that encode can't have written pass where they do no
  // harm, such as any codes in a block whose step is 0.
  virtual Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const = 0;

  // Adds the decoded tensor to `sum`, fp32: bit for bit what decode() and one addition a value give, without memory for
  // what is decoded. Errors as decode()'s, after which `sum` holds unspecified values; kUnsupported of codecs that
  // can't and of other dtypes.
  virtual bool can_add() const { return false; }
  virtual Status decode_add(std::span<const std::byte> payload, TensorView sum, std::span<std::byte> scratch) const;

  // Nothing if payloads of that shape can't be added up.
  virtual std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType dtype) const {
    (void)rows, (void)cols, (void)dtype;
    return std::nullopt;
  }
  // Of float32 tensors, where the sum form is not the payload: `form` has its elems. Both may use `values`, as many as
  // the tensor has. What codes of `planned` terms have no room for is cut off.
  virtual Status to_sum_form(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols, int planned,
                             std::span<std::byte> form, std::span<float> values) const;
  // The sum of the tensors; of a majority vote the sign of the sum of signs times the sum of magnitudes.
  virtual Status decode_sum(std::span<const std::byte> form, SumTerms terms, TensorView output) const;

  // What becomes of the decoded tensors of all ranks: their mean, or the sign of the sum of their signs (0 at a tie)
  // times the mean of their magnitudes.
  virtual bool is_majority_vote() const { return false; }

  // What the bytes of a payload are: sections in order, without gaps, that cover it all, whatever bytes it has.
  // Allocates.
  virtual std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                              DType dtype) const = 0;

  // The codec as a stage of a composition; nullptr if others can't stand behind it.
  virtual const Sparsifier* sparsifier() const { return nullptr; }
  virtual const Quantiser* quantiser() const { return nullptr; }
};

// One row of the registry: the catalogue half is data, the kernels are behind `make`.
struct CodecRow {
  const char* name;
  std::uint8_t wire_id;  // part of the wire format, never reused
  std::uint8_t version;  // of the payload format
  CodecTraits traits;
  const char* summary;  // one line
  std::vector<Parameter> parameters;
  Result<std::unique_ptr<Codec>> (*make)(const ParameterValues& values);
};

// All rows, in the order of the documentation.
const std::vector<CodecRow>& codec_registry();

// nullptr when there is none of that name.
const CodecRow* find_codec(std::string_view name);

// Makes the codec of a specification such as "cast(bf16)" or "topk(density=0.01) | quant(bits=4) | rans". An unknown
// name lists the known ones; codecs that can't stand one behind the other are refused by name.
Result<std::unique_ptr<Codec>> make_codec(std::string_view spec);

// The spelling of a codec that Codec::spec() gives, by which those of files and arguments are compared; `spec` itself
// where there is no such codec.
std::string canonical_codec(std::string_view spec);

// ---- frames: self-describing payloads (docs/wire_format.md) --------------------------------------------------------

constexpr std::size_t kFrameHeaderBytes = 40;

struct FrameInfo {
  std::uint8_t wire_id = 0;
  std::uint8_t codec_version = 0;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::uint64_t payload_bytes = 0;
};

// Header plus payload in `frame`, which must have kFrameHeaderBytes + max_payload_bytes(); returns the bytes used.
Result<std::uint64_t> encode_frame(const CodecRow& row, const Codec& codec, ConstTensorView input,
                                   const EncodeContext& context, std::span<std::byte> frame,
                                   std::span<std::byte> scratch);

// Reads and checks a header; refuses frames that are cut short, damaged, of a newer version or not ours.
Result<FrameInfo> read_frame_header(std::span<const std::byte> frame);

// Decodes a frame into `output`, whose shape and dtype must be the frame's.
Status decode_frame(const Codec& codec, const CodecRow& row, std::span<const std::byte> frame, TensorView output,
                    std::span<std::byte> scratch);

}  // namespace cortado

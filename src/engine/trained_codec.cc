// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/trained_codec.h"

#include <algorithm>
#include <string>
#include <vector>

#include "codec/stage.h"
#include "core/check.h"
#include "core/float16.h"
#include "core/philox.h"

namespace cortado {

namespace {

using Feedback = EngineOptions::Feedback;

std::vector<float> normal_values(std::int64_t elems, float scale) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(0, 0, 0, values.data(), elems);
  for (float& value : values) value *= scale;
  return values;
}

// Whether a codec loses less than all of a tensor of normal values as small as gradients are. Residuals grow without
// bound under one that does not: it scales up what it keeps, so as to be unbiased, or has a scale of its own. Decoders
// give the same bytes everywhere, so all ranks get the same answer.
Result<bool> is_contraction(const Codec& codec) {
  constexpr std::int64_t kSide = 64;
  const std::vector<float> values = normal_values(kSide * kSide, 0x1p-10f);
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::byte> payload,
                           encode_sample(codec, {values.data(), DType::kFloat32, kSide, kSide}));
  std::vector<float> decoded(values.size());
  std::vector<std::byte> scratch(codec.scratch_bytes(kSide, kSide, DType::kFloat32));
  CORTADO_RETURN_IF_ERROR(codec.decode(payload, {decoded.data(), DType::kFloat32, kSide, kSide}, scratch));
  double squares = 0, lost = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double difference = static_cast<double>(values[i]) - decoded[i];
    squares += static_cast<double>(values[i]) * values[i];
    lost += difference * difference;
  }
  return lost < squares;
}

Result<Feedback> default_feedback(const Codec& codec) {
  if (codec.row().traits.lossless || codec.is_majority_vote()) return Feedback::kNone;
  CORTADO_ASSIGN_OR_RETURN(const bool contracts, is_contraction(codec));
  return contracts ? Feedback::kResidual : Feedback::kNone;
}

}  // namespace

Result<std::vector<std::byte>> encode_sample(const Codec& codec, ConstTensorView sample) {
  std::vector<std::byte> payload(codec.max_payload_bytes(sample.rows, sample.cols, sample.dtype));
  std::vector<std::byte> scratch(codec.scratch_bytes(sample.rows, sample.cols, sample.dtype));
  CORTADO_ASSIGN_OR_RETURN(const std::uint64_t bytes, codec.encode(sample, {}, payload, scratch));
  payload.resize(bytes);
  return payload;
}

bool takes_dtype(const Codec& codec, DType dtype) {
  const std::uint32_t zero = 0;
  return encode_sample(codec, {&zero, dtype, 1, 1}).status().code() != StatusCode::kUnsupported;
}

Result<TrainedCodec> make_trained_codec(const EngineOptions& options) {
  TrainedCodec trained;
  CORTADO_ASSIGN_OR_RETURN(trained.codec, make_codec(options.codec));
  const std::uint32_t zero = 0;
  const Status taken = encode_sample(*trained.codec, {&zero, DType::kFloat32, 1, 1}).status();
  if (taken.code() == StatusCode::kUnsupported) {
    return make_error(StatusCode::kUnsupported,
                      "\"%s\" can't train, because gradients are floats: %s; float_rans codes floats without loss",
                      options.codec.c_str(), taken.message().c_str());
  }
  CORTADO_RETURN_IF_ERROR(taken);
  const Sparsifier* sparsifier = trained.codec->sparsifier();
  trained.is_summed = sparsifier != nullptr && sparsifier->is_shared();
  trained.feedback = options.feedback;
  if (trained.feedback == Feedback::kAuto) {
    CORTADO_ASSIGN_OR_RETURN(trained.feedback, default_feedback(*trained.codec));
  }
  if (trained.feedback == Feedback::kDgc && !trained.codec->row().traits.sparse) {
    return make_error(StatusCode::kInvalidArgument,
                      "\"%s\": feedback=dgc clears what was sent, so it needs a codec that leaves values out, such as "
                      "topk",
                      options.codec.c_str());
  }
  return trained;
}

Result<double> expected_payload_bytes(const TrainedCodec& trained, std::int64_t rows, std::int64_t cols, DType dtype) {
  if (trained.is_summed) {
    return static_cast<double>(trained.codec->sparsifier()->max_kept(rows, cols)) * static_cast<double>(sizeof(float));
  }
  constexpr std::int64_t kSampleElems = 1 << 16;
  const std::int64_t sample_cols = std::min(cols, kSampleElems);
  const std::int64_t sample_rows = std::min(rows, std::max<std::int64_t>(1, kSampleElems / sample_cols));
  const std::int64_t elems = sample_rows * sample_cols;
  const std::vector<float> values = normal_values(elems, 1.0f);
  ConstTensorView sample(values.data(), dtype, sample_rows, sample_cols);
  std::vector<std::uint16_t> narrow;
  if (dtype != DType::kFloat32) {
    for (const float value : values) {
      narrow.push_back(dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value));
    }
    sample.data = narrow.data();
  }
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::byte> payload, encode_sample(*trained.codec, sample));
  const double scale = static_cast<double>(rows) * static_cast<double>(cols) / static_cast<double>(elems);
  return static_cast<double>(payload.size()) * scale;
}

}  // namespace cortado

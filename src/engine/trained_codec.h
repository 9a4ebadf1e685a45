// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cortado/codec.h"
#include "cortado/engine.h"

namespace cortado {

// What the engine does with the codec of method kCodec.
struct TrainedCodec {
  std::unique_ptr<Codec> codec;
  EngineOptions::Feedback feedback = EngineOptions::Feedback::kNone;  // never kAuto
  bool is_summed = false;                                             // values are all-reduced, not payloads gathered

  bool has_feedback() const { return feedback != EngineOptions::Feedback::kNone; }
};

// Fails if options.codec can't be made, does not take floats, or does not go with options.feedback.
Result<TrainedCodec> make_trained_codec(const EngineOptions& options);

bool takes_dtype(const Codec& codec, DType dtype);

// Of these values. Allocates.
Result<std::vector<std::byte>> encode_sample(const Codec& codec, ConstTensorView sample);

// Bytes that a tensor of N(0, 1) values would send, by encoding a sample of them; the same on every rank, because
// encoders give the same bytes everywhere.
Result<double> expected_payload_bytes(const TrainedCodec& codec, std::int64_t rows, std::int64_t cols, DType dtype);

}  // namespace cortado

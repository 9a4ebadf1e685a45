// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/codec_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/cast/float_chunks.h"
#include "core/check.h"
#include "core/finite.h"
#include "core/float_passes.h"
#include "core/streaming.h"

namespace cortado {

namespace {

float sign_of(float value) { return static_cast<float>((value > 0.0f) - (value < 0.0f)); }

Status of_rank(Status status, int rank) {
  return status.ok() ? status : status.with_context("payload of rank " + std::to_string(rank));
}

}  // namespace

// ---- both ways -----------------------------------------------------------------------------------------------------

CodecScratchSizes CodecTensor::scratch_sizes() const {
  const auto tensor_elems = static_cast<std::size_t>(elems());
  return {.tensor_elems = tensor_elems,
          .magnitude_elems = setup_.codec->is_majority_vote() ? tensor_elems : 0,
          .codec_bytes = codec_scratch_bytes(),
          .joint_bytes = setup_.codec->max_payload_bytes(setup_.rows, setup_.cols, setup_.encoded)};
}

std::size_t CodecTensor::codec_scratch_bytes() const {
  return setup_.codec->scratch_bytes(setup_.rows, setup_.cols, setup_.encoded);
}

void CodecTensor::set_memory(const FeedbackMemory& memory, const FeedbackMemory& spare) {
  memory_ = memory;
  spare_ = spare;
}

EncodeContext CodecTensor::context(std::int64_t step) const {
  EncodeContext context = setup_.key;
  context.step = static_cast<std::uint64_t>(step);
  return context;
}

CodecTensor::Prepared CodecTensor::prepare(const void* gradient, double gradient_scale, CodecScratch& scratch) {
  settled_ = false;
  rolled_back_ = {};
  is_held_ = gradient == nullptr;
  if (is_held_) {
    std::fill_n(scratch.sum.data(), elems(), 0.0f);
    squares_ = {};
    return {view_of(scratch.sum.data()), true};
  }
  if (!setup_.has_feedback) {
    const bool finite = all_finite(gradient, elems(), setup_.dtype);
    if (setup_.encoded == setup_.dtype) return {{gradient, setup_.dtype, setup_.rows, setup_.cols}, finite};
    float buffer[kChunkElems];
    for_chunks(elems(), [&](std::int64_t at, std::int64_t count) {
      std::copy_n(load_floats(gradient, setup_.dtype, at, count, buffer), count, scratch.sum.data() + at);
    });
    return {view_of(scratch.sum.data()), finite};
  }
  pass_ = {.elems = elems(),
           .gradient = gradient,
           .dtype = setup_.dtype,
           .gradient_scale = static_cast<float>(1.0 / gradient_scale),
           .momentum = setup_.momentum};
  const bool finite = add_gradient(pass_, memory_, fresh());
  return {view_of(fresh().residual), finite};
}

float CodecTensor::mean_scale(double gradient_scale) const {
  return static_cast<float>((setup_.has_feedback ? gradient_scale : 1.0) / setup_.world_size);
}

// A velocity that was cleared can't be had again, so without another one it waits for the verdict.
void CodecTensor::settle_if(Settle settle, const float* own) {
  if (is_held_) return;
  const bool undoable = !spare_.empty() || !rolled_back_.empty() || memory_.velocity == nullptr;
  if (settle == Settle::kNever || (settle == Settle::kIfUndoable && !undoable)) return;
  if (narrows() && !all_finite(own, elems(), DType::kFloat32)) {
    if (settle != Settle::kYes) return;  // an Inf could not be taken back
    // Nobody looked, as an engine on a device does not: what came as Inf is owed no more.
    float* const residual = fresh().residual;
    for (std::int64_t i = 0; i < elems(); ++i) residual[i] = std::isfinite(own[i]) ? residual[i] - own[i] : 0.0f;
    squares_ = {};
    settled_ = true;
    return;
  }
  squares_ = subtract_sent(own, elems(), fresh());
  settled_ = true;
}

Status CodecTensor::commit(PayloadOfRank payload, CodecScratch& scratch) {
  if (!setup_.has_feedback || is_held_) return {};
  if (!settled_) {
    CORTADO_RETURN_IF_ERROR(decode_own(payload, scratch));
    settle_if(Settle::kYes, scratch.decoded.data());
  }
  if (!spare_.empty()) std::swap(memory_, spare_);
  return {};
}

void CodecTensor::prepare_rollback(const FeedbackMemory& rolled_back) {
  CORTADO_CHECK(setup_.has_feedback && spare_.empty(), "a rollback of this tensor needs no gradient");
  if (is_held_) return;
  take_back(pass_, memory_, rolled_back);
  rolled_back_ = rolled_back;
  rolled_back_squares_ = squares_;
}

Status CodecTensor::rollback(const void* gradient, PayloadOfRank payload, CodecScratch& scratch) {
  if (!setup_.has_feedback || !spare_.empty() || is_held_) return {};
  if (!rolled_back_.empty()) {
    std::copy_n(rolled_back_.residual, elems(), memory_.residual);
    if (memory_.velocity != nullptr) std::copy_n(rolled_back_.velocity, elems(), memory_.velocity);
    squares_ = rolled_back_squares_;
    return {};
  }
  if (settled_) {
    CORTADO_RETURN_IF_ERROR(decode_own(payload, scratch));
    add_values(scratch.decoded.data(), elems(), memory_.residual);
  }
  pass_.gradient = gradient;
  take_back(pass_, memory_, memory_);
  return {};
}

// ---- gathered ------------------------------------------------------------------------------------------------------

Result<CodecTensor::Encoded> GatheredTensor::encode(const void* gradient, double gradient_scale, std::int64_t step,
                                                    std::span<std::byte> slot, CodecScratch& scratch) {
  const Prepared prepared = prepare(gradient, gradient_scale, scratch);
  CORTADO_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                           setup().codec->encode(prepared.input, context(step), slot, scratch.codec.span()));
  return Encoded{bytes, prepared.finite};
}

Status GatheredTensor::decode_rank(int rank, PayloadOfRank payload, float* decoded, CodecScratch& scratch) {
  return of_rank(setup().codec->decode(payload(rank, scratch.joint.span()), view_of(decoded), scratch.codec.span()),
                 rank);
}

Status GatheredTensor::add_decoded_rank(int rank, PayloadOfRank payload, CodecScratch& scratch) {
  return of_rank(
      setup().codec->decode_add(payload(rank, scratch.joint.span()), view_of(scratch.sum.data()), scratch.codec.span()),
      rank);
}

Status GatheredTensor::decode_own(PayloadOfRank payload, CodecScratch& scratch) {
  return decode_rank(setup().rank, payload, scratch.decoded.data(), scratch);
}

Status GatheredTensor::decode(const Arrived& arrived, double gradient_scale, Settle settle, void* gradient_and_output,
                              CodecScratch& scratch) {
  const bool begins_sum = setup().encoded == DType::kFloat32 && !setup().codec->is_majority_vote();
  const bool adds = begins_sum && setup().codec->can_add();
  const float scale = mean_scale(gradient_scale);
  for (int rank = 0; rank < setup().world_size; ++rank) {
    if (adds && rank > 0 && rank != setup().rank) {
      CORTADO_RETURN_IF_ERROR(add_decoded_rank(rank, arrived.payload, scratch));
      if (rank == setup().world_size - 1) {
        store_floats(scratch.sum.data(), scale, elems(), gradient_and_output, setup().dtype, 0, streams_mean());
      }
      continue;
    }
    float* decoded = rank == 0 && begins_sum ? scratch.sum.data() : scratch.decoded.data();
    CORTADO_RETURN_IF_ERROR(decode_rank(rank, arrived.payload, decoded, scratch));
    if (rank == setup().rank && setup().has_feedback) settle_if(settle, decoded);
    if (rank == setup().rank && !setup().has_feedback && arrived.finite) {
      keep_error(compare_sent(gradient_and_output, setup().dtype, decoded, setup().encoded, elems()));
    }
    if (decoded == scratch.sum.data()) continue;
    add_rank(rank, scale, gradient_and_output, scratch);
  }
  if (streams_mean()) finish_streams();
  // What was left out of the residual is missing in the payload too; nobody may take that for a gradient.
  if (!arrived.finite && all_finite(gradient_and_output, elems(), setup().dtype)) {
    fill_with_nan(gradient_and_output, elems(), setup().dtype);
  }
  return {};
}

// Not where it is looked through for overflow at once.
bool GatheredTensor::streams_mean() const {
  constexpr auto kElemBytes = static_cast<std::int64_t>(sizeof(float));
  return setup().dtype == DType::kFloat32 && !narrows() && elems() * kElemBytes >= kLeastStreamedGradientBytes;
}

void GatheredTensor::add_rank(int rank, float mean_scale, void* output, CodecScratch& scratch) const {
  const bool is_first = rank == 0, is_last = rank == setup().world_size - 1;
  float buffer[kChunkElems];
  for_chunks(elems(), [&](std::int64_t at, std::int64_t count) {
    const float* decoded = load_floats(scratch.decoded.data(), setup().encoded, at, count, buffer);
    float* sum = scratch.sum.data() + at;
    if (setup().codec->is_majority_vote()) {
      float* magnitude = scratch.magnitude.data() + at;
      for (std::int64_t i = 0; i < count; ++i) {
        sum[i] = (is_first ? 0.0f : sum[i]) + sign_of(decoded[i]);
        magnitude[i] = (is_first ? 0.0f : magnitude[i]) + std::fabs(decoded[i]);
      }
      if (!is_last) return;
      for (std::int64_t i = 0; i < count; ++i) sum[i] = sign_of(sum[i]) * magnitude[i];
    } else if (is_first) {
      std::copy_n(decoded, count, sum);
    } else {
      add_values(decoded, count, sum);
    }
    if (is_last) store_floats(sum, mean_scale, count, output, setup().dtype, at, streams_mean());
  });
}

// ---- summed --------------------------------------------------------------------------------------------------------

SummedTensor::SummedTensor(const Setup& setup)
    : CodecTensor(setup),
      sparsifier_(*setup.codec->sparsifier()),
      own_values_(static_cast<std::size_t>(sparsifier_.max_kept(setup.rows, setup.cols))),
      index_(sparsifier_.max_index_bytes(setup.rows, setup.cols)) {}

std::int64_t SummedTensor::bytes() const {
  return static_cast<std::int64_t>(own_values_.size() * sizeof(float) + index_.size());
}

std::size_t SummedTensor::codec_scratch_bytes() const {
  return sparsifier_.select_scratch_bytes(setup().rows, setup().cols, setup().encoded);
}

Result<CodecTensor::Encoded> SummedTensor::encode(const void* gradient, double gradient_scale, std::int64_t step,
                                                  std::span<std::byte> slot, CodecScratch& scratch) {
  const Prepared prepared = prepare(gradient, gradient_scale, scratch);
  std::fill(own_values_.begin(), own_values_.end(), 0.0f);
  CORTADO_ASSIGN_OR_RETURN(
      selection_, sparsifier_.select(prepared.input, context(step), own_values_, index_, scratch.codec.span()));
  std::memcpy(slot.data(), own_values_.data(), own_values_.size() * sizeof(float));
  if (!prepared.finite) *reinterpret_cast<float*>(slot.data()) = std::numeric_limits<float>::quiet_NaN();
  return Encoded{slot.size(), prepared.finite};
}

Status SummedTensor::decode_own(PayloadOfRank, CodecScratch& scratch) {
  return sparsifier_.scatter(std::span(index_).first(selection_.index_bytes),
                             std::span(own_values_).first(static_cast<std::size_t>(selection_.kept)),
                             view_of(scratch.decoded.data()), scratch.codec.span());
}

// The residual is settled in commit(), which needs this rank's own values, not their sum.
Status SummedTensor::decode(const Arrived& arrived, double gradient_scale, Settle, void* gradient_and_output,
                            CodecScratch& scratch) {
  if (!setup().has_feedback && arrived.finite) {
    CORTADO_RETURN_IF_ERROR(decode_own(arrived.payload, scratch));
    keep_error(compare_sent(gradient_and_output, setup().dtype, scratch.decoded.data(), setup().encoded, elems()));
  }
  const auto kept = static_cast<std::size_t>(selection_.kept);
  scale_values(arrived.summed.data(), mean_scale(gradient_scale), selection_.kept, scratch.sum.data());
  return sparsifier_.scatter(std::span(index_).first(selection_.index_bytes),
                             std::span<const float>(scratch.sum.data(), kept),
                             {gradient_and_output, setup().dtype, setup().rows, setup().cols}, scratch.codec.span());
}

}  // namespace cortado

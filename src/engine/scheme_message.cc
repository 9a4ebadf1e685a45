// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/scheme_message.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "codec/cast/float_chunks.h"
#include "core/check.h"
#include "core/finite.h"
#include "engine/trained_codec.h"

namespace cortado {

Result<std::unique_ptr<PlanMessage>> SchemeMessage::make(const Setup& setup) {
  std::unique_ptr<SchemeMessage> message(new SchemeMessage);
  message->tensors_ = setup.tensors;
  message->world_size_ = setup.levels->topology().world_size();
  if (setup.bucket->option.encodes() > 0) {
    EngineOptions options;
    options.codec = setup.bucket->codec;
    if (!setup.bucket->error_feedback) options.feedback = EngineOptions::Feedback::kNone;
    CORTADO_ASSIGN_OR_RETURN(TrainedCodec trained, make_trained_codec(options));
    message->codec_ = std::move(trained.codec);
    const auto is_vector = [](const EngineTensor& tensor) { return tensor.dimensions < 2; };
    const auto vector = std::find_if(setup.tensors.begin(), setup.tensors.end(), is_vector);
    if (message->codec_->row().traits.low_rank && vector != setup.tensors.end()) {
      return make_error(StatusCode::kUnsupported,
                        "\"%s\" has one dimension, of which \"%s\" would leave one number; expected the option "
                        "encode all_reduce decode over all levels, where vectors stay whole, or another bucket",
                        vector->name.c_str(), setup.bucket->codec.c_str());
    }
    message->has_feedback_ = trained.has_feedback();
  }
  SchemeSetup scheme{.levels = setup.levels,
                     .option = setup.bucket->option,
                     .codec = message->codec_.get(),
                     .has_feedback = message->has_feedback_,
                     .averages = message->codec_ != nullptr,
                     .seed = setup.seed,
                     .clock = setup.clock,
                     .device = setup.device,
                     .lends_memory = true};
  for (const EngineTensor& tensor : setup.tensors) scheme.tensors.push_back({tensor.name, tensor.rows, tensor.cols});
  CORTADO_ASSIGN_OR_RETURN(message->run_, SchemeRun::make(scheme));
  return std::unique_ptr<PlanMessage>(std::move(message));
}

void SchemeMessage::begin_step(const StepContext& context) {
  context_ = context;
  run_->coder().hold_zeros(context.holds_zero_gradients);
}

float SchemeMessage::loss_scale() const { return has_feedback_ ? static_cast<float>(context_.gradient_scale) : 1.0f; }

float SchemeMessage::unscale() const { return run_->result_scale() * (codec_ == nullptr ? 1.0f : loss_scale()); }

void SchemeMessage::write(int slot, void* gradient, const float* carried) {
  const DType dtype = tensors_[static_cast<std::size_t>(slot)].dtype;
  const float scale = codec_ == nullptr ? 1.0f / static_cast<float>(world_size_) : 1.0f / loss_scale();
  // In double, where the first product may be above the largest float.
  const auto carried_scale = static_cast<float>(std::min<double>(
      context_.gradient_scale * world_size_ * static_cast<double>(scale), std::numeric_limits<float>::max()));
  run_->lend(slot, {.data = gradient,
                    .dtype = dtype,
                    .scale = scale,
                    .added = carried,
                    .added_scale = carried_scale,
                    .result_scale = unscale()});
  if (run_->reads_lent()) return;
  const std::span<float> values = run_->values(slot);
  float buffer[kChunkElems];
  for_chunks(static_cast<std::int64_t>(values.size()), [&](std::int64_t at, std::int64_t count) {
    store_floats(load_floats(gradient, dtype, at, count, buffer), scale, count, values.data(), DType::kFloat32, at);
  });
  if (carried == nullptr) return;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += carried[i] * carried_scale;
}

bool SchemeMessage::read(int slot, void* gradient) {
  if (run_->writes_lent()) return run_->coder().is_finite(slot);
  const std::span<const float> sums = run_->sums(slot);
  const auto elems = static_cast<std::int64_t>(sums.size());
  bool finite = true;
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    store_floats(sums.data() + at, unscale(), count, gradient, tensors_[static_cast<std::size_t>(slot)].dtype, at);
    finite = all_finite(sums.data() + at, count, DType::kFloat32) && finite;
  });
  return finite;
}

std::vector<MessageResidual> SchemeMessage::residuals() {
  std::vector<MessageResidual> residuals;
  for (const SchemeCoder::Residual& residual : run_->coder().residuals()) {
    residuals.push_back({.slot = residual.tensor,
                         .place = residual.place,
                         .begin = residual.begin,
                         .values = residual.values,
                         .share = residual.share,
                         .replicas = residual.replicas});
  }
  return residuals;
}

std::int64_t SchemeMessage::payload_bytes(int slot) const {
  if (codec_ != nullptr) return run_->coder().encoded_bytes(slot);
  const EngineTensor& tensor = tensors_[static_cast<std::size_t>(slot)];
  return tensor.elems() * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/engine.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/hash.h"
#include "core/seconds.h"
#include "engine/engine_impl.h"
#include "engine/plan_engine.h"
#include "engine/round_layouts.h"

namespace cortado {

using Method = EngineOptions::Method;

namespace {

constexpr const char* kDeviceRefused = "a device that can't be used";

std::string describe_tensor(const EngineTensor& tensor) {
  char text[80];
  std::snprintf(text, sizeof(text), " %" PRId64 " x %" PRId64 " %s, %d-D%s", tensor.rows, tensor.cols,
                std::string(dtype_name(tensor.dtype)).c_str(), tensor.dimensions,
                tensor.is_embedding ? ", embedding" : "");
  return tensor.name + text;
}

std::vector<std::string> describe_tensors(const std::vector<EngineTensor>& tensors) {
  std::vector<std::string> descriptions;
  for (const EngineTensor& tensor : tensors) descriptions.push_back(describe_tensor(tensor));
  return descriptions;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                               Communicator* communicator, const Clock* clock, TraceRecorder* trace) {
  return EngineImpl::make(std::move(tensors), options, communicator, clock, trace, {});
}

Result<std::unique_ptr<Engine>> EngineImpl::make(std::vector<EngineTensor> tensors, const EngineOptions& given,
                                                 Communicator* communicator, const Clock* clock, TraceRecorder* trace,
                                                 EngineDevice device) {
  EngineOptions options = given;
  if (options.phase == EngineOptions::Phase::kGlobal) options.sides = EngineOptions::Sides::kAlternate;
  if (options.method == Method::kCodec) options.wire = DType::kFloat32;
  // Ranks agree on what they were asked for before one of them returns an error of its own model, which then comes on
  // all of them; a device that can't be used, and options that no string could say, may be of one rank alone, which
  // tells the others here: all fail as it does.
  const std::vector<std::string> descriptions = describe_tensors(tensors);
  const Status allowed = check_options(given);
  Status opened = device.failure;
  const auto make_own = [&]() -> Result<std::unique_ptr<EngineImpl>> {
    CORTADO_RETURN_IF_ERROR(allowed);
    TrainedCodec codec;
    if (options.method == Method::kCodec) {
      CORTADO_ASSIGN_OR_RETURN(codec, make_trained_codec(options));
    }
    CORTADO_ASSIGN_OR_RETURN(std::vector<Treatment> treatments, choose_treatments(tensors, options, codec));
    auto engine = std::make_unique<EngineImpl>(std::move(tensors), options, std::move(codec), std::move(treatments),
                                               communicator, clock, trace);
    if (device.queue != nullptr) opened = engine->open_device(std::move(device));
    return engine;
  };
  Result<std::unique_ptr<EngineImpl>> made = make_own();
  const std::string settings = options.method == Method::kPlan ? "a plan" : options.results_spec();
  const double timeout_s = options.timeout_s > 0 ? options.timeout_s : EngineOptions().timeout_s;
  const Status own = allowed.ok() ? opened.with_context(kDeviceRefused) : allowed;
  CORTADO_RETURN_IF_ERROR(check_agreement(communicator, settings, descriptions, from_seconds(timeout_s), own));
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<EngineImpl> engine, std::move(made));
  CORTADO_RETURN_IF_ERROR(engine->agree_on_overflow());
  if (engine->first_ != nullptr && !engine->in_warm_up()) engine->allocate_feedback();
  return std::unique_ptr<Engine>(std::move(engine));
}

Result<std::unique_ptr<Engine>> Engine::create(std::vector<EngineTensor> tensors, const Plan& plan,
                                               const EngineOptions& given, Communicator* communicator,
                                               const Clock* clock, TraceRecorder* trace,
                                               std::shared_ptr<const SchemeDevice> device) {
  EngineOptions options;
  options.method = Method::kPlan;
  options.codec = plan_summary(plan);
  options.random_seed = given.random_seed;
  options.timeout_s = given.timeout_s;
  const auto timeout = from_seconds(options.timeout_s);
  CORTADO_RETURN_IF_ERROR(check_agreement(communicator, options.results_spec(), describe_tensors(tensors), timeout));
  CORTADO_RETURN_IF_ERROR(check_tensors(tensors));
  Result<std::unique_ptr<PlanEngine>> made =
      PlanEngine::make(std::move(tensors), plan, options, communicator, clock, trace, std::move(device));
  CORTADO_RETURN_IF_ERROR(agree_on_outcome(communicator, "settings of the plan", made.status(), timeout));
  return std::unique_ptr<Engine>(std::move(made).value());
}

Status Engine::switch_plan(const Plan&) {
  return make_error(StatusCode::kFailedPrecondition, "switch_plan: this engine executes \"%s\", not a plan",
                    options().to_spec().c_str());
}

EngineImpl::EngineImpl(std::vector<EngineTensor> tensors, const EngineOptions& options, TrainedCodec codec,
                       std::vector<Treatment> treatments, Communicator* communicator, const Clock* clock,
                       TraceRecorder* trace)
    : EngineBase(std::move(tensors), options, communicator, clock, trace),
      treatments_(std::move(treatments)),
      pool_(options.threads),
      codec_(std::move(codec)),
      low_rank_(tensors_.size()),
      codec_tensors_(tensors_.size()),
      steps_(tensors_.size()),
      rolled_back_(tensors_.size()) {
  buffers_.reserve(tensors_.size() + 1);
  waiting_.reserve(tensors_.size());
  if (passes_through() || options_.method == Method::kNone) return;
  make_tensors();
  make_rounds();
}

void EngineImpl::make_tensors() {
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    if (!treatments_[t].is_compressed()) continue;
    options_.method == Method::kCodec ? make_codec_tensor(t) : make_low_rank_tensor(t);
  }
  CodecScratchSizes sizes;
  for (const std::unique_ptr<CodecTensor>& tensor : codec_tensors_) {
    if (tensor != nullptr) sizes.merge(tensor->scratch_sizes());
  }
  if (sizes.tensor_elems > 0) scratch_ = CodecScratchPool(pool_.threads(), sizes);
}

void EngineImpl::make_low_rank_tensor(std::size_t t) {
  low_rank_[t] = LowRankTensor::make(
      options_, {.rows = tensors_[t].rows,
                 .cols = tensors_[t].cols,
                 .rank = treatments_[t].rank,
                 .dtype = tensors_[t].dtype,
                 .wire = options_.wire,
                 .world_size = communicator_->world_size(),
                 .warm_start = options_.warm_start,
                 .key = {.seed = options_.random_seed, .step = 0, .tensor = fnv1a_64(tensors_[t].name)}});
}

// Ranks draw independent numbers, so that what they round at random cancels out; unless they must draw the same ones.
std::uint64_t EngineImpl::codec_seed() const {
  constexpr std::uint64_t kOddNumber = 0xbf58476d1ce4e5b9u;  // not that of the stages of a composition
  const std::uint64_t of_rank = codec_.is_summed ? 0 : kOddNumber * static_cast<std::uint64_t>(communicator_->rank());
  return options_.random_seed + of_rank;
}

void EngineImpl::make_codec_tensor(std::size_t t) {
  const CodecTensor::Setup setup{.codec = codec_.codec.get(),
                                 .rows = tensors_[t].rows,
                                 .cols = tensors_[t].cols,
                                 .dtype = tensors_[t].dtype,
                                 .encoded = treatments_[t].encoded,
                                 .world_size = communicator_->world_size(),
                                 .rank = communicator_->rank(),
                                 .has_feedback = codec_.has_feedback(),
                                 .momentum = static_cast<float>(options_.momentum),
                                 .key = {.seed = codec_seed(), .step = 0, .tensor = fnv1a_64(tensors_[t].name)}};
  if (codec_.is_summed) {
    codec_tensors_[t] = std::make_unique<SummedTensor>(setup);
  } else {
    codec_tensors_[t] = std::make_unique<GatheredTensor>(setup);
  }
}

void EngineImpl::make_rounds() {
  const auto make_round = [&](std::vector<Layout> of_parity, DType dtype) {
    return std::make_unique<Round>(Round::Layouts{std::move(of_parity), tensors_.size(), dtype, names()}, communicator_,
                                   clock_);
  };
  if (in_warm_up()) warm_up_ = make_round({warm_up_layout(tensors_, treatments_)}, DType::kFloat32);
  RoundLayouts layouts = choose_round_layouts(tensors_, treatments_, options_, codec_);
  first_ = make_round(std::move(layouts.first), options_.wire);
  if (layouts.second.has_value()) second_ = make_round({*std::move(layouts.second)}, options_.wire);
}

bool EngineImpl::has_feedback() const {
  if (options_.method == Method::kCodec) return codec_.has_feedback();
  return compresses() && options_.use_error_feedback;
}

void EngineImpl::allocate_feedback() {
  if (!has_feedback()) return;
  std::vector<std::int64_t> elems;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    const bool is_here = treatments_[t].is_compressed() && !is_on_device(t);
    elems.push_back(is_here ? tensors_[t].elems() : 0);
  }
  residuals_ = ResidualStore(elems, is_exact());
  const bool has_velocity = codec_.feedback == EngineOptions::Feedback::kDgc;
  if (has_velocity) velocities_ = ResidualStore(elems, is_exact());
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (low_rank_[t] != nullptr) low_rank_[t]->set_residual(residuals_.residual(t), residuals_.spare(t));
    if (codec_tensors_[t] == nullptr || is_on_device(t)) continue;
    codec_tensors_[t]->set_memory({residuals_.residual(t), has_velocity ? velocities_.residual(t) : nullptr},
                                  {residuals_.spare(t), has_velocity ? velocities_.spare(t) : nullptr});
  }
}

// Nothing is awaited once the last message is there. Engines on a device do without: there gradients are copies, and
// what the device encoded is decoded there.
void EngineImpl::allocate_rolled_back() {
  const std::vector<Message>& messages = first_->layout().messages;
  const bool has_velocity = codec_.feedback == EngineOptions::Feedback::kDgc;
  for (std::size_t m = 0; m + 1 < messages.size(); ++m) {
    for (const Slot& slot : messages[m].slots) {
      if (slot.kind != SlotKind::kPayload) continue;
      const auto elems = static_cast<std::size_t>(tensors_[slot.tensor].elems());
      rolled_back_[slot.tensor] = AlignedBuffer<float>(has_velocity ? 2 * elems : elems);
    }
  }
  has_rolled_back_ = true;
}

void EngineImpl::release_rolled_back() {
  for (AlignedBuffer<float>& memory : rolled_back_) memory = {};
  has_rolled_back_ = false;
}

// What is coded on a device is not looked at on its way back; if that is so on one rank, no rank looks.
Status EngineImpl::agree_on_overflow() {
  bool some = false, on_device = false;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    some = some || may_overflow(t);
    on_device = on_device || (may_overflow(t) && is_on_device(t));
  }
  if (!some || passes_through()) return {};
  const std::int64_t own[] = {on_device};
  const auto most = largest_of_ranks(communicator_, std::span<const std::int64_t>(own), timeout());
  if (!most.ok()) return most.status().with_context("comparing settings, of where fp16 is coded");
  looks_for_overflow_ = most.value()[0] == 0;
  return {};
}

}  // namespace cortado

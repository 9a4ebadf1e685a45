// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/kfac.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <unordered_set>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"
#include "core/linalg.h"
#include "core/seconds.h"
#include "cortado/spec.h"
#include "kfac/kfac_impl.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

std::string layer_text(const KfacLayer& layer) {
  char text[240];
  int used = std::snprintf(text, sizeof(text), " %" PRId64 " x %" PRId64 "%s, %" PRId64 " groups", layer.outputs,
                           layer.inputs, layer.has_bias ? " with bias" : "", layer.groups);
  for (const KfacWindow& w : layer.window) {
    used += std::snprintf(text + used, sizeof(text) - static_cast<std::size_t>(used),
                          ", window %" PRId64 " stride %" PRId64 " dilation %" PRId64 " padding %" PRId64 "+%" PRId64,
                          w.size, w.stride, w.dilation, w.pad_before, w.pad_after);
  }
  return layer.name + text + (layer.is_convolution ? ", convolution" : "");
}

Status check_layer(const KfacLayer& layer) {
  const auto refuse = [&](const std::string& what) {
    return make_error(StatusCode::kInvalidArgument, "layer %s: %s", layer.name.c_str(), what.c_str());
  };
  if (layer.inputs < 1 || layer.outputs < 1 || layer.groups < 1) {
    return refuse("inputs, outputs and groups must be positive, got " + std::to_string(layer.inputs) + ", " +
                  std::to_string(layer.outputs) + " and " + std::to_string(layer.groups));
  }
  if (layer.a_dim() > kMaxMatrixDim || layer.g_dim() > kMaxMatrixDim) {
    return refuse("a factor of " + std::to_string(std::max(layer.a_dim(), layer.g_dim())) +
                  " rows is too large, at most " + std::to_string(kMaxMatrixDim) + " are possible");
  }
  if (!checked_mul(layer.groups, std::max(layer.a_dim(), layer.g_dim()) * std::max(layer.a_dim(), layer.g_dim()) * 8)
           .has_value()) {
    return refuse("no memory holds its groups");
  }
  for (const KfacWindow& window : layer.window) {
    const bool is_point = window.size == 1 && window.stride == 1 && window.pad_before == 0 && window.pad_after == 0;
    if (window.size < 1 || window.stride < 1 || window.dilation < 1 || window.pad_before < 0 || window.pad_after < 0 ||
        (!layer.is_convolution && !is_point)) {
      return refuse("its window is not possible");
    }
  }
  if (!layer.is_convolution && layer.groups != 1) return refuse("linear layers have no groups");
  if (layer.inputs % (layer.window[0].size * layer.window[1].size) != 0) {
    return refuse("inputs are no multiple of the size of its window");
  }
  return {};
}

Result<KfacGrid> grid_of(const KfacOptions& options, int world_size) {
  switch (options.strategy) {
    case KfacStrategy::kCommOpt:
      return KfacGrid{.workers = world_size, .columns = 1};
    case KfacStrategy::kMemOpt:
    case KfacStrategy::kDpKfac:
      return KfacGrid{.workers = 1, .columns = world_size};
    case KfacStrategy::kHybridOpt:
      break;
  }
  if (options.workers < 1 || world_size % options.workers != 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "HYBRID-OPT: gradient workers of a layer must divide the world size %d, got %d", world_size,
                      options.workers);
  }
  return KfacGrid{.workers = options.workers, .columns = world_size / options.workers};
}

constexpr std::string_view kAutoCodec = "auto";

// Before "auto" has decided.
std::string first_codec(const std::string& spec) { return spec == kAutoCodec ? "none" : spec; }

bool is_auto(const KfacOptions& options) {
  return options.gradients.codec == kAutoCodec || options.factor_compression == kAutoCodec;
}

// "topk | quant" of "topk(density=0.01) | quant(bits=4)".
Result<std::string> names_of(const std::string& spec) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<SpecStage> stages, parse_spec(spec));
  std::string names;
  for (const SpecStage& stage : stages) names += (names.empty() ? "" : " | ") + stage.name;
  return names;
}

Status already_chosen(const char* message) {
  return make_error(StatusCode::kFailedPrecondition, "\"auto\" chooses the codec of %s, so it can't be set", message);
}

Status check_auto(const KfacOptions& options, int world_size) {
  if (!is_auto(options) || world_size == 1) return {};
  const int ranks = options.cluster.has_value() ? options.cluster->topology().world_size() : 0;
  if (ranks != world_size) {
    return make_error(StatusCode::kInvalidArgument, "compression \"auto\" needs a cluster of %d ranks, got one of %d",
                      world_size, ranks);
  }
  CORTADO_RETURN_IF_ERROR(options.cluster->check());
  if (!(options.min_gain >= 0 && options.min_gain < 1)) {
    return make_error(StatusCode::kInvalidArgument, "min_gain must be from 0 to less than 1, got %g", options.min_gain);
  }
  for (const std::string& candidate : options.candidates) {
    CORTADO_RETURN_IF_ERROR(TensorListCodec::create(candidate).status());
  }
  return {};
}

Status check_options(const KfacOptions& options, const std::vector<KfacLayer>& layers) {
  if (options.threads < 1 || options.threads > 1024) {
    return make_error(StatusCode::kInvalidArgument, "threads must be from 1 to 1024, got %d", options.threads);
  }
  if (options.pi_correction && options.inverse == KfacInverse::kCholesky && !options.colocate_factors) {
    return make_error(StatusCode::kInvalidArgument,
                      "pi_correction with cholesky needs both factors on one rank: colocate_factors");
  }
  std::unordered_set<std::string_view> names;
  for (const KfacLayer& layer : layers) {
    CORTADO_RETURN_IF_ERROR(check_layer(layer));
    if (!names.insert(layer.name).second) {
      return make_error(StatusCode::kInvalidArgument, "two layers have the name %s", layer.name.c_str());
    }
  }
  return {};
}

}  // namespace

std::string_view kfac_strategy_name(KfacStrategy strategy) {
  constexpr std::string_view kNames[] = {"COMM-OPT", "HYBRID-OPT", "MEM-OPT", "DP-KFAC"};
  return kNames[static_cast<int>(strategy)];
}

std::string_view kfac_stage_name(KfacStage stage) {
  constexpr std::string_view kNames[kKfacStageCount] = {
      "factors",      "reduce_factors", "inverses", "gather_inverses", "reduce_gradients",
      "precondition", "encode",         "gather",   "decode",          "apply"};
  return kNames[static_cast<int>(stage)];
}

std::string settings_text(const KfacOptions& options) {
  std::string text(kfac_strategy_name(options.strategy));
  text += ", workers " + std::to_string(options.workers);
  text += options.inverse == KfacInverse::kEigen ? ", eigen" : ", cholesky";
  text += options.pi_correction ? ", pi_correction" : "";
  text += options.colocate_factors ? ", colocate_factors" : "";
  text += options.balance_memory ? ", balance_memory" : "";
  text += ", gradients " + options.gradients.codec;
  text += options.gradients.use_error_feedback ? ", error feedback" : "";
  text += ", aggregate " + std::to_string(options.gradients.aggregate);
  text += ", seed " + std::to_string(options.gradients.random_seed);
  text += ", factor_compression " + options.factor_compression;
  if (!options.schedule.empty()) text += ", " + options.schedule;
  // Ranks that compute the same for themselves get the same bytes on devices of one kind only.
  const bool compute_the_same =
      options.strategy == KfacStrategy::kCommOpt || options.strategy == KfacStrategy::kHybridOpt;
  if (compute_the_same && options.device != nullptr) text += ", on a device: " + options.device->kind();
  if (!is_auto(options)) return text;
  for (const std::string& candidate : options.candidates) text += ", candidate " + candidate;
  text += ", min_gain " + std::to_string(options.min_gain);
  const int ranks = options.cluster.has_value() ? options.cluster->topology().world_size() : 0;
  return text + ", cluster of " + std::to_string(ranks) + " ranks";
}

Status KfacImpl::set_compression(std::string_view spec) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (options_.gradients.codec == kAutoCodec) return already_chosen("gradients");
  CORTADO_RETURN_IF_ERROR(gradient_gather_->set_codec(spec));
  options_.gradients.codec = spec;
  return {};
}

std::string KfacImpl::codecs_text() const {
  std::string text = "gradients " + options_.gradients.codec + ", factors " + options_.factor_compression;
  if (!is_auto(options_)) return text;
  for (const std::string& candidate : candidates_) text += ", candidate " + candidate;
  return text;
}

Status KfacImpl::set_factor_compression(std::string_view spec) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (options_.factor_compression == kAutoCodec) return already_chosen("factors");
  CORTADO_ASSIGN_OR_RETURN(TensorListCodec codec, TensorListCodec::create(spec));
  if (spec == options_.factor_compression) return {};
  CORTADO_RETURN_IF_ERROR(inverse_gather_->set_codec(spec, 0));
  sync_->set_codec(std::move(codec));
  options_.factor_compression = spec;
  return {};
}

Status KfacImpl::set_candidates(const std::vector<std::string>& candidates) {
  CORTADO_RETURN_IF_ERROR(failure_);
  if (!is_auto(options_)) {
    return make_error(StatusCode::kFailedPrecondition,
                      "candidates are of \"auto\", and no codec was \"auto\" when this was made");
  }
  if (candidates.size() != candidates_.size()) {
    return make_error(StatusCode::kInvalidArgument, "expected as many candidates as at first, %zu, got %zu",
                      candidates_.size(), candidates.size());
  }
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    CORTADO_RETURN_IF_ERROR(TensorListCodec::create(candidates[c]).status());
    CORTADO_ASSIGN_OR_RETURN(const std::string name, names_of(candidates[c]));
    CORTADO_ASSIGN_OR_RETURN(const std::string first_name, names_of(options_.candidates[c]));
    if (name == first_name) continue;
    return make_error(StatusCode::kInvalidArgument, "candidate %zu was %s at first and must stay %s, got %s", c,
                      options_.candidates[c].c_str(), first_name.c_str(), candidates[c].c_str());
  }
  candidates_ = candidates;
  return {};
}

KfacImpl::~KfacImpl() {
  if (gradients_in_flight_ == nullptr) return;
  if (gradients_in_flight_->abandon("K-FAC was destroyed after a broken collective")) return;
  for (std::vector<float>& memory : gradient_memory_) keep_for_ever(std::move(memory));
  keep_for_ever(std::move(column_elems_));
  if (device_ != nullptr) keep_for_ever(std::move(device_));  // with its pinned memory
}

Status KfacImpl::prepare() {
  place_layers();
  allocate();
  CORTADO_ASSIGN_OR_RETURN(TensorListCodec codec, TensorListCodec::create(first_codec(options_.factor_compression)));
  sync_ = std::make_unique<FactorSync>(slots(), options_.strategy != KfacStrategy::kDpKfac, std::move(codec),
                                       options_.gradients.random_seed, options_.timeout_s, world_);
  if (device_ != nullptr) {
    if (Status status = prepare_device(); !status.ok()) return fail(status.with_context("K-FAC's device"));
  }
  if (Status status = reserve_inverses(); !status.ok()) return fail(status.with_context("memory for inverses"));
  for (const std::int64_t offset : offsets_) {  // a group of one neither reads nor writes
    result_of_layer_.push_back(stays_on_device() ? static_cast<void*>(this) : results_ + offset);
  }
  CORTADO_RETURN_IF_ERROR(prepare_inverse_gather());
  CORTADO_RETURN_IF_ERROR(prepare_gradient_gather());
  // Where nothing travels, nothing is chosen.
  const bool chooses = options_.factor_compression == kAutoCodec;
  auto_factors_.is_on = chooses && options_.strategy != KfacStrategy::kDpKfac && world_->world_size() > 1;
  auto_inverses_.is_on = chooses && grid_.workers > 1;
  auto_gradients_.is_on = options_.gradients.codec == kAutoCodec && grid_.columns > 1;
  candidates_ = options_.candidates;
  auto_factors_.choice.message = "factors";
  auto_inverses_.choice.message = "inverses";
  auto_gradients_.choice.message = "gradients";
  return {};
}

std::vector<FactorSlot> KfacImpl::slots() const {
  std::vector<FactorSlot> slots;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const KfacLayer& layer = layers_[i];
    slots.push_back({i, Side::kA, layer.a_dim(), layer.groups, placements_[i].a_rank});
    slots.push_back({i, Side::kG, layer.g_dim(), layer.groups, placements_[i].g_rank});
  }
  return slots;
}

void KfacImpl::place_layers() {
  std::vector<KfacWork> work;
  for (const KfacLayer& layer : layers_) {
    const auto cost = [&](std::int64_t n) {
      const auto rows = static_cast<double>(n);
      return static_cast<double>(layer.groups) * rows * rows * (options_.balance_memory ? 1 : rows);
    };
    work.push_back({cost(layer.a_dim()), cost(layer.g_dim())});
  }
  // DP-KFAC knows a layer's batches on its worker only, so both factors are there anyway.
  placements_ = assign_layers(work, grid_, options_.colocate_factors);
}

// The running factor, where this rank holds it.
void KfacImpl::begin_anew(const FactorSlot& slot) {
  if (slot.owner != rank()) return;
  HeldFactor& factor = factors_[2 * slot.layer + (slot.side == Side::kG ? 1 : 0)];
  for (std::int64_t m = 0; m < slot.matrices; ++m) {
    set_identity_triangle(slot.n, factor.running.data() + m * triangle_elems(slot.n));
  }
}

void KfacImpl::allocate() {
  factors_.resize(2 * layers_.size());
  for (const FactorSlot& slot : slots()) {
    HeldFactor& factor = factors_[2 * slot.layer + (slot.side == Side::kG ? 1 : 0)];
    if (slot.owner == rank()) factor.running.resize(static_cast<std::size_t>(slot.elems()));
    begin_anew(slot);
    if (!is_worker(slot.layer)) continue;
    factor.inverse.resize(static_cast<std::size_t>(slot.matrices * slot.n * slot.n));
    for (std::int64_t m = 0; m < slot.matrices; ++m) set_identity(slot.n, factor.inverse.data() + m * slot.n * slot.n);
    if (is_eigen()) factor.values.assign(static_cast<std::size_t>(slot.matrices * slot.n), 1.0f);
    if (!is_eigen() && grid_.workers > 1) factor.triangles.resize(static_cast<std::size_t>(slot.elems()));
  }

  offsets_.resize(layers_.size());
  column_elems_.assign(static_cast<std::size_t>(grid_.columns), 0);
  std::int64_t at = 0, largest = 0;
  for (int column = 0; column < grid_.columns; ++column) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (placements_[i].column != column) continue;
      offsets_[i] = at;
      at += layers_[i].gradient_elems();
      column_elems_[static_cast<std::size_t>(column)] += layers_[i].gradient_elems();
      largest = std::max(largest, layers_[i].gradient_elems() / layers_[i].groups);
    }
  }
  gradient_elems_ = at;
  if (device_ != nullptr) return;
  for (std::vector<float>& memory : gradient_memory_) memory.resize(static_cast<std::size_t>(at));
  gradients_ = gradient_memory_[0].data(), results_ = gradient_memory_[1].data();
  product_scratch_.resize(static_cast<std::size_t>(largest));
}

// What batches and gradients on a device need, and pinned memory for what comes from there and travels.
Status KfacImpl::prepare_device() {
  KfacDevice::Setup setup{.layers = layers_,
                          .adds = {},
                          .preconditions = {},
                          .offsets = offsets_,
                          .elems = gradient_elems_,
                          .is_eigen = is_eigen(),
                          .splits = options_.pi_correction,
                          .timeout_s = options_.timeout_s,
                          .peer_failure = [this] { return world_->peer_failure(); }};
  for (std::size_t s = 0; s < factors_.size(); ++s) setup.adds.push_back(sync_->wants(s));
  for (std::size_t i = 0; i < layers_.size(); ++i) setup.preconditions.push_back(is_worker(i));
  const int column = grid_.column_of(rank());
  for (int c = 0; c < column; ++c) setup.first += column_elems_[static_cast<std::size_t>(c)];
  setup.own_elems = column_elems_[static_cast<std::size_t>(column)];
  CORTADO_RETURN_IF_ERROR(device_->prepare(setup));
  return stays_on_device() ? Status() : allocate(&results_);
}

Status KfacImpl::allocate(float** pinned) {
  if (*pinned != nullptr) return {};
  CORTADO_ASSIGN_OR_RETURN(*pinned, device_->host_memory(gradient_elems_));
  return {};
}

Status KfacImpl::prepare_inverse_gather() {
  std::vector<OwnedTensor> tensors;
  const std::vector<FactorSlot> all = slots();
  for (std::size_t s = 0; s < all.size(); ++s) {
    const FactorSlot& slot = all[s];
    if (!is_worker(slot.layer)) continue;
    HeldFactor& factor = factors_[s];
    const std::string name = layers_[slot.layer].name + (slot.side == Side::kA ? ".A" : ".G");
    const int owner = grid_.row_of(slot.owner);
    gathered_slots_.push_back(s);
    if (is_eigen()) {
      tensors.push_back({name + ".vectors", DType::kFloat32, slot.matrices * slot.n, slot.n, owner});
      tensors.push_back({name + ".values", DType::kFloat32, 1, slot.matrices * slot.n, owner, /*is_exact=*/true});
      gathered_inverses_.push_back(factor.inverse.data());
      gathered_inverses_.push_back(factor.values.data());
    } else {
      tensors.push_back({name + ".inverse", DType::kFloat32, 1, slot.elems(), owner});
      gathered_inverses_.push_back(factor.triangles.data());
    }
  }
  const OwnerGatherOptions options = {.codec = first_codec(options_.factor_compression),
                                      .random_seed = options_.gradients.random_seed + 1,
                                      .timeout_s = options_.timeout_s};
  CORTADO_ASSIGN_OR_RETURN(inverse_gather_, OwnerGather::create(std::move(tensors), options, column_->get(), clock_));
  return {};
}

Status KfacImpl::prepare_gradient_gather() {
  std::vector<OwnedTensor> tensors;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const KfacLayer& layer = layers_[i];
    tensors.push_back(
        {layer.name, DType::kFloat32, layer.groups * layer.g_dim(), layer.a_dim(), placements_[i].column});
  }
  OwnerGatherOptions options = options_.gradients;
  options.codec = first_codec(options.codec);
  options.timeout_s = options_.timeout_s;
  CORTADO_ASSIGN_OR_RETURN(gradient_gather_, OwnerGather::create(std::move(tensors), options, row_->get(), clock_));
  return {};
}

Result<std::unique_ptr<Kfac>> Kfac::create(std::vector<KfacLayer> layers, const KfacOptions& options,
                                           Communicator* communicator, const Clock* clock) {
  std::vector<std::string> descriptions;
  for (const KfacLayer& layer : layers) descriptions.push_back(layer_text(layer));
  Status own = check_options(options, layers);
  if (own.ok()) own = check_auto(options, communicator->world_size());
  CORTADO_RETURN_IF_ERROR(
      check_agreement(communicator, settings_text(options), descriptions, from_seconds(options.timeout_s), own));
  CORTADO_ASSIGN_OR_RETURN(const KfacGrid grid, grid_of(options, communicator->world_size()));
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<GridGroup> column, GridGroup::create(communicator, grid, true));
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<GridGroup> row, GridGroup::create(communicator, grid, false));
  auto kfac = std::make_unique<KfacImpl>(std::move(layers), options, communicator, clock, grid, std::move(column),
                                         std::move(row));
  CORTADO_RETURN_IF_ERROR(kfac->prepare());
  return std::unique_ptr<Kfac>(std::move(kfac));
}

}  // namespace cortado

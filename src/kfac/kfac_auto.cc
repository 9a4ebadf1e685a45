// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// "auto": what this rank is about to send is encoded with every candidate, and rank 0 decides for all.
#include <algorithm>
#include <cstdio>

#include "core/check.h"
#include "core/finite.h"
#include "kfac/kfac_impl.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

// What rank 0 has decided, as it travels.
struct Decision {
  std::int64_t trial = -1, predicted_ns = 0, uncompressed_ns = 0;
  char reason[256] = {};
};

bool are_finite(const std::vector<TensorList>& lists) {
  for (const TensorList& list : lists) {
    for (const ConstTensorView& view : list) {
      if (!all_finite(view.data, view.elems(), view.dtype)) return false;
    }
  }
  return true;
}

}  // namespace

void AutoMessage::record(std::int64_t ns) {
  if (!is_on) return;
  is_due |= ++messages == next_decision;
  if (messages >= next_decision) next_decision *= 10;
  if (codec_messages++ == 0) return;  // sizes have not settled yet
  codec_ns += ns;
  choice.measured_ns = codec_ns / (codec_messages - 1);
}

std::vector<MessageTrial> KfacImpl::trials() const {
  std::vector<MessageTrial> trials;
  for (const std::string& codec : options_.candidates) {
    std::vector<std::int64_t> sizes = {options_.gradients.aggregate};
    if (options_.gradients.aggregate == 0) sizes = {0, 16, 4, 1};
    if (!TensorListCodec::create(codec).value().aggregates()) sizes = {0};
    for (const std::int64_t aggregate : sizes) trials.push_back({codec, aggregate, 0});
  }
  return trials;
}

Result<bool> KfacImpl::decide(AutoMessage* message, const MessageShape& shape, const std::vector<TensorList>& own) {
  if (!message->is_on || !message->is_due) return false;
  std::vector<MessageTrial> candidates = trials();
  std::vector<std::uint64_t> sizes;
  for (const MessageTrial& trial : candidates) {
    CORTADO_ASSIGN_OR_RETURN(const TensorListCodec codec, TensorListCodec::create(trial.codec, trial.aggregate));
    sizes.push_back(0);
    for (const TensorList& list : own) {
      std::vector<TensorView> views;
      for (const ConstTensorView& view : list) views.push_back({nullptr, view.dtype, view.rows, view.cols});
      std::vector<std::byte> payload(codec.max_payload_bytes(views)), scratch(codec.scratch_bytes(views));
      CORTADO_ASSIGN_OR_RETURN(const std::uint64_t bytes, codec.encode(list, {}, payload, scratch));
      sizes.back() += bytes;
    }
  }
  sizes.push_back(are_finite(own) ? 1 : 0);
  const auto world_size = static_cast<std::size_t>(world_->world_size());
  std::vector<std::uint64_t> all(world_size * sizes.size());
  CORTADO_RETURN_IF_ERROR(
      world_->all_gather(std::as_bytes(std::span(sizes)), std::as_writable_bytes(std::span(all)), timeout()));
  for (std::size_t r = 0; r < world_size; ++r) {
    if (all[(r + 1) * sizes.size() - 1] == 0) return false;  // such values say nothing: at the next message
  }

  Decision decision;
  if (rank() == 0) {
    for (const int r : shape.ranks) {
      for (std::size_t t = 0; t < candidates.size(); ++t) {
        const auto bytes = static_cast<std::int64_t>(all[static_cast<std::size_t>(r) * sizes.size() + t]);
        candidates[t].payload_bytes = std::max(candidates[t].payload_bytes, bytes);
      }
    }
    CORTADO_ASSIGN_OR_RETURN(const MessageChoice choice,
                             choose_codec(shape, candidates, *options_.cluster, options_.min_gain));
    decision = {.trial = choice.trial, .predicted_ns = choice.predicted_ns, .uncompressed_ns = choice.uncompressed_ns};
    std::snprintf(decision.reason, sizeof(decision.reason), "%s", choice.reason.c_str());
  }
  std::vector<Decision> decisions(world_size);
  CORTADO_RETURN_IF_ERROR(world_->all_gather(std::as_bytes(std::span(&decision, 1)),
                                             std::as_writable_bytes(std::span(decisions)), timeout()));
  decision = decisions[0];
  message->is_due = false;
  const std::string before = message->choice.codec;
  const std::int64_t aggregate_before = message->choice.aggregate;
  KfacChoice& choice = message->choice;
  choice.codec = decision.trial < 0 ? "none" : candidates[static_cast<std::size_t>(decision.trial)].codec;
  choice.aggregate = decision.trial < 0 ? 0 : candidates[static_cast<std::size_t>(decision.trial)].aggregate;
  choice.predicted_ns = decision.predicted_ns;
  choice.predicted_uncompressed_ns = decision.uncompressed_ns;
  choice.reason = decision.reason;
  if (choice.codec == before && choice.aggregate == aggregate_before) return false;
  message->codec_messages = message->codec_ns = choice.measured_ns = 0;
  return true;
}

// Each rank's own contribution to the factors of every other one.
Status KfacImpl::decide_factors() {
  MessageShape shape{.is_sum = true, .ranks = {}, .elems = {}};
  std::vector<TensorList> own(static_cast<std::size_t>(world_->world_size()));
  for (int r = 0; r < world_->world_size(); ++r) shape.ranks.push_back(r);
  shape.elems.resize(own.size());
  for (std::size_t s = 0; s < sync_->slots().size(); ++s) {
    const FactorSlot& slot = sync_->slots()[s];
    const auto owner = static_cast<std::size_t>(slot.owner);
    shape.elems[owner].push_back(slot.elems());
    if (slot.owner != rank()) own[owner].emplace_back(sync_->triangles(s), DType::kFloat32, 1, slot.elems());
  }
  CORTADO_ASSIGN_OR_RETURN(const bool changed, decide(&auto_factors_, shape, own));
  if (!changed) return {};
  const KfacChoice& choice = auto_factors_.choice;
  CORTADO_ASSIGN_OR_RETURN(TensorListCodec codec, TensorListCodec::create(choice.codec, choice.aggregate));
  sync_->set_codec(std::move(codec));
  return {};
}

// Rank 0 looks at its own column.
Status KfacImpl::decide_inverses() {
  MessageShape shape;
  std::vector<TensorList> own(1);
  for (int r = 0; r < grid_.workers; ++r) shape.ranks.push_back(r * grid_.columns);
  shape.elems.resize(shape.ranks.size());
  for (const std::size_t s : gathered_slots_) {
    const FactorSlot& slot = sync_->slots()[s];
    const std::int64_t elems = is_eigen() ? slot.matrices * slot.n * slot.n : slot.elems();
    shape.elems[static_cast<std::size_t>(grid_.row_of(slot.owner))].push_back(elems);
    const HeldFactor& factor = factors_[s];
    if (slot.owner != rank()) continue;
    own[0].emplace_back(is_eigen() ? factor.inverse.data() : factor.triangles.data(), DType::kFloat32, 1, elems);
  }
  CORTADO_ASSIGN_OR_RETURN(const bool changed, decide(&auto_inverses_, shape, own));
  if (!changed) return {};
  return inverse_gather_->set_codec(auto_inverses_.choice.codec, auto_inverses_.choice.aggregate);
}

// And at its own row.
Status KfacImpl::decide_gradients() {
  MessageShape shape;
  std::vector<TensorList> own(1);
  for (int c = 0; c < grid_.columns; ++c) shape.ranks.push_back(c);
  shape.elems.resize(shape.ranks.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const KfacLayer& layer = layers_[i];
    shape.elems[static_cast<std::size_t>(placements_[i].column)].push_back(layer.gradient_elems());
    if (!is_worker(i)) continue;
    own[0].emplace_back(results_ + offsets_[i], DType::kFloat32, layer.groups * layer.g_dim(), layer.a_dim());
  }
  CORTADO_ASSIGN_OR_RETURN(const bool changed, decide(&auto_gradients_, shape, own));
  if (!changed) return {};
  return gradient_gather_->set_codec(auto_gradients_.choice.codec, auto_gradients_.choice.aggregate);
}

}  // namespace cortado

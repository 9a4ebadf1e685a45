// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// "auto": what this rank is about to send is encoded with every candidate, and rank 0 predicts for all which is best;
// messages with it and without are then held against each other by the clock.
#include <algorithm>
#include <cstdio>

#include "collective/agreement.h"
#include "core/check.h"
#include "core/finite.h"
#include "core/format.h"
#include "kfac/kfac_impl.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

// Compressed and not, in turns, so that a slow spell of the machine hits both. The first of each block is not counted:
// of another codec sizes travel first. Where one way takes at most half of what the other takes, one round is enough.
constexpr std::size_t kBlock = 3, kRound = 2 * kBlock, kRounds = 4;
constexpr std::int64_t kClear = 2;
bool is_compressed(std::size_t message) { return message % kRound < kBlock; }

// What rank 0 has predicted, as it travels.
struct Prediction {
  std::int64_t trial = -1, predicted_ns = 0, uncompressed_ns = 0;
  char reason[256] = {};
};

// Of a list that is not empty.
std::int64_t median_of(std::vector<std::int64_t> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

bool is_clearly_less(const std::vector<std::int64_t>& some, const std::vector<std::int64_t>& others) {
  return kClear * *std::max_element(some.begin(), some.end()) <= *std::min_element(others.begin(), others.end());
}

bool are_finite(const std::vector<TensorList>& lists) {
  for (const TensorList& list : lists) {
    for (const ConstTensorView& view : list) {
      if (!all_finite(view.data, view.elems(), view.dtype)) return false;
    }
  }
  return true;
}

}  // namespace

bool AutoMessage::take(const std::vector<std::string>& candidates) {
  const std::string codec = compresses ? candidates[candidate] : "none";
  const std::int64_t layers = compresses ? aggregate : 0;
  if (choice.codec == codec && choice.aggregate == layers) return false;
  choice.codec = codec;
  choice.aggregate = layers;
  return true;
}

void AutoMessage::record(std::int64_t ns, bool is_finite) {
  if (!is_on) return;
  ++messages;
  if (phase == Phase::kTrial) times_ns.push_back(is_finite ? ns : -1);
}

std::vector<MessageTrial> KfacImpl::trials() const {
  std::vector<MessageTrial> trials;
  for (std::size_t c = 0; c < candidates_.size(); ++c) {
    const std::string& codec = candidates_[c];
    std::vector<std::int64_t> sizes = {options_.gradients.aggregate};
    if (options_.gradients.aggregate == 0) sizes = {0, 16, 4, 1};
    if (!TensorListCodec::create(codec).value().aggregates()) sizes = {0};
    for (const std::int64_t aggregate : sizes) trials.push_back({codec, aggregate, 0, options_.candidates[c]});
  }
  return trials;
}

Result<bool> KfacImpl::decide(AutoMessage* message, const MessageShape& shape, const std::vector<TensorList>& own) {
  using Phase = AutoMessage::Phase;
  if (message->phase == Phase::kDecided && message->messages >= message->next_trial) {
    message->phase = Phase::kUndecided;
    message->next_trial *= 10;
  }
  const std::size_t on_trial = message->times_ns.size();
  if (message->phase == Phase::kTrial && on_trial > 0 && on_trial % kRound == 0) {
    CORTADO_RETURN_IF_ERROR(compare_times(message));
  }
  if (message->phase == Phase::kUndecided) {
    CORTADO_RETURN_IF_ERROR(predict(message, shape, own));
  } else if (message->phase == Phase::kTrial) {
    message->compresses = is_compressed(on_trial);
  }
  if (message->phase == Phase::kTrial) {
    // All begin together, so that no time has a wait for a rank that computes longer.
    const std::byte here{};
    std::vector<std::byte> all(static_cast<std::size_t>(world_->world_size()));
    CORTADO_RETURN_IF_ERROR(world_->all_gather(std::span(&here, 1), all, timeout()));
  }
  return message->take(candidates_);
}

Status KfacImpl::predict(AutoMessage* message, const MessageShape& shape, const std::vector<TensorList>& own) {
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
  CORTADO_ASSIGN_OR_RETURN(
      const std::vector<std::uint64_t> all,
      gather_checked(world_, "sizes of payloads", std::span<const std::uint64_t>(sizes), timeout()));
  for (std::size_t r = 0; r < world_size; ++r) {
    if (all[(r + 1) * sizes.size() - 1] == 0) return {};  // such values say nothing: at the next message
  }

  Prediction prediction;
  if (rank() == 0) {
    for (const int r : shape.ranks) {
      for (std::size_t t = 0; t < candidates.size(); ++t) {
        const auto bytes = static_cast<std::int64_t>(all[static_cast<std::size_t>(r) * sizes.size() + t]);
        candidates[t].payload_bytes = std::max(candidates[t].payload_bytes, bytes);
      }
    }
    CORTADO_ASSIGN_OR_RETURN(const MessageChoice choice,
                             choose_codec(shape, candidates, *options_.cluster, options_.min_gain));
    prediction = {
        .trial = choice.trial, .predicted_ns = choice.predicted_ns, .uncompressed_ns = choice.uncompressed_ns};
    std::snprintf(prediction.reason, sizeof(prediction.reason), "%s", choice.reason.c_str());
  }
  CORTADO_ASSIGN_OR_RETURN(
      const std::vector<Prediction> predictions,
      gather_checked(world_, "predictions", std::span<const Prediction>(&prediction, 1), timeout()));
  prediction = predictions[0];
  message->times_ns.clear();
  KfacChoice& choice = message->choice;
  choice.predicted_ns = prediction.predicted_ns;
  choice.predicted_uncompressed_ns = prediction.uncompressed_ns;
  choice.measured_ns = choice.measured_uncompressed_ns = 0;
  choice.reason = prediction.reason;
  message->compresses = prediction.trial >= 0;
  message->phase = message->compresses ? AutoMessage::Phase::kTrial : AutoMessage::Phase::kDecided;
  if (!message->compresses) return {};
  const MessageTrial& best = candidates[static_cast<std::size_t>(prediction.trial)];
  message->candidate =
      static_cast<std::size_t>(std::find(candidates_.begin(), candidates_.end(), best.codec) - candidates_.begin());
  message->aggregate = best.aggregate;
  message->predicted = prediction.reason;
  choice.reason += ", on trial";
  return {};
}

Status KfacImpl::compare_times(AutoMessage* message) {
  const auto world_size = static_cast<std::size_t>(world_->world_size());
  const std::size_t count = message->times_ns.size();
  std::vector<std::int64_t> compressed_ns, uncompressed_ns;
  CORTADO_ASSIGN_OR_RETURN(
      const std::vector<std::int64_t> all,
      gather_checked(world_, "times", std::span<const std::int64_t>(message->times_ns), timeout()));
  for (std::size_t m = 0; m < count; ++m) {
    if (m % kBlock == 0) continue;
    std::int64_t longest_ns = 0;  // of any rank, which all others wait for in the end
    bool counts = true;
    for (std::size_t r = 0; r < world_size; ++r) {
      longest_ns = std::max(longest_ns, all[r * count + m]);
      counts &= all[r * count + m] >= 0;
    }
    if (counts) (is_compressed(m) ? compressed_ns : uncompressed_ns).push_back(longest_ns);
  }
  const bool is_last = count == kRounds * kRound;
  if (compressed_ns.empty() || uncompressed_ns.empty()) {
    if (is_last) message->phase = AutoMessage::Phase::kUndecided;
    return {};
  }
  if (!is_last && !is_clearly_less(compressed_ns, uncompressed_ns) &&
      !is_clearly_less(uncompressed_ns, compressed_ns)) {
    return {};
  }
  message->phase = AutoMessage::Phase::kDecided;
  KfacChoice& choice = message->choice;
  choice.measured_ns = median_of(compressed_ns);
  choice.measured_uncompressed_ns = median_of(uncompressed_ns);
  const auto took_ns = static_cast<double>(choice.measured_ns),
             uncompressed_took_ns = static_cast<double>(choice.measured_uncompressed_ns);
  choice.reason = message->predicted +
                  format_text(", measured %.3g ms instead of %.3g ms", 1e-6 * took_ns, 1e-6 * uncompressed_took_ns);
  message->compresses = took_ns <= (1 - options_.min_gain) * uncompressed_took_ns;
  if (!message->compresses) choice.reason = "uncompressed, as it gains too little: " + choice.reason;
  return {};
}

// Each rank's own contribution to the factors of every other one.
Status KfacImpl::decide_factors() {
  if (!auto_factors_.is_on) return {};
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

// The column with most values stands for all.
Status KfacImpl::decide_inverses() {
  if (!auto_inverses_.is_on) return {};
  std::vector<MessageShape> columns(static_cast<std::size_t>(grid_.columns));
  std::vector<std::int64_t> values(columns.size());
  for (std::size_t c = 0; c < columns.size(); ++c) {
    for (int r = 0; r < grid_.workers; ++r) columns[c].ranks.push_back(r * grid_.columns + static_cast<int>(c));
    columns[c].elems.resize(columns[c].ranks.size());
  }
  for (const FactorSlot& slot : sync_->slots()) {
    const auto column = static_cast<std::size_t>(grid_.column_of(slot.owner));
    const std::int64_t elems = is_eigen() ? slot.matrices * slot.n * slot.n : slot.elems();
    columns[column].elems[static_cast<std::size_t>(grid_.row_of(slot.owner))].push_back(elems);
    values[column] += elems;
  }
  const MessageShape& shape =
      columns[static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin())];
  std::vector<TensorList> own(1);
  for (const std::size_t s : gathered_slots_) {
    const FactorSlot& slot = sync_->slots()[s];
    const std::int64_t elems = is_eigen() ? slot.matrices * slot.n * slot.n : slot.elems();
    const HeldFactor& factor = factors_[s];
    if (slot.owner != rank()) continue;
    own[0].emplace_back(is_eigen() ? factor.inverse.data() : factor.triangles.data(), DType::kFloat32, 1, elems);
  }
  CORTADO_ASSIGN_OR_RETURN(const bool changed, decide(&auto_inverses_, shape, own));
  if (!changed) return {};
  return inverse_gather_->set_codec(auto_inverses_.choice.codec, auto_inverses_.choice.aggregate);
}

// Rank 0 looks at its own row; the others send the same.
Status KfacImpl::decide_gradients() {
  if (!auto_gradients_.is_on) return {};
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

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What an engine saves, loads and tells.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <unordered_map>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "engine/finite_state.h"
#include "engine/state_hash.h"

namespace cortado {

namespace {

// Nothing: none was saved, as by earlier versions.
std::span<const float> other_basis_of(const TensorState& saved) {
  for (const PlaceState& place : saved.places)
    if (place.name == kOtherBasis) return place.values;
  return {};
}

std::string mib(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

}  // namespace

bool EngineImpl::is_stateful(std::uint32_t t) const {
  return treatments_[t].is_compressed() && (options_.method != EngineOptions::Method::kCodec || has_feedback());
}

// What a tensor sends in the step after `phase_step` compressed ones: the layouts of both parities say it.
SlotKind EngineImpl::kind_at(std::uint32_t t, std::int64_t phase_step) const {
  const std::vector<Layout>& layouts = first_->layouts().of_parity;
  const Layout& layout = layouts[layouts.size() == 2 ? phase_step & 1 : 0];
  for (const Message& message : layout.messages)
    for (const Slot& slot : message.slots)
      if (slot.tensor == t) return slot.kind;
  return SlotKind::kDense;
}

Result<EngineState> EngineImpl::save_state() {
  CORTADO_RETURN_IF_ERROR(check_between_steps("save_state"));
  if (device_ != nullptr) CORTADO_RETURN_IF_ERROR(wait_until_finished());
  EngineState state{.spec = options_.results_spec(),
                    .world_size = communicator_->world_size(),
                    .rank = communicator_->rank(),
                    .step = step_,
                    .phase_step = phase_step_,
                    .layout = {},
                    .tensors = {}};
  if (first_ != nullptr) {
    for (const Layout& layout : first_->layouts().of_parity) state.layout.push_back(layout_names(layout, names()));
  }
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (!is_stateful(t)) continue;
    TensorState saved{.name = tensors_[t].name, .residual = {}, .basis = {}, .velocity = {}};
    if (low_rank_[t] != nullptr) {
      if (!is_on_device(t)) low_rank_[t]->materialise_residual();
      const std::span<const float> basis = low_rank_[t]->basis(kind_at(t, phase_step_));
      saved.basis.assign(basis.begin(), basis.end());
      const std::span<const float> other = low_rank_[t]->other_basis(kind_at(t, phase_step_));
      if (!other.empty()) saved.places.push_back({.name = kOtherBasis, .values = {other.begin(), other.end()}});
    }
    const FeedbackMemory memory = feedback_memory(t);
    const std::int64_t elems = tensors_[t].elems();
    if (is_on_device(t) && has_feedback() && warm_up_ == nullptr) {
      saved.residual.resize(static_cast<std::size_t>(elems));
      CORTADO_RETURN_IF_ERROR(device_->read_residual(t, saved.residual));
    }
    if (memory.residual != nullptr) saved.residual.assign(memory.residual, memory.residual + elems);
    if (memory.velocity != nullptr) saved.velocity.assign(memory.velocity, memory.velocity + elems);
    state.tensors.push_back(std::move(saved));
  }
  return state;
}

FeedbackMemory EngineImpl::feedback_memory(std::uint32_t t) const {
  if (low_rank_[t] != nullptr) return {.residual = low_rank_[t]->residual()};
  return codec_tensors_[t] != nullptr ? codec_tensors_[t]->memory() : FeedbackMemory{};
}

// Everything is checked before anything is changed.
Status EngineImpl::check_state(const EngineState& state, std::vector<Layout>* layouts) const {
  CORTADO_RETURN_IF_ERROR(check_origin(state));
  std::vector<std::string> expected;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t)
    if (is_stateful(t)) expected.push_back(tensors_[t].name);
  std::unordered_map<std::string, const TensorState*> found;
  for (const TensorState& tensor : state.tensors) found[tensor.name] = &tensor;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (!is_stateful(t)) continue;
    const auto entry = found.find(tensors_[t].name);
    if (entry == found.end()) {
      return make_error(StatusCode::kMismatch, "load_state: the state has no tensor \"%s\"; it is of another model",
                        tensors_[t].name.c_str());
    }
    if (passes_through()) continue;
    const TensorState& saved = *entry->second;
    // One rank exchanges nothing, and saves no more than names.
    const bool has_basis = low_rank_[t] != nullptr && state.world_size > 1;
    const std::int64_t elems = state.world_size > 1 ? tensors_[t].elems() : 0;
    const std::size_t basis = has_basis ? low_rank_[t]->basis(kind_at(t, state.phase_step)).size() : 0;
    const auto fits = [&](std::size_t size) { return size == 0 || size == static_cast<std::size_t>(elems); };
    if (!fits(saved.residual.size()) || !fits(saved.velocity.size()) || saved.basis.size() != basis) {
      return make_error(StatusCode::kMismatch,
                        "load_state: \"%s\" has a residual of %zu, a velocity of %zu and a basis of %zu values; "
                        "expected %" PRId64 " (or none) of the first two and %zu",
                        saved.name.c_str(), saved.residual.size(), saved.velocity.size(), saved.basis.size(), elems,
                        basis);
    }
    const std::size_t saved_other = other_basis_of(saved).size();
    const std::size_t other = has_basis ? low_rank_[t]->other_basis(kind_at(t, state.phase_step)).size() : 0;
    if (saved_other != 0 && saved_other != other) {
      return make_error(StatusCode::kMismatch,
                        "load_state: \"%s\" has an other_basis of %zu values; expected %zu (or none)",
                        saved.name.c_str(), saved_other, other);
    }
  }
  if (state.tensors.size() != expected.size()) {
    return make_error(StatusCode::kMismatch,
                      "load_state: the state has %zu compressed tensors, this engine %zu; it is of another model",
                      state.tensors.size(), expected.size());
  }
  if (first_ == nullptr || state.world_size == 1) return {};
  const std::vector<Layout>& current = first_->layouts().of_parity;
  if (state.layout.size() != current.size()) {
    return make_error(StatusCode::kMismatch, "load_state: the state has %zu layouts, expected %zu", state.layout.size(),
                      current.size());
  }
  const bool has_groups = device_ != nullptr && options_.method == EngineOptions::Method::kPower;
  for (std::size_t parity = 0; parity < current.size(); ++parity) {
    // The matrices of a message are one group there, and both its rounds run for all of it.
    if (has_groups && state.layout[parity] != layout_names(current[parity], names())) {
      return make_error(StatusCode::kUnsupported,
                        "load_state: the state has %zu messages of other tensors than the %zu of this engine, whose "
                        "power iterations are on a device; load it without the device engine, or begin anew",
                        state.layout[parity].size(), current[parity].messages.size());
    }
    CORTADO_ASSIGN_OR_RETURN(Layout layout, layout_from_names(state.layout[parity], current[parity], names()));
    layouts->push_back(std::move(layout));
  }
  return {};
}

Result<std::string> EngineImpl::load_state(const EngineState& state) {
  std::vector<Layout> layouts;
  Status checked = check_state(state, &layouts);
  if (checked.ok()) checked = check_finite(state);
  Status agreed = agree_on_outcome(communicator_, "load_state", checked, timeout());
  if (agreed.ok()) {
    agreed = check_same_number(communicator_, "the state to load (hash of step, layout and bases)", state_hash(state),
                               timeout());
  }
  if (!agreed.ok()) return fail_if_cut_off(agreed);
  if (device_ != nullptr) CORTADO_RETURN_IF_ERROR(wait_until_finished());
  step_ = state.step;
  set_first_step(state.step);
  replicas_ = {};
  phase_step_ = state.phase_step;
  const bool same_world = state.world_size == communicator_->world_size();
  const std::string warning = warning_of_ranks(state);
  if (first_ == nullptr) return warning;
  if (in_warm_up() && warm_up_ == nullptr) make_rounds();  // back to before the last dense step
  if (!layouts.empty()) first_->replace_layouts(std::move(layouts));
  release_rolled_back();  // another message may be the last now
  first_->reset_capacities();
  if (!in_warm_up() && warm_up_ != nullptr) {
    warm_up_.reset();
    allocate_feedback();
  }
  std::unordered_map<std::string, const TensorState*> found;
  for (const TensorState& tensor : state.tensors) found[tensor.name] = &tensor;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (!is_stateful(t) || found.count(tensors_[t].name) == 0) continue;
    const TensorState& saved = *found[tensors_[t].name];
    if (low_rank_[t] != nullptr) {
      low_rank_[t]->materialise_residual();
      std::copy(saved.basis.begin(), saved.basis.end(), low_rank_[t]->basis(kind_at(t, phase_step_)).begin());
      const std::span<const float> other = other_basis_of(saved);
      std::copy(other.begin(), other.end(), low_rank_[t]->other_basis(kind_at(t, phase_step_)).begin());
    }
    const auto restore = [&](const std::vector<float>& from, float* to) {
      if (to == nullptr) return;
      std::fill_n(to, tensors_[t].elems(), 0.0f);
      if (same_world) std::copy(from.begin(), from.end(), to);
    };
    if (is_on_device(t)) {
      if (!has_feedback()) continue;
      std::vector<float> residual(static_cast<std::size_t>(tensors_[t].elems()));
      restore(saved.residual, residual.data());
      if (const Status status = device_->write_residual(t, residual); !status.ok()) {
        return fail(status.with_context("load_state"));  // half of it is loaded, and the other ranks know nothing
      }
      continue;
    }
    const FeedbackMemory memory = feedback_memory(t);
    restore(saved.residual, memory.residual);
    restore(saved.velocity, memory.velocity);
  }
  return warning;
}

EngineReport EngineImpl::report() const {
  EngineReport report = begin_report();
  // Of the step before, if the device has not decoded the last one yet.
  if (device_ != nullptr) static_cast<void>(device_->finished());
  SquareSums sums;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    TensorReport& tensor = report.tensors[t];
    if (first_ != nullptr && finished_steps_ > 0) tensor.payload_bytes = payload_bytes(t);
    const LowRankTensor* low_rank = low_rank_[t].get();
    const CodecTensor* coded = codec_tensors_[t].get();
    if (low_rank != nullptr) report.factor_bytes += low_rank->factor_bytes();
    double squares = steps_[t].sum_squares;
    double lost = steps_[t].error_squares;
    if (low_rank != nullptr && last_step_compressed_) {
      squares = low_rank->sum_squares();
      lost = low_rank->error_squares();
    } else if (coded != nullptr && is_on_device(t) && last_step_compressed_) {
      const DifferenceSquares of_device = steps_[t].held ? DifferenceSquares{} : device_->squares(t);
      squares = of_device.of_values;
      lost = of_device.of_differences;
    } else if (coded != nullptr && last_step_compressed_) {
      squares = coded->sum_squares();
      lost = coded->error_squares();
    }
    const bool compressed = last_step_compressed_ && (low_rank != nullptr || coded != nullptr);
    if (compressed && has_feedback()) sums.of_residuals += lost;
    tensor.compressed = compressed || squares > 0;
    if (squares > 0) tensor.relative_l2_error = std::sqrt(lost / squares);
    sums.of_values += squares;
    sums.of_errors += lost;
    if (!treatments_[t].reason.empty()) {
      report.fallbacks.push_back({tensor.name, treatments_[t].reason, finished_steps_});
    }
  }
  add_squares(sums, &report);
  report.residual_bytes = residuals_.bytes() + velocities_.bytes() + residual_bytes_on_device();
  report.message_bytes = message_bytes();
  if (passes_through()) report.fallbacks.push_back({"", "world size 1: nothing to exchange", finished_steps_});
  report.host_reason = device_fallback_;
  if (!device_fallback_.empty()) {
    report.fallbacks.push_back({"", "encoded on the CPU, not on the device: " + device_fallback_, finished_steps_});
  }
  if (warm_up_steps_ > 0) report.fallbacks.push_back({"", "warm-up (start_step): dense", warm_up_steps_});
  if (non_finite_steps_ > 0) report.fallbacks.push_back({"", "non-finite: step rolled back", non_finite_steps_});
  return report;
}

std::int64_t EngineImpl::message_bytes() const {
  std::int64_t bytes = scratch_.bytes() + static_cast<std::int64_t>(trial_.size());
  for (const Round* round : {warm_up_.get(), first_.get(), second_.get()}) {
    if (round != nullptr) bytes += round->buffer_bytes();
  }
  for (const std::unique_ptr<CodecTensor>& tensor : codec_tensors_) bytes += tensor == nullptr ? 0 : tensor->bytes();
  for (const AlignedBuffer<float>& memory : rolled_back_) {
    bytes += static_cast<std::int64_t>(memory.size() * sizeof(float));
  }
  if (device_ != nullptr) bytes += device_->memory_bytes() - residual_bytes_on_device();
  return bytes;
}

std::int64_t EngineImpl::residual_bytes_on_device() const {
  std::int64_t elems = 0;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    if (has_feedback() && is_on_device(t)) elems += tensors_[t].elems();
  }
  return elems * static_cast<std::int64_t>(sizeof(float)) * (is_exact() ? 2 : 1);
}

std::int64_t EngineImpl::payload_bytes(std::uint32_t t) const {
  const bool two_rounds = second_ != nullptr && warm_up_ == nullptr;
  if (warm_up_ == nullptr && steps_[t].payload_bytes > 0) return static_cast<std::int64_t>(steps_[t].payload_bytes);
  std::int64_t elems = 0;
  for (const Round* round :
       {warm_up_ != nullptr ? warm_up_.get() : first_.get(), two_rounds ? second_.get() : nullptr}) {
    const Slot* slot = round == nullptr ? nullptr : round->find_slot(t);
    if (slot != nullptr) elems += slot->elems;
  }
  return elems * static_cast<std::int64_t>(dtype_bytes(warm_up_ != nullptr ? DType::kFloat32 : options_.wire));
}

std::string EngineImpl::describe() const {
  const EngineReport now = report();
  std::int64_t compressed = 0;
  std::int64_t compressed_elems = 0;
  std::int64_t elems = 0;
  std::int64_t residual_bytes = 0;
  for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
    elems += tensors_[t].elems();
    if (!treatments_[t].is_compressed() || passes_through()) continue;
    ++compressed;
    compressed_elems += tensors_[t].elems();
  }
  if (has_feedback()) {
    residual_bytes = compressed_elems * 4 * (options_.rollback == EngineOptions::Rollback::kExact ? 2 : 1);
    if (codec_.feedback == EngineOptions::Feedback::kDgc) residual_bytes *= 2;
  }
  const bool is_small = elems < 1'000'000;
  const double number = static_cast<double>(elems) / (is_small ? 1e3 : 1e6);
  const char* const unit = is_small ? "k" : "M";
  char compressed_text[160];
  if (options_.method == EngineOptions::Method::kCast && !passes_through()) {
    std::snprintf(compressed_text, sizeof(compressed_text), "; all of %zu tensors cast (%.2f %s values)\n",
                  tensors_.size(), number, unit);
  } else {
    std::snprintf(compressed_text, sizeof(compressed_text),
                  "; %" PRId64 " of %zu tensors compressed (%.1f %% of %.2f %s values)\n", compressed, tensors_.size(),
                  elems == 0 ? 0.0 : 100.0 * static_cast<double>(compressed_elems) / static_cast<double>(elems), number,
                  unit);
  }
  const std::string ranks = ", " + std::to_string(now.world_size) + (now.world_size == 1 ? " rank" : " ranks");
  return "cortado: " + now.spec + " over " + now.communicator + ranks + compressed_text + "cortado: memory: residual " +
         mib(residual_bytes) + ", factors " + mib(now.factor_bytes) + ", messages " + mib(now.message_bytes);
}

}  // namespace cortado

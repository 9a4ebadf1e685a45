// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/low_rank_message.h"

#include <limits>
#include <utility>

#include "codec/cast/float_chunks.h"
#include "core/check.h"
#include "core/finite.h"
#include "core/format.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"

namespace cortado {

namespace {

constexpr const char* kPlace = "factors";

LowRankTensor::Setup setup_of(const EngineTensor& tensor, int rank, int world_size, std::uint64_t seed) {
  return {.rows = tensor.rows,
          .cols = tensor.cols,
          .rank = rank,
          .dtype = tensor.dtype,
          .world_size = world_size,
          .key = {.seed = seed, .step = 0, .tensor = fnv1a_64(tensor.name)}};
}

}  // namespace

bool sums_factors(const PlanBucket& bucket, int levels) {
  const std::vector<Operation>& ops = bucket.option.operations;
  const bool is_flat_sum = ops.size() == 3 && ops[0].kind == OpKind::kEncode && ops[1].kind == OpKind::kAllReduce &&
                           ops[1].levels == LevelRange{0, levels - 1};
  if (!is_flat_sum) return false;
  const Result<std::unique_ptr<Codec>> codec = make_codec(bucket.codec);
  return codec.ok() && codec.value()->row().traits.low_rank;
}

Result<std::unique_ptr<PlanMessage>> LowRankMessage::make(const Setup& setup) {
  CORTADO_ASSIGN_OR_RETURN(const EngineOptions options, EngineOptions::parse(setup.bucket->codec));
  std::unique_ptr<LowRankMessage> message(new LowRankMessage);
  const Topology& topology = setup.levels->topology();
  const LevelRange all = {0, static_cast<int>(topology.levels.size()) - 1};
  message->communicator_ = setup.levels->of(all);
  message->clock_ = setup.clock;
  message->work_ = TraceRecorder(2 * setup.tensors.size());
  const bool is_power = options.method == EngineOptions::Method::kPower;
  if (is_power) message->kind_ = SlotKind::kRowFactor;
  const int rounds = is_power ? 2 : 1;
  for (int round = 0; round < rounds; ++round) {
    SchemeCollective& collective = message->collectives_.emplace_back();
    collective.levels = all;
    collective.ordinal = round;
    collective.name = "all_reduce@" + topology.range_name(all);
  }

  std::vector<std::int64_t> residual_elems;
  std::int64_t elems[2] = {};
  for (const EngineTensor& tensor : setup.tensors) {
    Slot& slot = message->slots_.emplace_back();
    slot.tensor = tensor;
    int rank = tensor.dimensions < 2 ? 0 : effective_rank(tensor.rows, tensor.cols, options.rank, 1);
    if (!is_power) rank = (rank + 1) / 2;
    const LayoutTensor shape{tensor.rows, tensor.cols, rank};
    slot.elems[0] = shape.slot_elems(rank > 0 ? message->kind_ : SlotKind::kDense);
    slot.elems[1] = rank > 0 && is_power ? shape.slot_elems(SlotKind::kColFactor) : 0;
    for (int round = 0; round < 2; ++round) {
      slot.offset[round] = elems[round];
      elems[round] += slot.elems[round];
    }
    if (rank > 0) {
      slot.matrix = LowRankTensor::make(options, setup_of(tensor, rank, topology.world_size(), setup.seed));
    }
    residual_elems.push_back(rank > 0 && setup.bucket->error_feedback ? tensor.elems() : 0);
  }
  for (int round = 0; round < rounds; ++round) {
    message->messages_[round] = AlignedBuffer<float>(static_cast<std::size_t>(elems[round]));
  }
  message->residuals_ = ResidualStore(residual_elems, /*with_spare=*/true);
  for (std::size_t s = 0; s < message->slots_.size(); ++s) {
    LowRankTensor* matrix = message->slots_[s].matrix.get();
    if (matrix == nullptr || residual_elems[s] == 0) continue;
    matrix->set_residual(message->residuals_.residual(s), message->residuals_.spare(s));
  }
  return std::unique_ptr<PlanMessage>(std::move(message));
}

LowRankMessage::~LowRankMessage() {
  if (state_ != SchemeState::kInFlight && state_ != SchemeState::kFailed) return;
  if (communicator_->abandon("a message was destroyed within a step")) return;
  for (AlignedBuffer<float>& message : messages_) keep_for_ever(std::move(message));
}

Status LowRankMessage::fail(const Status& status) {
  state_ = SchemeState::kFailed;
  return status.with_context("communicate: factors of " + name_tensors(slots_.front().tensor.name, slots_.size()));
}

void LowRankMessage::begin_step(const StepContext& context) { context_ = context; }

void LowRankMessage::write(int index, void* gradient, const float* carried) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  float* data = messages_[0].data() + slot.offset[0];
  if (slot.matrix == nullptr) {
    const auto scale = 1.0f / static_cast<float>(communicator_->world_size());
    float buffer[kChunkElems];
    for_chunks(slot.elems[0], [&](std::int64_t at, std::int64_t count) {
      store_floats(load_floats(gradient, slot.tensor.dtype, at, count, buffer), scale, count, data, DType::kFloat32,
                   at);
    });
    const auto to_values = static_cast<float>(context_.gradient_scale);
    for (std::int64_t i = 0; carried != nullptr && i < slot.elems[0]; ++i) data[i] += carried[i] * to_values;
    return;
  }
  if (context_.holds_zero_gradients && all_bits_zero(gradient, slot.tensor.size_bytes())) {
    slot.matrix->hold(kind_, data);
  } else if (!slot.matrix->encode(kind_, gradient, context_.gradient_scale, data)) {
    data[0] = std::numeric_limits<float>::quiet_NaN();
  }
}

Status LowRankMessage::begin(std::int64_t step) {
  step_ = step;
  round_ = 0;
  sent_bytes_ = 0;
  work_.clear();
  state_ = SchemeState::kReady;
  return {};
}

Status LowRankMessage::start() {
  AlignedBuffer<float>& message = messages_[round_];
  const Result<WorkId> work =
      communicator_->start_all_reduce(message.data(), static_cast<std::int64_t>(message.size()), DType::kFloat32);
  if (!work.ok()) return fail(work.status());
  in_flight_ = work.value();
  sent_bytes_ += static_cast<std::int64_t>(message.size() * sizeof(float));
  state_ = SchemeState::kInFlight;
  return {};
}

Result<bool> LowRankMessage::test() {
  const Result<bool> ended = communicator_->test(in_flight_);
  if (!ended.ok()) return fail(ended.status());
  if (ended.value()) state_ = SchemeState::kArrived;
  return ended;
}

Status LowRankMessage::wait(std::chrono::nanoseconds timeout) {
  if (const Status status = communicator_->wait(in_flight_, timeout); !status.ok()) return fail(status);
  state_ = SchemeState::kArrived;
  return {};
}

void LowRankMessage::note_work(Stage stage, int slot, std::int64_t start_ns) {
  work_.record({.stage = stage, .tensor = slot, .start_ns = start_ns, .end_ns = clock_->now_ns()});
}

Status LowRankMessage::proceed() {
  const bool has_next = round_ + 1 < collectives_.size();
  work_.clear();
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    Slot& slot = slots_[s];
    if (slot.matrix == nullptr) continue;
    const int index = static_cast<int>(s);
    const float* summed = messages_[round_].data() + slot.offset[round_];
    std::int64_t start_ns = clock_->now_ns();
    if (has_next) {
      slot.matrix->receive_first_round(summed, step_);
    } else {
      slot.matrix->receive(is_power() ? SlotKind::kColFactor : kind_, summed, step_);
    }
    note_work(Stage::kOrthogonalise, index, start_ns);
    if (!has_next) continue;
    float* data = messages_[1].data() + slot.offset[1];
    start_ns = clock_->now_ns();
    if (!slot.matrix->encode_second_round(data)) data[0] = std::numeric_limits<float>::quiet_NaN();
    note_work(Stage::kEncode, index, start_ns);
  }
  if (has_next) ++round_;
  state_ = has_next ? SchemeState::kReady : SchemeState::kDone;
  return {};
}

bool LowRankMessage::read(int index, void* gradient) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  bool finite = true;
  for (int round = 0; round < 2; ++round) {
    finite = finite && all_finite(messages_[round].data() + slot.offset[round], slot.elems[round], DType::kFloat32);
  }
  if (slot.matrix != nullptr) {
    const float* summed = messages_[round_].data() + slot.offset[round_];
    slot.matrix->decode(is_power() ? SlotKind::kColFactor : kind_, summed, context_.gradient_scale, gradient);
    return finite;
  }
  for_chunks(slot.elems[0], [&](std::int64_t at, std::int64_t count) {
    store_floats(messages_[0].data() + slot.offset[0] + at, 1.0f, count, gradient, slot.tensor.dtype, at);
  });
  return finite;
}

void LowRankMessage::commit() {
  for (Slot& slot : slots_) {
    if (slot.matrix != nullptr) slot.matrix->commit(is_power() ? SlotKind::kColFactor : kind_);
  }
}

std::vector<MessageResidual> LowRankMessage::residuals() {
  std::vector<MessageResidual> residuals;
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    LowRankTensor* matrix = slots_[s].matrix.get();
    if (matrix == nullptr || matrix->residual() == nullptr) continue;
    matrix->materialise_residual();
    residuals.push_back(
        {.slot = static_cast<int>(s),
         .place = kPlace,
         .values = {matrix->residual(), static_cast<std::size_t>(slots_[s].tensor.rows * slots_[s].tensor.cols)},
         .share = 1.0f / static_cast<float>(communicator_->world_size())});
  }
  return residuals;
}

std::span<float> LowRankMessage::basis(int index) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  return slot.matrix == nullptr ? std::span<float>() : slot.matrix->basis(kind_);
}

bool LowRankMessage::absorb(int index, const float* carried) {
  LowRankTensor* matrix = slots_[static_cast<std::size_t>(index)].matrix.get();
  if (matrix == nullptr || matrix->residual() == nullptr) return false;
  matrix->materialise_residual();
  const EngineTensor& tensor = slots_[static_cast<std::size_t>(index)].tensor;
  const auto ranks = static_cast<float>(communicator_->world_size());
  for (std::int64_t i = 0; i < tensor.elems(); ++i) matrix->residual()[i] += carried[i] * ranks;
  return true;
}

std::int64_t LowRankMessage::payload_bytes(int index) const {
  const Slot& slot = slots_[static_cast<std::size_t>(index)];
  return (slot.elems[0] + slot.elems[1]) * static_cast<std::int64_t>(sizeof(float));
}

DifferenceSquares LowRankMessage::squares(int index) const {
  const LowRankTensor* matrix = slots_[static_cast<std::size_t>(index)].matrix.get();
  return matrix == nullptr ? DifferenceSquares{} : DifferenceSquares{matrix->sum_squares(), matrix->error_squares()};
}

std::int64_t LowRankMessage::factor_bytes() const {
  std::int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.matrix == nullptr ? 0 : slot.matrix->factor_bytes();
  return bytes;
}

std::int64_t LowRankMessage::buffer_bytes() const {
  return static_cast<std::int64_t>((messages_[0].size() + messages_[1].size()) * sizeof(float));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/finite.h"
#include "core/hash.h"

namespace cortado {

namespace {

constexpr std::uint64_t kOddNumber = 0xd6e8feb86659fd93u;  // not that of the engine, nor of compositions

float sign_of(float value) { return static_cast<float>((value > 0.0f) - (value < 0.0f)); }

// 16 sums side by side, so that compilers vectorise without reordering.
SchemeCoder::Squares take_differences(const float* values, const float* decoded, std::int64_t elems, float* lost) {
  constexpr std::int64_t kLanes = 16, kPiece = 4096;
  SchemeCoder::Squares total;
  for (std::int64_t begin = 0; begin < elems; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, elems - begin);
    float of_values[kLanes] = {}, of_differences[kLanes] = {};
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = values[begin + i], difference = value - decoded[begin + i];
      of_values[i % kLanes] += value * value;
      of_differences[i % kLanes] += difference * difference;
      if (lost != nullptr) lost[begin + i] = difference;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      total.of_values += of_values[lane];
      total.of_differences += of_differences[lane];
    }
  }
  return total;
}

}  // namespace

void PayloadSet::place() {
  offsets.resize(bytes.size());
  total_bytes = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    offsets[i] = total_bytes;
    total_bytes += bytes[i];
  }
}

SchemeCoder::SchemeCoder(Setup setup, const SchemeProgram* program)
    : setup_(std::move(setup)), program_(program), squares_(setup_.tensors.size()), encoded_bytes_(squares_.size()) {
  for (const SchemeTensor& tensor : setup_.tensors) keys_.push_back(fnv1a_64(tensor.name));
  if (setup_.codec == nullptr || program->places.empty()) return;
  const CodecTraits& traits = setup_.codec->row().traits;
  fixed_size_ = traits.fixed_size;
  lossy_ = !traits.lossless;
  shares_key_ = traits.linear;
  votes_ = setup_.codec->is_majority_vote();
  std::size_t elems = 0, scratch_bytes = 0, payload_bytes = 0;
  for (const Cell& cell : program->cells) {
    for (const Piece& piece : cell.pieces) {
      elems = std::max(elems, static_cast<std::size_t>(piece.elems()));
      payload_bytes = std::max<std::size_t>(payload_bytes, piece.max_bytes);
      scratch_bytes =
          std::max<std::size_t>(scratch_bytes, setup_.codec->scratch_bytes(piece.rows, piece.cols, DType::kFloat32));
    }
  }
  decoded_ = AlignedBuffer<float>(elems);
  scratch_ = AlignedBuffer<std::byte>(scratch_bytes);
  if (votes_) magnitude_ = AlignedBuffer<float>(elems);
  const bool uses_device = std::any_of(program->steps.begin(), program->steps.end(), [](const SchemeStep& step) {
    return !is_collective(step.op.kind) && step.op.device == OpDevice::kGpu;
  });
  if (uses_device) {
    device_values_ = AlignedBuffer<float>(elems);
    device_payload_ = AlignedBuffer<std::byte>(payload_bytes);
  }
  if (!setup_.has_feedback) return;
  for (const FeedbackPlace& place : program->places) {
    const auto count = place.active ? static_cast<std::size_t>(program->elems_of(place.region)) : 0;
    kept_.emplace_back(count);
    fresh_.emplace_back(count);
  }
}

void SchemeCoder::begin(std::int64_t step) {
  step_ = step;
  statistics_ = {};
  std::fill(squares_.begin(), squares_.end(), Squares{});
  std::fill(encoded_bytes_.begin(), encoded_bytes_.end(), 0);
}

// Contributors draw independent numbers, so that what they round at random cancels out, except where payloads must have
// the same places to be added. Ranks that encode the same sums draw the same.
EncodeContext SchemeCoder::context_of(const SchemeStep& step, const Piece& piece) const {
  EncodeContext context{
      .seed = setup_.seed,
      .step = static_cast<std::uint64_t>(step_),
      .tensor = keys_[static_cast<std::size_t>(piece.tensor)] + kOddNumber * static_cast<std::uint64_t>(piece.begin)};
  if (shares_key_) return context;
  const auto place = static_cast<std::uint64_t>(step.place);
  const auto contributor = static_cast<std::uint64_t>(program_->places[place].contributor);
  context.seed += kOddNumber * (contributor + (place << 32));
  return context;
}

void SchemeCoder::copy_to_device(const void* from, void* to, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  ++statistics_.copies_to_device;
  statistics_.bytes_to_device += static_cast<std::int64_t>(bytes);
}

void SchemeCoder::copy_to_host(const void* from, void* to, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  ++statistics_.copies_to_host;
  statistics_.bytes_to_host += static_cast<std::int64_t>(bytes);
}

// ---- encode --------------------------------------------------------------------------------------------------------

Status SchemeCoder::encode(const SchemeStep& step, float* values, std::byte* memory, PayloadSet* set) {
  set->bytes.clear();
  std::uint64_t at = 0;
  for (const PayloadUnit& unit : step.result_units) {
    for (const Piece& piece : cell_of(unit).pieces) {
      const Result<std::uint64_t> bytes =
          encode_piece(step, piece, values + piece.offset, {memory + at, static_cast<std::size_t>(piece.max_bytes)});
      if (!bytes.ok()) return bytes.status().with_context("\"" + setup_.tensors[piece.tensor].name + "\"");
      set->bytes.push_back(bytes.value());
      at += bytes.value();
      encoded_bytes_[static_cast<std::size_t>(piece.tensor)] += static_cast<std::int64_t>(bytes.value());
    }
  }
  set->place();
  statistics_.encoded_bytes += static_cast<std::int64_t>(set->total_bytes);
  return {};
}

Result<std::uint64_t> SchemeCoder::encode_piece(const SchemeStep& step, const Piece& piece, float* values,
                                                std::span<std::byte> slot) {
  const bool held = setup_.has_feedback && holds_zeros_ &&
                    all_bits_zero(values, piece.elems() * static_cast<std::int64_t>(sizeof(float)));
  if (setup_.has_feedback) {
    const float* kept = residual_of(kept_, step, piece);
    for (std::int64_t i = 0; i < piece.elems() && !held; ++i) values[i] += kept[i];
    if (held) std::copy_n(kept, piece.elems(), residual_of(fresh_, step, piece));
  }
  const bool on_gpu = step.op.device == OpDevice::kGpu;
  const float* input = values;
  std::span<std::byte> payload = slot;
  if (on_gpu) {
    copy_to_device(values, device_values_.data(), static_cast<std::uint64_t>(piece.elems()) * sizeof(float));
    input = device_values_.data();
    payload = device_payload_.span().first(slot.size());
  }
  CORTADO_ASSIGN_OR_RETURN(const std::uint64_t bytes,
                           setup_.codec->encode({input, DType::kFloat32, piece.rows, piece.cols},
                                                context_of(step, piece), payload, scratch_.span()));
  if (lossy_ && !held) CORTADO_RETURN_IF_ERROR(keep_loss(step, piece, payload.first(bytes), input));
  if (on_gpu) copy_to_host(payload.data(), slot.data(), bytes);
  return bytes;
}

float* SchemeCoder::residual_of(std::vector<AlignedBuffer<float>>& residuals, const SchemeStep& step,
                                const Piece& piece) const {
  const auto place = static_cast<std::size_t>(step.place);
  return residuals[place].data() + (piece.offset - program_->begin_of(program_->places[place].region));
}

Status SchemeCoder::keep_loss(const SchemeStep& step, const Piece& piece, std::span<const std::byte> payload,
                              const float* values) {
  CORTADO_RETURN_IF_ERROR(
      setup_.codec->decode(payload, {decoded_.data(), DType::kFloat32, piece.rows, piece.cols}, scratch_.span()));
  float* lost = setup_.has_feedback ? residual_of(fresh_, step, piece) : nullptr;
  const Squares squares = take_differences(values, decoded_.data(), piece.elems(), lost);
  squares_[static_cast<std::size_t>(piece.tensor)].of_values += squares.of_values;
  squares_[static_cast<std::size_t>(piece.tensor)].of_differences += squares.of_differences;
  return {};
}

// ---- decode --------------------------------------------------------------------------------------------------------

Status SchemeCoder::decode(const SchemeStep& step, const PayloadSet& set, const std::byte* memory, float* values) {
  for (std::size_t begin = 0; begin < step.decode_order.size();) {
    const auto unit_at = [&](std::size_t i) -> const PayloadUnit& {
      return step.units[static_cast<std::size_t>(step.decode_order[i])];
    };
    std::size_t end = begin;
    while (end < step.decode_order.size() && unit_at(end).cell == unit_at(begin).cell) ++end;
    const Cell& cell = cell_of(unit_at(begin));
    for (std::size_t p = 0; p < cell.pieces.size(); ++p) {
      const Piece& piece = cell.pieces[p];
      const int contributors = static_cast<int>(end - begin);
      for (int c = 0; c < contributors; ++c) {
        const std::size_t entry = step.first_entry[static_cast<std::size_t>(step.decode_order[begin + c])] + p;
        const std::span<const std::byte> payload(memory + set.offsets[entry], set.bytes[entry]);
        const Status status = decode_piece(piece, step.op.device, c, contributors, payload, values + piece.offset);
        if (status.ok()) continue;
        return status.with_context("\"" + setup_.tensors[piece.tensor].name + "\", contributor " + std::to_string(c));
      }
    }
    begin = end;
  }
  return {};
}

Status SchemeCoder::decode_piece(const Piece& piece, OpDevice device, int contributor, int contributors,
                                 std::span<const std::byte> payload, float* values) {
  const bool on_gpu = device == OpDevice::kGpu;
  if (on_gpu) {
    copy_to_device(payload.data(), device_payload_.data(), payload.size());
    payload = {device_payload_.data(), payload.size()};
  }
  float* sum = on_gpu ? device_values_.data() : values;
  float* target = contributor == 0 && !votes_ ? sum : decoded_.data();
  CORTADO_RETURN_IF_ERROR(
      setup_.codec->decode(payload, {target, DType::kFloat32, piece.rows, piece.cols}, scratch_.span()));
  if (target != sum) add(contributor, contributors, target, piece.elems(), sum);
  if (on_gpu && contributor == contributors - 1) {
    copy_to_host(sum, values, static_cast<std::uint64_t>(piece.elems()) * sizeof(float));
  }
  return {};
}

void SchemeCoder::add(int contributor, int contributors, const float* decoded, std::int64_t elems, float* sum) {
  if (!votes_) {
    for (std::int64_t i = 0; i < elems; ++i) sum[i] += decoded[i];
    return;
  }
  float* magnitude = magnitude_.data();
  if (contributor == 0) {
    std::fill_n(sum, elems, 0.0f);
    std::fill_n(magnitude, elems, 0.0f);
  }
  for (std::int64_t i = 0; i < elems; ++i) {
    sum[i] += sign_of(decoded[i]);
    magnitude[i] += std::fabs(decoded[i]);
  }
  if (contributor < contributors - 1) return;
  for (std::int64_t i = 0; i < elems; ++i) sum[i] = sign_of(sum[i]) * magnitude[i];
}

// ---- residuals -----------------------------------------------------------------------------------------------------

void SchemeCoder::commit() { std::swap(kept_, fresh_); }

std::vector<SchemeCoder::Residual> SchemeCoder::residuals() {
  std::vector<Residual> residuals;
  for (std::size_t p = 0; p < kept_.size(); ++p) {
    const FeedbackPlace& place = program_->places[p];
    if (!place.active) continue;
    const std::int64_t begin = program_->begin_of(place.region), end = begin + program_->elems_of(place.region);
    std::int64_t offset = 0;
    for (std::size_t t = 0; t < setup_.tensors.size(); ++t) {
      const std::int64_t from = std::max(begin, offset), to = std::min(end, offset + setup_.tensors[t].elems());
      if (from < to) {
        residuals.push_back({.tensor = static_cast<int>(t),
                             .place = place.name,
                             .begin = from - offset,
                             .values = kept_[p].span().subspan(static_cast<std::size_t>(from - begin),
                                                               static_cast<std::size_t>(to - from)),
                             .replicas = place.replicas});
      }
      offset += setup_.tensors[t].elems();
    }
  }
  return residuals;
}

std::int64_t SchemeCoder::residual_bytes() const {
  std::size_t floats = 0;
  for (const AlignedBuffer<float>& residual : kept_) floats += 2 * residual.size();
  return static_cast<std::int64_t>(floats * sizeof(float));
}

std::int64_t SchemeCoder::scratch_bytes() const {
  const std::size_t floats = decoded_.size() + magnitude_.size() + device_values_.size();
  return static_cast<std::int64_t>(floats * sizeof(float) + scratch_.size() + device_payload_.size());
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "codec/cast/cast.h"
#include "codec/cast/float_chunks.h"
#include "codec/stage.h"
#include "core/check.h"
#include "core/checksum.h"
#include "core/finite.h"
#include "core/float_passes.h"
#include "core/hash.h"

namespace cortado {

namespace {

constexpr std::uint64_t kOddNumber = 0xd6e8feb86659fd93u;  // not that of the engine, nor of compositions

std::uint32_t check_of(std::span<const std::byte> payload) { return static_cast<std::uint32_t>(checksum_64(payload)); }

// Behind a payload of `bytes` bytes; returns the size of both.
std::uint64_t add_check(std::byte* payload, std::uint64_t bytes) {
  const std::uint32_t check = check_of({payload, static_cast<std::size_t>(bytes)});
  std::memcpy(payload + bytes, &check, kPayloadCheckBytes);
  return bytes + kPayloadCheckBytes;
}

float sign_of(float value) { return static_cast<float>((value > 0.0f) - (value < 0.0f)); }

}  // namespace

Status check_payload(std::span<const std::byte> payload) {
  if (payload.size() < kPayloadCheckBytes) {
    return make_error(StatusCode::kCorruptData, "%zu bytes, expected a payload and a check of %d bytes", payload.size(),
                      static_cast<int>(kPayloadCheckBytes));
  }
  const std::span<const std::byte> encoded = payload.first(payload.size() - kPayloadCheckBytes);
  std::uint32_t found = 0;
  std::memcpy(&found, payload.data() + encoded.size(), sizeof(found));
  const std::uint32_t expected = check_of(encoded);
  if (found == expected) return {};
  return make_error(StatusCode::kCorruptData, "%zu bytes were damaged on the way: their check is %08x, expected %08x",
                    encoded.size(), found, expected);
}

void PayloadSet::place() {
  offsets.resize(bytes.size());
  total_bytes = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    offsets[i] = total_bytes;
    total_bytes += bytes[i];
  }
}

SchemeCoder::SchemeCoder(Setup setup, const SchemeProgram* program)
    : setup_(std::move(setup)),
      program_(program),
      lent_(setup_.tensors.size()),
      finite_(lent_.size()),
      squares_(lent_.size()),
      lost_squares_(lent_.size()),
      encoded_bytes_(lent_.size()) {
  for (const SchemeTensor& tensor : setup_.tensors) keys_.push_back(fnv1a_64(tensor.name));
  if (setup_.codec == nullptr || program->places.empty()) return;
  const CodecTraits& traits = setup_.codec->row().traits;
  fixed_size_ = traits.fixed_size;
  lossy_ = !traits.lossless;
  shares_key_ = traits.linear;
  scales_up_ = setup_.codec->sparsifier() != nullptr && setup_.codec->sparsifier()->scales_up();
  votes_ = setup_.codec->is_majority_vote();
  elementwise_ = traits.elementwise;
  if (elementwise_) value_bytes_ = setup_.codec->max_payload_bytes(1, 1, DType::kFloat32);
  cast_ = cast_dtype(*setup_.codec);
  says_gpu_ = std::any_of(program->steps.begin(), program->steps.end(), [](const SchemeStep& step) {
    return !is_collective(step.op.kind) && step.op.device == OpDevice::kGpu;
  });
  std::size_t elems = 0, scratch_bytes = 0, payload_bytes = 0, pieces = 0;
  bool makes_sum_forms = false;
  for (const Cell& cell : program->cells) {
    pieces += cell.pieces.size();
    for (const Piece& piece : cell.pieces) {
      elems = std::max(elems, static_cast<std::size_t>(piece.elems()));
      makes_sum_forms = makes_sum_forms || cell.form == PayloadForm::kSumForm;
      payload_bytes = std::max<std::size_t>(
          {payload_bytes, piece.max_bytes, setup_.codec->max_payload_bytes(piece.rows, piece.cols, DType::kFloat32)});
      scratch_bytes =
          std::max<std::size_t>(scratch_bytes, setup_.codec->scratch_bytes(piece.rows, piece.cols, DType::kFloat32));
    }
  }
  const bool has_chunks_only = elementwise_ && !says_gpu_;
  decoded_ = AlignedBuffer<float>(has_chunks_only ? static_cast<std::size_t>(kChunkElems) : elems);
  scratch_ = AlignedBuffer<std::byte>(scratch_bytes);
  if (makes_sum_forms) payload_ = AlignedBuffer<std::byte>(payload_bytes);
  if (votes_) magnitude_ = AlignedBuffer<float>(elems);
  if (says_gpu_) {
    device_values_ = AlignedBuffer<float>(elems);
    device_payload_ = AlignedBuffer<std::byte>(payload_bytes);
  }
  if (setup_.clock != nullptr) work_ = TraceRecorder(pieces * program->steps.size());
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
  forget_work();
  std::fill(finite_.begin(), finite_.end(), char{1});
  std::fill(squares_.begin(), squares_.end(), DifferenceSquares{});
  std::fill(lost_squares_.begin(), lost_squares_.end(), 0);
  std::fill(encoded_bytes_.begin(), encoded_bytes_.end(), 0);
}

// Contributors draw independent numbers, so that what they round at random cancels out, except where payloads must have
// the same places to be added: then all draw the same in one place, and in each, as what was kept is kept again, unless
// it would be scaled up again. Ranks that encode the same sums draw the same.
EncodeContext SchemeCoder::context_of(const SchemeStep& step, const Piece& piece) const {
  return {.seed = seed_of(step), .step = static_cast<std::uint64_t>(step_), .tensor = number_of(piece)};
}

std::uint64_t SchemeCoder::seed_of(const SchemeStep& step) const {
  const auto place = static_cast<std::uint64_t>(step.place);
  if (shares_key_) return scales_up_ ? setup_.seed + kOddNumber * (place << 32) : setup_.seed;
  const auto contributor = static_cast<std::uint64_t>(program_->places[place].contributor);
  return setup_.seed + kOddNumber * (contributor + (place << 32));
}

std::uint64_t SchemeCoder::number_of(const Piece& piece) const {
  return keys_[static_cast<std::size_t>(piece.tensor)] + kOddNumber * static_cast<std::uint64_t>(piece.begin);
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

void SchemeCoder::note_work(Stage stage, const Piece& piece, std::int64_t start_ns) {
  if (setup_.clock == nullptr) return;
  work_.record({.stage = stage, .tensor = piece.tensor, .start_ns = start_ns, .end_ns = now_ns()});
}

// ---- encode --------------------------------------------------------------------------------------------------------

Status SchemeCoder::encode(const SchemeStep& step, float* values, std::byte* memory, PayloadSet* set) {
  const DeviceEncode* const on_device = encode_of(step);
  if (on_device != nullptr) statistics_ += on_device->copies();
  set->bytes.clear();
  std::uint64_t at = 0;
  for (const PayloadUnit& unit : step.result_units) {
    for (const Piece& piece : cell_of(unit).pieces) {
      const std::int64_t start_ns = now_ns();
      const std::size_t i = set->bytes.size();
      const Result<std::uint64_t> bytes =
          goes_by_chunks(step) ? encode_chunks(step, cell_of(unit), piece, values, memory + at)
          : on_device == nullptr
              ? encode_piece(step, cell_of(unit), piece, values + piece.offset, memory + at)
              : finish_piece(step, cell_of(unit), piece, on_device->payload(i), held_[i] != 0, values + piece.offset,
                             decoded_on_device(*on_device, step, piece), memory + at);
      if (!bytes.ok()) return bytes.status().with_context("\"" + setup_.tensors[piece.tensor].name + "\"");
      note_work(Stage::kEncode, piece, start_ns);
      set->bytes.push_back(bytes.value());
      at += bytes.value();
      encoded_bytes_[static_cast<std::size_t>(piece.tensor)] += static_cast<std::int64_t>(bytes.value());
    }
  }
  set->place();
  statistics_.encoded_bytes += static_cast<std::int64_t>(set->total_bytes);
  return {};
}

// Makes of `values` what is encoded. True if they are zeros and the residual waits.
bool SchemeCoder::add_residual(const SchemeStep& step, const Piece& piece, float* values) {
  const float scale = program_->places[static_cast<std::size_t>(step.place)].scale;
  const std::int64_t elems = piece.elems();
  if (!setup_.has_feedback) {
    if (scale != 1) scale_values(values, scale, elems, values);
    return false;
  }
  const float* kept = residual_of(kept_, step, piece);
  // Of either sign: a sum of what was decoded may have both.
  if (holds_zeros_ && std::all_of(values, values + elems, [](float value) { return value == 0; })) {
    std::copy_n(kept, elems, residual_of(fresh_, step, piece));
    return true;
  }
  for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
    if (scale != 1) scale_values(values + at, scale, count, values + at);
    add_values(kept + at, count, values + at);
  });
  return false;
}

Result<std::uint64_t> SchemeCoder::encode_piece(const SchemeStep& step, const Cell& cell, const Piece& piece,
                                                float* values, std::byte* slot) {
  const bool held = add_residual(step, piece, values);
  const bool on_gpu = step.op.device == OpDevice::kGpu;
  const std::uint64_t max_bytes = setup_.codec->max_payload_bytes(piece.rows, piece.cols, DType::kFloat32);
  std::byte* host = cell.form == PayloadForm::kSumForm ? payload_.data() : slot;
  const float* input = values;
  if (on_gpu) {
    copy_to_device(values, device_values_.data(), static_cast<std::uint64_t>(piece.elems()) * sizeof(float));
    input = device_values_.data();
  }
  CORTADO_ASSIGN_OR_RETURN(
      const std::uint64_t bytes,
      setup_.codec->encode({input, DType::kFloat32, piece.rows, piece.cols}, context_of(step, piece),
                           {on_gpu ? device_payload_.data() : host, static_cast<std::size_t>(max_bytes)},
                           scratch_.span()));
  if (on_gpu) copy_to_host(device_payload_.data(), host, bytes);
  return finish_piece(step, cell, piece, {host, static_cast<std::size_t>(bytes)}, held, values, nullptr, slot);
}

Result<std::uint64_t> SchemeCoder::finish_piece(const SchemeStep& step, const Cell& cell, const Piece& piece,
                                                std::span<const std::byte> payload, bool held, const float* values,
                                                const float* decoded, std::byte* slot) {
  const bool is_sum_form = cell.form == PayloadForm::kSumForm;
  const bool loses = lossy_ && !held;
  std::uint64_t bytes = payload.size();
  const TensorView target = {decoded_.data(), DType::kFloat32, piece.rows, piece.cols};
  if (is_sum_form) {
    bytes = piece.max_bytes;
    const std::span<std::byte> form(slot, static_cast<std::size_t>(bytes));
    CORTADO_RETURN_IF_ERROR(
        setup_.codec->to_sum_form(payload, piece.rows, piece.cols, step.terms, form, decoded_.span()));
    if (loses) CORTADO_RETURN_IF_ERROR(setup_.codec->decode_sum(form, {step.terms, 1}, target));
    decoded = nullptr;
  } else {
    if (payload.data() != slot) std::memcpy(slot, payload.data(), payload.size());
    if (loses && decoded == nullptr) {
      CORTADO_RETURN_IF_ERROR(setup_.codec->decode(payload, target, scratch_.span()));
    }
  }
  if (loses) keep_loss(step, piece, values, decoded == nullptr ? decoded_.data() : decoded);
  return cell.form == PayloadForm::kChecked ? add_check(slot, bytes) : bytes;
}

float* SchemeCoder::residual_of(std::vector<AlignedBuffer<float>>& residuals, const SchemeStep& step,
                                const Piece& piece) const {
  const auto place = static_cast<std::size_t>(step.place);
  return residuals[place].data() + (piece.offset - program_->begin_of(program_->places[place].region));
}

void SchemeCoder::keep_loss(const SchemeStep& step, const Piece& piece, const float* values, const float* decoded) {
  float* lost = setup_.has_feedback ? residual_of(fresh_, step, piece) : nullptr;
  const DifferenceSquares squares = take_differences(values, decoded, piece.elems(), lost);
  note_squares(step, piece, squares);
}

void SchemeCoder::note_squares(const SchemeStep& step, const Piece& piece, const DifferenceSquares& squares) {
  const auto tensor = static_cast<std::size_t>(piece.tensor);
  const double share = program_->places[static_cast<std::size_t>(step.place)].share;
  squares_[tensor].of_values += squares.of_values;
  squares_[tensor].of_differences += squares.of_differences;
  lost_squares_[tensor] += squares.of_differences * share * share;
}

// ---- decode --------------------------------------------------------------------------------------------------------

// Calls act(cell, piece, entries of its payloads, one for each contributor in their order) for each piece.
template <typename Act>
Status SchemeCoder::for_contributions(const SchemeStep& step, Act&& act) const {
  const auto contributors = static_cast<std::size_t>(step.contributors);
  for (std::size_t begin = 0; begin < step.decode_order.size(); begin += contributors) {
    const Cell& cell = cell_of(step.units[static_cast<std::size_t>(step.decode_order[begin])]);
    for (std::size_t p = 0; p < cell.pieces.size(); ++p) {
      const auto entry_of = [&](int contributor) {
        const int unit = step.decode_order[begin + static_cast<std::size_t>(contributor)];
        return step.first_entry[static_cast<std::size_t>(unit)] + p;
      };
      CORTADO_RETURN_IF_ERROR(act(cell, cell.pieces[p], entry_of));
    }
  }
  return {};
}

Status SchemeCoder::decode(const SchemeStep& step, const PayloadSet& set, const std::byte* memory, float* values) {
  if (const DeviceDecode* const on_device = decode_of(step); on_device != nullptr) {
    take_sums(step, *on_device, values);
    return {};
  }
  return for_contributions(step, [&](const Cell& cell, const Piece& piece, const auto& entry_of) -> Status {
    const std::int64_t start_ns = now_ns();
    const auto payload_of = [&](int c) {
      const std::size_t entry = entry_of(c);
      return std::span<const std::byte>(memory + set.offsets[entry], set.bytes[entry]);
    };
    if (goes_by_chunks(step)) CORTADO_RETURN_IF_ERROR(decode_chunks(step, piece, values, payload_of));
    for (int c = 0; c < step.contributors && !goes_by_chunks(step); ++c) {
      const Status status = decode_piece(step, cell, piece, payload_of(c), c, values + piece.offset);
      if (!status.ok()) return status.with_context(name_of(piece, c));
    }
    note_work(Stage::kDecode, piece, start_ns);
    return {};
  });
}

std::string SchemeCoder::name_of(const Piece& piece, int contributor) const {
  return "\"" + setup_.tensors[static_cast<std::size_t>(piece.tensor)].name + "\", contributor " +
         std::to_string(contributor);
}

Status SchemeCoder::decode_piece(const SchemeStep& step, const Cell& cell, const Piece& piece,
                                 std::span<const std::byte> payload, int contributor, float* values) {
  const bool on_gpu = step.op.device == OpDevice::kGpu;
  const bool is_sum_form = cell.form == PayloadForm::kSumForm;
  if (cell.form == PayloadForm::kChecked) payload = payload.first(payload.size() - kPayloadCheckBytes);
  if (on_gpu) {
    copy_to_device(payload.data(), device_payload_.data(), payload.size());
    payload = {device_payload_.data(), payload.size()};
  }
  float* sum = on_gpu ? device_values_.data() : values;
  const bool is_alone = step.contributors == 1 && is_sum_form;  // then votes have been counted
  const bool begins_sum = contributor == 0 && (!votes_ || is_alone);
  const bool adds = !begins_sum && !votes_ && !is_sum_form && setup_.codec->can_add();
  float* target = begins_sum || adds ? sum : decoded_.data();
  const TensorView decoded = {target, DType::kFloat32, piece.rows, piece.cols};
  if (is_sum_form) {
    CORTADO_RETURN_IF_ERROR(setup_.codec->decode_sum(payload, {step.terms, step.terms}, decoded));
    if (step.scale != 1) scale_values(target, step.scale, piece.elems(), target);
  } else if (adds) {
    CORTADO_RETURN_IF_ERROR(setup_.codec->decode_add(payload, decoded, scratch_.span()));
  } else {
    CORTADO_RETURN_IF_ERROR(setup_.codec->decode(payload, decoded, scratch_.span()));
  }
  if (target != sum) add(contributor, step.contributors, target, piece.elems(), sum);
  if (on_gpu && contributor == step.contributors - 1) {
    copy_to_host(sum, values, static_cast<std::uint64_t>(piece.elems()) * sizeof(float));
  }
  return {};
}

void SchemeCoder::add(int contributor, int contributors, const float* decoded, std::int64_t elems, float* sum) {
  if (!votes_) {
    add_values(decoded, elems, sum);
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

// ---- chunk by chunk ------------------------------------------------------------------------------------------------

bool SchemeCoder::takes_lent(const SchemeStep& step) const {
  const bool is_end = &step == (step.op.kind == OpKind::kEncode ? &program_->steps.front() : &program_->steps.back());
  return setup_.lends_memory && is_end && step.active && !is_collective(step.op.kind) && goes_by_chunks(step);
}

// Where a piece's values are; `message` is that of all.
TensorMemory SchemeCoder::memory_of(const SchemeStep& step, const Piece& piece, float* message) const {
  if (!takes_lent(step)) return {.data = message + piece.offset};
  TensorMemory memory = lent_[static_cast<std::size_t>(piece.tensor)];
  memory.data =
      static_cast<std::byte*>(memory.data) + piece.begin * static_cast<std::int64_t>(dtype_bytes(memory.dtype));
  if (memory.added != nullptr) memory.added += piece.begin;
  return memory;
}

Result<std::uint64_t> SchemeCoder::encode_chunks(const SchemeStep& step, const Cell& cell, const Piece& piece,
                                                 float* message, std::byte* slot) {
  const TensorMemory from = memory_of(step, piece, message);
  const float place_scale = program_->places[static_cast<std::size_t>(step.place)].scale;
  const float scale = from.scale * place_scale, added_scale = from.added_scale * place_scale;
  const float* kept = setup_.has_feedback ? residual_of(kept_, step, piece) : nullptr;
  float* fresh = setup_.has_feedback ? residual_of(fresh_, step, piece) : nullptr;
  const bool held = holds_zeros_ && kept != nullptr && from.added == nullptr &&
                    all_bits_zero(from.data, piece.elems() * static_cast<std::int64_t>(dtype_bytes(from.dtype)));
  if (held) {
    std::copy_n(kept, piece.elems(), fresh);
    kept = nullptr;
  }
  DifferenceSquares squares;
  const bool is_cast_alone = cast_ != DType::kFloat32 && from.added == nullptr && kept == nullptr;
  float made[kChunkElems];
  for (std::int64_t at = 0; at < piece.elems(); at += kChunkElems) {
    const std::int64_t count = std::min(kChunkElems, piece.elems() - at);
    const float* values = load_floats(from.data, from.dtype, at, count, made);
    if (is_cast_alone) {  // one pass
      const CastSquares of_chunk = measured_cast(values, scale, 1 / scale, count, slot, cast_, at);
      squares.of_values += of_chunk.of_values * double{scale} * scale;
      squares.of_differences += of_chunk.of_differences * double{scale} * scale;
      continue;
    }
    if (scale != 1 || from.added != nullptr || kept != nullptr) {
      scale_values(values, scale, count, made);
      for (std::int64_t i = 0; i < count && from.added != nullptr; ++i) made[i] += from.added[at + i] * added_scale;
      if (kept != nullptr) add_values(kept + at, count, made);
      values = made;
    }
    const std::span<std::byte> payload(slot + static_cast<std::uint64_t>(at) * value_bytes_,
                                       static_cast<std::size_t>(static_cast<std::uint64_t>(count) * value_bytes_));
    CORTADO_RETURN_IF_ERROR(
        setup_.codec->encode({values, DType::kFloat32, 1, count}, {}, payload, scratch_.span()).status());
    if (!lossy_ || held) continue;
    const TensorView decoded = {decoded_.data(), DType::kFloat32, 1, count};
    CORTADO_RETURN_IF_ERROR(setup_.codec->decode(payload, decoded, scratch_.span()));
    const DifferenceSquares of_chunk =
        take_differences(values, decoded_.data(), count, fresh == nullptr ? nullptr : fresh + at);
    squares.of_values += of_chunk.of_values;
    squares.of_differences += of_chunk.of_differences;
  }
  note_squares(step, piece, squares);
  const std::uint64_t bytes = static_cast<std::uint64_t>(piece.elems()) * value_bytes_;
  return cell.form == PayloadForm::kChecked ? add_check(slot, bytes) : bytes;
}

// `payload_of`: a contributor's.
template <typename PayloadOf>
Status SchemeCoder::decode_chunks(const SchemeStep& step, const Piece& piece, float* message, PayloadOf&& payload_of) {
  const TensorMemory to = memory_of(step, piece, message);
  if (cast_ != DType::kFloat32 && step.contributors == 1 && takes_lent(step) && to.dtype == DType::kFloat32 &&
      to.result_scale == 1) {  // one pass
    const std::byte* const payload = payload_of(0).data();
    widen_gradient(payload, cast_, piece.elems(), static_cast<float*>(to.data));
    if (!all_finite(payload, piece.elems(), cast_)) finite_[static_cast<std::size_t>(piece.tensor)] = 0;
    return {};
  }
  float buffer[kChunkElems];
  bool finite = true;
  for (std::int64_t at = 0; at < piece.elems(); at += kChunkElems) {
    const std::int64_t count = std::min(kChunkElems, piece.elems() - at);
    float* sum = to.dtype == DType::kFloat32 ? static_cast<float*>(to.data) + at : buffer;
    for (int c = 0; c < step.contributors; ++c) {
      const std::span<const std::byte> payload =
          payload_of(c).subspan(static_cast<std::size_t>(static_cast<std::uint64_t>(at) * value_bytes_),
                                static_cast<std::size_t>(static_cast<std::uint64_t>(count) * value_bytes_));
      const TensorView decoded = {c == 0 ? sum : decoded_.data(), DType::kFloat32, 1, count};
      const Status status = setup_.codec->decode(payload, decoded, scratch_.span());
      if (!status.ok()) return status.with_context(name_of(piece, c));
      if (c > 0) add_values(decoded_.data(), count, sum);
    }
    finite = all_finite(sum, count, DType::kFloat32) && finite;
    if (sum == buffer || to.result_scale != 1) store_floats(sum, to.result_scale, count, to.data, to.dtype, at);
  }
  if (!finite) finite_[static_cast<std::size_t>(piece.tensor)] = 0;
  return {};
}

// ---- on a device ---------------------------------------------------------------------------------------------------

DeviceEncode* SchemeCoder::encode_of(const SchemeStep& step) const {
  return device_encodes_.empty() ? nullptr : device_encodes_[index_of(step)].get();
}

DeviceDecode* SchemeCoder::decode_of(const SchemeStep& step) const {
  return device_decodes_.empty() ? nullptr : device_decodes_[index_of(step)].get();
}

void SchemeCoder::open_device(const SchemeDevice& device) {
  if (!says_gpu_) return;
  // Ranks that encode the same sums must make the same payloads, on whatever they run.
  if (setup_.codec->row().traits.low_rank) {
    host_reason_ = setup_.codec->spec() + ": factors have the same bits on one kind of device only";
    return;
  }
  const Status status = open_steps(device);
  if (status.ok()) {
    if (!host_reason_.empty()) return;
    device_values_ = {};  // of the CPU's variant
    device_payload_ = {};
    return;
  }
  host_reason_ = status.message();
  device_encodes_.clear();
  device_decodes_.clear();
  queue_.reset();
}

Status SchemeCoder::open_steps(const SchemeDevice& device) {
  CORTADO_ASSIGN_OR_RETURN(queue_, device.make_queue());
  // A launch says whether there are kernels for this device.
  CORTADO_ASSIGN_OR_RETURN(std::byte* const sum, queue_->allocate_on_device(2 * sizeof(float)));
  auto* const floats = reinterpret_cast<float*>(sum);
  CORTADO_RETURN_IF_ERROR(
      device.add(queue_->stream(), {.decoded = floats + 1, .sum = floats, .elems = 1, .is_first = true}));
  device_encodes_.resize(program_->steps.size());
  device_decodes_.resize(program_->steps.size());
  for (const SchemeStep& step : program_->steps) {
    if (!step.active || is_collective(step.op.kind) || step.op.device != OpDevice::kGpu) continue;
    CORTADO_RETURN_IF_ERROR(open_step(device, step));
  }
  return {};
}

// Sums of codes are made on the host, of payloads that have come there, and decoded there.
Status SchemeCoder::open_step(const SchemeDevice& device, const SchemeStep& step) {
  const std::int64_t begin = program_->begin_of(step.before);
  DeviceOperationSetup setup{.device = &device,
                             .queue = queue_.get(),
                             .codec = setup_.codec,
                             .pieces = {},
                             .elems = program_->elems_of(step.before)};
  const auto add = [&](const Piece& piece) {
    setup.pieces.push_back({.name = setup_.tensors[static_cast<std::size_t>(piece.tensor)].name,
                            .offset = piece.offset - begin,
                            .rows = piece.rows,
                            .cols = piece.cols,
                            .number = number_of(piece)});
  };
  bool has_sum_form = false;
  if (step.op.kind == OpKind::kEncode) {
    for (const PayloadUnit& unit : step.result_units) {
      has_sum_form = has_sum_form || cell_of(unit).form == PayloadForm::kSumForm;
      for (const Piece& piece : cell_of(unit).pieces) add(piece);
    }
    if (setup.pieces.empty()) return {};
    held_.resize(std::max(held_.size(), setup.pieces.size()));
    CORTADO_ASSIGN_OR_RETURN(device_encodes_[index_of(step)],
                             DeviceEncode::make(setup, seed_of(step), lossy_ && !has_sum_form));
    return {};
  }
  CORTADO_RETURN_IF_ERROR(for_contributions(step, [&](const Cell& cell, const Piece& piece, const auto&) -> Status {
    has_sum_form = has_sum_form || cell.form == PayloadForm::kSumForm;
    add(piece);
    return {};
  }));
  if (has_sum_form) host_reason_ = setup_.codec->spec() + ": sums of codes are decoded on the CPU";
  if (setup.pieces.empty() || has_sum_form) return {};
  CORTADO_ASSIGN_OR_RETURN(device_decodes_[index_of(step)], DeviceDecode::make(setup, step.contributors));
  return {};
}

Status SchemeCoder::start_on_device(const SchemeStep& step, const PayloadSet& set, const std::byte* memory,
                                    float* values) {
  const std::int64_t start_ns = now_ns();
  const Piece* first = nullptr;
  if (DeviceEncode* const encode = encode_of(step); encode != nullptr) {
    std::size_t i = 0;
    for (const PayloadUnit& unit : step.result_units) {
      for (const Piece& piece : cell_of(unit).pieces) {
        first = first == nullptr ? &piece : first;
        held_[i++] = add_residual(step, piece, values + piece.offset);
      }
    }
    CORTADO_RETURN_IF_ERROR(encode->start(values + program_->begin_of(step.before), static_cast<std::uint64_t>(step_)));
    note_work(Stage::kEncode, *first, start_ns);
    return {};
  }
  DeviceDecode* const decode = decode_of(step);
  for (int contributor = 0; contributor < decode->terms(); ++contributor) {
    std::size_t i = 0;
    CORTADO_RETURN_IF_ERROR(
        for_contributions(step, [&](const Cell& cell, const Piece& piece, const auto& entry_of) -> Status {
          const std::size_t entry = entry_of(contributor);
          const std::uint64_t check_bytes = cell.form == PayloadForm::kChecked ? kPayloadCheckBytes : 0;
          const std::span<const std::byte> payload(memory + set.offsets[entry], set.bytes[entry] - check_bytes);
          first = first == nullptr ? &piece : first;
          const Status status = decode->put(i++, contributor, payload);
          return status.ok() ? status : status.with_context(name_of(piece, contributor));
        }));
  }
  CORTADO_RETURN_IF_ERROR(decode->start());
  note_work(Stage::kDecode, *first, start_ns);
  return {};
}

Result<bool> SchemeCoder::ended_on_device(const SchemeStep& step) {
  DeviceEncode* const encode = encode_of(step);
  return encode != nullptr ? encode->ended() : decode_of(step)->ended();
}

const float* SchemeCoder::decoded_on_device(const DeviceEncode& device, const SchemeStep& step,
                                            const Piece& piece) const {
  return device.decoded() == nullptr ? nullptr : device.decoded() + (piece.offset - program_->begin_of(step.before));
}

void SchemeCoder::take_sums(const SchemeStep& step, const DeviceDecode& device, float* values) {
  statistics_ += device.copies();
  const std::int64_t begin = program_->begin_of(step.before);
  const Status status = for_contributions(step, [&](const Cell&, const Piece& piece, const auto&) -> Status {
    const std::int64_t start_ns = now_ns();
    std::copy_n(device.sums() + (piece.offset - begin), piece.elems(), values + piece.offset);
    note_work(Stage::kDecode, piece, start_ns);
    return {};
  });
  CORTADO_CHECK(status.ok(), "nothing can fail");
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
                             .share = place.share,
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
  auto bytes =
      static_cast<std::int64_t>(floats * sizeof(float) + scratch_.size() + payload_.size() + device_payload_.size());
  for (const auto& encode : device_encodes_) bytes += encode == nullptr ? 0 : encode->memory_bytes();
  for (const auto& decode : device_decodes_) bytes += decode == nullptr ? 0 : decode->memory_bytes();
  return bytes;
}

}  // namespace cortado

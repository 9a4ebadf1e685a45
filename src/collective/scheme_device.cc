// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_device.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace cortado {

DeviceCopies& DeviceCopies::operator+=(const DeviceCopies& other) {
  copies_to_device += other.copies_to_device;
  bytes_to_device += other.bytes_to_device;
  copies_to_host += other.copies_to_host;
  bytes_to_host += other.bytes_to_host;
  return *this;
}

// ---- what both have in common --------------------------------------------------------------------------------------

namespace {

std::vector<DeviceTensor> shapes_of(const std::vector<DevicePiece>& pieces) {
  std::vector<DeviceTensor> shapes;
  for (const DevicePiece& piece : pieces) {
    shapes.push_back({.rows = piece.rows, .cols = piece.cols, .number = piece.number});
  }
  return shapes;
}

}  // namespace

DeviceOperation::DeviceOperation(const DeviceOperationSetup& setup, std::size_t sets)
    : setup_(setup), is_fixed_(setup.codec->row().traits.fixed_size), layout_(*setup.codec, shapes_of(setup.pieces)) {
  std::vector<std::int64_t> most_bytes;
  for (const DevicePiece& piece : setup_.pieces) {
    room_.push_back(setup_.codec->max_payload_bytes(piece.rows, piece.cols, DType::kFloat32));
    offsets_.push_back(payloads_.add(room_.back()));
    most_bytes.push_back(static_cast<std::int64_t>(room_.back()));
  }
  payloads_at_ = on_device_.add(stride());
  step_ = on_device_.add(sizeof(std::uint64_t));
  if (is_fixed_) return;
  tiles_ = layout_.tile(most_bytes, MovePayloads::kTileBytes);
  moves_ = layout_.scratch<PayloadMove>(count());
  packed_ = on_device_.add(stride());
  tables_ = on_device_.add(layout_.workspace_bytes());
  tables_on_host_ = on_host_.add(layout_.tables().size());
  moves_on_host_ = on_host_.add(sets * count() * sizeof(PayloadMove));
}

std::vector<DeviceTensor> DeviceOperation::tensors(std::byte* values, std::byte* payloads) const {
  std::vector<DeviceTensor> tensors = shapes_of(setup_.pieces);
  for (std::size_t i = 0; i < count(); ++i) {
    tensors[i].data = values + static_cast<std::uint64_t>(setup_.pieces[i].offset) * sizeof(float);
    tensors[i].payload = payloads + offsets_[i];
  }
  return tensors;
}

Status DeviceOperation::open(std::uint64_t values, std::uint64_t seed) {
  CORTADO_ASSIGN_OR_RETURN(batch_, setup_.device->make_batch(setup_.codec->spec(), shapes_of(setup_.pieces)));
  const std::uint64_t workspace = on_device_.add(batch_->workspace_bytes());
  CORTADO_ASSIGN_OR_RETURN(device_, queue().allocate_on_device(on_device_.bytes()));
  CORTADO_ASSIGN_OR_RETURN(host_, queue().allocate_on_host(on_host_.bytes()));
  const DeviceKeys keys{.seed = seed, .step = reinterpret_cast<const std::uint64_t*>(device_ + step_)};
  CORTADO_RETURN_IF_ERROR(
      batch_->set_up(tensors(device_ + values, device_ + payloads_at_), keys, device_ + workspace, queue().stream()));
  if (is_fixed_) return {};
  workspace_ = layout_.workspace(device_ + tables_, nullptr);
  std::memcpy(host_ + tables_on_host_, layout_.tables().data(), layout_.tables().size());
  return queue().copy_to_device(device_ + tables_, host_ + tables_on_host_, layout_.tables().size());
}

Status DeviceOperation::to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  ++copies_.copies_to_device;
  copies_.bytes_to_device += static_cast<std::int64_t>(bytes);
  return queue().copy_to_device(to, from, bytes);
}

Status DeviceOperation::to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  ++copies_.copies_to_host;
  copies_.bytes_to_host += static_cast<std::int64_t>(bytes);
  return queue().copy_to_host(to, from, bytes);
}

Status DeviceOperation::move(std::size_t set, const std::byte* from, std::byte* to) {
  PayloadMove* const on_device = workspace_.at(moves_);
  CORTADO_RETURN_IF_ERROR(to_device(reinterpret_cast<std::byte*>(on_device),
                                    reinterpret_cast<const std::byte*>(moves(set)), count() * sizeof(PayloadMove)));
  return setup_.device->move(queue().stream(), tiles_.tiles,
                             {.tiling = workspace_.tiling(tiles_),
                              .moves = on_device,
                              .payloads = static_cast<std::int64_t>(count()),
                              .from = from,
                              .to = to});
}

// ---- encode --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceEncode>> DeviceEncode::make(const DeviceOperationSetup& setup, std::uint64_t seed,
                                                         bool is_lossy) {
  std::unique_ptr<DeviceEncode> made(new DeviceEncode(setup, is_lossy));
  DeviceEncode& encode = *made;
  encode.values_ = encode.on_device_.add(encode.region_bytes());
  encode.values_on_host_ = encode.on_host_.add(encode.region_bytes());
  encode.payloads_on_host_ = encode.on_host_.add(encode.stride());
  encode.sizes_on_host_ = encode.on_host_.add(encode.count() * sizeof(std::uint64_t));
  encode.step_on_host_ = encode.on_host_.add(sizeof(std::uint64_t));
  CORTADO_RETURN_IF_ERROR(encode.open(encode.values_, seed));
  for (DeviceQueue::Event* event : {&encode.sized_, &encode.ended_}) {
    CORTADO_ASSIGN_OR_RETURN(*event, encode.queue().make_event());
  }
  encode.found_at_ = encode.offsets_;
  std::copy(encode.room_.begin(), encode.room_.end(), encode.sizes());
  return made;
}

Status DeviceEncode::start(const float* values, std::uint64_t step) {
  begin_counting();
  std::memcpy(host_ + values_on_host_, values, region_bytes());
  std::memcpy(host_ + step_on_host_, &step, sizeof(step));
  CORTADO_RETURN_IF_ERROR(to_device(device_ + values_, host_ + values_on_host_, region_bytes()));
  CORTADO_RETURN_IF_ERROR(to_device(device_ + step_, host_ + step_on_host_, sizeof(step)));
  CORTADO_RETURN_IF_ERROR(batch_->encode(queue().stream()));
  sizes_are_known_ = is_fixed_;
  if (is_fixed_) {
    CORTADO_RETURN_IF_ERROR(to_host(host_ + payloads_on_host_, device_ + payloads_at_, stride()));
  } else {
    CORTADO_RETURN_IF_ERROR(to_host(host_ + sizes_on_host_, reinterpret_cast<const std::byte*>(batch_->payload_bytes()),
                                    count() * sizeof(std::uint64_t)));
    CORTADO_RETURN_IF_ERROR(queue().record(sized_));
  }
  if (is_lossy_) {  // the decoded values take the place of the values
    CORTADO_RETURN_IF_ERROR(batch_->decode(queue().stream()));
    CORTADO_RETURN_IF_ERROR(to_host(host_ + values_on_host_, device_ + values_, region_bytes()));
  }
  return is_fixed_ ? queue().record(ended_) : Status();
}

Result<bool> DeviceEncode::ended() {
  if (!sizes_are_known_) {
    CORTADO_ASSIGN_OR_RETURN(sizes_are_known_, queue().reached(sized_));
    if (!sizes_are_known_) return false;
    CORTADO_RETURN_IF_ERROR(fetch_payloads());
  }
  return queue().reached(ended_);
}

// What has come to be of a size each goes to the host in one copy.
Status DeviceEncode::fetch_payloads() {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < count(); ++i) {
    if (sizes()[i] > room_[i]) {
      return make_error(StatusCode::kInternal, "\"%s\": the device encoded %llu bytes, expected at most %llu",
                        setup_.pieces[i].name.c_str(), static_cast<unsigned long long>(sizes()[i]),
                        static_cast<unsigned long long>(room_[i]));
    }
    found_at_[i] = end;
    moves(0)[i] = {.from = offsets_[i], .to = end, .bytes = sizes()[i]};
    end += aligned(sizes()[i]);
  }
  CORTADO_RETURN_IF_ERROR(move(0, device_ + payloads_at_, device_ + packed_));
  CORTADO_RETURN_IF_ERROR(to_host(host_ + payloads_on_host_, device_ + packed_, end));
  return queue().record(ended_);
}

std::span<const std::byte> DeviceEncode::payload(std::size_t piece) const {
  return {host_ + payloads_on_host_ + found_at_[piece], static_cast<std::size_t>(sizes()[piece])};
}

// ---- decode --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceDecode>> DeviceDecode::make(const DeviceOperationSetup& setup, int terms) {
  std::unique_ptr<DeviceDecode> made(new DeviceDecode(setup, terms));
  DeviceDecode& decode = *made;
  const auto sets = static_cast<std::uint64_t>(terms);
  decode.is_vote_ = setup.codec->is_majority_vote();
  decode.sums_ = decode.decoded_ = decode.on_device_.add(decode.region_bytes());
  if (terms > 1 || decode.is_vote_) decode.decoded_ = decode.on_device_.add(decode.region_bytes());
  if (decode.is_vote_) decode.magnitude_ = decode.on_device_.add(decode.region_bytes());
  decode.payloads_on_host_ = decode.on_host_.add(sets * decode.stride());
  decode.sizes_on_host_ = decode.on_host_.add(sets * decode.count() * sizeof(std::uint64_t));
  decode.faults_on_host_ = decode.on_host_.add(sets * decode.count() * sizeof(std::uint32_t));
  decode.sums_on_host_ = decode.on_host_.add(decode.region_bytes());
  decode.packed_bytes_.resize(sets);
  CORTADO_RETURN_IF_ERROR(decode.open(decode.decoded_, /*seed=*/0));
  CORTADO_ASSIGN_OR_RETURN(decode.ended_, decode.queue().make_event());
  return made;
}

Status DeviceDecode::put(std::size_t piece, int term, std::span<const std::byte> payload) {
  if (is_fixed_ ? payload.size() != room_[piece] : payload.size() > room_[piece]) {
    return make_error(StatusCode::kCorruptData, "payload has %zu bytes, expected %s%llu", payload.size(),
                      is_fixed_ ? "" : "at most ", static_cast<unsigned long long>(room_[piece]));
  }
  std::uint64_t at = offsets_[piece];
  if (!is_fixed_) {
    std::uint64_t& end = packed_bytes_[static_cast<std::size_t>(term)];
    at = piece == 0 ? 0 : end;
    end = at + aligned(payload.size());
    moves(static_cast<std::size_t>(term))[piece] = {.from = at, .to = offsets_[piece], .bytes = payload.size()};
    sizes(term)[piece] = payload.size();
  }
  std::memcpy(payloads_on_host(term) + at, payload.data(), payload.size());
  return {};
}

// To their room, which those of the term before have left by then.
Status DeviceDecode::upload(int term) {
  if (is_fixed_) return to_device(device_ + payloads_at_, payloads_on_host(term), stride());
  const auto set = static_cast<std::size_t>(term);
  CORTADO_RETURN_IF_ERROR(to_device(device_ + packed_, payloads_on_host(term), packed_bytes_[set]));
  CORTADO_RETURN_IF_ERROR(move(set, device_ + packed_, device_ + payloads_at_));
  return to_device(reinterpret_cast<std::byte*>(batch_->payload_bytes()),
                   reinterpret_cast<const std::byte*>(sizes(term)), count() * sizeof(std::uint64_t));
}

Status DeviceDecode::start() {
  begin_counting();
  for (int term = 0; term < terms_; ++term) {
    CORTADO_RETURN_IF_ERROR(upload(term));
    CORTADO_RETURN_IF_ERROR(batch_->decode(queue().stream()));
    CORTADO_RETURN_IF_ERROR(to_host(reinterpret_cast<std::byte*>(faults(term)),
                                    reinterpret_cast<const std::byte*>(batch_->faults()),
                                    count() * sizeof(std::uint32_t)));
    if (decoded_ == sums_) continue;
    CORTADO_RETURN_IF_ERROR(setup_.device->add(
        queue().stream(), {.decoded = reinterpret_cast<const float*>(device_ + decoded_),
                           .sum = reinterpret_cast<float*>(device_ + sums_),
                           .magnitude = is_vote_ ? reinterpret_cast<float*>(device_ + magnitude_) : nullptr,
                           .elems = setup_.elems,
                           .is_first = term == 0,
                           .is_last = term == terms_ - 1}));
  }
  CORTADO_RETURN_IF_ERROR(to_host(host_ + sums_on_host_, device_ + sums_, region_bytes()));
  return queue().record(ended_);
}

Result<bool> DeviceDecode::ended() {
  CORTADO_ASSIGN_OR_RETURN(const bool is_there, queue().reached(ended_));
  if (!is_there) return false;
  for (int term = 0; term < terms_; ++term) {
    for (std::size_t i = 0; i < count(); ++i) {
      if (faults(term)[i] == 0) continue;
      return make_error(StatusCode::kCorruptData, "\"%s\", contributor %d: the decoder on the device refuses it",
                        setup_.pieces[i].name.c_str(), term);
    }
  }
  return true;
}

}  // namespace cortado

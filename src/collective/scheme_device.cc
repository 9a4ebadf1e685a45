// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_device.h"

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

DeviceOperation::DeviceOperation(const DeviceOperationSetup& setup)
    : setup_(setup), is_fixed_(setup.codec->row().traits.fixed_size) {
  for (const DevicePiece& piece : setup_.pieces) {
    room_.push_back(setup_.codec->max_payload_bytes(piece.rows, piece.cols, DType::kFloat32));
    offsets_.push_back(payloads_.add(room_.back()));
  }
}

std::vector<DeviceTensor> DeviceOperation::shapes() const { return tensors_at(nullptr, nullptr); }

std::vector<DeviceTensor> DeviceOperation::tensors_at(std::byte* values, std::byte* payloads) const {
  std::vector<DeviceTensor> tensors;
  for (std::size_t i = 0; i < count(); ++i) {
    const DevicePiece& piece = setup_.pieces[i];
    DeviceTensor& tensor = tensors.emplace_back();
    tensor.rows = piece.rows;
    tensor.cols = piece.cols;
    tensor.number = piece.number;
    if (values == nullptr) continue;
    tensor.data = values + static_cast<std::uint64_t>(piece.offset) * sizeof(float);
    tensor.payload = payloads + offsets_[i];
  }
  return tensors;
}

Status DeviceOperation::allocate() {
  CORTADO_ASSIGN_OR_RETURN(device_, queue().allocate_on_device(on_device_.bytes()));
  CORTADO_ASSIGN_OR_RETURN(host_, queue().allocate_on_host(on_host_.bytes()));
  return {};
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

// ---- encode --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceEncode>> DeviceEncode::make(const DeviceOperationSetup& setup, std::uint64_t seed,
                                                         bool is_lossy) {
  std::unique_ptr<DeviceEncode> encode(new DeviceEncode(setup, is_lossy));
  CORTADO_RETURN_IF_ERROR(encode->open(seed));
  return encode;
}

Status DeviceEncode::open(std::uint64_t seed) {
  CORTADO_ASSIGN_OR_RETURN(batch_, setup_.device->make_batch(setup_.codec->spec(), shapes()));
  const std::uint64_t workspace = on_device_.add(batch_->workspace_bytes());
  values_ = on_device_.add(region_bytes());
  encoded_ = on_device_.add(stride());
  step_ = on_device_.add(sizeof(std::uint64_t));
  values_on_host_ = on_host_.add(region_bytes());
  payloads_on_host_ = on_host_.add(stride());
  sizes_on_host_ = on_host_.add(count() * sizeof(std::uint64_t));
  step_on_host_ = on_host_.add(sizeof(std::uint64_t));
  CORTADO_RETURN_IF_ERROR(allocate());
  for (DeviceQueue::Event* event : {&sized_, &ended_}) {
    CORTADO_ASSIGN_OR_RETURN(*event, queue().make_event());
  }
  for (std::size_t i = 0; i < count(); ++i) sizes()[i] = room_[i];
  const DeviceKeys keys{.seed = seed, .step = reinterpret_cast<const std::uint64_t*>(device_ + step_)};
  return batch_->set_up(tensors_at(device_ + values_, device_ + encoded_), keys, device_ + workspace, queue().stream());
}

Status DeviceEncode::start(const float* values, std::uint64_t step) {
  copies_ = {};
  std::memcpy(host_ + values_on_host_, values, region_bytes());
  std::memcpy(host_ + step_on_host_, &step, sizeof(step));
  CORTADO_RETURN_IF_ERROR(to_device(device_ + values_, host_ + values_on_host_, region_bytes()));
  CORTADO_RETURN_IF_ERROR(to_device(device_ + step_, host_ + step_on_host_, sizeof(step)));
  CORTADO_RETURN_IF_ERROR(batch_->encode(queue().stream()));
  sizes_are_known_ = is_fixed_;
  if (is_fixed_) {
    CORTADO_RETURN_IF_ERROR(to_host(host_ + payloads_on_host_, device_ + encoded_, stride()));
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

// Of just the bytes they have.
Status DeviceEncode::fetch_payloads() {
  for (std::size_t i = 0; i < count(); ++i) {
    if (sizes()[i] > room_[i]) {
      return make_error(StatusCode::kInternal, "the device encoded \"%s\" in %llu bytes, expected at most %llu",
                        setup_.pieces[i].name.c_str(), static_cast<unsigned long long>(sizes()[i]),
                        static_cast<unsigned long long>(room_[i]));
    }
    CORTADO_RETURN_IF_ERROR(
        to_host(host_ + payloads_on_host_ + offsets_[i], device_ + encoded_ + offsets_[i], sizes()[i]));
  }
  return queue().record(ended_);
}

std::span<const std::byte> DeviceEncode::payload(std::size_t piece) const {
  return {host_ + payloads_on_host_ + offsets_[piece], static_cast<std::size_t>(sizes()[piece])};
}

// ---- decode --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<DeviceDecode>> DeviceDecode::make(const DeviceOperationSetup& setup, int terms) {
  std::unique_ptr<DeviceDecode> decode(new DeviceDecode(setup, terms));
  CORTADO_RETURN_IF_ERROR(decode->open());
  return decode;
}

Status DeviceDecode::open() {
  is_vote_ = setup_.codec->is_majority_vote();
  const auto terms = static_cast<std::size_t>(terms_);
  std::vector<std::uint64_t> workspaces;
  for (std::size_t t = 0; t < terms; ++t) {
    CORTADO_ASSIGN_OR_RETURN(batches_.emplace_back(), setup_.device->make_batch(setup_.codec->spec(), shapes()));
    workspaces.push_back(on_device_.add(batches_.back()->workspace_bytes()));
  }
  const std::uint64_t step = on_device_.add(sizeof(std::uint64_t));  // decoders don't read it
  sums_ = on_device_.add(region_bytes());
  if (terms > 1 || is_vote_) decoded_ = on_device_.add(region_bytes());
  if (is_vote_) magnitude_ = on_device_.add(region_bytes());
  received_ = on_device_.add(terms * stride());
  payloads_on_host_ = on_host_.add(terms * stride());
  sizes_on_host_ = on_host_.add(terms * count() * sizeof(std::uint64_t));
  faults_on_host_ = on_host_.add(terms * count() * sizeof(std::uint32_t));
  sums_on_host_ = on_host_.add(region_bytes());
  CORTADO_RETURN_IF_ERROR(allocate());
  CORTADO_ASSIGN_OR_RETURN(ended_, queue().make_event());
  const DeviceKeys keys{.seed = 0, .step = reinterpret_cast<const std::uint64_t*>(device_ + step)};
  for (std::size_t t = 0; t < terms; ++t) {
    std::byte* const values = device_ + (t == 0 && !is_vote_ ? sums_ : decoded_);
    CORTADO_RETURN_IF_ERROR(batches_[t]->set_up(tensors_at(values, device_ + received_ + t * stride()), keys,
                                                device_ + workspaces[t], queue().stream()));
  }
  return {};
}

Status DeviceDecode::put(std::size_t piece, int term, std::span<const std::byte> payload) {
  if (payload.size() > room_[piece]) {
    return make_error(StatusCode::kCorruptData, "payload has %zu bytes, expected at most %llu", payload.size(),
                      static_cast<unsigned long long>(room_[piece]));
  }
  sizes()[index(piece, term)] = payload.size();
  std::memcpy(host_ + payloads_on_host_ + static_cast<std::uint64_t>(term) * stride() + offsets_[piece], payload.data(),
              payload.size());
  return {};
}

Status DeviceDecode::start() {
  copies_ = {};
  const auto terms = static_cast<std::size_t>(terms_);
  if (is_fixed_) {
    CORTADO_RETURN_IF_ERROR(to_device(device_ + received_, host_ + payloads_on_host_, terms * stride()));
  }
  for (std::size_t t = 0; t < terms; ++t) {
    for (std::size_t i = 0; i < count() && !is_fixed_; ++i) {
      const std::uint64_t at = t * stride() + offsets_[i];
      CORTADO_RETURN_IF_ERROR(
          to_device(device_ + received_ + at, host_ + payloads_on_host_ + at, sizes()[t * count() + i]));
    }
    CORTADO_RETURN_IF_ERROR(to_device(reinterpret_cast<std::byte*>(batches_[t]->payload_bytes()),
                                      reinterpret_cast<const std::byte*>(sizes() + t * count()),
                                      count() * sizeof(std::uint64_t)));
    CORTADO_RETURN_IF_ERROR(batches_[t]->decode(queue().stream()));
    CORTADO_RETURN_IF_ERROR(to_host(host_ + faults_on_host_ + t * count() * sizeof(std::uint32_t),
                                    reinterpret_cast<const std::byte*>(batches_[t]->faults()),
                                    count() * sizeof(std::uint32_t)));
    if (t == 0 && !is_vote_) continue;
    CORTADO_RETURN_IF_ERROR(setup_.device->add(
        queue().stream(), {.decoded = reinterpret_cast<const float*>(device_ + decoded_),
                           .sum = reinterpret_cast<float*>(device_ + sums_),
                           .magnitude = is_vote_ ? reinterpret_cast<float*>(device_ + magnitude_) : nullptr,
                           .elems = setup_.elems,
                           .is_first = t == 0,
                           .is_last = t == terms - 1}));
  }
  CORTADO_RETURN_IF_ERROR(to_host(host_ + sums_on_host_, device_ + sums_, region_bytes()));
  return queue().record(ended_);
}

Result<bool> DeviceDecode::ended() {
  CORTADO_ASSIGN_OR_RETURN(const bool is_there, queue().reached(ended_));
  if (!is_there) return false;
  for (int t = 0; t < terms_; ++t) {
    for (std::size_t i = 0; i < count(); ++i) {
      if (faults()[index(i, t)] == 0) continue;
      return make_error(StatusCode::kCorruptData, "\"%s\", contributor %d: the decoder on the device refuses it",
                        setup_.pieces[i].name.c_str(), t);
    }
  }
  return true;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/tensor_list.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "codec/compso/compso.h"
#include "core/check.h"

namespace cortado {

namespace {

constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);

std::vector<std::int64_t> elems_of(std::span<const TensorView> tensors) {
  std::vector<std::int64_t> elems;
  for (const TensorView& tensor : tensors) elems.push_back(tensor.elems());
  return elems;
}

Status refuse(std::string_view spec, const char* why) {
  return make_error(StatusCode::kUnsupported, "%.200s cannot send what one rank has computed for all: %s",
                    std::string(spec).c_str(), why);
}

}  // namespace

Result<TensorListCodec> TensorListCodec::create(std::string_view spec, std::int64_t aggregate) {
  if (aggregate < 0) {
    return make_error(StatusCode::kInvalidArgument, "aggregate must be 0 or more tensors, got %" PRId64, aggregate);
  }
  TensorListCodec list;
  CORTADO_ASSIGN_OR_RETURN(list.codec_, make_codec(spec));
  const CodecTraits& traits = list.codec_->row().traits;
  if (traits.low_rank) return refuse(spec, "its factors are a state between steps");
  if (traits.rounds != 1) return refuse(spec, "it takes several rounds");
  if (list.codec_->is_majority_vote()) return refuse(spec, "it is a vote of all ranks");
  list.compso_ = compso_settings_of(*list.codec_);
  list.aggregate_ = aggregate;
  list.is_plain_ = list.codec_->spec() == "none";
  return list;
}

template <typename View, typename F>
Status TensorListCodec::for_groups(std::span<const View> tensors, const F& f) const {
  std::size_t first = 0;
  while (first < tensors.size()) {
    std::size_t count = 1;
    // One group has one dtype.
    while (compso_ != nullptr && first + count < tensors.size() &&
           (aggregate_ == 0 || count < static_cast<std::size_t>(aggregate_)) &&
           tensors[first + count].dtype == tensors[first].dtype) {
      ++count;
    }
    CORTADO_RETURN_IF_ERROR(f(first, tensors.subspan(first, count)));
    first += count;
  }
  return {};
}

std::vector<std::int64_t> TensorListCodec::elems_of_calls(std::span<const std::int64_t> tensor_elems) const {
  std::vector<TensorView> views;
  for (const std::int64_t elems : tensor_elems) views.push_back({nullptr, DType::kFloat32, 1, elems});
  std::vector<std::int64_t> calls;
  const Status status =
      for_groups(std::span<const TensorView>(views), [&](std::size_t, std::span<const TensorView> group) -> Status {
        calls.push_back(0);
        for (const TensorView& view : group) calls.back() += view.elems();
        return {};
      });
  CORTADO_CHECK(status.ok());
  return calls;
}

std::uint64_t TensorListCodec::max_payload_bytes(std::span<const TensorView> tensors) const {
  std::uint64_t bytes = 0;
  const Status status = for_groups(tensors, [&](std::size_t, std::span<const TensorView> group) -> Status {
    bytes += kLengthBytes;
    bytes += compso_ != nullptr ? max_compso_bytes(*compso_, elems_of(group), group[0].dtype)
                                : codec_->max_payload_bytes(group[0].rows, group[0].cols, group[0].dtype);
    return {};
  });
  CORTADO_CHECK(status.ok());
  return bytes;
}

std::uint64_t TensorListCodec::scratch_bytes(std::span<const TensorView> tensors) const {
  std::uint64_t bytes = 0;
  const Status status = for_groups(tensors, [&](std::size_t, std::span<const TensorView> group) -> Status {
    bytes = std::max(bytes, compso_ != nullptr ? compso_scratch_bytes(*compso_, elems_of(group))
                                               : codec_->scratch_bytes(group[0].rows, group[0].cols, group[0].dtype));
    return {};
  });
  CORTADO_CHECK(status.ok());
  return bytes;
}

Result<std::uint64_t> TensorListCodec::encode(std::span<const ConstTensorView> tensors, const EncodeContext& context,
                                              std::span<std::byte> payload, std::span<std::byte> scratch) const {
  std::uint64_t at = 0;
  CORTADO_RETURN_IF_ERROR(for_groups(tensors, [&](std::size_t first, std::span<const ConstTensorView> group) -> Status {
    EncodeContext own = context;
    own.tensor += first;
    const std::span<std::byte> room = payload.subspan(at + kLengthBytes);
    std::uint64_t bytes = 0;
    if (compso_ != nullptr) {
      bytes = encode_layers(*compso_, group, own, room.data(), scratch.data());
    } else {
      CORTADO_ASSIGN_OR_RETURN(bytes, codec_->encode(group[0], own, room, scratch));
    }
    std::memcpy(payload.data() + at, &bytes, kLengthBytes);
    at += kLengthBytes + bytes;
    return {};
  }));
  return at;
}

Status TensorListCodec::decode(std::span<const std::byte> payload, std::span<const TensorView> tensors,
                               std::span<std::byte> scratch) const {
  CORTADO_RETURN_IF_ERROR(for_groups(tensors, [&](std::size_t first, std::span<const TensorView> group) -> Status {
    std::uint64_t bytes = 0;
    if (payload.size() >= kLengthBytes) std::memcpy(&bytes, payload.data(), kLengthBytes);
    if (payload.size() < kLengthBytes || bytes > payload.size() - kLengthBytes) {
      return make_error(StatusCode::kCorruptData, "a payload of several tensors ends within tensor %zu", first);
    }
    const std::span<const std::byte> part = payload.subspan(kLengthBytes, bytes);
    payload = payload.subspan(kLengthBytes + bytes);
    return compso_ != nullptr ? decode_layers(*compso_, part, group, scratch.data())
                              : codec_->decode(part, group[0], scratch);
  }));
  if (payload.empty()) return {};
  return make_error(StatusCode::kCorruptData, "%zu bytes follow a payload of %zu tensors", payload.size(),
                    tensors.size());
}

}  // namespace cortado

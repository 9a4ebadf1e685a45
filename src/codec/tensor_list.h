// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// TensorListCodec: many tensors as one payload, for messages that carry the tensors of several layers. With `compso`
// all of them (or `aggregate` at a time) share a pass over their values and a table of codes, each with statistics of
// its own; with any other codec they are encoded one by one.
//
//   payload := { bytes (8, little-endian) | payload of the codec }     one for each tensor, or group of tensors
//
// Immutable once made: any number of threads may use it at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codec/compso/compso_layers.h"
#include "cortado/codec.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

class TensorListCodec {
 public:
  // Refuses what make_codec() refuses, and codecs that can't be decoded by whoever gets a payload alone: those of low
  // rank, with several rounds, or whose result is a vote. `aggregate`: tensors of one group of `compso`; 0: all.
  static Result<TensorListCodec> create(std::string_view spec, std::int64_t aggregate = 0);

  const Codec& codec() const { return *codec_; }
  bool is_plain() const { return is_plain_; }  // `none`: the payload's size is known and nothing is lost
  bool aggregates() const { return compso_ != nullptr; }

  // Values of each encoding (and decoding) of fp32 tensors of so many values.
  std::vector<std::int64_t> elems_of_calls(std::span<const std::int64_t> tensor_elems) const;

  // Upper bounds for tensors of these shapes; data pointers are not looked at.
  std::uint64_t max_payload_bytes(std::span<const TensorView> tensors) const;
  std::uint64_t scratch_bytes(std::span<const TensorView> tensors) const;

  // Returns the bytes written. Tensor i draws its random numbers as tensor `context.tensor + i`; with compso those of a
  // group with one table as its first tensor does, numbered through.
  Result<std::uint64_t> encode(std::span<const ConstTensorView> tensors, const EncodeContext& context,
                               std::span<std::byte> payload, std::span<std::byte> scratch) const;

  // Any bytes are safe; kCorruptData for what can't have been written for these tensors.
  Status decode(std::span<const std::byte> payload, std::span<const TensorView> tensors,
                std::span<std::byte> scratch) const;

 private:
  // Calls f(first tensor, tensors) for each group.
  template <typename View, typename F>
  Status for_groups(std::span<const View> tensors, const F& f) const;

  std::unique_ptr<Codec> codec_;
  const CompsoSettings* compso_ = nullptr;
  std::int64_t aggregate_ = 0;
  bool is_plain_ = false;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// CodecScratch: what one thread needs to encode or decode one tensor. CodecScratchPool: one for each thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/aligned_buffer.h"

namespace cortado {

// Sizes that are enough for a tensor; merge() makes them enough for two.
struct CodecScratchSizes {
  std::size_t tensor_elems = 0;
  std::size_t magnitude_elems = 0;
  std::size_t codec_bytes = 0;
  std::size_t joint_bytes = 0;

  void merge(const CodecScratchSizes& other) {
    tensor_elems = std::max(tensor_elems, other.tensor_elems);
    magnitude_elems = std::max(magnitude_elems, other.magnitude_elems);
    codec_bytes = std::max(codec_bytes, other.codec_bytes);
    joint_bytes = std::max(joint_bytes, other.joint_bytes);
  }
};

struct CodecScratch {
  AlignedBuffer<float> decoded;    // one rank's tensor
  AlignedBuffer<float> sum;        // over ranks
  AlignedBuffer<float> magnitude;  // of a majority vote
  AlignedBuffer<std::byte> codec;  // the codec's own
  AlignedBuffer<std::byte> joint;  // a payload that arrived in two pieces
};

class CodecScratchPool {
 public:
  CodecScratchPool() = default;
  CodecScratchPool(int threads, const CodecScratchSizes& sizes)
      : places_(std::make_unique<Place[]>(static_cast<std::size_t>(threads))), threads_(threads) {
    for (int i = 0; i < threads; ++i) {
      CodecScratch& scratch = places_[i].scratch;
      scratch.decoded = AlignedBuffer<float>(sizes.tensor_elems);
      scratch.sum = AlignedBuffer<float>(sizes.tensor_elems);
      scratch.magnitude = AlignedBuffer<float>(sizes.magnitude_elems);
      scratch.codec = AlignedBuffer<std::byte>(sizes.codec_bytes);
      scratch.joint = AlignedBuffer<std::byte>(sizes.joint_bytes);
    }
    const std::size_t floats = 2 * sizes.tensor_elems + sizes.magnitude_elems;
    bytes_ = threads * static_cast<std::int64_t>(floats * sizeof(float) + sizes.codec_bytes + sizes.joint_bytes);
  }
  CodecScratchPool& operator=(CodecScratchPool&&) = default;

  std::int64_t bytes() const { return bytes_; }

  // Calls act(CodecScratch&) with one that no other thread has. At most `threads` threads may be inside at once.
  template <typename Act>
  auto with(Act&& act) {
    Place* place = nullptr;
    while (place == nullptr) {
      for (int i = 0; i < threads_ && place == nullptr; ++i) {
        if (!places_[i].taken.exchange(true, std::memory_order_acquire)) place = &places_[i];
      }
    }
    struct GiveBack {
      Place* place;
      ~GiveBack() { place->taken.store(false, std::memory_order_release); }
    } give_back{place};
    return act(place->scratch);
  }

 private:
  struct Place {
    std::atomic<bool> taken{false};
    CodecScratch scratch;
  };
  std::unique_ptr<Place[]> places_;
  int threads_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace cortado

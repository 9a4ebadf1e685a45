// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// ResidualStore: the memory of error feedback, one buffer for all tensors, by tensor index. Zero at the start. With
// `with_spare` there are two buffers, so that a step can write one and leave the other for an exact rollback.
#pragma once

#include <cstdint>
#include <vector>

#include "core/aligned_buffer.h"

namespace cortado {

class ResidualStore {
 public:
  ResidualStore() = default;
  // elems[t] floats for tensor t; 0 for tensors without a residual.
  ResidualStore(const std::vector<std::int64_t>& elems, bool with_spare) {
    std::size_t total = 0;
    for (const std::int64_t count : elems) {
      offsets_.push_back(total);
      total += (static_cast<std::size_t>(count) + kAlignElems - 1) / kAlignElems * kAlignElems;
    }
    residuals_ = AlignedBuffer<float>(total);
    if (with_spare) spares_ = AlignedBuffer<float>(total);
  }

  float* residual(std::size_t tensor) { return residuals_.data() + offsets_[tensor]; }
  float* spare(std::size_t tensor) { return spares_.size() == 0 ? nullptr : spares_.data() + offsets_[tensor]; }
  std::int64_t bytes() const { return static_cast<std::int64_t>((residuals_.size() + spares_.size()) * sizeof(float)); }

 private:
  static constexpr std::size_t kAlignElems = 16;
  std::vector<std::size_t> offsets_;
  AlignedBuffer<float> residuals_;
  AlignedBuffer<float> spares_;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How decoding of a batch begins, whatever its codec.
#pragma once

#include "codec/device_tensors.h"

namespace cortado {

// Faults: none yet, but for payloads of a fixed size that have another one.
struct BeginFaults {
  static constexpr int kThreads = 256;

  TensorTable tensors;
  std::int64_t count;
  bool is_fixed;  // a payload's size is max_payload_bytes

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t i = block.number() * kThreads + t;
      if (i >= count) return;
      const bool is_other = is_fixed && tensors.payload_bytes[i] != tensors.entries[i].max_payload_bytes;
      tensors.faults[i] = is_other ? kCorruptPayload : 0;
    });
  }
};

}  // namespace cortado

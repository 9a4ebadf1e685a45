// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/streaming.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/streaming.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void StreamLines(const std::uint8_t* from, std::size_t bytes, std::uint8_t* to) {
  const hn::CappedTag<std::uint8_t, 64> d;
  for (std::size_t i = 0; i < bytes; i += hn::Lanes(d)) hn::Stream(hn::LoadU(d, from + i), d, to + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(StreamLines);

void stream_copy(const void* from, std::size_t bytes, void* to) {
  const bool are_lines = is_stream_aligned(to) && bytes % kStreamAlignBytes == 0;
  if (!are_lines) {
    std::memcpy(to, from, bytes);
  } else {
    HWY_DYNAMIC_DISPATCH(StreamLines)(static_cast<const std::uint8_t*>(from), bytes, static_cast<std::uint8_t*>(to));
  }
}

void finish_streams() { hwy::FlushStream(); }

}  // namespace cortado
#endif

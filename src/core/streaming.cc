// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/streaming.h"

#include <algorithm>
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
  const auto* source = static_cast<const std::uint8_t*>(from);
  auto* target = static_cast<std::uint8_t*>(to);
  const std::size_t head = std::min(bytes, static_cast<std::size_t>(bytes_to_stream_alignment(to)));
  const std::size_t lines = (bytes - head) / kStreamAlignBytes * kStreamAlignBytes;
  std::memcpy(target, source, head);
  HWY_DYNAMIC_DISPATCH(StreamLines)(source + head, lines, target + head);
  std::memcpy(target + head + lines, source + head + lines, bytes - head - lines);
}

void finish_streams() { hwy::FlushStream(); }

}  // namespace cortado
#endif

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Groups of codes that a message of `compso` leaves out, because all their levels are 0: rows of dead units, pixels
// that are always black, tokens that did not occur. A bit a group, at the end of the message, says which are there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/device.h"

namespace cortado {

// Of a layer; its last group may have fewer. Smaller messages keep all: the bits would take more than they save.
constexpr std::int64_t kCompsoGroupElems = 256;
constexpr std::int64_t kCompsoLeastGroupedElems = 4096;

// In the first word of a message.
constexpr std::uint64_t kCompsoLeavesOut = 4;

CORTADO_HD constexpr std::int64_t compso_groups(std::int64_t layer_elems) {
  return layer_elems / kCompsoGroupElems + (layer_elems % kCompsoGroupElems != 0);
}
CORTADO_HD constexpr std::int64_t compso_elems_of_group(std::int64_t layer_elems, std::int64_t group) {
  const std::int64_t left = layer_elems - group * kCompsoGroupElems;
  return left < kCompsoGroupElems ? left : kCompsoGroupElems;
}

CORTADO_HD constexpr std::uint64_t compso_group_flag_bytes(std::int64_t groups) {
  return (static_cast<std::uint64_t>(groups) + 7) / 8;
}
CORTADO_HD constexpr bool is_group_kept(const std::byte* flags, std::int64_t group) {
  return (static_cast<unsigned>(flags[group / 8]) >> (group % 8) & 1u) != 0;
}

// Codes of a layer whose groups are numbered from `first_group` on that are not left out.
inline std::int64_t kept_codes(const std::byte* flags, std::int64_t first_group, std::int64_t layer_elems) {
  std::int64_t kept = 0;
  for (std::int64_t group = 0; group < compso_groups(layer_elems); ++group) {
    if (is_group_kept(flags, first_group + group)) kept += compso_elems_of_group(layer_elems, group);
  }
  return kept;
}

// Whether bits behind that of the last group are set, which no encoder does.
CORTADO_HD constexpr bool has_flags_beyond(const std::byte* flags, std::int64_t groups) {
  return groups % 8 != 0 && static_cast<unsigned>(flags[groups / 8]) >> (groups % 8) != 0;
}

}  // namespace cortado

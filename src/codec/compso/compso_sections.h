// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The low codes of a message of `compso`: payloads of `rans` one behind the other, sections, each with a table of its
// own. Where a layer, or a part of one, has other codes than what came before, a new section takes fewer bits than a
// table for all; where they are alike, one section goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/rans/rans_kernels.h"
#include "cortado/status.h"

namespace cortado {

// What sections take at most, beyond max_rans_bytes() of all codes and 8 bytes.
std::uint64_t max_extra_section_bytes(std::int64_t elems);

// Encodes codes while they are made. Codes that are counted together, a unit, stay in one section; units are alike
// where a common table costs no more bits than the second table would.
class SectionEncoder {
 public:
  // `codes` are those of the message from the first one on, without those left out; `scratch` has rans_scratch_bytes()
  // of all, `to` room for all sections.
  SectionEncoder(const std::uint8_t* codes, std::int64_t chunk_codes, std::byte* scratch, std::byte* to)
      : codes_(codes), chunk_codes_(chunk_codes), scratch_(scratch), to_(to) {}

  // Of the unit in hand. Whoever makes codes counts them here, then says how many there were and how many of them are
  // not left out.
  RansCounts* counts() { return &unit_; }
  void advance(std::int64_t elems, std::int64_t kept);
  // What follows may be different.
  void end_layer();

  // After the last code: the end of what was written.
  std::byte* finish();
  std::uint64_t sections() const { return sections_; }

 private:
  void end_unit();
  void put_section(bool is_last);

  const std::uint8_t* codes_;
  const std::int64_t chunk_codes_;
  std::byte* const scratch_;
  std::byte* to_;
  std::int64_t begin_ = 0, section_elems_ = 0, unit_elems_ = 0, unit_kept_ = 0;
  std::uint64_t sections_ = 0;
  double section_bits_ = 0;
  RansCounts unit_, section_;  // of `section_` only the sums
};

// The inverse: so many sections for `elems` codes, from the payload's begin; *bytes is where they end.
Status decode_sections(std::span<const std::byte> payload, std::uint64_t sections, std::uint8_t* codes,
                       std::int64_t elems, std::byte* scratch, std::uint64_t* bytes);

// What stands before a section's payload of `rans`.
struct SectionHead {
  std::uint64_t head_bytes;  // 8 for the last section, which has what codes are left, else 16
  std::int64_t elems;
  std::uint64_t bytes;
};
// kCorruptData if the section, of a message's codes from `at` on, can't be.
Result<SectionHead> read_section_head(std::span<const std::byte> payload, bool is_last, std::int64_t elems_left);

}  // namespace cortado

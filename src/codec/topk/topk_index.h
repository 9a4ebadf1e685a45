// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The index section of sparse payloads: which positions of a tensor were kept, as Golomb-Rice coded gaps or as a
// bitmap. spec.md has the format.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "codec/topk/topk_rice.h"
#include "cortado/status.h"

namespace cortado {

// Largest size of a section of 1 <= kept <= max_kept positions.
std::uint64_t max_index_bytes(IndexKind kind, std::int64_t elems, std::int64_t max_kept);

// Writes the section of ascending `positions` below `elems`, at least one; returns its bytes, at most
// max_index_bytes().
std::uint64_t write_index(IndexKind kind, std::span<const std::int64_t> positions, std::int64_t elems,
                          std::byte* section);

// The number of positions that the first bytes of a payload speak of, and that they can be those of a section with
// min_kept to max_kept positions.
Result<std::int64_t> read_index_header(std::span<const std::byte> section, IndexKind kind, std::int64_t min_kept,
                                       std::int64_t max_kept);

// After read_index_header() gave `kept`: the section has the one size it can have, and for_each_position() gives
// `kept` ascending positions below `elems`.
Status check_index_section(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept);

// ---- reading of checked sections -----------------------------------------------------------------------------------

// As many of the next bytes as there are, the missing ones 0.
template <class Word>
Word load_word(std::span<const std::byte> bytes, std::size_t at) {
  Word word = 0;
  if (at + sizeof(Word) <= bytes.size()) {
    std::memcpy(&word, bytes.data() + at, sizeof(Word));
  } else if (at < bytes.size()) {
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
  }
  return word;
}

// The numbers of the bits that are set, in ascending order; next() is asked at most as often as there are.
class SetBits {
 public:
  explicit SetBits(std::span<const std::byte> bytes) : bytes_(bytes), word_(load_word<std::uint64_t>(bytes, 0)) {}

  std::int64_t next() {
    while (word_ == 0 && at_ < bytes_.size()) {
      at_ += sizeof(word_);
      word_ = load_word<std::uint64_t>(bytes_, at_);
    }
    const int bit = std::countr_zero(word_);
    word_ &= word_ - 1;
    return static_cast<std::int64_t>(8 * at_) + bit;
  }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::uint64_t word_;
};

// Fields of a fixed width of at most 24 bits.
class BitFields {
 public:
  BitFields(std::span<const std::byte> bytes, int width) : bytes_(bytes), width_(width) {}

  std::int64_t next() {
    const std::uint32_t word = load_word<std::uint32_t>(bytes_, bit_ / 8) >> (bit_ % 8);
    bit_ += static_cast<std::size_t>(width_);
    return word & ((1u << width_) - 1);
  }

 private:
  std::span<const std::byte> bytes_;
  int width_;
  std::size_t bit_ = 0;
};

// The two parts behind the header of a delta section of `kept` positions.
struct DeltaParts {
  DeltaParts(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept);

  int bits;
  std::span<const std::byte> low;
  std::span<const std::byte> unary;
};

// Calls f(position) for all `kept` positions, in ascending order.
template <class F>
void for_each_position(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept, const F& f) {
  if (static_cast<IndexKind>(section[0]) == IndexKind::kBitmap) {
    SetBits positions(section.subspan(kIndexHeaderBytes));
    for (std::int64_t i = 0; i < kept; ++i) f(positions.next());
    return;
  }
  const DeltaParts parts(section, elems, kept);
  BitFields low(parts.low, parts.bits);
  SetBits ones(parts.unary);
  std::int64_t low_sum = 0;  // of the gaps, and the positions between them
  for (std::int64_t i = 0; i < kept; ++i) {
    low_sum += low.next() + 1;
    f(((ones.next() - i) << parts.bits) + low_sum - 1);
  }
}

}  // namespace cortado

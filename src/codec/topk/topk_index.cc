// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_index.h"

#include <algorithm>

#include "core/check.h"

namespace cortado {

namespace {

std::uint64_t bitmap_bytes(std::int64_t elems) { return bytes_of_bits(elems); }

std::uint64_t unary_bytes(std::span<const std::int64_t> positions, int bits) {
  std::int64_t sum = static_cast<std::int64_t>(positions.size());
  std::int64_t next = 0;
  for (const std::int64_t position : positions) {
    sum += (position - next) >> bits;
    next = position + 1;
  }
  return bytes_of_bits(sum);
}

void write_bitmap(std::span<const std::int64_t> positions, std::int64_t elems, std::byte* to) {
  std::memset(to, 0, bitmap_bytes(elems));
  for (const std::int64_t position : positions) to[position / 8] |= std::byte{1} << (position % 8);
}

// Four bytes at a time.
class FieldWriter {
 public:
  explicit FieldWriter(std::byte* to) : to_(to) {}
  void put(std::uint64_t field, int width) {
    word_ |= field << filled_bits_;
    filled_bits_ += width;
    if (filled_bits_ < 32) return;
    std::memcpy(to_, &word_, 4);
    to_ += 4;
    word_ >>= 32;
    filled_bits_ -= 32;
  }
  void flush() { std::memcpy(to_, &word_, bytes_of_bits(filled_bits_)); }

 private:
  std::byte* to_;
  std::uint64_t word_ = 0;
  int filled_bits_ = 0;
};

void write_delta(std::span<const std::int64_t> positions, int bits, std::byte* low, std::byte* unary) {
  FieldWriter fields(low);
  const std::int64_t low_mask = (std::int64_t{1} << bits) - 1;
  std::int64_t next = 0, one = 0;
  for (const std::int64_t position : positions) {
    const std::int64_t gap = position - next;
    next = position + 1;
    fields.put(static_cast<std::uint64_t>(gap & low_mask), bits);
    one += gap >> bits;
    unary[one / 8] |= std::byte{1} << (one % 8);
    ++one;
  }
  fields.flush();
}

std::int64_t count_bits(std::span<const std::byte> bytes) {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < bytes.size(); i += 8) count += std::popcount(load_word<std::uint64_t>(bytes, i));
  return count;
}

const char* name_of(IndexKind kind) { return kind == IndexKind::kBitmap ? "bitmap" : "delta"; }

Status wrong_size(IndexKind kind, std::size_t bytes, std::uint64_t least, std::uint64_t most) {
  return make_error(StatusCode::kCorruptData, "the %s index section has %zu bytes, expected %llu to %llu",
                    name_of(kind), bytes, static_cast<unsigned long long>(least),
                    static_cast<unsigned long long>(most));
}

Status wrong_count(IndexKind kind, std::int64_t found, std::int64_t kept) {
  return make_error(StatusCode::kCorruptData, "the %s index section has %lld positions, its header says %lld",
                    name_of(kind), static_cast<long long>(found), static_cast<long long>(kept));
}

// The last byte has bits from `used_bits` on, counted from the beginning of `bytes`.
bool has_bits_behind(std::span<const std::byte> bytes, std::int64_t used_bits) {
  return used_bits % 8 != 0 && (bytes.back() >> (used_bits % 8)) != std::byte{0};
}

Status check_bitmap(std::span<const std::byte> bits, std::int64_t elems, std::int64_t kept) {
  if (bits.size() != bitmap_bytes(elems)) {
    const std::uint64_t expected = kIndexHeaderBytes + bitmap_bytes(elems);
    return wrong_size(IndexKind::kBitmap, kIndexHeaderBytes + bits.size(), expected, expected);
  }
  if (has_bits_behind(bits, elems)) {
    return make_error(StatusCode::kCorruptData, "the bitmap has positions behind the tensor's %lld elements",
                      static_cast<long long>(elems));
  }
  const std::int64_t found = count_bits(bits);
  return found == kept ? Status() : wrong_count(IndexKind::kBitmap, found, kept);
}

Status check_delta(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept) {
  const int bits = rice_bits(elems, kept);
  const std::uint64_t least = kIndexHeaderBytes + bytes_of_bits(kept * bits) + bytes_of_bits(kept);
  const std::uint64_t most = kIndexHeaderBytes + bytes_of_bits(kept * bits) + max_unary_bytes(elems, kept, bits);
  if (section.size() < least || section.size() > most) {
    return wrong_size(IndexKind::kDelta, section.size(), least, most);
  }
  const DeltaParts parts(section, elems, kept);
  const std::int64_t found = count_bits(parts.unary);
  if (found != kept || kept == 0) return wrong_count(IndexKind::kDelta, found, kept);
  if (parts.unary.back() == std::byte{0} || has_bits_behind(parts.low, kept * bits)) {
    return make_error(StatusCode::kCorruptData, "the delta index section does not end with its last position");
  }
  std::int64_t low_sum = 0;
  BitFields low(parts.low, bits);
  for (std::int64_t i = 0; i < kept; ++i) low_sum += low.next();
  const std::int64_t one = 8 * static_cast<std::int64_t>(parts.unary.size()) - 1 -
                           std::countl_zero(static_cast<std::uint8_t>(parts.unary.back()));
  const std::int64_t last = ((one - (kept - 1)) << bits) + low_sum + kept - 1;
  if (last < elems) return {};
  return make_error(StatusCode::kCorruptData, "the last position is %lld, the tensor has %lld elements",
                    static_cast<long long>(last), static_cast<long long>(elems));
}

}  // namespace

std::uint64_t max_index_bytes(IndexKind kind, std::int64_t elems, std::int64_t max_kept) {
  if (elems == 0) return 0;
  // Both parts round up to bytes.
  const std::uint64_t delta = bytes_of_bits(most_delta_bits(elems, max_kept, rice_bits(elems, max_kept))) + 1;
  if (kind == IndexKind::kDelta) return kIndexHeaderBytes + delta;
  if (kind == IndexKind::kBitmap) return kIndexHeaderBytes + bitmap_bytes(elems);
  return kIndexHeaderBytes + std::min(delta, bitmap_bytes(elems));
}

std::uint64_t write_index(IndexKind kind, std::span<const std::int64_t> positions, std::int64_t elems,
                          std::byte* section) {
  const auto kept = static_cast<std::int64_t>(positions.size());
  const int bits = rice_bits(elems, kept);
  const std::uint64_t low_bytes = bytes_of_bits(kept * bits);
  const std::uint64_t delta_bytes = low_bytes + unary_bytes(positions, bits);
  if (kind == IndexKind::kSmaller) {
    kind = delta_bytes <= bitmap_bytes(elems) ? IndexKind::kDelta : IndexKind::kBitmap;
  }
  section[0] = static_cast<std::byte>(kind);
  std::memcpy(section + 1, &kept, sizeof(kept));
  std::byte* const body = section + kIndexHeaderBytes;
  if (kind == IndexKind::kBitmap) {
    write_bitmap(positions, elems, body);
    return kIndexHeaderBytes + bitmap_bytes(elems);
  }
  std::memset(body + low_bytes, 0, delta_bytes - low_bytes);
  write_delta(positions, bits, body, body + low_bytes);
  return kIndexHeaderBytes + delta_bytes;
}

Result<std::int64_t> read_index_header(std::span<const std::byte> section, IndexKind kind, std::int64_t min_kept,
                                       std::int64_t max_kept) {
  if (section.size() < kIndexHeaderBytes) {
    return make_error(StatusCode::kCorruptData, "%zu bytes, expected at least the %llu of the index header",
                      section.size(), static_cast<unsigned long long>(kIndexHeaderBytes));
  }
  const auto found = static_cast<IndexKind>(section[0]);
  const bool is_known = found == IndexKind::kDelta || found == IndexKind::kBitmap;
  if (!is_known || (kind != IndexKind::kSmaller && found != kind)) {
    return make_error(StatusCode::kCorruptData, "the index section is of kind %d, expected %s", static_cast<int>(found),
                      kind == IndexKind::kSmaller ? "1 (delta) or 2 (bitmap)"
                      : kind == IndexKind::kDelta ? "1 (delta)"
                                                  : "2 (bitmap)");
  }
  std::int64_t kept = 0;
  std::memcpy(&kept, section.data() + 1, sizeof(kept));
  if (kept >= min_kept && kept <= max_kept) return kept;
  return make_error(StatusCode::kCorruptData, "%lld kept values, expected %lld to %lld", static_cast<long long>(kept),
                    static_cast<long long>(min_kept), static_cast<long long>(max_kept));
}

Status check_index_section(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept) {
  return static_cast<IndexKind>(section[0]) == IndexKind::kBitmap
             ? check_bitmap(section.subspan(kIndexHeaderBytes), elems, kept)
             : check_delta(section, elems, kept);
}

DeltaParts::DeltaParts(std::span<const std::byte> section, std::int64_t elems, std::int64_t kept)
    : bits(rice_bits(elems, kept)) {
  const std::uint64_t low_bytes = bytes_of_bits(kept * bits);
  low = section.subspan(kIndexHeaderBytes, low_bytes);
  unary = section.subspan(kIndexHeaderBytes + low_bytes);
}

}  // namespace cortado

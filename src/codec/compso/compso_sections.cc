// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso_sections.h"

#include <algorithm>
#include <cstring>

#include "codec/compso/compso_entropy.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"

namespace cortado {

namespace {

// Order-0 entropy of codes that occur as often as that in both together. Terms are added in a tree.
double entropy_bits(const std::uint64_t (&a)[256], const std::uint64_t (&b)[256]) {
  std::uint64_t all = 0;
  double terms[256];
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    const std::uint64_t count = a[symbol] + b[symbol];
    all += count;
    terms[symbol] = bits_of_count(count);
  }
  for (std::size_t apart = 128; apart > 0; apart /= 2) {
    for (std::size_t i = 0; i < apart; ++i) terms[i] += terms[i + apart];
  }
  return bits_of_count(all) - terms[0];
}

double section_cost_bits(const std::uint64_t (&counts)[256]) {
  std::size_t first = 0, last = 255;
  while (first < last && counts[first] == 0) ++first;
  while (first < last && counts[last] == 0) --last;
  return cortado::section_cost_bits(first, last);
}

constexpr std::uint64_t kNone[256] = {};

template <typename T>
std::byte* put(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
  return to + sizeof(value);
}

}  // namespace

std::uint64_t max_extra_section_bytes(std::int64_t elems) {
  return (16 + 1) * static_cast<std::uint64_t>(elems / kLeastUnitCodes);
}

void SectionEncoder::advance(std::int64_t elems, std::int64_t kept) {
  unit_elems_ += elems;
  unit_kept_ += kept;
  if (unit_elems_ >= kUnitCodes) end_unit();
}

void SectionEncoder::end_layer() {
  if (unit_elems_ >= kLeastUnitCodes) end_unit();
}

void SectionEncoder::end_unit() {
  unit_.settle();
  const double together = entropy_bits(section_.sums, unit_.sums);
  const double alone = entropy_bits(kNone, unit_.sums);
  if (section_elems_ > 0 && together - section_bits_ - alone > section_cost_bits(unit_.sums)) {
    put_section(false);
    section_bits_ = alone;
  } else {
    section_bits_ = together;
  }
  for (std::size_t symbol = 0; symbol < 256; ++symbol) {
    section_.sums[symbol] += unit_.sums[symbol];
    unit_.sums[symbol] = 0;
  }
  section_elems_ += unit_kept_;
  unit_elems_ = unit_kept_ = 0;
}

void SectionEncoder::put_section(bool is_last) {
  if (!is_last) to_ = put(static_cast<std::uint64_t>(section_elems_), to_);
  const std::uint64_t bytes = encode_codes(codes_ + begin_, section_elems_, chunk_codes_, to_ + sizeof(std::uint64_t),
                                           scratch_, nullptr, &section_);
  to_ = put(bytes, to_) + bytes;
  begin_ += section_elems_;
  section_elems_ = 0;
  section_ = {};
  ++sections_;
}

std::byte* SectionEncoder::finish() {
  if (unit_elems_ > 0) end_unit();
  put_section(true);
  return to_;
}

Result<SectionHead> read_section_head(std::span<const std::byte> payload, bool is_last, std::int64_t elems_left) {
  SectionHead head = {.head_bytes = is_last ? 8u : 16u, .elems = elems_left, .bytes = 0};
  if (payload.size() < head.head_bytes) {
    return make_error(StatusCode::kCorruptData, "%zu bytes left for low codes, expected at least %llu", payload.size(),
                      static_cast<unsigned long long>(head.head_bytes));
  }
  if (!is_last) {
    std::uint64_t elems;
    std::memcpy(&elems, payload.data(), sizeof(elems));
    if (elems == 0 || elems >= static_cast<std::uint64_t>(elems_left)) {
      return make_error(StatusCode::kCorruptData, "a section of %llu low codes, but not the last, where %lld are left",
                        static_cast<unsigned long long>(elems), static_cast<long long>(elems_left));
    }
    head.elems = static_cast<std::int64_t>(elems);
  }
  std::memcpy(&head.bytes, payload.data() + head.head_bytes - 8, sizeof(head.bytes));
  if (head.bytes > payload.size() - head.head_bytes) {
    return make_error(StatusCode::kCorruptData, "%llu bytes of low codes, but %zu bytes are left",
                      static_cast<unsigned long long>(head.bytes), payload.size() - head.head_bytes);
  }
  return head;
}

Status decode_sections(std::span<const std::byte> payload, std::uint64_t sections, std::uint8_t* codes,
                       std::int64_t elems, std::byte* scratch, std::uint64_t* bytes) {
  std::span<const std::byte> rest = payload;
  for (std::uint64_t section = 0; section < sections; ++section) {
    CORTADO_ASSIGN_OR_RETURN(const SectionHead head, read_section_head(rest, section + 1 == sections, elems));
    rest = rest.subspan(head.head_bytes);
    CORTADO_RETURN_IF_ERROR(decode_codes(rest.first(head.bytes), codes, head.elems, scratch));
    rest = rest.subspan(head.bytes);
    codes += head.elems;
    elems -= head.elems;
  }
  *bytes = payload.size() - rest.size();
  return {};
}

}  // namespace cortado

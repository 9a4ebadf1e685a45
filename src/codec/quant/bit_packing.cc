// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/bit_packing.h"

#include <algorithm>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/bit_packing.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Row = hn::CappedTag<std::uint8_t, 16>;
using VRow = hn::Vec<Row>;

constexpr int kLanes = 16, kRows = 8;
static_assert(kLanes * kRows == kPackedGroupElems);

template <int kBits>
HWY_INLINE void pack_lanes(const std::uint8_t* codes, std::uint8_t* packed) {
  const Row d;
  VRow bytes[kBits];
  // Rows are unrolled by the template, since shifts must be constants.
  const auto add_row = [&]<int kRow>(std::integral_constant<int, kRow>) HWY_ATTR {
    constexpr int kByte = kRow * kBits / 8, kShift = kRow * kBits % 8;
    const VRow row = hn::LoadU(d, codes + kRow * kLanes);
    bytes[kByte] = kShift == 0 ? row : hn::Or(bytes[kByte], hn::ShiftLeft<kShift>(row));
    if constexpr (kShift + kBits > 8) bytes[kByte + 1] = hn::ShiftRight<8 - kShift>(row);
  };
  [&]<int... kRow>(std::integer_sequence<int, kRow...>) HWY_ATTR {
    (add_row(std::integral_constant<int, kRow>()), ...);
  }
  (std::make_integer_sequence<int, kRows>());
  for (int i = 0; i < kBits; ++i) hn::StoreU(bytes[i], d, packed + i * kLanes);
}

// Returns the larger of each row and `largest`: read again from memory, the codes would cost more than unpacking them.
template <int kBits>
HWY_INLINE VRow unpack_lanes(const std::uint8_t* packed, std::uint8_t* codes, VRow largest) {
  const Row d;
  const VRow mask = hn::Set(d, static_cast<std::uint8_t>((1 << kBits) - 1));
  const auto take_row = [&]<int kRow>(std::integral_constant<int, kRow>) HWY_ATTR {
    constexpr int kByte = kRow * kBits / 8, kShift = kRow * kBits % 8;
    VRow row = hn::ShiftRight<kShift>(hn::LoadU(d, packed + kByte * kLanes));
    if constexpr (kShift + kBits > 8) {
      row = hn::Or(row, hn::ShiftLeft<8 - kShift>(hn::LoadU(d, packed + (kByte + 1) * kLanes)));
    }
    row = hn::And(row, mask);
    largest = hn::Max(largest, row);
    hn::StoreU(row, d, codes + kRow * kLanes);
  };
  [&]<int... kRow>(std::integer_sequence<int, kRow...>) HWY_ATTR {
    (take_row(std::integral_constant<int, kRow>()), ...);
  }
  (std::make_integer_sequence<int, kRows>());
  return largest;
}

HWY_INLINE std::uint8_t largest_lane(VRow row) {
  std::uint8_t lanes[kLanes] = {};
  hn::StoreU(row, Row(), lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

template <int kBits>
void pack_groups(const std::uint8_t* codes, std::int64_t groups, std::uint8_t* packed) {
  const auto lanes = static_cast<int>(hn::Lanes(Row()));
  for (std::int64_t group = 0; group < groups; ++group) {
    for (int part = 0; part < kLanes; part += lanes) {
      pack_lanes<kBits>(codes + group * kPackedGroupElems + part, packed + group * kLanes * kBits + part);
    }
  }
}

template <int kBits>
std::uint8_t unpack_groups(const std::uint8_t* packed, std::int64_t groups, std::uint8_t* codes) {
  const auto lanes = static_cast<int>(hn::Lanes(Row()));
  VRow largest = hn::Zero(Row());
  for (std::int64_t group = 0; group < groups; ++group) {
    for (int part = 0; part < kLanes; part += lanes) {
      largest = unpack_lanes<kBits>(packed + group * kLanes * kBits + part, codes + group * kPackedGroupElems + part,
                                    largest);
    }
  }
  return largest_lane(largest);
}

void PackGroups(const std::uint8_t* codes, std::int64_t groups, int bits, std::uint8_t* packed) {
  constexpr decltype(&pack_groups<1>) kByBits[] = {pack_groups<1>, pack_groups<2>, pack_groups<3>, pack_groups<4>,
                                                   pack_groups<5>, pack_groups<6>, pack_groups<7>};
  kByBits[bits - 1](codes, groups, packed);
}

std::uint8_t UnpackGroups(const std::uint8_t* packed, std::int64_t groups, int bits, std::uint8_t* codes) {
  constexpr decltype(&unpack_groups<1>) kByBits[] = {unpack_groups<1>, unpack_groups<2>, unpack_groups<3>,
                                                     unpack_groups<4>, unpack_groups<5>, unpack_groups<6>,
                                                     unpack_groups<7>};
  return kByBits[bits - 1](packed, groups, codes);
}

std::uint8_t LargestOfCodes(const std::uint8_t* codes, std::int64_t elems) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(Row()));
  VRow largest = hn::Zero(Row());
  std::int64_t i = 0;
  for (; i + lanes <= elems; i += lanes) largest = hn::Max(largest, hn::LoadU(Row(), codes + i));
  std::uint8_t result = largest_lane(largest);
  for (; i < elems; ++i) result = std::max(result, codes[i]);
  return result;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(PackGroups);
HWY_EXPORT(UnpackGroups);
HWY_EXPORT(LargestOfCodes);

void pack_codes(const std::uint8_t* codes, std::int64_t elems, int bits, std::byte* packed) {
  auto* out = reinterpret_cast<std::uint8_t*>(packed);
  if (bits == 8) {
    std::copy_n(codes, elems, out);
    return;
  }
  const std::int64_t groups = elems / kPackedGroupElems;
  HWY_DYNAMIC_DISPATCH(PackGroups)(codes, groups, bits, out);
  out += packed_bytes(groups * kPackedGroupElems, bits);
  unsigned held = 0;
  int held_bits = 0;
  for (std::int64_t i = groups * kPackedGroupElems; i < elems; ++i) {
    held |= static_cast<unsigned>(codes[i]) << held_bits;
    held_bits += bits;
    if (held_bits < 8) continue;
    *out++ = static_cast<std::uint8_t>(held);
    held >>= 8;
    held_bits -= 8;
  }
  if (held_bits > 0) *out = static_cast<std::uint8_t>(held);
}

UnpackedCodes unpack_codes(const std::byte* packed, std::int64_t elems, int bits, std::uint8_t* codes) {
  const auto* in = reinterpret_cast<const std::uint8_t*>(packed);
  if (bits == 8) {
    std::copy_n(in, elems, codes);
    return {largest_of_codes(codes, elems), true};
  }
  const std::int64_t groups = elems / kPackedGroupElems;
  std::uint8_t largest = HWY_DYNAMIC_DISPATCH(UnpackGroups)(in, groups, bits, codes);
  in += packed_bytes(groups * kPackedGroupElems, bits);
  unsigned held = 0;
  int held_bits = 0;
  for (std::int64_t i = groups * kPackedGroupElems; i < elems; ++i) {
    if (held_bits < bits) {
      held |= static_cast<unsigned>(*in++) << held_bits;
      held_bits += 8;
    }
    codes[i] = static_cast<std::uint8_t>(held & ((1u << bits) - 1));
    largest = std::max(largest, codes[i]);
    held >>= bits;
    held_bits -= bits;
  }
  return {largest, held == 0};
}

std::uint8_t largest_of_codes(const std::uint8_t* codes, std::int64_t elems) {
  return HWY_DYNAMIC_DISPATCH(LargestOfCodes)(codes, elems);
}

}  // namespace cortado
#endif

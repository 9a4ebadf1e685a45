// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/float_rans/float_rans_kernels.h"

#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/float_rans/float_rans_kernels.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using U32 = hn::CappedTag<std::uint32_t, 16>;
using U16 = hn::CappedTag<std::uint16_t, 32>;
using HalvesOf32 = hn::Rebind<std::uint16_t, U32>;
using BytesOf32 = hn::Rebind<std::uint8_t, U32>;
using BytesOf16 = hn::Rebind<std::uint8_t, U16>;
constexpr std::int64_t kLanes32 = hn::MaxLanes(U32());
constexpr std::int64_t kLanes16 = hn::MaxLanes(U16());

template <typename T>
HWY_INLINE T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
HWY_INLINE void store(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
}

template <class D>
HWY_INLINE const hn::TFromD<D>* lanes_at(D, const std::byte* from) {
  return reinterpret_cast<const hn::TFromD<D>*>(from);
}

template <class D>
HWY_INLINE hn::TFromD<D>* lanes_at(D, std::byte* to) {
  return reinterpret_cast<hn::TFromD<D>*>(to);
}

void Split32(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest) {
  const U32 d;
  std::byte* third = rest + 2 * elems;
  std::int64_t i = 0;
  for (; i + kLanes32 <= elems; i += kLanes32) {
    const auto value = hn::LoadU(d, lanes_at(d, values + 4 * i));
    const auto rotated = hn::Or(hn::ShiftLeft<1>(value), hn::ShiftRight<31>(value));
    hn::StoreU(hn::TruncateTo(BytesOf32(), hn::ShiftRight<24>(rotated)), BytesOf32(), codes + i);
    hn::StoreU(hn::TruncateTo(HalvesOf32(), rotated), HalvesOf32(), lanes_at(HalvesOf32(), rest + 2 * i));
    hn::StoreU(hn::TruncateTo(BytesOf32(), hn::ShiftRight<16>(rotated)), BytesOf32(), lanes_at(BytesOf32(), third + i));
  }
  for (; i < elems; ++i) {
    const std::uint32_t rotated = std::rotl(load<std::uint32_t>(values + 4 * i), 1);
    codes[i] = static_cast<std::uint8_t>(rotated >> 24);
    store(static_cast<std::uint16_t>(rotated), rest + 2 * i);
    store(static_cast<std::uint8_t>(rotated >> 16), third + i);
  }
}

void Merge32(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values) {
  const U32 d;
  const std::byte* third = rest + 2 * elems;
  std::int64_t i = 0;
  for (; i + kLanes32 <= elems; i += kLanes32) {
    const auto upper = hn::PromoteTo(d, hn::LoadU(BytesOf32(), codes + i));
    const auto middle = hn::PromoteTo(d, hn::LoadU(BytesOf32(), lanes_at(BytesOf32(), third + i)));
    const auto lower = hn::PromoteTo(d, hn::LoadU(HalvesOf32(), lanes_at(HalvesOf32(), rest + 2 * i)));
    const auto rotated = hn::Or(hn::Or(hn::ShiftLeft<24>(upper), hn::ShiftLeft<16>(middle)), lower);
    hn::StoreU(hn::Or(hn::ShiftRight<1>(rotated), hn::ShiftLeft<31>(rotated)), d, lanes_at(d, values + 4 * i));
  }
  for (; i < elems; ++i) {
    const std::uint32_t rotated = static_cast<std::uint32_t>(codes[i]) << 24 |
                                  static_cast<std::uint32_t>(load<std::uint8_t>(third + i)) << 16 |
                                  load<std::uint16_t>(rest + 2 * i);
    store(std::rotr(rotated, 1), values + 4 * i);
  }
}

void Split16(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest) {
  const U16 d;
  std::int64_t i = 0;
  for (; i + kLanes16 <= elems; i += kLanes16) {
    const auto value = hn::LoadU(d, lanes_at(d, values + 2 * i));
    const auto rotated = hn::Or(hn::ShiftLeft<1>(value), hn::ShiftRight<15>(value));
    hn::StoreU(hn::TruncateTo(BytesOf16(), hn::ShiftRight<8>(rotated)), BytesOf16(), codes + i);
    hn::StoreU(hn::TruncateTo(BytesOf16(), rotated), BytesOf16(), lanes_at(BytesOf16(), rest + i));
  }
  for (; i < elems; ++i) {
    const std::uint16_t rotated = std::rotl(load<std::uint16_t>(values + 2 * i), 1);
    codes[i] = static_cast<std::uint8_t>(rotated >> 8);
    store(static_cast<std::uint8_t>(rotated), rest + i);
  }
}

void Merge16(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values) {
  const U16 d;
  std::int64_t i = 0;
  for (; i + kLanes16 <= elems; i += kLanes16) {
    const auto upper = hn::PromoteTo(d, hn::LoadU(BytesOf16(), codes + i));
    const auto lower = hn::PromoteTo(d, hn::LoadU(BytesOf16(), lanes_at(BytesOf16(), rest + i)));
    const auto rotated = hn::Or(hn::ShiftLeft<8>(upper), lower);
    hn::StoreU(hn::Or(hn::ShiftRight<1>(rotated), hn::ShiftLeft<15>(rotated)), d, lanes_at(d, values + 2 * i));
  }
  for (; i < elems; ++i) {
    const auto rotated = static_cast<std::uint16_t>(codes[i] << 8 | load<std::uint8_t>(rest + i));
    store(std::rotr(rotated, 1), values + 2 * i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(Split32);
HWY_EXPORT(Merge32);
HWY_EXPORT(Split16);
HWY_EXPORT(Merge16);

void split_floats_32(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest) {
  HWY_DYNAMIC_DISPATCH(Split32)(values, elems, codes, rest);
}
void merge_floats_32(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values) {
  HWY_DYNAMIC_DISPATCH(Merge32)(codes, rest, elems, values);
}
void split_floats_16(const std::byte* values, std::int64_t elems, std::uint8_t* codes, std::byte* rest) {
  HWY_DYNAMIC_DISPATCH(Split16)(values, elems, codes, rest);
}
void merge_floats_16(const std::uint8_t* codes, const std::byte* rest, std::int64_t elems, std::byte* values) {
  HWY_DYNAMIC_DISPATCH(Merge16)(codes, rest, elems, values);
}

}  // namespace cortado
#endif

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/combine.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/float16.h"

namespace cortado {
namespace {

// One format: how its elements become float32 and back. float32 holds every sum of up to 65793 uint8 exactly.
struct Float32 {
  using Element = float;
  static float load(float x) { return x; }
  static float store(float sum) { return sum; }
};
struct Float16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t x) { return fp16_to_float(x); }
  static std::uint16_t store(float sum) { return float_to_fp16(sum); }
};
struct BFloat16 {
  using Element = std::uint16_t;
  static float load(std::uint16_t x) { return bf16_to_float(x); }
  static std::uint16_t store(float sum) { return float_to_bf16(sum); }
};
struct Uint8 {
  using Element = std::uint8_t;
  static float load(std::uint8_t x) { return x; }
  static std::uint8_t store(float sum) { return static_cast<std::uint8_t>(static_cast<std::uint32_t>(sum)); }
};

// Sums a tile that stays in the first-level cache, then gives it to every rank.
template <typename Format>
void sum(std::span<const Contribution> of_rank) {
  using Element = typename Format::Element;
  constexpr std::int64_t kTileElems = 2048;
  float sums[kTileElems];
  Element result[kTileElems];
  for (std::int64_t begin = 0; begin < of_rank[0].elems; begin += kTileElems) {
    const std::int64_t elems = std::min(kTileElems, of_rank[0].elems - begin);
    const Element* first = static_cast<const Element*>(of_rank[0].sent) + begin;
    for (std::int64_t i = 0; i < elems; ++i) sums[i] = Format::load(first[i]);
    for (const Contribution& rank : of_rank.subspan(1)) {
      const Element* values = static_cast<const Element*>(rank.sent) + begin;
      for (std::int64_t i = 0; i < elems; ++i) sums[i] += Format::load(values[i]);
    }
    for (std::int64_t i = 0; i < elems; ++i) result[i] = Format::store(sums[i]);
    for (const Contribution& rank : of_rank) {
      std::memcpy(static_cast<Element*>(rank.received) + begin, result,
                  static_cast<std::size_t>(elems) * sizeof(Element));
    }
  }
}

void all_reduce(std::span<const Contribution> of_rank) {
  if (of_rank.size() == 1) return;  // keeps every bit, those of a signalling NaN too
  switch (of_rank[0].dtype) {
    case DType::kFloat32:
      return sum<Float32>(of_rank);
    case DType::kFloat16:
      return sum<Float16>(of_rank);
    case DType::kBFloat16:
      return sum<BFloat16>(of_rank);
    case DType::kUint8:
      return sum<Uint8>(of_rank);
  }
}

void all_gather(std::span<const Contribution> of_rank) {
  const auto bytes = static_cast<std::size_t>(of_rank[0].elems);
  if (bytes == 0) return;
  for (const Contribution& to : of_rank) {
    for (std::size_t from = 0; from < of_rank.size(); ++from) {
      // memmove: a rank's own bytes may be there already.
      std::memmove(static_cast<std::byte*>(to.received) + from * bytes, of_rank[from].sent, bytes);
    }
  }
}

}  // namespace

bool agree(const Contribution& a, const Contribution& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.elems == b.elems;
}

std::string describe(const Contribution& contribution) {
  std::string text = contribution.kind == Contribution::Kind::kAllReduce ? "all_reduce " : "all_gather ";
  return text.append(dtype_name(contribution.dtype)) + " " + std::to_string(contribution.elems);
}

void combine(std::span<const Contribution> of_rank) {
  of_rank[0].kind == Contribution::Kind::kAllReduce ? all_reduce(of_rank) : all_gather(of_rank);
}

}  // namespace cortado

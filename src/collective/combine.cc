// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/combine.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "collective/collective_call.h"
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

const std::byte* at(const void* data, std::int64_t elem, DType dtype) {
  return static_cast<const std::byte*>(data) + static_cast<std::size_t>(elem) * dtype_bytes(dtype);
}

std::byte* at(void* data, std::int64_t elem, DType dtype) {
  return static_cast<std::byte*>(data) + static_cast<std::size_t>(elem) * dtype_bytes(dtype);
}

// memmove: what is in place already stays there.
void copy(void* to, const void* from, std::int64_t elems, DType dtype) {
  if (elems > 0 && to != from) std::memmove(to, from, static_cast<std::size_t>(elems) * dtype_bytes(dtype));
}

// Where and how much of `sent` is summed, and who gets the sum: ranks [first_receiver, end_receiver).
struct Share {
  std::int64_t begin = 0;
  std::int64_t elems = 0;
  int first_receiver = 0;
  int end_receiver = 0;
};

// Sums a tile that stays in the first-level cache, then gives it to every receiver.
template <typename Format>
void sum_as(std::span<const CollectiveCall> of_rank, const Share& share) {
  using Element = typename Format::Element;
  constexpr std::int64_t kTileElems = 2048;
  float sums[kTileElems];
  Element result[kTileElems];
  for (std::int64_t done = 0; done < share.elems; done += kTileElems) {
    const std::int64_t elems = std::min(kTileElems, share.elems - done);
    const Element* first = static_cast<const Element*>(of_rank[0].sent) + share.begin + done;
    for (std::int64_t i = 0; i < elems; ++i) sums[i] = Format::load(first[i]);
    for (const CollectiveCall& rank : of_rank.subspan(1)) {
      const Element* values = static_cast<const Element*>(rank.sent) + share.begin + done;
      for (std::int64_t i = 0; i < elems; ++i) sums[i] += Format::load(values[i]);
    }
    for (std::int64_t i = 0; i < elems; ++i) result[i] = Format::store(sums[i]);
    for (int rank = share.first_receiver; rank < share.end_receiver; ++rank) {
      copy(static_cast<Element*>(of_rank[static_cast<std::size_t>(rank)].received) + done, result, elems,
           of_rank[0].dtype);
    }
  }
}

void sum(std::span<const CollectiveCall> of_rank, const Share& share) {
  if (of_rank.size() == 1) {  // keeps every bit, those of a signalling NaN too
    return copy(of_rank[0].received, of_rank[0].sent, share.elems, of_rank[0].dtype);
  }
  switch (of_rank[0].dtype) {
    case DType::kFloat32:
      return sum_as<Float32>(of_rank, share);
    case DType::kFloat16:
      return sum_as<Float16>(of_rank, share);
    case DType::kBFloat16:
      return sum_as<BFloat16>(of_rank, share);
    case DType::kUint8:
      return sum_as<Uint8>(of_rank, share);
  }
}

void reduce_scatter(std::span<const CollectiveCall> of_rank) {
  std::int64_t begin = 0;
  for (int rank = 0; rank < static_cast<int>(of_rank.size()); ++rank) {
    const std::int64_t elems = block_elems(of_rank[0], rank);
    sum(of_rank, {begin, elems, rank, rank + 1});
    begin += elems;
  }
}

// The blocks of all ranks one after the other into the memory of one.
void gather(std::span<const CollectiveCall> of_rank, const CollectiveCall& receiver) {
  std::int64_t begin = 0;
  for (int rank = 0; rank < static_cast<int>(of_rank.size()); ++rank) {
    const std::int64_t elems = block_elems(receiver, rank);
    copy(at(receiver.received, begin, receiver.dtype), of_rank[static_cast<std::size_t>(rank)].sent, elems,
         receiver.dtype);
    begin += elems;
  }
}

void all_to_all(std::span<const CollectiveCall> of_rank) {
  const int world_size = static_cast<int>(of_rank.size());
  for (int to = 0; to < world_size; ++to) {
    const CollectiveCall& receiver = of_rank[static_cast<std::size_t>(to)];
    std::int64_t received = 0;
    for (int from = 0; from < world_size; ++from) {
      const CollectiveCall& sender = of_rank[static_cast<std::size_t>(from)];
      std::int64_t sent = 0;
      for (int before = 0; before < to; ++before) sent += block_elems(sender, before);
      const std::int64_t elems = received_block_elems(receiver, from);
      copy(at(receiver.received, received, receiver.dtype), at(sender.sent, sent, sender.dtype), elems, sender.dtype);
      received += elems;
    }
  }
}

void broadcast(std::span<const CollectiveCall> of_rank) {
  const CollectiveCall& root = of_rank[static_cast<std::size_t>(of_rank[0].root)];
  for (const CollectiveCall& receiver : of_rank) {
    if (&receiver != &root) copy(receiver.received, root.sent, root.elems, root.dtype);
  }
}

}  // namespace

bool agree(const CollectiveCall& a, int rank_a, const CollectiveCall& b, int rank_b, int world_size) {
  if (a.kind != b.kind || a.dtype != b.dtype) return false;
  if (is_rooted(a.kind) && a.root != b.root) return false;
  if (a.kind == CollectiveKind::kAllToAll) {
    return block_elems(a, rank_b) == received_block_elems(b, rank_a) &&
           block_elems(b, rank_a) == received_block_elems(a, rank_b);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (block_elems(a, rank) != block_elems(b, rank)) return false;
  }
  return true;
}

void combine(std::span<const CollectiveCall> of_rank) {
  const CollectiveCall& first = of_rank[0];
  switch (first.kind) {
    case CollectiveKind::kAllReduce:
      return sum(of_rank, {0, first.elems, 0, static_cast<int>(of_rank.size())});
    case CollectiveKind::kReduceScatter:
      return reduce_scatter(of_rank);
    case CollectiveKind::kAllGather:
      for (const CollectiveCall& receiver : of_rank) gather(of_rank, receiver);
      return;
    case CollectiveKind::kAllToAll:
      return all_to_all(of_rank);
    case CollectiveKind::kBroadcast:
      return broadcast(of_rank);
    case CollectiveKind::kReduce:
      return sum(of_rank, {0, first.elems, first.root, first.root + 1});
    case CollectiveKind::kGather:
      return gather(of_rank, of_rank[static_cast<std::size_t>(first.root)]);
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests of any communicator: every kind of collective, with equal and varying blocks, every root, in place and not,
// compared with what a plain loop expects. All ranks call it together.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "collective/collective_call.h"
#include "core/check.h"
#include "core/float16.h"
#include "cortado/communicator.h"

namespace cortado {

constexpr CollectiveKind kEveryKind[] = {
    CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllGather, CollectiveKind::kAllToAll,
    CollectiveKind::kBroadcast, CollectiveKind::kReduce,        CollectiveKind::kGather,
};

using Bytes = std::vector<std::byte>;

inline Bytes encode_as(DType dtype, const std::vector<int>& values) {
  Bytes bytes(values.size() * dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values[i]);
    const std::uint16_t half = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
    const auto byte = static_cast<std::uint8_t>(values[i]);
    const void* source = &value;
    if (dtype_bytes(dtype) == 2) source = &half;
    if (dtype_bytes(dtype) == 1) source = &byte;
    std::memcpy(bytes.data() + i * dtype_bytes(dtype), source, dtype_bytes(dtype));
  }
  return bytes;
}

// One call with buffers of its own, and what `received` must hold when it has ended. Sums of up to 64 of its numbers
// are exact in every dtype.
class CheckedCollective {
 public:
  // counts[from][to] elements go from one rank to another (all_to_all); of the other kinds only row 0 is looked at.
  // Empty: `elems` each.
  CheckedCollective(CollectiveKind kind, DType dtype, int root, std::int64_t elems,
                    std::vector<std::vector<std::int64_t>> counts, bool in_place, int rank, int world_size)
      : rank_(rank), world_size_(world_size), counts_(std::move(counts)) {
    call_ = {.kind = kind, .dtype = dtype, .root = root, .elems = elems};
    if (!counts_.empty()) {
      call_.elems = 0;
      const bool pairwise = kind == CollectiveKind::kAllToAll;
      call_.counts = counts_[pairwise ? static_cast<std::size_t>(rank) : 0];
      for (int from = 0; pairwise && from < world_size; ++from) received_counts_.push_back(between(from, rank));
      call_.received_counts = received_counts_;
    }
    sent_ = encode_as(dtype, sent_by(rank));
    expected_ = encode_as(dtype, expected_values());
    received_.assign(expected_.size(), std::byte(0xAA));
    before_ = sent_;
    if (in_place) {
      place(kind);
    } else {
      call_.sent = reads_sent(call_, rank) ? sent_.data() : nullptr;
      call_.received = writes_received(call_, rank) ? received_.data() : nullptr;
    }
  }

  CheckedCollective(CheckedCollective&&) = default;  // a copy's call would point into the original

  const CollectiveCall& call() const { return call_; }

  // Whether the result is right and what was sent is as it was.
  Status check() const {
    const bool writes = writes_received(call_, rank_);
    const bool right = !writes || received_ == expected_;
    const bool in_place = call_.sent != nullptr && call_.sent != sent_.data();
    const bool kept = sent_ == before_ && (writes || !in_place || sent_.empty() ||
                                           std::memcmp(call_.sent, before_.data(), before_.size()) == 0);
    if (right && kept) return Status();
    return make_error(StatusCode::kInternal, "rank %d of %d: %s: %s", rank_, world_size_, describe(call_).c_str(),
                      right ? "what was sent has changed" : "wrong result");
  }

 private:
  // Of the k-th element that `from` brings.
  static int value(int from, std::int64_t k) { return static_cast<int>((7 * from + 3 * k) % 4); }

  std::int64_t between(int from, int to) const {
    if (counts_.empty()) return call_.elems;
    return counts_[call_.kind == CollectiveKind::kAllToAll ? static_cast<std::size_t>(from) : 0]
                  [static_cast<std::size_t>(to)];
  }

  std::int64_t before_block(int from, int to) const {
    std::int64_t elems = 0;
    for (int peer = 0; peer < to; ++peer) elems += between(from, peer);
    return elems;
  }

  std::vector<int> sent_by(int from) const {
    std::int64_t elems = call_.elems;
    const bool block_for_each = call_.kind == CollectiveKind::kReduceScatter || call_.kind == CollectiveKind::kAllToAll;
    if (block_for_each) elems = before_block(from, world_size_);
    if (call_.kind == CollectiveKind::kAllGather || call_.kind == CollectiveKind::kGather) elems = between(0, from);
    std::vector<int> values;
    for (std::int64_t k = 0; k < elems; ++k) values.push_back(value(from, k));
    return values;
  }

  std::vector<int> expected_values() const {
    std::vector<int> values;
    switch (call_.kind) {
      case CollectiveKind::kBroadcast:
        return sent_by(call_.root);
      case CollectiveKind::kAllReduce:
      case CollectiveKind::kReduce:
      case CollectiveKind::kReduceScatter: {
        values.assign(sent_by(0).size(), 0);
        for (int from = 0; from < world_size_; ++from) {
          for (std::size_t k = 0; k < values.size(); ++k) values[k] += value(from, static_cast<std::int64_t>(k));
        }
        if (call_.kind != CollectiveKind::kReduceScatter) return values;
        const auto begin = values.begin() + before_block(0, rank_);
        return {begin, begin + between(0, rank_)};
      }
      case CollectiveKind::kAllGather:
      case CollectiveKind::kGather:
        for (int from = 0; from < world_size_; ++from) {
          const std::vector<int> block = sent_by(from);
          values.insert(values.end(), block.begin(), block.end());
        }
        return values;
      case CollectiveKind::kAllToAll:
        for (int from = 0; from < world_size_; ++from) {
          for (std::int64_t k = 0; k < between(from, rank_); ++k)
            values.push_back(value(from, before_block(from, rank_) + k));
        }
        return values;
    }
    return values;
  }

  // Puts what is sent into `received_`, where the result goes.
  void place(CollectiveKind kind) {
    std::size_t offset = 0;
    if (kind == CollectiveKind::kAllGather || kind == CollectiveKind::kGather) {
      for (int peer = 0; peer < rank_; ++peer) {
        offset += static_cast<std::size_t>(between(0, peer)) * dtype_bytes(call_.dtype);
      }
    }
    if (!sent_.empty()) std::memcpy(received_.data() + offset, sent_.data(), sent_.size());
    call_.sent = received_.data() + offset;
    call_.received = received_.data();
  }

  int rank_, world_size_;
  std::vector<std::vector<std::int64_t>> counts_;
  std::vector<std::int64_t> received_counts_;
  CollectiveCall call_;
  Bytes sent_, before_, received_, expected_;
};

// A few of each kind: `visit` gets them in the same order on every rank.
inline Status for_each_collective(Communicator& communicator, const std::function<Status(CheckedCollective&)>& visit) {
  const int world_size = communicator.world_size();
  for (const CollectiveKind kind : kEveryKind) {
    const bool rooted =
        kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce || kind == CollectiveKind::kGather;
    const bool one_block =
        kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce;
    const bool has_place = one_block || kind == CollectiveKind::kAllGather || kind == CollectiveKind::kGather;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUint8}) {
      for (int root = 0; root < (rooted ? world_size : 1); ++root) {
        for (const bool in_place : {false, true}) {
          if (in_place && !has_place) continue;
          for (const std::int64_t elems : {0, 1, 5, 3001}) {
            CheckedCollective equal(kind, dtype, root, elems, {}, in_place, communicator.rank(), world_size);
            CORTADO_RETURN_IF_ERROR(visit(equal));
          }
          if (one_block) continue;
          for (const std::int64_t most : {3, 2500}) {  // every third block is empty
            std::vector<std::vector<std::int64_t>> counts(static_cast<std::size_t>(world_size));
            for (int from = 0; from < world_size; ++from) {
              for (int to = 0; to < world_size; ++to) {
                counts[static_cast<std::size_t>(from)].push_back(
                    (from + to) % 3 == 1 ? 0 : (5 * from + 3 * to + 1) % most + 1);
              }
            }
            CheckedCollective varying(kind, dtype, root, 0, counts, in_place, communicator.rank(), world_size);
            CORTADO_RETURN_IF_ERROR(visit(varying));
          }
        }
      }
    }
  }
  return Status();
}

inline Status check_every_collective(Communicator& communicator, std::chrono::nanoseconds timeout) {
  return for_each_collective(communicator, [&](CheckedCollective& collective) {
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator.start(collective.call()));
    CORTADO_RETURN_IF_ERROR(communicator.wait(work, timeout));
    return collective.check();
  });
}

}  // namespace cortado

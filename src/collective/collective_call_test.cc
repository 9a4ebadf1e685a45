// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/collective_call.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

namespace cortado {
namespace {

using Kind = CollectiveKind;

std::string message(const CollectiveCall& call, int rank = 0, int world_size = 2) {
  const Status status = check_call(call, rank, world_size);
  EXPECT_TRUE(status.ok() || status.code() == StatusCode::kInvalidArgument);
  return status.message();
}

TEST(CollectiveCall, WrongCallsAreNamed) {
  char memory[64];
  const std::array<std::int64_t, 2> counts{1, 2}, negative{1, -2};
  const std::array<std::int64_t, 3> three{1, 2, 3};
  const std::array<std::int64_t, 2> huge{std::numeric_limits<std::int64_t>::max() / 8 + 1, 1};
  const auto call = [&memory](Kind kind) {
    return CollectiveCall{.kind = kind, .sent = memory, .received = memory, .elems = 1};
  };
  CollectiveCall wrong = call(Kind::kAllReduce);
  EXPECT_EQ(message(wrong), "");
  wrong.kind = static_cast<Kind>(99);
  EXPECT_EQ(message(wrong), "unknown kind of collective 99");
  wrong = call(Kind::kReduce);
  wrong.dtype = static_cast<DType>(9);
  EXPECT_EQ(message(wrong), "reduce: unknown dtype 9");
  wrong = call(Kind::kReduce);
  wrong.elems = -1;
  EXPECT_EQ(message(wrong), "reduce: -1 elements");
  wrong.elems = huge[0];
  EXPECT_EQ(message(wrong), "reduce: 1152921504606846976 elements");
  wrong = call(Kind::kGather);
  for (const int root : {-1, 2}) {
    wrong.root = root;
    EXPECT_EQ(message(wrong), "gather: root " + std::to_string(root) + " of 2 ranks");
  }
  wrong = call(Kind::kBroadcast);
  wrong.counts = counts;
  EXPECT_EQ(message(wrong), "broadcast takes one size, not counts");
  wrong = call(Kind::kAllGather);
  wrong.counts = three;
  EXPECT_EQ(message(wrong), "all_gather: 3 counts, expected one for each of 2 ranks");
  wrong.counts = negative;
  EXPECT_EQ(message(wrong), "all_gather: -2 elements in counts of rank 1");
  wrong.counts = huge;
  EXPECT_EQ(message(wrong), "all_gather: 1152921504606846976 elements in counts of rank 0");
  wrong.counts = wrong.received_counts = counts;
  EXPECT_EQ(message(wrong), "all_gather: received_counts given, expected none");
  wrong = call(Kind::kAllToAll);
  wrong.counts = counts;
  EXPECT_EQ(message(wrong), "all_to_all: received_counts missing");
  wrong.received_counts = negative;
  EXPECT_EQ(message(wrong), "all_to_all: -2 elements in received_counts of rank 1");
}

TEST(CollectiveCall, BuffersMayBeNullWhereTheyAreNotUsed) {
  char memory[64];
  for (const Kind kind : {Kind::kBroadcast, Kind::kReduce, Kind::kGather}) {
    const bool root_sends = kind == Kind::kBroadcast;
    const CollectiveCall from_memory{.kind = kind, .root = 1, .sent = memory, .elems = 2};
    const CollectiveCall to_memory{.kind = kind, .root = 1, .received = memory, .elems = 2};
    EXPECT_EQ(message(from_memory, root_sends ? 1 : 0), "") << collective_kind_name(kind);
    EXPECT_EQ(message(to_memory, root_sends ? 1 : 0),
              std::string(collective_kind_name(kind)) + " uint8 2 of root 1: `sent` is null");
  }
  EXPECT_EQ(message({.kind = Kind::kGather, .root = 1, .sent = memory, .elems = 2}, 1),
            "gather uint8 2 of root 1: `received` is null");
  EXPECT_EQ(message({.kind = Kind::kAllToAll, .sent = memory, .elems = 2}), "all_to_all uint8 2: `received` is null");
  EXPECT_EQ(message({.kind = Kind::kAllToAll}), "") << "nothing to send";
  const std::array<std::int64_t, 2> only_the_other{0, 5};
  EXPECT_EQ(message({.kind = Kind::kAllGather, .received = memory, .counts = only_the_other}, 0), "");
  EXPECT_EQ(message({.kind = Kind::kAllGather, .received = memory, .counts = only_the_other}, 1),
            "all_gather uint8 0+5: `sent` is null");
}

TEST(CollectiveCall, Sizes) {
  const std::array<std::int64_t, 3> counts{4, 0, 5}, received{1, 2, 3};
  const auto sizes = [&](Kind kind) {
    const CollectiveCall equal{.kind = kind, .elems = 7};
    const CollectiveCall varying{
        .kind = kind,
        .counts = counts,
        .received_counts = kind == Kind::kAllToAll ? received : std::span<const std::int64_t>()};
    return std::array{sent_elems(equal, 2, 3), received_elems(equal, 2, 3), sent_elems(varying, 2, 3),
                      received_elems(varying, 2, 3)};
  };
  EXPECT_EQ(sizes(Kind::kReduceScatter), (std::array<std::int64_t, 4>{21, 7, 9, 5}));
  EXPECT_EQ(sizes(Kind::kAllGather), (std::array<std::int64_t, 4>{7, 21, 5, 9}));
  EXPECT_EQ(sizes(Kind::kGather), (std::array<std::int64_t, 4>{7, 21, 5, 9}));
  EXPECT_EQ(sizes(Kind::kAllToAll), (std::array<std::int64_t, 4>{21, 21, 9, 6}));
  EXPECT_EQ(received_elems({.kind = Kind::kBroadcast, .elems = 7}, 0, 3), 7);
  EXPECT_EQ(sent_elems({.kind = Kind::kAllReduce, .elems = 7}, 0, 3), 7);
}

TEST(CollectiveCall, Describes) {
  const std::array<std::int64_t, 2> counts{1, 2}, received{3, 4};
  EXPECT_EQ(describe({.kind = Kind::kAllReduce, .dtype = DType::kBFloat16, .elems = 1024}), "all_reduce bf16 1024");
  EXPECT_EQ(describe({.kind = Kind::kBroadcast, .root = 2, .elems = 64}), "broadcast uint8 64 of root 2");
  EXPECT_EQ(describe({.kind = Kind::kReduceScatter, .counts = counts}), "reduce_scatter uint8 1+2");
  EXPECT_EQ(describe({.kind = Kind::kAllToAll, .counts = counts, .received_counts = received}),
            "all_to_all uint8 1+2 for 3+4");
}

}  // namespace
}  // namespace cortado

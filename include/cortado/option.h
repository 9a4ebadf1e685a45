// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Option: one way to treat one tensor, as data. A list of operations that a tensor goes through on every rank: the
// planner generates them, the schemes interpreter executes them. Plain values: any thread may read them.
//
// In between operations a rank holds of the tensor either values (plain) or a set of payloads (encoded):
//   encode       values -> one payload of them
//   decode       payloads -> the sum of their values. Payloads are summed nowhere else, unless they are linear
//   collectives  in pairs or alone, over a range of levels; on values or, between encode and decode, on payloads:
//
//     moves all, result everywhere   one part a rank, and back           root only, and back
//     ---------------------------    --------------------------------    ------------------------
//     plain: all_reduce              reduce_scatter ... all_gather       reduce ... broadcast
//     encoded: all_gather            all_to_all ... all_gather           gather ... broadcast
//     encoded, linear codec: as plain
//
// Source: Espresso (EuroSys 2023), section 4.2; "stays compressed" as docs/schemes.md defines it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/status.h"
#include "cortado/topology.h"

namespace cortado {

enum class OpKind : std::uint8_t {
  kEncode,
  kDecode,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kReduce,
  kBroadcast,
  kGather,
};

enum class OpDevice : std::uint8_t { kCpu, kGpu };

// "encode", "all_reduce" ...; "cpu", "gpu".
std::string_view op_kind_name(OpKind kind);
std::string_view op_device_name(OpDevice device);

constexpr bool is_collective(OpKind kind) { return kind != OpKind::kEncode && kind != OpKind::kDecode; }
constexpr bool is_sum(OpKind kind) {  // a collective that adds up what ranks have
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}

struct Operation {
  OpKind kind = OpKind::kAllReduce;
  OpDevice device = OpDevice::kCpu;  // encode and decode: where they run
  LevelRange levels = {};            // collectives: among whom
  bool encoded = false;              // collectives: whether payloads travel

  bool operator==(const Operation&) const = default;
};

struct Option {
  std::vector<Operation> operations;

  bool operator==(const Option&) const = default;

  // How often the tensor is encoded: each time something may be lost.
  int encodes() const;

  // "encode@gpu all_to_all@flat decode@gpu encode@cpu all_gather@flat decode@cpu". Level names must not have blanks.
  std::string to_string(const Topology& topology) const;

  // The inverse; `encoded` follows from the order. Says which operation is wrong and what could stand there. Checked as
  // for a linear codec: what the codec forbids is found by check().
  static Result<Option> parse(std::string_view text, const Topology& topology);

  // Whether the operations turn the values of every rank into their sum on every rank: encodes and decodes alternate,
  // levels exist and each is covered once, second steps answer first ones in reverse order. `linear`: of the codec.
  Status check(int levels, bool linear) const;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Plan: which tensors travel together and how, for one job on one cluster; and the file it is kept in, `cortado.plan/1`
// (docs/plan_format.md). Plain values: any thread may read them. A planner makes plans, an engine executes them,
// neither knows the other.
//
//   {"format": "cortado.plan/1", "job": "gpt2", "cluster": "two racks",
//    "levels": [{"name": "intra", "ranks": 2}, {"name": "inter", "ranks": 3}],
//    "buckets": [
//     {"tensors": ["h.1.weight", "h.1.bias"], "elems": [2359296, 3072], "codec": "topk(density=0.01)",
//      "option": [{"op": "encode", "device": "cpu"}, {"op": "all_gather", "levels": ["intra", "inter"]},
//                 {"op": "decode", "device": "cpu"}]}],
//    "predicted_step_ns": 81000000, "dense_step_ns": 190000000, "lower_bound_ns": 76000000,
//    "options_considered": 4341, "planner_ns": 2100000, "notes": []}
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/option.h"
#include "cortado/status.h"
#include "cortado/topology.h"
#include "cortado/unknown_fields.h"

namespace cortado {

// Tensors that travel in one message.
struct PlanBucket {
  std::vector<std::string> tensors;  // names of parameters, at least one; in the order of the message
  // How many elements each of them has, so that a model of the same names and another size is refused; empty: not said.
  std::vector<std::int64_t> elems = {};
  Option option;
  std::string codec = "none";  // what encode means; of no effect if the option does not encode
  bool error_feedback = true;  // false: what is lost stays lost. Of codecs that lose nothing or vote, of no effect
  UnknownFields unknown = {};

  bool operator==(const PlanBucket&) const = default;
};

struct Plan {
  std::string job, cluster;         // names of the profiles it was made from
  Topology topology;                // "levels" of the file
  std::vector<PlanBucket> buckets;  // in the order in which they are expected to become ready

  // What the planner expected; -1: not said.
  std::int64_t predicted_step_ns = -1;
  std::int64_t dense_step_ns = -1;   // the best without compression
  std::int64_t lower_bound_ns = -1;  // no plan can be faster
  std::int64_t options_considered = -1;
  std::int64_t planner_ns = -1;
  std::vector<std::string> notes;
  UnknownFields unknown;

  bool operator==(const Plan&) const = default;
};

// That it can be executed by as many ranks as the topology has: the topology, each option, each codec, sizes for all
// tensors of a bucket or none, and that no tensor occurs twice. Errors name the place and what was expected:
// "$.buckets[3]: option: operation 1 (all_gather): it does not sum; expected ...".
Status check_plan(const Plan& plan);

// Equal for plans that do the same: covers levels, tensors and their sizes, options and codecs, not what was expected
// or noted.
std::uint64_t plan_hash(const Plan& plan);

// The JSON text, one line a bucket, and back. Fields that are wrong, missing or of the wrong type are refused with
// their path and the expected form; a plan that was read has passed check_plan(). kUnsupported: of a later version.
std::string plan_to_json(const Plan& plan);
Result<Plan> plan_from_json(std::string_view json);

Status save_plan(const Plan& plan, const std::string& path);
Result<Plan> load_plan(const std::string& path);

}  // namespace cortado

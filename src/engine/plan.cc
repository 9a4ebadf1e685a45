// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/plan.h"

#include <algorithm>
#include <memory>
#include <set>

#include "collective/scheme_program.h"
#include "core/check.h"
#include "core/fault_json.h"
#include "core/hash.h"
#include "cortado/codec.h"
#include "engine/plan_message.h"
#include "engine/trained_codec.h"

namespace cortado {

namespace {

Result<std::unique_ptr<Codec>> make_float_codec(const std::string& spec) {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec(spec));
  if (takes_dtype(*codec, DType::kFloat32)) return codec;
  return make_error(StatusCode::kUnsupported, "%s does not take fp32; expected a codec of floats", spec.c_str());
}

Status check_bucket(const PlanBucket& bucket, const std::string& place, const Topology& topology,
                    std::set<std::string>* seen) {
  const auto refuse = [&](const std::string& where, const std::string& expected, const std::string& found) {
    return status_of({where, expected, found}, StatusCode::kInvalidArgument);
  };
  if (bucket.tensors.empty()) return refuse(place + ".tensors", "at least one name", "none");
  for (std::size_t t = 0; t < bucket.tensors.size(); ++t) {
    if (seen->insert(bucket.tensors[t]).second) continue;
    return refuse(place_of(place + ".tensors", t), "each tensor once", "\"" + bucket.tensors[t] + "\" again");
  }
  if (!bucket.elems.empty() && bucket.elems.size() != bucket.tensors.size()) {
    return refuse(place + ".elems", "one for each of the " + std::to_string(bucket.tensors.size()) + " tensors",
                  std::to_string(bucket.elems.size()));
  }
  const Result<std::unique_ptr<Codec>> codec = make_float_codec(bucket.codec);
  if (!codec.ok()) return codec.status().with_context(place + ".codec");
  const int levels = static_cast<int>(topology.levels.size());
  const bool is_linear = codec.value()->sum_form(1, 1, DType::kFloat32).has_value() || sums_factors(bucket, levels);
  CORTADO_RETURN_IF_ERROR(bucket.option.check(levels, is_linear).with_context(place));
  if (!codec.value()->row().traits.low_rank || sums_factors(bucket, levels)) return {};
  // Whether several ranks encode the same is the same whatever the tensors are, and for two ranks and any more.
  Topology small = topology;
  for (TopologyLevel& level : small.levels) level.ranks = std::min(level.ranks, 2);
  return compile_scheme(small, 0, bucket.option, codec.value().get(), {{"tensor", 2, 2}}, true)
      .status()
      .with_context(place);
}

}  // namespace

Status check_plan(const Plan& plan) {
  CORTADO_RETURN_IF_ERROR(plan.topology.check().with_context("$.levels"));
  std::set<std::string> seen;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    CORTADO_RETURN_IF_ERROR(check_bucket(plan.buckets[b], place_of("$.buckets", b), plan.topology, &seen));
  }
  return {};
}

std::uint64_t plan_hash(const Plan& plan) {
  std::string text;
  for (const TopologyLevel& level : plan.topology.levels) {
    text += level.name + '\x1f' + std::to_string(level.ranks) + '\n';
  }
  for (const PlanBucket& bucket : plan.buckets) {
    for (const std::string& tensor : bucket.tensors) text += tensor + '\x1f';
    for (const std::int64_t elems : bucket.elems) text += std::to_string(elems) + '\x1e';
    const Result<std::unique_ptr<Codec>> codec = make_codec(bucket.codec);
    text += '\n' + (codec.ok() ? codec.value()->spec() : bucket.codec);
    text += bucket.error_feedback ? "\n" : " without error feedback\n";
    text += bucket.option.to_string(plan.topology) + '\n';
  }
  return fnv1a_64(text);
}

}  // namespace cortado

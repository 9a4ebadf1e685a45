// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado.plan/1` (docs/plan_format.md).
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/fields_json.h"
#include "core/json_text.h"
#include "cortado/files.h"
#include "cortado/plan.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPlanFormat = "cortado.plan/1";

// ---- reading -------------------------------------------------------------------------------------------------------

LevelRange read_levels(JsonFields& operation, const Topology& topology) {
  const std::vector<std::string> names = operation.texts("levels", true);
  const auto index_of = [&](const std::string& name) {
    for (std::size_t l = 0; l < topology.levels.size(); ++l) {
      if (topology.levels[l].name == name) return static_cast<int>(l);
    }
    return -1;
  };
  std::string known;
  for (const TopologyLevel& level : topology.levels) known += (known.empty() ? "" : ", ") + level.name;
  LevelRange range = {0, -1};
  for (std::size_t i = 0; i < names.size(); ++i) {
    const int level = index_of(names[i]);
    if (i == 0) range = {level, level - 1};
    if (level < 0 || level != range.last + 1) {
      operation.fail_at(place_of(operation.place("levels"), i),
                        "names of $.levels, neighbours from the inside out: " + known, shortened_json(Json(names[i])));
      return range;
    }
    range.last = level;
  }
  if (names.empty()) operation.fail("levels", "at least one of " + known, "[]");
  return range;
}

Operation read_operation(JsonFields& fields, const Topology& topology, bool* encoded) {
  Operation op = {.kind = fields.word("op", OpKind::kGather, op_kind_name)};
  if (is_collective(op.kind)) {
    op.levels = read_levels(fields, topology);
    op.encoded = *encoded;
  } else {
    op.device = fields.word("device", OpDevice::kGpu, op_device_name);
    *encoded = op.kind == OpKind::kEncode;
  }
  return op;
}

PlanBucket read_bucket(JsonFields& fields, const Topology& topology) {
  PlanBucket bucket;
  bucket.tensors = fields.texts("tensors", true);
  if (fields.has("elems")) bucket.elems = fields.integers("elems", "a number of elements");
  for (std::size_t t = 0; t < bucket.elems.size(); ++t) {
    if (bucket.elems[t] >= 0) continue;
    fields.fail_at(place_of(fields.place("elems"), t), "a number of elements, at least 0",
                   std::to_string(bucket.elems[t]));
  }
  bucket.codec = fields.text_or("codec", bucket.codec);
  bucket.error_feedback = fields.boolean_or("error_feedback", bucket.error_feedback);
  bool encoded = false;
  fields.each("option", "operations", true, [&](JsonFields operation) {
    const std::string pointer = "/option/" + std::to_string(bucket.option.operations.size());
    bucket.option.operations.push_back(read_operation(operation, topology, &encoded));
    fields.keep_unknown(pointer, operation);
  });
  bucket.unknown = fields.unknown();
  return bucket;
}

struct NumberField {
  const char* key;
  std::int64_t Plan::*value;
};
constexpr NumberField kNumbers[] = {{"predicted_step_ns", &Plan::predicted_step_ns},
                                    {"dense_step_ns", &Plan::dense_step_ns},
                                    {"lower_bound_ns", &Plan::lower_bound_ns},
                                    {"options_considered", &Plan::options_considered},
                                    {"planner_ns", &Plan::planner_ns}};

Status read_plan(JsonFields& fields, Plan* plan) {
  plan->job = fields.text_or("job", "");
  plan->cluster = fields.text_or("cluster", "");
  fields.each("levels", "levels", true, [&](JsonFields level) {
    const std::string pointer = "/levels/" + std::to_string(plan->topology.levels.size());
    TopologyLevel& read = plan->topology.levels.emplace_back();
    read.name = level.text("name");
    read.ranks = static_cast<int>(level.integer_within("ranks", 1, INT32_MAX));
    fields.keep_unknown(pointer, level);
  });
  if (!fields.ok()) return {};
  CORTADO_RETURN_IF_ERROR(plan->topology.check().with_context("$.levels"));
  fields.each("buckets", "buckets", true,
              [&](JsonFields bucket) { plan->buckets.push_back(read_bucket(bucket, plan->topology)); });
  for (const NumberField& field : kNumbers) {
    std::int64_t& value = plan->*field.value;
    value = fields.integer_within(field.key, -1, INT64_MAX, value);
  }
  plan->notes = fields.texts("notes", false);
  plan->unknown = fields.unknown();
  return fields.ok() ? check_plan(*plan) : Status();
}

// ---- writing -------------------------------------------------------------------------------------------------------

Json operation_json(const Operation& op, const Topology& topology) {
  if (!is_collective(op.kind)) return {{"op", op_kind_name(op.kind)}, {"device", op_device_name(op.device)}};
  Json levels = Json::array();
  for (int l = op.levels.first; l <= op.levels.last; ++l) {
    levels.push_back(topology.levels[static_cast<std::size_t>(l)].name);
  }
  return {{"op", op_kind_name(op.kind)}, {"levels", std::move(levels)}};
}

Json bucket_json(const PlanBucket& bucket, const Topology& topology) {
  Json object = {{"tensors", bucket.tensors}};
  if (!bucket.elems.empty()) object["elems"] = bucket.elems;
  object["codec"] = bucket.codec;
  if (!bucket.error_feedback) object["error_feedback"] = false;
  object["option"] = Json::array();
  for (const Operation& op : bucket.option.operations) object["option"].push_back(operation_json(op, topology));
  put_unknown(bucket.unknown, &object);
  return object;
}

}  // namespace

std::string plan_to_json(const Plan& plan) {
  Json document = {{"format", kPlanFormat}, {"job", plan.job}, {"cluster", plan.cluster}};
  document["levels"] = Json::array();
  for (const TopologyLevel& level : plan.topology.levels) {
    document["levels"].push_back({{"name", level.name}, {"ranks", level.ranks}});
  }
  document["buckets"] = Json::array();
  for (const PlanBucket& bucket : plan.buckets) document["buckets"].push_back(bucket_json(bucket, plan.topology));
  for (const NumberField& field : kNumbers) {
    if (plan.*field.value >= 0) document[field.key] = plan.*field.value;
  }
  document["notes"] = plan.notes;
  put_unknown(plan.unknown, &document);
  return json_by_lines(document);
}

Result<Plan> plan_from_json(std::string_view json) {
  Plan plan;
  CORTADO_RETURN_IF_ERROR(read_json(json, kPlanFormat, StatusCode::kInvalidArgument,
                                    [&](JsonFields& top) { return read_plan(top, &plan); }));
  return plan;
}

Status save_plan(const Plan& plan, const std::string& path) {
  return write_file(path, plan_to_json(plan)).with_context(path);
}

Result<Plan> load_plan(const std::string& path) { return load_json(path, plan_from_json); }

}  // namespace cortado

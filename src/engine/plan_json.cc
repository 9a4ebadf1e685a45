// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado.plan/1` (docs/plan_format.md).
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/json_text.h"
#include "cortado/files.h"
#include "cortado/plan.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFormat = "cortado.plan/1";
constexpr std::string_view kFamily = "cortado.plan/";

Status wrong(const std::string& path, const std::string& found, const std::string& expected) {
  return make_error(StatusCode::kInvalidArgument, "%s: %s; expected %s", path.c_str(), found.c_str(), expected.c_str());
}

// ---- reading -------------------------------------------------------------------------------------------------------

std::string integer_from(std::int64_t smallest, std::int64_t largest) {
  return "an integer from " + std::to_string(smallest) + " to " + std::to_string(largest);
}

Status read_integer(const Json& value, const std::string& path, std::int64_t smallest, std::int64_t largest,
                    std::int64_t* target) {
  const bool fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) &&
                    value.get<std::int64_t>() >= smallest && value.get<std::int64_t>() <= largest;
  if (!fits) return wrong(path, shortened_json(value), integer_from(smallest, largest));
  *target = value.get<std::int64_t>();
  return {};
}

// One object of the file: hands out its fields and, at the end, those that nobody asked for.
class ObjectReader {
 public:
  // `path` names it in errors; unknown fields go to `unknown` under `pointer`.
  ObjectReader(const Json& object, std::string path, std::string pointer, UnknownFields* unknown)
      : object_(object), path_(std::move(path)), pointer_(std::move(pointer)), unknown_(unknown) {}

  Status begin() const { return object_.is_object() ? Status() : wrong(path_, shortened_json(object_), "an object"); }

  // nullptr if it is not there.
  const Json* find(const std::string& key) {
    known_.push_back(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  Result<const Json*> list(const std::string& key, const std::string& of) {
    const Json* value = find(key);
    if (value == nullptr) return wrong(path_of(key), "not there", "a list of " + of);
    if (!value->is_array()) return wrong(path_of(key), shortened_json(*value), "a list of " + of);
    return value;
  }
  // Those that may be left out keep what `target` was.
  Status read(const std::string& key, bool required, std::string* target) {
    const Json* value = find(key);
    if (value == nullptr && !required) return {};
    if (value == nullptr) return wrong(path_of(key), "not there", "a text");
    if (!value->is_string()) return wrong(path_of(key), shortened_json(*value), "a text");
    *target = value->get<std::string>();
    return {};
  }
  Status read(const std::string& key, bool required, std::int64_t smallest, std::int64_t largest,
              std::int64_t* target) {
    const Json* value = find(key);
    if (value == nullptr && !required) return {};
    if (value == nullptr) return wrong(path_of(key), "not there", integer_from(smallest, largest));
    return read_integer(*value, path_of(key), smallest, largest, target);
  }
  Status read(const std::string& key, bool* target) {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_boolean()) return wrong(path_of(key), shortened_json(*value), "true or false");
    *target = value->get<bool>();
    return {};
  }
  Status read_texts(const std::string& key, bool required, std::vector<std::string>* target) {
    if (!required && !object_.contains(key)) return {};
    CORTADO_ASSIGN_OR_RETURN(const Json* values, list(key, "texts"));
    for (std::size_t i = 0; i < values->size(); ++i) {
      const Json& value = (*values)[i];
      if (!value.is_string())
        return wrong(path_of(key) + "[" + std::to_string(i) + "]", shortened_json(value), "a text");
      target->push_back(value.get<std::string>());
    }
    return {};
  }
  // One for each of `of`, or none.
  Status read_integers(const std::string& key, std::size_t count, const std::string& of,
                       std::vector<std::int64_t>* target) {
    if (!object_.contains(key)) return {};
    const std::string expected = "one for each of the " + std::to_string(count) + " " + of;
    CORTADO_ASSIGN_OR_RETURN(const Json* values, list(key, "integers, " + expected));
    if (values->size() != count) return wrong(path_of(key), std::to_string(values->size()) + " of them", expected);
    for (std::size_t i = 0; i < count; ++i) {
      CORTADO_RETURN_IF_ERROR(read_integer((*values)[i], path_of(key) + "[" + std::to_string(i) + "]", 0, INT64_MAX,
                                           &target->emplace_back()));
    }
    return {};
  }
  void keep_unknown() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      (*unknown_)[pointer_ + "/" + pointer_part(key)] = json_line(value);
    }
  }
  std::string path_of(const std::string& key) const { return path_ + "." + key; }

 private:
  const Json& object_;
  std::string path_, pointer_;
  UnknownFields* unknown_;
  std::vector<std::string> known_;
};

std::string at(const std::string& path, std::size_t index) { return path + "[" + std::to_string(index) + "]"; }

Result<LevelRange> read_levels(const std::vector<std::string>& names, const std::string& path,
                               const Topology& topology) {
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
      return wrong(at(path, i), "\"" + names[i] + "\"", "names of $.levels, neighbours from the inside out: " + known);
    }
    range.last = level;
  }
  if (names.empty()) return wrong(path, "[]", "at least one of " + known);
  return range;
}

Status read_operation(ObjectReader& reader, const std::string& path, const Topology& topology, bool* encoded,
                      Operation* op) {
  std::string name, device;
  CORTADO_RETURN_IF_ERROR(reader.read("op", true, &name));
  std::string known;
  bool found = false;
  for (int k = 0; k <= static_cast<int>(OpKind::kGather); ++k) {
    const auto kind = static_cast<OpKind>(k);
    known += (known.empty() ? "" : ", ") + std::string(op_kind_name(kind));
    if (op_kind_name(kind) == name) op->kind = kind, found = true;
  }
  if (!found) return wrong(path + ".op", "\"" + name + "\"", "one of " + known);
  if (is_collective(op->kind)) {
    std::vector<std::string> names;
    CORTADO_RETURN_IF_ERROR(reader.read_texts("levels", true, &names));
    CORTADO_ASSIGN_OR_RETURN(op->levels, read_levels(names, path + ".levels", topology));
    op->encoded = *encoded;
    return {};
  }
  CORTADO_RETURN_IF_ERROR(reader.read("device", true, &device));
  if (device != "cpu" && device != "gpu") return wrong(path + ".device", "\"" + device + "\"", "cpu or gpu");
  op->device = device == "cpu" ? OpDevice::kCpu : OpDevice::kGpu;
  *encoded = op->kind == OpKind::kEncode;
  return {};
}

Result<PlanBucket> read_bucket(const Json& object, const std::string& path, const Topology& topology) {
  PlanBucket bucket;
  ObjectReader reader(object, path, "", &bucket.unknown);
  CORTADO_RETURN_IF_ERROR(reader.begin());
  CORTADO_RETURN_IF_ERROR(reader.read_texts("tensors", true, &bucket.tensors));
  CORTADO_RETURN_IF_ERROR(reader.read_integers("elems", bucket.tensors.size(), "tensors", &bucket.elems));
  CORTADO_RETURN_IF_ERROR(reader.read("codec", false, &bucket.codec));
  CORTADO_RETURN_IF_ERROR(reader.read("error_feedback", &bucket.error_feedback));
  CORTADO_ASSIGN_OR_RETURN(const Json* operations, reader.list("option", "operations"));
  bool encoded = false;
  for (std::size_t i = 0; i < operations->size(); ++i) {
    const std::string place = at(path + ".option", i);
    ObjectReader each((*operations)[i], place, "/option/" + std::to_string(i), &bucket.unknown);
    CORTADO_RETURN_IF_ERROR(each.begin());
    CORTADO_RETURN_IF_ERROR(read_operation(each, place, topology, &encoded, &bucket.option.operations.emplace_back()));
    each.keep_unknown();
  }
  reader.keep_unknown();
  return bucket;
}

Status read_topology(const Json& levels, Plan* plan) {
  for (std::size_t l = 0; l < levels.size(); ++l) {
    ObjectReader reader(levels[l], at("$.levels", l), "/levels/" + std::to_string(l), &plan->unknown);
    CORTADO_RETURN_IF_ERROR(reader.begin());
    TopologyLevel& level = plan->topology.levels.emplace_back();
    std::int64_t ranks = 0;
    CORTADO_RETURN_IF_ERROR(reader.read("name", true, &level.name));
    CORTADO_RETURN_IF_ERROR(reader.read("ranks", true, 1, INT32_MAX, &ranks));
    level.ranks = static_cast<int>(ranks);
    reader.keep_unknown();
  }
  return {};
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

Status check_format(ObjectReader& reader) {
  std::string format;
  CORTADO_RETURN_IF_ERROR(reader.read("format", true, &format));
  if (format == kFormat) return {};
  const StatusCode code =
      std::string_view(format).starts_with(kFamily) ? StatusCode::kUnsupported : StatusCode::kInvalidArgument;
  return make_error(code, "$.format: \"%s\"; expected \"%s\"", format.c_str(), std::string(kFormat).c_str());
}

Status read_plan(const Json& document, Plan* plan) {
  ObjectReader reader(document, "$", "", &plan->unknown);
  CORTADO_RETURN_IF_ERROR(reader.begin());
  CORTADO_RETURN_IF_ERROR(check_format(reader));
  CORTADO_RETURN_IF_ERROR(reader.read("job", false, &plan->job));
  CORTADO_RETURN_IF_ERROR(reader.read("cluster", false, &plan->cluster));
  CORTADO_ASSIGN_OR_RETURN(const Json* levels, reader.list("levels", "levels"));
  CORTADO_RETURN_IF_ERROR(read_topology(*levels, plan));
  CORTADO_RETURN_IF_ERROR(plan->topology.check().with_context("$.levels"));
  CORTADO_ASSIGN_OR_RETURN(const Json* buckets, reader.list("buckets", "buckets"));
  for (std::size_t b = 0; b < buckets->size(); ++b) {
    CORTADO_ASSIGN_OR_RETURN(PlanBucket bucket, read_bucket((*buckets)[b], at("$.buckets", b), plan->topology));
    plan->buckets.push_back(std::move(bucket));
  }
  for (const NumberField& field : kNumbers) {
    CORTADO_RETURN_IF_ERROR(reader.read(field.key, false, -1, INT64_MAX, &(plan->*field.value)));
  }
  CORTADO_RETURN_IF_ERROR(reader.read_texts("notes", false, &plan->notes));
  reader.keep_unknown();
  return check_plan(*plan);
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

// Lists of the top have one line an element.
std::string plan_text(const Json& document) {
  std::string text = "{";
  for (const auto& [key, value] : document.items()) {
    text += text.size() > 1 ? ",\n " : "\n ";
    text += json_line(Json(key)) + ": ";
    if (!value.is_array() || value.empty()) {
      text += json_line(value);
      continue;
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      text += (i == 0 ? "[\n  " : ",\n  ") + json_line(value[i]);
    }
    text += "\n ]";
  }
  return text + "\n}\n";
}

}  // namespace

std::string plan_to_json(const Plan& plan) {
  Json document = {{"format", kFormat}, {"job", plan.job}, {"cluster", plan.cluster}};
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
  return plan_text(document);
}

Result<Plan> plan_from_json(std::string_view json) {
  if (const auto fault = find_json_fault(json)) return wrong(fault->place, fault->found, fault->expected);
  Plan plan;
  CORTADO_RETURN_IF_ERROR(read_plan(Json::parse(json), &plan));
  return plan;
}

Status save_plan(const Plan& plan, const std::string& path) {
  return write_file(path, plan_to_json(plan)).with_context(path);
}

Result<Plan> load_plan(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text.ok()) return text.status().with_context(path);
  Result<Plan> plan = plan_from_json(text.value());
  if (!plan.ok()) return plan.status().with_context(path);
  return plan;
}

}  // namespace cortado

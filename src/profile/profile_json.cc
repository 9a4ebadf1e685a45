// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado.job/1` and `cortado.cluster/1`: JSON to plain values and back.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/json_text.h"
#include "cortado/cluster.h"
#include "cortado/files.h"
#include "cortado/job.h"
#include "profile/places.h"

namespace cortado {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kJobFormat = "cortado.job/1";
constexpr const char* kClusterFormat = "cortado.cluster/1";

// ---- text to JSON ---------------------------------------------------------------------------------------------------

Result<Json> parse_json(std::string_view text) {
  if (const auto fault = find_json_fault(text)) return refuse(fault->place, fault->expected, fault->found);
  return Json::parse(text);
}

// ---- JSON to fields -------------------------------------------------------------------------------------------------

// One object of the file. The first thing that is wrong is kept; after it, readers return defaults.
class Fields {
 public:
  Fields(const Json& object, std::string path, Status* status)
      : object_(object), path_(std::move(path)), status_(status) {
    if (!object.is_object()) fail("", "an object", shortened_json(object));
  }

  std::string text(const char* key) { return text_or(key, nullptr); }
  std::string text_or(const char* key, const char* missing) {
    const Json* value = find(key, "a text", missing == nullptr);
    if (value == nullptr) return missing != nullptr ? missing : "";
    if (value->is_string()) return value->get<std::string>();
    return fail(key, "a text", shortened_json(*value)), "";
  }
  std::int64_t integer(const char* key, const char* expected) {
    const Json* value = find(key, expected, true);
    return value == nullptr ? 0 : as_integer(*value, place(key), expected);
  }
  // How many `things` there are. That it is below 1, say, whoever checks the result finds.
  int number_of(const char* key, const char* things, std::optional<int> missing = {}) {
    const std::string expected = std::string("a number of ") + things;
    const Json* value = find(key, expected.c_str(), !missing.has_value());
    if (value == nullptr) return missing.value_or(0);
    const std::int64_t number = as_integer(*value, place(key), expected.c_str());
    if (std::in_range<int>(number)) return static_cast<int>(number);
    return fail(key, expected + ", below 2^31", std::to_string(number)), 0;
  }
  std::optional<std::int64_t> time_or_null(const char* key) {
    const Json* value = find(key, "nanoseconds or null", false);
    if (value == nullptr || value->is_null()) return std::nullopt;
    return as_integer(*value, place(key), "nanoseconds or null");
  }
  double number_or(const char* key, double missing) {
    const Json* value = find(key, "a number", false);
    return value == nullptr ? missing : as_number(*value, place(key));
  }
  std::optional<double> number_or_null(const char* key) {
    const Json* value = find(key, "a number or null", false);
    if (value == nullptr || value->is_null()) return std::nullopt;
    return as_number(*value, place(key));
  }
  bool boolean_or(const char* key, bool missing) {
    const Json* value = find(key, "true or false", false);
    if (value == nullptr) return missing;
    if (!value->is_boolean()) return fail(key, "true or false", shortened_json(*value)), missing;
    return value->get<bool>();
  }
  std::vector<std::int64_t> integers(const char* key, const char* expected) {
    std::vector<std::int64_t> result;
    const Json* value = find(key, "a list", true);
    if (value == nullptr) return result;
    if (!value->is_array()) return fail(key, "a list", shortened_json(*value)), result;
    for (const Json& item : *value) result.push_back(as_integer(item, place_of(place(key), result.size()), expected));
    return result;
  }
  // Calls `read` with each object of a list.
  template <typename Read>
  void each(const char* key, bool required, Read read) {
    const Json* value = find(key, "a list", required);
    if (value == nullptr) return;
    if (!value->is_array()) return fail(key, "a list", shortened_json(*value));
    for (std::size_t i = 0; i < value->size() && status_->ok(); ++i) {
      read(Fields((*value)[i], place_of(place(key), i), status_));
    }
  }
  // Calls `read` with an object, if it is there; its unknown fields become this object's.
  template <typename Read>
  void inner(const char* key, Read read) {
    const Json* value = find(key, "an object", false);
    if (value == nullptr) return;
    Fields fields(*value, place(key), status_);
    read(fields);
    for (const auto& [pointer, json] : fields.unknown()) nested_["/" + std::string(key) + pointer] = json;
  }
  // Calls `read` with key, value and place of each entry of an object.
  template <typename Read>
  void each_entry(const char* key, bool required, Read read) {
    const Json* value = find(key, "an object", required);
    if (value == nullptr) return;
    if (!value->is_object()) return fail(key, "an object", shortened_json(*value));
    for (const auto& [name, entry] : value->items()) {
      if (status_->ok()) read(name, entry, field_of(place(key), name));
    }
  }

  void fail(const std::string& key, const std::string& expected, const std::string& found) {
    if (status_->ok()) *status_ = refuse(key.empty() ? path_ : place(key), expected, found);
  }
  Status* status() { return status_; }
  double as_number(const Json& value, const std::string& where) {
    if (value.is_number()) return value.get<double>();
    if (status_->ok()) *status_ = refuse(where, "a number", shortened_json(value));
    return 0;
  }

  // The unknown fields of an object within this one, which is at the JSON pointer `where`.
  void keep_unknown(const std::string& where, const Fields& inner) {
    for (const auto& [pointer, json] : inner.unknown()) nested_[where + pointer] = json;
  }

  // What nobody has asked for.
  UnknownFields unknown() const {
    UnknownFields fields = nested_;
    if (!object_.is_object()) return fields;
    for (const auto& [name, value] : object_.items()) {
      if (known_.count(name) == 0) fields["/" + pointer_part(name)] = json_line(value);
    }
    return fields;
  }

 private:
  std::string place(const std::string& key) const { return field_of(path_, key); }

  const Json* find(const char* key, const char* expected, bool required) {
    known_.insert(key);
    if (!status_->ok()) return nullptr;
    const auto found = object_.find(key);
    if (found != object_.end()) return &*found;
    if (required) fail(key, expected, "nothing");
    return nullptr;
  }
  std::int64_t as_integer(const Json& value, const std::string& where, const char* expected) {
    if (value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX)) {
      return value.get<std::int64_t>();
    }
    if (status_->ok()) *status_ = refuse(where, std::string(expected) + ", an integer", shortened_json(value));
    return 0;
  }

  const Json& object_;
  std::string path_;
  Status* status_;
  std::set<std::string> known_;
  UnknownFields nested_;
};

// The document's top object, if it is of this format.
Status check_format(Fields& fields, const std::string& expected) {
  const std::string found = fields.text("format");
  if (!fields.status()->ok() || found == expected) return *fields.status();
  const std::string family = expected.substr(0, expected.find('/') + 1);
  const bool other_version = found.compare(0, family.size(), family) == 0;
  return {other_version ? StatusCode::kUnsupported : StatusCode::kCorruptData,
          "$.format: expected \"" + expected + "\", got \"" + found + "\""};
}

// ---- the two formats ------------------------------------------------------------------------------------------------

struct DTypeWord {
  const char* word;
  DType dtype;
};
constexpr DTypeWord kDTypeWords[] = {
    {"float32", DType::kFloat32}, {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16}};

OpDevice read_device(Fields& fields, const char* key, const char* missing) {
  const std::string word = fields.text_or(key, missing);
  if (word != "cpu" && word != "gpu") fields.fail(key, "\"cpu\" or \"gpu\"", "\"" + word + "\"");
  return word == "cpu" ? OpDevice::kCpu : OpDevice::kGpu;
}

JobTensor read_tensor(Fields fields) {
  JobTensor tensor;
  tensor.name = fields.text("name");
  tensor.shape = fields.integers("shape", "a dimension");
  const std::string dtype = fields.text("dtype");
  bool is_known = false;
  for (const DTypeWord& row : kDTypeWords) {
    if (dtype == row.word) tensor.dtype = row.dtype, is_known = true;
  }
  if (!is_known) fields.fail("dtype", "\"float32\", \"float16\" or \"bfloat16\"", "\"" + dtype + "\"");
  tensor.ready_ns = fields.integer("ready_ns", "nanoseconds");
  tensor.rms = fields.number_or_null("rms");
  if (tensor.rms.value_or(0) < 0) fields.fail("rms", "a number of at least 0", std::to_string(*tensor.rms));
  fields.each_entry("errors", false, [&](const std::string& codec, const Json& value, const std::string& place) {
    tensor.errors.push_back({codec, fields.as_number(value, place)});
  });
  tensor.unknown = fields.unknown();
  return tensor;
}

TimeCurve read_curve(Fields& fields, const char* sizes) {
  return {fields.integers(sizes, "a size"), fields.integers("time_ns", "nanoseconds")};
}

CollectiveCurves read_collectives(Fields& fields) {
  CollectiveCurves curves;
  fields.each_entry("collectives", true, [&](const std::string& name, const Json& value, const std::string& place) {
    for (int k = 0; k <= static_cast<int>(OpKind::kGather); ++k) {
      const OpKind kind = static_cast<OpKind>(k);
      if (!is_collective(kind) || op_kind_name(kind) != name) continue;
      Fields curve(value, place, fields.status());
      curves[kind] = read_curve(curve, "bytes");
      fields.keep_unknown("/collectives/" + name, curve);
      return;
    }
    *fields.status() = refuse(place, "all_reduce, reduce_scatter, all_gather, all_to_all, reduce, broadcast or gather",
                              "\"" + name + "\"");
  });
  return curves;
}

CodecTimes read_codec(Fields fields) {
  CodecTimes times;
  times.codec = fields.text("codec");
  times.device = read_device(fields, "device", "");
  const std::string direction = fields.text("direction");
  if (direction != "encode" && direction != "decode") {
    fields.fail("direction", "\"encode\" or \"decode\"", "\"" + direction + "\"");
  }
  times.direction = direction == "decode" ? OpKind::kDecode : OpKind::kEncode;
  times.threads = fields.number_of("threads", "threads", 1);
  times.curve = read_curve(fields, "elems");
  times.unknown = fields.unknown();
  return times;
}

ClusterLevel read_level(Fields fields) {
  ClusterLevel level;
  level.name = fields.text("name");
  level.ranks = fields.number_of("ranks", "ranks");
  level.link = fields.text_or("link", "");
  level.collectives = read_collectives(fields);
  level.overlap_time_share = fields.number_or_null("overlap_time_share");
  level.float16_sum_factor = fields.number_or_null("float16_sum_factor");
  level.bfloat16_sum_factor = fields.number_or_null("bfloat16_sum_factor");
  level.unknown = fields.unknown();
  return level;
}

// ---- fields to text -------------------------------------------------------------------------------------------------

Json curve_json(const TimeCurve& curve, const char* sizes) {
  return {{sizes, curve.sizes}, {"time_ns", curve.times_ns}};
}

Json collectives_json(const CollectiveCurves& curves) {
  Json object = Json::object();
  for (const auto& [kind, curve] : curves) object[std::string(op_kind_name(kind))] = curve_json(curve, "bytes");
  return object;
}

Json optional_json(const std::optional<std::int64_t>& value) {
  return value.has_value() ? Json(*value) : Json(nullptr);
}

Json tensor_json(const JobTensor& tensor) {
  Json object = {{"name", tensor.name}, {"shape", tensor.shape}};
  for (const DTypeWord& row : kDTypeWords) {
    if (row.dtype == tensor.dtype) object["dtype"] = row.word;
  }
  object["ready_ns"] = tensor.ready_ns;
  if (tensor.rms.has_value()) object["rms"] = *tensor.rms;
  for (const MeasuredError& error : tensor.errors) object["errors"][error.codec] = error.relative_l2;
  put_unknown(tensor.unknown, &object);
  return object;
}

// The top object on lines of its own, the items of its lists on one line each.
std::string dump_by_lines(const Json& document) {
  std::string text = "{\n";
  bool first = true;
  for (const auto& [key, value] : document.items()) {
    text += (first ? "" : ",\n") + std::string(" ") + json_line(Json(key)) + ": ";
    first = false;
    if (!value.is_array() || value.empty()) {
      text += json_line(value);
      continue;
    }
    text += "[\n";
    for (std::size_t i = 0; i < value.size(); ++i) text += (i == 0 ? "  " : ",\n  ") + json_line(value[i]);
    text += "]";
  }
  return text + "\n}\n";
}

template <typename Value>
Result<Value> load(const std::string& path, Result<Value> (*parse)(std::string_view)) {
  const Result<std::string> text = read_file(path);
  if (!text.ok()) return text.status().with_context(path);
  Result<Value> value = parse(text.value());
  if (!value.ok()) return value.status().with_context(path);
  return value;
}

}  // namespace

Result<Job> job_from_json(std::string_view json) {
  CORTADO_ASSIGN_OR_RETURN(const Json document, parse_json(json));
  Status status;
  Fields fields(document, "$", &status);
  CORTADO_RETURN_IF_ERROR(check_format(fields, kJobFormat));
  Job job;
  job.name = fields.text("name");
  job.description = fields.text_or("description", "");
  job.device = read_device(fields, "device", "gpu");
  job.forward_ns = fields.time_or_null("forward_ns");
  job.backward_ns = fields.time_or_null("backward_ns");
  job.optimizer_ns = fields.time_or_null("optimizer_ns");
  job.overlap_forward = fields.boolean_or("overlap_forward", false);
  fields.each("tensors", true, [&](const Fields& tensor) { job.tensors.push_back(read_tensor(tensor)); });
  job.unknown = fields.unknown();
  CORTADO_RETURN_IF_ERROR(status);
  CORTADO_RETURN_IF_ERROR(job.check());
  return job;
}

std::string job_to_json(const Job& job) {
  Json document = {{"format", kJobFormat}, {"name", job.name}, {"description", job.description}};
  document["device"] = op_device_name(job.device);
  document["forward_ns"] = optional_json(job.forward_ns);
  document["backward_ns"] = optional_json(job.backward_ns);
  document["optimizer_ns"] = optional_json(job.optimizer_ns);
  document["overlap_forward"] = job.overlap_forward;
  document["tensors"] = Json::array();
  for (const JobTensor& tensor : job.tensors) document["tensors"].push_back(tensor_json(tensor));
  put_unknown(job.unknown, &document);
  return dump_by_lines(document);
}

Result<Cluster> cluster_from_json(std::string_view json) {
  CORTADO_ASSIGN_OR_RETURN(const Json document, parse_json(json));
  Status status;
  Fields fields(document, "$", &status);
  CORTADO_RETURN_IF_ERROR(check_format(fields, kClusterFormat));
  Cluster cluster;
  cluster.name = fields.text("name");
  cluster.description = fields.text_or("description", "");
  fields.each("levels", true, [&](const Fields& level) { cluster.levels.push_back(read_level(level)); });
  const Topology topology = cluster.topology();
  fields.each("ranges", false, [&](Fields range) {
    ClusterRange read;
    const Result<LevelRange> levels = topology.parse_range(range.text("levels"));
    if (!levels.ok()) return range.fail("levels", "a range of levels", levels.status().message());
    read.levels = levels.value();
    read.collectives = read_collectives(range);
    read.unknown = range.unknown();
    cluster.ranges.push_back(std::move(read));
  });
  fields.each("codecs", false, [&](const Fields& codec) { cluster.codecs.push_back(read_codec(codec)); });
  fields.inner("copies", [&](Fields& copies) {
    copies.inner("host_to_device", [&](Fields& curve) { cluster.host_to_device = read_curve(curve, "bytes"); });
    copies.inner("device_to_host", [&](Fields& curve) { cluster.device_to_host = read_curve(curve, "bytes"); });
    copies.inner("pack", [&](Fields& curve) { cluster.pack = read_curve(curve, "elems"); });
    copies.inner("unpack", [&](Fields& curve) { cluster.unpack = read_curve(curve, "elems"); });
  });
  fields.inner("contention", [&](Fields& contention) {
    cluster.gpu_codec_slows_backward = contention.number_or("gpu_codec_slows_backward", 0);
    cluster.cpu_codec_slows_backward = contention.number_or("cpu_codec_slows_backward", 0);
    cluster.transfers_slow_backward = contention.number_or_null("transfers_slow_backward");
    cluster.collective_start_ns = contention.time_or_null("collective_start_ns");
    cluster.gpu_codec = contention.text_or("gpu_codec", "");
    cluster.cpu_codec = contention.text_or("cpu_codec", "");
    cluster.cpu_codec_workers = contention.number_of("cpu_codec_workers", "workers", 1);
    cluster.cpu_codec_threads = contention.number_of("cpu_codec_threads", "threads", 1);
  });
  fields.inner("host", [&](Fields& host) {
    cluster.fingerprint = host.text_or("fingerprint", "");
    cluster.communicator = host.text_or("communicator", "");
  });
  cluster.unknown = fields.unknown();
  CORTADO_RETURN_IF_ERROR(status);
  CORTADO_RETURN_IF_ERROR(cluster.check());
  return cluster;
}

std::string cluster_to_json(const Cluster& cluster) {
  Json document = {{"format", kClusterFormat}, {"name", cluster.name}, {"description", cluster.description}};
  document["levels"] = Json::array();
  for (const ClusterLevel& level : cluster.levels) {
    Json object = {{"name", level.name}, {"ranks", level.ranks}, {"link", level.link}};
    object["collectives"] = collectives_json(level.collectives);
    if (level.overlap_time_share.has_value()) object["overlap_time_share"] = *level.overlap_time_share;
    if (level.float16_sum_factor.has_value()) object["float16_sum_factor"] = *level.float16_sum_factor;
    if (level.bfloat16_sum_factor.has_value()) object["bfloat16_sum_factor"] = *level.bfloat16_sum_factor;
    put_unknown(level.unknown, &object);
    document["levels"].push_back(std::move(object));
  }
  const Topology topology = cluster.topology();
  for (const ClusterRange& range : cluster.ranges) {
    Json object = {{"levels", topology.range_name(range.levels)}, {"collectives", collectives_json(range.collectives)}};
    put_unknown(range.unknown, &object);
    document["ranges"].push_back(std::move(object));
  }
  document["codecs"] = Json::array();
  for (const CodecTimes& times : cluster.codecs) {
    Json object = {{"codec", times.codec}, {"device", op_device_name(times.device)}};
    object["direction"] = op_kind_name(times.direction);
    if (times.device == OpDevice::kCpu) object["threads"] = times.threads;
    object.update(curve_json(times.curve, "elems"));
    put_unknown(times.unknown, &object);
    document["codecs"].push_back(std::move(object));
  }
  document["copies"] = {{"host_to_device", curve_json(cluster.host_to_device, "bytes")},
                        {"device_to_host", curve_json(cluster.device_to_host, "bytes")}};
  for (const auto& [name, curve] : {std::pair("pack", &cluster.pack), std::pair("unpack", &cluster.unpack)}) {
    if (!curve->sizes.empty()) document["copies"][name] = curve_json(*curve, "elems");
  }
  document["contention"] = {{"gpu_codec_slows_backward", cluster.gpu_codec_slows_backward},
                            {"cpu_codec_slows_backward", cluster.cpu_codec_slows_backward},
                            {"cpu_codec_workers", cluster.cpu_codec_workers},
                            {"cpu_codec_threads", cluster.cpu_codec_threads}};
  if (!cluster.gpu_codec.empty()) document["contention"]["gpu_codec"] = cluster.gpu_codec;
  if (!cluster.cpu_codec.empty()) document["contention"]["cpu_codec"] = cluster.cpu_codec;
  if (cluster.transfers_slow_backward.has_value()) {
    document["contention"]["transfers_slow_backward"] = *cluster.transfers_slow_backward;
  }
  if (cluster.collective_start_ns.has_value()) {
    document["contention"]["collective_start_ns"] = *cluster.collective_start_ns;
  }
  document["host"] = {{"fingerprint", cluster.fingerprint}, {"communicator", cluster.communicator}};
  put_unknown(cluster.unknown, &document);
  return dump_by_lines(document);
}

Status save_job(const Job& job, const std::string& path) {
  return write_file(path, job_to_json(job)).with_context(path);
}

Result<Job> load_job(const std::string& path) { return load(path, job_from_json); }

Status save_cluster(const Cluster& cluster, const std::string& path) {
  return write_file(path, cluster_to_json(cluster)).with_context(path);
}

Result<Cluster> load_cluster(const std::string& path) { return load(path, cluster_from_json); }

}  // namespace cortado

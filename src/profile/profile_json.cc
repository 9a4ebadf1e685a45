// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado.job/1` and `cortado.cluster/1`: JSON to plain values and back.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/fault_json.h"
#include "core/fields_json.h"
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

// ---- the two formats ------------------------------------------------------------------------------------------------

// Torch's names. Gradients are of the first three, and no other is read.
std::string_view dtype_word(DType dtype) {
  constexpr std::string_view kWords[] = {"float32", "float16", "bfloat16", "uint8"};
  return kWords[static_cast<int>(dtype)];
}

JobTensor read_tensor(JsonFields fields) {
  JobTensor tensor;
  tensor.name = fields.text("name");
  tensor.shape = fields.integers("shape", "a dimension");
  tensor.dtype = fields.word("dtype", DType::kBFloat16, dtype_word);
  tensor.ready_ns = fields.integer("ready_ns", "nanoseconds");
  tensor.rms = fields.number_or_null("rms");
  fields.each_entry("errors", false, [&](const std::string& codec, const Json& value, const std::string& place) {
    tensor.errors.push_back({codec, fields.as_number(value, place)});
  });
  tensor.unknown = fields.unknown();
  return tensor;
}

TimeCurve read_curve(JsonFields& fields, const char* sizes) {
  return {fields.integers(sizes, "a size"), fields.integers("time_ns", "nanoseconds")};
}

CollectiveCurves read_collectives(JsonFields& fields) {
  CollectiveCurves curves;
  fields.each_entry("collectives", true, [&](const std::string& name, const Json& value, const std::string& place) {
    for (int k = 0; k <= static_cast<int>(OpKind::kGather); ++k) {
      const OpKind kind = static_cast<OpKind>(k);
      if (!is_collective(kind) || op_kind_name(kind) != name) continue;
      JsonFields curve(value, place, fields.fault());
      curves[kind] = read_curve(curve, "bytes");
      fields.keep_unknown("/collectives/" + name, curve);
      return;
    }
    fields.fail_at(place, "all_reduce, reduce_scatter, all_gather, all_to_all, reduce, broadcast or gather",
                   shortened_json(Json(name)));
  });
  return curves;
}

CodecTimes read_codec(JsonFields fields) {
  CodecTimes times;
  times.codec = fields.text("codec");
  times.device = fields.word("device", OpDevice::kGpu, op_device_name);
  times.direction = fields.word("direction", OpKind::kDecode, op_kind_name);
  times.threads = fields.number_of("threads", "threads", 1);
  times.curve = read_curve(fields, "elems");
  times.unknown = fields.unknown();
  return times;
}

ClusterLevel read_level(JsonFields fields) {
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
  Json object = {{"name", tensor.name}, {"shape", tensor.shape}, {"dtype", dtype_word(tensor.dtype)}};
  object["ready_ns"] = tensor.ready_ns;
  if (tensor.rms.has_value()) object["rms"] = *tensor.rms;
  for (const MeasuredError& error : tensor.errors) object["errors"][error.codec] = error.relative_l2;
  put_unknown(tensor.unknown, &object);
  return object;
}

}  // namespace

namespace {

Job read_job(JsonFields& fields) {
  Job job;
  job.name = fields.text("name");
  job.description = fields.text_or("description", "");
  job.device = fields.word("device", OpDevice::kGpu, op_device_name, std::optional(OpDevice::kGpu));
  job.forward_ns = fields.time_or_null("forward_ns");
  job.backward_ns = fields.time_or_null("backward_ns");
  job.optimizer_ns = fields.time_or_null("optimizer_ns");
  job.overlap_forward = fields.boolean_or("overlap_forward", false);
  fields.each("tensors", "tensors", true,
              [&](const JsonFields& tensor) { job.tensors.push_back(read_tensor(tensor)); });
  job.unknown = fields.unknown();
  return job;
}

}  // namespace

Result<Job> job_from_json(std::string_view json) {
  Job job;
  CORTADO_RETURN_IF_ERROR(read_json(json, kJobFormat, StatusCode::kCorruptData, [&](JsonFields& top) {
    job = read_job(top);
    return top.ok() ? job.check() : Status();
  }));
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
  return json_by_lines(document);
}

namespace {

Cluster read_cluster(JsonFields& fields) {
  Cluster cluster;
  cluster.name = fields.text("name");
  cluster.description = fields.text_or("description", "");
  fields.each("levels", "levels", true, [&](const JsonFields& level) { cluster.levels.push_back(read_level(level)); });
  const Topology topology = cluster.topology();
  fields.each("ranges", "ranges of levels", false, [&](JsonFields range) {
    ClusterRange read;
    const Result<LevelRange> levels = topology.parse_range(range.text("levels"));
    if (!levels.ok()) return range.fail("levels", "a range of levels", levels.status().message());
    read.levels = levels.value();
    read.collectives = read_collectives(range);
    read.unknown = range.unknown();
    cluster.ranges.push_back(std::move(read));
  });
  fields.each("codecs", "times of codecs", false,
              [&](const JsonFields& codec) { cluster.codecs.push_back(read_codec(codec)); });
  fields.inner("copies", [&](JsonFields& copies) {
    copies.inner("host_to_device", [&](JsonFields& curve) { cluster.host_to_device = read_curve(curve, "bytes"); });
    copies.inner("device_to_host", [&](JsonFields& curve) { cluster.device_to_host = read_curve(curve, "bytes"); });
    copies.inner("pack", [&](JsonFields& curve) { cluster.pack = read_curve(curve, "elems"); });
    copies.inner("unpack", [&](JsonFields& curve) { cluster.unpack = read_curve(curve, "elems"); });
  });
  fields.inner("contention", [&](JsonFields& contention) {
    cluster.gpu_codec_slows_backward = contention.number_or("gpu_codec_slows_backward", 0);
    cluster.cpu_codec_slows_backward = contention.number_or("cpu_codec_slows_backward", 0);
    cluster.transfers_slow_backward = contention.number_or_null("transfers_slow_backward");
    cluster.collective_start_ns = contention.time_or_null("collective_start_ns");
    cluster.gpu_codec = contention.text_or("gpu_codec", "");
    cluster.cpu_codec = contention.text_or("cpu_codec", "");
    cluster.cpu_codec_workers = contention.number_of("cpu_codec_workers", "workers", 1);
    cluster.cpu_codec_threads = contention.number_of("cpu_codec_threads", "threads", 1);
  });
  fields.inner("host", [&](JsonFields& host) {
    cluster.fingerprint = host.text_or("fingerprint", "");
    cluster.communicator = host.text_or("communicator", "");
  });
  cluster.unknown = fields.unknown();
  return cluster;
}

}  // namespace

Result<Cluster> cluster_from_json(std::string_view json) {
  Cluster cluster;
  CORTADO_RETURN_IF_ERROR(read_json(json, kClusterFormat, StatusCode::kCorruptData, [&](JsonFields& top) {
    cluster = read_cluster(top);
    return top.ok() ? cluster.check() : Status();
  }));
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
  return json_by_lines(document);
}

Status save_job(const Job& job, const std::string& path) {
  return write_file(path, job_to_json(job)).with_context(path);
}

Result<Job> load_job(const std::string& path) { return load_json(path, job_from_json); }

Status save_cluster(const Cluster& cluster, const std::string& path) {
  return write_file(path, cluster_to_json(cluster)).with_context(path);
}

Result<Cluster> load_cluster(const std::string& path) { return load_json(path, cluster_from_json); }

}  // namespace cortado

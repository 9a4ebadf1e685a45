// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/option_list.h"

#include <cstdint>
#include <cstdio>

#include "cli/codec_commands.h"
#include "cli/json.h"
#include "cortado/codec.h"
#include "cortado/planner.h"

namespace cortado::cli {

namespace {

Topology topology_of(int levels) {
  if (levels == 1) return {{{"all", 2}}};
  if (levels == 2) return {{{"intra", 2}, {"inter", 2}}};
  Topology topology;
  for (int l = 0; l < levels; ++l) topology.levels.push_back({"level" + std::to_string(l), 2});
  return topology;
}

std::string operation_json(const Operation& op, const Topology& topology) {
  std::string json = "{\"op\": " + json_text(op_kind_name(op.kind));
  if (!is_collective(op.kind)) return json + ", \"device\": " + json_text(op_device_name(op.device)) + "}";
  std::vector<std::string> levels;
  for (int l = op.levels.first; l <= op.levels.last; ++l) levels.push_back(topology.levels[l].name);
  return json + ", \"levels\": " + json_list(levels) + "}";
}

void print(const Option& option, const std::string& codec, const Topology& topology, bool as_json) {
  const std::string text = option.to_string(topology);
  if (!as_json) {
    std::printf("%s%s%s\n", codec.c_str(), codec.empty() ? "" : ": ", text.c_str());
    return;
  }
  std::vector<std::string> operations;
  for (const Operation& op : option.operations) operations.push_back(operation_json(op, topology));
  const std::string of_codec = codec.empty() ? "" : ", \"codec\": " + json_text(codec);
  std::printf("{\"option\": [%s], \"encodes\": %d%s, \"text\": %s}\n", join(operations, ", ").c_str(), option.encodes(),
              of_codec.c_str(), json_text(text).c_str());
}

}  // namespace

int list_options(const OptionListOptions& options) {
  const Topology topology = topology_of(options.levels);
  OptionSpace space = {.levels = options.levels, .rooted = options.rooted};
  if (!options.device.empty()) space.devices = {options.device == "cpu" ? OpDevice::kCpu : OpDevice::kGpu};

  std::int64_t count = 0;
  const auto take = [&](const std::string& codec, bool takes_plain) -> Status {
    if (!options.only_count) {
      return visit_options(space, [&](const Option& option) {
        if (option.encodes() > 0) print(option, codec, topology, options.as_json);
        if (option.encodes() == 0 && takes_plain) print(option, "", topology, options.as_json);
      });
    }
    OptionSpace plain = space;
    plain.devices.clear();
    const Result<std::int64_t> all = count_options(space), without_encodes = count_options(plain);
    if (!all.ok()) return all.status();
    count += all.value() - (takes_plain ? 0 : without_encodes.value());
    return {};
  };
  if (options.codecs.empty()) {
    if (const Status status = take("", true); !status.ok()) return report_error("", status);
  }
  bool takes_plain = true;
  for (const std::string& spec : options.codecs) {
    const Result<std::unique_ptr<Codec>> codec = make_codec(spec);
    if (!codec.ok()) return report_error("", codec.status());
    space.sum_payloads = codec.value()->sum_form(1, 1, DType::kFloat32).has_value();
    if (const Status status = take(codec.value()->spec(), takes_plain); !status.ok()) return report_error("", status);
    takes_plain = false;
  }
  if (!options.only_count) return kDone;
  std::printf(options.as_json ? "{\"count\": %lld}\n" : "%lld\n", static_cast<long long>(count));
  return kDone;
}

}  // namespace cortado::cli

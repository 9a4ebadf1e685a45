// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/option_list.h"

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

  std::size_t count = 0;
  const auto take = [&](const Option& option, const std::string& codec) {
    ++count;
    if (!options.only_count) print(option, codec, topology, options.as_json);
  };
  if (options.codecs.empty()) {
    for (const Option& option : generate_options(space)) take(option, "");
  }
  bool plain_ones_taken = false;
  for (const std::string& spec : options.codecs) {
    const Result<std::unique_ptr<Codec>> codec = make_codec(spec);
    if (!codec.ok()) return report_error("", codec.status());
    space.sum_payloads = codec.value()->sum_form(1, 1, DType::kFloat32).has_value();
    for (const Option& option : generate_options(space)) {
      if (option.encodes() > 0) {
        take(option, codec.value()->spec());
      } else if (!plain_ones_taken) {
        take(option, "");
      }
    }
    plain_ones_taken = true;
  }
  if (!options.only_count) return kDone;
  options.as_json ? std::printf("{\"count\": %zu}\n", count) : std::printf("%zu\n", count);
  return kDone;
}

}  // namespace cortado::cli

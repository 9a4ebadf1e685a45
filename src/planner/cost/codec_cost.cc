// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/cost/codec_cost.h"

#include <algorithm>

#include "cortado/engine.h"

namespace cortado {

namespace {

// Adds the times of one entry of the file to its codec, which is made if it is the first one.
Status take(const CodecTimes& times, std::vector<CodecCost>* costs) {
  const std::string canonical = canonical_codec(times.codec);  // directions may be spelt differently
  auto cost =
      std::find_if(costs->begin(), costs->end(), [&](const CodecCost& c) { return c.codec->spec() == canonical; });
  if (cost == costs->end()) {
    Result<std::unique_ptr<Codec>> codec = make_codec(times.codec);
    if (!codec.ok()) return codec.status();
    const CodecTraits traits = codec.value()->row().traits;
    cost = costs->emplace(costs->end());
    cost->spec = times.codec;
    cost->codec = std::move(codec).value();
    cost->traits = traits;
    const std::optional<SumForm> form = cost->codec->sum_form(8, 8, DType::kFloat32);
    if (form.has_value()) cost->sum_dtype = form->dtype;
    cost->sums = traits.linear && form.has_value();
    if (traits.low_rank) cost->rank = EngineOptions::parse(cost->codec->spec()).value().rank;
  }
  const TimeCurve** curves = times.direction == OpKind::kEncode ? cost->encode : cost->decode;
  curves[CodecCost::index(times.device)] = &times.curve;
  return {};
}

}  // namespace

Result<std::vector<CodecCost>> codec_costs(const Cluster& cluster, OpDevice home,
                                           const std::vector<std::string>& allowed, std::vector<std::string>* notes) {
  std::vector<CodecCost> costs;
  for (const CodecTimes& times : cluster.codecs) {
    if (times.device == OpDevice::kCpu && times.threads != cluster.cpu_codec_threads) continue;
    const Status status = take(times, &costs);
    if (!status.ok())
      notes->push_back("codec \"" + times.codec + "\" of the cluster file left out: " + status.message());
  }
  std::vector<std::string> wanted;  // in canonical form
  for (const std::string& spec : allowed) {
    const Result<std::unique_ptr<Codec>> codec = make_codec(spec);
    if (!codec.ok()) return codec.status();
    wanted.push_back(codec.value()->spec());
    const auto matches = [&](const CodecCost& cost) { return cost.codec->spec() == wanted.back(); };
    if (std::none_of(costs.begin(), costs.end(), matches) && wanted.back() != "none") {
      notes->push_back("codec \"" + spec + "\" is no candidate: the cluster file has no times of it");
    }
  }
  std::erase_if(costs, [&](const CodecCost& cost) {
    if (!allowed.empty() && std::find(wanted.begin(), wanted.end(), cost.codec->spec()) == wanted.end()) return true;
    if (cost.runs_on(OpDevice::kCpu) || (home == OpDevice::kGpu && cost.runs_on(OpDevice::kGpu))) return false;
    notes->push_back("codec \"" + cost.spec +
                     "\" is no candidate: the cluster file has no times of it in both directions");
    return true;
  });
  for (std::size_t i = 0; i < costs.size(); ++i) costs[i].number = static_cast<int>(i);
  return costs;
}

const CodecCost* find_codec_cost(const std::vector<CodecCost>& costs, const std::string& spec) {
  auto found = std::find_if(costs.begin(), costs.end(), [&](const CodecCost& cost) { return cost.spec == spec; });
  if (found == costs.end()) {
    const std::string canonical = canonical_codec(spec);
    found = std::find_if(costs.begin(), costs.end(),
                         [&](const CodecCost& cost) { return cost.codec->spec() == canonical; });
  }
  return found == costs.end() ? nullptr : &*found;
}

}  // namespace cortado

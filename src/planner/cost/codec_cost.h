// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A codec as the planner sees it: sizes from the catalogue, times from the cluster file. Immutable once made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/codec.h"

namespace cortado {

struct CodecCost {
  std::string spec;  // as the cluster file has it
  int number = 0;    // its index in the list it comes from
  std::shared_ptr<const Codec> codec;
  CodecTraits traits;
  bool sums = false;                  // its payloads can be summed on the way, by any collective that sums
  DType sum_dtype = DType::kFloat32;  // of payloads that are summed
  int rank = 0;                       // of low rank
  const TimeCurve* encode[2] = {};    // by OpDevice; nullptr: not measured there
  const TimeCurve* decode[2] = {};

  // Measured in both directions.
  bool runs_on(OpDevice device) const { return encode[index(device)] != nullptr && decode[index(device)] != nullptr; }
  std::int64_t encode_ns(OpDevice device, std::int64_t elems) const { return encode[index(device)]->at(elems); }
  std::int64_t decode_ns(OpDevice device, std::int64_t elems) const { return decode[index(device)]->at(elems); }

  static constexpr std::size_t index(OpDevice device) { return static_cast<std::size_t>(device); }
};

// The codecs of `cluster` that have times where gradients on `home` can reach them, in the file's order; of gradients
// in host memory a codec must have those of the CPU, and may have those of the GPU, too (docs/adr/0034). Times of the
// CPU are those of cluster.cpu_codec_threads threads. `allowed`: of these only, by meaning rather than spelling
// ("randk" is "randk(density=0.01)"); empty: all. What is left out and why is added to `notes`. Codecs of `cluster`
// that this build does not know are left out; unknown ones in `allowed` are an error.
Result<std::vector<CodecCost>> codec_costs(const Cluster& cluster, OpDevice home,
                                           const std::vector<std::string>& allowed, std::vector<std::string>* notes);

// The one of that specification, however it is spelt; nullptr: there is none.
const CodecCost* find_codec_cost(const std::vector<CodecCost>& costs, const std::string& spec);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

#include "cortado/codec.h"
#include "cortado/planner.h"

namespace cortado {

std::optional<double> expected_error(const Plan& plan, const Job& job, int bucket) {
  std::map<std::string_view, const JobTensor*> by_name;
  for (const JobTensor& tensor : job.tensors) by_name[tensor.name] = &tensor;
  double lost = 0, total = 0;
  bool has_rms = false, lacks_rms = false;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    if (bucket >= 0 && static_cast<int>(b) != bucket) continue;
    const PlanBucket& planned = plan.buckets[b];
    const int passes = planned.option.encodes();
    const Result<std::unique_ptr<Codec>> codec = make_codec(planned.codec);
    const bool loses = passes > 0 && !(codec.ok() && codec.value()->row().traits.lossless);
    for (const std::string& name : planned.tensors) {
      const auto found = by_name.find(name);
      if (found == by_name.end()) return {};
      const JobTensor& tensor = *found->second;
      const double weight = tensor.rms.value_or(1) * tensor.rms.value_or(1) * static_cast<double>(tensor.elems());
      total += weight;
      if (tensor.elems() > 0) (tensor.rms.has_value() ? has_rms : lacks_rms) = true;
      if (!loses || weight == 0) continue;
      const auto measured = std::find_if(tensor.errors.begin(), tensor.errors.end(), [&](const MeasuredError& error) {
        return error.codec == planned.codec || canonical_codec(error.codec) == canonical_codec(planned.codec);
      });
      if (measured == tensor.errors.end()) return {};
      lost += weight * std::pow(measured->relative_l2 * passes, 2);
    }
  }
  if (lost > 0 && has_rms && lacks_rms) return {};  // weights of two kinds
  return total > 0 ? std::sqrt(lost / total) : 0;
}

}  // namespace cortado

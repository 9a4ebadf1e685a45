// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/watch.h"

#include <algorithm>

namespace cortado {

void Watch::restart(std::int64_t expected_ns, std::int64_t measured_ns) {
  expected_ns_ = expected_ns;
  measured_ns_ = measured_ns;
  comparisons_ = lossy_ = drifted_ = beaten_ = 0;
}

Watch::Finding Watch::note(std::int64_t step_ns, bool is_lossy, bool others_were_faster) {
  ++comparisons_;
  if (expected_ns_ == kFirstTells) expected_ns_ = measured_ns_ = step_ns;
  const auto now = static_cast<double>(step_ns), measured = static_cast<double>(measured_ns_);
  const bool has_drifted = now > (1 + drift_) * measured || measured > (1 + drift_) * now;
  const bool is_beaten = now > kSlower * static_cast<double>(expected_ns_) && others_were_faster;
  lossy_ = is_lossy ? lossy_ + 1 : 0;
  drifted_ = has_drifted ? drifted_ + 1 : 0;
  beaten_ = is_beaten ? beaten_ + 1 : 0;
  if (lossy_ >= kInARow) return Finding::kLossy;
  const auto pass_more = [](int to_pass) { return std::clamp(2 * to_pass, 4, kMostToPass); };
  if (drifted_ >= kInARow && comparisons_ > drifts_to_pass_) {
    drifts_to_pass_ = pass_more(drifts_to_pass_);
    return Finding::kDrifted;
  }
  if (beaten_ >= kInARow && comparisons_ > retries_to_pass_) {
    retries_to_pass_ = pass_more(retries_to_pass_);
    return Finding::kBeaten;
  }
  return Finding::kNothing;
}

}  // namespace cortado

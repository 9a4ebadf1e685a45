// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Watch: compares what steps take and lose, now, with what was decided on, and says when something has to change. Pure,
// so that all ranks, who share what it is told, go the same way. Nothing changes but by kInARow comparisons that agree.
#pragma once

#include <cstdint>

namespace cortado {

class Watch {
 public:
  static constexpr int kInARow = 2;
  static constexpr int kMostToPass = 64;  // comparisons, until what changed may change again
  static constexpr double kSlower = 1.1;  // a step, over what was expected, before others may be tried again

  enum class Finding {
    kNothing,
    kLossy,    // the setting loses more than is allowed
    kDrifted,  // links or computation are not what was measured
    kBeaten,   // a step takes kSlower times what was expected, and others took less on trial
  };

  // `drift`: share of the measured time by which a step may be longer, or the measured one longer than a step.
  explicit Watch(double drift) : drift_(drift) {}

  // After each decision. `expected_ns`: of a step; `measured_ns`: the same, as it was when links and codecs were
  // measured. kFirstTells for both: the first comparison tells.
  static constexpr std::int64_t kFirstTells = -1;
  void restart(std::int64_t expected_ns, std::int64_t measured_ns);

  // Of steps since the last call. kDrifted and kBeaten come late, and later from time to time: what was decided is not
  // to change with each spell of the machine.
  Finding note(std::int64_t step_ns, bool is_lossy, bool others_were_faster);

  std::int64_t expected_ns() const { return expected_ns_; }
  std::int64_t measured_ns() const { return measured_ns_; }

 private:
  double drift_;
  std::int64_t expected_ns_ = kFirstTells, measured_ns_ = kFirstTells;
  int lossy_ = 0, drifted_ = 0, beaten_ = 0;  // comparisons in a row
  int comparisons_ = 0;                       // since the decision
  // How many of these before kDrifted, and before kBeaten. They outlive decisions.
  int drifts_to_pass_ = 0, retries_to_pass_ = 0;
};

}  // namespace cortado

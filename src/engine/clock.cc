// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <chrono>

#include "cortado/trace.h"

namespace cortado {

const Clock* steady_clock() {
  class SteadyClock final : public Clock {
   public:
    std::int64_t now_ns() const override {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    }
  };
  static const SteadyClock clock;
  return &clock;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "codec/device_layout.h"
#include "codec/lowrank/lowrank_device.h"

namespace cortado {

struct LowRankShape {
  std::int64_t rows, cols, rank;  // all 0 for a tensor without elements
};

LowRankLaunches make_low_rank_launches(std::span<const LowRankShape> shapes, DeviceLayout& layout);
LowRankPasses make_low_rank_passes(std::span<const LowRankShape> shapes, DeviceLayout& layout);

}  // namespace cortado

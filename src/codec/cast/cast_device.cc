// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/cast/cast_device.h"

#include "codec/device_layout.h"
#include "cortado/spec.h"

namespace cortado {

Result<CastPlan> CastPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  return CastPlan{.narrow = values.word("dtype") == "fp16" ? DType::kFloat16 : DType::kBFloat16,
                  .tiling = layout.tile(CastTile::kTileElems)};
}

}  // namespace cortado

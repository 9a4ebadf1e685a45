// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/float_rans/float_rans_device.h"

#include "codec/rans/rans_layout.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"

namespace cortado {

Result<FloatRansPlan> FloatRansPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  const std::int64_t chunk_codes = values.integer("chunk_codes");
  CORTADO_RETURN_IF_ERROR(check_chunk_codes("float_rans", chunk_codes));
  FloatRansPlan plan;
  plan.rans = make_rans_plan(chunk_codes, layout);
  plan.tiles = layout.tile(FloatSplit::kTileElems);
  std::uint64_t codes = 0;
  for (const std::int64_t elems : layout.elems()) codes += static_cast<std::uint64_t>(elems + 15) / 16 * 16;
  plan.codes = layout.scratch<std::uint8_t>(codes);
  return plan;
}

}  // namespace cortado

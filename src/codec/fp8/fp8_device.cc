// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/fp8/fp8_device.h"

#include "codec/fp8/fp8.h"
#include "codec/quant/block_codec.h"
#include "codec/quant/block_layout.h"

namespace cortado {

Result<Fp8Plan> Fp8Plan::make(const ParameterValues& values, DeviceLayout& layout) {
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t block_elems, read_block_elems("fp8", values, 256));
  return make_block_plan<Fp8Plan>(Fp8DeviceScheme{fp8_format_named(values.word("format")), block_elems}, layout);
}

}  // namespace cortado

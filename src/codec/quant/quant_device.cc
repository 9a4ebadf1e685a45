// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_device.h"

#include "codec/quant/block_layout.h"
#include "codec/quant/quant_settings.h"
#include "core/check.h"

namespace cortado {

Result<QuantPlan> QuantPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  CORTADO_ASSIGN_OR_RETURN(const QuantSettings settings, read_quant_settings(values));
  if (settings.rule == QuantRule::StepRule::kError) {
    return make_error(StatusCode::kUnsupported,
                      "%s on a device: error is searched on the CPU only; bits and bounds are not",
                      settings.spec.c_str());
  }
  return make_block_plan<QuantPlan>(QuantDeviceScheme{settings}, layout);
}

}  // namespace cortado

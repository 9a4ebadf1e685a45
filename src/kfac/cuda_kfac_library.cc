// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What libcortado_cuda_kfac.so gives to who loads it (cortado/device_library.h).
#include "core/cuda_device.h"
#include "cortado/device_library.h"
#include "cortado/kfac_cuda.h"

extern "C" __attribute__((visibility("default"))) const cortado::DeviceLibrary* cortado_device_library() {
  static const cortado::DeviceLibrary library = {.build = cortado::this_build(),
                                                 .device_count = cortado::cuda_device_count,
                                                 .create_engine = nullptr,
                                                 .create_kfac_device = cortado::make_cuda_kfac_device,
                                                 .current_device = cortado::current_cuda_device,
                                                 .set_current_device = cortado::set_current_cuda_device};
  return &library;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What libcortado_cuda.so gives to who loads it (cortado/device_library.h).
#include <utility>

#include "core/cuda_device.h"
#include "cortado/cuda.h"
#include "cortado/device_library.h"

extern "C" __attribute__((visibility("default"))) const cortado::DeviceLibrary* cortado_device_library() {
  static const cortado::DeviceLibrary library = {
      .build = cortado::this_build(),
      .device_count = cortado::cuda_device_count,
      .create_engine =
          [](std::vector<cortado::EngineTensor> tensors, const cortado::EngineOptions& options,
             cortado::Communicator* communicator,
             int device) { return cortado::create_cuda_engine(std::move(tensors), options, communicator, device); },
      .create_auto_engine =
          [](std::vector<cortado::EngineTensor> tensors, const cortado::AutoOptions& options,
             cortado::Communicator* communicator, int device) {
            return cortado::create_cuda_auto_engine(std::move(tensors), options, communicator, device);
          },
      .create_scheme_device = cortado::create_cuda_scheme_device,
      .create_kfac_device = nullptr,  // of libcortado_cuda_kfac.so
      .current_device = cortado::current_cuda_device,
      .set_current_device = cortado::set_current_cuda_device};
  return &library;
}

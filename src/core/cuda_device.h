// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One stream of a CUDA device, as kernels are given to it (device.h). Nothing here waits for the device, and nothing
// includes a CUDA header: launch() is compiled with the kernels, in cuda_device.cuh.
#pragma once

#include <cstdint>

#include "core/device.h"

namespace cortado {

class Status;  // its header costs nvcc a second for each kernel file

class CudaDevice {
 public:
  explicit CudaDevice(DeviceStream stream) : stream_(stream) {}

  // No blocks: no launch. More than kMostBlocks: an error.
  template <class Kernel>
  void launch(std::int64_t blocks, const Kernel& kernel);

  void fill(void* to, int byte, std::uint64_t bytes);
  // `from` may change when the call returns, if it is not pinned.
  void upload(void* to, const void* from, std::uint64_t bytes);

  // The first error of a call above: kUnsupported for what the device can't do, kInternal otherwise.
  Status status() const;

 private:
  void note(int cuda_error);
  void note_too_many_blocks();

  DeviceStream stream_;
  int first_error_ = 0;  // a cudaError_t
};

// What a call of CUDA returned, a cudaError_t: kUnsupported for what the device can't do, kInternal otherwise.
Status cuda_status(int cuda_error, const char* what);

// Devices that CUDA finds; 0 where there is no driver.
int cuda_device_count();

// The one that this thread's calls mean; 0 where there is none.
int current_cuda_device();
void set_current_cuda_device(int device);

}  // namespace cortado

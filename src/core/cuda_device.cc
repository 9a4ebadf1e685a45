// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_device.h"

#include <cuda_runtime_api.h>

#include "core/check.h"

namespace cortado {

void CudaDevice::fill(void* to, int byte, std::uint64_t bytes) {
  if (bytes > 0) note(cudaMemsetAsync(to, byte, bytes, stream_));
}

void CudaDevice::upload(void* to, const void* from, std::uint64_t bytes) {
  if (bytes > 0) note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
}

void CudaDevice::note(int cuda_error) {
  if (first_error_ == 0) first_error_ = cuda_error;
}

void CudaDevice::note_too_many_blocks() { note(cudaErrorInvalidConfiguration); }

Status CudaDevice::status() const { return cuda_status(first_error_, "work on a stream"); }

Status cuda_status(int cuda_error, const char* what) {
  const auto error = static_cast<cudaError_t>(cuda_error);
  if (error == cudaSuccess) return {};
  const bool is_unsupported = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                              error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  // Not the end of a training: something else may be asked for.
  const bool is_out_of_memory = error == cudaErrorMemoryAllocation;
  if (is_out_of_memory) cudaGetLastError();  // the device can be used as before, and the next launch is not to blame
  const StatusCode code = is_unsupported     ? StatusCode::kUnsupported
                          : is_out_of_memory ? StatusCode::kIoError
                                             : StatusCode::kInternal;
  return make_error(code, "CUDA: %s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int current_cuda_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

void set_current_cuda_device(int device) { static_cast<void>(cudaSetDevice(device)); }

}  // namespace cortado

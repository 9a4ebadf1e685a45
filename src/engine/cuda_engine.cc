// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "core/cuda_queue.h"
#include "cortado/cuda.h"
#include "engine/engine_impl.h"

namespace cortado {

Result<std::unique_ptr<Engine>> create_cuda_engine(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                   Communicator* communicator, int device, const Clock* clock,
                                                   TraceRecorder* trace) {
  Result<std::unique_ptr<DeviceQueue>> queue = make_cuda_queue(device);
  // Told to the other ranks before this one gives up.
  if (!queue.ok()) {
    return EngineImpl::make(std::move(tensors), options, communicator, clock, trace,
                            {.queue = nullptr, .failure = queue.status()});
  }
  return EngineImpl::make(
      std::move(tensors), options, communicator, clock, trace,
      {.queue = std::move(queue).value(), .make_message = make_cuda_message, .make_matrices = make_cuda_matrices});
}

}  // namespace cortado

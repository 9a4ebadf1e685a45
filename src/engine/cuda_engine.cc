// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "core/cuda_queue.h"
#include "cortado/cuda.h"
#include "engine/engine_impl.h"

namespace cortado {

Result<std::unique_ptr<Engine>> create_cuda_engine(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                   Communicator* communicator, int device, const Clock* clock,
                                                   TraceRecorder* trace) {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> queue, make_cuda_queue(device));
  return EngineImpl::make(std::move(tensors), options, communicator, clock, trace,
                          {.queue = std::move(queue), .make_message = make_cuda_message});
}

}  // namespace cortado

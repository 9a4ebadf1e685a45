// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "core/cuda_queue.h"
#include "cortado/cuda.h"
#include "session/auto_engine.h"

namespace cortado {

Result<std::unique_ptr<AutoEngine>> create_cuda_auto_engine(std::vector<EngineTensor> tensors,
                                                            const AutoOptions& options, Communicator* communicator,
                                                            int device, const Clock* clock) {
  const auto make_engine = [device](std::vector<EngineTensor> of, const EngineOptions& setting, Communicator* over,
                                    const Clock* own_clock, TraceRecorder* trace) {
    return create_cuda_engine(std::move(of), setting, over, device, own_clock, trace);
  };
  AutoDevice on_device{.copies = {}, .make_engine = make_engine};
  Result<std::unique_ptr<DeviceQueue>> queue = make_cuda_queue(device);
  if (queue.ok()) {
    on_device.copies.queue = std::move(queue).value();
  } else {
    on_device.copies.failure = queue.status();
  }
  auto engine =
      std::make_unique<AutoEngineImpl>(std::move(tensors), options, communicator, clock, std::move(on_device));
  CORTADO_RETURN_IF_ERROR(engine->start());
  return std::unique_ptr<AutoEngine>(std::move(engine));
}

}  // namespace cortado

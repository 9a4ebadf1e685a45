// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// libcortado_emulated.so, for tests without a GPU: what libcortado_cuda.so and libcortado_cuda_kfac.so are, with an
// emulated device, whose memory is that of the host and whose copies are late. Loaded by
// src/session/device_library_test.cc and by tests/python/test_device_engine.py.
#include "cortado/device_library.h"

#include <utility>

#include "collective/emulated_scheme_device.h"
#include "core/check.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"
#include "engine/emulated_message.h"
#include "engine/engine_impl.h"
#include "kfac/emulated_kfac_device.h"
#include "session/auto_engine.h"

namespace {

using namespace cortado;

Result<std::unique_ptr<Engine>> make_engine(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                            Communicator* communicator, const Clock* clock, TraceRecorder* trace) {
  return EngineImpl::make(std::move(tensors), options, communicator, clock, trace,
                          {.queue = std::make_unique<EmulatedQueue>(),
                           .make_message = make_emulated_message,
                           .make_matrices = make_emulated_matrices});
}

Result<std::unique_ptr<AutoEngine>> make_auto_engine(std::vector<EngineTensor> tensors, const AutoOptions& options,
                                                     Communicator* communicator) {
  AutoDevice device{.copies = {.queue = std::make_unique<EmulatedQueue>()}, .make_engine = make_engine};
  auto engine =
      std::make_unique<AutoEngineImpl>(std::move(tensors), options, communicator, steady_clock(), std::move(device));
  CORTADO_RETURN_IF_ERROR(engine->start());
  return std::unique_ptr<AutoEngine>(std::move(engine));
}

thread_local int current_device = 0;

// Makes its device the current one when it is made and when it is destroyed, as one of CUDA does.
Result<std::shared_ptr<KfacDevice>> make_kfac_device(int device) {
  std::shared_ptr<KfacDevice> made = make_late_kfac_device();
  current_device = device;
  return std::shared_ptr<KfacDevice>(made.get(), [made, device](KfacDevice*) mutable {
    made.reset();
    current_device = device;
  });
}

}  // namespace

// For tests of who changes it.
extern "C" __attribute__((visibility("default"))) int cortado_emulated_device() { return current_device; }
extern "C" __attribute__((visibility("default"))) void cortado_set_emulated_device(int device) {
  current_device = device;
}

extern "C" __attribute__((visibility("default"))) const cortado::DeviceLibrary* cortado_device_library() {
  static const DeviceLibrary library = {
      .build = this_build(),
      .device_count = [] { return 1; },
      .create_engine =
          [](std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator, int) {
            return make_engine(std::move(tensors), options, communicator, steady_clock(), nullptr);
          },
      .create_auto_engine = [](std::vector<EngineTensor> tensors, const AutoOptions& options,
                               Communicator* communicator,
                               int) { return make_auto_engine(std::move(tensors), options, communicator); },
      .create_scheme_device = [](int) -> std::shared_ptr<const SchemeDevice> {
        return std::make_shared<const EmulatedSchemeDevice>();
      },
      .create_kfac_device = make_kfac_device,
      .current_device = [] { return current_device; },
      .set_current_device = [](int device) { current_device = device; }};
  return &library;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Engines and K-FAC on a device, from libraries that are loaded while the program runs, so that who loads them is free
// of CUDA. libcortado_cuda.so, with the engine, is built where nvcc is found, libcortado_cuda_kfac.so, with K-FAC,
// where cuSOLVER is found too, which it needs when it is loaded. Both sides must be of one build: version, compiler and
// the texts of the headers whose classes cross are compared before anything is called.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/communicator.h"
#include "cortado/engine.h"
#include "cortado/kfac.h"
#include "cortado/status.h"

namespace cortado {

// What both must have in common. Texts end with 0 and are cut where they are longer.
struct DeviceLibraryBuild {
  int version = 0;  // 1002003 is 1.2.3
  char compiler[96] = {};
  char headers[72] = {};  // hash of include/cortado, and of the headers of KfacDevice
};
DeviceLibraryBuild this_build();

// kMismatch if `found`, that of the library at `path`, is not this_build().
Status check_same_build(const DeviceLibraryBuild& found, const std::string& path);

struct DeviceLibrary {
  DeviceLibraryBuild build;  // first, so that it can be read of any library

  int (*device_count)() = nullptr;
  // create_cuda_engine() (cortado/cuda.h); null in a library without engines.
  Result<std::unique_ptr<Engine>> (*create_engine)(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                   Communicator* communicator, int device) = nullptr;
  // create_cuda_auto_engine() (cortado/cuda.h); null in a library without engines.
  Result<std::unique_ptr<AutoEngine>> (*create_auto_engine)(std::vector<EngineTensor> tensors,
                                                            const AutoOptions& options, Communicator* communicator,
                                                            int device) = nullptr;
  // create_cuda_scheme_device() (cortado/cuda.h); null in a library without engines.
  std::shared_ptr<const SchemeDevice> (*create_scheme_device)(int device) = nullptr;
  // make_cuda_kfac_device() (cortado/kfac_cuda.h); null in a library without K-FAC.
  Result<std::shared_ptr<KfacDevice>> (*create_kfac_device)(int device) = nullptr;
  // Of the calling thread; what engines and K-FAC change.
  int (*current_device)() = nullptr;
  void (*set_current_device)(int device) = nullptr;
};

// The name of the function, without arguments, by which a library gives a pointer to its DeviceLibrary.
inline constexpr const char* kDeviceLibrarySymbol = "cortado_device_library";

// The library stays loaded until the program ends. kNotFound: there is none at `path`, or it can't be loaded;
// kMismatch: it is of another build, or none of Cortado's.
Result<const DeviceLibrary*> load_device_library(const std::string& path);

}  // namespace cortado

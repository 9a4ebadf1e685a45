// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// K-FAC on a CUDA device. In the library cortado_cuda_kfac, which is built where the CUDA toolkit and
// cuSOLVER (with cuBLAS) are found. This header needs neither.
#pragma once

#include <memory>

#include "cortado/kfac.h"
#include "cortado/status.h"

namespace cortado {

// For KfacOptions::inverter: eigenvectors and damped inverses on the device that is current now and whenever it is
// used, on streams of its own; no call waits for the device as a whole. Factors come from host memory and inverses go
// there. Matrices of one size, up to 512 rows, are decomposed together (cuSOLVER's batched eigensolver). Results are
// near those of the CPU, not their bytes. Several Kfac, of several threads, may share one: they take turns.
// kUnsupported where there is no device.
Result<std::shared_ptr<KfacInverter>> make_cuda_inverter();

// For KfacOptions::device, of one Kfac: batches and gradients are in the memory of CUDA device `device`. Products are
// those of cuBLAS in float32, on a stream of its own, inverses as above. Calls make `device` the current device of
// their thread. kUnsupported where there is no device.
Result<std::shared_ptr<KfacDevice>> make_cuda_kfac_device(int device);

}  // namespace cortado

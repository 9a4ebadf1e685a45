// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/device_queue.h"

namespace cortado {

// A stream of its own on CUDA device `device`. It does not wait for the default stream, nor that for it. Calls make the
// device the current one of the calling thread, so that kernels may be launched behind follow() and copy_to_device().
// It is destroyed when its work has ended; work that takes seconds more is left alone with its stream and memory.
Result<std::unique_ptr<DeviceQueue>> make_cuda_queue(int device);

}  // namespace cortado

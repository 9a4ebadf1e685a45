// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Engines whose gradients are on a CUDA device, in the library cortado_cuda.
#pragma once

#include <memory>
#include <vector>

#include "cortado/auto.h"
#include "cortado/communicator.h"
#include "cortado/engine.h"
#include "cortado/status.h"
#include "cortado/trace.h"

namespace cortado {

// As Engine::create(), but gradients are in the memory of CUDA device `device`, and the means are written there. Codecs
// that have a device variant (sign, quant, fp8, topk, randk, compso, float_rans) run on the device, and only their
// payloads leave it; of low rank (acp, power) matrices are projected and reconstructed there, and only factors
// cross. report() says so of all others, which are copied to pinned memory and run on the CPU. Bytes on the wire are
// the same either way, but for the rounding of factors, and replicas are equal to the bit, so ranks may differ in it.
//
// begin_step() takes the stream that computes the gradients (StepContext::device_stream). submit() does not wait for
// the device; finish_step() waits for the gradients and for peers, and that stream finds the means when it goes on. No
// call waits for the device as a whole. A payload that a decoder on the device refuses is an error of the next step.
// Calls make `device` the current device of their thread.
// kUnsupported: method kNone.
Result<std::unique_ptr<Engine>> create_cuda_engine(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                   Communicator* communicator, int device,
                                                   const Clock* clock = steady_clock(), TraceRecorder* trace = nullptr);

// Of engines of a plan, whose gradients are in host memory (Engine::create): what encodes and decodes there what the
// plan gives to a GPU, on CUDA device `device`. An engine makes a stream and its memory for each bucket, and its calls
// make `device` the current device of their thread.
std::shared_ptr<const SchemeDevice> create_cuda_scheme_device(int device);

// As AutoEngine::create(), with gradients on the device as above: settings run as create_cuda_engine() runs them; while
// it runs dense, or a plan, gradients are copied to the host and back. Nothing is predicted, because
// codecs would be measured on the CPU: each setting is tried. A cluster file is checked for being of these machines.
Result<std::unique_ptr<AutoEngine>> create_cuda_auto_engine(std::vector<EngineTensor> tensors,
                                                            const AutoOptions& options, Communicator* communicator,
                                                            int device, const Clock* clock = steady_clock());

}  // namespace cortado

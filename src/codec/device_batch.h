// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// DeviceBatch: the tensors of a bucket, encoded and decoded on a device, all of them in a few launches. Payloads are
// those of the codec (codec.h), byte for byte; those of low-rank codecs keep the bound of the codec's spec.md.
//
// Everything is allocated, sized and uploaded before the first step: encode() and decode() only give work to a stream.
// They neither allocate nor wait, so that a CUDA graph can hold them. What is known only when the work is done stays on
// the device: the payloads' sizes, and whether a payload was damaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/device.h"
#include "cortado/codec.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

// Pointers are to device memory.
struct DeviceTensor {
  // Read by encode(), written by decode(). Aligned as its dtype is; kernels are faster from 16 bytes on.
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  // Room for max_payload_bytes(). Any alignment; kernels are faster where it is a multiple of 16.
  std::byte* payload = nullptr;
  std::uint64_t number = 0;  // EncodeContext::tensor
};

// Of EncodeContext. The step lies in device memory, so that a graph can be launched again with another one.
struct DeviceKeys {
  std::uint64_t seed = 0;
  const std::uint64_t* step = nullptr;
};

constexpr std::size_t kWorkspaceAlignBytes = 256;  // what device allocators give, and more than any load needs

class DeviceBatch {
 public:
  virtual ~DeviceBatch() = default;

  virtual const Codec& codec() const = 0;

  // Device memory, aligned to kWorkspaceAlignBytes, that belongs to the batch while it is used.
  virtual std::uint64_t workspace_bytes() const = 0;

  // Before the first step, and whenever a pointer changes. The tensors have the shapes that the batch was made for;
  // kInvalidArgument otherwise, and for pointers that are null or not aligned.
  virtual Status set_up(std::span<const DeviceTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                        DeviceStream stream) = 0;

  // After set_up(), in the order of the stream. Errors are those of giving work to the stream.
  virtual Status encode(DeviceStream stream) = 0;
  // Reads payload_bytes() of every payload. Any bytes are safe: a damaged payload sets faults() of its tensor, whose
  // values are unspecified then.
  virtual Status decode(DeviceStream stream) = 0;

  // Device memory, a number a tensor, in the workspace. encode() writes the sizes, but those of codecs of a fixed size,
  // which set_up() writes; who decodes what others have sent writes theirs.
  virtual std::uint64_t* payload_bytes() const = 0;
  virtual const std::uint32_t* faults() const = 0;  // 0: nothing was wrong
};

// Data and payload pointers are not looked at yet. kUnsupported for codecs that have no device variant, saying what
// they would need; such tensors are compressed on the CPU. Defined in device_registry.h; with all its kernels it is
// compiled once a device: for CudaDevice in the library cortado_cuda, for EmulatedDevice in cortado_emulation.
template <class Device>
Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec, std::span<const DeviceTensor> tensors);

// On CUDA devices.
Result<std::unique_ptr<DeviceBatch>> make_cuda_batch(std::string_view spec, std::span<const DeviceTensor> tensors);

}  // namespace cortado

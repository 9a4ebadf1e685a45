// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which codecs have a device variant: one row each. A variant is a plan, made once for the tensors of a batch:
//
//   struct CastPlan {
//     static constexpr bool kTakesCodes = false;      uint8, instead of fp32, fp16 and bf16
//     static Result<CastPlan> make(const ParameterValues&, DeviceLayout&);   what it needs of device memory
//     template <class Device>
//     void encode(Device&, const DeviceWorkspace&) const;                    launches
//     template <class Device>
//     void decode(Device&, const DeviceWorkspace&) const;
//   };
//
// <name>_device.h has it and its kernels, <name>_device.cc make(), <name>.cu its launches on CUDA devices. The same
// rows, on an EmulatedDevice, are what device_conformance_test.cc compares with the codecs.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "codec/cast/cast_device.h"
#include "codec/compso/compso_device.h"
#include "codec/device_batch.h"
#include "codec/device_faults.h"
#include "codec/device_layout.h"
#include "codec/float_rans/float_rans_device.h"
#include "codec/fp8/fp8_device.h"
#include "codec/lowrank/lowrank_device.h"
#include "codec/quant/quant_device.h"
#include "codec/randk/randk_device.h"
#include "codec/rans/rans_device.h"
#include "codec/sign/sign_device.h"
#include "codec/topk/topk_device.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "cortado/spec.h"

namespace cortado {

template <class Device, class Plan>
class BatchOf final : public DeviceBatch {
 public:
  BatchOf(std::unique_ptr<Codec> codec, DeviceLayout layout, Plan plan)
      : codec_(std::move(codec)), layout_(std::move(layout)), plan_(std::move(plan)) {}

  static Result<std::unique_ptr<DeviceBatch>> make(std::unique_ptr<Codec> codec, const ParameterValues& values,
                                                   std::span<const DeviceTensor> tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const DeviceTensor& tensor = tensors[i];
      const bool has_size = checked_size_bytes(tensor.rows, tensor.cols, tensor.dtype).has_value();
      if ((tensor.dtype == DType::kUint8) == Plan::kTakesCodes && has_size) continue;
      return make_error(StatusCode::kUnsupported, "%s on a device: tensor %zu is %lld x %lld of %s, expected %s",
                        codec->spec().c_str(), i, static_cast<long long>(tensor.rows),
                        static_cast<long long>(tensor.cols), std::string(dtype_name(tensor.dtype)).c_str(),
                        Plan::kTakesCodes ? "uint8" : "fp32, fp16 or bf16");
    }
    DeviceLayout layout(*codec, tensors);
    CORTADO_ASSIGN_OR_RETURN(Plan plan, Plan::make(values, layout));
    return std::unique_ptr<DeviceBatch>(
        std::make_unique<BatchOf>(std::move(codec), std::move(layout), std::move(plan)));
  }

  const Codec& codec() const override { return *codec_; }
  std::uint64_t workspace_bytes() const override { return layout_.workspace_bytes(); }

  Status set_up(std::span<const DeviceTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                DeviceStream stream) override {
    CORTADO_RETURN_IF_ERROR(check(tensors, keys, workspace));
    layout_.bind(tensors, keys);
    workspace_ = layout_.workspace(workspace, keys.step);
    Device device(stream);
    device.upload(workspace, layout_.tables().data(), layout_.tables().size());
    return device.status();
  }

  Status encode(DeviceStream stream) override {
    Device device(stream);
    plan_.encode(device, workspace_);
    return device.status();
  }
  Status decode(DeviceStream stream) override {
    Device device(stream);
    const std::int64_t tensors = workspace_.tensor_count;
    device.launch((tensors + BeginFaults::kThreads - 1) / BeginFaults::kThreads,
                  BeginFaults{workspace_.tensors, tensors, codec_->row().traits.fixed_size});
    plan_.decode(device, workspace_);
    return device.status();
  }

  std::uint64_t* payload_bytes() const override { return workspace_.tensors.payload_bytes; }
  const std::uint32_t* faults() const override { return workspace_.tensors.faults; }

 private:
  Status check(std::span<const DeviceTensor> tensors, const DeviceKeys& keys, const std::byte* workspace) const {
    const std::span<const TensorEntry> made_for = layout_.tensors();
    const auto refused = [&](std::size_t i, const char* what) {
      return make_error(StatusCode::kInvalidArgument, "%s on a device: tensor %zu of %zu %s", codec_->spec().c_str(), i,
                        made_for.size(), what);
    };
    if (tensors.size() != made_for.size()) return refused(tensors.size(), "is the last, expected all");
    if (workspace == nullptr || keys.step == nullptr) return refused(0, "has no workspace or no step");
    if (!is_aligned(workspace, kWorkspaceAlignBytes)) return refused(0, "has a workspace that is not aligned");
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorEntry& entry = made_for[i];
      const DeviceTensor& tensor = tensors[i];
      if (tensor.rows != entry.rows || tensor.cols != entry.cols || tensor.dtype != entry.dtype) {
        return refused(i, "has another shape or dtype than the batch was made for");
      }
      if (entry.elems == 0) continue;
      if (tensor.data == nullptr || tensor.payload == nullptr) return refused(i, "has no memory");
      if (!is_aligned(tensor.data, dtype_bytes(tensor.dtype))) return refused(i, "is not aligned as its dtype");
    }
    return {};
  }

  std::unique_ptr<Codec> codec_;  // at the same place, whoever owns it: the layout refers to it
  DeviceLayout layout_;
  Plan plan_;
  DeviceWorkspace workspace_ = {};
};

struct DeviceRow {
  const char* codec;
  Result<std::unique_ptr<DeviceBatch>> (*make)(std::unique_ptr<Codec>, const ParameterValues&,
                                               std::span<const DeviceTensor>);
};

// In the order of codec_registry().
template <class Device>
constexpr std::array kDeviceRows = {
    DeviceRow{.codec = "cast", .make = BatchOf<Device, CastPlan>::make},
    DeviceRow{.codec = "fp8", .make = BatchOf<Device, Fp8Plan>::make},
    DeviceRow{.codec = "acp", .make = BatchOf<Device, LowRankPlan>::make},
    DeviceRow{.codec = "power", .make = BatchOf<Device, LowRankPlan>::make},
    DeviceRow{.codec = "sign", .make = BatchOf<Device, SignPlan>::make},
    DeviceRow{.codec = "topk", .make = BatchOf<Device, TopkPlan>::make},
    DeviceRow{.codec = "randk", .make = BatchOf<Device, RandkPlan>::make},
    DeviceRow{.codec = "quant", .make = BatchOf<Device, QuantPlan>::make},
    DeviceRow{.codec = "rans", .make = BatchOf<Device, RansPlan>::make},
    DeviceRow{.codec = "float_rans", .make = BatchOf<Device, FloatRansPlan>::make},
    DeviceRow{.codec = "compso", .make = BatchOf<Device, CompsoPlan>::make},
};

template <class Device>
Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec, std::span<const DeviceTensor> tensors) {
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_codec(spec));
  // The codec's own text, not the caller's: one that another name stands for says so there.
  CORTADO_ASSIGN_OR_RETURN(const std::vector<SpecStage> stages, parse_spec(codec->spec()));
  if (stages.size() == 1) {
    for (const DeviceRow& row : kDeviceRows<Device>) {
      if (stages[0].name != row.codec) continue;
      const CodecRow& codec_row = codec->row();
      CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                               ParameterValues::read(row.codec, stages[0].arguments, codec_row.parameters));
      return row.make(std::move(codec), values, tensors);
    }
  }
  std::string known;
  for (const DeviceRow& row : kDeviceRows<Device>) known += (known.empty() ? "" : ", ") + std::string(row.codec);
  return make_error(StatusCode::kUnsupported, "%s has no device variant; these have, by themselves: %s",
                    codec->spec().c_str(), known.c_str());
}

}  // namespace cortado

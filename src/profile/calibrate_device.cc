// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Of Calibrator: what is timed on a device (SchemeDevice): codecs, and copies to it and back.
#include <cstring>
#include <thread>

#include "core/check.h"
#include "profile/calibrator.h"

namespace cortado {

namespace {

// A queue whose work is waited for, as the host sees it: from giving it work until it is known to be done.
class TimedQueue {
 public:
  static Result<std::unique_ptr<TimedQueue>> make(const SchemeDevice& device, const Clock* clock,
                                                  std::chrono::nanoseconds timeout) {
    auto made = std::make_unique<TimedQueue>();
    made->clock_ = clock;
    made->timeout_ = timeout;
    CORTADO_ASSIGN_OR_RETURN(made->queue_, device.make_queue());
    CORTADO_ASSIGN_OR_RETURN(made->ended_, made->queue_->make_event());
    return made;
  }

  DeviceQueue& queue() { return *queue_; }

  // Without sleeping: what is timed may take some microseconds.
  Status wait() {
    CORTADO_RETURN_IF_ERROR(queue_->record(ended_));
    const std::int64_t start_ns = clock_->now_ns();
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool has_ended, queue_->reached(ended_));
      if (has_ended) return {};
      if (clock_->now_ns() - start_ns >= timeout_.count()) {
        return make_error(StatusCode::kTimeout, "the device has not ended within %g s",
                          std::chrono::duration<double>(timeout_).count());
      }
      std::this_thread::yield();
    }
  }

 private:
  const Clock* clock_ = nullptr;
  std::chrono::nanoseconds timeout_{};
  std::unique_ptr<DeviceQueue> queue_;
  DeviceQueue::Event ended_ = 0;
};

// Values stay as they are: payloads are decoded to other memory. So every encode makes the same payload.
class DeviceCodecWork final : public CodecWork {
 public:
  DeviceCodecWork(const Codec& codec, std::int64_t elems) : CodecWork(elems), has_feedback_(has_feedback(codec)) {}

  Status open(const SchemeDevice& device, const Codec& codec, const Clock* clock, std::chrono::nanoseconds timeout) {
    CORTADO_ASSIGN_OR_RETURN(queue_, TimedQueue::make(device, clock, timeout));
    DeviceQueue& queue = queue_->queue();
    const std::uint64_t bytes = size() * sizeof(float);
    CORTADO_ASSIGN_OR_RETURN(std::byte* const values, queue.allocate_on_device(bytes));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const decoded, queue.allocate_on_device(bytes));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const payload,
                             queue.allocate_on_device(codec.max_payload_bytes(rows_, cols_, DType::kFloat32)));
    CORTADO_ASSIGN_OR_RETURN(step_, queue.allocate_on_device(sizeof(std::uint64_t)));
    CORTADO_ASSIGN_OR_RETURN(step_on_host_, queue.allocate_on_host(sizeof(std::uint64_t)));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const values_on_host, queue.allocate_on_host(bytes));
    fill({reinterpret_cast<float*>(values_on_host), size()});
    CORTADO_RETURN_IF_ERROR(queue.copy_to_device(values, values_on_host, bytes));

    const DeviceKeys keys{.seed = 1, .step = reinterpret_cast<const std::uint64_t*>(step_)};
    const auto make_batch = [&](std::byte* data) -> Result<std::unique_ptr<DeviceBatch>> {
      const DeviceTensor tensor{.data = data, .rows = rows_, .cols = cols_, .payload = payload, .number = 1};
      CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBatch> batch, device.make_batch(codec.spec(), {&tensor, 1}));
      CORTADO_ASSIGN_OR_RETURN(std::byte* const workspace, queue.allocate_on_device(batch->workspace_bytes()));
      CORTADO_RETURN_IF_ERROR(batch->set_up({&tensor, 1}, keys, workspace, queue.stream()));
      return batch;
    };
    CORTADO_ASSIGN_OR_RETURN(encoder_, make_batch(values));
    CORTADO_ASSIGN_OR_RETURN(decoder_, make_batch(decoded));
    CORTADO_RETURN_IF_ERROR(give_step());
    CORTADO_RETURN_IF_ERROR(encoder_->encode(queue.stream()));
    // What a decoder is told of a payload from elsewhere.
    CORTADO_ASSIGN_OR_RETURN(std::byte* const payload_bytes, queue.allocate_on_host(sizeof(std::uint64_t)));
    CORTADO_RETURN_IF_ERROR(queue.copy_to_host(
        payload_bytes, reinterpret_cast<const std::byte*>(encoder_->payload_bytes()), sizeof(std::uint64_t)));
    CORTADO_RETURN_IF_ERROR(queue_->wait());
    CORTADO_RETURN_IF_ERROR(queue.copy_to_device(reinterpret_cast<std::byte*>(decoder_->payload_bytes()), payload_bytes,
                                                 sizeof(std::uint64_t)));
    CORTADO_RETURN_IF_ERROR(decoder_->decode(queue.stream()));
    CORTADO_ASSIGN_OR_RETURN(std::byte* const fault, queue.allocate_on_host(sizeof(std::uint32_t)));
    CORTADO_RETURN_IF_ERROR(
        queue.copy_to_host(fault, reinterpret_cast<const std::byte*>(decoder_->faults()), sizeof(std::uint32_t)));
    CORTADO_RETURN_IF_ERROR(queue_->wait());
    std::uint32_t refused = 0;
    std::memcpy(&refused, fault, sizeof(refused));
    if (refused == 0) return {};
    return make_error(StatusCode::kCorruptData, "the decoder on the device refuses what was encoded there");
  }

  Status encode() override {
    CORTADO_RETURN_IF_ERROR(give_step());
    CORTADO_RETURN_IF_ERROR(encoder_->encode(queue_->queue().stream()));
    if (has_feedback_) CORTADO_RETURN_IF_ERROR(decoder_->decode(queue_->queue().stream()));
    return queue_->wait();
  }

  Status decode() override {
    CORTADO_RETURN_IF_ERROR(give_step());
    CORTADO_RETURN_IF_ERROR(decoder_->decode(queue_->queue().stream()));
    return queue_->wait();
  }

 private:
  // As every encode of an engine begins; it makes this the thread's current device.
  Status give_step() {
    constexpr std::uint64_t kStep = 1;
    std::memcpy(step_on_host_, &kStep, sizeof(kStep));
    return queue_->queue().copy_to_device(step_, step_on_host_, sizeof(kStep));
  }

  const bool has_feedback_;
  std::unique_ptr<TimedQueue> queue_;  // outlives the batches, whose memory it has
  std::byte *step_ = nullptr, *step_on_host_ = nullptr;
  std::unique_ptr<DeviceBatch> encoder_, decoder_;
};

}  // namespace

Result<std::unique_ptr<CodecWork>> make_device_work(const SchemeDevice& device, const Codec& codec, std::int64_t elems,
                                                    const Clock* clock, std::chrono::nanoseconds timeout) {
  auto work = std::make_unique<DeviceCodecWork>(codec, elems);
  CORTADO_RETURN_IF_ERROR(work->open(device, codec, clock, timeout));
  return std::unique_ptr<CodecWork>(std::move(work));
}

Status Calibrator::find_device_codecs() {
  const bool has_device = options_.device != nullptr, computes = has_device && options_.device_computation;
  const DeviceTensor tensor{.rows = 1, .cols = kSmallestElems};
  std::vector<std::int64_t> own = {has_device, !has_device, computes, !computes};
  for (const std::string& spec : options_.codecs) {
    own.push_back(!has_device || !options_.device->make_batch(spec, {&tensor, 1}).ok());
  }
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> of_any, longest(own));
  const auto differ = [&](const char* what, bool has) {
    return make_error(StatusCode::kMismatch, "calibrate: some ranks were given %s and others were not; rank %d was%s",
                      what, communicator_->rank(), has ? "" : " not");
  };
  if (of_any[0] + of_any[1] == 2) return differ("a device", has_device);
  if (of_any[2] + of_any[3] == 2) return differ("a computation for their device", computes);
  for (std::size_t i = 0; i < options_.codecs.size(); ++i) {
    if (of_any[4 + i] == 0) device_codecs_.push_back(options_.codecs[i]);
  }
  return {};
}

// From pinned memory and to it, as engines copy.
Status Calibrator::measure_copies(Cluster* cluster) {
  if (!measures_copies(*cluster)) return {};
  const std::vector<std::int64_t> sizes = sizes_up_to(kSmallestBytes, options_.max_bytes);
  const auto most = static_cast<std::uint64_t>(sizes.back());
  std::byte *on_host = nullptr, *on_device = nullptr;
  std::unique_ptr<TimedQueue> timed;
  const auto open = [&]() -> Status {
    CORTADO_ASSIGN_OR_RETURN(timed, TimedQueue::make(*options_.device, clock_, timeout_ / 2));
    CORTADO_ASSIGN_OR_RETURN(on_host, timed->queue().allocate_on_host(most));
    CORTADO_ASSIGN_OR_RETURN(on_device, timed->queue().allocate_on_device(most));
    return {};
  };
  CORTADO_RETURN_IF_ERROR(on_all_ranks("memory on the device", open()));
  Curve to_device, to_host;
  for (const std::int64_t size : sizes) {
    const auto bytes = static_cast<std::uint64_t>(size);
    const std::string text = ", " + std::to_string(size) + " bytes";
    CORTADO_ASSIGN_OR_RETURN(const Point there, measure("copy to the device" + text, [&]() -> Status {
                               CORTADO_RETURN_IF_ERROR(timed->queue().copy_to_device(on_device, on_host, bytes));
                               return timed->wait();
                             }));
    CORTADO_ASSIGN_OR_RETURN(const Point back, measure("copy to the host" + text, [&]() -> Status {
                               CORTADO_RETURN_IF_ERROR(timed->queue().copy_to_host(on_host, on_device, bytes));
                               return timed->wait();
                             }));
    to_device.add(size, there);
    to_host.add(size, back);
  }
  keep_unless_known("/copies/host_to_device", to_device, &cluster->host_to_device, &cluster->unknown);
  keep_unless_known("/copies/device_to_host", to_host, &cluster->device_to_host, &cluster->unknown);
  return {};
}

}  // namespace cortado

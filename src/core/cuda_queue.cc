// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_queue.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/cuda_device.h"

namespace cortado {

namespace {

constexpr std::chrono::seconds kPatience{2};    // of a destructor
constexpr std::chrono::microseconds kLook{50};  // between two looks at the stream

class CudaQueue final : public DeviceQueue {
 public:
  explicit CudaQueue(int device) : device_(device) {}
  ~CudaQueue() override {
    if (stream_ == nullptr) return;
    cudaSetDevice(device_);
    // Work may be under way in the memory that goes. After a timeout it may never end: then all of it stays, since
    // cudaFree() too would wait for it.
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() >= deadline) return;
      std::this_thread::sleep_for(kLook);
    }
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    for (std::byte* memory : on_device_) cudaFree(memory);
    for (std::byte* memory : on_host_) cudaFreeHost(memory);
    cudaStreamDestroy(stream_);
  }
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  Status open() {
    CORTADO_RETURN_IF_ERROR(select());
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"));
    CORTADO_ASSIGN_OR_RETURN(turn_, make_event());
    return {};
  }

  DeviceStream stream() const override { return stream_; }

  Result<std::byte*> allocate_on_device(std::uint64_t bytes) override {
    CORTADO_RETURN_IF_ERROR(select());
    void* memory = nullptr;
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMalloc(&memory, bytes == 0 ? 1 : bytes), "device memory"));
    on_device_.push_back(static_cast<std::byte*>(memory));
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMemsetAsync(memory, 0, bytes, stream_), "device memory"));
    return on_device_.back();
  }
  Result<std::byte*> allocate_on_host(std::uint64_t bytes) override {
    CORTADO_RETURN_IF_ERROR(select());
    void* memory = nullptr;
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaHostAlloc(&memory, bytes == 0 ? 1 : bytes, 0), "pinned memory"));
    on_host_.push_back(static_cast<std::byte*>(memory));
    std::fill_n(on_host_.back(), bytes, std::byte{0});
    return on_host_.back();
  }
  Result<Event> make_event() override {
    CORTADO_RETURN_IF_ERROR(select());
    cudaEvent_t event = nullptr;
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
    events_.push_back(event);
    return static_cast<Event>(events_.size() - 1);
  }

  Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "a copy to the host");
  }
  Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    CORTADO_RETURN_IF_ERROR(select());
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "a copy to the device");
  }
  Status follow(DeviceStream other) override {
    CORTADO_RETURN_IF_ERROR(select());
    return order(other, stream_);
  }
  Status lead(DeviceStream other) override {  // stream 0 is that of the current device
    CORTADO_RETURN_IF_ERROR(select());
    return order(stream_, other);
  }
  Status record(Event event) override { return cuda_status(cudaEventRecord(of(event), stream_), "an event"); }
  Result<bool> reached(Event event) override {
    const cudaError_t error = cudaEventQuery(of(event));
    if (error == cudaErrorNotReady) return false;
    CORTADO_RETURN_IF_ERROR(cuda_status(error, "work given before"));
    return true;
  }

 private:
  // A stream that waits for an event has taken note of it when the call returns.
  Status order(cudaStream_t first, cudaStream_t then) {
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaEventRecord(of(turn_), first), "an event"));
    return cuda_status(cudaStreamWaitEvent(then, of(turn_), 0), "an event");
  }
  // Kernels run on the device that is current.
  Status select() const { return cuda_status(cudaSetDevice(device_), "the device"); }
  cudaEvent_t of(Event event) const { return events_[static_cast<std::size_t>(event)]; }

  int device_;
  cudaStream_t stream_ = nullptr;
  Event turn_ = 0;
  std::vector<cudaEvent_t> events_;
  std::vector<std::byte*> on_device_, on_host_;
};

}  // namespace

Result<std::unique_ptr<DeviceQueue>> make_cuda_queue(int device) {
  auto queue = std::make_unique<CudaQueue>(device);
  CORTADO_RETURN_IF_ERROR(queue->open());
  return std::unique_ptr<DeviceQueue>(std::move(queue));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cuda_device.h"
#include "core/cuda_linalg.h"
#include "core/thread_annotations.h"
#include "cortado/kfac_cuda.h"
#include "kfac/inverse.h"
#include "kfac/inverter.h"
#include "kfac/triangle_device.h"

namespace cortado {

namespace {

constexpr int kLanes = 4;  // streams: small decompositions leave most of a device idle
constexpr std::size_t kAlignBytes = 256;
constexpr std::chrono::seconds kPatience{2};    // of a destructor
constexpr std::chrono::microseconds kLook{50};  // between two looks at a stream

std::size_t aligned(std::int64_t elems) {
  return (static_cast<std::size_t>(elems) * sizeof(float) + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

using TimePoint = std::chrono::steady_clock::time_point;

// Matrices of one size and kind. Its memory on the device, and the same again in pinned memory of the host, which both
// ways are copied from and to: dampings and triangles go up, matrices, eigenvalues and infos come down.
struct Group {
  std::int64_t n = 0;
  bool is_eigen = false;
  std::vector<InverseJob*> jobs;

  std::int64_t count() const { return static_cast<std::int64_t>(jobs.size()); }
  std::size_t triangles_at() const { return aligned(count()); }  // behind the dampings
  std::size_t up_bytes() const { return triangles_at() + aligned(count() * triangle_elems(n)); }
  std::size_t values_at() const { return aligned(count() * n * n); }  // behind the matrices
  std::size_t infos_at() const { return values_at() + (is_eigen ? aligned(count() * n) : 0); }
  std::size_t down_bytes() const { return infos_at() + aligned(count()); }
  std::size_t bytes() const { return up_bytes() + down_bytes(); }
};

// In the order in which they are given to the lanes, the largest first.
using Groups = std::map<std::pair<bool, std::int64_t>, Group>;

class Lane {
 public:
  Lane() = default;
  // With its stream at work, or other work on the device that never ends, cuSOLVER would wait for it: see leave().
  ~Lane() {
    linalg_.reset();
    if (done_ != nullptr) cudaEventDestroy(done_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Status prepare() {
    CORTADO_RETURN_IF_ERROR(
        cuda_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreate"));
    CORTADO_ASSIGN_OR_RETURN(linalg_, CudaLinalg::create(stream_));
    return {};
  }

  bool is_prepared() const { return linalg_ != nullptr; }

  // So that start() allocates nothing.
  Status reserve(const Group& group) {
    return group.is_eigen ? linalg_->reserve_symmetric_eigen(group.n, group.count())
                          : linalg_->reserve_invert_positive_definite(group.n, group.count());
  }
  std::int64_t workspace_bytes() const { return linalg_ == nullptr ? 0 : linalg_->workspace_bytes(); }

  // Gives the group to the stream.
  Status start(const Group& group, std::byte* device, std::byte* host) {
    const std::int64_t n = group.n, count = group.count(), elems = count * n * n;
    auto* const dampings = reinterpret_cast<float*>(host);
    auto* const triangles = reinterpret_cast<float*>(host + group.triangles_at());
    for (std::int64_t i = 0; i < count; ++i) {
      const InverseJob& job = *group.jobs[static_cast<std::size_t>(i)];
      dampings[i] = group.is_eigen ? 0 : static_cast<float>(job.damping);
      std::memcpy(triangles + i * triangle_elems(n), job.triangle,
                  static_cast<std::size_t>(triangle_elems(n)) * sizeof(float));
    }
    CORTADO_RETURN_IF_ERROR(cuda_status(
        cudaMemcpyAsync(device, host, group.up_bytes(), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync"));
    std::byte* const found = device + group.up_bytes();
    auto* const matrices = reinterpret_cast<float*>(found);
    auto* const infos = reinterpret_cast<int*>(found + group.infos_at());
    CudaDevice kernels(stream_);
    kernels.launch(element_blocks(elems),
                   ExpandTriangles{.n = n,
                                   .count = count,
                                   .triangles = reinterpret_cast<float*>(device + group.triangles_at()),
                                   .dampings = reinterpret_cast<float*>(device),
                                   .matrices = matrices});
    if (group.is_eigen) {
      auto* const values = reinterpret_cast<float*>(found + group.values_at());
      CORTADO_RETURN_IF_ERROR(linalg_->symmetric_eigen(n, count, matrices, values, infos));
    } else {
      CORTADO_RETURN_IF_ERROR(linalg_->invert_positive_definite(n, count, matrices, infos));
      kernels.launch(element_blocks(elems), MirrorMatrices{.n = n, .count = count, .matrices = matrices});
    }
    CORTADO_RETURN_IF_ERROR(kernels.status());
    return cuda_status(
        cudaMemcpyAsync(host + group.up_bytes(), found, group.down_bytes(), cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync");
  }

  // Behind what was started; then waits for that alone.
  Status mark() { return cuda_status(cudaEventRecord(done_, stream_), "cudaEventRecord"); }
  Status wait(TimePoint deadline) {
    for (;;) {
      const cudaError_t error = cudaEventQuery(done_);
      if (error != cudaErrorNotReady) return cuda_status(error, "inverses");
      if (std::chrono::steady_clock::now() >= deadline) {
        return make_error(StatusCode::kTimeout, "the device has not finished with inverses in time");
      }
      std::this_thread::sleep_for(kLook);
    }
  }

  // What it has stays until the program ends.
  void leave() {
    static_cast<void>(linalg_.release());
    done_ = nullptr, stream_ = nullptr;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_ = nullptr;
  std::unique_ptr<CudaLinalg> linalg_;
};

class CudaInverter final : public KfacInverter {
 public:
  // After a timeout work may be under way that never ends, and cudaFree() would wait for it: then all of it stays.
  ~CudaInverter() override {
    const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
    bool is_idle = true;
    for (Lane& lane : lanes_) {
      if (lane.is_prepared()) is_idle &= lane.mark().ok() && lane.wait(deadline).ok();
    }
    if (!is_idle) {
      for (Lane& lane : lanes_) lane.leave();
      return;
    }
    cudaFree(device_);
    cudaFreeHost(host_);
  }

  Status prepare() {
    for (Lane& lane : lanes_) CORTADO_RETURN_IF_ERROR(lane.prepare());
    return {};
  }

  Status reserve(std::span<const InverseJob> jobs) override {
    const MutexLock lock(mutex_);
    CORTADO_RETURN_IF_ERROR(failure_);
    std::vector<InverseJob> copies(jobs.begin(), jobs.end());
    std::vector<InverseJob*> todo;
    for (InverseJob& job : copies) {
      if (job.n > 0) todo.push_back(&job);
    }
    const Groups groups = groups_of(todo);
    CORTADO_RETURN_IF_ERROR(grow(groups));
    for (const auto& [size, group] : groups) CORTADO_RETURN_IF_ERROR(lane_of(size).reserve(group));
    return {};
  }

  Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds timeout) override {
    const MutexLock lock(mutex_);
    CORTADO_RETURN_IF_ERROR(failure_);
    const TimePoint deadline = std::chrono::steady_clock::now() + timeout;
    std::vector<InverseJob*> todo;
    for (InverseJob& job : jobs) {
      job.failed = job.n > 0;
      if (job.failed) todo.push_back(&job);
    }
    for (int raises = 0; !todo.empty() && raises <= kMostRaises; ++raises) {
      if (Status status = run(todo, deadline); !status.ok()) return failure_ = status;
      // What is not positive definite again, with more damping. A failed iteration for eigenvalues does not get better.
      std::erase_if(todo, [](const InverseJob* job) { return !job->failed || job->values != nullptr; });
      for (InverseJob* job : todo) ++job->raised, job->damping *= 10;
    }
    return {};
  }

  std::int64_t scratch_bytes() const override {
    const MutexLock lock(mutex_);
    auto bytes = static_cast<std::int64_t>(bytes_);
    for (const Lane& lane : lanes_) bytes += lane.workspace_bytes();
    return bytes;
  }

 private:
  static Groups groups_of(const std::vector<InverseJob*>& jobs) {
    Groups by_size;
    for (InverseJob* job : jobs) {
      Group& group = by_size[{job->values != nullptr, -job->n}];
      group.n = job->n, group.is_eigen = job->values != nullptr;
      group.jobs.push_back(job);
    }
    return by_size;
  }

  // Always the same for a size, which has memory there; sizes that come one after the other go to different ones.
  Lane& lane_of(const Groups::key_type& size) REQUIRES(mutex_) {
    const auto next = static_cast<int>(lane_of_size_.size()) % kLanes;
    return lanes_[lane_of_size_.try_emplace(size, next).first->second];
  }

  Status run(const std::vector<InverseJob*>& jobs, TimePoint deadline) REQUIRES(mutex_) {
    const Groups by_size = groups_of(jobs);
    CORTADO_RETURN_IF_ERROR(grow(by_size));
    CORTADO_RETURN_IF_ERROR(start(by_size));
    std::size_t at = 0;
    for (Lane& each : lanes_) CORTADO_RETURN_IF_ERROR(each.mark());
    for (Lane& each : lanes_) CORTADO_RETURN_IF_ERROR(each.wait(deadline));
    at = 0;
    for (const auto& [size, group] : by_size) {
      take(group, host_ + at + group.up_bytes());
      at += group.bytes();
    }
    return {};
  }

  // By a thread for each lane: cuSOLVER waits for eigenvectors where it is called. What a thread throws comes out of
  // get(), behind which the others have ended.
  Status start(const Groups& by_size) REQUIRES(mutex_) {
    struct Given {
      const Group* group;
      std::size_t at;
    };
    std::map<Lane*, std::vector<Given>> of_lane;
    std::size_t at = 0;
    for (const auto& [size, group] : by_size) {
      of_lane[&lane_of(size)].push_back({&group, at});
      at += group.bytes();
    }
    std::byte *const device = device_, *const host = host_;
    const int current = current_cuda_device();
    std::vector<std::future<Status>> started;
    for (const auto& [lane, given] : of_lane) {
      started.push_back(std::async(std::launch::async, [=, lane = lane, &given = given]() -> Status {
        set_current_cuda_device(current);
        for (const Given& each : given) {
          CORTADO_RETURN_IF_ERROR(lane->start(*each.group, device + each.at, host + each.at));
        }
        return {};
      }));
    }
    Status first;
    for (std::future<Status>& each : started) {
      Status status = each.get();
      if (first.ok()) first = std::move(status);
    }
    return first;
  }

  static void take(const Group& group, const std::byte* found) {
    const auto* const matrices = reinterpret_cast<const float*>(found);
    const auto* const values = reinterpret_cast<const float*>(found + group.values_at());
    const auto* const infos = reinterpret_cast<const int*>(found + group.infos_at());
    const std::int64_t n = group.n;
    for (std::int64_t i = 0; i < group.count(); ++i) {
      InverseJob& job = *group.jobs[static_cast<std::size_t>(i)];
      job.failed = infos[i] != 0;
      if (job.failed) continue;
      std::memcpy(job.inverse, matrices + i * n * n, static_cast<std::size_t>(n * n) * sizeof(float));
      if (group.is_eigen) job.is_indefinite = keep_eigenvalues(n, values + i * n, job.values);
    }
  }

  // Steps invert matrices of the sizes that were reserved: then nothing is allocated.
  Status grow(const Groups& groups) REQUIRES(mutex_) {
    std::size_t bytes = 0;
    for (const auto& [size, group] : groups) bytes += group.bytes();
    if (bytes <= bytes_) return {};
    cudaFree(device_);
    cudaFreeHost(host_);
    device_ = host_ = nullptr;
    bytes_ = 0;
    void *device = nullptr, *host = nullptr;
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMalloc(&device, bytes), "cudaMalloc"));
    device_ = static_cast<std::byte*>(device);
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMallocHost(&host, bytes), "cudaMallocHost"));
    host_ = static_cast<std::byte*>(host);
    bytes_ = bytes;
    return {};
  }

  mutable Mutex mutex_;  // of several Kfac, one inverts at a time
  Lane lanes_[kLanes];
  std::map<Groups::key_type, int> lane_of_size_ GUARDED_BY(mutex_);
  std::byte *device_ GUARDED_BY(mutex_) = nullptr, *host_ GUARDED_BY(mutex_) = nullptr;
  std::size_t bytes_ GUARDED_BY(mutex_) = 0;
  Status failure_ GUARDED_BY(mutex_);  // with work under way, the memory can't be used again
};

}  // namespace

Result<std::shared_ptr<KfacInverter>> make_cuda_inverter() {
  if (cuda_device_count() == 0) return make_error(StatusCode::kUnsupported, "there is no CUDA device");
  auto made = std::make_shared<CudaInverter>();
  CORTADO_RETURN_IF_ERROR(made->prepare());
  return std::shared_ptr<KfacInverter>(std::move(made));
}

}  // namespace cortado

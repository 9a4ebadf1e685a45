// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One rank a device, each a thread of this process. Without a device nothing is run, and the program says so.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/passing_communicator_testing.h"
#include "core/check.h"
#include "cortado/nccl.h"

namespace cortado {
namespace {

constexpr std::chrono::seconds kLong(30);

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

Status cuda(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return make_error(StatusCode::kInternal, "CUDA: %s", cudaGetErrorString(error));
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) { EXPECT_EQ(cudaMalloc(&data_, bytes + 1), cudaSuccess); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

// Collectives on host memory, by copies of it on the device. Ends each one in its start.
class Staged final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;
  Result<WorkId> start(const CollectiveCall& call) override {
    const std::size_t elem_bytes = dtype_bytes(call.dtype);
    const auto sent_bytes = static_cast<std::size_t>(sent_elems(call, rank(), world_size())) * elem_bytes;
    const auto received_bytes = static_cast<std::size_t>(received_elems(call, rank(), world_size())) * elem_bytes;
    const auto *sent = static_cast<const std::byte*>(call.sent), *received = static_cast<std::byte*>(call.received);
    const bool in_place =
        sent != nullptr && received != nullptr && sent >= received && sent <= received + received_bytes;
    const DeviceBuffer from(sent_bytes), to(received_bytes);
    CollectiveCall staged = call;
    if (sent != nullptr) {
      std::byte* const data = in_place ? to.data() + (sent - received) : from.data();
      CORTADO_RETURN_IF_ERROR(cuda(cudaMemcpy(data, sent, sent_bytes, cudaMemcpyHostToDevice)));
      staged.sent = data;
    }
    if (received != nullptr) staged.received = to.data();
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, inner_->start(staged));
    CORTADO_RETURN_IF_ERROR(inner_->wait(work, kLong));
    if (writes_received(call, rank())) {
      CORTADO_RETURN_IF_ERROR(cuda(cudaMemcpy(call.received, to.data(), received_bytes, cudaMemcpyDeviceToHost)));
    }
    return work;
  }
  Result<bool> test(WorkId) override { return true; }
  Status wait(WorkId, std::chrono::nanoseconds) override { return {}; }
};

// Calls act(communicator) as every rank.
void for_all_ranks(const std::function<Status(Communicator&)>& act) {
  const int ranks = std::min(device_count(), 4);
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(ranks));
  ASSERT_EQ(ncclCommInitAll(comms.data(), ranks, nullptr), ncclSuccess);
  std::vector<Status> statuses(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      cudaStream_t stream = nullptr;
      EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      {
        const auto communicator = make_nccl_communicator(comms[static_cast<std::size_t>(rank)], stream).value();
        EXPECT_EQ(communicator->rank(), rank);
        EXPECT_EQ(communicator->world_size(), ranks);
        statuses[static_cast<std::size_t>(rank)] = act(*communicator);
      }
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Nccl, EveryKindOfCollective) {
  for_all_ranks([](Communicator& communicator) {
    Staged staged(&communicator);
    return check_every_collective(staged, kLong);
  });
}

TEST(Nccl, GathersHostMemory) {
  for_all_ranks([](Communicator& communicator) -> Status {
    const auto own = static_cast<std::byte>(communicator.rank() + 1);
    std::vector<std::byte> all(static_cast<std::size_t>(communicator.world_size()));
    CORTADO_RETURN_IF_ERROR(communicator.all_gather({&own, 1}, all, kLong));
    for (std::size_t rank = 0; rank < all.size(); ++rank) EXPECT_EQ(all[rank], static_cast<std::byte>(rank + 1));
    return {};
  });
}

TEST(Nccl, SubgroupOfAllRanks) {
  for_all_ranks([](Communicator& communicator) -> Status {
    std::vector<int> ranks(static_cast<std::size_t>(communicator.world_size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> subgroup, communicator.subgroup(ranks));
    Staged staged(subgroup.get());
    return check_every_collective(staged, kLong);
  });
}

TEST(Nccl, WhatCanNotBeStartedIsRefused) {
  EXPECT_EQ(make_nccl_communicator(nullptr, nullptr).status().code(), StatusCode::kInvalidArgument);
  for_all_ranks([](Communicator& communicator) -> Status {
    EXPECT_EQ(communicator.wait(7, kLong).code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(communicator.peer_failure().ok());
    EXPECT_TRUE(communicator.abandon("enough"));
    EXPECT_EQ(communicator.peer_failure().code(), StatusCode::kPeerFailed);
    EXPECT_EQ(communicator.start({.elems = 0}).status().code(), StatusCode::kPeerFailed);
    return {};
  });
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!testing::GTEST_FLAG(list_tests) && cortado::device_count() == 0) {
    std::puts("no CUDA device: none of the NCCL tests was run");
    return 0;
  }
  return RUN_ALL_TESTS();
}

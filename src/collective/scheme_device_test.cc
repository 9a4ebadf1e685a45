// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_device.h"

#include "collective/emulated_scheme_device.h"
#include "collective/scheme_device_testing.h"
#include "core/counting_new.h"
#include "core/sanitized.h"

namespace cortado {
namespace {

const Topology kTwoByTwo = {{{"intra", 2}, {"inter", 2}}};
const Topology kTwoByThree = {{{"intra", 2}, {"inter", 3}}};
const std::vector<SchemeTensor> kTensors = {{"w", 4, 16}, {"b", 1, 5}};

// Kernels on the CPU are slow: one option in so many. cuda_scheme_test.cc runs all of them on a GPU.
constexpr std::size_t kEvery = kSanitized ? 997 : 61;

TEST(SchemeDevice, GivesTheResultsOfTheCpu) {
  const EmulatedSchemeDevice device;
  for (const std::string& spec : kDeviceSpecs) {
    for (const Topology& topology : {kTwoByTwo, kTwoByThree}) {
      expect_results_of_the_cpu(device, topology, spec, kEvery * (spec == "compso" || spec == "topk" ? 7 : 1));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SchemeDevice, SumsOfPayloadsAndOfCodes) {
  const EmulatedSchemeDevice device;
  SchemeRanks ranks(kTwoByTwo);
  const Option option = Option::parse("encode@gpu all_reduce@flat decode@gpu", kTwoByTwo).value();
  for (const char* spec : {"cast(bf16)", "randk(density=0.3)", "cast(fp16)"}) {
    expect_results_of_the_cpu(device, ranks, option, make_codec(spec).value().get(), kTensors);
  }
  for (const char* spec : {"sign(scale=none, vote=majority)", "quant(abs_bound=1e-2, bits=8)"}) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const SchemeSetup setup = {.option = option, .codec = codec.get(), .tensors = kTensors, .averages = true};
    SchemeRuns on_cpu(ranks, setup), on_device(ranks, setup, &device);
    ASSERT_TRUE(on_cpu.step(0, normal_like_message).ok());
    ASSERT_TRUE(on_device.step(0, normal_like_message).ok());
    EXPECT_EQ(on_device.sums(1), on_cpu.sums(1)) << spec;
    EXPECT_TRUE(on_device.run(0).coder().runs_on_device(on_device.run(0).program().steps.front()));
    EXPECT_NE(on_device.run(0).coder().host_reason().find("sums of codes are decoded on the CPU"), std::string::npos);
  }
}

TEST(SchemeDevice, CopiesAreCounted) {
  const EmulatedSchemeDevice device;
  SchemeRanks ranks(kTwoByTwo);
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  const Option option = Option::parse("encode@gpu all_gather@flat decode@gpu", kTwoByTwo).value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = {{"w", 4, 64}}}, &device);
  ASSERT_TRUE(runs.step(0, integer_message).ok());
  const SchemeStatistics& statistics = runs.run(0).coder().statistics();
  // Values and the step there; payload and decoded values back. Four payloads there; four faults and the sum back.
  EXPECT_EQ(statistics.copies_to_device, 2 + 4);
  EXPECT_EQ(statistics.bytes_to_device, 256 * 4 + 8 + 4 * 256 * 2);
  EXPECT_EQ(statistics.copies_to_host, 2 + 4 + 1);
  EXPECT_EQ(statistics.bytes_to_host, 256 * 2 + 256 * 4 + 4 * 4 + 256 * 4);
}

TEST(SchemeDevice, LeavesToTheCpuWhatItCannotDo) {
  class Full final : public EmulatedSchemeDevice {
   public:
    Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
      return std::unique_ptr<DeviceQueue>(std::make_unique<EmulatedQueue>(nullptr, /*most_bytes=*/1000));
    }
  };
  const EmulatedSchemeDevice emulated;
  const Full full;
  SchemeRanks ranks(kTwoByTwo);
  const Option option = Option::parse("encode@gpu all_gather@flat decode@gpu", kTwoByTwo).value();
  const auto expect_reason = [&](const char* spec, const SchemeDevice& device, const char* reason) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const SchemeSetup setup = {.option = option, .codec = codec.get(), .tensors = {{"w", 40, 16}}};
    SchemeRuns on_cpu(ranks, setup), runs(ranks, setup, &device);
    EXPECT_NE(runs.run(0).coder().host_reason().find(reason), std::string::npos) << runs.run(0).coder().host_reason();
    EXPECT_EQ(runs.run(1).coder().host_reason(), "");
    ASSERT_TRUE(on_cpu.step(0, integer_message).ok());
    ASSERT_TRUE(runs.step(0, integer_message).ok());
    EXPECT_EQ(runs.sums(1), on_cpu.sums(1)) << spec;
  };
  expect_reason("none", emulated, "none has no device variant");
  expect_reason("topk(density=0.3) | quant", emulated, "has no device variant");
  expect_reason("acp(rank=2)", emulated, "one kind of device only");
  expect_reason("cast(bf16)", full, "out of memory");
}

TEST(SchemeDevice, RefusesDamagedPayloads) {
  const EmulatedSchemeDevice device;
  const std::unique_ptr<DeviceQueue> queue = device.make_queue().value();
  const std::unique_ptr<Codec> codec = make_codec("float_rans").value();
  const auto decode = DeviceDecode::make({.device = &device,
                                          .queue = queue.get(),
                                          .codec = codec.get(),
                                          .pieces = {{.name = "w", .rows = 3, .cols = 40}},
                                          .elems = 120},
                                         /*terms=*/2)
                          .value();
  std::vector<std::byte> payload(codec->max_payload_bytes(3, 40, DType::kFloat32));
  std::vector<float> values(120, 1.5f);
  std::vector<std::byte> scratch(codec->scratch_bytes(3, 40, DType::kFloat32));
  const std::uint64_t bytes = codec->encode({values.data(), DType::kFloat32, 3, 40}, {}, payload, scratch).value();
  const std::span<const std::byte> whole(payload.data(), static_cast<std::size_t>(bytes));
  std::vector<std::byte> longer(payload.size() + 1);
  EXPECT_EQ(decode->put(0, 0, longer).code(), StatusCode::kCorruptData);
  const auto run = [&](std::span<const std::byte> second) -> Status {
    CORTADO_RETURN_IF_ERROR(decode->put(0, 0, whole));
    CORTADO_RETURN_IF_ERROR(decode->put(0, 1, second));
    CORTADO_RETURN_IF_ERROR(decode->start());
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool ended, decode->ended());
      if (ended) return {};
    }
  };
  ASSERT_TRUE(run(whole).ok());
  EXPECT_EQ(decode->sums()[119], 3.0f);
  const Status cut = run(whole.first(whole.size() / 2));
  EXPECT_EQ(cut.code(), StatusCode::kCorruptData);
  EXPECT_NE(cut.message().find("\"w\", contributor 1"), std::string::npos) << cut.message();
}

TEST(SchemeDevice, AStuckDeviceIsAnErrorInTime) {
  class Stuck final : public EmulatedSchemeDevice {
   public:
    Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
      return std::unique_ptr<DeviceQueue>(std::make_unique<StuckQueue>());
    }
  };
  const Stuck device;
  SchemeRanks ranks({{{"all", 1}}});
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  const Option option = Option::parse("encode@gpu all_gather@all decode@gpu", ranks.topology()).value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors}, &device);
  const Status status = runs.run(0).run(0, std::chrono::milliseconds(20));
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find("(encode@gpu) of"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("the device has not encoded within"), std::string::npos) << status.message();
}

TEST(SchemeDevice, AllocatesNothingInSteadyState) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  class Plain final : public EmulatedSchemeDevice {  // an EmulatedQueue keeps what it copies
   public:
    class Queue final : public EmulatedQueue {
     public:
      Status copy_to_host(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
        std::memcpy(to, from, bytes);
        return {};
      }
      Status copy_to_device(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
        std::memcpy(to, from, bytes);
        return {};
      }
    };
    Result<std::unique_ptr<DeviceQueue>> make_queue() const override {
      return std::unique_ptr<DeviceQueue>(std::make_unique<Queue>());
    }
    Status add(DeviceStream, const AddTerm&) const override { return {}; }
    Result<std::unique_ptr<DeviceBatch>> make_batch(std::string_view spec,
                                                    std::span<const DeviceTensor> tensors) const override {
      CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBatch> made, EmulatedSchemeDevice::make_batch(spec, tensors));
      return std::unique_ptr<DeviceBatch>(std::make_unique<Idle>(std::move(made)));
    }
    class Idle final : public DeviceBatch {  // an EmulatedDevice allocates in each launch
     public:
      explicit Idle(std::unique_ptr<DeviceBatch> inner) : inner_(std::move(inner)) {}
      const Codec& codec() const override { return inner_->codec(); }
      std::uint64_t workspace_bytes() const override { return inner_->workspace_bytes(); }
      Status set_up(std::span<const DeviceTensor> tensors, const DeviceKeys& keys, std::byte* workspace,
                    DeviceStream stream) override {
        return inner_->set_up(tensors, keys, workspace, stream);
      }
      Status encode(DeviceStream) override { return {}; }
      Status decode(DeviceStream) override { return {}; }
      std::uint64_t* payload_bytes() const override { return inner_->payload_bytes(); }
      const std::uint32_t* faults() const override { return inner_->faults(); }

     private:
      std::unique_ptr<DeviceBatch> inner_;
    };
  };
  const Plain device;
  SchemeRanks ranks(kTwoByTwo);
  const Option option = Option::parse("encode@gpu all_gather@flat decode@gpu", kTwoByTwo).value();
  const auto leave = [](const std::vector<SchemeTensor>&, int, int) { return Message(); };
  const std::unique_ptr<Codec> codec = make_codec("cast(bf16)").value();
  SchemeRuns runs(ranks, {.option = option, .codec = codec.get(), .tensors = kTensors, .has_feedback = true}, &device);
  ASSERT_TRUE(runs.step(0, integer_message).ok());
  const std::int64_t before = allocation_count();
  ASSERT_TRUE(runs.step(1, leave).ok());
  EXPECT_EQ(allocation_count() - before, 0);
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// K-FAC on a device, emulated: who waits for whom, what comes to the host, ranks that differ. That its numbers are
// those of the reference is tested where those of the CPU are: kfac_test.cc, factor_test.cc.
#include "kfac/kfac_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/float16.h"
#include "kfac/kfac_testing.h"

namespace cortado {
namespace {

DeviceStream stream(std::uintptr_t number) { return reinterpret_cast<DeviceStream>(number); }

KfacOptions options_of(KfacStrategy strategy) {
  KfacOptions options;
  options.strategy = strategy;
  options.timeout_s = 20;
  return options;
}

TEST(KfacDevice, KernelsDoNotDependOnTheOrderOfBlocks) {
  SmallRun run{.world_size = 2, .options = options_of(KfacStrategy::kMemOpt), .values = {}};
  run.on_device = true;
  run.options.pi_correction = true;
  const History forwards = run_job(run, 3);
  run.backwards = true;
  EXPECT_TRUE(run_job(run, 3) == forwards);
}

// Its stream comes after those that have computed what it reads, and who gets the results comes after it.
TEST(KfacDevice, TakesItsOrderFromTheStreamsOfTheCaller) {
  LocalGroup group(1);
  auto owned = std::make_unique<EmulatedQueue>();
  const EmulatedQueue& queue = *owned;
  KfacOptions options = options_of(KfacStrategy::kCommOpt);
  options.device = make_emulated_kfac_device(1, std::move(owned));
  const auto kfac = Kfac::create({{.name = "fc", .inputs = 3, .outputs = 2}}, options, group.communicator(0)).value();
  const std::vector<float> x = normal_values(4 * 3, 1, 0, 0), d = normal_values(4 * 2, 2, 0, 0);
  ASSERT_TRUE(kfac->add_activations(0, {.data = x.data(), .count = 4, .device_stream = stream(8)}).ok());
  EXPECT_EQ(queue.followed(), std::vector{stream(8)});
  ASSERT_TRUE(kfac->add_output_gradients(0, {.data = d.data(), .count = 4, .device_stream = stream(16)}).ok());
  EXPECT_EQ(queue.followed(), (std::vector{stream(8), stream(16)}));
  EXPECT_TRUE(queue.led().empty());
  ASSERT_TRUE(kfac->release_batches(stream(24)).ok());
  EXPECT_EQ(queue.led(), std::vector{stream(24)});
  std::vector<float> gradient = normal_values(6, 3, 0, 0);
  const KfacGradient address{.weight = gradient.data()};
  ASSERT_TRUE(kfac->step({}, {&address, 1}, stream(32)).ok());
  EXPECT_EQ(queue.followed().at(2), stream(32));
  EXPECT_EQ(queue.led(), (std::vector{stream(24), stream(32)}));
}

TEST(KfacDevice, AllocatesBeforeTheFirstStepOnly) {
  LocalGroup group(1);
  auto owned = std::make_unique<EmulatedQueue>();
  const EmulatedQueue& queue = *owned;
  KfacOptions options = options_of(KfacStrategy::kMemOpt);
  options.device = make_emulated_kfac_device(1, std::move(owned));
  const auto kfac = Kfac::create(small_job(), options, group.communicator(0)).value();
  const std::uint64_t allocations = queue.allocations();
  const std::int64_t bytes = options.device->memory().total_bytes();
  const SmallRun run{.world_size = 1, .options = options, .values = {}};
  for (std::int64_t step = 0; step < 2; ++step) EXPECT_TRUE(run_step(*kfac, run, 0, step).ok());
  EXPECT_EQ(queue.allocations(), allocations);
  EXPECT_EQ(options.device->memory().total_bytes(), bytes);
  EXPECT_GE(kfac->memory().total_bytes(), bytes);
}

// Of two Kfac that share one, each would overwrite what the other one has added up.
TEST(KfacDevice, IsOfOneKfac) {
  LocalGroup group(1);
  KfacOptions options = options_of(KfacStrategy::kMemOpt);
  options.device = make_emulated_kfac_device();
  ASSERT_TRUE(Kfac::create(small_job(), options, group.communicator(0)).ok());
  const Status again = Kfac::create(small_job(), options, group.communicator(0)).status();
  EXPECT_EQ(again.code(), StatusCode::kFailedPrecondition) << again.to_string();
}

// What can't be had on one device ends the set-up of all ranks.
TEST(KfacDevice, OneThatFailsIsEverybodysError) {
  KfacOptions shared = options_of(KfacStrategy::kMemOpt);
  shared.device = make_emulated_kfac_device();
  ASSERT_TRUE(shared.device->prepare({}).ok());
  for (const Status& status : run_ranks(3, [&](Communicator& communicator) -> Status {
         KfacOptions options = shared;
         if (communicator.rank() != 1) options.device = make_emulated_kfac_device();
         return Kfac::create(small_job(), options, &communicator).status();
       })) {
    EXPECT_NE(status.to_string().find("of one Kfac only"), std::string::npos) << status.to_string();
  }
}

// Devices of two kinds give other bytes.
TEST(KfacDevice, RanksThatComputeTheSameMustBeOfOneKind) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         KfacOptions options = options_of(KfacStrategy::kCommOpt);
         auto products = std::make_unique<EmulatedProducts>(communicator.rank() == 0 ? "old" : "new");
         options.device = make_emulated_kfac_device(1, std::make_unique<EmulatedQueue>(), std::move(products));
         return Kfac::create(small_job(), options, &communicator).status();
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("on a device: new"), std::string::npos) << status.to_string();
  }
}

class NotedProducts final : public EmulatedProducts {
 public:
  explicit NotedProducts(bool* is_gone) : is_gone_(is_gone) {}
  ~NotedProducts() override { *is_gone_ = true; }

 private:
  bool* is_gone_;
};

// cuBLAS would wait for the device before it lets go.
TEST(KfacDevice, OneThatHangsIsAnErrorAndLeftAsItIs) {
  for (const bool hangs : {false, true}) {
    LocalGroup group(1);
    bool is_gone = false;
    auto owned = std::make_unique<EmulatedQueue>();
    EmulatedQueue& queue = *owned;
    KfacOptions options = options_of(KfacStrategy::kMemOpt);
    options.timeout_s = hangs ? 0.05 : 20;
    options.device = make_emulated_kfac_device(1, std::move(owned), std::make_unique<NotedProducts>(&is_gone));
    auto kfac = Kfac::create(small_job(), options, group.communicator(0)).value();
    options.device.reset();
    const SmallRun run{.world_size = 1, .options = options, .values = {}};
    if (hangs) queue.hang();
    const Status status = run_step(*kfac, run, 0, 0).status();
    EXPECT_EQ(status.code(), hangs ? StatusCode::kTimeout : StatusCode::kOk) << status.to_string();
    kfac.reset();
    EXPECT_EQ(is_gone, !hangs);
  }
}

class NotedInverter final : public KfacInverter {
 public:
  Status reserve(std::span<const InverseJob> jobs) override {
    for (const InverseJob& job : jobs) reserved.emplace_back(job.n, job.values != nullptr);
    return {};
  }
  Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds timeout) override {
    for (const InverseJob& job : jobs) inverted.emplace_back(job.n, job.values != nullptr);
    timeouts.push_back(timeout);
    return times_out ? make_error(StatusCode::kTimeout, "late") : cpu_->invert(jobs, timeout);
  }
  std::int64_t scratch_bytes() const override { return 0; }

  std::vector<std::pair<std::int64_t, bool>> reserved, inverted;
  std::vector<std::chrono::nanoseconds> timeouts;
  bool times_out = false;

 private:
  std::unique_ptr<KfacInverter> cpu_ = make_cpu_inverter(1);
};

// Long before the timeout.
TEST(KfacDevice, AFailedPeerEndsTheWaitForTheDevice) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    auto owned = std::make_unique<EmulatedQueue>();
    EmulatedQueue& queue = *owned;
    KfacOptions options = options_of(KfacStrategy::kDpKfac);
    options.timeout_s = 100;
    options.device = make_emulated_kfac_device(1, std::move(owned));
    if (communicator.rank() == 1) {
      auto failing = std::make_shared<NotedInverter>();
      failing->times_out = true;
      options.inverter = failing;
    }
    CORTADO_ASSIGN_OR_RETURN(auto kfac, Kfac::create(small_job(), options, &communicator));
    if (communicator.rank() == 0) queue.hang();
    const SmallRun run{.world_size = 2, .options = options, .values = {}};
    return run_step(*kfac, run, communicator.rank(), 0).status();
  });
  EXPECT_NE(statuses[0].to_string().find("while waiting for the device"), std::string::npos) << statuses[0].to_string();
  EXPECT_NE(statuses[0].to_string().find("late"), std::string::npos) << statuses[0].to_string();
}

// Before others have taken the device's memory.
TEST(KfacDevice, MemoryForInversesIsTakenAtTheStart) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    LocalGroup group(1);
    const auto inverter = std::make_shared<NotedInverter>();
    KfacOptions options = options_of(KfacStrategy::kMemOpt);
    options.inverse = inverse;
    options.device =
        make_emulated_kfac_device(1, std::make_unique<EmulatedQueue>(), std::make_unique<EmulatedProducts>(), inverter);
    const auto kfac = Kfac::create(small_job(), options, group.communicator(0)).value();
    EXPECT_TRUE(inverter->inverted.empty());
    const SmallRun run{.world_size = 1, .options = options, .values = {}};
    ASSERT_TRUE(run_step(*kfac, run, 0, 0).ok());
    EXPECT_FALSE(inverter->reserved.empty());
    EXPECT_EQ(inverter->reserved, inverter->inverted);
    EXPECT_EQ(inverter->timeouts, std::vector<std::chrono::nanoseconds>{std::chrono::seconds(20)});
  }
}

TEST(KfacDevice, AfterInversesThatAreLateItIsLeftAsItIs) {
  LocalGroup group(1);
  bool is_gone = false;
  const auto inverter = std::make_shared<NotedInverter>();
  inverter->times_out = true;
  KfacOptions options = options_of(KfacStrategy::kMemOpt);
  options.device = make_emulated_kfac_device(1, std::make_unique<EmulatedQueue>(),
                                             std::make_unique<NotedProducts>(&is_gone), inverter);
  auto kfac = Kfac::create(small_job(), options, group.communicator(0)).value();
  options.device.reset();
  const SmallRun run{.world_size = 1, .options = options, .values = {}};
  EXPECT_EQ(run_step(*kfac, run, 0, 0).status().code(), StatusCode::kTimeout);
  kfac.reset();
  EXPECT_FALSE(is_gone);
}

TEST(KfacDevice, RanksMayDifferWhereEveryByteComesFromOneOfThem) {
  for (const KfacStrategy strategy : {KfacStrategy::kMemOpt, KfacStrategy::kDpKfac}) {
    SmallRun run{.world_size = 3, .options = options_of(strategy), .values = {}};
    run.reduces = true;
    const History on_cpu = run_job(run, 4);
    run.on_device = true;
    run.device_ranks = {0, 2};
    const History mixed = run_job(run, 4);
    expect_replicas_are_equal(mixed);
    for (std::size_t step = 0; step < 4; ++step) EXPECT_LT(distance(mixed[0][step], on_cpu[0][step]), 1e-4) << step;
  }
}

TEST(KfacDevice, RanksThatComputeTheSameMustNotDiffer) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         KfacOptions options = options_of(KfacStrategy::kCommOpt);
         if (communicator.rank() == 1) options.device = make_emulated_kfac_device();
         return Kfac::create(small_job(), options, &communicator).status();
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("on a device"), std::string::npos) << status.to_string();
  }
}

// Codecs see what the device has made; replicas get what they decode, to the bit.
TEST(KfacDevice, CompressedExchangesAreThoseOfTheCpu) {
  for (const char* codec : {"quant(bits=8)", "compso(bound=0.004)"}) {
    SmallRun run{.world_size = 2, .options = options_of(KfacStrategy::kMemOpt), .values = {}};
    run.options.gradients.codec = codec;
    run.options.gradients.use_error_feedback = true;
    run.options.factor_compression = "cast(bf16)";
    const History on_cpu = run_job(run, 4);
    run.on_device = true;
    const History there = run_job(run, 4);
    expect_replicas_are_equal(there);
    for (std::size_t step = 0; step < 4; ++step) {
      EXPECT_LT(distance(there[0][step], on_cpu[0][step]), 0.02) << codec << ", step " << step;
    }
  }
}

// A state of the CPU goes on on a device, with its inverses or without.
TEST(KfacDevice, StatesAreThoseOfTheCpu) {
  for (const bool with_inverses : {true, false}) {
    LocalGroup group(1);
    SmallRun run{.world_size = 1, .options = options_of(KfacStrategy::kMemOpt), .values = {}};
    run.inv_update_steps = 3;
    const auto first = Kfac::create(small_job(), run.options, group.communicator(0)).value();
    for (std::int64_t step = 0; step < 2; ++step) ASSERT_TRUE(run_step(*first, run, 0, step).ok());
    KfacOptions options = run.options;
    options.device = make_emulated_kfac_device();
    const auto second = Kfac::create(small_job(), options, group.communicator(0)).value();
    ASSERT_TRUE(run_step(*second, run, 0, 7).ok());  // something else before
    const std::vector<KfacState> states = {first->save_state(with_inverses)};
    ASSERT_TRUE(second->load_state(states).ok());
    const auto third = Kfac::create(small_job(), run.options, group.communicator(0)).value();
    ASSERT_TRUE(third->load_state(states).ok());
    for (std::int64_t step = 2; step < 5; ++step) {
      const Gradients expected = run_step(*third, run, 0, step).value(),
                      found = run_step(*second, run, 0, step).value();
      EXPECT_LT(distance(found, expected), 1e-4) << step;
    }
  }
}

TEST(KfacDevice, AStepThatIsNotFiniteChangesNothing) {
  for (const KfacStrategy strategy : {KfacStrategy::kCommOpt, KfacStrategy::kMemOpt}) {
    for (const Status& status : run_ranks(2, [&](Communicator& communicator) -> Status {
           KfacOptions options = options_of(strategy);
           options.device = make_emulated_kfac_device();
           CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
           Gradients gradients = gradients_of(kfac->layers(), 2, -1, 0);
           for (std::vector<float>& each : gradients) each[1] = std::numeric_limits<float>::infinity();
           const Gradients before = gradients;
           CORTADO_ASSIGN_OR_RETURN(const KfacOutcome outcome,
                                    kfac->step({}, addresses_of(kfac->layers(), &gradients)));
           EXPECT_FALSE(outcome.finite);
           EXPECT_TRUE(gradients == before);
           EXPECT_EQ(kfac->report().non_finite_steps, 1);
           return {};
         })) {
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// fp16 and bf16 are read and written as on the CPU; a layer without a gradient is left alone.
TEST(KfacDevice, GradientsOfAllDtypesAndNone) {
  const std::vector<KfacLayer> layers = {{.name = "fc", .inputs = 5, .outputs = 3, .has_bias = true},
                                         {.name = "unused", .inputs = 4, .outputs = 2}};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<std::vector<float>> found;
    for (const bool on_device : {false, true}) {
      LocalGroup group(1);
      KfacOptions options = options_of(KfacStrategy::kMemOpt);
      if (on_device) options.device = make_emulated_kfac_device();
      const auto kfac = Kfac::create(layers, options, group.communicator(0)).value();
      std::vector<float> wide = normal_values(18, 5, 0, 0);
      std::vector<std::uint16_t> narrow;
      for (const float value : wide) {
        narrow.push_back(dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value));
      }
      KfacGradient gradients[2] = {{.weight = wide.data(), .bias = wide.data() + 15, .dtype = dtype}, {}};
      if (dtype != DType::kFloat32) gradients[0] = {narrow.data(), narrow.data() + 15, dtype};
      ASSERT_TRUE(kfac->step({.kl_clip = 0}, gradients).ok());
      for (std::size_t i = 0; dtype != DType::kFloat32 && i < wide.size(); ++i) {
        wide[i] = dtype == DType::kFloat16 ? fp16_to_float(narrow[i]) : bf16_to_float(narrow[i]);
      }
      found.push_back(wide);
    }
    for (std::size_t i = 0; i < found[0].size(); ++i) {
      EXPECT_NEAR(found[1][i], found[0][i], (dtype == DType::kFloat32 ? 1e-5f : 1e-2f) * std::fabs(found[0][i])) << i;
    }
  }
}

}  // namespace
}  // namespace cortado

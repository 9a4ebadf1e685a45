// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The engine with gradients on an emulated device, whose copies to the host are late: what it delivers, keeps and sends
// are the bits of the engine on the CPU, whatever runs where; of low rank, whose projections are held to a bound, they
// are close, and the same on all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "codec/cast/float_chunks.h"
#include "core/check.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"
#include "core/sanitized.h"
#include "engine/emulated_message.h"
#include "engine/engine_impl.h"
#include "engine/engine_testing.h"

namespace cortado::engine_device_test {
namespace {

Result<std::unique_ptr<Engine>> make_with(std::unique_ptr<DeviceQueue> queue, std::vector<EngineTensor> tensors,
                                          const EngineOptions& options, Communicator* communicator) {
  return EngineImpl::make(
      std::move(tensors), options, communicator, steady_clock(), nullptr,
      {.queue = std::move(queue), .make_message = make_emulated_message, .make_matrices = make_emulated_matrices});
}

Result<std::unique_ptr<Engine>> make_on_device(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                               Communicator* communicator) {
  return make_with(std::make_unique<EmulatedQueue>(), std::move(tensors), options, communicator);
}

Result<std::unique_ptr<Engine>> make_on_some_devices(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                     Communicator* communicator) {
  if (communicator->rank() % 2 == 0) return make_on_device(std::move(tensors), options, communicator);
  return Engine::create(std::move(tensors), options, communicator);
}

Gradients with_bad_values(int rank, std::int64_t step) {
  Gradients gradients = made_up_gradients(small_model(), rank, step);
  const std::size_t matrix = tensor_index(small_model(), "first.weight"),
                    vector = tensor_index(small_model(), "first.bias");
  if (step == 2 && rank == 1) gradients[matrix][17] = std::numeric_limits<float>::quiet_NaN();
  if (step == 4 && rank == 0) gradients[vector][3] = std::numeric_limits<float>::infinity();
  return gradients;
}

void expect_same_residuals(const History& found, const History& expected) {
  for (std::size_t rank = 0; rank < found.states.size(); ++rank) {
    const std::vector<TensorState>&a = found.states[rank].tensors, &b = expected.states[rank].tensors;
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t t = 0; t < a.size(); ++t) {
      EXPECT_EQ(a[t].name, b[t].name);
      EXPECT_EQ(a[t].residual, b[t].residual) << a[t].name << " of rank " << rank;
      EXPECT_EQ(a[t].basis, b[t].basis);
    }
  }
}

// Relative; of numbers that are about 1 at most, absolute (a residual may be nothing but rounding).
double difference(const std::vector<float>& found, const std::vector<float>& expected) {
  const std::vector<double> a(found.begin(), found.end()), b(expected.begin(), expected.end());
  const double squares = squares_of_difference(b, std::vector<double>(b.size()));
  return std::sqrt(squares_of_difference(a, b) / std::max({1.0, static_cast<double>(b.size()), squares}));
}

// Means, residuals and bases, to what projections that are added in another order come to over some steps: a narrow
// wire rounds a value that lies between two of its own to the one or the other.
void expect_close(const History& found, const History& expected, DType wire) {
  const double first_bound = wire == DType::kFloat32 ? 1e-5 : 1e-3;
  const double bound = wire == DType::kFloat32 ? 1e-4 : 1e-2;
  for (std::size_t rank = 0; rank < found.delivered.size(); ++rank) {
    for (std::size_t step = 0; step < found.delivered[rank].size(); ++step) {
      if (!expected.finite[rank][step]) continue;
      for (std::size_t t = 0; t < found.delivered[rank][step].size(); ++t) {
        const std::vector<float>&a = found.delivered[rank][step][t], &b = expected.delivered[rank][step][t];
        EXPECT_LT(difference(a, b), step == 0 ? first_bound : bound)
            << "rank " << rank << ", step " << step << ", tensor " << t;
      }
    }
    const std::vector<TensorState>&a = found.states[rank].tensors, &b = expected.states[rank].tensors;
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t t = 0; t < a.size(); ++t) {
      EXPECT_EQ(a[t].name, b[t].name);
      ASSERT_EQ(a[t].residual.size(), b[t].residual.size());
      ASSERT_EQ(a[t].basis.size(), b[t].basis.size());
      EXPECT_LT(difference(a[t].residual, b[t].residual), bound) << a[t].name;
      EXPECT_LT(difference(a[t].basis, b[t].basis), bound) << a[t].name;
    }
  }
}

// close_by: of low rank, the dtype of its wire; nothing: to the bit.
void expect_same(const History& found, const History& expected, std::optional<DType> close_by = std::nullopt) {
  expect_replicas_agree(found);
  EXPECT_EQ(found.finite, expected.finite);
  EXPECT_EQ(found.logs, expected.logs) << "other collectives";
  for (std::size_t rank = 0; rank < found.delivered.size(); ++rank) {
    ASSERT_EQ(found.delivered[rank].size(), expected.delivered[rank].size());
    for (std::size_t step = 0; step < found.delivered[rank].size(); ++step) {
      if (!expected.finite[rank][step] || close_by.has_value()) continue;
      EXPECT_TRUE(same_bits(found.delivered[rank][step], expected.delivered[rank][step]))
          << "rank " << rank << ", step " << step;
    }
    EXPECT_EQ(found.reports[rank].payload_bytes, expected.reports[rank].payload_bytes);
    const double bound = close_by.value_or(DType::kFloat32) == DType::kFloat32 ? 1e-5 : 1e-3;
    EXPECT_NEAR(found.reports[rank].relative_l2_error, expected.reports[rank].relative_l2_error, bound);
    EXPECT_NEAR(found.reports[rank].residual_l2, expected.reports[rank].residual_l2,
                bound * expected.reports[rank].residual_l2);
    EXPECT_NEAR(static_cast<double>(found.reports[rank].residual_bytes),
                static_cast<double>(expected.reports[rank].residual_bytes), 256)
        << "but for alignment";
    EXPECT_EQ(found.reports[rank].non_finite_steps, expected.reports[rank].non_finite_steps);
    EXPECT_EQ(found.reports[rank].last_non_finite, expected.reports[rank].last_non_finite);
  }
  close_by.has_value() ? expect_close(found, expected, *close_by) : expect_same_residuals(found, expected);
}

bool runs_on_device(const History& run) {
  const std::vector<Fallback>& fallbacks = run.reports[0].fallbacks;
  return std::none_of(fallbacks.begin(), fallbacks.end(), [](const Fallback& fallback) {
    return fallback.reason.find("not on the device") != std::string::npos;
  });
}

struct Case {
  std::string spec;
  bool on_device = true;  // else its gradients are copied to the host
};

void PrintTo(const Case& the_case, std::ostream* out) { *out << the_case.spec; }

class EngineOnDevice : public testing::TestWithParam<Case> {
 protected:
  Training training() const { return {.options = coded(GetParam().spec)}; }
  void compare(const History& found, const History& expected) const {
    const EngineOptions options = training().options;
    const bool is_low_rank =
        options.method == EngineOptions::Method::kAcp || options.method == EngineOptions::Method::kPower;
    expect_same(found, expected, is_low_rank && GetParam().on_device ? std::optional(options.wire) : std::nullopt);
  }
};

TEST_P(EngineOnDevice, HasTheBitsOfTheEngineOnTheCpu) {
  Training training = this->training();
  training.scale = [](std::int64_t step) { return step % 3 == 0 ? 1.0 : 1024.0; };
  const History expected = train(training);
  training.engine = make_on_device;
  const History found = train(training);
  compare(found, expected);
  EXPECT_EQ(runs_on_device(found), GetParam().on_device);
}

TEST_P(EngineOnDevice, MixesWithRanksOnTheCpu) {
  Training training = this->training();
  training.world_size = 4;
  const History expected = train(training);
  training.engine = make_on_some_devices;
  compare(train(training), expected);
}

TEST_P(EngineOnDevice, BeginsWithDenseSteps) {
  Training training = this->training();
  training.options.start_step = 2;
  const History expected = train(training);
  training.engine = make_on_device;
  compare(train(training), expected);
}

TEST_P(EngineOnDevice, UndoesStepsThatAreNotFinite) {
  Training training = this->training();
  training.world_size = 2;
  training.gradients = with_bad_values;
  const History expected = train(training);
  training.engine = make_on_device;
  const History found = train(training);
  compare(found, expected);
  EXPECT_EQ(found.finite[0], (std::vector<bool>{true, true, false, true, false, true}));
  const std::size_t matrix = tensor_index(small_model(), "first.weight");
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(std::any_of(found.delivered[rank][2][matrix].begin(), found.delivered[rank][2][matrix].end(),
                            [](float value) { return !std::isfinite(value); }));
  }
}

TEST_P(EngineOnDevice, ReadsTheLossScaleWhereItLies) {
  Training training = this->training();
  training.world_size = 2;
  training.gradients = with_bad_values;
  training.scale = [](std::int64_t step) { return step % 3 == 0 ? 1.0 : 48.0; };
  const History expected = train(training);
  training.engine = make_on_device;
  training.run_step = [](Engine& engine, Gradients& gradients, const StepContext& context, const LocalGradient& local) {
    const auto scale = std::make_unique<float>(static_cast<float>(context.gradient_scale));
    StepContext own = context;
    own.gradient_scale = 1;
    own.device_gradient_scale = scale.get();
    return run_step(engine, gradients, own, local);
  };
  compare(train(training), expected);
}

TEST_P(EngineOnDevice, ResumesFromACheckpoint) {
  Training training = this->training();
  training.engine = make_on_device;
  training.steps = 6;
  const History whole = train(training);
  training.steps = 3;
  const History first = train(training);
  training.resume_from = &first;
  training.first_step = 3;
  const History second = train(training);
  for (std::size_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(same_bits(second.delivered[0][step], whole.delivered[0][step + 3])) << "step " << step;
  }
  expect_same_residuals(second, whole);
}

TEST_P(EngineOnDevice, WithoutOverlapHasTheSameBits) {
  Training training = this->training();
  training.engine = make_on_device;
  const History expected = train(training);
  training.options.overlap = false;
  expect_same(train(training), expected);
}

// A tensor whose gradient is zero sends nothing, whatever it still owes: here of all ranks, then of one.
TEST_P(EngineOnDevice, HoldsZeroGradients) {
  Training training = this->training();
  training.context.holds_zero_gradients = true;
  const std::size_t matrix = tensor_index(small_model(), "first.weight");
  training.gradients = [&](int rank, std::int64_t step) {
    Gradients gradients = made_up_gradients(small_model(), rank, step);
    if (step == 2 || (step == 3 && rank == 1)) std::fill(gradients[matrix].begin(), gradients[matrix].end(), 0.0f);
    return gradients;
  };
  const History expected = train(training);
  training.engine = make_on_device;
  const History found = train(training);
  compare(found, expected);
  if (GetParam().spec == "sign(scale=none, feedback=residual)") return;  // has no zeros
  EXPECT_TRUE(std::all_of(found.delivered[0][2][matrix].begin(), found.delivered[0][2][matrix].end(),
                          [](float value) { return value == 0; }));
}

std::vector<Case> cases() {
  std::vector<Case> all = {{"sign"},
                           {"quant(bits=4, round=stochastic)"},
                           {"sign(scale=none, feedback=residual)"},  // whose zeros are decoded as 1
                           {"topk(density=0.1, rollback=exact)"},
                           {"topk(density=0.05, select=sampled, bucket_cap_mib=0)"},
                           {"compso"},
                           {"randk(density=0.3, block=7, scale=unbiased, bucket_cap_mib=0)"},
                           {"cast(bf16)", false},
                           {"acp(rank=3, sides=alternate)"},
                           {"acp(rank=2, wire=bf16, warm_start=false)"},
                           {"power(rank=3, wire=fp16, bucket_cap_mib=0)"}};
  if (kSanitized) return all;  // the same paths
  const std::vector<Case> others = {{"sign(scale=two_means, bucket_cap_mib=0)"},
                                    {"fp8(e4m3)"},
                                    {"quant(bits=3, feedback=none)"},
                                    {"sign(rollback=exact)"},
                                    {"randk(density=0.2, rollback=exact)"},
                                    {"topk(density=0.1)"},
                                    {"topk(density=0.3, index=bitmap, values=fp16, feedback=none)"},
                                    {"topk(density=0.1, block=256)", false},
                                    {"compso(bound=0.01, filter=off, feedback=none)"},
                                    {"float_rans"},
                                    {"randk(density=0.2)"},
                                    {"topk(density=0.2) | quant(bits=4)", false},
                                    {"acp(rank=2)"},
                                    {"acp(rank=2, use_error_feedback=false)"},
                                    {"acp(rank=2, rollback=exact)", false},
                                    {"power(rank=2)"},
                                    {"power(rank=2, use_error_feedback=false)"}};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Codecs, EngineOnDevice, testing::ValuesIn(cases()));

TEST(DeviceEngine, SaysWhatItCanNotDo) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         EngineOptions options;
         options.method = EngineOptions::Method::kNone;
         const auto none = make_on_device(small_model(), options, &communicator);
         EXPECT_EQ(none.status().code(), StatusCode::kUnsupported) << none.status().to_string();
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(DeviceEngine, RefusesALossScaleThatCanNotBe) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                             make_on_device(small_model(), coded("sign"), &communicator));
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    const float scale = communicator.rank() == 0 ? 2 : std::numeric_limits<float>::infinity();
    return run_step(*engine, gradients, {.device_gradient_scale = &scale}).status();
  });
  EXPECT_FALSE(statuses[0].ok());
  EXPECT_EQ(statuses[1].code(), StatusCode::kInvalidArgument) << statuses[1].to_string();
  EXPECT_NE(statuses[1].message().find("on the device: gradient_scale must be above 0"), std::string::npos)
      << statuses[1].message();

  const float scale = 2;
  for (const Status& status : run_ranks(2, [&](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                  Engine::create(small_model(), coded("sign"), &communicator));
         const Status refused = engine->begin_step({.device_gradient_scale = &scale});
         EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused.to_string();
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// One rank's device can't be used: none of the others is left waiting in the first step.
TEST(DeviceEngine, EveryRankHearsOfADeviceThatCanNotBeOpened) {
  const std::vector<Status> statuses = run_ranks(3, [](Communicator& communicator) -> Status {
    if (communicator.rank() == 0) return Engine::create(small_model(), coded("sign"), &communicator).status();
    if (communicator.rank() == 1) return make_on_device(small_model(), coded("sign"), &communicator).status();
    return EngineImpl::make(small_model(), coded("sign"), &communicator, steady_clock(), nullptr,
                            {.queue = nullptr, .failure = make_error(StatusCode::kInternal, "no stream")})
        .status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.to_string(), "internal error: rank 2: a device that can't be used: no stream");
  }
}

// Too little memory ends nothing: all ranks hear of it, and may ask for something else.
TEST(DeviceEngine, EveryRankHearsThatADeviceIsFull) {
  for (const Status& status : run_ranks(3, [](Communicator& communicator) -> Status {
         for (const std::string spec : {"sign", "acp(rank=2)", "topk(density=0.1)"}) {
           const std::uint64_t most_bytes = communicator.rank() == 1 ? 1000 : std::uint64_t{1} << 30;
           const Status refused = make_with(std::make_unique<EmulatedQueue>(nullptr, most_bytes), small_model(),
                                            coded(spec), &communicator)
                                      .status();
           EXPECT_EQ(refused.code(), StatusCode::kIoError) << refused.to_string();
           EXPECT_NE(refused.message().find("rank 1: a device that can't be used: "), std::string::npos);
         }
         CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                  make_on_device(small_model(), coded("sign"), &communicator));
         Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
         return run_step(*engine, gradients).status();
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// The mean is rounded once, as on the CPU, and so are ranks' values that are kept; without feedback these stay narrow.
TEST(DeviceEngine, HasTheBitsOfTheCpuForNarrowGradients) {
  std::vector<EngineTensor> tensors = {{.name = "half", .dtype = DType::kFloat16, .rows = 48, .cols = 33},
                                       {.name = "bf16", .dtype = DType::kBFloat16, .rows = 40, .cols = 24}};
  for (const std::string spec : {"randk(density=0.3)", "randk(density=0.3, feedback=none)", "sign",
                                 "quant(bits=4, feedback=none)", "topk(density=0.1, feedback=none)"}) {
    const auto run = [&](const MakeEngine& make) {
      std::vector<std::vector<std::uint16_t>> delivered(3);
      const std::vector<Status> statuses = run_ranks(3, [&](Communicator& communicator) -> Status {
        CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, make(tensors, coded(spec), &communicator));
        for (std::int64_t step = 0; step < 4; ++step) {
          std::vector<std::vector<std::uint16_t>> narrow;
          std::vector<void*> gradients;
          for (std::size_t t = 0; t < tensors.size(); ++t) {
            const std::int64_t elems = tensors[t].rows * tensors[t].cols;
            std::vector<float> values;
            for (std::int64_t i = 0; i < elems; ++i) {
              values.push_back(made_up_value(communicator.rank(), step, t, static_cast<std::size_t>(i)));
            }
            narrow.emplace_back(static_cast<std::size_t>(elems));
            gradients.push_back(narrow.back().data());
            for_chunks(elems, [&](std::int64_t at, std::int64_t count) {
              store_floats(values.data() + at, 1.0f, count, gradients.back(), tensors[t].dtype, at);
            });
          }
          CORTADO_RETURN_IF_ERROR(run_step_at(*engine, gradients).status());
          std::vector<std::uint16_t>& all = delivered[static_cast<std::size_t>(communicator.rank())];
          for (const std::vector<std::uint16_t>& of : narrow) all.insert(all.end(), of.begin(), of.end());
        }
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
      return delivered;
    };
    const auto expected = run([](std::vector<EngineTensor> of, const EngineOptions& options, Communicator* over) {
      return Engine::create(std::move(of), options, over);
    });
    EXPECT_EQ(run(make_on_device), expected) << spec;
  }
}

// Found in review: what overflows on its way back is seen on the host only, and ranks parted over it.
TEST(DeviceEngine, RanksInBothPlacesAgreeOnStepsWhatsoeverOverflows) {
  const std::vector<EngineTensor> tensors = {{.name = "half", .dtype = DType::kFloat16, .rows = 48, .cols = 33}};
  std::vector<std::vector<bool>> finite(3);
  std::vector<std::vector<std::uint16_t>> delivered(3);
  std::vector<std::int64_t> steps(3);
  for (const Status& status : run_ranks(3, [&](Communicator& communicator) -> Status {
         const auto rank = static_cast<std::size_t>(communicator.rank());
         CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                  make_on_some_devices(tensors, coded("randk(density=0.3)"), &communicator));
         for (std::int64_t step = 0; step < 6; ++step) {
           std::vector<std::uint16_t> gradient(48 * 33, 0x78e2);  // 40000: what waits for two steps is too large
           CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_step_at(*engine, {gradient.data()}));
           finite[rank].push_back(outcome.finite);
           delivered[rank].insert(delivered[rank].end(), gradient.begin(), gradient.end());
         }
         CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
         steps[rank] = state.step;
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  constexpr std::uint16_t kInfinity = 0x7c00;
  EXPECT_NE(std::find(delivered[0].begin(), delivered[0].end(), kInfinity), delivered[0].end());
  for (const std::size_t rank : {1, 2}) {
    EXPECT_EQ(finite[rank], finite[0]);
    EXPECT_EQ(steps[rank], steps[0]);
    EXPECT_EQ(delivered[rank], delivered[0]);
  }
}

// No fp16 holds 7e4: it comes as Inf, and what is kept of it must be the same wherever it is kept.
TEST(DeviceEngine, OwesNothingOfWhatCameAsInf) {
  for (const std::string spec : {"topk(density=0.1, values=fp16)", "topk(density=0.1, values=fp16, rollback=exact)"}) {
    SCOPED_TRACE(spec);
    const std::size_t matrix = tensor_index(small_model(), "first.weight");
    Training training{.options = coded(spec), .gradients = [&](int rank, std::int64_t step) {
                        Gradients gradients = made_up_gradients(small_model(), rank, step);
                        if (step == 2) gradients[matrix][17 + static_cast<std::size_t>(rank)] = 7e4f;
                        return gradients;
                      }};
    training.engine = make_on_some_devices;
    const History found = train(training);
    training.engine = [](std::vector<EngineTensor> tensors, const EngineOptions& options, Communicator* communicator) {
      return communicator->rank() % 2 == 0 ? Engine::create(std::move(tensors), options, communicator)
                                           : make_on_device(std::move(tensors), options, communicator);
    };
    expect_same_residuals(found, train(training));
    EXPECT_EQ(found.finite[0], std::vector<bool>(6, true));
    EXPECT_EQ(found.delivered[0][2][matrix][17], std::numeric_limits<float>::infinity());
    for (const EngineState& state : found.states) {
      for (const TensorState& tensor : state.tensors) {
        EXPECT_TRUE(std::all_of(tensor.residual.begin(), tensor.residual.end(),
                                [](float owed) { return std::fabs(owed) < 100; }))
            << tensor.name << " of rank " << state.rank;
      }
    }
    for (const EngineReport& report : found.reports) EXPECT_TRUE(std::isfinite(report.residual_l2));
  }
}

// Groups of matrices are those of the messages that the engine was made with.
TEST(DeviceEngine, OfPowerRefusesAStateWithOtherMessages) {
  const EngineOptions options = EngineOptions::parse("power(rank=2, start_step=0)").value();
  for (const Status& status : run_ranks(2, [&](Communicator& communicator) -> Status {
         CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                  make_on_device(small_model(), options, &communicator));
         CORTADO_ASSIGN_OR_RETURN(EngineState state, engine->save_state());
         EXPECT_TRUE(engine->load_state(state).ok());
         std::vector<std::vector<std::string>>& messages = state.layout[0];
         const std::vector<std::string> last = messages.back();
         if (messages.size() > 1) {
           messages.pop_back();
           messages.back().insert(messages.back().end(), last.begin(), last.end());
         } else {
           messages.back().pop_back();
           messages.push_back({last.back()});
         }
         const Status refused = engine->load_state(state).status();
         EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
         EXPECT_NE(refused.message().find("messages of other tensors"), std::string::npos) << refused.message();
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// What the gradients come from is waited for by each submission, and what reads them before they are written; it waits
// for the end of the step.
TEST(DeviceEngine, IsOrderedBehindAndBeforeTheStreamThatComputes) {
  for (const Status& status : run_ranks(2, [](Communicator& communicator) -> Status {
         auto queue = std::make_unique<EmulatedQueue>();
         const EmulatedQueue& seen = *queue;
         CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                  EngineImpl::make(small_model(), coded("sign"), &communicator, steady_clock(), nullptr,
                                                   {.queue = std::move(queue), .make_message = make_emulated_message}));
         std::vector<DeviceStream> followed, led;
         const float scale = 2;
         for (std::int64_t step = 0; step < 4; ++step) {
           auto* const compute = reinterpret_cast<DeviceStream>(step + 1);  // another one each time
           Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
           const bool has_scale = step % 2 == 1;  // which is copied
           CORTADO_RETURN_IF_ERROR(
               engine->begin_step({.device_stream = compute, .device_gradient_scale = has_scale ? &scale : nullptr}));
           if (has_scale) followed.push_back(compute);
           EXPECT_EQ(seen.followed(), followed);
           for (std::size_t t = 0; t < gradients.size(); ++t) {
             const Gradient gradient{static_cast<std::uint32_t>(t), gradients[t].data()};
             CORTADO_RETURN_IF_ERROR(engine->submit({&gradient, 1}));
             followed.push_back(compute);
             EXPECT_EQ(seen.followed(), followed);
           }
           EXPECT_EQ(seen.led(), led);
           CORTADO_RETURN_IF_ERROR(engine->finish_step({}).status());
           followed.push_back(compute);
           EXPECT_EQ(seen.followed(), followed);
           led.push_back(compute);
           EXPECT_EQ(seen.led(), led);
         }
         return {};
       })) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(DeviceEngine, DoesNotWaitForEverForADevice) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    EngineOptions options = coded("sign");
    options.timeout_s = communicator.rank() == 0 ? 2 : 20;
    std::unique_ptr<DeviceQueue> queue = std::make_unique<StuckQueue>();
    if (communicator.rank() == 1) queue = std::make_unique<EmulatedQueue>();
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                             make_with(std::move(queue), small_model(), options, &communicator));
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    return run_step(*engine, gradients).status();
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kTimeout) << statuses[0].to_string();
  EXPECT_NE(statuses[0].message().find("the device has not computed"), std::string::npos) << statuses[0].message();
  EXPECT_FALSE(statuses[1].ok());
}

TEST(DeviceEngine, DoesNotWaitForEverForResiduals) {
  for (const std::string spec : {"sign", "acp(rank=2)"}) {
    for (const Status& status : run_ranks(2, [&](Communicator& communicator) -> Status {
           EngineOptions options = coded(spec);
           options.timeout_s = 1;
           CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                                    make_with(std::make_unique<StuckQueue>(), small_model(), options, &communicator));
           const Status saved = engine->save_state().status();
           EXPECT_EQ(saved.code(), StatusCode::kTimeout) << saved.to_string();
           return {};
         })) {
      EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// The device may itself wait for the peer that is gone.
TEST(DeviceEngine, DoesNotWaitForADeviceWhenAPeerHasFailed) {
  const std::int64_t start_ns = steady_clock()->now_ns();
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    std::unique_ptr<DeviceQueue> queue = std::make_unique<StuckQueue>();
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                             make_with(std::move(queue), small_model(), coded("sign"), &communicator));
    if (communicator.rank() == 1) return make_error(StatusCode::kInternal, "out of coffee");
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    return run_step(*engine, gradients).status();
  });
  EXPECT_EQ(statuses[0].code(), StatusCode::kPeerFailed) << statuses[0].to_string();
  EXPECT_NE(statuses[0].message().find("waiting for the device"), std::string::npos) << statuses[0].message();
  EXPECT_NE(statuses[0].message().find("out of coffee"), std::string::npos) << statuses[0].message();
  EXPECT_LT(steady_clock()->now_ns() - start_ns, std::int64_t{10'000'000'000}) << "the timeout is 20 s";
}

}  // namespace
}  // namespace cortado::engine_device_test

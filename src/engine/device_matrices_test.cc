// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Matrices on an emulated device, whose copies to the host are late, beside LowRankTensor on the CPU: factors within
// the bound of the projections, means of the same sums to the bit, through steps that are finite, held and not finite.
#include "engine/device_matrices.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/device_tensors.h"
#include "codec/lowrank/lowrank_reference.h"
#include "core/device_emulation.h"
#include "core/emulated_queue.h"
#include "engine/emulated_message.h"

namespace cortado {
namespace {

using reference::Floats;
using Bytes = std::vector<std::byte>;

constexpr int kSteps = 6, kHeldStep = 2, kBadStep = 4, kLargeStep = 5, kWorldSize = 2;
constexpr std::size_t kHeldSlot = 1, kBadSlot = 3;
constexpr double kBound = 1e-5;  // of one pass; of what passes over passes keep, some times as much

struct Shape {
  std::int64_t rows, cols;
  int rank;
};
// Less than a tile, whole tiles, and more tiles than a block has either way.
constexpr Shape kShapes[] = {{1, 1, 1}, {16, 256, 4}, {17, 257, 3}, {100, 2100, 4}, {300, 40, 9}, {70, 70, 1}};
constexpr std::size_t kSlots = std::size(kShapes);

struct Case {
  const char* spec;
  DType dtype = DType::kFloat32;
};

void PrintTo(const Case& the_case, std::ostream* out) { *out << the_case.spec << " " << dtype_name(the_case.dtype); }

double distance(const Floats& a, const Floats& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1));
}

class EmulatedMatrices : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    options_ = EngineOptions::parse(GetParam().spec).value();
    for (std::size_t s = 0; s < kSlots; ++s) {
      for (auto* const tensors : {&on_cpu_, &on_device_}) tensors->push_back(make_tensor(s));
      residuals_.emplace_back(elems(s));
      if (has_feedback()) on_cpu_[s]->set_residual(residuals_[s].data(), nullptr);
      if (has_feedback()) on_device_[s]->keep_residual_elsewhere();
    }
    make_matrices();
  }

  std::unique_ptr<LowRankTensor> make_tensor(std::size_t s) const {
    return LowRankTensor::make(options_, {.rows = kShapes[s].rows,
                                          .cols = kShapes[s].cols,
                                          .rank = kShapes[s].rank,
                                          .dtype = GetParam().dtype,
                                          .wire = options_.wire,
                                          .world_size = kWorldSize,
                                          .key = {.seed = 3, .step = 0, .tensor = s}});
  }

  void make_matrices() {
    DeviceMatrices::Setup setup{.tensors = {}, .has_feedback = has_feedback(), .queue = &queue_};
    for (const auto& tensor : on_device_) setup.tensors.push_back(tensor.get());
    matrices_ = make_emulated_matrices(setup).value();
    ASSERT_TRUE(matrices_->set_up(queue_.allocate_on_device(matrices_->scratch_bytes()).value()).ok());
    allocations_ = queue_.allocations();
  }

  bool has_feedback() const { return options_.use_error_feedback; }
  bool is_power() const { return options_.method == EngineOptions::Method::kPower; }
  static std::size_t elems(std::size_t s) { return static_cast<std::size_t>(kShapes[s].rows * kShapes[s].cols); }
  static double scale_of(int step) { return step % 2 == 0 ? 1.0 : 512.0; }

  SlotKind kind_of(std::size_t s, int step) const {
    if (is_power()) return SlotKind::kRowFactor;
    if (options_.sides == EngineOptions::Sides::kBoth) return SlotKind::kBothFactors;
    return (s + static_cast<std::size_t>(step)) % 2 == 0 ? SlotKind::kRowFactor : SlotKind::kColFactor;
  }
  SlotKind last_kind_of(std::size_t s, int step) const { return is_power() ? SlotKind::kColFactor : kind_of(s, step); }
  std::size_t slot_bytes(std::size_t s, SlotKind kind) const {
    const LayoutTensor tensor{kShapes[s].rows, kShapes[s].cols, kShapes[s].rank};
    return static_cast<std::size_t>(tensor.slot_elems(kind)) * dtype_bytes(options_.wire);
  }

  Bytes gradient_of(std::size_t s, int step) const {
    Floats values =
        reference::random_floats(static_cast<std::int64_t>(elems(s)), 100 * s + static_cast<unsigned>(step));
    for (float& value : values) value *= static_cast<float>(scale_of(step));
    if (step == kHeldStep && s == kHeldSlot) std::fill(values.begin(), values.end(), 0.0f);
    const bool is_wide = options_.wire == DType::kFloat32 && GetParam().dtype != DType::kFloat16;
    if (step == kLargeStep && is_wide) values.back() = 1e25f;  // its square is no float
    reference::Gradient gradient(values, GetParam().dtype);
    if (step == kBadStep && s == kBadSlot) gradient.set(1234, std::numeric_limits<float>::infinity());
    return gradient.bytes;
  }

  Floats widened(const Bytes& wire) const {
    Floats values(wire.size() / dtype_bytes(options_.wire));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = load_value(wire.data(), options_.wire, static_cast<std::int64_t>(i));
    }
    return values;
  }

  void wait_until_encoded() {
    Result<bool> is_there = matrices_->encoded();
    ASSERT_TRUE(is_there.ok());
    EXPECT_FALSE(is_there.value()) << "the copies of the emulated queue are late";
    while (is_there.ok() && !is_there.value()) is_there = matrices_->encoded();
    ASSERT_TRUE(is_there.ok()) << is_there.status().to_string();
  }

  void compare_slots(std::size_t s, const Bytes& found, const Bytes& expected, int step) {
    const bool is_bad = step == kBadStep && s == kBadSlot;
    const Floats a = widened(found), b = widened(expected);
    if (is_bad) {
      EXPECT_TRUE(std::isnan(a[0]));
      return;
    }
    // A narrow wire may round a value that is on the border to either side.
    const double bound = options_.wire == DType::kFloat32 ? 4 * kBound : 2e-3;
    EXPECT_LE(distance(a, b), bound) << "slot " << s << ", step " << step;
  }

  // Both get the factors of the CPU for a sum, so that what follows can be compared to the bit.
  void run_step(int step) {
    on_host_.clear();
    gradients_.clear();
    std::vector<void*> pointers;
    for (std::size_t s = 0; s < kSlots; ++s) {
      matrices_->set_kind(static_cast<int>(s), kind_of(s, step));
      on_host_.push_back(gradient_of(s, step));
      gradients_.push_back(gradient_of(s, step));
    }
    for (Bytes& gradient : gradients_) pointers.push_back(gradient.data());
    ASSERT_TRUE(matrices_->encode(pointers, {scale_of(step)}, step).ok());
    ASSERT_NO_FATAL_FAILURE(wait_until_encoded());
    std::vector<Bytes> sums;
    for (std::size_t s = 0; s < kSlots; ++s) {
      Bytes found(slot_bytes(s, kind_of(s, step))), expected(found.size());
      const bool is_held = step == kHeldStep && s == kHeldSlot, is_bad = step == kBadStep && s == kBadSlot;
      EXPECT_EQ(matrices_->write(static_cast<int>(s), true, found.data()), !is_bad);
      if (is_held) {
        on_cpu_[s]->hold(kind_of(s, step), expected.data());
      } else {
        EXPECT_EQ(on_cpu_[s]->encode(kind_of(s, step), on_host_[s].data(), scale_of(step), expected.data()), !is_bad);
      }
      EXPECT_EQ(on_device_[s]->is_held(), is_held);
      compare_slots(s, found, expected, step);
      sums.push_back(expected);
    }
    if (is_power()) {
      ASSERT_NO_FATAL_FAILURE(run_second_round(step, &sums));
    }
    finish(step, sums);
  }

  void run_second_round(int step, std::vector<Bytes>* sums) {
    for (std::size_t s = 0; s < kSlots; ++s) {
      for (auto* const tensors : {&on_cpu_, &on_device_}) {
        (*tensors)[s]->receive_first_round((*sums)[s].data(), step);
      }
    }
    ASSERT_TRUE(matrices_->encode_second_round().ok());
    ASSERT_NO_FATAL_FAILURE(wait_until_encoded());
    for (std::size_t s = 0; s < kSlots; ++s) {
      Bytes found(slot_bytes(s, SlotKind::kColFactor)), expected(found.size());
      matrices_->write(static_cast<int>(s), true, found.data());
      on_cpu_[s]->encode_second_round(expected.data());
      if (step != kBadStep || s != kBadSlot) compare_slots(s, found, expected, step);
      (*sums)[s] = expected;
    }
  }

  void finish(int step, const std::vector<Bytes>& sums) {
    const bool is_finite = step != kBadStep;
    for (std::size_t s = 0; s < kSlots; ++s) {
      const SlotKind kind = last_kind_of(s, step);
      matrices_->take(static_cast<int>(s), sums[s].data());
      const Bytes local = on_host_[s];
      on_cpu_[s]->decode(kind, sums[s].data(), scale_of(step), on_host_[s].data());
      for (auto* const tensors : {&on_cpu_, &on_device_}) (*tensors)[s]->receive(kind, sums[s].data(), step);
      if (is_finite) {
        for (auto* const tensors : {&on_cpu_, &on_device_}) (*tensors)[s]->commit(kind);
      } else {
        on_cpu_[s]->rollback(local.data());
      }
      const double squares = on_cpu_[s]->sum_squares();
      if (is_finite) {
        EXPECT_NEAR(on_device_[s]->sum_squares(), squares, kBound * squares) << s;
        EXPECT_NEAR(on_device_[s]->error_squares(), on_cpu_[s]->error_squares(), kBound * squares) << s;
      }
    }
    bool finite[kSlots];
    std::fill(std::begin(finite), std::end(finite), true);
    ASSERT_TRUE(matrices_->decode(is_finite, finite).ok());
    for (std::size_t s = 0; s < kSlots; ++s) {
      SCOPED_TRACE("slot " + std::to_string(s) + ", step " + std::to_string(step));
      if (is_finite || s != kBadSlot) {
        EXPECT_EQ(gradients_[s], on_host_[s]);
      } else {
        EXPECT_TRUE(std::isnan(load_value(gradients_[s].data(), GetParam().dtype, 0)));
      }
    }
  }

  void compare_residuals() {
    for (std::size_t s = 0; s < kSlots && has_feedback(); ++s) {
      Floats residual(elems(s));
      ASSERT_TRUE(matrices_->read_residual(static_cast<int>(s), residual).ok());
      on_cpu_[s]->materialise_residual();
      EXPECT_LE(distance(residual, residuals_[s]), 10 * kBound) << s;
    }
  }

  EngineOptions options_;
  EmulatedQueue queue_;
  std::vector<std::unique_ptr<LowRankTensor>> on_cpu_, on_device_;
  std::vector<Floats> residuals_;  // on the CPU
  std::unique_ptr<DeviceMatrices> matrices_;
  std::vector<Bytes> on_host_, gradients_;  // on the CPU, on the device
  std::uint64_t allocations_ = 0;
};

TEST_P(EmulatedMatrices, AreThoseOfTheEngineOnTheCpu) {
  for (int step = 0; step < kSteps && !HasFatalFailure(); ++step) {
    EmulatedDevice::order() = step % 2 == 0 ? EmulatedOrder::kForwards : EmulatedOrder::kBackwards;
    run_step(step);
    if (step == 3) compare_residuals();  // also of pairs that were taken from them between two steps
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
  compare_residuals();
  EXPECT_EQ(queue_.allocations(), allocations_) << "memory made in a step";
}

// Nor does the order in which threads and blocks are emulated change a bit.
TEST_P(EmulatedMatrices, GoOnFromResidualsThatWereWritten) {
  if (!has_feedback()) GTEST_SKIP() << "nothing is kept";
  run_step(0);
  run_step(1);
  std::vector<Floats> residuals;
  for (std::size_t s = 0; s < kSlots; ++s) {
    ASSERT_TRUE(matrices_->read_residual(static_cast<int>(s), residuals.emplace_back(elems(s))).ok());
  }
  run_step(2);
  const std::vector<Bytes> expected = gradients_;
  std::vector<Floats> after;
  for (std::size_t s = 0; s < kSlots; ++s) {
    ASSERT_TRUE(matrices_->read_residual(static_cast<int>(s), after.emplace_back(elems(s))).ok());
  }
  // Another one, with the bases and the residuals of two steps.
  on_device_.clear();
  on_cpu_.clear();
  residuals_.clear();
  SetUp();
  run_step(0);
  run_step(1);
  for (std::size_t s = 0; s < kSlots; ++s) {
    ASSERT_TRUE(matrices_->write_residual(static_cast<int>(s), residuals[s]).ok());
  }
  EmulatedDevice::order() = EmulatedOrder::kBackwards;
  run_step(2);
  EmulatedDevice::order() = EmulatedOrder::kForwards;
  for (std::size_t s = 0; s < kSlots; ++s) {
    Floats residual(elems(s));
    ASSERT_TRUE(matrices_->read_residual(static_cast<int>(s), residual).ok());
    EXPECT_TRUE(reference::same_bytes(residual, after[s])) << s;
    EXPECT_EQ(gradients_[s], expected[s]);
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, EmulatedMatrices,
                         testing::Values(Case{"acp"}, Case{"acp", DType::kBFloat16}, Case{"acp(wire=bf16)"},
                                         Case{"acp(sides=alternate)", DType::kFloat16},
                                         Case{"acp(use_error_feedback=false)"}, Case{"power"},
                                         Case{"power(wire=fp16)", DType::kBFloat16},
                                         Case{"power(use_error_feedback=false)"}));

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The kernels of error feedback, run on the CPU: the bits of the passes on the CPU, over tensors of all sizes and
// dtypes, in both orders of threads.
#include "feedback/feedback_device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "codec/cast/float_chunks.h"
#include "codec/device_layout.h"
#include "core/device_emulation.h"
#include "core/finite.h"
#include "core/philox.h"

namespace cortado {
namespace {

constexpr int kWorldSize = 3;
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
// Empty, one value, and around the borders of warps, blocks and tiles.
const std::vector<std::int64_t> kElems = {0, 1, 31, 257, 4096, 4097, 20000};

struct Case {
  DType dtype = DType::kFloat32, encoded = DType::kFloat32;
  bool has_feedback = true, has_velocity = false, has_bad_values = false, has_large_values = false;
};

std::vector<float> normal(std::uint64_t seed, std::size_t tensor, std::int64_t elems) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, tensor, 0, values.data(), elems);
  return values;
}

using Bytes = std::vector<std::byte>;

Bytes narrowed(const std::vector<float>& values, DType dtype) {
  Bytes bytes(values.size() * dtype_bytes(dtype));
  for_chunks(static_cast<std::int64_t>(values.size()), [&](std::int64_t at, std::int64_t count) {
    store_floats(values.data() + at, 1.0f, count, bytes.data(), dtype, at);
  });
  return bytes;
}

std::vector<float> widened(const Bytes& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_value(bytes.data(), dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

// One message's tensors, twice: what the passes on the CPU make of them, and what the kernels do.
class FeedbackOnDevice : public testing::TestWithParam<Case> {
 protected:
  struct Tensor {
    Bytes gradient, values;
    std::vector<float> velocity, sum;
    DifferenceSquares squares;
    bool finite = true;
  };

  void SetUp() override {
    for (std::size_t i = 0; i < kElems.size(); ++i) {
      std::vector<float> gradient = normal(1, i, kElems[i]);
      if (GetParam().has_bad_values && i % 2 == 1) {
        const float bad[] = {kNan, kInf, -kInf, 3e38f};
        for (std::size_t b = 0; b < std::min<std::size_t>(gradient.size(), 4); ++b) {
          gradient[b * 37 % gradient.size()] = bad[b];
        }
      }
      if (GetParam().has_large_values) {
        for (std::size_t at = 0; at < gradient.size(); at += 5) gradient[at] *= at % 2 == 0 ? 1e20f : 1e30f;
      }
      Tensor tensor;
      tensor.gradient = narrowed(gradient, GetParam().dtype);
      tensor.values = narrowed(normal(2, i, kElems[i]), GetParam().encoded);
      if (GetParam().has_velocity) tensor.velocity = normal(3, i, kElems[i]);
      tensor.sum.resize(gradient.size());
      for (int rank = 0; rank < kWorldSize; ++rank) {
        std::vector<float> sent = normal(static_cast<std::uint64_t>(4 + rank), i, kElems[i]);
        for (std::size_t at = 0; at < sent.size(); at += 3) sent[at] = 0;  // of a sparse one
        sent_[rank].push_back(narrowed(sent, GetParam().encoded));
      }
      expected_.push_back(tensor);
      found_.push_back(std::move(tensor));
    }
    set_up_device();
  }

  void set_up_device() {
    std::vector<DeviceTensor> shapes;
    for (const std::int64_t elems : kElems) shapes.push_back({.rows = 1, .cols = elems});
    codec_ = make_codec("none").value();
    DeviceLayout layout(*codec_, shapes);
    slots_ = FeedbackSlots::make(layout);
    memory_.reset(static_cast<std::byte*>(::operator new(layout.workspace_bytes(), kAlign)));
    std::memset(memory_.get(), 0xa5, layout.workspace_bytes());
    workspace_ = layout.workspace(memory_.get(), nullptr);
    device_.upload(memory_.get(), layout.tables().data(), layout.tables().size());
    launches_ = {slots_.table(workspace_, GetParam().has_feedback)};
  }

  void point_to(int rank) {
    std::vector<FeedbackTensor> tensors;
    for (std::size_t i = 0; i < kElems.size(); ++i) {
      Tensor& tensor = found_[i];
      tensors.push_back({.gradient = tensor.gradient.data(),
                         .values = tensor.values.data(),
                         .velocity = GetParam().has_velocity ? tensor.velocity.data() : nullptr,
                         .decoded = sent_[rank][i].data(),
                         .sum = tensor.sum.data(),
                         .dtype = GetParam().dtype,
                         .encoded = GetParam().encoded});
    }
    device_.upload(workspace_.at(slots_.tensors), tensors.data(), tensors.size() * sizeof(FeedbackTensor));
  }

  FeedbackPass pass_of(const Tensor& tensor) const {
    return {.elems = static_cast<std::int64_t>(tensor.sum.size()),
            .gradient = tensor.gradient.data(),
            .dtype = GetParam().dtype,
            .gradient_scale = 0.25f,
            .momentum = 0.75f};
  }
  static FeedbackMemory memory_of(Tensor& tensor) {
    return {reinterpret_cast<float*>(tensor.values.data()), tensor.velocity.empty() ? nullptr : tensor.velocity.data()};
  }

  void add_on_cpu() {
    for (Tensor& tensor : expected_) {
      const auto elems = static_cast<std::int64_t>(tensor.sum.size());
      if (GetParam().has_feedback) {
        tensor.finite = add_gradient(pass_of(tensor), memory_of(tensor), memory_of(tensor));
        continue;
      }
      tensor.finite = all_finite(tensor.gradient.data(), elems, GetParam().dtype);
      if (GetParam().dtype == GetParam().encoded) {
        tensor.values = tensor.gradient;
      } else {
        tensor.values = narrowed(widened(tensor.gradient, GetParam().dtype), DType::kFloat32);
      }
    }
  }

  void add_on_device() {
    point_to(0);
    launches_.add_gradients(device_, FeedbackStep::of(pass_of(found_.back())));
    for (std::size_t i = 0; i < found_.size(); ++i) {
      const std::uint32_t flags = workspace_.at(slots_.flags)[i];
      found_[i].finite = (flags & FeedbackTable::kNotFinite) == 0;
      EXPECT_EQ((flags & FeedbackTable::kHasBits) != 0, !found_[i].sum.empty()) << i;
    }
  }

  // The mean of what was sent, in rank order; rank 1 is the own one.
  void take_on_cpu(float mean_scale) {
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      Tensor& tensor = expected_[i];
      const auto elems = static_cast<std::int64_t>(tensor.sum.size());
      for (int rank = 0; rank < kWorldSize; ++rank) {
        const std::vector<float> sent = widened(sent_[rank][i], GetParam().encoded);
        if (rank == 1 && GetParam().has_feedback) {
          tensor.squares = subtract_sent(sent.data(), elems, memory_of(tensor));
        } else if (rank == 1) {
          tensor.squares =
              compare_sent(tensor.values.data(), GetParam().encoded, sent_[rank][i].data(), GetParam().encoded, elems);
        }
        for (std::size_t at = 0; at < sent.size(); ++at) {
          tensor.sum[at] = rank == 0 ? sent[at] : tensor.sum[at] + sent[at];
        }
      }
      store_floats(tensor.sum.data(), mean_scale, elems, tensor.gradient.data(), GetParam().dtype, 0);
    }
  }

  void take_on_device(float mean_scale) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      point_to(rank);
      launches_.take_decoded(device_, rank, kWorldSize, rank == 1, mean_scale, /*holds_zeros=*/true);
    }
    launches_.sum_squares(device_);
    for (std::size_t i = 0; i < found_.size(); ++i) found_[i].squares = workspace_.at(slots_.squares)[i];
  }

  void expect_same(const char* when) {
    for (std::size_t i = 0; i < kElems.size(); ++i) {
      EXPECT_EQ(expected_[i].finite, found_[i].finite) << when << ", tensor " << i;
      EXPECT_EQ(expected_[i].gradient, found_[i].gradient) << when << ", gradient of tensor " << i;
      EXPECT_EQ(expected_[i].values, found_[i].values) << when << ", values of tensor " << i;
      EXPECT_EQ(narrowed(expected_[i].velocity, DType::kFloat32), narrowed(found_[i].velocity, DType::kFloat32))
          << when << ", velocity of tensor " << i;
      expect_near(expected_[i].squares.of_values, found_[i].squares.of_values);
      expect_near(expected_[i].squares.of_differences, found_[i].squares.of_differences);
    }
  }
  static void expect_near(double expected, double found) {
    EXPECT_EQ(std::isfinite(expected), std::isfinite(found));
    if (!std::isfinite(expected)) return;
    EXPECT_NEAR(expected, found, 1e-5 * expected);
  }

  static constexpr std::align_val_t kAlign{kWorkspaceAlignBytes};
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };

  std::vector<Tensor> expected_, found_;
  std::vector<Bytes> sent_[kWorldSize];
  std::unique_ptr<Codec> codec_;
  FeedbackSlots slots_;
  std::unique_ptr<std::byte, Delete> memory_;
  DeviceWorkspace workspace_ = {};
  FeedbackLaunches launches_ = {};
  EmulatedDevice device_{nullptr};
};

TEST_P(FeedbackOnDevice, HasTheBitsOfThePassesOnTheCpu) {
  const std::vector<Tensor> before = found_;
  for (const EmulatedOrder order : {EmulatedOrder::kForwards, EmulatedOrder::kBackwards}) {
    EmulatedDevice::order() = order;
    expected_ = found_ = before;
    add_on_cpu();
    add_on_device();
    expect_same("added");
    if (GetParam().has_feedback) {
      std::vector<Tensor> kept = found_;
      for (Tensor& tensor : expected_) take_back(pass_of(tensor), memory_of(tensor), memory_of(tensor));
      launches_.take_back(device_, FeedbackStep::of(pass_of(found_.back())));
      expect_same("taken back");
      expected_ = before;
      found_ = std::move(kept);
      add_on_cpu();
    }
    take_on_cpu(0.3f);
    take_on_device(0.3f);
    expect_same("taken");
  }
  EmulatedDevice::order() = EmulatedOrder::kForwards;
}

// A step that is not finite changes no values.
TEST_P(FeedbackOnDevice, TakesOthersWithoutItsOwn) {
  const std::vector<Tensor> before = found_;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    point_to(rank);
    launches_.take_decoded(device_, rank, kWorldSize, /*is_own=*/false, 1.0f, /*holds_zeros=*/true);
  }
  for (std::size_t i = 0; i < kElems.size(); ++i) EXPECT_EQ(found_[i].values, before[i].values);
  expected_ = before;
  take_on_cpu(1.0f);
  for (std::size_t i = 0; i < kElems.size(); ++i) EXPECT_EQ(found_[i].gradient, expected_[i].gradient);
}

constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;

INSTANTIATE_TEST_SUITE_P(
    Cases, FeedbackOnDevice,
    testing::Values(Case{}, Case{.has_bad_values = true}, Case{.has_large_values = true},
                    Case{.has_feedback = false, .has_large_values = true}, Case{.dtype = kHalf},
                    Case{.dtype = kBrain, .has_bad_values = true}, Case{.has_velocity = true},
                    Case{.dtype = kHalf, .has_velocity = true, .has_bad_values = true}, Case{.has_feedback = false},
                    Case{.has_feedback = false, .has_bad_values = true},
                    Case{.dtype = kBrain, .has_feedback = false, .has_bad_values = true},
                    Case{.dtype = kBrain, .encoded = kBrain, .has_feedback = false},
                    Case{.dtype = kHalf, .encoded = kHalf, .has_feedback = false, .has_bad_values = true}));

}  // namespace
}  // namespace cortado

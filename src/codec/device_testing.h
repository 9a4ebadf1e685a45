// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the tests of device variants share, on an EmulatedDevice and on a CUDA one: batches of tensors whose payloads
// and values are compared with those of the codec.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "codec/conformance_cases.h"
#include "codec/device_batch.h"
#include "codec/device_tensors.h"

namespace cortado {

// Memory for the device under test: where it is the host's, both are one.
class TestMemory {
 public:
  virtual ~TestMemory() = default;
  virtual std::byte* allocate(std::uint64_t bytes) = 0;  // lives as long as this; aligned to 256 bytes
  virtual void to_device(std::byte* to, std::span<const std::byte> from) = 0;
  virtual void from_device(std::span<std::byte> to, const std::byte* from) = 0;
  virtual Result<std::unique_ptr<DeviceBatch>> make(std::string_view spec, std::span<const DeviceTensor> tensors) = 0;
  virtual bool has_nan_of_cpu() const { return true; }  // false: a product with NaN is a NaN of other bits there
};

// About N(0, 1); with Inf, NaN and denormals among them; the second half 100 times smaller, as layers of one message
// are, and a third of its groups of 256 values 0; or multiples of 1/4, of which many are equal. Codes are noise, noise,
// all the same, or of little entropy.
enum class TestValues { kNormal, kSpecial, kUneven, kCoarse };

struct BatchShape {
  std::int64_t rows, cols;
};

struct BatchCase {
  std::string spec;
  DType dtype = DType::kFloat32;
  std::vector<BatchShape> shapes;
  TestValues values = TestValues::kNormal;
  std::uint64_t shift_bytes = 0;                                   // of payloads, from a multiple of 256
  EncodeContext context = {.seed = 21, .step = 22, .tensor = 23};  // tensor i has the number context.tensor + i
  double relative_l2_bound = 0;  // of the decoded tensors, for encoders that are not held to bytes
};

inline void PrintTo(const BatchCase& the_case, std::ostream* out) { *out << the_case.spec; }

// Encodes and decodes the case on the device and on the CPU and compares; damages payloads if they are hostile.
class BatchCheck {
 public:
  BatchCheck(TestMemory& memory, const BatchCase& the_case) : memory_(memory), case_(the_case) {}

  void run() {
    codec_ = make_codec(case_.spec).value();
    place_tensors();
    Result<std::unique_ptr<DeviceBatch>> made = memory_.make(case_.spec, tensors_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    batch_ = std::move(made).value();
    workspace_ = memory_.allocate(batch_->workspace_bytes());
    std::byte* step = memory_.allocate(sizeof(case_.context.step));
    memory_.to_device(step, std::as_bytes(std::span(&case_.context.step, 1)));
    keys_ = {.seed = case_.context.seed, .step = reinterpret_cast<const std::uint64_t*>(step)};
    Status status = batch_->set_up(tensors_, keys_, workspace_, nullptr);
    ASSERT_TRUE(status.ok()) << status.to_string();
    // Twice: nothing of the first run may show in the second.
    for (int run = 0; run < 2; ++run) {
      status = batch_->encode(nullptr);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    for (std::size_t i = 0; i < tensors_.size() && !testing::Test::HasFatalFailure(); ++i) compare_payload(i);
    clear_values();
    status = batch_->decode(nullptr);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (std::size_t i = 0; i < tensors_.size() && !testing::Test::HasFatalFailure(); ++i) compare_values(i);
  }

  // After run(): with damage(i, payload) done to every payload, faults are those of the codec, and nothing else
  // happens. Memory ends with the payload, where its size varies, so that sanitizers see what is read beyond.
  template <class Damage>
  void run_damaged(const Damage& damage) {
    std::vector<std::vector<std::byte>> payloads = payloads_;
    std::vector<DeviceTensor> tensors = tensors_;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      damage(i, payloads[i]);
      if (!codec_->row().traits.fixed_size) {
        tensors[i].payload = memory_.allocate(case_.shift_bytes + payloads[i].size()) + case_.shift_bytes;
      }
      memory_.to_device(tensors[i].payload, payloads[i]);
    }
    Status status = batch_->set_up(tensors, keys_, workspace_, nullptr);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::uint64_t bytes = payloads[i].size();
      memory_.to_device(reinterpret_cast<std::byte*>(batch_->payload_bytes() + i), std::as_bytes(std::span(&bytes, 1)));
    }
    status = batch_->decode(nullptr);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const DeviceTensor& tensor = tensors[i];
      std::vector<std::byte> scratch(codec_->scratch_bytes(tensor.rows, tensor.cols, tensor.dtype));
      std::vector<std::byte> values = inputs_[i];
      const Status expected =
          codec_->decode(payloads[i], {values.data(), tensor.dtype, tensor.rows, tensor.cols}, scratch);
      EXPECT_EQ(fault_of(i) != 0, !expected.ok()) << name_of(i) << ": " << expected.to_string();
      if (expected.ok()) expect_same_values(values, tensor.data, name_of(i) + ", damaged, decoded");
    }
  }

 private:
  void place_tensors() {
    for (std::size_t i = 0; i < case_.shapes.size(); ++i) {
      const auto [rows, cols] = case_.shapes[i];
      inputs_.push_back(make_values(case_.dtype, rows * cols, case_.values == TestValues::kSpecial, 100 + i));
      change_values(inputs_.back());
      DeviceTensor tensor;
      tensor.dtype = case_.dtype;
      tensor.rows = rows, tensor.cols = cols;
      tensor.number = case_.context.tensor + i;
      tensor.data = memory_.allocate(inputs_[i].size());
      const std::uint64_t room = codec_->max_payload_bytes(rows, cols, case_.dtype);
      tensor.payload = memory_.allocate(room + case_.shift_bytes + kGuardBytes) + case_.shift_bytes;
      memory_.to_device(static_cast<std::byte*>(tensor.data), inputs_[i]);
      memory_.to_device(tensor.payload, std::vector<std::byte>(room + kGuardBytes, kGuard));
      tensors_.push_back(tensor);
    }
  }

  void change_values(std::vector<std::byte>& bytes) const {
    if (case_.dtype == DType::kUint8) {
      for (std::byte& code : bytes) {
        if (case_.values == TestValues::kUneven) code = std::byte{9};
        if (case_.values == TestValues::kCoarse) code = std::byte(std::popcount(std::to_integer<unsigned>(code)));
      }
    }
    if (case_.dtype != DType::kFloat32) return;
    std::vector<float> values(bytes.size() / sizeof(float));
    if (values.empty()) return;
    std::memcpy(values.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (case_.values == TestValues::kUneven && i >= values.size() / 2) values[i] *= i / 256 % 3 == 0 ? 0 : 0.01f;
      if (case_.values == TestValues::kCoarse) values[i] = std::round(values[i] * 4) / 4;
    }
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }

  std::string name_of(std::size_t i) const {
    return case_.spec + ", tensor " + std::to_string(i) + ": " + std::to_string(tensors_[i].rows) + " x " +
           std::to_string(tensors_[i].cols) + " " + std::string(dtype_name(case_.dtype));
  }

  void compare_payload(std::size_t i) {
    const DeviceTensor& tensor = tensors_[i];
    const std::uint64_t room = codec_->max_payload_bytes(tensor.rows, tensor.cols, tensor.dtype);
    std::vector<std::byte> expected(room), scratch(codec_->scratch_bytes(tensor.rows, tensor.cols, tensor.dtype));
    EncodeContext context = case_.context;
    context.tensor += i;
    const Result<std::uint64_t> bytes =
        codec_->encode({inputs_[i].data(), tensor.dtype, tensor.rows, tensor.cols}, context, expected, scratch);
    ASSERT_TRUE(bytes.ok()) << bytes.status().to_string();
    expected.resize(bytes.value());
    std::uint64_t found_bytes = 0;
    memory_.from_device(std::as_writable_bytes(std::span(&found_bytes, 1)),
                        reinterpret_cast<const std::byte*>(batch_->payload_bytes() + i));
    ASSERT_EQ(found_bytes, bytes.value()) << name_of(i);
    if (case_.relative_l2_bound == 0) {
      expect_same(expected, tensor.payload, name_of(i) + ", payload");
    } else {
      std::vector<std::byte> found(found_bytes);
      memory_.from_device(found, tensor.payload);
      if (case_.values != TestValues::kSpecial) expect_near(expected, found, i);
      expected = found;  // what is decoded from it is held to bytes
    }
    std::vector<std::byte> guard(kGuardBytes);
    memory_.from_device(guard, tensor.payload + room);
    EXPECT_EQ(guard, std::vector<std::byte>(kGuardBytes, kGuard)) << name_of(i) << ": bytes behind the payload's room";
    payloads_.push_back(expected);
  }

  void clear_values() {
    for (const DeviceTensor& tensor : tensors_) {
      const auto bytes = static_cast<std::size_t>(tensor.rows * tensor.cols) * dtype_bytes(tensor.dtype);
      memory_.to_device(static_cast<std::byte*>(tensor.data), std::vector<std::byte>(bytes, kGuard));
    }
  }

  void compare_values(std::size_t i) {
    const DeviceTensor& tensor = tensors_[i];
    std::vector<std::byte> expected(inputs_[i].size());
    std::vector<std::byte> scratch(codec_->scratch_bytes(tensor.rows, tensor.cols, tensor.dtype));
    const Status status =
        codec_->decode(payloads_[i], {expected.data(), tensor.dtype, tensor.rows, tensor.cols}, scratch);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(fault_of(i), 0u) << name_of(i);
    expect_same_values(expected, tensor.data, name_of(i) + ", decoded");
  }

  // Two payloads of tensor i decode to nearly the same.
  void expect_near(const std::vector<std::byte>& expected, const std::vector<std::byte>& found, std::size_t i) {
    const DeviceTensor& tensor = tensors_[i];
    const auto elems = static_cast<std::size_t>(tensor.rows * tensor.cols);
    std::vector<float> values[2];
    for (int which = 0; which < 2; ++which) {
      values[which].resize(elems);
      std::vector<std::byte> scratch(codec_->scratch_bytes(tensor.rows, tensor.cols, DType::kFloat32));
      const Status status = codec_->decode(which == 0 ? expected : found,
                                           {values[which].data(), DType::kFloat32, tensor.rows, tensor.cols}, scratch);
      ASSERT_TRUE(status.ok()) << name_of(i) << ": " << status.to_string();
    }
    double distance = 0, norm = 0;
    for (std::size_t at = 0; at < elems; ++at) {
      const double a = values[0][at], b = values[1][at];
      distance += (a - b) * (a - b);
      norm += a * a;
    }
    EXPECT_LE(distance, case_.relative_l2_bound * case_.relative_l2_bound * norm) << name_of(i);
  }

  std::uint32_t fault_of(std::size_t i) {
    std::uint32_t fault = 0;
    memory_.from_device(std::as_writable_bytes(std::span(&fault, 1)),
                        reinterpret_cast<const std::byte*>(batch_->faults() + i));
    return fault;
  }

  void expect_same(const std::vector<std::byte>& expected, const void* device, const std::string& what) {
    std::vector<std::byte> found(expected.size());
    memory_.from_device(found, static_cast<const std::byte*>(device));
    for (std::size_t at = 0; at < expected.size(); ++at) {
      ASSERT_EQ(std::to_integer<int>(expected[at]), std::to_integer<int>(found[at]))
          << what << ": byte " << at << " of " << expected.size();
    }
  }

  // Of projections, which multiply what was sent, a GPU may decode another NaN.
  void expect_same_values(std::vector<std::byte> expected, const void* device, const std::string& what) {
    if (case_.relative_l2_bound == 0 || memory_.has_nan_of_cpu()) return expect_same(expected, device, what);
    std::vector<std::byte> found(expected.size());
    memory_.from_device(found, static_cast<const std::byte*>(device));
    for (std::vector<std::byte>* bytes : {&expected, &found}) {
      for (std::size_t at = 0; at < bytes->size(); at += dtype_bytes(case_.dtype)) {
        const auto i = static_cast<std::int64_t>(at / dtype_bytes(case_.dtype));
        if (!std::isnan(load_value(bytes->data(), case_.dtype, i))) continue;
        store_value(std::numeric_limits<float>::quiet_NaN(), bytes->data(), case_.dtype, i);
      }
    }
    EXPECT_TRUE(expected == found) << what << ", but for which NaN";
  }

  static constexpr std::byte kGuard{0xa5};
  static constexpr std::size_t kGuardBytes = 64;

  TestMemory& memory_;
  const BatchCase case_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<DeviceBatch> batch_;
  std::byte* workspace_ = nullptr;
  DeviceKeys keys_;
  std::vector<std::vector<std::byte>> inputs_, payloads_;
  std::vector<DeviceTensor> tensors_;
};

}  // namespace cortado

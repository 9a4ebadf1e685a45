// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// K-FAC with batches and gradients on a CUDA device against K-FAC on the CPU, and cuBLAS's products against those of
// the CPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/cuda_device.h"
#include "core/cuda_products.h"
#include "core/emulated_products.h"
#include "cortado/kfac_cuda.h"
#include "kfac/kfac_testing.h"

namespace cortado {
namespace {

using Floats = std::vector<float>;

// Values in device memory, to which `stream` copies them late.
class OnDevice {
 public:
  explicit OnDevice(const Floats& values, cudaStream_t stream = nullptr) : elems_(values.size()) {
    EXPECT_EQ(cudaMalloc(&memory_, bytes()), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(memory_, 0xff, bytes(), stream), cudaSuccess);  // NaN
    EXPECT_EQ(cudaMemcpyAsync(memory_, values.data(), bytes(), cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  ~OnDevice() { cudaFree(memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  float* data() { return static_cast<float*>(memory_); }
  // In the order of `stream`.
  Floats read(cudaStream_t stream = nullptr) {
    Floats values(elems_);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), memory_, bytes(), cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return values;
  }

 private:
  std::size_t bytes() const { return elems_ * sizeof(float); }
  std::size_t elems_;
  void* memory_ = nullptr;
};

double distance(const Floats& found, const Floats& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(static_cast<double>(found[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1));
}

class CudaKfac : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaKfac, ProductsAreThoseOfTheCpu) {
  const auto products = make_cuda_products(stream_).value();
  EmulatedProducts on_cpu;
  struct Sizes {
    std::int64_t m, n, k, count;
  };
  for (const auto& [m, n, k, count] :
       {Sizes{1, 1, 1, 1}, Sizes{7, 5, 3, 1}, Sizes{40, 33, 65, 3}, Sizes{300, 200, 129, 1}}) {
    const Floats a = normal_values(count * m * k, 1, 0, 0), b = normal_values(count * k * n, 2, 0, 0);
    const Floats none(static_cast<std::size_t>(count * m * n), -1.0f);
    OnDevice a_there(a, stream_), b_there(b, stream_);
    for (const Operand op_a : {Operand::kAsIs, Operand::kTransposed}) {
      for (const Operand op_b : {Operand::kAsIs, Operand::kTransposed}) {
        OnDevice c_there(none, stream_);
        Floats c = none;
        ASSERT_TRUE(
            products->multiply(op_a, op_b, m, n, k, a_there.data(), b_there.data(), c_there.data(), count).ok());
        ASSERT_TRUE(on_cpu.multiply(op_a, op_b, m, n, k, a.data(), b.data(), c.data(), count).ok());
        EXPECT_LT(distance(c_there.read(stream_), c), 1e-5) << m << " x " << n << " x " << k;
      }
    }
    for (const bool begins : {true, false}) {
      // clang before 16 captures no structured binding by reference.
      const auto expect_lower = [&, k = k](Floats found, Floats expected, std::int64_t dim) {
        for (std::size_t i = 0; i < found.size(); ++i) {
          const auto at = static_cast<std::int64_t>(i) % (dim * dim);
          if (at % dim > at / dim) found[i] = expected[i] = 0;
        }
        EXPECT_LT(distance(found, expected), 1e-5) << dim << " x " << k << (begins ? ", begins" : "");
      };
      Floats c(static_cast<std::size_t>(count * m * m), 0.5f);
      OnDevice c_there(c, stream_);
      ASSERT_TRUE(products->add_row_products(m, k, 0.1f, a_there.data(), c_there.data(), begins, count).ok());
      ASSERT_TRUE(on_cpu.add_row_products(m, k, 0.1f, a.data(), c.data(), begins, count).ok());
      expect_lower(c_there.read(stream_), c, m);
      for (const std::int64_t columns : {n, n - 1}) {
        Floats d(static_cast<std::size_t>(columns * columns), 0.5f);
        OnDevice d_there(d, stream_);
        ASSERT_TRUE(products->add_column_products(columns, k, 0.1f, b_there.data(), n, d_there.data(), begins).ok());
        ASSERT_TRUE(on_cpu.add_column_products(columns, k, 0.1f, b.data(), n, d.data(), begins).ok());
        expect_lower(d_there.read(stream_), d, columns);
      }
    }
  }
}

// Everything the Kfac is given is copied to the device by a stream just before.
TEST_F(CudaKfac, StepsAreThoseOfTheCpu) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    for (const bool pi_correction : {false, true}) {
      LocalGroup group(1);
      KfacOptions options;
      options.strategy = pi_correction ? KfacStrategy::kMemOpt : KfacStrategy::kCommOpt;
      options.inverse = inverse;
      options.pi_correction = pi_correction;
      const auto on_cpu = Kfac::create(small_job(), options, group.communicator(0)).value();
      options.device = make_cuda_kfac_device(0).value();
      const auto there = Kfac::create(small_job(), options, group.communicator(0)).value();
      const SmallRun run{.world_size = 1, .options = options, .values = {}};
      for (std::int64_t step = 0; step < 3; ++step) {
        std::vector<std::unique_ptr<OnDevice>> batches, gradients;
        for (std::size_t i = 0; i < there->layers().size(); ++i) {
          const SmallBatch x = activations_of(there->layers()[i], 0, step, i);
          const SmallBatch d = output_gradients_of(there->layers()[i], 0, step, i);
          for (const SmallBatch* each : {&x, &d}) {
            batches.push_back(std::make_unique<OnDevice>(each->values, stream_));
            KfacBatch batch = each->batch();
            batch.data = batches.back()->data(), batch.device_stream = stream_;
            ASSERT_TRUE((each == &x ? there->add_activations(i, batch) : there->add_output_gradients(i, batch)).ok());
          }
        }
        Gradients values = gradients_of(there->layers(), 1, -1, step);
        std::vector<KfacGradient> addresses = addresses_of(there->layers(), &values);
        for (std::size_t i = 0; i < values.size(); ++i) {
          gradients.push_back(std::make_unique<OnDevice>(values[i], stream_));
          const KfacLayer& layer = there->layers()[i];
          addresses[i].weight = gradients.back()->data();
          if (layer.has_bias) {
            addresses[i].bias = gradients.back()->data() + layer.groups * layer.outputs * layer.inputs;
          }
        }
        const Result<KfacOutcome> outcome = there->step({}, addresses, stream_);
        ASSERT_TRUE(outcome.ok()) << outcome.status().to_string();
        EXPECT_TRUE(outcome.value().finite);
        const Gradients expected = run_step(*on_cpu, run, 0, step).value();
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_LT(distance(gradients[i]->read(stream_), expected[i]), 1e-3) << there->layers()[i].name << step;
        }
      }
    }
  }
}

TEST_F(CudaKfac, TheSameStepsGiveTheSameBits) {
  std::vector<Floats> ends;
  for (int run = 0; run < 2; ++run) {
    LocalGroup group(1);
    KfacOptions options;
    options.device = make_cuda_kfac_device(0).value();
    const auto kfac =
        Kfac::create({{.name = "fc", .inputs = 300, .outputs = 200, .has_bias = true}}, options, group.communicator(0))
            .value();
    OnDevice x(normal_values(700 * 300, 1, 0, 0), stream_), d(normal_values(700 * 200, 2, 0, 0), stream_);
    OnDevice gradient(normal_values(301 * 200, 3, 0, 0), stream_);
    ASSERT_TRUE(kfac->add_activations(0, {.data = x.data(), .count = 700, .device_stream = stream_}).ok());
    ASSERT_TRUE(kfac->add_output_gradients(0, {.data = d.data(), .count = 700, .device_stream = stream_}).ok());
    const KfacGradient address{.weight = gradient.data(), .bias = gradient.data() + 300 * 200};
    ASSERT_TRUE(kfac->step({}, {&address, 1}, stream_).ok());
    ends.push_back(gradient.read(stream_));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

}  // namespace
}  // namespace cortado

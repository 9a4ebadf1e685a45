// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_products.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <string>

#include "core/check.h"
#include "core/cuda_device.h"

namespace cortado {

namespace {

Status status_of(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return make_error(StatusCode::kInternal, "%s: cuBLAS returned %d (%s)", call, static_cast<int>(status),
                    cublasGetStatusString(status));
}

cublasOperation_t operation(Operand operand) { return operand == Operand::kAsIs ? CUBLAS_OP_N : CUBLAS_OP_T; }

// A row-major matrix is the transpose of a column-major one.
constexpr float kOne = 1, kZero = 0;

class CudaProducts final : public DeviceProducts {
 public:
  ~CudaProducts() override {
    if (blas_ != nullptr) cublasDestroy(blas_);
  }

  Status open(DeviceStream stream) {
    CORTADO_RETURN_IF_ERROR(status_of(cublasCreate(&blas_), "cublasCreate"));
    return status_of(cublasSetStream(blas_, stream), "cublasSetStream");
  }

  std::string kind() const override {
    cudaDeviceProp properties{};
    int version = 0;
    if (cudaGetDeviceProperties(&properties, device_) != cudaSuccess) return "an unknown device";
    cublasGetVersion(blas_, &version);
    return std::string(properties.name) + " with " + std::to_string(properties.multiProcessorCount) +
           " multiprocessors and cuBLAS " + std::to_string(version);
  }

  Status multiply(Operand op_a, Operand op_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
                  const float* b, float* c, std::int64_t count) override {
    if (m == 0 || n == 0 || count == 0) return {};
    const int b_stride = size(op_b == Operand::kAsIs ? n : k), a_stride = size(op_a == Operand::kAsIs ? k : m);
    if (count == 1) {
      return status_of(cublasSgemm(blas_, operation(op_b), operation(op_a), size(n), size(m), size(k), &kOne, b,
                                   b_stride, a, a_stride, &kZero, c, size(n)),
                       "cublasSgemm");
    }
    return status_of(
        cublasSgemmStridedBatched(blas_, operation(op_b), operation(op_a), size(n), size(m), size(k), &kOne, b,
                                  b_stride, k * n, a, a_stride, m * k, &kZero, c, size(n), m * n, size(count)),
        "cublasSgemmStridedBatched");
  }

  // By whole products: cuBLAS's syrk does not divide `k` among the multiprocessors. The factors of ResNet-50, of up to
  // 400,000 positions, took it eight times as long, those of a GPT about as long (docs/results/gpu_reading.md).
  Status add_row_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, bool begins,
                          std::int64_t count) override {
    if (n == 0 || count == 0) return {};
    const float* const kept = begins ? &kZero : &kOne;
    if (count == 1) {
      return status_of(cublasSgemm(blas_, CUBLAS_OP_T, CUBLAS_OP_N, size(n), size(n), size(k), &alpha, x, size(k), x,
                                   size(k), kept, c, size(n)),
                       "cublasSgemm");
    }
    return status_of(cublasSgemmStridedBatched(blas_, CUBLAS_OP_T, CUBLAS_OP_N, size(n), size(n), size(k), &alpha, x,
                                               size(k), n * k, x, size(k), n * k, kept, c, size(n), n * n, size(count)),
                     "cublasSgemmStridedBatched");
  }

  Status add_column_products(std::int64_t n, std::int64_t k, float alpha, const float* x, std::int64_t x_stride,
                             float* c, bool begins) override {
    if (n == 0) return {};
    return status_of(cublasSgemm(blas_, CUBLAS_OP_N, CUBLAS_OP_T, size(n), size(n), size(k), &alpha, x, size(x_stride),
                                 x, size(x_stride), begins ? &kZero : &kOne, c, size(n)),
                     "cublasSgemm");
  }

 private:
  static int size(std::int64_t dimension) { return static_cast<int>(dimension); }

  const int device_ = current_cuda_device();
  cublasHandle_t blas_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<DeviceProducts>> make_cuda_products(DeviceStream stream) {
  if (cuda_device_count() == 0) return make_error(StatusCode::kUnsupported, "there is no CUDA device");
  auto made = std::make_unique<CudaProducts>();
  CORTADO_RETURN_IF_ERROR(made->open(stream));
  return std::unique_ptr<DeviceProducts>(std::move(made));
}

}  // namespace cortado

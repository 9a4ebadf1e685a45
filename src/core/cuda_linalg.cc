// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/cuda_linalg.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>

#include <algorithm>
#include <cstddef>
#include <list>
#include <vector>

#include "core/check.h"
#include "core/cuda_device.h"
#include "core/linalg.h"
#include "core/linalg_device.h"

namespace cortado {

namespace {

// A row-major lower triangle is a column-major upper one, and the columns of what is found are rows.
constexpr cublasFillMode_t kTriangle = CUBLAS_FILL_MODE_UPPER;
constexpr cusolverEigMode_t kVectors = CUSOLVER_EIG_MODE_VECTOR;
constexpr cudaDataType kFloat = CUDA_R_32F;

Status status_of(cusolverStatus_t status, const char* call) {
  if (status == CUSOLVER_STATUS_SUCCESS) return {};
  return make_error(StatusCode::kInternal, "%s: cuSOLVER returned %d", call, static_cast<int>(status));
}

Status status_of(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return make_error(StatusCode::kInternal, "%s: cuBLAS returned %d (%s)", call, static_cast<int>(status),
                    cublasGetStatusString(status));
}

// Larger matrices fill a device one by one; eigenvectors of a batch of them take up to three times as long. cuSOLVER
// inverts none of a batch, so that this decomposes them, solves for the identity and multiplies: three times the
// operations, in as many calls for all as else for one. On an L40S 16 decompositions of 512 x 512 take 0.7 ms together
// and 5.3 one by one (github.com/ml-explore/mlx, pull request 4208).
constexpr std::int64_t kMostBatched = 512;

bool is_large(std::int64_t n) { return n > kMostBatched; }
bool is_batched(std::int64_t n, std::int64_t count) { return count > 1 && !is_large(n); }

class CudaLinalgImpl final : public CudaLinalg {
 public:
  explicit CudaLinalgImpl(DeviceStream stream) : stream_(stream) {}
  ~CudaLinalgImpl() override {
    if (workspace_ != nullptr) cudaFreeAsync(workspace_, stream_);
    if (parameters_ != nullptr) cusolverDnDestroyParams(parameters_);
    if (solver_ != nullptr) cusolverDnDestroy(solver_);
    if (blas_ != nullptr) cublasDestroy(blas_);
  }

  Status prepare() {
    CORTADO_RETURN_IF_ERROR(status_of(cusolverDnCreate(&solver_), "cusolverDnCreate"));
    CORTADO_RETURN_IF_ERROR(status_of(cusolverDnSetStream(solver_, stream_), "cusolverDnSetStream"));
    return status_of(cusolverDnCreateParams(&parameters_), "cusolverDnCreateParams");
  }

  Status reserve_symmetric_eigen(std::int64_t n, std::int64_t count) override {
    if (n == 0 || count == 0) return {};
    std::size_t host_bytes = 0;
    CORTADO_RETURN_IF_ERROR(is_large(n) ? grow_for_one_eigen(n, nullptr, nullptr, &host_bytes)
                                        : grow_for_eigen(n, count, nullptr, nullptr, &host_bytes));
    static_cast<void>(host_workspace(host_bytes));
    return {};
  }
  Status reserve_invert_positive_definite(std::int64_t n, std::int64_t count) override {
    if (n == 0 || count == 0) return {};
    if (is_batched(n, count)) {
      CORTADO_RETURN_IF_ERROR(open_blas());
      CORTADO_RETURN_IF_ERROR(grow(Batch(n, count).bytes()));
    }
    int elems = 0;  // fewer of them, perhaps one, may be inverted again
    return grow_for_inverse(n, nullptr, &elems);
  }
  std::int64_t workspace_bytes() const override { return static_cast<std::int64_t>(workspace_bytes_); }

  Status symmetric_eigen(std::int64_t n, std::int64_t count, float* matrices, float* values, int* infos) override {
    CORTADO_CHECK(n >= 0 && n <= kMaxMatrixDim && count >= 0);
    if (n == 0 || count == 0) return {};
    if (is_large(n)) {
      for (std::int64_t i = 0; i < count; ++i) {
        CORTADO_RETURN_IF_ERROR(one_eigen(n, matrices + i * n * n, values + i * n, infos + i));
      }
      return {};
    }
    std::size_t host_bytes = 0;
    CORTADO_RETURN_IF_ERROR(grow_for_eigen(n, count, matrices, values, &host_bytes));
    std::byte* const host = host_workspace(host_bytes);
    return status_of(
        cusolverDnXsyevBatched(solver_, parameters_, kVectors, kTriangle, n, kFloat, matrices, n, kFloat, values,
                               kFloat, workspace_, workspace_bytes_, host, host_bytes, infos, count),
        "cusolverDnXsyevBatched");
  }

  Status invert_positive_definite(std::int64_t n, std::int64_t count, float* matrices, int* infos) override {
    CORTADO_CHECK(n >= 0 && n <= kMaxMatrixDim && count >= 0);
    if (n == 0) return {};
    if (is_batched(n, count)) return invert_together(n, count, matrices, infos);
    for (std::int64_t i = 0; i < count; ++i) {
      CORTADO_RETURN_IF_ERROR(invert_one(n, matrices + i * n * n, infos + i));
    }
    return {};
  }

 private:
  static constexpr std::size_t kInfoBytes = 256;  // an int, and the alignment of what follows

  // The workspace of invert_together(): identities, which become inverses of the Cholesky factors, then pointers.
  struct Batch {
    Batch(std::int64_t n, std::int64_t matrices)
        : count(static_cast<std::size_t>(matrices)), elems(count * static_cast<std::size_t>(n * n)) {}
    std::size_t pointers_at() const {
      return (elems * sizeof(float) + sizeof(float*) - 1) / sizeof(float*) * sizeof(float*);
    }
    std::size_t bytes() const { return pointers_at() + 2 * count * sizeof(float*); }
    std::size_t count, elems;
  };

  // It takes memory of its own, so that nobody has one who does not need it.
  Status open_blas() {
    if (blas_ != nullptr) return {};
    CORTADO_RETURN_IF_ERROR(status_of(cublasCreate(&blas_), "cublasCreate"));
    return status_of(cublasSetStream(blas_, stream_), "cublasSetStream");
  }

  // With A = U^T U: X = U^-T, which solves U^T X = I, and A^-1 = X^T X.
  Status invert_together(std::int64_t n, std::int64_t count, float* matrices, int* infos) {
    const Batch batch(n, count);
    CORTADO_RETURN_IF_ERROR(open_blas());
    CORTADO_RETURN_IF_ERROR(grow(batch.bytes()));
    auto* const inverses = reinterpret_cast<float*>(workspace_);
    auto** const pointers = reinterpret_cast<float**>(workspace_ + batch.pointers_at());
    const BeginBatch begin{.n = n,
                           .count = count,
                           .matrices = matrices,
                           .identities = inverses,
                           .matrix_pointers = pointers,
                           .identity_pointers = pointers + count};
    CudaDevice kernels(stream_);
    kernels.launch(begin.blocks(), begin);
    CORTADO_RETURN_IF_ERROR(kernels.status());
    const auto size = static_cast<int>(n), number = static_cast<int>(count);
    constexpr float kOne = 1, kZero = 0;
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnSpotrfBatched(solver_, kTriangle, size, begin.matrix_pointers, size, infos, number),
                  "cusolverDnSpotrfBatched"));
    CORTADO_RETURN_IF_ERROR(
        status_of(cublasStrsmBatched(blas_, CUBLAS_SIDE_LEFT, kTriangle, CUBLAS_OP_T, CUBLAS_DIAG_NON_UNIT, size, size,
                                     &kOne, begin.matrix_pointers, size, begin.identity_pointers, size, number),
                  "cublasStrsmBatched"));
    return status_of(cublasSgemmStridedBatched(blas_, CUBLAS_OP_T, CUBLAS_OP_N, size, size, size, &kOne, inverses, size,
                                               n * n, inverses, size, n * n, &kZero, matrices, size, n * n, number),
                     "cublasSgemmStridedBatched");
  }

  Status invert_one(std::int64_t n, float* matrix, int* info) {
    const auto size = static_cast<int>(n);
    int elems = 0;
    CORTADO_RETURN_IF_ERROR(grow_for_inverse(n, matrix, &elems));
    auto* const work = reinterpret_cast<float*>(workspace_ + kInfoBytes);
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnSpotrf(solver_, kTriangle, size, matrix, size, work, elems, info), "cusolverDnSpotrf"));
    // With an info of its own: what the first call found stays. A diagonal element can't be 0 where that is 0.
    return status_of(
        cusolverDnSpotri(solver_, kTriangle, size, matrix, size, work, elems, reinterpret_cast<int*>(workspace_)),
        "cusolverDnSpotri");
  }

  Status one_eigen(std::int64_t n, float* matrix, float* values, int* info) {
    std::size_t host_bytes = 0;
    CORTADO_RETURN_IF_ERROR(grow_for_one_eigen(n, matrix, values, &host_bytes));
    std::byte* const host = host_workspace(host_bytes);
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnXsyevd(solver_, parameters_, kVectors, kTriangle, n, kFloat, matrix, n, kFloat, values,
                                   kFloat, workspace_, workspace_bytes_, host, host_bytes, info),
                  "cusolverDnXsyevd"));
    // The next one uses the same memory of the host; cuSOLVER does not say when it is done with it.
    return host_bytes > 0 ? cuda_status(cudaStreamSynchronize(stream_), "cudaStreamSynchronize") : Status();
  }

  // How much is needed does not depend on where the matrices are.
  Status grow_for_one_eigen(std::int64_t n, float* matrix, float* values, std::size_t* host_bytes) {
    std::size_t device_bytes = 0;
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnXsyevd_bufferSize(solver_, parameters_, kVectors, kTriangle, n, kFloat, matrix, n, kFloat,
                                              values, kFloat, &device_bytes, host_bytes),
                  "cusolverDnXsyevd_bufferSize"));
    return grow(device_bytes);
  }
  Status grow_for_eigen(std::int64_t n, std::int64_t count, float* matrices, float* values, std::size_t* host_bytes) {
    std::size_t device_bytes = 0;
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnXsyevBatched_bufferSize(solver_, parameters_, kVectors, kTriangle, n, kFloat, matrices, n,
                                                    kFloat, values, kFloat, &device_bytes, host_bytes, count),
                  "cusolverDnXsyevBatched_bufferSize"));
    return grow(device_bytes);
  }
  Status grow_for_inverse(std::int64_t n, float* matrix, int* elems) {
    const auto size = static_cast<int>(n);
    int factor_elems = 0, inverse_elems = 0;
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnSpotrf_bufferSize(solver_, kTriangle, size, matrix, size, &factor_elems),
                  "cusolverDnSpotrf_bufferSize"));
    CORTADO_RETURN_IF_ERROR(
        status_of(cusolverDnSpotri_bufferSize(solver_, kTriangle, size, matrix, size, &inverse_elems),
                  "cusolverDnSpotri_bufferSize"));
    *elems = std::max(factor_elems, inverse_elems);
    return grow(static_cast<std::size_t>(*elems) * sizeof(float) + kInfoBytes);
  }

  Status grow(std::size_t bytes) {
    if (bytes <= workspace_bytes_) return {};
    if (workspace_ != nullptr) {  // cudaFreeAsync() takes no null
      CORTADO_RETURN_IF_ERROR(cuda_status(cudaFreeAsync(workspace_, stream_), "cudaFreeAsync"));
      workspace_ = nullptr, workspace_bytes_ = 0;
    }
    void* memory = nullptr;
    CORTADO_RETURN_IF_ERROR(cuda_status(cudaMallocAsync(&memory, bytes, stream_), "cudaMallocAsync"));
    workspace_ = static_cast<std::byte*>(memory), workspace_bytes_ = bytes;
    return {};
  }

  // Blocks that were handed out before may still be in use.
  std::byte* host_workspace(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    if (host_workspaces_.empty() || host_workspaces_.back().size() < bytes) host_workspaces_.emplace_back(bytes);
    return host_workspaces_.back().data();
  }

  const DeviceStream stream_;
  cusolverDnHandle_t solver_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  cusolverDnParams_t parameters_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  std::list<std::vector<std::byte>> host_workspaces_;
};

}  // namespace

Result<std::unique_ptr<CudaLinalg>> CudaLinalg::create(DeviceStream stream) {
  if (cuda_device_count() == 0) return make_error(StatusCode::kUnsupported, "there is no CUDA device");
  auto made = std::make_unique<CudaLinalgImpl>(stream);
  CORTADO_RETURN_IF_ERROR(made->prepare());
  return std::unique_ptr<CudaLinalg>(std::move(made));
}

}  // namespace cortado

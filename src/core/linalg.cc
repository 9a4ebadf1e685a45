// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/linalg.h"

#include <cblas.h>
#include <lapacke.h>

#include "core/check.h"

namespace cortado {

namespace {

// LAPACK is called as Fortran, not through LAPACKE's C functions, which would allocate and transpose. A row-major lower
// triangle is its column-major upper one.
constexpr char kUpper = 'U';

// Once for the process: threads of BLAS beside those of the ranks of one machine only get in each other's way, and the
// order of additions would depend on their number.
void use_one_blas_thread() {
  static const bool done = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  (void)done;
}

lapack_int to_blas(std::int64_t dimension) { return static_cast<lapack_int>(dimension); }

std::int64_t eigen_work_elems(std::int64_t n) { return n <= 1 ? 1 : 2 * n * n + 6 * n + 1; }
std::int64_t eigen_index_elems(std::int64_t n) { return n <= 1 ? 1 : 5 * n + 3; }

}  // namespace

void multiply(Operand op_a, Operand op_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
              const float* b, float* c) {
  if (m == 0 || n == 0) return;
  use_one_blas_thread();
  const bool a_as_is = op_a == Operand::kAsIs, b_as_is = op_b == Operand::kAsIs;
  cblas_sgemm(CblasRowMajor, a_as_is ? CblasNoTrans : CblasTrans, b_as_is ? CblasNoTrans : CblasTrans, to_blas(m),
              to_blas(n), to_blas(k), 1, a, to_blas(a_as_is ? k : m), b, to_blas(b_as_is ? n : k), 0, c, to_blas(n));
}

void add_row_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, std::int64_t c_stride) {
  if (n == 0 || k == 0) return;
  use_one_blas_thread();
  cblas_ssyrk(CblasRowMajor, CblasLower, CblasNoTrans, to_blas(n), to_blas(k), alpha, x, to_blas(k), 1, c,
              to_blas(c_stride));
}

void add_column_products(std::int64_t n, std::int64_t k, float alpha, const float* x, float* c, std::int64_t c_stride) {
  if (n == 0 || k == 0) return;
  use_one_blas_thread();
  cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, to_blas(n), to_blas(k), alpha, x, to_blas(n), 1, c,
              to_blas(c_stride));
}

std::uint64_t eigen_scratch_bytes(std::int64_t n) {
  return static_cast<std::uint64_t>(eigen_work_elems(n)) * sizeof(float) +
         static_cast<std::uint64_t>(eigen_index_elems(n)) * sizeof(lapack_int);
}

Status symmetric_eigen(std::int64_t n, float* matrix, float* values, std::span<std::byte> scratch) {
  CORTADO_CHECK(n >= 0 && n <= kMaxMatrixDim && scratch.size() >= eigen_scratch_bytes(n));
  if (n == 0) return {};
  use_one_blas_thread();
  const char vectors = 'V';
  const lapack_int size = to_blas(n), work_elems = to_blas(eigen_work_elems(n)),
                   index_elems = to_blas(eigen_index_elems(n));
  auto* work = reinterpret_cast<float*>(scratch.data());
  auto* indices = reinterpret_cast<lapack_int*>(work + work_elems);
  lapack_int info = 0;
  LAPACK_ssyevd(&vectors, &kUpper, &size, matrix, &size, values, work, &work_elems, indices, &index_elems, &info);
  if (info == 0) return {};
  return make_error(StatusCode::kInternal, "eigenvalues of a %lld x %lld matrix: LAPACK's ssyevd returned %d",
                    static_cast<long long>(n), static_cast<long long>(n), static_cast<int>(info));
}

Status invert_positive_definite(std::int64_t n, float* matrix) {
  CORTADO_CHECK(n >= 0 && n <= kMaxMatrixDim);
  if (n == 0) return {};
  use_one_blas_thread();
  const lapack_int size = to_blas(n);
  lapack_int info = 0;
  LAPACK_spotrf(&kUpper, &size, matrix, &size, &info);
  if (info == 0) LAPACK_spotri(&kUpper, &size, matrix, &size, &info);
  if (info == 0) return {};
  return make_error(StatusCode::kFailedPrecondition, "a %lld x %lld matrix is not positive definite (pivot %d)",
                    static_cast<long long>(n), static_cast<long long>(n), static_cast<int>(info));
}

}  // namespace cortado

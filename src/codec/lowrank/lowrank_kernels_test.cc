// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "codec/lowrank/lowrank_reference.h"
#include "core/aligned_buffer.h"
#include "core/simd_target.h"
#include "core/streaming.h"

namespace cortado::lowrank_kernels_test {
namespace {

using reference::Doubles;
using reference::Floats;
using reference::Gradient;
using reference::random_floats;
using reference::relative_error;
using reference::same_bytes;

constexpr double kProjectionBound = 1e-5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33};

struct Shape {
  std::int64_t rows, cols;
};
// One element, tails of rows (blocks of 4), tails of columns (vectors of 4 to 16, tiles of 512), tall and wide.
constexpr Shape kShapes[] = {{1, 1},   {1, 17},  {17, 1},  {2, 3},    {3, 16},  {4, 15},   {5, 33},
                             {7, 512}, {8, 513}, {64, 31}, {9, 1100}, {130, 7}, {1200, 5}, {6, 2000}};

std::string describe(const Shape& shape, int rank, DType dtype) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.cols) + " rank " + std::to_string(rank) + " dtype " +
         std::to_string(static_cast<int>(dtype));
}

// Calls body() once on every instruction set of this machine.
template <typename Body>
void for_each_target(const Body& body) {
  for (const std::int64_t target : simd_targets()) {
    SCOPED_TRACE(simd_target_name(target));
    const ForcedSimdTarget forced(target);
    body();
  }
}

// A pass and the memory it works on.
struct Problem {
  enum class Residual { kNone, kInPlace, kApart };

  Problem(const Shape& s, int r, DType dtype, Residual kind, int sent_rank, float scale_)
      : shape(s),
        rank(r),
        scale(scale_),
        gradient(random_floats(s.rows * s.cols, 1), dtype),
        before(random_floats(s.rows * s.cols, 2)),
        sent_row(random_floats(s.rows * sent_rank, 3)),
        sent_col(random_floats(sent_rank * s.cols, 4)),
        col_basis(random_floats(r * s.cols, 5)),
        row_basis(random_floats(s.rows * r, 6)),
        row_factor(s.rows * r),
        col_factor(r * s.cols),
        residual(before),
        apart(kind == Residual::kApart ? before.size() : 0, -1.0f) {
    pass = {.rows = s.rows,
            .cols = s.cols,
            .gradient = gradient.data(),
            .gradient_dtype = dtype,
            .gradient_scale = scale,
            .residual_in = kind == Residual::kNone ? nullptr : residual.data(),
            .residual_out = kind == Residual::kNone ? nullptr : residual.data(),
            .sent = {.row = sent_row.data(), .col = sent_col.data(), .rank = sent_rank}};
    if (kind == Residual::kApart) pass.residual_out = apart.data();
  }
  Problem(const Problem&) = delete;

  // A in float64.
  Doubles expected() const {
    Doubles a = reference::product(sent_row, sent_col, shape.rows, pass.sent.rank, shape.cols);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<double>(scale) * gradient.values[i] + (pass.residual_in == nullptr ? 0.0 : before[i]) - a[i];
    }
    return a;
  }

  PassResult run_rows() {
    residual = before;
    return project_rows(pass, col_basis.data(), rank, row_factor.data());
  }
  PassResult run_cols() {
    residual = before;
    return project_cols(pass, row_basis.data(), rank, col_factor.data());
  }
  const Floats& updated() const { return apart.empty() ? residual : apart; }

  Shape shape;
  int rank;
  float scale;
  Gradient gradient;
  Floats before, sent_row, sent_col, col_basis, row_basis, row_factor, col_factor, residual, apart;
  ResidualPass pass;
};
using Residual = Problem::Residual;

void expect_near_float64(Problem* problem) {
  const Doubles a = problem->expected();
  const Shape& shape = problem->shape;
  const auto expect_pass = [&](const PassResult& result) {
    EXPECT_TRUE(result.finite);
    EXPECT_NEAR(result.sum_squares, reference::sum_squares(a), kProjectionBound * reference::sum_squares(a));
    if (problem->pass.residual_out != nullptr) {
      EXPECT_LE(relative_error(problem->updated(), a), 1e-6);
    }
  };
  expect_pass(problem->run_rows());
  const Floats col_basis_t = reference::transposed(problem->col_basis, problem->rank, shape.cols);
  EXPECT_LE(
      relative_error(problem->row_factor, reference::product(a, col_basis_t, shape.rows, shape.cols, problem->rank)),
      kProjectionBound);
  expect_pass(problem->run_cols());
  const Floats row_basis_t = reference::transposed(problem->row_basis, shape.rows, problem->rank);
  EXPECT_LE(
      relative_error(problem->col_factor, reference::product(row_basis_t, a, problem->rank, shape.rows, shape.cols)),
      kProjectionBound);
}

TEST(LowRankProjection, IsNearFloat64) {
  struct Form {
    Residual residual;
    bool has_pair;
    float scale;
  };
  for (const Shape& shape : kShapes) {
    for (const int rank : kRanks) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(describe(shape, rank, dtype));
        for (const Form& form : {Form{Residual::kNone, false, 1}, Form{Residual::kInPlace, false, 0.37f},
                                 Form{Residual::kInPlace, true, 1}, Form{Residual::kApart, true, 0.37f}}) {
          Problem problem(shape, rank, dtype, form.residual, form.has_pair ? rank : 0, form.scale);
          expect_near_float64(&problem);
        }
      }
    }
  }
}

TEST(LowRankProjection, IsNearFloat64OnEveryTarget) {
  for_each_target([] {
    for (const Shape& shape : {Shape{1, 1}, Shape{5, 33}, Shape{9, 1100}}) {
      for (const DType dtype : kDTypes) {
        Problem problem(shape, 7, dtype, Residual::kInPlace, 6, 0.5f);
        expect_near_float64(&problem);
      }
    }
  });
}

// The column factor is summed over the rows one after the other; that must not add up, not even for like signs.
TEST(LowRankProjection, IsNearFloat64ForManyRows) {
  Problem problem({50'000, 3}, 2, DType::kFloat32, Residual::kInPlace, 2, 1);
  expect_near_float64(&problem);
  for (std::size_t i = 0; i < problem.gradient.values.size(); ++i) problem.gradient.set(i, 5.5f);
  for (float& value : problem.row_basis) value = std::fabs(value);
  expect_near_float64(&problem);
}

TEST(LowRankProjection, BothInOnePassGiveTheBytesOfTwo) {
  for_each_target([] {
    for (const Shape& shape : {Shape{1, 1}, Shape{6, 35}, Shape{9, 1100}}) {
      Problem problem(shape, 5, DType::kFloat32, Residual::kApart, 3, 0.37f);
      problem.run_rows();
      problem.run_cols();
      Floats row_factor(problem.row_factor.size(), kNan), col_factor(problem.col_factor.size(), kNan);
      const BothBases bases{.row = problem.row_basis.data(), .col = problem.col_basis.data(), .rank = 5};
      EXPECT_TRUE(project_both(problem.pass, bases, {row_factor.data(), col_factor.data()}).finite);
      EXPECT_TRUE(same_bytes(row_factor, problem.row_factor));
      EXPECT_TRUE(same_bytes(col_factor, problem.col_factor));
      problem.gradient.set(0, kInfinity);
      EXPECT_FALSE(project_both(problem.pass, bases, {row_factor.data(), col_factor.data()}).finite);
      EXPECT_TRUE(std::isnan(row_factor[0]));
    }
  });
}

TEST(LowRankProjection, TakesGradientsAtAnyAddress) {
  for (const DType dtype : kDTypes) {
    Problem aligned({6, 531}, 3, dtype, Residual::kInPlace, 2, 1);
    Problem odd({6, 531}, 3, dtype, Residual::kInPlace, 2, 1);
    std::vector<std::byte> shifted(odd.gradient.bytes.size() + 1);
    std::memcpy(shifted.data() + 1, odd.gradient.data(), odd.gradient.bytes.size());
    odd.pass.gradient = shifted.data() + 1;
    aligned.run_rows();
    odd.run_rows();
    EXPECT_TRUE(same_bytes(aligned.row_factor, odd.row_factor));
    EXPECT_TRUE(same_bytes(aligned.residual, odd.residual));
    undo_pass(aligned.pass, aligned.residual.data());
    undo_pass(odd.pass, odd.residual.data());
    EXPECT_TRUE(same_bytes(aligned.residual, odd.residual));
  }
}

TEST(LowRankProjection, ReadsNoGradientAsZeros) {
  Problem problem({9, 70}, 3, DType::kFloat32, Residual::kInPlace, 2, 1);
  problem.pass.gradient = nullptr;
  for (std::size_t i = 0; i < problem.gradient.values.size(); ++i) problem.gradient.set(i, 0);
  expect_near_float64(&problem);
}

// ---- the deferred pair
// -----------------------------------------------------------------------------------------------

TEST(DeferredPair, EqualsMaterialisingFirst) {
  for_each_target([] {
    for (const Shape& shape : {Shape{1, 1}, Shape{6, 35}, Shape{5, 1030}}) {
      for (const int sent_rank : kRanks) {
        SCOPED_TRACE(describe(shape, sent_rank, DType::kFloat32));
        Problem deferred(shape, 3, DType::kFloat32, Residual::kInPlace, sent_rank, 0.37f);
        Problem first(shape, 3, DType::kFloat32, Residual::kInPlace, sent_rank, 0.37f);
        materialise(shape.rows, shape.cols, first.pass.sent, first.before.data());
        first.pass.sent = {};
        deferred.run_rows();
        first.run_rows();
        EXPECT_TRUE(same_bytes(deferred.row_factor, first.row_factor));
        EXPECT_TRUE(same_bytes(deferred.residual, first.residual));
        deferred.run_cols();
        first.run_cols();
        EXPECT_TRUE(same_bytes(deferred.col_factor, first.col_factor));
        EXPECT_TRUE(same_bytes(deferred.residual, first.residual));
      }
    }
  });
}

TEST(DeferredPair, InPlaceEqualsApart) {
  Problem in_place({6, 600}, 5, DType::kFloat32, Residual::kInPlace, 9, 1);
  Problem apart({6, 600}, 5, DType::kFloat32, Residual::kApart, 9, 1);
  in_place.run_rows();
  apart.run_rows();
  EXPECT_TRUE(same_bytes(in_place.row_factor, apart.row_factor));
  EXPECT_TRUE(same_bytes(in_place.residual, apart.apart));
  EXPECT_TRUE(same_bytes(apart.residual, apart.before)) << "the residual read is left as it was";
}

TEST(DeferredPair, MaterialiseIsNearFloat64) {
  Problem problem({6, 77}, 1, DType::kFloat32, Residual::kInPlace, 9, 0);
  materialise(6, 77, problem.pass.sent, problem.residual.data());
  EXPECT_LE(relative_error(problem.residual, problem.expected()), 1e-6);
}

TEST(DeferredPair, MaterialiseWithoutPairChangesNothing) {
  Problem problem({6, 77}, 1, DType::kFloat32, Residual::kInPlace, 0, 1);
  materialise(6, 77, {}, problem.residual.data());
  EXPECT_TRUE(same_bytes(problem.residual, problem.before));
}

// ---- values that are not finite
// --------------------------------------------------------------------------------------

struct BadValue {
  DType dtype;
  float value;
  float scale;
};
const BadValue kBadValues[] = {{DType::kFloat32, kInfinity, 1},
                               {DType::kFloat32, -kInfinity, 0.5f},
                               {DType::kFloat32, kNan, 1},
                               {DType::kFloat32, 1e38f, 1},
                               {DType::kFloat32, -3e38f, 1.0f / 65536},
                               {DType::kFloat32, 5e37f, 4},
                               {DType::kFloat16, kInfinity, 1},
                               {DType::kFloat16, kNan, 1},
                               {DType::kBFloat16, -kInfinity, 1},
                               {DType::kBFloat16, kNan, 1},
                               {DType::kBFloat16, 2e38f, 1}};

// In a whole vector, in a tail of columns, in a block of rows and in what is left of it.
constexpr std::size_t kBadCols = 531;
constexpr std::size_t kBadAt[] = {3, kBadCols - 1, 2 * kBadCols + 514, 5 * kBadCols + 8};

// Their squares are no floats.
TEST(LargeValues, HaveSquares) {
  for_each_target([] {
    for (const float value : {1e20f, 1e30f, -9e37f}) {
      for (const Residual kind : {Residual::kInPlace, Residual::kNone}) {
        for (const std::size_t bad_at : {std::size_t{0}, kBadAt[0]}) {
          SCOPED_TRACE(value);
          Problem problem({6, kBadCols}, 5, DType::kFloat32, kind, 0, 1);
          for (const std::size_t at : kBadAt) problem.gradient.set(at, value);
          const Doubles a = problem.expected();
          if (bad_at != 0) problem.gradient.set(bad_at, kInfinity);  // the others count
          const double missing = bad_at != 0 ? a[bad_at] * a[bad_at] : 0;
          const double squares = reference::sum_squares(a) - missing;
          EXPECT_NEAR(problem.run_rows().sum_squares, squares, 1e-5 * squares);
          EXPECT_NEAR(problem.run_cols().sum_squares, squares, 1e-5 * squares);
        }
      }
    }
  });
}

TEST(NonFinite, LeavesTheResidualAndMarksTheFactor) {
  for_each_target([] {
    for (const BadValue& bad : kBadValues) {
      for (const int sent_rank : {0, 3, 9}) {
        SCOPED_TRACE("value " + std::to_string(bad.value) + " pair of rank " + std::to_string(sent_rank));
        Problem good({6, kBadCols}, 5, bad.dtype, Residual::kInPlace, sent_rank, bad.scale);
        Problem poisoned({6, kBadCols}, 5, bad.dtype, Residual::kInPlace, sent_rank, bad.scale);
        for (const std::size_t at : kBadAt) poisoned.gradient.set(at, bad.value);
        const auto expect_as_documented = [&](const PassResult& result, const Floats& factor) {
          EXPECT_FALSE(result.finite);
          EXPECT_TRUE(std::isfinite(result.sum_squares));
          EXPECT_TRUE(std::isnan(factor[0]));
          EXPECT_TRUE(std::all_of(factor.begin() + 1, factor.end(), [](float f) { return std::isfinite(f); }));
          Floats expected = good.residual;
          for (const std::size_t at : kBadAt) expected[at] = poisoned.before[at];
          EXPECT_TRUE(same_bytes(poisoned.residual, expected));
        };
        good.run_rows();
        expect_as_documented(poisoned.run_rows(), poisoned.row_factor);
        good.run_cols();
        expect_as_documented(poisoned.run_cols(), poisoned.col_factor);
      }
    }
  });
}

TEST(NonFinite, LargestAllowedValueIsKept) {
  Problem problem({1, 16}, 1, DType::kFloat32, Residual::kInPlace, 0, 1);
  problem.gradient.set(5, 9.9e37f);
  EXPECT_TRUE(problem.run_rows().finite);
  EXPECT_EQ(problem.residual[5], 9.9e37f);
}

TEST(UndoPass, RestoresTheMaterialisedResidual) {
  for_each_target([] {
    for (const BadValue& bad : kBadValues) {
      for (const int sent_rank : {0, 3, 9}) {
        SCOPED_TRACE("value " + std::to_string(bad.value) + " pair of rank " + std::to_string(sent_rank));
        Problem problem({6, kBadCols}, 5, bad.dtype, Residual::kInPlace, sent_rank, bad.scale);
        for (const std::size_t at : kBadAt) problem.gradient.set(at, bad.value);
        Floats expected = problem.before;
        materialise(6, kBadCols, problem.pass.sent, expected.data());
        problem.run_cols();
        undo_pass(problem.pass, problem.residual.data());
        EXPECT_LE(relative_error(problem.residual, Doubles(expected.begin(), expected.end())), 1e-6);
      }
    }
  });
}

TEST(UndoPass, WithoutGradientOnlyTheSubtractionStays) {
  Problem problem({6, 40}, 2, DType::kFloat32, Residual::kInPlace, 3, 1);
  problem.pass.gradient = nullptr;
  Floats expected = problem.before;
  materialise(6, 40, problem.pass.sent, expected.data());
  problem.run_rows();
  undo_pass(problem.pass, problem.residual.data());
  EXPECT_TRUE(same_bytes(problem.residual, expected));
}

// ---- reconstruction
// --------------------------------------------------------------------------------------------------

// The definition: each operation rounded by itself, in the order of k.
Gradient reconstructed(const Floats& row, const Floats& col, const Shape& shape, int rank, float scale, DType dtype) {
  Floats output(static_cast<std::size_t>(shape.rows * shape.cols));
  for (std::int64_t i = 0; i < shape.rows; ++i) {
    for (std::int64_t j = 0; j < shape.cols; ++j) {
      float sum = 0;
      for (int k = 0; k < rank; ++k) {
        const float scaled = row[i * rank + k] * scale;
        const float product = scaled * col[k * shape.cols + j];
        sum = k == 0 ? product : sum + product;
      }
      output[i * shape.cols + j] = sum;
    }
  }
  return Gradient(output, dtype);
}

void expect_reconstruction(const Shape& shape, int rank, DType dtype) {
  SCOPED_TRACE(describe(shape, rank, dtype));
  const Floats row = random_floats(shape.rows * rank, 7);
  const Floats col = random_floats(rank * shape.cols, 8);
  std::vector<std::byte> output(shape.rows * shape.cols * dtype_bytes(dtype), std::byte{0x55});
  reconstruct({row.data(), col.data(), rank}, shape.rows, shape.cols, 0.37f, output.data(), dtype);
  EXPECT_TRUE(same_bytes(output, reconstructed(row, col, shape, rank, 0.37f, dtype).bytes));
}

TEST(Reconstruct, GivesTheSameBytesOnEveryTarget) {
  for_each_target([] {
    for (const Shape& shape : kShapes)
      for (const int rank : kRanks)
        for (const DType dtype : kDTypes) expect_reconstruction(shape, rank, dtype);
    for (const int rank : {255, 256, 257, 600})
      for (const DType dtype : kDTypes) expect_reconstruction({5, 530}, rank, dtype);
  });
}

TEST(Reconstruct, WritesToAnyAddress) {
  for (const DType dtype : kDTypes) {
    const Floats row = random_floats(5 * 3, 7), col = random_floats(3 * 531, 8);
    const Gradient expected = reconstructed(row, col, {5, 531}, 3, 0.37f, dtype);
    std::vector<std::byte> output(expected.bytes.size() + 1);
    reconstruct({row.data(), col.data(), 3}, 5, 531, 0.37f, output.data() + 1, dtype);
    EXPECT_EQ(std::memcmp(output.data() + 1, expected.data(), expected.bytes.size()), 0);
  }
}

// Large outputs go past the caches, from the first cache line on.
TEST(Reconstruct, StreamsTheSameBytesToAnyFloat) {
  const Shape shape = {kLeastStreamedGradientBytes / (528 * 4) + 3, 528};
  for (const int rank : {1, 4, 9}) {
    const Floats row = random_floats(shape.rows * rank, 7), col = random_floats(rank * shape.cols, 8);
    const Gradient expected = reconstructed(row, col, shape, rank, 0.37f, DType::kFloat32);
    AlignedBuffer<float> output(static_cast<std::size_t>(shape.rows * shape.cols) + 17);
    for_each_target([&] {
      for (const std::ptrdiff_t past_line : {0, 1, 7, 15}) {
        float* begin = output.data() + past_line;
        std::fill_n(begin, shape.rows * shape.cols + 1, -1.0f);
        reconstruct({row.data(), col.data(), rank}, shape.rows, shape.cols, 0.37f, begin, DType::kFloat32,
                    /*streams=*/true);
        EXPECT_EQ(std::memcmp(begin, expected.data(), expected.bytes.size()), 0) << rank << ", " << past_line;
        EXPECT_EQ(begin[shape.rows * shape.cols], -1.0f);
      }
    });
  }
}

TEST(Reconstruct, RankZeroGivesZeros) {
  for (const DType dtype : kDTypes) expect_reconstruction({5, 35}, 0, dtype);
}

TEST(Reconstruct, LetsNanAndInfinityThrough) {
  const float row[] = {1, 2};
  const float col[] = {kNan, 1, kInfinity};
  float output[6];
  reconstruct({row, col, 1}, 2, 3, 1, output, DType::kFloat32);
  EXPECT_TRUE(std::isnan(output[0]) && std::isnan(output[3]));
  EXPECT_EQ(output[4], 2);
  EXPECT_EQ(output[5], kInfinity);
}

// ---- targets
// ---------------------------------------------------------------------------------------------------------

TEST(LowRankTargets, TheForcedOneRuns) {
  for_each_target([] {
    // 1 - (1 + e)(1 - e) is e * e for a fused multiply-add, and 0 where the product is rounded first.
    constexpr float kEpsilon = 1.0f / 16384;
    const float row = 1 + kEpsilon;
    const Floats col(64, 1 - kEpsilon);
    Floats residual(64, 1.0f);
    materialise(1, 64, {&row, col.data(), 1}, residual.data());
    const std::set<std::string> unfused = {"SSE2", "SSSE3", "SSE4", "SCALAR", "EMU128"};
    const bool is_fused = !unfused.contains(simd_target_name(simd_target()));
    EXPECT_EQ(residual, Floats(64, is_fused ? kEpsilon * kEpsilon : 0.0f));
  });
}

}  // namespace
}  // namespace cortado::lowrank_kernels_test

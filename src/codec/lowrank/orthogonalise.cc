// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/orthogonalise.h"

#include <algorithm>
#include <cmath>

#include "core/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/lowrank/orthogonalise.cc"
#include "core/simd.h"

HWY_BEFORE_NAMESPACE();
namespace cortado {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, 16>;

constexpr int kVirtualLanes = 16;

// Adds 16 partial sums in one fixed tree.
HWY_INLINE float sum_virtual_lanes(float* lanes) {
  for (int width = kVirtualLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// Element i belongs to virtual lane i % 16 on every target, whatever its vector length.
float Dot(const float* a, const float* b, std::int64_t length) {
  const D d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  alignas(64) float partial[kVirtualLanes] = {};
  const std::int64_t whole = length - length % kVirtualLanes;
  for (int part = 0; part < kVirtualLanes; part += lanes) {
    auto sum = hn::Zero(d);
    for (std::int64_t i = part; i < whole; i += kVirtualLanes) {
      sum = hn::Add(sum, hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i)));
    }
    hn::StoreU(sum, d, partial + part);
  }
  for (std::int64_t i = whole; i < length; ++i) partial[i - whole] += a[i] * b[i];
  return sum_virtual_lanes(partial);
}

// a -= scale * b
void SubtractScaled(float* a, const float* b, float scale, std::int64_t length) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  const auto s = hn::Set(d, scale);
  std::int64_t i = 0;
  for (; i + lanes <= length; i += lanes) {
    hn::StoreU(hn::Sub(hn::LoadU(d, a + i), hn::Mul(s, hn::LoadU(d, b + i))), d, a + i);
  }
  for (; i < length; ++i) a[i] -= scale * b[i];
}

void Scale(float* a, float scale, std::int64_t length) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  const auto s = hn::Set(d, scale);
  std::int64_t i = 0;
  for (; i + lanes <= length; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, a + i), s), d, a + i);
  for (; i < length; ++i) a[i] *= scale;
}

// Of the elements that are not NaN, or maybe NaN if some are.
float LargestMagnitude(const float* a, std::int64_t length) {
  const D d;
  const std::int64_t lanes = hn::Lanes(d);
  auto maximum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= length; i += lanes) maximum = hn::Max(maximum, hn::Abs(hn::LoadU(d, a + i)));
  float largest = hn::GetLane(hn::MaxOfLanes(d, maximum));
  for (; i < length; ++i) largest = std::max(largest, std::fabs(a[i]));
  return largest;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cortado
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cortado {

HWY_EXPORT(Dot);
HWY_EXPORT(SubtractScaled);
HWY_EXPORT(Scale);
HWY_EXPORT(LargestMagnitude);

namespace {

float dot(const float* a, const float* b, std::int64_t length) { return HWY_DYNAMIC_DISPATCH(Dot)(a, b, length); }

void fill_random(float* vector, std::int64_t length, const BasisKey& key, int k, int attempt) {
  philox_fill_normal(key.seed, key.step, random_vector(key, k, attempt), vector, length);
}

// Brings the largest magnitude to [1, 2) by a power of two, which is exact, so that squares neither underflow nor
// overflow. False if the vector is zero or not finite.
bool bring_to_unit_range(float* vector, std::int64_t length) {
  const float largest = HWY_DYNAMIC_DISPATCH(LargestMagnitude)(vector, length);
  const bool has_nan = std::isnan(dot(vector, vector, length));
  if (!(largest > 0) || std::isinf(largest) || has_nan) return false;
  const int exponent = std::ilogb(largest);
  // Two steps: 2^-exponent itself may not be representable for denormal magnitudes.
  HWY_DYNAMIC_DISPATCH(Scale)(vector, std::ldexp(1.0f, -exponent / 2), length);
  HWY_DYNAMIC_DISPATCH(Scale)(vector, std::ldexp(1.0f, -exponent + exponent / 2), length);
  return true;
}

// Projects vector k twice on the complement of those before it and normalises it; false if too little is left.
bool orthonormalise_one(float* vectors, std::int64_t length, int k) {
  float* v = vectors + k * length;
  if (!bring_to_unit_range(v, length)) return false;
  const float before = std::sqrt(dot(v, v, length));
  for (int pass = 0; pass < 2; ++pass) {
    for (int j = 0; j < k; ++j) {
      const float* q = vectors + j * length;
      HWY_DYNAMIC_DISPATCH(SubtractScaled)(v, q, dot(q, v, length), length);
    }
  }
  const float after = std::sqrt(dot(v, v, length));
  if (!(after > kDependent * before)) return false;
  HWY_DYNAMIC_DISPATCH(Scale)(v, 1.0f / after, length);
  return true;
}

}  // namespace

void orthogonalise(float* vectors, std::int64_t length, int rank, const BasisKey& key) {
  for (int k = 0; k < rank; ++k) {
    bool done = k < length && orthonormalise_one(vectors, length, k);
    for (int attempt = 0; attempt < kReplacementTries && !done && k < length; ++attempt) {
      fill_random(vectors + k * length, length, key, k, attempt);
      done = orthonormalise_one(vectors, length, k);
    }
    if (!done) std::fill_n(vectors + k * length, length, 0.0f);
  }
}

void orthogonalise_rows(float* row_factor, std::int64_t rows, int rank, const BasisKey& key, float* scratch) {
  for (std::int64_t i = 0; i < rows; ++i)
    for (int k = 0; k < rank; ++k) scratch[k * rows + i] = row_factor[i * rank + k];
  orthogonalise(scratch, rows, rank, key);
  for (std::int64_t i = 0; i < rows; ++i)
    for (int k = 0; k < rank; ++k) row_factor[i * rank + k] = scratch[k * rows + i];
}

void remove_overlap(const TwoSided& shape, const float* row_factor, float* col_factor, float* scratch) {
  const int rank = shape.rank;
  float* factor = scratch;
  float* basis = scratch + shape.rows * rank;
  for (std::int64_t i = 0; i < shape.rows; ++i) {
    for (int k = 0; k < rank; ++k) {
      factor[k * shape.rows + i] = row_factor[i * rank + k];
      basis[k * shape.rows + i] = shape.row_basis[i * rank + k];
    }
  }
  for (int k = 0; k < rank; ++k) {
    for (int l = 0; l < rank; ++l) {
      const float overlap = dot(factor + l * shape.rows, basis + k * shape.rows, shape.rows);
      HWY_DYNAMIC_DISPATCH(SubtractScaled)
      (col_factor + k * shape.cols, shape.col_basis + l * shape.cols, overlap, shape.cols);
    }
  }
}

void random_basis(float* vectors, std::int64_t length, int rank, const BasisKey& key) {
  for (int k = 0; k < rank; ++k) fill_random(vectors + k * length, length, key, k, 0);
  orthogonalise(vectors, length, rank, key);
}

}  // namespace cortado
#endif  // HWY_ONCE

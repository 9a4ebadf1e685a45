// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace cortado {

// How a damping is split between A and G (Martens and Grosse 2015, section 6.3): damping_a * damping_g = damping.
struct SplitDamping {
  double a = 0, g = 0;
};

// pi = sqrt(mean eigenvalue of A / mean eigenvalue of G); 1 where one of them is 0.
SplitDamping split_damping(double damping, double mean_a, double mean_g);

// One factor's eigenvectors (rows of an n x n matrix) and eigenvalues.
struct Eigen {
  const float* vectors;
  const float* values;
};

// v = Q_G [ (Q_G^T w Q_A) / (d_G d_A^T + damping) ] Q_A^T, w and v being outputs x inputs. With `splits` the divisor is
// (d_G + damping.g)(d_A + damping.a)^T instead. `scratch` has room for outputs x inputs values; nothing overlaps.
void precondition_by_eigen(std::int64_t outputs, std::int64_t inputs, const Eigen& g, const Eigen& a, double damping,
                           bool splits, const float* w, float* v, float* scratch);

// v = g_inverse w a_inverse.
void precondition_by_inverse(std::int64_t outputs, std::int64_t inputs, const float* g_inverse, const float* a_inverse,
                             const float* w, float* v, float* scratch);

// Sum of the products of values with the same place, in their order, in double precision: the same on all machines.
double inner_product(const float* left, const float* right, std::int64_t elems);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests: K-FAC of a job of kfac_testing.h in double precision on one rank, written from the formulas of
// include/cortado/kfac.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kfac/kfac_testing.h"

namespace cortado {

// A dense n x n matrix.
struct Matrix {
  std::size_t n = 0;
  std::vector<double> values;
  explicit Matrix(std::size_t size) : n(size), values(size * size) {}
  double& at(std::size_t i, std::size_t j) { return values[i * n + j]; }
  double at(std::size_t i, std::size_t j) const { return values[i * n + j]; }
};

inline Matrix identity(std::size_t n) {
  Matrix matrix(n);
  for (std::size_t i = 0; i < n; ++i) matrix.at(i, i) = 1;
  return matrix;
}

// Solves matrix x = b by Gaussian elimination with pivots.
inline std::vector<double> solve(Matrix matrix, std::vector<double> b) {
  const std::size_t n = matrix.n;
  for (std::size_t k = 0; k < n; ++k) {
    std::size_t pivot = k;
    for (std::size_t i = k; i < n; ++i) {
      if (std::fabs(matrix.at(i, k)) > std::fabs(matrix.at(pivot, k))) pivot = i;
    }
    for (std::size_t j = 0; j < n; ++j) std::swap(matrix.at(k, j), matrix.at(pivot, j));
    std::swap(b[k], b[pivot]);
    for (std::size_t i = k + 1; i < n; ++i) {
      const double share = matrix.at(i, k) / matrix.at(k, k);
      for (std::size_t j = k; j < n; ++j) matrix.at(i, j) -= share * matrix.at(k, j);
      b[i] -= share * b[k];
    }
  }
  for (std::size_t k = n; k-- > 0;) {
    for (std::size_t j = k + 1; j < n; ++j) b[k] -= matrix.at(k, j) * b[j];
    b[k] /= matrix.at(k, k);
  }
  return b;
}

// Rows of samples of one group as the factor sees them.
inline std::vector<std::vector<double>> rows_of(const KfacLayer& layer, const SmallBatch& batch, std::int64_t group,
                                                bool is_activations) {
  const KfacWindow point;
  const KfacWindow& w = is_activations ? layer.window[0] : point;  // windows are square here
  const std::int64_t channels = is_activations ? layer.channels() : layer.outputs, side = batch.high;
  const std::int64_t out = (side + w.pad_before + w.pad_after - w.size) / w.stride + 1;
  const double share = 1.0 / static_cast<double>(out * out);
  std::vector<std::vector<double>> rows;
  for (std::int64_t at = 0; at < kSmallImages * out * out; ++at) {
    const std::int64_t image = at / (out * out), y0 = at / out % out, x0 = at % out;
    rows.emplace_back();
    for (std::int64_t k = 0; k < channels * w.size * w.size; ++k) {
      const std::int64_t channel = k / (w.size * w.size), ky = k / w.size % w.size, kx = k % w.size;
      const std::int64_t y = y0 * w.stride - w.pad_before + ky, x = x0 * w.stride - w.pad_before + kx;
      const bool inside = y >= 0 && y < side && x >= 0 && x < side;
      const std::int64_t plane = (image * layer.groups + group) * channels + channel;
      rows.back().push_back(
          inside ? share * static_cast<double>(batch.values[static_cast<std::size_t>((plane * side + y) * side + x)])
                 : 0);
    }
    if (is_activations && layer.has_bias) rows.back().push_back(share);
  }
  return rows;
}

class ReferenceKfac {
 public:
  explicit ReferenceKfac(const SmallRun& run) : run_(run), layers_(small_job()) {
    for (const KfacLayer& layer : layers_) {
      for (std::int64_t group = 0; group < layer.groups; ++group) {
        a_.push_back(identity(static_cast<std::size_t>(layer.a_dim())));
        g_.push_back(identity(static_cast<std::size_t>(layer.g_dim())));
      }
    }
    inverted_a_ = a_;
    inverted_g_ = g_;
  }

  // `batch_ranks`: whose batches the factors see; one entry a layer for DP-KFAC, or empty for all ranks.
  Gradients step(std::int64_t step, const std::vector<int>& batch_ranks = {}) {
    if (step % run_.factor_update_steps == 0) update_factors(step, batch_ranks);
    if (step % run_.inv_update_steps == 0) {
      inverted_a_ = a_;
      inverted_g_ = g_;
    }
    const Gradients gradients = gradients_of(layers_, run_.world_size, -1, step);
    Gradients results;
    double product = 0;
    std::size_t block = 0;
    std::vector<std::vector<double>> all;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      all.emplace_back(gradients[i].size());
      for (std::int64_t group = 0; group < layers_[i].groups; ++group, ++block) {
        precondition(i, group, block, gradients[i], &all.back());
      }
      for (std::size_t e = 0; e < all.back().size(); ++e)
        product += all.back()[e] * static_cast<double>(gradients[i][e]);
    }
    const double squared = std::fabs(product * run_.values.lr * run_.values.lr);
    const double scale = run_.values.kl_clip > 0 ? std::min(1.0, std::sqrt(run_.values.kl_clip / squared)) : 1;
    for (const auto& values : all) {
      results.emplace_back();
      for (const double value : values) results.back().push_back(static_cast<float>(value * scale));
    }
    return results;
  }

 private:
  void update_factors(std::int64_t step, const std::vector<int>& batch_ranks) {
    std::size_t block = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      for (std::int64_t group = 0; group < layers_[i].groups; ++group, ++block) {
        for (const bool is_a : {true, false}) {
          Matrix& running = is_a ? a_[block] : g_[block];
          Matrix mean(running.n);
          int ranks = 0;
          for (int rank = 0; rank < run_.world_size; ++rank) {
            if (!batch_ranks.empty() && rank != batch_ranks[i]) continue;
            ++ranks;
            add(rows_of(
                    layers_[i],
                    is_a ? activations_of(layers_[i], rank, step, i) : output_gradients_of(layers_[i], rank, step, i),
                    group, is_a),
                &mean);
          }
          const double decay = run_.values.factor_decay;
          for (std::size_t k = 0; k < mean.values.size(); ++k) {
            running.values[k] = decay * running.values[k] + (1 - decay) / ranks * mean.values[k];
          }
        }
      }
    }
  }

  static void add(const std::vector<std::vector<double>>& rows, Matrix* sum) {
    for (const auto& row : rows) {
      for (std::size_t i = 0; i < sum->n; ++i) {
        for (std::size_t j = 0; j < sum->n; ++j) {
          sum->at(i, j) += row[i] * row[j] / static_cast<double>(rows.size());
        }
      }
    }
  }

  // G V A + damping V = W as one system of linear equations; or (G + damping_g) V (A + damping_a) = W.
  void precondition(std::size_t i, std::int64_t group, std::size_t block, const std::vector<float>& gradient,
                    std::vector<double>* result) const {
    const KfacLayer& layer = layers_[i];
    Matrix a = inverted_a_[block], g = inverted_g_[block];
    double added = run_.values.damping;
    if (run_.options.pi_correction || run_.options.inverse == KfacInverse::kCholesky) {
      double root_a = added, root_g = added;
      if (run_.options.pi_correction) {
        const double pi = std::sqrt(mean_diagonal(a) / mean_diagonal(g));
        root_a = pi * std::sqrt(added);
        root_g = std::sqrt(added) / pi;
      }
      for (std::size_t k = 0; k < a.n; ++k) a.at(k, k) += root_a;
      for (std::size_t k = 0; k < g.n; ++k) g.at(k, k) += root_g;
      added = 0;
    }
    const std::size_t size = a.n * g.n;
    Matrix system(size);
    std::vector<double> w(size);
    for (std::size_t r = 0; r < g.n; ++r) {
      for (std::size_t c = 0; c < a.n; ++c) {
        const std::size_t at = r * a.n + c;
        w[at] = static_cast<double>(gradient[place(layer, group, r, c)]);
        for (std::size_t r2 = 0; r2 < g.n; ++r2) {
          for (std::size_t c2 = 0; c2 < a.n; ++c2) system.at(at, r2 * a.n + c2) = g.at(r, r2) * a.at(c2, c);
        }
        system.at(at, at) += added;
      }
    }
    const std::vector<double> v = solve(std::move(system), std::move(w));
    for (std::size_t r = 0; r < g.n; ++r) {
      for (std::size_t c = 0; c < a.n; ++c) (*result)[place(layer, group, r, c)] = v[r * a.n + c];
    }
  }

  static double mean_diagonal(const Matrix& matrix) {
    double sum = 0;
    for (std::size_t k = 0; k < matrix.n; ++k) sum += matrix.at(k, k);
    return sum / static_cast<double>(matrix.n);
  }

  // Of element (row, column) of a group's matrix in the gradients: those of the weight first, then the bias's.
  static std::size_t place(const KfacLayer& layer, std::int64_t group, std::size_t row, std::size_t column) {
    const std::int64_t r = group * layer.outputs + static_cast<std::int64_t>(row);
    const auto c = static_cast<std::int64_t>(column);
    return static_cast<std::size_t>(c < layer.inputs ? r * layer.inputs + c
                                                     : layer.groups * layer.outputs * layer.inputs + r);
  }

  SmallRun run_;
  std::vector<KfacLayer> layers_;
  std::vector<Matrix> a_, g_, inverted_a_, inverted_g_;  // of each group of each layer
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What one batch adds to the Kronecker factors of a layer.
//
//   linear       A = X^T X / N, X: N x inputs, then a column of ones if there is a bias; G = D^T D / N
//   convolution  the same with a row for each image and output position: its patch (or output gradients), and the one,
//                divided by the number of positions S, and N = images x S
//
// Sources: KAISA (arXiv 2107.01739), section 2; the scaling of convolutions is that of gpauloski/kfac-pytorch.
#pragma once

#include <vector>

#include "cortado/kfac.h"
#include "cortado/status.h"

namespace cortado {

// Memory of the two functions below, kept from call to call.
struct FactorScratch {
  std::vector<float> matrix, patches, converted;
  std::vector<double> sums;

  std::int64_t bytes() const;
};

// What products of the rows of a batch are multiplied with: X^T X / N of rows divided by the number of positions, and
// by `scale`.
float mean_alpha(const KfacBatch& batch, std::int64_t positions, double scale = 1);

// Says what is wrong with a batch of activations, or of output gradients, for the layer.
Status check_activations(const KfacLayer& layer, const KfacBatch& batch);
Status check_output_gradients(const KfacLayer& layer, const KfacBatch& batch);

// Adds a checked batch to `triangles`: one triangle (kfac/triangle.h) a group. Output gradients are divided by `scale`.
void add_activation_factors(const KfacLayer& layer, const KfacBatch& batch, float* triangles, FactorScratch* scratch);
void add_gradient_factors(const KfacLayer& layer, const KfacBatch& batch, double scale, float* triangles,
                          FactorScratch* scratch);

}  // namespace cortado

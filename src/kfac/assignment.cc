// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "cortado/kfac.h"

namespace cortado {

namespace {

class Loads {
 public:
  explicit Loads(const KfacGrid& grid)
      : grid_(grid), of_rank_(static_cast<std::size_t>(grid.workers) * static_cast<std::size_t>(grid.columns)) {}

  int least_column() const {
    std::vector<double> of_column(static_cast<std::size_t>(grid_.columns));
    for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
      of_column[static_cast<std::size_t>(grid_.column_of(static_cast<int>(rank)))] += of_rank_[rank];
    }
    return static_cast<int>(std::min_element(of_column.begin(), of_column.end()) - of_column.begin());
  }

  // The rank of the column with the least load gets the work.
  int place(int column, double work) {
    int least = column;
    for (int row = 1; row < grid_.workers; ++row) {
      const int rank = row * grid_.columns + column;
      if (load(rank) < load(least)) least = rank;
    }
    load(least) += work;
    return least;
  }

 private:
  double& load(int rank) { return of_rank_[static_cast<std::size_t>(rank)]; }

  KfacGrid grid_;
  std::vector<double> of_rank_;
};

}  // namespace

std::vector<KfacPlacement> assign_layers(std::span<const KfacWork> layers, const KfacGrid& grid, bool colocate) {
  std::vector<std::size_t> order(layers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t left, std::size_t right) {
    return layers[left].a + layers[left].g > layers[right].a + layers[right].g;
  });

  Loads loads(grid);
  std::vector<KfacPlacement> placements(layers.size());
  for (const std::size_t i : order) {
    const KfacWork& work = layers[i];
    KfacPlacement& placement = placements[i];
    placement.column = loads.least_column();
    if (colocate) {
      placement.a_rank = placement.g_rank = loads.place(placement.column, work.a + work.g);
    } else if (work.a >= work.g) {
      placement.a_rank = loads.place(placement.column, work.a);
      placement.g_rank = loads.place(placement.column, work.g);
    } else {
      placement.g_rank = loads.place(placement.column, work.g);
      placement.a_rank = loads.place(placement.column, work.a);
    }
  }
  return placements;
}

KfacVolumes kfac_volumes(std::span<const KfacLayer> layers) {
  KfacVolumes volumes;
  for (const KfacLayer& layer : layers) {
    const std::int64_t a = layer.a_dim(), g = layer.g_dim();
    volumes.gradient += layer.gradient_elems();
    volumes.a += layer.groups * a * a;
    volumes.g += layer.groups * g * g;
    volumes.triangles += layer.groups * (a * (a + 1) / 2 + g * (g + 1) / 2);
    volumes.eigenvectors += layer.groups * (a * a + g * g);
    volumes.eigenvalues += layer.groups * (a + g);
    volumes.eigenvalue_products += layer.groups * a * g;
  }
  return volumes;
}

}  // namespace cortado

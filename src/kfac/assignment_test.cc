// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cortado/kfac.h"

namespace cortado {
namespace {

struct Case {
  std::string what;
  std::vector<KfacWork> layers;
  KfacGrid grid;
  bool colocate;
  std::vector<KfacPlacement> expected;
};

TEST(KfacAssignment, Table) {
  const std::vector<Case> cases = {
      {"nothing", {}, {1, 4}, true, {}},
      {"one rank", {{1, 2}, {3, 4}}, {1, 1}, true, {{0, 0, 0}, {0, 0, 0}}},
      {"MEM-OPT: the longest first, then the least loaded",
       {{1, 0}, {4, 0}, {2, 0}, {3, 0}},
       {1, 2},
       true,
       {{0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}}},
      {"MEM-OPT: ties go by index", {{1, 1}, {1, 1}, {1, 1}}, {1, 3}, true, {{0, 0, 0}, {1, 1, 1}, {2, 2, 2}}},
      {"COMM-OPT: one column, any of its ranks",
       {{5, 5}, {3, 3}, {2, 2}},
       {3, 1},
       true,
       {{0, 0, 0}, {0, 1, 1}, {0, 2, 2}}},
      {"COMM-OPT: the factors of a layer on two ranks", {{8, 1}, {2, 5}}, {2, 1}, false, {{0, 0, 1}, {0, 1, 1}}},
      {"a layer's own rank bears both", {{8, 1}, {2, 5}}, {2, 1}, true, {{0, 0, 0}, {0, 1, 1}}},
      {"HYBRID-OPT: columns {0, 2} and {1, 3}",
       {{4, 4}, {3, 3}, {2, 2}, {1, 1}},
       {2, 2},
       true,
       {{0, 0, 0}, {1, 1, 1}, {1, 3, 3}, {0, 2, 2}}},
      {"HYBRID-OPT: factors stay in their column", {{4, 3}, {9, 1}}, {2, 2}, false, {{1, 1, 3}, {0, 0, 2}}},
  };
  for (const Case& c : cases) EXPECT_EQ(assign_layers(c.layers, c.grid, c.colocate), c.expected) << c.what;
}

TEST(KfacAssignment, LoadsOfManyEqualLayersDifferByOne) {
  const std::vector<KfacWork> layers(54, KfacWork{1, 1});
  for (const int ranks : {1, 4, 8, 64}) {
    std::vector<int> count(static_cast<std::size_t>(ranks));
    for (const KfacPlacement& placement : assign_layers(layers, {1, ranks}, true)) {
      EXPECT_EQ(placement.a_rank, placement.column);
      ++count[static_cast<std::size_t>(placement.a_rank)];
    }
    EXPECT_LE(*std::max_element(count.begin(), count.end()) - *std::min_element(count.begin(), count.end()), 1);
  }
}

TEST(KfacAssignment, RowsAndColumnsOfTheGrid) {
  const KfacGrid grid{.workers = 2, .columns = 3};
  std::vector<int> columns, rows;
  for (int rank = 0; rank < 6; ++rank) {
    columns.push_back(grid.column_of(rank));
    rows.push_back(grid.row_of(rank));
  }
  EXPECT_EQ(columns, (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(rows, (std::vector<int>{0, 0, 0, 1, 1, 1}));
}

// ---- volumes of known models ---------------------------------------------------------------------------------------

KfacLayer layer(std::int64_t inputs, std::int64_t outputs, bool has_bias) {
  return {.name = "", .inputs = inputs, .outputs = outputs, .has_bias = has_bias};
}

std::vector<KfacLayer> resnet50() {
  std::vector<KfacLayer> layers = {layer(3 * 49, 64, false)};
  std::int64_t inputs = 64, width = 64;
  for (const int blocks : {3, 4, 6, 3}) {
    for (int block = 0; block < blocks; ++block) {
      layers.push_back(layer(inputs, width, false));
      layers.push_back(layer(width * 9, width, false));
      layers.push_back(layer(width, 4 * width, false));
      if (block == 0) layers.push_back(layer(inputs, 4 * width, false));
      inputs = 4 * width;
    }
    width *= 2;
  }
  layers.push_back(layer(inputs, 1000, true));
  return layers;
}

std::vector<KfacLayer> transformer(int blocks, std::int64_t hidden, bool qkv_bias) {
  std::vector<KfacLayer> layers;
  for (int block = 0; block < blocks; ++block) {
    for (int i = 0; i < 3; ++i) layers.push_back(layer(hidden, hidden, qkv_bias));
    layers.push_back(layer(hidden, hidden, true));
    layers.push_back(layer(hidden, 4 * hidden, true));
    layers.push_back(layer(4 * hidden, hidden, true));
  }
  return layers;
}

// The table of known volumes: layers, gradient, sums of a^2 and of g^2; MB of fp32 of A + G, of triangles, and of
// eigenvectors with products of eigenvalues.
TEST(KfacVolumes, OfKnownModels) {
  struct Known {
    std::vector<KfacLayer> layers;
    std::size_t count;
    std::int64_t gradient, a, g;
    double factors_mb, triangles_mb, eigen_mb;
  };
  const std::vector<Known> models = {
      {resnet50(), 54, 25503912, 124642410, 29209152, 615.4, 307.9, 717.4},
      {transformer(24, 1024, true), 144, 302211072, 528924816, 528482304, 4229.6, 2115.7, 5438.5},
      {transformer(12, 768, false), 72, 84989952, 148746276, 148635648, 1189.5, 595.1, 1529.5},
  };
  for (const Known& known : models) {
    EXPECT_EQ(known.layers.size(), known.count);
    const KfacVolumes volumes = kfac_volumes(known.layers);
    EXPECT_EQ(volumes.gradient, known.gradient);
    EXPECT_EQ(volumes.a, known.a);
    EXPECT_EQ(volumes.g, known.g);
    EXPECT_EQ(volumes.eigenvectors, known.a + known.g);
    EXPECT_EQ(volumes.eigenvalue_products, known.gradient);
    const auto mb = [](std::int64_t elems) { return static_cast<double>(elems) * 4e-6; };
    EXPECT_NEAR(mb(volumes.a + volumes.g), known.factors_mb, 0.05);
    EXPECT_NEAR(mb(volumes.triangles), known.triangles_mb, 0.05);
    EXPECT_NEAR(mb(volumes.eigenvectors + volumes.eigenvalue_products), known.eigen_mb, 0.05);
  }
  const KfacVolumes resnet = kfac_volumes(models[0].layers);
  EXPECT_NEAR(static_cast<double>(resnet.a + resnet.g) / static_cast<double>(resnet.gradient), 6.03, 0.005);
}

TEST(KfacVolumes, GroupsAreMatricesOfTheirOwn) {
  KfacLayer grouped = layer(9, 2, true);
  grouped.groups = 4;
  const KfacVolumes volumes = kfac_volumes({&grouped, 1});
  EXPECT_EQ(volumes.gradient, 4 * 2 * 10);
  EXPECT_EQ(volumes.a, 4 * 100);
  EXPECT_EQ(volumes.g, 4 * 4);
  EXPECT_EQ(volumes.triangles, 4 * (55 + 3));
  EXPECT_EQ(volumes.eigenvalues, 4 * 12);
}

}  // namespace
}  // namespace cortado

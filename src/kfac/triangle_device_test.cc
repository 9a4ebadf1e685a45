// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/triangle_device.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/device_emulation.h"
#include "core/philox.h"

namespace cortado {
namespace {

struct Sizes {
  std::int64_t n, count;
};

class TriangleOnDevice : public testing::TestWithParam<Sizes> {
 protected:
  static std::vector<float> normal(std::int64_t elems) {
    std::vector<float> values(static_cast<std::size_t>(elems));
    philox_fill_normal(3, 0, 0, values.data(), elems);
    return values;
  }
  std::size_t matrix_elems() const { return static_cast<std::size_t>(GetParam().n * GetParam().n); }
};

TEST_P(TriangleOnDevice, ExpandingIsCopyingAndDamping) {
  const auto [n, count] = GetParam();
  const std::vector<float> triangles = normal(count * triangle_elems(n)), dampings = normal(count);
  std::vector<float> found(matrix_elems() * static_cast<std::size_t>(count), -1.0f);
  EmulatedDevice(nullptr).launch(element_blocks(count * n * n), ExpandTriangles{.n = n,
                                                                                .count = count,
                                                                                .triangles = triangles.data(),
                                                                                .dampings = dampings.data(),
                                                                                .matrices = found.data()});
  for (std::int64_t m = 0; m < count; ++m) {
    std::vector<float> expected(matrix_elems());
    copy_from_triangle(n, triangles.data() + m * triangle_elems(n), expected.data());
    for (std::int64_t i = 0; i < n; ++i) {
      expected[static_cast<std::size_t>(i * n + i)] += dampings[static_cast<std::size_t>(m)];
    }
    const auto first = found.begin() + m * n * n;
    EXPECT_EQ(std::vector<float>(first, first + n * n), expected) << m;
  }
}

TEST_P(TriangleOnDevice, MirroringCopiesTheLowerTriangle) {
  const auto [n, count] = GetParam();
  const std::vector<float> before = normal(count * n * n);
  std::vector<float> found = before;
  EmulatedDevice(nullptr).launch(element_blocks(count * n * n),
                                 MirrorMatrices{.n = n, .count = count, .matrices = found.data()});
  for (std::int64_t m = 0; m < count; ++m) {
    std::vector<float> triangle(static_cast<std::size_t>(triangle_elems(n))), expected(matrix_elems());
    copy_to_triangle(n, before.data() + m * n * n, triangle.data());
    copy_from_triangle(n, triangle.data(), expected.data());
    const auto first = found.begin() + m * n * n;
    EXPECT_EQ(std::vector<float>(first, first + n * n), expected) << m;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, TriangleOnDevice,
                         testing::Values(Sizes{1, 1}, Sizes{1, 5}, Sizes{2, 3}, Sizes{16, 1}, Sizes{17, 4},
                                         Sizes{33, 2}, Sizes{5, 60}));

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/linalg_device.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "core/device_emulation.h"

namespace cortado {
namespace {

TEST(BeginBatchTest, MakesIdentitiesAndSaysWhereMatricesLie) {
  for (const std::int64_t n : {1, 2, 16, 33}) {
    for (const std::int64_t count : {1, 3, 60}) {
      const auto elems = static_cast<std::size_t>(count * n * n), matrices_count = static_cast<std::size_t>(count);
      std::vector<float> matrices(elems), identities(elems, -1.0f);
      std::vector<float*> matrix_pointers(matrices_count), identity_pointers(matrices_count);
      const BeginBatch begin{.n = n,
                             .count = count,
                             .matrices = matrices.data(),
                             .identities = identities.data(),
                             .matrix_pointers = matrix_pointers.data(),
                             .identity_pointers = identity_pointers.data()};
      EmulatedDevice(nullptr).launch(begin.blocks(), begin);
      for (std::int64_t m = 0; m < count; ++m) {
        EXPECT_EQ(matrix_pointers[static_cast<std::size_t>(m)], matrices.data() + m * n * n);
        EXPECT_EQ(identity_pointers[static_cast<std::size_t>(m)], identities.data() + m * n * n);
      }
      for (std::int64_t at = 0; at < count * n * n; ++at) {
        const std::int64_t row = at % (n * n) / n, col = at % n;
        ASSERT_EQ(identities[static_cast<std::size_t>(at)], row == col ? 1.0f : 0.0f) << n << ", element " << at;
      }
    }
  }
}

}  // namespace
}  // namespace cortado

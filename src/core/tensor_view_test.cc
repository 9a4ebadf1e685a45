// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/tensor_view.h"

#include <gtest/gtest.h>

#include <string>

#include "cortado/version.h"

namespace cortado {
namespace {

TEST(TensorView, SizesFollowFromShapeAndDtype) {
  TensorView view{.data = nullptr, .dtype = DType::kBFloat16, .rows = 3, .cols = 5};
  EXPECT_EQ(view.elems(), 15);
  EXPECT_EQ(ConstTensorView(view).size_bytes(), 30);
  view.dtype = DType::kUint8;
  EXPECT_EQ(view.size_bytes(), 15);
}

TEST(TensorView, DtypesHaveNamesAndSizes) {
  EXPECT_EQ(dtype_name(DType::kFloat32), "fp32");
  EXPECT_EQ(dtype_name(DType::kFloat16), "fp16");
  EXPECT_EQ(dtype_name(DType::kBFloat16), "bf16");
  EXPECT_EQ(dtype_name(DType::kUint8), "uint8");
  const auto unknown = static_cast<DType>(77);
  EXPECT_EQ(dtype_name(unknown), "unknown dtype");
  EXPECT_EQ(dtype_bytes(unknown), 0u);
}

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_EQ(version(), std::to_string(CORTADO_VERSION_MAJOR) + "." + std::to_string(CORTADO_VERSION_MINOR) + "." +
                           std::to_string(CORTADO_VERSION_PATCH));
}

}  // namespace
}  // namespace cortado

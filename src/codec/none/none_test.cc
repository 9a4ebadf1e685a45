// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/none/none.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace cortado {
namespace {

TEST(None, TheWorkedExampleOfItsSpec) {
  const std::unique_ptr<Codec> codec = make_codec("none").value();
  const float values[] = {1.0f, -2.5f};
  std::vector<std::byte> payload(codec->max_payload_bytes(1, 2, DType::kFloat32));
  EXPECT_EQ(codec->encode({values, DType::kFloat32, 1, 2}, {}, payload, {}).value(), 8u);
  const unsigned char expected[] = {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x20, 0xc0};
  EXPECT_EQ(std::memcmp(payload.data(), expected, sizeof(expected)), 0);
}

TEST(None, TakesNoParameters) {
  EXPECT_EQ(make_codec("none(4)").status().message(), "none(4): none takes no parameters");
}

}  // namespace
}  // namespace cortado

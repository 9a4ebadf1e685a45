// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/streaming.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace cortado {
namespace {

TEST(StreamCopy, CopiesWhatItIsToldAndNothingElse) {
  constexpr std::size_t kRoom = 512;
  std::vector<std::uint8_t> from(kRoom);
  std::iota(from.begin(), from.end(), std::uint8_t{1});
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 128, 200}) {
    for (std::size_t at = 0; at < 66; ++at) {
      std::vector<std::uint8_t> to(kRoom), expected(kRoom);
      std::copy_n(from.begin() + 3, bytes, expected.begin() + static_cast<std::ptrdiff_t>(at));
      stream_copy(from.data() + 3, bytes, to.data() + at);
      finish_streams();
      ASSERT_EQ(to, expected) << bytes << " bytes to " << at;
    }
  }
}

TEST(StreamCopy, PiecesFollowEachOther) {
  std::vector<std::uint8_t> from(1000), to(1000);
  std::iota(from.begin(), from.end(), std::uint8_t{0});
  for (std::size_t at = 0; at < from.size(); at += 100) stream_copy(from.data() + at, 100, to.data() + at);
  finish_streams();
  EXPECT_EQ(to, from);
}

}  // namespace
}  // namespace cortado

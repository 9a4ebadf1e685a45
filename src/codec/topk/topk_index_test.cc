// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_index.h"

#include <gtest/gtest.h>

#include <string>

#include "codec/topk/topk_reference.h"
#include "core/philox.h"

namespace cortado {
namespace {

using Bytes = std::vector<std::byte>;
using Positions = std::vector<std::int64_t>;

Bytes written(IndexKind kind, const Positions& positions, std::int64_t elems) {
  Bytes section(max_index_bytes(kind, elems, static_cast<std::int64_t>(positions.size())));
  section.resize(write_index(kind, positions, elems, section.data()));
  return section;
}

Positions read(const Bytes& section, std::int64_t elems) {
  Positions positions;
  const std::int64_t kept = read_index_header(section, IndexKind::kSmaller, 1, elems).value();
  EXPECT_TRUE(check_index_section(section, elems, kept).ok());
  for_each_position(section, elems, kept, [&](std::int64_t position) { positions.push_back(position); });
  return positions;
}

// Each position with the probability 1 / every.
Positions random_positions(std::int64_t elems, std::uint32_t every) {
  Positions positions;
  for (std::int64_t i = 0; i < elems; ++i) {
    const PhiloxBlock numbers = philox_block(1, every, 0, static_cast<std::uint64_t>(i / 4));
    if (numbers[static_cast<std::size_t>(i % 4)] < 0xffffffffu / every) positions.push_back(i);
  }
  if (positions.empty()) positions.push_back(elems / 2);
  return positions;
}

TEST(TopkIndex, TheBytesOfTheReferenceAndBack) {
  for (const std::int64_t elems : {1, 2, 7, 8, 9, 63, 64, 65, 1000, 4099, 100000}) {
    for (const std::uint32_t every : {1u, 2u, 3u, 10u, 100u, 3000u}) {
      Positions positions = random_positions(elems, every);
      for (const Positions& p : {positions, Positions{0}, Positions{elems - 1}}) {
        for (const IndexKind kind : {IndexKind::kDelta, IndexKind::kBitmap, IndexKind::kSmaller}) {
          const Bytes section = written(kind, p, elems);
          ASSERT_EQ(section, reference::index_section(kind, p, elems)) << elems << " every " << every;
          ASSERT_EQ(read(section, elems), p) << elems << " every " << every;
        }
      }
    }
  }
}

TEST(TopkIndex, PositionsBeyond32Bits) {
  constexpr std::int64_t kElems = (std::int64_t{1} << 40) + 17;
  const Positions positions = {0, 1, (std::int64_t{1} << 31) + 1, (std::int64_t{1} << 39) + 12345, kElems - 1};
  EXPECT_EQ(read(written(IndexKind::kDelta, positions, kElems), kElems), positions);
}

TEST(TopkIndex, NoPositionsMakeALongerSectionThanIsSaid) {
  for (const std::int64_t elems : {10, 100, 1000}) {
    for (std::int64_t kept = 1; kept <= elems; kept += 1 + kept / 7) {
      Positions last(static_cast<std::size_t>(kept));  // the whole rest in the first gap
      for (std::int64_t i = 0; i < kept; ++i) last[static_cast<std::size_t>(i)] = elems - kept + i;
      EXPECT_LE(written(IndexKind::kDelta, last, elems).size(), max_index_bytes(IndexKind::kDelta, elems, kept));
      EXPECT_LE(max_index_bytes(IndexKind::kSmaller, elems, kept), max_index_bytes(IndexKind::kBitmap, elems, kept));
      // Room for a larger number of values is enough for a smaller one.
      EXPECT_LE(max_index_bytes(IndexKind::kDelta, elems, kept),
                max_index_bytes(IndexKind::kDelta, elems, std::min(elems, kept + 1)));
    }
  }
}

// About the entropy of the positions: 8.08 bits each at 1 %.
TEST(TopkIndex, SizesAtUsualDensities) {
  for (const auto& [every, bits] : {std::pair{10u, 4.9}, {100u, 8.3}, {1000u, 11.7}}) {
    const Positions positions = random_positions(1000000, every);
    const Bytes section = written(IndexKind::kSmaller, positions, 1000000);
    EXPECT_LT(8.0 * static_cast<double>(section.size()) / static_cast<double>(positions.size()), bits) << every;
  }
}

// ---- damage ----

std::string error_of(const Bytes& section, std::int64_t elems, std::int64_t kept) {
  const Result<std::int64_t> found = read_index_header(section, IndexKind::kSmaller, kept, kept);
  const Status status = found.ok() ? check_index_section(section, elems, kept) : found.status();
  EXPECT_EQ(status.code(), StatusCode::kCorruptData);
  return status.message();
}

// 3 of 100: b = 4, two bytes of low bits, of which the last four bits are not used, then "00110001".
const Positions kThree = {37, 40, 99};

TEST(TopkIndex, DamagedHeaders) {
  const Bytes section = written(IndexKind::kDelta, kThree, 100);
  EXPECT_EQ(error_of(Bytes(8), 100, 3), "8 bytes, expected at least the 9 of the index header");
  Bytes damaged = section;
  damaged[0] = std::byte{3};
  EXPECT_EQ(error_of(damaged, 100, 3), "the index section is of kind 3, expected 1 (delta) or 2 (bitmap)");
  damaged = section;
  damaged[8] = std::byte{0x80};
  EXPECT_EQ(error_of(damaged, 100, 3), "-9223372036854775805 kept values, expected 3 to 3");
  EXPECT_EQ(read_index_header(section, IndexKind::kBitmap, 1, 100).status().message(),
            "the index section is of kind 1, expected 2 (bitmap)");
}

TEST(TopkIndex, DamagedDeltas) {
  const Bytes section = written(IndexKind::kDelta, kThree, 100);
  ASSERT_EQ(rice_bits(100, 3), 4);
  Bytes damaged = section;
  damaged.pop_back();
  damaged.pop_back();
  EXPECT_EQ(error_of(damaged, 100, 3), "the delta index section has 10 bytes, expected 12 to 13");
  damaged = section;
  damaged.push_back(std::byte{0});
  damaged.push_back(std::byte{0});
  EXPECT_EQ(error_of(damaged, 100, 3), "the delta index section has 14 bytes, expected 12 to 13");
  damaged = section;
  damaged.push_back(std::byte{0});
  EXPECT_EQ(error_of(damaged, 100, 3), "the delta index section does not end with its last position");
  damaged = section;
  damaged[11] |= std::byte{1};
  EXPECT_EQ(error_of(damaged, 100, 3), "the delta index section has 4 positions, its header says 3");
  damaged = section;
  damaged[10] |= std::byte{0x80};
  EXPECT_EQ(error_of(damaged, 100, 3), "the delta index section does not end with its last position");
  damaged = section;
  damaged[9] |= std::byte{0x0f};
  EXPECT_EQ(error_of(damaged, 100, 3), "the last position is 109, the tensor has 100 elements");
}

TEST(TopkIndex, DamagedBitmaps) {
  const Bytes section = written(IndexKind::kBitmap, kThree, 100);
  Bytes damaged = section;
  damaged.pop_back();
  EXPECT_EQ(error_of(damaged, 100, 3), "the bitmap index section has 21 bytes, expected 22 to 22");
  damaged = section;
  damaged[9] |= std::byte{1};
  EXPECT_EQ(error_of(damaged, 100, 3), "the bitmap index section has 4 positions, its header says 3");
  damaged = section;
  damaged.back() = std::byte{0x10};
  EXPECT_EQ(error_of(damaged, 100, 3), "the bitmap has positions behind the tensor's 100 elements");
}

}  // namespace
}  // namespace cortado

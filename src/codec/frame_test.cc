// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/hash.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

using Bytes = std::vector<std::byte>;

class Frame : public testing::Test {
 protected:
  Frame() : row_(*find_codec("cast")), codec_(make_codec("cast(bf16)").value()) {
    bytes_.resize(kFrameHeaderBytes + 8);
    EXPECT_EQ(encode_frame(row_, *codec_, {values_, DType::kFloat32, 2, 2}, {}, bytes_, {}).value(), bytes_.size());
  }

  Status decode() { return decode_frame(*codec_, row_, bytes_, {output_, DType::kFloat32, 2, 2}, {}); }

  // Changes a byte of the header and makes the checksum right again.
  void set(std::size_t at, int value) {
    bytes_[at] = static_cast<std::byte>(value);
    const std::uint64_t checksum = fnv1a_64({reinterpret_cast<const char*>(bytes_.data()), 32});
    std::memcpy(bytes_.data() + 32, &checksum, sizeof(checksum));
  }

  const CodecRow& row_;
  std::unique_ptr<Codec> codec_;
  const float values_[4] = {1.0f, -2.5f, 0.5f, 3.0f};
  float output_[4] = {};
  Bytes bytes_;
};

TEST_F(Frame, TheWorkedExampleOfTheReadme) {
  const unsigned char expected[] = {0x43, 0x52, 0x54, 0x44, 0x01, 0x02, 0x01, 0x00, 0x02, 0x00, 0x00, 0x00,
                                    0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                                    0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x72, 0xe4, 0xe8, 0x09,
                                    0x7b, 0xde, 0xa1, 0xe4, 0x80, 0x3f, 0x20, 0xc0, 0x00, 0x3f, 0x40, 0x40};
  ASSERT_EQ(bytes_.size(), sizeof(expected));
  EXPECT_EQ(std::memcmp(bytes_.data(), expected, sizeof(expected)), 0);
}

TEST_F(Frame, RoundTripAndHeader) {
  ASSERT_TRUE(decode().ok());
  EXPECT_EQ(std::memcmp(values_, output_, sizeof(values_)), 0);
  bytes_.resize(bytes_.size() + 10);  // frames may follow one another
  const FrameInfo info = read_frame_header(bytes_).value();
  EXPECT_EQ(info.wire_id, row_.wire_id);
  EXPECT_EQ(info.codec_version, row_.version);
  EXPECT_EQ(info.dtype, DType::kFloat32);
  EXPECT_EQ(info.rows, 2);
  EXPECT_EQ(info.cols, 2);
  EXPECT_EQ(info.payload_bytes, 8u);
  EXPECT_TRUE(decode().ok());
}

TEST_F(Frame, TheHeaderIsSafeFromEveryBitFlip) {
  for (std::size_t bit = 0; bit < kFrameHeaderBytes * 8; ++bit) {
    bytes_[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(read_frame_header(bytes_).ok()) << "bit " << bit;
    bytes_[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(read_frame_header(bytes_).ok());
}

TEST_F(Frame, EveryTruncationIsCorruptData) {
  for (std::size_t length = 0; length < bytes_.size(); ++length) {
    const Bytes part(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(read_frame_header(part).status().code(), StatusCode::kCorruptData) << length;
  }
  bytes_.resize(47);
  EXPECT_EQ(decode().message(), "frame: cut short: 7 bytes behind the header, expected 8 of payload");
  bytes_.resize(39);
  EXPECT_EQ(decode().message(), "frame: cut short: 39 bytes, a header has 40");
}

TEST_F(Frame, ForeignAndNewerFramesAreNamed) {
  bytes_[0] = std::byte{0x50};
  EXPECT_EQ(decode().to_string(),
            "corrupt data: frame: begins with 50 52 54 44, expected 43 52 54 44 (a Cortado frame)");
  bytes_[0] = std::byte{0x43};
  set(4, 2);
  EXPECT_EQ(decode().to_string(), "unsupported: frame: format version 2, this build reads version 1");
  set(4, 1);
  set(5, 99);
  EXPECT_EQ(decode().to_string(), "corrupt data: cast: frame: codec id is 99, expected 2");
  set(5, row_.wire_id);
  set(6, 7);
  EXPECT_EQ(decode().to_string(), "unsupported: cast: frame: payload version 7, this build reads version 1");
  set(6, 1);
  set(7, 200);
  EXPECT_EQ(decode().to_string(), "corrupt data: frame: 2 x 2 elements of dtype 200 are no tensor");
}

TEST_F(Frame, ImpossibleSizesAreRefused) {
  set(15, 0x80);  // rows < 0
  EXPECT_EQ(decode().code(), StatusCode::kCorruptData);
  set(15, 0x40);  // rows * cols overflows
  set(23, 0x40);
  EXPECT_EQ(decode().code(), StatusCode::kCorruptData);
  set(15, 0);
  set(23, 0);
  set(31, 0xff);  // payload beyond the frame
  EXPECT_EQ(decode().code(), StatusCode::kCorruptData);
  set(31, 0);
  set(24, 7);  // not what the codec writes for the shape
  EXPECT_EQ(decode().to_string(),
            "corrupt data: frame: cast(bf16): decode of 2 x 2 fp32: the payload has 7 bytes, expected 8");
  set(24, 9);
  bytes_.resize(kFrameHeaderBytes + 9);
  EXPECT_EQ(decode().to_string(), "corrupt data: cast: frame: payload of 9 bytes, expected at most 8");
}

TEST_F(Frame, TheOutputMustHaveTheFramesShape) {
  EXPECT_EQ(decode_frame(*codec_, row_, bytes_, {output_, DType::kFloat32, 1, 4}, {}).to_string(),
            "invalid argument: cast: frame: holds 2 x 2 fp32, the output is 1 x 4 fp32");
}

TEST_F(Frame, EncodeNeedsRoomAndApartMemory) {
  Bytes small(kFrameHeaderBytes - 1);
  EXPECT_EQ(encode_frame(row_, *codec_, {values_, DType::kFloat32, 2, 2}, {}, small, {}).status().message(),
            "cast: frame: room for 39 bytes, expected at least 40");
  small.resize(kFrameHeaderBytes + 7);
  EXPECT_EQ(encode_frame(row_, *codec_, {values_, DType::kFloat32, 2, 2}, {}, small, {}).status().message(),
            "cast(bf16): encode of 2 x 2 fp32: the payload has 7 bytes, expected at least 8");
  // The input lies in the header, where the codec itself would not see it.
  EXPECT_EQ(encode_frame(row_, *codec_, {bytes_.data(), DType::kFloat32, 2, 2}, {}, bytes_, {}).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace cortado

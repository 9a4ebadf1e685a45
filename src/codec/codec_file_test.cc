// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/codec_file.h"

#include <gtest/gtest.h>

#include <cstring>

#include "codec/conformance_cases.h"
#include "core/crc32.h"

namespace cortado {
namespace {

using Bytes = std::vector<std::byte>;

Result<Bytes> compress(const CodecFileInfo& info, const Bytes& tensor, std::uint64_t seed = 0) {
  Result<CodecFileWriter> writer = CodecFileWriter::create(info, seed);
  if (!writer.ok()) return writer.status();
  const auto header = writer.value().header();
  Bytes file(header.begin(), header.end());
  while (writer.value().next_chunk().elems() > 0) {
    const auto at = static_cast<std::size_t>(writer.value().next_chunk().first_elem) * dtype_bytes(info.dtype);
    Result<std::span<const std::byte>> chunk = writer.value().encode_chunk(tensor.data() + at);
    if (!chunk.ok()) return chunk.status();
    file.insert(file.end(), chunk.value().begin(), chunk.value().end());
  }
  return file;
}

Result<Bytes> decompress(const Bytes& file) {
  Result<CodecFileReader> reader = CodecFileReader::open(file);
  if (!reader.ok()) return reader.status();
  Bytes tensor;
  while (reader.value().next_chunk().elems() > 0) {
    const std::size_t at = tensor.size();
    tensor.resize(at + static_cast<std::size_t>(reader.value().next_chunk().elems()) *
                           dtype_bytes(reader.value().info().dtype));
    const Status status = reader.value().decode_chunk(tensor.data() + at);
    if (!status.ok()) return status;
  }
  return tensor;
}

CodecFileInfo info_of(std::string spec, std::vector<std::int64_t> shape, DType dtype = DType::kFloat32) {
  return {.spec = std::move(spec), .dtype = dtype, .source = FileSource::kNpy, .shape = std::move(shape)};
}

Bytes values_of(const CodecFileInfo& info, bool special = false) {
  std::int64_t elems = 1;
  for (const std::int64_t size : info.shape) elems *= size;
  return make_values(info.dtype, elems, special);
}

Bytes small_file() { return compress(info_of("cast(bf16)", {2, 2}), values_of(info_of("", {2, 2}))).value(); }

TEST(CodecFile, TheWorkedExampleOfTheWireFormat) {
  const float values[] = {1.0f, -2.5f, 0.5f, 3.0f};
  Bytes tensor(sizeof(values));
  std::memcpy(tensor.data(), values, sizeof(values));
  const Bytes file = compress(info_of("cast", {2, 2}), tensor).value();
  std::string hex;
  for (const std::byte byte : file) {
    char text[4];
    std::snprintf(text, sizeof(text), "%02x", static_cast<unsigned>(byte));
    hex += text;
  }
  EXPECT_EQ(hex,
            "4352544601000102"
            "0400000000000000"
            "010000000a00000000000000f2e7b56c"
            "02000000000000000200000000000000"
            "0201"
            "63617374286266313629"
            "c87f17d7"
            "00000000000000000800000000000000ddce192f3ca30776"
            "803f20c0003f4040");
}

TEST(CodecFile, EveryShapeComesBackWithItsInfo) {
  const std::vector<std::vector<std::int64_t>> shapes = {{}, {1}, {7}, {0}, {3, 0}, {0, 3}, {1, 5}, {5, 1}, {2, 3, 4}};
  for (const DType dtype : kAllDTypes) {
    for (const auto& shape : shapes) {
      CodecFileInfo info = info_of("none", shape, dtype);
      info.source = FileSource::kRaw;
      const Bytes tensor = values_of(info, true);
      const Bytes file = compress(info, tensor).value();
      const CodecFileInfo read = CodecFileReader::open(file).value().info();
      EXPECT_EQ(read.spec, "none");
      EXPECT_EQ(read.dtype, dtype);
      EXPECT_EQ(read.source, FileSource::kRaw);
      EXPECT_EQ(read.shape, shape);
      EXPECT_EQ(decompress(file).value(), tensor);
    }
  }
}

TEST(CodecFile, EveryCodecDecodesToWhatItDecodesToByItself) {
  for (const std::string& spec : all_examples()) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const CodecFileInfo info = info_of(spec, {17, 33});
    const Bytes tensor = values_of(info);
    Bytes payload(codec->max_payload_bytes(17, 33, info.dtype)), scratch(codec->scratch_bytes(17, 33, info.dtype));
    const Result<std::uint64_t> bytes =
        codec->encode({tensor.data(), info.dtype, 17, 33}, {.seed = 5}, payload, scratch);
    if (bytes.status().code() == StatusCode::kUnsupported) continue;  // not a codec of float32
    Bytes expected(tensor.size());
    ASSERT_TRUE(
        codec->decode(std::span(payload).first(bytes.value()), {expected.data(), info.dtype, 17, 33}, scratch).ok());
    EXPECT_EQ(decompress(compress(info, tensor, 5).value()).value(), expected) << spec;
  }
}

// Each chunk is a tensor of its own: two of the same values do not keep the same ones.
TEST(CodecFile, ChunksDrawOtherNumbers) {
  CodecFileInfo info = info_of("randk(density=0.1)", {2000});
  info.chunk_elems = 1000;
  const Bytes tensor = bytes_of(std::vector<float>(2000, 1.0f), DType::kFloat32);
  const Bytes decoded = decompress(compress(info, tensor).value()).value();
  ASSERT_EQ(decoded.size(), tensor.size());
  const auto half = decoded.begin() + static_cast<std::ptrdiff_t>(decoded.size() / 2);
  EXPECT_FALSE(std::equal(decoded.begin(), half, half));
}

TEST(CodecFile, ChunksAreWholeRowsOrPartsOfOneRow) {
  CodecFileInfo info = info_of("sign", {10, 100});
  info.chunk_elems = 350;
  const CodecFileWriter rows = CodecFileWriter::create(info).value();
  EXPECT_EQ(rows.info().chunk_elems, 300);
  EXPECT_EQ(rows.next_chunk().rows, 3);
  EXPECT_EQ(rows.next_chunk().cols, 100);
  info.shape = {1000};
  const CodecFileWriter one_row = CodecFileWriter::create(info).value();
  EXPECT_EQ(one_row.next_chunk().rows, 1);
  EXPECT_EQ(one_row.next_chunk().cols, 350);
  info.shape = {10, 1000};
  EXPECT_EQ(CodecFileWriter::create(info).value().info().chunk_elems, 1000) << "at least one row";

  info = info_of("none", {10, 100});
  for (const std::int64_t chunk_elems : {1, 100, 350, 999, 5000}) {
    info.chunk_elems = chunk_elems;
    EXPECT_EQ(decompress(compress(info, values_of(info)).value()).value(), values_of(info)) << chunk_elems;
  }
}

TEST(CodecFile, ChunksDrawOtherNumbersAndSeedsTooButEqualCallsTheSame) {
  CodecFileInfo info = info_of("acp(rank=1)", {64, 8});
  const Bytes tensor = values_of(info);
  EXPECT_EQ(compress(info, tensor, 3).value(), compress(info, tensor, 3).value());
  EXPECT_NE(compress(info, tensor, 3).value(), compress(info, tensor, 4).value());
}

TEST(CodecFile, EveryBitFlipIsFound) {
  CodecFileInfo info = info_of("sign", {4, 100});
  info.chunk_elems = 200;
  Bytes file = compress(info, values_of(info)).value();
  for (std::size_t bit = 0; bit < file.size() * 8; ++bit) {
    file[bit / 8] ^= std::byte{1} << (bit % 8);
    const StatusCode code = decompress(file).status().code();
    const bool is_version = bit / 8 == 4;
    EXPECT_EQ(code, is_version ? StatusCode::kUnsupported : StatusCode::kCorruptData) << "byte " << bit / 8;
    file[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(decompress(file).ok());
}

TEST(CodecFile, EveryTruncationAndExtensionIsFound) {
  const Bytes file = small_file();
  for (std::size_t length = 0; length < file.size(); ++length) {
    const Bytes part(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(decompress(part).status().code(), StatusCode::kCorruptData) << length;
  }
  for (const CodecFileInfo& info : {info_of("none", {2}), info_of("none", {0})}) {
    Bytes longer = compress(info, values_of(info)).value();
    longer.push_back(std::byte{0});
    const std::string text = decompress(longer).status().to_string();
    EXPECT_NE(text.find("1 bytes follow, expected none"), std::string::npos) << text;
  }
}

TEST(CodecFile, ErrorsNamePlaceValueAndExpectation) {
  const Bytes file = small_file();  // header 32, description 16 + 2 + 10 + 4, chunk header 24, payload 8
  ASSERT_EQ(file.size(), 96u);
  const auto error_at = [&](std::size_t at, int value) {
    Bytes damaged = file;
    damaged[at] = static_cast<std::byte>(value);
    return decompress(damaged).status().to_string();
  };
  const auto error_of_length = [&](std::ptrdiff_t length) {
    return decompress({file.begin(), file.begin() + length}).status().to_string();
  };
  EXPECT_EQ(error_at(0, 'X'),
            "corrupt data: header at byte 0: 58 52 54 46, expected 43 52 54 46 (a file of a compressed tensor)");
  EXPECT_EQ(error_at(4, 9), "unsupported: header at byte 4: format version 9, this build reads version 1");
  EXPECT_EQ(error_at(5, 1).find("corrupt data: header at byte 0: damaged: its checksum is "), 0u);
  EXPECT_EQ(error_at(33, 1).find("corrupt data: description at byte 32: damaged: its checksum is "), 0u);
  EXPECT_EQ(error_at(65, 1).find("corrupt data: chunk 0, header at byte 64: damaged: its checksum is "), 0u);
  EXPECT_EQ(error_at(90, 0xff).find("corrupt data: chunk 0, payload at byte 88: damaged: its checksum is "), 0u);
  EXPECT_EQ(error_of_length(20), "corrupt data: header at byte 0: cut short: 20 bytes, expected 32");
  EXPECT_EQ(error_of_length(40), "corrupt data: description at byte 32: cut short: 8 bytes, expected 32");
  EXPECT_EQ(error_of_length(70), "corrupt data: chunk 0 at byte 64: cut short: 6 bytes, expected 24");
  EXPECT_EQ(error_of_length(90), "corrupt data: chunk 0, payload at byte 88: cut short: 2 bytes, expected 8");
}

// Changes bytes of a file and makes the checksums right again, as no accident would.
class Forgery : public testing::Test {
 protected:
  void put(std::size_t at, const void* from, std::size_t bytes) { std::memcpy(file_.data() + at, from, bytes); }
  template <typename T>
  void set(std::size_t at, T value) {
    put(at, &value, sizeof(value));
    repair(0, 28);
    repair(32, 28);
    repair(64, 20);
  }
  std::string error() { return decompress(file_).status().to_string(); }

  Bytes file_ = small_file();

 private:
  void repair(std::size_t begin, std::size_t bytes) {
    const std::uint32_t crc32 = crc32_of(std::span(file_).subspan(begin, bytes));
    put(begin + bytes, &crc32, sizeof(crc32));
  }
};

TEST_F(Forgery, NoFieldIsTrusted) {
  set<std::uint8_t>(5, 200);
  EXPECT_EQ(error(), "corrupt data: description: (2 x 2) elements of dtype 200 are no tensor");
  set<std::uint8_t>(5, 0);
  set<std::uint8_t>(6, 2);
  EXPECT_EQ(error().find("corrupt data: header at byte 0: source 2, "), 0u) << error();
  set<std::uint8_t>(6, 1);
  set<std::int64_t>(8, 3);
  EXPECT_EQ(error(), "corrupt data: header at byte 8: chunks of 3 elements do not divide a tensor of (2 x 2)");
  set<std::int64_t>(8, 4);
  set<std::int64_t>(32, -2);
  EXPECT_EQ(error(), "corrupt data: description: (-2 x 2) elements of dtype 0 are no tensor");
  set<std::int64_t>(32, std::int64_t{1} << 62);
  EXPECT_EQ(error().find("corrupt data: description: "), 0u) << error();
  set<std::int64_t>(32, 2);
  set<std::uint8_t>(48, 9);
  EXPECT_EQ(error(), "corrupt data: description: cast has wire id 9, expected 2");
  set<std::uint8_t>(48, 2);
  set<std::uint8_t>(49, 7);
  EXPECT_EQ(error(), "unsupported: description: cast: payload version 7, this build reads version 1");
  set<std::uint8_t>(49, 1);
  set<std::uint8_t>(50, 'k');
  EXPECT_EQ(error().find("unsupported: description: unknown codec \"kast\""), 0u) << error();
  set<std::uint8_t>(50, 'c');
  set<std::uint64_t>(64, 1);
  EXPECT_EQ(error(), "corrupt data: chunk 0 at byte 64: its number is 1");
  set<std::uint64_t>(64, 0);
  set<std::uint64_t>(72, 9);
  EXPECT_EQ(error(), "corrupt data: chunk 0 at byte 64: payload of 9 bytes, expected at most 8");
  set<std::uint64_t>(72, 8);
  EXPECT_EQ(error(), "ok");
}

TEST(CodecFile, WrongSettingsAreRefused) {
  const auto error = [](const CodecFileInfo& info) { return CodecFileWriter::create(info).status().to_string(); };
  EXPECT_EQ(error(info_of("nnoe", {2})).find("not found: unknown codec"), 0u);
  EXPECT_EQ(error(info_of("cast", {2}, DType::kUint8)), "unsupported: cast(bf16) takes fp32, fp16 and bf16, got uint8");
  EXPECT_EQ(error(info_of("none", {-1, 2})).find("invalid argument: a tensor of (-1 x 2) in chunks of 0: "), 0u);
  EXPECT_EQ(error(info_of("none", std::vector<std::int64_t>(33, 1))).find("invalid argument: "), 0u);
  CodecFileInfo info = info_of("none", {2});
  info.chunk_elems = -1;
  EXPECT_EQ(error(info).find("invalid argument: a tensor of (2) in chunks of -1: "), 0u);
}

TEST(CodecFile, ExplainCoversTheFileUpToTheDamage) {
  CodecFileInfo info = info_of("sign", {4, 100});
  info.chunk_elems = 200;
  Bytes file = compress(info, values_of(info)).value();
  std::vector<PayloadSection> sections;
  const auto end = [&] {
    std::uint64_t at = 0;
    for (const PayloadSection& section : sections) {
      EXPECT_EQ(section.offset, at) << section.name;
      at += section.bytes;
    }
    return at;
  };
  EXPECT_TRUE(explain_codec_file(file, &sections).ok());
  EXPECT_EQ(end(), file.size());
  const std::size_t payload_bytes = 4 + 25, second = file.size() - 24 - payload_bytes;
  file[second + 30] ^= std::byte{1};
  EXPECT_EQ(explain_codec_file(file, &sections).code(), StatusCode::kCorruptData);
  EXPECT_EQ(end(), second);
  file[0] = std::byte{0};
  EXPECT_EQ(explain_codec_file(file, &sections).code(), StatusCode::kCorruptData);
  EXPECT_TRUE(sections.empty());
}

}  // namespace
}  // namespace cortado

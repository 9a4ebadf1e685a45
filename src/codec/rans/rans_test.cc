// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What spec.md says: the bytes (those of the reference on every target and with every number of threads), sizes and
// errors. Round trips over all shapes and addresses are in codec/conformance_test.cc.
#include "codec/rans/rans.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>

#include "codec/rans/rans_reference.h"
#include "codec/rans/rans_stream.h"
#include "codec/rans/rans_table.h"
#include "core/philox.h"
#include "core/simd_target.h"

namespace cortado {
namespace {

using reference::RansBytes;

std::uint32_t random_word(std::uint64_t seed, std::uint64_t i) { return philox_block(seed, 0, 0, i / 4)[i % 4]; }

// Codes whose histograms differ in kind.
enum class Kind {
  kNormal,
  kNormalWide,
  kUniform4Bit,
  kUniform,
  kSkewed,
  kSparse,
  kTwo,
  kAlmostOne,
  kNarrowBlocks,
  kLaplace,
  kLaplaceAbove,
  kOthersTogether,
};
constexpr Kind kKinds[] = {Kind::kNormal,       Kind::kNormalWide, Kind::kUniform4Bit,  Kind::kUniform,
                           Kind::kSkewed,       Kind::kSparse,     Kind::kTwo,          Kind::kAlmostOne,
                           Kind::kNarrowBlocks, Kind::kLaplace,    Kind::kLaplaceAbove, Kind::kOthersTogether};

RansBytes normal_codes(std::size_t elems, int bits, double step, std::uint64_t seed = 1) {
  std::vector<float> values(elems);
  philox_fill_normal(seed, 0, 0, values.data(), static_cast<std::int64_t>(elems));
  const double half = std::ldexp(1, bits - 1);
  RansBytes codes(elems);
  for (std::size_t i = 0; i < elems; ++i) {
    codes[i] = static_cast<std::uint8_t>(std::clamp(std::nearbyint(values[i] / step), -half, half - 1) + half);
  }
  return codes;
}

RansBytes make_codes(Kind kind, std::size_t elems, std::uint64_t seed = 1) {
  if (kind == Kind::kNormal) return normal_codes(elems, 4, 0.5, seed);
  if (kind == Kind::kNormalWide) return normal_codes(elems, 8, 0.042, seed);
  RansBytes codes(elems);
  for (std::size_t i = 0; i < elems; ++i) {
    const std::uint32_t word = random_word(seed, i), low = word & 0xffff;
    const double unit = (word >> 8) * 0x1p-24;
    std::uint32_t code = 0;
    if (kind == Kind::kUniform4Bit) code = 40 + low % 16;
    if (kind == Kind::kUniform) code = low % 256;
    if (kind == Kind::kSkewed) code = static_cast<std::uint32_t>(255 * std::pow(unit, 12));
    if (kind == Kind::kSparse) code = low < 60000 ? 255 : low % 256;
    if (kind == Kind::kTwo) code = low < 20000 ? 0 : 255;
    if (kind == Kind::kAlmostOne) code = i % 1021 == 7 ? 9 : 8;
    if (kind == Kind::kNarrowBlocks) code = low % 9 + 11 * (i / 20000 % 20);
    // Levels as of gradients: nearly all near the middle, or near 0, the others far apart.
    const auto magnitude = static_cast<std::uint32_t>(std::min(-1.3 * std::log(unit + 0x1p-25), 120.0));
    if (kind == Kind::kLaplace) code = low % 2 == 0 ? 128 + magnitude : 128 - magnitude;
    if (kind == Kind::kLaplaceAbove) code = magnitude > 9 ? 20 + low % 230 : 7 + magnitude;
    // 16 symbols behind a frequent one, and many rare ones that follow each other.
    if (kind == Kind::kOthersTogether) code = i / 64 % 480 == 1 ? 200 + low % 40 : low < 33 ? 3 : 128 + low % 16;
    codes[i] = static_cast<std::uint8_t>(code);
  }
  return codes;
}

RansBytes encode(const RansBytes& codes, std::int64_t chunk_codes, ThreadPool* pool = nullptr) {
  const auto elems = static_cast<std::int64_t>(codes.size());
  RansBytes payload(max_rans_bytes(elems));
  std::vector<std::byte> scratch(rans_scratch_bytes(elems, chunk_codes));
  payload.resize(encode_codes(codes.data(), elems, chunk_codes, reinterpret_cast<std::byte*>(payload.data()),
                              scratch.data(), pool));
  return payload;
}

Status decode(const RansBytes& payload, RansBytes* codes, ThreadPool* pool = nullptr) {
  const auto elems = static_cast<std::int64_t>(codes->size());
  std::vector<std::byte> scratch(rans_scratch_bytes(elems, kMinRansChunkCodes));
  // A copy of the exact size, so that the address sanitizer sees every read beyond it.
  const RansBytes exact(payload);
  return decode_codes(std::as_bytes(std::span(exact)), codes->data(), elems, scratch.data(), pool);
}

RansBytes decoded(const RansBytes& payload, std::size_t elems, ThreadPool* pool = nullptr) {
  RansBytes codes(elems, 0xee);
  const Status status = decode(payload, &codes, pool);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return codes;
}

double entropy_bytes(const RansBytes& codes) {
  std::array<double, 256> count = {};
  for (const std::uint8_t code : codes) ++count[code];
  double bits = 0;
  for (const double c : count) bits += c == 0 ? 0 : c * std::log2(static_cast<double>(codes.size()) / c);
  return bits / 8;
}

TEST(Rans, BytesAreThoseOfTheReferenceOnEveryTarget) {
  for (const Kind kind : kKinds) {
    for (const std::size_t elems : {1, 2, 31, 32, 33, 200, 4095, 4096, 4097, 4127, 4128, 16384, 20480 + 5, 70001}) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(elems) + " codes");
      const RansBytes codes = make_codes(kind, elems);
      const RansBytes expected = reference::rans_encode(codes, 4096);
      ASSERT_EQ(encode(codes, 4096), expected);
      ASSERT_EQ(reference::rans_decode(expected, elems), codes);
      ASSERT_EQ(decoded(expected, elems), codes);
      for (const std::int64_t target : simd_targets()) {
        const ForcedSimdTarget forced(target);
        ASSERT_EQ(encode(codes, 4096), expected) << simd_target_name(target);
        ASSERT_EQ(decoded(expected, elems), codes) << simd_target_name(target);
      }
    }
  }
}

TEST(Rans, ThereAreCodesOfEveryLookup) {
  int narrow = 0, first_mostly = 0, later_mostly = 0, wide = 0;
  for (const Kind kind : kKinds) {
    std::uint64_t counts[256] = {};
    for (const std::uint8_t code : make_codes(kind, 70001)) ++counts[code];
    RansDecodeTable table;
    make_rans_decode_table(rans_frequencies(counts), &table);
    ++(table.is_narrow()           ? narrow
       : !table.is_mostly_narrow() ? wide
       : table.starts[0] == 0      ? first_mostly
                                   : later_mostly);
  }
  EXPECT_GE(narrow, 3);
  EXPECT_GE(first_mostly, 1);
  EXPECT_GE(later_mostly, 1);
  EXPECT_EQ(first_mostly + later_mostly, 3);
  EXPECT_GE(wide, 3);
}

TEST(Rans, EveryChunkSize) {
  for (const Kind kind : {Kind::kNormal, Kind::kNormalWide}) {
    const RansBytes codes = make_codes(kind, 300000);
    for (std::int64_t chunk_codes = kMinRansChunkCodes; chunk_codes <= kMaxRansChunkCodes; chunk_codes *= 2) {
      const RansBytes payload = encode(codes, chunk_codes);
      ASSERT_EQ(payload, reference::rans_encode(codes, static_cast<std::size_t>(chunk_codes))) << chunk_codes;
      ASSERT_EQ(decoded(payload, codes.size()), codes) << chunk_codes;
    }
  }
}

TEST(Rans, ThreadsChangeNothing) {
  for (const Kind kind : kKinds) {
    const RansBytes codes = make_codes(kind, 300001);
    const RansBytes expected = encode(codes, 4096);
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      EXPECT_EQ(encode(codes, 4096, &pool), expected) << threads << " threads";
      EXPECT_EQ(decoded(expected, codes.size(), &pool), codes) << threads << " threads";
    }
  }
}

TEST(Rans, SizeIsThatOfTheEntropy) {
  for (const Kind kind : kKinds) {
    for (const std::int64_t chunk_codes : {4096, 65536}) {
      const RansBytes codes = make_codes(kind, 1 << 20);
      const double entropy = entropy_bytes(codes), chunks = std::ceil(codes.size() / static_cast<double>(chunk_codes));
      const std::size_t bytes = encode(codes, chunk_codes).size();
      EXPECT_LE(static_cast<double>(bytes), 1.01 * entropy + 256 + 136 * chunks) << static_cast<int>(kind);
      EXPECT_LE(bytes, codes.size() + 1) << static_cast<int>(kind);
    }
  }
  // Without what a chunk may cost: 4-bit codes of 2.5 to 3.5 bits.
  for (const double step : {0.35, 0.5, 0.7}) {
    const RansBytes codes = normal_codes(1 << 20, 4, step);
    EXPECT_LE(static_cast<double>(encode(codes, 65536).size()) - 16 * 136, 1.001 * entropy_bytes(codes));
  }
}

TEST(Rans, OneSymbolTakesTwoBytesAndNoiseOneMoreThanItself) {
  EXPECT_EQ(encode(RansBytes(100000, 77), 65536), (RansBytes{1, 77}));
  const RansBytes noise = make_codes(Kind::kUniform, 100000);
  const RansBytes payload = encode(noise, 65536);
  ASSERT_EQ(payload.size(), noise.size() + 1);
  EXPECT_EQ(payload[0], 0);
}

TEST(Rans, FrequenciesAreLawfulWhateverTheCounts) {
  for (std::uint64_t i = 0; i < 3000; ++i) {
    std::uint64_t counts[256] = {};
    const std::uint32_t symbols = 2 + random_word(1, 4 * i) % 255, scale = random_word(1, 4 * i + 1) % 33;
    for (std::uint32_t s = 0; s < symbols; ++s) {
      const std::uint64_t word = random_word(2 + i, s);
      counts[(s * 151 + i) % 256] = 1 + (word >> (word % 8 * scale / 8)) + (s == 0 ? std::uint64_t{1} << scale : 0);
    }
    const RansFrequencies frequencies = rans_frequencies(counts);
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < 256; ++s) {
      sum += frequencies[s];
      EXPECT_EQ(frequencies[s] > 0, counts[s] > 0);
      EXPECT_TRUE(frequencies[s] < kRansCoarse || frequencies[s] % kRansCoarse == 0) << frequencies[s];
    }
    ASSERT_EQ(sum, kRansTotal) << "histogram " << i;
  }
}

TEST(Rans, TheWorkedExamplesOfItsSpec) {
  EXPECT_EQ(encode({7, 1, 2}, 65536), (RansBytes{0, 7, 1, 2}));
  EXPECT_EQ(encode({9, 9, 9}, 65536), (RansBytes{1, 9}));
  RansBytes codes(512, 3);
  for (std::size_t i = 0; i < codes.size(); i += 32) codes[i] = 5;
  RansBytes expected = {0x02, 0x10, 0x03, 0x05, 0x8f, 0x1f, 0x00, 0x8f, 0x01, 0, 0,    0,    0,    0,
                        0,    0,    0x8a, 0,    0,    0,    0,    0,    0,    0, 0xff, 0xfb, 0x01, 0};
  for (int lane = 1; lane < 32; ++lane) expected.insert(expected.end(), {0x00, 0x80, 0x01, 0x00});
  expected.insert(expected.end(), {0xff, 0xfb, 0xff, 0xfb, 0xff, 0xfb, 0xff, 0xfb, 0x00, 0xf8});
  EXPECT_EQ(encode(codes, 65536), expected);
  EXPECT_EQ(decoded(expected, codes.size()), codes);
}

// ---- hostile payloads ----------------------------------------------------------------------------------------------

TEST(Rans, EveryTruncationIsAnError) {
  for (const Kind kind : {Kind::kNormal, Kind::kNormalWide, Kind::kUniform, Kind::kAlmostOne, Kind::kLaplace}) {
    const RansBytes codes = make_codes(kind, 6000);
    const RansBytes payload = encode(codes, 4096);
    RansBytes output(codes.size());
    for (std::size_t bytes = 0; bytes < payload.size(); ++bytes) {
      const RansBytes cut(payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(bytes));
      ASSERT_EQ(decode(cut, &output).code(), StatusCode::kCorruptData) << bytes << " of " << payload.size();
    }
  }
}

TEST(Rans, FlippedBitsAndBytesGiveAnErrorOrCodes) {
  for (const Kind kind : {Kind::kNormal, Kind::kNormalWide, Kind::kSkewed, Kind::kTwo, Kind::kLaplace}) {
    const RansBytes codes = make_codes(kind, 30000);
    const RansBytes payload = encode(codes, 4096);
    RansBytes output(codes.size());
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      int found = 0;
      constexpr int kFlips = 600;
      for (std::uint64_t i = 0; i < kFlips; ++i) {
        RansBytes damaged = payload;
        const std::uint32_t word = random_word(5, 2 * i), other = random_word(5, 2 * i + 1);
        // Half of them where header, table, directory and the first states are.
        const std::size_t at = other % 2 == 0 ? word % damaged.size() : word % 300;
        damaged[at] ^= static_cast<std::uint8_t>(other % 4 < 2 ? 1u << (other >> 8) % 8 : 1 + (other >> 8) % 255);
        const Status status = decode(damaged, &output);
        ASSERT_TRUE(status.ok() || status.code() == StatusCode::kCorruptData) << status.to_string();
        found += !status.ok();
      }
      // 32 states of 32 bits are a checksum of sorts.
      EXPECT_GE(found, kFlips * 9 / 10) << simd_target_name(target);
    }
  }
}

TEST(Rans, NoiseBehindALawfulHeaderGivesAnErrorOrCodes) {
  for (const Kind kind : {Kind::kNormalWide, Kind::kLaplace, Kind::kOthersTogether}) {
    const RansBytes codes = make_codes(kind, 30000);
    RansBytes payload = encode(codes, 4096), output(codes.size());
    for (const std::int64_t target : simd_targets()) {
      const ForcedSimdTarget forced(target);
      for (std::uint64_t round = 0; round < 50; ++round) {
        for (std::size_t i = 512; i < payload.size(); ++i) {
          const std::uint32_t word = random_word(100 + round, i);
          payload[i] = static_cast<std::uint8_t>(round % 4 == 3 ? 0xff : word >> (round % 4 == 0 ? 24 : 31));
        }
        EXPECT_EQ(decode(payload, &output).code(), StatusCode::kCorruptData) << simd_target_name(target);
      }
    }
  }
}

TEST(Rans, ErrorsSayWhatIsWrong) {
  const RansBytes codes = make_codes(Kind::kNormal, 10000);
  const RansBytes payload = encode(codes, 4096);
  const std::unique_ptr<Codec> codec = make_codec("rans").value();
  const auto message = [&](const RansBytes& damaged) {
    RansBytes output(codes.size());
    std::vector<std::byte> scratch(codec->scratch_bytes(1, 10000, DType::kUint8));
    const Status status =
        codec->decode(std::as_bytes(std::span(damaged)), {output.data(), DType::kUint8, 1, 10000}, scratch);
    EXPECT_EQ(status.code(), StatusCode::kCorruptData);
    return status.message();
  };
  const auto with = [&](std::size_t at, std::uint8_t value) {
    RansBytes damaged = payload;
    damaged[at] = value;
    return damaged;
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  const auto expect = [&](const RansBytes& damaged, const char* part) {
    const std::string text = message(damaged);
    EXPECT_TRUE(contains(text, part)) << text;
    EXPECT_EQ(text.find("rans(chunk_codes=65536): "), 0u) << text;
  };
  expect({}, "0 bytes");
  expect(with(0, 9), "mode 9");
  expect(with(1, 5), "chunks of 2^5 codes");
  expect(with(2, 16), "symbols 16 to 15");
  expect(with(4, static_cast<std::uint8_t>(payload[4] ^ 1)), "add up to");
  RansBytes cut(payload.begin(), payload.begin() + 6);
  expect(cut, "the table ends after 6 bytes");
  RansBytes longer = payload;
  longer[4] |= 128;
  longer.insert(longer.begin() + 5, 0);
  expect(longer, "has a frequency of two bytes, expected one");
  const auto two_bytes = std::find_if(payload.begin() + 4, payload.end(), [](std::uint8_t byte) { return byte > 127; });
  const auto upper = static_cast<std::size_t>(two_bytes - payload.begin()) + 1;
  expect(with(upper, static_cast<std::uint8_t>(payload[upper] | 128)), "has frequency");
  expect(with(payload.size() - 1, static_cast<std::uint8_t>(payload.back() ^ 1)), "chunk 2 of 3");
  cut = payload;
  cut.pop_back();
  expect(cut, "chunk 2 of 3 lies at bytes");
}

TEST(Rans, SettingsThatAreRefused) {
  EXPECT_EQ(make_codec("rans(chunk_codes=5000)").status().message(),
            "rans(chunk_codes=5000): chunk_codes must be a power of two from 4096 to 262144");
  EXPECT_FALSE(make_codec("rans(chunk_codes=2048)").ok());
  const Status status = make_codec("rans").value()->encode({nullptr, DType::kFloat32, 0, 0}, {}, {}, {}).status();
  EXPECT_EQ(status.message(),
            "rans(chunk_codes=65536) takes uint8, one code a byte; float_rans takes floats, got fp32");
}

}  // namespace
}  // namespace cortado

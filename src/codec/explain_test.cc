// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What `cortado codec inspect` says of payloads, mostly those of the examples in spec.md. That sections cover every
// byte of any payload is tested for all codecs in conformance_test.cc.
#include "codec/explain.h"

#include <gtest/gtest.h>

namespace cortado::explain_test {
namespace {

struct Case {
  const char* spec;
  DType dtype;
  std::int64_t rows, cols;
  std::vector<std::uint8_t> payload;
  const char* explained;  // "bytes name: meaning", a line a section
};

std::string explain(const Case& c) {
  const std::unique_ptr<Codec> codec = make_codec(c.spec).value();
  std::string text;
  for (const PayloadSection& section : codec->explain(std::as_bytes(std::span(c.payload)), c.rows, c.cols, c.dtype)) {
    text += std::to_string(section.bytes) + " " + section.name + ": " + section.meaning + "\n";
  }
  return text;
}

// 16 x 32 codes: 5 and 31 times 3, and so on.
std::vector<std::uint8_t> coded_payload() {
  std::vector<std::uint8_t> payload = {2, 16, 3,    5, 0x8f, 0x1f, 0, 0x8f, 1, 0, 0,    0,    0, 0,
                                       0, 0,  0x8a, 0, 0,    0,    0, 0,    0, 0, 0xff, 0xfb, 1, 0};
  for (int lane = 1; lane < 32; ++lane) payload.insert(payload.end(), {0, 0x80, 1, 0});
  payload.insert(payload.end(), {0xff, 0xfb, 0xff, 0xfb, 0xff, 0xfb, 0xff, 0xfb, 0, 0xf8});
  return payload;
}

TEST(Explain, SaysWhatEachSectionHolds) {
  const Case cases[] = {
      {"quant(4)",
       DType::kFloat32,
       1,
       5,
       {0, 0, 0x80, 0x3f, 0x4e, 0x87, 7},
       "4 steps: a block each: 1\n"
       "3 codes: 4 bits each: 14, 4, 7, 8, ...\n"},
      {"quant(3, round=dither)",
       DType::kFloat32,
       1,
       5,
       {0x70, 6, 0xe8, 0xe3, 0xbc, 0xe, 0xa, 0xe5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0x40, 0xd6, 0x36},
       "8 key: of seed and tensor; decoding draws the dither with it\n"
       "8 step: 2\n"
       "4 steps: a block each: 2.5\n"
       "2 codes: 3 bits each: 6, 2, 3, 3, ...\n"},
      {"fp8(e4m3)",
       DType::kFloat32,
       1,
       5,
       {0x7d, 0x48, 0xd2, 0x2d, 0x79, 0},
       "1 scales: a block each: exponents of two plus 127, 255 is NaN: 125\n"
       "5 codes: 8 bits each: 72, 210, 45, 121, ...\n"},
      {"rans", DType::kUint8, 1, 3, {0, 7, 1, 2}, "1 mode: 0: the codes as they are\n3 codes: 7, 1, 2\n"},
      {"rans", DType::kUint8, 1, 3, {1, 9}, "1 mode: 1: all codes are equal\n1 codes: 9\n"},
      {"rans", DType::kUint8, 1, 3, {7, 9}, "1 mode: unknown: 7\n1 unexpected: no part of a payload of this shape\n"},
      {"rans", DType::kUint8, 16, 32, coded_payload(),
       "1 mode: 2: coded\n"
       "1 chunk codes: 2 to the power of this: 65536\n"
       "1 first symbol: 3\n"
       "1 last symbol: 5\n"
       "5 frequencies: symbol by symbol, of 65536: 3: 63488, 5: 2048\n"
       "7 zeros: up to a multiple of 8 bytes\n"
       "8 directory: where each of 1 chunks ends, from the begin of the first\n"
       "138 chunk 0: 512 codes: 32 states of 4 bytes, 5 words of 2\n"},
      {"rans",
       DType::kUint8,
       16,
       32,
       {2, 16, 5, 3, 1, 2},
       "1 mode: 2: coded\n5 unreadable: symbols 5 to 3, expected at least two\n"},
      {"float_rans",
       DType::kFloat32,
       1,
       2,
       {0, 0, 1, 0, 0, 0x40, 0, 0x7f, 0x80},
       "4 lower halves: bits 0 to 15 of the values rotated left by one\n"
       "2 middle bytes: bits 16 to 23 of the same\n"
       "1 upper bytes: mode: 0: the codes as they are\n"
       "2 upper bytes: codes: 127, 128\n"},
      {"float_rans",
       DType::kBFloat16,
       1,
       2,
       {0, 0x41, 0, 0x7f, 0x80},
       "2 middle bytes: bits 0 to 7 of the values rotated left by one\n"
       "1 upper bytes: mode: 0: the codes as they are\n"
       "2 upper bytes: codes: 127, 128\n"},
      {"compso(bound=0.25, round=nearest)",
       DType::kFloat32,
       1,
       5,
       {1,    0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0x3f, 0xfe, 0xff, 0xff,
        0xff, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0x82, 0x80, 0x80, 0x82, 0x7e},
       "8 code bytes: 1 a value\n"
       "4 steps: a block each: 0.5\n"
       "4 smallest levels: a block each, the first: -2\n"
       "8 length: 6 bytes of low codes\n"
       "1 low codes: mode: 0: the codes as they are\n"
       "5 low codes: codes: 130, 128, 128, 130, ...\n"},
      {"compso(bound=0.25, round=nearest)",
       DType::kFloat32,
       1,
       5,
       {1, 1, 0, 0, 0, 0, 0, 0, 0, 0,    0,    0x3f, 0xfe, 0xff, 0xff, 0xff, 3, 0, 0, 0, 0, 0,    0,   0,
        4, 0, 0, 0, 0, 0, 0, 0, 0, 0x82, 0x80, 0x80, 3,    0,    0,    0,    0, 0, 0, 0, 0, 0x82, 0x7e},
       "8 code bytes: 1 a value; low codes in 2 sections\n"
       "4 steps: a block each: 0.5\n"
       "4 smallest levels: a block each, the first: -2\n"
       "8 section: the next 3 low codes\n"
       "8 length: 4 bytes of low codes\n"
       "1 low codes: mode: 0: the codes as they are\n"
       "3 low codes: codes: 130, 128, 128\n"
       "8 length: 3 bytes of low codes\n"
       "1 low codes: mode: 0: the codes as they are\n"
       "2 low codes: codes: 130, 126\n"},
      {"compso(bound=0.001, round=dither, coder=none)",
       DType::kFloat32,
       1,
       1,
       {2, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f, 3, 0, 0, 0, 0x83, 0x80},
       "8 code bytes: 2 a value\n"
       "8 key: of seed and tensor; decoding draws the dither with it\n"
       "8 step: 9\n"
       "4 steps: a block each: 0.5\n"
       "4 smallest levels: a block each, the first: 3\n"
       "1 low codes: 131\n"
       "1 high codes: 128\n"},
      {"compso(bound=0)",
       DType::kBFloat16,
       1,
       2,
       {0, 0x41, 0, 0x7f, 0x80},
       "2 middle bytes: bits 0 to 7 of the values rotated left by one\n"
       "1 upper bytes: mode: 0: the codes as they are\n"
       "2 upper bytes: codes: 127, 128\n"},
      {"topk(density=0.3) | quant(bits=4) | rans",
       DType::kFloat32,
       1,
       10,
       {6, 1, 8, 1, 10, 1, 11, 0, 0, 0, 0, 0,    0, 0, 4, 0,    0, 0, 0,  0, 0,
        0, 1, 3, 0, 0,  0, 0,  0, 0, 0, 7, 0x13, 0, 0, 0, 0x3f, 0, 0, 11, 3},
       "2 stage: wire id and payload version of topk\n"
       "2 stage: wire id and payload version of quant\n"
       "2 stage: wire id and payload version of rans\n"
       "8 length: 11 bytes of the topk index section\n"
       "8 length: 4 bytes of the quant side section\n"
       "1 topk index kind: delta\n"
       "8 topk kept: 3 of 10 values\n"
       "1 topk gaps, lower bits: 1 bits each\n"
       "1 topk gaps, upper parts: in unary; positions 1, 3, 9\n"
       "4 quant steps: a block each: 0.5\n"
       "1 rans mode: 0: the codes as they are\n"
       "3 rans codes: 0, 11, 3\n"},
      {"none", DType::kFloat32, 1, 2, {0, 0, 0x80, 0x3f, 0}, "5 values: 1 x 2 fp32: 1 (cut short: expected 8 bytes)\n"},
  };
  for (const Case& c : cases) EXPECT_EQ(explain(c), c.explained) << c.spec;
}

}  // namespace
}  // namespace cortado::explain_test

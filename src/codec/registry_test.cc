// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cctype>
#include <set>
#include <string>

#include "cortado/codec.h"

namespace cortado {
namespace {

TEST(Registry, NamesAndWireIdsAreUnique) {
  std::set<std::string> names;
  std::set<int> wire_ids;
  for (const CodecRow& row : codec_registry()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(wire_ids.insert(row.wire_id).second) << row.name;
    EXPECT_NE(row.wire_id, 0) << row.name;  // 0 is never a codec, so a zeroed header is never a frame
    EXPECT_NE(row.version, 0) << row.name;
    EXPECT_EQ(find_codec(row.name), &row);
  }
  EXPECT_FALSE(names.empty());
}

TEST(Registry, RowsAreDocumented) {
  for (const CodecRow& row : codec_registry()) {
    EXPECT_GT(std::string(row.summary).size(), 10u) << row.name;
    EXPECT_EQ(std::string(row.summary).find('\n'), std::string::npos) << row.name;
    for (const char c : std::string(row.name)) EXPECT_TRUE(std::islower(c) || std::isdigit(c) || c == '_') << row.name;
    for (const Parameter& parameter : row.parameters) {
      EXPECT_GT(std::string(parameter.meaning).size(), 5u) << row.name << "." << parameter.name;
      EXPECT_EQ(std::string(parameter.meaning).find('\n'), std::string::npos) << row.name << "." << parameter.name;
    }
    EXPECT_GE(row.traits.rounds, 1) << row.name;
  }
}

TEST(Registry, AnUnknownCodecListsTheKnownOnes) {
  const Status status = make_codec("nnoe").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(status.message().find("unknown codec \"nnoe\"; known are none, cast"), 0u) << status.message();
  EXPECT_EQ(find_codec("nnoe"), nullptr);
}

TEST(Registry, EveryStageOfACompositionIsChecked) {
  EXPECT_EQ(
      make_codec("cast(bf16) | none | none").status().to_string(),
      "invalid argument: cast | none: nothing may follow a codec that, as set, is neither sparsifier nor quantiser");
  EXPECT_EQ(make_codec("none | nnoe").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(make_codec("none | cast(fp8)").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(make_codec("cast(").status().code(), StatusCode::kInvalidArgument);
}

TEST(Registry, CodecsKnowTheirRow) {
  for (const CodecRow& row : codec_registry()) EXPECT_EQ(&make_codec(row.name).value()->row(), &row);
}

}  // namespace
}  // namespace cortado

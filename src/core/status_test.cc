// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>

#include "core/check.h"

namespace cortado {
namespace {

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_FALSE(status.is_fatal());
  EXPECT_EQ(status.to_string(), "ok");
  EXPECT_TRUE(status.with_context("acp").ok());
}

TEST(Status, TextNamesCodeContextAndValues) {
  const Status status = make_error(StatusCode::kTimeout, "message %d after %s", 2, "1.5 s");
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_EQ(status.to_string(), "timeout: message 2 after 1.5 s");
  EXPECT_EQ(status.with_context("rank 3").to_string(), "timeout: rank 3: message 2 after 1.5 s");
}

TEST(Status, MessagesMayBeLong) {
  const std::string name(10000, 'x');
  EXPECT_EQ(make_error(StatusCode::kNotFound, "%s!", name.c_str()).message(), name + "!");
}

TEST(Status, CodesHaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    names.insert(status_code_name(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(StatusCode::kInternal) + 1);
  EXPECT_EQ(names.count("unknown error"), 0u);
}

TEST(Status, WhatRanksNoLongerShareIsFatal) {
  for (const StatusCode code : {StatusCode::kMismatch, StatusCode::kTimeout, StatusCode::kPeerFailed,
                                StatusCode::kCorruptData, StatusCode::kInternal}) {
    EXPECT_TRUE(Status(code, "").is_fatal()) << status_code_name(code);
  }
  for (const StatusCode code : {StatusCode::kInvalidArgument, StatusCode::kNotFound, StatusCode::kFailedPrecondition,
                                StatusCode::kUnsupported}) {
    EXPECT_FALSE(Status(code, "").is_fatal()) << status_code_name(code);
  }
}

Result<std::unique_ptr<int>> make_number(int value) {
  if (value < 0) return make_error(StatusCode::kInvalidArgument, "%d is negative", value);
  return std::make_unique<int>(value);
}

Result<int> add(int a, int b) {
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<int> first, make_number(a));
  CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<int> second, make_number(b));
  return *first + *second;
}

Status check_both(int a, int b) {
  CORTADO_RETURN_IF_ERROR(make_number(a).status());
  CORTADO_RETURN_IF_ERROR(make_number(b).status());
  return {};
}

TEST(Result, CarriesAValueOrAnError) {
  EXPECT_EQ(add(1, 2).value(), 3);
  EXPECT_EQ(add(1, -2).status().message(), "-2 is negative");
  EXPECT_EQ(add(-1, -2).status().message(), "-1 is negative");
  EXPECT_TRUE(check_both(1, 2).ok());
  EXPECT_EQ(check_both(1, -2).message(), "-2 is negative");
}

TEST(ResultDeathTest, ValueOfAnErrorEndsTheProcessWithItsText) {
  EXPECT_DEATH((void)add(1, -2).value(), "invalid argument: -2 is negative");
}

TEST(CheckDeathTest, NamesThePlaceTheConditionAndTheValues) {
  const int slot = 4;
  CORTADO_CHECK(slot < 5);
  EXPECT_DEATH(CORTADO_CHECK(slot < 4), "status_test.cc:[0-9]+: broken invariant: slot < 4");
  EXPECT_DEATH(CORTADO_CHECK(slot < 4, "slot %d of %d", slot, 4), "slot < 4: slot 4 of 4");
}

}  // namespace
}  // namespace cortado

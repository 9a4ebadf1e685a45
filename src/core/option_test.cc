// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/option.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace cortado {
namespace {

const Topology kTwoLevels = {{{"intra", 2}, {"inter", 3}}};

TEST(OptionCheck, NamesTheOperationAndWhatWasExpected) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "operation 0 (end): level 0 has not been summed over"},
      {"jump@intra", "operation 0 (jump@intra): no operation of that name"},
      {"all_reduce@outer", "no levels \"outer\"; there are intra, flat, inter"},
      {"encode@tpu", "operation 0 (encode@tpu): no device; expected encode@cpu or encode@gpu"},
      {"decode@cpu", "operation 0 (decode): the tensor is not encoded"},
      {"encode@cpu decode@cpu all_reduce@flat", "operation 1 (decode): nothing has travelled since encode"},
      {"encode@cpu encode@cpu", "operation 1 (encode): the tensor is encoded already"},
      {"encode@cpu all_gather@flat", "operation 2 (end): the tensor is encoded; expected decode"},
      {"all_reduce@inter", "operation 0 (all_reduce): it begins at level 1"},
      {"all_gather@flat", "operation 0 (all_gather): it does not sum"},
      {"all_to_all@flat", "operation 0 (all_to_all): it takes payloads, but the tensor is not encoded"},
      {"all_reduce@intra", "operation 1 (end): level 1 has not been summed over"},
      {"reduce_scatter@flat", "operation 1 (end): not every rank has the sum; expected all_gather over level 0"},
      {"reduce_scatter@flat broadcast@flat", "operation 1 (broadcast): it does not answer the last first step"},
      {"reduce_scatter@intra reduce@inter all_gather@intra", "operation 2 (all_gather): it does not answer"},
      {"all_reduce@flat all_gather@flat", "operation 1 (all_gather): the sum is complete; expected the end"},
      {"all_reduce@flat encode@cpu", "operation 1 (encode): the sum is complete; expected the end"},
  };
  for (const auto& [text, message] : cases) {
    const Result<Option> option = Option::parse(text, kTwoLevels);
    ASSERT_FALSE(option.ok()) << text;
    EXPECT_NE(option.status().message().find(message), std::string::npos) << option.status().message();
  }
}

TEST(OptionCheck, PayloadsAreSummedOnlyByLinearCodecs) {
  const Result<Option> option = Option::parse("encode@cpu all_reduce@flat decode@cpu", kTwoLevels);
  ASSERT_TRUE(option.ok()) << option.status().to_string();
  EXPECT_TRUE(option.value().check(2, true).ok());
  EXPECT_NE(option.value().check(2, false).message().find("payloads of this codec can't be summed"), std::string::npos);
}

}  // namespace
}  // namespace cortado

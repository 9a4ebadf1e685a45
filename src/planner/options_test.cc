// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/planner.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "planner/option_tree.h"

namespace cortado {
namespace {

const std::vector<OpDevice> kGpu = {OpDevice::kGpu};

std::size_t count(OptionSpace space) {
  const std::size_t generated = generate_options(space).value().size();
  EXPECT_EQ(static_cast<std::size_t>(count_options(space).value()), generated);
  return generated;
}

std::map<int, int> count_by_encodes(OptionSpace space) {
  std::map<int, int> counts;
  for (const auto options = generate_options(space).value(); const Option& option : options) ++counts[option.encodes()];
  return counts;
}

// The recurrence of the tree with d devices and s routines of a first step.
std::size_t expected_count(std::size_t d, std::size_t s) {
  const std::size_t t1 = 1 + d * d, t2 = d + d * t1, t5 = t1 + d * t2;
  const std::size_t t3 = t1 + s * t5, t4 = t2 + s * (t2 + d * t5);
  const std::size_t flat = 1 + s * t1 + d * (d + s * t2);
  return flat + s * (t3 + d * t4) + s * d * (t4 + d * (t3 + d * t4));
}

TEST(GenerateOptions, CountsOfTheTwoLevelTree) {
  EXPECT_EQ(count({}), 4341u);
  EXPECT_EQ(count({.devices = kGpu}), 174u);
  EXPECT_EQ(count({.rooted = false}), 1188u);
  EXPECT_EQ(count({.devices = kGpu, .rooted = false}), 54u);
  for (std::size_t d : {1, 2}) {
    for (std::size_t s : {1, 2}) {
      OptionSpace space = {.rooted = s == 2};
      space.devices.resize(d);
      EXPECT_EQ(count(space), expected_count(d, s)) << d << " devices, " << s << " routines";
    }
  }
}

TEST(GenerateOptions, CountsByNumberOfEncodes) {
  EXPECT_EQ(count_by_encodes({}), (std::map<int, int>{{0, 9}, {1, 236}, {2, 1152}, {3, 1920}, {4, 1024}}));
  EXPECT_EQ(count_by_encodes({.devices = kGpu}), (std::map<int, int>{{0, 9}, {1, 59}, {2, 72}, {3, 30}, {4, 4}}));
}

TEST(GenerateOptions, OptionsOfOneDeviceEach) {
  for (const bool rooted : {true, false}) {
    int single = 0;
    for (const auto options = generate_options({.rooted = rooted}).value(); const Option& option : options) {
      std::set<OpDevice> devices;
      for (const Operation& op : option.operations) {
        if (!is_collective(op.kind)) devices.insert(op.device);
      }
      single += devices.size() <= 1;
    }
    EXPECT_EQ(single, rooted ? 339 : 104);
  }
}

TEST(GenerateOptions, OneLevelHasOnlyFlatOnes) { EXPECT_EQ(count({.levels = 1}), 63u); }

TEST(CountOptions, OfThreeAndFourLevels) {
  const auto of = [](int levels, bool sum_payloads) {
    return count_options({.levels = levels, .sum_payloads = sum_payloads}).value();
  };
  EXPECT_EQ(of(3, false), 294'993);
  EXPECT_EQ(of(3, true), 1'843'965);
  EXPECT_EQ(of(4, false), 20'042'217);
  EXPECT_EQ(of(4, true), 232'468'629);
}

TEST(CountOptions, NumbersOfLevelsThatAreRefused) {
  for (const int levels : {0, -1, kMaxLevels + 1}) {
    const OptionSpace space = {.levels = levels};
    const Status statuses[] = {count_options(space).status(), generate_options(space).status(),
                               visit_options(space, [](const Option&) { FAIL(); })};
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(), "options: expected 1 to 4 levels, got " + std::to_string(levels));
    }
  }
}

TEST(CountOptions, AgreesWithWhatIsGenerated) {
  for (const int levels : {1, 2, 3}) {
    for (const bool sum_payloads : {false, true}) {
      count({.levels = levels, .devices = kGpu, .rooted = levels < 3, .sum_payloads = sum_payloads});
      if (levels < 3) count({.levels = levels, .sum_payloads = sum_payloads});
    }
  }
}

TEST(GenerateOptions, AreDistinctCheckedAndParseBack) {
  for (const int levels : {1, 2, 3}) {
    for (const bool sum_payloads : {false, true}) {
      Topology topology;
      for (int l = 0; l < levels; ++l) topology.levels.push_back({"level" + std::to_string(l), 2});
      OptionSpace space = {.levels = levels, .sum_payloads = sum_payloads};
      if (levels == 3) space.devices = kGpu;
      std::set<std::string> texts;
      for (const auto options = generate_options(space).value(); const Option& option : options) {
        const std::string text = option.to_string(topology);
        ASSERT_TRUE(texts.insert(text).second) << text;
        ASSERT_TRUE(option.check(levels, sum_payloads).ok()) << text << option.check(levels, sum_payloads).to_string();
        const Result<Option> parsed = Option::parse(text, topology);
        ASSERT_TRUE(parsed.ok()) << parsed.status().to_string();
        ASSERT_EQ(parsed.value(), option) << text;
      }
    }
  }
}

}  // namespace
}  // namespace cortado

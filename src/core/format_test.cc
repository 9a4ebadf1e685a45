// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/format.h"

#include <gtest/gtest.h>

namespace cortado {
namespace {

TEST(FormatText, GivesWhatPrintfPrints) {
  EXPECT_EQ(format_text("%s: %.2f of %d %%", "link", 1.5, 3), "link: 1.50 of 3 %");
  EXPECT_EQ(format_text("%s", ""), "");
}

TEST(FormatText, LosesNothingOfLongText) {
  const std::string longer(5000, 'x');
  EXPECT_EQ(format_text("<%s>", longer.c_str()), "<" + longer + ">");
}

}  // namespace
}  // namespace cortado

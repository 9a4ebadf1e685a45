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

TEST(Shorten, KeepsWhatFitsAndOtherwiseWholeCharacters) {
  EXPECT_EQ(shorten("", 4), "");
  EXPECT_EQ(shorten("rank", 4), "rank");
  EXPECT_EQ(shorten("ranks", 4), "rank...");
  EXPECT_EQ(shorten("\xc3\xa9\xc3\xa9\xc3\xa9", 4), "\xc3\xa9\xc3\xa9...");
  EXPECT_EQ(shorten("\xc3\xa9\xc3\xa9\xc3\xa9", 3), "\xc3\xa9...");
  EXPECT_EQ(shorten("a\xf0\x9f\x98\x80", 4), "a...");
  EXPECT_EQ(shorten("\x80\x80\x80", 2), "...");  // no UTF-8 at all
}

TEST(Printable, LeavesNothingThatATerminalObeys) {
  EXPECT_EQ(printable("a.weight \xc3\xa9 \xc2\xa0"), "a.weight \xc3\xa9 \xc2\xa0");
  EXPECT_EQ(printable("\x1b[2J\n\t\x7f\r"), "?[2J????");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J\xc2"),
            "?2J\xc2");  // U+009B begins a sequence, as ESC [ does
  EXPECT_EQ(printable(""), "");
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The little JSON that the program writes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cortado::cli {

std::string join(const std::vector<std::string>& words, const char* separator);

// A string with its quotes. What is not UTF-8 becomes U+FFFD.
std::string json_text(std::string_view text);

std::string json_list(const std::vector<std::string>& words);

// Enough digits to read the same number back; null for what JSON has no number for.
std::string json_number(double value);

}  // namespace cortado::cli

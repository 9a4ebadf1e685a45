// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Texts of files for a terminal.
#pragma once

#include <string>
#include <string_view>

namespace cortado {

// Of a text that may be anything: "?" for control characters (C0, DEL and, in UTF-8, C1), which a terminal would obey.
std::string printable(std::string_view text);

}  // namespace cortado

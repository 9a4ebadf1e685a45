// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

namespace cortado {

// Fields of a file that this version does not know, kept as they were read: JSON pointer from the object they belong to
// ("/searched", "/option/0/cost_ns") -> JSON text.
using UnknownFields = std::map<std::string, std::string>;

}  // namespace cortado

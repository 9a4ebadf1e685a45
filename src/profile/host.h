// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace cortado {

// The kind of this machine: "AMD EPYC, 2 cores, x86_64". No names or numbers of a single machine: nodes of a pool are
// as good as each other.
std::string host_kind();

}  // namespace cortado

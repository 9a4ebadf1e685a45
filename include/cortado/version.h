// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#define CORTADO_VERSION_MAJOR 0
#define CORTADO_VERSION_MINOR 1
#define CORTADO_VERSION_PATCH 0

namespace cortado {

// "major.minor.patch" of the library that is linked, which may differ from the macros of the headers.
const char* version();

}  // namespace cortado

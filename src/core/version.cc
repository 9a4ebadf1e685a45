// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/version.h"

#define CORTADO_TEXT_OF(x) CORTADO_TEXT(x)
#define CORTADO_TEXT(x) #x

namespace cortado {

const char* version() {
  return CORTADO_TEXT_OF(CORTADO_VERSION_MAJOR) "." CORTADO_TEXT_OF(CORTADO_VERSION_MINOR) "." CORTADO_TEXT_OF(
      CORTADO_VERSION_PATCH);
}

}  // namespace cortado

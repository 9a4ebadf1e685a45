// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/crc32.h"

#include <zlib.h>

namespace cortado {

std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  // A null pointer would ask zlib for the initial value, which is that of no bytes.
  return static_cast<std::uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cortado {

// CRC-32 of ISO-HDLC (zlib, gzip, PNG; Python's zlib.crc32): the checksum of files.
std::uint32_t crc32_of(std::span<const std::byte> bytes);

}  // namespace cortado

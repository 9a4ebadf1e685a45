// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Public lossless coders beside ours, on bytes: those whose headers were installed when this was built.
#pragma once

#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

#ifdef CORTADO_HAS_ZSTD
#include <zstd.h>
#endif
#ifdef CORTADO_HAS_LZ4
#include <lz4.h>
#endif

namespace cortado {

using Bytes = std::span<const std::byte>;
using Room = std::span<std::byte>;

struct ReferenceCoder {
  const char* name;
  std::size_t (*max_bytes)(std::size_t bytes);
  std::size_t (*compress)(Bytes from, Room to);  // returns the bytes written
  bool (*decompress)(Bytes from, Room to);       // false unless it fills `to`
};

inline std::vector<ReferenceCoder> reference_coders() {
  std::vector<ReferenceCoder> coders;
#ifdef CORTADO_HAS_ZSTD
  coders.push_back(
      {"zstd -1", ZSTD_compressBound,
       [](Bytes from, Room to) { return ZSTD_compress(to.data(), to.size(), from.data(), from.size(), 1); },
       [](Bytes from, Room to) {
         return ZSTD_decompress(to.data(), to.size(), from.data(), from.size()) == to.size();
       }});
#else
  std::printf("zstd was not installed with its header: left out\n");
#endif
#ifdef CORTADO_HAS_LZ4
  coders.push_back(
      {"lz4", [](std::size_t bytes) { return static_cast<std::size_t>(LZ4_compressBound(static_cast<int>(bytes))); },
       [](Bytes from, Room to) {
         return static_cast<std::size_t>(
             LZ4_compress_default(reinterpret_cast<const char*>(from.data()), reinterpret_cast<char*>(to.data()),
                                  static_cast<int>(from.size()), static_cast<int>(to.size())));
       },
       [](Bytes from, Room to) {
         return LZ4_decompress_safe(reinterpret_cast<const char*>(from.data()), reinterpret_cast<char*>(to.data()),
                                    static_cast<int>(from.size()),
                                    static_cast<int>(to.size())) == static_cast<int>(to.size());
       }});
#else
  std::printf("lz4 was not installed with its header: left out\n");
#endif
  return coders;
}

// Of single bytes: bits for all of them, by a coder that knows how often each occurs.
inline double order0_bits(std::span<const std::uint8_t> codes) {
  double counts[256] = {}, bits = 0;
  for (const std::uint8_t code : codes) ++counts[code];
  for (const double count : counts) {
    if (count > 0) bits += count * std::log2(static_cast<double>(codes.size()) / count);
  }
  return bits;
}

}  // namespace cortado

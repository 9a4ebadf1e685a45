// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How the inputs of fuzzers begin that try every codec: which one, and the shape of a tensor. Eight bytes,
// little-endian:
//
//   4   the codec: of the specifications of golden_specs(), ordered by the low 32 bits of their FNV-1a hashes, the
//       first that is not below this number (after the last comes the first again). So an input stays with its codec
//       when others are added, and every number means some codec.
//   1   dtype, modulo 4
//   1   rows
//   2   columns, cut where the tensor would have more elements than the fuzzer wants
//
// tests/oracle/fuzz_seeds.py writes the corpora.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "codec/conformance_cases.h"
#include "core/hash.h"

namespace cortado {

struct KeyedCodec {
  std::uint32_t key;
  std::unique_ptr<Codec> codec;
  const CodecRow* row;
};

struct CodecCase {
  const KeyedCodec* chosen;
  DType dtype;
  std::int64_t rows, cols;
  std::span<const std::uint8_t> rest;

  const Codec& codec() const { return *chosen->codec; }
  std::size_t tensor_bytes() const { return static_cast<std::size_t>(rows * cols) * dtype_bytes(dtype); }
  std::size_t scratch_bytes() const { return codec().scratch_bytes(rows, cols, dtype); }
};

// By key.
inline const std::vector<KeyedCodec>& all_codecs() {
  static const std::vector<KeyedCodec> codecs = [] {
    std::vector<KeyedCodec> made;
    for (const std::string& spec : golden_specs()) {
      std::unique_ptr<Codec> codec = make_codec(spec).value();
      const CodecRow* row = &codec->row();
      made.push_back({static_cast<std::uint32_t>(fnv1a_64(spec)), std::move(codec), row});
    }
    std::sort(made.begin(), made.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    return made;
  }();
  return codecs;
}

inline std::optional<CodecCase> read_codec_case(const std::uint8_t* data, std::size_t size, std::int64_t most_elems) {
  constexpr std::size_t kBytes = 8;
  if (size < kBytes) return std::nullopt;
  std::uint32_t key;
  std::uint16_t cols;
  std::memcpy(&key, data, sizeof(key));
  std::memcpy(&cols, data + 6, sizeof(cols));
  const std::vector<KeyedCodec>& codecs = all_codecs();
  auto chosen = std::lower_bound(codecs.begin(), codecs.end(), key,
                                 [](const KeyedCodec& codec, std::uint32_t at_least) { return codec.key < at_least; });
  if (chosen == codecs.end()) chosen = codecs.begin();
  const std::int64_t rows = data[5];
  return CodecCase{&*chosen,
                   kAllDTypes[data[4] % 4],
                   rows,
                   std::min<std::int64_t>(cols, most_elems / std::max<std::int64_t>(rows, 1)),
                   {data + kBytes, size - kBytes}};
}

}  // namespace cortado

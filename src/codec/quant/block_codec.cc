// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/block_codec.h"

namespace cortado {

Parameter block_parameter(const char* default_text, const char* meaning) {
  return {.name = "block",
          .kind = ParameterKind::kInteger,
          .default_text = default_text,
          .min = kSmallestBlockElems,
          .max = 65536,
          .choices = "auto|tensor",
          .meaning = meaning};
}

Result<std::int64_t> read_block_elems(const char* codec, const ParameterValues& values, std::int64_t automatic) {
  const std::string& text = values.text("block");
  if (text == "auto") return automatic;
  if (text == "tensor") return kWholeTensor;
  const std::int64_t elems = values.integer("block");
  if (std::has_single_bit(static_cast<std::uint64_t>(elems))) return elems;
  return make_error(StatusCode::kInvalidArgument, "%s(block=%s): block must be a power of two", codec, text.c_str());
}

std::string block_text(std::int64_t block_elems) {
  return block_elems == kWholeTensor ? "tensor" : std::to_string(block_elems);
}

}  // namespace cortado

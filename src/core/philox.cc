// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/philox.h"

namespace cortado {

void philox_fill_normal(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor, float* values,
                        std::int64_t elems) {
  const PhiloxStream stream{philox_key(seed, tensor), step};
  for (std::int64_t i = 0; i < elems; i += 2) {
    const PhiloxBlock block = stream.block(static_cast<std::uint64_t>(i / 2));
    values[i] = normal_from(block[0], block[1]);
    if (i + 1 < elems) values[i + 1] = normal_from(block[2], block[3]);
  }
}

}  // namespace cortado

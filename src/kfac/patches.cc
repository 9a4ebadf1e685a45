// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/patches.h"

#include <algorithm>
#include <cstring>

namespace cortado {

namespace {

// Along one line of the input: value `offset` + i * stride for position i, zeros outside.
void copy_line(const float* line, std::int64_t width, std::int64_t offset, std::int64_t stride, std::int64_t positions,
               float* out) {
  // Positions first ... last - 1 lie inside.
  const std::int64_t first = offset >= 0 ? 0 : std::min(positions, (-offset + stride - 1) / stride);
  const std::int64_t last = offset >= width ? first : std::clamp((width - 1 - offset) / stride + 1, first, positions);
  std::fill(out, out + first, 0.0f);
  if (stride == 1) {
    std::memcpy(out + first, line + offset + first, static_cast<std::size_t>(last - first) * sizeof(float));
  } else {
    for (std::int64_t i = first; i < last; ++i) out[i] = line[offset + i * stride];
  }
  std::fill(out + last, out + positions, 0.0f);
}

}  // namespace

void copy_patches(const PatchSource& source, const KfacWindow window[2], std::int64_t first_line, std::int64_t lines,
                  float* patches) {
  const std::int64_t rows_out = window_positions(window[0], source.height);
  const std::int64_t positions = window_positions(window[1], source.width);
  const std::int64_t columns = lines * positions;
  for (std::int64_t l = 0; l < lines; ++l) {
    const std::int64_t image = (first_line + l) / rows_out, y_out = (first_line + l) % rows_out;
    const float* planes = source.data + image * source.stride_elems;
    float* out = patches + l * positions;
    for (std::int64_t c = 0; c < source.channels; ++c) {
      for (std::int64_t ky = 0; ky < window[0].size; ++ky) {
        const std::int64_t y = y_out * window[0].stride - window[0].pad_before + ky * window[0].dilation;
        const float* line = planes + (c * source.height + y) * source.width;
        for (std::int64_t kx = 0; kx < window[1].size; ++kx, out += columns) {
          if (y < 0 || y >= source.height) {
            std::fill(out, out + positions, 0.0f);
          } else {
            copy_line(line, source.width, kx * window[1].dilation - window[1].pad_before, window[1].stride, positions,
                      out);
          }
        }
      }
    }
  }
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a convolution multiplies its weights with: the patches of its input, one column for each output position.
#pragma once

#include <cstdint>

#include "cortado/kfac.h"

namespace cortado {

// Positions of a window over `input` values of one dimension; 0 or less if it does not fit.
constexpr std::int64_t window_positions(const KfacWindow& window, std::int64_t input) {
  const std::int64_t reach = window.dilation * (window.size - 1) + 1;
  const std::int64_t room = input + window.pad_before + window.pad_after - reach;
  return room < 0 ? 0 : room / window.stride + 1;
}

// Images of one group: `channels` planes of height x width, images `stride_elems` apart.
struct PatchSource {
  const float* data;
  std::int64_t stride_elems;
  std::int64_t channels, height, width;
};

// Writes the columns of output lines first_line ... first_line + lines - 1, counted through all images; each line has
// as many columns as there are positions along the width. `patches` is row-major with channels x window rows (channel,
// then window row, then window column) of lines * positions columns. Outside the image stand zeros.
void copy_patches(const PatchSource& source, const KfacWindow window[2], std::int64_t first_line, std::int64_t lines,
                  float* patches);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What stands before and behind the products that make factors on a device: activations and output gradients as the
// float32 matrices that are multiplied with themselves, and the triangles of what comes of that.
#pragma once

#include "codec/device_tensors.h"
#include "core/device.h"
#include "kfac/triangle_device.h"

namespace cortado {

// Rows of `features` values, and a one behind them; up to `stride` follow zeros. matrix: rows x stride.
struct CopyRows {
  static constexpr int kThreads = kElementThreads;

  const void* data;  // the first row
  DType dtype;
  bool has_ones;
  std::int64_t features, rows, stride;
  float* matrix;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t;
      if (at >= rows * stride) return;
      const std::int64_t row = at / stride, col = at % stride;
      const float behind = has_ones && col == features ? 1.0f : 0.0f;
      matrix[at] = col < features ? load_value(data, dtype, row * features + col) : behind;
    });
  }
};

// One dimension of a KfacWindow (cortado/kfac.h).
struct DeviceWindow {
  std::uint32_t size;
  std::int64_t stride, dilation, pad_before;
};

// Images of `groups` times `channels` planes of height x width, and the window over them.
struct DeviceImages {
  const void* data;
  DType dtype;
  std::uint32_t groups, channels, height, width;
  std::uint32_t lines, positions;  // of an image: of output, and in each line
  DeviceWindow high, wide;
};

// Patches of output positions first_column ... first_column + columns - 1, counted through all images: what
// copy_patches() (patches.h) writes, group by group, and with `has_ones` a row of ones below. Rows are `stride` apart;
// behind `columns` they hold zeros. A launch of copy_patches_blocks(). Positions are counted in 32 bits.
struct CopyPatches {
  static constexpr int kThreads = kElementThreads;

  DeviceImages images;
  bool has_ones;
  std::uint32_t rows;  // of a group, the ones included
  std::uint32_t first_column, columns, stride;
  float* patches;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    const std::uint32_t blocks = (stride + kThreads - 1) / kThreads;  // of a row
    const auto number = static_cast<std::uint32_t>(block.number());
    const std::uint32_t row_of_all = number / blocks, group = row_of_all / rows, row = row_of_all % rows;
    const DeviceWindow &high = images.high, &wide = images.wide;
    const std::uint32_t kx = row % wide.size, ky = row / wide.size % high.size, channel = row / (wide.size * high.size);
    block.each([&](int t) {
      const std::uint32_t column = number % blocks * kThreads + static_cast<std::uint32_t>(t);
      if (column >= stride) return;
      float value = 0;
      if (column < columns) {
        const std::uint32_t place = first_column + column, line = place / images.positions;
        const std::uint32_t image = line / images.lines;
        const std::int64_t y = line % images.lines * high.stride - high.pad_before + ky * high.dilation,
                           x = place % images.positions * wide.stride - wide.pad_before + kx * wide.dilation;
        if (has_ones && row == rows - 1) {
          value = 1;
        } else if (y >= 0 && y < images.height && x >= 0 && x < images.width) {
          const std::int64_t plane = (std::int64_t{image} * images.groups + group) * images.channels + channel;
          value = load_value(images.data, images.dtype, (plane * images.height + y) * images.width + x);
        }
      }
      patches[static_cast<std::int64_t>(row_of_all) * stride + column] = value;
    });
  }
};
inline std::int64_t copy_patches_blocks(const CopyPatches& kernel) {
  return std::int64_t{kernel.images.groups} * kernel.rows * element_blocks(kernel.stride);
}

// Lower triangles (triangle.h) of `count` matrices. A launch of element_blocks(count * n * n).
struct PackTriangles {
  static constexpr int kThreads = kElementThreads;

  std::int64_t n, count;
  const float* matrices;
  float* triangles;

  struct Shared {};

  template <class Block>
  CORTADO_HD void operator()(Block& block, Shared&) const {
    block.each([&](int t) {
      const std::int64_t at = block.number() * kThreads + t;
      if (at >= count * n * n) return;
      const std::int64_t matrix = at / (n * n), row = at % (n * n) / n, col = at % n;
      if (col <= row) triangles[matrix * triangle_elems(n) + triangle_elems(row) + col] = matrices[at];
    });
  }
};

}  // namespace cortado

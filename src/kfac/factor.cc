// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/factor.h"

#include <algorithm>
#include <cinttypes>
#include <limits>

#include "core/check.h"
#include "core/checked_math.h"
#include "core/float16.h"
#include "core/linalg.h"
#include "kfac/patches.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

constexpr std::int64_t kPatchElems = std::int64_t{1} << 20;    // of one product: what a cache holds
constexpr std::int64_t kConvertElems = std::int64_t{1} << 18;  // of fp16 and bf16, at a time

constexpr KfacWindow kPoint[2] = {{}, {}};

template <typename T>
T* grown(std::vector<T>* memory, std::int64_t elems) {
  if (memory->size() < static_cast<std::size_t>(elems)) memory->resize(static_cast<std::size_t>(elems));
  return memory->data();
}

// elems values from `first` on as float32: where they lie, or in scratch->converted.
const float* as_floats(const KfacBatch& batch, std::int64_t first, std::int64_t elems, FactorScratch* scratch) {
  if (batch.dtype == DType::kFloat32) return static_cast<const float*>(batch.data) + first;
  float* out = grown(&scratch->converted, elems);
  const std::uint16_t* in = static_cast<const std::uint16_t*>(batch.data) + first;
  if (batch.dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < elems; ++i) out[i] = bf16_to_float(in[i]);
  } else {
    for (std::int64_t i = 0; i < elems; ++i) out[i] = fp16_to_float(in[i]);
  }
  return out;
}

float* cleared_matrix(std::int64_t n, FactorScratch* scratch) {
  float* matrix = grown(&scratch->matrix, n * n);
  std::fill(matrix, matrix + n * n, 0.0f);
  return matrix;
}

// Rows of `features` values; with `has_ones` a column of ones behind them.
void add_rows(const KfacBatch& batch, std::int64_t features, bool has_ones, float alpha, float* triangle,
              FactorScratch* scratch) {
  const std::int64_t n = features + (has_ones ? 1 : 0);
  float* matrix = cleared_matrix(n, scratch);
  double* sums = grown(&scratch->sums, features);
  std::fill(sums, sums + features, 0.0);
  const std::int64_t most_rows =
      batch.dtype == DType::kFloat32 && !has_ones ? batch.count : std::max<std::int64_t>(kConvertElems / features, 1);
  for (std::int64_t first = 0; first < batch.count; first += most_rows) {
    const std::int64_t rows = std::min(most_rows, batch.count - first);
    const float* values = as_floats(batch, first * features, rows * features, scratch);
    add_column_products(features, rows, alpha, values, matrix, n);
    for (std::int64_t r = 0; has_ones && r < rows; ++r) {
      for (std::int64_t j = 0; j < features; ++j) sums[j] += static_cast<double>(values[r * features + j]);
    }
  }
  if (has_ones) {
    float* last = matrix + features * n;
    for (std::int64_t j = 0; j < features; ++j) last[j] = static_cast<float>(sums[j] * static_cast<double>(alpha));
    last[features] = static_cast<float>(batch.count) * alpha;
  }
  add_to_triangle(n, matrix, triangle);
}

// Columns of all patches of all images, group by group; with `has_ones` a row of ones below them.
void add_patches(const KfacBatch& batch, std::int64_t groups, std::int64_t channels, const KfacWindow window[2],
                 bool has_ones, float alpha, float* triangles, FactorScratch* scratch) {
  const std::int64_t plane = batch.height * batch.width, image = groups * channels * plane;
  const std::int64_t rows = channels * window[0].size * window[1].size, n = rows + (has_ones ? 1 : 0);
  const std::int64_t lines_of_image = window_positions(window[0], batch.height);
  const std::int64_t positions = window_positions(window[1], batch.width);
  const std::int64_t most_lines = std::max<std::int64_t>(kPatchElems / (n * positions), 1);
  // fp16 and bf16 are widened some images at a time, which begin and end with a chunk of lines.
  const std::int64_t most_images =
      batch.dtype == DType::kFloat32 ? batch.count : std::max<std::int64_t>(kConvertElems / image, 1);
  for (std::int64_t group = 0; group < groups; ++group) {
    float* matrix = cleared_matrix(n, scratch);
    for (std::int64_t first_image = 0; first_image < batch.count; first_image += most_images) {
      const std::int64_t images = std::min(most_images, batch.count - first_image);
      const float* values = as_floats(batch, first_image * image, images * image, scratch);
      const PatchSource source = {values + group * channels * plane, image, channels, batch.height, batch.width};
      const std::int64_t all_lines = images * lines_of_image;
      for (std::int64_t line = 0; line < all_lines; line += most_lines) {
        const std::int64_t lines = std::min(most_lines, all_lines - line), columns = lines * positions;
        float* patches = grown(&scratch->patches, n * columns);
        copy_patches(source, window, line, lines, patches);
        if (has_ones) std::fill(patches + rows * columns, patches + n * columns, 1.0f);
        add_row_products(n, columns, alpha, patches, matrix, n);
      }
    }
    add_to_triangle(n, matrix, triangles + group * triangle_elems(n));
  }
}

Status check_batch(const KfacLayer& layer, const KfacBatch& batch, std::int64_t features, const char* what) {
  const std::string& name = layer.name;
  if (batch.dtype == DType::kUint8) {
    return make_error(StatusCode::kInvalidArgument, "layer %s: %s must be fp32, fp16 or bf16", name.c_str(), what);
  }
  const auto plane = checked_elems(batch.height, batch.width);
  const auto elems = plane.has_value() ? checked_elems(batch.count, *plane) : std::nullopt;
  const auto values = elems.has_value() ? checked_mul(*elems, features) : std::nullopt;
  if (!values.has_value() || batch.count < 1 || *plane < 1 || batch.data == nullptr ||
      *elems > std::numeric_limits<std::int32_t>::max()) {
    return make_error(StatusCode::kInvalidArgument,
                      "layer %s: %s must be 1 to 2^31 - 1 rows, or images and positions, got %" PRId64 " x %" PRId64
                      " x %" PRId64 " at %p",
                      name.c_str(), what, batch.count, batch.height, batch.width, batch.data);
  }
  if (!layer.is_convolution && *plane != 1) {
    return make_error(StatusCode::kInvalidArgument, "layer %s is linear, %s have positions %" PRId64 " x %" PRId64,
                      name.c_str(), what, batch.height, batch.width);
  }
  return {};
}

}  // namespace

float mean_alpha(const KfacBatch& batch, std::int64_t positions, double scale) {
  const auto s = static_cast<double>(positions);
  const auto alpha = static_cast<float>(1.0 / (static_cast<double>(batch.count) * s * s * s));
  return static_cast<float>(static_cast<double>(alpha) / (scale * scale));
}

std::int64_t FactorScratch::bytes() const {
  return static_cast<std::int64_t>((matrix.size() + patches.size() + converted.size()) * sizeof(float) +
                                   sums.size() * sizeof(double));
}

Status check_activations(const KfacLayer& layer, const KfacBatch& batch) {
  CORTADO_RETURN_IF_ERROR(check_batch(layer, batch, layer.groups * layer.channels(), "activations"));
  if (!layer.is_convolution) return {};
  const std::int64_t high = window_positions(layer.window[0], batch.height);
  const std::int64_t wide = window_positions(layer.window[1], batch.width);
  if (high > 0 && wide > 0) return {};
  return make_error(StatusCode::kInvalidArgument,
                    "layer %s: its window does not fit into activations of %" PRId64 " x %" PRId64, layer.name.c_str(),
                    batch.height, batch.width);
}

Status check_output_gradients(const KfacLayer& layer, const KfacBatch& batch) {
  return check_batch(layer, batch, layer.groups * layer.outputs, "output gradients");
}

void add_activation_factors(const KfacLayer& layer, const KfacBatch& batch, float* triangles, FactorScratch* scratch) {
  if (!layer.is_convolution) {
    return add_rows(batch, layer.inputs, layer.has_bias, mean_alpha(batch, 1), triangles, scratch);
  }
  const std::int64_t positions =
      window_positions(layer.window[0], batch.height) * window_positions(layer.window[1], batch.width);
  add_patches(batch, layer.groups, layer.channels(), layer.window, layer.has_bias, mean_alpha(batch, positions),
              triangles, scratch);
}

void add_gradient_factors(const KfacLayer& layer, const KfacBatch& batch, double scale, float* triangles,
                          FactorScratch* scratch) {
  const float alpha = mean_alpha(batch, batch.height * batch.width, scale);
  if (!layer.is_convolution) return add_rows(batch, layer.outputs, false, alpha, triangles, scratch);
  add_patches(batch, layer.groups, layer.outputs, kPoint, false, alpha, triangles, scratch);
}

}  // namespace cortado

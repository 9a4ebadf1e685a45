// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/factor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/float16.h"
#include "core/philox.h"
#include "kfac/emulated_kfac_device.h"
#include "kfac/factor_sync.h"
#include "kfac/patches.h"
#include "kfac/triangle.h"

namespace cortado {
namespace {

std::vector<float> normal(std::int64_t elems, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(seed, 0, 0, values.data(), elems);
  return values;
}

// Rows of samples in double; the factor is rows^T rows / number of rows.
using Rows = std::vector<std::vector<double>>;

void expect_factor(const Rows& rows, const float* triangle, const std::string& what) {
  const std::size_t n = rows.at(0).size();
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (const auto& row : rows) sum += row[i] * row[j];
      const double expected = sum / static_cast<double>(rows.size());
      EXPECT_NEAR(*triangle++, expected, 1e-5 * (1 + std::fabs(expected))) << what << " at " << i << ", " << j;
    }
  }
}

struct Convolution {
  const char* what;
  KfacLayer layer;
  std::int64_t images, height, width;
};

std::vector<Convolution> convolutions() {
  const auto layer = [](std::int64_t channels, std::int64_t outputs, bool bias, std::int64_t groups, KfacWindow high,
                        KfacWindow wide) {
    return KfacLayer{.name = "conv",
                     .inputs = channels * high.size * wide.size,
                     .outputs = outputs,
                     .has_bias = bias,
                     .groups = groups,
                     .is_convolution = true,
                     .window = {high, wide}};
  };
  return {
      {"3x3, padded", layer(2, 3, true, 1, {3, 1, 1, 1, 1}, {3, 1, 1, 1, 1}), 3, 5, 6},
      {"1x1", layer(4, 2, false, 1, {}, {}), 2, 3, 3},
      {"strides and no bias", layer(1, 2, false, 1, {3, 2, 1, 0, 0}, {2, 3, 1, 0, 0}), 2, 8, 9},
      {"dilated", layer(2, 2, true, 1, {2, 1, 3, 2, 2}, {3, 2, 2, 1, 1}), 2, 7, 8},
      {"padding larger than the image", layer(1, 1, true, 1, {3, 1, 1, 4, 4}, {3, 3, 1, 5, 4}), 1, 2, 2},
      {"padding of two sizes (same)", layer(1, 2, true, 1, {2, 1, 1, 0, 1}, {4, 1, 1, 1, 2}), 2, 4, 4},
      {"groups", layer(2, 3, true, 3, {2, 1, 1, 0, 0}, {2, 1, 1, 0, 0}), 2, 4, 3},
      {"depthwise", layer(1, 1, false, 5, {3, 1, 1, 1, 1}, {3, 1, 1, 1, 1}), 2, 4, 4},
      {"one dimension", layer(3, 4, true, 1, {}, {5, 2, 1, 2, 2}), 3, 1, 11},
  };
}

// X of one group: a row for each image and position, divided by the number of positions.
Rows patches_of(const Convolution& c, const std::vector<float>& input, std::int64_t group) {
  const KfacWindow *high = &c.layer.window[0], *wide = &c.layer.window[1];
  const std::int64_t channels = c.layer.channels();
  const auto positions = [](const KfacWindow& w, std::int64_t size) {
    return (size + w.pad_before + w.pad_after - w.dilation * (w.size - 1) - 1) / w.stride + 1;
  };
  const std::int64_t out_high = positions(*high, c.height), out_wide = positions(*wide, c.width);
  const double share = 1.0 / static_cast<double>(out_high * out_wide);
  Rows rows;
  for (std::int64_t image = 0; image < c.images; ++image) {
    for (std::int64_t y_out = 0; y_out < out_high; ++y_out) {
      for (std::int64_t x_out = 0; x_out < out_wide; ++x_out) {
        std::vector<double> row;
        for (std::int64_t channel = 0; channel < channels; ++channel) {
          for (std::int64_t ky = 0; ky < high->size; ++ky) {
            for (std::int64_t kx = 0; kx < wide->size; ++kx) {
              const std::int64_t y = y_out * high->stride - high->pad_before + ky * high->dilation;
              const std::int64_t x = x_out * wide->stride - wide->pad_before + kx * wide->dilation;
              const bool inside = y >= 0 && y < c.height && x >= 0 && x < c.width;
              const std::int64_t plane = (image * c.layer.groups + group) * channels + channel;
              const auto at = static_cast<std::size_t>(inside ? (plane * c.height + y) * c.width + x : 0);
              row.push_back(inside ? share * static_cast<double>(input[at]) : 0);
            }
          }
        }
        if (c.layer.has_bias) row.push_back(share);
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

// What a batch adds on a device.
std::vector<float> device_factors(const KfacLayer& layer, Side side, const KfacBatch& batch, double scale = 1,
                                  std::int64_t patch_elems = 1) {
  const std::shared_ptr<KfacDevice> device = make_emulated_kfac_device(patch_elems);
  const std::size_t slot = side == Side::kA ? 0 : 1;
  EXPECT_TRUE(
      device->prepare({.layers = {&layer, 1}, .adds = {true, true}, .preconditions = {false}, .offsets = {0}}).ok());
  const Status added = device->add_batch(slot, batch, scale), fetched = device->fetch_factors();
  EXPECT_TRUE(added.ok() && fetched.ok()) << added.to_string() << fetched.to_string();
  const std::int64_t n = side == Side::kA ? layer.a_dim() : layer.g_dim();
  const float* const triangles = device->triangles(slot);
  return {triangles, triangles + layer.groups * triangle_elems(n)};
}

void expect_near(const std::vector<float>& found, const std::vector<float>& expected, const char* what) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 2e-6f * (1 + std::fabs(expected[i]))) << what << " at " << i;
  }
}

TEST(KfacFactor, ActivationsOfConvolutions) {
  for (const Convolution& c : convolutions()) {
    const std::int64_t n = c.layer.a_dim();
    const std::vector<float> input = normal(c.images * c.layer.groups * c.layer.channels() * c.height * c.width, 7);
    const KfacBatch batch{input.data(), DType::kFloat32, c.images, c.height, c.width};
    ASSERT_TRUE(check_activations(c.layer, batch).ok()) << c.what;
    std::vector<float> triangles(static_cast<std::size_t>(c.layer.groups * triangle_elems(n)));
    FactorScratch scratch;
    add_activation_factors(c.layer, batch, triangles.data(), &scratch);
    for (std::int64_t group = 0; group < c.layer.groups; ++group) {
      expect_factor(patches_of(c, input, group), triangles.data() + group * triangle_elems(n), c.what);
    }
    // In pieces of 32 columns, of 64, and in one.
    const std::int64_t column = c.layer.groups * n;
    for (const std::int64_t columns : {1, 70, 1000}) {
      expect_near(device_factors(c.layer, Side::kA, batch, 1, columns * column), triangles, c.what);
    }
  }
}

TEST(KfacFactor, OutputGradientsOfConvolutions) {
  constexpr std::int64_t kImages = 3, kHeight = 2, kWidth = 4;
  for (const std::int64_t groups : {1, 2}) {
    const KfacLayer layer{.name = "conv", .inputs = 1, .outputs = 3, .groups = groups, .is_convolution = true};
    const std::vector<float> gradients = normal(kImages * groups * 3 * kHeight * kWidth, 8);
    std::vector<float> triangles(static_cast<std::size_t>(groups * triangle_elems(3)));
    FactorScratch scratch;
    const KfacBatch batch{gradients.data(), DType::kFloat32, kImages, kHeight, kWidth};
    add_gradient_factors(layer, batch, 4.0, triangles.data(), &scratch);
    expect_near(device_factors(layer, Side::kG, batch, 4.0), triangles, "gradients");
    for (std::int64_t group = 0; group < groups; ++group) {
      Rows rows;
      for (std::int64_t at = 0; at < kImages * kHeight * kWidth; ++at) {
        const std::int64_t image = at / (kHeight * kWidth), place = at % (kHeight * kWidth);
        rows.emplace_back();
        for (std::int64_t c = 0; c < 3; ++c) {
          const std::int64_t plane = (image * groups + group) * 3 + c;
          const float value = gradients[static_cast<std::size_t>(plane * kHeight * kWidth + place)];
          rows.back().push_back(static_cast<double>(value) / 4 / (kHeight * kWidth));
        }
      }
      expect_factor(rows, triangles.data() + group * triangle_elems(3), "gradients");
    }
  }
}

TEST(KfacFactor, LinearLayersInAllDtypes) {
  constexpr std::int64_t kRows = 37, kInputs = 6;
  const std::vector<float> values = normal(kRows * kInputs, 9);
  for (const bool has_bias : {true, false}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const KfacLayer layer{.name = "linear", .inputs = kInputs, .outputs = 2, .has_bias = has_bias};
      std::vector<std::uint16_t> narrow;
      std::vector<double> wide;
      for (const float value : values) {
        narrow.push_back(dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value));
        wide.push_back(dtype == DType::kFloat32   ? value
                       : dtype == DType::kFloat16 ? fp16_to_float(narrow.back())
                                                  : bf16_to_float(narrow.back()));
      }
      const void* data = dtype == DType::kFloat32 ? static_cast<const void*>(values.data()) : narrow.data();
      std::vector<float> triangle(static_cast<std::size_t>(triangle_elems(layer.a_dim())), 1.0f);
      FactorScratch scratch;
      add_activation_factors(layer, {data, dtype, kRows}, triangle.data(), &scratch);
      for (float& value : triangle) value -= 1;  // it was added to what was there
      expect_near(device_factors(layer, Side::kA, {data, dtype, kRows}), triangle, "linear");
      Rows rows;
      for (std::int64_t r = 0; r < kRows; ++r) {
        rows.emplace_back(wide.begin() + r * kInputs, wide.begin() + (r + 1) * kInputs);
        if (has_bias) rows.back().push_back(1);
      }
      expect_factor(rows, triangle.data(), "linear");
    }
  }
}

// More than one product's worth of patches, and narrow images in several pieces.
TEST(KfacFactor, LargeBatchesInPieces) {
  const KfacLayer layer{.name = "conv",
                        .inputs = 16 * 9,
                        .outputs = 4,
                        .has_bias = true,
                        .is_convolution = true,
                        .window = {{3, 1, 1, 1, 1}, {3, 1, 1, 1, 1}}};
  constexpr std::int64_t kImages = 20, kSide = 32;
  std::vector<float> values = normal(kImages * 16 * kSide * kSide, 10);
  std::vector<std::uint16_t> narrow;
  for (float& value : values) {
    narrow.push_back(float_to_bf16(value));
    value = bf16_to_float(narrow.back());
  }
  const auto factor = [&](const void* data, DType dtype, std::int64_t images) {
    std::vector<float> triangle(static_cast<std::size_t>(triangle_elems(layer.a_dim())));
    FactorScratch scratch;
    add_activation_factors(layer, {data, dtype, images, kSide, kSide}, triangle.data(), &scratch);
    return triangle;
  };
  const std::vector<float> whole = factor(values.data(), DType::kFloat32, kImages),
                           widened = factor(narrow.data(), DType::kBFloat16, kImages);
  std::vector<double> mean(whole.size());
  for (std::int64_t image = 0; image < kImages; ++image) {
    const std::vector<float> one = factor(values.data() + image * 16 * kSide * kSide, DType::kFloat32, 1);
    for (std::size_t i = 0; i < one.size(); ++i) mean[i] += static_cast<double>(one[i]) / kImages;
  }
  for (std::size_t i = 0; i < mean.size(); ++i) {
    EXPECT_NEAR(whole[i], mean[i], 1e-9);  // values are about 1e-6
    EXPECT_NEAR(widened[i], mean[i], 1e-9);
  }
}

// Batches of a step, then those of the next one.
TEST(KfacFactor, BatchesOnADevice) {
  constexpr std::int64_t kRows = 5;
  const KfacLayer layer{.name = "linear", .inputs = 7, .outputs = 3, .has_bias = true};
  const std::shared_ptr<KfacDevice> device = make_emulated_kfac_device();
  ASSERT_TRUE(
      device->prepare({.layers = {&layer, 1}, .adds = {true, true}, .preconditions = {false}, .offsets = {0}}).ok());
  FactorScratch scratch;
  for (std::uint64_t step = 0; step < 2; ++step) {
    std::vector<float> a(static_cast<std::size_t>(triangle_elems(8))), g(static_cast<std::size_t>(triangle_elems(3)));
    for (std::uint64_t seed : {10 + step, 20 + step}) {
      const std::vector<float> x = normal(kRows * 7, seed), d = normal(kRows * 3, seed + 5);
      const KfacBatch activations{x.data(), DType::kFloat32, kRows}, gradients{d.data(), DType::kFloat32, kRows};
      ASSERT_TRUE(device->add_batch(0, activations, 1).ok());
      ASSERT_TRUE(device->add_batch(1, gradients, 8).ok());
      add_activation_factors(layer, activations, a.data(), &scratch);
      add_gradient_factors(layer, gradients, 8, g.data(), &scratch);
    }
    ASSERT_TRUE(device->fetch_factors().ok());
    expect_near({device->triangles(0), device->triangles(0) + a.size()}, a, "A");
    expect_near({device->triangles(1), device->triangles(1) + g.size()}, g, "G");
  }
}

TEST(KfacFactor, BatchesThatAreWrong) {
  const float value = 1;
  const KfacLayer linear{.name = "fc", .inputs = 1, .outputs = 1};
  const KfacLayer conv{.name = "conv", .inputs = 9, .outputs = 1, .is_convolution = true, .window = {{3}, {3}}};
  const auto text = [](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_NE(text(check_activations(linear, {&value, DType::kFloat32, 0})).find("layer fc: activations must be 1 to"),
            std::string::npos);
  EXPECT_NE(text(check_activations(linear, {nullptr, DType::kFloat32, 1})).find("1 x 1 x 1 at"), std::string::npos);
  EXPECT_NE(text(check_activations(linear, {&value, DType::kUint8, 1})).find("fp32, fp16 or bf16"), std::string::npos);
  EXPECT_NE(text(check_output_gradients(linear, {&value, DType::kFloat32, 1, 2, 1})).find("layer fc is linear"),
            std::string::npos);
  EXPECT_NE(text(check_activations(conv, {&value, DType::kFloat32, 1, 2, 5})).find("window does not fit"),
            std::string::npos);
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_FALSE(check_activations(conv, {&value, DType::kFloat32, huge, huge, huge}).ok());
}

}  // namespace
}  // namespace cortado

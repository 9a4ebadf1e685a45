// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// KfacDevice for a device: CudaDevice with products by cuBLAS, or EmulatedDevice with those of the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/device_products.h"
#include "core/device_queue.h"
#include "core/seconds.h"
#include "kfac/factor.h"
#include "kfac/factor_device.h"
#include "kfac/kfac_device.h"
#include "kfac/patches.h"
#include "kfac/precondition.h"
#include "kfac/precondition_device.h"

namespace cortado {

template <class Device>
class KfacDeviceOf : public KfacDevice {
 public:
  // patch_elems: most values of a matrix that is copied before it is multiplied; at least 32 columns fit all the same.
  KfacDeviceOf(std::unique_ptr<DeviceQueue> queue, std::unique_ptr<DeviceProducts> products,
               std::shared_ptr<KfacInverter> inverter, std::int64_t patch_elems = std::int64_t{1} << 24)
      : queue_(std::move(queue)),
        products_(std::move(products)),
        inverter_(std::move(inverter)),
        patch_elems_(patch_elems) {}

  // cuBLAS, cuSOLVER and cudaFree() wait for the whole device before they let go. After a timeout it may never end:
  // then all that there is stays until the program ends.
  ~KfacDeviceOf() override {
    if (!inverter_has_timed_out_ && ends_soon()) return;
    auto* const left = new Left{std::move(queue_), std::move(products_), std::move(inverter_), left_.load()};
    while (!left_.compare_exchange_weak(left->next, left)) {
    }
  }
  KfacDeviceOf(const KfacDeviceOf&) = delete;
  KfacDeviceOf& operator=(const KfacDeviceOf&) = delete;

  std::string kind() const override { return products_->kind(); }

  Status prepare(const Setup& setup) override {
    if (is_prepared_) return make_error(StatusCode::kFailedPrecondition, "a KfacDevice is of one Kfac only");
    is_prepared_ = true;
    setup_ = setup;
    layers_.assign(setup.layers.begin(), setup.layers.end());
    setup_.layers = layers_;
    CORTADO_ASSIGN_OR_RETURN(event_, queue_->make_event());
    CORTADO_RETURN_IF_ERROR(allocate_factors());
    return allocate_gradients();
  }

  Status follow(DeviceStream stream) override { return queue_->follow(stream); }
  Status lead(DeviceStream stream) override { return queue_->lead(stream); }

  Result<float*> host_memory(std::int64_t elems) override { return on_host<float>(elems, &memory_.gradients_bytes); }

  Status reserve(std::span<const InverseJob> jobs) override { return inverter_->reserve(jobs); }
  Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds timeout) override {
    Status status = inverter_->invert(jobs, timeout);
    inverter_has_timed_out_ |= status.code() == StatusCode::kTimeout;
    return status;
  }
  std::int64_t scratch_bytes() const override { return inverter_->scratch_bytes(); }

  // ---- factors

  Status add_batch(std::size_t s, const KfacBatch& batch, double scale) override {
    CORTADO_RETURN_IF_ERROR(queue_->follow(static_cast<DeviceStream>(batch.device_stream)));
    Factor& factor = factors_[s];
    const KfacLayer& layer = layers_[s / 2];
    const bool is_a = s % 2 == 0;
    if (layer.is_convolution) {
      CORTADO_RETURN_IF_ERROR(add_images(layer, is_a, batch, scale, factor));
    } else {
      const bool has_ones = is_a && layer.has_bias;
      CORTADO_RETURN_IF_ERROR(add_rows(batch, is_a ? layer.inputs : layer.outputs, has_ones, scale, factor));
    }
    factor.has_batch = true;
    return {};
  }

  void forget_batches() override {
    for (Factor& factor : factors_) factor.has_batch = false;
  }

  Status fetch_factors() override {
    if (triangle_elems_ == 0) return {};
    Device device(queue_->stream());
    for (const Factor& factor : factors_) {
      if (!factor.has_batch) continue;
      device.launch(element_blocks(factor.count * factor.n * factor.n),
                    PackTriangles{.n = factor.n,
                                  .count = factor.count,
                                  .matrices = factor.sums,
                                  .triangles = triangles_ + factor.triangles_at});
    }
    CORTADO_RETURN_IF_ERROR(device.status());
    CORTADO_RETURN_IF_ERROR(to_host(host_triangles_, triangles_, triangle_elems_));
    forget_batches();
    return wait("factors");
  }

  const float* triangles(std::size_t slot) const override { return host_triangles_ + factors_[slot].triangles_at; }

  // ---- gradients

  Status load_inverse(std::size_t s, const float* inverse, const float* values) override {
    const Factor& factor = factors_[s];
    CORTADO_RETURN_IF_ERROR(upload(factor.inverse, inverse, factor.count * factor.n * factor.n));
    if (!setup_.is_eigen) return {};
    CORTADO_RETURN_IF_ERROR(upload(factor.values, values, factor.count * factor.n));
    Inverses& inverses = inverses_[s / 2];
    std::vector<double>& means = s % 2 == 0 ? inverses.a_means : inverses.g_means;
    for (std::int64_t m = 0; m < factor.count; ++m) {
      double sum = 0;
      for (std::int64_t i = 0; i < factor.n; ++i) sum += static_cast<double>(values[m * factor.n + i]);
      means[static_cast<std::size_t>(m)] = sum / static_cast<double>(factor.n);
    }
    std::vector<double> pis(means.size(), 1.0);
    for (std::size_t m = 0; setup_.splits && m < pis.size(); ++m) {
      pis[m] = split_damping(1, inverses.a_means[m], inverses.g_means[m]).a;
    }
    return upload(inverses.pis, pis.data(), factor.count);
  }

  Status load_gradients(std::span<const KfacGradient> gradients, float scale, bool all) override {
    Device device(queue_->stream());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!all && !setup_.preconditions[i]) continue;
      float* const matrix = gradients_ + setup_.offsets[i];
      if (gradients[i].weight == nullptr) {
        device.fill(matrix, 0, static_cast<std::uint64_t>(layers_[i].gradient_elems()) * sizeof(float));
        continue;
      }
      const LoadGradient kernel = {.gradient = on_device(i, gradients[i]), .scale = scale, .matrix = matrix};
      device.launch(element_blocks(layers_[i].gradient_elems()), kernel);
    }
    return device.status();
  }

  Status fetch_gradients(float* to) override {
    CORTADO_RETURN_IF_ERROR(to_host(to, gradients_, setup_.elems));
    return wait("gradients");
  }

  Result<double> precondition(double damping, float* to) override {
    Device device(queue_->stream());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!setup_.preconditions[i]) continue;
      CORTADO_RETURN_IF_ERROR(precondition_layer(i, damping, device));
    }
    const std::int64_t blocks = InnerProducts::blocks(setup_.own_elems);
    device.launch(blocks, InnerProducts{.elems = setup_.own_elems,
                                        .left = results_ + setup_.first,
                                        .right = gradients_ + setup_.first,
                                        .sums = products_on_device_});
    CORTADO_RETURN_IF_ERROR(device.status());
    if (to != nullptr) CORTADO_RETURN_IF_ERROR(to_host(to + setup_.first, results_ + setup_.first, setup_.own_elems));
    CORTADO_RETURN_IF_ERROR(to_host(products_on_host_, products_on_device_, blocks));
    CORTADO_RETURN_IF_ERROR(wait("preconditioned gradients"));
    double product = 0;
    for (std::int64_t b = 0; b < blocks; ++b) product += products_on_host_[b];
    return product;
  }

  Status store_gradients(std::span<const KfacGradient> gradients, float scale, bool all, const float* from) override {
    const std::int64_t first = all ? 0 : setup_.first, elems = all ? setup_.elems : setup_.own_elems;
    if (from != nullptr) {
      CORTADO_RETURN_IF_ERROR(queue_->copy_to_device(reinterpret_cast<std::byte*>(results_ + first),
                                                     reinterpret_cast<const std::byte*>(from + first), bytes(elems)));
    }
    Device device(queue_->stream());
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (gradients[i].weight == nullptr || (!all && !setup_.preconditions[i])) continue;
      device.launch(element_blocks(layers_[i].gradient_elems()), StoreGradient{.gradient = on_device(i, gradients[i]),
                                                                               .scale = scale,
                                                                               .matrix = results_ + setup_.offsets[i]});
    }
    return device.status();
  }

  KfacMemory memory() const override { return memory_; }

 private:
  static constexpr std::chrono::microseconds kLook{50};  // between two looks at the device
  static constexpr std::chrono::seconds kPeers{1};       // between two questions for failed peers
  static constexpr double kPatienceS = 2;                // of the destructor, at most
  static constexpr std::int64_t kColumns = 32;           // of patches are a multiple of it
  static constexpr std::int64_t kStrideElems = 4;        // rows that are copied begin at a multiple of it
  static constexpr std::uint64_t kUploadBytes = std::uint64_t{1} << 22;

  struct Factor {
    std::int64_t n = 0, count = 0;
    float* sums = nullptr;  // matrices
    bool has_batch = false;
    std::int64_t triangles_at = 0;
    float *inverse = nullptr, *values = nullptr;
  };
  struct Left {
    std::unique_ptr<DeviceQueue> queue;
    std::unique_ptr<DeviceProducts> products;
    std::shared_ptr<KfacInverter> inverter;
    Left* next;
  };
  static inline std::atomic<Left*> left_ = nullptr;  // of all that were destroyed
  struct Inverses {
    std::vector<double> a_means{}, g_means{};  // of eigenvalues, of each group
    double* pis = nullptr;
  };

  template <typename T = float>
  static std::uint64_t bytes(std::int64_t elems) {
    return static_cast<std::uint64_t>(elems) * sizeof(T);
  }
  static std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

  template <typename T>
  Result<T*> on_device(std::int64_t elems, std::int64_t* counted) {
    CORTADO_ASSIGN_OR_RETURN(std::byte* const memory, queue_->allocate_on_device(bytes<T>(elems)));
    *counted += static_cast<std::int64_t>(bytes<T>(elems));
    return reinterpret_cast<T*>(memory);
  }
  template <typename T>
  Result<T*> on_host(std::int64_t elems, std::int64_t* counted) {
    CORTADO_ASSIGN_OR_RETURN(std::byte* const memory, queue_->allocate_on_host(bytes<T>(elems)));
    *counted += static_cast<std::int64_t>(bytes<T>(elems));
    return reinterpret_cast<T*>(memory);
  }

  Status allocate_factors() {
    factors_.resize(2 * layers_.size());
    std::int64_t patch_elems = 0;
    for (std::size_t s = 0; s < factors_.size(); ++s) {
      const KfacLayer& layer = layers_[s / 2];
      Factor& factor = factors_[s];
      factor.n = s % 2 == 0 ? layer.a_dim() : layer.g_dim();
      factor.count = layer.groups;
      if (!setup_.adds[s]) continue;
      factor.triangles_at = triangle_elems_;
      triangle_elems_ += factor.count * triangle_elems(factor.n);
      CORTADO_ASSIGN_OR_RETURN(factor.sums, on_device<float>(factor.count * factor.n * factor.n, &memory_.batch_bytes));
      patch_elems = std::max(patch_elems, factor.count * (factor.n + kStrideElems) * kColumns);
    }
    if (triangle_elems_ == 0) return {};
    patch_elems_ = std::max(patch_elems_, patch_elems);
    CORTADO_ASSIGN_OR_RETURN(patches_, on_device<float>(patch_elems_, &memory_.scratch_bytes));
    CORTADO_ASSIGN_OR_RETURN(triangles_, on_device<float>(triangle_elems_, &memory_.batch_bytes));
    CORTADO_ASSIGN_OR_RETURN(host_triangles_, on_host<float>(triangle_elems_, &memory_.batch_bytes));
    return {};
  }

  Status allocate_gradients() {
    inverses_.resize(layers_.size());
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      if (!setup_.preconditions[i]) continue;
      largest = std::max(largest, layers_[i].gradient_elems());
      for (Factor* const factor : {&factors_[2 * i], &factors_[2 * i + 1]}) {
        const std::int64_t elems = factor->count * factor->n;
        CORTADO_ASSIGN_OR_RETURN(factor->inverse, on_device<float>(elems * factor->n, &memory_.inverses_bytes));
        if (!setup_.is_eigen) continue;
        CORTADO_ASSIGN_OR_RETURN(factor->values, on_device<float>(elems, &memory_.inverses_bytes));
      }
      if (!setup_.is_eigen) continue;
      const auto groups = static_cast<std::size_t>(layers_[i].groups);
      inverses_[i] = {.a_means = std::vector<double>(groups), .g_means = std::vector<double>(groups)};
      CORTADO_ASSIGN_OR_RETURN(inverses_[i].pis, on_device<double>(layers_[i].groups, &memory_.inverses_bytes));
    }
    const std::int64_t blocks = InnerProducts::blocks(setup_.own_elems);
    CORTADO_ASSIGN_OR_RETURN(gradients_, on_device<float>(setup_.elems, &memory_.gradients_bytes));
    CORTADO_ASSIGN_OR_RETURN(results_, on_device<float>(setup_.elems, &memory_.gradients_bytes));
    CORTADO_ASSIGN_OR_RETURN(product_, on_device<float>(largest, &memory_.scratch_bytes));
    CORTADO_ASSIGN_OR_RETURN(products_on_device_, on_device<double>(blocks, &memory_.scratch_bytes));
    CORTADO_ASSIGN_OR_RETURN(products_on_host_, on_host<double>(blocks, &memory_.scratch_bytes));
    CORTADO_ASSIGN_OR_RETURN(upload_, on_host<std::byte>(kUploadBytes, &memory_.scratch_bytes));
    return {};
  }

  // Rows of `features` values, and a column of ones. float32 without it is multiplied where it lies.
  Status add_rows(const KfacBatch& batch, std::int64_t features, bool has_ones, double scale, Factor& factor) {
    const float alpha = mean_alpha(batch, 1, scale);
    if (batch.dtype == DType::kFloat32 && !has_ones) {
      return products_->add_column_products(features, batch.count, alpha, static_cast<const float*>(batch.data),
                                            features, factor.sums, !factor.has_batch);
    }
    const std::int64_t stride = round_up(factor.n, kStrideElems), most_rows = patch_elems_ / stride;
    for (std::int64_t first = 0; first < batch.count; first += most_rows) {
      const std::int64_t rows = std::min(most_rows, batch.count - first);
      const auto* const data = static_cast<const std::byte*>(batch.data) +
                               first * features * static_cast<std::int64_t>(dtype_bytes(batch.dtype));
      Device device(queue_->stream());
      device.launch(element_blocks(rows * stride), CopyRows{.data = data,
                                                            .dtype = batch.dtype,
                                                            .has_ones = has_ones,
                                                            .features = features,
                                                            .rows = rows,
                                                            .stride = stride,
                                                            .matrix = patches_});
      CORTADO_RETURN_IF_ERROR(device.status());
      CORTADO_RETURN_IF_ERROR(products_->add_column_products(factor.n, rows, alpha, patches_, stride, factor.sums,
                                                             !factor.has_batch && first == 0));
    }
    return {};
  }

  // Patches of activations; of output gradients a window of one value.
  Status add_images(const KfacLayer& layer, bool is_a, const KfacBatch& batch, double scale, Factor& factor) {
    const KfacWindow point, &high = is_a ? layer.window[0] : point, &wide = is_a ? layer.window[1] : point;
    const std::int64_t lines = window_positions(high, batch.height), positions = window_positions(wide, batch.width);
    const std::int64_t all_columns = batch.count * lines * positions;
    if (all_columns > std::numeric_limits<std::int32_t>::max()) {
      return make_error(StatusCode::kUnsupported, "layer %s: a batch of more than 2^31 - 1 positions on a device",
                        layer.name.c_str());
    }
    const auto u32 = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
    const auto window = [&](const KfacWindow& w) {
      return DeviceWindow{u32(w.size), w.stride, w.dilation, w.pad_before};
    };
    CopyPatches kernel = {.images = {.data = batch.data,
                                     .dtype = batch.dtype,
                                     .groups = u32(layer.groups),
                                     .channels = u32(is_a ? layer.channels() : layer.outputs),
                                     .height = u32(batch.height),
                                     .width = u32(batch.width),
                                     .lines = u32(lines),
                                     .positions = u32(positions),
                                     .high = window(high),
                                     .wide = window(wide)},
                          .has_ones = is_a && layer.has_bias,
                          .rows = u32(factor.n),
                          .first_column = 0,
                          .columns = 0,
                          .stride = 0,
                          .patches = patches_};
    const std::int64_t most_columns = patch_elems_ / (factor.count * factor.n) / kColumns * kColumns;
    const float alpha = mean_alpha(batch, lines * positions, scale);
    for (std::int64_t first = 0; first < all_columns; first += most_columns) {
      const std::int64_t columns = std::min(most_columns, all_columns - first), stride = round_up(columns, kColumns);
      kernel.first_column = u32(first), kernel.columns = u32(columns), kernel.stride = u32(stride);
      Device device(queue_->stream());
      device.launch(copy_patches_blocks(kernel), kernel);
      CORTADO_RETURN_IF_ERROR(device.status());
      CORTADO_RETURN_IF_ERROR(products_->add_row_products(factor.n, stride, alpha, patches_, factor.sums,
                                                          !factor.has_batch && first == 0, factor.count));
    }
    return {};
  }

  // As on the CPU (precondition.h).
  Status precondition_layer(std::size_t i, double damping, Device& device) {
    const KfacLayer& layer = layers_[i];
    const Factor &a = factors_[2 * i], &g = factors_[2 * i + 1];
    const std::int64_t inputs = a.n, outputs = g.n, count = layer.groups;
    const float* const w = gradients_ + setup_.offsets[i];
    float* const v = results_ + setup_.offsets[i];
    const auto product = [&](Operand op_a, Operand op_b, std::int64_t k, const float* left, const float* right,
                             float* to) {
      return products_->multiply(op_a, op_b, outputs, inputs, k, left, right, to, count);
    };
    constexpr Operand kAsIs = Operand::kAsIs, kTransposed = Operand::kTransposed;
    CORTADO_RETURN_IF_ERROR(product(kAsIs, kAsIs, outputs, g.inverse, w, product_));
    if (!setup_.is_eigen) return product(kAsIs, kAsIs, inputs, product_, a.inverse, v);
    CORTADO_RETURN_IF_ERROR(product(kAsIs, kTransposed, inputs, product_, a.inverse, v));
    device.launch(element_blocks(layer.gradient_elems()),
                  DivideByEigenvalues{.outputs = outputs,
                                      .inputs = inputs,
                                      .count = count,
                                      .g_values = g.values,
                                      .a_values = a.values,
                                      .pis = inverses_[i].pis,
                                      .root = setup_.splits ? std::sqrt(damping) : 0,
                                      .added = setup_.splits ? 0 : static_cast<float>(damping),
                                      .v = v});
    CORTADO_RETURN_IF_ERROR(product(kTransposed, kAsIs, outputs, g.inverse, v, product_));
    return product(kAsIs, kAsIs, inputs, product_, a.inverse, v);
  }

  DeviceGradient on_device(std::size_t i, const KfacGradient& gradient) const {
    return {gradient.weight, layers_[i].has_bias ? gradient.bias : nullptr, gradient.dtype,
            layers_[i].groups * layers_[i].outputs, layers_[i].inputs};
  }

  template <typename T>
  Status to_host(T* to, const T* from, std::int64_t elems) {
    return queue_->copy_to_host(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                                bytes<T>(elems));
  }

  // Through pinned memory, which is free again when the device has been waited for: only when it is full, not for each.
  template <typename T>
  Status upload(T* to, const T* from, std::int64_t elems) {
    constexpr std::uint64_t kAlign = 16;  // of what follows; a divisor of kUploadBytes
    for (std::int64_t first = 0; first < elems;) {
      if (upload_used_ == kUploadBytes) CORTADO_RETURN_IF_ERROR(wait("inverses"));
      const std::uint64_t room = (kUploadBytes - upload_used_) / sizeof(T),
                          count = std::min(room, static_cast<std::uint64_t>(elems - first));
      const std::uint64_t size = count * sizeof(T);
      std::memcpy(upload_ + upload_used_, from + first, size);
      CORTADO_RETURN_IF_ERROR(
          queue_->copy_to_device(reinterpret_cast<std::byte*>(to + first), upload_ + upload_used_, size));
      upload_used_ += (size + kAlign - 1) / kAlign * kAlign;
      first += static_cast<std::int64_t>(count);
    }
    return {};
  }

  bool ends_soon() {
    if (!is_prepared_) return true;
    setup_.peer_failure = nullptr;  // who asks may be gone
    return wait("what it was given", std::min(kPatienceS, setup_.timeout_s)).code() != StatusCode::kTimeout;
  }

  // For all that was given.
  Status wait(const char* what) { return wait(what, setup_.timeout_s); }
  Status wait(const char* what, double timeout_s) {
    CORTADO_RETURN_IF_ERROR(queue_->record(event_));
    const auto begin = std::chrono::steady_clock::now(), deadline = begin + from_seconds(timeout_s);
    auto asks_peers = begin + kPeers;
    for (;;) {
      CORTADO_ASSIGN_OR_RETURN(const bool is_reached, queue_->reached(event_));
      if (is_reached) {
        upload_used_ = 0;
        return {};
      }
      const auto now = std::chrono::steady_clock::now();
      if (setup_.peer_failure && now >= asks_peers) {
        CORTADO_RETURN_IF_ERROR(setup_.peer_failure().with_context("while waiting for the device"));
        asks_peers = now + kPeers;
      }
      if (now >= deadline) {
        return make_error(StatusCode::kTimeout, "the device has not finished with %s within %g s", what, timeout_s);
      }
      std::this_thread::sleep_for(kLook);
    }
  }

  std::unique_ptr<DeviceQueue> queue_;
  std::unique_ptr<DeviceProducts> products_;
  std::shared_ptr<KfacInverter> inverter_;
  std::int64_t patch_elems_;
  bool is_prepared_ = false;
  bool inverter_has_timed_out_ = false;
  Setup setup_;
  std::vector<KfacLayer> layers_;
  DeviceQueue::Event event_ = 0;

  std::vector<Factor> factors_;     // of slots
  std::vector<Inverses> inverses_;  // of layers
  float* patches_ = nullptr;
  float *triangles_ = nullptr, *host_triangles_ = nullptr;
  std::int64_t triangle_elems_ = 0;

  float *gradients_ = nullptr, *results_ = nullptr;  // of all layers
  float* product_ = nullptr;                         // of a layer
  double *products_on_device_ = nullptr, *products_on_host_ = nullptr;
  std::byte* upload_ = nullptr;
  std::uint64_t upload_used_ = 0;  // by copies that may be under way
  KfacMemory memory_;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a Kfac does on a device: all that touches activations and gradients of parameters, or multiplies. It has a
// stream of its own, which takes its order from those of the caller. What travels comes to the host: triangles of
// factors, inverses, preconditioned gradients. docs/adr/0033.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "cortado/kfac.h"
#include "kfac/inverter.h"

namespace cortado {

// As the inverter it is, it inverts from and to host memory. Of one Kfac only, and for one thread at a time.
class KfacDevice : public KfacInverter {
 public:
  struct Setup {
    std::span<const KfacLayer> layers;
    std::vector<bool> adds;                 // of slots (kfac_impl.h): whether batches come
    std::vector<bool> preconditions;        // of layers
    std::vector<std::int64_t> offsets;      // of layers: where the matrix of a gradient is among those of all
    std::int64_t elems = 0;                 // of all of these matrices
    std::int64_t first = 0, own_elems = 0;  // of them, those of the layers it preconditions
    bool is_eigen = true;
    bool splits = false;      // the damping: pi_correction
    double timeout_s = 1800;  // of each wait for the device
    // Asked about once a second of a wait, which ends with its error: the device may itself wait for a peer that is
    // gone. May be empty.
    std::function<Status()> peer_failure = {};
  };
  // Of device and libraries: preconditions to the same bits wherever it is the same.
  virtual std::string kind() const = 0;

  // First of all, and once.
  virtual Status prepare(const Setup& setup) = 0;

  // What it is given from now on comes after all that `stream` has been given; and the other way round.
  virtual Status follow(DeviceStream stream) = 0;
  virtual Status lead(DeviceStream stream) = 0;

  // Pinned memory, zeroed, as long as the device.
  virtual Result<float*> host_memory(std::int64_t elems) = 0;

  // ---- factors

  // Adds a checked batch, divided by `scale`, behind what batch.device_stream has been given. Its memory is read later.
  virtual Status add_batch(std::size_t slot, const KfacBatch& batch, double scale) = 0;
  virtual void forget_batches() = 0;
  // Waits; then triangles(slot) holds the sum of the batches of each slot that got one, until the next call. Forgets
  // the batches.
  virtual Status fetch_factors() = 0;
  virtual const float* triangles(std::size_t slot) const = 0;

  // ---- gradients, as matrices one behind the other (Setup::offsets)

  // From host memory, which may change when the call returns. With `splits`, the means of eigenvalues count too.
  virtual Status load_inverse(std::size_t slot, const float* inverse, const float* values) = 0;
  // Gradients times `scale`; of all layers, or of those it preconditions.
  virtual Status load_gradients(std::span<const KfacGradient> gradients, float scale, bool all) = 0;
  // Waits; then `to` (host_memory()) has those of all layers.
  virtual Status fetch_gradients(float* to) = 0;
  // Waits, and returns the sum of the products of what was loaded with what comes of it. `to`: unless null,
  // host_memory() that gets what comes of it, at its places among those of all layers.
  virtual Result<double> precondition(double damping, float* to) = 0;
  // Results times `scale` to the gradients of all layers, or of those it preconditions. `from`: host_memory() with the
  // results of these layers; null: what precondition() has left on the device.
  virtual Status store_gradients(std::span<const KfacGradient> gradients, float scale, bool all, const float* from) = 0;

  // Of the device, and pinned.
  virtual KfacMemory memory() const = 0;
};

}  // namespace cortado

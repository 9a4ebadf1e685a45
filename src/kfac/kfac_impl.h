// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The Kfac behind include/cortado/kfac.h. Of layer i, slot 2 i is factor A and slot 2 i + 1 factor G.
//
//   kfac.cc           checks, set-up
//   kfac_inverses.cc  factors and inverses
//   kfac_step.cc      gradients
//   kfac_auto.cc      which codec, where it is "auto"
//   kfac_state.cc     report, saving and loading
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/seconds.h"
#include "cortado/kfac.h"
#include "kfac/factor.h"
#include "kfac/factor_sync.h"
#include "kfac/grid_group.h"
#include "kfac/inverter.h"
#include "kfac/kfac_device.h"
#include "kfac/message_choice.h"
#include "kfac/precondition.h"

namespace cortado {

// A factor that this rank inverts, holds the inverse of, or both.
struct HeldFactor {
  std::vector<float> running;    // triangles; on the owner
  std::vector<float> inverse;    // matrices: eigenvectors as rows, or inverses; on gradient workers
  std::vector<float> values;     // eigenvalues
  std::vector<float> triangles;  // an inverse as it travels
};

using TensorList = std::vector<ConstTensorView>;  // of one payload

// One kind of message whose codec may be chosen. If the model says that a codec makes them shorter, the next ones are
// on trial: some go with it and some as they are, in turns, and then the way that took less time stays. Anew after
// 1000, 10,000 ... messages.
struct AutoMessage {
  enum class Phase : std::uint8_t { kUndecided, kTrial, kDecided };

  bool is_on = false;
  Phase phase = Phase::kUndecided;
  std::int64_t messages = 0, next_trial = 1000;
  std::size_t candidate = 0;  // the place of the one that was predicted to be best, and how it aggregates
  std::int64_t aggregate = 0;
  bool compresses = false;             // the next message goes with it
  std::string predicted;               // of it, in words
  std::vector<std::int64_t> times_ns;  // of this rank's messages on trial; -1: it does not count
  KfacChoice choice;

  // The way of the next message. True if it is another one than before.
  bool take(const std::vector<std::string>& candidates);
  // What a message took. Such as are not finite say nothing.
  void record(std::int64_t ns, bool is_finite);
};

// What ranks must share, besides layers.
std::string settings_text(const KfacOptions& options);

class KfacImpl final : public Kfac {
 public:
  KfacImpl(std::vector<KfacLayer> layers, const KfacOptions& options, Communicator* world, const Clock* clock,
           const KfacGrid& grid, std::unique_ptr<GridGroup> column, std::unique_ptr<GridGroup> row)
      : layers_(std::move(layers)),
        options_(options),
        world_(world),
        clock_(clock),
        grid_(grid),
        column_(std::move(column)),
        row_(std::move(row)),
        device_(options.device),
        inverter_(inverter_of(options)) {}
  ~KfacImpl() override;

  // The second half of create(): what can fail.
  Status prepare();

  bool wants_batches(std::size_t layer) const override {
    return sync_->wants(2 * layer) || sync_->wants(2 * layer + 1);
  }

  Status add_activations(std::size_t layer, const KfacBatch& batch) override {
    return add_batch(layer, Side::kA, batch, 1);
  }
  Status add_output_gradients(std::size_t layer, const KfacBatch& batch, double scale) override {
    return add_batch(layer, Side::kG, batch, scale);
  }
  void reset_batch() override {
    sync_->reset();
    if (device_ != nullptr) device_->forget_batches();
  }
  Status release_batches(void* device_stream) override {
    return device_ != nullptr ? device_->lead(static_cast<DeviceStream>(device_stream)) : Status();
  }

  Status reduce_gradients(std::span<const KfacGradient> gradients, void* device_stream) override;
  Result<KfacOutcome> step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients,
                           void* device_stream) override;

  Status set_compression(std::string_view spec) override;
  Status set_factor_compression(std::string_view spec) override;
  Status set_candidates(const std::vector<std::string>& candidates) override;

  const std::vector<KfacLayer>& layers() const override { return layers_; }
  const std::vector<KfacPlacement>& placements() const override { return placements_; }
  const KfacGrid& grid() const override { return grid_; }
  std::int64_t steps() const override { return step_; }
  KfacReport report() const override;
  KfacMemory memory() const override;
  KfacState save_state(bool with_inverses) const override;
  Result<std::string> load_state(std::span<const KfacState> states) override;

 private:
  int rank() const { return world_->rank(); }
  std::chrono::nanoseconds timeout() const { return from_seconds(options_.timeout_s); }
  bool is_worker(std::size_t layer) const { return placements_[layer].column == grid_.column_of(rank()); }
  bool is_eigen() const { return options_.inverse == KfacInverse::kEigen; }
  std::vector<FactorSlot> slots() const;

  void place_layers();
  void begin_anew(const FactorSlot& slot);
  void allocate();
  Status prepare_device();
  Status allocate(float** pinned);  // unless it is there; gradients_ or results_
  Status prepare_inverse_gather();
  Status prepare_gradient_gather();

  // Whether all ranks were given the same for this step, before anything is sent that another one may not expect.
  Status compare_step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients);
  std::string codecs_text() const;
  Status add_batch(std::size_t layer, Side side, const KfacBatch& batch, double scale);
  Status fetch_factors();
  Status update_factors(double decay);
  Status update_inverses(const KfacHyperparameters& values);
  Status reserve_inverses();
  Status invert_all(double damping);
  InverseJob inverse_job(std::size_t slot, std::int64_t matrix, double damping);
  SplitDamping damping_of(std::size_t layer, std::int64_t group, double damping) const;
  void pack_own_inverses();
  const std::string& inverse_codec() const;
  Status send_inverses();
  Status gather_inverses();
  Result<double> precondition(double damping, std::span<const KfacGradient> gradients);
  Result<double> precondition_on_device(double damping, std::span<const KfacGradient> gradients);
  // Whether what has been preconditioned need not come to the host, because no other rank gets it.
  bool stays_on_device() const { return device_ != nullptr && row_->is_alone(); }
  // `results`, nullptr those that stay on the device, times `scale` to the gradients of all layers, or of those of this
  // rank's column.
  Status store(const float* results, float scale, bool all, std::span<const KfacGradient> gradients,
               DeviceStream stream);
  Result<KfacOutcome> exchange(const KfacHyperparameters& values, double own_product);
  Result<KfacOutcome> run_step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients,
                               DeviceStream stream);
  Status load_all(std::span<const KfacGradient> gradients, float scale, DeviceStream stream);
  Status sum_gradients();

  std::vector<MessageTrial> trials() const;
  // Before a message: true if its codec has changed. own: the payloads this rank is about to send.
  Result<bool> decide(AutoMessage* message, const MessageShape& shape, const std::vector<TensorList>& own);
  // What the model says.
  Status predict(AutoMessage* message, const MessageShape& shape, const std::vector<TensorList>& own);
  // What the clock says of the messages on trial so far.
  Status compare_times(AutoMessage* message);
  Status decide_factors();
  Status decide_inverses();
  Status decide_gradients();
  Status check_gradients(std::span<const KfacGradient> gradients) const;

  struct Loading;
  Status find_layer(std::size_t layer, std::span<const KfacState> states, Loading* loading);
  Status check_states(std::span<const KfacState> states, Loading* loading);

  void count(const std::string& layer, const std::string& reason) { ++fallbacks_[{layer, reason}]; }
  Status fail(Status status) {
    failure_ = status;
    world_->abandon(status.to_string());
    return status;
  }

  static std::shared_ptr<KfacInverter> inverter_of(const KfacOptions& options) {
    if (options.inverter != nullptr) return options.inverter;
    if (options.device != nullptr) return options.device;
    return make_cpu_inverter(options.threads);
  }

  // Adds the time since the last call of lap() or start_lap() to a stage.
  void start_lap() { lap_begin_ns_ = clock_->now_ns(); }
  void lap(KfacStage stage) {
    const std::int64_t now_ns = clock_->now_ns();
    report_.stage_ns[static_cast<int>(stage)] += now_ns - lap_begin_ns_;
    lap_begin_ns_ = now_ns;
  }

  std::vector<KfacLayer> layers_;
  KfacOptions options_;
  Communicator* world_;
  const Clock* clock_;
  KfacGrid grid_;
  std::unique_ptr<GridGroup> column_, row_;

  std::vector<KfacPlacement> placements_;
  std::vector<HeldFactor> factors_;  // of each slot
  std::unique_ptr<FactorSync> sync_;
  std::unique_ptr<OwnerGather> inverse_gather_, gradient_gather_;
  std::vector<std::size_t> gathered_slots_;  // of the inverse gather, in its order
  std::vector<void*> gathered_inverses_;     // addresses of its tensors

  // Gradients of all layers as matrices with the bias as last column, those of a column's layers next to each other.
  std::vector<std::int64_t> offsets_;       // of each layer
  std::vector<std::int64_t> column_elems_;  // of the layers of each column
  // With a device they are pinned memory: what is to travel (nullptr where nothing does), and what has come.
  float *gradients_ = nullptr, *results_ = nullptr;
  std::int64_t gradient_elems_ = 0;              // of each
  std::vector<float> gradient_memory_[2];        // without a device
  Communicator* gradients_in_flight_ = nullptr;  // of a collective of theirs whose end was not seen
  std::vector<void*> result_of_layer_;
  std::vector<float> product_scratch_;

  AutoMessage auto_factors_, auto_inverses_, auto_gradients_;

  FactorScratch factor_scratch_;
  std::shared_ptr<KfacDevice> device_;  // nullptr: batches and gradients are in host memory
  bool device_has_inverses_ = false;
  std::shared_ptr<KfacInverter> inverter_;
  std::int64_t step_ = 0;
  bool inverses_are_stale_ = false;
  std::map<std::pair<std::string, std::string>, std::int64_t> fallbacks_;
  KfacReport report_;
  std::int64_t lap_begin_ns_ = 0;
  std::vector<std::string> candidates_;  // of "auto"; options_ has those at first
  Status failure_;
};

}  // namespace cortado

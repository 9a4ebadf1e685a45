// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// LowRankTensor: what one compressed matrix keeps between steps, and the changes a step makes to it. Three ways to
// approximate a matrix A by few columns; in all of them the summed factors are the same bytes on every rank, and the
// next bases are made from them:
//
//   AcpTensor      one factor a step, the sides take turns (ACP-SGD, section 2.2)
//   TwoSidedTensor both factors in every step, from the bases of the step before, half the rank each
//   PowerTensor    two rounds, the second on the basis that the first one gave (Power-SGD, algorithm 1)
//
// A step first only writes to places that the step before does not need any more, and, in place, to the residual.
// commit() makes that the new state; rollback() takes the residual's change back. So until commit the state before can
// be had again.
//
// What reads or writes a whole matrix are passes of lowrank_kernels.h; the rest works on factors, which are small.
// Where gradient and residual are on a device, so are the passes, and DeviceMatrices (device_matrices.h) calls the
// rest.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "bucket/layout.h"
#include "codec/lowrank/lowrank_kernels.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/aligned_buffer.h"
#include "cortado/engine.h"

namespace cortado {

class LowRankTensor {
 public:
  struct Setup {
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    int rank = 0;  // columns of each factor
    DType dtype = DType::kFloat32;
    DType wire = DType::kFloat32;
    int world_size = 1;
    bool warm_start = true;
    BasisKey key;
  };
  static std::unique_ptr<LowRankTensor> make(const EngineOptions& options, const Setup& setup);
  virtual ~LowRankTensor() = default;

  // `residual`: rows * cols floats, zeroed; nullptr without error feedback. `spare`: as many, or nullptr; with it a
  // rollback is bit-exact.
  void set_residual(float* residual, float* spare);

  // The residual is on a device, and with it what set_residual() is for.
  void keep_residual_elsewhere() { is_elsewhere_ = true; }

  // Reads the gradient, updates the residual and writes what `kind` asks for to `slot` in the wire's dtype. Returns
  // false if the gradient was not finite.
  bool encode(SlotKind kind, const void* gradient, double gradient_scale, void* slot);

  // Instead of encode(), for a tensor that has nothing to send in this step: zeros go to the slot and the residual
  // waits.
  void hold(SlotKind kind, void* slot);

  // Between two rounds: the summed row factor becomes the basis of the second, whose factor is written to `slot`.
  virtual void receive_first_round(const void* summed, std::int64_t step);
  bool encode_second_round(void* slot);

  // output = the mean of the gradients that the summed factors stand for, in the gradient's dtype; NaN where some
  // rank's was not finite. Before commit(); receive() may come before or after it.
  void decode(SlotKind kind, const void* summed, double gradient_scale, void* output);

  // ---- encode(), encode_second_round() and decode() without the pass over the matrix

  // The factors that a pass makes, each where the basis for it is given; both in memory of the tensor.
  struct Projection {
    BothBases bases;
    BothFactors factors;
  };
  // To be followed by hold() or finish_encode(), with what the pass found.
  Projection begin_encode(SlotKind kind);
  virtual bool finish_encode(SlotKind kind, const PassResult& result, void* slot) = 0;
  virtual Projection second_projection();
  virtual bool finish_second_round(const PassResult& result, void* slot);
  // What the residual still has to lose: the pass subtracts it.
  const FactorPair& sent() const { return sent_; }
  // The pair that decode() makes output = decode_scale() * row * col of; nothing: NaN. Valid until the next call.
  virtual std::optional<FactorPair> mean(SlotKind kind, const void* summed) = 0;
  float decode_scale(double gradient_scale) const;
  int most_sent_rank() const { return most_sent_rank_; }  // of sent() and mean()
  bool is_held() const { return is_held_; }

  // ----

  // Keeps the summed factors, made orthonormal, for the next step.
  virtual void receive(SlotKind kind, const void* summed, std::int64_t step) = 0;

  virtual void commit(SlotKind kind) = 0;
  // The gradient as encode() read it (nullptr: zeros); needed unless there is a spare residual.
  void rollback(const void* gradient);

  // The residual itself, without a pair pending.
  void materialise_residual();
  float* residual() { return residual_; }

  // What the next step projects on if it sends `kind`: the state that a checkpoint holds besides the residual.
  virtual std::span<float> basis(SlotKind kind) = 0;
  // Where sides alternate, what the step after that projects on if nobody sends anything: it belongs to that state.
  virtual std::span<float> other_basis(SlotKind) { return {}; }

  const Setup& setup() const { return setup_; }
  virtual std::int64_t factor_bytes() const = 0;
  double sum_squares() const { return sum_squares_; }      // of A in the last step
  double error_squares() const { return error_squares_; }  // of A minus its own reconstruction

 protected:
  LowRankTensor(const Setup& setup, int most_sent_rank) : setup_(setup), most_sent_rank_(most_sent_rank) {}

  virtual Projection projection(SlotKind kind) = 0;

  std::int64_t row_elems() const { return setup_.rows * setup_.rank; }
  std::int64_t col_elems() const { return setup_.cols * setup_.rank; }
  BasisKey key_of_step(std::int64_t step) const;
  void random_row_basis(float* row_basis, float* scratch) const;

  // `sent` is what the residual still has to lose.
  void commit_residual(const FactorPair& sent);

  // Puts a factor on the wire. With a narrow wire the factor becomes what the others will read, so that its rounding is
  // error-fed-back too; returns the squares of that rounding.
  double write_factor(float* factor, std::int64_t elems, void* slot) const;
  // The factor as float32: at `summed` itself, or widened.
  const float* read_factor(const void* summed, std::int64_t elems, float* widened) const;
  std::int64_t wire_bytes(std::int64_t elems) const {
    return elems * static_cast<std::int64_t>(dtype_bytes(setup_.wire));
  }
  void set_error(double sum_squares, double factor_squares, double wire_error_squares);

 private:
  float wire_scale() const;
  PassResult project(const ResidualPass& pass, const Projection& projection) const;

  Setup setup_;
  int most_sent_rank_;
  float* residual_ = nullptr;
  float* spare_ = nullptr;
  bool is_elsewhere_ = false;  // the residual
  FactorPair sent_;
  ResidualPass pass_;     // over gradient and residual, of the step in hand
  bool is_held_ = false;  // in the step in hand
  double sum_squares_ = 0;
  double error_squares_ = 0;
};

double squares_of(const float* values, std::int64_t elems);

}  // namespace cortado

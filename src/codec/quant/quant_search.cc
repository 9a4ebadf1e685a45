// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_search.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "codec/pieces.h"

namespace cortado {

namespace {

constexpr std::int64_t kSampleElems = 65536, kSamplePieceElems = 256;

// Some or all pieces of a tensor: `elems` values every `stride`.
class Sample {
 public:
  Sample(ConstTensorView input, std::int64_t piece_elems, std::int64_t stride)
      : input_(input), piece_elems_(piece_elems), stride_(stride) {
    for_each([&](const float* values, std::int64_t elems) {
      BlockStats stats;
      measure_blocks(BlockScale::kL2, values, elems, elems, &stats);
      energy_ += stats.squares;
      is_finite_ &= stats.max_magnitude < kInfinityBits;
    });
  }

  bool is_finite() const { return is_finite_; }
  double energy() const { return energy_; }

  // Relative L2.
  double error_at(Rounding rounding, float step) const {
    double sum = 0;
    for_each([&](const float* values, std::int64_t elems) { sum += sum_squared_errors(rounding, step, values, elems); });
    return static_cast<double>(step) * std::sqrt(sum / energy_);
  }

 private:
  template <typename Body>
  void for_each(const Body& body) const {
    alignas(64) float buffer[kMaxPieceElems];
    for (std::int64_t first = 0; first < input_.elems(); first += stride_) {
      const std::int64_t elems = std::min(piece_elems_, input_.elems() - first);
      body(load_piece(input_, first, elems, buffer), whole_rows(elems));
    }
  }

  ConstTensorView input_;
  std::int64_t piece_elems_, stride_;
  double energy_ = 0;
  bool is_finite_ = true;
};

// The largest step found that keeps the error, from a guess on: bracketed by powers of two, then halved.
float bisect(const Sample& sample, Rounding rounding, double error, float guess) {
  const auto keeps = [&](float step) { return sample.error_at(rounding, step) <= error; };
  // The error tends to 1 as the step grows, and is below one step a value.
  float kept = guess, lost = guess;
  if (keeps(guess)) {
    do lost *= 2;
    while (keeps(lost) && std::isfinite(lost));
    kept = lost / 2;
  } else {
    do kept /= 2;
    while (!keeps(kept) && kept > 0);
    lost = kept * 2;
  }
  constexpr int kHalvings = 12;
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = kept + (lost - kept) / 2;
    (keeps(middle) ? kept : lost) = middle;
  }
  return kept;
}

}  // namespace

float find_step(Rounding rounding, double error, ConstTensorView input) {
  const std::int64_t elems = input.elems();
  const Sample all(input, kMaxPieceElems, kMaxPieceElems);
  if (!all.is_finite()) return std::numeric_limits<float>::quiet_NaN();
  if (all.energy() == 0) return 0;
  const double rms = std::sqrt(all.energy() / static_cast<double>(elems));
  // Exact for dither, nearly so for small errors of the others.
  auto step = static_cast<float>(error * rms * std::sqrt(12.0));
  if (rounding == Rounding::kDither) return step;
  if (elems <= kSampleElems) return bisect(all, rounding, error, step);

  const std::int64_t pieces = kSampleElems / kSamplePieceElems;
  const Sample some(input, kSamplePieceElems, elems / pieces / kSamplePieceElems * kSamplePieceElems);
  if (some.energy() > 0) step = bisect(some, rounding, error, step);
  constexpr int kCorrections = 4;
  for (int i = 0; i < kCorrections; ++i) {
    const double found = all.error_at(rounding, step);
    if (std::abs(found / error - 1) < 0.002) break;
    step *= static_cast<float>(std::clamp(error / found, 0.125, 8.0));
  }
  return step;
}

}  // namespace cortado

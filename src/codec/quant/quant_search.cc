// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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
      max_magnitude_ = std::max(max_magnitude_, stats.max_magnitude);
    });
  }

  bool is_finite() const { return max_magnitude_ < kInfinityBits; }
  float largest() const { return std::bit_cast<float>(max_magnitude_); }
  double energy() const { return energy_; }

  // body(values, elems), elems a multiple of 16: behind the last value stand zeros.
  template <typename Body>
  void for_each(const Body& body) const {
    alignas(64) float buffer[kMaxPieceElems];
    for (std::int64_t first = 0; first < input_.elems(); first += stride_) {
      const std::int64_t elems = std::min(piece_elems_, input_.elems() - first);
      body(load_piece(input_, first, elems, buffer), whole_rows(elems));
    }
  }

 private:
  ConstTensorView input_;
  std::int64_t piece_elems_, stride_;
  double energy_ = 0;
  std::uint32_t max_magnitude_ = 0;  // its bits
};

constexpr float kLeastStep = std::numeric_limits<float>::min(), kMostStep = std::numeric_limits<float>::max();

// The largest step found that keeps the error, from a guess on: bracketed by powers of two, then halved. Neither 0 nor
// infinity, which no factor of 2 moves, even if the guess is.
// `error_at(step)` is the relative L2 error.
template <typename ErrorAt>
float bisect(const ErrorAt& error_at, double error, float guess) {
  const auto keeps = [&](float step) { return error_at(step) <= error; };
  // The error tends to 1 as the step grows, and is below one step a value.
  float kept = std::clamp(guess, kLeastStep, kMostStep), lost = kept;
  if (keeps(kept)) {
    do lost *= 2;
    while (std::isfinite(lost) && keeps(lost));
    if (!std::isfinite(lost)) return kMostStep;
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

// Towards the error itself. Where it is not in proportion to the step, as of values of one magnitude, all are searched.
// Of a step above twice the largest value nothing but zeros is left.
template <typename ErrorAt>
float corrected(const ErrorAt& error_at, double error, float largest, float step) {
  constexpr int kCorrections = 4;
  const float most = std::clamp(2 * largest, kLeastStep, kMostStep);
  for (int i = 0; i <= kCorrections; ++i) {
    step = std::clamp(step, kLeastStep, most);
    const double found = error_at(step);
    if (std::abs(found / error - 1) < 0.002) return step;
    step *= static_cast<float>(std::clamp(error / found, 0.125, 8.0));
  }
  return bisect(error_at, error, step);
}

bool is_small(ConstTensorView input) { return input.elems() <= kSampleElems; }

Sample all_of(ConstTensorView input) { return Sample(input, kMaxPieceElems, kMaxPieceElems); }

Sample some_of(ConstTensorView input) {
  constexpr std::int64_t kPieces = kSampleElems / kSamplePieceElems;
  return Sample(input, kSamplePieceElems, input.elems() / kPieces / kSamplePieceElems * kSamplePieceElems);
}

// Exact for dither, nearly so for small errors of the others.
float first_guess(const Sample& all, double error, std::int64_t elems) {
  const double guess = error * std::sqrt(all.energy() / static_cast<double>(elems)) * std::sqrt(12.0);
  return static_cast<float>(std::min<double>(guess, kMostStep));
}

// ---- dead zones ----------------------------------------------------------------------------------------------------

DeadZoneSums dead_zone_sums(const Sample& sample, float shift, float step) {
  DeadZoneSums all;
  sample.for_each([&](const float* values, std::int64_t elems) {
    const DeadZoneSums sums = sum_dead_zone(shift, step, values, elems);
    all.zeros += sums.zeros, all.offsets += sums.offsets, all.squares += sums.squares, all.others += sums.others;
  });
  return all;
}

// At the best `outwards`.
double dead_zone_error(const Sample& sample, float shift, float step) {
  const DeadZoneSums sums = dead_zone_sums(sample, shift, step);
  const double saved = sums.others > 0 ? sums.offsets * sums.offsets / sums.others : 0;
  const double lost = std::max(0.0, sums.zeros + sums.squares - saved);  // of values of one magnitude nothing
  return static_cast<double>(step) * std::sqrt(lost / sample.energy());
}

// Order-0 bits of all levels together; the farthest count as one.
double dead_zone_bits(const Sample& sample, float shift, float step) {
  constexpr int kFarthest = 1023;
  std::uint32_t counts[2 * kFarthest + 1] = {};
  double total = 0, bits = 0;
  sample.for_each([&](const float* values, std::int64_t elems) {
    for (std::int64_t i = 0; i < elems; ++i) {
      float x;  // values need not be aligned
      std::memcpy(&x, values + i, sizeof(x));
      const float q = std::min(std::fabs(x) / step, static_cast<float>(kFarthest)) - shift;
      const int level = static_cast<int>(q + 0.5f);
      ++counts[kFarthest + (x < 0 ? -level : level)];
    }
    total += static_cast<double>(elems);
  });
  for (const double count : counts) bits += count > 0 ? count * std::log2(total / count) : 0;
  return bits;
}

}  // namespace

float find_step(Rounding rounding, double error, ConstTensorView input) {
  const Sample all = all_of(input);
  if (!all.is_finite()) return std::numeric_limits<float>::quiet_NaN();
  if (all.energy() == 0) return 0;
  float step = first_guess(all, error, input.elems());
  if (rounding == Rounding::kDither) return step;
  const auto error_in = [&](const Sample& sample) {
    return [&sample, rounding](float s) {
      double sum = 0;
      sample.for_each(
          [&](const float* values, std::int64_t elems) { sum += sum_squared_errors(rounding, s, values, elems); });
      return static_cast<double>(s) * std::sqrt(sum / sample.energy());
    };
  };
  if (is_small(input)) return bisect(error_in(all), error, step);
  const Sample some = some_of(input);
  if (some.energy() > 0) step = bisect(error_in(some), error, step);
  return corrected(error_in(all), error, all.largest(), step);
}

StepAndDeadZone find_dead_zone(double error, ConstTensorView input) {
  constexpr float kShifts[] = {0, 0.1f, 0.2f, 0.3f, 0.4f};
  const Sample all = all_of(input);
  if (!all.is_finite()) return {std::numeric_limits<float>::quiet_NaN(), kDeadZone};
  if (all.energy() == 0) return {0, kDeadZone};
  const Sample some = is_small(input) ? all : some_of(input);
  StepAndDeadZone best = {first_guess(all, error, input.elems()), kDeadZone};
  double best_bits = std::numeric_limits<double>::infinity();
  float step = best.step;
  for (const float shift : kShifts) {
    if (some.energy() == 0) break;
    step = bisect([&](float s) { return dead_zone_error(some, shift, s); }, error, step);
    const double bits = dead_zone_bits(some, shift, step);
    if (bits >= best_bits) continue;
    best_bits = bits;
    best = {step, {.shift = shift, .outwards = 0}};
  }
  const float shift = best.dead_zone.shift;
  if (!is_small(input)) {
    best.step = corrected([&](float s) { return dead_zone_error(all, shift, s); }, error, all.largest(), best.step);
  }
  const DeadZoneSums sums = dead_zone_sums(all, shift, best.step);
  best.dead_zone.outwards = sums.others > 0 ? static_cast<float>(sums.offsets / sums.others) : 0.0f;
  return best;
}

}  // namespace cortado

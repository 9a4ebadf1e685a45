// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_search.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "codec/pieces.h"

namespace cortado {

namespace {

// Up to here all values are searched, above a sample of them.
constexpr std::int64_t kSmallElems = 65536;
constexpr float kLeastStep = std::numeric_limits<float>::min(), kMostStep = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Energy and largest magnitude of values.
struct Measured {
  double energy = 0;                // the sum of their squares
  std::uint32_t max_magnitude = 0;  // its bits

  void add(const float* values, std::int64_t elems) {
    BlockStats stats;
    measure_blocks(BlockScale::kL2, values, elems, elems, &stats);
    energy += stats.squares;
    max_magnitude = std::max(max_magnitude, stats.max_magnitude);
  }
  bool is_finite() const { return max_magnitude < kInfinityBits; }
  float largest() const { return std::bit_cast<float>(max_magnitude); }
};

// All values of a tensor. measured() is what has been measured so far.
class Whole {
 public:
  explicit Whole(ConstTensorView input) : input_(input) {}

  std::int64_t elems() const { return input_.elems(); }
  const Measured& measured() const { return measured_; }
  bool is_measured() const { return is_measured_; }

  // body(values, elems), elems a multiple of 16: behind the last value stand zeros.
  template <typename Body>
  void for_each(const Body& body) const {
    alignas(64) float buffer[kMaxPieceElems];
    for (std::int64_t first = 0; first < input_.elems(); first += kMaxPieceElems) {
      const std::int64_t elems = std::min(kMaxPieceElems, input_.elems() - first);
      body(load_piece(input_, first, elems, buffer), whole_rows(elems));
    }
  }
  // The same, and measures on the way.
  template <typename Body>
  void measure(const Body& body) {
    measured_ = {};
    for_each([&](const float* values, std::int64_t elems) {
      measured_.add(values, elems);
      body(values, elems);
    });
    is_measured_ = true;
  }
  void measure() {
    measure([](const float*, std::int64_t) {});
  }

 private:
  ConstTensorView input_;
  Measured measured_;
  bool is_measured_ = false;
};

// Some values of a large tensor: 64 in a row from each of 256 stretches, at offsets that differ, so that no column is
// always met.
class Sample {
 public:
  explicit Sample(ConstTensorView input) {
    const std::int64_t stretch = input.elems() / kPieces;
    std::uint32_t random = 0;
    for (std::int64_t p = 0; p < kPieces; ++p) {
      random += 0x9e3779b9u;  // of 2^32 what the golden section is of 1
      const std::int64_t offset = (stretch - kPieceElems) * static_cast<std::int64_t>(random >> 16) >> 16;
      float* to = values_ + p * kPieceElems;
      const float* piece = load_piece(input, p * stretch + offset, kPieceElems, to);
      if (piece != to) std::memcpy(to, piece, kPieceElems * sizeof(float));
    }
    for_each([&](const float* values, std::int64_t elems) { measured_.add(values, elems); });
  }

  static constexpr std::int64_t elems() { return kPieces * kPieceElems; }
  const Measured& measured() const { return measured_; }

  template <typename Body>
  void for_each(const Body& body) const {
    for (std::int64_t first = 0; first < elems(); first += kMaxPieceElems) body(values_ + first, kMaxPieceElems);
  }

 private:
  static constexpr std::int64_t kPieces = 256, kPieceElems = 64;
  static_assert(kPieces * kPieceElems < kSmallElems && kPieces * kPieceElems % kMaxPieceElems == 0);

  alignas(64) float values_[kPieces * kPieceElems];
  Measured measured_;
};

// ---- what is lost at a step, in squares of it ----------------------------------------------------------------------

struct RoundingLoss {
  Rounding rounding;
  double sum = 0;

  void add(float step, const float* values, std::int64_t elems) {
    sum += sum_squared_errors(rounding, step, values, elems);
  }
  double squares() const { return sum; }
};

// At the best `outwards`.
struct DeadZoneLoss {
  float shift;
  DeadZoneSums sums = {};

  void add(float step, const float* values, std::int64_t elems) {
    const DeadZoneSums more = sum_dead_zone(shift, step, values, elems);
    sums.zeros += more.zeros, sums.offsets += more.offsets, sums.squares += more.squares, sums.others += more.others;
  }
  double squares() const {
    const double saved = sums.others > 0 ? sums.offsets * sums.offsets / sums.others : 0;
    return std::max(0.0, sums.zeros + sums.squares - saved);  // of values of one magnitude nothing
  }
  float outwards() const { return sums.others > 0 ? static_cast<float>(sums.offsets / sums.others) : 0.0f; }
};

template <typename Loss>
double relative_error(const Loss& loss, float step, const Measured& measured) {
  return static_cast<double>(step) * std::sqrt(loss.squares() / measured.energy);
}

// `loss`, and what `values` lose at `step`.
template <typename Values, typename Loss>
Loss loss_at(const Values& values, Loss loss, float step) {
  values.for_each([&](const float* piece, std::int64_t elems) { loss.add(step, piece, elems); });
  return loss;
}

// Of a step the relative L2 error of `values`, whose loss is counted from `none` on.
template <typename Values, typename Loss>
auto error_of(const Values& values, const Loss& none) {
  return [&values, none](float step) { return relative_error(loss_at(values, none, step), step, values.measured()); };
}

// Order-0 bits of all levels together; the farthest count as one.
template <typename Values>
double dead_zone_bits(const Values& all, float shift, float step) {
  constexpr int kFarthest = 1023;
  std::uint32_t counts[2 * kFarthest + 1] = {};
  double total = 0, bits = 0;
  all.for_each([&](const float* values, std::int64_t elems) {
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

// ---- searches ------------------------------------------------------------------------------------------------------

// Exact for dither, nearly so for small errors of the others.
float first_guess(const Measured& measured, double error, std::int64_t elems) {
  const double guess = error * std::sqrt(measured.energy / static_cast<double>(elems)) * std::sqrt(12.0);
  return static_cast<float>(std::min<double>(guess, kMostStep));
}

float in_proportion(float step, double error, double found) {
  return step * static_cast<float>(std::clamp(error / found, 0.125, 8.0));
}

// The largest step found that keeps the error, from a guess on: bracketed by powers of two, then halved. From
// kLeastStep to kMostStep, even if the guess is not. `error_at(step)` is the relative L2 error.
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
    while (kept > kLeastStep && !keeps(kept));
    if (kept <= kLeastStep) return kLeastStep;
    lost = kept * 2;
  }
  constexpr int kHalvings = 12;
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = kept + (lost - kept) / 2;
    (keeps(middle) ? kept : lost) = middle;
  }
  return kept;
}

// A step whose error is nearly `error`, from a guess on, by secants: some five looks where errors are smooth in the
// step. Where they are not, what bisect() finds.
template <typename ErrorAt>
float solve(const ErrorAt& error_at, double error, float guess) {
  constexpr int kMostSecants = 8;
  constexpr double kClose = 0.0005;
  float step = std::clamp(guess, kLeastStep, kMostStep), last = step;
  double found = error_at(step), last_found = found;
  for (int i = 0; std::abs(found / error - 1) >= kClose; ++i) {
    if (i == kMostSecants) return bisect(error_at, error, guess);
    const double slope = (found - last_found) / (static_cast<double>(step) - last);  // NaN at first
    const double next = std::min<double>(step + (error - found) / slope, kMostStep);
    const bool is_near = next > step / 8.0 && next < step * 8.0;
    last = std::exchange(step, is_near ? static_cast<float>(next) : in_proportion(step, error, found));
    step = std::clamp(step, kLeastStep, kMostStep);
    last_found = std::exchange(found, error_at(step));
  }
  return step;
}

// Where to search a large tensor from; 0 or NaN where find_step() gives these.
float start_of(const Sample& some, double error, Whole* all) {
  const bool some_tell = some.measured().energy > 0;
  if (!some_tell) all->measure();
  const Measured& measured = some_tell ? some.measured() : all->measured();
  if (!measured.is_finite()) return kNan;
  if (measured.energy == 0) return 0;
  return std::max(kLeastStep, first_guess(measured, error, some_tell ? Sample::elems() : all->elems()));
}

// The step of a large tensor, from the one on at which `some` of its values have the error; NaN if one is not finite.
// `loss`: that of all values at the step.
template <typename Loss>
float correct(double error, Whole* all, const Sample& some, float step, Loss* loss) {
  constexpr int kLooks = 5;
  constexpr double kClose = 0.002;
  const Loss none = *loss;
  const auto error_of_some = error_of(some, none);
  for (int i = 0; i < kLooks; ++i) {
    *loss = none;
    const auto add = [&](const float* values, std::int64_t elems) { loss->add(step, values, elems); };
    all->is_measured() ? all->for_each(add) : all->measure(add);
    if (!all->measured().is_finite()) return kNan;
    const double found = relative_error(*loss, step, all->measured());
    if (std::abs(found / error - 1) < kClose) return step;
    // As if errors of all were in proportion to those of some.
    const double found_in_some = some.measured().energy > 0 ? error_of_some(step) : 0;
    const double wanted_of_some = error * found_in_some / found;
    step = in_proportion(step, error, found);
    if (wanted_of_some > 0 && wanted_of_some < 1) step = solve(error_of_some, wanted_of_some, step);
    // Of a step above twice the largest value nothing but zeros is left.
    step = std::clamp(step, kLeastStep, std::clamp(2 * all->measured().largest(), kLeastStep, kMostStep));
  }
  // Errors are in no proportion to steps, as of values of one magnitude.
  step = bisect(error_of(*all, none), error, first_guess(all->measured(), error, all->elems()));
  *loss = loss_at(*all, none, step);
  return step;
}

// Of a few shifts the one with the fewest bits at the error, by `search` from a guess on.
template <typename Values, typename Search>
StepAndDeadZone best_dead_zone(const Values& values, double error, float guess, const Search& search) {
  constexpr float kShifts[] = {0, 0.1f, 0.2f, 0.3f, 0.4f};
  StepAndDeadZone best = {guess, kDeadZone};
  double best_bits = std::numeric_limits<double>::infinity();
  float step = guess;
  for (const float shift : kShifts) {
    step = search(error_of(values, DeadZoneLoss{.shift = shift}), error, step);
    const double bits = dead_zone_bits(values, shift, step);
    if (bits >= best_bits) continue;
    best_bits = bits;
    best = {step, {.shift = shift, .outwards = 0}};
  }
  return best;
}

}  // namespace

float find_step(Rounding rounding, double error, ConstTensorView input) {
  Whole all(input);
  RoundingLoss loss{.rounding = rounding};
  if (input.elems() <= kSmallElems || rounding == Rounding::kDither) {
    all.measure();
    if (!all.measured().is_finite()) return kNan;
    if (all.measured().energy == 0) return 0;
    const float guess = first_guess(all.measured(), error, all.elems());
    return rounding == Rounding::kDither ? guess : bisect(error_of(all, loss), error, guess);
  }
  const Sample some(input);
  float step = start_of(some, error, &all);
  if (!(step > 0)) return step;
  if (some.measured().energy > 0) step = solve(error_of(some, loss), error, step);
  return correct(error, &all, some, step, &loss);
}

StepAndDeadZone find_dead_zone(double error, ConstTensorView input) {
  Whole all(input);
  StepAndDeadZone best = {0, kDeadZone};
  DeadZoneLoss loss{.shift = 0};
  if (input.elems() <= kSmallElems) {
    all.measure();
    if (!all.measured().is_finite()) return {kNan, kDeadZone};
    if (all.measured().energy == 0) return {0, kDeadZone};
    best = best_dead_zone(all, error, first_guess(all.measured(), error, all.elems()),
                          [](const auto&... of) { return bisect(of...); });
    loss = loss_at(all, DeadZoneLoss{.shift = best.dead_zone.shift}, best.step);
  } else {
    const Sample some(input);
    best.step = start_of(some, error, &all);
    if (!(best.step > 0)) return best;
    if (some.measured().energy > 0) {
      best = best_dead_zone(some, error, best.step, [](const auto&... of) { return solve(of...); });
    }
    loss.shift = best.dead_zone.shift;
    best.step = correct(error, &all, some, best.step, &loss);
    if (std::isnan(best.step)) return {kNan, kDeadZone};
  }
  best.dead_zone.outwards = loss.outwards();
  return best;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How many bits does a given error cost, beside the best uniform dead-zone quantiser with an ideal coder?
//
//   rate_bench              2^20 values of N(0, 1), and their cubes
//   rate_bench gradients    what capture.py wrote there: tensors of at least 64 Ki values, their bits added up
//
// The reference, for each tensor and error: level sign(x) floor(|x| / d + 1/2 - a), decoded as (|level| + c) d, with
// the c that is best, the d that meets the error, and the a from 0 to 0.45 with the least order-0 entropy of the levels
// of the whole tensor; no header, no table. Ours are whole payloads. Percentages are bits above the reference's; behind
// each stands the error that was reached.
#include <cstdlib>
#include <map>
#include <memory>

#include "benchmarks/codec/bench_program.h"
#include "core/philox.h"
#include "cortado/codec.h"

namespace cortado {
namespace {

constexpr double kErrors[] = {0.5, 0.2, 0.1, 0.05};
constexpr std::size_t kLeastElems = 65536;
// %s: the error.
constexpr const char* kSpecs[] = {
    "quant(error=%s, round=nearest) | rans(chunk_codes=262144)",
    "quant(error=%s, round=dead_zone) | rans(chunk_codes=262144)",
    "compso(error=%s, round=nearest, chunk_codes=262144)",
    "compso(error=%s, round=dead_zone, chunk_codes=262144)",
    "compso(error=%s, round=dead_zone, block=4096, chunk_codes=262144)",
    "compso(error=%s, round=dither, chunk_codes=262144)",
    "compso(error=%s, round=stochastic, chunk_codes=262144)",
};

// ---- the reference -------------------------------------------------------------------------------------------------

struct Quantiser {
  double step, dead_zone;

  std::int64_t level(float x) const {
    return static_cast<std::int64_t>(std::floor(std::fabs(static_cast<double>(x)) / step + 0.5 - dead_zone));
  }

  // Relative L2, at the best c.
  double error(const std::vector<float>& values) const {
    const auto inverse = static_cast<float>(1 / step), shift = static_cast<float>(0.5 - dead_zone);
    double lost = 0, sum = 0, squares = 0, count = 0, energy = 0;
    constexpr std::size_t kPart = 4096;
    for (std::size_t begin = 0; begin < values.size(); begin += kPart) {
      float part_lost = 0, part_sum = 0, part_squares = 0, part_count = 0, part_energy = 0;
      const std::size_t end = std::min(begin + kPart, values.size());
      for (std::size_t i = begin; i < end; ++i) {
        const float q = std::fabs(values[i]) * inverse, whole = std::floor(q + shift);
        const float offset = whole > 0 ? q - whole : 0;
        part_energy += q * q;
        part_lost += whole > 0 ? 0 : q * q;
        part_count += whole > 0 ? 1.0f : 0.0f;
        part_sum += offset;
        part_squares += offset * offset;
      }
      lost += part_lost, sum += part_sum, squares += part_squares, count += part_count, energy += part_energy;
    }
    if (count > 0) lost += squares - sum * sum / count;
    return energy > 0 ? std::sqrt(lost / energy) : 0;
  }

  double entropy_bits(const std::vector<float>& values) const {
    std::map<std::int64_t, double> far;
    std::vector<double> near(4096);
    for (const float x : values) {
      const std::int64_t signed_level = x < 0 ? -level(x) : level(x);
      const std::int64_t at = signed_level + static_cast<std::int64_t>(near.size() / 2);
      ++(at >= 0 && at < static_cast<std::int64_t>(near.size()) ? near[static_cast<std::size_t>(at)] : far[at]);
    }
    for (const auto& [level, count] : far) near.push_back(count);
    double bits = 0;
    for (const double count : near)
      bits += count > 0 ? count * std::log2(static_cast<double>(values.size()) / count) : 0;
    return bits;
  }
};

// The step at which the error is met, to 1e-4 of it.
Quantiser with_error(const std::vector<float>& values, double dead_zone, double error, double guess) {
  Quantiser quantiser{guess, dead_zone};
  double low = 0, high = 0;  // steps with too small and too large an error
  for (int i = 0; i < 40; ++i) {
    const double found = quantiser.error(values);
    if (std::fabs(found / error - 1) < 1e-4) break;
    (found < error ? low : high) = quantiser.step;
    const double scaled = quantiser.step * error / found;
    const bool is_inside = scaled > low && (high == 0 || scaled < high);
    quantiser.step = i < 6 && is_inside ? scaled : high == 0 ? 2 * low : (low + high) / 2;
  }
  return quantiser;
}

double best_bits(const std::vector<float>& values, double error) {
  double energy = 0;
  for (const float x : values) energy += static_cast<double>(x) * x;
  double step = error * std::sqrt(12 * energy / static_cast<double>(values.size()));
  double best = HUGE_VAL;
  for (int twentieths = 0; twentieths < 10; ++twentieths) {
    const Quantiser quantiser = with_error(values, twentieths / 20.0, error, step);
    step = quantiser.step;
    const double bits = quantiser.entropy_bits(values);
    if (bits > 1.01 * best) break;
    best = std::min(best, bits);
  }
  return best;
}

// ---- ours ----------------------------------------------------------------------------------------------------------

struct Outcome {
  double bits = 0, lost = 0, energy = 0;

  void add(const std::string& spec, const std::vector<float>& values) {
    const auto elems = static_cast<std::int64_t>(values.size());
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    std::vector<std::byte> payload(codec->max_payload_bytes(1, elems, DType::kFloat32));
    std::vector<std::byte> scratch(codec->scratch_bytes(1, elems, DType::kFloat32));
    std::vector<float> decoded(values.size());
    const std::uint64_t bytes =
        codec->encode({values.data(), DType::kFloat32, 1, elems}, {.seed = 1}, payload, scratch).value();
    const Status status =
        codec->decode(std::span(payload).first(bytes), {decoded.data(), DType::kFloat32, 1, elems}, scratch);
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", spec.c_str(), status.to_string().c_str());
      std::exit(1);
    }
    bits += 8 * static_cast<double>(bytes);
    for (std::size_t i = 0; i < values.size(); ++i) {
      lost += std::pow(static_cast<double>(values[i]) - decoded[i], 2);
      energy += std::pow(static_cast<double>(values[i]), 2);
    }
  }
  void add(const Outcome& other) { bits += other.bits, lost += other.lost, energy += other.energy; }
  double error() const { return std::sqrt(lost / energy); }
};

std::string with_error(const char* spec, double error) {
  char number[16], text[128];
  std::snprintf(number, sizeof(number), "%g", error);
  std::snprintf(text, sizeof(text), spec, number);
  return text;
}

// Of some tensors.
struct Sums {
  double elems = 0;
  double reference_bits[std::size(kErrors)] = {};
  Outcome outcomes[std::size(kSpecs)][std::size(kErrors)];

  void add(const Sums& other) {
    elems += other.elems;
    for (std::size_t e = 0; e < std::size(kErrors); ++e) {
      reference_bits[e] += other.reference_bits[e];
      for (std::size_t s = 0; s < std::size(kSpecs); ++s) outcomes[s][e].add(other.outcomes[s][e]);
    }
  }

  void print() const {
    std::printf("%-66s", "");
    for (const double error : kErrors) std::printf("   error %-6g", error);
    std::printf("\n%-66s", "the best dead-zone quantiser, ideally coded: bits a value");
    for (const double bits : reference_bits) std::printf("   %-12.4f", bits / elems);
    for (std::size_t s = 0; s < std::size(kSpecs); ++s) {
      char text[128];
      std::snprintf(text, sizeof(text), kSpecs[s], "...");
      std::printf("\n%-66s", text);
      for (std::size_t e = 0; e < std::size(kErrors); ++e) {
        std::printf("  %+5.1f%% %.4f", 100 * (outcomes[s][e].bits / reference_bits[e] - 1), outcomes[s][e].error());
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
};

Sums measure(const std::string& name, const std::vector<const std::vector<float>*>& tensors) {
  Sums sums;
  for (const auto* values : tensors) {
    sums.elems += static_cast<double>(values->size());
    for (std::size_t e = 0; e < std::size(kErrors); ++e) {
      sums.reference_bits[e] += best_bits(*values, kErrors[e]);
      for (std::size_t s = 0; s < std::size(kSpecs); ++s) {
        sums.outcomes[s][e].add(with_error(kSpecs[s], kErrors[e]), *values);
      }
    }
  }
  std::printf("\n%s: %zu tensors, %.0f values\n", name.c_str(), tensors.size(), sums.elems);
  sums.print();
  return sums;
}

int run(const BenchOptions& options) {
  print_conditions(options);
  std::map<std::string, std::vector<const std::vector<float>*>> groups;
  std::vector<CapturedGradient> gradients;
  if (options.arguments.empty()) {
    std::vector<float> normal(std::size_t{1} << 20);
    philox_fill_normal(1, 0, 0, normal.data(), static_cast<std::int64_t>(normal.size()));
    std::vector<float> cubes = normal;
    for (float& x : cubes) x *= x * x;
    gradients = {{"N(0, 1)", "", std::move(normal)}, {"cubes of N(0, 1)", "", std::move(cubes)}};
  } else {
    gradients = read_gradients(options.arguments[0]);
  }
  for (const CapturedGradient& gradient : gradients) {
    if (gradient.values.size() >= kLeastElems) groups[gradient.moment].push_back(&gradient.values);
  }
  Sums all;
  for (const auto& [name, tensors] : groups) {
    if (options.wants(name)) all.add(measure(name, tensors));
  }
  std::printf("\nall together\n");
  all.print();
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 1)); }

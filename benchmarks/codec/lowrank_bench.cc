// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How close to a memory copy are the fused P-step and Q-step?
//
// A pass reads gradient and residual and writes the residual: 12 bytes an element. The copy beside it moves as many,
// between the same two pools of memory, walked in the same order: out of cache, over all matrices of a pool many times
// the size of the last-level cache; resident, over one matrix again and again. Both are timed in turn, round after
// round, in one thread, in processor time (other processes then matter less); the medians are printed. A third of a
// pass's bytes are writes, half of the copy's, so shares above 100 % are possible. Reconstruction writes 4 bytes an
// element, past the caches as engines have it. The pair that a pass subtracts has
// the rank that it projects on, as in training.
#include <cstring>
#include <functional>

#include "benchmarks/codec/bench_program.h"
#include "codec/lowrank/lowrank_kernels.h"
#include "codec/lowrank/lowrank_reference.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/aligned_buffer.h"

namespace cortado {
namespace {

constexpr std::int64_t kPoolElems = std::int64_t{128} << 20;  // 512 MiB
constexpr std::int64_t kBytesAnElem = 12;
constexpr double kBound = 1e-5;
constexpr int kRanks[] = {1, 2, 4, 8, 16, 32};

struct Workload {
  const char* place;
  std::int64_t rows, cols;
  bool out_of_cache;
  int matrices_a_sample;  // so that a sample takes milliseconds
};
constexpr Workload kWorkloads[] = {{"out of cache", 4096, 4096, true, 1},
                                   {"out of cache", 1536, 384, true, 32},
                                   {"cache-resident", 1536, 384, false, 32}};

// One matrix of a pool after the other.
class Cursor {
 public:
  Cursor(std::int64_t elems, bool moves) : elems_(elems), moves_(moves) {}
  std::int64_t next() {
    const std::int64_t at = at_;
    if (moves_) at_ = at_ + 2 * elems_ <= kPoolElems ? at_ + elems_ : 0;
    return at;
  }

 private:
  std::int64_t elems_;
  bool moves_;
  std::int64_t at_ = 0;
};

class Experiment {
 public:
  Experiment(const Workload& workload, int rank, float* gradients, float* residuals)
      : w_(workload),
        rank_(rank),
        gradients_(gradients),
        residuals_(residuals),
        row_(reference::random_floats(w_.rows * rank, 1)),
        col_(reference::random_floats(rank * w_.cols, 2)),
        row_factor_(row_.size()),
        col_factor_(col_.size()) {
    const BasisKey key{.seed = 1};
    std::vector<float> scratch(row_.size());
    orthogonalise_rows(row_.data(), w_.rows, rank, key, scratch.data());
    orthogonalise(col_.data(), w_.cols, rank, key);
  }

  void project_rows_at(std::int64_t at) { project_rows(pass(at), col_.data(), rank_, row_factor_.data()); }
  void project_cols_at(std::int64_t at) { project_cols(pass(at), row_.data(), rank_, col_factor_.data()); }
  void reconstruct_at(std::int64_t at) {
    reconstruct(pair(), w_.rows, w_.cols, 0.25f, residuals_ + at, DType::kFloat32, /*streams=*/true);
  }
  void orthogonalise_factor() {
    col_factor_ = col_;
    orthogonalise(col_factor_.data(), w_.cols, rank_, {.seed = 1});
  }

  // Both passes against float64; the larger relative error.
  double check() {
    const std::int64_t elems = w_.rows * w_.cols;
    reference::Doubles a = reference::product(row_, col_, w_.rows, rank_, w_.cols);
    for (std::int64_t i = 0; i < elems; ++i) a[i] = 0.5 * gradients_[i] + residuals_[i] - a[i];
    const std::vector<float> before(residuals_, residuals_ + elems);
    project_rows_at(0);
    std::copy(before.begin(), before.end(), residuals_);
    project_cols_at(0);
    const auto col_t = reference::transposed(col_, rank_, w_.cols);
    const auto row_t = reference::transposed(row_, w_.rows, rank_);
    return std::max(reference::relative_error(row_factor_, reference::product(a, col_t, w_.rows, w_.cols, rank_)),
                    reference::relative_error(col_factor_, reference::product(row_t, a, rank_, w_.rows, w_.cols)));
  }

 private:
  FactorPair pair() const { return {row_.data(), col_.data(), rank_}; }
  ResidualPass pass(std::int64_t at) const {
    return {.rows = w_.rows,
            .cols = w_.cols,
            .gradient = gradients_ + at,
            .gradient_scale = 0.5f,
            .residual_in = residuals_ + at,
            .residual_out = residuals_ + at,
            .sent = pair()};
  }

  Workload w_;
  int rank_;
  float* gradients_;
  float* residuals_;
  std::vector<float> row_, col_, row_factor_, col_factor_;
};

// One thing to time, and its samples.
struct Contender {
  const char* name;
  double bytes;  // moved by one call
  Cursor cursor;
  std::function<void(std::int64_t)> call;
  int calls = 1;  // a sample
  Samples samples = {};

  void sample() {
    samples.add([&] {
      for (int i = 0; i < calls; ++i) call(cursor.next());
    });
  }
  double median_ms() const { return samples.median_ms() / calls; }
  double gb_per_s() const { return bytes / median_ms() / 1e6; }
};

void measure(const Workload& w, int rank, int rounds, float* gradients, float* residuals) {
  Experiment experiment(w, rank, gradients, residuals);
  const std::int64_t elems = w.rows * w.cols;
  const std::int64_t copied_elems = elems * kBytesAnElem / 2 / static_cast<std::int64_t>(sizeof(float));
  const double pass_bytes = static_cast<double>(elems * kBytesAnElem);
  const Cursor cursor(elems, w.out_of_cache);
  Contender contenders[] = {
      {"memcpy", pass_bytes, Cursor(copied_elems, w.out_of_cache),
       [&](std::int64_t at) {
         std::memcpy(residuals + at, gradients + at, static_cast<std::size_t>(copied_elems) * sizeof(float));
       }},
      {"P-step", pass_bytes, cursor, [&](std::int64_t at) { experiment.project_rows_at(at); }},
      {"Q-step", pass_bytes, cursor, [&](std::int64_t at) { experiment.project_cols_at(at); }},
      {"reconstruct", static_cast<double>(elems) * sizeof(float), cursor,
       [&](std::int64_t at) { experiment.reconstruct_at(at); }},
      {"orthogonalise", 0, cursor, [&](std::int64_t) { experiment.orthogonalise_factor(); }},
  };
  for (Contender& contender : contenders) contender.calls = w.matrices_a_sample;
  for (int round = 0; round < rounds; ++round) {
    for (Contender& contender : contenders) contender.sample();
  }
  const double copy = contenders[0].gb_per_s();
  std::printf("%-14s  %4d x %-4d  %4d  %7.2f", w.place, static_cast<int>(w.rows), static_cast<int>(w.cols), rank, copy);
  for (Contender& contender : contenders) {
    if (contender.name == contenders[0].name) continue;
    std::printf("  %8.3f", contender.median_ms());
    if (contender.bytes > 0) std::printf(" %6.2f %3.0f%%", contender.gb_per_s(), 100 * contender.gb_per_s() / copy);
  }
  std::printf("\n");
  std::fflush(stdout);
}

std::string row_name(const Workload& w, int rank) {
  return "lowrank " + std::string(w.place) + " " + std::to_string(w.rows) + "x" + std::to_string(w.cols) + " rank " +
         std::to_string(rank);
}

int run(const BenchOptions& options) {
  AlignedBuffer<float> gradients(kPoolElems);
  AlignedBuffer<float> residuals(kPoolElems);
  const std::vector<float> values = reference::random_floats(1 << 20, 3);
  for (std::int64_t at = 0; at < kPoolElems; at += static_cast<std::int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), gradients.data() + at);
    std::copy(values.rbegin(), values.rend(), residuals.data() + at);
  }
  print_conditions(options);
  std::printf("two pools of %d MiB; GB/s moved and share of memcpy's\n", static_cast<int>(kPoolElems >> 18));
  std::printf("%-14s  %11s  %4s  %7s  %20s  %20s  %20s  %8s\n", "", "shape", "rank", "memcpy", "P-step ms  GB/s    %",
              "Q-step ms  GB/s    %", "reconstr ms GB/s   %", "orth ms");
  for (const Workload& w : kWorkloads) {
    for (const int rank : kRanks) {
      if (!options.wants(row_name(w, rank))) continue;
      const double error = Experiment(w, rank, gradients.data(), residuals.data()).check();
      if (!(error <= kBound)) {
        std::fprintf(stderr, "%s: relative error %.2g against float64, bound %.0g\n", row_name(w, rank).c_str(), error,
                     kBound);
        return 1;
      }
      measure(w, rank, options.rounds, gradients.data(), residuals.data());
    }
  }
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 11)); }

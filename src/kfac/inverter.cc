// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/inverter.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/thread_pool.h"
#include "kfac/inverse.h"

namespace cortado {

namespace {

class CpuInverter final : public KfacInverter {
 public:
  explicit CpuInverter(int threads) : pool_(threads), scratch_(static_cast<std::size_t>(pool_.threads())) {}

  Status reserve(std::span<const InverseJob> /*jobs*/) override { return {}; }

  // Matrices of one size next to each other, the largest first, so that threads end together and reuse their scratch.
  Status invert(std::span<InverseJob> jobs, std::chrono::nanoseconds /*timeout*/) override {
    order_.resize(jobs.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t x, std::size_t y) { return jobs[x].n > jobs[y].n; });
    std::atomic<std::size_t> next{0};
    pool_.parallel_for(pool_.threads(), [&](std::int64_t thread) {
      InverseScratch* scratch = &scratch_[static_cast<std::size_t>(thread)];
      // Relaxed, or the counter would order the threads' work as ThreadSanitizer sees it, and hide what they share.
      const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
      for (std::size_t i = take(); i < jobs.size(); i = take()) invert_one(&jobs[order_[i]], scratch);
    });
    return {};
  }

  std::int64_t scratch_bytes() const override {
    std::int64_t bytes = 0;
    for (const InverseScratch& scratch : scratch_) bytes += scratch.bytes();
    return bytes;
  }

 private:
  static void invert_one(InverseJob* job, InverseScratch* scratch) {
    const Status status =
        job->values != nullptr
            ? compute_eigenvectors(job->n, job->triangle, job->inverse, job->values, &job->is_indefinite, scratch)
            : compute_damped_inverse(job->n, job->triangle, job->damping, job->inverse, &job->raised, scratch);
    job->failed = !status.ok();
  }

  ThreadPool pool_;
  std::vector<InverseScratch> scratch_;  // of each thread
  std::vector<std::size_t> order_;
};

}  // namespace

std::unique_ptr<KfacInverter> make_cpu_inverter(int threads) { return std::make_unique<CpuInverter>(threads); }

}  // namespace cortado

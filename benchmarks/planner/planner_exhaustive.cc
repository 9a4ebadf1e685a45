// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How far are plans from the best of all plans? Random jobs and clusters that are small enough to try every fusion with
// every option of the whole tree.
//
//   planner_exhaustive [CASES]    so many of each kind; 1000 if not given
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cortado/trace.h"
#include "planner/search/brute_force_testing.h"
#include "planner/search/search.h"

namespace cortado {
namespace {

struct Kind {
  const char* text;
  int tensors, levels;
  std::vector<OpDevice> devices;
  bool is_slow;  // a tenth of the cases
};

int run(int cases) {
  const std::vector<OpDevice> gpu = {OpDevice::kGpu}, cpu = {OpDevice::kCpu}, both = {OpDevice::kCpu, OpDevice::kGpu};
  const Kind kinds[] = {{"1 level, GPU", 4, 1, gpu, false},         {"1 level, CPU", 4, 1, cpu, false},
                        {"1 level, CPU and GPU", 3, 1, both, true}, {"2 levels, GPU", 2, 2, gpu, false},
                        {"2 levels, CPU", 2, 2, cpu, false},        {"2 levels, CPU and GPU", 1, 2, both, false},
                        {"1 level, GPU", 5, 1, gpu, true}};
  std::printf(
      "# Plans against the best of all plans\n\n`build/release/benchmarks/planner_exhaustive %d > "
      "docs/results/planner_exhaustive.md` "
      "(benchmarks/planner/planner_exhaustive.cc). Random jobs and clusters, small enough to simulate every fusion "
      "with every option of the "
      "whole tree. *Gap*: of the plan over the best. *Bound above the best*: lower bounds that would be wrong. *All "
      "tried*: the "
      "search itself tried everything within its budget; the others mostly ended at the lower bound.\n\n",
      cases);
  std::printf(
      "| tree | tensors | cases | median gap | 99th percentile | worst | above 1 %% | bound above the best | all tried "
      "| longest search |\n|---|---|---|---|---|---|---|---|---|---|\n");
  int failures = 0;
  for (const Kind& kind : kinds) {
    std::vector<double> gaps;
    int far = 0, wrong = 0, exact = 0;
    std::int64_t longest_ns = 0;
    for (int seed = 0; seed < (kind.is_slow ? cases / 10 + 1 : cases); ++seed) {
      const testing::RandomCase example =
          testing::random_case(static_cast<std::uint64_t>(seed), kind.tensors, kind.levels, kind.devices);
      const std::unique_ptr<Problem> problem = Problem::make(example.job, example.cluster, {}).value();
      const std::int64_t start_ns = steady_clock()->now_ns();
      const SearchResult found = search(*problem);
      longest_ns = std::max(longest_ns, steady_clock()->now_ns() - start_ns);
      const std::int64_t best_ns = testing::brute_force_ns(*problem);
      gaps.push_back(100.0 * static_cast<double>(found.score.step_ns - best_ns) / static_cast<double>(best_ns));
      far += gaps.back() > 1;
      if (gaps.back() > 1)
        std::fprintf(stderr, "%s, seed %d: %.2f %%, %s\n", kind.text, seed, gaps.back(),
                     found.is_exact ? "exact" : "not exact");
      exact += found.is_exact;
      wrong += found.bound.step_ns > best_ns || found.score.step_ns < best_ns;
    }
    std::sort(gaps.begin(), gaps.end());
    std::printf("| %s | %d | %zu | %.3f %% | %.3f %% | %.3f %% | %d | %d | %d | %.1f ms |\n", kind.text, kind.tensors,
                gaps.size(), gaps[gaps.size() / 2], gaps[gaps.size() * 99 / 100], gaps.back(), far, wrong, exact,
                static_cast<double>(longest_ns) * 1e-6);
    std::fflush(stdout);
    failures += far + wrong;
  }
  return failures > 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  int cases = 1000;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--benchmark_min_time", 20) == 0) cases = 10;
    if (argv[i][0] != '-') cases = std::atoi(argv[i]);
  }
  return cortado::run(cases);
}

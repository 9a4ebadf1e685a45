// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does the planner find on Espresso's six jobs and two testbeds, how far is that from the lower bound and from
// what other strategies find, and how long does it take?
//
//   planner_bench > docs/results/planner.md     all of it
//   planner_bench lstm                          one job
//   planner_bench --search-times 100            what so many times the search steps would gain
//
// Every plan is first checked: the simulator gives the time that was promised. Planning times are of make_plan() as a
// whole, wall time on one core: no file is read meanwhile, nothing is scaled. Exits with 1 if a strategy is better than
// the search.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cortado/planner.h"
#include "cortado/trace.h"
#include "planner/free_compression.h"
#include "planner/search/brute_force_testing.h"
#include "planner/search/search.h"

namespace cortado {
namespace {

constexpr const char* kData = "tests/data/planner/";
constexpr const char* kAllCodecs = "";
constexpr int kRounds = 7;

constexpr const char* kAbout =
    "# The planner against its bound and other strategies\n"
    "\n"
    "`build/release/benchmarks/planner_bench > docs/results/planner.md` (benchmarks/planner/planner_bench.cc). "
    "Simulated step times in ms of Espresso's six jobs on its two\n"
    "testbeds (tests/data/planner: published traces and link speeds, codec times of the released simulator; "
    "[planner.md](../planner.md) says what is modelled), each of\n"
    "its compressors and the cast alone, and all codecs of the file together. The files have no errors of these "
    "gradients: of one "
    "encode of normally distributed values the relative\n"
    "L2 error is 0.995 for `randk(density=0.01)`, 0.957 for `topk(density=0.01)`, 0.603 for `sign(scale=mean_abs)` "
    "(error feedback sends the rest later), 3e-4 for `cast(fp16)`.\n"
    "\n"
    "- *strategies*: `cortado plan --strategy`, each with the best fusion by size, `dense` searched for. "
    "`hitopk_like`, "
    "`byteps_compress_like` and `hipress_like` are this project's reading of\n"
    "  those systems. `bf16` is a cast of all tensors (to fp16, of which the files have times).\n"
    "- *free*: the best plan found, cortado's among them, where codecs and copies cost nothing. *bound*: no plan can "
    "be faster; *gap*: of the plan "
    "over the bound.\n"
    "- *factor*: the best compression-enabled strategy over cortado; Espresso's abstract says up to 1.77 over its "
    "rivals.\n"
    "- *plan ms*: median of seven, and the first of them, in which memory is touched for the first time. Each case is "
    "timed once in every round over all of them, so that a slow\n"
    "  spell of the machine is in one or two of its seven.\n"
    "\n";

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }

struct Case {
  const Job* job;
  const Cluster* cluster;
  const char* codec = kAllCodecs;
  Plan plan = {};
  std::vector<double> times_ms = {};  // of each round

  PlannerConstraints constraints() const {
    PlannerConstraints constraints;
    if (codec != kAllCodecs) constraints.allowed_codecs = {codec};
    return constraints;
  }
  double first_ms() const { return times_ms.front(); }
  double median_ms() const {
    std::vector<double> sorted = times_ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

void plan_all(int rounds, std::vector<Case>* cases) {
  for (int round = 0; round < rounds; ++round) {
    for (Case& each : *cases) {
      const std::int64_t start_ns = steady_clock()->now_ns();
      each.plan = make_plan(*each.job, *each.cluster, each.constraints()).value();
      each.times_ms.push_back(milliseconds(steady_clock()->now_ns() - start_ns));
    }
  }
}

class Report {
 public:
  void add(const Case& planned) {
    const Job& job = *planned.job;
    const Cluster& cluster = *planned.cluster;
    const char* codec = planned.codec;
    const PlannerConstraints constraints = planned.constraints();
    const std::int64_t step_ns = planned.plan.predicted_step_ns;
    if (simulate_plan(planned.plan, job, cluster).value().step_ns != step_ns) {
      std::printf("%s on %s: the simulator does not agree\n", job.name.c_str(), cluster.name.c_str());
      ++failures_;
    }
    std::printf("| %s | %s ", job.name.c_str(), codec == kAllCodecs ? "all" : codec);
    std::int64_t best_encoding_ns = 0;
    for (const std::string& strategy : planner_strategies()) {
      if (strategy == "cortado") continue;
      const Result<Plan> other = make_plan(job, cluster, constraints, strategy);
      if (!other.ok()) {
        std::printf("| - ");
        continue;
      }
      const std::int64_t other_ns = other.value().predicted_step_ns;
      // The cast may use a codec that the search may not.
      const bool is_better = other_ns < step_ns && (strategy != "bf16" || codec == kAllCodecs);
      failures_ += is_better;
      std::printf("| %.2f%s ", milliseconds(other_ns), is_better ? " BETTER" : "");
      if (strategy != "dense" && strategy != "bf16" && (best_encoding_ns == 0 || other_ns < best_encoding_ns))
        best_encoding_ns = other_ns;
    }
    const std::int64_t free_ns = free_compression_ns(planned.plan, job, cluster, constraints).value();
    std::size_t encoded = 0;
    for (const PlanBucket& bucket : planned.plan.buckets)
      encoded += bucket.option.encodes() > 0 ? bucket.tensors.size() : 0;
    const double gap =
        static_cast<double>(step_ns - planned.plan.lower_bound_ns) / static_cast<double>(planned.plan.lower_bound_ns);
    const double factor = static_cast<double>(best_encoding_ns) / static_cast<double>(step_ns);
    std::printf("| **%.2f** | %.2f | %.2f | %.2f %% | %.3f | %.1f | %.1f | %zu of %zu in %zu |\n",
                milliseconds(step_ns), milliseconds(free_ns), milliseconds(planned.plan.lower_bound_ns), gap * 100,
                factor, planned.median_ms(), planned.first_ms(), encoded, job.tensors.size(),
                planned.plan.buckets.size());
    std::fflush(stdout);
    factors_.push_back(factor);
    gaps_.push_back(gap * 100);
    times_ms_.push_back(planned.median_ms());
    considered_ = std::max(considered_, planned.plan.options_considered);
  }

  // Where the gap is above one percent, the plan that a longer search finds.
  static void add_longer_search(const Case& planned, int times) {
    const double step_ns = static_cast<double>(planned.plan.predicted_step_ns);
    const double gap = step_ns / static_cast<double>(planned.plan.lower_bound_ns) - 1;
    if (gap < 0.01) return;
    PlannerConstraints constraints = planned.constraints();
    constraints.search_steps = times * default_search_steps(static_cast<int>(planned.job->tensors.size()));
    const Plan longer = make_plan(*planned.job, *planned.cluster, constraints).value();
    const double gain = 1 - static_cast<double>(longer.predicted_step_ns) / step_ns;
    std::printf("| %s | %s | %s | %.2f | %.2f %% | %.2f | %.2f %% |\n", planned.cluster->name.c_str(),
                planned.job->name.c_str(), planned.codec == kAllCodecs ? "all" : planned.codec,
                milliseconds(planned.plan.predicted_step_ns), gap * 100, milliseconds(longer.predicted_step_ns),
                gain * 100);
    std::fflush(stdout);
  }

  static void print_head(const Cluster& cluster) {
    std::printf("## %s\n\n| job | codecs ", cluster.name.c_str());
    for (const std::string& strategy : planner_strategies()) {
      if (strategy != "cortado") std::printf("| %s ", strategy.c_str());
    }
    std::printf(
        "| **cortado** | free | bound | gap | factor | plan ms | first | encoded tensors, buckets |\n|---|---|");
    for (std::size_t column = 0; column < planner_strategies().size() + 6; ++column) std::printf("---|");
    std::printf("\n");
  }

  // A thousand tensors on three levels: random profiles, as the search's tests have them.
  static void add_large(int seeds) {
    std::vector<testing::RandomCase> examples;
    for (int seed = 0; seed < seeds; ++seed) {
      examples.push_back(
          testing::random_case(static_cast<std::uint64_t>(seed), 1000, 3, {OpDevice::kCpu, OpDevice::kGpu}));
    }
    std::vector<Case> cases;
    for (const testing::RandomCase& example : examples) cases.push_back({&example.job, &example.cluster});
    plan_all(kRounds, &cases);
    std::printf(
        "\n## 1000 tensors on three levels\n\n| random profile | ranks | options | cortado, ms | gap | plan ms | first "
        "|\n|---|---|---|---|---|---|---|\n");
    for (int seed = 0; seed < seeds; ++seed) {
      const Case& planned = cases[static_cast<std::size_t>(seed)];
      const Plan& plan = planned.plan;
      std::printf("| %d | %d | %lld | %.1f | %.2f %% | %.1f | %.1f |\n", seed, plan.topology.world_size(),
                  static_cast<long long>(plan.options_considered), milliseconds(plan.predicted_step_ns),
                  100 * static_cast<double>(plan.predicted_step_ns - plan.lower_bound_ns) /
                      static_cast<double>(plan.lower_bound_ns),
                  planned.median_ms(), planned.first_ms());
      std::fflush(stdout);
    }
  }

  void print_summary() {
    const auto worst = [](const std::vector<double>& values) {
      return *std::max_element(values.begin(), values.end());
    };
    const auto median = [](std::vector<double> values) {
      return std::sort(values.begin(), values.end()), values[values.size() / 2];
    };
    std::printf(
        "\n## In short\n\n%zu cases, up to %lld options of the tree each. Planning takes %.1f ms (median), %.1f at "
        "most. Gap to the bound: %.2f %% (median), %.2f at most; %td "
        "cases above 3 %%. Factor over the best compression-enabled strategy: %.3f (median), up to %.3f. Strategies "
        "that are better than cortado anywhere: %d.\n",
        gaps_.size(), static_cast<long long>(considered_), median(times_ms_), worst(times_ms_), median(gaps_),
        worst(gaps_), std::count_if(gaps_.begin(), gaps_.end(), [](double gap) { return gap > 3; }), median(factors_),
        worst(factors_), failures_);
  }

  int failures() const { return failures_; }

 private:
  int failures_ = 0;
  std::int64_t considered_ = 0;
  std::vector<double> factors_, gaps_, times_ms_;
};

int run(const char* only, bool smoke, int search_times) {
  std::vector<Cluster> clusters;
  for (const char* name : {"nvlink_100g", "pcie_25g"}) {
    clusters.push_back(load_cluster(std::string(kData) + "clusters/" + name + ".json").value());
  }
  std::vector<Job> jobs;
  for (const char* name : {"vgg16", "resnet101", "ugatit", "bert_base", "gpt2", "lstm"}) {
    if (only == nullptr || std::strcmp(only, name) == 0) {
      jobs.push_back(load_job(std::string(kData) + "jobs/" + name + ".json").value());
    }
  }
  if (jobs.empty()) {
    std::fprintf(stderr, "no job of %sjobs is named %s\n", kData, only);
    return 1;
  }
  std::vector<Case> cases;
  for (const Cluster& cluster : clusters) {
    for (const Job& job : jobs) {
      for (const char* codec :
           {"randk(density=0.01)", "topk(density=0.01)", "sign(scale=mean_abs)", "cast(fp16)", kAllCodecs}) {
        cases.push_back({&job, &cluster, codec});
      }
    }
  }
  plan_all(smoke || search_times > 0 ? 1 : kRounds, &cases);
  if (search_times > 0) {
    std::printf(
        "| cluster | job | codecs | step, ms | gap | with %d times the search steps | gain |\n"
        "|---|---|---|---|---|---|---|\n",
        search_times);
    for (const Case& planned : cases) Report::add_longer_search(planned, search_times);
    return 0;
  }
  if (only == nullptr) std::printf("%s", kAbout);
  Report report;
  const Cluster* shown = nullptr;
  for (const Case& planned : cases) {
    if (planned.cluster != shown) {
      if (shown != nullptr) std::printf("\n");
      shown = planned.cluster;
      Report::print_head(*shown);
    }
    report.add(planned);
  }
  std::printf("\n");
  report.print_summary();
  if (only == nullptr) Report::add_large(5);
  return report.failures() > 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  const char* only = nullptr;
  bool smoke = false;
  int search_times = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--search-times") == 0 && i + 1 < argc) {
      search_times = std::max(1, std::atoi(argv[++i]));
    } else if (std::strncmp(argv[i], "--benchmark_min_time", 20) == 0) {
      smoke = true;
      only = "lstm";
    } else if (argv[i][0] != '-') {
      only = argv[i];
    }
  }
  return cortado::run(only, smoke, search_times);
}

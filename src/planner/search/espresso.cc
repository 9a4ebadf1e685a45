// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/espresso.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "planner/search/local_search.h"

namespace cortado {

namespace {

bool encodes(const Problem& problem, const Placed& placed) {
  return problem.candidates()[placed.way->candidate].codec >= 0;
}

std::vector<SimulatedBucket> simulated(const Problem& problem, const std::vector<Placed>& plan) {
  std::vector<SimulatedBucket> buckets;
  for (const Placed& placed : plan) buckets.push_back(simulated_bucket(problem, placed));
  return buckets;
}

// When the compute stream had a bucket ready: there its stretches end.
std::vector<std::int64_t> ready_times(std::span<const SimulatedBucket> buckets,
                                      std::span<const SimulatedEvent> events) {
  std::vector<std::int64_t> ready_ns;
  std::int64_t work_ns = 0, time_ns = 0;
  auto event = events.begin();
  for (const SimulatedBucket& bucket : buckets) {
    if (bucket.ready_ns > work_ns) {
      while (event != events.end() && event->bucket >= 0) ++event;
      if (event != events.end()) time_ns = (event++)->end_ns;
    }
    work_ns = bucket.ready_ns;
    ready_ns.push_back(time_ns);
  }
  return ready_ns;
}

// Buckets whose last use of the outermost link ends before its last gap that only waits for the computation: the bucket
// that ends it uses the link for the first time, and was delayed nowhere on its way there. Other gaps, while a bucket
// is coded between two of its collectives or waits for another link, come earlier or become smaller when less is sent
// before.
std::vector<bool> travels_before_gap(const Problem& problem, Simulator* simulator, const std::vector<Placed>& plan) {
  std::vector<SimulatedEvent> events;
  const std::vector<SimulatedBucket> buckets = simulated(problem, plan);
  simulator->run(buckets, Simulator::kNever, &events);
  std::vector<std::int64_t> undelayed_ns = ready_times(buckets, events);  // when the next step of its chain could start
  std::vector<std::int64_t> last_ns(plan.size(), Simulator::kNever);
  std::vector<bool> was_delayed(plan.size(), false);
  std::sort(events.begin(), events.end(),
            [](const SimulatedEvent& a, const SimulatedEvent& b) { return a.start_ns < b.start_ns; });
  const int outer = kLink + problem.levels() - 1;
  std::int64_t gap_ns = -1, free_ns = Simulator::kNever;  // of the outermost link
  for (const SimulatedEvent& event : events) {
    if (event.bucket < 0) continue;
    was_delayed[event.bucket] = was_delayed[event.bucket] || event.start_ns > undelayed_ns[event.bucket];
    undelayed_ns[event.bucket] = event.end_ns;
    if (event.server != outer) continue;
    const bool is_first = last_ns[event.bucket] == Simulator::kNever;
    if (event.start_ns > free_ns && is_first && !was_delayed[event.bucket]) gap_ns = free_ns;
    free_ns = last_ns[event.bucket] = event.end_ns;
  }
  std::vector<bool> before(plan.size());
  for (std::size_t k = 0; k < plan.size(); ++k) before[k] = last_ns[k] <= gap_ns;
  return before;
}

Option on_cpu(Option option) {
  for (Operation& operation : option.operations) {
    if (!is_collective(operation.kind)) operation.device = OpDevice::kCpu;
  }
  return option;
}

// Buckets that may take each other's place, and their way on the CPU.
struct Group {
  std::vector<std::size_t> buckets;  // by readiness
  std::vector<const Way*> gpu, cpu;
};

std::vector<Group> groups_of(Problem& problem, const std::vector<Placed>& plan) {
  std::map<std::pair<std::int64_t, int>, Group> groups;
  for (std::size_t k = 0; k < plan.size(); ++k) {
    if (!encodes(problem, plan[k])) continue;
    const Candidate candidate = problem.candidates()[plan[k].way->candidate];
    const int other = problem.add_candidate({candidate.codec, on_cpu(candidate.option)});
    const Way* cpu = problem.way_of(plan[k].first, plan[k].last, other);
    if (cpu == nullptr || other == plan[k].way->candidate) continue;
    Group& group = groups[{problem.elems(plan[k].first, plan[k].last), plan[k].way->candidate}];
    group.buckets.push_back(k);
    group.gpu.push_back(plan[k].way);
    group.cpu.push_back(cpu);
  }
  std::vector<Group> list;
  for (auto& [key, group] : groups) list.push_back(std::move(group));
  return list;
}

void set_offloaded(const Group& group, std::size_t count, std::vector<Placed>* plan) {
  for (std::size_t i = 0; i < group.buckets.size(); ++i) {
    (*plan)[group.buckets[i]].way = i < count ? group.cpu[i] : group.gpu[i];
  }
}

}  // namespace

std::vector<int> options_on(Problem& problem, int codec, OpDevice device) {
  std::vector<int> options;
  OptionSpace space = problem.space_of(codec);
  space.sum_payloads = false;  // the published tree
  if (std::find(space.devices.begin(), space.devices.end(), device) == space.devices.end()) {
    space.devices.clear();
  } else {
    space.devices = {device};
  }
  std::vector<Option> generated = generate_options(space).value();
  for (Option& option : generated) {
    const bool is_plain = option.encodes() == 0;
    options.push_back(problem.add_candidate({is_plain ? -1 : codec, std::move(option)}));
  }
  return options;
}

WaysOf ways_of_options(Problem& problem, std::vector<int> options) {
  return [&problem, options = std::move(options)](int first, int last) {
    std::vector<const Way*> ways;
    for (const int option : options) {
      if (const Way* way = problem.way_of(first, last, option); way != nullptr) ways.push_back(way);
    }
    return ways;
  };
}

void choose_greedily(Problem& problem, const WaysOf& ways_of, Simulator* simulator, std::int64_t until_steps,
                     std::vector<Placed>* plan) {
  std::vector<std::size_t> order(plan->size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return problem.elems((*plan)[a].first, (*plan)[a].last) > problem.elems((*plan)[b].first, (*plan)[b].last);
  });
  std::vector<bool> removed = travels_before_gap(problem, simulator, *plan);
  std::vector<SimulatedBucket> buckets = simulated(problem, *plan);
  std::int64_t best_ns = simulator->run_keeping(buckets);
  for (const std::size_t k : order) {
    if (simulator->steps_done() >= until_steps) return;
    if (removed[k]) continue;
    const Way* const before = (*plan)[k].way;
    const Way* best = before;
    const auto change_to = [&](const Way* way) {
      Loads change = way->chain.loads;
      for (int r = 0; r < kMaxResources; ++r) change[r] -= before->chain.loads[r];
      return change;
    };
    for (const Way* way : ways_of((*plan)[k].first, (*plan)[k].last)) {
      buckets[k].steps = way->chain.steps;
      const std::int64_t step_ns = simulator->rerun(buckets, k, change_to(way), best_ns);
      if (step_ns < best_ns) best_ns = step_ns, best = way;
    }
    (*plan)[k].way = best;
    buckets[k].steps = best->chain.steps;
    if (best == before) continue;
    const std::vector<bool> early = travels_before_gap(problem, simulator, *plan);
    for (std::size_t b = 0; b < plan->size(); ++b) {
      if (early[b] && !encodes(problem, (*plan)[b])) removed[b] = true;
    }
    simulator->rerun_keeping(buckets, k, change_to(best));
  }
}

void offload_to_cpu(Problem& problem, std::int64_t max_combinations, std::vector<Placed>* plan) {
  const std::vector<Group> groups = groups_of(problem, *plan);
  LocalSearch scores(&problem);
  std::vector<Placed> best = *plan;
  std::int64_t best_ns = scores.score(best).step_ns;
  const auto try_plan = [&](const std::vector<Placed>& tried) {
    const std::int64_t step_ns = scores.score(tried, {best_ns, 0, 0}).step_ns;
    if (step_ns < best_ns) best_ns = step_ns, best = tried;
  };
  std::int64_t combinations = 1;
  for (const Group& group : groups) {
    if (combinations <= max_combinations) combinations *= static_cast<std::int64_t>(group.buckets.size()) + 1;
  }
  if (combinations > max_combinations) {
    for (const Group& group : groups) {
      for (std::size_t count = 0; count <= group.buckets.size(); ++count) {
        std::vector<Placed> tried = best;
        set_offloaded(group, count, &tried);
        try_plan(tried);
      }
    }
  } else {
    std::vector<std::size_t> counts(groups.size(), 0);
    std::vector<Placed> tried = *plan;
    for (std::size_t g = 0; g < groups.size();) {  // counts like an odometer
      if (counts[g] == groups[g].buckets.size()) {
        counts[g] = 0;
        set_offloaded(groups[g], 0, &tried);
        ++g;
        continue;
      }
      set_offloaded(groups[g], ++counts[g], &tried);
      try_plan(tried);
      g = 0;
    }
  }
  *plan = best;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The one event simulator: what a step takes when every bucket goes its way. Integer nanoseconds, deterministic.
//
// The compute stream runs the backward pass and, if it may overlap, the next forward pass. When it has done the work of
// a bucket, the bucket's chain begins; each of its steps waits for its resource. A resource serves in the order in
// which steps become ready, at equal times the lower bucket first; it does one thing at a time, except the CPU, which
// has workers. Codecs and transfers take speed from the compute stream while they run. Where gradients are on the host,
// one thread runs the backward pass and the codecs and starts transfers, and sees what has arrived only when it has
// encoded what became ready, and after the backward pass. Not modelled: docs/planner.md.
//
// PERF: a resource's results come in order, so that every server has a queue of its own and the next event is the least
// of their heads: 15 ns an event, where one heap over all buckets in flight takes 40.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cortado/job.h"
#include "planner/cost/option_cost.h"

namespace cortado {

// What does not change from plan to plan.
struct SimulatedJob {
  std::int64_t backward_ns = 0;
  std::int64_t forward_ns = 0;
  std::int64_t optimizer_ns = 0;
  bool overlap_forward = false;
  int cpu_workers = 1;
  std::int64_t gpu_slowdown_ppm = 0;  // of the compute stream while a codec runs: 1,000,000 stands still
  std::int64_t cpu_slowdown_ppm = 0;
  std::int64_t link_slowdown_ppm = 0;  // while a link is busy
  // What has arrived waits until the thread of the backward pass looks; and a busy link takes from codecs on the CPU,
  // which run in it, what it takes from the backward pass.
  bool host_passes_on = false;
};

SimulatedJob simulated_job(const Job& job, const Cluster& cluster);

struct SimulatedBucket {
  std::int64_t ready_ns = 0;  // of backward work
  std::span<const Step> steps;
  std::int64_t elems = 0;  // shares the optimizer's time where the forward pass overlaps
};

// One step on one resource, or a part of the compute stream.
struct SimulatedEvent {
  std::int64_t start_ns = 0, end_ns = 0;
  std::int32_t bucket = -1;  // -1: compute stream
  std::int32_t step = 0;     // of the bucket's chain; of the compute stream: 0 backward, 1 optimizer, 2 forward
  std::int32_t server = 0;   // resource; workers of the CPU are told apart by `worker`
  std::int32_t worker = 0;
};

class Simulator {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;

  Simulator(const SimulatedJob& job, int levels);
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  // The time of a step: from the start of a backward pass to the start of the next one. Buckets are in the order of
  // their ready times. Any number above `limit` may be returned instead of a time above `limit`, earlier. `events`, if
  // given, receives what happened, by start time within a resource.
  std::int64_t run(std::span<const SimulatedBucket> buckets, std::int64_t limit = kNever,
                   std::vector<SimulatedEvent>* events = nullptr);

  // As run() without a limit, and keeps states on the way for rerun().
  std::int64_t run_keeping(std::span<const SimulatedBucket> buckets);

  // As run(), but continues from a kept state. The buckets before `first` must be those of the last run that kept
  // states, and no other may become ready before the one that had the index `first` then (its own change is a change of
  // chain, or of fusion with later ones). `load_change`: by how much the chains of all buckets take more time on each
  // resource now.
  std::int64_t rerun(std::span<const SimulatedBucket> buckets, std::size_t first, const Loads& load_change,
                     std::int64_t limit = kNever);

  // As rerun() without a limit, after which the kept states are those of these buckets.
  std::int64_t rerun_keeping(std::span<const SimulatedBucket> buckets, std::size_t first, const Loads& load_change);

  // Steps simulated since construction: what a search has cost, in a unit that is the same on every machine.
  std::int64_t steps_done() const { return steps_done_; }

 private:
  // PERF: written and read as two words: what is read as one piece of 16 bytes waits until both stores have left.
  struct Waiting {
    std::int64_t time_ns;
    std::int64_t place;  // bucket and step: of equal times the least comes first

    Waiting() = default;
    Waiting(std::int64_t time, std::int64_t at) : time_ns(time), place(at) {}

    static Waiting of(std::int64_t time_ns, std::int32_t bucket, std::int32_t step) {
      return {time_ns, (std::int64_t{bucket} << 32) + step};
    }
    std::int32_t bucket() const { return static_cast<std::int32_t>(place >> 32); }
    std::int32_t step() const { return static_cast<std::int32_t>(place); }
  };
  // Results of one server that have not been passed on yet, in order of time: a ring with room for every bucket, as a
  // bucket waits in one place at a time. The first of them is in head_times_ and head_places_.
  struct Server {
    Waiting* ring = nullptr;
    std::size_t head = 0, tail = 0;
    std::int64_t free_ns = 0;
  };
  // The compute stream. Its work has milestones: buckets become ready, the backward pass ends, parts of the forward
  // pass begin that need a bucket, the forward pass ends.
  struct Compute {
    std::int64_t time_ns = 0, work_ns = 0;  // so much work is done at that time
    std::int64_t began_ns = 0;              // the stretch that the next milestone ends
    std::int64_t slowed_until_ns[3] = {};   // by codecs on the GPU, on the CPU, by transfers
    std::int32_t milestone = 0;
    std::int32_t waits_for = -1;  // a bucket
    std::int64_t next_ns = 0;     // when the milestone will be reached, if no other codec or transfer starts before
  };
  struct State {
    Compute compute;
    Loads remaining_ns = {};  // of all chains, what has not been started, by resource
    std::int64_t arrived_ns = 0;
    std::int64_t seen_ns = 0;  // the host has looked at what had arrived by then
  };
  struct Checkpoint {
    State state;
    std::vector<std::int64_t> free_ns;  // by server
    std::vector<std::int32_t> counts;
    std::vector<Waiting> waiting, unseen;
    std::vector<std::int64_t> arrivals;
  };

  void make_room(std::size_t buckets);
  std::size_t resume(std::span<const SimulatedBucket> buckets, std::size_t first, const Loads& load_change);
  void reset(std::span<const SimulatedBucket> buckets);
  void place_gates(std::span<const SimulatedBucket> buckets);
  std::int64_t advance(std::span<const SimulatedBucket> buckets, std::int64_t limit);
  template <bool kHostPassesOn>
  std::int64_t advance_as(std::span<const SimulatedBucket> buckets, std::int64_t limit);
  std::int32_t reach_milestone(std::span<const SimulatedBucket> buckets);
  bool may_end_by(std::int64_t limit) const;
  std::int64_t work_after(std::int32_t bucket) const;
  template <bool kHostPassesOn>
  bool take_step(std::span<const SimulatedBucket> buckets, Waiting ready, std::int64_t limit);
  bool waits_for_host(std::span<const SimulatedBucket> buckets, Waiting ready);
  std::int64_t beside_transfers_ns(std::int64_t start_ns, std::int64_t time_ns) const;
  std::int32_t free_worker() const;
  std::size_t host_server() const { return servers_.size() - 1; }
  void see_unseen(std::span<const SimulatedBucket> buckets);
  void see(std::int64_t time_ns, std::int64_t place);
  void pass_on(std::size_t server, std::int64_t time_ns, std::int64_t place) {
    Server& from = servers_[server];
    if (from.head == from.tail) set_head(server, time_ns, place);
    from.ring[from.tail++ & ring_mask_] = {time_ns, place};
  }
  void set_head(std::size_t server, std::int64_t time_ns, std::int64_t place) {
    head_times_[server] = time_ns;
    head_places_[server] = place;
  }
  void arrive(std::span<const SimulatedBucket> buckets, std::int32_t bucket, std::int64_t time_ns);
  std::int64_t milestone_work(std::span<const SimulatedBucket> buckets) const;
  void plan_next(std::span<const SimulatedBucket> buckets);
  struct Speed {
    std::int64_t ppm, until_ns;
  };
  Speed speed_at(std::int64_t time_ns) const;
  void settle(std::int64_t time_ns);
  void keep();

  SimulatedJob job_;
  std::array<std::int64_t, 3> slowdowns_ppm_;      // in the order of Compute::slowed_until_ns
  std::array<std::int32_t, kMaxResources> slows_;  // which of them a resource makes slow; -1: none
  // One for each resource, then the other workers of the CPU; and if the host passes on, what it sees behind what it
  // codes.
  std::vector<Server> servers_;
  std::int32_t first_worker_;
  std::vector<Waiting> rings_;                          // of all servers
  std::size_t ring_mask_ = 0;                           // over the indices of one
  std::vector<std::int64_t> head_times_, head_places_;  // of each server; at kNever: none
  State state_;
  std::vector<Waiting> unseen_;         // has arrived while the host runs the backward pass
  std::vector<std::int64_t> arrivals_;  // by bucket; -1: not known yet; where the forward pass overlaps
  std::vector<std::int64_t> gates_;     // work before the parts of the forward pass that need the last bucket, ...
  std::int64_t total_work_ns_ = 0;
  std::vector<Checkpoint> checkpoints_;
  std::size_t kept_ = 0;         // of checkpoints_
  std::int32_t keep_every_ = 0;  // buckets; 0: none
  std::vector<SimulatedEvent>* events_ = nullptr;
  std::int64_t steps_done_ = 0;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/simulate/simulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace cortado {

namespace {

constexpr std::int64_t kFullSpeedPpm = 1000000;
constexpr std::int32_t kMaxCheckpoints = 96;

std::int32_t checkpoint_every(std::size_t buckets) { return static_cast<std::int32_t>(buckets) / kMaxCheckpoints + 1; }

std::int64_t muldiv(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product;
  if (!__builtin_mul_overflow(a, b, &product)) return product / c;
  return static_cast<std::int64_t>(static_cast<__int128>(a) * b / c);
}

// Which of Compute::slowed_until_ns it is that takes speed from the compute stream; -1: none.
int slowdown_by(int resource) {
  if (resource >= kLink) return 2;
  return resource <= kCpuCodec ? resource : -1;
}

}  // namespace

SimulatedJob simulated_job(const Job& job, const Cluster& cluster) {
  const auto ppm = [](double share) { return std::llround(share * kFullSpeedPpm); };
  return {.backward_ns = job.backward_end_ns(),
          .forward_ns = job.forward_ns.value_or(0),
          .optimizer_ns = job.optimizer_ns.value_or(0),
          .overlap_forward = job.overlap_forward,
          .cpu_workers = job.device == OpDevice::kCpu ? 1 : cluster.cpu_codec_workers,
          .gpu_slowdown_ppm = ppm(cluster.gpu_codec_slows_backward),
          // The engine encodes what is in host memory in the thread of the backward pass, which stands still meanwhile.
          .cpu_slowdown_ppm = job.device == OpDevice::kCpu ? kFullSpeedPpm : ppm(cluster.cpu_codec_slows_backward),
          .link_slowdown_ppm = ppm(cluster.transfers_slow_backward.value_or(0)),
          .host_passes_on = job.device == OpDevice::kCpu};
}

Simulator::Simulator(const SimulatedJob& job, int levels)
    : job_(job), slowdowns_ppm_{job.gpu_slowdown_ppm, job.cpu_slowdown_ppm, job.link_slowdown_ppm} {
  for (int r = 0; r < kMaxResources; ++r) {
    const int by = slowdown_by(r);
    slows_[r] = by >= 0 && slowdowns_ppm_[static_cast<std::size_t>(by)] > 0 ? by : -1;
  }
  first_worker_ = kLink + levels;
  servers_.resize(static_cast<std::size_t>(first_worker_ + job.cpu_workers - 1 + job.host_passes_on));
  head_times_.resize(servers_.size(), kNever);
  head_places_.resize(servers_.size(), 0);
}

std::int64_t Simulator::run(std::span<const SimulatedBucket> buckets, std::int64_t limit,
                            std::vector<SimulatedEvent>* events) {
  events_ = events;
  const std::int32_t every = std::exchange(keep_every_, 0);
  reset(buckets);
  const std::int64_t step_ns = advance(buckets, limit);
  keep_every_ = every;
  events_ = nullptr;
  if (events != nullptr && !job_.overlap_forward) {
    const std::int64_t forward_ns = step_ns - job_.forward_ns;
    if (job_.optimizer_ns > 0) events->push_back({forward_ns - job_.optimizer_ns, forward_ns, -1, 1, 0, 0});
    if (job_.forward_ns > 0) events->push_back({forward_ns, step_ns, -1, 2, 0, 0});
  }
  return step_ns;
}

std::int64_t Simulator::run_keeping(std::span<const SimulatedBucket> buckets) {
  keep_every_ = checkpoint_every(buckets.size());
  kept_ = 0;
  checkpoints_.resize(std::max(checkpoints_.size(), buckets.size() / static_cast<std::size_t>(keep_every_) + 1));
  reset(buckets);
  return advance(buckets, kNever);
}

std::int64_t Simulator::rerun(std::span<const SimulatedBucket> buckets, std::size_t first, const Loads& load_change,
                              std::int64_t limit) {
  resume(buckets, first, load_change);
  const std::int32_t every = std::exchange(keep_every_, 0);
  const std::int64_t step_ns = advance(buckets, limit);
  keep_every_ = every;
  return step_ns;
}

std::int64_t Simulator::rerun_keeping(std::span<const SimulatedBucket> buckets, std::size_t first,
                                      const Loads& load_change) {
  if (checkpoint_every(buckets.size()) != keep_every_) return run_keeping(buckets);
  checkpoints_.resize(std::max(checkpoints_.size(), buckets.size() / static_cast<std::size_t>(keep_every_) + 1));
  kept_ = resume(buckets, first, load_change);
  for (std::size_t c = 0; c < kept_; ++c) {
    for (int r = 0; r < kMaxResources; ++r) checkpoints_[c].state.remaining_ns[r] += load_change[r];
  }
  return advance(buckets, kNever);
}

// Goes back to the last kept state that the buckets before `first` decide, and says which it is.
std::size_t Simulator::resume(std::span<const SimulatedBucket> buckets, std::size_t first, const Loads& load_change) {
  // When the host has seen what had arrived by the bucket before depends on when the first was ready.
  if (job_.host_passes_on && first > 0) --first;
  const std::size_t at = std::min(first / static_cast<std::size_t>(keep_every_), kept_ - 1);
  const Checkpoint& from = checkpoints_[at];
  state_ = from.state;
  for (int r = 0; r < kMaxResources; ++r) state_.remaining_ns[r] += load_change[r];
  make_room(buckets.size());
  const Waiting* waiting = from.waiting.data();
  for (std::size_t s = 0; s < servers_.size(); ++s) {
    const auto count = static_cast<std::size_t>(from.counts[s]);
    servers_[s].head = 0;
    servers_[s].tail = count;
    servers_[s].free_ns = from.free_ns[s];
    set_head(s, kNever, 0);
    if (count > 0) set_head(s, waiting->time_ns, waiting->place);
    std::copy_n(waiting, count, servers_[s].ring);
    waiting += count;
  }
  unseen_ = from.unseen;
  place_gates(buckets);
  std::copy(from.arrivals.begin(), from.arrivals.end(), arrivals_.begin());
  plan_next(buckets);
  return at;
}

void Simulator::make_room(std::size_t buckets) {
  if (buckets <= ring_mask_ + 1 && !rings_.empty()) return;
  const std::size_t room = std::bit_ceil(buckets);
  rings_.resize(room * servers_.size());
  for (std::size_t s = 0; s < servers_.size(); ++s) servers_[s].ring = rings_.data() + s * room;
  ring_mask_ = room - 1;
}

void Simulator::reset(std::span<const SimulatedBucket> buckets) {
  state_ = {};
  for (const SimulatedBucket& bucket : buckets) {
    for (const Step& step : bucket.steps) state_.remaining_ns[step.resource] += step.time_ns;
  }
  make_room(buckets.size());
  for (Server& server : servers_) server.head = server.tail = 0, server.free_ns = 0;
  std::fill(head_times_.begin(), head_times_.end(), kNever);
  unseen_.clear();
  place_gates(buckets);
  plan_next(buckets);
}

// The forward pass needs the tensors in the opposite order: what becomes ready at the share x of the backward pass is
// needed at the share 1 - x of the forward pass. The optimizer's time is spread by elements.
void Simulator::place_gates(std::span<const SimulatedBucket> buckets) {
  total_work_ns_ = job_.backward_ns;
  if (!job_.overlap_forward) return;
  arrivals_.assign(buckets.size(), -1);
  std::int64_t elems = 0, elems_before = 0;
  for (const SimulatedBucket& bucket : buckets) elems += bucket.elems;
  gates_.resize(buckets.size());
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const SimulatedBucket& bucket = buckets[buckets.size() - 1 - i];
    const std::int64_t left_ns = job_.backward_ns - bucket.ready_ns;
    gates_[i] = job_.backward_ns + muldiv(job_.forward_ns, left_ns, std::max<std::int64_t>(job_.backward_ns, 1)) +
                muldiv(job_.optimizer_ns, elems_before, std::max<std::int64_t>(elems, 1));
    elems_before += bucket.elems;
  }
  total_work_ns_ += job_.forward_ns + job_.optimizer_ns;
}

std::int64_t Simulator::milestone_work(std::span<const SimulatedBucket> buckets) const {
  const auto n = static_cast<std::int32_t>(buckets.size());
  const std::int32_t m = state_.compute.milestone;
  if (m < n) return buckets[m].ready_ns;
  if (job_.overlap_forward && m < 2 * n) return gates_[m - n];
  return total_work_ns_;
}

// When the next milestone comes.
void Simulator::plan_next(std::span<const SimulatedBucket> buckets) {
  Compute& compute = state_.compute;
  const std::int32_t last = static_cast<std::int32_t>(buckets.size()) * (job_.overlap_forward ? 2 : 1);
  if (compute.waits_for >= 0 || compute.milestone > last) {
    compute.next_ns = kNever;
    return;
  }
  std::int64_t time_ns = compute.time_ns;
  std::int64_t left_ns = milestone_work(buckets) - compute.work_ns;
  while (left_ns > 0) {
    const Speed speed = speed_at(time_ns);
    if (speed.ppm == kFullSpeedPpm) break;
    const std::int64_t done_ns = muldiv(speed.until_ns - time_ns, speed.ppm, kFullSpeedPpm);
    if (done_ns >= left_ns) {
      time_ns += muldiv(left_ns, kFullSpeedPpm, speed.ppm);
      left_ns = 0;
      break;
    }
    left_ns -= done_ns;
    time_ns = speed.until_ns;
  }
  compute.next_ns = time_ns + std::max<std::int64_t>(left_ns, 0);
}

// The speed of the compute stream from `time_ns` on, and until when.
Simulator::Speed Simulator::speed_at(std::int64_t time_ns) const {
  Speed speed = {kFullSpeedPpm, kNever};
  for (std::size_t by = 0; by < slowdowns_ppm_.size(); ++by) {
    const std::int64_t until_ns = state_.compute.slowed_until_ns[by];
    if (until_ns <= time_ns) continue;
    speed.ppm -= slowdowns_ppm_[by];
    speed.until_ns = std::min(speed.until_ns, until_ns);
  }
  speed.ppm = std::max<std::int64_t>(speed.ppm, 0);
  return speed;
}

// Brings the compute stream to `time_ns`, which is not after its next milestone.
void Simulator::settle(std::int64_t time_ns) {
  Compute& compute = state_.compute;
  while (compute.time_ns < time_ns) {
    const Speed speed = speed_at(compute.time_ns);
    const std::int64_t until_ns = std::min(time_ns, speed.until_ns);
    if (compute.waits_for < 0) {
      compute.work_ns += speed.ppm == kFullSpeedPpm ? until_ns - compute.time_ns
                                                    : muldiv(until_ns - compute.time_ns, speed.ppm, kFullSpeedPpm);
    }
    compute.time_ns = until_ns;
  }
}

// PERF: what a host that passes on needs is not looked at where there is none, and a step is taken inline: together a
// tenth of the time of a whole plan.
std::int64_t Simulator::advance(std::span<const SimulatedBucket> buckets, std::int64_t limit) {
  return job_.host_passes_on ? advance_as<true>(buckets, limit) : advance_as<false>(buckets, limit);
}

template <bool kHostPassesOn>
std::int64_t Simulator::advance_as(std::span<const SimulatedBucket> buckets, std::int64_t limit) {
  const std::int64_t tail_ns = job_.overlap_forward ? 0 : job_.optimizer_ns + job_.forward_ns;
  const std::int64_t last_arrival = limit - tail_ns;
  if (!may_end_by(last_arrival)) return kNever;
  const std::int64_t* const head_times = head_times_.data();
  const std::int64_t* const head_places = head_places_.data();
  const std::size_t others = kHostPassesOn ? host_server() : head_times_.size();
  for (;;) {
    // The earliest of all results and the next milestone; at equal times results first, of lower buckets first, and
    // last what the host sees: it starts transfers first.
    std::size_t next = 0;
    std::int64_t least_ns = head_times[0];
    for (std::size_t s = 1; s < others; ++s) {
      const std::int64_t head_ns = head_times[s];
      if (head_ns < least_ns || (head_ns == least_ns && head_places[s] < head_places[next])) {
        least_ns = head_ns;
        next = s;
      }
    }
    if (kHostPassesOn && head_times[others] < least_ns) {
      least_ns = head_times[others];
      next = others;
    }
    Waiting ready = {least_ns, head_places[next]};
    const bool is_milestone = least_ns == kNever || state_.compute.next_ns < least_ns;
    if (is_milestone) {
      if (state_.compute.next_ns == kNever) break;
      if (state_.compute.next_ns + total_work_ns_ - milestone_work(buckets) > last_arrival) return kNever;
      const std::int32_t bucket = reach_milestone(buckets);
      if (bucket < 0) continue;
      ready = Waiting::of(state_.compute.time_ns, bucket, 0);
    } else {
      Server& server = servers_[next];
      if (++server.head == server.tail) {
        head_times_[next] = kNever;
      } else {
        const Waiting& head = server.ring[server.head & ring_mask_];
        set_head(next, head.time_ns, head.place);
      }
      if (kHostPassesOn && next == others) state_.seen_ns = least_ns;
    }
    if (!take_step<kHostPassesOn>(buckets, ready, last_arrival)) return kNever;
    if (kHostPassesOn && is_milestone && !unseen_.empty()) see_unseen(buckets);
  }
  return std::max(state_.compute.time_ns, state_.arrived_ns) + tail_ns;
}

// False: some resource can't do all that is left by then. Nothing that is left starts before the next event.
bool Simulator::may_end_by(std::int64_t limit) const {
  std::int64_t now_ns = state_.compute.next_ns;
  for (const std::int64_t head_ns : head_times_) now_ns = std::min(now_ns, head_ns);
  for (int r = 0; r < kMaxResources; ++r) {
    const std::int64_t remaining_ns = state_.remaining_ns[r];
    if (remaining_ns == 0) continue;
    const std::int64_t count = r == kCpuCodec ? job_.cpu_workers : 1;
    const std::int64_t start_ns = count == 1 ? std::max(now_ns, servers_[r].free_ns) : now_ns;
    if (start_ns + remaining_ns / count > limit) return false;
  }
  return true;
}

// What the compute stream has to do, at least, once a bucket has arrived.
std::int64_t Simulator::work_after(std::int32_t bucket) const {
  return job_.overlap_forward ? total_work_ns_ - gates_[gates_.size() - 1 - static_cast<std::size_t>(bucket)] : 0;
}

// The bucket that is ready now; -1: none.
std::int32_t Simulator::reach_milestone(std::span<const SimulatedBucket> buckets) {
  Compute& compute = state_.compute;
  const auto n = static_cast<std::int32_t>(buckets.size());
  const std::int32_t m = compute.milestone;
  if (keep_every_ > 0 && m < n && m % keep_every_ == 0) keep();
  if (events_ != nullptr && compute.next_ns > compute.began_ns) {
    events_->push_back(
        {.start_ns = compute.began_ns, .end_ns = compute.next_ns, .step = m < n || !job_.overlap_forward ? 0 : 2});
  }
  compute.work_ns = milestone_work(buckets);
  compute.began_ns = compute.time_ns = compute.next_ns;
  if (m < n) {
    ++compute.milestone;
    plan_next(buckets);
    return m;
  }
  if (job_.overlap_forward && m < 2 * n) {
    const std::int32_t needed = 2 * n - 1 - m;
    if (arrivals_[needed] < 0) {
      compute.waits_for = needed;
    } else {  // it may be known when the last step of its chain ends
      compute.began_ns = compute.time_ns = std::max(compute.time_ns, arrivals_[needed]);
    }
  }
  ++compute.milestone;
  plan_next(buckets);
  return -1;
}

// False: the step will take longer than the limit.
template <bool kHostPassesOn>
[[gnu::always_inline]] inline bool Simulator::take_step(std::span<const SimulatedBucket> buckets, Waiting ready,
                                                        std::int64_t limit) {
  const std::int32_t bucket = ready.bucket();
  const std::span<const Step> steps = buckets[bucket].steps;
  const auto at = static_cast<std::size_t>(ready.step());
  if (at == steps.size()) {
    arrive(buckets, bucket, ready.time_ns);
    return true;
  }
  const Step& step = steps[at];
  if (kHostPassesOn && at > 0 && steps[at - 1].resource >= kLink && waits_for_host(buckets, ready)) return true;
  ++steps_done_;
  const bool has_workers = step.resource == kCpuCodec && job_.cpu_workers > 1;
  std::int32_t s = step.resource;
  if (has_workers) s = free_worker();
  Server& server = servers_[s];
  const std::int64_t start_ns = std::max(ready.time_ns, server.free_ns);
  const bool is_of_host = kHostPassesOn && step.resource == kCpuCodec;
  const std::int64_t end_ns = start_ns + (is_of_host ? beside_transfers_ns(start_ns, step.time_ns) : step.time_ns);
  server.free_ns = end_ns;
  const bool is_last = at + 1 == steps.size();
  if (!is_last) pass_on(static_cast<std::size_t>(s), end_ns, ready.place + 1);
  if (const std::int32_t by = slows_[step.resource]; by >= 0 && end_ns > state_.compute.slowed_until_ns[by]) {
    settle(ready.time_ns);
    state_.compute.slowed_until_ns[by] = end_ns;
    plan_next(buckets);
  }
  if (is_last) arrive(buckets, bucket, end_ns);
  if (events_ != nullptr) {
    const std::int32_t worker = s == step.resource ? 0 : s - first_worker_ + 1;
    events_->push_back({start_ns, end_ns, bucket, ready.step(), step.resource, worker});
  }
  const std::int64_t remaining_ns = state_.remaining_ns[step.resource] -= step.time_ns;
  if (end_ns + step.rest_ns + work_after(bucket) > limit) return false;
  return has_workers || end_ns + remaining_ns <= limit;
}

// Of the CPU, the one that is free first.
std::int32_t Simulator::free_worker() const {
  std::int32_t first = kCpuCodec;
  for (std::int32_t s = first_worker_; s < first_worker_ + job_.cpu_workers - 1; ++s) {
    if (servers_[s].free_ns < servers_[first].free_ns) first = s;
  }
  return first;
}

// What has arrived, until the thread of the backward pass sees it.
bool Simulator::waits_for_host(std::span<const SimulatedBucket> buckets, Waiting ready) {
  if (ready.time_ns == state_.seen_ns) return false;
  if (const std::int64_t free_ns = servers_[kCpuCodec].free_ns; free_ns > ready.time_ns) {
    see(free_ns, ready.place);
    return true;
  }
  if (state_.compute.milestone >= static_cast<std::int32_t>(buckets.size())) return false;
  unseen_.push_back(ready);
  return true;
}

// What transfers take from the backward pass they take from codecs in its thread, too, those that have begun by then.
std::int64_t Simulator::beside_transfers_ns(std::int64_t start_ns, std::int64_t time_ns) const {
  const std::int64_t slow_ns = state_.compute.slowed_until_ns[2] - start_ns;
  const std::int64_t speed_ppm = kFullSpeedPpm - slowdowns_ppm_[2];
  if (time_ns == 0 || slow_ns <= 0 || speed_ppm == kFullSpeedPpm) return time_ns;
  const std::int64_t done_ns = muldiv(slow_ns, speed_ppm, kFullSpeedPpm);
  return done_ns < time_ns ? slow_ns + time_ns - done_ns : muldiv(time_ns, kFullSpeedPpm, speed_ppm);
}

// At the milestone of a bucket, the last of those that are ready together: the host looks at what has arrived, behind
// what it encodes now.
void Simulator::see_unseen(std::span<const SimulatedBucket> buckets) {
  const auto next = static_cast<std::size_t>(state_.compute.milestone);
  if (next < buckets.size() && buckets[next].ready_ns == buckets[next - 1].ready_ns) return;
  const std::int64_t time_ns = std::max(state_.compute.time_ns, servers_[kCpuCodec].free_ns);
  for (const Waiting& unseen : unseen_) see(time_ns, unseen.place);
  unseen_.clear();
}

// What the host sees at one time it takes up in the order of the buckets.
void Simulator::see(std::int64_t time_ns, std::int64_t place) {
  Server& host = servers_[host_server()];
  std::size_t at = host.tail++;
  for (; at != host.head; --at) {
    const Waiting& before = host.ring[(at - 1) & ring_mask_];
    if (before.time_ns != time_ns || before.place <= place) break;
    host.ring[at & ring_mask_] = before;
  }
  host.ring[at & ring_mask_] = {time_ns, place};
  const Waiting& head = host.ring[host.head & ring_mask_];
  set_head(host_server(), head.time_ns, head.place);
}

// It will have arrived at `time_ns`, which may be later than now.
void Simulator::arrive(std::span<const SimulatedBucket> buckets, std::int32_t bucket, std::int64_t time_ns) {
  state_.arrived_ns = std::max(state_.arrived_ns, time_ns);
  if (!job_.overlap_forward) return;
  arrivals_[bucket] = time_ns;
  if (state_.compute.waits_for != bucket) return;
  settle(time_ns);
  state_.compute.began_ns = state_.compute.time_ns;
  state_.compute.waits_for = -1;
  plan_next(buckets);
}

void Simulator::keep() {
  Checkpoint& to = checkpoints_[kept_++];
  to.state = state_;
  to.free_ns.clear();
  to.unseen = unseen_;
  to.counts.clear();
  to.waiting.clear();
  for (const Server& server : servers_) {
    to.free_ns.push_back(server.free_ns);
    to.counts.push_back(static_cast<std::int32_t>(server.tail - server.head));
    for (std::size_t i = server.head; i != server.tail; ++i) to.waiting.push_back(server.ring[i & ring_mask_]);
  }
  if (job_.overlap_forward) to.arrivals.assign(arrivals_.begin(), arrivals_.begin() + state_.compute.milestone);
}

}  // namespace cortado

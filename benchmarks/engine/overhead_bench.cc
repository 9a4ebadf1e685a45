// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does the engine cost by itself, without codecs and collectives?
//
// Eight in-process ranks, a thread each, exchange a model of 300 tensors (150 matrices of 64 x 64 and their biases)
// that are submitted one by one:
//
//   collective   in the communicator: start, test and wait; for the most part waiting for other ranks
//   codec        in the engine's stages encode, decode and orthogonalise
//   engine       what is left of the step, copies of gradients to messages and back included
//
// Times are of the steady clock, whose reading costs a tenth of one of a thread's processor time; that is measured too
// and taken out. Ranks share cores, so a thread may be suspended anywhere: medians leave most of that out, and what
// they do not makes the figures too large.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/codec/bench_program.h"
#include "core/check.h"
#include "core/philox.h"
#include "cortado/engine.h"

namespace cortado {
namespace {

constexpr int kRanks = 8, kMatrices = 150, kWidth = 64;
constexpr double kBar_us = 5;
const Topology kTopology = {{{"intra", 4}, {"inter", 2}}};

// The steady clock; counts how often it is asked. One for each thread.
class CountingClock final : public Clock {
 public:
  std::int64_t now_ns() const override {
    ++reads_;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  std::int64_t reads() const { return reads_; }

 private:
  mutable std::int64_t reads_ = 0;
};

struct Meter {
  CountingClock clock;
  std::int64_t collective_ns = 0;
};

// Adds up the time spent in another communicator and in its sub-groups.
class MeteredCommunicator final : public Communicator {
 public:
  MeteredCommunicator(Communicator* inner, Meter* meter) : inner_(inner), meter_(meter) {}
  MeteredCommunicator(std::unique_ptr<Communicator> inner, Meter* meter)
      : owned_(std::move(inner)), inner_(owned_.get()), meter_(meter) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return inner_->name(); }
  Result<WorkId> start(const CollectiveCall& call) override {
    const Interval interval(meter_);
    return inner_->start(call);
  }
  Result<bool> test(WorkId work) override {
    const Interval interval(meter_);
    return inner_->test(work);
  }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override {
    const Interval interval(meter_);
    return inner_->wait(work, timeout);
  }
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override {
    return inner_->all_gather(sent, received, timeout);
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->subgroup(ranks));
    return std::unique_ptr<Communicator>(new MeteredCommunicator(std::move(group), meter_));
  }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

 private:
  // From its making to its end.
  class Interval {
   public:
    explicit Interval(Meter* meter) : meter_(meter), begin_ns_(meter->clock.now_ns()) {}
    ~Interval() { meter_->collective_ns += meter_->clock.now_ns() - begin_ns_; }
    Interval(const Interval&) = delete;
    Interval& operator=(const Interval&) = delete;

   private:
    Meter* meter_;
    std::int64_t begin_ns_;
  };

  std::unique_ptr<Communicator> owned_;
  Communicator* inner_;
  Meter* meter_;
};

std::vector<EngineTensor> model() {
  std::vector<EngineTensor> tensors;
  for (int i = 0; i < kMatrices; ++i) {
    const std::string name = "layer" + std::to_string(i);
    tensors.push_back({.name = name + ".weight", .rows = kWidth, .cols = kWidth});
    tensors.push_back({.name = name + ".bias", .rows = 1, .cols = kWidth, .dimensions = 1});
  }
  return tensors;
}

struct Workload {
  std::string name;
  std::string spec = "none";  // of an engine without a plan
  std::string option = "";    // of every bucket of a plan
  std::size_t fused = 1;      // tensors a bucket
};

const std::vector<Workload> kWorkloads = {
    {"cast(bf16)", "cast(bf16)"},
    {"cast(bf16), unfused", "cast(bf16, bucket_cap_mib=0)"},
    {"topk(density=0.01)", "topk(density=0.01, start_step=0)"},
    {"sign(vote=majority)", "sign(vote=majority, start_step=0)"},
    {"acp(rank=4)", "acp(rank=4, start_step=0)"},
    {"acp(rank=4), unfused", "acp(rank=4, start_step=0, bucket_cap_mib=0)"},
    {"power(rank=4)", "power(rank=4, start_step=0)"},
    {"plan: all_reduce", "none", "all_reduce@flat"},
    {"plan: hierarchical", "none", "reduce_scatter@intra all_reduce@inter all_gather@intra"},
    {"plan: hierarchical, 10 a bucket", "none", "reduce_scatter@intra all_reduce@inter all_gather@intra", 10},
    {"plan: gathered", "quant(bits=4)", "encode@cpu all_gather@flat decode@cpu"},
    {"plan: gathered, sizes vary", "quant(bits=4) | rans", "encode@cpu all_gather@flat decode@cpu"},
    {"plan: acp", "acp(rank=4)", "encode@cpu all_reduce@flat decode@cpu"},
};

Plan plan_of(const Workload& workload, const std::vector<EngineTensor>& tensors) {
  Plan plan{.job = "bench", .cluster = "threads", .topology = kTopology, .buckets = {}, .notes = {}, .unknown = {}};
  for (std::size_t t = tensors.size(); t-- > 0;) {  // as a backward pass has them
    if (plan.buckets.empty() || plan.buckets.back().tensors.size() == workload.fused) {
      plan.buckets.push_back({.tensors = {},
                              .option = Option::parse(workload.option, kTopology).value(),
                              .codec = workload.spec,
                              .error_feedback = true,
                              .unknown = {}});
    }
    plan.buckets.back().tensors.push_back(tensors[t].name);
  }
  return plan;
}

// Of one rank and step, in ns.
struct StepTimes {
  double engine, codec, collective;
};

double of_reading_ns() {
  CountingClock clock;
  constexpr int kReads = 200'000;
  const std::int64_t begin_ns = clock.now_ns();
  for (int i = 0; i < kReads; ++i) (void)clock.now_ns();
  return static_cast<double>(clock.now_ns() - begin_ns) / (kReads + 1);
}

double codec_ns_of(const Engine& engine) {
  const EngineReport report = engine.report();
  double sum = 0;
  for (const Stage stage : {Stage::kEncode, Stage::kDecode, Stage::kOrthogonalise}) {
    sum += static_cast<double>(report.stage_ns[static_cast<int>(stage)]);
  }
  return sum;
}

// The steps of one rank; the first few, which warm up, are left out.
std::vector<StepTimes> run_rank(Communicator* group, const Workload& workload, int steps, double reading_ns) {
  constexpr int kWarmUp = 3;
  const std::vector<EngineTensor> tensors = model();
  Meter meter;
  MeteredCommunicator communicator(group, &meter);
  Result<std::unique_ptr<Engine>> made =
      workload.option.empty()
          ? Engine::create(tensors, EngineOptions::parse(workload.spec).value(), &communicator, &meter.clock)
          : Engine::create(tensors, plan_of(workload, tensors), EngineOptions{}, &communicator, &meter.clock);
  if (!made.ok()) die_of_missing_value(made.status());
  Engine& engine = *made.value();
  std::vector<std::vector<float>> gradients;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::vector<float>& values = gradients.emplace_back(static_cast<std::size_t>(tensors[t].rows * tensors[t].cols));
    philox_fill_normal(1, static_cast<std::uint64_t>(group->rank()), t, values.data(),
                       static_cast<std::int64_t>(values.size()));
  }
  std::vector<StepTimes> times;
  for (int step = 0; step < kWarmUp + steps; ++step) {
    const double codec_before_ns = codec_ns_of(engine);
    const std::int64_t collective_before_ns = meter.collective_ns, reads_before = meter.clock.reads();
    const std::int64_t begin_ns = meter.clock.now_ns();
    Status status = engine.begin_step({});
    for (std::size_t t = tensors.size(); t-- > 0 && status.ok();) {
      const Gradient gradient{static_cast<std::uint32_t>(t), gradients[t].data()};
      status = engine.submit({&gradient, 1});
    }
    if (status.ok()) status = engine.finish_step().status();
    if (!status.ok()) die_of_missing_value(status);
    const auto all_ns = static_cast<double>(meter.clock.now_ns() - begin_ns);
    const double codec_ns = codec_ns_of(engine) - codec_before_ns;
    const auto collective_ns = static_cast<double>(meter.collective_ns - collective_before_ns);
    // Of the two readings of an interval about one falls into it.
    const double readings_ns = reading_ns * static_cast<double>(meter.clock.reads() - reads_before) / 2;
    if (step >= kWarmUp) times.push_back({all_ns - codec_ns - collective_ns - readings_ns, codec_ns, collective_ns});
  }
  return times;
}

double median_us(const std::vector<StepTimes>& times, double StepTimes::*part) {
  std::vector<double> values;
  for (const StepTimes& step : times) values.push_back(step.*part / 1e3 / (2 * kMatrices));
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int run(const BenchOptions& options) {
  print_conditions(options);
  const double reading_ns = of_reading_ns();
  std::printf(
      "%d ranks as threads, %d tensors, medians over ranks and steps; a reading of the clock, %.0f ns, is taken "
      "out; bar: engine under %.0f us\n\n",
      kRanks, 2 * kMatrices, reading_ns, kBar_us);
  std::printf("| microseconds a tensor and rank | engine | codec | collective and waiting |\n|---|---|---|---|\n");
  for (const Workload& workload : kWorkloads) {
    if (!options.wants(workload.name)) continue;
    LocalGroup group(kRanks);
    std::vector<std::vector<StepTimes>> of_ranks(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        of_ranks[static_cast<std::size_t>(rank)] =
            run_rank(group.communicator(rank), workload, options.rounds, reading_ns);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<StepTimes> times;
    for (const auto& of_rank : of_ranks) times.insert(times.end(), of_rank.begin(), of_rank.end());
    std::printf("| `%s` | %.2f | %.2f | %.2f |\n", workload.name.c_str(), median_us(times, &StepTimes::engine),
                median_us(times, &StepTimes::codec), median_us(times, &StepTimes::collective));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) { return cortado::run(cortado::BenchOptions(argc, argv, 41)); }

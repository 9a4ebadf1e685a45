// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does recording a trace cost?
//
// One thread drives two in-process ranks through steps of the 10.9 M-parameter GPT's tensors, every other step with a
// recorder. Nothing is computed and nothing travels but through memory, so the share of a training step is smaller.
// Times are processor time; the medians of many steps are printed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/philox.h"
#include "cortado/engine.h"
#include "cortado/plan.h"

namespace cortado {
namespace {

constexpr int kRanks = 2;
constexpr char kPlanOf[] = "plan of ";
constexpr const char* kSpecs[] = {"acp(rank=4, start_step=0)", "topk(density=0.01, start_step=0)", "cast(bf16)",
                                  "plan of quant(bits=4)"};

// examples/train_lm.py: width 384, 6 blocks, 256 bytes.
std::vector<EngineTensor> gpt_tensors() {
  constexpr std::int64_t kWidth = 384;
  std::vector<EngineTensor> tensors = {{.name = "tokens", .rows = 256, .cols = kWidth, .is_embedding = true},
                                       {.name = "positions", .rows = 64, .cols = kWidth, .is_embedding = true}};
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    tensors.push_back({.name = name + ".weight", .rows = rows, .cols = cols});
    tensors.push_back({.name = name + ".bias", .rows = 1, .cols = rows, .dimensions = 1});
  };
  for (int block = 0; block < 6; ++block) {
    const std::string prefix = "blocks." + std::to_string(block) + ".";
    for (const char* norm : {"norm1", "norm2"}) {
      for (const char* part : {".weight", ".bias"}) {
        tensors.push_back({.name = prefix + norm + part, .rows = 1, .cols = kWidth, .dimensions = 1});
      }
    }
    add(prefix + "qkv", 3 * kWidth, kWidth);
    add(prefix + "out", kWidth, kWidth);
    add(prefix + "up", 4 * kWidth, kWidth);
    add(prefix + "down", kWidth, 4 * kWidth);
  }
  tensors.push_back({.name = "head", .rows = 256, .cols = kWidth});
  return tensors;
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct RankOfBench {
  std::unique_ptr<Engine> engine;
  std::vector<std::vector<float>> gradients;
  TraceRecorder recorder{10'000};
};

// All ranks gather what each has encoded, in two buckets: one collective each, so that one thread can drive two ranks.
Plan plan_of(const char* codec, const std::vector<EngineTensor>& tensors) {
  Plan plan;
  plan.topology = {{{"all", kRanks}}};
  plan.buckets.resize(2);
  for (PlanBucket& bucket : plan.buckets) {
    bucket.option = Option::parse("encode@cpu all_gather@all decode@cpu", plan.topology).value();
    bucket.codec = codec;
  }
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    plan.buckets[t < tensors.size() / 2 ? 0 : 1].tensors.push_back(tensors[t].name);
  }
  return plan;
}

void measure(const std::string& spec, int steps) {
  const std::vector<EngineTensor> tensors = gpt_tensors();
  const bool has_plan = spec.starts_with(kPlanOf);
  LocalGroup group(kRanks);
  std::vector<RankOfBench> ranks(kRanks);
  std::vector<std::thread> makers;
  for (int r = 0; r < kRanks; ++r) {
    makers.emplace_back([&, r] {
      ranks[r].engine =
          has_plan ? Engine::create(tensors, plan_of(spec.c_str() + std::strlen(kPlanOf), tensors), EngineOptions{},
                                    group.communicator(r))
                         .value()
                   : Engine::create(tensors, EngineOptions::parse(spec).value(), group.communicator(r)).value();
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        std::vector<float>& values =
            ranks[r].gradients.emplace_back(static_cast<std::size_t>(tensors[t].rows * tensors[t].cols));
        philox_fill_normal(1, static_cast<std::uint64_t>(r), t, values.data(),
                           static_cast<std::int64_t>(values.size()));
      }
    });
  }
  for (std::thread& maker : makers) maker.join();
  std::vector<double> seconds[2];
  std::size_t events = 0;
  for (int step = 0; step < steps; ++step) {
    const bool traced = step % 2 == 1;
    for (RankOfBench& rank : ranks) {
      rank.recorder.clear();
      rank.engine->set_trace(traced ? &rank.recorder : nullptr);
    }
    const std::clock_t begin = std::clock();
    bool ok = true;
    for (RankOfBench& rank : ranks) ok = ok && rank.engine->begin_step({}).ok();
    for (std::uint32_t t = static_cast<std::uint32_t>(tensors.size()); t-- > 0;) {
      for (RankOfBench& rank : ranks) {
        const Gradient gradient{t, rank.gradients[t].data()};
        ok = ok && rank.engine->submit({&gradient, 1}).ok();
      }
    }
    for (RankOfBench& rank : ranks) ok = ok && rank.engine->finish_step().ok();
    if (!ok) std::abort();
    if (step >= 10) seconds[traced].push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / kRanks);
    if (traced) events = ranks[0].recorder.events().size();
  }
  const double without = median(seconds[0]), with = median(seconds[1]);
  std::printf("| `%s` | %zu | %.3f | %.3f | %+.2f %% |\n", spec.c_str(), events, without * 1e3, with * 1e3,
              100 * (with / without - 1));
}

// The recorder alone: what an event costs when nothing else is to be seen.
void measure_recorder() {
  constexpr int kEvents = 100'000;
  TraceRecorder recorder(kEvents);
  std::vector<double> seconds;
  for (int round = 0; round < 21; ++round) {
    recorder.clear();
    const std::clock_t begin = std::clock();
    for (int i = 0; i < kEvents; ++i) recorder.record({Stage::kEncode, 0, i, round, i, i + 1, 64});
    seconds.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  std::printf("\none event: %.1f ns\n", median(seconds) / kEvents * 1e9);
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  int steps = 410;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--benchmark_min_time", 20) == 0) steps = 14;
  }
  std::printf("| codec | events a step and rank | ms a step and rank | traced | overhead |\n|---|---|---|---|---|\n");
  for (const char* spec : cortado::kSpecs) cortado::measure(spec, steps);
  cortado::measure_recorder();
  return 0;
}

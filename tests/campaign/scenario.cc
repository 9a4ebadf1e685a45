// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "tests/campaign/scenario.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>

#include "collective/virtual_clock.h"
#include "core/check.h"
#include "core/float16.h"
#include "cortado/planner.h"
#include "tests/campaign/watched_communicator.h"

namespace cortado {

namespace {

constexpr std::int64_t kSecond_ns = 1'000'000'000;
constexpr double kTimeout_s = 30;

// splitmix64: the same numbers on every platform.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <typename T>
  const T& any(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(static_cast<int>(list.size())))];
  }

 private:
  std::uint64_t state_;
};

const std::vector<std::string>& specs() {
  static const std::vector<std::string> list = {
      "none",
      "cast(bf16)",
      "cast(fp16)",
      "acp(rank=2)",
      "acp(rank=3, wire=bf16)",
      "acp(rank=2, sides=alternate)",
      "acp(rank=1, phase=global)",
      "power(rank=2)",
      "power(rank=1, wire=fp16)",
      "sign(scale=mean_abs)",
      "sign(scale=two_means)",
      "sign(vote=majority)",
      "topk(density=0.1)",
      "topk(density=0.2, feedback=dgc)",
      "topk(density=1)",
      "randk(density=0.2)",
      "quant(bits=4)",
      "quant(bits=3, round=stochastic)",
      "quant(error=0.1, coder=rans)",
      "fp8(e4m3)",
      "float_rans",
      "compso(bound=4e-3)",
      "topk(density=0.2) | quant(bits=4) | rans",
      "topk(density=0.2) | float_rans",
      "topk(density=0.1) | sign(scale=mean_abs)",
  };
  return list;
}

EngineTensor make_tensor(Dice& dice, int number) {
  EngineTensor tensor{.name = "layer" + std::to_string(number) + (dice.one_in(2) ? ".weight" : ".conv")};
  const int large = dice.one_in(6) ? 64 : 20;
  tensor.rows = 1 + dice.below(large);
  tensor.cols = 1 + dice.below(large);
  if (dice.one_in(4)) {
    tensor.name = "layer" + std::to_string(number) + ".bias";
    tensor.rows = 1;
    tensor.dimensions = 1;
  }
  if (dice.one_in(12)) tensor.rows = 0;
  if (dice.one_in(5)) tensor.dtype = dice.one_in(2) ? DType::kFloat16 : DType::kBFloat16;
  tensor.is_embedding = dice.one_in(10);
  return tensor;
}

EngineOptions make_options(Dice& dice) {
  using Method = EngineOptions::Method;
  EngineOptions options = EngineOptions::parse(dice.any(specs())).value();
  options.timeout_s = kTimeout_s;
  if (options.method == Method::kNone) return options;
  if (dice.one_in(2)) options.bucket_cap_mib = dice.one_in(2) ? 0 : 1e-3;
  if (dice.one_in(4)) options.threads = 2;
  if (options.method == Method::kCast) return options;
  options.start_step = dice.below(3);
  options.min_compression_rate = 0;
  if (options.method == Method::kCodec) options.min_elems = 0;
  if (dice.one_in(3)) options.rollback = EngineOptions::Rollback::kExact;
  options.random_seed = dice.next() % 1000;
  return options;
}

// The decision tree; with sums of payloads too for codecs that are linear.
const std::vector<Option>& all_options(bool sum_payloads = false) {
  static const std::vector<Option> tree = generate_options({}).value();
  static const std::vector<Option> more = generate_options({.sum_payloads = true}).value();
  return sum_payloads ? more : tree;
}

// After their sum, to ranks that do not take part in it: summed payloads, and where asked for plain values.
bool moves_without_check(const Option& option, bool plain_values_too) {
  bool is_summed = false;
  return std::any_of(option.operations.begin(), option.operations.end(), [&](const Operation& op) {
    if (op.kind == OpKind::kEncode || op.kind == OpKind::kDecode) is_summed = false;
    is_summed = is_summed || op.kind == OpKind::kReduceScatter || op.kind == OpKind::kReduce;
    return (op.encoded ? is_summed : plain_values_too) &&
           (op.kind == OpKind::kAllGather || op.kind == OpKind::kBroadcast);
  });
}

// Of low rank vectors go in sums of factors only.
bool takes_tensors(const PlanBucket& bucket, const Topology& topology, const std::vector<EngineTensor>& tensors) {
  if (!bucket.codec.starts_with("acp") && !bucket.codec.starts_with("power")) return true;
  if (bucket.option.encodes() == 0) return true;
  if (bucket.option == Option::parse("encode@cpu all_reduce@flat decode@cpu", topology).value()) return true;
  return std::all_of(bucket.tensors.begin(), bucket.tensors.end(), [&](const std::string& name) {
    const auto has_name = [&](const EngineTensor& tensor) { return tensor.name == name; };
    return std::find_if(tensors.begin(), tensors.end(), has_name)->dimensions > 1;
  });
}

// Buckets of one to three tensors, each with an option and a codec of its own.
Plan make_plan(Dice& dice, const std::vector<EngineTensor>& tensors, int machines) {
  static const std::vector<std::string> codecs = {
      "none",          "float_rans",         "cast(bf16)",           "acp(rank=2)",
      "power(rank=1)", "topk(density=0.1)",  "sign(scale=mean_abs)", "quant(bits=4)",
      "fp8(e4m3)",     "randk(density=0.2)", "compso(bound=4e-3)",   "topk(density=0.3) | quant(bits=8) | rans"};
  Plan plan{.job = "campaign",
            .cluster = "threads",
            .topology = {{{"intra", 2}, {"inter", machines}}},
            .buckets = {},
            .notes = {},
            .unknown = {}};
  for (std::size_t next = 0; next < tensors.size();) {
    PlanBucket& bucket = plan.buckets.emplace_back();
    const std::size_t end = std::min(tensors.size(), next + 1 + static_cast<std::size_t>(dice.below(3)));
    while (next < end) bucket.tensors.push_back(tensors[next++].name);
    bucket.codec = dice.any(codecs);
    do {
      bucket.option = dice.any(all_options(dice.one_in(2)));
    } while (!check_plan(plan).ok() || !takes_tensors(bucket, plan.topology, tensors));
    bucket.error_feedback = !dice.one_in(4);
  }
  return plan;
}

bool is_of_a_collective(Trouble trouble) {
  switch (trouble) {
    case Trouble::kShortDelay:
    case Trouble::kLongDelay:
    case Trouble::kDrop:
    case Trouble::kRefusal:
    case Trouble::kCorruption:
    case Trouble::kTruncation:
    case Trouble::kArrival:
      return true;
    default:
      return false;
  }
}

// ---- gradients -----------------------------------------------------------------------------------------------------

using Memory = std::vector<std::vector<std::byte>>;  // by tensor

void store(std::byte* to, DType dtype, std::size_t i, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to + 4 * i, &value, 4);
    return;
  }
  const std::uint16_t half = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  std::memcpy(to + 2 * i, &half, 2);
}

float load(const std::byte* from, DType dtype, std::size_t i) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, from + 4 * i, 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, from + 2 * i, 2);
  return dtype == DType::kFloat16 ? fp16_to_float(half) : bf16_to_float(half);
}

std::size_t elems_of(const EngineTensor& tensor) { return static_cast<std::size_t>(tensor.rows * tensor.cols); }

Memory make_gradients(const Scenario& scenario, int rank, int step) {
  Memory gradients;
  for (std::size_t t = 0; t < scenario.tensors.size(); ++t) {
    const EngineTensor& tensor = scenario.tensors[t];
    std::vector<std::byte>& memory = gradients.emplace_back(elems_of(tensor) * dtype_bytes(tensor.dtype));
    Dice dice(scenario.seed * 1000003 + static_cast<std::uint64_t>((rank * 100 + step) * 100) + t);
    if (dice.one_in(6)) continue;  // nobody used it here
    for (std::size_t i = 0; i < elems_of(tensor); ++i) {
      store(memory.data(), tensor.dtype, i, static_cast<float>(dice.below(20001) - 10000) * 1e-4f);
    }
  }
  if (step == scenario.non_finite_step && rank == (scenario.victim + 1) % scenario.world_size) {
    for (std::size_t t = 0; t < scenario.tensors.size(); ++t) {
      const EngineTensor& tensor = scenario.tensors[(t + scenario.seed) % scenario.tensors.size()];
      if (elems_of(tensor) == 0) continue;
      store(gradients[(t + scenario.seed) % scenario.tensors.size()].data(), tensor.dtype, elems_of(tensor) / 2,
            std::numeric_limits<float>::infinity());
      break;
    }
  }
  return gradients;
}

// ---- a rank --------------------------------------------------------------------------------------------------------

struct Run {
  const Scenario* scenario;
  Trouble trouble;
  std::uint64_t at = 0;  // of the collective or the call
  const std::vector<RankOutcome>* resume_from = nullptr;
};

class Rank {
 public:
  Rank(const Run& run, Communicator* communicator, VirtualClock* clock, RankOutcome* outcome)
      : run_(run),
        scenario_(*run.scenario),
        communicator_(communicator),
        clock_(clock),
        outcome_(outcome),
        is_victim_(communicator->rank() == scenario_.victim),
        dice_(scenario_.seed * 7919 + static_cast<std::uint64_t>(communicator->rank())) {}

  Status train() {
    Memory gradients, kept;  // outlive the engine, which may have them in flight
    int step = run_.resume_from != nullptr ? scenario_.saved_after : 0;
    const bool has_switched = scenario_.next_plan.has_value() && scenario_.switched_after < step;
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                             create(has_switched ? scenario_.next_plan : scenario_.plan));
    if (run_.resume_from != nullptr) {
      CORTADO_RETURN_IF_ERROR(load(*engine, (*run_.resume_from)[communicator_->rank()].saved));
    }
    for (; step < scenario_.steps; ++step) {
      if (scenario_.next_plan.has_value() && step == scenario_.switched_after) {
        CORTADO_RETURN_IF_ERROR(engine->switch_plan(*scenario_.next_plan));
      }
      gradients = make_gradients(scenario_, communicator_->rank(), step);
      kept = gradients;
      CORTADO_RETURN_IF_ERROR(take_step(*engine, gradients, kept));
      if (outcome_->left) return {};
      outcome_->delivered.push_back(gradients);
      if (step + 1 != scenario_.saved_after) continue;
      CORTADO_ASSIGN_OR_RETURN(outcome_->saved, engine->save_state());
      outcome_->has_saved = true;
      if (run_.trouble == Trouble::kOtherState) CORTADO_RETURN_IF_ERROR(load(*engine, outcome_->saved));
    }
    return {};
  }

 private:
  bool has(Trouble trouble) const { return is_victim_ && run_.trouble == trouble; }

  Result<std::unique_ptr<Engine>> create(std::optional<Plan> plan) {
    EngineOptions options = scenario_.options;
    std::vector<EngineTensor> tensors = scenario_.tensors;
    // What changes only speed may differ between ranks.
    options.overlap = !dice_.one_in(6);
    if (scenario_.options.method != EngineOptions::Method::kNone && dice_.one_in(6))
      options.threads = 3 - options.threads;
    if (has(Trouble::kOtherSettings)) {
      options.random_seed += 1;
      if (plan.has_value()) plan->buckets.back().error_feedback = !plan->buckets.back().error_feedback;
    }
    if (has(Trouble::kOtherModel)) {
      EngineTensor& changed = tensors[scenario_.at % tensors.size()];
      switch (scenario_.at / 100 % 4) {
        case 0:
          changed.rows += 1;
          break;
        case 1:
          changed.name += ".other";
          break;
        case 2:
          changed.dtype = changed.dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
          break;
        default:
          tensors.pop_back();
      }
    }
    if (plan.has_value()) return Engine::create(tensors, *plan, options, communicator_, clock_);
    return Engine::create(tensors, options, communicator_, clock_);
  }

  Status load(Engine& engine, EngineState state) {
    if (has(Trouble::kOtherState)) {
      switch (scenario_.at % 3) {
        case 0:
          state.step += 1;
          break;
        case 1:
          state.spec = "another";
          break;
        default:
          state.rank += 1;
      }
    }
    return engine.load_state(state).status();
  }

  Status take_step(Engine& engine, Memory& gradients, const Memory& kept) {
    if (!before_call(engine)) return give_up();
    CORTADO_RETURN_IF_ERROR(engine.begin_step(scenario_.context));
    if (scenario_.options.method == EngineOptions::Method::kNone) {
      CORTADO_RETURN_IF_ERROR(submit_buffers(engine, gradients));
    } else {
      CORTADO_RETURN_IF_ERROR(submit_out_of_order(engine, gradients));
    }
    if (outcome_->left) return {};
    if (!before_call(engine)) return give_up();
    return engine.finish_step([&](std::uint32_t t) { return kept[t].data(); }).status();
  }

  Status submit_buffers(Engine& engine, Memory& gradients) {
    for (std::size_t t = 0; t < gradients.size(); ++t) {
      if (!before_call(engine)) return give_up();
      const EngineTensor& tensor = scenario_.tensors[t];
      void* data = gradients[t].data();
      const Gradient gradient{static_cast<std::uint32_t>(t), data};
      CORTADO_RETURN_IF_ERROR(engine.submit_buffer({&gradient, 1}, data, tensor.rows * tensor.cols, tensor.dtype));
    }
    return {};
  }

  Status submit_out_of_order(Engine& engine, Memory& gradients) {
    std::vector<std::uint32_t> order(gradients.size());
    std::iota(order.begin(), order.end(), 0u);
    for (std::size_t i = order.size(); i-- > 1;) {
      std::swap(order[i], order[static_cast<std::size_t>(dice_.below(static_cast<int>(i) + 1))]);
    }
    const bool is_here = outcome_->delivered.size() == run_.at % static_cast<std::uint64_t>(scenario_.steps);
    if (has(Trouble::kMissingTensor) && is_here) order.pop_back();
    if (has(Trouble::kTensorTwice) && is_here) order.push_back(order.front());
    std::vector<Gradient> bunch;
    for (std::size_t i = 0; i < order.size(); ++i) {
      bunch.push_back({order[i], gradients[order[i]].data()});
      if (i + 1 < order.size() && dice_.one_in(2)) continue;
      if (!before_call(engine)) return give_up();
      CORTADO_RETURN_IF_ERROR(engine.submit(bunch));
      bunch.clear();
    }
    return {};
  }

  // False: the rank goes no further.
  bool before_call(Engine& engine) {
    const bool is_now = static_cast<std::uint64_t>(outcome_->calls++) == run_.at && is_victim_;
    if (!is_now) return true;
    if (run_.trouble == Trouble::kShortStall || run_.trouble == Trouble::kLongStall) {
      clock_->sleep(std::chrono::nanoseconds(scenario_.pause_ns));
    }
    if (run_.trouble == Trouble::kAbandon) engine.abandon("enough of this");
    outcome_->left = run_.trouble == Trouble::kLeave;
    return !outcome_->left;
  }

  static Status give_up() { return {}; }

  const Run& run_;
  const Scenario& scenario_;
  Communicator* communicator_;
  VirtualClock* clock_;
  RankOutcome* outcome_;
  const bool is_victim_;
  Dice dice_;
};

std::vector<Fault> faults_of(const Run& run) {
  const auto at = static_cast<std::int64_t>(run.at);
  const std::chrono::nanoseconds delay(run.scenario->pause_ns);
  switch (run.trouble) {
    case Trouble::kShortDelay:
    case Trouble::kLongDelay:
      return {{.at = at, .kind = Fault::Kind::kDelay, .delay = delay}};
    case Trouble::kDrop:
      return {{.at = at, .kind = Fault::Kind::kDrop}};
    case Trouble::kRefusal:
      return {{.at = at, .kind = Fault::Kind::kError}};
    case Trouble::kCorruption:
      return {{.at = at, .kind = Fault::Kind::kCorrupt}};
    case Trouble::kTruncation:
      return {{.at = at, .kind = Fault::Kind::kTruncate}};
    default:
      return {};
  }
}

// A float32 sum's check sees twice its bound: for six ranks 0.01 of their largest value (sum_checks.h). A corrupted
// value changes by a quarter of itself or more, and the victim's may be smaller than those of the others.
constexpr double kSeenShare = 0.2;

std::vector<RankOutcome> run_all_ranks(const Run& run) {
  const int world_size = run.scenario->world_size;
  VirtualClock clock(world_size);
  LocalGroup group(world_size, &clock);
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      const bool is_victim = rank == run.scenario->victim;
      const bool checks = run.scenario->checks_collectives;
      WatchedCommunicator::Watch watch{.is_checked = checks};
      if (is_victim && run.trouble == Trouble::kArrival) {
        watch.damaged = static_cast<std::int64_t>(run.at);
        watch.bit = run.scenario->at;
        watch.damages_sums = run.scenario->damages_sums;
      }
      if (is_victim && is_of_a_collective(run.trouble)) watch.asked = static_cast<std::int64_t>(run.at);
      const std::vector<Fault> faults = is_victim ? faults_of(run) : std::vector<Fault>{};
      WatchedCommunicator watched(make_faulty_communicator(group.communicator(rank), faults, &clock), &watch);
      const auto checking = checks ? make_checking_communicator(&watched, &clock) : nullptr;
      Communicator* communicator = checks ? checking.get() : &watched;
      outcome.status = Rank(run, communicator, &clock, &outcome).train();
      if (!outcome.status.ok()) communicator->abandon(outcome.status.message());
      outcome.collectives = watch.starts;
      const bool corrupts = run.trouble == Trouble::kCorruption, truncates = run.trouble == Trouble::kTruncation;
      const double share = corrupts ? watch.corrupted_share : watch.truncated_share;
      outcome.may_be_unseen = (corrupts || truncates) && (checks ? share < kSeenShare : watch.asked_has_no_check);
      outcome.ended_ns = clock.now_ns();
      clock.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// ---- judgement -----------------------------------------------------------------------------------------------------

Judgement wrong(const std::string& text) { return {.verdict = Verdict::kWrong, .text = text}; }

// One of several, where nobody can know more: of those that did not come, or of those whose contributions were added.
bool names_rank(const std::string& text, int rank) {
  const std::string number = std::to_string(rank);
  for (const std::string& before :
       {std::string("rank "), std::string("ranks "), std::string("not started it: "), std::string(", ")}) {
    for (std::size_t at = text.find(before + number); at != std::string::npos;
         at = text.find(before + number, at + 1)) {
      const std::size_t end = at + before.size() + number.size();
      if (end == text.size() || !std::isdigit(static_cast<unsigned char>(text[end]))) return true;
    }
  }
  return false;
}

bool names_tensor(const Scenario& scenario, const std::string& text) {
  return std::any_of(scenario.tensors.begin(), scenario.tensors.end(),
                     [&](const EngineTensor& tensor) { return text.find(tensor.name) != std::string::npos; });
}

// Errors within a step say which, which tensor (of a message its first), and what was being done to it. Others say what
// did not fit, and of a model which tensor; settings, numbers of tensors and states have none.
bool names_place(const Scenario& scenario, const std::string& text, bool in_step) {
  const auto has = [&](const char* word) { return text.find(word) != std::string::npos; };
  if (has("load_state") || has("state to load")) return true;
  if (has("switch_plan before step ")) return true;
  if (has("differs in name, shape or dtype")) return names_tensor(scenario, text);
  if (!in_step) {
    return has("comparing settings") || has("comparing models") || has("different settings") || has("different models");
  }
  const bool names_stage = text.starts_with("submit: ") ||  // the caller's own mistake, in the call it was told of
                           (has("step ") && (has(": communicate: ") || has(": operation ") || has("encode of \"") ||
                                             has(": decode of \"") || has("finish_step: ") || has("abandoned step ")));
  return names_stage && names_tensor(scenario, text);
}

std::string bits_that_differ(const Scenario& scenario, const RankOutcome& got, const RankOutcome& expected,
                             std::size_t first_step, int skipped_step = -1) {
  for (std::size_t step = 0; step < got.delivered.size(); ++step) {
    if (static_cast<int>(first_step + step) == skipped_step) continue;
    for (std::size_t t = 0; t < scenario.tensors.size(); ++t) {
      if (got.delivered[step][t] == expected.delivered[first_step + step][t]) continue;
      return "step " + std::to_string(first_step + step) + ", " + scenario.tensors[t].name;
    }
  }
  return "";
}

bool is_lossless(const Scenario& scenario) {
  if (scenario.plan.has_value()) return false;
  const std::string spec = scenario.options.to_spec();
  return spec.starts_with("none") || spec.starts_with("float_rans") || spec.starts_with("topk(density=1,") ||
         spec.starts_with("topk(density=1)");
}

// Replicas agree, and where nothing is lost the mean is delivered.
std::string faults_of_reference(const Scenario& scenario, const std::vector<RankOutcome>& ranks) {
  for (const RankOutcome& rank : ranks) {
    if (!rank.status.ok()) return "without trouble: " + rank.status.to_string();
    const std::string differs = bits_that_differ(scenario, rank, ranks[0], 0);
    if (!differs.empty()) return "without trouble replicas differ in " + differs;
  }
  for (int step = 0; step < scenario.steps; ++step) {
    const bool is_dense = is_lossless(scenario) || (!scenario.plan.has_value() && step < scenario.options.start_step);
    if (!is_dense || scenario.options.method == EngineOptions::Method::kCast || scenario.non_finite_step >= 0) continue;
    std::vector<Memory> sent;
    for (int rank = 0; rank < scenario.world_size; ++rank) sent.push_back(make_gradients(scenario, rank, step));
    for (std::size_t t = 0; t < scenario.tensors.size(); ++t) {
      const DType dtype = scenario.tensors[t].dtype;
      for (std::size_t i = 0; i < elems_of(scenario.tensors[t]); ++i) {
        double mean = 0;
        for (const Memory& gradients : sent) mean += cortado::load(gradients[t].data(), dtype, i);
        mean /= scenario.world_size;
        const double got = cortado::load(ranks[0].delivered[static_cast<std::size_t>(step)][t].data(), dtype, i);
        if (std::abs(got - mean) > (dtype == DType::kFloat32 ? 1e-6 : 2e-2)) {
          return "without trouble step " + std::to_string(step) + " delivers " + std::to_string(got) + " of " +
                 scenario.tensors[t].name + ", the mean is " + std::to_string(mean);
        }
      }
    }
  }
  return "";
}

std::string faults_of_error(const Scenario& scenario, const RankOutcome& outcome, int rank) {
  const std::string text = outcome.status.message();
  const std::string place = "rank " + std::to_string(rank) + ": \"" + text + "\"";
  if (rank != scenario.victim && !names_rank(text, scenario.victim)) return place + " does not name the rank";
  if (!names_place(scenario, text, outcome.calls > 0)) return place + " does not name tensor and stage";
  const bool may_be_late = rank == scenario.victim && scenario.trouble == Trouble::kLongStall;
  const std::int64_t limit_ns = static_cast<std::int64_t>(kTimeout_s) * kSecond_ns + 2 * kSecond_ns;
  if (!may_be_late && outcome.ended_ns > limit_ns) {
    return place + " came after " + std::to_string(outcome.ended_ns / kSecond_ns) + " s";
  }
  return "";
}

std::string restart(const Scenario& scenario, const std::vector<RankOutcome>& saved,
                    const std::vector<RankOutcome>& reference) {
  const std::vector<RankOutcome> resumed =
      run_all_ranks({.scenario = &scenario, .trouble = Trouble::kNone, .resume_from = &saved});
  for (const RankOutcome& rank : resumed) {
    if (!rank.status.ok()) return "after the restart: " + rank.status.to_string();
    const std::string differs =
        bits_that_differ(scenario, rank, reference[0], static_cast<std::size_t>(scenario.saved_after));
    if (!differs.empty()) return "after the restart another result in " + differs;
  }
  return "";
}

}  // namespace

const char* trouble_name(Trouble trouble) {
  constexpr const char* kNames[kTroubleCount] = {
      "none",           "short delay", "long delay",     "short stall",     "long stall", "drop",
      "refusal",        "corruption",  "truncation",     "damaged arrival", "abandon",    "leave",
      "other settings", "other model", "missing tensor", "tensor twice",    "other state"};
  return kNames[static_cast<int>(trouble)];
}

Scenario make_scenario(std::uint64_t seed) {
  Dice dice(seed);
  Scenario scenario;
  scenario.seed = seed;
  scenario.world_size = 2 + (dice.one_in(3) ? 1 + dice.below(3) : 0);
  scenario.options = make_options(dice);
  const int tensors = 1 + dice.below(7);
  for (int t = 0; t < tensors; ++t) scenario.tensors.push_back(make_tensor(dice, t));
  if (dice.one_in(4)) {
    const int machines = dice.one_in(4) ? 3 : 2;
    scenario.world_size = 2 * machines;
    scenario.options = {};
    scenario.options.timeout_s = kTimeout_s;
    scenario.plan = make_plan(dice, scenario.tensors, machines);
  }
  scenario.steps = 2 + dice.below(4);
  scenario.context.keeps_local_gradients = dice.one_in(2);
  scenario.context.holds_zero_gradients = dice.one_in(2);
  if (dice.one_in(4)) scenario.non_finite_step = dice.below(scenario.steps);
  scenario.saved_after = 1 + dice.below(scenario.steps - 1);
  if (scenario.plan.has_value() && dice.one_in(2)) {
    scenario.next_plan = make_plan(dice, scenario.tensors, scenario.world_size / 2);
    scenario.switched_after = 1 + dice.below(scenario.steps - 1);
  }
  scenario.trouble = static_cast<Trouble>(dice.below(kTroubleCount));
  scenario.checks_collectives = dice.one_in(3);
  const bool is_arrival = scenario.trouble == Trouble::kArrival;  // spares plain values (WatchedCommunicator)
  const bool damages =
      scenario.trouble == Trouble::kCorruption || scenario.trouble == Trouble::kTruncation || is_arrival;
  for (std::optional<Plan>* plan : {&scenario.plan, &scenario.next_plan}) {
    if (!plan->has_value() || !damages || scenario.checks_collectives) continue;  // only check_replicas() can see it
    for (PlanBucket& bucket : (*plan)->buckets) {
      while (moves_without_check(bucket.option, !is_arrival)) bucket.option = dice.any(all_options());
    }
  }
  scenario.victim = dice.below(scenario.world_size);
  scenario.at = dice.next();
  const bool is_short = scenario.trouble == Trouble::kShortDelay || scenario.trouble == Trouble::kShortStall;
  scenario.pause_ns = static_cast<std::int64_t>(1 + dice.below(20'000)) * 1'000'000 + (is_short ? 0 : 40 * kSecond_ns);
  return scenario;
}

std::string describe(const Scenario& scenario) {
  const std::string what = scenario.plan.has_value() ? plan_to_json(*scenario.plan) : scenario.options.to_spec();
  std::string text = "seed " + std::to_string(scenario.seed) + ": " + what + ", " +
                     std::to_string(scenario.world_size) + " ranks, " + std::to_string(scenario.steps) + " steps, " +
                     std::to_string(scenario.tensors.size()) + " tensors; " + trouble_name(scenario.trouble) +
                     " on rank " + std::to_string(scenario.victim) + (scenario.checks_collectives ? ", checked" : "");
  return text;
}

Judgement judge(const Scenario& scenario) {
  const std::vector<RankOutcome> reference = run_all_ranks({.scenario = &scenario, .trouble = Trouble::kNone});
  if (std::string fault = faults_of_reference(scenario, reference); !fault.empty()) return wrong(fault);

  Run run{.scenario = &scenario, .trouble = scenario.trouble};
  const RankOutcome& victim = reference[static_cast<std::size_t>(scenario.victim)];
  const std::int64_t points = is_of_a_collective(scenario.trouble) ? victim.collectives : victim.calls;
  run.at = scenario.at % static_cast<std::uint64_t>(std::max<std::int64_t>(1, points));
  const std::vector<RankOutcome> ranks = run_all_ranks(run);

  // A contribution to a sum can't be told from another one once it is in the sum.
  const bool may_end_alike = ranks[static_cast<std::size_t>(scenario.victim)].may_be_unseen;
  // Sums with an Inf in them have no check, and their step is undone.
  const bool is_checked_sum = scenario.checks_collectives && scenario.trouble == Trouble::kCorruption;
  const int unchecked_step = is_checked_sum ? scenario.non_finite_step : -1;
  Judgement judgement;
  bool all_have_saved = true;
  std::string differs;
  for (int r = 0; r < scenario.world_size; ++r) {
    const RankOutcome& rank = ranks[static_cast<std::size_t>(r)];
    all_have_saved = all_have_saved && rank.has_saved;
    if (rank.left) {
      judgement.verdict = Verdict::kError;
      continue;
    }
    if (!rank.status.ok()) {
      const std::string fault = faults_of_error(scenario, rank, r);
      if (!fault.empty()) return wrong(fault);
      if (judgement.text.empty()) judgement.text = rank.status.message();
      judgement.verdict = Verdict::kError;
    } else if (rank.delivered.size() != static_cast<std::size_t>(scenario.steps)) {
      return wrong("rank " + std::to_string(r) + " ended early and without an error");
    }
    const std::string here = bits_that_differ(scenario, rank, reference[0], 0, unchecked_step);
    if (!here.empty()) differs = "rank " + std::to_string(r) + ": another result in " + here;
  }
  if (!differs.empty()) {
    if (!may_end_alike) return wrong(differs);
    // Up to where each came, all have the same.
    for (const RankOutcome& rank : ranks) {
      const bool is_longer = rank.delivered.size() > ranks[0].delivered.size();
      const std::string apart = bits_that_differ(scenario, is_longer ? ranks[0] : rank, is_longer ? rank : ranks[0], 0);
      if (!apart.empty()) return wrong("replicas have come apart in " + apart);
    }
    judgement.verdict = Verdict::kAlike;
    return judgement;
  }
  if (judgement.verdict == Verdict::kError && all_have_saved && !may_end_alike) {
    const std::string fault = restart(scenario, ranks, reference);
    if (!fault.empty()) return wrong(fault);
    judgement.restarted = true;
  }
  return judgement;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The fault campaign: scenarios by seed (scenario.h), each of which must end in the right result on every rank or in an
// error on every rank.
//
//   CORTADO_FAULT_SCENARIOS=10000   how many; tools/ci/faults runs that many
//   CORTADO_FAULT_SEED=17           the first seed; with one scenario, to see a failure again
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "collective/agreement.h"
#include "collective/rank_threads.h"
#include "tests/campaign/scenario.h"
#include "tests/campaign/watched_communicator.h"

namespace cortado {
namespace {

constexpr int kScenarios = 320;  // where nobody asks for more

std::uint64_t environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Ends the program with the scenario's seed if one takes longer than any can: a hang is a failure with a name.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      seed_ = 0;
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void begin(std::uint64_t seed) {
    const std::lock_guard lock(mutex_);
    seed_ = seed;
    changed_.notify_all();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!done_) {
      const std::uint64_t seed = seed_;
      const bool moved = changed_.wait_for(lock, std::chrono::seconds(120), [&] { return seed_ != seed || done_; });
      if (moved) continue;
      std::fprintf(stderr, "hung: %s\n", describe(make_scenario(seed)).c_str());
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t seed_ = 0;
  bool done_ = false;
  std::thread thread_;
};

struct Tally {
  int scenarios = 0, correct = 0, errors = 0, restarted = 0, alike = 0;
};

using Kind = std::pair<Trouble, bool>;  // and whether collectives are checked

void print(const std::map<Kind, Tally>& tallies) {
  std::printf("| trouble | scenarios | correct everywhere | an error everywhere | of these restarted | alike |\n");
  std::printf("|---|---|---|---|---|---|\n");
  Tally all;
  const auto row = [](const std::string& name, const Tally& t) {
    std::printf("| %s | %d | %d | %d | %d | %d |\n", name.c_str(), t.scenarios, t.correct, t.errors, t.restarted,
                t.alike);
  };
  for (const auto& [kind, tally] : tallies) {
    row(std::string(trouble_name(kind.first)) + (kind.second ? ", checked" : ""), tally);
    all.scenarios += tally.scenarios;
    all.correct += tally.correct;
    all.errors += tally.errors;
    all.restarted += tally.restarted;
    all.alike += tally.alike;
  }
  row("all", all);
}

TEST(EngineCampaign, EveryScenarioEndsWellOrInAnErrorOnEveryRank) {
  const std::uint64_t count = environment("CORTADO_FAULT_SCENARIOS", kScenarios);
  const std::uint64_t first = environment("CORTADO_FAULT_SEED", 1);
  std::map<Kind, Tally> tallies;
  Watchdog watchdog;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    watchdog.begin(seed);
    const Scenario scenario = make_scenario(seed);
    const Judgement judgement = judge(scenario);
    Tally& tally = tallies[{scenario.trouble, scenario.checks_collectives}];
    ++tally.scenarios;
    tally.correct += judgement.verdict == Verdict::kCorrect;
    tally.errors += judgement.verdict == Verdict::kError;
    tally.restarted += judgement.restarted;
    tally.alike += judgement.verdict == Verdict::kAlike;
    if (judgement.verdict == Verdict::kWrong) ADD_FAILURE() << describe(scenario) << "\n  " << judgement.text;
    if (count == 1) std::printf("%s\n  %s\n", describe(scenario).c_str(), judgement.text.c_str());
  }
  if (count > 1) print(tallies);
  if (count < kScenarios) return;
  for (int t = 0; t < kTroubleCount; ++t) {
    const auto trouble = static_cast<Trouble>(t);
    const bool is_harmless =
        trouble == Trouble::kNone || trouble == Trouble::kShortDelay || trouble == Trouble::kShortStall;
    for (const bool checked : {false, true}) {
      const Tally& tally = tallies[{trouble, checked}];
      EXPECT_GT(tally.scenarios, 0) << trouble_name(trouble);
      EXPECT_EQ(tally.errors > 0, !is_harmless) << trouble_name(trouble) << (checked ? ", checked" : "");
    }
  }
}

// Sums that differ between ranks are what nobody notices in a step: then the judge must.
TEST(EngineCampaign, TheJudgeSeesReplicasThatComeApart) {
  Scenario scenario = make_scenario(1);
  scenario.options = EngineOptions::parse("none(timeout_s=30)").value();
  scenario.tensors = {{.name = "a", .rows = 10, .cols = 10}};
  scenario.world_size = 3;
  scenario.trouble = Trouble::kArrival;
  scenario.checks_collectives = false;
  scenario.victim = 1;
  scenario.steps = 3;
  scenario.saved_after = 1;
  scenario.non_finite_step = -1;
  scenario.at = 3;  // two gathers set up, then one sum a step
  EXPECT_EQ(judge(scenario).verdict, Verdict::kCorrect) << "sums are left alone";
  scenario.damages_sums = true;
  const Judgement judgement = judge(scenario);
  EXPECT_EQ(judgement.verdict, Verdict::kWrong);
  EXPECT_NE(judgement.text.find("rank 1: another result in step"), std::string::npos) << judgement.text;
}

// Wherever the bit was that was flipped: in the code of a failure, which there is none, too.
TEST(CheckAgreement, NamesTheRankWhoseSettingsWereDamagedOnTheirWay) {
  constexpr std::uint64_t kSummaryBits = 8 * 2032;
  for (std::uint64_t bit = kSummaryBits; bit < 2 * kSummaryBits; bit += 37) {
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      WatchedCommunicator::Watch watch{.damaged = communicator.rank() == 0 ? 0 : -1, .bit = bit};
      WatchedCommunicator watched(make_faulty_communicator(&communicator, {}), &watch);
      return check_agreement(&watched, "sign", {}, std::chrono::seconds(60));
    });
    ASSERT_EQ(statuses[0].to_string(), "corrupt data: comparing settings over all ranks: what rank 1 sent was damaged");
    EXPECT_TRUE(statuses[1].ok());
  }
}

}  // namespace
}  // namespace cortado

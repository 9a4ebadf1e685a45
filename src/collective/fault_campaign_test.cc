// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Random programs of collectives over random topologies, in which random things go wrong. Whatever it is: nothing
// hangs, no rank takes a wrong result for a right one, and every rank gets an error within its timeout. Time is
// virtual.
//
// CORTADO_FAULT_SCENARIOS=10000 runs more than everyday; a failure names its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/virtual_clock.h"
#include "core/check.h"
#include "core/sanitized.h"
#include "cortado/communicator.h"

namespace cortado::fault_campaign_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kTimeout(1000), kShort(50), kLong(3000);

// What happens to one rank.
enum class Trouble {
  kNone,
  kShortDelay,  // shorter than the timeout: nobody may notice
  kLongDelay,
  kDrop,
  kRefused,
  kCorrupt,
  kStall,      // it is busy for longer than the timeout
  kAbandon,    // it gives up and says so
  kVanish,     // it ends and says nothing
  kOtherSize,  // it starts something else than the others
  kOtherKind,
  kCount,
};

struct Step {
  LevelRange range;
  CollectiveKind kind;
  DType dtype;
  std::uint32_t root;  // modulo the size of the group
  std::int64_t elems;
  std::uint32_t varying;  // 0: equal blocks, otherwise what the counts are made from
  bool in_place;
};

class Scenario {
 public:
  explicit Scenario(std::uint64_t seed) : random_(seed) {
    const std::vector<Topology> topologies{{{{"all", 2}}},
                                           {{{"all", 3}}},
                                           {{{"intra", 2}, {"inter", 2}}},
                                           {{{"intra", 2}, {"inter", 3}}},
                                           {{{"socket", 2}, {"machine", 1}, {"rack", 2}}}};
    topology_ = topologies[below(topologies.size())];
    victim_ = static_cast<int>(below(static_cast<std::uint32_t>(topology_.world_size())));
    trouble_ = static_cast<Trouble>(below(static_cast<std::uint32_t>(Trouble::kCount)));
    most_in_flight_ = 1 + below(6);
    const std::uint32_t steps = 3 + below(12);
    for (std::uint32_t i = 0; i < steps; ++i) steps_.push_back(random_step());
    // The last one is among all ranks, so that no rank can miss what went wrong before.
    steps_.push_back({{0, levels() - 1}, CollectiveKind::kAllReduce, DType::kFloat32, 0, 10, 0, true});
    at_ = below(static_cast<std::uint32_t>(steps_.size()));
    own_.resize(static_cast<std::size_t>(topology_.world_size()));
  }

  // What is wrong with how the ranks ended; empty if nothing is.
  std::string run() {
    const int ranks = topology_.world_size();
    VirtualClock clock(ranks);
    LocalGroup group(ranks, &clock);
    std::vector<Status> ended(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        ended[static_cast<std::size_t>(rank)] = run_rank(*group.communicator(rank), clock);
        clock.leave();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string wrong = judge(rank, ended[static_cast<std::size_t>(rank)]);
      if (!wrong.empty()) return describe() + ": " + wrong;
    }
    return "";
  }

 private:
  std::uint32_t below(std::size_t end) { return static_cast<std::uint32_t>(random_() % end); }
  int levels() const { return static_cast<int>(topology_.levels.size()); }

  Step random_step() {
    Step step{};
    step.range.first = static_cast<int>(below(topology_.levels.size()));
    step.range.last = step.range.first + static_cast<int>(below(topology_.levels.size() - step.range.first));
    step.kind = kEveryKind[below(std::size(kEveryKind))];
    step.dtype = static_cast<DType>(below(4));
    step.root = below(64);
    step.elems = below(3) == 0 ? 0 : below(200);
    step.varying = below(2) == 0 ? 0 : 1 + below(1000);
    step.in_place = below(2) == 0;
    return step;
  }

  std::unique_ptr<CheckedCollective> make(Step step, const Communicator& group, bool wrong) const {
    const int size = group.world_size();
    if (wrong && trouble_ == Trouble::kOtherSize) ++step.elems, step.varying = 0;
    if (wrong && trouble_ == Trouble::kOtherKind) {
      step.kind = step.kind == CollectiveKind::kReduce ? CollectiveKind::kBroadcast : CollectiveKind::kReduce;
    }
    const bool one_block = step.kind == CollectiveKind::kAllReduce || step.kind == CollectiveKind::kBroadcast ||
                           step.kind == CollectiveKind::kReduce;
    const bool has_place = step.kind != CollectiveKind::kReduceScatter && step.kind != CollectiveKind::kAllToAll;
    std::vector<std::vector<std::int64_t>> counts;
    for (int from = 0; step.varying != 0 && !one_block && from < size; ++from) {
      auto& row = counts.emplace_back();
      for (int to = 0; to < size; ++to) row.push_back((step.varying * (from + 1) + 7 * to) % 61);
    }
    return std::make_unique<CheckedCollective>(step.kind, step.dtype, static_cast<int>(step.root) % size, step.elems,
                                               counts, step.in_place && has_place, group.rank(), size);
  }

  std::vector<Fault> faults() const {
    switch (trouble_) {
      case Trouble::kShortDelay:
        return {{.at = at_, .kind = Fault::Kind::kDelay, .delay = kShort}};
      case Trouble::kLongDelay:
        return {{.at = at_, .kind = Fault::Kind::kDelay, .delay = kLong}};
      case Trouble::kDrop:
        return {{.at = at_, .kind = Fault::Kind::kDrop}};
      case Trouble::kRefused:
        return {{.at = at_, .kind = Fault::Kind::kError}};
      case Trouble::kCorrupt:
        return {{.at = at_, .kind = Fault::Kind::kCorrupt}};
      default:
        return {};
    }
  }

  Status run_rank(Communicator& local, VirtualClock& clock) {
    const bool is_victim = local.rank() == victim_;
    const auto whole = make_faulty_communicator(&local, is_victim ? faults() : std::vector<Fault>(), &clock);
    CORTADO_ASSIGN_OR_RETURN(const LevelCommunicators communicators,
                             LevelCommunicators::create(whole.get(), topology_));
    Status status = run_steps(communicators, is_victim, clock);
    // An error of its own ends the group, as the engine does it. Who has vanished says nothing.
    if (!status.ok() && status.message() != kVanished) whole->abandon(status.message());
    return status;
  }

  Status run_steps(const LevelCommunicators& communicators, bool is_victim, VirtualClock& clock) {
    struct InFlight {
      Communicator* group;
      WorkId work;
      const CheckedCollective* collective;
    };
    const auto whole = communicators.of({0, levels() - 1});
    std::deque<InFlight> in_flight;
    const auto land = [&]() -> Status {
      const InFlight first = in_flight.front();
      in_flight.pop_front();
      const std::int64_t begin_ns = clock.now_ns();
      const Status status = first.group->wait(first.work, kTimeout);
      if (clock.now_ns() - begin_ns > nanoseconds(kTimeout).count()) {
        return make_error(StatusCode::kInternal, "waited for longer than the timeout");
      }
      CORTADO_RETURN_IF_ERROR(status);
      return first.collective->check();
    };
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const bool here = is_victim && i == at_;
      if (here && trouble_ == Trouble::kStall) clock.sleep(kLong);
      if (here && trouble_ == Trouble::kAbandon) return make_error(StatusCode::kInternal, "out of memory");
      if (here && trouble_ == Trouble::kVanish) return make_error(StatusCode::kInternal, "%s", kVanished);
      Communicator* group = communicators.of(steps_[i].range);
      // The buffers outlive the thread: who vanishes leaves them to the others.
      auto& own = own_[static_cast<std::size_t>(whole->rank())];
      own.push_back(make(steps_[i], *group, here));
      CORTADO_ASSIGN_OR_RETURN(const WorkId work, group->start(own.back()->call()));
      in_flight.push_back({group, work, own.back().get()});
      if (in_flight.size() >= most_in_flight_) CORTADO_RETURN_IF_ERROR(land());
    }
    while (!in_flight.empty()) CORTADO_RETURN_IF_ERROR(land());
    return Status();
  }

  // What is wrong with how `rank` ended; empty if nothing is.
  std::string judge(int rank, const Status& status) const {
    const std::string at = "rank " + std::to_string(rank) + " ended with " + status.to_string();
    const bool own_error = rank == victim_ && status.code() == StatusCode::kInternal &&
                           (trouble_ == Trouble::kAbandon || trouble_ == Trouble::kVanish);
    if (own_error) return "";
    if (trouble_ == Trouble::kNone || trouble_ == Trouble::kShortDelay) return status.ok() ? "" : at;
    if (trouble_ == Trouble::kCorrupt) {  // a wrong value that is found, or none where nothing travelled
      const bool found = status.message().find("wrong result") != std::string::npos ||
                         status.message().find("has changed") != std::string::npos;
      return status.ok() || found ? "" : at;
    }
    if (status.ok()) {
      // A mismatch within a group of one rank is none; a rank that learns late of a result has told the others its
      // part.
      const bool alone = topology_.group_size(steps_[at_].range) == 1;
      const bool may_be_ok = trouble_ == Trouble::kOtherSize || trouble_ == Trouble::kOtherKind
                                 ? alone
                                 : trouble_ == Trouble::kLongDelay && rank != victim_;
      return may_be_ok ? "" : at + ", expected an error";
    }
    const bool is_outside = status.code() == StatusCode::kTimeout || status.code() == StatusCode::kPeerFailed ||
                            status.code() == StatusCode::kMismatch;
    if (!is_outside) return at;
    return status.message().find("rank ") == std::string::npos ? at + ", which names no rank" : "";
  }

  std::string describe() const {
    std::string text = "trouble " + std::to_string(static_cast<int>(trouble_)) + " of rank " + std::to_string(victim_) +
                       " at step " + std::to_string(at_) + " of";
    for (const Step& step : steps_) {
      text += " " + std::string(collective_kind_name(step.kind)) + "@" + topology_.range_name(step.range);
    }
    return text;
  }

  static constexpr const char* kVanished = "vanished";

  std::mt19937_64 random_;
  Topology topology_;
  int victim_ = 0;
  Trouble trouble_ = Trouble::kNone;
  std::uint32_t at_ = 0;
  std::size_t most_in_flight_ = 1;
  std::vector<Step> steps_;
  std::vector<std::vector<std::unique_ptr<CheckedCollective>>> own_;  // of each rank
};

TEST(FaultCampaign, NothingHangsAndNothingIsSilentlyWrong) {
  const char* asked = std::getenv("CORTADO_FAULT_SCENARIOS");
  const std::uint64_t scenarios = asked == nullptr ? (kSanitized ? 500 : 2000) : std::strtoull(asked, nullptr, 10);
  for (std::uint64_t seed = 0; seed < scenarios; ++seed) {
    const std::string wrong = Scenario(seed).run();
    ASSERT_EQ(wrong, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace cortado::fault_campaign_test

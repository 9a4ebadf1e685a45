// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a search works on: tensors in the order in which they become ready, and for every bucket of neighbours the ways
// it can go. Built once for a job, a cluster and constraints; finds the ways of a bucket when they are asked for and
// remembers them. One thread at a time.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cortado/job.h"
#include "cortado/planner.h"
#include "planner/cost/option_cost.h"
#include "planner/search/pricing.h"
#include "planner/simulate/simulator.h"

namespace cortado {

// An option, and the codec of its encodes.
struct Candidate {
  int codec = -1;  // index into Problem::codecs(); -1: it does not encode
  Option option;

  bool operator==(const Candidate&) const = default;
};

// A candidate for one bucket.
struct Way {
  int candidate = 0;
  bool is_encoded = false;
  struct Chain : ChainCosts {
    std::span<const Step> steps;  // as long as the problem
  };
  Chain chain;
  std::int64_t lossy_elems = 0;  // elements times lossy passes: what ties are broken by
  double squared_error = 0;      // expected share of the job's squared gradient norm that is lost, by measured errors
};

// Tensors first .. last in one message, and how it goes.
struct Placed {
  int first = 0, last = 0;
  const Way* way = nullptr;

  bool operator==(const Placed&) const = default;
};

class Problem {
 public:
  // Fails if the constraints are wrong, a codec is unknown or there are too many levels. `spared`: codecs that stay,
  // though another one is never slower.
  static Result<std::unique_ptr<Problem>> make(const Job& job, const Cluster& cluster,
                                               const PlannerConstraints& constraints,
                                               std::span<const std::string> spared = {});

  int tensors() const { return static_cast<int>(ready_ns_.size()); }
  std::int64_t ready_ns(int tensor) const { return ready_ns_[tensor]; }
  BucketShape shape(int first, int last) const {
    return {elems(first, last), dtypes_[first], sums_.get(), first, last};
  }
  // One tensor of so many elements, as options are priced with: of low-rank codecs with the payload of a typical
  // tensor, or of the tensor that shrinks most.
  BucketShape typical_shape(int codec, std::int64_t elems, DType dtype, bool smallest_payload = false) const;
  std::int64_t bytes(int first, int last) const { return bytes_before_[last + 1] - bytes_before_[first]; }
  std::int64_t elems(int first, int last) const { return elems_before_[last + 1] - elems_before_[first]; }
  // Whether the tensors are of one dtype.
  bool may_fuse(int first, int last) const { return dtype_run_[first] == dtype_run_[last]; }

  // Ways worth considering: those that no other one beats on every resource. What is not encoded is beaten by its like
  // only: there is at least one, and those come first.
  std::span<const Way* const> ways(int first, int last);
  // Those of them that are not encoded, which are found much sooner.
  std::span<const Way* const> plain_ways(int first, int last);

  // Whether a takes no more of anything than b, and is not encoded where b is not.
  bool beats(const Way& a, const Way& b) const;

  // The way of a candidate that need not be among them, always the same; nullptr if it can't be done or is not allowed.
  const Way* way_of(int first, int last, int candidate);
  int add_candidate(const Candidate& candidate);

  const std::vector<Candidate>& candidates() const { return candidates_; }
  const std::vector<CodecCost>& codecs() const { return codecs_; }
  const CostModel& model() const { return model_; }
  const SimulatedJob& simulated() const { return simulated_; }
  const PlannerConstraints& constraints() const { return constraints_; }
  int levels() const { return levels_; }
  OptionSpace space_of(int codec) const;
  // The options of that space that encode if a codec is given, and sums of factors of a codec whose payloads are summed
  // nowhere else.
  std::vector<Option> options_of(int codec) const;
  std::vector<Option> sums_of_factors(int codec) const;
  int max_encodes(int codec) const;  // of one option, by the limit of lossy passes; -1: of none
  Pricer& pricer(int codec);         // -1: options that do not encode

  // The problem to find lower bounds of: this one, or where some curve's time per unit rises with the size, the same
  // with curves that are nowhere above (lower_bound.h says why).
  Problem& for_bounds() { return relaxed_ != nullptr ? *relaxed_ : *this; }

  // Made since construction: part of what a search has cost, in a unit that is the same on every machine.
  std::int64_t ways_made() const { return ways_made_; }

  std::int64_t options_considered() const { return options_considered_; }
  std::vector<std::string>& notes() { return notes_; }

 private:
  Problem(const Job& job, const Cluster& cluster, const PlannerConstraints& constraints,
          std::shared_ptr<StateGraphs> graphs);
  Status prepare(const Job& job, const Cluster& cluster, std::span<const std::string> spared);
  Status prepare_errors(const Job& job);
  void drop_codecs_never_better(std::span<const std::string> spared);
  void prepare_low_rank_shares();
  const std::vector<int>& candidates_at(int size_class, DType dtype);
  std::pair<int, int> run_of(std::int64_t elems, DType dtype) const;
  const std::vector<int>& candidates_around(std::int64_t elems, DType dtype);
  // PERF: in memory that is given back with the problem, all at once.
  using Ways = std::pmr::vector<const Way*>;
  // PERF: searches ask for tens of thousands of ways; each is found by three indices, and most buckets are asked for
  // few.
  struct WaysOfBucket {
    explicit WaysOfBucket(std::pmr::memory_resource* memory) : plain(memory), all(memory), made(memory) {}

    Ways plain, all;  // worth considering; empty: not asked for yet
    Ways made;        // by candidate; nullptr: not asked for yet
  };
  WaysOfBucket& bucket(int first, int last);
  const Way* known_way(const WaysOfBucket& bucket, int candidate) const;
  const Way* remember(const Way& way, WaysOfBucket* bucket);
  void add_unbeaten(int first, int last, bool encoded, Ways* list);
  bool make_way(int first, int last, int candidate);  // to scratch_
  bool within_limits(int first, int last, Way* way) const;

  PlannerConstraints constraints_;
  CostModel model_;
  SimulatedJob simulated_;
  int levels_;
  std::vector<CodecCost> codecs_;
  bool has_errors_ = false;
  std::vector<std::int64_t> ready_ns_;
  std::vector<DType> dtypes_;
  std::vector<std::int64_t> elems_before_, bytes_before_, vectors_before_;  // of the tensors before each
  std::vector<int> dtype_run_;
  std::vector<JobTensor> job_tensors_;
  std::unique_ptr<TensorSums> sums_;
  std::vector<std::vector<double>> errors_;  // [codec][tensor]; negative: not measured
  std::vector<double> weights_;              // share of the job's squared norm, by tensor
  std::shared_ptr<StateGraphs> graphs_;
  std::vector<std::unique_ptr<Pricer>> pricers_;        // [codec + 1]
  std::vector<std::array<double, 2>> low_rank_shares_;  // [codec]: of a typical tensor, of the one that shrinks most
  std::vector<Candidate> candidates_;
  std::unordered_map<std::string, int> candidate_numbers_;           // by codec and operations
  std::unordered_map<int, std::vector<int>> by_size_, around_size_;  // class and dtype -> candidates
  Way scratch_;
  OptionChain scratch_chain_;
  std::pmr::monotonic_buffer_resource memory_{1 << 16};
  std::pmr::vector<std::pmr::vector<WaysOfBucket*>> buckets_{&memory_};  // [first][last - first]
  std::pmr::deque<WaysOfBucket> ways_of_buckets_{&memory_};
  std::pmr::deque<Way> ways_{&memory_};
  std::int64_t ways_made_ = 0;
  const Way impossible_ = {};  // stands for a candidate that can't be done
  std::int64_t options_considered_ = 0;
  std::vector<std::string> notes_;
  std::unique_ptr<Cluster> relaxed_cluster_;
  std::unique_ptr<Problem> relaxed_;
};

// What a plan is judged by: first the time, then how much is lost for it, then what it occupies.
struct Score {
  std::int64_t step_ns = Simulator::kNever;
  std::int64_t lossy_elems = 0;
  std::int64_t busy_ns = 0;
  auto operator<=>(const Score&) const = default;
};

}  // namespace cortado

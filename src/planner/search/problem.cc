// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/problem.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "planner/cost/relaxed.h"

namespace cortado {

namespace {

// Candidates are looked for at powers of this many elements, and taken from both neighbours of a size.
constexpr int kClassBits = 2;

constexpr float kPlentiful[] = {0.03f, 0.4f};  // the price of the rest, once each

// Of several codecs, those that are at some price up to this factor from the cheapest.
constexpr float kWorthKeeping = 1.1f;

PriceSets prices_by_scarcity(int levels, float plentiful) {
  PriceSets prices;
  for (int r = 0; r < kMaxResources; ++r) {
    for (int set = 0; set < kPriceSets; ++set) prices[r][set] = (set & scarcity_of(r, levels)) != 0 ? 1 : plentiful;
  }
  return prices;
}

// The same with one collective in two steps instead of one: others get between them.
std::vector<Option> split_variants(const Option& option) {
  std::vector<Option> variants;
  for (std::size_t i = 0; i < option.operations.size(); ++i) {
    const Operation whole = option.operations[i];
    if (whole.kind != OpKind::kAllReduce) continue;
    for (const auto& [first, second] :
         {std::pair(OpKind::kReduceScatter, OpKind::kAllGather), std::pair(OpKind::kReduce, OpKind::kBroadcast)}) {
      Option variant = option;
      variant.operations[i].kind = first;
      variant.operations.insert(variant.operations.begin() + static_cast<std::ptrdiff_t>(i) + 1, whole);
      variant.operations[i + 1].kind = second;
      variants.push_back(std::move(variant));
    }
  }
  return variants;
}

// Up to `most` elements; curves are linear between the sizes of both.
bool is_never_above(const TimeCurve* a, const TimeCurve* b, std::int64_t most) {
  if (b == nullptr) return true;
  if (a == nullptr) return false;
  const std::int64_t beyond = std::max({a->sizes.back() * 2, b->sizes.back() * 2, most});
  const auto no_more = [&](std::int64_t size) { return a->at(size) <= b->at(size); };
  return std::all_of(a->sizes.begin(), a->sizes.end(), no_more) &&
         std::all_of(b->sizes.begin(), b->sizes.end(), no_more) && no_more(beyond);
}

bool sends_no_more(const Codec& a, const Codec& b) {
  for (std::int64_t elems = 1; elems <= std::int64_t{1} << 34; elems *= 2) {
    if (a.max_payload_bytes(1, elems, DType::kFloat32) > b.max_payload_bytes(1, elems, DType::kFloat32)) return false;
  }
  return true;
}

// Whether `a` can do all that `b` can, on each device and level, in no more time and with no more bytes.
bool is_never_slower(const CodecCost& a, const CodecCost& b, const std::vector<ClusterLevel>& levels,
                     std::int64_t all_elems) {
  const CodecTraits &of_a = a.traits, &of_b = b.traits;
  if (of_a.low_rank || of_b.low_rank || of_a.lossless < of_b.lossless || a.sums < b.sums ||
      of_a.fixed_size < of_b.fixed_size || of_a.needs_residual > of_b.needs_residual || of_a.rounds > of_b.rounds) {
    return false;
  }
  for (const std::size_t device : {0, 1}) {
    if (!is_never_above(a.encode[device], b.encode[device], all_elems)) return false;
    if (!is_never_above(a.decode[device], b.decode[device], all_elems)) return false;
  }
  const auto sums_no_slower = [&](const ClusterLevel& level) {
    return level.sum_factor(a.sum_dtype) <= level.sum_factor(b.sum_dtype);
  };
  return std::all_of(levels.begin(), levels.end(), sums_no_slower) && sends_no_more(*a.codec, *b.codec);
}

Status check_constraints(const PlannerConstraints& constraints) {
  const auto refuse = [](const char* what, const std::string& found) {
    return make_error(StatusCode::kInvalidArgument, "%s must be at least 0, got %s", what, found.c_str());
  };
  if (constraints.search_steps < 0 || constraints.search_steps > kMaxSearchSteps) {
    return make_error(StatusCode::kInvalidArgument, "search_steps must be from 0 to %lld, got %lld",
                      static_cast<long long>(kMaxSearchSteps), static_cast<long long>(constraints.search_steps));
  }
  if (constraints.max_lossy_passes.value_or(0) < 0) {
    return refuse("max_lossy_passes", std::to_string(*constraints.max_lossy_passes));
  }
  if (constraints.max_memory_bytes.value_or(0) < 0) {
    return refuse("max_memory_bytes", std::to_string(*constraints.max_memory_bytes));
  }
  for (const auto& [what, limit] : {std::pair("max_tensor_error", constraints.max_tensor_error),
                                    std::pair("max_total_error", constraints.max_total_error)}) {
    if (limit.has_value() && !(*limit >= 0)) return refuse(what, std::to_string(*limit));
  }
  return {};
}

}  // namespace

Problem::Problem(const Job& job, const Cluster& cluster, const PlannerConstraints& constraints,
                 std::shared_ptr<StateGraphs> graphs)
    : constraints_(constraints),
      model_(cluster, job.device),
      simulated_(simulated_job(job, cluster)),
      levels_(static_cast<int>(cluster.levels.size())),
      graphs_(std::move(graphs)) {}

Result<std::unique_ptr<Problem>> Problem::make(const Job& job, const Cluster& cluster,
                                               const PlannerConstraints& constraints,
                                               std::span<const std::string> spared) {
  CORTADO_RETURN_IF_ERROR(check_constraints(constraints));
  CORTADO_RETURN_IF_ERROR(job.check().with_context("job"));
  CORTADO_RETURN_IF_ERROR(check_for_planning(cluster));
  const auto graphs = std::make_shared<StateGraphs>(static_cast<int>(cluster.levels.size()));
  std::unique_ptr<Problem> problem(new Problem(job, cluster, constraints, graphs));
  CORTADO_RETURN_IF_ERROR(problem->prepare(job, cluster, spared));
  if (std::optional<Cluster> relaxed = relax_curves(cluster); relaxed.has_value()) {
    problem->relaxed_cluster_ = std::make_unique<Cluster>(std::move(*relaxed));
    problem->relaxed_.reset(new Problem(job, *problem->relaxed_cluster_, constraints, graphs));
    CORTADO_RETURN_IF_ERROR(problem->relaxed_->prepare(job, *problem->relaxed_cluster_, spared));
  }
  return problem;
}

Status Problem::prepare(const Job& job, const Cluster& cluster, std::span<const std::string> spared) {
  CORTADO_ASSIGN_OR_RETURN(codecs_, codec_costs(cluster, model_.home, constraints_.allowed_codecs, &notes_));
  elems_before_ = bytes_before_ = vectors_before_ = {0};
  for (const JobTensor& tensor : job.tensors) {
    ready_ns_.push_back(tensor.ready_ns);
    dtype_run_.push_back(dtypes_.empty() ? 0 : dtype_run_.back() + (tensor.dtype != dtypes_.back()));
    dtypes_.push_back(tensor.dtype);
    elems_before_.push_back(elems_before_.back() + tensor.elems());
    bytes_before_.push_back(bytes_before_.back() + tensor.size_bytes());
    vectors_before_.push_back(vectors_before_.back() + (tensor.shape.size() < 2));
  }
  job_tensors_ = job.tensors;
  buckets_.resize(job.tensors.size());
  const std::int64_t plain = count_options({.levels = levels_, .devices = {}}).value();
  options_considered_ = plain;
  for (const CodecCost& codec : codecs_) options_considered_ += count_options(space_of(codec.number)).value() - plain;
  drop_codecs_never_better(spared);
  sums_ = std::make_unique<TensorSums>(codecs_, job_tensors_);
  CORTADO_RETURN_IF_ERROR(prepare_errors(job));

  pricers_.push_back(std::make_unique<Pricer>(model_, nullptr, graphs_.get()));
  for (const CodecCost& codec : codecs_) pricers_.push_back(std::make_unique<Pricer>(model_, &codec, graphs_.get()));
  prepare_low_rank_shares();
  for (const auto& [time, name] :
       {std::pair(job.forward_ns, "forward_ns"), std::pair(job.optimizer_ns, "optimizer_ns")}) {
    if (!time.has_value()) notes_.push_back(std::string(name) + " of the job is not known and counts as 0");
  }
  return {};
}

Status Problem::prepare_errors(const Job& job) {
  has_errors_ = constraints_.max_tensor_error.has_value() || constraints_.max_total_error.has_value();
  if (!has_errors_) return {};
  const auto knows_rms = [](const JobTensor& tensor) { return tensor.rms.has_value(); };
  const bool knows_any = std::any_of(job.tensors.begin(), job.tensors.end(), knows_rms);
  double total = 0;
  for (const JobTensor& tensor : job.tensors) {
    // One that counts as 1 beside measured ones of 1e-3 would be nearly all of the gradient.
    if (constraints_.max_total_error.has_value() && knows_any && !knows_rms(tensor)) {
      return make_error(
          StatusCode::kInvalidArgument,
          "$.tensors[%td].rms (\"%s\") is missing: expected that of every tensor, or of none, for a limit "
          "of the total error",
          &tensor - job.tensors.data(), tensor.name.c_str());
    }
    const double rms = tensor.rms.value_or(1);
    weights_.push_back(rms * rms * static_cast<double>(tensor.elems()));
    total += weights_.back();
  }
  for (double& weight : weights_) weight = total > 0 ? weight / total : 0;
  std::unordered_map<std::string_view, std::string> canonical;  // of the spellings in the job
  for (const JobTensor& tensor : job.tensors) {
    for (const MeasuredError& measured : tensor.errors) {
      if (!canonical.contains(measured.codec)) canonical[measured.codec] = canonical_codec(measured.codec);
    }
  }
  for (const CodecCost& codec : codecs_) {
    std::vector<double>& errors = errors_.emplace_back();
    const std::string spec = codec.codec->spec();
    int missing = 0;
    for (const JobTensor& tensor : job.tensors) {
      // Where there is no gradient, or nothing of it, nothing is lost.
      double error = codec.traits.lossless || tensor.elems() == 0 || tensor.rms == 0 ? 0 : -1;
      for (const MeasuredError& measured : tensor.errors) {
        if (canonical.at(measured.codec) == spec) error = measured.relative_l2;
      }
      errors.push_back(error);
      missing += error < 0;
    }
    if (missing > 0) {
      notes_.push_back("codec \"" + codec.spec + "\" has no measured error of " + std::to_string(missing) +
                       " tensors and is no candidate for them");
    }
  }
  return {};
}

// Another codec that takes no more time anywhere and sends no more bytes does all that this one could, no slower.
void Problem::drop_codecs_never_better(std::span<const std::string> spared) {
  if (constraints_.max_tensor_error.has_value() || constraints_.max_total_error.has_value()) return;
  const auto is_spared = [&](const CodecCost& codec) {
    return std::any_of(spared.begin(), spared.end(), [&](const std::string& spec) {
      const CodecCost* const named = find_codec_cost(codecs_, spec);
      return named != nullptr && named->number == codec.number;
    });
  };
  const auto covers_with_a_note = [&](const CodecCost& a, const CodecCost& b) {
    if (is_spared(b) || !is_never_slower(a, b, model_.cluster->levels, elems_before_.back())) return false;
    notes_.push_back("codec \"" + b.spec + "\" can't be faster than \"" + a.spec +
                     "\": no more time on any device, no more bytes");
    return true;
  };
  std::vector<CodecCost> kept;
  for (const CodecCost& codec : codecs_) {
    const auto covers_it = [&](const CodecCost& other) { return covers_with_a_note(other, codec); };
    if (std::any_of(kept.begin(), kept.end(), covers_it)) continue;
    std::erase_if(kept, [&](const CodecCost& other) { return covers_with_a_note(codec, other); });
    kept.push_back(codec);
  }
  codecs_ = std::move(kept);
  for (std::size_t c = 0; c < codecs_.size(); ++c) codecs_[c].number = static_cast<int>(c);
}

OptionSpace Problem::space_of(int codec) const {
  OptionSpace space = {.levels = levels_, .devices = {}};
  if (codec < 0) return space;
  space.sum_payloads = codecs_[codec].sums;
  if (codecs_[codec].runs_on(OpDevice::kCpu)) space.devices.push_back(OpDevice::kCpu);
  if (codecs_[codec].runs_on(OpDevice::kGpu)) space.devices.push_back(OpDevice::kGpu);
  return space;
}

std::vector<Option> Problem::options_of(int codec) const {
  std::vector<Option> options = generate_options(space_of(codec)).value();
  std::erase_if(options, [codec](const Option& option) { return (option.encodes() > 0) != (codec >= 0); });
  if (codec < 0 || !codecs_[codec].traits.low_rank || codecs_[codec].sums) return options;
  for (Option& option : sums_of_factors(codec)) options.push_back(std::move(option));
  return options;
}

std::vector<Option> Problem::sums_of_factors(int codec) const {
  std::vector<Option> options;
  for (const OpDevice encode_device : space_of(codec).devices) {
    for (const OpDevice decode_device : space_of(codec).devices) {
      options.push_back(sum_of_factors(encode_device, decode_device, levels_));
    }
  }
  return options;
}

Pricer& Problem::pricer(int codec) { return *pricers_[codec + 1]; }

int Problem::add_candidate(const Candidate& candidate) {
  std::string key = {static_cast<char>(candidate.codec)};
  for (const Operation& op : candidate.option.operations) {
    key += static_cast<char>(static_cast<int>(op.kind) << 2 | static_cast<int>(op.device) << 1 |
                             static_cast<int>(op.encoded));
    key += static_cast<char>(op.levels.first << 4 | op.levels.last);
  }
  const auto [entry, is_new] = candidate_numbers_.try_emplace(std::move(key), static_cast<int>(candidates_.size()));
  if (is_new) candidates_.push_back(candidate);
  return entry->second;
}

const std::vector<int>& Problem::candidates_at(int size_class, DType dtype) {
  const auto [entry, is_new] = by_size_.try_emplace(size_class * 4 + static_cast<int>(dtype));
  std::vector<int>& found = entry->second;
  if (!is_new) return found;
  const auto take = [&](const Candidate& candidate) {
    const int number = add_candidate(candidate);
    if (std::find(found.begin(), found.end(), number) == found.end()) found.push_back(number);
  };
  const int codecs = static_cast<int>(codecs_.size());
  const std::int64_t elems = std::int64_t{1} << (size_class * kClassBits);
  const bool may_be_forbidden = has_errors_ || constraints_.max_memory_bytes.has_value();
  std::vector<bool> is_worth(codecs, true);
  for (const float plentiful : kPlentiful) {
    const PriceSets prices = prices_by_scarcity(levels_, plentiful);
    std::vector<Costs> costs(codecs + 1);
    Costs least;
    least.fill(Pricer::kNoOption);
    for (int codec = -1; codec < codecs; ++codec) {
      if (codec >= 0 && !is_worth[codec]) continue;
      costs[codec + 1] = pricer(codec).solve(typical_shape(codec, elems, dtype), prices, max_encodes(codec));
      for (int set = 0; set < kPriceSets; ++set) least[set] = std::min(least[set], costs[codec + 1][set]);
    }
    for (int codec = -1; codec < codecs; ++codec) {
      if (codec >= 0 && !is_worth[codec]) continue;
      bool is_worth_here = codec < 0 || may_be_forbidden;
      for (int set = 0; set < kPriceSets; ++set) {
        // With limits of errors or of memory the cheapest one may be forbidden.
        const float worth = may_be_forbidden || codec < 0 ? Pricer::kNoOption : least[set] * kWorthKeeping;
        if (costs[codec + 1][set] >= worth) continue;
        is_worth_here = true;
        const Option option = pricer(codec).option(set);
        const int encoder = option.encodes() > 0 ? codec : -1;
        take({encoder, option});
        for (Option& variant : split_variants(option)) take({encoder, std::move(variant)});
      }
      if (codec >= 0) is_worth[codec] = is_worth_here;
    }
  }
  // Prices know nothing of what engines take of low rank (can_go()): of what they do not, this one is left.
  for (int codec = 0; codec < codecs; ++codec) {
    if (!codecs_[codec].traits.low_rank || !is_worth[codec]) continue;
    for (Option& option : sums_of_factors(codec)) take({codec, std::move(option)});
  }
  // A bucket pays for each of its tensors that is encoded and decoded, which one large tensor does not show.
  const auto [first, last] = run_of(elems, dtype);
  for (int codec = 0; codec < codecs && last > first; ++codec) {
    if (!is_worth[codec]) continue;
    PriceSets own_time;
    for (Costs& costs : own_time) costs.fill(1);
    const Costs costs = pricer(codec).solve(shape(first, last), own_time, max_encodes(codec), 1);
    if (costs[0] < Pricer::kNoOption) take({codec, pricer(codec).option(0)});
  }
  return found;
}

// The first neighbours of the dtype with so many elements, or half as many where there are no more.
std::pair<int, int> Problem::run_of(std::int64_t elems, DType dtype) const {
  const auto first = static_cast<int>(std::find(dtypes_.begin(), dtypes_.end(), dtype) - dtypes_.begin());
  int last = first;
  while (last + 1 < tensors() && may_fuse(first, last + 1) && this->elems(first, last) < elems) ++last;
  return this->elems(first, last) >= elems / 2 ? std::pair(first, last) : std::pair(first, first);
}

int Problem::max_encodes(int codec) const {
  if (codec >= 0 && codecs_[codec].traits.low_rank) return std::min(1, constraints_.max_lossy_passes.value_or(1));
  const bool is_lossy = codec >= 0 && !codecs_[codec].traits.lossless;
  return is_lossy ? constraints_.max_lossy_passes.value_or(Pricer::kUnlimited) : Pricer::kUnlimited;
}

void Problem::prepare_low_rank_shares() {
  for (const CodecCost& codec : codecs_) {
    std::array<double, 2>& shares = low_rank_shares_.emplace_back(std::array{1.0, 1.0});
    if (!codec.traits.low_rank) continue;
    const auto share = [&](std::int64_t payload_bytes, int first, int last) {
      return static_cast<double>(payload_bytes) / static_cast<double>(std::max<std::int64_t>(bytes(first, last), 1));
    };
    shares.fill(share(sums_->factor_bytes(codec, 0, tensors() - 1), 0, tensors() - 1));
    for (int tensor = 0; tensor < tensors(); ++tensor) {
      if (bytes(tensor, tensor) == 0) continue;
      const std::int64_t least =
          std::min(sums_->factor_bytes(codec, tensor, tensor), sums_->payload_bytes(codec, 1, tensor, tensor));
      shares[1] = std::min(shares[1], share(least, tensor, tensor));
    }
  }
}

BucketShape Problem::typical_shape(int codec, std::int64_t elems, DType dtype, bool smallest_payload) const {
  BucketShape shape = {.elems = elems, .dtype = dtype};
  if (codec >= 0) shape.low_rank_share = low_rank_shares_[codec][smallest_payload ? 1 : 0];
  return shape;
}

bool Problem::make_way(int first, int last, int candidate) {
  ++ways_made_;
  const Candidate& c = candidates_[candidate];
  const CodecCost* codec = c.codec < 0 ? nullptr : &codecs_[c.codec];
  if (codec != nullptr && !can_go(*codec, c.option, levels_, vectors_before_[last + 1] > vectors_before_[first])) {
    return false;
  }
  scratch_.candidate = candidate;
  scratch_.is_encoded = c.codec >= 0;
  scratch_.squared_error = 0;
  if (!make_chain(model_, codec, shape(first, last), c.option, &scratch_chain_)) return false;
  scratch_.chain = {scratch_chain_, scratch_chain_.steps};
  return within_limits(first, last, &scratch_);
}

bool Problem::within_limits(int first, int last, Way* way) const {
  const int passes = way->chain.lossy_passes;
  way->lossy_elems = elems(first, last) * passes;
  if (passes == 0) return true;
  if (passes > constraints_.max_lossy_passes.value_or(passes)) return false;
  if (!has_errors_) return true;
  for (int tensor = first; tensor <= last; ++tensor) {
    const double error = errors_[candidates_[way->candidate].codec][tensor] * passes;
    if (error < 0 || error > constraints_.max_tensor_error.value_or(error)) return false;
    way->squared_error += weights_[tensor] * error * error;
  }
  return true;
}

// Those of the two sizes next to the bucket's.
const std::vector<int>& Problem::candidates_around(std::int64_t elems, DType dtype) {
  const int below = (std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(elems, 1))) - 1) / kClassBits;
  const auto [entry, is_new] = around_size_.try_emplace(below * 4 + static_cast<int>(dtype));
  if (is_new) {
    entry->second = candidates_at(below, dtype);
    for (const int number : candidates_at(below + 1, dtype)) {
      if (std::find(entry->second.begin(), entry->second.end(), number) == entry->second.end())
        entry->second.push_back(number);
    }
  }
  return entry->second;
}

Problem::WaysOfBucket& Problem::bucket(int first, int last) {
  const auto length = static_cast<std::size_t>(last - first);
  std::pmr::vector<WaysOfBucket*>& of_first = buckets_[static_cast<std::size_t>(first)];
  if (of_first.size() <= length) of_first.resize(length + 1);
  if (of_first[length] == nullptr) of_first[length] = &ways_of_buckets_.emplace_back(&memory_);
  return *of_first[length];
}

// nullptr: not made yet.
const Way* Problem::known_way(const WaysOfBucket& bucket, int candidate) const {
  return static_cast<std::size_t>(candidate) < bucket.made.size() ? bucket.made[candidate] : nullptr;
}

const Way* Problem::remember(const Way& way, WaysOfBucket* bucket) {
  ways_.push_back(way);
  const std::span<const Step> steps = way.chain.steps;
  Step* const kept = std::pmr::polymorphic_allocator<Step>(&memory_).allocate(steps.size());
  std::uninitialized_copy(steps.begin(), steps.end(), kept);
  ways_.back().chain.steps = {kept, steps.size()};
  if (bucket->made.size() <= static_cast<std::size_t>(way.candidate)) bucket->made.resize(candidates_.size());
  return bucket->made[way.candidate] = &ways_.back();
}

// Of the candidates that are encoded, or of those that are not, the ways that none of `list` and no other one beats.
void Problem::add_unbeaten(int first, int last, bool encoded, Ways* list) {
  WaysOfBucket& of = bucket(first, last);
  for (const int number : candidates_around(elems(first, last), dtypes_[first])) {
    if ((candidates_[number].codec >= 0) != encoded) continue;
    const Way* way = known_way(of, number);
    if (way == &impossible_) continue;
    if (way == nullptr) {
      if (!make_way(first, last, number)) continue;
      way = &scratch_;  // most are not kept
    }
    if (std::any_of(list->begin(), list->end(), [&](const Way* other) { return beats(*other, *way); })) continue;
    std::erase_if(*list, [&](const Way* other) { return beats(*way, *other); });
    list->push_back(way == &scratch_ ? remember(scratch_, &of) : way);
  }
}

std::span<const Way* const> Problem::plain_ways(int first, int last) {
  Ways& plain = bucket(first, last).plain;
  if (plain.empty()) add_unbeaten(first, last, false, &plain);
  return plain;
}

std::span<const Way* const> Problem::ways(int first, int last) {
  Ways& all = bucket(first, last).all;
  if (!all.empty()) return all;
  const std::span<const Way* const> plain = plain_ways(first, last);
  all.assign(plain.begin(), plain.end());
  add_unbeaten(first, last, true, &all);
  std::stable_sort(all.begin(), all.end(), [](const Way* a, const Way* b) {
    return std::pair(a->lossy_elems, a->is_encoded) < std::pair(b->lossy_elems, b->is_encoded);
  });
  return all;
}

bool Problem::beats(const Way& a, const Way& b) const {
  if (a.is_encoded && !b.is_encoded) return false;
  for (int r = 0; r < kMaxResources; ++r) {
    if (a.chain.loads[r] > b.chain.loads[r]) return false;
  }
  if (constraints_.max_memory_bytes.has_value() && a.chain.memory_bytes > b.chain.memory_bytes) return false;
  if (has_errors_ && a.squared_error > b.squared_error) return false;
  return a.chain.longest_link_ns <= b.chain.longest_link_ns;
}

const Way* Problem::way_of(int first, int last, int candidate) {
  WaysOfBucket& of = bucket(first, last);
  const Way* way = known_way(of, candidate);
  if (way == nullptr) {
    if (of.made.size() <= static_cast<std::size_t>(candidate)) of.made.resize(candidates_.size());
    way = make_way(first, last, candidate) ? remember(scratch_, &of) : &impossible_;
    of.made[candidate] = way;
  }
  return way == &impossible_ ? nullptr : way;
}

}  // namespace cortado

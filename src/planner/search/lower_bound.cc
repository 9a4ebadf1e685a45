// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "planner/search/lower_bound.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace cortado {

namespace {

// Payloads come in whole blocks and costs are floats: so much of a computed load may be rounding.
constexpr double kRounding = 2e-5;

// A plan this close to the bound needs no better one.
constexpr double kCloseEnough = 0.99;

// Weights of the resources, of the compute stream and of one tensor's own way; they sum to 1.
struct Weights {
  std::array<double, kMaxResources> resource = {};
  double compute = 0;
  double own = 0;
};

class Bounds {
 public:
  explicit Bounds(Problem& problem)
      : problem_(problem),
        job_(problem.simulated()),
        last_(problem.tensors() - 1),
        outer_(kLink + problem.levels() - 1) {
    const std::int64_t all_ppm = job_.gpu_slowdown_ppm + job_.cpu_slowdown_ppm + job_.link_slowdown_ppm;
    const double per_ppm = 1.0 / static_cast<double>(std::max<std::int64_t>(1000000, all_ppm));
    slowdown_[kGpuCodec] = static_cast<double>(job_.gpu_slowdown_ppm) * per_ppm;
    slowdown_[kCpuCodec] = static_cast<double>(job_.cpu_slowdown_ppm) * per_ppm / job_.cpu_workers;
    slowdown_[static_cast<std::size_t>(outer_)] = static_cast<double>(job_.link_slowdown_ppm) * per_ppm;
    // The bytes of the narrowest elements.
    for (int tensor = 0; tensor <= last_; ++tensor) {
      if (dtype_bytes(problem.shape(tensor, tensor).dtype) < dtype_bytes(dtype_))
        dtype_ = problem.shape(tensor, tensor).dtype;
    }
    for (int codec = -1; codec < static_cast<int>(problem_.codecs().size()); ++codec) codecs_.push_back(codec);
    for (int tensor = 0; tensor <= last_; ++tensor) {
      while (starts_.size() > 1 && is_below(starts_.back(), starts_[starts_.size() - 2], tensor)) starts_.pop_back();
      starts_.push_back(tensor);
    }
  }

  LowerBound quick() {
    take(job_.backward_ns + job_.optimizer_ns + job_.forward_ns, "computation alone");
    take_single_tensors();
    return best_;
  }

  LowerBound better_than(const LowerBound& known, std::int64_t good_enough_ns) {
    best_ = known;
    if (problem_.elems(0, last_) == 0) return best_;
    if (static_cast<double>(known.step_ns) < static_cast<double>(good_enough_ns) * kCloseEnough)
      search_weights(good_enough_ns);
    return best_;
  }

 private:
  void take(std::int64_t step_ns, const char* reason, double rounding_ns = 0) {
    if (step_ns > best_.step_ns) best_ = {step_ns, reason, static_cast<std::int64_t>(rounding_ns)};
  }

  // What follows the last arrival of the buckets from a tensor on. Where the forward pass overlaps, it needs the
  // tensors in the opposite order: its part from this one on, as the later ones are needed before. (Of the optimizer,
  // which is spread over it, nothing is counted.)
  std::int64_t tail_ns(int tensor) const {
    if (!job_.overlap_forward) return job_.optimizer_ns + job_.forward_ns;
    return static_cast<std::int64_t>(static_cast<double>(job_.forward_ns) * (1 - kRounding) *
                                     static_cast<double>(problem_.ready_ns(tensor)) /
                                     static_cast<double>(std::max<std::int64_t>(job_.backward_ns, 1)));
  }

  std::int64_t elems_of(int tensor) const { return problem_.elems(tensor, tensor); }

  // Whether (ready time, elements from then on) of `middle` lies under the line from `before` to `after`: then it is no
  // better a first tensor than one of these, whatever the weights.
  bool is_below(int middle, int before, int after) const {
    const auto x = [&](int tensor) {
      return static_cast<double>(problem_.ready_ns(tensor) - problem_.ready_ns(before));
    };
    const auto y = [&](int tensor) {
      return static_cast<double>(problem_.elems(tensor, last_) - problem_.elems(before, last_));
    };
    return x(middle) * y(after) - y(middle) * x(after) >= 0;
  }

  // The least of `least` and of the costs of all options of a codec, in each set of prices.
  void take_least(int codec, std::int64_t elems, const PriceSets& prices, Costs* least) {
    const Costs costs = problem_.pricer(codec).solve(problem_.typical_shape(codec, elems, dtype_, true), prices);
    for (int set = 0; set < kPriceSets; ++set) (*least)[set] = std::min((*least)[set], costs[set]);
  }

  // (b). Only a tensor that is later or larger than all before it in this order can raise the bound; and only where it
  // would if it took as long as a larger one.
  void take_single_tensors() {
    PriceSets prices;
    for (Costs& costs : prices) costs.fill(1);
    std::vector<int> later_or_larger;
    for (int tensor = last_; tensor >= 0; --tensor) {
      if (later_or_larger.empty() || elems_of(tensor) > elems_of(later_or_larger.back()))
        later_or_larger.push_back(tensor);
    }
    std::int64_t own_ns = Simulator::kNever / 2;
    for (auto at = later_or_larger.rbegin(); at != later_or_larger.rend(); ++at) {
      const auto with = [&](std::int64_t ns) { return problem_.ready_ns(*at) + ns + tail_ns(*at); };
      if (with(own_ns) <= best_.step_ns) continue;
      Costs least;
      least.fill(Pricer::kNoOption);
      for (const int codec : codecs_) take_least(codec, elems_of(*at), prices, &least);
      const double cost = least[0];
      own_ns = static_cast<std::int64_t>(cost * (1 - kRounding));
      // Costs may be off either way; of the tail kRounding was taken off.
      const double tail = job_.overlap_forward ? static_cast<double>(job_.forward_ns) : 0;
      take(with(own_ns), "the time of one tensor after it is ready", (2 * cost + tail) * kRounding);
    }
  }

  using Tried = std::array<Weights, kPriceSets>;

  using SetBounds = std::array<double, kPriceSets>;  // one for each choice of weights

  // (c) for sixteen choices of weights; `tensor`: the one whose own way counts, -1: none does. If none of them is above
  // `worth`, they may be too high, but are not above it either.
  SetBounds loads(const Tried& weights, int tensor, double worth) {
    PriceSets prices = {};
    for (int set = 0; set < kPriceSets; ++set) {
      for (int r = 0; r < kMaxResources; ++r) {
        prices[r][set] = static_cast<float>(weights[set].resource[r] / (r == kCpuCodec ? job_.cpu_workers : 1) +
                                            weights[set].compute * slowdown_[r]);
      }
    }
    PriceSets own_prices = prices;
    for (Costs& price : own_prices) {
      for (int set = 0; set < kPriceSets; ++set) price[set] += static_cast<float>(weights[set].own);
    }
    const std::int64_t all = problem_.elems(0, last_);
    const std::vector<std::int64_t> sizes = tensor < 0 ? std::vector<std::int64_t>() : bucket_sizes(tensor);
    Costs none;
    none.fill(Pricer::kNoOption);
    Costs costs = none;
    std::vector<Costs> own(sizes.size(), none);
    SetBounds bounds = {};
    for (auto codec = codecs_.begin(); codec != codecs_.end(); ++codec) {
      take_least(*codec, all, prices, &costs);
      for (std::size_t i = 0; i < sizes.size(); ++i) take_least(*codec, sizes[i], own_prices, &own[i]);
      SetBounds per_elem;
      for (int set = 0; set < kPriceSets; ++set) {
        per_elem[set] = costs[set] / static_cast<double>(all) * (1 - kRounding);
      }
      bounds =
          tensor < 0 ? bounds_of_loads(weights, per_elem) : bounds_with_own_way(weights, tensor, per_elem, sizes, own);
      // PERF: the other codecs can only lower them. What one codec shows, it often shows of the next weights, too.
      if (*std::max_element(bounds.begin(), bounds.end()) <= worth) {
        std::rotate(codecs_.begin(), codec, codec + 1);
        break;
      }
    }
    return bounds;
  }

  SetBounds bounds_of_loads(const Tried& weights, const SetBounds& per_elem) const {
    SetBounds bounds = {};
    for (int set = 0; set < kPriceSets; ++set) {
      for (const int first : starts_) {
        const double load = per_elem[set] * static_cast<double>(problem_.elems(first, last_));
        bounds[set] = std::max(bounds[set], start_of(weights[set], first, 0) + load);
      }
    }
    return bounds;
  }

  // Of a bucket with this tensor: from its own size to all, powers of two between, as of other tensors their costs are
  // asked for, too.
  std::vector<std::int64_t> bucket_sizes(int tensor) const {
    const std::int64_t all = problem_.elems(0, last_);
    std::vector<std::int64_t> sizes = {elems_of(tensor)};
    while (sizes.back() * 2 < all) {
      sizes.push_back(static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(sizes.back())) * 2));
    }
    if (sizes.back() < all) sizes.push_back(all);
    return sizes;
  }

  // `own`: costs of buckets of `sizes` with the tensor's own way. At sizes between two they are at least that of the
  // smaller one, and at least in proportion to that of the larger one.
  SetBounds bounds_with_own_way(const Tried& weights, int tensor, const SetBounds& per_elem,
                                std::span<const std::int64_t> sizes, std::span<const Costs> own) const {
    SetBounds bounds = {};
    for (int set = 0; set < kPriceSets; ++set) {
      for (const int first : starts_) {
        if (first > tensor) break;
        const auto from = static_cast<double>(problem_.elems(first, last_));
        const auto with_rest = [&](double bucket_cost, double size) {
          return bucket_cost + std::max(0.0, from - size) * per_elem[set];
        };
        double least = with_rest(own.back()[set], static_cast<double>(sizes.back()));
        for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
          const double large = static_cast<double>(sizes[i + 1]);
          const double size = std::clamp(own[i][set] / std::max<double>(own[i + 1][set], 1e-9) * large,
                                         static_cast<double>(sizes[i]), large);
          least = std::min(least, with_rest(own[i][set], size));
        }
        bounds[set] =
            std::max(bounds[set], start_of(weights[set], first, problem_.ready_ns(tensor)) + least * (1 - kRounding));
      }
    }
    return bounds;
  }

  double start_of(const Weights& weights, int first, std::int64_t tensor_ready_ns) const {
    return (1 - weights.compute - weights.own) * static_cast<double>(problem_.ready_ns(first)) +
           weights.compute * static_cast<double>(job_.backward_ns) +
           weights.own * static_cast<double>(tensor_ready_ns) + static_cast<double>(tail_ns(first));
  }

  // The tensors whose own way may matter: none, the last one and the two largest.
  std::vector<int> notable_tensors() const {
    std::vector<int> order(static_cast<std::size_t>(last_) + 1);
    std::iota(order.rbegin(), order.rend(), 0);
    const std::size_t largest = std::min<std::size_t>(2, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(largest), order.end(),
                      [&](int a, int b) { return elems_of(a) > elems_of(b); });
    std::vector<int> notable = {-1, last_};
    for (std::size_t i = 0; i < largest; ++i) {
      if (order[i] != last_) notable.push_back(order[i]);
    }
    return notable;
  }

  struct Ascent {
    int tensor = -1;
    double bound = 0;
    Weights at = {};
  };

  // At first each mixture of computation, links and the tensor's own way; from the best of them small steps.
  void search_weights(std::int64_t good_enough_ns) {
    const double wanted = static_cast<double>(good_enough_ns);
    Ascent best;
    for (const int tensor : notable_tensors()) {
      if (tensor >= 0 && elems_of(tensor) == 0) continue;
      Ascent ascent = {.tensor = tensor, .bound = best.bound};
      if (take_best(first_weights(tensor), &ascent)) best = ascent;
      if (best.bound >= wanted * kCloseEnough) return;
    }
    // A tensor's own way costs more to ask for than the loads alone: its bucket may have any size.
    climb(&best, best.tensor < 0 ? 16 : 8, wanted);
  }

  // One weight at a time, and many at once by turns: the bound has edges on which no single weight leads upwards.
  void climb(Ascent* ascent, int rounds, double wanted) {
    const bool with_own = ascent->tensor >= 0;
    double step = 0.5;
    for (int round = 0; round < rounds && ascent->bound < wanted * kCloseEnough; ++round) {
      const bool one = round % 2 == 0;
      const bool helped =
          take_best(one ? near(ascent->at, step, with_own) : scattered(ascent->at, step, with_own), ascent);
      if (!helped && !one) step *= 0.8;
    }
  }

  bool take_best(Tried tried, Ascent* ascent) {
    for (Weights& weights : tried) normalise(&weights);
    const double worth = ascent->bound * (1 + 1e-4);
    const SetBounds bounds = loads(tried, ascent->tensor, worth);
    const auto highest = std::max_element(bounds.begin(), bounds.end());
    if (*highest <= worth) return false;
    ascent->bound = *highest;
    ascent->at = tried[static_cast<std::size_t>(highest - bounds.begin())];
    take(static_cast<std::int64_t>(*highest),
         ascent->tensor < 0 ? "loads of the resources" : "loads of the resources and one tensor's own way");
    return true;
  }

  Tried first_weights(int tensor) const {
    Tried tried;
    for (int set = 0; set < kPriceSets; ++set) {
      Weights& weights = tried[set];
      if ((set & 1) != 0 || set == 0) weights.compute = 1;
      if ((set & 2) != 0) weights.resource[outer_] = 1;
      if ((set & 4) != 0)
        weights.resource[problem_.levels() > 1 ? static_cast<int>(kLink) : static_cast<int>(kCpuCodec)] = 1;
      if ((set & 8) != 0) (tensor < 0 ? weights.resource[kGpuCodec] : weights.own) = 1;
    }
    return tried;
  }

  // All weights more or less, by factors of up to 1 + 2 * step.
  Tried scattered(const Weights& at, double step, bool with_own) {
    Tried tried;
    tried.fill(at);
    const auto scatter = [&](double* weight) {
      const double x = 2 * step * (static_cast<double>(random_() >> 11) * 0x1p-52 - 1);
      *weight = std::max(*weight, 0.01) * (x > 0 ? 1 + x : 1 / (1 - x));
    };
    for (Weights& weights : tried) {
      scatter(&weights.compute);
      if (with_own) scatter(&weights.own);
      for (int r = 0; r < kLink + problem_.levels(); ++r) scatter(&weights.resource[r]);
    }
    return tried;
  }

  // One weight more or less at a time.
  Tried near(const Weights& at, double step, bool with_own) const {
    Tried tried;
    tried.fill(at);
    std::size_t set = 0;
    const auto move = [&](double* weight, const Weights& changed) {
      for (const double factor : {1.0, -1.0}) {
        if (set == tried.size()) return;
        const double before = *weight;
        *weight = std::max(0.0, before + factor * step * std::max(before, 0.1));
        tried[set++] = changed;
        *weight = before;
      }
    };
    Weights moved = at;
    move(&moved.compute, moved);
    if (with_own) move(&moved.own, moved);
    for (int r = kLink + problem_.levels() - 1; r >= 0; --r) move(&moved.resource[r], moved);
    return tried;
  }

  static void normalise(Weights* weights) {
    double sum = weights->compute + weights->own;
    for (const double weight : weights->resource) sum += weight;
    if (sum <= 0) sum = weights->compute = 1;
    weights->compute /= sum;
    weights->own /= sum;
    for (double& weight : weights->resource) weight /= sum;
  }

  Problem& problem_;
  const SimulatedJob& job_;
  int last_, outer_;
  std::array<double, kMaxResources> slowdown_ = {};  // of the compute stream by each resource, as (c) counts it
  DType dtype_ = DType::kFloat32;
  std::vector<int> codecs_;  // those of the problem, and -1: none; the one that bounds most first
  std::vector<int> starts_;  // the tensors from which on loads are worth adding up
  LowerBound best_;
  std::mt19937_64 random_{1};
};

}  // namespace

LowerBound quick_bound(Problem& problem) { return Bounds(problem).quick(); }

LowerBound lower_bound(Problem& problem, const LowerBound& known, std::int64_t good_enough_ns) {
  return Bounds(problem).better_than(known, good_enough_ns);
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/planner.h"

#include <algorithm>

namespace cortado {

namespace {

// Walks the tree depth first; `option_` is the path from its root.
class Generator {
 public:
  explicit Generator(const OptionSpace& space) : space_(space) {}

  std::vector<Option> run() {
    begin(0, /*encoded=*/false);
    std::stable_sort(options_.begin(), options_.end(),
                     [](const Option& a, const Option& b) { return a.encodes() < b.encodes(); });
    return std::move(options_);
  }

 private:
  struct Pair {
    OpKind first, second;
  };

  // Sum over the levels from `level` on: first perhaps into the other form.
  void begin(int level, bool encoded) {
    body(level, encoded);
    if (!encoded) {
      for_each_device(OpKind::kEncode, [&] { body(level, true); });
    } else {
      for_each_device(OpKind::kDecode, [&] { begin(level, false); });
    }
  }

  void body(int level, bool encoded) {
    const LevelRange rest = {level, space_.levels - 1};
    for (OpKind kind : complete_collectives(encoded)) {
      with(kind, rest, encoded, [&] { end(encoded); });
    }
    first_step(rest, encoded, [&] { second_step(encoded); });
    if (level + 1 < space_.levels) {
      first_step({level, level}, encoded, [&] { begin(level + 1, encoded); });
    }
  }

  // The last first step is answered, or the tree ends.
  void end(bool encoded) {
    if (!open_.empty()) return second_step(encoded);
    if (!encoded) return options_.push_back(option_);
    for_each_device(OpKind::kDecode, [&] { options_.push_back(option_); });
  }

  void second_step(bool encoded) {
    const Operation second = open_.back();
    open_.pop_back();
    with(second.kind, second.levels, encoded, [&] { end(encoded); });
    open_.push_back(second);
    // Into the other form first. From payloads to values both follow: values, or another payload of them.
    if (!encoded) {
      for_each_device(OpKind::kEncode, [&] { second_encoded(second); });
    } else {
      for_each_device(OpKind::kDecode, [&] { second_step(false); });
    }
  }

  void second_encoded(const Operation& second) {
    open_.pop_back();
    with(second.kind, second.levels, true, [&] { end(true); });
    open_.push_back(second);
  }

  std::vector<OpKind> complete_collectives(bool encoded) const {
    if (!encoded) return {OpKind::kAllReduce};
    if (space_.sum_payloads) return {OpKind::kAllGather, OpKind::kAllReduce};
    return {OpKind::kAllGather};
  }

  template <typename Next>
  void first_step(LevelRange levels, bool encoded, Next next) {
    std::vector<Pair> pairs;
    if (!encoded || space_.sum_payloads) {
      pairs.push_back({OpKind::kReduceScatter, OpKind::kAllGather});
      if (space_.rooted) pairs.push_back({OpKind::kReduce, OpKind::kBroadcast});
    }
    if (encoded) {
      pairs.push_back({OpKind::kAllToAll, OpKind::kAllGather});
      if (space_.rooted) pairs.push_back({OpKind::kGather, OpKind::kBroadcast});
    }
    for (const Pair& pair : pairs) {
      open_.push_back({.kind = pair.second, .levels = levels});
      with(pair.first, levels, encoded, next);
      open_.pop_back();
    }
  }

  template <typename Next>
  void for_each_device(OpKind kind, Next next) {
    for (OpDevice device : space_.devices) {
      option_.operations.push_back({.kind = kind, .device = device});
      next();
      option_.operations.pop_back();
    }
  }

  template <typename Next>
  void with(OpKind kind, LevelRange levels, bool encoded, Next next) {
    option_.operations.push_back({.kind = kind, .levels = levels, .encoded = encoded});
    next();
    option_.operations.pop_back();
  }

  const OptionSpace& space_;
  Option option_;
  std::vector<Operation> open_;  // second steps that must follow
  std::vector<Option> options_;
};

}  // namespace

std::vector<Option> generate_options(const OptionSpace& space) { return Generator(space).run(); }

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "planner/option_tree.h"

namespace cortado {

namespace {

// Adds branches from one place.
class Branches {
 public:
  Branches(const OptionSpace& space, const TreePlace& from, std::vector<TreeBranch>* branches)
      : space_(space), from_(from), branches_(*branches) {}

  void append() {
    switch (from_.phase) {
      case TreePlace::kFirst:
        append_first_moves();
        return append_changes_of_form(TreePlace::kFirst, TreePlace::kFirstMoves);
      case TreePlace::kFirstMoves:
        return append_first_moves();
      case TreePlace::kSecond:
        append_second_move();
        return append_changes_of_form(TreePlace::kSecond, TreePlace::kSecondMoves);
      case TreePlace::kSecondMoves:
        return append_second_move();
      case TreePlace::kLastDecode:
        return append_changes_of_form(TreePlace::kDone, TreePlace::kDone);
      case TreePlace::kDone:
        return;
    }
  }

 private:
  // Values are encoded and then travel. Payloads are decoded, and then the values travel or are encoded anew.
  void append_changes_of_form(TreePlace::Phase after_decode, TreePlace::Phase after_encode) {
    for (const OpDevice device : space_.devices) {
      TreePlace to = from_;
      to.encoded = !from_.encoded;
      to.phase = from_.encoded ? after_decode : after_encode;
      branches_.push_back({{.kind = from_.encoded ? OpKind::kDecode : OpKind::kEncode, .device = device}, to});
    }
  }

  void append_first_moves() {
    const LevelRange rest = {from_.level, space_.levels - 1};
    if (!from_.encoded || space_.sum_payloads) append_complete(OpKind::kAllReduce, rest);
    if (from_.encoded) append_complete(OpKind::kAllGather, rest);
    append_first_steps(rest, TreePlace::kSecond);
    if (from_.level + 1 < space_.levels) append_first_steps({from_.level, from_.level}, TreePlace::kFirst);
  }

  void append_complete(OpKind kind, LevelRange levels) {
    TreePlace to = from_;
    settle(&to);
    branches_.push_back({{.kind = kind, .levels = levels, .encoded = from_.encoded}, to});
  }

  void append_first_steps(LevelRange levels, TreePlace::Phase phase) {
    const bool sums = !from_.encoded || space_.sum_payloads;
    if (sums) append_first_step(OpKind::kReduceScatter, OpKind::kAllGather, levels, phase);
    if (sums && space_.rooted) append_first_step(OpKind::kReduce, OpKind::kBroadcast, levels, phase);
    if (from_.encoded) append_first_step(OpKind::kAllToAll, OpKind::kAllGather, levels, phase);
    if (from_.encoded && space_.rooted) append_first_step(OpKind::kGather, OpKind::kBroadcast, levels, phase);
  }

  void append_first_step(OpKind first, OpKind second, LevelRange levels, TreePlace::Phase phase) {
    TreePlace to = from_;
    to.phase = phase;
    if (phase == TreePlace::kFirst) ++to.level;
    to.open[to.open_count++] = {.kind = second, .levels = levels};
    branches_.push_back({{.kind = first, .levels = levels, .encoded = from_.encoded}, to});
  }

  void append_second_move() {
    TreePlace to = from_;
    Operation second = std::exchange(to.open[--to.open_count], {});
    second.encoded = from_.encoded;
    settle(&to);
    branches_.push_back({second, to});
  }

  // All levels that were begun last are summed and every rank that took part has the result.
  static void settle(TreePlace* place) {
    place->level = 0;
    place->phase = place->open_count > 0 ? TreePlace::kSecond
                   : place->encoded      ? TreePlace::kLastDecode
                                         : TreePlace::kDone;
  }

  const OptionSpace& space_;
  const TreePlace& from_;
  std::vector<TreeBranch>& branches_;
};

Status check_levels(const OptionSpace& space) {
  if (space.levels >= 1 && space.levels <= kMaxLevels) return {};
  return make_error(StatusCode::kInvalidArgument, "options: expected 1 to %d levels, got %d", kMaxLevels, space.levels);
}

// Calls visit(option) for all that go on from `path` with `encodes` more of them; returns how many.
template <typename Visit>
std::int64_t visit_from(const OptionSpace& space, const TreePlace& from, int encodes, Option* path,
                        const Visit& visit) {
  if (from.phase == TreePlace::kDone) {
    if (encodes > 0) return 0;
    visit(*path);
    return 1;
  }
  std::vector<TreeBranch> branches;
  append_branches(space, from, &branches);
  std::int64_t visited = 0;
  for (const TreeBranch& branch : branches) {
    const int left = encodes - (branch.operation.kind == OpKind::kEncode ? 1 : 0);
    if (left < 0) continue;
    path->operations.push_back(branch.operation);
    visited += visit_from(space, branch.to, left, path, visit);
    path->operations.pop_back();
  }
  return visited;
}

// What follows depends on phase, form, level and the number of open steps only.
using Counts = std::map<std::tuple<int, bool, int, int>, std::int64_t>;

std::int64_t count_from(const OptionSpace& space, const TreePlace& from, Counts* counts) {
  if (from.phase == TreePlace::kDone) return 1;
  const auto key = std::make_tuple(static_cast<int>(from.phase), from.encoded, from.level, from.open_count);
  const auto found = counts->find(key);
  if (found != counts->end()) return found->second;
  std::vector<TreeBranch> branches;
  append_branches(space, from, &branches);
  std::int64_t count = 0;
  for (const TreeBranch& branch : branches) count += count_from(space, branch.to, counts);
  return (*counts)[key] = count;
}

}  // namespace

void append_branches(const OptionSpace& space, const TreePlace& from, std::vector<TreeBranch>* branches) {
  CORTADO_CHECK(space.levels <= kMaxLevels, "%d levels", space.levels);
  Branches(space, from, branches).append();
}

Result<std::int64_t> count_options(const OptionSpace& space) {
  CORTADO_RETURN_IF_ERROR(check_levels(space));
  Counts counts;
  return count_from(space, {}, &counts);
}

TreeGraph::TreeGraph(const OptionSpace& space) {
  // By their text: places are small plain values, and there are few.
  std::unordered_map<std::string, std::int32_t> numbers;
  std::vector<TreePlace> reached;
  const auto number_of = [&](const TreePlace& place) {
    std::string key = {static_cast<char>(place.phase), static_cast<char>(place.encoded),
                       static_cast<char>(place.level)};
    for (int i = 0; i < place.open_count; ++i) {
      key += static_cast<char>(place.open[i].kind);
      key += static_cast<char>(place.open[i].levels.first);
      key += static_cast<char>(place.open[i].levels.last);
    }
    const auto [entry, is_new] = numbers.try_emplace(key, static_cast<std::int32_t>(reached.size()));
    if (is_new) reached.push_back(place);
    return entry->second;
  };
  number_of({});
  std::vector<TreeBranch> branches;
  for (std::size_t i = 0; i < reached.size(); ++i) {  // grows while it is walked
    branches.clear();
    append_branches(space, TreePlace(reached[i]), &branches);
    Place place;
    place.is_done = reached[i].phase == TreePlace::kDone;
    for (const TreeBranch& branch : branches) place.edges.push_back({branch.operation, number_of(branch.to)});
    places.push_back(std::move(place));
  }
}

Status visit_options(const OptionSpace& space, const std::function<void(const Option&)>& visit) {
  CORTADO_ASSIGN_OR_RETURN(std::int64_t left, count_options(space));
  Option path;
  for (int encodes = 0; left > 0; ++encodes) left -= visit_from(space, {}, encodes, &path, visit);
  return {};
}

Result<std::vector<Option>> generate_options(const OptionSpace& space) {
  std::vector<Option> options;
  CORTADO_RETURN_IF_ERROR(visit_options(space, [&](const Option& option) { options.push_back(option); }));
  return options;
}

}  // namespace cortado

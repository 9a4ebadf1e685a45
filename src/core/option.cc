// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/option.h"

#include <algorithm>
#include <array>

#include "core/check.h"

namespace cortado {

namespace {

constexpr std::array<std::string_view, 9> kKindNames = {
    "encode", "decode", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast", "gather"};

Status wrong(std::size_t index, std::string_view name, const std::string& found, const std::string& expected) {
  return make_error(StatusCode::kInvalidArgument, "option: operation %zu (%.*s): %s; expected %s", index,
                    static_cast<int>(name.size()), name.data(), found.c_str(), expected.c_str());
}

// A first step leaves each rank with a part, or the root with all; the second one brings it back.
bool is_first_step(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll || kind == OpKind::kReduce ||
         kind == OpKind::kGather;
}

OpKind second_of(OpKind first) {
  return first == OpKind::kReduce || first == OpKind::kGather ? OpKind::kBroadcast : OpKind::kAllGather;
}

bool sums(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}

bool moves_payloads_only(OpKind kind) { return kind == OpKind::kAllToAll || kind == OpKind::kGather; }

// Follows the state of the tensor along the operations.
class Walk {
 public:
  Walk(int levels, bool linear) : levels_(levels), linear_(linear) {}

  Status take(std::size_t index, const Operation& op) {
    const std::string_view name = op_kind_name(op.kind);
    if (op.kind == OpKind::kEncode || op.kind == OpKind::kDecode) {
      const bool to_encoded = op.kind == OpKind::kEncode;
      if (encoded_ == to_encoded) {
        return wrong(index, name, encoded_ ? "the tensor is encoded already" : "the tensor is not encoded",
                     encoded_ ? "decode or a collective" : "encode or a collective");
      }
      if (!to_encoded && idle_) return wrong(index, name, "nothing has travelled since encode", "a collective");
      if (to_encoded && done()) return wrong(index, name, "the sum is complete", "the end");
      encoded_ = to_encoded;
      idle_ = true;
      return {};
    }
    idle_ = false;
    if (op.encoded != encoded_) {
      return wrong(index, name,
                   op.encoded ? "it takes payloads, but the tensor is not encoded"
                              : "it takes values, but the tensor is encoded",
                   op.encoded ? "encode before it" : "decode before it");
    }
    const LevelRange range = op.levels;
    if (range.first < 0 || range.last < range.first || range.last >= levels_) {
      return wrong(index, name,
                   "levels " + std::to_string(range.first) + " to " + std::to_string(range.last) + " of " +
                       std::to_string(levels_),
                   "levels that exist, from the inner to the outer");
    }
    if (next_ < levels_) return take_summing(index, op);
    return take_second(index, op);
  }

  Status finish(std::size_t index) const {
    if (next_ < levels_) {
      return wrong(index, "end", "level " + std::to_string(next_) + " has not been summed over",
                   "a collective over it");
    }
    if (!open_.empty()) {
      return wrong(index, "end", "not every rank has the sum",
                   std::string(op_kind_name(second_of(open_.back().kind))) + " over level " +
                       std::to_string(open_.back().levels.first));
    }
    if (encoded_) return wrong(index, "end", "the tensor is encoded", "decode");
    return {};
  }

 private:
  bool done() const { return next_ == levels_ && open_.empty(); }

  // A collective that sums over levels which no one has summed over yet.
  Status take_summing(std::size_t index, const Operation& op) {
    const std::string_view name = op_kind_name(op.kind);
    if (op.levels.first != next_) {
      return wrong(index, name, "it begins at level " + std::to_string(op.levels.first),
                   "the innermost level not summed over, " + std::to_string(next_));
    }
    if (sums(op.kind) && encoded_ && !linear_) {
      return wrong(index, name, "payloads of this codec can't be summed", "all_gather, all_to_all or gather");
    }
    const bool complete = op.kind == OpKind::kAllReduce || (encoded_ && op.kind == OpKind::kAllGather);
    if (!complete && !is_first_step(op.kind)) {
      return wrong(index, name, "it does not sum",
                   encoded_ ? "all_gather, all_to_all or gather" : "all_reduce, reduce_scatter or reduce");
    }
    if (moves_payloads_only(op.kind) && !encoded_) {
      return wrong(index, name, "it takes payloads, but the tensor is not encoded",
                   "all_reduce, reduce_scatter or reduce");
    }
    if (!complete) open_.push_back(op);
    next_ = op.levels.last + 1;
    return {};
  }

  // A collective that answers the last first step.
  Status take_second(std::size_t index, const Operation& op) {
    const std::string_view name = op_kind_name(op.kind);
    if (open_.empty()) return wrong(index, name, "the sum is complete", encoded_ ? "decode" : "the end");
    const Operation& first = open_.back();
    if (op.kind != second_of(first.kind) || op.levels != first.levels) {
      return wrong(index, name, "it does not answer the last first step, " + std::string(op_kind_name(first.kind)),
                   std::string(op_kind_name(second_of(first.kind))) + " over levels " +
                       std::to_string(first.levels.first) + " to " + std::to_string(first.levels.last));
    }
    open_.pop_back();
    return {};
  }

  int levels_;
  bool linear_;
  bool encoded_ = false;
  bool idle_ = false;            // no collective since the last encode or decode
  int next_ = 0;                 // the innermost level not summed over
  std::vector<Operation> open_;  // first steps not answered
};

}  // namespace

std::string_view op_kind_name(OpKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::string_view op_device_name(OpDevice device) { return device == OpDevice::kCpu ? "cpu" : "gpu"; }

int Option::encodes() const {
  int count = 0;
  for (const Operation& op : operations) count += op.kind == OpKind::kEncode;
  return count;
}

std::string Option::to_string(const Topology& topology) const {
  std::string text;
  for (const Operation& op : operations) {
    if (!text.empty()) text += ' ';
    text += op_kind_name(op.kind);
    text += '@';
    text += is_collective(op.kind) ? topology.range_name(op.levels) : std::string(op_device_name(op.device));
  }
  return text;
}

Result<Option> Option::parse(std::string_view text, const Topology& topology) {
  Option option;
  bool encoded = false;
  for (std::size_t begin = text.find_first_not_of(' '); begin != std::string_view::npos;) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word(text.substr(begin, end - begin));
    begin = text.find_first_not_of(' ', end);

    const std::size_t index = option.operations.size();
    const std::size_t at = word.find('@');
    const std::string name = word.substr(0, at);
    const std::string place = at == std::string::npos ? "" : word.substr(at + 1);
    Operation op;
    std::size_t kind = 0;
    while (kind < kKindNames.size() && kKindNames[kind] != name) ++kind;
    if (kind == kKindNames.size()) {
      std::string known;
      for (std::string_view each : kKindNames) known += (known.empty() ? "" : ", ") + std::string(each);
      return wrong(index, word, "no operation of that name", "one of " + known);
    }
    op.kind = static_cast<OpKind>(kind);
    if (is_collective(op.kind)) {
      Result<LevelRange> range = topology.parse_range(place);
      if (!range.ok())
        return range.status().with_context("option: operation " + std::to_string(index) + " (" + word + ")");
      op.levels = range.value();
      op.encoded = encoded;
    } else {
      if (place != "cpu" && place != "gpu") return wrong(index, word, "no device", name + "@cpu or " + name + "@gpu");
      op.device = place == "cpu" ? OpDevice::kCpu : OpDevice::kGpu;
      encoded = op.kind == OpKind::kEncode;
    }
    option.operations.push_back(op);
  }
  CORTADO_RETURN_IF_ERROR(option.check(static_cast<int>(topology.levels.size()), /*linear=*/true));
  return option;
}

Status Option::check(int levels, bool linear) const {
  Walk walk(levels, linear);
  for (std::size_t i = 0; i < operations.size(); ++i) CORTADO_RETURN_IF_ERROR(walk.take(i, operations[i]));
  return walk.finish(operations.size());
}

}  // namespace cortado

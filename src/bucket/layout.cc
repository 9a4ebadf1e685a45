// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "bucket/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <unordered_map>

namespace cortado {

namespace {

// Latency times bandwidth of the reference link of the latency rule: an all-reduce over four workers at 1 Gb/s starts
// in about 1 ms and moves about 83 MB/s of payload. Fixed, not measured, so that two runs sum in the same order.
constexpr double kLatencyBytes = 83e3;

void append(Message* message, std::uint32_t tensor, SlotKind kind, std::int64_t elems) {
  message->collective = collective_of(kind);
  message->slots.push_back({tensor, kind, message->elems, elems});
  message->elems += elems;
}

// Whether both kinds of slots may stand in one message.
bool fit_together(SlotKind a, SlotKind b) { return collective_of(a) == collective_of(b); }

// For each position in `order`, which of DDP's buckets hands the tensor over, if DDP's settings are its defaults.
std::vector<int> buckets_of(const std::vector<LayoutTensor>& tensors, const std::vector<std::uint32_t>& order) {
  std::vector<int> buckets;
  int bucket = 0;
  std::int64_t bytes = 0;
  for (const std::uint32_t t : order) {
    buckets.push_back(bucket);
    bytes += tensors[t].elems() * tensors[t].gradient_elem_bytes;
    if (bytes < (bucket == 0 ? kFirstBucketBytes : kBucketBytes)) continue;
    ++bucket;
    bytes = 0;
  }
  return buckets;
}

}  // namespace

std::int64_t LayoutTensor::slot_elems(SlotKind kind) const {
  switch (kind) {
    case SlotKind::kDense:
      return elems();
    case SlotKind::kRowFactor:
      return rows * rank;
    case SlotKind::kColFactor:
      return cols * rank;
    case SlotKind::kBothFactors:
      return (rows + cols) * rank;
    case SlotKind::kValues:
    case SlotKind::kPayload:
      return payload_elems;
  }
  return 0;
}

std::int64_t Layout::elems() const {
  std::int64_t total = 0;
  for (const Message& message : messages) total += message.elems;
  return total;
}

std::int64_t Layout::largest_message_elems() const {
  std::int64_t largest = 0;
  for (const Message& message : messages) largest = std::max(largest, message.elems);
  return largest;
}

int effective_rank(std::int64_t rows, std::int64_t cols, int rank, double min_rate) {
  const std::int64_t r = std::min<std::int64_t>({rank, rows, cols});
  if (r <= 0) return 0;
  const double sent = min_rate * static_cast<double>(r) * static_cast<double>(rows + cols);
  const bool pays = min_rate == 0 || static_cast<double>(rows) * static_cast<double>(cols) > sent;
  return pays ? static_cast<int>(r) : 0;
}

std::vector<SlotKind> choose_sides(const std::vector<LayoutTensor>& tensors, bool balanced) {
  std::vector<SlotKind> sides(tensors.size(), SlotKind::kDense);
  std::vector<std::uint32_t> matrices;
  for (std::uint32_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].rank == 0) continue;
    sides[t] = SlotKind::kRowFactor;
    matrices.push_back(t);
  }
  if (!balanced) return sides;
  const auto lopsidedness = [&](std::uint32_t t) {
    return std::llabs(tensors[t].rows - tensors[t].cols) * tensors[t].rank;
  };
  std::stable_sort(matrices.begin(), matrices.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return lopsidedness(a) > lopsidedness(b); });
  std::int64_t surplus = 0;  // elements of even steps minus elements of odd steps
  for (const std::uint32_t t : matrices) {
    const std::int64_t row_surplus = (tensors[t].rows - tensors[t].cols) * tensors[t].rank;
    const bool begin_with_rows = std::llabs(surplus + row_surplus) <= std::llabs(surplus - row_surplus);
    sides[t] = begin_with_rows ? SlotKind::kRowFactor : SlotKind::kColFactor;
    surplus += begin_with_rows ? row_surplus : -row_surplus;
  }
  return sides;
}

std::int64_t budget_bytes(const FusionBudget& budget, std::int64_t sent_bytes, std::int64_t model_bytes) {
  switch (budget.kind) {
    case FusionBudget::Kind::kNone:
      return 0;
    case FusionBudget::Kind::kBuckets:
      return budget.cap_bytes;
    case FusionBudget::Kind::kScaled:
      if (model_bytes == 0) return 0;
      return static_cast<std::int64_t>(static_cast<double>(budget.cap_bytes) * static_cast<double>(sent_bytes) /
                                       static_cast<double>(model_bytes));
    // K messages cost K latencies and leave 1/K of the bytes exposed after the backward pass; the sum is smallest
    // where a message is sqrt(all bytes * latency bytes).
    case FusionBudget::Kind::kLatency:
      return static_cast<std::int64_t>(std::sqrt(static_cast<double>(sent_bytes) * kLatencyBytes));
  }
  return 0;
}

Layout make_layout(const std::vector<LayoutTensor>& tensors, const std::vector<std::uint32_t>& order,
                   const std::vector<SlotKind>& kinds, const std::vector<bool>& skip, const FusionBudget& budget,
                   std::int64_t elem_bytes) {
  const auto slot_elems = [&](std::uint32_t t) {
    return !skip.empty() && skip[t] ? 0 : tensors[t].slot_elems(kinds[t]);
  };
  const auto bytes_of = [&](Collective collective, std::int64_t elems) {
    return collective == Collective::kAllGather ? elems : elems * elem_bytes;
  };
  std::int64_t sent_bytes = 0;
  std::int64_t model_elems = 0;
  for (const std::uint32_t t : order) {
    sent_bytes += bytes_of(collective_of(kinds[t]), slot_elems(t));
    model_elems += tensors[t].elems();
  }
  const std::int64_t cap = budget_bytes(budget, sent_bytes, model_elems * elem_bytes);

  const bool are_buckets = budget.kind == FusionBudget::Kind::kBuckets;
  const bool end_with_buckets = budget.kind == FusionBudget::Kind::kLatency;
  const std::int64_t most_bytes = end_with_buckets ? cap + cap / 2 : cap;
  const std::vector<int> buckets = buckets_of(tensors, order);
  // Of each collective the last message takes further tensors.
  Layout layout;
  std::vector<std::size_t> completed_at;     // position in `order`, by message
  std::vector<std::int64_t> gradient_bytes;  // by message
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::size_t open[2] = {kNone, kNone};
  const auto bytes_in = [&](std::size_t message) {
    return bytes_of(layout.messages[message].collective, layout.messages[message].elems);
  };
  for (std::size_t position = 0; position < order.size(); ++position) {
    const std::uint32_t t = order[position];
    if (end_with_buckets && position > 0 && buckets[position] != buckets[position - 1]) {
      for (std::size_t& message : open)
        if (message != kNone && bytes_in(message) >= cap / 2) message = kNone;
    }
    const std::int64_t elems = slot_elems(t);
    if (elems == 0) continue;
    const Collective collective = collective_of(kinds[t]);
    std::size_t& last = open[static_cast<int>(collective)];
    if (last == kNone || (!are_buckets && bytes_in(last) + bytes_of(collective, elems) > most_bytes)) {
      last = layout.messages.size();
      layout.messages.emplace_back();
      completed_at.emplace_back();
      gradient_bytes.emplace_back();
    }
    append(&layout.messages[last], t, kinds[t], elems);
    completed_at[last] = position;
    const std::int64_t full_bytes = last == 0 ? std::min(kFirstBucketBytes, cap) : cap;
    gradient_bytes[last] += elems * tensors[t].gradient_elem_bytes;
    if (are_buckets && gradient_bytes[last] >= full_bytes) last = kNone;
  }
  std::vector<std::size_t> by_completion(layout.messages.size());
  std::iota(by_completion.begin(), by_completion.end(), std::size_t{0});
  std::sort(by_completion.begin(), by_completion.end(),
            [&](std::size_t a, std::size_t b) { return completed_at[a] < completed_at[b]; });
  Layout sorted;
  for (const std::size_t m : by_completion) sorted.messages.push_back(std::move(layout.messages[m]));
  return sorted;
}

std::vector<std::vector<std::string>> layout_names(const Layout& layout, const std::vector<std::string>& names) {
  std::vector<std::vector<std::string>> result;
  for (const Message& message : layout.messages) {
    std::vector<std::string>& slots = result.emplace_back();
    for (const Slot& slot : message.slots) slots.push_back(names[slot.tensor]);
  }
  return result;
}

Result<Layout> layout_from_names(const std::vector<std::vector<std::string>>& messages, const Layout& expected,
                                 const std::vector<std::string>& names) {
  std::unordered_map<std::string, Slot> slots;
  for (const Message& message : expected.messages)
    for (const Slot& slot : message.slots) slots[names[slot.tensor]] = slot;
  Layout layout;
  for (const std::vector<std::string>& message : messages) {
    if (message.empty()) {
      return make_error(StatusCode::kMismatch, "layout of the state: message %zu is empty", layout.messages.size());
    }
    layout.messages.emplace_back();
    for (const std::string& name : message) {
      const auto found = slots.find(name);
      if (found == slots.end()) {
        return make_error(StatusCode::kMismatch,
                          "layout of the state: tensor \"%s\" is unknown, occurs twice or does not travel",
                          name.c_str());
      }
      Message& last = layout.messages.back();
      if (!last.slots.empty() && !fit_together(last.slots[0].kind, found->second.kind)) {
        return make_error(
            StatusCode::kMismatch,
            "layout of the state: \"%s\" does not travel in the same collective as the rest of message %zu",
            name.c_str(), layout.messages.size() - 1);
      }
      append(&last, found->second.tensor, found->second.kind, found->second.elems);
      slots.erase(found);
    }
  }
  for (const Message& message : expected.messages) {
    for (const Slot& slot : message.slots) {
      const std::string& name = names[slot.tensor];
      if (slots.contains(name)) {
        return make_error(StatusCode::kMismatch, "layout of the state: tensor \"%s\" is in no message", name.c_str());
      }
    }
  }
  return layout;
}

}  // namespace cortado

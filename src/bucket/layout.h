// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Which tensor travels in which message, and where in it. Pure functions of shapes and options, so that every rank gets
// the same answer; keys are indices into the engine's list of tensors.
//
// What can be summed on the way (dense gradients, factors, values at shared places) travels in messages that are
// all-reduced; payloads that must be decoded first travel in messages that are gathered. Both kinds are one sequence.
//
// ACP-SGD sends one factor of each matrix per step and the other in the next step (section 2.2), so there are two
// layouts, one a parity; Power-SGD has one for each of its rounds; dense steps have their own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// kBothFactors: the row factor, then the column factor. kValues: of a sparsifier whose places all ranks share.
// kPayload: what a codec wrote; counted in bytes, at most `payload_elems` of them.
enum class SlotKind : std::uint8_t { kDense, kRowFactor, kColFactor, kBothFactors, kValues, kPayload };

enum class Collective : std::uint8_t { kAllReduce, kAllGather };

constexpr Collective collective_of(SlotKind kind) {
  return kind == SlotKind::kPayload ? Collective::kAllGather : Collective::kAllReduce;
}

struct LayoutTensor {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  int rank = 0;                    // columns of a factor
  std::int64_t payload_elems = 0;  // kValues: values; kPayload: bytes at most
  std::int64_t gradient_elem_bytes = sizeof(float);

  std::int64_t elems() const { return rows * cols; }
  std::int64_t slot_elems(SlotKind kind) const;
};

struct Slot {
  std::uint32_t tensor = 0;
  SlotKind kind = SlotKind::kDense;
  std::int64_t offset_elems = 0;  // within the message
  std::int64_t elems = 0;
};

// Holds slots of one collective. Of kAllGather messages elements are bytes.
struct Message {
  std::vector<Slot> slots;
  std::int64_t elems = 0;
  Collective collective = Collective::kAllReduce;
};

struct Layout {
  std::vector<Message> messages;

  std::int64_t elems() const;
  std::int64_t largest_message_elems() const;
};

// DDP's defaults: gradients of this many bytes are handed over together, the first ones sooner.
constexpr std::int64_t kFirstBucketBytes = std::int64_t{1} << 20;
constexpr std::int64_t kBucketBytes = std::int64_t{25} << 20;

// How much may be fused into one message.
struct FusionBudget {
  enum class Kind {
    kNone,     // one message a tensor
    kScaled,   // cap_bytes of dense gradient, scaled by (bytes sent / bytes of the model): ACP-SGD, section 5.3
    kBuckets,  // as DDP's buckets: the tensor that brings a message to cap_bytes of gradients is its last one; the
               // first message is full at kFirstBucketBytes
    kLatency,  // the size that balances the latency of more messages against the exposed tail of larger ones. A message
               // of half to one and a half times that ends where one of DDP's buckets does: it would wait for the next
  };
  Kind kind = Kind::kLatency;
  std::int64_t cap_bytes = 0;
};

// r' = min(rank, rows, cols) if r' columns pay: rows * cols > min_rate * r' * (rows + cols); else 0. A rate of 0 always
// compresses.
int effective_rank(std::int64_t rows, std::int64_t cols, int rank, double min_rate);

// The side each tensor begins with. Balanced: greedily, the most lopsided matrices first, so that both parities send
// about as many elements; otherwise all begin with the row factor.
std::vector<SlotKind> choose_sides(const std::vector<LayoutTensor>& tensors, bool balanced);

// One layout: tensors in the order of `order`, kinds[t] saying what tensor t sends; tensors of 0 elements get no slot.
// A tensor for which skip[t] is true is left out (dense tensors in the second round of Power-SGD); empty: none.
// A tensor above the budget (of kLatency: above one and a half times that) gets a message of its own, but of kBuckets.
// Messages are in the order in which they become complete if tensors become ready in `order`.
Layout make_layout(const std::vector<LayoutTensor>& tensors, const std::vector<std::uint32_t>& order,
                   const std::vector<SlotKind>& kinds, const std::vector<bool>& skip, const FusionBudget& budget,
                   std::int64_t elem_bytes);

// The size in bytes that messages have about: kNone 0; kScaled and kBuckets the one they are cut at; kLatency the one
// that is aimed at, up to one and a half times of which a message grows.
std::int64_t budget_bytes(const FusionBudget& budget, std::int64_t sent_bytes, std::int64_t model_bytes);

// Names in place of indices, for checkpoints, and back. from_names fails unless every tensor that `expected` holds
// occurs exactly once.
std::vector<std::vector<std::string>> layout_names(const Layout& layout, const std::vector<std::string>& names);
Result<Layout> layout_from_names(const std::vector<std::vector<std::string>>& messages, const Layout& expected,
                                 const std::vector<std::string>& names);

}  // namespace cortado

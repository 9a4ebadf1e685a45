// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Factors of a batch: where each rank adds up its own, and how their sum over ranks reaches the rank that inverts them.
// One reduce-scatter of triangles; or, compressed, one all-to-all of payloads that the owner decodes and adds up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/tensor_list.h"
#include "core/check.h"
#include "cortado/kfac.h"

namespace cortado {

enum class Side : std::uint8_t { kA, kG };

// One factor of one layer; with groups, several matrices.
struct FactorSlot {
  std::size_t layer = 0;
  Side side = Side::kA;
  std::int64_t n = 0;
  std::int64_t matrices = 1;
  int owner = 0;

  std::int64_t elems() const;  // of its triangles
};

class FactorSync {
 public:
  // `sums_over_ranks`: false where owners use the factors of their own batch (DP-KFAC).
  FactorSync(std::vector<FactorSlot> slots, bool sums_over_ranks, TensorListCodec codec, std::uint64_t random_seed,
             double timeout_s, Communicator* communicator);
  // In flight: abandons the group, and keeps memory that may still be written to.
  ~FactorSync();
  FactorSync(const FactorSync&) = delete;
  FactorSync& operator=(const FactorSync&) = delete;

  const std::vector<FactorSlot>& slots() const { return slots_; }

  // From the next reduce() on; on all ranks before the same one.
  void set_codec(TensorListCodec codec) { codec_ = std::move(codec); }

  // Whether anybody wants the triangles of a batch from this rank.
  bool wants(std::size_t slot) const { return sums_over_ranks_ || slots_[slot].owner == rank(); }
  // Where they are to be added, if so.
  float* triangles(std::size_t slot) {
    CORTADO_CHECK(wants(slot));
    is_touched_[slot] = true;
    return batch_.data() + offsets_[slot];
  }
  // After each that was added.
  void count_batch(std::size_t slot) { ++batches_[slot]; }
  bool has_batch(std::size_t slot) const { return batches_[slot] > 0; }
  void reset();

  // Brings the sum over ranks of each factor's mean batch to its owner, and forgets the batches.
  Status reduce(std::uint64_t step);

  // Of an owned slot after reduce(): the sum, and how many ranks had a batch.
  struct Sum {
    const float* triangles;
    double ranks;
  };
  Sum sum(std::size_t slot) const;

  const KfacTraffic& traffic() const { return traffic_; }
  std::int64_t memory_bytes() const;

 private:
  struct Segment {  // what one rank owns
    std::vector<std::size_t> slots;
    std::int64_t first = 0;  // in batch_; the counts of its slots stand behind its triangles
    std::int64_t triangle_elems = 0;
    std::int64_t elems() const { return triangle_elems + static_cast<std::int64_t>(slots.size()); }
  };
  struct Announced {  // of a message that follows
    std::int64_t bytes;
    std::uint64_t codec_hash;
  };

  int rank() const { return communicator_->rank(); }
  void finish_means();
  Status reduce_plain();
  Status reduce_encoded(std::uint64_t step);
  Status encode_for_owners(std::uint64_t step);  // to sent_ and sizes_
  Status add_decoded(int from, std::span<const std::byte> message);
  Status wait(Result<WorkId> work);

  std::vector<FactorSlot> slots_;
  bool sums_over_ranks_;
  TensorListCodec codec_;
  std::uint64_t random_seed_;
  double timeout_s_;
  Communicator* communicator_;

  std::vector<Segment> segments_;      // of each rank
  std::vector<std::int64_t> offsets_;  // of each slot, in batch_
  std::vector<std::int64_t> batches_;  // of each slot
  std::vector<bool> is_touched_;       // of each slot; where not, batch_ holds zeros
  std::vector<float> batch_;
  std::vector<float> sums_;                                // of the own segment
  std::vector<Announced> announced_, received_announced_;  // to and from each rank
  std::vector<std::byte> sent_, received_, scratch_;
  std::vector<std::int64_t> sizes_, received_sizes_;  // of what goes to each rank, and comes from it
  std::vector<float> decoded_;
  bool in_flight_ = false;  // a collective whose end was not seen
  KfacTraffic traffic_;
};

}  // namespace cortado

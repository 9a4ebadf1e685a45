// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What an option does to a bucket, as a chain of times on resources. One interpreter for all options:
//
//   encode        values -> a set of one payload of each tensor
//   all_to_all    over n: each rank is left with 1/n of the values, in n times as many payloads of 1/n of the size
//   all_gather, gather   over n: n times as many payloads
//   decode        takes as long as decoding each payload of the set
//
// Each tensor of a bucket is encoded by itself; what travels, travels together. Payloads whose sizes the codec does not
// fix are preceded by those sizes.
//
// Data lies where it was last encoded or decoded, at first where gradients are made; collectives take it from there.
// An encode or decode elsewhere is preceded by a copy, and the result is copied back. Gradients in host memory are
// copied into the bucket's buffer first, and averages out of it at last, unless an elementwise codec encodes them
// first, or decodes them last, on the CPU. Collectives of what is in host memory are preceded by what starting them
// takes of the thread of the backward pass. Source: Espresso (EuroSys 2023), section 4; "stays compressed" as
// docs/planner.md defines it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/job.h"
#include "cortado/option.h"
#include "planner/cost/codec_cost.h"
#include "planner/cost/collective_cost.h"
#include "planner/option_tree.h"

namespace cortado {

// What operations occupy. The links of the levels follow each other from kLink on.
enum Resource : std::uint8_t { kGpuCodec, kCpuCodec, kDeviceToHost, kHostToDevice, kLink };
constexpr int kMaxResources = kLink + kMaxLevels;
using Loads = std::array<std::int64_t, kMaxResources>;  // nanoseconds by resource

enum class StepPart : std::uint8_t {
  kOperation,  // or a copy for it
  kPacking,    // into or out of the bucket's buffer
  kStart,      // of a collective, by itself
};

struct Step {
  std::int64_t time_ns = 0;
  std::uint8_t resource = kLink;
  std::uint8_t operation = 0;  // of the option; of a copy: the one it is for
  StepPart part = StepPart::kOperation;
  std::uint8_t starts = 0;   // of collectives, at the step's end: whoever has encoded starts at once
  std::int64_t rest_ns = 0;  // of a chain: what the steps after it take, so that simulations may end early; 0 may do
};

// A cluster that plans can be made and simulated for: right in itself, and of no more levels than there are links
// above.
Status check_for_planning(const Cluster& cluster);

// What codecs do to each of a job's tensors, added up, so that a bucket costs two look-ups whatever its size.
class TensorSums {
 public:
  // `codecs` must outlive this.
  TensorSums(const std::vector<CodecCost>& codecs, const std::vector<JobTensor>& tensors);

  // Over tensors first .. last, each divided into so many parts, of which one is counted.
  std::int64_t encode_ns(const CodecCost& codec, OpDevice device, std::int64_t parts, int first, int last);
  std::int64_t decode_ns(const CodecCost& codec, OpDevice device, std::int64_t parts, int first, int last);
  std::int64_t payload_bytes(const CodecCost& codec, std::int64_t parts, int first, int last);
  // What all ranks sum of a low-rank codec in one collective over all levels (sums_factors()), both rounds of `power`:
  // factors of matrices that shrink by them, in float32; other tensors as they are.
  std::int64_t factor_bytes(const CodecCost& codec, int first, int last);

 private:
  using Sums = std::vector<std::int64_t>;  // of the tensors before each
  const Sums& sums(const CodecCost& codec, int what, std::int64_t parts);

  const std::vector<CodecCost>& codecs_;
  const std::vector<JobTensor>& tensors_;
  std::vector<std::array<std::vector<std::pair<std::int64_t, Sums>>, 6>> sums_;  // [codec][what] by parts
};

// Whether the option is encode, all_reduce over all levels, decode: what engines do with low-rank codecs by themselves.
bool sums_factors(const CodecCost& codec, const Option& option, int levels);

// That option.
Option sum_of_factors(OpDevice encode_device, OpDevice decode_device, int levels);

// Whether engines take the option with this codec. Of low rank, encodes are of what no other rank holds, too, as
// processors of different kinds project the same values to other bits; and vectors go by sums_factors() only, where
// they stay whole. Payloads of `power` are summed there only.
bool can_go(const CodecCost& codec, const Option& option, int levels, bool has_vectors);

// What is treated as one: tensors first .. last of `sums`; or one tensor of so many elements.
struct BucketShape {
  std::int64_t elems = 0;
  DType dtype = DType::kFloat32;
  TensorSums* sums = nullptr;
  int first = 0, last = 0;
  double low_rank_share = 1;  // of one tensor: bytes of a low-rank payload over those of the tensor

  bool operator==(const BucketShape&) const = default;
};

struct CostModel {
  CostModel(const Cluster& cluster, OpDevice home) : cluster(&cluster), home(home), collectives(cluster) {}

  // Of gradients into a bucket's buffer, and of the averages out of it: by kCpuCodec.
  std::int64_t pack_ns(std::int64_t elems) const { return home == OpDevice::kCpu ? cluster->pack.at(elems) : 0; }
  std::int64_t unpack_ns(std::int64_t elems) const { return home == OpDevice::kCpu ? cluster->unpack.at(elems) : 0; }
  // Of the thread of the backward pass, which starts collectives where gradients are in host memory.
  std::int64_t start_ns() const { return home == OpDevice::kCpu ? cluster->collective_start_ns.value_or(0) : 0; }

  const Cluster* cluster;
  OpDevice home;              // where gradients are made and needed
  bool gathers_sizes = true;  // that vary, before the payloads
  CollectiveCost collectives;
};

// What has to be done before values that lie on the host can be used there.
enum class Packing : std::uint8_t {
  kNone,    // they go by where gradients are
  kPack,    // before anything but an elementwise encode reads them
  kUnpack,  // at the end
};

// How far a bucket has come. Equal states at equal places of the tree have equal futures.
struct PathState {
  std::int64_t parts = 1;                    // a rank cares for one of so many parts of the values
  std::int64_t pieces = 0, piece_parts = 1;  // encoded: the payloads of each tensor, each of one of so many parts of it
  std::uint8_t parted = 0;                   // levels, as bits, among whose ranks the values are divided
  OpDevice place = OpDevice::kGpu;
  bool encoded = false;
  Packing packing = Packing::kNone;

  bool operator==(const PathState&) const = default;
};

// At most this many steps come of one operation: packing, a copy and itself; or packing, a start and itself; or starts,
// sizes and payloads.
struct OperationSteps {
  int count = 0;
  std::array<Step, 3> steps;
};

// One thread at a time.
class OptionCost {
 public:
  // `codec`: nullptr for options that do not encode. All must outlive this.
  OptionCost(const CostModel& model, const CodecCost* codec, const BucketShape& shape);

  PathState begin() const;
  // False: it can't be done with this codec here (not measured on that device, or parts of a low-rank payload would
  // have to be decoded).
  bool apply(const Operation& operation, PathState* state, OperationSteps* steps) const;
  // The way home.
  void finish(PathState* state, OperationSteps* steps) const;

 private:
  bool encode(const Operation& operation, PathState* state, OperationSteps* steps) const;
  bool decode(const Operation& operation, PathState* state, OperationSteps* steps) const;
  void travel(const Operation& operation, PathState* state, OperationSteps* steps) const;
  void add_transfer(const Operation& operation, const PathState& state, std::int64_t ranks, std::int64_t groups,
                    OperationSteps* steps) const;
  void arrive(OpKind kind, std::int64_t ranks, unsigned levels, PathState* state) const;
  bool goes_in_place(const Operation& operation) const;
  void pack(PathState* state, OperationSteps* steps) const;
  void move_to(OpDevice place, std::int64_t bytes, PathState* state, OperationSteps* steps) const;
  std::int64_t announcement_ns(const Operation& operation, const PathState& state, std::int64_t ranks,
                               std::int64_t groups) const;
  std::int64_t values_bytes(const PathState& state) const;
  std::int64_t payload_bytes(std::int64_t parts) const;
  std::int64_t held_payload_bytes(const PathState& state) const;  // of all pieces
  std::int64_t factor_bytes() const;
  template <typename Make>
  std::int64_t once(int what, std::int64_t parts, Make make) const;
  std::int64_t encode_ns(OpDevice device, std::int64_t parts) const;
  std::int64_t decode_ns(OpDevice device, std::int64_t parts) const;

  friend bool make_chain(const CostModel& model, const CodecCost* codec, const BucketShape& shape, const Option& option,
                         struct OptionChain* chain);

  const CostModel& model_;
  const CodecCost* codec_;
  BucketShape shape_;
  std::int64_t elem_bytes_;

  // PERF: hundreds of states ask for what the same few parts of a tensor take.
  static constexpr int kSlots = 8;
  struct Known {
    std::int64_t parts, value;
  };
  mutable std::uint64_t is_known_ = 0;
  mutable std::array<Known, 5 * kSlots> known_;  // where the bit of is_known_ is set
};

// What an option's whole chain takes for a bucket.
struct ChainCosts {
  Loads loads = {};
  std::int64_t own_ns = 0;           // the sum: what the bucket takes by itself
  std::int64_t longest_link_ns = 0;  // for which others have to wait at a link
  std::int64_t memory_bytes = 0;     // residuals, twice, of all places that lose something; two buffers of payloads
  int lossy_passes = 0;              // encodes of a codec that is not lossless
};

struct OptionChain : ChainCosts {
  std::vector<Step> steps;
};

// False: it can't be done, as above.
bool make_chain(const CostModel& model, const CodecCost* codec, const BucketShape& shape, const Option& option,
                OptionChain* chain);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// SchemeProgram: what one rank does when an option is executed for one message, worked out before the first step.
// Pure; the drawing is in docs/schemes.md.
//
// A message is the values of its tensors one after the other, `elems` in all. Each first step that leaves every rank of
// its group a part (reduce_scatter, all_to_all) divides what a rank has into as many parts as the group has ranks; the
// smallest parts that arise are the atoms. A region is a range of atoms: what a rank has after some operations.
//
// Between encode and decode a rank holds units: a unit is the payloads that one contributor made of one cell (a region
// that does not get divided any more before decode), one payload for each piece of a tensor in it. Contributors are
// numbered from 0 in the order in which their values are summed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cortado/codec.h"
#include "cortado/option.h"
#include "cortado/topology.h"

namespace cortado {

struct SchemeTensor {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  std::int64_t elems() const { return rows * cols; }
};

struct Region {
  int first = 0;
  int count = 0;

  bool operator==(const Region&) const = default;
};

// A contiguous range of one tensor's elements, encoded as a tensor by itself: whole rows where that is what it is, else
// one row.
struct Piece {
  int tensor = 0;
  std::int64_t begin = 0;   // in the tensor
  std::int64_t offset = 0;  // in the message
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::uint64_t max_bytes = 0;  // of a payload and its check, or just those of a sum form

  std::int64_t elems() const { return rows * cols; }
};

// What travels of a cell.
enum class PayloadForm {
  kChecked,   // payloads, each with a check behind it, so that none that was damaged on the way is decoded
  kSummable,  // payloads as they are, because they are summed
  kSumForm,   // sum forms that are no payloads (Codec::to_sum_form)
};

constexpr std::uint64_t kPayloadCheckBytes = 4;

struct Cell {
  Region region;
  PayloadForm form = PayloadForm::kChecked;
  std::vector<Piece> pieces;  // none is empty
  std::uint64_t max_bytes = 0;
};

struct PayloadUnit {
  int cell = 0;  // index into SchemeProgram::cells
  int contributor = 0;
};

struct SchemeStep {
  Operation op;
  bool active = true;  // false: another rank has the values, this one is not part of it
  int group_size = 1;  // collectives
  int group_rank = 0;
  Region before = {}, after = {};  // what is held, here or at the root
  std::vector<PayloadUnit> units = {},
                           result_units = {};  // payloads held before and after, in memory order; what an encoded
                                               // collective divides stands in the order of the ranks it goes to
  // Payloads stand in memory as entries, one for each piece of each unit: how many there are before each unit and, at
  // the end, in all.
  std::vector<std::size_t> first_entry = {}, first_result_entry = {};
  std::vector<std::size_t> moved_from =
      {};                              // which entry of the memory before each entry of `units` is; empty: the same
  std::vector<int> decode_order = {};  // decode: indices of units by cell, those of a cell by contributor
  int contributors = 0;                // decode: to each cell
  int terms = 1;                       // encode, decode: so many payloads are added up on the way
  float scale = 1;                     // decode: of what comes out
  int place = -1;                      // encode: index into SchemeProgram::places
};

// Where something is lost: one encode.
struct FeedbackPlace {
  std::string name;     // "intra" (the encode before the sum over it), "intra again" (before the way back), "flat" ...
  Region region;        // of this rank
  bool active = true;   // false: this rank encodes nothing there
  int contributor = 0;  // which of the ranks with that region encodes; equal where values are the same
  int replicas = 1;     // ranks with this region whose values, and so residuals, are the same
  float scale = 1;      // of the values before they are encoded
  float share = 1;      // what a value that is lost here was worth in the result
};

struct SchemeProgram {
  std::vector<std::int64_t> bounds;  // atom a is the elements bounds[a] to bounds[a + 1]
  std::vector<SchemeStep> steps;
  std::vector<Cell> cells;
  std::vector<FeedbackPlace> places;
  float result_scale = 1;  // makes the sum, or the mean, of what is left at the end

  std::int64_t begin_of(Region region) const { return bounds[static_cast<std::size_t>(region.first)]; }
  std::int64_t elems_of(Region region) const {
    return bounds[static_cast<std::size_t>(region.first + region.count)] - begin_of(region);
  }
  Region whole() const { return {0, static_cast<int>(bounds.size()) - 1}; }
};

// `averages`: the result is the mean over all ranks, and what is encoded is the mean over the ranks summed so far; so
// that codecs with a scale of their own see values of the same size at every place, in every option. Else: the sum.
// `codec` may be null if the option encodes nothing. Refuses what Option::check() refuses, and sums of payloads of a
// codec that has none (Codec::sum_form).
Result<SchemeProgram> compile_scheme(const Topology& topology, int rank, const Option& option, const Codec* codec,
                                     const std::vector<SchemeTensor>& tensors, bool averages = false);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/scheme_program.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "core/check.h"

namespace cortado {

namespace {

// Leaves every rank of the group a part.
bool divides(OpKind kind) { return kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll; }

// Leaves the root all, the others nothing.
bool gathers_at_root(OpKind kind) { return kind == OpKind::kReduce || kind == OpKind::kGather; }

class Compiler {
 public:
  Compiler(const Topology& topology, int rank, const Option& option, const Codec* codec,
           const std::vector<SchemeTensor>& tensors, bool averages)
      : topology_(topology), rank_(rank), option_(option), codec_(codec), tensors_(tensors), averages_(averages) {}

  Result<SchemeProgram> run() {
    divide_message();
    region_ = program_.whole();
    for (std::size_t i = 0; i < option_.operations.size(); ++i) {
      const Operation& op = option_.operations[i];
      if (op.kind == OpKind::kEncode) {
        CORTADO_RETURN_IF_ERROR(encode(i));
      } else if (op.kind == OpKind::kDecode) {
        decode(op);
      } else {
        CORTADO_RETURN_IF_ERROR(collective(op).with_context("option: operation " + std::to_string(i)));
      }
    }
    if (averages_) program_.result_scale = 1.0f / static_cast<float>(terms_);
    return std::move(program_);
  }

 private:
  struct Open {  // a first step that has not been answered
    Region before;
    bool active;
    int group_size;
  };

  // ---- the message

  void divide_message() {
    std::int64_t elems = 0;
    for (const SchemeTensor& tensor : tensors_) {
      offsets_.push_back(elems);
      elems += tensor.elems();
    }
    int atoms = 1;
    for (const Operation& op : option_.operations) {
      if (divides(op.kind)) atoms *= topology_.group_size(op.levels);
    }
    for (int a = 0; a <= atoms; ++a) {
      program_.bounds.push_back(bound(static_cast<std::int64_t>(static_cast<__int128>(elems) * a / atoms)));
    }
  }

  // Parts of a matrix that is to be factored are matrices: whole rows.
  std::int64_t bound(std::int64_t at) const {
    if (codec_ == nullptr || !codec_->row().traits.low_rank) return at;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::int64_t in_tensor = at - offsets_[t];
      if (in_tensor > 0 && in_tensor < tensors_[t].elems()) return at - in_tensor % tensors_[t].cols;
    }
    return at;
  }

  int cell_of(Region region) {
    for (std::size_t c = 0; c < program_.cells.size(); ++c) {
      const Cell& known = program_.cells[c];
      if (known.region == region && known.form == form_) return static_cast<int>(c);
    }
    Cell cell{.region = region, .form = form_, .pieces = {}};
    const std::int64_t begin = program_.begin_of(region), end = begin + program_.elems_of(region);
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::int64_t from = std::max(begin, offsets_[t]);
      const std::int64_t to = std::min(end, offsets_[t] + tensors_[t].elems());
      if (from < to) cell.pieces.push_back(make_piece(static_cast<int>(t), from, to));
    }
    for (const Piece& piece : cell.pieces) cell.max_bytes += piece.max_bytes;
    program_.cells.push_back(std::move(cell));
    return static_cast<int>(program_.cells.size()) - 1;
  }

  Piece make_piece(int t, std::int64_t from, std::int64_t to) const {
    const SchemeTensor& tensor = tensors_[static_cast<std::size_t>(t)];
    const std::int64_t begin = from - offsets_[static_cast<std::size_t>(t)], elems = to - from;
    const bool whole_rows = begin % tensor.cols == 0 && elems % tensor.cols == 0;
    Piece piece{.tensor = t,
                .begin = begin,
                .offset = from,
                .rows = whole_rows ? elems / tensor.cols : 1,
                .cols = whole_rows ? tensor.cols : elems};
    if (form_ == PayloadForm::kSumForm) {
      piece.max_bytes = static_cast<std::uint64_t>(sum_form_of(piece)->elems);
    } else {
      piece.max_bytes = codec_->max_payload_bytes(piece.rows, piece.cols, DType::kFloat32);
      if (form_ == PayloadForm::kChecked) piece.max_bytes += kPayloadCheckBytes;
    }
    return piece;
  }

  std::optional<SumForm> sum_form_of(const Piece& piece) const {
    return codec_->sum_form(piece.rows, piece.cols, DType::kFloat32);
  }

  // ---- encode and decode

  Status encode(std::size_t index) {
    int parts = 1;  // before decode, as is what follows
    bool has_sums = false;
    summed_terms_ = 1;
    for (std::size_t i = index + 1; option_.operations[i].kind != OpKind::kDecode; ++i) {
      const int n = topology_.group_size(option_.operations[i].levels);
      if (divides(option_.operations[i].kind)) parts *= n;
      if (!is_sum(option_.operations[i].kind)) continue;
      summed_terms_ *= n;
      has_sums = true;
    }
    const std::optional<SumForm> form = codec_->sum_form(1, 1, DType::kFloat32);
    const bool sums_codes = form.has_value() && !form->is_payload;
    form_ = !has_sums ? PayloadForm::kChecked : sums_codes ? PayloadForm::kSumForm : PayloadForm::kSummable;
    units_.clear();
    contributors_ = 1;
    const int atoms = region_.count / parts;
    for (int part = 0; part < parts; ++part) {
      units_.push_back({.cell = cell_of({region_.first + part * atoms, atoms})});
    }
    add_place(option_.operations[index + 1].levels);
    // Kernels of different processors project the same values to other bits, and no sum makes them one again.
    if (program_.places.back().replicas > 1 && codec_->row().traits.low_rank) {
      return make_error(
          StatusCode::kUnsupported,
          "option: \"%s\" is of low rank, but several ranks would encode the same sums, and those of other "
          "processors to other bits; expected an encode before all_reduce and all_gather",
          codec_->spec().c_str());
    }
    terms_ = 1;
    add_step({.op = option_.operations[index],
              .active = active_,
              .before = region_,
              .after = region_,
              .result_units = units_,
              .terms = summed_terms_,
              .place = static_cast<int>(program_.places.size()) - 1});
    return {};
  }

  void add_place(LevelRange levels) {
    const bool again = summed_levels_ == static_cast<int>(topology_.levels.size());
    const int summed_ranks = topology_.group_size({0, summed_levels_ - 1});
    int copies = summed_ranks;
    for (const Open& open : open_) copies /= open.group_size;
    program_.places.push_back({.name = topology_.range_name(levels) + (again ? " again" : ""),
                               .region = region_,
                               .active = active_,
                               .contributor = rank_ / summed_ranks,
                               .replicas = copies});
    if (!averages_) return;
    // What will be summed before decode is made small enough before, so that narrow values do not overflow; codes of
    // one scale can't be.
    const int summed_later = form_ == PayloadForm::kSumForm ? 1 : summed_terms_;
    FeedbackPlace& place = program_.places.back();
    place.scale = 1.0f / static_cast<float>(terms_ * summed_later);
    place.share = static_cast<float>(summed_ranks * summed_later) / static_cast<float>(topology_.world_size());
  }

  void decode(const Operation& op) {
    SchemeStep step{.op = op,
                    .active = active_,
                    .before = region_,
                    .after = region_,
                    .units = units_,
                    .decode_order = std::vector<int>(units_.size()),
                    .terms = summed_terms_};
    if (averages_ && form_ == PayloadForm::kSumForm) step.scale = 1.0f / static_cast<float>(summed_terms_);
    std::iota(step.decode_order.begin(), step.decode_order.end(), 0);
    std::sort(step.decode_order.begin(), step.decode_order.end(), [&](int a, int b) {
      const PayloadUnit &left = units_[static_cast<std::size_t>(a)], &right = units_[static_cast<std::size_t>(b)];
      return std::pair(left.cell, left.contributor) < std::pair(right.cell, right.contributor);
    });
    std::vector<int> contributors(program_.cells.size());
    for (const PayloadUnit& unit : units_) ++contributors[static_cast<std::size_t>(unit.cell)];
    for (const int count : contributors) {
      CORTADO_CHECK(count == 0 || step.contributors == 0 || count == step.contributors,
                    "cells of one step have equally many contributors");
      step.contributors = std::max(step.contributors, count);
    }
    add_step(std::move(step));
  }

  void add_step(SchemeStep step) {
    step.first_entry = first_entries(step.units);
    step.first_result_entry = first_entries(step.result_units);
    program_.steps.push_back(std::move(step));
  }

  std::vector<std::size_t> first_entries(const std::vector<PayloadUnit>& units) const {
    std::vector<std::size_t> first = {0};
    for (const PayloadUnit& unit : units) {
      first.push_back(first.back() + program_.cells[static_cast<std::size_t>(unit.cell)].pieces.size());
    }
    return first;
  }

  // ---- collectives

  Status collective(const Operation& op) {
    SchemeStep step{.op = op,
                    .active = active_,
                    .group_size = topology_.group_size(op.levels),
                    .group_rank = topology_.rank_in_group(rank_, op.levels),
                    .before = region_};
    const bool first_or_only = summed_levels_ < static_cast<int>(topology_.levels.size());
    if (op.encoded) {
      if (is_sum(op.kind)) CORTADO_RETURN_IF_ERROR(check_sum());
      step.units = units_;
      if (divides(op.kind)) sort_by_receiver(&step);
    }
    first_or_only ? take_first(&step) : take_second(&step);
    step.after = region_;
    if (op.encoded) step.result_units = units_;
    add_step(std::move(step));
    return {};
  }

  Status check_sum() const {
    for (const PayloadUnit& unit : units_) {
      for (const Piece& piece : program_.cells[static_cast<std::size_t>(unit.cell)].pieces) {
        const std::optional<SumForm> form = sum_form_of(piece);
        if (form.has_value() && summed_terms_ <= form->max_terms) continue;
        return make_error(StatusCode::kInvalidArgument, "payloads of %s can't be summed over %d ranks",
                          codec_->spec().c_str(), summed_terms_);
      }
    }
    return {};
  }

  int receiver_of(const PayloadUnit& unit, int group_size) const {
    const Region cell = program_.cells[static_cast<std::size_t>(unit.cell)].region;
    return (cell.first - region_.first) / (region_.count / group_size);
  }

  void sort_by_receiver(SchemeStep* step) const {
    std::vector<int> order(units_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return receiver_of(units_[static_cast<std::size_t>(a)], step->group_size) <
             receiver_of(units_[static_cast<std::size_t>(b)], step->group_size);
    });
    if (std::is_sorted(order.begin(), order.end())) return;
    const std::vector<std::size_t> first = first_entries(units_);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto old = static_cast<std::size_t>(order[i]);
      step->units[i] = units_[old];
      for (std::size_t entry = first[old]; entry < first[old + 1]; ++entry) step->moved_from.push_back(entry);
    }
  }

  // A collective over levels that have not been summed over. All members of its group have the same region and units.
  void take_first(SchemeStep* step) {
    const OpKind kind = step->op.kind;
    const int n = step->group_size, own = step->group_rank;
    summed_levels_ = step->op.levels.last + 1;
    if (!step->op.encoded || !is_sum(kind)) terms_ *= n;  // those of payloads have been counted by encode
    if (divides(kind) || gathers_at_root(kind)) open_.push_back({region_, active_, n});
    if (step->op.encoded && divides(kind)) {
      std::erase_if(units_, [&](const PayloadUnit& unit) { return receiver_of(unit, n) != own; });
    }
    if (kind == OpKind::kAllToAll || kind == OpKind::kGather || kind == OpKind::kAllGather) {
      const std::vector<PayloadUnit> of_each = std::move(units_);
      units_.clear();
      for (int member = 0; member < n; ++member) {
        for (const PayloadUnit& unit : of_each) {
          units_.push_back({unit.cell, member * contributors_ + unit.contributor});
        }
      }
      contributors_ *= n;
    }
    if (divides(kind)) {
      const int count = region_.count / n;
      region_ = {region_.first + own * count, count};
    }
    if (gathers_at_root(kind)) active_ = active_ && own == 0;
  }

  // The answer to the last first step: the members of the group have one part each, or the root has all.
  void take_second(SchemeStep* step) {
    const Open first = open_.back();
    open_.pop_back();
    if (step->op.kind == OpKind::kBroadcast) {
      step->active = active_ = first.active;
      return;
    }
    if (step->op.encoded) {
      const std::vector<PayloadUnit> of_own = std::move(units_);
      units_.clear();
      for (int member = 0; member < step->group_size; ++member) {
        for (const PayloadUnit& unit : of_own) {
          Region cell = program_.cells[static_cast<std::size_t>(unit.cell)].region;
          cell.first += (member - step->group_rank) * region_.count;
          units_.push_back({cell_of(cell), unit.contributor});
        }
      }
    }
    region_ = first.before;
  }

  const Topology& topology_;
  const int rank_;
  const Option& option_;
  const Codec* codec_;
  const std::vector<SchemeTensor>& tensors_;
  const bool averages_;
  std::vector<std::int64_t> offsets_;

  SchemeProgram program_;
  Region region_;
  bool active_ = true;
  int summed_levels_ = 0;
  std::vector<Open> open_;
  std::vector<PayloadUnit> units_;            // held now
  int contributors_ = 1;                      // of each cell held
  int summed_terms_ = 1;                      // payloads that are added up before decode
  PayloadForm form_ = PayloadForm::kChecked;  // of what is held
  int terms_ = 1;                             // what is held, or will be decoded, is the sum of so many means
};

}  // namespace

Result<SchemeProgram> compile_scheme(const Topology& topology, int rank, const Option& option, const Codec* codec,
                                     const std::vector<SchemeTensor>& tensors, bool averages) {
  CORTADO_RETURN_IF_ERROR(topology.check());
  const bool has_sum_form = codec != nullptr && codec->sum_form(1, 1, DType::kFloat32).has_value();
  CORTADO_RETURN_IF_ERROR(option.check(static_cast<int>(topology.levels.size()), has_sum_form));
  if (option.encodes() > 0 && codec == nullptr) {
    return make_error(StatusCode::kInvalidArgument, "option: it encodes, but there is no codec");
  }
  return Compiler(topology, rank, option, codec, tensors, averages).run();
}

}  // namespace cortado

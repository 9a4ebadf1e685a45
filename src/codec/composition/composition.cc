// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/composition/composition.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "codec/binding.h"
#include "codec/explain.h"
#include "codec/none/none.h"
#include "codec/stage.h"
#include "core/check.h"

namespace cortado {

namespace {

constexpr std::uint64_t kAlignBytes = 64;
constexpr std::uint64_t kStageIdBytes = 2;                     // wire id and payload version of a stage
constexpr std::uint64_t kLengthBytes = sizeof(std::uint64_t);  // of an index or a side section

// ---- which codecs may stand where ----

enum class Role { kSparsifier, kQuantiser, kCoder, kValues, kLowRank };

Role role_of(const Codec& codec) {
  if (codec.row().traits.low_rank) return Role::kLowRank;
  if (codec.sparsifier() != nullptr) return Role::kSparsifier;
  if (codec.quantiser() != nullptr) return Role::kQuantiser;
  return std::string_view(codec.row().name) == "rans" ? Role::kCoder : Role::kValues;
}

// What is wrong with `second` behind `first`; nullptr if nothing is.
const char* objection(Role first, Role second) {
  if (first == Role::kLowRank || second == Role::kLowRank) return "low-rank codecs stand alone";
  if (first == Role::kCoder) return "rans codes integers and must come last";
  if (first == Role::kValues) return "nothing may follow a codec that, as set, is neither sparsifier nor quantiser";
  if (first == Role::kQuantiser && second != Role::kCoder) return "only rans may follow a quantiser";
  if (first == Role::kSparsifier && second == Role::kCoder) {
    return "rans codes the integers of a quantiser; behind a sparsifier may come sparsifiers, quantisers or other "
           "codecs "
           "of floats, such as float_rans";
  }
  return nullptr;
}

Status check_order(const std::vector<std::unique_ptr<Codec>>& stages) {
  if (stages.size() > kMaxStages) {
    return make_error(StatusCode::kInvalidArgument, "%zu codecs in a composition, expected at most %zu", stages.size(),
                      kMaxStages);
  }
  for (std::size_t i = 0; i + 1 < stages.size(); ++i) {
    const char* wrong = objection(role_of(*stages[i]), role_of(*stages[i + 1]));
    if (wrong == nullptr) continue;
    return make_error(StatusCode::kInvalidArgument, "%s | %s: %s", stages[i]->row().name, stages[i + 1]->row().name,
                      wrong);
  }
  return {};
}

CodecTraits traits_of(const std::vector<std::unique_ptr<Codec>>& stages) {
  CodecTraits traits = {.lossless = true, .unbiased = true, .divisible = true};
  for (const std::unique_ptr<Codec>& stage : stages) {
    const CodecTraits& own = stage->row().traits;
    traits.lossless &= own.lossless;
    traits.unbiased &= own.unbiased || own.lossless;
    traits.sparse |= own.sparse;
    traits.divisible &= own.divisible;
    traits.needs_residual |= own.needs_residual;
  }
  return traits;
}

// ---- memory ----

std::uint64_t round_up(std::uint64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

// The parts of the scratch memory of one shape, in bytes, each a multiple of kAlignBytes but the last.
struct WorkspaceBytes {
  std::uint64_t values[2] = {};  // what the sparsifiers of even and of odd number kept
  std::uint64_t codes = 0;
  std::uint64_t stage = 0;

  std::uint64_t sum() const { return kAlignBytes - 1 + values[0] + values[1] + codes + stage; }
};

struct Workspace {
  Workspace(std::span<std::byte> scratch, const WorkspaceBytes& bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
    std::span<std::byte> rest = scratch.subspan((kAlignBytes - address % kAlignBytes) % kAlignBytes);
    const auto take = [&rest](std::uint64_t size) {
      const std::span<std::byte> part = rest.first(size);
      rest = rest.subspan(size);
      return part;
    };
    for (int i = 0; i < 2; ++i) values[i] = reinterpret_cast<float*>(take(bytes.values[i]).data());
    codes = reinterpret_cast<std::uint8_t*>(take(bytes.codes).data());
    stage = take(bytes.stage);
  }

  float* values[2];
  std::uint8_t* codes;
  std::span<std::byte> stage;
};

// Lengths in the header, one after the other.
void put_length(std::byte*& to, std::uint64_t length) {
  std::memcpy(to, &length, sizeof(length));
  to += sizeof(length);
}

std::uint64_t take_length(const std::byte*& from) {
  std::uint64_t length;
  std::memcpy(&length, from, sizeof(length));
  from += sizeof(length);
  return length;
}

// ---- the codec ----

class Composition final : public Codec {
 public:
  explicit Composition(std::vector<std::unique_ptr<Codec>> stages) : stages_(std::move(stages)) {
    row_ = {.name = "composition",
            .wire_id = 13,
            .version = 1,
            .traits = traits_of(stages_),
            .summary = "codecs one behind the other, each taking what the one before kept",
            .parameters = {},
            .make = nullptr};
    for (const std::unique_ptr<Codec>& stage : stages_) stage_rows_.push_back(&stage->row());
    while (sparsifiers_ < stages_.size() && role_of(*stages_[sparsifiers_]) == Role::kSparsifier) ++sparsifiers_;
    if (sparsifiers_ < stages_.size()) {
      values_ = stages_[sparsifiers_].get();
    } else {
      plain_values_ = none_row().make({}).value();
      values_ = plain_values_.get();
    }
    if (sparsifiers_ + 2 == stages_.size()) coder_ = stages_.back().get();
  }

  std::string spec() const override {
    std::string text;
    for (const std::unique_ptr<Codec>& stage : stages_) text += (text.empty() ? "" : " | ") + stage->spec();
    return text;
  }

  const CodecRow& row() const override { return row_; }
  bool is_majority_vote() const override { return values_->is_majority_vote(); }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    if (rows == 0 || cols == 0) return 0;
    std::uint64_t bytes = header_bytes();
    View view = {nullptr, dtype, rows, cols};
    for (std::size_t i = 0; i < sparsifiers_; ++i) {
      bytes += sparsifier_at(i).max_index_bytes(view.rows, view.cols);
      view = kept_view(nullptr, sparsifier_at(i).max_kept(view.rows, view.cols));
    }
    if (coder_ == nullptr) return bytes + values_->max_payload_bytes(view.rows, view.cols, view.dtype);
    return bytes + values_->quantiser()->max_side_bytes(view.rows, view.cols) +
           coder_->max_payload_bytes(view.rows, view.cols, DType::kUint8);
  }

  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    return rows == 0 || cols == 0 ? 0 : workspace_bytes(rows, cols, dtype).sum();
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    if (input.elems() == 0) return std::uint64_t{0};
    Result<std::uint64_t> bytes = encode_stages(input, context, payload, scratch);
    if (!bytes.ok()) return bytes.status().with_context(spec());
    return bytes;
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    return decode_to(payload, output, scratch, /*adds=*/false);
  }

  // What sparsifiers kept is scattered over zeros.
  bool can_add() const override { return sparsifiers_ == 0 && coder_ != nullptr && values_->can_add(); }

  Status decode_add(std::span<const std::byte> payload, TensorView sum, std::span<std::byte> scratch) const override {
    if (!can_add() || sum.dtype != DType::kFloat32) return Codec::decode_add(payload, sum, scratch);
    return decode_to(payload, sum, scratch, /*adds=*/true);
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType dtype) const override {
    PayloadExplainer explainer(payload);
    if (rows > 0 && cols > 0) explain_stages(explainer, {nullptr, dtype, rows, cols});
    return std::move(explainer).finish();
  }

  std::vector<std::unique_ptr<Codec>> take_stages() && { return std::move(stages_); }

 private:
  using View = ConstTensorView;

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  Status decode_to(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch,
                   bool adds) const {
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    if (output.elems() == 0) return check_payload_bytes(*this, payload, output, 0);
    Status status = decode_stages(payload, output, scratch, adds);
    return status.ok() ? status : status.with_context(spec());
  }

  const Sparsifier& sparsifier_at(std::size_t i) const { return *stages_[i]->sparsifier(); }

  // What a sparsifier kept is a float32 vector for the next.
  static View kept_view(const float* values, std::int64_t kept) { return {values, DType::kFloat32, 1, kept}; }

  std::size_t lengths() const { return sparsifiers_ + (coder_ != nullptr ? 1 : 0); }
  std::uint64_t header_bytes() const { return kStageIdBytes * stages_.size() + kLengthBytes * lengths(); }

  WorkspaceBytes workspace_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const {
    WorkspaceBytes bytes;
    View view = {nullptr, dtype, rows, cols};
    for (std::size_t i = 0; i < sparsifiers_; ++i) {
      bytes.stage = std::max(bytes.stage, sparsifier_at(i).select_scratch_bytes(view.rows, view.cols, view.dtype));
      view = kept_view(nullptr, sparsifier_at(i).max_kept(view.rows, view.cols));
      bytes.values[i % 2] = std::max(bytes.values[i % 2], round_up(static_cast<std::uint64_t>(view.size_bytes())));
    }
    if (coder_ == nullptr) {
      bytes.stage = std::max(bytes.stage, values_->scratch_bytes(view.rows, view.cols, view.dtype));
      return bytes;
    }
    bytes.codes = round_up(static_cast<std::uint64_t>(view.elems()));
    bytes.stage = std::max({bytes.stage, coder_->scratch_bytes(view.rows, view.cols, DType::kUint8),
                            values_->quantiser()->quantise_scratch_bytes(view.rows, view.cols, view.dtype)});
    return bytes;
  }

  // Stages draw from streams of their own: what one keeps must not tell how another rounds.
  static EncodeContext context_of_stage(const EncodeContext& context, std::size_t stage) {
    constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;
    return {.seed = context.seed + stage * kGoldenRatio, .step = context.step, .tensor = context.tensor};
  }

  Result<std::uint64_t> encode_stages(View input, const EncodeContext& context, std::span<std::byte> payload,
                                      std::span<std::byte> scratch) const {
    const Workspace workspace(scratch, workspace_bytes(input.rows, input.cols, input.dtype));
    std::byte* header = payload.data();
    for (const CodecRow* row : stage_rows_) {
      *header++ = std::byte{row->wire_id};
      *header++ = std::byte{row->version};
    }
    std::span<std::byte> rest = payload.subspan(header_bytes());
    View view = input;
    for (std::size_t i = 0; i < sparsifiers_; ++i) {
      Selection selection;
      float* values = workspace.values[i % 2];
      if (view.elems() > 0) {
        const auto room = static_cast<std::size_t>(sparsifier_at(i).max_kept(view.rows, view.cols));
        const std::uint64_t index_bytes = sparsifier_at(i).max_index_bytes(view.rows, view.cols);
        CORTADO_ASSIGN_OR_RETURN(selection, sparsifier_at(i).select(view, context_of_stage(context, i), {values, room},
                                                                    rest.first(index_bytes), workspace.stage));
      }
      put_length(header, selection.index_bytes);
      rest = rest.subspan(selection.index_bytes);
      view = kept_view(values, selection.kept);
    }
    const EncodeContext last = context_of_stage(context, sparsifiers_);
    if (coder_ != nullptr) {
      CORTADO_ASSIGN_OR_RETURN(const std::uint64_t side_bytes, quantise(view, last, rest, workspace));
      put_length(header, side_bytes);
      rest = rest.subspan(side_bytes);
      view = {workspace.codes, DType::kUint8, view.rows, view.cols};
    }
    const Codec& final_codec = coder_ != nullptr ? *coder_ : *values_;
    CORTADO_ASSIGN_OR_RETURN(const std::uint64_t bytes, final_codec.encode(view, last, rest, workspace.stage));
    return payload.size() - rest.size() + bytes;
  }

  Result<std::uint64_t> quantise(View view, const EncodeContext& context, std::span<std::byte> side,
                                 const Workspace& workspace) const {
    if (view.elems() == 0) return std::uint64_t{0};
    const std::span<std::uint8_t> codes(workspace.codes, static_cast<std::size_t>(view.elems()));
    return values_->quantiser()->quantise(view, context, codes, side, workspace.stage);
  }

  // Forward through the index sections, which say how many values each sparsifier kept; then back through the stages.
  Status decode_stages(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch,
                       bool adds) const {
    CORTADO_RETURN_IF_ERROR(check_header(payload));
    const Workspace workspace(scratch, workspace_bytes(output.rows, output.cols, output.dtype));
    const std::byte* header = payload.data() + kStageIdBytes * stages_.size();
    std::span<const std::byte> rest = payload.subspan(header_bytes());
    std::array<std::span<const std::byte>, kMaxStages> indices;
    std::array<TensorView, kMaxStages + 1> views;  // views[i]: what stage i encoded
    views[0] = output;
    for (std::size_t i = 0; i < sparsifiers_; ++i) {
      CORTADO_ASSIGN_OR_RETURN(indices[i], take_section(rest, take_length(header)));
      CORTADO_ASSIGN_OR_RETURN(const std::int64_t kept, count_kept(i, indices[i], views[i]));
      views[i + 1] = {workspace.values[i % 2], DType::kFloat32, 1, kept};
    }
    if (coder_ == nullptr) {
      CORTADO_RETURN_IF_ERROR(values_->decode(rest, views[sparsifiers_], workspace.stage));
    } else {
      CORTADO_ASSIGN_OR_RETURN(const std::span<const std::byte> side, take_section(rest, take_length(header)));
      CORTADO_RETURN_IF_ERROR(decode_codes(rest, side, views[sparsifiers_], workspace, adds));
    }
    for (std::size_t i = sparsifiers_; i-- > 0;) {
      if (views[i].elems() == 0) continue;
      const std::span<const float> values(workspace.values[i % 2], static_cast<std::size_t>(views[i + 1].cols));
      CORTADO_RETURN_IF_ERROR(sparsifier_at(i).scatter(indices[i], values, views[i], workspace.stage));
    }
    return {};
  }

  Status check_header(std::span<const std::byte> payload) const {
    if (payload.size() < header_bytes()) {
      return make_error(StatusCode::kCorruptData, "decode: the payload has %zu bytes, expected at least %llu",
                        payload.size(), static_cast<unsigned long long>(header_bytes()));
    }
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      const CodecRow& expected = *stage_rows_[i];
      const int wire_id = std::to_integer<int>(payload[kStageIdBytes * i]);
      const int version = std::to_integer<int>(payload[kStageIdBytes * i + 1]);
      if (wire_id == expected.wire_id && version == expected.version) continue;
      return make_error(StatusCode::kCorruptData,
                        "decode: stage %zu was made by codec %d, payload version %d, expected %d (%s), version %d", i,
                        wire_id, version, expected.wire_id, expected.name, expected.version);
    }
    return {};
  }

  static Result<std::span<const std::byte>> take_section(std::span<const std::byte>& rest, std::uint64_t bytes) {
    if (bytes > rest.size()) {
      return make_error(StatusCode::kCorruptData, "decode: a section of %llu bytes, only %zu are left",
                        static_cast<unsigned long long>(bytes), rest.size());
    }
    const std::span<const std::byte> section = rest.first(bytes);
    rest = rest.subspan(bytes);
    return section;
  }

  Result<std::int64_t> count_kept(std::size_t i, std::span<const std::byte> index, const TensorView& view) const {
    std::int64_t kept = 0, most = 0;
    if (view.elems() > 0) {
      CORTADO_ASSIGN_OR_RETURN(kept, sparsifier_at(i).check_index(index, view.rows, view.cols));
      most = sparsifier_at(i).max_kept(view.rows, view.cols);
    } else if (!index.empty()) {
      return make_error(StatusCode::kCorruptData, "decode: an index of %zu bytes of no values", index.size());
    }
    if (kept >= 0 && kept <= most) return kept;
    return make_error(StatusCode::kCorruptData, "decode: %s kept %lld values, expected at most %lld",
                      stage_rows_[i]->name, static_cast<long long>(kept), static_cast<long long>(most));
  }

  Status decode_codes(std::span<const std::byte> coded, std::span<const std::byte> side, const TensorView& output,
                      const Workspace& workspace, bool adds) const {
    CORTADO_RETURN_IF_ERROR(
        coder_->decode(coded, {workspace.codes, DType::kUint8, output.rows, output.cols}, workspace.stage));
    if (output.elems() > 0) {
      const std::span<const std::uint8_t> codes(workspace.codes, static_cast<std::size_t>(output.elems()));
      const Quantiser& quantiser = *values_->quantiser();
      return adds ? quantiser.dequantise_add(codes, side, output, workspace.stage)
                  : quantiser.dequantise(codes, side, output, workspace.stage);
    }
    if (side.empty()) return {};
    return make_error(StatusCode::kCorruptData, "decode: a side section of %zu bytes of no values", side.size());
  }

  // Ends where the payload makes no sense any more.
  void explain_stages(PayloadExplainer& explainer, View view) const {
    for (const CodecRow* row : stage_rows_) {
      explainer.take(kStageIdBytes, "stage", "wire id and payload version of " + std::string(row->name));
    }
    std::array<std::uint64_t, kMaxStages> section_bytes = {};
    for (std::size_t i = 0; i < lengths(); ++i) {
      section_bytes[i] = explainer.peek<std::uint64_t>().value_or(0);
      explainer.take(kLengthBytes, "length",
                     std::to_string(section_bytes[i]) + " bytes of the " + section_name(i) + " section");
    }
    for (std::size_t i = 0; i < sparsifiers_ && view.elems() > 0; ++i) {
      const std::span<const std::byte> index = explainer.next(section_bytes[i]);
      const Result<std::int64_t> kept = sparsifier_at(i).check_index(index, view.rows, view.cols);
      if (!kept.ok()) return explainer.take(section_bytes[i], section_name(i), kept.status().message());
      explainer.append(sparsifier_at(i).explain_index(index, view.rows, view.cols), whose(i));
      view = kept_view(nullptr, kept.value());
    }
    if (view.elems() == 0) return;
    if (coder_ != nullptr) {
      const std::span<const std::byte> side = explainer.next(section_bytes[sparsifiers_]);
      explainer.append(values_->quantiser()->explain_side(side, view.rows, view.cols), whose(sparsifiers_));
    }
    const Codec& codec = coder_ != nullptr ? *coder_ : *values_;
    const DType dtype = coder_ != nullptr ? DType::kUint8 : view.dtype;
    explainer.append(codec.explain(explainer.rest(), view.rows, view.cols, dtype), std::string(codec.row().name) + " ");
  }

  std::string whose(std::size_t stage) const { return std::string(stage_rows_[stage]->name) + " "; }
  std::string section_name(std::size_t stage) const { return whose(stage) + (stage < sparsifiers_ ? "index" : "side"); }

  std::vector<std::unique_ptr<Codec>> stages_;
  std::vector<const CodecRow*> stage_rows_;  // asking for them is not free
  CodecRow row_;
  std::size_t sparsifiers_ = 0;  // how many; they come first
  std::unique_ptr<Codec> plain_values_;
  const Codec* values_;           // codes what the last sparsifier kept
  const Codec* coder_ = nullptr;  // codes the quantiser's codes, if given
};

}  // namespace

Result<std::unique_ptr<Codec>> make_composition(std::vector<std::unique_ptr<Codec>> codecs) {
  // "topk | quant(coder=rans)" is "topk | quant | rans".
  std::vector<std::unique_ptr<Codec>> stages;
  for (std::unique_ptr<Codec>& codec : codecs) {
    if (auto* inner = dynamic_cast<Composition*>(codec.get()); inner != nullptr) {
      for (std::unique_ptr<Codec>& stage : std::move(*inner).take_stages()) stages.push_back(std::move(stage));
    } else {
      stages.push_back(std::move(codec));
    }
  }
  CORTADO_RETURN_IF_ERROR(check_order(stages));
  return std::unique_ptr<Codec>(std::make_unique<Composition>(std::move(stages)));
}

}  // namespace cortado

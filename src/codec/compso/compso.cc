// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso.h"

#include <limits>
#include <string>

#include "codec/binding.h"
#include "codec/compso/compso_groups.h"
#include "codec/compso/compso_layers.h"
#include "codec/compso/compso_sections.h"
#include "codec/explain.h"
#include "codec/quant/quant_settings.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

constexpr double kSmallestBound = 1e-4;
constexpr std::uint64_t kNoMemoryHoldsIt = std::numeric_limits<std::uint64_t>::max();

// A message of one layer.
class CompsoCodec final : public Codec {
 public:
  CompsoCodec(const CompsoSettings& settings, std::string spec) : settings_(settings), spec_(std::move(spec)) {}

  std::string spec() const override { return spec_; }
  const CompsoSettings& settings() const { return settings_; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    return elems > kMaxRansCodes ? kNoMemoryHoldsIt : max_compso_bytes(settings_, {&elems, 1}, dtype);
  }
  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    return elems > kMaxRansCodes ? kNoMemoryHoldsIt : compso_scratch_bytes(settings_, {&elems, 1});
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    return encode_layers(settings_, {&input, 1}, context, payload.data(), scratch.data());
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const Status status = decode_layers(settings_, payload, {&output, 1}, scratch.data());
    return status.ok() ? status : status.with_context(spec());
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType dtype) const override {
    if (settings_.is_lossless()) return make_codec("float_rans").value()->explain(payload, rows, cols, dtype);
    PayloadExplainer explainer(payload);
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    if (elems > 0) explain_message(explainer, elems);
    return std::move(explainer).finish();
  }

 private:
  void explain_message(PayloadExplainer& explainer, std::int64_t elems) const {
    const std::int64_t blocks = settings_.block_elems == 0 ? 1 : (elems - 1) / settings_.block_elems + 1;
    const std::uint64_t block_bytes = sizeof(float) * static_cast<std::uint64_t>(blocks);
    const auto word = explainer.peek<std::uint64_t>().value_or(1);
    const bool leaves_out = settings_.is_coded && elems >= kCompsoLeastGroupedElems && (word & kCompsoLeavesOut) != 0;
    const std::uint64_t code_bytes = (word & 0xff) - (leaves_out ? kCompsoLeavesOut : 0), sections = 1 + (word >> 8);
    explainer.take(sizeof(word), "code bytes",
                   std::to_string(code_bytes) + " a value" +
                       (sections > 1 ? "; low codes in " + std::to_string(sections) + " sections" : "") +
                       (leaves_out ? "; groups of zeros left out" : ""));
    if (settings_.rounding == Rounding::kDither) {
      explainer.take_random_key("of seed and tensor; decoding draws the dither with it");
    }
    explainer.take(block_bytes, "steps", "a block each: " + first_values(explainer.next(block_bytes), DType::kFloat32));
    explainer.take(block_bytes, "smallest levels",
                   "a block each, the first: " + std::to_string(explainer.peek<std::int32_t>().value_or(0)));
    if (settings_.finds_dead_zone()) {
      explainer.take(block_bytes, "outwards",
                     "a block each, in steps: " + first_values(explainer.next(block_bytes), DType::kFloat32));
    }
    const auto bytes = static_cast<std::uint64_t>(elems);
    if (!settings_.is_coded) {
      explainer.take(bytes, "low codes", first_values(explainer.next(bytes), DType::kUint8));
      if (code_bytes == 2) explainer.take(bytes, "high codes", first_values(explainer.next(bytes), DType::kUint8));
      return;
    }
    const std::int64_t groups = compso_groups(elems);
    const std::uint64_t flag_bytes = leaves_out ? compso_group_flag_bytes(groups) : 0;
    if (explainer.rest().size() < flag_bytes) return;
    const std::byte* const flags = explainer.rest().last(flag_bytes).data();
    const std::int64_t kept = leaves_out ? kept_codes(flags, 0, elems) : elems;
    std::int64_t elems_left = kept;
    for (std::uint64_t section = 0; section < sections; ++section) {
      const bool is_last = section + 1 == sections;
      const Result<SectionHead> head = read_section_head(explainer.rest(), is_last, elems_left);
      if (!head.ok()) return;
      const auto [head_bytes, section_elems, section_bytes] = head.value();
      if (!is_last) explainer.take(8, "section", "the next " + std::to_string(section_elems) + " low codes");
      explainer.take(8, "length", std::to_string(section_bytes) + " bytes of low codes");
      explainer.append(explain_codes(explainer.next(section_bytes), section_elems), "low codes: ");
      elems_left -= section_elems;
    }
    const std::span<const std::byte> rest = explainer.rest();
    if (rest.size() < flag_bytes) return;
    if (code_bytes == 2) explainer.append(explain_codes(rest.first(rest.size() - flag_bytes), kept), "high codes: ");
    if (leaves_out) {
      explainer.take(flag_bytes, "groups",
                     "a bit for each 256 values, 0: left out; codes of " + std::to_string(kept) + " of " +
                         std::to_string(elems) + " values are there");
    }
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  const CompsoSettings settings_;
  const std::string spec_;
};

Status refused(const char* what) { return make_error(StatusCode::kInvalidArgument, "compso: %s", what); }

Status read_bound(const ParameterValues& values, CompsoSettings* settings) {
  settings->bound = values.real("bound");
  if (settings->bound > 0 && settings->bound < kSmallestBound) {
    return make_error(StatusCode::kInvalidArgument, "compso: bound must be 0 (lossless) or from 0.0001 to 1, got %s",
                      values.text("bound").c_str());
  }
  if (values.text("error") == "off") return {};
  if (values.was_given("bound")) return refused("expected one of bound and error");
  settings->error = values.real("error");
  return {};
}

Status read_filter(const ParameterValues& values, CompsoSettings* settings) {
  const std::string& text = values.text("filter");
  const bool goes = settings->rounding != Rounding::kDither && settings->error == 0;
  if (text == "off") return {};
  if (text == "bound") {
    if (goes) settings->filter = settings->bound;
    return {};
  }
  if (!goes) return refused("filter goes neither with error nor with round=dither, which decodes zeros as noise");
  settings->filter = values.real("filter");
  return {};
}

Status read_block(const ParameterValues& values, CompsoSettings* settings) {
  if (values.text("block") == "layer") return {};
  settings->block_elems = values.integer("block");
  if (settings->block_elems % kCompsoBlockUnit == 0) return {};
  return make_error(StatusCode::kInvalidArgument, "compso: block must be a multiple of %lld, got %lld",
                    static_cast<long long>(kCompsoBlockUnit), static_cast<long long>(settings->block_elems));
}

std::string spec_of(const ParameterValues& values, const CompsoSettings& settings) {
  const auto of = [&](const char* name) { return std::string(name) + "=" + spec_text(values, name); };
  return "compso(" + (settings.error > 0 ? of("error") : of("bound") + ", " + of("filter")) + ", " + of("round") +
         ", " + of("coder") +
         ", block=" + (settings.block_elems == 0 ? "layer" : std::to_string(settings.block_elems)) +
         ", chunk_codes=" + std::to_string(settings.chunk_codes) + ")";
}

Result<std::unique_ptr<Codec>> make_compso(const ParameterValues& values) {
  CompsoSettings settings;
  settings.rounding = rounding_named(values.word("round"));
  settings.is_coded = values.word("coder") == "rans";
  settings.chunk_codes = values.integer("chunk_codes");
  CORTADO_RETURN_IF_ERROR(check_chunk_codes("compso", settings.chunk_codes));
  CORTADO_RETURN_IF_ERROR(read_bound(values, &settings));
  CORTADO_RETURN_IF_ERROR(read_filter(values, &settings));
  CORTADO_RETURN_IF_ERROR(read_block(values, &settings));
  return std::unique_ptr<Codec>(std::make_unique<CompsoCodec>(settings, spec_of(values, settings)));
}

std::vector<Parameter> parameters() {
  return {{.name = "bound",
           .kind = ParameterKind::kReal,
           .default_text = "0.004",
           .min = 0,
           .max = 1,
           .meaning = "step as a share of the range of the layer, at least 0.0001; 0 is lossless"},
          {.name = "filter",
           .kind = ParameterKind::kReal,
           .default_text = "bound",
           .min = 0,
           .max = 1,
           .choices = "bound|off",
           .meaning = "magnitudes up to this share of the range become 0; bound: off with error and dither"},
          rounding_parameter("stochastic"),
          {.name = "coder",
           .kind = ParameterKind::kChoice,
           .default_text = "rans",
           .choices = "rans|none",
           .meaning = "of the codes; none: one or two bytes each"},
          error_parameter("relative L2 error of a layer, in place of the bound"),
          {.name = "block",
           .kind = ParameterKind::kInteger,
           .default_text = "layer",
           .min = kCompsoBlockUnit,
           .max = 1 << 30,
           .choices = "layer",
           .meaning = "values that share a step, a multiple of 1024"},
          chunk_codes_parameter("of rans")};
}

}  // namespace

const CompsoSettings* compso_settings_of(const Codec& codec) {
  const auto* compso = dynamic_cast<const CompsoCodec*>(&codec);
  return compso == nullptr ? nullptr : &compso->settings();
}

const CodecRow& compso_row() {
  static const CodecRow row = {
      .name = "compso",
      .wire_id = 12,
      .version = 1,
      .traits = {.divisible = true, .needs_residual = true},
      .summary = "multiples of a share of the range, small values as 0, entropy-coded (COMPSO)",
      .parameters = parameters(),
      .make = make_compso,
  };
  return row;
}

}  // namespace cortado

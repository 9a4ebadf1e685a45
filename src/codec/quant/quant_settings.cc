// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/quant/quant_settings.h"

#include "codec/quant/block_codec.h"
#include "codec/quant/quant_grid.h"
#include "codec/sparse.h"
#include "core/check.h"
#include "core/format.h"

namespace cortado {

namespace {

// The largest error of a value within reach, in steps; rounding errors of the arithmetic come on top and are below
// 2^-14.
double largest_error(Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearest:
    case Rounding::kDither:
      return 0.5;
    case Rounding::kDeadZone:
      return 0.65;
    case Rounding::kStochastic:
      return 1.0;
  }
  return 1.0;
}

// The step, in units of the standard deviation, at which nearest rounding of N(0, 1) to the levels of 1 to 8 bits has
// the least squared error (numerical integration).
constexpr float kGaussianStep[] = {1.5958f, 1.2240f, 0.6508f, 0.3534f, 0.1932f, 0.1055f, 0.0573f, 0.0309f};

BlockScale scale_named(const std::string& word) {
  if (word == "rms") return BlockScale::kRms;
  if (word == "l2") return BlockScale::kL2;
  return word == "range" ? BlockScale::kRange : BlockScale::kMax;
}

bool is_set(const ParameterValues& values, const char* name) { return values.text(name) != "off"; }

Status refused(const char* what) { return make_error(StatusCode::kInvalidArgument, "quant: %s", what); }

// The rule, and what it leaves to be said about bits and blocks.
Status read_rule(const ParameterValues& values, QuantSettings* s) {
  const bool bound = is_set(values, "bound"), abs_bound = is_set(values, "abs_bound"), error = is_set(values, "error");
  if (bound + abs_bound + error > 1) return refused("expected at most one of bound, abs_bound and error");
  s->rule = bound       ? QuantSettings::StepRule::kBound
            : abs_bound ? QuantSettings::StepRule::kAbsBound
            : error     ? QuantSettings::StepRule::kError
                        : QuantSettings::StepRule::kBits;
  // The levels' own rounding errors must not break the bound.
  const double steps_a_bound = (1 - 0x1p-13) / largest_error(s->rounding);
  if (bound) s->step = static_cast<float>(values.real("bound") * steps_a_bound);
  if (abs_bound) s->step = static_cast<float>(values.real("abs_bound") * steps_a_bound);
  if (error) s->error = values.real("error");
  return {};
}

// The fewest bits, from 2 on, whose levels reach 1 / step; 9 if 8 do not.
int bits_that_reach(Rounding rounding, float step) {
  int bits = 2;
  while (bits <= 8 && reach_of(rounding, static_cast<float>((1 << (bits - 1)) - 1)) * step < 1) ++bits;
  return bits;
}

Status read_bits(const ParameterValues& values, QuantSettings* s) {
  const bool given = values.text("bits") != "auto";
  if (given) s->bits = static_cast<int>(values.integer("bits"));
  if (s->rule == QuantSettings::StepRule::kBits) {
    s->step = s->scale == BlockScale::kRms ? kGaussianStep[s->bits - 1] : 1 / reach_of(s->rounding, s->largest_level());
    return {};
  }
  // A magnitude is at most the block's scale, but for rms, so that the bound alone says how many levels it takes.
  if (s->rule == QuantSettings::StepRule::kBound && s->scale != BlockScale::kRms) {
    const int needed = bits_that_reach(s->rounding, s->step);
    if (needed > (given ? s->bits : 8)) {
      return make_error(StatusCode::kInvalidArgument,
                        "quant: bound=%s takes %s bits with round=%s, expected at most %d",
                        values.text("bound").c_str(), needed > 8 ? "more than 8" : std::to_string(needed).c_str(),
                        values.word("round").c_str(), given ? s->bits : 8);
    }
    if (!given) s->bits = needed;
  } else if (!given) {
    s->bits = 8;
  }
  return {};
}

Status read_filter(const ParameterValues& values, QuantSettings* s) {
  if (!is_set(values, "filter")) return {};
  s->filter = static_cast<float>(values.real("filter"));
  if (s->rounding == Rounding::kDither) return refused("filter and round=dither: dither decodes zeros as noise");
  if (s->rule == QuantSettings::StepRule::kError) return refused("filter and error: expected one of them");
  return {};
}

std::string spec_of(const ParameterValues& values, const QuantSettings& s) {
  std::string text = "quant(bits=" + std::to_string(s.bits) + ", block=" + block_text(s.block_elems);
  for (const char* name : {"scale", "round", "bound", "abs_bound", "error", "filter"}) {
    text += std::string(", ") + name + "=" + spec_text(values, name);
  }
  return text + ")";
}

}  // namespace

Rounding rounding_named(const std::string& word) {
  if (word == "dead_zone") return Rounding::kDeadZone;
  if (word == "stochastic") return Rounding::kStochastic;
  return word == "dither" ? Rounding::kDither : Rounding::kNearest;
}

std::string spec_text(const ParameterValues& values, const char* name) {
  const std::string& text = values.text(name);
  const bool is_word = !text.empty() && text[0] >= 'a' && text[0] <= 'z';
  return is_word ? text : number_text(values.real(name) + 0.0);  // -0 is 0
}

Parameter rounding_parameter(const char* default_text) {
  return {.name = "round",
          .kind = ParameterKind::kChoice,
          .default_text = default_text,
          .choices = "nearest|dead_zone|stochastic|dither",
          .meaning = "stochastic and dither are unbiased"};
}

Parameter error_parameter(const char* meaning) {
  return {.name = "error",
          .kind = ParameterKind::kReal,
          .default_text = "off",
          .min = 0.001,
          .max = 0.9,
          .choices = "off",
          .meaning = meaning};
}

std::vector<Parameter> quant_parameters() {
  return {
      {.name = "bits",
       .kind = ParameterKind::kInteger,
       .default_text = "auto",
       .min = 1,
       .max = 8,
       .choices = "auto",
       .meaning = "of a code; auto is 4, with a bound as few as keep it, else 8"},
      block_parameter("auto",
                      "values that share a step, a power of two; auto is 256, or 4096 with abs_bound and error"),
      {.name = "scale",
       .kind = ParameterKind::kChoice,
       .default_text = "max",
       .choices = "max|rms|l2|range",
       .meaning = "what the step of a block is relative to"},
      rounding_parameter("nearest"),
      {.name = "bound",
       .kind = ParameterKind::kReal,
       .default_text = "off",
       .min = 0.004,
       .max = 4,
       .choices = "off",
       .meaning = "largest error, in units of the block's scale, in place of bits"},
      {.name = "abs_bound",
       .kind = ParameterKind::kReal,
       .default_text = "off",
       .min = 1e-30,
       .max = 1e30,
       .choices = "off",
       .meaning = "largest error, in place of bits"},
      error_parameter("relative L2 error of the tensor, in place of bits"),
      {.name = "filter",
       .kind = ParameterKind::kReal,
       .default_text = "off",
       .min = 0,
       .max = 1,
       .choices = "off",
       .meaning = "magnitudes up to this, in units of the block's scale, become 0"},
      {.name = "coder",
       .kind = ParameterKind::kChoice,
       .default_text = "none",
       .choices = "none|rans",
       .meaning = "rans: the composition quant(...) | rans"},
  };
}

Result<QuantSettings> read_quant_settings(const ParameterValues& values) {
  QuantSettings s;
  s.scale = scale_named(values.word("scale"));
  s.rounding = rounding_named(values.word("round"));
  CORTADO_RETURN_IF_ERROR(read_rule(values, &s));
  CORTADO_RETURN_IF_ERROR(read_bits(values, &s));
  // A rule for the whole tensor needs no fine blocks: their steps differ only where codes do not reach.
  const bool is_relative = s.rule == QuantSettings::StepRule::kBits || s.rule == QuantSettings::StepRule::kBound;
  CORTADO_ASSIGN_OR_RETURN(s.block_elems, read_block_elems("quant", values, is_relative ? 256 : 4096));
  CORTADO_RETURN_IF_ERROR(read_filter(values, &s));
  if (s.bits == 1 && (s.rounding == Rounding::kDeadZone || s.filter >= 0)) {
    return refused("bits=1 has no level 0, which round=dead_zone and filter need");
  }
  s.spec = spec_of(values, s);
  return s;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "core/format.h"
#include "cortado/auto.h"

namespace cortado {

const std::vector<Parameter>& auto_parameters() {
  static const std::vector<Parameter> table = {
      {.name = "quality",
       .kind = ParameterKind::kChoice,
       .default_text = "balanced",
       .choices = "safe|balanced|aggressive",
       .meaning = "what may be used (docs/auto.md)"},
      {.name = "min_gain",
       .kind = ParameterKind::kReal,
       .default_text = "0.03",
       .min = 0,
       .max = 0.99,
       .meaning = "share of dense's step time that must be saved"},
      {.name = "measure_s",
       .kind = ParameterKind::kReal,
       .default_text = "8",
       .min = 0,
       .max = 600,
       .meaning = "seconds for measuring links and codecs; 0: try without predictions"},
      {.name = "drift",
       .kind = ParameterKind::kReal,
       .default_text = "0.3",
       .min = 0.05,
       .max = 100,
       .meaning = "measured again if a step takes 1 + drift times as long as when it was decided, or as short"},
      {.name = "max_relative_error",
       .kind = ParameterKind::kReal,
       .default_text = "0.99",
       .min = 0,
       .max = 1e6,
       .meaning = "steps back beyond: share of gradient and residual that a step loses"},
      {.name = "max_residual",
       .kind = ParameterKind::kReal,
       .default_text = "100",
       .min = 0,
       .max = 1e9,
       .meaning = "steps back beyond: norm of the residual, in gradients"},
      {.name = "random_seed",
       .kind = ParameterKind::kInteger,
       .default_text = "0",
       .min = 0,
       .max = 9e15,
       .meaning = "of what it runs"},
      {.name = "timeout_s",
       .kind = ParameterKind::kReal,
       .default_text = "1800",
       .min = 0.001,
       .max = 1e6,
       .meaning = "longest wait for a collective"},
  };
  return table;
}

std::string_view quality_name(Quality quality) {
  switch (quality) {
    case Quality::kSafe:
      return "safe";
    case Quality::kBalanced:
      return "balanced";
    case Quality::kAggressive:
      return "aggressive";
  }
  return "?";
}

bool is_auto_spec(std::string_view spec) {
  const std::size_t begin = spec.find_first_not_of(" \t\n");
  if (begin == std::string_view::npos || !spec.substr(begin).starts_with("auto")) return false;
  const std::string_view rest = spec.substr(begin + 4);
  return rest.empty() || rest.front() == '(' || rest.front() == ' ' || rest.front() == '|';
}

Result<AutoOptions> AutoOptions::parse(std::string_view spec) {
  CORTADO_ASSIGN_OR_RETURN(std::vector<SpecStage> stages, parse_spec(spec));
  if (stages.size() != 1 || stages[0].name != "auto") {
    return make_error(StatusCode::kInvalidArgument, "expected auto or auto(quality=...) alone, got \"%s\"",
                      std::string(spec).c_str());
  }
  AutoOptions options;
  // A path is no number, choice or list of names, so the table can't describe it.
  std::erase_if(stages[0].arguments, [&](const SpecArgument& argument) {
    if (argument.key == "cluster") options.cluster = argument.value;
    return argument.key == "cluster";
  });
  CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                           ParameterValues::read("auto", stages[0].arguments, auto_parameters()));
  for (const Quality quality : {Quality::kSafe, Quality::kBalanced, Quality::kAggressive}) {
    if (values.word("quality") == quality_name(quality)) options.quality = quality;
  }
  options.min_gain = values.real("min_gain");
  options.measure_s = values.real("measure_s");
  options.drift = values.real("drift");
  options.max_relative_error = values.real("max_relative_error");
  options.max_residual = values.real("max_residual");
  options.random_seed = static_cast<std::uint64_t>(values.integer("random_seed"));
  options.timeout_s = values.real("timeout_s");
  return options;
}

std::string AutoOptions::to_spec() const {
  const AutoOptions defaults;
  std::string text = "auto(quality=" + std::string(quality_name(quality));
  if (!cluster.empty()) text += ", cluster=" + cluster;
  const auto add = [&](const char* name, double value, double standard) {
    if (value != standard) text += ", " + std::string(name) + "=" + number_text(value);
  };
  add("min_gain", min_gain, defaults.min_gain);
  add("measure_s", measure_s, defaults.measure_s);
  add("drift", drift, defaults.drift);
  add("max_relative_error", max_relative_error, defaults.max_relative_error);
  add("max_residual", max_residual, defaults.max_residual);
  if (random_seed != 0) text += ", random_seed=" + std::to_string(random_seed);
  add("timeout_s", timeout_s, defaults.timeout_s);
  return text + ")";
}

}  // namespace cortado

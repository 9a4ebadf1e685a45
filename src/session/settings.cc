// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What auto may use. A lossy setting is `balanced` if docs/results/accuracy.md has it within noise of dense training,
// or better, on both of its tasks: the validation loss after equal steps, three seeds. To extend: measure
// (benchmarks/training/accuracy.py), commit the table, change the row here.
#include "session/settings.h"

#include <algorithm>

#include "core/check.h"
#include "cortado/auto.h"

namespace cortado {

const std::vector<AutoSetting>& auto_settings() {
  static const std::vector<AutoSetting> settings = {
      {"cast(bf16)", Quality::kSafe,
       "a cast; docs/results/accuracy.md: GPT -0.001, convolutional net -0.003 (within noise)"},
      {"cast(fp16)", Quality::kSafe, "a cast, where gradients are far below 65504"},
      {"compso(bound=4e-3)", Quality::kBalanced,
       "docs/results/accuracy.md: GPT -0.020, convolutional net -0.014 (within noise)"},
      {"quant(bits=4, round=dead_zone)", Quality::kBalanced,
       "docs/results/accuracy.md: GPT -0.011, convolutional net -0.009 (within noise)"},
      {"quant(error=0.3, round=dead_zone, coder=rans)", Quality::kBalanced,
       "docs/results/accuracy.md: GPT -0.003, convolutional net -0.013 (within noise)"},
      {"topk(density=0.01)", Quality::kAggressive,
       "docs/results/accuracy.md: GPT +0.342 (worse), convolutional net -0.008 (within noise)"},
      {"sign(scale=mean_abs)", Quality::kAggressive,
       "docs/results/accuracy.md: GPT +0.4 (worse), convolutional net +0.414 (worse)"},
      {"acp(rank=16, wire=bf16)", Quality::kAggressive, "docs/results/quality.md: GPT +0.039 (worse)"},
      {"acp(rank=4)", Quality::kAggressive,
       "docs/results/accuracy.md: GPT +0.180 (worse), convolutional net +0.020 (within noise)"},
      {"power(rank=4)", Quality::kAggressive,
       "docs/results/accuracy.md: GPT +0.077 (worse), convolutional net within noise"},
  };
  return settings;
}

Result<std::string> codec_of_setting(std::string_view spec) {
  using Method = EngineOptions::Method;
  CORTADO_ASSIGN_OR_RETURN(const EngineOptions options, EngineOptions::parse(spec));
  if (options.method == Method::kNone) return std::string("none");
  if (options.method == Method::kCodec) return options.codec;
  if (options.method == Method::kCast) return "cast(" + std::string(dtype_name(options.wire)) + ")";
  return (options.method == Method::kAcp ? "acp(rank=" : "power(rank=") + std::to_string(options.rank) + ")";
}

std::vector<std::string> auto_codecs(Quality quality) {
  std::vector<std::string> codecs;
  for (const AutoSetting& setting : auto_settings()) {
    const std::string codec = codec_of_setting(setting.spec).value();
    if (setting.quality <= quality && std::find(codecs.begin(), codecs.end(), codec) == codecs.end()) {
      codecs.push_back(codec);
    }
  }
  return codecs;
}

std::vector<std::string> auto_plan_codecs(Quality quality) {
  std::vector<std::string> codecs = auto_codecs(quality);
  std::erase_if(codecs, [&](const std::string& codec) {
    const bool is_low_rank = codec.starts_with("acp") || codec.starts_with("power");
    return is_low_rank || (quality != Quality::kAggressive && !codec.starts_with("cast"));
  });
  return codecs;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the parameters of `quant` mean.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/quant/quant_rule.h"
#include "cortado/spec.h"
#include "cortado/tensor_view.h"

namespace cortado {

struct QuantSettings : QuantRule {
  std::string spec;
};

// Parameters that codecs share which round to multiples of a step.
Rounding rounding_named(const std::string& word);
Parameter rounding_parameter(const char* default_text);
Parameter error_parameter(const char* meaning);

// How Codec::spec() has it: a word as it is, a number as the shortest text of it, however it was written.
std::string spec_text(const ParameterValues& values, const char* name);

std::vector<Parameter> quant_parameters();
Result<QuantSettings> read_quant_settings(const ParameterValues& values);

}  // namespace cortado

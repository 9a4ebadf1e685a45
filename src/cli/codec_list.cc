// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado codec list` and `check`.
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "cli/codec_commands.h"
#include "cli/json.h"
#include "cortado/auto.h"
#include "cortado/codec.h"
#include "cortado/engine.h"

namespace cortado::cli {

namespace {

std::vector<std::string> trait_names(const CodecTraits& traits) {
  std::vector<std::string> names;
  if (traits.lossless) names.push_back("lossless");
  if (traits.unbiased) names.push_back("unbiased");
  if (traits.linear) names.push_back("linear");
  if (traits.sparse) names.push_back("sparse");
  if (traits.divisible) names.push_back("divisible");
  if (traits.fixed_size) names.push_back("fixed_size");
  if (traits.elementwise) names.push_back("elementwise");
  if (traits.needs_residual) names.push_back("needs_residual");
  if (traits.low_rank) names.push_back("low_rank");
  return names;
}

std::vector<std::string> choices_of(const Parameter& parameter) {
  std::vector<std::string> words;
  for (std::string_view rest = parameter.choices; !rest.empty();) {
    const std::size_t end = rest.find('|');
    words.emplace_back(rest.substr(0, end));
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
  }
  return words;
}

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.16g", value);
  return text;
}

bool has_range(const Parameter& parameter) {
  return parameter.kind == ParameterKind::kInteger || parameter.kind == ParameterKind::kReal;
}

const char* kind_name(ParameterKind kind) {
  constexpr const char* kNames[] = {"integer", "real", "bool", "choice", "names"};
  return kNames[static_cast<int>(kind)];
}

// "1 to 4096", "bf16 or fp16" ...
std::string legal_values(const Parameter& parameter) {
  std::vector<std::string> parts;
  if (has_range(parameter)) parts.push_back(number(parameter.min) + " to " + number(parameter.max));
  if (parameter.kind == ParameterKind::kBool) parts = {"true", "false"};
  if (parameter.kind == ParameterKind::kNames) parts = {"[name, ...]"};
  for (const std::string& choice : choices_of(parameter)) parts.push_back(choice);
  return join(parts, " or ");
}

void print_parameters(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) {
    std::printf("           %s=%s  (%s)  %s\n", parameter.name, parameter.default_text, legal_values(parameter).c_str(),
                parameter.meaning);
  }
}

void print_as_text(const CodecRow& row) {
  std::printf("%-10s %s\n", row.name, row.summary);
  std::string traits = join(trait_names(row.traits), ", ");
  if (row.traits.rounds > 1) traits += ", " + std::to_string(row.traits.rounds) + " rounds";
  if (!traits.empty()) std::printf("           traits: %s\n", traits.c_str());
  print_parameters(row.parameters);
}

std::string parameter_json(const Parameter& parameter) {
  std::string json = "{\"name\": " + json_text(parameter.name) + ", \"kind\": " + json_text(kind_name(parameter.kind)) +
                     ", \"default\": " + json_text(parameter.default_text);
  if (has_range(parameter)) json += ", \"min\": " + number(parameter.min) + ", \"max\": " + number(parameter.max);
  const std::vector<std::string> choices = choices_of(parameter);
  if (!choices.empty()) json += ", \"choices\": " + json_list(choices);
  return json + ", \"meaning\": " + json_text(parameter.meaning) + "}";
}

void print_as_json(const CodecRow& row) {
  std::vector<std::string> parameters;
  for (const Parameter& parameter : row.parameters) parameters.push_back(parameter_json(parameter));
  std::printf(
      "{\"name\": %s, \"wire_id\": %d, \"version\": %d, \"summary\": %s, \"traits\": %s, \"rounds\": %d, "
      "\"parameters\": [%s]}\n",
      json_text(row.name).c_str(), row.wire_id, row.version, json_text(row.summary).c_str(),
      json_list(trait_names(row.traits)).c_str(), row.traits.rounds, join(parameters, ", ").c_str());
}

// What training accepts has more parameters than the codec alone (start_step ...), so the engine is asked first; it
// does not know every codec.
Result<std::string> canonical_form(const std::string& spec) {
  if (is_auto_spec(spec)) {
    const Result<AutoOptions> options = AutoOptions::parse(spec);
    if (!options.ok()) return options.status();
    return options.value().to_spec();
  }
  const Result<EngineOptions> options = EngineOptions::parse(spec);
  if (options.ok()) return options.value().to_spec();
  const StatusCode code = options.status().code();
  if (code != StatusCode::kNotFound && code != StatusCode::kUnsupported) return options.status();
  const Result<std::unique_ptr<Codec>> codec = make_codec(spec);
  if (codec.ok()) return codec.value()->spec();
  return code == StatusCode::kUnsupported ? options.status() : codec.status();
}

}  // namespace

// `cortado codec list`: every codec with its parameters, as text or as one JSON object a line.
int list_codecs(bool as_json) {
  for (const CodecRow& row : codec_registry()) as_json ? print_as_json(row) : print_as_text(row);
  if (as_json) return kDone;
  std::printf(
      "\nin training, beside the codec's own, those of these that concern it (none: the last two, cast: the last "
      "four):\n");
  print_parameters(engine_parameters());
  std::printf("\nauto, in place of a codec (docs/auto.md); also cluster=FILE, of cortado calibrate, not to measure:\n");
  print_parameters(auto_parameters());
  return kDone;
}

// `cortado codec check SPEC`: the canonical form, or the error on stderr. Returns the exit code.
int check_codec(const std::string& spec) {
  const Result<std::string> form = canonical_form(spec);
  if (!form.ok()) return report_error("", form.status());
  std::printf("%s\n", form.value().c_str());
  return kDone;
}

}  // namespace cortado::cli

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/format.h"
#include "cortado/codec.h"
#include "cortado/engine.h"
#include "engine/trained_codec.h"
#include "engine/treatment.h"

namespace cortado {

namespace {

using Method = EngineOptions::Method;
using Feedback = EngineOptions::Feedback;

struct MethodName {
  const char* codec;
  Method method;
};
constexpr MethodName kMethods[] = {
    {"none", Method::kNone}, {"cast", Method::kCast}, {"power", Method::kPower}, {"acp", Method::kAcp}};

const char* method_codec(Method method) {
  for (const MethodName& entry : kMethods)
    if (entry.method == method) return entry.codec;
  return "?";
}

// Compositions and all codecs without a method of their own are kCodec.
Method find_method(const std::vector<SpecStage>& stages) {
  for (const MethodName& entry : kMethods)
    if (stages.size() == 1 && stages[0].name == entry.codec) return entry.method;
  return Method::kCodec;
}

Result<DType> read_dtype(const std::string& word) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    if (word == dtype_name(dtype)) return dtype;
  return make_error(StatusCode::kInvalidArgument, "unknown dtype \"%s\"; expected fp32, fp16 or bf16", word.c_str());
}

bool is_low_rank(Method method) { return method == Method::kAcp || method == Method::kPower; }

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool takes(Method method, std::string_view name) {
  if (is_one_of(name, {"timeout_s", "overlap"})) return true;
  if (is_one_of(name, {"bucket_cap_mib", "threads"})) return method != Method::kNone;
  if (is_one_of(name, {"sides", "phase"})) return method == Method::kAcp;
  if (is_one_of(name, {"wire", "warm_start"})) return is_low_rank(method);
  if (is_one_of(name, {"feedback", "momentum", "min_elems"})) return method == Method::kCodec;
  return is_low_rank(method) || method == Method::kCodec;
}

const Parameter* find_parameter(const std::vector<Parameter>& table, std::string_view name) {
  for (const Parameter& parameter : table)
    if (name == parameter.name) return &parameter;
  return nullptr;
}

// The parameters of a codec and of the engine stand in the same parentheses; where both have one, it is the codec's.
std::vector<Parameter> parameters_of(Method method, const CodecRow* row) {
  std::vector<Parameter> table;
  if (row != nullptr) table = row->parameters;
  for (const Parameter& parameter : engine_parameters()) {
    if (takes(method, parameter.name) && find_parameter(table, parameter.name) == nullptr) table.push_back(parameter);
  }
  return table;
}

void read_low_rank(const ParameterValues& values, EngineOptions* options) {
  options->rank = static_cast<int>(values.integer("rank"));
  if (options->method == Method::kAcp) {
    const bool global = values.word("phase") == "global";
    if (global) options->phase = EngineOptions::Phase::kGlobal;
    if (global || values.word("sides") == "alternate") options->sides = EngineOptions::Sides::kAlternate;
  }
  options->use_error_feedback = values.boolean("use_error_feedback");
  options->warm_start = values.boolean("warm_start");
}

// What all methods have that compress some tensors and leave others dense.
void read_treatments(const ParameterValues& values, EngineOptions* options) {
  if (values.text("min_compression_rate") != "auto")
    options->min_compression_rate = values.real("min_compression_rate");
  options->start_step = static_cast<int>(values.integer("start_step"));
  options->dense = values.names("dense");
  options->dense_embeddings = values.boolean("dense_embeddings");
  if (values.word("rollback") == "exact") options->rollback = EngineOptions::Rollback::kExact;
  options->random_seed = static_cast<std::uint64_t>(values.integer("random_seed"));
}

std::string names_text(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", " : "") + name;
  return text + "]";
}

// "name(key=value, ...)"
class StageText {
 public:
  explicit StageText(std::string name) : name_(std::move(name)) {}

  void add(std::string_view key, std::string_view value) {
    if (!arguments_.empty()) arguments_ += ", ";
    if (!key.empty()) arguments_.append(key) += "=";
    arguments_.append(value);
  }
  std::string text() const { return arguments_.empty() ? name_ : name_ + "(" + arguments_ + ")"; }

 private:
  std::string name_;
  std::string arguments_;
};

std::string stage_text(const SpecStage& stage) {
  StageText text(stage.name);
  for (const SpecArgument& argument : stage.arguments) text.add(argument.key, argument.value);
  return text.text();
}

constexpr const char* kFeedbackWords[] = {"auto", "residual", "dgc", "none"};  // in the order of Feedback

Result<Feedback> read_feedback(const std::string& codec, const ParameterValues& values) {
  const std::string& word = values.word("feedback");
  const auto feedback =
      static_cast<Feedback>(std::find(kFeedbackWords, std::end(kFeedbackWords), word) - kFeedbackWords);
  if (values.was_given("momentum") && feedback != Feedback::kDgc) {
    return make_error(StatusCode::kInvalidArgument, "%s: momentum is that of feedback=dgc, got feedback=%s",
                      codec.c_str(), word.c_str());
  }
  if (values.boolean("use_error_feedback")) return feedback;
  if (feedback == Feedback::kAuto) return Feedback::kNone;
  return make_error(StatusCode::kInvalidArgument, "%s: feedback=%s can't go with use_error_feedback=false",
                    codec.c_str(), word.c_str());
}

Result<EngineOptions> parse_codec(std::vector<SpecStage> stages) {
  SpecStage& first = stages[0];
  const CodecRow* row = find_codec(first.name);
  if (row == nullptr) return make_codec(first.name).status();
  CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                           ParameterValues::read(first.name, first.arguments, parameters_of(Method::kCodec, row)));
  EngineOptions options;
  options.method = Method::kCodec;
  options.threads = static_cast<int>(values.integer("threads"));
  options.timeout_s = values.real("timeout_s");
  options.overlap = values.word("overlap") == "on";
  if (values.text("bucket_cap_mib") != "auto") options.bucket_cap_mib = values.real("bucket_cap_mib");
  read_treatments(values, &options);
  options.min_elems = values.integer("min_elems");
  CORTADO_ASSIGN_OR_RETURN(options.feedback, read_feedback(first.name, values));
  options.momentum = values.real("momentum");
  std::erase_if(first.arguments, [&](const SpecArgument& argument) {
    return !argument.key.empty() && find_parameter(row->parameters, argument.key) == nullptr;
  });
  for (const SpecStage& stage : stages) options.codec += (options.codec.empty() ? "" : " | ") + stage_text(stage);
  CORTADO_ASSIGN_OR_RETURN(const TrainedCodec trained, make_trained_codec(options));
  options.codec = trained.codec->spec();
  return options;
}

// The stages of a codec's specification without the parameters at their defaults, except the first of lossy codecs,
// which says how much they leave.
std::vector<SpecStage> short_stages(const std::string& spec) {
  Result<std::vector<SpecStage>> stages = parse_spec(spec);
  if (!stages.ok()) return {{spec, {}}};
  for (SpecStage& stage : stages.value()) {
    const CodecRow* row = find_codec(stage.name);
    if (row == nullptr || row->parameters.empty()) continue;
    std::erase_if(stage.arguments, [&](const SpecArgument& argument) {
      const Parameter* parameter = find_parameter(row->parameters, argument.key);
      const bool is_first = parameter == &row->parameters[0] && !row->traits.lossless;
      return parameter != nullptr && !is_first && argument.value == parameter->default_text;
    });
  }
  return std::move(stages).value();
}

}  // namespace

const std::vector<Parameter>& engine_parameters() {
  static const std::vector<Parameter> table = {
      {"sides", ParameterKind::kChoice, "both", 0, 0, "both|alternate",
       "acp: both factors in every step, half the rank each; or one a step, as published (phase=global implies it)"},
      {"phase", ParameterKind::kChoice, "balanced", 0, 0, "balanced|global",
       "acp: global: every matrix sends the same side in a step, as published"},
      {"wire", ParameterKind::kChoice, "fp32", 0, 0, "fp32|bf16|fp16", "acp, power: dtype of what travels"},
      {"min_compression_rate", ParameterKind::kReal, "auto", 0, 1e6, "auto",
       "acp, power: a matrix stays dense unless rows * cols > rate * rank * (rows + cols), 2 by default; others: "
       "unless its payload is by more than this smaller, 1 by default"},
      {"min_elems", ParameterKind::kInteger, "256", 0, 9e15, "", "not acp, power: smaller tensors stay dense"},
      {"start_step", ParameterKind::kInteger, "2", 0, 1e9, "", "dense steps before the first compressed one"},
      {"dense", ParameterKind::kNames, "[]", 0, 0, "", "tensors that stay dense; a name may end in *"},
      {"dense_embeddings", ParameterKind::kBool, "false", 0, 0, "", "keep embedding tables dense"},
      {"use_error_feedback", ParameterKind::kBool, "true", 0, 0, "", "add what was lost to the next step's gradient"},
      {"feedback", ParameterKind::kChoice, "auto", 0, 0, "auto|residual|dgc|none",
       "not acp, power: what is done with what was lost. auto: residual if the codec loses some, but less than all; "
       "dgc: "
       "a residual of momentum, cleared where it was sent, for sparse codecs and optimisers without momentum"},
      {"momentum", ParameterKind::kReal, "0.9", 0, 0.9999, "", "of feedback=dgc"},
      {"warm_start", ParameterKind::kBool, "true", 0, 0, "", "acp, power: project on the factor of the step before"},
      {"rollback", ParameterKind::kChoice, "rounded", 0, 0, "rounded|exact",
       "how a non-finite step is undone; exact keeps a second residual"},
      {"random_seed", ParameterKind::kInteger, "0", 0, 9e15, "",
       "of the first bases and of codecs that draw; the same on every rank"},
      {"bucket_cap_mib", ParameterKind::kReal, "auto", 0, 1e6, "auto",
       "dense MiB a message stands for, scaled to its compressed size; 0: no fusion"},
      {"threads", ParameterKind::kInteger, "1", 1, 256, "",
       "CPU threads that encode and decode, the caller's included"},
      {"timeout_s", ParameterKind::kReal, "1800", 0.001, 1e7, "", "longest wait for a collective"},
      {"overlap", ParameterKind::kChoice, "on", 0, 0, "on|off",
       "off: nothing is encoded or sent before the backward pass has ended, to measure what overlap gains"},
  };
  return table;
}

Status check_options(const EngineOptions& options) {
  if (options.method == Method::kPlan) {
    return make_error(StatusCode::kInvalidArgument, "options: an engine of a plan is made of the plan itself");
  }
  // Any codec can be asked for as kCodec, those of other methods too, whose strings take less.
  if (options.method != Method::kCodec) return EngineOptions::parse(options.to_spec()).status();
  const EngineOptions defaults;  // that of a rate and of a cap is none that a string could say
  const std::tuple<const char*, double, double> numbers[] = {
      {"min_compression_rate", options.min_compression_rate, defaults.min_compression_rate},
      {"min_elems", static_cast<double>(options.min_elems), 0},
      {"start_step", options.start_step, 0},
      {"momentum", options.momentum, 0},
      {"random_seed", static_cast<double>(options.random_seed), 0},
      {"bucket_cap_mib", options.bucket_cap_mib, defaults.bucket_cap_mib},
      {"threads", options.threads, 1},
      {"timeout_s", options.timeout_s, defaults.timeout_s}};
  for (const auto& [name, value, also] : numbers) {
    const Parameter& parameter = *find_parameter(engine_parameters(), name);
    if ((value >= parameter.min && value <= parameter.max) || value == also) continue;
    return make_error(StatusCode::kInvalidArgument, "options: %s must be from %g to %g, got %g", name, parameter.min,
                      parameter.max, value);
  }
  return {};
}

Result<EngineOptions> EngineOptions::parse(std::string_view spec) {
  CORTADO_ASSIGN_OR_RETURN(std::vector<SpecStage> stages, parse_spec(spec));
  EngineOptions options;
  options.method = find_method(stages);
  if (options.method == Method::kCodec) return parse_codec(std::move(stages));
  const std::string& name = stages[0].name;
  CORTADO_ASSIGN_OR_RETURN(
      const ParameterValues values,
      ParameterValues::read(name, stages[0].arguments, parameters_of(options.method, find_codec(name))));
  options.timeout_s = values.real("timeout_s");
  options.overlap = values.word("overlap") == "on";
  if (options.method == Method::kNone) return options;
  options.threads = static_cast<int>(values.integer("threads"));
  if (values.text("bucket_cap_mib") != "auto") options.bucket_cap_mib = values.real("bucket_cap_mib");
  if (options.method == Method::kCast) {
    CORTADO_ASSIGN_OR_RETURN(options.wire, read_dtype(values.word("dtype")));
    options.start_step = 0;
    options.use_error_feedback = false;
    return options;
  }
  CORTADO_ASSIGN_OR_RETURN(options.wire, read_dtype(values.word("wire")));
  if (options.method == Method::kAcp && values.word("phase") == "global" && values.was_given("sides") &&
      values.word("sides") == "both") {
    return make_error(StatusCode::kInvalidArgument, "acp: phase=global alternates sides; it can't go with sides=both");
  }
  read_low_rank(values, &options);
  read_treatments(values, &options);
  return options;
}

std::string EngineOptions::to_spec() const {
  const EngineOptions defaults;
  std::vector<SpecStage> stages = {{method_codec(method), {}}};
  if (method == Method::kCodec) stages = short_stages(codec);
  if (method == Method::kPlan) stages = parse_spec(codec).value();
  StageText text(stages[0].name);
  for (const SpecArgument& argument : stages[0].arguments) text.add(argument.key, argument.value);
  if (method == Method::kCast) text.add("", dtype_name(wire));
  if (is_low_rank(method)) {
    text.add("rank", std::to_string(rank));
    if (phase == Phase::kGlobal) {
      text.add("phase", "global");
    } else if (sides == Sides::kAlternate) {
      text.add("sides", "alternate");
    }
    if (wire != defaults.wire) text.add("wire", dtype_name(wire));
  }
  if (method == Method::kPlan && random_seed != 0) text.add("random_seed", std::to_string(random_seed));
  if (is_low_rank(method) || method == Method::kCodec) {
    if (min_compression_rate != defaults.min_compression_rate)
      text.add("min_compression_rate", number_text(min_compression_rate));
    if (min_elems != defaults.min_elems) text.add("min_elems", std::to_string(min_elems));
    if (start_step != defaults.start_step) text.add("start_step", std::to_string(start_step));
    if (!dense.empty()) text.add("dense", names_text(dense));
    if (dense_embeddings) text.add("dense_embeddings", "true");
    if (!use_error_feedback) text.add("use_error_feedback", "false");
    if (feedback != defaults.feedback) text.add("feedback", kFeedbackWords[static_cast<int>(feedback)]);
    if (momentum != defaults.momentum) text.add("momentum", number_text(momentum));
    if (!warm_start) text.add("warm_start", "false");
    if (rollback == Rollback::kExact) text.add("rollback", "exact");
    if (random_seed != 0) text.add("random_seed", std::to_string(random_seed));
  }
  if (bucket_cap_mib != defaults.bucket_cap_mib) text.add("bucket_cap_mib", number_text(bucket_cap_mib));
  if (threads != defaults.threads) text.add("threads", std::to_string(threads));
  if (timeout_s != defaults.timeout_s) text.add("timeout_s", number_text(timeout_s));
  if (!overlap) text.add("overlap", "off");
  std::string spec = text.text();
  for (std::size_t i = 1; i < stages.size(); ++i) spec += " | " + stage_text(stages[i]);
  return spec;
}

std::string EngineOptions::results_spec() const {
  EngineOptions results = *this;
  results.threads = EngineOptions().threads;
  results.timeout_s = EngineOptions().timeout_s;
  results.overlap = true;
  return results.to_spec();
}

}  // namespace cortado

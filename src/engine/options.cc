// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <string>

#include "core/check.h"
#include "cortado/codec.h"
#include "cortado/engine.h"

namespace cortado {

namespace {

using Method = EngineOptions::Method;

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

Result<Method> find_method(const std::string& codec) {
  for (const MethodName& entry : kMethods)
    if (codec == entry.codec) return entry.method;
  if (codec == "auto") {
    return make_error(StatusCode::kUnsupported,
                      "\"auto\" needs the planner, which this version does not have yet; what works now: \"none\", "
                      "\"cast(bf16)\", \"cast(fp16)\", \"acp(rank=4)\", \"power(rank=4)\"");
  }
  return make_error(StatusCode::kNotFound, "unknown codec \"%s\"; this engine trains with none, cast, power and acp",
                    codec.c_str());
}

Result<DType> read_dtype(const std::string& word) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    if (word == dtype_name(dtype)) return dtype;
  return make_error(StatusCode::kInvalidArgument, "unknown dtype \"%s\"; expected fp32, fp16 or bf16", word.c_str());
}

// The parameters of a codec and of the engine stand in the same parentheses.
std::vector<Parameter> parameters_of(Method method) {
  std::vector<Parameter> table;
  if (const CodecRow* row = find_codec(method_codec(method)); row != nullptr) table = row->parameters;
  if (method == Method::kNone) {
    table.push_back(engine_parameters().back());
    return table;
  }
  const bool low_rank = method == Method::kAcp || method == Method::kPower;
  for (const Parameter& parameter : engine_parameters()) {
    const std::string name = parameter.name;
    const bool dense_too = name == "bucket_cap_mib" || name == "threads" || name == "timeout_s";
    if (low_rank ? ((name != "phase" && name != "sides") || method == Method::kAcp) : dense_too)
      table.push_back(parameter);
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
  options->min_compression_rate = values.real("min_compression_rate");
  options->start_step = static_cast<int>(values.integer("start_step"));
  options->dense = values.names("dense");
  options->dense_embeddings = values.boolean("dense_embeddings");
  options->use_error_feedback = values.boolean("use_error_feedback");
  options->warm_start = values.boolean("warm_start");
  if (values.word("rollback") == "exact") options->rollback = EngineOptions::Rollback::kExact;
  options->random_seed = static_cast<std::uint64_t>(values.integer("random_seed"));
}

// The shortest text that reads back as the same number.
std::string number_text(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

std::string names_text(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", " : "") + name;
  return text + "]";
}

}  // namespace

const std::vector<Parameter>& engine_parameters() {
  static const std::vector<Parameter> table = {
      {"sides", ParameterKind::kChoice, "both", 0, 0, "both|alternate",
       "both factors in every step, half the rank each; or one a step, as published (phase=global implies it)"},
      {"phase", ParameterKind::kChoice, "balanced", 0, 0, "balanced|global",
       "global: every matrix sends the same side in a step, as published"},
      {"wire", ParameterKind::kChoice, "fp32", 0, 0, "fp32|bf16|fp16", "dtype of what travels"},
      {"min_compression_rate", ParameterKind::kReal, "2", 0, 1e6, "",
       "a matrix stays dense unless rows * cols > rate * rank * (rows + cols)"},
      {"start_step", ParameterKind::kInteger, "2", 0, 1e9, "", "dense steps before the first compressed one"},
      {"dense", ParameterKind::kNames, "[]", 0, 0, "", "tensors that stay dense; a name may end in *"},
      {"dense_embeddings", ParameterKind::kBool, "false", 0, 0, "", "keep embedding tables dense"},
      {"use_error_feedback", ParameterKind::kBool, "true", 0, 0, "", "add what was lost to the next step's gradient"},
      {"warm_start", ParameterKind::kBool, "true", 0, 0, "", "project on the factor of the step before"},
      {"rollback", ParameterKind::kChoice, "rounded", 0, 0, "rounded|exact",
       "how a non-finite step is undone; exact keeps a second residual"},
      {"random_seed", ParameterKind::kInteger, "0", 0, 9e15, "", "of the first bases; the same on every rank"},
      {"bucket_cap_mib", ParameterKind::kReal, "auto", 0, 1e6, "auto",
       "dense MiB a message stands for, scaled to its compressed size; 0: no fusion"},
      {"threads", ParameterKind::kInteger, "1", 1, 256, "",
       "CPU threads that encode and decode, the caller's included"},
      {"timeout_s", ParameterKind::kReal, "1800", 0.001, 1e7, "", "longest wait for a collective"},
  };
  return table;
}

Result<EngineOptions> EngineOptions::parse(std::string_view spec) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<SpecStage> stages, parse_spec(spec));
  if (stages.size() != 1) {
    return make_error(StatusCode::kUnsupported,
                      "\"%.*s\": compositions of codecs can't train yet; give one codec, such as acp(rank=4)",
                      static_cast<int>(spec.size()), spec.data());
  }
  EngineOptions options;
  CORTADO_ASSIGN_OR_RETURN(options.method, find_method(stages[0].name));
  const std::vector<Parameter> table = parameters_of(options.method);
  CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                           ParameterValues::read(stages[0].name, stages[0].arguments, table));
  options.timeout_s = values.real("timeout_s");
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
  return options;
}

std::string EngineOptions::to_spec() const {
  const EngineOptions defaults;
  std::string arguments;
  const auto add = [&](const char* name, const std::string& value) {
    arguments += (arguments.empty() ? "" : ", ") + std::string(name) + "=" + value;
  };
  if (method == Method::kCast) arguments = dtype_name(wire);
  if (method == Method::kAcp || method == Method::kPower) {
    add("rank", std::to_string(rank));
    if (phase == Phase::kGlobal) {
      add("phase", "global");
    } else if (sides == Sides::kAlternate) {
      add("sides", "alternate");
    }
    if (wire != defaults.wire) add("wire", std::string(dtype_name(wire)));
    if (min_compression_rate != defaults.min_compression_rate)
      add("min_compression_rate", number_text(min_compression_rate));
    if (start_step != defaults.start_step) add("start_step", std::to_string(start_step));
    if (!dense.empty()) add("dense", names_text(dense));
    if (dense_embeddings) add("dense_embeddings", "true");
    if (!use_error_feedback) add("use_error_feedback", "false");
    if (!warm_start) add("warm_start", "false");
    if (rollback == Rollback::kExact) add("rollback", "exact");
    if (random_seed != 0) add("random_seed", std::to_string(random_seed));
  }
  if (bucket_cap_mib != defaults.bucket_cap_mib) add("bucket_cap_mib", number_text(bucket_cap_mib));
  if (threads != defaults.threads) add("threads", std::to_string(threads));
  if (timeout_s != defaults.timeout_s) add("timeout_s", number_text(timeout_s));
  const std::string name = method_codec(method);
  return arguments.empty() ? name : name + "(" + arguments + ")";
}

std::string EngineOptions::results_spec() const {
  EngineOptions results = *this;
  results.threads = EngineOptions().threads;
  results.timeout_s = EngineOptions().timeout_s;
  return results.to_spec();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/treatment.h"

#include <string_view>
#include <unordered_set>

#include "bucket/layout.h"
#include "core/check.h"

namespace cortado {

namespace {

bool matches(std::string_view pattern, std::string_view name) {
  if (!pattern.empty() && pattern.back() == '*') return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return pattern == name;
}

Status check_names(const std::vector<EngineTensor>& tensors) {
  std::unordered_set<std::string_view> seen;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].name.empty()) {
      return make_error(StatusCode::kInvalidArgument, "tensor %zu has no name; residuals are kept by name", t);
    }
    if (!seen.insert(tensors[t].name).second) {
      return make_error(StatusCode::kInvalidArgument, "two tensors are called \"%s\"; names must be unique",
                        tensors[t].name.c_str());
    }
    if (tensors[t].rows < 0 || tensors[t].cols < 0 || tensors[t].dtype == DType::kUint8) {
      return make_error(
          StatusCode::kInvalidArgument,
          "tensor \"%s\": expected a shape of at least 0 and dtype fp32, fp16 or bf16, got %lld x %lld %s",
          tensors[t].name.c_str(), static_cast<long long>(tensors[t].rows), static_cast<long long>(tensors[t].cols),
          std::string(dtype_name(tensors[t].dtype)).c_str());
    }
  }
  return {};
}

Status check_dense_list(const std::vector<EngineTensor>& tensors, const EngineOptions& options) {
  for (const std::string& pattern : options.dense) {
    bool found = false;
    for (const EngineTensor& tensor : tensors) found = found || matches(pattern, tensor.name);
    if (!found) {
      return make_error(StatusCode::kNotFound, "dense=[%s]: no tensor has that name; the first is \"%s\"",
                        pattern.c_str(), tensors.empty() ? "" : tensors[0].name.c_str());
    }
  }
  return {};
}

Treatment treat(const EngineTensor& tensor, const EngineOptions& options) {
  using Method = EngineOptions::Method;
  if (options.method != Method::kAcp && options.method != Method::kPower) return {};
  if (tensor.rows * tensor.cols == 0) return {0, "empty"};
  if (tensor.dimensions < 2) return {0, "1-D"};
  for (const std::string& pattern : options.dense)
    if (matches(pattern, tensor.name)) return {0, "dense="};
  if (options.dense_embeddings && tensor.is_embedding) return {0, "dense_embeddings"};
  const int rank = effective_rank(tensor.rows, tensor.cols, options.rank, options.min_compression_rate);
  if (rank == 0) return {0, "min_compression_rate"};
  const bool halved = options.method == Method::kAcp && options.sides == EngineOptions::Sides::kBoth;
  return {halved ? (rank + 1) / 2 : rank, ""};
}

}  // namespace

Result<std::vector<Treatment>> choose_treatments(const std::vector<EngineTensor>& tensors,
                                                 const EngineOptions& options) {
  CORTADO_RETURN_IF_ERROR(check_names(tensors));
  CORTADO_RETURN_IF_ERROR(check_dense_list(tensors, options));
  std::vector<Treatment> treatments;
  for (const EngineTensor& tensor : tensors) treatments.push_back(treat(tensor, options));
  return treatments;
}

}  // namespace cortado

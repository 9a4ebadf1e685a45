// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "engine/treatment.h"

#include <string_view>
#include <unordered_set>

#include "bucket/layout.h"
#include "codec/stage.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

bool matches(std::string_view pattern, std::string_view name) {
  if (!pattern.empty() && pattern.back() == '*') return name.starts_with(pattern.substr(0, pattern.size() - 1));
  return pattern == name;
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

using Method = EngineOptions::Method;

double min_rate(const EngineOptions& options) {
  if (options.min_compression_rate != EngineOptions::kAutoRate) return options.min_compression_rate;
  return options.method == Method::kCodec ? 1 : 2;
}

Treatment treat_low_rank(const EngineTensor& tensor, const EngineOptions& options) {
  const int rank = effective_rank(tensor.rows, tensor.cols, options.rank, min_rate(options));
  if (rank == 0) return {.reason = "min_compression_rate"};
  const bool halved = options.method == Method::kAcp && options.sides == EngineOptions::Sides::kBoth;
  return {.rank = halved ? (rank + 1) / 2 : rank};
}

Result<Treatment> treat_with_codec(const EngineTensor& tensor, const EngineOptions& options,
                                   const TrainedCodec& codec) {
  const std::int64_t elems = tensor.elems();
  if (elems < options.min_elems) return Treatment{.reason = "min_elems"};
  Treatment treatment;
  if (!codec.has_feedback() && takes_dtype(*codec.codec, tensor.dtype)) treatment.encoded = tensor.dtype;
  CORTADO_ASSIGN_OR_RETURN(const double sent_bytes,
                           expected_payload_bytes(codec, tensor.rows, tensor.cols, treatment.encoded));
  // Dense tensors travel as float32.
  const bool pays = static_cast<double>(elems) * sizeof(float) > min_rate(options) * sent_bytes;
  if (pays || min_rate(options) == 0) {
    treatment.payload_elems =
        codec.is_summed
            ? codec.codec->sparsifier()->max_kept(tensor.rows, tensor.cols)
            : static_cast<std::int64_t>(codec.codec->max_payload_bytes(tensor.rows, tensor.cols, treatment.encoded));
  }
  if (treatment.payload_elems == 0) treatment.reason = "min_compression_rate";
  return treatment;
}

Result<Treatment> treat(const EngineTensor& tensor, const EngineOptions& options, const TrainedCodec& codec) {
  if (options.method == Method::kNone || options.method == Method::kCast) return Treatment();
  if (tensor.elems() == 0) return Treatment{.reason = "empty"};
  if (tensor.dimensions < 2) return Treatment{.reason = "1-D"};
  for (const std::string& pattern : options.dense)
    if (matches(pattern, tensor.name)) return Treatment{.reason = "dense="};
  if (options.dense_embeddings && tensor.is_embedding) return Treatment{.reason = "dense_embeddings"};
  return options.method == Method::kCodec ? treat_with_codec(tensor, options, codec) : treat_low_rank(tensor, options);
}

}  // namespace

Status check_tensors(const std::vector<EngineTensor>& tensors) {
  std::unordered_set<std::string_view> seen;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].name.empty()) {
      return make_error(StatusCode::kInvalidArgument, "tensor %zu has no name; residuals are kept by name", t);
    }
    if (!seen.insert(tensors[t].name).second) {
      return make_error(StatusCode::kInvalidArgument, "two tensors are called \"%s\"; names must be unique",
                        tensors[t].name.c_str());
    }
    const bool fits = checked_size_bytes(tensors[t].rows, tensors[t].cols, DType::kFloat32).has_value();
    if (!fits || tensors[t].dtype == DType::kUint8) {
      return make_error(
          StatusCode::kInvalidArgument,
          "tensor \"%s\": expected a shape that memory can hold and dtype fp32, fp16 or bf16, got %lld x %lld %s",
          tensors[t].name.c_str(), static_cast<long long>(tensors[t].rows), static_cast<long long>(tensors[t].cols),
          std::string(dtype_name(tensors[t].dtype)).c_str());
    }
  }
  return {};
}

Result<std::vector<Treatment>> choose_treatments(const std::vector<EngineTensor>& tensors, const EngineOptions& options,
                                                 const TrainedCodec& codec) {
  CORTADO_RETURN_IF_ERROR(check_tensors(tensors));
  CORTADO_RETURN_IF_ERROR(check_dense_list(tensors, options));
  std::vector<Treatment> treatments;
  for (const EngineTensor& tensor : tensors) {
    CORTADO_ASSIGN_OR_RETURN(Treatment treatment, treat(tensor, options, codec));
    treatments.push_back(std::move(treatment));
  }
  return treatments;
}

}  // namespace cortado

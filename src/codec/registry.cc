// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One row a codec, in the order of the documentation. A new codec is a folder, an include and a line here.
#include "codec/cast/cast.h"
#include "codec/composition/composition.h"
#include "codec/compso/compso.h"
#include "codec/float_rans/float_rans.h"
#include "codec/fp8/fp8.h"
#include "codec/lowrank/lowrank.h"
#include "codec/none/none.h"
#include "codec/quant/quant.h"
#include "codec/randk/randk.h"
#include "codec/rans/rans.h"
#include "codec/sign/sign.h"
#include "codec/topk/topk.h"
#include "core/check.h"
#include "cortado/codec.h"

namespace cortado {

namespace {

Status unknown_codec(const std::string& name) {
  if (name == "auto") {
    return make_error(
        StatusCode::kUnsupported,
        "\"auto\" chooses while it trains (cortado.attach, AutoEngine); here a codec is expected, such as "
        "\"none\", \"cast(bf16)\", \"acp(rank=4)\", \"power(rank=4)\" (`cortado codec list`)");
  }
  std::string known;
  for (const CodecRow& row : codec_registry()) known += (known.empty() ? "" : ", ") + std::string(row.name);
  return make_error(StatusCode::kNotFound, "unknown codec \"%.100s\"; known are %s", name.c_str(), known.c_str());
}

Result<std::unique_ptr<Codec>> make_stage(const SpecStage& stage) {
  const CodecRow* row = find_codec(stage.name);
  if (row == nullptr) return unknown_codec(stage.name);
  CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                           ParameterValues::read(row->name, stage.arguments, row->parameters));
  return row->make(values);
}

}  // namespace

const std::vector<CodecRow>& codec_registry() {
  static const std::vector<CodecRow> rows = {
      none_row(), cast_row(),  fp8_row(),   acp_row(),  power_row(),      sign_row(),
      topk_row(), randk_row(), quant_row(), rans_row(), float_rans_row(), compso_row(),
  };
  return rows;
}

const CodecRow* find_codec(std::string_view name) {
  for (const CodecRow& row : codec_registry()) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

const CodecRow& Codec::row() const {
  const std::string own = spec();
  const CodecRow* row = find_codec(own.substr(0, own.find('(')));
  CORTADO_CHECK(row != nullptr, "%s", own.c_str());
  return *row;
}

Status Codec::decode_add(std::span<const std::byte>, TensorView sum, std::span<std::byte>) const {
  return make_error(StatusCode::kUnsupported, "%s does not add to %s", spec().c_str(),
                    std::string(dtype_name(sum.dtype)).c_str());
}

Status Codec::to_sum_form(std::span<const std::byte>, std::int64_t, std::int64_t, int, std::span<std::byte>,
                          std::span<float>) const {
  return make_error(StatusCode::kUnsupported, "%s has no sum form but its payload", spec().c_str());
}

Status Codec::decode_sum(std::span<const std::byte>, SumTerms, TensorView) const {
  return make_error(StatusCode::kUnsupported, "%s has no sum form but its payload", spec().c_str());
}

std::string canonical_codec(std::string_view spec) {
  const Result<std::unique_ptr<Codec>> codec = make_codec(spec);
  return codec.ok() ? codec.value()->spec() : std::string(spec);
}

Result<std::unique_ptr<Codec>> make_codec(std::string_view spec) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<SpecStage> parsed, parse_spec(spec));
  std::vector<std::unique_ptr<Codec>> stages;
  for (const SpecStage& stage : parsed) {
    CORTADO_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, make_stage(stage));
    stages.push_back(std::move(codec));
  }
  if (stages.size() == 1) return std::move(stages.front());
  return make_composition(std::move(stages));
}

}  // namespace cortado

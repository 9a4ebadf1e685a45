// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// One row a codec, in the order of the documentation. A new codec is a folder, an include and a line here.
#include "codec/cast/cast.h"
#include "codec/lowrank/lowrank.h"
#include "codec/none/none.h"
#include "codec/randk/randk.h"
#include "codec/topk/topk.h"
#include "core/check.h"
#include "cortado/codec.h"

namespace cortado {

namespace {

Status unknown_codec(const std::string& name) {
  std::string known;
  for (const CodecRow& row : codec_registry()) known += (known.empty() ? "" : ", ") + std::string(row.name);
  return make_error(StatusCode::kNotFound, "unknown codec \"%.100s\"; known are %s", name.c_str(), known.c_str());
}

}  // namespace

const std::vector<CodecRow>& codec_registry() {
  static const std::vector<CodecRow> rows = {
      none_row(), cast_row(), acp_row(), power_row(), topk_row(), randk_row(),
  };
  return rows;
}

const CodecRow* find_codec(std::string_view name) {
  for (const CodecRow& row : codec_registry()) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

Result<std::unique_ptr<Codec>> make_codec(std::string_view spec) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<SpecStage> stages, parse_spec(spec));
  const SpecStage& stage = stages.front();
  const CodecRow* row = find_codec(stage.name);
  if (row == nullptr) return unknown_codec(stage.name);
  if (stages.size() > 1) {
    return make_error(StatusCode::kUnsupported, "%s followed by %zu more: expected one codec, without \"|\"", row->name,
                      stages.size() - 1);
  }
  CORTADO_ASSIGN_OR_RETURN(const ParameterValues values,
                           ParameterValues::read(row->name, stage.arguments, row->parameters));
  return row->make(values);
}

}  // namespace cortado

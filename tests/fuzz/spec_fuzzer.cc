// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Any text as a specification: parsing ends without a crash, and what is accepted prints as something that is accepted
// and means the same.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "cortado/codec.h"
#include "cortado/engine.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cortado;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<std::vector<SpecStage>> stages = parse_spec(text);

  if (const Result<std::unique_ptr<Codec>> codec = make_codec(text); codec.ok()) {
    CORTADO_CHECK(stages.ok());
    const std::string spec = codec.value()->spec();
    CORTADO_CHECK(make_codec(spec).value()->spec() == spec, "%s", spec.c_str());
  }
  if (const Result<EngineOptions> options = EngineOptions::parse(text); options.ok()) {
    CORTADO_CHECK(stages.ok());
    const std::string spec = options.value().to_spec();
    CORTADO_CHECK(EngineOptions::parse(spec).value().to_spec() == spec, "%s", spec.c_str());
  }
  return 0;
}

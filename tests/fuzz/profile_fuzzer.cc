// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Any text as a job and as a cluster: reading ends without a crash, and what is accepted is written as something that
// is accepted and is written the same.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"
#include "cortado/cluster.h"
#include "cortado/job.h"

namespace {

template <typename Value>
void read_and_write(std::string_view text, cortado::Result<Value> (*parse)(std::string_view),
                    std::string (*write)(const Value&)) {
  const cortado::Result<Value> value = parse(text);
  if (!value.ok()) return;
  const std::string written = write(value.value());
  CORTADO_CHECK(write(parse(written).value()) == written, "%s", written.c_str());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cortado;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_and_write(text, job_from_json, job_to_json);
  read_and_write(text, cluster_from_json, cluster_to_json);
  return 0;
}

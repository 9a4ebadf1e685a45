// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans_device.h"

#include "codec/rans/rans_layout.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"

namespace cortado {

RansPlan make_rans_plan(std::int64_t chunk_codes, DeviceLayout& layout) {
  RansPlan plan;
  std::vector<std::int64_t> code_bases, chunk_bases;
  std::int64_t codes = 0, chunks = 0;
  for (const std::int64_t elems : layout.elems()) {
    code_bases.push_back(codes);
    chunk_bases.push_back(chunks);
    // Multiples of 16, so that codes of every tensor are aligned.
    codes += (elems + 15) / 16 * 16;
    chunks += rans_chunks(elems, chunk_codes);
  }
  plan.counted = layout.tile(RansCount::kTileCodes);
  plan.blocks = layout.tile(kRansBlockChunks * chunk_codes);
  plan.code_bases = layout.table<std::int64_t>(code_bases);
  plan.chunk_bases = layout.table<std::int64_t>(chunk_bases);
  plan.places = make_rans_places(chunk_codes, static_cast<std::int64_t>(code_bases.size()), codes, chunks, layout);
  return plan;
}

RansPlaces make_rans_places(std::int64_t chunk_codes, std::int64_t messages, std::int64_t codes, std::int64_t chunks,
                            DeviceLayout& layout) {
  RansPlaces places;
  places.chunk_codes = chunk_codes;
  places.messages_count = messages;
  places.messages = layout.scratch<RansMessage>(static_cast<std::uint64_t>(messages));
  places.counts = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(messages) * 256);
  places.states = layout.scratch<RansState>(static_cast<std::uint64_t>(messages));
  places.slots = layout.scratch<std::byte>(rans_slots_bytes(codes, chunks));
  places.chunk_bytes = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(chunks));
  return places;
}

Result<RansPlan> RansPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  const std::int64_t chunk_codes = values.integer("chunk_codes");
  CORTADO_RETURN_IF_ERROR(check_chunk_codes("rans", chunk_codes));
  return make_rans_plan(chunk_codes, layout);
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso_device.h"

#include "codec/compso/compso.h"
#include "codec/rans/rans_layout.h"
#include "core/check.h"

namespace cortado {

namespace {

std::int64_t parts_of(std::int64_t elems, std::int64_t part) { return (elems + part - 1) / part; }

}  // namespace

Result<CompsoPlan> CompsoPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  CompsoPlan plan;
  plan.settings = *compso_settings_of(layout.codec());
  const CompsoSettings& settings = plan.settings;
  if (settings.is_lossless()) {
    CORTADO_ASSIGN_OR_RETURN(plan.lossless, FloatRansPlan::make(values, layout));
    return plan;
  }
  if (settings.error > 0) {
    return make_error(StatusCode::kUnsupported, "%s on a device: error is searched on the CPU only; a bound is not",
                      layout.codec().spec().c_str());
  }
  std::vector<CompsoTensor> places;
  std::vector<std::int64_t> tiles, blocks;
  CompsoTensor next = {};
  for (const std::int64_t elems : layout.elems()) {
    CompsoTensor place = next;
    place.block_elems = settings.block_elems == 0 ? elems : std::min(settings.block_elems, elems);
    place.blocks = elems == 0 ? 0 : parts_of(elems, place.block_elems);
    place.units = parts_of(elems, kUnitCodes);
    place.groups = settings.is_coded && elems >= kCompsoLeastGroupedElems ? compso_groups(elems) : 0;
    // Sections round up to chunks and to blocks of them, each for itself; the high codes are one more message.
    const std::int64_t chunks = 2 * parts_of(elems, settings.chunk_codes) + place.units;
    place.tiles = 2 * parts_of(elems, kRansBlockChunks * settings.chunk_codes) + place.units;
    places.push_back(place);
    tiles.push_back(elems == 0 ? 0 : place.blocks * CompsoTile::tiles_of_block(place));
    blocks.push_back(place.blocks);
    next.first_block += place.blocks;
    next.first_unit += place.units;
    next.first_code += parts_of(elems, 16) * 16;
    next.first_group += place.groups;
    next.first_message += place.units + 1;
    next.first_chunk += chunks;
    next.first_tile += place.tiles;
  }
  const auto count = static_cast<std::uint64_t>(places.size()),
             messages = static_cast<std::uint64_t>(next.first_message);
  plan.blocks = next.first_block;
  plan.units = next.first_unit;
  plan.chunk_tiles = settings.is_coded ? next.first_tile : 0;
  plan.tiles = layout.tile(tiles, 1);
  plan.block_tiles = layout.tile(blocks, CompsoChoose::kThreads);
  plan.tensor_places = layout.table<CompsoTensor>(places);
  plan.ranges = layout.scratch<CompsoRangeBits>(static_cast<std::uint64_t>(next.first_block));
  plan.plans = layout.scratch<CompsoBlockPlan>(static_cast<std::uint64_t>(next.first_block));
  plan.is_wide = layout.scratch<std::uint32_t>(count);
  if (!settings.is_coded) return plan;
  const bool may_be_wide = compso_may_be_wide(settings);
  plan.unit_counts = layout.scratch<std::uint32_t>(static_cast<std::uint64_t>(next.first_unit) * 256);
  plan.high_counts = layout.scratch<std::uint64_t>(count * 256);
  plan.low = layout.scratch<std::uint8_t>(static_cast<std::uint64_t>(next.first_code));
  plan.high = layout.scratch<std::uint8_t>(may_be_wide ? static_cast<std::uint64_t>(next.first_code) : 0);
  plan.kept_low = layout.scratch<std::uint8_t>(static_cast<std::uint64_t>(next.first_code));
  plan.kept_high = layout.scratch<std::uint8_t>(may_be_wide ? static_cast<std::uint64_t>(next.first_code) : 0);
  plan.is_kept = layout.scratch<std::uint32_t>(static_cast<std::uint64_t>(next.first_group));
  plan.group_at = layout.scratch<std::int64_t>(static_cast<std::uint64_t>(next.first_group));
  plan.kept = layout.scratch<std::int64_t>(count);
  plan.sections = layout.scratch<std::int64_t>(count);
  plan.first_tile_of_message = layout.scratch<std::int64_t>(messages);
  plan.elems_of_message = layout.scratch<std::int64_t>(messages);
  plan.message_of_tile = layout.scratch<std::int32_t>(static_cast<std::uint64_t>(next.first_tile));
  // High codes have slots behind all low ones: see CompsoSections.
  plan.high_code_base = next.first_code;
  plan.places = make_rans_places(settings.chunk_codes, next.first_message, next.first_code * (may_be_wide ? 2 : 1),
                                 next.first_chunk, layout);
  return plan;
}

}  // namespace cortado

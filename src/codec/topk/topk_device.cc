// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk_device.h"

#include <algorithm>
#include <cmath>

#include "codec/device_layout.h"
#include "codec/sparse.h"
#include "codec/topk/topk_index.h"
#include "codec/topk/topk_select.h"
#include "core/check.h"

namespace cortado {

namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Of the unary part: the number of lower bits is such that the upper parts of all gaps take at most about twice as many
// bits as there are positions, or the largest there is.
std::int64_t most_unary_bytes(std::int64_t elems, std::int64_t kept) {
  return static_cast<std::int64_t>(bytes_of_bits(kept + std::max(2 * kept + 2, (elems >> kMostRiceBits) + 1)));
}

}  // namespace

Result<TopkPlan> TopkPlan::make(const ParameterValues& values, DeviceLayout& layout) {
  if (values.text("block") != "tensor") {
    return make_error(StatusCode::kUnsupported, "%s on a device: expected block=tensor", layout.codec().spec().c_str());
  }
  TopkPlan plan;
  plan.is_sampled = values.word("select") == "sampled";
  plan.value_dtype = values.word("values") == "fp16" ? DType::kFloat16 : DType::kFloat32;
  if (values.word("index") == "delta") plan.index = IndexKind::kDelta;
  if (values.word("index") == "bitmap") plan.index = IndexKind::kBitmap;
  std::vector<TopkTensor> places;
  std::vector<std::int64_t> runs, lists, payloads, streams;
  std::int64_t sample = 0, list = 0, bits = 0;
  for (const TensorEntry& tensor : layout.tensors()) {
    const std::int64_t elems = tensor.elems;
    TopkTensor place = {};
    place.least = kept_elems(values.real("density"), elems);
    place.most = plan.is_sampled ? std::min(elems, place.least + place.least / 4) : place.least;
    place.candidates = most_candidates(elems, place.least);
    place.sample_base = sample;
    if (plan.is_sampled && elems > kUnsampledElems) {
      const std::int64_t every = sample_every(elems, place.least);
      const SampleRanks ranks = sample_ranks(every, place.least);
      place.sample_stride = every * kSampleRun;
      place.sample_runs = elems / place.sample_stride;
      place.ranks[0] = static_cast<std::int64_t>(std::ceil(ranks.first));
      place.ranks[1] = static_cast<std::int64_t>(std::ceil(ranks.wider));
      place.ranks[2] = static_cast<std::int64_t>(std::ceil(ranks.narrower));
    }
    place.list_base = list;
    place.list_elems = place.most;
    const auto bitmap = static_cast<std::int64_t>(bytes_of_bits(elems));
    const std::int64_t unary = elems == 0 ? 0 : most_unary_bytes(elems, place.most);
    // A bitmap is chosen where it is the shorter one.
    const auto delta = static_cast<std::int64_t>(max_index_bytes(IndexKind::kDelta, elems, place.most));
    const std::int64_t of_bitmap = plan.index == IndexKind::kBitmap    ? bitmap
                                   : plan.index == IndexKind::kSmaller ? std::min(bitmap, delta)
                                                                       : 0;
    place.bits_base = bits;
    place.bits_bytes = round_up(std::max(unary, of_bitmap), sizeof(std::uint32_t));
    places.push_back(place);
    runs.push_back(place.sample_runs);
    lists.push_back(place.most);
    payloads.push_back(static_cast<std::int64_t>(tensor.max_payload_bytes));
    streams.push_back(plan.index == IndexKind::kDelta ? unary : std::max(unary, bitmap));
    sample += place.sample_runs * kSampleRun;
    list += place.most;
    bits += place.bits_bytes;
  }
  const auto count = static_cast<std::uint64_t>(places.size());
  plan.bits_bytes = static_cast<std::uint64_t>(bits);
  plan.tiles = layout.tile(kTopkTileElems);
  plan.runs = layout.tile(runs, TopkSample::kThreads);
  plan.lists = layout.tile(lists, kTopkListTile);
  plan.payloads = layout.tile(payloads, TopkWrite::kTileBytes);
  plan.streams = layout.tile(streams, TopkFindBits::kTileBytes);
  plan.places = layout.table<TopkTensor>(places);
  plan.states = layout.scratch<TopkState>(count);
  plan.tile_above = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(plan.tiles.tiles));
  plan.tile_equal = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(plan.tiles.tiles));
  plan.list_sums = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(plan.lists.tiles));
  plan.stream_counts = layout.scratch<std::uint64_t>(static_cast<std::uint64_t>(plan.streams.tiles));
  plan.histograms = layout.scratch<std::uint64_t>(count * kTopkBins);
  plan.values = layout.scratch<float>(static_cast<std::uint64_t>(list));
  plan.positions = layout.scratch<std::int64_t>(static_cast<std::uint64_t>(list));
  plan.sample = layout.scratch<std::uint32_t>(static_cast<std::uint64_t>(sample));
  plan.bits = layout.scratch<std::byte>(plan.bits_bytes);
  return plan;
}

}  // namespace cortado

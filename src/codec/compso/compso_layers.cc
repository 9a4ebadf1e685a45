// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/compso/compso_layers.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/compso/compso_groups.h"
#include "codec/compso/compso_kernels.h"
#include "codec/compso/compso_sections.h"
#include "codec/float_rans/float_rans_kernels.h"
#include "codec/pieces.h"
#include "codec/quant/quant_search.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"

namespace cortado {

namespace {

constexpr std::uint64_t kAlignBytes = 64;
constexpr std::int64_t kPrefetchElems = 1024;
constexpr std::int64_t kRandomAlignElems = 256;  // quant_kernels.h: pieces begin at multiples of it

constexpr std::uint64_t kWidthBytes = 8;
constexpr int kSectionsShift = 8;  // bytes a code, and above them how many sections more than one
constexpr std::uint64_t kLengthBytes = 8;
constexpr double kMostLevels = 65000;  // that the range may have with a target error

// ---- shapes --------------------------------------------------------------------------------------------------------

std::int64_t elems_of(std::int64_t elems) { return elems; }
std::int64_t elems_of(const ConstTensorView& view) { return view.elems(); }
std::int64_t elems_of(const TensorView& view) { return view.elems(); }

std::int64_t block_elems(const CompsoSettings& settings, std::int64_t layer_elems) {
  return settings.block_elems == 0 ? layer_elems : std::min(settings.block_elems, layer_elems);
}

struct Totals {
  std::int64_t elems = 0;
  std::int64_t blocks = 0;
  std::int64_t groups = 0;

  // Whether codes may be left out.
  bool are_grouped(const CompsoSettings& settings) const {
    return settings.is_coded && elems >= kCompsoLeastGroupedElems;
  }
};

// Of the header, and where it tells of blocks.
struct HeaderBytes {
  explicit HeaderBytes(const CompsoSettings& settings, const Totals& totals) {
    const auto blocks = static_cast<std::uint64_t>(totals.blocks);
    steps_at = kWidthBytes + (settings.rounding == Rounding::kDither ? sizeof(RandomKey) : 0);
    first_levels_at = steps_at + blocks * sizeof(float);
    outwards_at = first_levels_at + blocks * sizeof(std::int32_t);
    all = outwards_at + (settings.finds_dead_zone() ? blocks * sizeof(float) : 0);
  }

  std::uint64_t steps_at, first_levels_at, outwards_at, all;
};

template <class Layer>
Totals totals_of(const CompsoSettings& settings, std::span<const Layer> layers) {
  Totals totals;
  for (const Layer& layer : layers) {
    const std::int64_t elems = elems_of(layer);
    if (elems == 0) continue;
    totals.elems += elems;
    totals.blocks += (elems - 1) / block_elems(settings, elems) + 1;
    totals.groups += compso_groups(elems);
  }
  return totals;
}

// Values first ... first + elems - 1 of a layer. Blocks and random numbers are numbered through the message.
template <class Layer>
struct Block {
  const Layer& layer;
  std::int64_t first, elems;
  std::int64_t number;
  std::int64_t first_random;
};

template <class Layer, class F>
void for_blocks(const CompsoSettings& settings, std::span<const Layer> layers, const F& f) {
  std::int64_t number = 0, random = 0;
  for (const Layer& layer : layers) {
    const std::int64_t elems = elems_of(layer);
    const std::int64_t block = block_elems(settings, elems);
    for (std::int64_t first = 0; first < elems; first += block) {
      f(Block<Layer>{layer, first, std::min(block, elems - first), number++, random + first});
    }
    random += (elems + kRandomAlignElems - 1) / kRandomAlignElems * kRandomAlignElems;
  }
}

// f(offset in the block, count)
template <class Layer, class F>
void for_pieces(const Block<Layer>& block, const F& f) {
  for (std::int64_t at = 0; at < block.elems; at += kMaxPieceElems) f(at, std::min(kMaxPieceElems, block.elems - at));
}

// ---- memory --------------------------------------------------------------------------------------------------------

std::uint64_t round_up(std::uint64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

// How the values of a block become levels.
struct BlockPlan {
  BlockGrid grid;
  DeadZone dead_zone = kDeadZone;
};

// Kernels write and read whole rows.
std::uint64_t code_bytes(const Totals& totals) {
  return round_up(static_cast<std::uint64_t>(totals.elems + kRowElems));
}
std::uint64_t plan_bytes(const Totals& totals) {
  return round_up(static_cast<std::uint64_t>(totals.blocks) * sizeof(BlockPlan));
}

// A bit a group, of the encoder.
std::uint64_t flag_bytes(const Totals& totals) { return round_up(compso_group_flag_bytes(totals.groups)); }

struct Workspace {
  Workspace(std::byte* scratch, const Totals& totals) {
    std::byte* at = scratch + (kAlignBytes - reinterpret_cast<std::uintptr_t>(scratch) % kAlignBytes) % kAlignBytes;
    plans = reinterpret_cast<BlockPlan*>(at);
    low = reinterpret_cast<std::uint8_t*>(at + plan_bytes(totals));
    high = low + code_bytes(totals);
    flags = reinterpret_cast<std::byte*>(high + code_bytes(totals));
    coder = flags + flag_bytes(totals);
  }

  BlockPlan* plans;
  std::uint8_t* low;
  std::uint8_t* high;
  std::byte* flags;
  std::byte* coder;
};

template <typename T>
T load(const std::byte* from, std::int64_t i = 0) {
  T value;
  std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(T value, std::byte* to, std::int64_t i = 0) {
  std::memcpy(to + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
}

// ---- encode --------------------------------------------------------------------------------------------------------

class LayersEncoder {
 public:
  LayersEncoder(const CompsoSettings& settings, std::span<const ConstTensorView> layers, const EncodeContext& context,
                std::byte* scratch)
      : settings_(settings),
        layers_(layers),
        totals_(totals_of(settings, layers)),
        workspace_(scratch, totals_),
        levels_{.rounding = settings.rounding, .largest = 0, .filters = settings.filter > 0},
        random_{philox_key(context.seed, context.tensor), context.step} {}

  std::uint64_t run(std::byte* payload) {
    if (settings_.rounding == Rounding::kDither) store(random_, payload + kWidthBytes);
    plan_blocks(payload);
    std::byte* codes = payload + HeaderBytes(settings_, totals_).all;
    SectionEncoder low_codes(workspace_.low, settings_.chunk_codes, workspace_.coder, codes);
    std::fill_n(workspace_.flags, compso_group_flag_bytes(totals_.groups), std::byte{0});
    for_blocks(settings_, layers_, [&](const InputBlock& block) { quantise(block, &low_codes); });
    const std::byte* end = settings_.is_coded ? put_coded(&low_codes) : put_plain(codes);
    const std::uint64_t more_sections = settings_.is_coded ? low_codes.sections() - 1 : 0;
    const std::uint64_t leaves_out = kept_ < totals_.elems ? kCompsoLeavesOut : 0;
    store<std::uint64_t>((is_wide_ ? 2 : 1) + leaves_out + (more_sections << kSectionsShift), payload);
    return static_cast<std::uint64_t>(end - payload);
  }

 private:
  using InputBlock = Block<ConstTensorView>;

  void plan_blocks(std::byte* payload) {
    const HeaderBytes header(settings_, totals_);
    for_blocks(settings_, layers_, [&](const InputBlock& block) {
      const CompsoBlockRange range = range_of(block);
      BlockPlan& plan = workspace_.plans[block.number] = {};
      CompsoLevels levels;
      if (range.is_finite) {
        const float step = choose_step(block, range, &plan.dead_zone);
        plan.grid = compso_grid(step, plan.dead_zone, settings_, range, block.layer.dtype);
        levels = compso_levels(plan.grid, settings_, range);
      } else {
        plan.grid = {.step = std::numeric_limits<float>::quiet_NaN()};
      }
      is_wide_ |= levels.last - levels.first > 255;
      store(plan.grid.step, payload + header.steps_at, block.number);
      store(levels.first, payload + header.first_levels_at, block.number);
      if (settings_.finds_dead_zone()) store(plan.dead_zone.outwards, payload + header.outwards_at, block.number);
    });
  }

  static CompsoBlockRange range_of(const InputBlock& block) {
    CompsoBlockRange all;
    alignas(64) float buffer[kMaxPieceElems];
    for_pieces(block, [&](std::int64_t at, std::int64_t count) {
      const CompsoRange piece = measure_range(load_piece(block.layer, block.first + at, count, buffer), count,
                                              block.elems - at > 2 * kPrefetchElems ? kPrefetchElems : 0);
      all.low = at == 0 ? piece.low : std::min(all.low, piece.low);
      all.high = at == 0 ? piece.high : std::max(all.high, piece.high);
      all.is_finite &= piece.max_magnitude < kInfinityBits;
    });
    return all;
  }

  float choose_step(const InputBlock& block, const CompsoBlockRange& range, DeadZone* dead_zone) const {
    if (settings_.error == 0) {
      return compso_step_of_bound(settings_, range);
    }
    const auto* data = static_cast<const std::byte*>(block.layer.data);
    const auto offset = static_cast<std::size_t>(block.first) * dtype_bytes(block.layer.dtype);
    const ConstTensorView values(data + offset, block.layer.dtype, 1, block.elems);
    double step = 0;
    if (settings_.finds_dead_zone()) {
      const StepAndDeadZone found = find_dead_zone(settings_.error, values);
      step = found.step;
      *dead_zone = found.dead_zone;
    } else {
      step = find_step(settings_.rounding, settings_.error, values);
    }
    return compso_step(std::max(step, range.width() / kMostLevels), range);
  }

  // One pass over the values: codes are counted while they are made, put behind those that are kept, and coded when a
  // section is full.
  void quantise(const InputBlock& block, SectionEncoder* low_codes) {
    const BlockGrid& grid = workspace_.plans[block.number].grid;
    Levels levels = levels_;
    levels.dead_zone = workspace_.plans[block.number].dead_zone;
    const bool is_nan = std::isnan(grid.step);
    const CompsoCounts counts = {settings_.is_coded ? low_codes->counts() : nullptr,
                                 settings_.is_coded && is_wide_ ? &high_counts_ : nullptr};
    alignas(64) float buffer[kMaxPieceElems];
    for_pieces(block, [&](std::int64_t at, std::int64_t count) {
      const CompsoCodes codes = {workspace_.low + kept_, is_wide_ ? workspace_.high + kept_ : nullptr};
      if (is_nan) {
        std::fill_n(codes.low, count, std::uint8_t{kCompsoZeroCode});
        if (is_wide_) std::fill_n(codes.high, count, std::uint8_t{kCompsoZeroCode});
      } else {
        const BlockPiece piece = {
            .log2_block_elems = 62, .blocks = &grid, .first = block.first_random + at, .elems = whole_rows(count)};
        compso_quantise(levels, piece, random_, load_piece(block.layer, block.first + at, count, buffer),
                        block.elems - at > 2 * kPrefetchElems ? kPrefetchElems : 0, codes, counts);
      }
      // The kernel counted whole rows.
      count_zeros(is_nan ? count : count - whole_rows(count), low_codes);
      const std::int64_t kept = totals_.are_grouped(settings_) ? keep_groups(codes, count, low_codes) : count;
      kept_ += kept;
      if (settings_.is_coded) low_codes->advance(count, kept);
    });
    if (settings_.is_coded && block.first + block.elems == block.layer.elems()) low_codes->end_layer();
  }

  // Of the codes of a piece leaves those whose group is not 0, without gaps; how many they are.
  std::int64_t keep_groups(const CompsoCodes& codes, std::int64_t elems, SectionEncoder* low_codes) {
    std::int64_t kept = 0;
    for (std::int64_t at = 0; at < elems; at += kCompsoGroupElems, ++group_) {
      const auto count = static_cast<std::size_t>(std::min(kCompsoGroupElems, elems - at));
      if (are_zero(codes.low + at, count) && (codes.high == nullptr || are_zero(codes.high + at, count))) {
        count_zeros(-static_cast<std::int64_t>(count), low_codes);
        continue;
      }
      workspace_.flags[group_ / 8] |= std::byte{1} << (group_ % 8);
      if (kept < at) {
        std::memmove(codes.low + kept, codes.low + at, count);
        if (codes.high != nullptr) std::memmove(codes.high + kept, codes.high + at, count);
      }
      kept += static_cast<std::int64_t>(count);
    }
    return kept;
  }

  static bool are_zero(const std::uint8_t* codes, std::size_t count) {
    static constexpr auto kZeros = [] {
      std::array<std::uint8_t, kCompsoGroupElems> zeros = {};
      zeros.fill(kCompsoZeroCode);
      return zeros;
    }();
    return std::memcmp(codes, kZeros.data(), count) == 0;
  }

  // Level 0 so many times more, or less: sums wrap.
  void count_zeros(std::int64_t elems, SectionEncoder* low_codes) {
    low_codes->counts()->sums[kCompsoZeroCode] += static_cast<std::uint64_t>(elems);
    high_counts_.sums[kCompsoZeroCode] += static_cast<std::uint64_t>(elems);
  }

  std::byte* put_plain(std::byte* to) const {
    const auto bytes = static_cast<std::size_t>(totals_.elems);
    std::memcpy(to, workspace_.low, bytes);
    if (!is_wide_) return to + bytes;
    std::memcpy(to + bytes, workspace_.high, bytes);
    return to + 2 * bytes;
  }

  std::byte* put_coded(SectionEncoder* low_codes) {
    std::byte* to = low_codes->finish();
    if (is_wide_) {
      to += encode_codes(workspace_.high, kept_, settings_.chunk_codes, to, workspace_.coder, nullptr, &high_counts_);
    }
    if (kept_ == totals_.elems) return to;
    return std::copy_n(workspace_.flags, compso_group_flag_bytes(totals_.groups), to);
  }

  const CompsoSettings& settings_;
  const std::span<const ConstTensorView> layers_;
  const Totals totals_;
  const Workspace workspace_;
  const Levels levels_;
  const RandomKey random_;
  bool is_wide_ = false;
  std::int64_t group_ = 0, kept_ = 0;  // so far: groups, codes that are not left out
  RansCounts high_counts_;
};

// ---- decode --------------------------------------------------------------------------------------------------------

class LayersDecoder {
 public:
  LayersDecoder(const CompsoSettings& settings, std::span<const TensorView> layers, std::byte* scratch)
      : settings_(settings),
        layers_(layers),
        totals_(totals_of(settings, layers)),
        workspace_(scratch, totals_),
        levels_{.rounding = settings.rounding, .largest = 0} {}

  Status run(std::span<const std::byte> payload) {
    std::uint64_t codes_at = 0;
    CORTADO_RETURN_IF_ERROR(read_header(payload, &codes_at));
    const std::span<const std::byte> codes = payload.subspan(codes_at);
    CORTADO_RETURN_IF_ERROR(settings_.is_coded ? take_coded(codes) : take_plain(codes));
    bool streams = false;
    for_blocks(settings_, layers_, [&](const Block<TensorView>& block) { streams |= decode_block(block); });
    if (streams) finish_streams();
    return {};
  }

 private:
  Status read_header(std::span<const std::byte> payload, std::uint64_t* codes_at) {
    const HeaderBytes header(settings_, totals_);
    *codes_at = header.all;
    if (payload.size() < *codes_at) {
      return make_error(StatusCode::kCorruptData, "the payload has %zu bytes, expected at least %llu", payload.size(),
                        static_cast<unsigned long long>(*codes_at));
    }
    const auto word = load<std::uint64_t>(payload.data());
    leaves_out_ = totals_.are_grouped(settings_) && (word & kCompsoLeavesOut) != 0;
    const std::uint64_t code_bytes = (settings_.is_coded ? word & 0xff : word) - (leaves_out_ ? kCompsoLeavesOut : 0);
    sections_ = 1 + (settings_.is_coded ? word >> kSectionsShift : 0);
    if (code_bytes != 1 && !(code_bytes == 2 && compso_may_be_wide(settings_))) {
      return make_error(StatusCode::kCorruptData, "the payload begins with %llu bytes a code, expected %s",
                        static_cast<unsigned long long>(code_bytes), compso_may_be_wide(settings_) ? "1 or 2" : "1");
    }
    is_wide_ = code_bytes == 2;
    if (settings_.rounding == Rounding::kDither) random_ = load<RandomKey>(payload.data() + kWidthBytes);
    steps_ = payload.data() + header.steps_at;
    first_levels_ = payload.data() + header.first_levels_at;
    if (settings_.finds_dead_zone()) outwards_ = payload.data() + header.outwards_at;
    for (std::int64_t i = 0; i < totals_.blocks; ++i) {
      const auto step = load<float>(steps_, i);
      const auto first_level = load<std::int32_t>(first_levels_, i);
      if (!is_compso_step(step) || first_level <= -kCompsoLevelLimit || first_level >= kCompsoLevelLimit) {
        return make_error(StatusCode::kCorruptData, "block %lld has the step %g and the smallest level %d",
                          static_cast<long long>(i), static_cast<double>(step), first_level);
      }
      if (!(std::fabs(outwards_of(i)) <= 1)) {
        return make_error(StatusCode::kCorruptData, "block %lld has levels %g steps outwards, expected -1 to 1",
                          static_cast<long long>(i), static_cast<double>(outwards_of(i)));
      }
    }
    return {};
  }

  float outwards_of(std::int64_t block) const {
    return outwards_ != nullptr ? load<float>(outwards_, block) : kDeadZone.outwards;
  }

  Status take_plain(std::span<const std::byte> codes) const {
    const auto elems = static_cast<std::size_t>(totals_.elems);
    const std::size_t expected = is_wide_ ? 2 * elems : elems;
    if (codes.size() != expected) {
      return make_error(StatusCode::kCorruptData, "%zu bytes of codes, expected %zu", codes.size(), expected);
    }
    std::memcpy(workspace_.low, codes.data(), elems);
    if (is_wide_) std::memcpy(workspace_.high, codes.data() + elems, elems);
    return {};
  }

  Status take_coded(std::span<const std::byte> codes) {
    std::int64_t kept = totals_.elems;
    if (leaves_out_) CORTADO_RETURN_IF_ERROR(take_flags(&codes, &kept));
    std::uint64_t low_bytes = 0;
    CORTADO_RETURN_IF_ERROR(decode_sections(codes, sections_, workspace_.low, kept, workspace_.coder, &low_bytes));
    codes = codes.subspan(low_bytes);
    if (is_wide_) return decode_codes(codes, workspace_.high, kept, workspace_.coder);
    if (codes.empty()) return {};
    return make_error(StatusCode::kCorruptData, "%zu bytes behind the low codes, expected none", codes.size());
  }

  // From the end of the codes; how many codes there are.
  Status take_flags(std::span<const std::byte>* codes, std::int64_t* kept) {
    const std::uint64_t bytes = compso_group_flag_bytes(totals_.groups);
    if (codes->size() < bytes) {
      return make_error(StatusCode::kCorruptData, "%zu bytes left for codes and the flags of %lld groups",
                        codes->size(), static_cast<long long>(totals_.groups));
    }
    flags_ = codes->last(bytes).data();
    *codes = codes->first(codes->size() - bytes);
    if (has_flags_beyond(flags_, totals_.groups)) {
      return make_error(StatusCode::kCorruptData, "the last byte, 0x%02x, has flags of more than %lld groups",
                        std::to_integer<unsigned>(flags_[bytes - 1]), static_cast<long long>(totals_.groups));
    }
    *kept = 0;
    std::int64_t group = 0;
    for (const TensorView& layer : layers_) {
      *kept += kept_codes(flags_, group, layer.elems());
      group += compso_groups(layer.elems());
    }
    return {};
  }

  // Of the next piece of a layer, those that were left out among them; in whole rows.
  CompsoCodes next_codes(std::int64_t elems, std::uint8_t (&low)[kMaxPieceElems],
                         std::uint8_t (&high)[kMaxPieceElems]) {
    const CompsoCodes from = {workspace_.low + at_, is_wide_ ? workspace_.high + at_ : nullptr};
    if (!leaves_out_) {
      at_ += elems;
      return from;
    }
    std::int64_t kept = 0;
    for (std::int64_t at = 0; at < elems; at += kCompsoGroupElems, ++group_) {
      const std::int64_t count = std::min(kCompsoGroupElems, elems - at);
      const auto bytes = static_cast<std::size_t>(whole_rows(count));
      if (is_group_kept(flags_, group_)) {
        std::memcpy(low + at, from.low + kept, bytes);
        if (is_wide_) std::memcpy(high + at, from.high + kept, bytes);
        kept += count;
      } else {
        std::memset(low + at, kCompsoZeroCode, bytes);
        if (is_wide_) std::memset(high + at, kCompsoZeroCode, bytes);
      }
    }
    at_ += kept;
    return {low, is_wide_ ? high : nullptr};
  }

  // Whether values went past the caches.
  bool decode_block(const Block<TensorView>& block) {
    const BlockGrid grid = {.step = load<float>(steps_, block.number)};
    const auto first_level = load<std::int32_t>(first_levels_, block.number);
    Levels levels = levels_;
    levels.dead_zone.outwards = outwards_of(block.number);
    const bool streams = block.layer.size_bytes() >= kLeastStreamedBytes;
    alignas(64) float buffer[kMaxPieceElems];
    alignas(64) std::uint8_t low[kMaxPieceElems], high[kMaxPieceElems];
    for_pieces(block, [&](std::int64_t at, std::int64_t count) {
      const BlockPiece piece = {
          .log2_block_elems = 62, .blocks = &grid, .first = block.first_random + at, .elems = whole_rows(count)};
      const CompsoCodes codes = next_codes(count, low, high);
      float* values = piece_target(block.layer, block.first + at, count, buffer);
      compso_dequantise(levels, piece, random_, first_level, codes, streams && values != buffer, values);
      store_piece(values, block.layer, block.first + at, count, streams);
    });
    return streams;
  }

  const CompsoSettings& settings_;
  const std::span<const TensorView> layers_;
  const Totals totals_;
  const Workspace workspace_;
  const Levels levels_;
  const std::byte* steps_ = nullptr;         // float32 a block
  const std::byte* first_levels_ = nullptr;  // int32 a block
  const std::byte* outwards_ = nullptr;      // float32 a block, or null
  RandomKey random_;
  bool is_wide_ = false, leaves_out_ = false;
  std::uint64_t sections_ = 1;
  const std::byte* flags_ = nullptr;  // a bit a group
  std::int64_t group_ = 0, at_ = 0;   // next group, next code that was not left out
};

// ---- lossless ------------------------------------------------------------------------------------------------------

// Of an fp32 three bytes, of a 16-bit float one byte are kept as they are.
std::uint64_t plain_bytes(std::int64_t elems, DType dtype) {
  return static_cast<std::uint64_t>(elems) * (dtype_bytes(dtype) - 1);
}

std::uint64_t encode_lossless(const CompsoSettings& settings, std::span<const ConstTensorView> layers,
                              std::byte* payload, std::byte* scratch) {
  auto* codes = reinterpret_cast<std::uint8_t*>(scratch);
  std::byte* to = payload;
  std::int64_t elems = 0;
  for (const ConstTensorView& layer : layers) {
    const auto split = layer.dtype == DType::kFloat32 ? split_floats_32 : split_floats_16;
    split(static_cast<const std::byte*>(layer.data), layer.elems(), codes + elems, to);
    to += plain_bytes(layer.elems(), layer.dtype);
    elems += layer.elems();
  }
  to += encode_codes(codes, elems, settings.chunk_codes, to, scratch + elems);
  return static_cast<std::uint64_t>(to - payload);
}

Status decode_lossless(std::span<const std::byte> payload, std::span<const TensorView> layers, std::int64_t elems,
                       std::byte* scratch) {
  const std::uint64_t plain = plain_bytes(elems, layers.front().dtype);
  if (payload.size() < plain) {
    return make_error(StatusCode::kCorruptData, "the payload has %zu bytes, expected at least %llu", payload.size(),
                      static_cast<unsigned long long>(plain));
  }
  auto* codes = reinterpret_cast<std::uint8_t*>(scratch);
  CORTADO_RETURN_IF_ERROR(decode_codes(payload.subspan(plain), codes, elems, scratch + elems));
  const std::byte* from = payload.data();
  for (const TensorView& layer : layers) {
    const auto merge = layer.dtype == DType::kFloat32 ? merge_floats_32 : merge_floats_16;
    merge(codes, from, layer.elems(), static_cast<std::byte*>(layer.data));
    codes += layer.elems();
    from += plain_bytes(layer.elems(), layer.dtype);
  }
  return {};
}

}  // namespace

std::uint64_t max_compso_bytes(const CompsoSettings& settings, std::span<const std::int64_t> layer_elems, DType dtype) {
  const Totals totals = totals_of(settings, layer_elems);
  if (totals.elems == 0) return 0;
  if (settings.is_lossless()) return plain_bytes(totals.elems, dtype) + max_rans_bytes(totals.elems);
  const std::uint64_t bytes = HeaderBytes(settings, totals).all;
  const std::uint64_t planes = compso_may_be_wide(settings) ? 2 : 1;
  if (!settings.is_coded) return bytes + planes * static_cast<std::uint64_t>(totals.elems);
  return bytes + kLengthBytes + planes * max_rans_bytes(totals.elems) + max_extra_section_bytes(totals.elems) +
         (totals.are_grouped(settings) ? compso_group_flag_bytes(totals.groups) : 0);
}

std::uint64_t compso_scratch_bytes(const CompsoSettings& settings, std::span<const std::int64_t> layer_elems) {
  const Totals totals = totals_of(settings, layer_elems);
  if (totals.elems == 0) return 0;
  const std::uint64_t coder = rans_scratch_bytes(totals.elems, settings.chunk_codes);
  if (settings.is_lossless()) return static_cast<std::uint64_t>(totals.elems) + coder;
  return kAlignBytes - 1 + plan_bytes(totals) + 2 * code_bytes(totals) + flag_bytes(totals) +
         (settings.is_coded ? coder : 0);
}

std::uint64_t encode_layers(const CompsoSettings& settings, std::span<const ConstTensorView> layers,
                            const EncodeContext& context, std::byte* payload, std::byte* scratch) {
  if (totals_of(settings, layers).elems == 0) return 0;
  if (settings.is_lossless()) return encode_lossless(settings, layers, payload, scratch);
  return LayersEncoder(settings, layers, context, scratch).run(payload);
}

Status decode_layers(const CompsoSettings& settings, std::span<const std::byte> payload,
                     std::span<const TensorView> layers, std::byte* scratch) {
  const std::int64_t elems = totals_of(settings, layers).elems;
  if (elems > 0) {
    return settings.is_lossless() ? decode_lossless(payload, layers, elems, scratch)
                                  : LayersDecoder(settings, layers, scratch).run(payload);
  }
  if (payload.empty()) return {};
  return make_error(StatusCode::kCorruptData, "%zu bytes of no values", payload.size());
}

}  // namespace cortado

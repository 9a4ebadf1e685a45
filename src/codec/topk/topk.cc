// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/topk/topk.h"

#include <algorithm>
#include <cstring>

#include "codec/binding.h"
#include "codec/cast/cast_kernels.h"
#include "codec/explain.h"
#include "codec/sparse.h"
#include "codec/stage.h"
#include "codec/topk/topk_index.h"
#include "codec/topk/topk_select.h"
#include "core/check.h"
#include "core/format.h"

namespace cortado {

namespace {

struct TopkOptions {
  double density;
  bool is_sampled;
  std::int64_t block_elems;  // 0: the tensor is one block
  IndexKind index;
  DType values;
};

constexpr std::uint64_t kAlignBytes = 64;

class TopkCodec final : public Codec, public Sparsifier {
 public:
  explicit TopkCodec(const TopkOptions& options) : options_(options) {}

  std::string spec() const override {
    return "topk(density=" + number_text(options_.density) + ", select=" + (options_.is_sampled ? "sampled" : "exact") +
           ", block=" + (options_.block_elems == 0 ? "tensor" : std::to_string(options_.block_elems)) +
           ", index=" + index_text() + ", values=" + std::string(dtype_name(options_.values)) + ")";
  }

  // Values rounded to fp16 would only hide from the next stage what it could do better.
  const Sparsifier* sparsifier() const override { return options_.values == DType::kFloat32 ? this : nullptr; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    if (!sparse_elems(rows, cols).has_value()) return kNoMemoryHoldsIt;
    return max_index_bytes(rows, cols) + static_cast<std::uint64_t>(max_kept(rows, cols)) * value_bytes();
  }

  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::optional<std::int64_t> elems = sparse_elems(rows, cols);
    if (!elems.has_value()) return kNoMemoryHoldsIt;
    if (*elems == 0) return 0;
    const ScratchElems sizes = scratch_elems(*elems);
    return static_cast<std::uint64_t>(sizes.list) * (sizeof(std::int64_t) + sizeof(float)) +
           static_cast<std::uint64_t>(sizes.sample) * sizeof(float) + kAlignBytes - 1;
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    if (input.elems() == 0) return std::uint64_t{0};
    const KeptList list = select_all(input, context, scratch);
    const std::uint64_t index_bytes = put_index(list, input.elems(), payload.data());
    put_values(list, payload.data() + index_bytes);
    return index_bytes + static_cast<std::uint64_t>(list.count) * value_bytes();
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    if (output.elems() == 0) return check_payload_bytes(*this, payload, output, 0);
    const Result<Sections> sections = split(payload, output.elems());
    if (!sections.ok()) return sections.status().with_context(place("decode", output.rows, output.cols));
    const auto& [index, values, kept] = sections.value();
    options_.values == DType::kFloat16 ? scatter_values<DType::kFloat16>(index, values.data(), kept, output)
                                       : scatter_values<DType::kFloat32>(index, values.data(), kept, output);
    return {};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    PayloadExplainer explainer(payload);
    const std::int64_t elems = sparse_elems(rows, cols).value_or(0);
    if (elems == 0) {
      explainer.take(payload.size(), "unreadable", "an empty tensor has none");
      return std::move(explainer).finish();
    }
    const Result<Sections> sections = split(payload, elems);
    if (!sections.ok()) {
      explainer.take(payload.size(), "unreadable", sections.status().message());
      return std::move(explainer).finish();
    }
    const auto& [index, values, kept] = sections.value();
    explainer.append(explain_index(index, rows, cols));
    explainer.take(values.size(), "values", first_values(values, options_.values));
    return std::move(explainer).finish();
  }

  // ---- Sparsifier ----

  bool is_shared() const override { return false; }

  std::int64_t max_kept(std::int64_t rows, std::int64_t cols) const override {
    return kept_range(sparse_elems(rows, cols).value_or(0)).most;
  }

  std::uint64_t max_index_bytes(std::int64_t rows, std::int64_t cols) const override {
    const std::int64_t elems = sparse_elems(rows, cols).value_or(0);
    return cortado::max_index_bytes(options_.index, elems, kept_range(elems).most);
  }

  std::uint64_t select_scratch_bytes(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    return scratch_bytes(rows, cols, dtype);
  }

  Result<Selection> select(ConstTensorView input, const EncodeContext& context, std::span<float> values,
                           std::span<std::byte> index, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_select(*this, input, values, index, scratch));
    if (input.elems() == 0) return Selection{};
    const KeptList list = select_all(input, context, scratch);
    std::memcpy(values.data(), list.values, static_cast<std::size_t>(list.count) * sizeof(float));
    return Selection{list.count, put_index(list, input.elems(), index.data())};
  }

  Result<std::int64_t> check_index(std::span<const std::byte> index, std::int64_t rows,
                                   std::int64_t cols) const override {
    const Result<std::int64_t> kept = checked_kept(index, sparse_elems(rows, cols).value_or(0));
    return kept.ok() ? kept : kept.status().with_context(place("index", rows, cols));
  }

  std::vector<PayloadSection> explain_index(std::span<const std::byte> index, std::int64_t rows,
                                            std::int64_t cols) const override {
    PayloadExplainer explainer(index);
    const std::int64_t elems = sparse_elems(rows, cols).value_or(0);
    const Result<std::int64_t> checked = checked_kept(index, elems);
    if (elems == 0 || !checked.ok()) {
      explainer.take(index.size(), "unreadable", checked.ok() ? "of no values" : checked.status().message());
      return std::move(explainer).finish();
    }
    const std::int64_t kept = checked.value();
    const bool is_delta = static_cast<IndexKind>(index[0]) == IndexKind::kDelta;
    explainer.take(1, "index kind", is_delta ? "delta" : "bitmap");
    explainer.take(sizeof(kept), "kept", std::to_string(kept) + " of " + std::to_string(elems) + " values");
    if (is_delta) {
      const DeltaParts parts(index, elems, kept);
      explainer.take(parts.low.size(), "gaps, lower bits", std::to_string(parts.bits) + " bits each");
      explainer.take(parts.unary.size(), "gaps, upper parts",
                     "in unary; positions " + first_positions(index, elems, kept));
    } else {
      explainer.take(index.size() - kIndexHeaderBytes, "bitmap", "positions " + first_positions(index, elems, kept));
    }
    return std::move(explainer).finish();
  }

  Status scatter(std::span<const std::byte> index, std::span<const float> values, TensorView output,
                 std::span<std::byte>) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_scatter(*this, values, output));
    scatter_values<DType::kFloat32>(index, values.data(), static_cast<std::int64_t>(values.size()), output);
    return {};
  }

 private:
  struct Sections {
    std::span<const std::byte> index;
    std::span<const std::byte> values;
    std::int64_t kept;
  };

  struct ScratchElems {
    std::int64_t list = 0;
    std::int64_t sample = 0;
  };

  Status check_dtype(DType dtype) const {
    return is_float_dtype(dtype) ? Status() : unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  std::string place(const char* call, std::int64_t rows, std::int64_t cols) const {
    return spec() + ": " + call + " of " + std::to_string(rows) + " x " + std::to_string(cols);
  }

  const char* index_text() const {
    if (options_.index == IndexKind::kSmaller) return "auto";
    return options_.index == IndexKind::kDelta ? "delta" : "bitmap";
  }

  std::uint64_t value_bytes() const { return dtype_bytes(options_.values); }

  // ---- how many are kept ----

  std::int64_t block_elems(std::int64_t elems) const {
    return options_.block_elems == 0 ? elems : std::min(elems, options_.block_elems);
  }

  KeepRange kept_range_of_block(std::int64_t elems) const {
    const std::int64_t kept = kept_elems(options_.density, elems);
    return {kept, options_.is_sampled ? std::min(elems, kept + kept / 4) : kept};
  }

  KeepRange kept_range(std::int64_t elems) const {
    if (elems == 0) return {0, 0};
    const std::int64_t block = block_elems(elems);
    const KeepRange full = kept_range_of_block(block), last = kept_range_of_block(elems % block);
    return {elems / block * full.least + last.least, elems / block * full.most + last.most};
  }

  // ---- encode ----

  ScratchElems scratch_elems(std::int64_t elems) const {
    if (elems == 0) return {};
    const std::int64_t block = block_elems(elems);
    const std::int64_t least = kept_range_of_block(block).least;
    // A smaller last block needs no more than a full one.
    return {.list = kept_range(elems).most + select_list_elems(block, least), .sample = select_sample_elems(block)};
  }

  KeptList select_all(ConstTensorView input, const EncodeContext& context, std::span<std::byte> scratch) const {
    const std::int64_t elems = input.elems();
    const ScratchElems sizes = scratch_elems(elems);
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
    KeptList list;
    list.positions =
        reinterpret_cast<std::int64_t*>(scratch.data() + (kAlignBytes - address % kAlignBytes) % kAlignBytes);
    list.values = reinterpret_cast<float*>(list.positions + sizes.list);
    list.sample = list.values + sizes.list;
    const PhiloxStream stream{philox_key(context.seed, context.tensor), context.step};
    const std::int64_t block = block_elems(elems);
    for (std::int64_t first = 0; first < elems; first += block) {
      const std::int64_t count = std::min(block, elems - first);
      select_largest(input, first, count, kept_range_of_block(count), stream, list);
    }
    return list;
  }

  std::uint64_t put_index(const KeptList& list, std::int64_t elems, std::byte* to) const {
    return write_index(options_.index, {list.positions, static_cast<std::size_t>(list.count)}, elems, to);
  }

  void put_values(const KeptList& list, std::byte* to) const {
    if (options_.values == DType::kFloat16) {
      fp32_to_fp16(list.values, list.count, reinterpret_cast<std::uint16_t*>(to));
    } else {
      std::memcpy(to, list.values, static_cast<std::size_t>(list.count) * sizeof(float));
    }
  }

  // ---- decode ----

  Result<std::int64_t> kept_of(std::span<const std::byte> section, std::int64_t elems) const {
    const KeepRange range = kept_range(elems);
    return read_index_header(section, options_.index, range.least, range.most);
  }

  Result<std::int64_t> checked_kept(std::span<const std::byte> index, std::int64_t elems) const {
    if (elems == 0 && index.empty()) return std::int64_t{0};
    CORTADO_ASSIGN_OR_RETURN(const std::int64_t kept, kept_of(index, elems));
    CORTADO_RETURN_IF_ERROR(check_index_section(index, elems, kept));
    return kept;
  }

  Result<Sections> split(std::span<const std::byte> payload, std::int64_t elems) const {
    CORTADO_ASSIGN_OR_RETURN(const std::int64_t kept, kept_of(payload, elems));
    const std::uint64_t values_bytes = static_cast<std::uint64_t>(kept) * value_bytes();
    if (payload.size() < kIndexHeaderBytes + values_bytes) {
      return make_error(StatusCode::kCorruptData, "the payload has %zu bytes, %lld values alone have %llu",
                        payload.size(), static_cast<long long>(kept), static_cast<unsigned long long>(values_bytes));
    }
    const std::size_t index_bytes = payload.size() - values_bytes;
    const Sections sections{payload.first(index_bytes), payload.subspan(index_bytes), kept};
    CORTADO_RETURN_IF_ERROR(check_index_section(sections.index, elems, kept));
    return sections;
  }

  // "1, 3, 9": where the first values were.
  static std::string first_positions(std::span<const std::byte> index, std::int64_t elems, std::int64_t kept) {
    constexpr int kShown = 4;
    std::string text;
    int shown = 0;
    for_each_position(index, elems, kept, [&](std::int64_t position) {
      if (shown++ < kShown) text += (text.empty() ? "" : ", ") + std::to_string(position);
    });
    return shown > kShown ? text + ", ..." : text;
  }

  template <DType kValues>
  static void scatter_values(std::span<const std::byte> index, const void* values, std::int64_t kept,
                             TensorView output) {
    if (kept == 0) return;
    with_dtype(output.dtype, [&]<DType kOutput>() {
      ZeroedAhead<kOutput> target(output);
      std::int64_t i = 0;
      for_each_position(index, output.elems(), kept,
                        [&](std::int64_t position) { target.put(position, read_element<kValues>(values, i++)); });
      target.finish();
    });
  }

  TopkOptions options_;
};

Result<std::unique_ptr<Codec>> make_topk(const ParameterValues& values) {
  TopkOptions options{};
  options.density = values.real("density");
  options.is_sampled = values.word("select") == "sampled";
  options.block_elems = values.text("block") == "tensor" ? 0 : values.integer("block");
  if (values.word("index") == "delta") options.index = IndexKind::kDelta;
  if (values.word("index") == "bitmap") options.index = IndexKind::kBitmap;
  options.values = values.word("values") == "fp16" ? DType::kFloat16 : DType::kFloat32;
  return std::unique_ptr<Codec>(std::make_unique<TopkCodec>(options));
}

}  // namespace

const CodecRow& topk_row() {
  static const CodecRow row = {
      .name = "topk",
      .wire_id = 6,
      .version = 1,
      .traits = {.sparse = true, .divisible = true, .needs_residual = true},
      .summary = "the values of largest magnitude and their positions",
      .parameters = {{.name = "density",
                      .kind = ParameterKind::kReal,
                      .default_text = "0.01",
                      .min = kMinDensity,
                      .max = 1,
                      .meaning = "share of the values that are kept, rounded up to at least 1"},
                     {.name = "select",
                      .kind = ParameterKind::kChoice,
                      .default_text = "exact",
                      .choices = "exact|sampled",
                      .meaning = "just the largest; or all above a sampled threshold, up to a quarter more"},
                     {.name = "block",
                      .kind = ParameterKind::kInteger,
                      .default_text = "tensor",
                      .min = 64,
                      .max = 1 << 30,
                      .choices = "tensor",
                      .meaning = "values of which each such group keeps its share, in memory order"},
                     {.name = "index",
                      .kind = ParameterKind::kChoice,
                      .default_text = "auto",
                      .choices = "auto|delta|bitmap",
                      .meaning = "positions as coded gaps, as a bit for every value, or as what is smaller"},
                     {.name = "values",
                      .kind = ParameterKind::kChoice,
                      .default_text = "fp32",
                      .choices = "fp32|fp16",
                      .meaning = "what travels; fp32 where a composition takes the values further"}},
      .make = make_topk,
  };
  return row;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/randk/randk.h"

#include <cstring>
#include <limits>

#include "codec/binding.h"
#include "codec/explain.h"
#include "codec/randk/randk_pattern.h"
#include "codec/sparse.h"
#include "codec/stage.h"
#include "codec/topk/topk_select.h"
#include "core/check.h"
#include "core/format.h"

namespace cortado {

namespace {

// The whole index: what the positions are drawn from.
constexpr std::uint64_t kKeyBytes = sizeof(PhiloxStream);
static_assert(kKeyBytes == 16);

constexpr MagnitudeBound kLargestFinite = 0x7f7fffff;

struct RandkOptions {
  double density;
  std::int64_t block_elems;
  bool is_unbiased;
};

class RandkCodec final : public Codec, public Sparsifier {
 public:
  explicit RandkCodec(const RandkOptions& options) : options_(options) {}

  std::string spec() const override {
    return "randk(density=" + number_text(options_.density) + ", block=" + std::to_string(options_.block_elems) +
           ", scale=" + (options_.is_unbiased ? "unbiased" : "none") + ")";
  }

  const Sparsifier* sparsifier() const override { return this; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    const std::optional<std::int64_t> elems = sparse_elems(rows, cols);
    if (!elems.has_value()) return kNoMemoryHoldsIt;
    return *elems == 0 ? 0 : kKeyBytes + static_cast<std::uint64_t>(pattern(*elems).kept()) * sizeof(float);
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    if (input.elems() == 0) return std::uint64_t{0};
    put_key(context, payload.data());
    gather(input, stream_of(payload), payload.data() + kKeyBytes);
    return max_payload_bytes(input.rows, input.cols, input.dtype);
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const std::uint64_t bytes = max_payload_bytes(output.rows, output.cols, output.dtype);
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, bytes));
    if (output.elems() > 0) scatter_values(stream_of(payload), payload.data() + kKeyBytes, output);
    return {};
  }

  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType) const override {
    return SumForm{.header_bytes = max_index_bytes(rows, cols), .elems = max_kept(rows, cols)};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    PayloadExplainer explainer(payload);
    const std::int64_t elems = sparse_elems(rows, cols).value_or(0);
    const std::int64_t kept = pattern(elems).kept();
    if (kept > 0) {
      explainer.append(explain_index(explainer.next(kKeyBytes), rows, cols));
      const std::uint64_t bytes = static_cast<std::uint64_t>(kept) * sizeof(float);
      explainer.take(bytes, "values",
                     std::to_string(kept) + " of " + std::to_string(elems) + ": " +
                         first_values(explainer.next(bytes), DType::kFloat32));
    }
    return std::move(explainer).finish();
  }

  // ---- Sparsifier ----

  bool is_shared() const override { return true; }
  bool scales_up() const override { return options_.is_unbiased; }

  std::int64_t max_kept(std::int64_t rows, std::int64_t cols) const override {
    return pattern(sparse_elems(rows, cols).value_or(0)).kept();
  }
  std::uint64_t max_index_bytes(std::int64_t rows, std::int64_t cols) const override {
    return sparse_elems(rows, cols).value_or(0) == 0 ? 0 : kKeyBytes;
  }
  std::uint64_t select_scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<Selection> select(ConstTensorView input, const EncodeContext& context, std::span<float> values,
                           std::span<std::byte> index, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_select(*this, input, values, index, scratch));
    if (input.elems() == 0) return Selection{};
    put_key(context, index.data());
    gather(input, stream_of(index), values.data());
    return Selection{pattern(input.elems()).kept(), kKeyBytes};
  }

  Result<std::int64_t> check_index(std::span<const std::byte> index, std::int64_t rows,
                                   std::int64_t cols) const override {
    const std::uint64_t expected = max_index_bytes(rows, cols);
    if (index.size() == expected) return max_kept(rows, cols);
    return make_error(StatusCode::kCorruptData, "%s: index of %lld x %lld: %zu bytes, expected %llu", spec().c_str(),
                      static_cast<long long>(rows), static_cast<long long>(cols), index.size(),
                      static_cast<unsigned long long>(expected));
  }

  std::vector<PayloadSection> explain_index(std::span<const std::byte> index, std::int64_t,
                                            std::int64_t) const override {
    PayloadExplainer explainer(index);
    explainer.take_random_key("of seed and tensor; positions follow from it");
    return std::move(explainer).finish();
  }

  Status scatter(std::span<const std::byte> index, std::span<const float> values, TensorView output,
                 std::span<std::byte>) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_scatter(*this, values, output));
    if (output.elems() > 0) scatter_values(stream_of(index), values.data(), output);
    return {};
  }

 private:
  Status check_dtype(DType dtype) const {
    return is_float_dtype(dtype) ? Status() : unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  RandkPattern pattern(std::int64_t elems) const {
    return RandkPattern::of(options_.density, options_.block_elems, elems);
  }

  static void put_key(const EncodeContext& context, std::byte* to) {
    const PhiloxStream stream{philox_key(context.seed, context.tensor), context.step};
    std::memcpy(to, &stream, kKeyBytes);
  }

  static PhiloxStream stream_of(std::span<const std::byte> key) {
    PhiloxStream stream;
    std::memcpy(&stream, key.data(), kKeyBytes);
    return stream;
  }

  // `values` has room for what is kept; no alignment needed.
  void gather(ConstTensorView input, const PhiloxStream& stream, void* values) const {
    const RandkPattern kept = pattern(input.elems());
    const auto factor = static_cast<float>(static_cast<double>(kept.elems) / static_cast<double>(kept.kept()));
    std::int64_t not_finite = 0, next = 0;
    const auto look_at = [&](std::int64_t position, std::int64_t count) {
      not_finite += count_above(elements_of(input, position, count), kLargestFinite);
    };
    // Unscaled values are copied by themselves: a compiler may make one product with 1 of both, which changes NaN.
    const auto copy = [&]<DType kDType, bool kScales>() {
      kept.walk(stream, look_at, [&](std::int64_t position, std::int64_t count) {
        for (std::int64_t i = position; i < position + count; ++i) {
          const float value = read_element<kDType>(input.data, i);
          write_element<DType::kFloat32>(values, next++, kScales ? value * factor : value);
        }
      });
    };
    with_dtype(input.dtype, [&]<DType kDType>() {
      options_.is_unbiased ? copy.template operator()<kDType, true>() : copy.template operator()<kDType, false>();
    });
    if (not_finite > 0) write_element<DType::kFloat32>(values, 0, std::numeric_limits<float>::quiet_NaN());
  }

  void scatter_values(const PhiloxStream& stream, const void* values, TensorView output) const {
    with_dtype(output.dtype, [&]<DType kDType>() {
      const auto zero = [&](std::int64_t position, std::int64_t count) {
        std::byte* const to = static_cast<std::byte*>(output.data) + position * std::int64_t{dtype_bytes(kDType)};
        std::memset(to, 0, static_cast<std::size_t>(count) * dtype_bytes(kDType));
      };
      std::int64_t next = 0;
      pattern(output.elems()).walk(stream, zero, [&](std::int64_t position, std::int64_t count) {
        for (std::int64_t i = position; i < position + count; ++i) {
          write_element<kDType>(output.data, i, read_element<DType::kFloat32>(values, next++));
        }
      });
    });
  }

  RandkOptions options_;
};

Result<std::unique_ptr<Codec>> make_randk(const ParameterValues& values) {
  return std::unique_ptr<Codec>(
      std::make_unique<RandkCodec>(RandkOptions{.density = values.real("density"),
                                                .block_elems = values.integer("block"),
                                                .is_unbiased = values.word("scale") == "unbiased"}));
}

}  // namespace

const CodecRow& randk_row() {
  static const CodecRow row = {
      .name = "randk",
      .wire_id = 7,
      .version = 1,
      .traits = {.linear = true, .sparse = true, .divisible = true, .fixed_size = true, .needs_residual = true},
      .summary = "values at random positions, the same on all ranks",
      .parameters = {{.name = "density",
                      .kind = ParameterKind::kReal,
                      .default_text = "0.01",
                      .min = kMinDensity,
                      .max = 1,
                      .meaning = "share of the values that are kept, rounded up to whole blocks"},
                     {.name = "block",
                      .kind = ParameterKind::kInteger,
                      .default_text = "1",
                      .min = 1,
                      .max = 1 << 20,
                      .meaning = "neighbours that are kept together"},
                     {.name = "scale",
                      .kind = ParameterKind::kChoice,
                      .default_text = "none",
                      .choices = "none|unbiased",
                      .meaning = "kept as they are, for error feedback; or times elements over kept, without"}},
      .make = make_randk,
  };
  return row;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sign/sign.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "codec/binding.h"
#include "codec/code_sums.h"
#include "codec/explain.h"
#include "codec/sign/sign_kernels.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

constexpr std::int64_t kWholeTensor = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kBlockMultiple = 16;  // so that blocks begin with a byte and a vector

struct Settings {
  SignScale scale;
  std::int64_t block_elems;
  bool majority;
};

// Where the two sections of a payload lie.
struct Layout {
  std::uint64_t scale_bytes = 0;
  std::uint64_t bit_bytes = 0;
  std::uint64_t payload_bytes() const { return scale_bytes + bit_bytes; }
};

// "+-++...": the first signs.
std::string first_signs(std::span<const std::byte> bits, std::int64_t elems) {
  constexpr std::int64_t kShown = 16;
  std::string text;
  for (std::int64_t i = 0; i < std::min(elems, kShown) && static_cast<std::size_t>(i / 8) < bits.size(); ++i) {
    text += (bits[static_cast<std::size_t>(i / 8)] >> (i % 8) & std::byte{1}) == std::byte{0} ? '+' : '-';
  }
  return elems > kShown ? text + "..." : text;
}

class SignCodec final : public Codec {
 public:
  explicit SignCodec(const Settings& settings) : settings_(settings) {}

  std::string spec() const override {
    constexpr const char* kScales[] = {"mean_abs", "two_means", "none"};
    const std::string block = settings_.block_elems == kWholeTensor ? "tensor" : std::to_string(settings_.block_elems);
    return std::string("sign(scale=") + kScales[static_cast<int>(settings_.scale)] + ", block=" + block +
           ", vote=" + (settings_.majority ? "majority" : "mean") + ")";
  }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    return layout_of(checked_elems(rows, cols).value_or(0)).payload_bytes();
  }
  std::uint64_t scratch_bytes(std::int64_t, std::int64_t, DType) const override { return 0; }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext&, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    if (input.elems() == 0) return std::uint64_t{0};
    const Layout layout = layout_of(input.elems());
    sign_encode(input.data, input.dtype, input.elems(), settings_.block_elems, settings_.scale, payload.data(),
                payload.data() + layout.scale_bytes);
    return layout.payload_bytes();
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    const Layout layout = layout_of(output.elems());
    CORTADO_RETURN_IF_ERROR(check_payload_bytes(*this, payload, output, layout.payload_bytes()));
    if (output.elems() == 0) return {};
    CORTADO_RETURN_IF_ERROR(check_scales(payload.data(), output.elems()));
    CORTADO_RETURN_IF_ERROR(check_padding(payload, output.elems()));
    sign_decode(payload.data(), payload.data() + layout.scale_bytes, settings_.scale, settings_.block_elems,
                output.data, output.dtype, output.elems());
    return {};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    const std::int64_t elems = checked_elems(rows, cols).value_or(0);
    const Layout layout = layout_of(elems);
    PayloadExplainer explainer(payload);
    constexpr const char* kMeanings[] = {"mean magnitude", "mean of the values >= 0, mean of those below",
                                         "1, NaN if a value was not finite"};
    explainer.take(layout.scale_bytes, "scales",
                   std::string(kMeanings[static_cast<int>(settings_.scale)]) +
                       ", block after block: " + first_values(explainer.next(layout.scale_bytes), DType::kFloat32));
    explainer.take(layout.bit_bytes, "signs",
                   "a bit a value, lowest bit first, 1 is negative: " + first_signs(explainer.rest(), elems));
    return std::move(explainer).finish();
  }

  bool is_majority_vote() const override { return settings_.majority; }

  // Signs without a scale: the bytes count negative ones.
  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    if (settings_.scale != SignScale::kNone || dtype != DType::kFloat32) return std::nullopt;
    return code_sum_form(rows, cols, kLargestCodeSum);
  }

  Status to_sum_form(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols, int,
                     std::span<std::byte> form, std::span<float>) const override {
    const std::int64_t elems = rows * cols;
    if (elems == 0) return {};
    const Layout layout = layout_of(elems);
    CORTADO_CHECK(payload.size() == layout.payload_bytes() && form.size() == static_cast<std::size_t>(elems) + 1);
    const std::byte* bits = payload.data() + layout.scale_bytes;
    for (std::int64_t i = 0; i < elems; ++i) form[i] = bits[i / 8] >> (i % 8) & std::byte{1};
    const bool is_finite = read_sign_levels(payload.data(), 0, settings_.scale).positive == 1;
    form.back() = is_finite ? std::byte{0} : std::byte{1};
    return {};
  }

  Status decode_sum(std::span<const std::byte> form, SumTerms terms, TensorView output) const override {
    return decode_code_sums(*this, form, terms, 1, output, [&](int negative) {
      const int sum = terms.added - 2 * negative;
      if (!settings_.majority) return static_cast<float>(sum);
      return static_cast<float>(((sum > 0) - (sum < 0)) * terms.added);
    });
  }

 private:
  Layout layout_of(std::int64_t elems) const {
    if (elems == 0) return {};
    return {.scale_bytes = static_cast<std::uint64_t>(sign_blocks(elems, settings_.block_elems) *
                                                      sign_scale_bytes(settings_.scale)),
            .bit_bytes = static_cast<std::uint64_t>(elems / 8 + (elems % 8 != 0))};
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  Status check_scales(const std::byte* scales, std::int64_t elems) const {
    for (std::int64_t block = 0; block < sign_blocks(elems, settings_.block_elems); ++block) {
      const SignLevels levels = read_sign_levels(scales, block, settings_.scale);
      if (is_sign_scale(levels, settings_.scale)) continue;
      constexpr const char* kExpected[] = {"at least 0", "at least 0 and at most 0", "1"};
      return make_error(StatusCode::kCorruptData, "%s: decode: block %lld has levels %g and %g, expected %s or NaN",
                        spec().c_str(), static_cast<long long>(block), static_cast<double>(levels.positive),
                        static_cast<double>(levels.negative), kExpected[static_cast<int>(settings_.scale)]);
    }
    return {};
  }

  Status check_padding(std::span<const std::byte> payload, std::int64_t elems) const {
    const auto last = static_cast<unsigned>(payload.back());
    const auto used_bits = static_cast<unsigned>(elems % 8);
    if (used_bits == 0 || last >> used_bits == 0) return {};
    return make_error(StatusCode::kCorruptData, "%s: decode: the last byte is 0x%02x, expected 0 from bit %u on",
                      spec().c_str(), last, used_bits);
  }

  const Settings settings_;
};

Result<std::unique_ptr<Codec>> make_sign(const ParameterValues& values) {
  const bool in_blocks = values.text("block") != "tensor";
  const Settings settings = {.scale = sign_scale_named(values.word("scale")),
                             .block_elems = in_blocks ? values.integer("block") : kWholeTensor,
                             .majority = values.word("vote") == "majority"};
  if (in_blocks && settings.block_elems % kBlockMultiple != 0) {
    return make_error(StatusCode::kInvalidArgument, "sign(block=%lld): block must be a multiple of %lld",
                      static_cast<long long>(settings.block_elems), static_cast<long long>(kBlockMultiple));
  }
  if (in_blocks && settings.scale == SignScale::kNone) {
    return make_error(StatusCode::kInvalidArgument, "sign(scale=none, block=%lld): without a scale there are no blocks",
                      static_cast<long long>(settings.block_elems));
  }
  if (settings.majority && settings.scale == SignScale::kTwoMeans) {
    return make_error(StatusCode::kInvalidArgument,
                      "sign(scale=two_means, vote=majority): a vote needs one scale for both signs: mean_abs or none");
  }
  return std::unique_ptr<Codec>(std::make_unique<SignCodec>(settings));
}

}  // namespace

SignScale sign_scale_named(const std::string& word) {
  if (word == "none") return SignScale::kNone;
  return word == "two_means" ? SignScale::kTwoMeans : SignScale::kMeanAbs;
}

const CodecRow& sign_row() {
  static const CodecRow row = {
      .name = "sign",
      .wire_id = 5,
      .version = 1,
      .traits = {.fixed_size = true, .needs_residual = true},
      .summary = "one bit a value (signSGD, EF-signSGD, 1-bit SGD)",
      .parameters = {{.name = "scale",
                      .kind = ParameterKind::kChoice,
                      .default_text = "mean_abs",
                      .choices = "mean_abs|two_means|none",
                      .meaning = "mean magnitude; mean of either sign; or 1"},
                     {.name = "block",
                      .kind = ParameterKind::kInteger,
                      .default_text = "tensor",
                      .min = 256,
                      .max = 1 << 24,
                      .choices = "tensor",
                      .meaning = "values that share a scale, a multiple of 16"},
                     {.name = "vote",
                      .kind = ParameterKind::kChoice,
                      .default_text = "mean",
                      .choices = "mean|majority",
                      .meaning = "ranks are averaged, or the sign most of them have wins"}},
      .make = make_sign,
  };
  return row;
}

}  // namespace cortado

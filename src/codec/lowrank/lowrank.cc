// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/lowrank/lowrank.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/binding.h"
#include "codec/explain.h"
#include "codec/lowrank/lowrank_kernels.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

// In front of every payload; spec.md.
struct Header {
  std::uint32_t rank;
  std::uint32_t zero;
};
static_assert(sizeof(Header) == 8 && sizeof(BasisKey) == 24);

constexpr std::uint64_t kAlignBytes = 64;
constexpr std::uint64_t kNoMemoryHoldsIt = std::numeric_limits<std::uint64_t>::max();
// Larger matrices have no sizes, so that sums of factor bytes need no check for overflow.
constexpr std::int64_t kLargestElems = std::int64_t{1} << 58;

// Elements of the factors of one shape; all 0 for empty tensors.
struct Factors {
  int rank = 0;
  std::int64_t row_elems = 0;
  std::int64_t col_elems = 0;
};

// Where the factors lie in scratch memory: aligned, the row factor twice, as orthogonalise_rows() needs it.
struct Workspace {
  Workspace(std::span<std::byte> scratch, const Factors& factors) {
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.data());
    row = reinterpret_cast<float*>(scratch.data() + (kAlignBytes - address % kAlignBytes) % kAlignBytes);
    row_again = row + factors.row_elems;
    col = row_again + factors.row_elems;
  }
  float* row;
  float* row_again;
  float* col;
};

std::byte* put(std::byte* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return to + bytes;
}

const std::byte* take(const std::byte* from, void* to, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return from + bytes;
}

class LowRankCodec final : public Codec {
 public:
  LowRankCodec(const CodecRow& row, int rank) : row_(row), rank_(rank) {}

  std::string spec() const override { return std::string(row_.name) + "(rank=" + std::to_string(rank_) + ")"; }

  std::uint64_t max_payload_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    if (is_too_large(rows, cols)) return kNoMemoryHoldsIt;
    const Factors factors = factors_of(rows, cols);
    if (factors.rank == 0) return 0;
    return is_power() ? sizeof(Header) + bytes_of(factors.row_elems) + bytes_of(factors.col_elems)
                      : sizeof(Header) + sizeof(BasisKey) + bytes_of(factors.row_elems);
  }

  std::uint64_t scratch_bytes(std::int64_t rows, std::int64_t cols, DType) const override {
    if (is_too_large(rows, cols)) return kNoMemoryHoldsIt;
    const Factors factors = factors_of(rows, cols);
    if (factors.rank == 0) return 0;
    return 2 * bytes_of(factors.row_elems) + bytes_of(factors.col_elems) + kAlignBytes - 1;
  }

  Result<std::uint64_t> encode(ConstTensorView input, const EncodeContext& context, std::span<std::byte> payload,
                               std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(input.dtype));
    CORTADO_RETURN_IF_ERROR(check_encode(*this, input, payload, scratch));
    const Factors factors = factors_of(input.rows, input.cols);
    if (factors.rank == 0) return std::uint64_t{0};
    const Workspace work(scratch, factors);
    const BasisKey key{.seed = context.seed, .step = context.step, .tensor = context.tensor};
    const ResidualPass pass{
        .rows = input.rows, .cols = input.cols, .gradient = input.data, .gradient_dtype = input.dtype};

    random_basis(work.col, input.cols, factors.rank, key);
    project_rows(pass, work.col, factors.rank, work.row);
    const Header header{.rank = static_cast<std::uint32_t>(factors.rank), .zero = 0};
    std::byte* end = put(payload.data(), &header, sizeof(header));
    if (is_power()) {
      orthogonalise_rows(work.row, input.rows, factors.rank, key, work.row_again);
      project_cols(pass, work.row, factors.rank, work.col);
      end = put(end, work.row, bytes_of(factors.row_elems));
      end = put(end, work.col, bytes_of(factors.col_elems));
    } else {
      end = put(end, &key, sizeof(key));
      end = put(end, work.row, bytes_of(factors.row_elems));
    }
    return static_cast<std::uint64_t>(end - payload.data());
  }

  Status decode(std::span<const std::byte> payload, TensorView output, std::span<std::byte> scratch) const override {
    CORTADO_RETURN_IF_ERROR(check_dtype(output.dtype));
    CORTADO_RETURN_IF_ERROR(check_decode(*this, payload, output, scratch));
    CORTADO_RETURN_IF_ERROR(
        check_payload_bytes(*this, payload, output, max_payload_bytes(output.rows, output.cols, output.dtype)));
    const Factors factors = factors_of(output.rows, output.cols);
    if (factors.rank == 0) return {};
    Header header;
    const std::byte* next = take(payload.data(), &header, sizeof(header));
    CORTADO_RETURN_IF_ERROR(check_header(header, factors, output));
    const Workspace work(scratch, factors);
    if (is_power()) {
      next = take(next, work.row, bytes_of(factors.row_elems));
      take(next, work.col, bytes_of(factors.col_elems));
    } else {
      BasisKey key;
      next = take(next, &key, sizeof(key));
      take(next, work.row, bytes_of(factors.row_elems));
      random_basis(work.col, output.cols, factors.rank, key);
    }
    reconstruct({work.row, work.col, factors.rank}, output.rows, output.cols, 1.0f, output.data, output.dtype);
    return {};
  }

  std::optional<SumForm> sum_form(std::int64_t rows, std::int64_t cols, DType dtype) const override {
    if (is_power() || is_too_large(rows, cols)) return std::nullopt;
    const std::int64_t elems = factors_of(rows, cols).row_elems;
    return SumForm{.header_bytes = max_payload_bytes(rows, cols, dtype) - bytes_of(elems), .elems = elems};
  }

  std::vector<PayloadSection> explain(std::span<const std::byte> payload, std::int64_t rows, std::int64_t cols,
                                      DType) const override {
    PayloadExplainer explainer(payload);
    const Factors factors = is_too_large(rows, cols) ? Factors() : factors_of(rows, cols);
    const auto take_number = [&]<typename T>(T, const char* name, const char* meaning) {
      explainer.take(sizeof(T), name, meaning + std::to_string(explainer.peek<T>().value_or(0)));
    };
    const auto take_factor = [&](const char* name, std::int64_t factor_rows, std::int64_t factor_cols) {
      const std::string values = explain_matrix(explainer.rest(), factor_rows, factor_cols, DType::kFloat32);
      explainer.take(bytes_of(factor_rows * factor_cols), name, values);
    };
    if (factors.rank > 0) {
      take_number(std::uint32_t{}, "rank", "columns of the factors: ");
      take_number(std::uint32_t{}, "zero", "always 0: ");
      if (!is_power()) {
        take_number(std::uint64_t{}, "seed", "of the basis: ");
        take_number(std::uint64_t{}, "step", "of the basis: ");
        take_number(std::uint64_t{}, "tensor", "of the basis: ");
      }
      take_factor("row factor P", rows, factors.rank);
      if (is_power()) take_factor("column factor Q", factors.rank, cols);
    }
    return std::move(explainer).finish();
  }

 private:
  bool is_power() const { return row_.traits.rounds == 2; }

  static std::uint64_t bytes_of(std::int64_t elems) { return static_cast<std::uint64_t>(elems) * sizeof(float); }

  static bool is_too_large(std::int64_t rows, std::int64_t cols) {
    return rows > 0 && cols > 0 && checked_elems(rows, cols).value_or(kLargestElems + 1) > kLargestElems;
  }

  Factors factors_of(std::int64_t rows, std::int64_t cols) const {
    if (rows <= 0 || cols <= 0) return {};
    const std::int64_t rank = std::min<std::int64_t>({rank_, rows, cols});
    return {static_cast<int>(rank), rows * rank, cols * rank};
  }

  Status check_dtype(DType dtype) const {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {};
    return unsupported_dtype(*this, dtype, "fp32, fp16 and bf16");
  }

  Status check_header(const Header& header, const Factors& factors, TensorView output) const {
    if (header.rank == static_cast<std::uint32_t>(factors.rank) && header.zero == 0) return {};
    return make_error(StatusCode::kCorruptData,
                      "%s: decode of %lld x %lld: the payload begins with rank %u and %u, expected %d and 0",
                      spec().c_str(), static_cast<long long>(output.rows), static_cast<long long>(output.cols),
                      header.rank, header.zero, factors.rank);
  }

  const CodecRow& row_;
  const int rank_;
};

template <const CodecRow& (*row)()>
Result<std::unique_ptr<Codec>> make(const ParameterValues& values) {
  return std::unique_ptr<Codec>(std::make_unique<LowRankCodec>(row(), static_cast<int>(values.integer("rank"))));
}

std::vector<Parameter> parameters() {
  return {{.name = "rank",
           .kind = ParameterKind::kInteger,
           .default_text = "4",
           .min = 1,
           .max = 4096,
           .meaning = "columns of the factors; at most the matrix has rows and columns"}};
}

}  // namespace

const CodecRow& acp_row() {
  static const CodecRow row = {
      .name = "acp",
      .wire_id = 3,
      .version = 1,
      .traits = {.linear = true, .fixed_size = true, .needs_residual = true, .low_rank = true, .rounds = 1},
      .summary = "low rank, one all-reduce a step: alternating sides; in training half the rank on either (ACP-SGD)",
      .parameters = parameters(),
      .make = make<acp_row>,
  };
  return row;
}

const CodecRow& power_row() {
  static const CodecRow row = {
      .name = "power",
      .wire_id = 4,
      .version = 1,
      .traits = {.linear = true, .fixed_size = true, .needs_residual = true, .low_rank = true, .rounds = 2},
      .summary = "low rank, both factors in every step: two dependent all-reduces (Power-SGD)",
      .parameters = parameters(),
      .make = make<power_row>,
  };
  return row;
}

}  // namespace cortado

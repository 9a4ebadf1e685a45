// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Sum forms of codecs whose codes have one scale that all ranks know: a byte for each value, 0 to `largest` of them
// used by one rank, so that `planned` ranks stay below 256; and a last byte, which counts the ranks whose tensor had
// something that is not finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include "core/check.h"
#include "core/checked_math.h"
#include "cortado/codec.h"

namespace cortado {

constexpr int kLargestCodeSum = 255;

inline SumForm code_sum_form(std::int64_t rows, std::int64_t cols, int max_terms) {
  const std::int64_t elems = checked_elems(rows, cols).value_or(0);
  return {.dtype = DType::kUint8, .elems = elems == 0 ? 0 : elems + 1, .max_terms = max_terms, .is_payload = false};
}

// Checks the arguments of Codec::decode_sum(), then writes value_of(code sum), or NaN everywhere. `largest`: of one
// rank.
template <typename ValueOf>
Status decode_code_sums(const Codec& codec, std::span<const std::byte> form, SumTerms terms, int largest,
                        TensorView output, ValueOf&& value_of) {
  const std::int64_t elems = output.elems();
  if (output.dtype != DType::kFloat32 || terms.added < 1 || terms.added > terms.planned) {
    return make_error(StatusCode::kInvalidArgument, "%s: decode_sum: %d of %d terms to %s", codec.spec().c_str(),
                      terms.added, terms.planned, std::string(dtype_name(output.dtype)).c_str());
  }
  if (elems == 0) return {};
  if (form.size() != static_cast<std::size_t>(elems) + 1) {
    return make_error(StatusCode::kCorruptData, "%s: decode_sum: %zu bytes, expected %lld", codec.spec().c_str(),
                      form.size(), static_cast<long long>(elems + 1));
  }
  const bool is_finite = form.back() == std::byte{0};
  auto* values = static_cast<float*>(output.data);
  for (std::int64_t i = 0; i < elems; ++i) {
    const int sum = std::to_integer<int>(form[static_cast<std::size_t>(i)]);
    if (sum > largest * terms.added) {
      return make_error(StatusCode::kCorruptData, "%s: decode_sum: %d at %lld, expected at most %d",
                        codec.spec().c_str(), sum, static_cast<long long>(i), largest * terms.added);
    }
    values[i] = is_finite ? value_of(sum) : std::numeric_limits<float>::quiet_NaN();
  }
  return {};
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/explain.h"

#include <algorithm>
#include <cstdio>

#include "core/float16.h"

namespace cortado {

namespace {

float value_at(std::span<const std::byte> bytes, std::size_t i, DType dtype) {
  std::uint32_t element = 0;
  std::memcpy(&element, bytes.data() + i * dtype_bytes(dtype), dtype_bytes(dtype));
  switch (dtype) {
    case DType::kFloat32:
      return std::bit_cast<float>(element);
    case DType::kFloat16:
      return fp16_to_float(static_cast<std::uint16_t>(element));
    case DType::kBFloat16:
      return bf16_to_float(static_cast<std::uint16_t>(element));
    case DType::kUint8:
      return static_cast<float>(element);
  }
  return 0;
}

}  // namespace

void PayloadExplainer::take(std::uint64_t bytes, std::string name, std::string meaning) {
  const std::uint64_t there = next(bytes).size();
  if (there < bytes) meaning += " (cut short: expected " + std::to_string(bytes) + " bytes)";
  if (there > 0) sections_.push_back({at_, there, std::move(name), std::move(meaning)});
  at_ += there;
}

void PayloadExplainer::take_random_key(std::string meaning) {
  take(sizeof(std::uint64_t), "key", std::move(meaning));
  take(sizeof(std::uint64_t), "step", std::to_string(peek<std::uint64_t>().value_or(0)));
}

void PayloadExplainer::append(const std::vector<PayloadSection>& sections, const std::string& whose) {
  for (const PayloadSection& section : sections) take(section.bytes, whose + section.name, section.meaning);
}

std::vector<PayloadSection> PayloadExplainer::finish() && {
  take(rest().size(), "unexpected", "no part of a payload of this shape");
  return std::move(sections_);
}

std::string first_values(std::span<const std::byte> bytes, DType dtype) {
  constexpr std::size_t kShown = 4;
  const std::size_t count = bytes.size() / dtype_bytes(dtype);
  std::string text;
  for (std::size_t i = 0; i < std::min(count, kShown); ++i) {
    char number[32];
    std::snprintf(number, sizeof(number), "%s%.6g", i > 0 ? ", " : "", static_cast<double>(value_at(bytes, i, dtype)));
    text += number;
  }
  return count > kShown ? text + ", ..." : text;
}

std::string explain_matrix(std::span<const std::byte> bytes, std::int64_t rows, std::int64_t cols, DType dtype) {
  return std::to_string(rows) + " x " + std::to_string(cols) + " " + std::string(dtype_name(dtype)) + ": " +
         first_values(bytes, dtype);
}

}  // namespace cortado

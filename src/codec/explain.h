// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What Codec::explain() is written with: sections are taken from the front of a payload, which may be anything.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cortado/codec.h"

namespace cortado {

class PayloadExplainer {
 public:
  explicit PayloadExplainer(std::span<const std::byte> payload) : payload_(payload) {}

  // What is not yet explained.
  std::span<const std::byte> rest() const { return payload_.subspan(at_); }

  // The next `bytes` bytes, or as many as there are.
  std::span<const std::byte> next(std::uint64_t bytes) const {
    return rest().first(std::min<std::uint64_t>(bytes, rest().size()));
  }

  // Makes a section of next(bytes); none of no bytes.
  void take(std::uint64_t bytes, std::string name, std::string meaning);

  // The key of random numbers, two words, and the step they are drawn in (docs/wire_format.md): 16 bytes.
  void take_random_key(std::string meaning);

  // What a payload inside this one, which begins with the next byte, was explained as; `whose` stands before the names.
  void append(const std::vector<PayloadSection>& sections, const std::string& whose = "");

  // The next number; nothing, and no section, if the payload ends before it does.
  template <typename T>
  std::optional<T> peek() const {
    if (rest().size() < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, rest().data(), sizeof(T));
    return value;
  }

  // The sections; what is left over becomes one of its own.
  std::vector<PayloadSection> finish() &&;

 private:
  std::span<const std::byte> payload_;
  std::uint64_t at_ = 0;
  std::vector<PayloadSection> sections_;
};

// "3 x 5 bf16: 1, -2.5, 0.1, ...": what an array of values is and how it begins.
std::string explain_matrix(std::span<const std::byte> bytes, std::int64_t rows, std::int64_t cols, DType dtype);

// The first values of an array of `dtype`, as many as fit a line: "1, -2.5, 0.1, ...".
std::string first_values(std::span<const std::byte> bytes, DType dtype);

}  // namespace cortado

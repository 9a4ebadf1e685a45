// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every codec on every SIMD target: the encoders must write the same bytes, and the decoders make the same bits of
// them, or refuse them alike once a byte of the payload is damaged; and where a codec adds while it decodes, that must
// be decoding and one addition a value. The first difference ends the run. Encoders of low-rank codecs are held to a
// bound only (by the conformance suite), so one payload of theirs goes to all decoders; and theirs add, so that where a
// damaged factor is NaN, the order in which a compiler puts two NaNs says which one is left.
//
// Input: codec and shape (codec_case.h), which byte of the payload to damage (2 bytes, modulo its size) and the bits to
// flip there (1 byte), then the bytes of the tensor, again and again until it is full.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "codec/cast/float_chunks.h"
#include "core/check.h"
#include "core/simd_target.h"
#include "tests/fuzz/codec_case.h"

namespace {

using namespace cortado;

using Bytes = std::vector<std::byte>;

// Nothing if the codec does not take such tensors.
std::optional<Bytes> encode(const CodecCase& input, const Bytes& tensor) {
  Bytes payload(input.codec().max_payload_bytes(input.rows, input.cols, input.dtype)), scratch(input.scratch_bytes());
  const Result<std::uint64_t> bytes = input.codec().encode({tensor.data(), input.dtype, input.rows, input.cols},
                                                           {.seed = 11, .step = 12, .tensor = 13}, payload, scratch);
  if (bytes.status().code() == StatusCode::kUnsupported) return std::nullopt;
  CORTADO_CHECK(bytes.ok(), "%s", bytes.status().to_string().c_str());
  payload.resize(bytes.value());
  return payload;
}

struct Decoded {
  StatusCode code = StatusCode::kOk;
  Bytes tensor;  // empty if it was refused
  bool operator==(const Decoded&) const = default;
};

void unify_nans(DType dtype, Bytes& tensor) {
  const std::size_t elem_bytes = dtype_bytes(dtype);
  float buffer[1];
  for (std::size_t at = 0; at < tensor.size(); at += elem_bytes) {
    if (std::isnan(*load_floats(tensor.data() + at, dtype, 0, 1, buffer))) {
      std::memset(tensor.data() + at, 0xff, elem_bytes);
    }
  }
}

Decoded decode(const CodecCase& input, const Bytes& payload) {
  Bytes tensor(input.tensor_bytes()), scratch(input.scratch_bytes());
  const Status status = input.codec().decode(payload, {tensor.data(), input.dtype, input.rows, input.cols}, scratch);
  if (!status.ok()) tensor.clear();
  if (status.ok() && input.chosen->row->traits.low_rank) unify_nans(input.dtype, tensor);
  return {status.code(), std::move(tensor)};
}

// What decoding into a sum must give: of `decoded`, as decode() made it, one addition a value.
constexpr float kSumBefore = 0.375f;
Decoded added(Decoded decoded) {
  CORTADO_CHECK(decoded.tensor.size() % sizeof(float) == 0, "sums are fp32");
  for (std::size_t at = 0; at < decoded.tensor.size(); at += sizeof(float)) {
    float value;
    std::memcpy(&value, decoded.tensor.data() + at, sizeof(value));
    value = kSumBefore + value;
    std::memcpy(decoded.tensor.data() + at, &value, sizeof(value));
  }
  unify_nans(DType::kFloat32, decoded.tensor);
  return decoded;
}

Decoded decode_add(const CodecCase& input, const Bytes& payload) {
  std::vector<float> sum(static_cast<std::size_t>(input.rows * input.cols), kSumBefore);
  Bytes scratch(input.scratch_bytes());
  const Status status = input.codec().decode_add(payload, {sum.data(), input.dtype, input.rows, input.cols}, scratch);
  if (!status.ok()) return {status.code(), {}};
  Bytes tensor(input.tensor_bytes());
  if (!tensor.empty()) std::memcpy(tensor.data(), sum.data(), tensor.size());
  unify_nans(DType::kFloat32, tensor);
  return {status.code(), std::move(tensor)};
}

// Asked once: that is slow in virtual machines.
std::vector<std::int64_t> named_targets() {
  std::vector<std::int64_t> targets = simd_targets();
  std::fprintf(stderr, "SIMD targets:");
  for (const std::int64_t target : targets) std::fprintf(stderr, " %s", simd_target_name(target));
  std::fprintf(stderr, "\n");
  return targets;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kDamageBytes = 3;
  const std::optional<CodecCase> input = read_codec_case(data, size, 8192);
  if (!input.has_value() || input->rest.size() <= kDamageBytes) return 0;
  const auto values = input->rest.subspan(kDamageBytes);
  Bytes tensor(input->tensor_bytes());
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = std::byte{values[i % values.size()]};

  const std::optional<Bytes> payload = encode(*input, tensor);
  if (!payload.has_value()) return 0;
  Bytes damaged = *payload;
  const std::size_t at = input->rest[0] + 256u * input->rest[1];
  if (!damaged.empty()) damaged[at % damaged.size()] ^= std::byte{input->rest[2]};
  const Decoded expected = decode(*input, *payload), expected_of_damaged = decode(*input, damaged);
  CORTADO_CHECK(expected.code == StatusCode::kOk, "%s refuses its own payload", input->codec().spec().c_str());

  const bool adds = input->codec().can_add() && input->dtype == DType::kFloat32;
  const Decoded expected_sum = adds ? added(expected) : Decoded();
  const Decoded expected_sum_of_damaged = adds ? added(expected_of_damaged) : Decoded();

  static const std::vector<std::int64_t> targets = named_targets();
  for (const std::int64_t target : targets) {
    const ForcedSimdTarget forced(target);
    const auto check = [&](bool same, const char* what) {
      CORTADO_CHECK(same, "%s, %lld x %lld %s: %s differs on %s", input->codec().spec().c_str(),
                    static_cast<long long>(input->rows), static_cast<long long>(input->cols),
                    std::string(dtype_name(input->dtype)).c_str(), what, simd_target_name(target));
    };
    if (!input->chosen->row->traits.low_rank) check(encode(*input, tensor) == payload, "the payload");
    check(decode(*input, *payload) == expected, "the decoded tensor");
    check(decode(*input, damaged) == expected_of_damaged, "what becomes of a damaged payload");
    if (!adds) continue;
    check(decode_add(*input, *payload) == expected_sum, "the decoded tensor, added to a sum,");
    check(decode_add(*input, damaged) == expected_sum_of_damaged, "what a damaged payload adds to a sum");
  }
  return 0;
}

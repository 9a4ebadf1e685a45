// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every SIMD target must encode codes to the bytes of the reference, and take or refuse a payload as the others do; the
// first difference ends the run.
//
// Input: a 16-bit number, then bytes that are both codes and a payload of so many codes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "codec/rans/rans_reference.h"
#include "codec/rans/rans_stream.h"
#include "core/check.h"
#include "core/simd_target.h"

namespace {

using namespace cortado;
using reference::RansBytes;

RansBytes encode(const RansBytes& codes) {
  const auto elems = static_cast<std::int64_t>(codes.size());
  RansBytes payload(max_rans_bytes(elems));
  std::vector<std::byte> scratch(rans_scratch_bytes(elems, kMinRansChunkCodes));
  payload.resize(encode_codes(codes.data(), elems, kMinRansChunkCodes, reinterpret_cast<std::byte*>(payload.data()),
                              scratch.data()));
  return payload;
}

// Nothing if the payload is refused.
std::optional<RansBytes> decode(const RansBytes& payload, std::size_t elems) {
  RansBytes codes(elems);
  std::vector<std::byte> scratch(rans_scratch_bytes(static_cast<std::int64_t>(elems), kMinRansChunkCodes));
  const Status status =
      decode_codes(std::as_bytes(std::span(payload)), codes.data(), static_cast<std::int64_t>(elems), scratch.data());
  CORTADO_CHECK(status.ok() || status.code() == StatusCode::kCorruptData, "%s", status.message().c_str());
  return status.ok() ? std::optional(codes) : std::nullopt;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::uint16_t elems;
  if (size < sizeof(elems)) return 0;
  std::memcpy(&elems, data, sizeof(elems));
  const RansBytes bytes(data + sizeof(elems), data + size);
  const RansBytes expected_payload = reference::rans_encode(bytes, kMinRansChunkCodes);
  std::optional<std::optional<RansBytes>> expected_codes;

  // Asking the processor is slow in virtual machines.
  static const std::vector<std::int64_t> targets = simd_targets();
  for (const std::int64_t target : targets) {
    const ForcedSimdTarget forced(target);
    CORTADO_CHECK(encode(bytes) == expected_payload, "%zu codes encoded by %s", bytes.size(), simd_target_name(target));
    CORTADO_CHECK(decode(expected_payload, bytes.size()) == bytes, "%zu codes decoded by %s", bytes.size(),
                  simd_target_name(target));
    const std::optional<RansBytes> codes = decode(bytes, elems);
    if (!expected_codes.has_value()) expected_codes = codes;
    CORTADO_CHECK(codes == *expected_codes, "%u codes decoded by %s", elems, simd_target_name(target));
  }
  return 0;
}

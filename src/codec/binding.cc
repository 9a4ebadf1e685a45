// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/binding.h"

#include <string>

#include "codec/stage.h"
#include "core/check.h"
#include "core/checked_math.h"

namespace cortado {

namespace {

// "cast(bf16): encode of 3 x 5 fp32"
std::string place_of(const Codec& codec, const char* call, ConstTensorView view) {
  return codec.spec() + ": " + call + " of " + std::to_string(view.rows) + " x " + std::to_string(view.cols) + " " +
         std::string(dtype_name(view.dtype));
}

// One of the memory blocks of a call.
struct Block {
  const char* name;
  const void* data;
  std::uint64_t bytes;
};

Status check_view(const Codec& codec, const char* call, ConstTensorView view) {
  if (!checked_size_bytes(view.rows, view.cols, view.dtype).has_value()) {
    return make_error(StatusCode::kInvalidArgument,
                      "%s: expected a known dtype, a shape of at least 0 and a size that fits 63 bits",
                      place_of(codec, call, view).c_str());
  }
  if (view.data == nullptr && view.elems() > 0) {
    return make_error(StatusCode::kInvalidArgument, "%s: the tensor's memory is null",
                      place_of(codec, call, view).c_str());
  }
  return {};
}

Status check_room(const Codec& codec, const char* call, ConstTensorView view, const Block& block,
                  std::uint64_t needed_bytes) {
  if (block.bytes >= needed_bytes) return {};
  return make_error(StatusCode::kInvalidArgument, "%s: the %s has %llu bytes, expected at least %llu",
                    place_of(codec, call, view).c_str(), block.name, static_cast<unsigned long long>(block.bytes),
                    static_cast<unsigned long long>(needed_bytes));
}

Status check_apart(const Codec& codec, const char* call, ConstTensorView view, std::span<const Block> blocks) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t j = i + 1; j < blocks.size(); ++j) {
      if (!overlap(blocks[i].data, blocks[i].bytes, blocks[j].data, blocks[j].bytes)) continue;
      return make_error(StatusCode::kInvalidArgument, "%s: %s and %s overlap in memory",
                        place_of(codec, call, view).c_str(), blocks[i].name, blocks[j].name);
    }
  }
  return {};
}

}  // namespace

bool overlap(const void* a, std::uint64_t a_bytes, const void* b, std::uint64_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a), b_begin = reinterpret_cast<std::uintptr_t>(b);
  return a_begin < b_begin ? b_begin - a_begin < a_bytes : a_begin - b_begin < b_bytes;
}

Status check_encode(const Codec& codec, ConstTensorView input, std::span<const std::byte> payload,
                    std::span<const std::byte> scratch) {
  constexpr const char* kCall = "encode";
  CORTADO_RETURN_IF_ERROR(check_view(codec, kCall, input));
  const Block blocks[] = {{"input", input.data, static_cast<std::uint64_t>(input.size_bytes())},
                          {"payload", payload.data(), payload.size()},
                          {"scratch", scratch.data(), scratch.size()}};
  CORTADO_RETURN_IF_ERROR(
      check_room(codec, kCall, input, blocks[1], codec.max_payload_bytes(input.rows, input.cols, input.dtype)));
  CORTADO_RETURN_IF_ERROR(
      check_room(codec, kCall, input, blocks[2], codec.scratch_bytes(input.rows, input.cols, input.dtype)));
  return check_apart(codec, kCall, input, blocks);
}

Status check_decode(const Codec& codec, std::span<const std::byte> payload, TensorView output,
                    std::span<const std::byte> scratch) {
  constexpr const char* kCall = "decode";
  CORTADO_RETURN_IF_ERROR(check_view(codec, kCall, output));
  const Block blocks[] = {{"output", output.data, static_cast<std::uint64_t>(output.size_bytes())},
                          {"payload", payload.data(), payload.size()},
                          {"scratch", scratch.data(), scratch.size()}};
  CORTADO_RETURN_IF_ERROR(
      check_room(codec, kCall, output, blocks[2], codec.scratch_bytes(output.rows, output.cols, output.dtype)));
  return check_apart(codec, kCall, output, blocks);
}

Status check_payload_bytes(const Codec& codec, std::span<const std::byte> payload, TensorView output,
                           std::uint64_t expected_bytes) {
  if (payload.size() == expected_bytes) return {};
  return make_error(StatusCode::kCorruptData, "%s: the payload has %zu bytes, expected %llu",
                    place_of(codec, "decode", output).c_str(), payload.size(),
                    static_cast<unsigned long long>(expected_bytes));
}

Status corrupt_payload(const Codec& codec, TensorView output, const char* what) {
  return make_error(StatusCode::kCorruptData, "%s: %s", place_of(codec, "decode", output).c_str(), what);
}

Status check_quantise(const Codec& codec, const Quantiser& quantiser, ConstTensorView input,
                      std::span<const std::uint8_t> codes, std::span<const std::byte> side,
                      std::span<const std::byte> scratch) {
  constexpr const char* kCall = "quantise";
  CORTADO_RETURN_IF_ERROR(check_view(codec, kCall, input));
  const Block blocks[] = {{"input", input.data, static_cast<std::uint64_t>(input.size_bytes())},
                          {"codes", codes.data(), codes.size()},
                          {"side section", side.data(), side.size()},
                          {"scratch", scratch.data(), scratch.size()}};
  CORTADO_RETURN_IF_ERROR(check_room(codec, kCall, input, blocks[1], static_cast<std::uint64_t>(input.elems())));
  CORTADO_RETURN_IF_ERROR(check_room(codec, kCall, input, blocks[2], quantiser.max_side_bytes(input.rows, input.cols)));
  CORTADO_RETURN_IF_ERROR(check_room(codec, kCall, input, blocks[3],
                                     quantiser.quantise_scratch_bytes(input.rows, input.cols, input.dtype)));
  return check_apart(codec, kCall, input, blocks);
}

Status check_dequantise(const Codec& codec, const Quantiser& quantiser, std::span<const std::uint8_t> codes,
                        std::span<const std::byte> side, TensorView output, std::span<const std::byte> scratch) {
  constexpr const char* kCall = "dequantise";
  CORTADO_RETURN_IF_ERROR(check_view(codec, kCall, output));
  const Block blocks[] = {{"output", output.data, static_cast<std::uint64_t>(output.size_bytes())},
                          {"codes", codes.data(), codes.size()},
                          {"side section", side.data(), side.size()},
                          {"scratch", scratch.data(), scratch.size()}};
  CORTADO_RETURN_IF_ERROR(check_room(codec, kCall, output, blocks[1], static_cast<std::uint64_t>(output.elems())));
  CORTADO_RETURN_IF_ERROR(check_room(codec, kCall, output, blocks[3],
                                     quantiser.quantise_scratch_bytes(output.rows, output.cols, output.dtype)));
  CORTADO_RETURN_IF_ERROR(check_apart(codec, kCall, output, blocks));
  const std::uint64_t expected_bytes = quantiser.max_side_bytes(output.rows, output.cols);
  if (side.size() == expected_bytes) return {};
  return make_error(StatusCode::kCorruptData, "%s: the side section has %zu bytes, expected %llu",
                    place_of(codec, kCall, output).c_str(), side.size(),
                    static_cast<unsigned long long>(expected_bytes));
}

Status unsupported_dtype(const Codec& codec, DType dtype, const char* taken) {
  return make_error(StatusCode::kUnsupported, "%s takes %s, got %s", codec.spec().c_str(), taken,
                    std::string(dtype_name(dtype)).c_str());
}

}  // namespace cortado

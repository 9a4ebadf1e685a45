// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Frames: the 40-byte header in front of a payload. The layout stands in docs/wire_format.md.
#include <bit>
#include <cstring>

#include "codec/binding.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/hash.h"
#include "cortado/codec.h"

namespace cortado {

// Headers and payloads are little-endian and are copied as they lie in memory.
static_assert(std::endian::native == std::endian::little, "Cortado has no byte swapping for big-endian machines yet");

namespace {

constexpr std::uint8_t kFrameVersion = 1;
constexpr char kFrameMagic[4] = {'C', 'R', 'T', 'D'};

struct FrameHeader {
  char magic[4];
  std::uint8_t frame_version;
  std::uint8_t wire_id;
  std::uint8_t codec_version;
  std::uint8_t dtype;
  std::int64_t rows;
  std::int64_t cols;
  std::uint64_t payload_bytes;
  std::uint64_t checksum;  // fnv1a_64 of the 32 bytes before
};
static_assert(sizeof(FrameHeader) == kFrameHeaderBytes && offsetof(FrameHeader, checksum) == 32);

std::uint64_t checksum_of(const FrameHeader& header) {
  return fnv1a_64({reinterpret_cast<const char*>(&header), offsetof(FrameHeader, checksum)});
}

Status corrupt(const char* what, unsigned long long got, unsigned long long expected) {
  return make_error(StatusCode::kCorruptData, "frame: %s is %llu, expected %llu", what, got, expected);
}

Status check_header(const FrameHeader& header, std::uint64_t bytes_behind) {
  if (std::memcmp(header.magic, kFrameMagic, sizeof(kFrameMagic)) != 0) {
    const auto* got = reinterpret_cast<const unsigned char*>(header.magic);
    return make_error(StatusCode::kCorruptData,
                      "frame: begins with %02x %02x %02x %02x, expected 43 52 54 44 (a Cortado frame)", got[0], got[1],
                      got[2], got[3]);
  }
  // Before the checksum: a later version may have another header.
  if (header.frame_version != kFrameVersion) {
    return make_error(StatusCode::kUnsupported, "frame: format version %d, this build reads version %d",
                      header.frame_version, kFrameVersion);
  }
  if (header.checksum != checksum_of(header)) {
    return make_error(StatusCode::kCorruptData, "frame: header damaged: its checksum is %016llx, expected %016llx",
                      static_cast<unsigned long long>(header.checksum),
                      static_cast<unsigned long long>(checksum_of(header)));
  }
  if (!checked_size_bytes(header.rows, header.cols, static_cast<DType>(header.dtype)).has_value()) {
    return make_error(StatusCode::kCorruptData, "frame: %lld x %lld elements of dtype %d are no tensor",
                      static_cast<long long>(header.rows), static_cast<long long>(header.cols), header.dtype);
  }
  if (header.payload_bytes > bytes_behind) {
    return make_error(
        StatusCode::kCorruptData, "frame: cut short: %llu bytes behind the header, expected %llu of payload",
        static_cast<unsigned long long>(bytes_behind), static_cast<unsigned long long>(header.payload_bytes));
  }
  return {};
}

Status check_is_for(const FrameInfo& info, const CodecRow& row, const Codec& codec, TensorView output) {
  if (info.wire_id != row.wire_id) return corrupt("codec id", info.wire_id, row.wire_id).with_context(row.name);
  if (info.codec_version != row.version) {
    return make_error(StatusCode::kUnsupported, "%s: frame: payload version %d, this build reads version %d", row.name,
                      info.codec_version, row.version);
  }
  if (info.dtype != output.dtype || info.rows != output.rows || info.cols != output.cols) {
    return make_error(StatusCode::kInvalidArgument, "%s: frame: holds %lld x %lld %s, the output is %lld x %lld %s",
                      row.name, static_cast<long long>(info.rows), static_cast<long long>(info.cols),
                      dtype_name(info.dtype).data(), static_cast<long long>(output.rows),
                      static_cast<long long>(output.cols), dtype_name(output.dtype).data());
  }
  const std::uint64_t largest = codec.max_payload_bytes(info.rows, info.cols, info.dtype);
  if (info.payload_bytes <= largest) return {};
  return make_error(StatusCode::kCorruptData, "%s: frame: payload of %llu bytes, expected at most %llu", row.name,
                    static_cast<unsigned long long>(info.payload_bytes), static_cast<unsigned long long>(largest));
}

}  // namespace

Result<std::uint64_t> encode_frame(const CodecRow& row, const Codec& codec, ConstTensorView input,
                                   const EncodeContext& context, std::span<std::byte> frame,
                                   std::span<std::byte> scratch) {
  if (frame.size() < kFrameHeaderBytes) {
    return make_error(StatusCode::kInvalidArgument, "%s: frame: room for %zu bytes, expected at least %zu", row.name,
                      frame.size(), kFrameHeaderBytes);
  }
  const auto input_bytes = checked_size_bytes(input.rows, input.cols, input.dtype).value_or(0);
  if (overlap(input.data, static_cast<std::uint64_t>(input_bytes), frame.data(), frame.size()) ||
      overlap(scratch.data(), scratch.size(), frame.data(), frame.size())) {
    return make_error(StatusCode::kInvalidArgument, "%s: frame: input or scratch and the frame overlap in memory",
                      row.name);
  }
  CORTADO_ASSIGN_OR_RETURN(const std::uint64_t payload_bytes,
                           codec.encode(input, context, frame.subspan(kFrameHeaderBytes), scratch));
  FrameHeader header = {.magic = {},
                        .frame_version = kFrameVersion,
                        .wire_id = row.wire_id,
                        .codec_version = row.version,
                        .dtype = static_cast<std::uint8_t>(input.dtype),
                        .rows = input.rows,
                        .cols = input.cols,
                        .payload_bytes = payload_bytes,
                        .checksum = 0};
  std::memcpy(header.magic, kFrameMagic, sizeof(kFrameMagic));
  header.checksum = checksum_of(header);
  std::memcpy(frame.data(), &header, sizeof(header));
  return kFrameHeaderBytes + payload_bytes;
}

Result<FrameInfo> read_frame_header(std::span<const std::byte> frame) {
  if (frame.size() < kFrameHeaderBytes) {
    return make_error(StatusCode::kCorruptData, "frame: cut short: %zu bytes, a header has %zu", frame.size(),
                      kFrameHeaderBytes);
  }
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  CORTADO_RETURN_IF_ERROR(check_header(header, frame.size() - kFrameHeaderBytes));
  return FrameInfo{.wire_id = header.wire_id,
                   .codec_version = header.codec_version,
                   .dtype = static_cast<DType>(header.dtype),
                   .rows = header.rows,
                   .cols = header.cols,
                   .payload_bytes = header.payload_bytes};
}

Status decode_frame(const Codec& codec, const CodecRow& row, std::span<const std::byte> frame, TensorView output,
                    std::span<std::byte> scratch) {
  CORTADO_ASSIGN_OR_RETURN(const FrameInfo info, read_frame_header(frame));
  CORTADO_RETURN_IF_ERROR(check_is_for(info, row, codec, output));
  return codec.decode(frame.subspan(kFrameHeaderBytes, info.payload_bytes), output, scratch).with_context("frame");
}

}  // namespace cortado

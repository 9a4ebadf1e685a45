// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Hostile payloads and frames for every codec: decoding gives an error or some tensor, never a crash and never an
// access out of bounds (all memory has its exact size, for the address sanitizer).
//
// Input: example specification, dtype, rows, cols (a byte each), then the bytes to decode: once as a payload, once as
// a frame, once as a frame whose header is made to fit the codec, so that the checksum does not stop the fuzzer.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/conformance_cases.h"
#include "core/check.h"
#include "core/hash.h"

namespace {

using namespace cortado;

const std::vector<std::unique_ptr<Codec>>& all_codecs() {
  static const std::vector<std::unique_ptr<Codec>> codecs = [] {
    std::vector<std::unique_ptr<Codec>> made;
    for (const std::string& example : all_examples()) made.push_back(make_codec(example).value());
    return made;
  }();
  return codecs;
}

void check_defined(const Status& status) {
  CORTADO_CHECK(status.ok() || status.code() == StatusCode::kCorruptData || status.code() == StatusCode::kUnsupported ||
                    status.code() == StatusCode::kInvalidArgument,
                "%s", status.to_string().c_str());
}

// Makes the header that of a frame of `row`; keeps the size of the payload as it stands.
void repair_header(std::vector<std::byte>& frame, const CodecRow& row, const TensorView& output) {
  const std::uint8_t start[] = {'C', 'R',         'T',         'D',
                                1,   row.wire_id, row.version, static_cast<std::uint8_t>(output.dtype)};
  std::memcpy(frame.data(), start, sizeof(start));
  std::memcpy(frame.data() + 8, &output.rows, sizeof(output.rows));
  std::memcpy(frame.data() + 16, &output.cols, sizeof(output.cols));
  const std::uint64_t checksum = fnv1a_64({reinterpret_cast<const char*>(frame.data()), 32});
  std::memcpy(frame.data() + 32, &checksum, sizeof(checksum));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kChoiceBytes = 4;
  if (size < kChoiceBytes) return 0;
  const Codec& codec = *all_codecs()[data[0] % all_codecs().size()];
  const CodecRow& row = codec.row();
  TensorView output{nullptr, kAllDTypes[data[1] % 4], data[2], data[3]};
  std::vector<std::byte> memory(static_cast<std::size_t>(output.size_bytes()));
  std::vector<std::byte> scratch(codec.scratch_bytes(output.rows, output.cols, output.dtype));
  output.data = memory.data();

  std::vector<std::byte> bytes(size - kChoiceBytes);
  if (!bytes.empty()) std::memcpy(bytes.data(), data + kChoiceBytes, bytes.size());
  check_defined(codec.decode(bytes, output, scratch));
  check_defined(decode_frame(codec, row, bytes, output, scratch));
  if (bytes.size() >= kFrameHeaderBytes) {
    repair_header(bytes, row, output);
    check_defined(decode_frame(codec, row, bytes, output, scratch));
  }
  return 0;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Hostile payloads, sums of payloads and frames for every codec: decoding gives an error or some tensor, never a crash
// and never an access out of bounds (all memory has its exact size, for the address sanitizer).
//
// Input: codec and shape (codec_case.h), then the bytes to decode: once as a payload, once as the sum of two if the
// codec has a form for that, once as a frame, once as a frame whose header is made to fit the codec, so that the
// checksum does not stop the fuzzer. At the end it says how many payloads each codec met and took.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/fuzz/codec_case.h"

namespace {

using namespace cortado;

class Tally {
 public:
  ~Tally() {
    for (const auto& [codec, count] : counts_) {
      std::fprintf(stderr, "codec %s: %lld payloads, %lld decoded\n", codec.c_str(), count.payloads, count.decoded);
    }
  }

  void add(const CodecRow& row, bool decoded) {
    Count& count = counts_[row.name];
    ++count.payloads;
    if (decoded) ++count.decoded;
  }

 private:
  struct Count {
    long long payloads = 0, decoded = 0;
  };
  std::map<std::string, Count> counts_;
};

bool is_decoded(const Status& status) {
  CORTADO_CHECK(status.ok() || status.code() == StatusCode::kCorruptData || status.code() == StatusCode::kUnsupported ||
                    status.code() == StatusCode::kInvalidArgument,
                "%s", status.to_string().c_str());
  return status.ok();
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
  static Tally tally;
  const std::optional<CodecCase> input = read_codec_case(data, size, 65536);
  if (!input.has_value()) return 0;
  const Codec& codec = input->codec();
  const CodecRow& row = *input->chosen->row;
  std::vector<std::byte> memory(input->tensor_bytes()), scratch(input->scratch_bytes());
  const TensorView output{memory.data(), input->dtype, input->rows, input->cols};

  std::vector<std::byte> bytes(input->rest.size());
  if (!bytes.empty()) std::memcpy(bytes.data(), input->rest.data(), bytes.size());
  tally.add(row, is_decoded(codec.decode(bytes, output, scratch)));
  if (codec.can_add() && output.dtype == DType::kFloat32) is_decoded(codec.decode_add(bytes, output, scratch));
  if (const auto form = codec.sum_form(output.rows, output.cols, output.dtype);
      form.has_value() && !form->is_payload && output.dtype == DType::kFloat32) {
    is_decoded(codec.decode_sum(bytes, {.planned = 2, .added = 2}, output));
  }
  is_decoded(decode_frame(codec, row, bytes, output, scratch));
  if (bytes.size() >= kFrameHeaderBytes) {
    repair_header(bytes, row, output);
    is_decoded(decode_frame(codec, row, bytes, output, scratch));
  }
  return 0;
}

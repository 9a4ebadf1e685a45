// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Hostile codec files: reading and explaining one gives an error or a tensor, never a crash and never an access out of
// bounds.
//
// Input: a file, read once as it is and once with the checksums of its header and first chunk made right, so that they
// do not stop the fuzzer.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/check.h"
#include "core/crc32.h"
#include "cortado/codec_file.h"

namespace {

using namespace cortado;

constexpr std::int64_t kMostElems = 1 << 16;  // more take memory and time, and show nothing new

void read(const std::vector<std::byte>& file) {
  Result<CodecFileReader> reader = CodecFileReader::open(file);
  if (!reader.ok()) return;
  const FileChunk& chunk = reader.value().next_chunk();
  std::vector<std::byte> memory;
  while (chunk.elems() > 0 && chunk.elems() <= kMostElems) {
    memory.resize(static_cast<std::size_t>(chunk.elems()) * dtype_bytes(reader.value().info().dtype));
    if (!reader.value().decode_chunk(memory.data()).ok()) break;
  }
  std::vector<PayloadSection> sections;
  (void)explain_codec_file(file, &sections);
  std::uint64_t at = 0;
  for (const PayloadSection& section : sections) {
    CORTADO_CHECK(section.offset == at, "%s", section.name.c_str());
    at += section.bytes;
  }
  CORTADO_CHECK(at <= file.size());
}

// Writes the CRC-32 of the `bytes` bytes from `begin` on behind them; false if they end too early.
bool repair(std::vector<std::byte>& file, std::uint64_t begin, std::uint64_t bytes) {
  if (begin + bytes + 4 > file.size()) return false;
  const std::uint32_t crc32 = crc32_of(std::span(file).subspan(begin, bytes));
  std::memcpy(file.data() + begin + bytes, &crc32, sizeof(crc32));
  return true;
}

template <typename T>
T number_at(const std::vector<std::byte>& file, std::uint64_t at) {
  T value = 0;
  if (at + sizeof(T) <= file.size()) std::memcpy(&value, file.data() + at, sizeof(T));
  return value;
}

void repair_all(std::vector<std::byte>& file) {
  constexpr std::uint64_t kHeaderBytes = 32;
  if (!repair(file, 0, 28)) return;
  const std::uint64_t described = 8 * number_at<std::uint8_t>(file, 7) + 2ull * number_at<std::uint32_t>(file, 16) +
                                  number_at<std::uint32_t>(file, 20);
  if (!repair(file, kHeaderBytes, described)) return;
  const std::uint64_t chunk = kHeaderBytes + described + 4;
  const std::uint64_t payload_bytes = number_at<std::uint64_t>(file, chunk + 8);
  if (chunk + 24 <= file.size() && payload_bytes <= file.size() - chunk - 24) {
    const std::uint32_t crc32 = crc32_of(std::span(file).subspan(chunk + 24, payload_bytes));
    std::memcpy(file.data() + chunk + 16, &crc32, sizeof(crc32));
  }
  repair(file, chunk, 20);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> file(size);
  if (size > 0) std::memcpy(file.data(), data, size);
  read(file);
  repair_all(file);
  read(file);
  return 0;
}

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Files of compressed tensors (docs/wire_format.md): one tensor with its codec's specification, dtype and shape, every
// byte under a checksum. Writer and reader work on memory, chunk by chunk, so that a large tensor need not be there
// as a whole; each belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cortado/codec.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

// What the tensor came from and decompressing makes of it again. Values are part of the format.
enum class FileSource : std::uint8_t { kRaw = 0, kNpy = 1 };

struct CodecFileInfo {
  std::string spec;
  DType dtype = DType::kFloat32;
  FileSource source = FileSource::kNpy;
  std::vector<std::int64_t> shape;  // {} is a single value

  // Elements of a chunk; the last one may have fewer. A chunk is encoded by itself: it has its own scales, its own
  // largest values and so on. 0: about 2^26, so that only larger tensors have more than one chunk. Rounded down to
  // whole rows, where the first dimension is the rows.
  std::int64_t chunk_elems = 0;
};

// The matrix that chunk number `index` is encoded as, and where it begins.
struct FileChunk {
  std::int64_t index = 0;
  std::int64_t first_elem = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t elems() const { return rows * cols; }  // 0 after the last chunk
};

class CodecFileWriter {
 public:
  // Refuses what make_codec() refuses and shapes of more than 32 dimensions. `seed` is for codecs that draw numbers.
  static Result<CodecFileWriter> create(CodecFileInfo info, std::uint64_t seed = 0);

  const CodecFileInfo& info() const { return info_; }  // as it stands in the file
  std::span<const std::byte> header() const { return header_; }
  const FileChunk& next_chunk() const { return chunk_; }

  // Encodes the next chunk, of next_chunk().elems() elements at `elems` (any address), and returns its bytes in the
  // file, valid until the next call.
  Result<std::span<const std::byte>> encode_chunk(const void* elems);

 private:
  struct Memory {
    std::unique_ptr<std::byte[]> data;
    std::uint64_t bytes = 0;
    std::span<std::byte> span() const { return {data.get(), bytes}; }
  };
  friend class CodecFileReader;

  CodecFileInfo info_;
  std::uint64_t seed_ = 0;
  std::unique_ptr<Codec> codec_;
  std::vector<std::byte> header_;
  FileChunk chunk_;
  Memory record_, scratch_;
};

class CodecFileReader {
 public:
  // Reads the header. `file` must outlive the reader.
  static Result<CodecFileReader> open(std::span<const std::byte> file);

  const CodecFileInfo& info() const { return info_; }
  const FileChunk& next_chunk() const { return chunk_; }
  std::uint64_t next_offset() const { return offset_; }  // of the next chunk, in the file

  // Decodes the next chunk to `elems`, which has room for next_chunk().elems() elements. The last one fails too if
  // bytes follow it.
  Status decode_chunk(void* elems);

 private:
  friend Status explain_codec_file(std::span<const std::byte> file, std::vector<PayloadSection>* sections);

  Result<std::span<const std::byte>> read_payload() const;
  Status advance(std::uint64_t payload_bytes);
  Status check_end() const;
  std::string place() const;

  CodecFileInfo info_;
  std::unique_ptr<Codec> codec_;
  std::span<const std::byte> file_;
  std::uint64_t offset_ = 0;
  FileChunk chunk_;
  CodecFileWriter::Memory scratch_;
};

// The sections of a file, payloads by Codec::explain(). Where the file is damaged: those before, and the error.
Status explain_codec_file(std::span<const std::byte> file, std::vector<PayloadSection>* sections);

}  // namespace cortado

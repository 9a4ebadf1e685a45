// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Files of compressed tensors. The layout stands in docs/wire_format.md.
#include "cortado/codec_file.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "codec/explain.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/crc32.h"
#include "core/format.h"

namespace cortado {

namespace {

constexpr std::uint8_t kFileVersion = 1;
constexpr char kMagic[4] = {'C', 'R', 'T', 'F'};
constexpr std::int64_t kDefaultChunkElems = std::int64_t{1} << 26;
constexpr std::size_t kMostDimensions = 32;
constexpr std::uint32_t kMostSpecBytes = 4096;
constexpr std::uint32_t kMostStages = 16;

// How a file begins. Behind it: the sizes of all dimensions, a Stage for each stage of the codec, its specification,
// and the CRC-32 of these three.
struct Header {
  char magic[4];
  std::uint8_t version;
  std::uint8_t dtype;
  std::uint8_t source;
  std::uint8_t dimensions;
  std::int64_t chunk_elems;
  std::uint32_t stages;
  std::uint32_t spec_bytes;
  std::uint32_t zero;
  std::uint32_t crc32;  // of the 28 bytes before
};
static_assert(sizeof(Header) == 32 && offsetof(Header, crc32) == 28);

struct Stage {
  std::uint8_t wire_id;
  std::uint8_t payload_version;
};
static_assert(sizeof(Stage) == 2);

// In front of every payload.
struct ChunkHeader {
  std::uint64_t index;
  std::uint64_t payload_bytes;
  std::uint32_t payload_crc32;
  std::uint32_t crc32;  // of the 20 bytes before
};
static_assert(sizeof(ChunkHeader) == 24 && offsetof(ChunkHeader, crc32) == 20);

template <typename T>
std::uint32_t own_crc32(const T& header) {
  return crc32_of(std::as_bytes(std::span(&header, 1)).first(offsetof(T, crc32)));
}

unsigned long long number(auto value) { return static_cast<unsigned long long>(value); }

Status cut_short(const char* what, std::uint64_t at, std::uint64_t bytes, std::uint64_t there) {
  return make_error(StatusCode::kCorruptData, "%s at byte %llu: cut short: %llu bytes, expected %llu", what, number(at),
                    number(there), number(bytes));
}

Status wrong_checksum(const char* what, std::uint64_t at, std::uint32_t got, std::uint32_t expected) {
  return make_error(StatusCode::kCorruptData, "%s at byte %llu: damaged: its checksum is %08x, expected %08x", what,
                    number(at), got, expected);
}

// The tensor as a matrix: the first dimension is the rows, one dimension is one row.
struct Matrix {
  std::int64_t rows = 1;
  std::int64_t cols = 1;
};

std::optional<Matrix> matrix_of(const std::vector<std::int64_t>& shape, DType dtype) {
  Matrix matrix;
  bool is_empty = false;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0) return std::nullopt;
    is_empty = is_empty || shape[i] == 0;
    std::int64_t& side = i == 0 && shape.size() > 1 ? matrix.rows : matrix.cols;
    const std::optional<std::int64_t> product = checked_mul(side, std::max<std::int64_t>(shape[i], 1));
    if (!product.has_value()) return std::nullopt;
    side = *product;
  }
  if (!checked_size_bytes(matrix.rows, matrix.cols, dtype).has_value()) return std::nullopt;
  return is_empty ? Matrix{0, 0} : matrix;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return "(" + text + ")";
}

// Chunk `index`, which begins with element `first`.
FileChunk chunk_at(const Matrix& matrix, std::int64_t chunk_elems, std::int64_t index, std::int64_t first) {
  const std::int64_t count = std::min(chunk_elems, matrix.rows * matrix.cols - first);
  if (count == 0) return {.index = index, .first_elem = first, .rows = 0, .cols = 0};
  if (matrix.rows == 1) return {.index = index, .first_elem = first, .rows = 1, .cols = count};
  return {.index = index, .first_elem = first, .rows = count / matrix.cols, .cols = matrix.cols};
}

std::vector<Stage> stages_of(const std::string& spec) {
  const Result<std::vector<SpecStage>> parsed = parse_spec(spec);
  std::vector<Stage> stages;
  if (!parsed.ok()) return stages;
  for (const SpecStage& stage : parsed.value()) {
    const CodecRow* row = find_codec(stage.name);
    stages.push_back(row == nullptr ? Stage{0, 0} : Stage{row->wire_id, row->version});
  }
  return stages;
}

void append(std::vector<std::byte>& to, const void* from, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  to.insert(to.end(), begin, begin + bytes);
}

std::vector<std::byte> make_header(const CodecFileInfo& info) {
  const std::vector<Stage> stages = stages_of(info.spec);
  Header header = {.magic = {},
                   .version = kFileVersion,
                   .dtype = static_cast<std::uint8_t>(info.dtype),
                   .source = static_cast<std::uint8_t>(info.source),
                   .dimensions = static_cast<std::uint8_t>(info.shape.size()),
                   .chunk_elems = info.chunk_elems,
                   .stages = static_cast<std::uint32_t>(stages.size()),
                   .spec_bytes = static_cast<std::uint32_t>(info.spec.size()),
                   .zero = 0,
                   .crc32 = 0};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.crc32 = own_crc32(header);
  std::vector<std::byte> bytes;
  append(bytes, &header, sizeof(header));
  append(bytes, info.shape.data(), info.shape.size() * sizeof(std::int64_t));
  append(bytes, stages.data(), stages.size() * sizeof(Stage));
  append(bytes, info.spec.data(), info.spec.size());
  const std::uint32_t crc32 = crc32_of(std::span(bytes).subspan(sizeof(Header)));
  append(bytes, &crc32, sizeof(crc32));
  return bytes;
}

// Of the part behind Header, without its checksum.
std::uint64_t description_bytes(const Header& header) {
  return header.dimensions * sizeof(std::int64_t) + header.stages * sizeof(Stage) + header.spec_bytes;
}

Result<Header> read_header(std::span<const std::byte> file) {
  Header header;
  if (file.size() < sizeof(header)) return cut_short("header", 0, sizeof(header), file.size());
  std::memcpy(&header, file.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    const auto* got = reinterpret_cast<const unsigned char*>(header.magic);
    return make_error(StatusCode::kCorruptData,
                      "header at byte 0: %02x %02x %02x %02x, expected 43 52 54 46 (a file of a compressed tensor)",
                      got[0], got[1], got[2], got[3]);
  }
  // Before the checksum: a later version may have another header.
  if (header.version != kFileVersion) {
    return make_error(StatusCode::kUnsupported, "header at byte 4: format version %d, this build reads version %d",
                      header.version, kFileVersion);
  }
  if (header.crc32 != own_crc32(header)) return wrong_checksum("header", 0, own_crc32(header), header.crc32);
  if (header.dimensions > kMostDimensions || header.stages > kMostStages || header.spec_bytes > kMostSpecBytes ||
      header.source > static_cast<std::uint8_t>(FileSource::kNpy) || header.zero != 0) {
    return make_error(StatusCode::kCorruptData,
                      "header at byte 0: source %d, %d dimensions, %u stages, %u bytes of specification and %u, "
                      "expected at most %d, %zu, %u, %u and 0",
                      header.source, header.dimensions, header.stages, header.spec_bytes, header.zero,
                      static_cast<int>(FileSource::kNpy), kMostDimensions, kMostStages, kMostSpecBytes);
  }
  const std::uint64_t bytes = description_bytes(header) + sizeof(std::uint32_t);
  const std::uint64_t there = file.size() - sizeof(header);
  if (there < bytes) return cut_short("description", sizeof(header), bytes, there);
  const auto description = file.subspan(sizeof(header), description_bytes(header));
  std::uint32_t crc32;
  std::memcpy(&crc32, description.data() + description.size(), sizeof(crc32));
  if (crc32 == crc32_of(description)) return header;
  return wrong_checksum("description", sizeof(header), crc32_of(description), crc32);
}

// The payloads must be of the versions that this build's codecs write.
Status check_stages(const std::string& spec, std::span<const Stage> stages) {
  const std::vector<SpecStage> parsed = parse_spec(spec).value();
  const std::vector<Stage> expected = stages_of(spec);
  if (stages.size() != expected.size()) {
    return make_error(StatusCode::kCorruptData, "description: %zu stages, \"%s\" has %zu", stages.size(), spec.c_str(),
                      expected.size());
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (stages[i].wire_id != expected[i].wire_id) {
      return make_error(StatusCode::kCorruptData, "description: %s has wire id %d, expected %d", parsed[i].name.c_str(),
                        stages[i].wire_id, expected[i].wire_id);
    }
    if (stages[i].payload_version != expected[i].payload_version) {
      return make_error(StatusCode::kUnsupported, "description: %s: payload version %d, this build reads version %d",
                        parsed[i].name.c_str(), stages[i].payload_version, expected[i].payload_version);
    }
  }
  return {};
}

struct Description {
  CodecFileInfo info;
  std::vector<Stage> stages;
};

Description read_description(const Header& header, std::span<const std::byte> file) {
  Description description;
  CodecFileInfo& info = description.info;
  info.dtype = static_cast<DType>(header.dtype);
  info.source = static_cast<FileSource>(header.source);
  info.chunk_elems = header.chunk_elems;
  info.shape.resize(header.dimensions);
  description.stages.resize(header.stages);
  info.spec.resize(header.spec_bytes);
  const std::byte* next = file.data() + sizeof(header);
  const auto take = [&](void* to, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, next, bytes);
    next += bytes;
  };
  take(info.shape.data(), info.shape.size() * sizeof(std::int64_t));
  take(description.stages.data(), description.stages.size() * sizeof(Stage));
  take(info.spec.data(), info.spec.size());
  return description;
}

Status check_chunk_elems(const CodecFileInfo& info, const Matrix& matrix) {
  const std::int64_t elems = matrix.rows * matrix.cols;
  const bool whole_rows = matrix.rows <= 1 || info.chunk_elems % matrix.cols == 0;
  if (elems == 0 ? info.chunk_elems == 0 : info.chunk_elems >= 1 && info.chunk_elems <= elems && whole_rows) return {};
  return make_error(StatusCode::kCorruptData, "header at byte 8: chunks of %lld elements do not divide a tensor of %s",
                    static_cast<long long>(info.chunk_elems), shape_text(info.shape).c_str());
}

// What is asked for, or the default, in whole rows.
std::int64_t chunk_elems_for(std::int64_t asked, const Matrix& matrix) {
  const std::int64_t elems = matrix.rows * matrix.cols;
  const std::int64_t chunk = std::min(asked > 0 ? asked : kDefaultChunkElems, elems);
  return matrix.rows > 1 ? std::max<std::int64_t>(chunk / matrix.cols, 1) * matrix.cols : chunk;
}

Result<std::unique_ptr<std::byte[]>> allocate(std::uint64_t bytes, const char* what) {
  std::unique_ptr<std::byte[]> memory(bytes < PTRDIFF_MAX ? new (std::nothrow) std::byte[bytes] : nullptr);
  if (memory != nullptr) return memory;
  return make_error(StatusCode::kUnsupported, "no memory for %llu bytes of %s", number(bytes), what);
}

}  // namespace

// ---- writing -------------------------------------------------------------------------------------------------------

Result<CodecFileWriter> CodecFileWriter::create(CodecFileInfo info, std::uint64_t seed) {
  const std::optional<Matrix> matrix = matrix_of(info.shape, info.dtype);
  if (!matrix.has_value() || info.shape.size() > kMostDimensions || info.chunk_elems < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "a tensor of %s in chunks of %lld: expected at most %zu dimensions, none below 0, "
                      "a size that fits 63 bits, and 0 or more",
                      shape_text(info.shape).c_str(), static_cast<long long>(info.chunk_elems), kMostDimensions);
  }
  CodecFileWriter writer;
  CORTADO_ASSIGN_OR_RETURN(writer.codec_, make_codec(info.spec));
  info.spec = writer.codec_->spec();
  CORTADO_CHECK(info.spec.size() <= kMostSpecBytes && stages_of(info.spec).size() <= kMostStages, "%s",
                info.spec.c_str());
  info.chunk_elems = chunk_elems_for(info.chunk_elems, *matrix);
  writer.header_ = make_header(info);
  writer.info_ = std::move(info);
  writer.seed_ = seed;
  writer.chunk_ = chunk_at(*matrix, writer.info_.chunk_elems, 0, 0);
  // An empty tensor is never encoded; let the codec say whether it takes the dtype.
  const ConstTensorView nothing(nullptr, writer.info_.dtype, 0, 0);
  CORTADO_RETURN_IF_ERROR(writer.codec_->encode(nothing, {}, {}, {}).status());
  const FileChunk& largest = writer.chunk_;
  writer.record_.bytes =
      sizeof(ChunkHeader) + writer.codec_->max_payload_bytes(largest.rows, largest.cols, writer.info_.dtype);
  writer.scratch_.bytes = writer.codec_->scratch_bytes(largest.rows, largest.cols, writer.info_.dtype);
  CORTADO_ASSIGN_OR_RETURN(writer.record_.data, allocate(writer.record_.bytes, "payload"));
  CORTADO_ASSIGN_OR_RETURN(writer.scratch_.data, allocate(writer.scratch_.bytes, "scratch"));
  return writer;
}

Result<std::span<const std::byte>> CodecFileWriter::encode_chunk(const void* elems) {
  if (chunk_.elems() == 0) return make_error(StatusCode::kFailedPrecondition, "all chunks are encoded");
  const std::span<std::byte> payload = record_.span().subspan(sizeof(ChunkHeader));
  const EncodeContext context = {.seed = seed_, .step = 0, .tensor = static_cast<std::uint64_t>(chunk_.index)};
  CORTADO_ASSIGN_OR_RETURN(
      const std::uint64_t payload_bytes,
      codec_->encode({elems, info_.dtype, chunk_.rows, chunk_.cols}, context, payload, scratch_.span()));
  ChunkHeader header = {.index = static_cast<std::uint64_t>(chunk_.index),
                        .payload_bytes = payload_bytes,
                        .payload_crc32 = crc32_of(payload.first(payload_bytes)),
                        .crc32 = 0};
  header.crc32 = own_crc32(header);
  std::memcpy(record_.data.get(), &header, sizeof(header));
  const Matrix matrix = matrix_of(info_.shape, info_.dtype).value();
  chunk_ = chunk_at(matrix, info_.chunk_elems, chunk_.index + 1, chunk_.first_elem + chunk_.elems());
  return std::span<const std::byte>(record_.span().first(sizeof(header) + payload_bytes));
}

// ---- reading -------------------------------------------------------------------------------------------------------

Result<CodecFileReader> CodecFileReader::open(std::span<const std::byte> file) {
  CORTADO_ASSIGN_OR_RETURN(const Header header, read_header(file));
  Description description = read_description(header, file);
  CodecFileReader reader;
  reader.info_ = std::move(description.info);
  const CodecFileInfo& info = reader.info_;
  const std::optional<Matrix> matrix = matrix_of(info.shape, info.dtype);
  if (!matrix.has_value()) {
    return make_error(StatusCode::kCorruptData, "description: %s elements of dtype %d are no tensor",
                      shape_text(info.shape).c_str(), header.dtype);
  }
  CORTADO_RETURN_IF_ERROR(check_chunk_elems(info, *matrix));
  Result<std::unique_ptr<Codec>> codec = make_codec(info.spec);
  if (!codec.ok()) {
    // A codec that this build does not know: perhaps a later one does.
    return Status(StatusCode::kUnsupported, codec.status().message()).with_context("description");
  }
  reader.codec_ = std::move(codec).value();
  CORTADO_RETURN_IF_ERROR(check_stages(info.spec, description.stages));
  reader.file_ = file;
  reader.offset_ = sizeof(Header) + description_bytes(header) + sizeof(std::uint32_t);
  reader.chunk_ = chunk_at(*matrix, info.chunk_elems, 0, 0);
  if (reader.chunk_.elems() == 0) CORTADO_RETURN_IF_ERROR(reader.check_end());
  return reader;
}

std::string CodecFileReader::place() const {
  return "chunk " + std::to_string(chunk_.index) + " at byte " + std::to_string(offset_);
}

Status CodecFileReader::check_end() const {
  if (offset_ == file_.size()) return {};
  return make_error(StatusCode::kCorruptData, "end at byte %llu: %llu bytes follow, expected none", number(offset_),
                    number(file_.size() - offset_));
}

Result<std::span<const std::byte>> CodecFileReader::read_payload() const {
  const std::string what = "chunk " + std::to_string(chunk_.index);
  ChunkHeader header;
  const std::span<const std::byte> rest = file_.subspan(offset_);
  if (rest.size() < sizeof(header)) return cut_short(what.c_str(), offset_, sizeof(header), rest.size());
  std::memcpy(&header, rest.data(), sizeof(header));
  if (header.crc32 != own_crc32(header)) {
    return wrong_checksum((what + ", header").c_str(), offset_, own_crc32(header), header.crc32);
  }
  if (header.index != static_cast<std::uint64_t>(chunk_.index)) {
    return make_error(StatusCode::kCorruptData, "%s: its number is %llu", place().c_str(), number(header.index));
  }
  const std::uint64_t at = offset_ + sizeof(header);
  const std::uint64_t largest = codec_->max_payload_bytes(chunk_.rows, chunk_.cols, info_.dtype);
  if (header.payload_bytes > largest) {
    return make_error(StatusCode::kCorruptData, "%s: payload of %llu bytes, expected at most %llu", place().c_str(),
                      number(header.payload_bytes), number(largest));
  }
  if (header.payload_bytes > rest.size() - sizeof(header)) {
    return cut_short((what + ", payload").c_str(), at, header.payload_bytes, rest.size() - sizeof(header));
  }
  const std::span<const std::byte> payload = rest.subspan(sizeof(header), header.payload_bytes);
  if (header.payload_crc32 == crc32_of(payload)) return payload;
  return wrong_checksum((what + ", payload").c_str(), at, crc32_of(payload), header.payload_crc32);
}

Status CodecFileReader::advance(std::uint64_t payload_bytes) {
  offset_ += sizeof(ChunkHeader) + payload_bytes;
  const Matrix matrix = matrix_of(info_.shape, info_.dtype).value();
  chunk_ = chunk_at(matrix, info_.chunk_elems, chunk_.index + 1, chunk_.first_elem + chunk_.elems());
  return chunk_.elems() == 0 ? check_end() : Status();
}

Status CodecFileReader::decode_chunk(void* elems) {
  if (chunk_.elems() == 0) return make_error(StatusCode::kFailedPrecondition, "all chunks are decoded");
  CORTADO_ASSIGN_OR_RETURN(const std::span<const std::byte> payload, read_payload());
  if (scratch_.data == nullptr) {  // the first chunk is the largest
    scratch_.bytes = codec_->scratch_bytes(chunk_.rows, chunk_.cols, info_.dtype);
    CORTADO_ASSIGN_OR_RETURN(scratch_.data, allocate(scratch_.bytes, "scratch"));
  }
  const TensorView output{elems, info_.dtype, chunk_.rows, chunk_.cols};
  CORTADO_RETURN_IF_ERROR(codec_->decode(payload, output, scratch_.span()).with_context(place()));
  return advance(payload.size());
}

// ---- explaining ----------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kSourceNames[] = {"raw", "npy"};

void explain_header(const Header& header, const CodecFileInfo& info, PayloadExplainer& explainer) {
  explainer.take(4, "magic", "\"CRTF\": a file of a compressed tensor");
  explainer.take(1, "version", "of this layout: " + std::to_string(header.version));
  explainer.take(1, "dtype", std::to_string(header.dtype) + ": " + std::string(dtype_name(info.dtype)));
  explainer.take(1, "source", std::to_string(header.source) + ": " + kSourceNames[header.source]);
  explainer.take(1, "dimensions", std::to_string(header.dimensions));
  explainer.take(8, "chunk elements", std::to_string(header.chunk_elems) + ", the last chunk may have fewer");
  explainer.take(4, "stages", std::to_string(header.stages) + " of the codec");
  explainer.take(4, "spec bytes", std::to_string(header.spec_bytes));
  explainer.take(4, "zero", "always 0");
  explainer.take(4, "checksum", "CRC-32 of the bytes before, right");
  explainer.take(header.dimensions * sizeof(std::int64_t), "shape", shape_text(info.shape));
  explainer.take(header.stages * sizeof(Stage), "stage versions", "wire id and payload version of every stage");
  explainer.take(header.spec_bytes, "spec", printable(info.spec));
  explainer.take(4, "checksum", "CRC-32 of shape, versions and spec, right");
}

}  // namespace

Status explain_codec_file(std::span<const std::byte> file, std::vector<PayloadSection>* sections) {
  sections->clear();
  CORTADO_ASSIGN_OR_RETURN(const Header header, read_header(file));
  const Description description = read_description(header, file);
  PayloadExplainer beginning(file.first(sizeof(Header) + description_bytes(header) + sizeof(std::uint32_t)));
  explain_header(header, description.info, beginning);
  *sections = std::move(beginning).finish();
  CORTADO_ASSIGN_OR_RETURN(CodecFileReader reader, CodecFileReader::open(file));
  while (reader.next_chunk().elems() > 0) {
    const FileChunk chunk = reader.next_chunk();
    CORTADO_ASSIGN_OR_RETURN(const std::span<const std::byte> payload, reader.read_payload());
    std::uint64_t at = reader.next_offset();
    const auto add = [&](std::uint64_t bytes, const std::string& name, const std::string& meaning) {
      sections->push_back({at, bytes, "chunk " + std::to_string(chunk.index) + " " + name, meaning});
      at += bytes;
    };
    add(8, "number", std::to_string(chunk.index));
    add(8, "payload bytes", std::to_string(payload.size()));
    add(4, "checksum", "CRC-32 of the payload, right");
    add(4, "checksum", "CRC-32 of the 20 bytes before, right");
    for (const PayloadSection& section :
         reader.codec_->explain(payload, chunk.rows, chunk.cols, description.info.dtype)) {
      add(section.bytes, section.name, section.meaning);
    }
    CORTADO_RETURN_IF_ERROR(reader.advance(payload.size()));
  }
  return {};
}

}  // namespace cortado

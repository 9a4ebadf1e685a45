// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado codec compress` and `decompress`: between tensor files and files of compressed tensors, chunk by chunk.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <new>
#include <system_error>

#include "cli/codec_commands.h"
#include "cli/progress.h"
#include "cli/tensor_file.h"
#include "cortado/codec.h"
#include "cortado/codec_file.h"
#include "cortado/files.h"

namespace cortado::cli {

namespace {

constexpr const char* kAfterDamage =
    "If `cortado codec compress` wrote it, it can't be repaired: fetch it again, or compress the tensor\n"
    "again. `cortado codec inspect FILE` shows what is whole.";

}  // namespace

namespace {

// The input is read while the output is written.
Result<std::unique_ptr<OutputFile>> output_beside(const std::string& input_path, const std::string& output_path) {
  Result<std::unique_ptr<OutputFile>> output = OutputFile::create(output_path);
  std::error_code ignored;
  if (output.ok() && output.value()->is_direct() && std::filesystem::equivalent(input_path, output_path, ignored)) {
    return Status(StatusCode::kInvalidArgument,
                  "is " + input_path + " itself, and can only be written to directly: name another file");
  }
  return output;
}

}  // namespace

int compress_file(const CompressOptions& options) {
  const Result<std::unique_ptr<Codec>> codec = make_codec(options.spec);
  if (!codec.ok()) return report_wrong_codec(codec.status());
  const Result<std::unique_ptr<InputFile>> input = InputFile::open(options.input_path);
  if (!input.ok()) return report_error(options.input_path, input.status());
  const Result<TensorFile> read = read_tensor_file(input.value()->bytes(), options.input);
  if (!read.ok()) return report_error(options.input_path, read.status());
  const TensorFile& tensor = read.value();
  Result<CodecFileWriter> created = CodecFileWriter::create({.spec = options.spec,
                                                             .dtype = tensor.dtype,
                                                             .source = tensor.source,
                                                             .shape = tensor.shape,
                                                             .chunk_elems = options.chunk_elems},
                                                            options.seed);
  if (!created.ok()) return report_error(options.input_path, created.status());
  CodecFileWriter& writer = created.value();
  const Result<std::unique_ptr<OutputFile>> output = output_beside(options.input_path, options.output_path);
  if (!output.ok()) return report_error(options.output_path, output.status());
  Status written = output.value()->write(writer.header());
  Progress progress("compress " + options.input_path, tensor.data.size());
  while (written.ok() && writer.next_chunk().elems() > 0) {
    const std::size_t at = static_cast<std::size_t>(writer.next_chunk().first_elem) * dtype_bytes(tensor.dtype);
    const Result<std::span<const std::byte>> chunk = writer.encode_chunk(tensor.data.data() + at);
    if (!chunk.ok()) return report_error(options.input_path, chunk.status());
    written = output.value()->write(chunk.value());
    progress.update(static_cast<std::uint64_t>(writer.next_chunk().first_elem) * dtype_bytes(tensor.dtype));
  }
  if (written.ok()) written = output.value()->commit();
  return written.ok() ? kDone : report_error(options.output_path, written);
}

int decompress_file(const std::string& input_path, const std::string& output_path) {
  const Result<std::unique_ptr<InputFile>> input = InputFile::open(input_path);
  if (!input.ok()) return report_error(input_path, input.status());
  Result<CodecFileReader> opened = CodecFileReader::open(input.value()->bytes());
  if (!opened.ok()) return report_error(input_path, opened.status(), kAfterDamage);
  CodecFileReader& reader = opened.value();
  const CodecFileInfo& info = reader.info();
  const std::size_t elem_bytes = dtype_bytes(info.dtype);
  const std::size_t largest_bytes = static_cast<std::size_t>(reader.next_chunk().elems()) * elem_bytes;
  const std::unique_ptr<std::byte[]> chunk(new (std::nothrow) std::byte[largest_bytes]);
  if (chunk == nullptr) {
    return report_error(input_path,
                        make_error(StatusCode::kUnsupported, "no memory for a chunk of %zu bytes", largest_bytes));
  }
  const Result<std::unique_ptr<OutputFile>> output = output_beside(input_path, output_path);
  if (!output.ok()) return report_error(output_path, output.status());
  Status written =
      info.source == FileSource::kNpy ? output.value()->write(npy_header(info.dtype, info.shape)) : Status();
  Progress progress("decompress " + input_path, input.value()->bytes().size());
  while (written.ok() && reader.next_chunk().elems() > 0) {
    const std::size_t bytes = static_cast<std::size_t>(reader.next_chunk().elems()) * elem_bytes;
    const Status decoded = reader.decode_chunk(chunk.get());
    if (!decoded.ok()) return report_error(input_path, decoded, kAfterDamage);
    written = output.value()->write(std::span(chunk.get(), bytes));
    progress.update(reader.next_offset());
  }
  if (written.ok()) written = output.value()->commit();
  return written.ok() ? kDone : report_error(output_path, written);
}

}  // namespace cortado::cli

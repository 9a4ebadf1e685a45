// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Files of one tensor: NumPy's .npy (formats 1.0 and 2.0, C order, little-endian) and raw values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/codec_commands.h"
#include "cortado/codec_file.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado::cli {

struct TensorFile {
  DType dtype = DType::kFloat32;
  FileSource source = FileSource::kRaw;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;  // of the file's bytes; any address

  // As codec files have it: the first dimension is the rows, one dimension is one row.
  ConstTensorView matrix() const;
};

// What a file is, by how it begins. Messages say what can be done about it.
Result<TensorFile> read_tensor_file(std::span<const std::byte> file, const InputOptions& options);

// The header of an .npy file, byte for byte as NumPy writes it. bf16, which NumPy does not know, becomes "|V2".
std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace cortado::cli

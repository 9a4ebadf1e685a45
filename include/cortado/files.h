// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Files: an input as one piece of memory, an output that is complete or not there (but for a crash of the machine).
// Errors are kIoError, without the path.
#pragma once

#include <cstddef>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/status.h"

namespace cortado {

// A regular file is mapped; anything else (a pipe) is read to its end.
class InputFile {
 public:
  static Result<std::unique_ptr<InputFile>> open(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  InputFile() = default;
  std::span<const std::byte> bytes_;
  std::vector<std::byte> read_;  // what was not mapped
};

// Written under another name beside it (PATH.cortado-part), and put in its place by commit(): until then what was there
// before is, and without commit() nothing is left behind. What a killed process has left is written over by the next
// one. Permissions stay, and so do links. Written to directly, from the first write() on, and so not whole at all
// times: what is no regular file (a pipe), has several names, or lies where no other file can be made or put in its
// place. A path that leads through a descriptor (/dev/stdout, /dev/fd/3) is written to through that one, from where it
// is: what its file holds stays.
class OutputFile {
 public:
  // kIoError if what is there must not be written.
  static Result<std::unique_ptr<OutputFile>> create(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Neither after commit().
  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text) { return write(std::as_bytes(std::span(text))); }
  Status commit();

  // Whether write() changes what is there, and not commit() alone.
  bool is_direct() const { return part_path_.empty(); }

 private:
  OutputFile() = default;
  bool open_part();
  Status open_descriptor(const std::string& link);
  Status begin();

  std::string path_, part_path_;  // no part: written to directly
  std::FILE* file_ = nullptr;
  bool is_new_ = false, has_begun_ = false;  // of a file that is written to directly
};

// Of this process, that a path leads through: 1 of /dev/stdout, 3 of /dev/fd/3.
std::optional<int> descriptor_of(const std::string& path);

// Whole files.
Result<std::string> read_file(const std::string& path);
Status write_file(const std::string& path, std::string_view text);

}  // namespace cortado

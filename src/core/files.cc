// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace cortado {

namespace {

constexpr int kMostParts = 100;  // of one path under way at once

Status system_error(const char* what) { return make_error(StatusCode::kIoError, "%s: %s", what, std::strerror(errno)); }

Status read_all(int descriptor, std::vector<std::byte>* bytes) {
  constexpr std::size_t kStepBytes = std::size_t{1} << 20;
  for (;;) {
    const std::size_t at = bytes->size();
    bytes->resize(at + kStepBytes);
    const ssize_t count = ::read(descriptor, bytes->data() + at, kStepBytes);
    if (count < 0 && errno != EINTR) return system_error("can't be read");
    bytes->resize(at + static_cast<std::size_t>(count < 0 ? 0 : count));
    if (count == 0) return {};
  }
}

}  // namespace

Result<std::unique_ptr<InputFile>> InputFile::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return system_error("can't be opened");
  std::unique_ptr<InputFile> file(new InputFile);
  struct stat about = {};
  Status status;
  if (::fstat(descriptor, &about) != 0 || S_ISDIR(about.st_mode)) {
    errno = S_ISDIR(about.st_mode) ? EISDIR : errno;
    status = system_error("can't be read");
  } else if (!S_ISREG(about.st_mode)) {
    status = read_all(descriptor, &file->read_);
    file->bytes_ = file->read_;
  } else if (about.st_size > 0) {
    const auto bytes = static_cast<std::size_t>(about.st_size);
    void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (memory == MAP_FAILED) {
      status = system_error("can't be read");
    } else {
      ::madvise(memory, bytes, MADV_SEQUENTIAL);
      file->bytes_ = {static_cast<const std::byte*>(memory), bytes};
    }
  }
  ::close(descriptor);
  if (!status.ok()) return status;
  return file;
}

InputFile::~InputFile() {
  if (read_.empty() && !bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<std::unique_ptr<OutputFile>> OutputFile::create(const std::string& path) {
  std::unique_ptr<OutputFile> file(new OutputFile);
  struct stat about = {};
  const bool is_there = ::stat(path.c_str(), &about) == 0;
  if (is_there && !S_ISREG(about.st_mode)) {
    file->path_ = file->written_path_ = path;
    file->file_ = std::fopen(path.c_str(), "wb");
  } else {
    std::error_code error;
    const auto target = std::filesystem::canonical(path, error);  // a link stays one
    file->path_ = error ? path : target.string();
    // Others may write the same file at the same time.
    for (int number = 0; file->file_ == nullptr && number < kMostParts; ++number) {
      file->written_path_ = file->path_ + ".part" + std::to_string(::getpid()) + "." + std::to_string(number);
      file->file_ = std::fopen(file->written_path_.c_str(), "wbx");
      if (file->file_ == nullptr && errno != EEXIST) break;
    }
  }
  if (file->file_ == nullptr) return system_error("can't be written");
  return file;
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  if (bytes.empty() || std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size()) return {};
  return system_error("can't be written");
}

Status OutputFile::commit() {
  std::FILE* file = std::exchange(file_, nullptr);
  const bool flushed = std::fflush(file) == 0;
  if (std::fclose(file) != 0 || !flushed) {
    const Status status = system_error("can't be written");
    if (written_path_ != path_) ::unlink(written_path_.c_str());
    return status;
  }
  if (written_path_ == path_ || std::rename(written_path_.c_str(), path_.c_str()) == 0) return {};
  const Status status = system_error("can't be replaced");
  ::unlink(written_path_.c_str());
  return status;
}

OutputFile::~OutputFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  if (written_path_ != path_) ::unlink(written_path_.c_str());
}

Result<std::string> read_file(const std::string& path) {
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<InputFile> file, InputFile::open(path));
  const std::span<const std::byte> bytes = file->bytes();
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status write_file(const std::string& path, std::string_view text) {
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::create(path));
  CORTADO_RETURN_IF_ERROR(file->write(text));
  return file->commit();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace cortado {

namespace {

constexpr int kMostParts = 100;  // of one path under way at once

Status system_error(const char* what) { return make_error(StatusCode::kIoError, "%s: %s", what, std::strerror(errno)); }

std::optional<struct stat> stat_of(const std::string& path) {
  struct stat about = {};
  if (::stat(path.c_str(), &about) != 0) return std::nullopt;
  return about;
}

template <typename Bytes>
Status read_all(int descriptor, Bytes* bytes) {
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

// A new file, or what a killed process has left of one; locked, so that nobody else takes it. -1: errno says why.
int open_locked(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor < 0 && errno == ELOOP) errno = EEXIST;
  if (descriptor < 0) return -1;
  const bool is_taken = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  // Whoever had it may have put it in its place meanwhile.
  struct stat own = {};
  const auto there = stat_of(path);
  if (!is_taken && ::fstat(descriptor, &own) == 0 && there.has_value() && there->st_ino == own.st_ino &&
      S_ISREG(own.st_mode) && own.st_nlink == 1 && ::ftruncate(descriptor, 0) == 0) {
    return descriptor;
  }
  ::close(descriptor);
  errno = EEXIST;
  return -1;
}

// What a link says; empty if there is none.
std::string target_of(const std::filesystem::path& link) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(link, error);
  return error ? "" : target.string();
}

bool is_number(const std::string& text) {
  return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos;
}

// The folder of a process's descriptors that `path` ends in, with the name in it; empty: it leads through none.
std::filesystem::path descriptor_link(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as the system
  fs::path at = path;
  for (int links = 0; links < kMostLinks; ++links) {
    std::error_code error;
    const fs::path folder = fs::canonical(at.has_parent_path() ? at.parent_path() : ".", error);
    if (error) return {};
    if (folder.filename() == "fd" && folder.string().starts_with("/proc/") && is_number(at.filename())) {
      return folder / at.filename();
    }
    const std::string target = target_of(at);
    if (target.empty()) return {};
    at = folder / target;  // the target alone if it begins with a slash
  }
  return {};
}

}  // namespace

std::optional<int> descriptor_of(const std::string& path) {
  const std::filesystem::path link = descriptor_link(path);
  std::error_code error;
  const std::string own = std::filesystem::canonical("/proc/self", error).string() + "/";
  if (link.empty() || error || !link.string().starts_with(own)) return std::nullopt;
  return std::stoi(link.filename().string());
}

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

// False: there can be none here.
bool OutputFile::open_part() {
  for (int number = 0; number < kMostParts; ++number) {
    part_path_ = path_ + ".cortado-part" + (number == 0 ? "" : std::to_string(number));
    const int descriptor = open_locked(part_path_);
    if (descriptor < 0 && errno == EEXIST) continue;
    if (descriptor < 0) break;
    const auto there = stat_of(path_);
    const bool is_alike = !there.has_value() || (::fchown(descriptor, there->st_uid, there->st_gid) == 0 &&
                                                 ::fchmod(descriptor, there->st_mode & 07777) == 0);
    if (is_alike) file_ = ::fdopen(descriptor, "wb");
    if (file_ != nullptr) return true;
    ::close(descriptor);
    ::unlink(part_path_.c_str());
    break;
  }
  part_path_.clear();
  return false;
}

// Through a descriptor: what its file holds stays, and what others write to it comes before or behind. Of another
// process, whose descriptor can't be had, behind what is there.
Status OutputFile::open_descriptor(const std::string& link) {
  const std::optional<int> own = descriptor_of(link);
  const int descriptor =
      own.has_value() ? ::fcntl(*own, F_DUPFD_CLOEXEC, 0) : ::open(link.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor < 0) return system_error("can't be written");
  has_begun_ = true;  // nothing goes
  const int flags = ::fcntl(descriptor, F_GETFL);
  errno = EBADF;
  if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY) file_ = ::fdopen(descriptor, "wb");
  if (file_ != nullptr) return {};
  const Status status = system_error("can't be written");
  ::close(descriptor);
  return status;
}

Result<std::unique_ptr<OutputFile>> OutputFile::create(const std::string& path) {
  std::unique_ptr<OutputFile> file(new OutputFile);
  if (const std::filesystem::path link = descriptor_link(path); !link.empty()) {
    CORTADO_RETURN_IF_ERROR(file->open_descriptor(link));
    return file;
  }
  const auto there = stat_of(path);
  if (there.has_value() && ::access(path.c_str(), W_OK) != 0) return system_error("can't be written");
  std::error_code ignored, error;
  const bool is_link = std::filesystem::is_symlink(path, ignored);
  const bool is_plain = there.has_value() ? S_ISREG(there->st_mode) && there->st_nlink == 1 : !is_link;
  file->path_ = path;
  if (is_plain && is_link) file->path_ = std::filesystem::canonical(path, error).string();
  if (error) return make_error(StatusCode::kIoError, "can't be written: %s", error.message().c_str());
  if (is_plain && file->open_part()) return file;
  // What is there stays until something is written.
  file->is_new_ = !there.has_value();
  const int descriptor = ::open(file->path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) return system_error("can't be written");
  if (file->is_new_ && is_link) file->path_ = std::filesystem::canonical(path, ignored).string();  // the link stays
  file->file_ = ::fdopen(descriptor, "wb");
  if (file->file_ != nullptr) return file;
  const Status status = system_error("can't be written");
  ::close(descriptor);
  return status;
}

// Of a file that is written to directly: what was in it goes. Anything but a file has nothing in it.
Status OutputFile::begin() {
  if (!part_path_.empty() || std::exchange(has_begun_, true)) return {};
  struct stat there = {};
  if (::fstat(::fileno(file_), &there) != 0) return system_error("can't be written");
  if (S_ISREG(there.st_mode) && ::ftruncate(::fileno(file_), 0) != 0) return system_error("can't be written");
  return {};
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  CORTADO_CHECK(file_ != nullptr, "written to after commit()");
  CORTADO_RETURN_IF_ERROR(begin());
  if (bytes.empty() || std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size()) return {};
  return system_error("can't be written");
}

Status OutputFile::commit() {
  CORTADO_CHECK(file_ != nullptr, "commit() a second time");
  CORTADO_RETURN_IF_ERROR(begin());
  const int lock = part_path_.empty() ? -1 : ::dup(::fileno(file_));  // held until the part is in its place
  const bool is_written = std::fflush(file_) == 0;
  Status status;
  if (std::fclose(std::exchange(file_, nullptr)) != 0 || !is_written) status = system_error("can't be written");
  if (part_path_.empty()) return status;
  bool is_moved = status.ok() && std::rename(part_path_.c_str(), path_.c_str()) == 0;
  if (status.ok() && !is_moved) {  // a file that is mounted by itself, say
    std::error_code error;
    std::filesystem::copy_file(part_path_, path_, std::filesystem::copy_options::overwrite_existing, error);
    if (error) {  // what was there may be gone, and the next part would be written over this one
      const std::string whole_path = path_ + ".cortado-whole";
      const bool is_renamed = std::rename(part_path_.c_str(), whole_path.c_str()) == 0;
      is_moved = true;  // or stays
      status = make_error(StatusCode::kIoError, "can't be replaced: %s; all of it is in %s", error.message().c_str(),
                          is_renamed ? whole_path.c_str() : part_path_.c_str());
    }
  }
  if (!is_moved) ::unlink(part_path_.c_str());
  if (lock >= 0) ::close(lock);
  return status;
}

OutputFile::~OutputFile() {
  if (file_ == nullptr) return;
  if (!part_path_.empty()) ::unlink(part_path_.c_str());
  if (is_new_ && !has_begun_) ::unlink(path_.c_str());
  std::fclose(file_);
}

Result<std::string> read_file(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return system_error("can't be opened");
  std::string text;
  const Status status = read_all(descriptor, &text);
  ::close(descriptor);
  if (!status.ok()) return status;
  return text;
}

Status write_file(const std::string& path, std::string_view text) {
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::create(path));
  CORTADO_RETURN_IF_ERROR(file->write(text));
  return file->commit();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "core/temporary_directory_testing.h"

namespace cortado {
namespace {

namespace fs = std::filesystem;

std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(Files, WhatWasThereStaysUntilAllIsWritten) {
  const fs::path folder = temporary_directory() / "stays";
  fs::create_directory(folder);
  const std::string path = folder / "file";
  ASSERT_TRUE(write_file(path, "old").ok());
  {
    const auto abandoned = OutputFile::create(path).value();
    ASSERT_TRUE(abandoned->write("new").ok());
    EXPECT_EQ(read_file(path).value(), "old");
  }
  EXPECT_EQ(read_file(path).value(), "old");
  // Two at once: the last one counts, whole.
  const auto first = OutputFile::create(path).value(), second = OutputFile::create(path).value();
  ASSERT_TRUE(first->write("first").ok());
  ASSERT_TRUE(second->write("second").ok());
  ASSERT_TRUE(second->commit().ok());
  EXPECT_EQ(read_file(path).value(), "second");
  ASSERT_TRUE(first->commit().ok());
  EXPECT_EQ(read_file(path).value(), "first");
  EXPECT_EQ(files_in(folder), 1u);
}

TEST(Files, WhatAKilledProcessLeftIsWrittenOver) {
  const fs::path folder = temporary_directory() / "killed";
  fs::create_directory(folder);
  ASSERT_TRUE(write_file(folder / "file.cortado-part", "much more than comes now").ok());
  ASSERT_TRUE(write_file(folder / "file", "new").ok());
  EXPECT_EQ(read_file(folder / "file").value(), "new");
  EXPECT_EQ(files_in(folder), 1u);
  // But no file that somebody has linked there.
  ASSERT_TRUE(write_file(folder / "other", "other").ok());
  fs::create_symlink("other", folder / "file.cortado-part");
  fs::create_hard_link(folder / "other", folder / "file.cortado-part1");
  ASSERT_TRUE(write_file(folder / "file", "newer").ok());
  EXPECT_EQ(read_file(folder / "file").value(), "newer");
  EXPECT_EQ(read_file(folder / "other").value(), "other");
  EXPECT_EQ(files_in(folder), 4u);
}

TEST(Files, LinksAndPermissionsStay) {
  const fs::path folder = temporary_directory() / "links";
  fs::create_directory(folder);
  ASSERT_TRUE(write_file(folder / "file", "old").ok());
  fs::permissions(folder / "file", fs::perms::owner_read | fs::perms::owner_write);
  for (const char* target : {"file", "nothing"}) {
    const fs::path link = folder / (std::string("to_") + target);
    fs::create_symlink(target, link);
    ASSERT_TRUE(write_file(link, "new").ok());
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_EQ(read_file(folder / target).value(), "new");
  }
  EXPECT_EQ(fs::status(folder / "file").permissions(), fs::perms::owner_read | fs::perms::owner_write);
  fs::create_hard_link(folder / "file", folder / "same");
  ASSERT_TRUE(write_file(folder / "same", "newer").ok());
  EXPECT_EQ(read_file(folder / "file").value(), "newer");
}

// A name that leaves no room for that of a part.
TEST(Files, WhereNoPartCanBeMadeTheyAreWrittenDirectly) {
  const fs::path folder = temporary_directory() / "long";
  fs::create_directory(folder);
  const fs::path file = folder / std::string(254, 'x');
  for (const char* text : {"longer", "new"}) {
    EXPECT_TRUE(write_file(file, text).ok());
    EXPECT_EQ(read_file(file).value(), text);
  }
}

// Found in review: whoever only asked whether it could be written had emptied it.
TEST(Files, WhatIsWrittenDirectlyStaysUntilTheFirstWrite) {
  const fs::path folder = temporary_directory() / "direct";
  fs::create_directory(folder);
  ASSERT_TRUE(write_file(folder / "file", "old").ok());
  fs::create_hard_link(folder / "file", folder / "same");
  {
    const auto asked = OutputFile::create(folder / "same").value();
    EXPECT_TRUE(asked->is_direct());
  }
  EXPECT_EQ(read_file(folder / "file").value(), "old");
  ASSERT_TRUE(write_file(folder / "same", "").ok());
  EXPECT_EQ(read_file(folder / "file").value(), "");
  const fs::path missing = folder / std::string(254, 'x');
  EXPECT_TRUE(OutputFile::create(missing).value()->is_direct());
  EXPECT_FALSE(fs::exists(missing)) << "asked for, and not written";
  fs::create_symlink("nothing", folder / "link");
  EXPECT_TRUE(OutputFile::create(folder / "link").value()->is_direct());
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_FALSE(fs::exists(folder / "nothing"));
}

// The file that standard output was led to was replaced: what was in it, and what came later, was lost.
TEST(Files, ADescriptorsFileKeepsWhatItHolds) {
  const fs::path folder = temporary_directory() / "descriptor";
  fs::create_directory(folder);
  const std::string path = folder / "file";
  ASSERT_TRUE(write_file(path, "before\n").ok());
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_APPEND);
  ASSERT_GE(descriptor, 0);
  const std::string number = std::to_string(descriptor);
  fs::create_symlink("/dev/fd/" + number, folder / "link");
  std::string expected = "before\n";
  for (const std::string& name :
       {"/dev/fd/" + number, "/proc/self/fd/" + number, "/proc/" + std::to_string(::getpid()) + "/fd/" + number,
        std::string(folder / "link")}) {
    EXPECT_EQ(descriptor_of(name), descriptor) << name;
    EXPECT_TRUE(OutputFile::create(name).value()->is_direct());
    ASSERT_TRUE(write_file(name, name + "\n").ok());
    ASSERT_EQ(::write(descriptor, "later\n", 6), 6);
    expected += name + "\nlater\n";
  }
  EXPECT_EQ(read_file(path).value(), expected);
  EXPECT_EQ(files_in(folder), 2u);
  ::close(descriptor);
  EXPECT_FALSE(write_file("/dev/fd/" + number, "x").ok());
  EXPECT_EQ(descriptor_of("/dev/stdout"), 1);
  EXPECT_EQ(descriptor_of("/dev/stderr"), 2);
  EXPECT_EQ(descriptor_of("/dev/null"), std::nullopt);
  EXPECT_EQ(descriptor_of(path), std::nullopt);
  EXPECT_EQ(descriptor_of("nowhere/file"), std::nullopt);
}

TEST(Files, WhatADescriptorOnlyReadsIsNotWritten) {
  const std::string path = temporary_directory() / "read_only";
  ASSERT_TRUE(write_file(path, "old").ok());
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  EXPECT_EQ(write_file("/dev/fd/" + std::to_string(descriptor), "new").message(),
            "can't be written: Bad file descriptor");
  EXPECT_EQ(read_file(path).value(), "old");
  ::close(descriptor);
}

TEST(Files, WhatIsThereStaysWhereThereIsNoRoom) {
  const fs::path folder = temporary_directory() / "full";
  fs::create_directory(folder);
  ASSERT_TRUE(write_file(folder / "file", "old").ok());
  rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit smaller = {.rlim_cur = 10, .rlim_max = limit.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &smaller), 0);
  const Status status = write_file(folder / "file", std::string(100, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_EQ(status.message(), "can't be written: File too large");
  EXPECT_EQ(read_file(folder / "file").value(), "old");
  EXPECT_EQ(files_in(folder), 1u);
}

// A file that is mounted by itself is copied to, and there what it held goes first.
TEST(Files, OfWhatCanNotBeReplacedThePartStays) {
  const fs::path folder = temporary_directory() / "mounted", small = temporary_directory() / "small";
  fs::create_directory(folder);
  fs::create_directory(small);
  ASSERT_TRUE(write_file(folder / "file", "old").ok());
  if (::mount("none", small.c_str(), "tmpfs", 0, "size=4096") != 0) GTEST_SKIP() << "may not mount";
  const std::string text(100'000, 'x');
  ASSERT_TRUE(write_file(small / "file", "old").ok());
  const int mounted = ::mount((small / "file").c_str(), (folder / "file").c_str(), nullptr, MS_BIND, nullptr);
  const Status status = write_file(folder / "file", text);
  if (mounted == 0) ::umount((folder / "file").c_str());
  ::umount(small.c_str());
  ASSERT_EQ(mounted, 0);
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  const std::string whole = folder / "file.cortado-whole";
  EXPECT_NE(status.message().find("all of it is in " + whole), std::string::npos) << status.message();
  EXPECT_EQ(read_file(whole).value(), text);
  EXPECT_EQ(files_in(folder), 2u);
}

TEST(Files, SayWhatIsWrong) {
  EXPECT_EQ(read_file("/nowhere/file").status().message(), "can't be opened: No such file or directory");
  EXPECT_EQ(read_file("/").status().message(), "can't be read: Is a directory");
  EXPECT_EQ(write_file("/nowhere/file", "x").message(), "can't be written: No such file or directory");
  EXPECT_EQ(write_file("/dev/full", "x").code(), StatusCode::kIoError);
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/files.h"

#include <gtest/gtest.h>
#include <unistd.h>

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

TEST(Files, ALinkStaysOne) {
  const fs::path folder = temporary_directory() / "link";
  fs::create_directory(folder);
  ASSERT_TRUE(write_file(folder / "file", "old").ok());
  fs::create_symlink("file", folder / "link");
  ASSERT_TRUE(write_file(folder / "link", "new").ok());
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "file").value(), "new");
}

TEST(Files, SayWhatIsWrong) {
  EXPECT_EQ(read_file("/nowhere/file").status().message(), "can't be opened: No such file or directory");
  EXPECT_EQ(read_file("/").status().message(), "can't be read: Is a directory");
  EXPECT_EQ(write_file("/nowhere/file", "x").message(), "can't be written: No such file or directory");
  EXPECT_EQ(write_file("/dev/full", "x").code(), StatusCode::kIoError);
}

}  // namespace
}  // namespace cortado

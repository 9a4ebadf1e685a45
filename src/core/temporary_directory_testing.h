// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Where tests write their files.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace cortado {

// A directory that no other process writes to: tests run beside each other, and beside those of other checkouts. It is
// removed with what is in it when the process ends.
inline const std::filesystem::path& temporary_directory() {
  struct Directory {
    std::filesystem::path path;
    Directory() {
      std::string name = testing::TempDir() + "cortado_test_XXXXXX";
      if (mkdtemp(name.data()) != nullptr) path = name;
      EXPECT_FALSE(path.empty()) << "cannot make " << name;
    }
    ~Directory() {
      std::error_code ignored;
      if (!path.empty()) std::filesystem::remove_all(path, ignored);
    }
  };
  static const Directory directory;
  return directory.path;
}

}  // namespace cortado

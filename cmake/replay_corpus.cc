// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A main() for fuzzers built without libFuzzer: runs the target on empty input and on each of the files and folders
// that are named on the command line. A folder that does not exist counts as empty (no finding was kept yet).
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

int replayed = 0;

void replay(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // Named before it runs: when the target ends the process, the last line says which input did it.
  std::fprintf(stderr, "replay %s (%zu bytes)\n", path.c_str(), bytes.size());
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  ++replayed;
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint8_t nothing = 0;
  LLVMFuzzerTestOneInput(&nothing, 0);
  for (int i = 1; i < argc; ++i) {
    const std::filesystem::path path = argv[i];
    if (std::filesystem::is_directory(path)) {
      for (const auto& entry : std::filesystem::directory_iterator(path)) replay(entry.path());
    } else if (std::filesystem::exists(path)) {
      replay(path);
    }
  }
  std::printf("replayed %d inputs\n", replayed);
  return 0;
}

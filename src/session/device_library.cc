// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/device_library.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "core/check.h"
#include "cortado/version.h"

namespace cortado {

DeviceLibraryBuild this_build() {
  DeviceLibraryBuild build;
  build.version = CORTADO_VERSION_MAJOR * 1000000 + CORTADO_VERSION_MINOR * 1000 + CORTADO_VERSION_PATCH;
  std::snprintf(build.compiler, sizeof(build.compiler), "%s", __VERSION__);
  std::snprintf(build.headers, sizeof(build.headers), "%s", CORTADO_HEADERS_HASH);
  return build;
}

Status check_same_build(const DeviceLibraryBuild& found, const std::string& path) {
  const DeviceLibraryBuild own = this_build();
  const auto are_equal = [](const auto& a, const auto& b) { return std::strncmp(a, b, sizeof(a)) == 0; };
  if (found.version == own.version && are_equal(found.compiler, own.compiler) &&
      are_equal(found.headers, own.headers)) {
    return {};
  }
  return make_error(
      StatusCode::kMismatch,
      "\"%s\" is of another build (version number %d, compiler %.95s, headers %.12s); expected that of this "
      "program (%d, %s, %.12s): build both together",
      path.c_str(), found.version, found.compiler, found.headers, own.version, own.compiler, own.headers);
}

Result<const DeviceLibrary*> load_device_library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return make_error(StatusCode::kNotFound, "can't load a library of devices: %s", dlerror());
  const auto get = reinterpret_cast<const DeviceLibrary* (*)()>(dlsym(library, kDeviceLibrarySymbol));
  if (get == nullptr) {
    dlclose(library);
    return make_error(StatusCode::kMismatch, "\"%s\" is no library of devices: it has no %s", path.c_str(),
                      kDeviceLibrarySymbol);
  }
  const DeviceLibrary* const found = get();
  CORTADO_RETURN_IF_ERROR(check_same_build(found->build, path));
  return found;
}

}  // namespace cortado

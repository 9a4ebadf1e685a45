// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "profile/host.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>

namespace cortado {

std::string host_kind() {
  std::string cpu, implementer;
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; cpu.empty() && std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) cpu = line.substr(colon + 2);
    // ARM has numbers in place of a name.
    if (line.starts_with("CPU implementer") && colon != std::string::npos) implementer = line.substr(colon + 2);
    if (line.starts_with("CPU part") && colon != std::string::npos) {
      cpu = "CPU implementer " + implementer + " part " + line.substr(colon + 2);
    }
  }
  utsname system{};
  const std::string architecture = uname(&system) == 0 ? system.machine : "unknown";
  if (cpu.empty()) cpu = "unknown CPU";
  return cpu + ", " + std::to_string(sysconf(_SC_NPROCESSORS_ONLN)) + " cores, " + architecture;
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/calibrate_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include "cli/codec_commands.h"
#include "cli/progress.h"
#include "cortado/auto.h"
#include "cortado/calibrate.h"
#include "cortado/device_library.h"
#include "cortado/files.h"

namespace cortado::cli {

namespace {

void show_progress(double done, const std::string& next) {
  char text[120];
  const std::string bar(static_cast<std::size_t>(done * kBarWidth), '#');
  std::snprintf(text, sizeof(text), "[%-*s] %3.0f %%  %.60s", kBarWidth, bar.c_str(), 100 * done, next.c_str());
  show_line(text);
  if (done >= 1) std::fputs("\n", stderr);
}

// Something can be read there. An empty file, and what is no file, is there to be written.
bool has_content(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) && std::filesystem::file_size(path, error) > 0 && !error;
}

// Of the ranks of a machine each the next device, and from the first one again where there are fewer.
Result<std::shared_ptr<const SchemeDevice>> device_of_rank(const std::string& path, int rank_on_machine) {
  // A name without a slash would be looked for where the system's libraries are.
  const Result<const DeviceLibrary*> loaded = load_device_library(std::filesystem::absolute(path));
  if (!loaded.ok()) return loaded.status();
  const DeviceLibrary& library = *loaded.value();
  if (library.create_scheme_device == nullptr) {
    return Status(StatusCode::kUnsupported, path + " has no codecs; libcortado_cuda.so has");
  }
  const int devices = library.device_count();
  if (devices == 0) return Status(StatusCode::kUnsupported, path + " finds no device");
  if (rank_on_machine == devices) {
    std::fprintf(stderr, "calibrate: this machine has %d device%s, so ranks share them\n", devices,
                 devices == 1 ? "" : "s");
  }
  return library.create_scheme_device(rank_on_machine % devices);
}

int calibrate_over(const MpiWorld& world, const CalibrateCommand& command) {
  Communicator* communicator = world.communicator;
  const bool speaks = communicator->rank() == 0;
  CalibrateOptions options{.name = command.name,
                           .codecs = command.codecs.empty() ? auto_codecs(Quality::kAggressive) : command.codecs,
                           .budget_s = command.budget_s,
                           .transport_version = world.version};
  if (!command.device_library.empty()) {
    Result<std::shared_ptr<const SchemeDevice>> device = device_of_rank(command.device_library, world.rank_on_machine);
    if (!device.ok()) {
      return report_error("calibrate", device.status().with_context("rank " + std::to_string(communicator->rank())));
    }
    options.device = std::move(device).value();
  }
  if (speaks) {  // a minute of measuring is not for a file that can't be written
    const Result<std::unique_ptr<OutputFile>> writable = OutputFile::create(command.cluster_path);
    if (!writable.ok()) return report_error(command.cluster_path, writable.status());
  }
  if (speaks && ::isatty(STDERR_FILENO) == 1) options.progress = show_progress;
  if (speaks && has_content(command.cluster_path) && !command.again) {
    Result<Cluster> known = load_cluster(command.cluster_path);
    if (!known.ok()) return report_error("calibrate", known.status(), "--again measures everything and writes it anew");
    options.known = std::move(known).value();
    options.note = [&](const std::string& line) {
      std::fprintf(stderr, "%s: %s\n", command.cluster_path.c_str(), line.c_str());
    };
  }
  const Result<Cluster> cluster = calibrate(communicator, options);
  // What another rank says of itself is told there.
  const bool tells = speaks || (!cluster.ok() && cluster.status().code() != StatusCode::kPeerFailed);
  if (!cluster.ok()) return tells ? report_error("calibrate", cluster.status()) : kBadCommandLine;
  if (!speaks) return kDone;
  const Status saved = save_cluster(cluster.value(), command.cluster_path);
  if (!saved.ok()) return report_error("calibrate", saved);
  std::string too;
  if (options.device != nullptr) {
    const auto on_devices = std::count_if(
        cluster.value().codecs.begin(), cluster.value().codecs.end(),
        [](const CodecTimes& times) { return times.device == OpDevice::kGpu && times.direction == OpKind::kEncode; });
    too = "; the file has " + std::to_string(on_devices) + " on devices";
  }
  std::printf("%s: %d ranks, %zu codecs, over %s%s\n", command.cluster_path.c_str(), communicator->world_size(),
              options.codecs.size(), cluster.value().communicator.c_str(), too.c_str());
  return kDone;
}

}  // namespace

int calibrate_cluster(const CalibrateCommand& command) {
  const Result<int> code = with_mpi_world([&](const MpiWorld& world) { return calibrate_over(world, command); });
  if (code.ok()) return code.value();
  return report_error("calibrate", code.status(),
                      "Over the ranks of torchrun: torchrun ... -m cortado.calibrate -o " + command.cluster_path);
}

}  // namespace cortado::cli

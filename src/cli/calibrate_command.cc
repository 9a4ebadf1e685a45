// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/calibrate_command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "cli/codec_commands.h"
#include "cortado/auto.h"
#include "cortado/calibrate.h"
#include "cortado/device_library.h"
#include "cortado/topology.h"

namespace cortado::cli {

namespace {

constexpr int kBarWidth = 30;

void show_progress(double done, const std::string& next) {
  const std::string bar(static_cast<std::size_t>(done * kBarWidth), '#');
  std::fprintf(stderr, "\r[%-*s] %3.0f %%  %.44s\033[K%s", kBarWidth, bar.c_str(), 100 * done, next.c_str(),
               done < 1 ? "" : "\n");
  std::fflush(stderr);
}

// Of the ranks of a machine each the next device, and from the first one again where there are fewer.
Result<std::shared_ptr<const SchemeDevice>> device_of_rank(const std::string& path) {
  const Result<const DeviceLibrary*> loaded = load_device_library(path);
  if (!loaded.ok()) return loaded.status();
  const DeviceLibrary& library = *loaded.value();
  if (library.create_scheme_device == nullptr) return Status(StatusCode::kUnsupported, path + " has no codecs");
  const int devices = library.device_count();
  if (devices == 0) return Status(StatusCode::kUnsupported, path + " finds no device");
  const Result<std::optional<LauncherPlace>> place = launcher_place();
  if (!place.ok()) return place.status();
  return library.create_scheme_device(place.value().value_or(LauncherPlace{}).rank_on_machine % devices);
}

[[maybe_unused]] int calibrate_over(Communicator* communicator, const std::string& mpi_version,
                                    const CalibrateCommand& command) {
  const bool speaks = communicator->rank() == 0;
  CalibrateOptions options{.name = command.name,
                           .codecs = command.codecs.empty() ? auto_codecs(Quality::kAggressive) : command.codecs,
                           .budget_s = command.budget_s,
                           .transport_version = mpi_version};
  if (!command.device_library.empty()) {
    Result<std::shared_ptr<const SchemeDevice>> device = device_of_rank(command.device_library);
    if (!device.ok()) return report_error("calibrate", device.status());
    options.device = std::move(device).value();
  }
  if (speaks && ::isatty(STDERR_FILENO) == 1) options.progress = show_progress;
  const bool is_there = ::access(command.cluster_path.c_str(), F_OK) == 0;
  if (speaks && is_there && !command.again) {
    Result<Cluster> known = load_cluster(command.cluster_path);
    if (!known.ok()) return report_error("calibrate", known.status(), "--again measures everything and writes it anew");
    options.known = std::move(known).value();
    options.note = [&](const std::string& line) {
      std::fprintf(stderr, "%s: %s\n", command.cluster_path.c_str(), line.c_str());
    };
  }
  const Result<Cluster> cluster = calibrate(communicator, options);
  if (!cluster.ok()) return speaks ? report_error("calibrate", cluster.status()) : kBadCommandLine;
  if (!speaks) return kDone;
  const Status saved = save_cluster(cluster.value(), command.cluster_path);
  if (!saved.ok()) return report_error(command.cluster_path, saved);
  const auto on_devices = std::count_if(
      cluster.value().codecs.begin(), cluster.value().codecs.end(),
      [](const CodecTimes& times) { return times.device == OpDevice::kGpu && times.direction == OpKind::kEncode; });
  const std::string too = on_devices > 0 ? " (" + std::to_string(on_devices) + " on devices, too)" : "";
  std::printf("%s: %d ranks, %zu codecs%s, over %s\n", command.cluster_path.c_str(), communicator->world_size(),
              options.codecs.size(), too.c_str(), cluster.value().communicator.c_str());
  return kDone;
}

}  // namespace

int calibrate_cluster(const CalibrateCommand& command) {
#ifdef CORTADO_CLI_HAS_MPI
  return with_mpi_world([&](Communicator* communicator, const std::string& mpi_version) {
    return calibrate_over(communicator, mpi_version, command);
  });
#else
  return report_error("calibrate", Status(StatusCode::kUnsupported, "this program was built without MPI"),
                      "Over the ranks of torchrun: torchrun ... -m cortado.calibrate -o " + command.cluster_path);
#endif
}

}  // namespace cortado::cli

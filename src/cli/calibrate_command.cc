// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cli/calibrate_command.h"

#include <unistd.h>

#include <cstdio>

#include "cli/codec_commands.h"
#include "cortado/auto.h"
#include "cortado/calibrate.h"

namespace cortado::cli {

namespace {

constexpr int kBarWidth = 30;

void show_progress(double done, const std::string& next) {
  const std::string bar(static_cast<std::size_t>(done * kBarWidth), '#');
  std::fprintf(stderr, "\r[%-*s] %3.0f %%  %.44s\033[K%s", kBarWidth, bar.c_str(), 100 * done, next.c_str(),
               done < 1 ? "" : "\n");
  std::fflush(stderr);
}

[[maybe_unused]] int calibrate_over(Communicator* communicator, const std::string& mpi_version,
                                    const CalibrateCommand& command) {
  const bool speaks = communicator->rank() == 0;
  CalibrateOptions options{.name = command.name,
                           .codecs = command.codecs.empty() ? auto_codecs(Quality::kAggressive) : command.codecs,
                           .budget_s = command.budget_s,
                           .transport_version = mpi_version};
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
  std::printf("%s: %d ranks, %zu codecs, over %s\n", command.cluster_path.c_str(), communicator->world_size(),
              options.codecs.size(), cluster.value().communicator.c_str());
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

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <mpi.h>

#include <array>
#include <string>

#include "cli/calibrate_command.h"
#include "cli/codec_commands.h"
#include "cortado/mpi.h"

namespace cortado::cli {

namespace {

// "Open MPI v4.1.4", of a text that goes on.
std::string mpi_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string version(text.data());
  return version.substr(0, version.find_first_of(",\n"));
}

int rank_on_machine() {
  MPI_Comm machine = MPI_COMM_NULL;
  int rank = 0;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  MPI_Comm_rank(machine, &rank);
  MPI_Comm_free(&machine);
  return rank;
}

}  // namespace

Result<int> with_mpi_world(const std::function<int(const MpiWorld& world)>& work) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);  // threads that compute beside it are made
  int code = kBadCommandLine;
  {
    const Result<std::unique_ptr<Communicator>> world = make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD));
    code = world.ok() ? work({world.value().get(), mpi_version(), rank_on_machine()})
                      : report_error("MPI", world.status());
    if (code != kDone) MPI_Abort(MPI_COMM_WORLD, code);
  }
  MPI_Finalize();
  return code;
}

}  // namespace cortado::cli

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <string_view>

#include "core/check.h"
#include "cortado/topology.h"

namespace cortado {
namespace {

// One launcher's words for the place of a process. Slurm counts the tasks of all machines in one list.
struct Launcher {
  const char* rank_on_machine;
  const char* ranks_on_machine;
};
constexpr Launcher kLaunchers[] = {
    {"LOCAL_RANK", "LOCAL_WORLD_SIZE"},                            // torchrun
    {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},  // Open MPI
    {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},                        // MPICH, Intel MPI
    {"MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},    // MVAPICH
    {"SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},                // srun: "4", "4(x2)"
};

Result<int> parse(const char* name, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view rest(end, static_cast<std::size_t>(text.data() + text.size() - end));
  // Slurm: as many on each of so many machines. Anything behind it would be machines with another number.
  if (rest.starts_with("(x") && rest.find(')') == rest.size() - 1) rest = {};
  if (error == std::errc() && rest.empty() && value >= 0) return value;
  return make_error(StatusCode::kInvalidArgument, "launcher: %s=%.*s; expected one number of ranks for all machines",
                    name, static_cast<int>(text.size()), text.data());
}

}  // namespace

Result<std::optional<LauncherPlace>> launcher_place(const std::function<const char*(const char* name)>& variable) {
  for (const Launcher& launcher : kLaunchers) {
    const char* rank = variable(launcher.rank_on_machine);
    const char* ranks = variable(launcher.ranks_on_machine);
    if (rank == nullptr || ranks == nullptr) continue;
    LauncherPlace place;
    CORTADO_ASSIGN_OR_RETURN(place.rank_on_machine, parse(launcher.rank_on_machine, rank));
    CORTADO_ASSIGN_OR_RETURN(place.ranks_on_machine, parse(launcher.ranks_on_machine, ranks));
    if (place.rank_on_machine < place.ranks_on_machine) return std::optional(place);
    return make_error(StatusCode::kInvalidArgument, "launcher: %s=%s but %s=%s", launcher.rank_on_machine, rank,
                      launcher.ranks_on_machine, ranks);
  }
  return std::optional<LauncherPlace>();
}

}  // namespace cortado

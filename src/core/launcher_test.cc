// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "cortado/topology.h"

namespace cortado {
namespace {

Result<std::optional<LauncherPlace>> place_in(const std::map<std::string, std::string>& environment) {
  return launcher_place([&environment](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

std::string error_in(const std::map<std::string, std::string>& environment) {
  const auto place = place_in(environment);
  EXPECT_EQ(place.status().code(), StatusCode::kInvalidArgument);
  return place.status().message();
}

TEST(Launcher, ReadsTheVariablesOfEach) {
  const LauncherPlace third_of_four{.rank_on_machine = 2, .ranks_on_machine = 4};
  EXPECT_EQ(place_in({{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "4"}}).value(), third_of_four);
  EXPECT_EQ(place_in({{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}).value(),
            third_of_four);
  EXPECT_EQ(place_in({{"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "4"}}).value(), third_of_four);
  EXPECT_EQ(place_in({{"MV2_COMM_WORLD_LOCAL_RANK", "2"}, {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}}).value(), third_of_four);
  for (const char* tasks : {"4", "4(x2)", "4(x128)"}) {
    EXPECT_EQ(place_in({{"SLURM_LOCALID", "2"}, {"SLURM_STEP_TASKS_PER_NODE", tasks}}).value(), third_of_four) << tasks;
  }
  EXPECT_EQ(place_in({}).value(), std::nullopt);
  EXPECT_EQ(place_in({{"LOCAL_RANK", "2"}}).value(), std::nullopt) << "DeepSpeed sets it alone";
}

TEST(Launcher, TorchrunWinsWithinASlurmJob) {
  EXPECT_EQ(place_in({{"LOCAL_RANK", "1"},
                      {"LOCAL_WORLD_SIZE", "8"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_STEP_TASKS_PER_NODE", "1(x4)"}})
                .value(),
            (LauncherPlace{.rank_on_machine = 1, .ranks_on_machine = 8}));
}

TEST(Launcher, NamesWhatMakesNoSense) {
  EXPECT_EQ(error_in({{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"}}),
            "launcher: SLURM_STEP_TASKS_PER_NODE=4(x2),3; expected one number of ranks for all machines");
  EXPECT_EQ(error_in({{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4,3(x2)"}}),
            "launcher: SLURM_STEP_TASKS_PER_NODE=4,3(x2); expected one number of ranks for all machines");
  EXPECT_EQ(error_in({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "many"}}),
            "launcher: LOCAL_WORLD_SIZE=many; expected one number of ranks for all machines");
  EXPECT_EQ(error_in({{"LOCAL_RANK", "-1"}, {"LOCAL_WORLD_SIZE", "2"}}),
            "launcher: LOCAL_RANK=-1; expected one number of ranks for all machines");
  EXPECT_EQ(error_in({{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
            "launcher: LOCAL_RANK=2 but LOCAL_WORLD_SIZE=2");
}

}  // namespace
}  // namespace cortado

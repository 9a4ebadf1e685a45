// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Options over MPI's own groups, two machines of two ranks:
//   mpirun -n 4 cortado_mpi_test --gtest_filter='MpiScheme.*'
#include <algorithm>
#include <set>

#include "collective/mpi_testing.h"
#include "collective/scheme.h"
#include "collective/scheme_testing.h"
#include "cortado/codec.h"
#include "cortado/planner.h"

namespace cortado {
namespace {

constexpr std::chrono::seconds kLong(30);
const Topology kTwoByTwo = {{{"intra", 2}, {"inter", 2}}};
// The last one is more than MPI sends unasked.
const std::vector<SchemeTensor> kTensors = {
    {"a.weight", 5, 7}, {"empty", 0, 4}, {"a.bias", 1, 3}, {"b.weight", 60, 129}};

class MpiScheme : public testing::Test {
 protected:
  void SetUp() override {
    world_ = make_mpi_world();
    ASSERT_EQ(world_->world_size(), kTwoByTwo.world_size());
    levels_ = std::make_unique<LevelCommunicators>(LevelCommunicators::create(world_.get(), kTwoByTwo).value());
    for (int step = 0; step < 2; ++step) {
      messages_.push_back(integer_message(kTensors, world_->rank(), step));
      expected_.push_back(exact_sum(kTensors, world_->world_size(), step, integer_message));
    }
  }

  // Of integers, for two steps.
  void expect_exact_sum(const Option& option, const Codec* codec) {
    SCOPED_TRACE(codec->spec() + ": " + option.to_string(kTwoByTwo));
    const auto run = SchemeRun::make({.levels = levels_.get(), .option = option, .codec = codec, .tensors = kTensors});
    ASSERT_TRUE(run.ok()) << run.status().to_string();
    for (int step = 0; step < 2; ++step) {
      const auto at = static_cast<std::size_t>(step);
      for (std::size_t t = 0; t < kTensors.size(); ++t) {
        std::copy(messages_[at][t].begin(), messages_[at][t].end(), run.value()->values(static_cast<int>(t)).begin());
      }
      const Status status = run.value()->run(step, kLong);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (std::size_t t = 0; t < kTensors.size(); ++t) {
        const std::span<const float> sums = run.value()->sums(static_cast<int>(t));
        EXPECT_EQ(std::vector<double>(sums.begin(), sums.end()), expected_[at][t])
            << "step " << step << ", tensor " << t;
        EXPECT_TRUE(is_same_on_every_rank(*world_, sums)) << "step " << step << ", tensor " << t;
      }
    }
  }

  // Of all options of the space, which use so many kinds of collectives, counted for each range of levels, and for
  // values and payloads.
  void expect_exact_sums(const OptionSpace& space, const std::string& spec, std::size_t kinds) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    std::set<std::string> seen;
    for (const std::vector<Option> options = generate_options(space).value(); const Option& option : options) {
      for (const Operation& operation : option.operations) {
        if (!is_collective(operation.kind)) continue;
        seen.insert(std::string(op_kind_name(operation.kind)) + "@" + kTwoByTwo.range_name(operation.levels) +
                    (operation.encoded ? " of payloads" : " of values"));
      }
      expect_exact_sum(option, codec.get());
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(seen.size(), kinds) << testing::PrintToString(seen);
  }

 private:
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<LevelCommunicators> levels_;
  std::vector<Message> messages_;                           // of each step
  std::vector<std::vector<std::vector<double>>> expected_;  // of each step
};

TEST_F(MpiScheme, PayloadsOfOneSize) { expect_exact_sums({.devices = {OpDevice::kCpu}}, "none", 26); }

TEST_F(MpiScheme, PayloadsOfVaryingSize) { expect_exact_sums({.devices = {OpDevice::kCpu}}, "float_rans", 26); }

TEST_F(MpiScheme, SumsOfPayloads) {
  expect_exact_sums({.devices = {OpDevice::kCpu}, .sum_payloads = true}, "cast(bf16)", 34);
}

}  // namespace
}  // namespace cortado

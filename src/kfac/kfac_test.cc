// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/kfac.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "collective/late_communicator_testing.h"
#include "collective/virtual_clock.h"
#include "kfac/kfac_reference.h"
#include "kfac/kfac_testing.h"

namespace cortado {
namespace {

KfacOptions strategy(KfacStrategy strategy, int workers = 0) {
  KfacOptions options;
  options.strategy = strategy;
  options.workers = workers;
  options.timeout_s = 20;
  return options;
}

const std::vector<KfacOptions>& strategies() {  // of four ranks
  static const std::vector<KfacOptions> all = {strategy(KfacStrategy::kCommOpt), strategy(KfacStrategy::kHybridOpt, 2),
                                               strategy(KfacStrategy::kMemOpt), strategy(KfacStrategy::kDpKfac)};
  return all;
}

void expect_reference_there(const SmallRun& run, const std::string& what) {
  constexpr int kSteps = 4;
  std::vector<int> batch_ranks;
  const History history = run_job(run, kSteps, [&](Kfac& kfac, int rank) {
    if (rank != 0 || run.options.strategy != KfacStrategy::kDpKfac) return;
    for (const KfacPlacement& placement : kfac.placements()) batch_ranks.push_back(placement.a_rank);
  });
  ReferenceKfac reference(run);
  for (int step = 0; step < kSteps; ++step) {
    const Gradients expected = reference.step(step, batch_ranks);
    EXPECT_LT(distance(history[0][static_cast<std::size_t>(step)], expected), 2e-5) << what << ", step " << step;
  }
  expect_replicas_are_equal(history);
}

// On the CPU and on a device.
void expect_reference(const SmallRun& run, const std::string& what) {
  SmallRun there = run;
  for (const bool on_device : {false, true}) {
    there.on_device = on_device;
    expect_reference_there(there, what + (on_device ? ", on a device" : ""));
  }
}

TEST(Kfac, AllStrategiesAreTheReference) {
  for (const KfacOptions& options : strategies()) {
    for (const bool reduces : {false, true}) {
      SmallRun run{.options = options, .values = {}};
      run.reduces = reduces;
      expect_reference(run, std::string(kfac_strategy_name(options.strategy)));
    }
  }
}

TEST(Kfac, InversesDampingAndClipAreTheReference) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    for (const bool pi_correction : {false, true}) {
      for (const double kl_clip : {0.0, 1e-3, 1e6}) {
        SmallRun run{.world_size = 2, .options = strategy(KfacStrategy::kMemOpt), .values = {}};
        run.options.inverse = inverse;
        run.options.pi_correction = pi_correction;
        run.values = {.factor_decay = 0.7, .damping = 0.03, .kl_clip = kl_clip, .lr = 0.5};
        expect_reference(run, "kl_clip " + std::to_string(kl_clip));
      }
    }
  }
}

TEST(Kfac, FactorsAndInversesOfEarlierSteps) {
  for (const KfacOptions& options : strategies()) {
    SmallRun run{.options = options, .values = {}};
    run.factor_update_steps = 2;
    run.inv_update_steps = 3;
    expect_reference(run, std::string(kfac_strategy_name(options.strategy)));
  }
}

TEST(Kfac, FactorsOfALayerOnTwoRanks) {
  for (const KfacOptions& base : {strategy(KfacStrategy::kCommOpt), strategy(KfacStrategy::kHybridOpt, 2)}) {
    for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
      SmallRun run{.options = base, .values = {}};
      run.options.colocate_factors = false;
      run.options.inverse = inverse;
      expect_reference(run, "not colocated");
    }
  }
}

TEST(Kfac, OneRankAlone) {
  for (const KfacStrategy one : {KfacStrategy::kCommOpt, KfacStrategy::kMemOpt, KfacStrategy::kDpKfac}) {
    SmallRun run{.world_size = 1, .options = strategy(one), .values = {}};
    run.options.gradients.codec = "quant(bits=4)";  // nobody to send to: nothing is lost
    expect_reference(run, "one rank");
  }
}

TEST(Kfac, MicroBatchesAreAveraged) {
  const std::vector<KfacLayer> layers = {{.name = "fc", .inputs = 3, .outputs = 2}};
  const auto run = [&](bool in_two) {
    LocalGroup group(1);
    const auto kfac = Kfac::create(layers, strategy(KfacStrategy::kMemOpt), group.communicator(0)).value();
    const std::vector<float> x = normal_values(8 * 3, 1, 0, 0), d = normal_values(8 * 2, 2, 0, 0);
    const int rows = in_two ? 4 : 8;
    for (int first = 0; first < 8; first += rows) {
      EXPECT_TRUE(kfac->add_activations(0, {x.data() + first * 3, DType::kFloat32, rows}).ok());
      // A loss that was scaled by 1024.
      std::vector<float> scaled(d.begin() + first * 2, d.begin() + (first + rows) * 2);
      for (float& value : scaled) value *= 1024;
      EXPECT_TRUE(kfac->add_output_gradients(0, {scaled.data(), DType::kFloat32, rows}, 1024).ok());
    }
    std::vector<float> gradient = {1, 2, 3, 4, 5, 6};
    const KfacGradient address{.weight = gradient.data()};
    EXPECT_TRUE(kfac->step({}, {&address, 1}).ok());
    return gradient;
  };
  const std::vector<float> once = run(false), twice = run(true);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(once[i], twice[i], 1e-5 * std::fabs(once[i]));
}

TEST(Kfac, ThreadsChangeNoBit) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    SmallRun run{.world_size = 2, .options = strategy(KfacStrategy::kMemOpt), .values = {}};
    run.options.inverse = inverse;
    const History alone = run_job(run, 3);
    for (const int threads : {2, 5}) {
      run.options.threads = threads;
      EXPECT_TRUE(run_job(run, 3) == alone) << threads;
    }
  }
}

// ---- compressed ----------------------------------------------------------------------------------------------------

TEST(Kfac, LosslessCodecsChangeNoBit) {
  for (const KfacOptions& options : strategies()) {
    SmallRun run{.options = options, .values = {}};
    const History plain = run_job(run, 3);
    for (const char* codec : {"compso(bound=0)", "float_rans"}) {
      for (const bool feedback : {false, true}) {
        run.options.gradients.codec = codec;
        run.options.gradients.use_error_feedback = feedback;
        EXPECT_EQ(run_job(run, 3), plain) << codec << " " << kfac_strategy_name(options.strategy);
      }
    }
  }
}

TEST(Kfac, LosslessFactorsAndInverses) {
  // Factors are then summed by their owner, in rank order as LocalGroup does.
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    for (const KfacOptions& options : strategies()) {
      SmallRun run{.options = options, .values = {}};
      run.options.inverse = inverse;
      const History plain = run_job(run, 3);
      run.options.factor_compression = "compso(bound=0)";
      EXPECT_EQ(run_job(run, 3), plain) << kfac_strategy_name(options.strategy);
    }
  }
}

TEST(Kfac, ReplicasAreEqualAtAnyBound) {
  for (const KfacOptions& options : strategies()) {
    for (const char* codec : {"compso(bound=4e-3)", "compso(bound=0.1, round=dither)", "compso(error=0.3)",
                              "quant(bits=4)", "topk(density=0.1)", "cast(bf16)", "topk(density=0.2) | quant | rans"}) {
      SmallRun run{.options = options, .values = {}};
      run.options.gradients.codec = codec;
      run.options.gradients.use_error_feedback = true;
      run.options.factor_compression = "quant(bits=8)";
      KfacReport report;
      const History history = run_job(run, 4, [&](Kfac& kfac, int rank) {
        if (rank == 0) report = kfac.report();
      });
      expect_replicas_are_equal(history);
      EXPECT_GT(report.factors.messages + report.inverses.messages + report.gradients.messages, 0);
      if (options.strategy == KfacStrategy::kMemOpt) {
        EXPECT_GT(report.gradients.relative_l2_error, 0) << codec;
        EXPECT_LT(report.gradients.relative_l2_error, 1) << codec;
        EXPECT_LT(report.factors.relative_l2_error, 0.02);
        EXPECT_GT(report.factors.relative_l2_error, 0);
      }
    }
  }
}

TEST(Kfac, TheCodecOfFactorsMayChange) {
  const auto statuses_with = [](const char* codec_of_rank_1) {
    return run_ranks(4, [&](Communicator& communicator) -> Status {
      SmallRun run{.options = strategy(KfacStrategy::kHybridOpt, 2), .values = {}};
      run.options.factor_compression = "cast(bf16)";
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
      for (const char* codec : {"cast(bf16)", "none", "quant(bits=8)"}) {
        const bool differs = communicator.rank() == 1 && kfac->steps() == 2;
        CORTADO_RETURN_IF_ERROR(kfac->set_factor_compression(differs ? codec_of_rank_1 : codec));
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), kfac->steps()).status());
        EXPECT_EQ(kfac->report().factors.relative_l2_error == 0, std::string(codec) == "none") << codec;
      }
      EXPECT_EQ(kfac->set_factor_compression("quat").code(), StatusCode::kNotFound);
      return {};
    });
  };
  for (const Status& status : statuses_with("quant(bits=8)")) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const std::string other : {"quant(bits=4)", "none"}) {  // none is another collective
    for (const Status& status : statuses_with(other.c_str())) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
      EXPECT_NE(status.message().find("step 2"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("rank 1 has \"gradients none, factors " + other + "\""), std::string::npos)
          << status.message();
    }
  }
}

// A gather is within a row, so what a row does differently must be seen by another way.
TEST(Kfac, TheCodecOfGradientsMayChangeInAllRowsOnly) {
  const auto statuses_with = [](const char* codec_of_second_row) {
    return run_ranks(4, [&](Communicator& communicator) -> Status {
      SmallRun run{.options = strategy(KfacStrategy::kHybridOpt, 2), .values = {}};
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
      for (const char* codec : {"quant(bits=4)", "none", "quant(bits=8)"}) {
        const bool differs = communicator.rank() >= 2 && kfac->steps() == 2;
        CORTADO_RETURN_IF_ERROR(kfac->set_compression(differs ? codec_of_second_row : codec));
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), kfac->steps()).status());
      }
      return {};
    });
  };
  for (const Status& status : statuses_with("quant(bits=8)")) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const Status& status : statuses_with("quant(bits=4)")) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
    EXPECT_NE(status.message().find("step 2"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("rank 2 has \"gradients quant(bits=4), factors none\""), std::string::npos)
        << status.message();
  }
}

TEST(Kfac, SmallBoundsMeanSmallErrors) {
  SmallRun run{.options = strategy(KfacStrategy::kMemOpt), .values = {}};
  const History plain = run_job(run, 3);
  double last = 1e9;
  for (const char* codec : {"compso(bound=0.05)", "compso(bound=0.005)", "compso(bound=0.0005)"}) {
    run.options.gradients.codec = codec;
    const double lost = distance(run_job(run, 3)[0][2], plain[0][2]);
    EXPECT_LT(lost, last / 5);
    last = lost;
  }
  EXPECT_LT(last, 2e-3);
}

// ---- what travels --------------------------------------------------------------------------------------------------

std::vector<std::string> collectives_of_step(const KfacOptions& options, bool updates, bool reduces = false,
                                             const std::vector<KfacLayer>& layers = small_job()) {
  std::vector<std::string> kinds;
  run_ranks(4, [&](Communicator& communicator) -> Status {
    RecordingCommunicator recording(&communicator);
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Kfac> kfac, Kfac::create(layers, options, &recording));
    SmallRun run{.options = options, .values = {}};
    run.reduces = reduces;
    run.factor_update_steps = run.inv_update_steps = 2;
    for (int step = 0; step < (updates ? 3 : 2); ++step) {
      recording.clear();
      CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
    }
    if (communicator.rank() == 0) {
      for (const RecordedCollective& one : recording.log()) kinds.push_back(one.kind);
    }
    return {};
  });
  return kinds;
}

// One message for all layers, whatever travels, behind a note of eight bytes; COMM-OPT sends no gradient.
TEST(Kfac, MessagesOfAStep) {
  using Kinds = std::vector<std::string>;
  const auto plain = strategies();
  const std::string note = "all_gather";
  EXPECT_EQ(collectives_of_step(plain[0], true), (Kinds{note, "reduce_scatter", "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[0], false), Kinds{note});
  EXPECT_EQ(collectives_of_step(plain[1], true), (Kinds{note, "reduce_scatter", "all_gather", "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[1], false), (Kinds{note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[2], true), (Kinds{note, "reduce_scatter", "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[2], false), (Kinds{note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[3], true), (Kinds{note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[3], false), (Kinds{note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[0], false, true), (Kinds{"all_reduce", note}));
  EXPECT_EQ(collectives_of_step(plain[1], false, true), (Kinds{"reduce_scatter", "all_reduce", note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[2], false, true), (Kinds{"reduce_scatter", note, "all_gather"}));
  EXPECT_EQ(collectives_of_step(plain[3], false, true), (Kinds{"reduce_scatter", note, "all_gather"}));

  KfacOptions packed = plain[2];
  packed.gradients.codec = "quant(bits=4)";
  packed.factor_compression = "quant(bits=8)";
  EXPECT_EQ(collectives_of_step(packed, true), (Kinds{note, "all_to_all", "all_to_all", "all_gather"}));
}

// As many layers as ResNet-50 and BERT-large have: 54 and 144 broadcasts a step where each layer has its own.
TEST(Kfac, MessagesDoNotGrowWithLayers) {
  for (const int count : {54, 144}) {
    std::vector<KfacLayer> layers;
    for (int i = 0; i < count; ++i) layers.push_back({.name = std::to_string(i), .inputs = 2, .outputs = 1});
    for (const KfacOptions& options : strategies()) {
      for (const bool updates : {false, true}) {
        EXPECT_EQ(collectives_of_step(options, updates, false, layers), collectives_of_step(options, updates)) << count;
      }
    }
  }
}

TEST(Kfac, FactorsTravelAsTriangles) {
  SmallRun run{.options = strategy(KfacStrategy::kMemOpt), .values = {}};
  run_job(run, 1, [](Kfac& kfac, int) {
    const KfacVolumes volumes = kfac_volumes(kfac.layers());
    const auto slots = static_cast<std::int64_t>(2 * kfac.layers().size());
    EXPECT_EQ(kfac.report().factors.payload_bytes, 4 * (volumes.triangles + slots));
  });
}

// Greedy, the largest layer first, by n^3 or n^2: 10^3 outweighs four times 6^3, but 10^2 only two times 6^2.
TEST(Kfac, LayersAreSharedByTimeOrByMemory) {
  std::vector<KfacLayer> layers = {{.name = "large", .inputs = 10, .outputs = 1}};
  for (const char* name : {"a", "b", "c", "d"}) layers.push_back({.name = name, .inputs = 6, .outputs = 1});
  for (const bool balance_memory : {false, true}) {
    const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      KfacOptions options = strategy(KfacStrategy::kMemOpt);
      options.balance_memory = balance_memory;
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(layers, options, &communicator));
      std::vector<int> owners;
      for (const KfacPlacement& placement : kfac->placements()) owners.push_back(placement.a_rank);
      EXPECT_EQ(owners, balance_memory ? (std::vector<int>{0, 1, 1, 1, 0}) : (std::vector<int>{0, 1, 1, 1, 1}));
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(Kfac, MemoryIsSharedAmongOwners) {
  for (const KfacOptions& options : strategies()) {
    SmallRun run{.options = options, .values = {}};
    std::vector<KfacMemory> memory(4);
    run_job(run, 1, [&](Kfac& kfac, int rank) { memory[static_cast<std::size_t>(rank)] = kfac.memory(); });
    const KfacVolumes volumes = kfac_volumes(small_job());
    std::int64_t factors = 0, inverses = 0;
    for (const KfacMemory& one : memory) {
      factors += one.factors_bytes;
      inverses += one.inverses_bytes;
    }
    EXPECT_EQ(factors, 4 * volumes.triangles);
    const int copies = options.strategy == KfacStrategy::kCommOpt ? 4 : options.workers > 0 ? options.workers : 1;
    EXPECT_EQ(inverses, 4 * copies * (volumes.eigenvectors + volumes.eigenvalues));
    EXPECT_GT(memory[0].total_bytes(), memory[0].factors_bytes + memory[0].inverses_bytes);
  }
}

// ---- what can go wrong ---------------------------------------------------------------------------------------------

std::set<std::string> fallbacks_of(const Kfac& kfac) {
  std::set<std::string> all;
  for (const KfacFallback& fallback : kfac.report().fallbacks) all.insert(fallback.layer + ": " + fallback.reason);
  return all;
}

// A job of one linear layer on one rank, with its batches and its gradient.
struct OneLayer {
  explicit OneLayer(KfacInverse inverse = KfacInverse::kEigen) {
    KfacOptions options = strategy(KfacStrategy::kMemOpt);
    options.inverse = inverse;
    kfac = Kfac::create({{.name = "fc", .inputs = 2, .outputs = 2}}, options, group.communicator(0)).value();
  }
  Result<KfacOutcome> step(std::vector<float> x, std::vector<float> d, KfacHyperparameters values = {}) {
    if (!x.empty()) {
      const auto rows = static_cast<std::int64_t>(x.size() / 2);
      EXPECT_TRUE(kfac->add_activations(0, {x.data(), DType::kFloat32, rows}).ok());
      EXPECT_TRUE(kfac->add_output_gradients(0, {d.data(), DType::kFloat32, rows}).ok());
    }
    const KfacGradient address{.weight = gradient.data()};
    return kfac->step(values, {&address, 1});
  }
  LocalGroup group{1};
  std::unique_ptr<Kfac> kfac;
  std::vector<float> gradient = {1, 2, 3, 4};
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Kfac, NonFiniteFactorsAreNotAbsorbed) {
  OneLayer job, clean;
  ASSERT_TRUE(job.step({1, 2, 3, 5}, {1, 0, 0, 1}).ok());
  ASSERT_TRUE(job.step({1, kNan, 3, 5}, {1, 0, 0, std::numeric_limits<float>::infinity()}).ok());
  ASSERT_TRUE(clean.step({1, 2, 3, 5}, {1, 0, 0, 1}).ok());
  const KfacState state = job.kfac->save_state(), expected = clean.kfac->save_state();
  EXPECT_EQ(state.layers[0].a_factor, expected.layers[0].a_factor);
  EXPECT_EQ(state.layers[0].g_factor, expected.layers[0].g_factor);
  EXPECT_EQ(fallbacks_of(*job.kfac),
            std::set<std::string>{"fc: a factor of the batch is not finite: the average stays"});
}

// Whichever rank it comes from, and whoever holds the average; with DP-KFAC only the holder's own batches count.
TEST(Kfac, NonFiniteFactorsOnOneRankAreAbsorbedByNone) {
  constexpr std::size_t kPoisoned = 2, kOther = 3;
  const std::string reason = "fc: a factor of the batch is not finite: the average stays";
  for (KfacOptions options : strategies()) {
    for (const std::string codec : {"none", "quant(bits=8)"}) {
      options.factor_compression = codec;
      for (int poisoner = 0; poisoner < 4; ++poisoner) {
        SCOPED_TRACE(codec + ", rank " + std::to_string(poisoner));
        std::vector<KfacState> before(4), after(4);
        std::vector<std::set<std::string>> fallbacks(4);
        const SmallRun run{.options = options, .values = {}};
        const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
          const int rank = communicator.rank();
          const auto r = static_cast<std::size_t>(rank);
          CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
          CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, rank, 0).status());
          before[r] = kfac->save_state(false);
          CORTADO_RETURN_IF_ERROR(add_batches(*kfac, rank, 1));
          const std::vector<float> poison(static_cast<std::size_t>(kfac->layers()[kPoisoned].inputs), kNan);
          if (rank == poisoner) {
            CORTADO_RETURN_IF_ERROR(kfac->add_activations(kPoisoned, {poison.data(), DType::kFloat32, 1}));
          }
          Gradients gradients = gradients_of(kfac->layers(), 4, -1, 1);
          CORTADO_RETURN_IF_ERROR(kfac->step(run.values, addresses_of(kfac->layers(), &gradients)).status());
          after[r] = kfac->save_state(false);
          fallbacks[r] = fallbacks_of(*kfac);
          return {};
        });
        for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
        int holders = 0, others = 0;
        for (std::size_t r = 0; r < 4; ++r) {
          const std::vector<float>& held = before[r].layers[kPoisoned].a_factor;
          if (!held.empty()) {
            ++holders;
            const bool hears = options.strategy != KfacStrategy::kDpKfac || static_cast<int>(r) == poisoner;
            EXPECT_EQ(after[r].layers[kPoisoned].a_factor == held, hears);
            EXPECT_EQ(fallbacks[r].contains(reason), hears);
          }
          const std::vector<float>& other = before[r].layers[kOther].a_factor;
          if (!other.empty()) {
            ++others;
            EXPECT_NE(after[r].layers[kOther].a_factor, other);  // goes on
          }
          for (const auto& layer : after[r].layers) {
            for (const float value : layer.a_factor) EXPECT_TRUE(std::isfinite(value));
          }
        }
        EXPECT_EQ(holders, 1);
        EXPECT_EQ(others, 1);
      }
    }
  }
}

TEST(Kfac, ALayerThatWasNotUsedKeepsItsFactors) {
  OneLayer job;
  ASSERT_TRUE(job.step({}, {}, {.kl_clip = 0}).ok());
  EXPECT_EQ(job.kfac->save_state().layers[0].a_factor, (std::vector<float>{1, 0, 1}));
  EXPECT_EQ(fallbacks_of(*job.kfac), std::set<std::string>{"fc: no rank had a batch for a factor: the average stays"});
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(job.gradient[i], (static_cast<float>(i) + 1) / 1.001f, 1e-5);
}

TEST(Kfac, SingularFactorsAreHeldByTheDamping) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    OneLayer job(inverse);
    const KfacHyperparameters values{.factor_decay = 0, .damping = 0.5, .kl_clip = 0};
    ASSERT_TRUE(job.step({0, 0}, {0, 0}, values).ok());  // A = G = 0
    for (std::size_t i = 0; i < 4; ++i) {
      const float divisor = inverse == KfacInverse::kEigen ? 0.5f : 0.25f;
      EXPECT_NEAR(job.gradient[i], (static_cast<float>(i) + 1) / divisor, 1e-4);
    }
    EXPECT_TRUE(fallbacks_of(*job.kfac).empty());
  }
}

// A layer of a branch, or an expert: what some ranks did not use counts for nothing, also where it is sent compressed.
TEST(Kfac, FactorsAreMeansOfTheRanksThatUsedTheLayer) {
  const std::vector<KfacLayer> layers = {{.name = "fc", .inputs = 2, .outputs = 2}};
  for (const std::string codec : {"none", "cast(fp16)"}) {
    for (const int users : {1, 2, 4}) {
      KfacOptions options = strategy(KfacStrategy::kMemOpt);
      options.factor_compression = codec;
      const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
        CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(layers, options, &communicator));
        const std::vector<float> x = {2, 4}, d = {1, 2};
        if (communicator.rank() < users) {
          CORTADO_RETURN_IF_ERROR(kfac->add_activations(0, {x.data(), DType::kFloat32, 1}));
          CORTADO_RETURN_IF_ERROR(kfac->add_output_gradients(0, {d.data(), DType::kFloat32, 1}));
        }
        std::vector<float> gradient = {1, 2, 3, 4};
        const KfacGradient address{.weight = gradient.data()};
        CORTADO_RETURN_IF_ERROR(kfac->step({.factor_decay = 0}, {&address, 1}).status());
        const std::vector<float> factor = kfac->save_state().layers[0].a_factor;
        if (factor.empty()) return {};  // not the holder
        EXPECT_EQ(factor, (std::vector<float>{4, 8, 16})) << codec << ", " << users << " ranks";
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// Those of a step that updates no factors are not kept for the next one that does.
TEST(Kfac, BatchesOfAStepWithoutFactorsAreDropped) {
  OneLayer job, expected;
  ASSERT_TRUE(job.step({1, 2}, {3, 4}, {.update_factors = false}).ok());
  for (OneLayer* one : {&job, &expected}) ASSERT_TRUE(one->step({5, 6}, {7, 8}).ok());
  EXPECT_EQ(job.kfac->save_state().layers[0].a_factor, expected.kfac->save_state().layers[0].a_factor);
  EXPECT_EQ(job.kfac->save_state().layers[0].g_factor, expected.kfac->save_state().layers[0].g_factor);
}

// As a saved state, or a lossy codec, might leave it.
TEST(Kfac, IndefiniteFactors) {
  for (const KfacInverse inverse : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    OneLayer job(inverse);
    KfacState state = job.kfac->save_state(/*with_inverses=*/false);
    state.layers[0].a_factor = {-4, 0, 1};
    state.layers[0].g_factor = {1, 0, 1};
    ASSERT_TRUE(job.kfac->load_state({&state, 1}).ok());
    ASSERT_TRUE(
        job.step({}, {}, {.damping = 0.1, .kl_clip = 0, .update_factors = false, .update_inverses = false}).ok());
    if (inverse == KfacInverse::kEigen) {  // -4 counts as 0
      EXPECT_NEAR(job.gradient[0], 1 / 0.1, 1e-3);
      EXPECT_NEAR(job.gradient[1], 2 / 1.1, 1e-3);
      EXPECT_EQ(fallbacks_of(*job.kfac),
                std::set<std::string>{"fc: a factor is indefinite: eigenvalues below 0 count as 0"});
    } else {  // damping 0.1 and 1 are too small, 10 is not
      EXPECT_NEAR(job.gradient[0], 1 / 6.0 / 1.1, 1e-3);
      EXPECT_EQ(fallbacks_of(*job.kfac),
                std::set<std::string>{"fc: a factor is not positive definite: damping was raised"});
    }
  }
}

TEST(Kfac, NonFiniteGradientsOnOneRankAreSeenByAll) {
  for (const KfacOptions& base : strategies()) {
    KfacOptions options = base;
    options.gradients.codec = "topk(density=0.3)";
    options.gradients.use_error_feedback = true;
    const auto run = [&](bool has_bad_step) {
      History history(4);
      const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
        const int rank = communicator.rank();
        CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
        SmallRun small{.options = options, .values = {}};
        for (int step = 0; step < 3; ++step) {
          CORTADO_ASSIGN_OR_RETURN(Gradients after, run_step(*kfac, small, rank, step));
          history[static_cast<std::size_t>(rank)].push_back(std::move(after));
          if (step != 1 || !has_bad_step) continue;
          Gradients bad = gradients_of(kfac->layers(), 4, -1, 99);
          bad[2][5] = std::numeric_limits<float>::infinity();
          const Gradients before = bad;
          KfacHyperparameters values;
          values.update_factors = values.update_inverses = false;
          CORTADO_ASSIGN_OR_RETURN(const KfacOutcome outcome, kfac->step(values, addresses_of(kfac->layers(), &bad)));
          EXPECT_FALSE(outcome.finite);
          EXPECT_EQ(bad, before);
          EXPECT_EQ(kfac->report().non_finite_steps, 1);
        }
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
      return history;
    };
    EXPECT_EQ(run(true), run(false)) << kfac_strategy_name(options.strategy);  // residuals as if it had not been
  }
}

// Between updates too, when with COMM-OPT nothing else of a step travels.
TEST(Kfac, ARankThatLeavesOutAStepIsNamed) {
  for (const KfacOptions& options : strategies()) {
    VirtualClock clock(4);
    LocalGroup group(4, &clock);
    const auto steps = [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
      SmallRun run{.options = options, .values = {}, .factor_update_steps = 10, .inv_update_steps = 10};
      for (int step = 0; step < 3; ++step) {
        if (step == 2 && communicator.rank() == 1) continue;
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
      }
      return {};
    };
    const auto statuses = run_ranks(group, 4, [&](Communicator& communicator) {
      const Status status = steps(communicator);
      clock.leave();
      return status;
    });
    EXPECT_TRUE(statuses[1].ok());
    for (const int rank : {0, 2, 3}) {
      const Status& status = statuses[static_cast<std::size_t>(rank)];
      EXPECT_EQ(status.code(), StatusCode::kTimeout) << kfac_strategy_name(options.strategy);
      EXPECT_NE(status.message().find("ranks that have not started it: 1"), std::string::npos) << status.message();
    }
  }
}

TEST(Kfac, BuffersOfACollectiveWhoseEndWasNotSeenAreKept) {
  SmallRun plain{.world_size = 2, .options = strategy(KfacStrategy::kCommOpt), .values = {}}, encoded = plain;
  encoded.options.factor_compression = "cast(bf16)";
  SmallRun reducing = plain, on_device = plain;
  reducing.reduces = on_device.reduces = on_device.on_device = true;
  for (const auto& [run, late] : {std::pair(plain, 0), {encoded, 0}, {encoded, 1}, {reducing, 0}, {on_device, 0}}) {
    const auto statuses = run_ranks(2, [&run = run, &late = late](Communicator& communicator) -> Status {
      LateCommunicator transport(&communicator);
      transport.be_late(late);
      KfacOptions options = run.options;
      if (run.on_device) options.device = make_emulated_kfac_device();
      CORTADO_ASSIGN_OR_RETURN(auto kfac, Kfac::create(small_job(), options, &transport));
      options.device.reset();
      const Status status = run_step(*kfac, run, communicator.rank(), 0).status();
      kfac.reset();
      EXPECT_GT(transport.go_on(), 0u);
      return status;
    });
    for (const Status& status : statuses) EXPECT_EQ(status.code(), StatusCode::kTimeout) << status.to_string();
  }
}

// A rank that goes on after the step it left out is a step behind the others.
TEST(Kfac, ARankThatIsAStepBehindIsAnErrorOnAll) {
  for (const KfacOptions& options : strategies()) {
    const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
      SmallRun run{.options = options, .values = {}, .factor_update_steps = 3, .inv_update_steps = 3};
      for (int step = 0; step < 4; ++step) {
        if (step == 2 && communicator.rank() == 1) continue;
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), step).status());
      }
      return {};
    });
    for (const Status& status : statuses) {
      EXPECT_NE(status.message().find("step 2: ranks differ in factor_decay, damping"), std::string::npos)
          << kfac_strategy_name(options.strategy) << ": " << status.to_string();
    }
  }
}

TEST(Kfac, WrongArguments) {
  LocalGroup group(1);
  const auto refused = [&](std::vector<KfacLayer> layers, const KfacOptions& options) {
    const Status status = Kfac::create(std::move(layers), options, group.communicator(0)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    return status.message();
  };
  const KfacLayer fc{.name = "fc", .inputs = 2, .outputs = 2};
  EXPECT_NE(refused({fc, fc}, {}).find("two layers have the name fc"), std::string::npos);
  EXPECT_NE(refused({{.name = "fc", .inputs = 0, .outputs = 2}}, {}).find("must be positive"), std::string::npos);
  EXPECT_NE(refused({{.name = "head", .inputs = 2, .outputs = 50000}}, {}).find("a factor of 50000 rows is too large"),
            std::string::npos);
  EXPECT_NE(refused({{.name = "fc", .inputs = 2, .outputs = 2, .groups = 2}}, {}).find("no groups"), std::string::npos);
  EXPECT_NE(refused({fc}, strategy(KfacStrategy::kHybridOpt, 2)).find("must divide the world size 1, got 2"),
            std::string::npos);
  KfacOptions options;
  options.gradients.codec = "acp(rank=2)";
  EXPECT_EQ(Kfac::create({fc}, options, group.communicator(0)).status().code(), StatusCode::kUnsupported);
  options.gradients.codec = "compsoo";
  EXPECT_EQ(Kfac::create({fc}, options, group.communicator(0)).status().code(), StatusCode::kNotFound);

  OneLayer job;
  const std::vector<std::pair<KfacHyperparameters, std::string>> values = {
      {{.factor_decay = 1.5}, "factor_decay must be from 0 to 1, got 1.5"},
      {{.damping = 0}, "damping must be above 0, got 0"},
      {{.damping = std::numeric_limits<double>::quiet_NaN()}, "damping must be above 0"},
      {{.kl_clip = -1}, "kl_clip must be 0 (off) or more, got -1"},
      {{.lr = std::numeric_limits<double>::infinity()}, "lr must be finite"},
  };
  for (const auto& [value, text] : values) {
    const Status status = job.step({}, {}, value).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  }
  EXPECT_EQ(job.gradient, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_FALSE(job.kfac->step({}, {}).ok());
  EXPECT_FALSE(job.kfac->add_activations(7, {}).ok());
  const float one = 1;
  EXPECT_FALSE(job.kfac->add_output_gradients(0, {&one, DType::kFloat32, 1}, 0).ok());
}

TEST(Kfac, RanksMustAgree) {
  const auto run = [](const std::function<void(int, std::vector<KfacLayer>*, KfacOptions*)>& change) {
    return run_ranks(2, [&](Communicator& communicator) -> Status {
      std::vector<KfacLayer> layers = small_job();
      KfacOptions options = strategy(KfacStrategy::kMemOpt);
      change(communicator.rank(), &layers, &options);
      return Kfac::create(layers, options, &communicator).status();
    });
  };
  for (const Status& status : run([](int rank, auto*layers, auto*) { (*layers)[2].inputs += rank; })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("tensor 2 of rank 1 differs"), std::string::npos) << status.message();
  }
  for (const Status& status : run([](int rank, auto*, auto*options) {
         options->strategy = rank == 0 ? KfacStrategy::kMemOpt : KfacStrategy::kDpKfac;
       })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("DP-KFAC"), std::string::npos) << status.message();
  }
  for (const Status& status :
       run([](int rank, auto*, auto*options) { options->gradients.codec = rank == 0 ? "none" : "sign"; })) {
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    EXPECT_NE(status.message().find("sign"), std::string::npos) << status.message();
  }
}

// Two machines of two ranks, each of which has a row of its own.
TEST(Kfac, RowsMustAgree) {
  const std::vector<std::pair<std::string, std::function<void(KfacOptions*)>>> changes = {
      {"gradients quant(bits=8)", [](KfacOptions* options) { options->gradients.codec = "quant(bits=8)"; }},
      {"error feedback", [](KfacOptions* options) { options->gradients.use_error_feedback = true; }},
      {"aggregate 1", [](KfacOptions* options) { options->gradients.aggregate = 1; }},
      {"seed 1", [](KfacOptions* options) { options->gradients.random_seed = 1; }},
      {"factors every 5 steps", [](KfacOptions* options) { options->schedule = "factors every 5 steps"; }},
  };
  for (const auto& [text, change] : changes) {
    const auto statuses = run_ranks(4, [&change = change](Communicator& communicator) -> Status {
      KfacOptions options = strategy(KfacStrategy::kHybridOpt, 2);
      options.gradients.codec = "quant(bits=4)";
      if (communicator.rank() >= 2) change(&options);
      return Kfac::create(small_job(), options, &communicator).status();
    });
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << text;
      EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    }
  }
}

// In every step, whether anything is updated in it or not.
TEST(Kfac, HyperparametersMustAgree) {
  const std::vector<std::function<void(KfacHyperparameters*)>> changes = {
      [](KfacHyperparameters* values) { values->factor_decay = 0.9; },
      [](KfacHyperparameters* values) { values->damping = 2e-3; },
      [](KfacHyperparameters* values) { values->kl_clip = 0; },
      [](KfacHyperparameters* values) { values->lr = 0.2; },
  };
  for (const KfacOptions& options : strategies()) {
    for (const auto& change : changes) {
      const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
        SmallRun run{.options = options, .values = {}, .factor_update_steps = 5, .inv_update_steps = 5};
        CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
        CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), 0).status());
        if (communicator.rank() >= 2) change(&run.values);
        return run_step(*kfac, run, communicator.rank(), 1).status();
      });
      for (const Status& status : statuses) {
        EXPECT_NE(status.message().find("step 1: ranks differ in factor_decay, damping"), std::string::npos)
            << status.to_string();  // their own finding, or what the first that found it says
        // Of the two ranks that are named one has changed, and one has not.
        const std::size_t odd = status.message().find("update: rank "),
                          finder = status.message().find("others than rank ");
        ASSERT_NE(odd, std::string::npos) << status.message();
        ASSERT_NE(finder, std::string::npos) << status.message();
        EXPECT_NE(status.message()[odd + 13] < '2', status.message()[finder + 17] < '2') << status.message();
      }
    }
  }
}

// MEM-OPT inverts without a collective, so ranks would go on with inverses of different steps.
TEST(Kfac, RanksMustUpdateInTheSameSteps) {
  const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = strategy(KfacStrategy::kMemOpt), .values = {}};
    if (communicator.rank() == 3) run.inv_update_steps = 2;
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), 0).status());
    return run_step(*kfac, run, communicator.rank(), 1).status();
  });
  for (const Status& status : statuses) {
    EXPECT_NE(status.message().find("or what they update"), std::string::npos) << status.to_string();
    EXPECT_NE(status.message().find("and updates factors"), std::string::npos) << status.to_string();
  }
}

TEST(Kfac, RanksMustHaveGradientsOfTheSameLayers) {
  for (const KfacOptions& options : strategies()) {
    const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &communicator));
      CORTADO_RETURN_IF_ERROR(add_batches(*kfac, communicator.rank(), 0));
      Gradients gradients = gradients_of(kfac->layers(), 4, -1, 0);
      std::vector<KfacGradient> addresses = addresses_of(kfac->layers(), &gradients);
      if (communicator.rank() == 2) addresses[1] = {};
      return kfac->step({}, addresses).status();
    });
    for (const Status& status : statuses) {
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << kfac_strategy_name(options.strategy);
      EXPECT_NE(status.message().find("which layers have gradients"), std::string::npos) << status.message();
    }
  }
}

// Small damping makes of finite gradients values that have no fp16.
TEST(Kfac, OverflowOfACodecIsANonFiniteStep) {
  const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    SmallRun run{.options = strategy(KfacStrategy::kMemOpt), .values = {}};
    run.options.gradients.codec = "cast(fp16)";
    run.options.gradients.use_error_feedback = true;
    run.values = {.factor_decay = 0, .damping = 1e-9, .kl_clip = 0};
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    CORTADO_ASSIGN_OR_RETURN(const Gradients after, run_step(*kfac, run, communicator.rank(), 0));
    EXPECT_EQ(kfac->report().non_finite_steps, 1);
    for (const auto& of_layer : after) {
      EXPECT_TRUE(std::all_of(of_layer.begin(), of_layer.end(), [](float value) { return std::isfinite(value); }));
    }
    for (const KfacLayerState& layer : kfac->save_state().layers) {
      EXPECT_TRUE(std::all_of(layer.residual.begin(), layer.residual.end(), [](float value) { return value == 0; }));
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// A large inverse has no fp16 either: it travels as it is then, and no step is lost.
TEST(Kfac, InversesThatOverflowTheirCodecTravelAsTheyAre) {
  for (const float scale : {1e-7f, 1.0f}) {  // of the factors: 1e7 and 1 in the inverses
    std::vector<std::vector<float>> inverses(4);
    const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      SmallRun run{.options = strategy(KfacStrategy::kCommOpt), .values = {}};
      run.options.inverse = KfacInverse::kCholesky;
      run.options.factor_compression = "cast(fp16)";
      run.values = {.factor_decay = 1, .damping = 1e-9, .kl_clip = 0};
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
      KfacState state = kfac->save_state(/*with_inverses=*/false);
      for (KfacLayerState& layer : state.layers) {
        for (std::vector<float>* factor : {&layer.a_factor, &layer.g_factor}) {
          for (float& value : *factor) value *= scale;
        }
      }
      CORTADO_RETURN_IF_ERROR(kfac->load_state({&state, 1}).status());
      for (int step = 0; step < 2; ++step) {  // the codec is there again in the second one
        CORTADO_ASSIGN_OR_RETURN(const Gradients after, run_step(*kfac, run, communicator.rank(), step));
        for (const auto& of_layer : after) {
          EXPECT_TRUE(std::all_of(of_layer.begin(), of_layer.end(), [](float value) { return std::isfinite(value); }));
        }
      }
      const KfacReport report = kfac->report();
      EXPECT_EQ(report.non_finite_steps, 0);
      EXPECT_EQ(report.inverses.messages, scale < 1 ? 4 : 2);
      EXPECT_EQ(fallbacks_of(*kfac).contains(": inverses overflow in cast(fp16): sent as they are"), scale < 1);
      for (const KfacLayerState& layer : kfac->save_state().layers) {
        std::vector<float>& own = inverses[static_cast<std::size_t>(communicator.rank())];
        own.insert(own.end(), layer.a_inverse.begin(), layer.a_inverse.end());
      }
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    for (const std::vector<float>& own : inverses) EXPECT_EQ(own, inverses[0]);
    EXPECT_NEAR(inverses[0][0] * scale, 1.0f, 0.02f);
  }
}

// ---- saving and loading --------------------------------------------------------------------------------------------

SmallRun saved_run(const KfacOptions& options) {
  SmallRun run{.options = options, .values = {}};
  run.options.gradients.codec = "compso(bound=0.05)";
  run.options.gradients.use_error_feedback = true;
  run.inv_update_steps = 4;
  return run;
}

TEST(Kfac, ResumesBitForBit) {
  constexpr int kSteps = 6, kSavedAfter = 3;  // between two updates of the inverses
  for (const KfacOptions& options : strategies()) {
    const SmallRun run = saved_run(options);
    const History whole = run_job(run, kSteps);
    const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
      const int rank = communicator.rank();
      CORTADO_ASSIGN_OR_RETURN(const auto first, Kfac::create(small_job(), run.options, &communicator));
      for (int step = 0; step < kSavedAfter; ++step) {
        CORTADO_RETURN_IF_ERROR(run_step(*first, run, rank, step).status());
      }
      const KfacState state = first->save_state();
      CORTADO_ASSIGN_OR_RETURN(const auto second, Kfac::create(small_job(), run.options, &communicator));
      CORTADO_ASSIGN_OR_RETURN(const std::string warning, second->load_state({&state, 1}));
      EXPECT_EQ(warning, "");
      EXPECT_EQ(second->steps(), kSavedAfter);
      for (int step = kSavedAfter; step < kSteps; ++step) {
        CORTADO_ASSIGN_OR_RETURN(const Gradients after, run_step(*second, run, rank, step));
        EXPECT_EQ(after, whole[static_cast<std::size_t>(rank)][static_cast<std::size_t>(step)]);
      }
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// States of four ranks, loaded by two with another strategy: all factors are found, inverses are computed anew.
TEST(Kfac, StatesOfAnotherWorldSize) {
  for (const bool gives_all : {true, false}) {
    std::vector<KfacState> states(4);
    const SmallRun run = saved_run(strategy(KfacStrategy::kMemOpt));
    run_job(run, 4, [&](Kfac& kfac, int rank) { states[static_cast<std::size_t>(rank)] = kfac.save_state(false); });
    std::vector<std::string> warnings(2);
    const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      SmallRun small = run;
      small.world_size = 2;
      small.options.strategy = KfacStrategy::kCommOpt;
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), small.options, &communicator));
      CORTADO_ASSIGN_OR_RETURN(warnings[static_cast<std::size_t>(communicator.rank())],
                               kfac->load_state({states.data(), gives_all ? 4u : 1u}));
      std::size_t held = 0;
      const KfacState now = kfac->save_state();
      for (std::size_t i = 0; i < now.layers.size(); ++i) {
        for (const KfacState& state : states) {
          const std::vector<float>& before = state.layers[i].a_factor;
          if (before.empty() || now.layers[i].a_factor.empty()) continue;
          ++held;
          EXPECT_EQ(now.layers[i].a_factor == before, gives_all || &state == &states[0]);
        }
      }
      EXPECT_GT(held, 0u);
      small.factor_update_steps = small.inv_update_steps = 100;
      return run_step(*kfac, small, communicator.rank(), 5).status();
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    const std::string all = warnings[0] + warnings[1];
    EXPECT_EQ(all.empty(), gives_all);
    EXPECT_EQ(all.find("world size 4, loaded with 2); they begin anew") == std::string::npos, gives_all) << all;
  }
}

// What owners of four ranks still owe, owners of two take over.
TEST(Kfac, ResidualsFindTheirNewOwners) {
  std::vector<KfacState> states(4), after(2);
  const SmallRun run = saved_run(strategy(KfacStrategy::kMemOpt));
  run_job(run, 4, [&](Kfac& kfac, int rank) { states[static_cast<std::size_t>(rank)] = kfac.save_state(false); });
  const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    CORTADO_RETURN_IF_ERROR(kfac->load_state(states).status());
    after[static_cast<std::size_t>(communicator.rank())] = kfac->save_state(false);
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  const auto residual_of = [](const std::vector<KfacState>& all, std::size_t layer) {
    std::vector<std::vector<float>> found;
    for (const KfacState& state : all) {
      if (!state.layers[layer].residual.empty()) found.push_back(state.layers[layer].residual);
    }
    return found;
  };
  for (std::size_t i = 0; i < small_job().size(); ++i) {
    const auto owed = residual_of(states, i);
    ASSERT_EQ(owed.size(), 1u);
    EXPECT_NE(*std::max_element(owed[0].begin(), owed[0].end()), 0.0f);
    EXPECT_EQ(residual_of(after, i), owed);
  }
}

// What the state lacks begins anew, even where much was learnt before.
TEST(Kfac, FactorsThatNoStateHasBeginAnew) {
  const auto statuses = run_ranks(4, [&](Communicator& communicator) -> Status {
    const SmallRun run = saved_run(strategy(KfacStrategy::kMemOpt));
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    const KfacState fresh = kfac->save_state();
    CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, communicator.rank(), 0).status());
    KfacState saved = kfac->save_state();
    const KfacState trained = saved;
    for (KfacLayerState& layer : saved.layers) layer.a_factor.clear();
    CORTADO_RETURN_IF_ERROR(kfac->load_state({&saved, 1}).status());
    const KfacState now = kfac->save_state();
    for (std::size_t i = 0; i < now.layers.size(); ++i) {
      EXPECT_EQ(now.layers[i].a_factor, fresh.layers[i].a_factor);
      EXPECT_EQ(now.layers[i].g_factor, trained.layers[i].g_factor);
      EXPECT_TRUE(trained.layers[i].a_factor.empty() || trained.layers[i].a_factor != fresh.layers[i].a_factor);
    }
    return run_step(*kfac, run, communicator.rank(), 1).status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Kfac, StatesThatDoNotFit) {
  OneLayer job;
  KfacState state = job.kfac->save_state(), later = state;
  later.step = 3;
  EXPECT_EQ(job.kfac->load_state({}).status().code(), StatusCode::kInvalidArgument);
  const std::vector<KfacState> both = {state, later};
  EXPECT_EQ(job.kfac->load_state(both).status().code(), StatusCode::kMismatch);
  KfacState damaged = state;
  damaged.layers[0].g_factor[0] = kNan;
  EXPECT_EQ(job.kfac->load_state({&damaged, 1}).status().message(), "layer fc: the saved state has an Inf or NaN");
  damaged = state;
  damaged.layers[0].a_inverse[0] = kNan;  // is computed anew
  EXPECT_TRUE(job.kfac->load_state({&damaged, 1}).ok());
  EXPECT_TRUE(job.kfac->save_state().layers[0].a_inverse.empty());
  EXPECT_TRUE(job.kfac->load_state({&state, 1}).ok());
  state.layers[0].a_factor.push_back(1);
  const Status status = job.kfac->load_state({&state, 1}).status();
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("layer fc: the saved state has 4 values where 3 are expected"), std::string::npos);
}

// All ranks refuse it and none has changed, whichever of them it does not fit.
TEST(Kfac, AStateThatDoesNotFitOnOneRankChangesNone) {
  const SmallRun run = saved_run(strategy(KfacStrategy::kHybridOpt, 2));
  const std::vector<std::pair<std::string, std::function<void(KfacLayerState*)>>> damages = {
      {"layer head: the saved state has", [](KfacLayerState* layer) { layer->g_inverse.push_back(0); }},
      {"layer head: the saved residual has", [](KfacLayerState* layer) { layer->residual.push_back(0); }},
  };
  for (const auto& [text, damage] : damages) {
    const auto statuses = run_ranks(4, [&text = text, &damage = damage, &run](Communicator& communicator) -> Status {
      const int rank = communicator.rank();
      CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
      for (int step = 0; step < 2; ++step) CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, rank, step).status());
      const KfacState saved = kfac->save_state();
      CORTADO_RETURN_IF_ERROR(run_step(*kfac, run, rank, 2).status());
      const KfacState before = kfac->save_state();
      KfacState damaged = saved;
      const bool is_damaged = kfac->placements().back().column == kfac->grid().column_of(rank) && rank < 2;
      if (is_damaged) damage(&damaged.layers.back());
      const Status status = kfac->load_state({&damaged, 1}).status();
      EXPECT_EQ(status.code(), StatusCode::kMismatch) << status.to_string();
      EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
      EXPECT_EQ(status.message().starts_with("load_state: rank "), !is_damaged) << status.message();
      const KfacState after = kfac->save_state();
      EXPECT_EQ(after.step, before.step);
      for (std::size_t i = 0; i < after.layers.size(); ++i) {
        EXPECT_EQ(after.layers[i].a_factor, before.layers[i].a_factor);
        EXPECT_EQ(after.layers[i].a_inverse, before.layers[i].a_inverse);
        EXPECT_EQ(after.layers[i].residual, before.layers[i].residual);
      }
      CORTADO_RETURN_IF_ERROR(kfac->load_state({&saved, 1}).status());
      return run_step(*kfac, run, rank, 2).status();
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// Those of a state that was saved without are computed in the next step; saved again before, they are not there either.
TEST(Kfac, InversesThatAreStillToBeComputedAreNotSaved) {
  Gradients of_first;
  for (const bool saves_again : {false, true}) {
    SmallRun run = saved_run(strategy(KfacStrategy::kMemOpt));
    run.world_size = 2;
    run.factor_update_steps = run.inv_update_steps = 100;
    std::vector<KfacState> states(2);
    run_job(run, 2, [&](Kfac& kfac, int rank) { states[static_cast<std::size_t>(rank)] = kfac.save_state(false); });
    std::vector<Gradients> after(2);
    const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      const auto make = [&] { return Kfac::create(small_job(), run.options, &communicator).value(); };
      auto kfac = make();
      CORTADO_RETURN_IF_ERROR(kfac->load_state(states).status());
      const KfacState again = kfac->save_state();
      EXPECT_TRUE(again.layers[0].a_inverse.empty() && again.layers[0].g_eigenvalues.empty());
      if (saves_again) {
        kfac = make();
        CORTADO_RETURN_IF_ERROR(kfac->load_state({&again, 1}).status());
      }
      CORTADO_ASSIGN_OR_RETURN(after[rank], run_step(*kfac, run, communicator.rank(), 2));
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    if (!saves_again) of_first = after[0];
    EXPECT_EQ(after[0], of_first);
  }
}

// Nobody may compute them alone: they are sent.
TEST(Kfac, InversesThatOneStateLacksAreComputedByAll) {
  SmallRun run = saved_run(strategy(KfacStrategy::kCommOpt));
  run.world_size = 2;
  run.factor_update_steps = run.inv_update_steps = 100;
  std::vector<KfacState> states(2);
  run_job(run, 2, [&](Kfac& kfac, int rank) { states[static_cast<std::size_t>(rank)] = kfac.save_state(rank == 0); });
  std::vector<Gradients> after(2);
  const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
    CORTADO_RETURN_IF_ERROR(kfac->load_state({&states[rank], 1}).status());
    CORTADO_ASSIGN_OR_RETURN(after[rank], run_step(*kfac, run, communicator.rank(), 2));
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(after[0], after[1]);
}

TEST(Kfac, AStateWhoseLoadingIsCutOffEndsIt) {
  LocalGroup group(1);
  LateGather transport(group.communicator(0));
  const auto kfac = Kfac::create(small_job(), strategy(KfacStrategy::kMemOpt), &transport).value();
  const SmallRun run{.world_size = 1, .options = strategy(KfacStrategy::kMemOpt), .values = {}};
  ASSERT_TRUE(run_step(*kfac, run, 0, 0).ok());
  const KfacState state = kfac->save_state();
  transport.is_late = true;
  EXPECT_EQ(kfac->load_state({&state, 1}).status().code(), StatusCode::kTimeout);
  transport.is_late = false;
  EXPECT_EQ(run_step(*kfac, run, 0, 1).status().code(), StatusCode::kTimeout);
}

// By the one that fails, which is alive and says nothing more.
TEST(Kfac, PeersHearOfARankThatCanNotGoOn) {
  KfacOptions options = strategy(KfacStrategy::kMemOpt);
  options.timeout_s = 60;
  SmallRun run{.world_size = 2, .options = options, .values = {}};
  std::promise<void> others_ended;
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    // Rank 1 alone can't start what is in a step.
    class Failing final : public PassingCommunicator {
     public:
      using PassingCommunicator::PassingCommunicator;
      Result<WorkId> start(const CollectiveCall& call) override {
        if (fails) return make_error(StatusCode::kInternal, "no buffers");
        return PassingCommunicator::start(call);
      }
      bool fails = false;
    } transport(&communicator);
    CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), options, &transport));
    transport.fails = communicator.rank() == 1;
    const Status status = run_step(*kfac, run, communicator.rank(), 0).status();
    if (communicator.rank() == 0) {
      others_ended.set_value();
      EXPECT_EQ(status.code(), StatusCode::kPeerFailed) << status.to_string();
    } else {
      EXPECT_EQ(status.code(), StatusCode::kInternal) << status.to_string();
      EXPECT_EQ(others_ended.get_future().wait_for(std::chrono::seconds(90)), std::future_status::ready);
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

// Eigenvectors are no inverses, and the other way round: as if the state had been saved without.
TEST(Kfac, InversesOfAnotherKindAreComputedAnew) {
  for (const KfacInverse saved_as : {KfacInverse::kEigen, KfacInverse::kCholesky}) {
    const KfacInverse loaded_as = saved_as == KfacInverse::kEigen ? KfacInverse::kCholesky : KfacInverse::kEigen;
    std::vector<Gradients> after;
    for (const bool with_inverses : {true, false}) {
      SmallRun run = saved_run(strategy(KfacStrategy::kMemOpt));
      run.world_size = 2;
      run.options.inverse = saved_as;
      std::vector<KfacState> states(2);
      run_job(run, 2,
              [&](Kfac& kfac, int rank) { states[static_cast<std::size_t>(rank)] = kfac.save_state(with_inverses); });
      run.options.inverse = loaded_as;
      std::vector<Gradients> one(2);
      const auto statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        CORTADO_ASSIGN_OR_RETURN(const auto kfac, Kfac::create(small_job(), run.options, &communicator));
        CORTADO_RETURN_IF_ERROR(kfac->load_state(states).status());
        const auto rank = static_cast<std::size_t>(communicator.rank());
        CORTADO_ASSIGN_OR_RETURN(one[rank], run_step(*kfac, run, communicator.rank(), 2));
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
      after.push_back(one[0]);
    }
    EXPECT_EQ(after[0], after[1]) << (saved_as == KfacInverse::kEigen ? "eigenvectors" : "inverses");
  }
}

}  // namespace
}  // namespace cortado

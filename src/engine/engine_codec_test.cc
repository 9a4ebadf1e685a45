// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Training under ordinary codecs: against a plain implementation of what each rank should get, and what only codecs
// have (votes, momentum correction, sizes that vary, specifications). What every method promises is in engine_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "core/finite.h"
#include "core/float16.h"
#include "core/hash.h"
#include "core/sanitized.h"
#include "core/streaming.h"
#include "engine/engine_testing.h"
#include "engine/trained_codec.h"

namespace cortado {
namespace {

using Feedback = EngineOptions::Feedback;

// Error feedback as it is written, one tensor of all ranks at a time. The numbers that random codecs draw are those of
// the engine: by step and tensor, and by rank unless the values are summed on the way.
class Reference {
 public:
  Reference(const Training& training, std::size_t tensor)
      : trained_(make_trained_codec(training.options).value()),
        shape_(training.tensors[tensor]),
        momentum_(static_cast<float>(training.options.momentum)),
        ranks_(static_cast<std::size_t>(training.world_size)),
        residuals_(ranks_, std::vector<float>(elems())),
        velocities_(residuals_) {}

  // The mean that every rank should get.
  std::vector<float> step(const std::vector<std::vector<float>>& gradients) {
    std::vector<std::vector<float>> decoded;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      std::vector<float> input = gradients[rank];
      if (trained_.has_feedback()) {
        for (std::size_t i = 0; i < elems(); ++i) {
          float& velocity = velocities_[rank][i];
          velocity = trained_.feedback == Feedback::kDgc ? momentum_ * velocity + input[i] : input[i];
          input[i] = residuals_[rank][i] + velocity;
        }
      }
      decoded.push_back(round_trip(input, rank));
      for (std::size_t i = 0; i < elems(); ++i) {
        residuals_[rank][i] = input[i] - decoded.back()[i];
        if (decoded.back()[i] != 0) velocities_[rank][i] = 0;
      }
    }
    ++step_;
    const float scale = static_cast<float>(1.0 / static_cast<double>(ranks_));
    std::vector<float> mean(elems());
    for (std::size_t i = 0; i < elems(); ++i) {
      float sum = 0, votes = 0, magnitudes = 0;
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        const float value = decoded[rank][i];
        sum = rank == 0 ? value : sum + value;
        votes += static_cast<float>((value > 0) - (value < 0));
        magnitudes += std::fabs(value);
      }
      const float vote = static_cast<float>((votes > 0) - (votes < 0)) * magnitudes;
      mean[i] = (trained_.codec->is_majority_vote() ? vote : sum) * scale;
    }
    return mean;
  }

 private:
  std::size_t elems() const { return static_cast<std::size_t>(shape_.rows * shape_.cols); }

  std::vector<float> round_trip(const std::vector<float>& input, std::size_t rank) const {
    const Codec& codec = *trained_.codec;
    const std::int64_t rows = shape_.rows, cols = shape_.cols;
    std::vector<std::byte> payload(codec.max_payload_bytes(rows, cols, DType::kFloat32));
    std::vector<std::byte> scratch(codec.scratch_bytes(rows, cols, DType::kFloat32));
    const EncodeContext context{
        .seed = trained_.is_summed ? 0 : 0xbf58476d1ce4e5b9u * rank, .step = step_, .tensor = fnv1a_64(shape_.name)};
    payload.resize(codec.encode({input.data(), DType::kFloat32, rows, cols}, context, payload, scratch).value());
    std::vector<float> output(input.size());
    const Status status = codec.decode(payload, {output.data(), DType::kFloat32, rows, cols}, scratch);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return output;
  }

  TrainedCodec trained_;
  EngineTensor shape_;
  float momentum_;
  std::size_t ranks_;
  std::uint64_t step_ = 0;
  std::vector<std::vector<float>> residuals_, velocities_;  // by rank
};

class AnyCodec : public testing::TestWithParam<const char*> {};

void expect_what_the_reference_delivers(const Training& training) {
  const History run = train(training);
  expect_replicas_agree(run);
  std::vector<std::vector<Gradients>> gradients(static_cast<std::size_t>(training.steps));  // by step and rank
  for (std::int64_t step = 0; step < training.steps; ++step) {
    for (int rank = 0; rank < training.world_size; ++rank) {
      gradients[static_cast<std::size_t>(step)].push_back(made_up_gradients(training.tensors, rank, step));
    }
  }
  for (std::size_t t = 0; t < training.tensors.size(); ++t) {
    if (training.tensors[t].dimensions < 2 || training.tensors[t].rows == 0) continue;
    Reference reference(training, t);
    for (std::int64_t step = 0; step < training.steps; ++step) {
      std::vector<std::vector<float>> of_tensor;
      for (const Gradients& of_rank : gradients[static_cast<std::size_t>(step)]) of_tensor.push_back(of_rank[t]);
      EXPECT_EQ(run.delivered[0][static_cast<std::size_t>(step)][t], reference.step(of_tensor))
          << training.tensors[t].name << " step " << step;
    }
  }
}

TEST_P(AnyCodec, DeliversWhatThePlainImplementationDoes) {
  for (const int world_size : {2, 3, 5}) {
    if (kSanitized && world_size != 3 && GetParam() != std::string_view("topk(density=0.1)")) continue;
    for (const bool keeps : {false, true}) {
      Training training{.options = coded(GetParam()), .world_size = world_size, .steps = 5};
      training.context.keeps_local_gradients = keeps;
      training.options.bucket_cap_mib = keeps ? EngineOptions::kAutoBucketCap : 0;
      expect_what_the_reference_delivers(training);
    }
  }
}

// A mean of more than kLeastStreamedGradientBytes goes past the caches: added up while it is decoded, or not.
TEST(EngineCodec, LargeMeansAreWhatThePlainImplementationDelivers) {
  for (const char* spec : {"quant(bits=4)", "sign(block=256)"}) {
    Training training{.tensors = {{.name = "large", .rows = 409, .cols = 321}}, .options = coded(spec), .steps = 2};
    ASSERT_GE(training.tensors[0].elems() * std::int64_t{4}, kLeastStreamedGradientBytes);
    expect_what_the_reference_delivers(training);
  }
}

TEST_P(AnyCodec, ThreadsChangeNothing) {
  Training training{.options = coded(GetParam()), .steps = 4};
  const History one = train(training);
  training.options.threads = 3;
  const History three = train(training);
  for (std::size_t step = 0; step < 4; ++step) {
    EXPECT_TRUE(same_bits(one.delivered[1][step], three.delivered[1][step])) << step;
  }
}

TEST_P(AnyCodec, ZeroGradientsStayZero) {
  if (std::string(GetParam()).find("scale=none") != std::string::npos) GTEST_SKIP() << "its zeros are ones";
  Training training{.options = coded(GetParam()), .world_size = 2, .steps = 3};
  training.gradients = [&](int, std::int64_t) {
    Gradients gradients = made_up_gradients(training.tensors, 0, 0);
    for (std::vector<float>& tensor : gradients) std::fill(tensor.begin(), tensor.end(), 0.0f);
    return gradients;
  };
  const History run = train(training);
  for (const Gradients& step : run.delivered[1])
    for (const std::vector<float>& tensor : step)
      for (const float value : tensor) EXPECT_EQ(value, 0.0f);
}

TEST_P(AnyCodec, ItsSpecificationMakesEqualOptions) {
  const EngineOptions options = EngineOptions::parse(GetParam()).value();
  const EngineOptions again = EngineOptions::parse(options.to_spec()).value();
  EXPECT_EQ(again.to_spec(), options.to_spec());
  EXPECT_EQ(again.codec, options.codec);
  EXPECT_EQ(again.feedback, options.feedback);
  EXPECT_EQ(again.momentum, options.momentum);
}

INSTANTIATE_TEST_SUITE_P(
    Engine, AnyCodec,
    testing::Values("sign(scale=mean_abs)", "sign(scale=two_means)", "sign(scale=mean_abs, vote=majority)",
                    "sign(scale=none, vote=majority)", "topk(density=0.1)", "topk(density=0.05, values=fp16)",
                    "topk(density=0.1, feedback=dgc)", "topk(density=0.05, feedback=dgc, momentum=0.5, rollback=exact)",
                    "topk(density=0.1, feedback=none)", "topk(density=0.2) | sign(scale=mean_abs)",
                    "topk(density=0.5) | topk(density=0.2) | cast(bf16)", "float_rans", "float_rans(feedback=residual)",
                    "topk(density=0.3) | float_rans", "randk(density=0.2)", "randk(density=0.2, block=7)",
                    "randk(density=0.2, scale=unbiased)", "randk(density=0.2, feedback=dgc)",
                    "randk(density=0.5) | topk(density=0.3) | quant(bits=4)", "quant(bits=4)",
                    "quant(bits=4, feedback=none)", "quant(error=0.3, round=dead_zone, coder=rans)", "fp8(e4m3)",
                    "quant(bits=4, round=stochastic)", "quant(bits=3, round=dither)",
                    "quant(bits=8, round=dead_zone) | rans", "topk(density=0.2) | quant(bits=4) | rans",
                    "compso(bound=0.004)", "topk(density=0.5) | compso(bound=0.1)"),
    [](const auto& info) {
      std::string name;
      for (const char c : std::string(info.param)) name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

// A new row needs nothing here: it trains, or says why it can't.
TEST(EveryRow, TrainsByItsNameAlone) {
  for (const CodecRow& row : codec_registry()) {
    SCOPED_TRACE(row.name);
    const Result<EngineOptions> options = EngineOptions::parse(row.name);
    if (!options.ok()) {
      EXPECT_EQ(std::string(row.name), "rans");
      EXPECT_NE(options.status().message().find("float_rans"), std::string::npos) << options.status().message();
      continue;
    }
    if (options.value().method != EngineOptions::Method::kCodec) continue;  // engine_test.cc
    const Training training{.options = coded(row.name), .world_size = 2, .steps = 3};
    const History run = train(training);
    expect_replicas_agree(run);
    EXPECT_TRUE(run.reports[0].tensors[1].compressed);
    if (make_trained_codec(options.value()).value().has_feedback()) expect_telescoping(training, run, 2e-6);
  }
}

// ---- what is said
// ----------------------------------------------------------------------------------------------------

TEST(CodecOptions, ParametersOfTheEngineStandWithThoseOfTheFirstCodec) {
  const EngineOptions options = EngineOptions::parse(
                                    "topk(0.05, start_step=7, dense=[a, b*], bucket_cap_mib=3, threads=2, min_elems=9, "
                                    "min_compression_rate=1.5, rollback=exact) | sign")
                                    .value();
  EXPECT_EQ(options.method, EngineOptions::Method::kCodec);
  EXPECT_EQ(options.start_step, 7);
  EXPECT_EQ(options.dense, (std::vector<std::string>{"a", "b*"}));
  EXPECT_EQ(options.bucket_cap_mib, 3);
  EXPECT_EQ(options.threads, 2);
  EXPECT_EQ(options.min_elems, 9);
  EXPECT_EQ(options.min_compression_rate, 1.5);
  EXPECT_EQ(options.rollback, EngineOptions::Rollback::kExact);
  EXPECT_EQ(options.to_spec(),
            "topk(density=0.05, min_compression_rate=1.5, min_elems=9, start_step=7, dense=[a, b*], rollback=exact, "
            "bucket_cap_mib=3, threads=2) | sign(scale=mean_abs)");
  EXPECT_EQ(options.results_spec().find("threads"), std::string::npos);
  EXPECT_EQ(EngineOptions::parse("topk").value().results_spec(),
            EngineOptions::parse("topk(density=0.01, select=exact)").value().results_spec());
}

TEST(CodecOptions, WhatCanNotTrainIsRefusedByName) {
  const auto expect_refused = [](const char* spec, std::vector<const char*> words) {
    const Status status = EngineOptions::parse(spec).status();
    ASSERT_FALSE(status.ok()) << spec;
    for (const char* word : words) EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  expect_refused("gzip", {"unknown codec \"gzip\"", "known are none, cast"});
  expect_refused("topk | gzip", {"unknown codec \"gzip\""});
  expect_refused("topk(densty=0.1)", {"no parameter \"densty\"", "density", "start_step", "feedback"});
  expect_refused("topk(density=0.1) | sign(start_step=3)", {"no parameter \"start_step\"", "sign takes"});
  expect_refused("topk(feedback=some)", {"feedback", "residual", "dgc", "some"});
  expect_refused("topk(momentum=0.5)", {"momentum", "feedback=dgc"});
  expect_refused("topk(feedback=residual, momentum=0.5)", {"momentum", "feedback=dgc"});
  expect_refused("topk(feedback=dgc, use_error_feedback=false)", {"feedback=dgc", "use_error_feedback"});
  expect_refused("sign(feedback=dgc)", {"feedback=dgc", "topk"});
  expect_refused("acp(rank=4) | sign", {"acp", "sign"});
  expect_refused("topk(wire=bf16)", {"no parameter \"wire\""});
  expect_refused("rans", {"\"rans\" can't train", "uint8", "float_rans"});
}

TEST(CodecOptions, FeedbackIsChosenByWhatTheCodecLoses) {
  const auto feedback_of = [](const char* spec) {
    return make_trained_codec(EngineOptions::parse(spec).value()).value().feedback;
  };
  EXPECT_EQ(feedback_of("topk"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("sign"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("topk | sign"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("randk"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("randk(scale=unbiased)"), Feedback::kNone) << "no contraction";
  EXPECT_EQ(feedback_of("randk | topk | quant"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("float_rans"), Feedback::kNone);
  EXPECT_EQ(feedback_of("topk | float_rans"), Feedback::kResidual);
  EXPECT_EQ(feedback_of("sign(vote=majority)"), Feedback::kNone);
  EXPECT_EQ(feedback_of("sign(scale=none)"), Feedback::kNone) << "no contraction";
  EXPECT_EQ(feedback_of("topk(feedback=none)"), Feedback::kNone);
  EXPECT_EQ(feedback_of("topk(use_error_feedback=false)"), Feedback::kNone);
  EXPECT_EQ(feedback_of("sign(vote=majority, feedback=residual)"), Feedback::kResidual);
}

// ---- sizes
// -----------------------------------------------------------------------------------------------------------

// Values that entropy coding makes small, of exponents that repeat; in every fourth step values that it can't.
Gradients repetitive(const std::vector<EngineTensor>& tensors, int rank, std::int64_t step) {
  Gradients gradients = made_up_gradients(tensors, rank, step);
  for (std::vector<float>& tensor : gradients) {
    for (std::size_t i = 0; i < tensor.size(); ++i) {
      tensor[i] = step % 4 == 3 ? std::ldexp(tensor[i], static_cast<int>(i * 7919 % 101) - 50) : 1.0f;
    }
  }
  return gradients;
}

// Sums need no gather, and no more bytes than the values have.
TEST(CodecSizes, ValuesAtSharedPlacesAreSummed) {
  Training training{.options = coded("randk(density=0.1)"), .world_size = 3, .steps = 2};
  training.tensors = {{.name = "w", .rows = 100, .cols = 50}};
  const History run = train(training);
  expect_replicas_agree(run);
  EXPECT_EQ(run.logs[0].back(), (RecordedCollective{"all_reduce", DType::kFloat32, 500 + 3})) << "and three flags";
  EXPECT_EQ(run.reports[0].payload_bytes, 4 * 503);
  EXPECT_EQ(run.reports[0].tensors[0].payload_bytes, 4 * 500);
}

TEST(CodecSizes, WhatDoesNotFitTravelsInARestOnAllRanks) {
  for (const bool keeps : {false, true}) {
    Training training{.options = coded("float_rans"), .world_size = 3, .steps = 8};
    training.tensors = {{.name = "a", .rows = 300, .cols = 70}, {.name = "b", .rows = 500, .cols = 30}};
    training.gradients = [&](int rank, std::int64_t step) { return repetitive(training.tensors, rank, step); };
    training.options.bucket_cap_mib = 1000;  // one message
    training.context.keeps_local_gradients = keeps;
    const History run = train(training);
    expect_replicas_agree(run);
    // Two small gathers set the engine up; then one a step, but two in steps 3 and 7.
    std::vector<std::int64_t> bytes;
    for (const RecordedCollective& collective : run.logs[0]) bytes.push_back(collective.elems);
    ASSERT_EQ(bytes.size(), 2u + 10u) << testing::PrintToString(bytes);
    const std::vector<std::int64_t> steps(bytes.begin() + 2, bytes.end());
    EXPECT_GT(steps[0], steps[1]) << "room for all there can be, then for what there was";
    EXPECT_EQ(steps[1], steps[2]);
    EXPECT_EQ(steps[3], steps[2]);
    EXPECT_GT(steps[4], 1000) << "the rest";
    EXPECT_GT(steps[5], steps[3]) << "room for what there was";
    EXPECT_EQ(run.reports[0].payload_bytes, steps[8] + steps[9]);
    EXPECT_EQ(run.reports[0].messages, 2);
    Reference reference(training, 0);
    for (std::int64_t step = 0; step < 8; ++step) {
      std::vector<std::vector<float>> gradients;
      for (int rank = 0; rank < 3; ++rank) gradients.push_back(training.gradients(rank, step)[0]);
      EXPECT_EQ(run.delivered[0][static_cast<std::size_t>(step)][0], reference.step(gradients)) << step;
    }
  }
}

TEST(CodecSizes, TheReportHasBytesRatioAndErrorOfEveryTensor) {
  Training training{.options = coded("topk(density=0.1)"), .world_size = 2, .steps = 3};
  training.options.min_elems = 1000;
  training.options.min_compression_rate = EngineOptions::kAutoRate;
  training.options.dense = {"conv*"};
  const EngineReport report = train(training).reports[0];
  EXPECT_EQ(report.spec.find("topk(density=0.1, min_elems=1000, start_step=0, dense=[conv*]"), 0u) << report.spec;
  std::vector<std::string> found;
  for (const Fallback& fallback : report.fallbacks) found.push_back(fallback.tensor + ":" + fallback.reason);
  EXPECT_EQ(found, (std::vector<std::string>{"embedding:min_elems", "first.bias:1-D", "conv.weight:dense=",
                                             "empty:empty", "tiny.weight:min_elems", "last.bias:1-D"}));
  std::int64_t sent = 0;
  for (const TensorReport& tensor : report.tensors) {
    sent += tensor.payload_bytes;
    const bool compressed = tensor.name == "first.weight" || tensor.name == "last.weight";
    EXPECT_EQ(tensor.compressed, compressed) << tensor.name;
    if (!compressed) continue;
    EXPECT_LT(tensor.payload_bytes * 4, tensor.elems * 4);
    EXPECT_GT(tensor.relative_l2_error, 0.3);
    EXPECT_LT(tensor.relative_l2_error, 1.0);
  }
  EXPECT_GE(report.payload_bytes, sent);
  EXPECT_LT(report.payload_bytes, sent + 200) << "headers, flags and margins";
  EXPECT_GT(report.residual_bytes, 0);
}

// A 1 % sparsifier of six values would send more than it saves.
TEST(CodecSizes, WhatDoesNotGetSmallerStaysDense) {
  Training training{.options = coded("topk(density=1)"), .world_size = 2, .steps = 2};
  training.options.min_compression_rate = EngineOptions::kAutoRate;
  const History run = train(training);
  for (const TensorReport& tensor : run.reports[0].tensors) EXPECT_FALSE(tensor.compressed) << tensor.name;
  std::int64_t by_rate = 0;
  for (const Fallback& fallback : run.reports[0].fallbacks) by_rate += fallback.reason == "min_compression_rate";
  EXPECT_EQ(by_rate, 5);
}

// ---- dtypes
// ----------------------------------------------------------------------------------------------------------

// Gradients of 16 bits under feedback (float32 is encoded) and without (the codec gets them as they are).
TEST(CodecDtypes, NarrowGradientsGetTheMeanInTheirOwnDtype) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const auto narrow = [&](float x) { return dtype == DType::kFloat16 ? float_to_fp16(x) : float_to_bf16(x); };
    const auto wide = [&](std::uint16_t x) { return dtype == DType::kFloat16 ? fp16_to_float(x) : bf16_to_float(x); };
    for (const char* spec : {"topk(density=1)", "topk(density=1, feedback=none)"}) {
      const std::vector<EngineTensor> tensors = {{.name = "w", .dtype = dtype, .rows = 20, .cols = 30}};
      const std::vector<Status> statuses = run_ranks(3, [&](Communicator& communicator) -> Status {
        std::unique_ptr<Engine> engine = Engine::create(tensors, coded(spec), &communicator).value();
        std::vector<std::uint16_t> gradient;
        std::vector<float> mean(600);
        for (std::size_t i = 0; i < 600; ++i) gradient.push_back(narrow(made_up_value(communicator.rank(), 0, 0, i)));
        for (int rank = 0; rank < 3; ++rank)
          for (std::size_t i = 0; i < 600; ++i) mean[i] += wide(narrow(made_up_value(rank, 0, 0, i)));
        const std::vector<Gradient> all = {{0, gradient.data()}};
        for (const Status& status : {engine->begin_step({}), engine->submit(all), engine->finish_step().status()})
          if (!status.ok()) return status;
        for (std::size_t i = 0; i < 600; ++i) EXPECT_EQ(gradient[i], narrow(mean[i] * (1.0f / 3.0f))) << spec;
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// Payloads of fp16 hold no 7e4: the step is none, and nothing is owed that can't be paid.
TEST(CodecDtypes, WhatOverflowsInItsPayloadIsAStepThatNeverWas) {
  const std::vector<EngineTensor> tensors = {{.name = "w", .rows = 1, .cols = 64, .dimensions = 2}};
  for (const char* spec : {"topk(density=0.25, values=fp16)", "topk(density=0.25, values=fp16, rollback=exact)",
                           "topk(density=0.25) | cast(fp16)"}) {
    for (const bool keeps : {true, false}) {
      SCOPED_TRACE(std::string(spec) + (keeps ? ", gradients kept" : ""));
      const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        std::unique_ptr<Engine> engine = Engine::create(tensors, coded(spec), &communicator).value();
        for (int step = 0; step < 6; ++step) {
          const bool is_large = step == 2 && communicator.rank() == 1;
          std::vector<float> gradient(64, 0.5f);
          if (is_large) gradient[7] = 7e4f;
          std::vector<float> kept = gradient;
          CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome,
                                   run_step_at(*engine, {gradient.data()}, {.keeps_local_gradients = keeps},
                                               [&](std::uint32_t) { return kept.data(); }));
          EXPECT_EQ(outcome.finite, step != 2) << step;
          CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
          for (const float owed : state.tensors[0].residual) EXPECT_LE(std::fabs(owed), 4) << step;
          EXPECT_EQ(all_finite(gradient.data(), 64, DType::kFloat32), outcome.finite) << step;
        }
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// Found in a payload that was decoded while others were awaited, or after all had come: of either dtype, with the same
// name, and what is owed then has the same bits.
TEST(CodecDtypes, WhatOverflowsIsFoundHoweverLateMessagesAre) {
  struct Case {
    const char* spec;
    DType dtype;
    float large;
  };
  for (const Case& given : {Case{"topk(density=0.25, values=fp16, bucket_cap_mib=0)", DType::kFloat32, 7e4f},
                            Case{"topk(density=0.25, bucket_cap_mib=0)", DType::kFloat16, 6.4e4f}}) {
    SCOPED_TRACE(given.spec);
    std::vector<EngineTensor> tensors;
    for (const char* name : {"a", "b", "c"})
      tensors.push_back({.name = name, .dtype = given.dtype, .rows = 1, .cols = 64});
    const auto history = [&](bool is_slow) {
      std::vector<std::string> said(2);
      const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        SlowCommunicator slow(&communicator);
        PromptCommunicator prompt(&communicator);
        Communicator* const used = is_slow ? static_cast<Communicator*>(&slow) : &prompt;
        std::unique_ptr<Engine> engine = Engine::create(tensors, coded(given.spec), used).value();
        std::string& of_rank = said[static_cast<std::size_t>(communicator.rank())];
        for (int step = 0; step < 6; ++step) {
          // "c" is in the message that leaves first, "b" in the next one.
          const auto value = [&](int t) { return (t == 2 && step >= 2) || (t == 1 && step == 4) ? given.large : 0.5f; };
          std::vector<std::vector<std::uint16_t>> narrow;
          Gradients wide;
          std::vector<void*> gradients;
          for (int t = 0; t < 3; ++t) {
            narrow.emplace_back(64, float_to_fp16(value(t)));
            wide.emplace_back(64, value(t));
          }
          for (std::size_t t = 0; t < 3; ++t) {
            gradients.push_back(given.dtype == DType::kFloat16 ? static_cast<void*>(narrow[t].data()) : wide[t].data());
          }
          CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome, run_step_at(*engine, gradients));
          CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
          of_rank += (outcome.finite ? "+ " : "- ") + engine->report().last_non_finite + "\n";
          for (const TensorState& tensor : state.tensors) {
            for (const float owed : tensor.residual)
              of_rank += std::to_string(std::bit_cast<std::uint32_t>(owed)) + " ";
          }
        }
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
      return said;
    };
    const std::vector<std::string> slow = history(true);
    EXPECT_NE(slow[0].find("- "), std::string::npos) << slow[0];
    EXPECT_EQ(slow, history(false));
  }
}

// What is owed grows while a codec sends little, above the largest fp16 at last. What is delivered then is Inf, and a
// loss scaler skips the step: so it must count as one that never was.
TEST(CodecDtypes, WhatOverflowsOnTheWayBackIsAStepThatNeverWas) {
  const std::vector<EngineTensor> tensors = {{.name = "w", .dtype = DType::kFloat16, .rows = 8, .cols = 8}};
  // Two orthogonal patterns of 1 and -1.
  const auto value = [](std::size_t i) { return (i % 2 == 0 ? 34e3f : -34e3f) + (i / 8 % 2 == 0 ? 3e4f : -3e4f); };
  for (const char* spec : {"topk(density=0.25)", "sign(scale=mean_abs)", "acp(rank=1)", "acp(rank=1, sides=alternate)",
                           "power(rank=1)", "topk(density=0.25, rollback=exact)", "randk(density=0.25)"}) {
    for (const bool keeps : {true, false}) {
      SCOPED_TRACE(std::string(spec) + (keeps ? ", gradients kept" : ""));
      std::vector<std::string> verdicts(2);
      const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        std::unique_ptr<Engine> engine = Engine::create(tensors, coded(spec), &communicator).value();
        std::string& verdict = verdicts[static_cast<std::size_t>(communicator.rank())];
        for (int step = 0; step < 12; ++step) {
          std::vector<std::uint16_t> gradient;
          for (std::size_t i = 0; i < 64; ++i) gradient.push_back(float_to_fp16(value(i)));
          std::vector<std::uint16_t> kept = gradient;
          CORTADO_ASSIGN_OR_RETURN(const EngineState before, engine->save_state());
          CORTADO_ASSIGN_OR_RETURN(const StepOutcome outcome,
                                   run_step_at(*engine, {gradient.data()}, {.keeps_local_gradients = keeps},
                                               [&](std::uint32_t) { return kept.data(); }));
          EXPECT_EQ(outcome.finite, all_finite(gradient.data(), 64, DType::kFloat16)) << "step " << step;
          verdict += outcome.finite ? "+" : "-";
          if (outcome.finite) continue;
          CORTADO_ASSIGN_OR_RETURN(const EngineState after, engine->save_state());
          EXPECT_EQ(after.step, before.step);
          const auto &owed = before.tensors[0].residual, &owes = after.tensors[0].residual;
          for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(owes[i], owed[i], 1e-6 * 65504) << i;
          EXPECT_NE(engine->report().last_non_finite.find("w, in the sum over ranks"), std::string::npos);
        }
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
      EXPECT_EQ(verdicts[0], verdicts[1]);
      EXPECT_NE(verdicts[0].find('-'), std::string::npos);
    }
  }
}

// Of five messages four arrive while the next one is awaited; there is memory to roll them back from, unless somebody
// keeps gradients or that needs none.
TEST(CodecDecoding, GoesOnWhileMoreIsOnItsWay) {
  struct Case {
    const char* spec;
    bool keeps;
    std::int64_t rolled_back;  // values
  };
  for (const Case& given :
       {Case{"sign(scale=mean_abs)", false, 4 * 256}, Case{"sign(scale=mean_abs)", true, 0},
        Case{"sign(scale=mean_abs, rollback=exact)", false, 0}, Case{"quant(feedback=none)", false, 0},
        Case{"topk(density=0.1, feedback=dgc)", false, 8 * 256}}) {
    SCOPED_TRACE(std::string(given.spec) + (given.keeps ? ", gradients kept" : ""));
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      std::vector<EngineTensor> tensors;
      for (const char* name : {"a", "b", "c", "d", "e"}) tensors.push_back({.name = name, .rows = 1, .cols = 256});
      SlowCommunicator slow(&communicator);
      TraceRecorder recorder(100);
      const CountingClock clock;
      EngineOptions options = coded(given.spec);
      options.bucket_cap_mib = 0;
      std::unique_ptr<Engine> engine = Engine::create(tensors, options, &slow, &clock, &recorder).value();
      const std::int64_t bytes_before = engine->report().message_bytes;
      Gradients gradients = made_up_gradients(tensors, communicator.rank(), 0);
      const Gradients kept = gradients;
      CORTADO_RETURN_IF_ERROR(
          run_step(*engine, gradients, {.keeps_local_gradients = given.keeps}, [&](std::uint32_t t) {
            return kept[t].data();
          }).status());
      std::int64_t last_arrival_ns = 0;
      for (const TraceEvent& event : recorder.events()) {
        if (event.stage == Stage::kCommunicate) last_arrival_ns = std::max(last_arrival_ns, event.end_ns);
      }
      int before = 0, after = 0;
      for (const TraceEvent& event : recorder.events()) {
        if (event.stage == Stage::kDecode) ++(event.end_ns < last_arrival_ns ? before : after);
      }
      EXPECT_EQ(before, 4);
      EXPECT_EQ(after, 1);
      const auto rolled_back_bytes = given.rolled_back * static_cast<std::int64_t>(sizeof(float));
      EXPECT_EQ(engine->report().message_bytes - bytes_before, rolled_back_bytes);
      // A loaded layout may have another last message; and a step whose gradients are kept needs none of it.
      CORTADO_ASSIGN_OR_RETURN(const EngineState state, engine->save_state());
      CORTADO_RETURN_IF_ERROR(engine->load_state(state).status());
      EXPECT_EQ(engine->report().message_bytes, bytes_before);
      for (const bool keeps : {given.keeps, true}) {
        CORTADO_RETURN_IF_ERROR(run_step(*engine, gradients, {.keeps_local_gradients = keeps}, [&](std::uint32_t t) {
                                  return kept[t].data();
                                }).status());
        EXPECT_EQ(engine->report().message_bytes - bytes_before, keeps ? 0 : rolled_back_bytes);
      }
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// Low rank is decoded as each collective ends where somebody keeps gradients, else after the verdict.
TEST(LowRankDecoding, GoesOnWhileMoreIsOnItsWayWhereGradientsAreKept) {
  for (const char* spec : {"acp(rank=1, min_compression_rate=0, start_step=0, bucket_cap_mib=0)",
                           "power(rank=1, min_compression_rate=0, start_step=0, bucket_cap_mib=0)"}) {
    for (const bool keeps : {true, false}) {
      SCOPED_TRACE(std::string(spec) + (keeps ? ", gradients kept" : ""));
      const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
        std::vector<EngineTensor> tensors;
        for (const char* name : {"a", "b", "c", "d", "e"}) tensors.push_back({.name = name, .rows = 16, .cols = 16});
        SlowCommunicator slow(&communicator);
        TraceRecorder recorder(100);
        const CountingClock clock;
        CORTADO_ASSIGN_OR_RETURN(const EngineOptions options, EngineOptions::parse(spec));
        std::unique_ptr<Engine> engine = Engine::create(tensors, options, &slow, &clock, &recorder).value();
        Gradients gradients = made_up_gradients(tensors, communicator.rank(), 0);
        const Gradients kept = gradients;
        CORTADO_RETURN_IF_ERROR(run_step(*engine, gradients, {.keeps_local_gradients = keeps}, [&](std::uint32_t t) {
                                  return kept[t].data();
                                }).status());
        std::int64_t last_arrival_ns = 0;
        int before = 0, after = 0;
        for (const TraceEvent& event : recorder.events()) {
          if (event.stage == Stage::kCommunicate) last_arrival_ns = std::max(last_arrival_ns, event.end_ns);
        }
        for (const TraceEvent& event : recorder.events()) {
          if (event.stage == Stage::kDecode) ++(event.end_ns < last_arrival_ns ? before : after);
        }
        EXPECT_EQ(before, keeps ? 4 : 0);
        EXPECT_EQ(after, keeps ? 1 : 5);
        return {};
      });
      for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
    }
  }
}

// ---- what breaks
// -----------------------------------------------------------------------------------------------------

TEST(CodecErrors, PayloadsDamagedOnTheWayAreRefusedWithTheirRank) {
  int refused = 0;
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    const auto faulty = make_faulty_communicator(&communicator, {{.at = 1, .kind = Fault::Kind::kCorrupt}});
    Communicator* used = communicator.rank() == 1 ? faulty.get() : &communicator;
    const std::vector<EngineTensor> tensors = {{.name = "w", .rows = 1, .cols = 16, .dimensions = 2}};
    std::unique_ptr<Engine> engine = Engine::create(tensors, coded("sign(scale=mean_abs)"), used).value();
    for (std::int64_t step = 0; step < 2; ++step) {
      Gradients gradients = made_up_gradients(tensors, communicator.rank(), step);
      const Result<StepOutcome> outcome = run_step(*engine, gradients);
      if (!outcome.ok()) return outcome.status();
    }
    return {};
  });
  // header 8, scale 4, bits 2: the middle byte, 7, is in the header, whose top bit says that the gradient was not
  // finite. The check covers that bit too.
  for (const Status& status : statuses) {
    refused += status.code() == StatusCode::kCorruptData;
    EXPECT_NE(status.message().find("step 1: message 0 (\"w\"): decode of \"w\": the payload of rank 1"),
              std::string::npos)
        << status.message();
  }
  EXPECT_EQ(refused, 2);
}

TEST(CodecErrors, ARankThatStopsBeforeItsGatherIsNamed) {
  for (const Fault::Kind kind : {Fault::Kind::kError, Fault::Kind::kDrop}) {
    const std::vector<Status> statuses = run_ranks(3, [&](Communicator& communicator) -> Status {
      const auto faulty = make_faulty_communicator(&communicator, {{.at = 2, .kind = kind}});
      Communicator* used = communicator.rank() == 1 ? faulty.get() : &communicator;
      EngineOptions options = coded("topk(density=0.1)");
      options.bucket_cap_mib = 0;
      options.timeout_s = 2;  // also for what must succeed before
      std::unique_ptr<Engine> engine = Engine::create(small_model(), options, used).value();
      Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
      return run_step(*engine, gradients).status();
    });
    for (const Status& status : statuses) {
      EXPECT_FALSE(status.ok());
      EXPECT_NE(status.message().find("step 0: message 2"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find("1"), std::string::npos) << status.message();
    }
  }
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// The views of a trace, against a small one whose every number is known; and what the engine records.
#include "cortado/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "engine/engine_testing.h"
#include "engine/plan_engine_testing.h"

namespace cortado {
namespace {

constexpr std::int64_t kMs = 1'000'000;

// Two tensors in one message; the second step has a rest and waits for it.
Trace known_trace() {
  const std::int64_t begin = 1'000'000 * kMs;
  const auto at = [&](std::int64_t ms) { return begin + ms * kMs; };
  return {.spec = "acp(rank=2)",
          .rank = 1,
          .world_size = 3,
          .tensors = {"first.weight", "last.weight"},
          .events = {{Stage::kEncode, -1, 1, 7, at(0), at(10), 4000},
                     {Stage::kEncode, -1, 0, 7, at(20), at(30), 8000},
                     {Stage::kCommunicate, 0, -1, 7, at(30), at(90), 1500},
                     {Stage::kWait, 0, -1, 7, at(50), at(90), 0},
                     {Stage::kDecode, 0, 1, 7, at(90), at(94), 4000},
                     {Stage::kDecode, 0, 0, 7, at(94), at(97), 8000},
                     {Stage::kOrthogonalise, 0, 0, 7, at(97), at(100), 0},
                     {Stage::kEncode, -1, 0, 8, at(200), at(220), 8000}},
          .dropped = 2};
}

TEST(Trace, DrawsEachStepOverTime) {
  // 52 columns for 100 ms: about two a column.
  EXPECT_EQ(trace_to_text(known_trace()),
            "acp(rank=2), rank 1 of 3: 8 events of 2 steps; 2 more found no room\n"
            "E encode, = under way, w of that waited for, D decode, O orthogonalise\n"
            "\n"
            "step 7: 100.00 ms, waited 40.00 ms, sent 1.5 kB\n"
            "  message             sent   from ms     to ms\n"
            "  (tensors)                     0.00     30.00  |EEEEEE    EEEEEE                                    |\n"
            "  0                 1.5 kB     30.00    100.00  |               ===========wwwwwwwwwwwwwwwwwwwwDDDDOO|\n"
            "\n"
            "step 8: 20.00 ms, waited 0.00 ms, sent 0 B\n"
            "  message             sent   from ms     to ms\n"
            "  (tensors)                     0.00     20.00  |EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE|\n");
}

TEST(Trace, AMessageSendsWhatItsCollectivesDo) {
  Trace trace = known_trace();
  trace.events[3] = {Stage::kCommunicate, 0, -1, 7, 91 * kMs, 95 * kMs, 700};
  trace.events[3].start_ns += trace.events[0].start_ns;
  trace.events[3].end_ns += trace.events[0].start_ns;
  EXPECT_NE(trace_to_text(trace).find("waited 0.00 ms, sent 2.2 kB\n"), std::string::npos) << trace_to_text(trace);
  EXPECT_NE(trace_to_text(trace).find("  0                 2.2 kB"), std::string::npos) << trace_to_text(trace);
}

TEST(Trace, SumsUpByStage) {
  EXPECT_EQ(summarize_by_stage(known_trace()),
            "acp(rank=2), rank 1 of 3: 8 events of 2 steps; 2 more found no room\n"
            "a step took 60.000 ms from its first event to its last; \"under way\" overlaps the others\n"
            "\n"
            "stage            events   ms a step   of step  median ms     p99 ms longest ms\n"
            "encode                3      20.000    33.3 %    10.0000    10.0000    20.0000\n"
            "communicate           1      30.000    50.0 %    60.0000    60.0000    60.0000\n"
            "wait                  1      20.000    33.3 %    40.0000    40.0000    40.0000\n"
            "decode                2       3.500     5.8 %     3.0000     3.0000     4.0000\n"
            "orthogonalise         1       1.500     2.5 %     3.0000     3.0000     3.0000\n");
}

TEST(Trace, SumsUpByTensorTheSlowestFirst) {
  EXPECT_EQ(summarize_by_tensor(known_trace()),
            "acp(rank=2), rank 1 of 3: 8 events of 2 steps; 2 more found no room\n"
            "ms a step of this rank's threads\n"
            "\n"
            "    encode     decode  orthogon.   together   gradient  tensor\n"
            "   15.0000     1.5000     1.5000    18.0000     8.0 kB  first.weight\n"
            "    5.0000     2.0000     0.0000     7.0000     4.0 kB  last.weight\n");
}

// Sums of what each event may be overflowed.
TEST(Trace, SumsThatAreTooLargeStayAtTheLargest) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;
  Trace trace = {.spec = "none", .tensors = {"a"}, .events = {}};
  for (int i = 0; i < 9; ++i) {
    trace.events.push_back({Stage::kWait, 0, 0, i / 5, 0, kMost, 0});
    trace.events.push_back({Stage::kCommunicate, 0, -1, 0, 0, kMost, kMost});
    trace.events.push_back({Stage::kDecode, 0, 0, 5 + i, 0, kMost, 0});
  }
  trace = parse_trace(trace_to_json(trace)).value();
  const std::string largest = "9223372036854.78";  // ms
  EXPECT_NE(trace_to_text(trace).find(", waited " + largest + " ms, sent 9223372036.85 GB"), std::string::npos)
      << trace_to_text(trace);
  for (const std::string& text : {trace_to_text(trace), summarize_by_stage(trace), summarize_by_tensor(trace)}) {
    EXPECT_EQ(text.find(" -"), std::string::npos) << text;
  }
}

// A name could clear the screen, or do worse.
TEST(Trace, TextsHaveNoControlCharacters) {
  Trace trace = known_trace();
  trace.spec = "acp\x1b[2J";
  trace.tensors = {"first\x1b]0;title\x07",
                   "last\n\xc2\x9b"
                   "2J"};
  EXPECT_EQ(trace_to_text(trace).substr(0, 8), "acp?[2J,");
  EXPECT_EQ(summarize_by_stage(trace).substr(0, 8), "acp?[2J,");
  const std::string text = summarize_by_tensor(trace);
  EXPECT_NE(text.find("  first?]0;title?\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  last??2J\n"), std::string::npos) << text;
}

TEST(Trace, NothingRecordedIsNotAnError) {
  EXPECT_EQ(trace_to_text({.spec = "none", .tensors = {"a"}, .events = {}}),
            "none, rank 0 of 1: 0 events of 0 steps\n");
  EXPECT_NE(summarize_by_stage({}).find("0 events"), std::string::npos);
  EXPECT_NE(summarize_by_tensor({}).find("0 events"), std::string::npos);
  EXPECT_EQ(parse_trace(trace_to_json({})).value(), Trace{});
}

TEST(Trace, ComesBackFromItsFileFormat) {
  Trace trace = known_trace();
  trace.tensors[1] = "caf\xc3\xa9 \"quoted\"\n";
  const Result<Trace> back = parse_trace(trace_to_json(trace));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back.value(), trace);
}

TEST(Trace, CollectivesHaveNames) {
  Trace trace = known_trace();
  trace.collectives = {"all_gather@intra, sizes", "all_gather@intra"};
  trace.events[2].collective = 1;
  trace.events.push_back(trace.events[2]);
  trace.events.back().collective = -1;
  const Result<Trace> back = parse_trace(trace_to_json(trace));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back.value(), trace);
  EXPECT_NE(trace_to_chrome(trace).find("\"collective\":\"all_gather@intra\""), std::string::npos);
  EXPECT_EQ(trace_to_chrome(trace).find("sizes"), std::string::npos);
  for (const auto& [places, found] : std::vector<std::pair<nlohmann::json, std::string>>{
           {{1}, "got [1]"},
           {{1, -1, 0}, "got [1,-1,0]"},
           {{1, 2}, "$.collective_of[1]: expected a place in collectives, or -1, got 2"},
           {{-2, 0}, "got -2"},
           {1.5, "got 1.5"}}) {
    nlohmann::json file = nlohmann::json::parse(trace_to_json(trace));
    file["collective_of"] = places;
    const Status status = parse_trace(file.dump()).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruptData) << found;
    EXPECT_NE(status.message().find("expected a place in collectives, or -1"), std::string::npos) << found;
    EXPECT_NE(status.message().find(found), std::string::npos) << status.message();
  }
}

TEST(Trace, TheOrderOfStagesIsThatOfTheFile) {
  nlohmann::json file = nlohmann::json::parse(trace_to_json(known_trace()));
  std::swap(file["stages"][0], file["stages"][1]);
  EXPECT_EQ(parse_trace(file.dump()).value().events[0].stage, Stage::kCommunicate);
}

TEST(Trace, ChromeGetsMicroseconds) {
  const nlohmann::json chrome = nlohmann::json::parse(trace_to_chrome(known_trace()));
  std::vector<nlohmann::json> spans;
  for (const nlohmann::json& event : chrome["traceEvents"])
    if (event["ph"] == "X") spans.push_back(event);
  ASSERT_EQ(spans.size(), 8u);
  EXPECT_EQ(spans[1]["name"], "encode first.weight");
  EXPECT_EQ(spans[1]["dur"], 10'000.0);
  EXPECT_EQ(spans[1]["ts"].get<double>() - spans[0]["ts"].get<double>(), 20'000.0);
  EXPECT_EQ(spans[2]["name"], "communicate message 0");
  EXPECT_EQ(spans[2]["args"], (nlohmann::json{{"step", 7}, {"bytes", 1500}}));
  EXPECT_EQ(spans[2]["pid"], 1);
}

// The format takes what overlaps within one row for nested.
TEST(Trace, ChromeHasARowMoreWhereEventsOverlap) {
  Trace trace;
  for (const auto& [start_ns, end_ns] : {std::pair(100, 400), std::pair(400, 450), std::pair(110, 500)}) {
    trace.events.push_back({.stage = Stage::kCommunicate, .start_ns = start_ns, .end_ns = end_ns});
  }
  const nlohmann::json chrome = nlohmann::json::parse(trace_to_chrome(trace));
  std::vector<int> rows;
  std::map<int, std::string> names;
  for (const nlohmann::json& event : chrome["traceEvents"]) {
    if (event["ph"] == "X") rows.push_back(event["tid"]);
    if (event["name"] == "thread_name") names[event["tid"]] = event["args"]["name"];
  }
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_NE(rows[0], rows[2]);
  EXPECT_EQ(names[rows[0]], "communicate");
  EXPECT_EQ(names[rows[2]], "communicate 2");
}

TEST(Trace, DamagedFilesAreRefusedWithThePlace) {
  const std::string whole = trace_to_json(known_trace());
  const auto error_of = [](const nlohmann::json& file) {
    const Result<Trace> trace = parse_trace(file.dump());
    EXPECT_EQ(trace.status().code(), StatusCode::kCorruptData);
    return trace.ok() ? "none" : trace.status().message();
  };
  const auto changed = [&](const char* path, const nlohmann::json& value) {
    nlohmann::json file = nlohmann::json::parse(whole);
    file[nlohmann::json::json_pointer(path)] = value;
    return error_of(file);
  };
  EXPECT_NE(parse_trace(whole.substr(0, whole.size() / 2)).status().message().find("it is cut short"),
            std::string::npos);
  const std::string nested = std::string(200'000, '[') + std::string(200'000, ']');  // would be read by recursion
  EXPECT_EQ(parse_trace(nested).status().code(), StatusCode::kCorruptData);
  EXPECT_NE(error_of(nlohmann::json::array()).find("$: expected an object, got []"), std::string::npos);
  EXPECT_NE(error_of(nlohmann::json::object()).find("$.format: expected \"cortado.trace/1\", got nothing"),
            std::string::npos);
  EXPECT_NE(changed("/format", "cortado.plan/1").find("got \"cortado.plan/1\""), std::string::npos);
  EXPECT_LT(changed("/format", std::string(100'000, 'x')).size(), 200);
  EXPECT_EQ(parse_trace(R"({"format": "cortado.trace/2"})").status().code(), StatusCode::kUnsupported);
  EXPECT_NE(changed("/spec", 4).find("spec: expected a text, got 4"), std::string::npos);
  EXPECT_NE(changed("/rank", 3).find("rank: expected an integer from 0 to 2, got 3"), std::string::npos);
  EXPECT_NE(changed("/world_size", 0).find("world_size: expected"), std::string::npos);
  EXPECT_NE(changed("/dropped", 1.5).find("dropped: expected"), std::string::npos);
  EXPECT_NE(changed("/tensors/1", 7).find("tensors[1]: expected a text, got 7"), std::string::npos);
  EXPECT_NE(changed("/stages/1", "sleep").find("$.stages[1]: expected \"encode\", \"communicate\", \"wait\""),
            std::string::npos);
  EXPECT_NE(changed("/events", "none").find("events: expected a list of events"), std::string::npos);
  for (const auto& [field, value] : std::vector<std::pair<int, nlohmann::json>>{
           {0, 5}, {1, -1}, {2, std::int64_t{1} << 31}, {3, 2}, {4, -1}, {5, 0}, {6, -1}, {4, "now"}, {5, ~0ull}}) {
    const std::string path = "/events/3/" + std::to_string(field);
    EXPECT_NE(changed(path.c_str(), value).find("events[3]: expected [stage, step"), std::string::npos) << path;
  }
}

TEST(Trace, TheEngineRecordsEveryStageOfEveryTensorAndMessage) {
  const std::vector<Status> statuses = run_ranks(2, [](Communicator& communicator) -> Status {
    const CountingClock clock;
    TraceRecorder recorder(1000);
    EngineOptions options = low_rank(EngineOptions::Method::kAcp, 2);
    options.bucket_cap_mib = 0;
    std::unique_ptr<Engine> engine = Engine::create(small_model(), options, &communicator, &clock, &recorder).value();
    Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
    if (const auto outcome = run_step(*engine, gradients); !outcome.ok()) return outcome.status();
    const Trace trace = engine->trace();
    EXPECT_EQ(trace.rank, communicator.rank());
    EXPECT_EQ(trace.world_size, 2);
    EXPECT_EQ(trace.tensors[1], "first.weight");
    int encoded = 0, sent = 0, decoded = 0;
    for (const TraceEvent& event : trace.events) {
      EXPECT_LT(event.start_ns, event.end_ns);
      encoded += event.stage == Stage::kEncode;
      sent += event.stage == Stage::kCommunicate;
      decoded += event.stage == Stage::kDecode;
    }
    const int with_elements = static_cast<int>(small_model().size()) - 1;
    EXPECT_EQ(encoded, with_elements);
    EXPECT_EQ(decoded, with_elements);
    EXPECT_EQ(sent, engine->report().messages);
    engine->set_trace(nullptr);
    EXPECT_TRUE(engine->trace().events.empty());
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// All gradients in one call, as of a buffer of DDP's: what is complete does not wait until the last one is encoded.
TEST(Trace, AMessageLeavesWhileOthersAreEncoded) {
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    CORTADO_ASSIGN_OR_RETURN(const Topology flat, Topology::two_levels(2, 1));
    for (const char* setting : {"acp(rank=2)", "quant(bits=4)", "cast(bf16)", "plan"}) {
      const CountingClock clock;
      TraceRecorder recorder(1000);
      EngineOptions options = coded(setting == std::string("plan") ? "cast(bf16)" : setting);
      options.bucket_cap_mib = 0;
      CORTADO_ASSIGN_OR_RETURN(
          const auto engine,
          setting == std::string("plan")
              ? Engine::create(small_model(), dense_plan(flat), with_timeout(), &communicator, &clock, &recorder)
              : Engine::create(small_model(), options, &communicator, &clock, &recorder));
      Gradients gradients = made_up_gradients(small_model(), communicator.rank(), 0);
      std::vector<Gradient> all;
      for (std::uint32_t t = 0; t < 8; ++t) all.push_back({t, gradients[t].data()});
      // Engines send what comes last in a model first, a plan its first bucket.
      if (setting != std::string("plan")) std::reverse(all.begin(), all.end());
      CORTADO_RETURN_IF_ERROR(engine->begin_step({}));
      CORTADO_RETURN_IF_ERROR(engine->submit(all));
      CORTADO_RETURN_IF_ERROR(engine->finish_step({}).status());
      std::int64_t first_sent_ns = std::numeric_limits<std::int64_t>::max(), last_encoded_ns = 0;
      for (const TraceEvent& event : recorder.events()) {
        if (event.stage == Stage::kCommunicate) first_sent_ns = std::min(first_sent_ns, event.start_ns);
        if (event.stage == Stage::kEncode) last_encoded_ns = std::max(last_encoded_ns, event.start_ns);
      }
      EXPECT_LT(first_sent_ns, last_encoded_ns) << setting;
    }
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// With two threads a message waits for a second tensor of its size, and no longer.
TEST(Trace, AMessageLeavesWhenAllThreadsHadWork) {
  std::vector<EngineTensor> model;
  for (const char* name : {"a", "b", "c", "d"}) model.push_back({.name = name, .rows = 64, .cols = 64});
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    TraceRecorder recorder(1000);
    EngineOptions options = coded("quant(bits=4, threads=2)");
    options.bucket_cap_mib = 0;
    CORTADO_ASSIGN_OR_RETURN(const auto engine,
                             Engine::create(model, options, &communicator, steady_clock(), &recorder));
    Gradients gradients = made_up_gradients(model, communicator.rank(), 0);
    std::vector<Gradient> all;
    for (std::uint32_t t = 4; t-- > 0;) all.push_back({t, gradients[t].data()});
    CORTADO_RETURN_IF_ERROR(engine->begin_step({}));
    CORTADO_RETURN_IF_ERROR(engine->submit(all));
    CORTADO_RETURN_IF_ERROR(engine->finish_step({}).status());
    std::int64_t first_sent_ns = std::numeric_limits<std::int64_t>::max();
    TraceEvent encoded[4];
    for (const TraceEvent& event : recorder.events()) {
      if (event.stage == Stage::kCommunicate) first_sent_ns = std::min(first_sent_ns, event.start_ns);
      if (event.stage == Stage::kEncode) encoded[event.tensor] = event;
    }
    for (const int t : {3, 2}) EXPECT_LE(encoded[t].end_ns, first_sent_ns) << t;
    for (const int t : {1, 0}) EXPECT_GE(encoded[t].start_ns, first_sent_ns) << t;
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Two rounds; and payloads that outgrow what the messages of the steps before had room for, so that rests follow.
TEST(Trace, WhatCollectivesSentAddsUp) {
  for (const char* codec : {"acp(rank=2)", "power(rank=2)", "float_rans", "sign"}) {
    const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
      TraceRecorder recorder(1000);
      CORTADO_ASSIGN_OR_RETURN(const auto engine,
                               Engine::create(small_model(), coded(codec), &communicator, steady_clock(), &recorder));
      std::int64_t messages_before = 0;
      for (std::int64_t step = 0; step < 4; ++step) {
        messages_before = engine->report().messages;
        Gradients gradients = made_up_gradients(small_model(), communicator.rank(), step);
        for (std::vector<float>& values : gradients) {
          if (step < 3) std::fill(values.begin(), values.end(), 1.0f);
        }
        recorder.clear();
        CORTADO_RETURN_IF_ERROR(run_step(*engine, gradients).status());
        std::int64_t bytes = 0, collectives = 0;
        for (const TraceEvent& event : recorder.events()) {
          if (event.stage != Stage::kCommunicate) continue;
          bytes += event.bytes;
          ++collectives;
        }
        EXPECT_EQ(bytes, engine->report().payload_bytes) << codec << ", step " << step;
        EXPECT_EQ(collectives, engine->report().messages) << codec << ", step " << step;
      }
      const bool has_rest = engine->report().messages > messages_before;
      EXPECT_EQ(has_rest, codec == std::string("float_rans")) << codec;
      return {};
    });
    for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

}  // namespace
}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "collective/communicator_testing.h"
#include "collective/rank_threads.h"
#include "core/check.h"
#include "cortado/communicator.h"

namespace cortado {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kLong(30);

// A table of functions over another communicator, as an adapter would write it; `code` and `message` make it fail.
struct Adapter {
  Communicator* inner = nullptr;
  int code = 0;
  std::string message = "";
  std::vector<std::unique_ptr<Communicator>> groups = {};  // of the sub-groups, which live as long as this one
  std::vector<std::unique_ptr<Adapter>> adapters = {};

  static int fail(const Adapter& self, char* error, std::size_t error_bytes) {
    std::strncpy(error, self.message.c_str(), error_bytes);  // as sloppy as allowed: without NUL when it is too long
    return self.code;
  }
  static int convert(const Status& status, char* error, std::size_t error_bytes) {
    if (status.ok()) return 0;
    const int code = status.code() == StatusCode::kTimeout ? CommunicatorCallbacks::kTimedOut : 1;
    return fail({.code = code, .message = status.message()}, error, error_bytes);
  }

  static int start(void* context, const CollectiveCall* call, std::uint64_t work, char* error,
                   std::size_t error_bytes) {
    const auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    const Result<WorkId> started = self.inner->start(*call);
    EXPECT_TRUE(!started.ok() || started.value() == work);
    return convert(started.status(), error, error_bytes);
  }
  static int test(void* context, std::uint64_t work, int* done, char* error, std::size_t error_bytes) {
    const auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    const Result<bool> ended = self.inner->test(work);
    if (ended.ok()) *done = ended.value();
    return convert(ended.status(), error, error_bytes);
  }
  static int wait(void* context, std::uint64_t work, std::int64_t timeout_ns, char* error, std::size_t error_bytes) {
    const auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    return convert(self.inner->wait(work, std::chrono::nanoseconds(timeout_ns)), error, error_bytes);
  }
  static int all_gather(void* context, const void* sent, std::int64_t sent_bytes, void* received,
                        std::int64_t timeout_ns, char* error, std::size_t error_bytes) {
    const auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    const auto bytes = static_cast<std::size_t>(sent_bytes);
    const Status status = self.inner->all_gather({static_cast<const std::byte*>(sent), bytes},
                                                 {static_cast<std::byte*>(received), bytes * self.inner->world_size()},
                                                 std::chrono::nanoseconds(timeout_ns));
    return convert(status, error, error_bytes);
  }

  static int subgroup(void* context, const int* ranks, std::int64_t rank_count, CommunicatorCallbacks* table,
                      char* error, std::size_t error_bytes) {
    auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    auto made = self.inner->subgroup({ranks, static_cast<std::size_t>(rank_count)});
    if (!made.ok()) return convert(made.status(), error, error_bytes);
    self.groups.push_back(std::move(made).value());
    self.adapters.push_back(std::make_unique<Adapter>(Adapter{.inner = self.groups.back().get()}));
    *table = self.adapters.back()->callbacks();
    return 0;
  }

  static int check_peers(void* context, char* error, std::size_t error_bytes) {
    const auto& self = *static_cast<Adapter*>(context);
    if (self.code != 0) return fail(self, error, error_bytes);
    return convert(self.inner->peer_failure(), error, error_bytes);
  }

  static void abandon(void* context, const char* why) { static_cast<Adapter*>(context)->message = why; }

  CommunicatorCallbacks callbacks() {
    CommunicatorCallbacks table;
    table.context = this;
    table.rank = inner->rank();
    table.world_size = inner->world_size();
    table.name = "threads";
    table.start = start;
    table.test = test;
    table.wait = wait;
    table.all_gather = all_gather;
    table.subgroup = subgroup;
    return table;
  }
};

TEST(Callback, ReducesAndGathersThroughTheTable) {
  const auto statuses = run_ranks(3, [](Communicator& inner) {
    Adapter adapter{&inner, 0, ""};
    const auto communicator = make_callback_communicator(adapter.callbacks()).value();
    EXPECT_EQ(communicator->name(), "callback(threads)");
    EXPECT_EQ(communicator->rank(), inner.rank());
    EXPECT_EQ(communicator->world_size(), 3);
    float values[2] = {1, static_cast<float>(inner.rank())};
    CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start_all_reduce(values, 2, DType::kFloat32));
    CORTADO_RETURN_IF_ERROR(communicator->wait(work, kLong));
    EXPECT_TRUE(communicator->test(work).value());
    EXPECT_EQ(values[0], 3);
    EXPECT_EQ(values[1], 3);
    const std::array<std::byte, 1> sent{std::byte(inner.rank())};
    std::array<std::byte, 3> received{};
    CORTADO_ASSIGN_OR_RETURN(const WorkId gathering, communicator->start_all_gather(sent, received));
    CORTADO_RETURN_IF_ERROR(communicator->wait(gathering, kLong));
    EXPECT_EQ(received, (std::array{std::byte(0), std::byte(1), std::byte(2)}));
    received = {};
    CORTADO_RETURN_IF_ERROR(communicator->all_gather(sent, received, kLong));
    EXPECT_EQ(received, (std::array{std::byte(0), std::byte(1), std::byte(2)}));
    return Status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Callback, EveryKindOfCollectiveAlsoInSubgroups) {
  const auto statuses = run_ranks(4, [](Communicator& inner) {
    Adapter adapter{&inner, 0, ""};
    const auto communicator = make_callback_communicator(adapter.callbacks()).value();
    CORTADO_RETURN_IF_ERROR(check_every_collective(*communicator, kLong));
    const std::array ranks{inner.rank() % 2, inner.rank() % 2 + 2};
    CORTADO_ASSIGN_OR_RETURN(const auto subgroup, communicator->subgroup(ranks));
    EXPECT_EQ(subgroup->name(), "callback(threads)");
    EXPECT_EQ(subgroup->rank(), inner.rank() / 2);
    return check_every_collective(*subgroup, kLong);
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Callback, TellsThatAPeerHasFailedWhereTheTableCan) {
  LocalGroup group(2);
  Adapter adapter{group.communicator(0), 0, ""};
  CommunicatorCallbacks table = adapter.callbacks();
  const auto silent = make_callback_communicator(table).value();
  table.check_peers = Adapter::check_peers;
  const auto communicator = make_callback_communicator(table).value();
  EXPECT_TRUE(communicator->peer_failure().ok());
  group.abandon(1, "out of memory");
  EXPECT_TRUE(silent->peer_failure().ok());
  EXPECT_EQ(communicator->peer_failure().code(), StatusCode::kPeerFailed);
  EXPECT_EQ(communicator->peer_failure().message(), "callback(threads): rank 1 has left the group: out of memory");
}

TEST(Callback, TellsTheTransportThatThisRankHasGivenUp) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, "nothing yet"};
  CommunicatorCallbacks table = adapter.callbacks();
  EXPECT_FALSE(make_callback_communicator(table).value()->abandon("no memory"));
  EXPECT_EQ(adapter.message, "nothing yet");
  table.abandon = Adapter::abandon;
  EXPECT_FALSE(make_callback_communicator(table).value()->abandon("no memory"));  // buffers in flight stay taken
  EXPECT_EQ(adapter.message, "no memory");
}

TEST(Callback, SubgroupsAreRefusedWhereTheTableHasNone) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, "no memory"};
  CommunicatorCallbacks table = adapter.callbacks();
  const auto with = make_callback_communicator(table).value();
  table.subgroup = nullptr;
  const auto without = make_callback_communicator(table).value();
  EXPECT_EQ(without->subgroup(std::array{0}).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(without->subgroup(std::array{1}).status().code(), StatusCode::kInvalidArgument);
  adapter.code = 1;
  EXPECT_EQ(with->subgroup(std::array{0}).status().message(), "sub-group of callback(threads): no memory");
}

TEST(Callback, RefusesATableWithHoles) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, ""};
  const auto expect_refused = [&adapter](const char* named, auto make_hole) {
    CommunicatorCallbacks table = adapter.callbacks();
    make_hole(table);
    const Status status = make_callback_communicator(table).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << named;
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
  };
  expect_refused("name", [](auto& table) { table.name = nullptr; });
  expect_refused("start", [](auto& table) { table.start = nullptr; });
  expect_refused("test", [](auto& table) { table.test = nullptr; });
  expect_refused("wait", [](auto& table) { table.wait = nullptr; });
  expect_refused("all_gather", [](auto& table) { table.all_gather = nullptr; });
  expect_refused("rank 1 of world_size 1", [](auto& table) { table.rank = 1; });
  expect_refused("rank -1 of world_size 1", [](auto& table) { table.rank = -1; });
  expect_refused("rank 0 of world_size 0", [](auto& table) { table.world_size = 0; });
}

TEST(Callback, ErrorsCarryTheMessageAndWhatWasTried) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, "connection reset"};
  const auto communicator = make_callback_communicator(adapter.callbacks()).value();
  float values[3] = {};
  std::array<std::byte, 4> bytes{};
  const WorkId work = communicator->start_all_reduce(values, 3, DType::kFloat32).value();
  adapter.code = 1;
  const auto expect_failure = [](const Status& status, const std::string& message) {
    EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
    EXPECT_EQ(status.message(), message);
  };
  expect_failure(communicator->test(work).status(),
                 "test of all_reduce fp32 3 (collective 0) on callback(threads): connection reset");
  expect_failure(communicator->wait(work, kLong),
                 "wait for all_reduce fp32 3 (collective 0) on callback(threads): connection reset");
  expect_failure(communicator->start_all_reduce(values, 2, DType::kBFloat16).status(),
                 "start of all_reduce bf16 2 (collective 1) on callback(threads): connection reset");
  expect_failure(communicator->start_all_gather(bytes, bytes).status(),
                 "start of all_gather uint8 4 (collective 2) on callback(threads): connection reset");
  expect_failure(communicator->wait(2, kLong),
                 "wait for all_gather uint8 4 (collective 2) on callback(threads): connection reset");
  expect_failure(communicator->all_gather(bytes, bytes, kLong),
                 "all_gather uint8 4 on callback(threads): connection reset");
}

TEST(Callback, ToldTimeoutsAreTimeouts) {
  LocalGroup group(2);
  Adapter adapter{group.communicator(0), 0, ""};
  const auto communicator = make_callback_communicator(adapter.callbacks()).value();
  float value = 1;
  const WorkId work = communicator->start_all_reduce(&value, 1, DType::kFloat32).value();
  const Status status = communicator->wait(work, milliseconds(5));
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_NE(status.message().find("have not started it: 1"), std::string::npos) << status.message();
}

TEST(Callback, MessagesMayBeMissingOrTooLong) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 5, ""};
  const auto communicator = make_callback_communicator(adapter.callbacks()).value();
  std::array<std::byte, 1> bytes{};
  EXPECT_NE(communicator->all_gather(bytes, bytes, kLong).message().find("error 5 without a message"),
            std::string::npos);
  adapter.message = std::string(100000, 'x');
  const std::string message = communicator->all_gather(bytes, bytes, kLong).message();
  EXPECT_GT(message.size(), 500u);
  EXPECT_LT(message.size(), 2000u);
}

TEST(Callback, RefusesWhatWasNotStartedAndWrongSizes) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, ""};
  const auto communicator = make_callback_communicator(adapter.callbacks()).value();
  std::array<std::byte, 3> bytes{};
  EXPECT_EQ(communicator->test(0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator->wait(0, kLong).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator->all_gather({bytes.data(), 2}, bytes, kLong).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator->start_all_gather({bytes.data(), 2}, bytes).status().code(), StatusCode::kInvalidArgument);
}

TEST(Callback, OldCollectivesAreStillNamed) {
  LocalGroup group(1);
  Adapter adapter{group.communicator(0), 0, "late"};
  const auto communicator = make_callback_communicator(adapter.callbacks()).value();
  float value = 1;
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(communicator->start_all_reduce(&value, 1, DType::kFloat32).ok());
  adapter.code = 1;
  EXPECT_EQ(communicator->wait(3, kLong).message(), "wait for collective 3 on callback(threads): late");
}

}  // namespace
}  // namespace cortado

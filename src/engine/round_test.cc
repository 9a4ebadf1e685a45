// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Messages of payloads: what arrives when sizes vary, how capacities follow, and that the collectives are the same on
// all ranks. What is sent here is made up; the engine's tests send codecs'.
#include "engine/round.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "collective/rank_threads.h"
#include "core/check.h"
#include "core/counting_new.h"

namespace cortado {
namespace {

constexpr std::chrono::seconds kLong(20);
constexpr std::int64_t kLargest[] = {3000, 1, 500, 4000};  // bytes of the slots

// Two messages of payloads around one of a sum.
Layout mixed_layout() {
  std::vector<LayoutTensor> tensors;
  for (const std::int64_t bytes : kLargest) tensors.push_back({1, 1, 0, bytes});
  tensors.push_back({1, 5, 0});
  const SlotKind p = SlotKind::kPayload;
  Layout layout = make_layout(tensors, {0, 1, 2, 4, 3}, {p, p, p, p, SlotKind::kDense}, {},
                              {FusionBudget::Kind::kScaled, 18}, sizeof(float));
  return layout;
}

std::byte byte_of(int rank, std::int64_t step, std::uint32_t tensor, std::size_t i) {
  return static_cast<std::byte>(31 * static_cast<std::uint64_t>(rank) + 7 * static_cast<std::uint64_t>(step) + tensor +
                                i);
}

using SizeOf = std::function<std::uint64_t(int rank, std::int64_t step, std::uint32_t tensor)>;

// One step as the engine would run it; fails unless every payload of every rank arrives whole.
Status run_step(Round& round, Communicator& communicator, std::int64_t step, const SizeOf& size_of) {
  const int own = communicator.rank();
  round.begin(0);
  for (std::uint32_t tensor = 0; tensor < 5; ++tensor) {
    std::span<std::byte> slot = round.slot_bytes(tensor);
    if (tensor == 4) std::memset(slot.data(), 0, slot.size());
    const std::uint64_t bytes = tensor == 4 ? 0 : size_of(own, step, tensor);
    for (std::size_t i = 0; i < bytes; ++i) slot[i] = byte_of(own, step, tensor, i);
    const bool finite = !(tensor == 2 && step == 1 && own == 1);
    round.mark_written(tensor, finite, bytes);
  }
  CORTADO_RETURN_IF_ERROR(round.start_ready());
  for (int m = 0; m < round.message_count(); ++m) {
    CORTADO_RETURN_IF_ERROR(round.wait(m, kLong));
    if (!round.is_gathered(m)) continue;
    CORTADO_RETURN_IF_ERROR(round.check_headers(m));
    if (round.lacks_rest(m)) CORTADO_RETURN_IF_ERROR(round.start_rest(m));
  }
  std::vector<std::byte> joint(4000);
  for (int m = 0; m < round.message_count(); ++m) {
    if (round.state(m) == MessageState::kInFlight) CORTADO_RETURN_IF_ERROR(round.wait(m, kLong));
    if (round.is_gathered(m)) {
      const std::vector<Slot>& slots = round.layout().messages[m].slots;
      EXPECT_FALSE(round.lacks_rest(m));
      for (int s = 0; s < static_cast<int>(slots.size()); ++s) {
        EXPECT_EQ(round.non_finite_rank(m, s),
                  slots[s].tensor == 2 && step == 1 && communicator.world_size() > 1 ? 1 : -1);
        for (int rank = 0; rank < communicator.world_size(); ++rank) {
          const std::span<const std::byte> payload = round.payload(m, s, rank, joint);
          EXPECT_EQ(payload.size(), size_of(rank, step, slots[s].tensor));
          for (std::size_t i = 0; i < payload.size(); ++i) {
            if (payload[i] == byte_of(rank, step, slots[s].tensor, i)) continue;
            return make_error(StatusCode::kInternal, "step %d message %d slot %d rank %d byte %zu",
                              static_cast<int>(step), m, s, rank, i);
          }
        }
      }
    }
    round.mark_done(m);
  }
  round.adapt_capacities();
  return {};
}

// Runs `steps` steps and returns what was started on rank 0; all ranks must have started the same.
std::vector<RecordedCollective> log_of(int world_size, std::int64_t steps, const SizeOf& size_of) {
  std::vector<std::vector<RecordedCollective>> logs(static_cast<std::size_t>(world_size));
  const std::vector<Status> statuses = run_ranks(world_size, [&](Communicator& communicator) -> Status {
    RecordingCommunicator recording(&communicator);
    Round round({{mixed_layout()}, 5, DType::kFloat32}, &recording, steady_clock());
    for (std::int64_t step = 0; step < steps; ++step) {
      CORTADO_RETURN_IF_ERROR(run_step(round, recording, step, size_of));
    }
    logs[static_cast<std::size_t>(communicator.rank())] = recording.log();
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const auto& log : logs) EXPECT_EQ(log, logs[0]);
  return logs[0];
}

std::vector<std::int64_t> gathered_bytes(const std::vector<RecordedCollective>& log) {
  std::vector<std::int64_t> bytes;
  for (const RecordedCollective& collective : log) {
    if (collective.kind == "all_gather") bytes.push_back(collective.elems);
  }
  return bytes;
}

constexpr std::int64_t kFirstStream = 3 * 8 + 3000 + 1 + 500;
constexpr std::int64_t kSecondStream = 8 + 4000;

TEST(Round, LayoutOfTheTest) {
  const Layout layout = mixed_layout();
  ASSERT_EQ(layout.messages.size(), 3u);
  EXPECT_EQ(layout.messages[0].slots.size(), 3u);
  EXPECT_EQ(layout.messages[1].collective, Collective::kAllReduce);
  EXPECT_EQ(layout.messages[2].slots[0].tensor, 3u);
}

TEST(Round, PayloadsOfOneSizeTravelInOneGatherOfThatSize) {
  for (const int world_size : {1, 2, 3, 5}) {
    const auto bytes = gathered_bytes(log_of(
        world_size, 3, [](int, std::int64_t, std::uint32_t t) { return static_cast<std::uint64_t>(kLargest[t]); }));
    EXPECT_EQ(bytes, (std::vector<std::int64_t>{kFirstStream, kSecondStream, kFirstStream, kSecondStream, kFirstStream,
                                                kSecondStream}));
  }
}

// Step 0 sends all there can be; then a tenth is enough; step 3 needs rests for both messages.
TEST(Round, CapacitiesFollowTheSizesAndRestsBringWhatIsLeft) {
  for (const int world_size : {2, 3, 5}) {
    const auto size_of = [&](int rank, std::int64_t step, std::uint32_t tensor) {
      const std::int64_t small = kLargest[tensor] / 10 + rank;
      const bool grown = step == 3 && rank == world_size - 1;
      return static_cast<std::uint64_t>(tensor == 1 ? rank % 2 : grown ? kLargest[tensor] : small);
    };
    const std::vector<RecordedCollective> log = log_of(world_size, 5, size_of);
    const std::vector<std::int64_t> bytes = gathered_bytes(log);
    ASSERT_EQ(bytes.size(), 12u);
    EXPECT_EQ(bytes[0], kFirstStream);
    const std::int64_t first = bytes[2], second = bytes[3];
    EXPECT_LT(first, 600);
    EXPECT_LT(second, 600);
    EXPECT_EQ(bytes[4], first) << "stays while it fits";
    EXPECT_EQ(bytes[8], kFirstStream - first - (1 - (world_size - 1) % 2)) << "the rest of the longest stream";
    EXPECT_EQ(bytes[9], kSecondStream - second);
    EXPECT_GE(bytes[10], kFirstStream - 1) << "room for what was seen";
    EXPECT_EQ(log[log.size() - 3 - 3 - 2].kind, "all_gather");
  }
}

// Payloads are cut at every place: in the first, between two, in the last one.
TEST(Round, ACutMayBeAnywhere) {
  for (std::int64_t before = 0; before < 3501; before += 111) {
    const auto size_of = [&](int rank, std::int64_t step, std::uint32_t tensor) -> std::uint64_t {
      if (step == 1 || tensor == 3) return static_cast<std::uint64_t>(kLargest[tensor]) - (rank == 0);
      if (tensor == 0) return static_cast<std::uint64_t>(std::min<std::int64_t>(before, 3000));
      return static_cast<std::uint64_t>(tensor == 2 ? std::max<std::int64_t>(0, before - 3000) : 0);
    };
    log_of(2, 2, size_of);
    if (HasFailure()) FAIL() << before;
  }
}

TEST(Round, NothingIsAllocatedOnceItIsMade) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer owns operator new";
  LocalGroup group(1);
  Round round({{mixed_layout()}, 5, DType::kFloat32}, group.communicator(0), steady_clock());
  const auto step = [&] {
    round.begin(0);
    for (std::uint32_t tensor = 0; tensor < 5; ++tensor) round.mark_written(tensor, true, tensor < 4 ? 1 : 0);
    Status status = round.start_ready();
    for (int m = 0; m < 3 && status.ok(); ++m) {
      status = round.wait(m, kLong);
      round.mark_done(m);
    }
    round.adapt_capacities();
    return status;
  };
  ASSERT_TRUE(step().ok());
  const std::int64_t before = allocation_count();
  const Status status = step();
  EXPECT_EQ(allocation_count() - before, 0);
  EXPECT_TRUE(status.ok());
}

TEST(Round, AHeaderThatCanNotBeIsRefused) {
  const std::vector<Status> statuses = run_ranks(2, [&](Communicator& communicator) -> Status {
    // The top bit of the middle byte of rank 1's first gather, whose length makes that the top of slot 0's bytes.
    const auto faulty = make_faulty_communicator(&communicator, {{.at = 0, .kind = Fault::Kind::kCorrupt}});
    Communicator& used = communicator.rank() == 1 ? *faulty : communicator;
    Layout layout;
    layout.messages.push_back({{{0, SlotKind::kPayload, 0, 1}}, 1, Collective::kAllGather});
    Round round({{layout}, 1, DType::kFloat32}, &used, steady_clock());
    round.begin(0);
    round.mark_written(0, true, 1);
    CORTADO_RETURN_IF_ERROR(round.start_ready());
    CORTADO_RETURN_IF_ERROR(round.wait(0, kLong));
    const Status status = round.check_headers(0);
    EXPECT_EQ(status.code(), StatusCode::kCorruptData);
    EXPECT_NE(status.message().find("message 0: communicate: rank 1 announces"), std::string::npos) << status.message();
    return {};
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

// Every bit of the only payload and its header, on the way from rank 1: each is noticed by every rank.
TEST(Round, ADamagedPayloadIsNoticedOnEveryRank) {
  constexpr std::size_t kStream = 8 + 11;
  for (std::size_t bit = 0; bit < 8 * kStream; ++bit) {
    LocalGroup group(2);
    std::vector<std::unique_ptr<Round>> rounds;
    std::vector<std::vector<std::byte>> received(2);
    for (int rank = 0; rank < 2; ++rank) {
      Layout layout;
      layout.messages.push_back({{{0, SlotKind::kPayload, 0, 11}}, 11, Collective::kAllGather});
      rounds.push_back(std::make_unique<Round>(
          Round::Layouts{.of_parity = {layout}, .tensor_count = 1, .dtype = DType::kFloat32, .names = {"a"}},
          group.communicator(rank), steady_clock()));
      rounds[rank]->begin(0);
      std::span<std::byte> slot = rounds[rank]->slot_bytes(0);
      for (std::size_t i = 0; i < slot.size(); ++i) slot[i] = byte_of(rank, 0, 0, i);
      rounds[rank]->mark_written(0, true, slot.size());
      if (rank == 1) (slot.data() - 8)[bit / 8] ^= std::byte{1} << (bit % 8);  // the header stands before the slot
      ASSERT_TRUE(rounds[rank]->start_ready().ok());
    }
    for (int rank = 0; rank < 2; ++rank) {
      Round& round = *rounds[rank];
      ASSERT_TRUE(round.wait(0, kLong).ok());
      Status status = round.check_headers(0);
      std::vector<std::byte> joint(11);
      if (status.ok()) {
        EXPECT_TRUE(round.check_payload(0, 0, 0, round.payload(0, 0, 0, joint)).ok());
        status = round.check_payload(0, 0, 1, round.payload(0, 0, 1, joint));
      }
      EXPECT_EQ(status.code(), StatusCode::kCorruptData) << "bit " << bit;
      EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
      round.mark_done(0);
    }
  }
}

TEST(Round, ErrorsNameTheTensorsOfTheMessage) {
  Layout layout = mixed_layout();
  LocalGroup group(1);
  Round round({.of_parity = {layout}, .tensor_count = 5, .names = {"a", "b", "c", "d", "e"}}, group.communicator(0),
              steady_clock());
  round.begin(0);
  EXPECT_EQ(round.name_of(0), "message 0 (\"a\" and 2 more)");
  EXPECT_EQ(round.name_of(1), "message 1 (\"e\")");
}

}  // namespace
}  // namespace cortado

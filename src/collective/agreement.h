// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "cortado/communicator.h"
#include "cortado/engine.h"

namespace cortado {

// Compares `settings` (a text) and the tensors, a text each with name, shape and dtype, over all ranks. If they differ,
// every rank gets a kMismatch, which names the first rank that differs from rank 0 and in what. Every rank must
// call it. `failure`: why this rank alone can't do what it was asked for, such as a device without memory. Where
// settings and models are the same, all ranks get that of the first such rank, a fatal one before others.
Status check_agreement(Communicator* communicator, std::string_view settings, const std::vector<std::string>& tensors,
                       std::chrono::nanoseconds timeout, const Status& failure = {});

// The same for one number with a name ("layout", "step").
Status check_same_number(Communicator* communicator, std::string_view what, std::uint64_t number,
                         std::chrono::nanoseconds timeout);

// `own` where it is an error; else that of the first rank that has one, which it names. Every rank calls it, so that
// none goes on, and waits for those that do not. `what`: where it happens, such as "load_state".
Status agree_on_outcome(Communicator* communicator, std::string_view what, const Status& own,
                        std::chrono::nanoseconds timeout);

// Whether it is the transport that ended or damaged one of these, perhaps on this rank alone: then ranks may have
// parted, and none can go on. Of any other error all ranks have heard.
inline bool is_cut_off(const Status& status) {
  return status.code() == StatusCode::kTimeout || status.code() == StatusCode::kPeerFailed ||
         status.code() == StatusCode::kCorruptData;
}

// Every rank's values, in rank order; all have as many. A check of them travels behind each rank's: who takes damaged
// ones for true goes another way than the others. kCorruptData: some came damaged, perhaps here alone. `what`: for
// errors.
Result<std::vector<std::byte>> gather_checked_bytes(Communicator* communicator, std::string_view what,
                                                    std::span<const std::byte> own, std::chrono::nanoseconds timeout);

template <typename T>
Result<std::vector<T>> gather_checked(Communicator* communicator, std::string_view what, std::span<const T> own,
                                      std::chrono::nanoseconds timeout) {
  static_assert(std::is_trivially_copyable_v<T>);
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                           gather_checked_bytes(communicator, what, std::as_bytes(own), timeout));
  std::vector<T> all(bytes.size() / sizeof(T));
  if (!all.empty()) std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
  return all;
}

// Of each number the largest of any rank, the same on all of them; infinity where a rank has NaN. Every rank calls it
// with as many numbers: std::int64_t or double.
template <typename Number>
Result<std::vector<Number>> largest_of_ranks(Communicator* communicator, std::span<const Number> own,
                                             std::chrono::nanoseconds timeout);

// Of each number the mean of all ranks, the same on all of them. Every rank calls it with as many numbers.
Result<std::vector<std::int64_t>> mean_of_ranks(Communicator* communicator, std::span<const std::int64_t> own,
                                                std::chrono::nanoseconds timeout);

// The text that rank 0 has. Every rank calls it.
Result<std::string> text_of_rank_0(Communicator* communicator, const std::string& own,
                                   std::chrono::nanoseconds timeout);

// Compares checksums of the tensors over all ranks; every rank must call it, and gets the same text: which tensor of
// which ranks differs. Empty if none does.
struct ReplicaDifference {
  std::string text;
};
Result<ReplicaDifference> compare_replicas(Communicator* communicator, std::span<const ReplicaTensor> tensors,
                                           std::chrono::nanoseconds timeout);

// What check_replicas() of an engine says, from comparison to comparison.
class ReplicaHistory {
 public:
  // kMismatch if they differ, with the step (before which they were compared) and the last one at which all were equal.
  Status note(const ReplicaDifference& difference, std::int64_t step);

 private:
  std::int64_t equal_at_ = -1;
};

}  // namespace cortado

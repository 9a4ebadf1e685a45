// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// For tests of schemes: all ranks of a topology in one thread, which advances them in turn.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/scheme.h"

namespace cortado {

// The values of one rank, one vector a tensor.
using Message = std::vector<std::vector<float>>;

inline std::int64_t elems_of(const std::vector<SchemeTensor>& tensors) {
  std::int64_t elems = 0;
  for (const SchemeTensor& tensor : tensors) elems += tensor.elems();
  return elems;
}

// Small integers, different for each rank, step and tensor; sums of up to 32 of them are exact in bf16 too.
inline Message integer_message(const std::vector<SchemeTensor>& tensors, int rank, int step) {
  Message message;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::vector<float>& values = message.emplace_back(static_cast<std::size_t>(tensors[t].elems()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t mixed = (i + 1) * 2654435761u + static_cast<std::uint64_t>(rank) * 40503u +
                                  static_cast<std::uint64_t>(step) * 977u + t * 7919u;
      values[i] = static_cast<float>(static_cast<int>((mixed >> 7) % 17) - 8);
    }
  }
  return message;
}

inline Message normal_like_message(const std::vector<SchemeTensor>& tensors, int rank, int step) {
  // Made once: sines take longer than most schemes.
  static std::mutex mutex;
  static std::map<std::vector<std::int64_t>, Message> made;
  std::vector<std::int64_t> key = {rank, step};
  for (const SchemeTensor& tensor : tensors) key.insert(key.end(), {tensor.rows, tensor.cols});
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = made.try_emplace(std::move(key));
  Message& message = entry->second;
  if (!is_new) return message;
  message = integer_message(tensors, rank, step);
  for (std::vector<float>& values : message) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] += std::sin(0.7f * static_cast<float>(i) + 1.3f * static_cast<float>(rank) + static_cast<float>(step));
    }
  }
  return message;
}

// The ranks of one group; made once, used for many options.
class SchemeRanks {
 public:
  explicit SchemeRanks(Topology topology) : topology_(std::move(topology)), group_(topology_.world_size()) {
    for (int rank = 0; rank < topology_.world_size(); ++rank) {
      levels_.push_back(LevelCommunicators::create(group_.communicator(rank), topology_).value());
    }
  }

  int size() const { return topology_.world_size(); }
  const Topology& topology() const { return topology_; }
  const LevelCommunicators* levels(int rank) const { return &levels_[static_cast<std::size_t>(rank)]; }

 private:
  Topology topology_;
  LocalGroup group_;
  std::vector<LevelCommunicators> levels_;
};

class SchemeRuns {
 public:
  // `device`: of the ranks with even numbers.
  SchemeRuns(const SchemeRanks& ranks, SchemeSetup setup, const SchemeDevice* device = nullptr)
      : tensors_(setup.tensors) {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      setup.levels = ranks.levels(rank);
      setup.device = rank % 2 == 0 ? device : nullptr;
      Result<std::unique_ptr<SchemeRun>> run = SchemeRun::make(setup);
      if (!run.ok()) {
        status_ = run.status();
        return;
      }
      runs_.push_back(std::move(run).value());
      lent_.push_back(integer_message(tensors_, rank, 0));
    }
  }

  const Status& status() const { return status_; }
  SchemeRun& run(int rank) { return *runs_[static_cast<std::size_t>(rank)]; }
  std::size_t size() const { return runs_.size(); }

  template <typename MakeMessage>
  Status step(int number, MakeMessage&& make_message) {
    for (std::size_t rank = 0; rank < runs_.size(); ++rank) {
      const Message message = make_message(tensors_, static_cast<int>(rank), number);
      for (std::size_t t = 0; t < message.size(); ++t) {
        const int tensor = static_cast<int>(t);
        runs_[rank]->lend(tensor, {.data = lent_[rank][t].data()});
        std::copy(message[t].begin(), message[t].end(),
                  runs_[rank]->reads_lent() ? lent_[rank][t].data() : runs_[rank]->values(tensor).data());
      }
    }
    return step_with_lent(number);
  }

  // The same once values have been written, or lent.
  Status step_with_lent(int number) {
    for (const std::unique_ptr<SchemeRun>& run : runs_) {
      if (Status status = run->begin(number); !status.ok()) return status;
    }
    for (bool all_done = false; !all_done;) {
      all_done = true;
      for (const std::unique_ptr<SchemeRun>& run : runs_) {
        if (run->state() == SchemeState::kReady) {
          if (Status status = run->start(); !status.ok()) return status;
        }
        if (run->state() == SchemeState::kInFlight || run->state() == SchemeState::kOnDevice) {
          const Result<bool> ended = run->test();
          if (!ended.ok()) return ended.status();
        }
        if (run->state() == SchemeState::kArrived) {
          if (Status status = run->proceed(); !status.ok()) return status;
        }
        all_done = all_done && run->state() == SchemeState::kDone;
      }
    }
    return {};
  }

  Message sums(int rank) {
    if (run(rank).writes_lent()) return lent_[static_cast<std::size_t>(rank)];
    Message message;
    for (std::size_t t = 0; t < tensors_.size(); ++t) {
      const std::span<const float> sums = run(rank).sums(static_cast<int>(t));
      message.emplace_back(sums.begin(), sums.end());
    }
    return message;
  }

 private:
  std::vector<SchemeTensor> tensors_;
  std::vector<std::unique_ptr<SchemeRun>> runs_;
  std::vector<Message> lent_;  // of ranks
  Status status_;
};

template <typename MakeMessage>
std::vector<std::vector<double>> exact_sum(const std::vector<SchemeTensor>& tensors, int ranks, int step,
                                           MakeMessage&& make_message) {
  std::vector<std::vector<double>> sum;
  for (const SchemeTensor& tensor : tensors) sum.emplace_back(static_cast<std::size_t>(tensor.elems()));
  for (int rank = 0; rank < ranks; ++rank) {
    const Message message = make_message(tensors, rank, step);
    for (std::size_t t = 0; t < sum.size(); ++t) {
      for (std::size_t i = 0; i < sum[t].size(); ++i) sum[t][i] += static_cast<double>(message[t][i]);
    }
  }
  return sum;
}

}  // namespace cortado

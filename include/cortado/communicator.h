// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Communicator: what the engine needs of a process group. Implementations: LocalGroup (ranks as threads of one
// process, deterministic), CallbackCommunicator (a table of functions over whatever group the caller has), and the
// decorators Recording and Faulty that wrap any of them in tests.
//
// Promises every implementation keeps
//   order     all ranks of a group start the same collectives in the same order; a start never waits for a peer.
//   result    every rank gets the same bytes.
//   ownership the buffers belong to the caller and must stay untouched from start until wait() or test() says done.
//   threads   one communicator is used by one thread at a time.
//   errors    after a fatal Status (Status::is_fatal) no further collective may be started; each rank that takes part
//             gets an error within its timeout, never a hang.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cortado/status.h"
#include "cortado/tensor_view.h"

namespace cortado {

// Names one started collective of one communicator; counts up from 0.
using WorkId = std::uint64_t;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;  // "local", "callback(gloo)", "faulty(local)" ...

  // Starts an in-place SUM over all ranks of `elems` values of `dtype` at `data`; returns at once.
  virtual Result<WorkId> start_all_reduce(void* data, std::int64_t elems, DType dtype) = 0;

  // Starts a gather: every rank contributes the same number of bytes, `received` is world_size * sent.size() long and
  // gets them in rank order. Returns at once; both buffers are the communicator's until the work has ended.
  virtual Result<WorkId> start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received) = 0;

  // True when `work` has ended (its result is in place); does not wait.
  virtual Result<bool> test(WorkId work) = 0;

  // Returns when `work` has ended, or with kTimeout or kPeerFailed after at most `timeout`.
  virtual Status wait(WorkId work, std::chrono::nanoseconds timeout) = 0;

  // The same, but waits. Used when a job is set up, not in steps.
  virtual Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                            std::chrono::nanoseconds timeout) = 0;

  // This rank takes no further part, because of an error of its own. Nothing may be started afterwards. True if the
  // collectives in flight are cut off and their buffers free at once (local; the peers get kPeerFailed with `why`).
  // False if the transport can't: buffers in flight stay taken until wait(), and the peers find out by their timeout.
  virtual bool abandon(const std::string& why) {
    (void)why;
    return false;
  }
};

// ---- local: ranks as threads ---------------------------------------------------------------------------------------

// A group of `world_size` (at least 1) ranks in one process. Sums are taken in rank order in float32 (once rounded to
// the dtype at the end; uint8 wraps), so results do not depend on timing. communicator(r) belongs to the group and is
// to be used by one thread.
//
// The first failure (timeout, mismatch, abandon) is the group's: every rank gets its code and text from then on, for
// all collectives that some rank had not started yet. Collectives that all ranks had started still end well.
class LocalGroup {
 public:
  explicit LocalGroup(int world_size);
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  Communicator* communicator(int rank);

  // Tells the group that `rank` will take no further part (its thread raised or ended): every present and later wait of
  // the other ranks ends at once with kPeerFailed naming it. May be called from any thread; when it returns, no buffer
  // of that rank is used any more.
  void abandon(int rank, const std::string& why);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// ---- callback: a table of functions --------------------------------------------------------------------------------

// Each function gets `context` first and returns 0 or, after an error, a non-zero value with a message in `error`
// (NUL-terminated, at most error_bytes). They are called from the thread that calls the Communicator.
struct CommunicatorCallbacks {
  void* context = nullptr;
  int rank = 0;
  int world_size = 1;
  const char* name = "callback";
  int (*start_all_reduce)(void* context, void* data, std::int64_t elems, int dtype, std::uint64_t work, char* error,
                          std::size_t error_bytes) = nullptr;
  int (*start_all_gather)(void* context, const void* sent, std::int64_t sent_bytes, void* received, std::uint64_t work,
                          char* error, std::size_t error_bytes) = nullptr;
  int (*test)(void* context, std::uint64_t work, int* done, char* error, std::size_t error_bytes) = nullptr;
  // Must return within about timeout_ns; the error code kTimedOut tells a timeout from other failures.
  int (*wait)(void* context, std::uint64_t work, std::int64_t timeout_ns, char* error,
              std::size_t error_bytes) = nullptr;
  int (*all_gather)(void* context, const void* sent, std::int64_t sent_bytes, void* received, std::int64_t timeout_ns,
                    char* error, std::size_t error_bytes) = nullptr;

  static constexpr int kTimedOut = 2;
};

Result<std::unique_ptr<Communicator>> make_callback_communicator(const CommunicatorCallbacks& callbacks);

// ---- decorators for tests ------------------------------------------------------------------------------------------

// One line a collective: "all_reduce bf16 1024". The log can be compared between ranks.
struct RecordedCollective {
  std::string kind;
  DType dtype;
  std::int64_t elems;

  bool operator==(const RecordedCollective&) const = default;
};

class RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(Communicator* inner) : inner_(inner) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return "recording(" + inner_->name() + ")"; }
  Result<WorkId> start_all_reduce(void* data, std::int64_t elems, DType dtype) override;
  Result<WorkId> start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received) override;
  Result<bool> test(WorkId work) override { return inner_->test(work); }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override;
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override;
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

  const std::vector<RecordedCollective>& log() const { return log_; }
  std::int64_t waits() const { return waits_; }
  void clear() { log_.clear(), waits_ = 0; }

 private:
  Communicator* inner_;
  std::vector<RecordedCollective> log_;
  std::int64_t waits_ = 0;
};

// What FaultyCommunicator does to the collective with index `at` (counted from 0 over all calls of start_all_reduce and
// start_all_gather).
struct Fault {
  enum class Kind {
    kDelay,    // the result is reported `delay` after the start at the earliest
    kDrop,     // it and everything after it is never started: the peers wait, and so does this rank, until the timeout
    kError,    // start returns kPeerFailed
    kCorrupt,  // one bit of this rank's contribution is flipped
  };
  std::int64_t at = 0;
  Kind kind = Kind::kDelay;
  std::chrono::nanoseconds delay{0};
};

std::unique_ptr<Communicator> make_faulty_communicator(Communicator* inner, std::vector<Fault> faults);

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Communicator: what the engine needs of a process group. Implementations: LocalGroup (ranks as threads of one
// process, deterministic), a table of functions over whatever group the caller has, MPI (cortado/mpi.h) and NCCL
// (cortado/nccl.h), and decorators that wrap any of them: verifying, checking, and for tests recording and faulty.
//
// Every collective is one plain CollectiveCall given to start(): so a decorator, a transport or an interpreter of
// schemes is one function, not one for each kind.
//
// Promises every implementation keeps
//   order     all ranks of a group start the same collectives in the same order; a start never waits for a peer.
//   result    what two ranks both receive (a sum, a block) has the same bytes on both.
//   ownership the buffers and counts belong to the caller and must stay untouched from start until wait() or test()
//             says done. A start that returns an error took nothing.
//   threads   one communicator is used by one thread at a time. A sub-group counts as the communicator it came from.
//   errors    after a fatal Status (Status::is_fatal) no further collective may be started; each rank that takes part
//             gets an error within its timeout, never a hang.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/topology.h"

namespace cortado {

class Clock;         // cortado/trace.h
class VirtualClock;  // src/collective/virtual_clock.h: tests may bring their own time

// What a collective does. In the table, "a block for each" is world_size blocks one after the other in rank order,
// without gaps; the block of rank r has `elems` elements, or counts[r] where counts are given.
//
//   kind            read from `sent`                  written to `received`
//   all_reduce      elems                             elems: the sum over all ranks
//   reduce_scatter  a block for each rank             own block of the sum over all ranks
//   all_gather      own block                         a block of each rank
//   all_to_all      a block for each rank             a block of each rank
//   broadcast       elems, on the root only           elems, on all but the root
//   reduce          elems                             elems: the sum over all ranks, on the root only
//   gather          own block                         a block of each rank, on the root only
//
// What is neither read nor written on a rank may be null there, and so may what is empty. A message without elements is
// a collective like any other.
enum class CollectiveKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
};

// "all_reduce", "reduce_scatter", ...
std::string_view collective_kind_name(CollectiveKind kind);

struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  DType dtype = DType::kUint8;  // of a sum: the format it is taken in; otherwise only the unit of the sizes
  int root = 0;                 // broadcast, reduce, gather

  // The two may not overlap, except that all_reduce, broadcast and reduce work in place (sent == received), and that
  // the own block of an all_gather, or of the root of a gather, may lie at its place in `received` already; for
  // all_reduce and all_gather on all ranks or on none.
  const void* sent = nullptr;
  void* received = nullptr;

  // Sizes in elements of `dtype`: `elems` where all blocks are equal (counts empty), otherwise world_size counts.
  //   reduce_scatter, all_gather, gather   counts[r] is the block of rank r; every rank gives the same list.
  //   all_to_all                           counts[r] is sent to rank r, received_counts[r] comes from it.
  std::int64_t elems = 0;
  std::span<const std::int64_t> counts = {};
  std::span<const std::int64_t> received_counts = {};  // all_to_all with counts only
};

// Names one started collective of one communicator; counts up from 0.
using WorkId = std::uint64_t;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string name() const = 0;  // "local", "callback(gloo)", "faulty(local)" ...

  // Starts a collective and returns at once. kInvalidArgument for a call that is wrong by itself (nothing has changed
  // then); ranks whose calls do not fit together get kMismatch, here or from test() and wait(), as far as the transport
  // can tell. `call` itself may go afterwards, what it points to may not.
  virtual Result<WorkId> start(const CollectiveCall& call) = 0;

  // The two most used: an in-place sum of `elems` values at `data`, and a gather of equally many bytes of each rank
  // into `received`, which is world_size * sent.size() long.
  Result<WorkId> start_all_reduce(void* data, std::int64_t elems, DType dtype);
  Result<WorkId> start_all_gather(std::span<const std::byte> sent, std::span<std::byte> received);

  // True when `work` has ended (its result is in place); does not wait.
  virtual Result<bool> test(WorkId work) = 0;

  // Returns when `work` has ended, or with kTimeout or kPeerFailed after at most `timeout`.
  virtual Status wait(WorkId work, std::chrono::nanoseconds timeout) = 0;

  // The gather again, but waits, and whatever comes of it the buffers are free when it returns. Used when a job is set
  // up, not in steps.
  virtual Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                            std::chrono::nanoseconds timeout) = 0;

  // The failure of a peer, where one is known by now; ok where none is, or where the transport learns of it from
  // collectives alone. Does not wait for peers. For who waits for something else, such as a device, which may itself
  // wait for a peer that is gone: about once a second (collective/device_wait.h).
  virtual Status peer_failure() { return {}; }

  // A communicator for some of the ranks, in the order of the list: rank i of it is rank ranks[i] of this one. Every
  // rank of this communicator calls it at the same point of its program with the list it is in itself (lists of
  // different ranks are equal or share no rank), because some transports set up all sub-groups together; it may wait
  // for the others. Collectives of different communicators have no order among each other. A failure in one is a
  // failure of all that came from the same one, where the transport can tell them. It must not be used after the
  // communicator it came from has gone.
  virtual Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks);

  // This rank takes no further part, because of an error of its own. Nothing may be started afterwards. True if the
  // collectives in flight are cut off and their buffers free at once (local; the peers get kPeerFailed with `why`).
  // False if the transport can't: buffers in flight stay taken until wait(), and the peers are told by other ways, or
  // find out by their timeout.
  virtual bool abandon(const std::string& why) {
    (void)why;
    return false;
  }
};

// ---- the levels of a topology --------------------------------------------------------------------------------------

// The topology that the launcher has made: two levels, machines and the ranks on each, or one where there is but one
// machine or one rank on each, or where no rank has been told anything (`place` of launcher_place()). Every rank calls
// it at the same point of its program. kMismatch, the same on all ranks, where machines have different numbers of ranks
// or the ranks of a machine are not numbered one after the other.
Result<Topology> agree_on_topology(Communicator* whole, const std::optional<LauncherPlace>& place,
                                   std::chrono::nanoseconds timeout);

// The communicators of one rank for every range of levels: among the ranks that differ in these levels only.
class LevelCommunicators {
 public:
  // Makes the sub-groups; every rank of `whole` calls it at the same point of its program. `whole` is the communicator
  // of all levels and must outlive the result. kInvalidArgument where its world size is not the topology's.
  static Result<LevelCommunicators> create(Communicator* whole, const Topology& topology);

  const Topology& topology() const { return topology_; }

  // `range` lies within the topology. A group of one rank has a communicator like any other.
  Communicator* of(LevelRange range) const;

 private:
  Topology topology_;
  std::vector<Communicator*> of_range_;  // of [first][last], as levels x levels
  std::vector<std::unique_ptr<Communicator>> subgroups_;
};

// ---- local: ranks as threads ---------------------------------------------------------------------------------------

// A group of `world_size` (at least 1) ranks in one process. Sums are taken in rank order in float32 (once rounded to
// the dtype at the end; uint8 wraps), so results do not depend on timing. communicator(r) belongs to the group and is
// to be used by one thread; so are its sub-groups, which must not outlive the group.
//
// The first failure (timeout, mismatch, abandon) is the failure of the group and of all its sub-groups: every rank gets
// its code and text from then on, for all collectives that some rank had not started yet. Collectives that all ranks
// had started still end well. Texts name ranks by their number in this group, those of sub-groups too.
class LocalGroup {
 public:
  // `clock` must outlive the group; null: the machine's time.
  explicit LocalGroup(int world_size, VirtualClock* clock = nullptr);
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
  // Starts collective number `work`. The call has been checked; `call` is valid until the function returns.
  int (*start)(void* context, const CollectiveCall* call, std::uint64_t work, char* error,
               std::size_t error_bytes) = nullptr;
  int (*test)(void* context, std::uint64_t work, int* done, char* error, std::size_t error_bytes) = nullptr;
  // Must return within about timeout_ns; the error code kTimedOut tells a timeout from other failures.
  int (*wait)(void* context, std::uint64_t work, std::int64_t timeout_ns, char* error,
              std::size_t error_bytes) = nullptr;
  int (*all_gather)(void* context, const void* sent, std::int64_t sent_bytes, void* received, std::int64_t timeout_ns,
                    char* error, std::size_t error_bytes) = nullptr;
  // An error where it is known that a peer has failed, otherwise 0 (Communicator::peer_failure). May be null: then
  // nothing is known.
  int (*check_peers)(void* context, char* error, std::size_t error_bytes) = nullptr;
  // Fills `table` for the sub-group of these ranks (Communicator::subgroup); its context lives as long as this one. May
  // be null: then there are no sub-groups.
  int (*subgroup)(void* context, const int* ranks, std::int64_t rank_count, CommunicatorCallbacks* table, char* error,
                  std::size_t error_bytes) = nullptr;
  // This rank takes no further part (Communicator::abandon): tells the others. May be null: then they find out by their
  // timeout. Buffers in flight stay taken.
  void (*abandon)(void* context, const char* why) = nullptr;

  static constexpr int kTimedOut = 2;
};

Result<std::unique_ptr<Communicator>> make_callback_communicator(const CommunicatorCallbacks& callbacks);

// ---- verifying: do the calls fit together? -------------------------------------------------------------------------

// For transports that can't tell (all but local): before every collective the ranks gather 32 bytes each of what they
// start, and ranks whose calls do not fit together all get the same kMismatch from test() or wait(), instead of wrong
// sums, a timeout or a crash of the transport. Costs one small all-gather a collective. After a mismatch the buffers in
// flight stay those of `inner`, which must outlive this. Destroyed with signatures in flight it abandons `inner`.
std::unique_ptr<Communicator> make_verifying_communicator(Communicator* inner);

// ---- checking: did it arrive as it was sent? -----------------------------------------------------------------------

// For links and memory that damage what they carry: beside every collective a second one of the same kind carries
// checks of what each rank has put in, and what arrives is compared with them. A difference is kCorruptData from test()
// or wait(); then no further collective can be started, on this communicator and all its sub-groups.
//
// What is moved (all_gather, all_to_all, broadcast, gather) has a hash of 8 bytes a block: any change is seen, but for
// one in 2^64, and the error names the rank that sent it.
//
// Sums (all_reduce, reduce_scatter, reduce) have linear checks of blocks, which the transport adds as it adds the
// values: 0.2 % of the bytes of float32 (64 ranks: 1.6 %), 6 % of 16 bits, 0.3 % of uint8. Whose contribution was
// damaged a sum does not tell. Of uint8 any change of one or two values of a block is seen; of floats what is more than
// rounding may do (collective/sum_checks.h): of float32 and 4 ranks a change by a hundredth of an average contribution,
// of 16 bits, where rounding itself is coarse, only by some contributions. Not seen are smaller changes, also where
// they reach one rank alone, changes of several values that cancel, and blocks in which a rank has an Inf or NaN.
//
// Memory must be the host's. Reads what is sent and what has come once each. Goes by the name of `inner`, which must
// outlive it, as must `clock`, by which waits are timed (null: the machine's). Destroyed with collectives in flight it
// abandons `inner`.
std::unique_ptr<Communicator> make_checking_communicator(Communicator* inner, const Clock* clock = nullptr);

// ---- decorators for tests ------------------------------------------------------------------------------------------

// One collective: kind "all_reduce", and the sizes as they were given. The log can be compared between ranks (those of
// all_to_all with counts and of different sub-groups differ).
struct RecordedCollective {
  std::string kind;
  DType dtype;
  std::int64_t elems;
  int root = 0;
  std::vector<std::int64_t> counts = {};
  std::vector<std::int64_t> received_counts = {};
  std::vector<int> ranks = {};  // of the sub-group it ran in; empty for the recorded communicator itself

  bool operator==(const RecordedCollective&) const = default;
};

// Its sub-groups write into the same log.
class RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(Communicator* inner) : inner_(inner) {}
  RecordingCommunicator(const RecordingCommunicator&) = delete;
  RecordingCommunicator& operator=(const RecordingCommunicator&) = delete;
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name() const override { return "recording(" + inner_->name() + ")"; }
  Result<WorkId> start(const CollectiveCall& call) override;
  Result<bool> test(WorkId work) override { return inner_->test(work); }
  Status wait(WorkId work, std::chrono::nanoseconds timeout) override;
  Status all_gather(std::span<const std::byte> sent, std::span<std::byte> received,
                    std::chrono::nanoseconds timeout) override;
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks) override;
  Status peer_failure() override { return inner_->peer_failure(); }
  bool abandon(const std::string& why) override { return inner_->abandon(why); }

  const std::vector<RecordedCollective>& log() const { return whole_->log_; }
  std::int64_t waits() const { return whole_->waits_; }
  void clear() { whole_->log_.clear(), whole_->waits_ = 0; }

 private:
  std::unique_ptr<Communicator> owned_;  // of a sub-group
  Communicator* inner_;
  RecordingCommunicator* whole_ = this;  // has the log
  std::vector<int> ranks_;
  std::vector<RecordedCollective> log_;
  std::int64_t waits_ = 0;
};

// What FaultyCommunicator does to the collective with index `at` (counted from 0 over all calls of start(), those of
// its sub-groups too).
struct Fault {
  enum class Kind {
    kDelay,     // the result is reported `delay` after the start at the earliest
    kDrop,      // it and everything after it is never started: the peers wait, and so does this rank, until the timeout
    kError,     // start returns kPeerFailed
    kCorrupt,   // one bit of this rank's contribution is flipped
    kTruncate,  // half of this rank's contribution is missing: of a sum the sizes then disagree, else zeros arrive
  };
  std::int64_t at = 0;
  Kind kind = Kind::kDelay;
  std::chrono::nanoseconds delay{0};
};

// `clock`: as for LocalGroup; delays and timeouts of dropped collectives are in its time.
std::unique_ptr<Communicator> make_faulty_communicator(Communicator* inner, std::vector<Fault> faults,
                                                       VirtualClock* clock = nullptr);

}  // namespace cortado

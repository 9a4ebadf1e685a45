// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What does an interpreted scheme cost over the same collectives, encodes and decodes called by hand?
//
// Four ranks (2 x 2): of one process, driven by one thread, so that processor time is all there is and collectives are
// copies in memory; or, with --mpi, of four processes that mpirun started, timed by the clock of the first. Both ways
// work on one message of one tensor, keep residuals where something is lost, measure them, and guard payloads by a
// check; both are timed in turn, round after round; overhead is the median of the ratios of rounds. First their results
// are compared, bit by bit.
#ifdef CORTADO_BENCH_HAS_MPI
#include <mpi.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/codec/bench_program.h"
#include "collective/scheme.h"
#include "core/checksum.h"
#include "core/philox.h"
#ifdef CORTADO_BENCH_HAS_MPI
#include "cortado/mpi.h"
#endif

namespace cortado {
namespace {

constexpr int kRanks = 4;
const Topology kTopology = {{{"intra", 2}, {"inter", 2}}};

void must(const Status& status) {
  if (!status.ok()) die_of_missing_value(status);
}

// ---- by hand -------------------------------------------------------------------------------------------------------

// One rank of a scheme written out: phases, each of which ends with a start. All ranks run a phase, then all wait.
struct HandRank {
  Communicator *flat, *intra, *inter;
  const Codec* codec = nullptr;
  std::int64_t elems = 0;
  AlignedBuffer<float> values, other, decoded, kept[2], fresh[2];
  AlignedBuffer<std::byte> sent, received, scratch;
  double lost = 0;
  Communicator* running = nullptr;
  WorkId work = 0;

  void begin(Communicator* communicator, const CollectiveCall& call) {
    running = communicator;
    work = communicator->start(call).value();
  }
  void end() { must(running->wait(work, std::chrono::seconds(60))); }

  TensorView part(float* data, std::int64_t count) const { return {data, DType::kFloat32, 1, count}; }

  // Of a payload and the check behind it.
  std::uint64_t most_bytes(std::int64_t count) const {
    return codec->max_payload_bytes(1, count, DType::kFloat32) + kPayloadCheckBytes;
  }

  // Adds the residual, encodes, keeps what is lost, puts the check behind it.
  std::uint64_t encode(float* input, std::int64_t count, std::int64_t at, int place, std::uint64_t step,
                       std::byte* payload) {
    float* kept_here = kept[place].data() + at;
    for (std::int64_t i = 0; i < count; ++i) input[i] += kept_here[i];
    const std::uint64_t room = codec->max_payload_bytes(1, count, DType::kFloat32);
    const std::uint64_t bytes =
        codec->encode(part(input, count), {.step = step}, {payload, room}, scratch.span()).value();
    must(codec->decode({payload, bytes}, part(decoded.data(), count), scratch.span()));
    float* fresh_here = fresh[place].data() + at;
    const DifferenceSquares squares = take_differences(input, decoded.data(), count, fresh_here);
    lost += squares.of_differences;
    const auto check = static_cast<std::uint32_t>(checksum_64({payload, bytes}));
    std::memcpy(payload + bytes, &check, kPayloadCheckBytes);
    return bytes + kPayloadCheckBytes;
  }
  void decode(std::span<const std::byte> sent, std::int64_t count, bool is_first, float* sum) {
    const std::span<const std::byte> payload = sent.first(sent.size() - kPayloadCheckBytes);
    std::uint32_t found = 0;
    std::memcpy(&found, sent.data() + payload.size(), kPayloadCheckBytes);
    if (found != static_cast<std::uint32_t>(checksum_64(payload))) std::abort();
    must(codec->decode(payload, part(is_first ? sum : decoded.data(), count), scratch.span()));
    if (is_first) return;
    for (std::int64_t i = 0; i < count; ++i) sum[i] += decoded[static_cast<std::size_t>(i)];
  }
};

using Phase = std::function<void(HandRank&, std::uint64_t step)>;

Phase all_reduce_flat() {
  return [](HandRank& r, std::uint64_t) {
    r.begin(r.flat, {.kind = CollectiveKind::kAllReduce,
                     .dtype = DType::kFloat32,
                     .sent = r.values.data(),
                     .received = r.values.data(),
                     .elems = r.elems});
  };
}

std::vector<Phase> hierarchical() {
  return {[](HandRank& r, std::uint64_t) {
            float* own = r.other.data() + r.intra->rank() * r.elems / 2;
            r.begin(r.intra, {.kind = CollectiveKind::kReduceScatter,
                              .dtype = DType::kFloat32,
                              .sent = r.values.data(),
                              .received = own,
                              .elems = r.elems / 2});
          },
          [](HandRank& r, std::uint64_t) {
            float* own = r.other.data() + r.intra->rank() * r.elems / 2;
            r.begin(r.inter, {.kind = CollectiveKind::kAllReduce,
                              .dtype = DType::kFloat32,
                              .sent = own,
                              .received = own,
                              .elems = r.elems / 2});
          },
          [](HandRank& r, std::uint64_t) {
            const float* own = r.other.data() + r.intra->rank() * r.elems / 2;
            r.begin(r.intra, {.kind = CollectiveKind::kAllGather,
                              .dtype = DType::kFloat32,
                              .sent = own,
                              .received = r.values.data(),
                              .elems = r.elems / 2});
          }};
}

// Payloads of one size.
std::vector<Phase> gathered() {
  return {[](HandRank& r, std::uint64_t step) {
            const std::uint64_t bytes = r.encode(r.values.data(), r.elems, 0, 0, step, r.sent.data());
            r.begin(r.flat, {.kind = CollectiveKind::kAllGather,
                             .sent = r.sent.data(),
                             .received = r.received.data(),
                             .elems = static_cast<std::int64_t>(bytes)});
          },
          [](HandRank& r, std::uint64_t) {
            const std::uint64_t bytes = r.most_bytes(r.elems);
            for (int i = 0; i < kRanks; ++i) {
              r.decode({r.received.data() + static_cast<std::uint64_t>(i) * bytes, bytes}, r.elems, i == 0,
                       r.values.data());
            }
            std::swap(r.kept[0], r.fresh[0]);
          }};
}

std::vector<Phase> exchanged() {
  return {[](HandRank& r, std::uint64_t step) {
            const std::int64_t count = r.elems / kRanks;
            std::uint64_t bytes = 0;
            for (int i = 0; i < kRanks; ++i) {
              bytes += r.encode(r.values.data() + i * count, count, i * count, 0, step, r.sent.data() + bytes);
            }
            r.begin(r.flat, {.kind = CollectiveKind::kAllToAll,
                             .sent = r.sent.data(),
                             .received = r.received.data(),
                             .elems = static_cast<std::int64_t>(bytes) / kRanks});
          },
          [](HandRank& r, std::uint64_t step) {
            const std::int64_t count = r.elems / kRanks;
            const std::uint64_t bytes = r.most_bytes(count);
            float* own = r.values.data() + r.flat->rank() * count;
            for (int i = 0; i < kRanks; ++i) {
              r.decode({r.received.data() + static_cast<std::uint64_t>(i) * bytes, bytes}, count, i == 0, own);
            }
            (void)r.encode(own, count, 0, 1, step, r.sent.data());
            r.begin(r.flat, {.kind = CollectiveKind::kAllGather,
                             .sent = r.sent.data(),
                             .received = r.received.data(),
                             .elems = static_cast<std::int64_t>(bytes)});
          },
          [](HandRank& r, std::uint64_t) {
            const std::int64_t count = r.elems / kRanks;
            const std::uint64_t bytes = r.most_bytes(count);
            for (int i = 0; i < kRanks; ++i) {
              r.decode({r.received.data() + static_cast<std::uint64_t>(i) * bytes, bytes}, count, true,
                       r.values.data() + i * count);
            }
            for (int place = 0; place < 2; ++place) std::swap(r.kept[place], r.fresh[place]);
          }};
}

// ---- both ----------------------------------------------------------------------------------------------------------

struct Workload {
  std::string name;
  std::string option;
  std::string codec;
  std::int64_t elems;
  std::vector<Phase> by_hand;  // the last one may start nothing
};

std::vector<Workload> workloads() {
  std::vector<Workload> list;
  for (const std::int64_t elems : {std::int64_t{1} << 12, std::int64_t{1} << 16, std::int64_t{1} << 20}) {
    list.push_back({"all_reduce", "all_reduce@flat", "none", elems, {all_reduce_flat()}});
    list.push_back(
        {"hierarchical", "reduce_scatter@intra all_reduce@inter all_gather@intra", "none", elems, hierarchical()});
    for (const char* codec : {"cast(bf16)", "quant(bits=4)"}) {
      list.push_back(
          {std::string("gathered ") + codec, "encode@cpu all_gather@flat decode@cpu", codec, elems, gathered()});
      list.push_back({std::string("exchanged ") + codec,
                      "encode@cpu all_to_all@flat decode@cpu encode@cpu all_gather@flat decode@cpu", codec, elems,
                      exchanged()});
    }
  }
  return list;
}

std::vector<float> input_of(int rank, std::int64_t elems) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(1, 0, static_cast<std::uint64_t>(rank), values.data(), elems);
  return values;
}

// The ranks of this process: one way's and the other's communicators.
struct Ranks {
  std::vector<Communicator*> by_hand, of_schemes;
};

class Comparison {
 public:
  Comparison(const Workload& workload, const Ranks& ranks) : workload_(workload) {
    if (workload.codec != "none") codec_ = make_codec(workload.codec).value();
    for (std::size_t i = 0; i < ranks.by_hand.size(); ++i) {
      inputs_.push_back(input_of(ranks.by_hand[i]->rank(), workload.elems));
      hand_levels_.push_back(LevelCommunicators::create(ranks.by_hand[i], kTopology).value());
      scheme_levels_.push_back(LevelCommunicators::create(ranks.of_schemes[i], kTopology).value());
    }
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      make_hand(hand_levels_[i]);
      runs_.push_back(SchemeRun::make({.levels = &scheme_levels_[i],
                                       .option = Option::parse(workload.option, kTopology).value(),
                                       .codec = codec_.get(),
                                       .tensors = {{"tensor", 1, workload.elems}},
                                       .has_feedback = codec_ != nullptr})
                          .value());
    }
  }

  void run_by_hand(std::uint64_t step) {
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank)
      std::copy(inputs_[rank].begin(), inputs_[rank].end(), hand_[rank].values.data());
    for (const Phase& phase : workload_.by_hand) {
      for (HandRank& rank : hand_) {
        rank.running = nullptr;
        phase(rank, step);
      }
      for (HandRank& rank : hand_) {
        if (rank.running != nullptr) rank.end();
      }
    }
  }

  void run_scheme(std::int64_t step) {
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      std::copy(inputs_[rank].begin(), inputs_[rank].end(), runs_[rank]->values(0).begin());
      must(runs_[rank]->begin(step));
    }
    while (runs_[0]->state() != SchemeState::kDone) {
      for (const auto& run : runs_) must(run->start());
      for (const auto& run : runs_) must(run->wait(std::chrono::seconds(60)));
      for (const auto& run : runs_) must(run->proceed());
    }
    for (const auto& run : runs_) run->commit();
  }

  bool results_are_equal() {
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      const std::span<const float> sums = runs_[rank]->sums(0);
      if (std::memcmp(sums.data(), hand_[rank].values.data(), sums.size_bytes()) != 0) return false;
    }
    return true;
  }

 private:
  void make_hand(const LevelCommunicators& levels) {
    HandRank& hand = hand_.emplace_back();
    hand.flat = levels.of({0, 1});
    hand.intra = levels.of({0, 0});
    hand.inter = levels.of({1, 1});
    hand.elems = workload_.elems;
    const auto elems = static_cast<std::size_t>(workload_.elems);
    hand.values = AlignedBuffer<float>(elems);
    hand.other = AlignedBuffer<float>(elems);
    if (codec_ == nullptr) return;
    hand.codec = codec_.get();
    hand.decoded = AlignedBuffer<float>(elems);
    for (int place = 0; place < 2; ++place) {
      hand.kept[place] = AlignedBuffer<float>(elems);
      hand.fresh[place] = AlignedBuffer<float>(elems);
    }
    const std::uint64_t bytes = 2 * hand.most_bytes(workload_.elems);
    hand.sent = AlignedBuffer<std::byte>(bytes);
    hand.received = AlignedBuffer<std::byte>(kRanks * bytes);
    hand.scratch = AlignedBuffer<std::byte>(codec_->scratch_bytes(1, workload_.elems, DType::kFloat32));
  }

  const Workload& workload_;
  std::unique_ptr<Codec> codec_;
  std::vector<std::vector<float>> inputs_;
  std::vector<LevelCommunicators> hand_levels_, scheme_levels_;
  std::vector<HandRank> hand_;
  std::vector<std::unique_ptr<SchemeRun>> runs_;
};

int run(const BenchOptions& options, const Ranks& ranks) {
  const bool prints = ranks.by_hand.front()->rank() == 0, one_process = ranks.by_hand.size() == kRanks;
  if (prints) {
    print_conditions(options);
    std::printf("%-26s %10s %14s %14s %9s\n", one_process ? "2 x 2 ranks, one process" : "2 x 2 ranks, over MPI",
                "values", "by hand [us]", "scheme [us]", "overhead");
  }
  for (const Workload& workload : workloads()) {
    if (!options.wants(workload.name + " " + std::to_string(workload.elems))) continue;
    Comparison comparison(workload, ranks);
    for (int step = 0; step < 2; ++step) {
      comparison.run_by_hand(static_cast<std::uint64_t>(step));
      comparison.run_scheme(step);
      if (comparison.results_are_equal()) continue;
      std::printf("%s of %lld: the results differ\n", workload.name.c_str(), static_cast<long long>(workload.elems));
      return 1;
    }
    Samples by_hand, scheme;
    const std::int64_t values_a_sample = one_process ? std::int64_t{1} << 20 : std::int64_t{1} << 18;
    const int repeats = static_cast<int>(std::max<std::int64_t>(1, values_a_sample / workload.elems));
    const auto add_to = [&](Samples& samples, const auto& step) {
      const auto steps = [&] {
        for (int i = 0; i < repeats; ++i) step(i);
      };
      one_process ? samples.add(steps) : samples.add_elapsed(steps);
    };
    for (int round = 0; round < options.rounds; ++round) {
      add_to(by_hand, [&](int i) { comparison.run_by_hand(static_cast<std::uint64_t>(i)); });
      add_to(scheme, [&](int i) { comparison.run_scheme(i); });
    }
    if (!prints) continue;
    const double a_step = 1e6 / repeats / static_cast<double>(ranks.by_hand.size());
    std::printf("%-26s %10lld %14.2f %14.2f %8.1f%%\n", workload.name.c_str(), static_cast<long long>(workload.elems),
                by_hand.median_s() * a_step, scheme.median_s() * a_step, (scheme.median_ratio_to(by_hand) - 1) * 100);
    std::fflush(stdout);
  }
  return 0;
}

int run_in_process(const BenchOptions& options) {
  LocalGroup hand_group(kRanks), scheme_group(kRanks);
  Ranks ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.by_hand.push_back(hand_group.communicator(rank));
    ranks.of_schemes.push_back(scheme_group.communicator(rank));
  }
  return run(options, ranks);
}

#ifdef CORTADO_BENCH_HAS_MPI
int run_over_mpi(const BenchOptions& options) {
  MPI_Init(nullptr, nullptr);
  int code = 1;
  {
    const auto by_hand = make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD)).value();
    const auto of_schemes = make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD)).value();
    if (by_hand->world_size() == kRanks) {
      code = run(options, {{by_hand.get()}, {of_schemes.get()}});
      if (code != 0) MPI_Abort(MPI_COMM_WORLD, code);  // the others may have seen nothing, and go on
    } else if (by_hand->rank() == 0) {
      std::fprintf(stderr, "%d processes, expected %d: mpirun -n %d scheme_bench --mpi\n", by_hand->world_size(),
                   kRanks, kRanks);
    }
  }
  MPI_Finalize();
  return code;
}
#else
int run_over_mpi(const BenchOptions&) {
  std::fprintf(stderr, "--mpi: MPI was not found when this was built\n");
  return 1;
}
#endif

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  const cortado::BenchOptions options(argc, argv, 41);
  const bool over_mpi = options.arguments == std::vector<std::string>{"--mpi"};
  if (!over_mpi && !options.arguments.empty()) {
    std::fprintf(stderr, "%s: expected --mpi, --rounds=N or nothing\n", options.arguments.front().c_str());
    return 1;
  }
  return over_mpi ? cortado::run_over_mpi(options) : cortado::run_in_process(options);
}

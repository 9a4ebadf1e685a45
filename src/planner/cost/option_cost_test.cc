// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Every option's chain against a second opinion: a model that follows what each rank of a small cluster holds, piece by
// piece, and adds up what the operations take.
#include "planner/cost/option_cost.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <string>

namespace cortado {
namespace {

constexpr std::int64_t kElems = 1 << 12;

TimeCurve line(std::int64_t from_ns, std::int64_t per_unit_ns) {
  return {{1, 1 << 20}, {from_ns + per_unit_ns, from_ns + (per_unit_ns << 20)}};
}

// Different lines for everything, so that no mistake hides.
Cluster small_cluster(int levels) {
  Cluster cluster;
  const char* names[] = {"intra", "inter", "wan"};
  for (int l = 0; l < levels; ++l) {
    ClusterLevel level = {names[l], l == 1 ? 4 : 2, "", {}, {}};
    for (int k = static_cast<int>(OpKind::kAllReduce); k <= static_cast<int>(OpKind::kGather); ++k) {
      level.collectives[static_cast<OpKind>(k)] = line(1000 * (l + 1) + 10 * k, 3 * l + k);
    }
    cluster.levels.push_back(level);
  }
  for (int first = 0; first < levels; ++first) {
    for (int last = first + 1; last < levels; ++last) {
      ClusterRange range = {{first, last}, {}, {}};
      for (int k = static_cast<int>(OpKind::kAllReduce); k <= static_cast<int>(OpKind::kGather); ++k) {
        range.collectives[static_cast<OpKind>(k)] = line(7000 * (first + 1) + 500 * last + 10 * k, 11 + k);
      }
      cluster.ranges.push_back(range);
    }
  }
  int n = 0;
  for (const char* codec : {"cast(fp16)", "topk(density=0.125)"}) {
    for (const OpDevice device : {OpDevice::kCpu, OpDevice::kGpu}) {
      for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
        ++n;
        cluster.codecs.push_back({codec, device, direction, 1, line(100 * n, n), {}});
      }
    }
  }
  cluster.host_to_device = line(55, 1);
  cluster.device_to_host = line(66, 2);
  return cluster;
}

// What a rank holds: payloads of equal parts of the tensor, by contributor and place; or one part of its values.
struct Held {
  std::int64_t begin = 0, end = kElems;  // of the values
  std::vector<std::pair<std::int64_t, std::int64_t>> payloads;
  bool nothing = false;
};

class SecondOpinion {
 public:
  SecondOpinion(const Cluster& cluster, const CodecCost& codec)
      : cluster_(cluster), codec_(codec), topology_(cluster.topology()) {}

  std::int64_t time_ns(const Option& option) {
    held_.assign(topology_.world_size(), {});
    encoded_ = false;
    place_ = OpDevice::kGpu;
    std::int64_t total = 0;
    for (const Operation& op : option.operations) total += step_ns(op);
    return total + move_ns(OpDevice::kGpu);
  }

 private:
  std::int64_t bytes(const Held& held) const {
    if (held.nothing) return 0;
    if (!encoded_) return (held.end - held.begin) * 4;
    std::int64_t total = 0;
    for (const auto& [begin, end] : held.payloads) total += payload_bytes(end - begin);
    return total;
  }
  std::int64_t payload_bytes(std::int64_t elems) const {
    return static_cast<std::int64_t>(codec_.codec->max_payload_bytes(1, elems, DType::kFloat32));
  }
  std::int64_t move_ns(OpDevice to) {
    if (to == place_) return 0;
    place_ = to;
    return (to == OpDevice::kCpu ? cluster_.device_to_host : cluster_.host_to_device).at(bytes(held_[0]));
  }
  std::int64_t step_ns(const Operation& op) {
    if (op.kind == OpKind::kEncode) {
      const std::int64_t moved = move_ns(op.device);
      for (Held& held : held_) held.payloads = {{held.begin, held.end}};
      encoded_ = true;
      return moved + codec_.encode_ns(op.device, held_[0].end - held_[0].begin);
    }
    if (op.kind == OpKind::kDecode) {
      const std::int64_t moved = move_ns(op.device);
      std::int64_t time = 0;
      for (const auto& [begin, end] : held_[0].payloads) time += codec_.decode_ns(op.device, end - begin);
      for (Held& held : held_) {
        if (held.payloads.empty()) continue;
        held.begin = held.end = held.payloads[0].first;
        for (const auto& [begin, end] : held.payloads)
          held.begin = std::min(held.begin, begin), held.end = std::max(held.end, end);
      }
      encoded_ = false;
      return moved + time;
    }
    // Ranks that differ from rank 0 inside the levels only, and are at work: they share one link.
    std::int64_t groups = 0;
    int unit = 1;
    for (int l = 0; l < op.levels.first; ++l) unit *= topology_.levels[l].ranks;
    for (int rank = 0; rank < unit; ++rank) groups += !held_[rank].nothing;
    const std::vector<Held> before = held_;
    for (int rank = 0; rank < topology_.world_size(); ++rank) held_[rank] = after(op, rank, before);
    std::int64_t size = bytes(before[0]);
    if (op.kind == OpKind::kAllGather) size = bytes(held_[0]);
    if (op.kind == OpKind::kGather) size = bytes(held_[0]);
    std::int64_t announced = 0;
    if (encoded_ && !codec_.traits.fixed_size) {
      const bool gathers = op.kind == OpKind::kAllGather || op.kind == OpKind::kGather;
      announced = curve(gathers ? OpKind::kAllGather : op.kind, op.levels)
                      .at(8 * groups *
                          static_cast<std::int64_t>(gathers ? held_[0].payloads.size() : before[0].payloads.size()));
    }
    return announced + curve(op.kind, op.levels).at(size * groups);
  }
  const TimeCurve& curve(OpKind kind, LevelRange levels) const {
    if (levels.first == levels.last) return cluster_.levels[levels.first].collectives.at(kind);
    for (const ClusterRange& range : cluster_.ranges) {
      if (range.levels == levels) return range.collectives.at(kind);
    }
    return cluster_.ranges[0].collectives.at(kind);
  }
  Held after(const Operation& op, int rank, const std::vector<Held>& before) const {
    const std::vector<int> group = topology_.group_of(rank, op.levels);
    const int place = topology_.rank_in_group(rank, op.levels);
    Held held = before[rank];
    if (before[group[0]].nothing) return held;
    const std::int64_t n = static_cast<std::int64_t>(group.size());
    const std::int64_t part = (held.end - held.begin) / n;
    switch (op.kind) {
      case OpKind::kReduceScatter:
      case OpKind::kAllToAll:
        held.begin += place * part;
        held.end = held.begin + part;
        held.payloads.clear();
        if (!encoded_) break;
        for (const int peer : group) {
          if (op.kind == OpKind::kReduceScatter && peer != rank) continue;
          for (const auto& [begin, end] : before[peer].payloads) {
            const std::int64_t cut = (end - begin) / n;
            held.payloads.push_back({begin + place * cut, begin + (place + 1) * cut});
          }
        }
        break;
      case OpKind::kAllGather:
      case OpKind::kGather:
        if (op.kind == OpKind::kGather && place != 0) {
          held.nothing = true;
          return held;
        }
        held.payloads.clear();
        for (const int peer : group) {
          held.begin = std::min(held.begin, before[peer].begin);
          held.end = std::max(held.end, before[peer].end);
          held.payloads.insert(held.payloads.end(), before[peer].payloads.begin(), before[peer].payloads.end());
        }
        break;
      case OpKind::kReduce:
        held.nothing = place != 0;
        break;
      case OpKind::kBroadcast:
        held = before[group[0]];
        break;
      default:
        break;
    }
    return held;
  }

  const Cluster& cluster_;
  const CodecCost& codec_;
  Topology topology_;
  std::vector<Held> held_;
  bool encoded_ = false;
  OpDevice place_ = OpDevice::kGpu;
};

void compare_all(const OptionSpace& space, int codec, std::size_t expected_count) {
  const Cluster cluster = small_cluster(space.levels);
  ASSERT_TRUE(cluster.check().ok()) << cluster.check().to_string();
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kGpu, {}, &notes).value();
  const CostModel model(cluster, OpDevice::kGpu);
  SecondOpinion opinion(cluster, codecs[codec]);
  const std::vector<Option> options = generate_options(space).value();
  EXPECT_EQ(options.size(), expected_count);
  for (const Option& option : options) {
    OptionChain chain;
    ASSERT_TRUE(make_chain(model, &codecs[codec], {.elems = kElems}, option, &chain));
    ASSERT_EQ(chain.own_ns, opinion.time_ns(option)) << option.to_string(cluster.topology());
    EXPECT_EQ(chain.lossy_passes, option.encodes());
  }
}

TEST(OptionCost, TheFiftyFourOptionsOfOneDevice) {
  for (const int codec : {0, 1}) compare_all({.devices = {OpDevice::kGpu}, .rooted = false}, codec, 54);
}

TEST(OptionCost, TheWholeTree) {
  for (const int codec : {0, 1}) compare_all({}, codec, 4341);
}

TEST(OptionCost, SummedPayloads) {
  compare_all({.sum_payloads = true}, 0, generate_options({.sum_payloads = true}).value().size());
}

TEST(OptionCost, ThreeLevels) {
  const OptionSpace space = {.levels = 3, .devices = {OpDevice::kGpu}, .rooted = false};
  compare_all(space, 1, generate_options(space).value().size());
}

// One tensor by hand: 2 x 4 ranks, 4096 elements, cast.
TEST(OptionCost, OneByHand) {
  const Cluster cluster = small_cluster(2);
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kGpu, {"cast(fp16)"}, &notes).value();
  const CostModel model(cluster, OpDevice::kGpu);
  const Option option = Option::parse(
                            "reduce_scatter@intra encode@cpu all_to_all@inter decode@cpu encode@gpu all_gather@inter "
                            "decode@gpu all_gather@intra",
                            cluster.topology())
                            .value();
  OptionChain chain;
  ASSERT_TRUE(make_chain(model, &codecs[0], {.elems = kElems}, option, &chain));
  const std::int64_t half = kElems / 2, eighth = kElems / 8;
  const auto cast_bytes = [&](std::int64_t elems) {
    return static_cast<std::int64_t>(codecs[0].codec->max_payload_bytes(1, elems, DType::kFloat32));
  };
  const auto at = [&](int level, OpKind kind, std::int64_t bytes) {
    return cluster.levels[level].collectives.at(kind).at(bytes);
  };
  const std::vector<std::pair<int, std::int64_t>> expected = {
      {kLink, at(0, OpKind::kReduceScatter, kElems * 4)},
      {kDeviceToHost, cluster.device_to_host.at(half * 4)},
      {kCpuCodec, codecs[0].encode_ns(OpDevice::kCpu, half)},
      {kLink + 1, at(1, OpKind::kAllToAll, 2 * cast_bytes(half))},  // both ranks of the machine
      {kCpuCodec, 4 * codecs[0].decode_ns(OpDevice::kCpu, eighth)},
      {kHostToDevice, cluster.host_to_device.at(eighth * 4)},
      {kGpuCodec, codecs[0].encode_ns(OpDevice::kGpu, eighth)},
      {kLink + 1, at(1, OpKind::kAllGather, 2 * 4 * cast_bytes(eighth))},
      {kGpuCodec, 4 * codecs[0].decode_ns(OpDevice::kGpu, eighth)},
      {kLink, at(0, OpKind::kAllGather, kElems * 4)}};
  ASSERT_EQ(chain.steps.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(chain.steps[i].resource, expected[i].first) << i;
    EXPECT_EQ(chain.steps[i].time_ns, expected[i].second) << i;
  }
  EXPECT_EQ(chain.loads[kGpuCodec], expected[6].second + expected[8].second);
  EXPECT_EQ(chain.memory_bytes, cast_bytes(half) + 4 * cast_bytes(eighth));

  // One that keeps what both places lose, in float32, and that of the step before.
  const std::vector<CodecCost> of_topk = codec_costs(cluster, OpDevice::kGpu, {"topk(density=0.125)"}, &notes).value();
  ASSERT_TRUE(of_topk[0].traits.needs_residual);
  ASSERT_TRUE(make_chain(model, &of_topk[0], {.elems = kElems}, option, &chain));
  const auto topk_bytes = [&](std::int64_t elems) {
    return static_cast<std::int64_t>(of_topk[0].codec->max_payload_bytes(1, elems, DType::kFloat32));
  };
  EXPECT_EQ(chain.memory_bytes, 2 * 4 * (half + eighth) + topk_bytes(half) + 4 * topk_bytes(eighth));
}

// The host has to see that the sizes have come before the payloads are gathered.
TEST(OptionCost, SizesTravelInAStepOfTheirOwnWhereGradientsAreInHostMemory) {
  const Cluster cluster = small_cluster(2);
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kCpu, {}, &notes).value();
  const auto varying =
      std::find_if(codecs.begin(), codecs.end(), [](const CodecCost& codec) { return !codec.traits.fixed_size; });
  ASSERT_NE(varying, codecs.end());
  const Option option =
      Option::parse("encode@cpu all_gather@intra all_gather@inter decode@cpu", cluster.topology()).value();
  OptionChain on_host, on_gpu;
  ASSERT_TRUE(make_chain(CostModel(cluster, OpDevice::kCpu), &*varying, {.elems = kElems}, option, &on_host));
  ASSERT_TRUE(make_chain(CostModel(cluster, OpDevice::kGpu), &*varying, {.elems = kElems}, option, &on_gpu));
  const auto links = [](const OptionChain& chain) {
    return std::count_if(chain.steps.begin(), chain.steps.end(),
                         [](const Step& step) { return step.resource >= kLink; });
  };
  EXPECT_EQ(links(on_host), 4);
  EXPECT_EQ(links(on_gpu), 2);
  EXPECT_EQ(on_host.loads[kLink + 1], on_gpu.loads[kLink + 1]);
}

// All options of an elementwise codec and of another one.
TEST(OptionCost, GradientsInHostMemoryArePackedFirstAndUnpackedLast) {
  Cluster cluster = small_cluster(2);
  cluster.pack = line(77, 3);
  cluster.unpack = line(88, 4);
  Cluster for_nothing = cluster;
  for_nothing.pack = for_nothing.unpack = {};
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kCpu, {}, &notes).value();
  ASSERT_TRUE(codecs[0].traits.elementwise && !codecs[1].traits.elementwise);
  const std::vector<Option> options = generate_options({}).value();
  int without_any = 0;
  for (const CodecCost& codec : codecs) {
    for (const Option& option : options) {
      OptionChain with, without;
      if (!make_chain(CostModel(cluster, OpDevice::kCpu), &codec, {.elems = kElems}, option, &with)) continue;
      ASSERT_TRUE(make_chain(CostModel(for_nothing, OpDevice::kCpu), &codec, {.elems = kElems}, option, &without));
      const auto in_place = [&](const Operation& operation, OpKind kind) {
        return codec.traits.elementwise && operation.kind == kind && operation.device == OpDevice::kCpu;
      };
      const bool packs = !in_place(option.operations.front(), OpKind::kEncode),
                 unpacks = !in_place(option.operations.back(), OpKind::kDecode);
      SCOPED_TRACE(codec.spec + ": " + option.to_string(cluster.topology()));
      ASSERT_EQ(with.own_ns, without.own_ns + packs * cluster.pack.at(kElems) + unpacks * cluster.unpack.at(kElems));
      ASSERT_EQ(with.steps.size(), without.steps.size() + packs + unpacks);
      EXPECT_EQ(with.steps.front().part == StepPart::kPacking, packs);
      EXPECT_EQ(with.steps.back().part == StepPart::kPacking, unpacks);
      EXPECT_EQ(with.loads[kCpuCodec] - without.loads[kCpuCodec], with.own_ns - without.own_ns);
      for (std::size_t i = 1; i + 1 < with.steps.size(); ++i) EXPECT_NE(with.steps[i].part, StepPart::kPacking);
      without_any += !packs && !unpacks;
      // On a GPU these are copies of its own memory, which were not measured.
      ASSERT_TRUE(make_chain(CostModel(cluster, OpDevice::kGpu), &codec, {.elems = kElems}, option, &with));
      ASSERT_TRUE(make_chain(CostModel(for_nothing, OpDevice::kGpu), &codec, {.elems = kElems}, option, &without));
      EXPECT_EQ(with.own_ns, without.own_ns);
    }
  }
  EXPECT_GT(without_any, 0);
}

// Each collective keeps the thread that starts it, sums of factors in two rounds twice, and sizes are sent first by one
// of their own.
TEST(OptionCost, StartsOfCollectivesTakeTheHostsThread) {
  Cluster cluster = small_cluster(2);
  for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
    cluster.codecs.push_back({"power(rank=4)", OpDevice::kCpu, direction, 1, line(5000, 2), {}});
  }
  const Cluster unknown = cluster;
  cluster.collective_start_ns = 1234;
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kCpu, {}, &notes).value();
  const std::vector<Option> options = generate_options({.sum_payloads = true}).value();
  int with_sizes = 0, in_two_rounds = 0;
  for (const CodecCost& codec : codecs) {
    for (const Option& option : options) {
      OptionChain with, without;
      if (!make_chain(CostModel(cluster, OpDevice::kCpu), &codec, {.elems = kElems}, option, &with)) continue;
      SCOPED_TRACE(codec.spec + ": " + option.to_string(cluster.topology()));
      ASSERT_TRUE(make_chain(CostModel(unknown, OpDevice::kCpu), &codec, {.elems = kElems}, option, &without));
      int starts = 0;
      bool is_encoded = false;
      for (const Operation& operation : option.operations) {
        if (operation.kind == OpKind::kEncode || operation.kind == OpKind::kDecode) {
          is_encoded = operation.kind == OpKind::kEncode;
          continue;
        }
        const int rounds = sums_factors(codec, option, 2) ? codec.traits.rounds : 1;
        starts += is_encoded ? rounds + !codec.traits.fixed_size : 1;
        with_sizes += is_encoded && !codec.traits.fixed_size;
        in_two_rounds += is_encoded && rounds == 2;
      }
      ASSERT_EQ(with.own_ns - without.own_ns, starts * 1234);
      EXPECT_EQ(with.loads[kCpuCodec] - without.loads[kCpuCodec], starts * 1234);
      int found = 0;
      for (std::size_t i = 0; i < with.steps.size(); ++i) {
        if (with.steps[i].starts == 0) continue;
        found += with.steps[i].starts;
        EXPECT_EQ(with.steps[i].resource, kCpuCodec);
        EXPECT_GE(with.steps[i + 1].resource, kLink);
        // What was encoded there is sent at once.
        const bool follows_a_codec = i > 0 && with.steps[i - 1].resource == kCpuCodec;
        EXPECT_FALSE(follows_a_codec && with.steps[i].part == StepPart::kStart);
      }
      EXPECT_EQ(found, starts);
      // A device's stream computes whatever the host does.
      ASSERT_TRUE(make_chain(CostModel(cluster, OpDevice::kGpu), &codec, {.elems = kElems}, option, &with));
      ASSERT_TRUE(make_chain(CostModel(unknown, OpDevice::kGpu), &codec, {.elems = kElems}, option, &without));
      EXPECT_EQ(with.own_ns, without.own_ns);
    }
  }
  EXPECT_GT(with_sizes, 0);
  EXPECT_GT(in_two_rounds, 0);
}

// Half of the factors of a matrix of 64 x 64 in each.
TEST(OptionCost, TwoRoundsAreTwoCollectives) {
  Cluster cluster = small_cluster(2);
  cluster.codecs.clear();
  for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
    cluster.codecs.push_back({"power(rank=4)", OpDevice::kCpu, direction, 1, line(5000, 2), {}});
  }
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kGpu, {}, &notes).value();
  ASSERT_EQ(codecs.at(0).traits.rounds, 2);
  std::vector<JobTensor> tensors(1);
  tensors[0].shape = {64, 64};
  TensorSums sums(codecs, tensors);
  OptionChain chain;
  ASSERT_TRUE(make_chain(CostModel(cluster, OpDevice::kGpu), &codecs[0], {.elems = kElems, .sums = &sums},
                         sum_of_factors(OpDevice::kCpu, OpDevice::kCpu, 2), &chain));
  EXPECT_EQ(chain.loads[kLink + 1], 2 * cluster.ranges[0].collectives.at(OpKind::kAllReduce).at(4 * 64 * 4));
}

// Flat collectives that were not measured: ring forms on the machine's link, from its latency and bandwidth.
TEST(CollectiveCost, FlatOnesWithoutACurve) {
  Cluster cluster;
  const double a = 1000, ns_per_byte = 0.5;
  for (const int ranks : {4, 8}) {
    ClusterLevel level = {ranks == 4 ? "intra" : "inter", ranks, "", {}, {}};
    const double n = ranks;
    for (const std::int64_t bytes : {std::int64_t{1} << 10, std::int64_t{1} << 20, std::int64_t{1} << 30}) {
      level.collectives[OpKind::kAllGather].sizes.push_back(bytes);
      level.collectives[OpKind::kAllGather].times_ns.push_back(
          std::llround((n - 1) * a + (n - 1) / n * ns_per_byte * static_cast<double>(bytes)));
    }
    cluster.levels.push_back(level);
  }
  const CollectiveCost cost(cluster);
  const double n = 32, k = 4, machines = 8, s = 1 << 24;
  const auto near = [&](OpKind kind, LevelRange range, std::int64_t groups, double expected) {
    EXPECT_NEAR(static_cast<double>(cost.time_ns(kind, range, 1 << 24, groups)), expected, expected * 1e-6)
        << op_kind_name(kind);
  };
  const LevelRange flat = {0, 1};
  near(OpKind::kAllReduce, flat, 1, 2 * (n - 1) * a + 2 * (n - 1) / n * s * ns_per_byte);
  near(OpKind::kAllGather, flat, 1, (n - 1) * a + (n - 1) / n * s * ns_per_byte);
  near(OpKind::kReduceScatter, flat, 1, (n - 1) * a + (n - 1) / n * s * ns_per_byte);
  near(OpKind::kAllToAll, flat, 1, (n - 1) * a + k * (machines - 1) / machines * s * ns_per_byte);
  near(OpKind::kBroadcast, flat, 1, 5 * a + s * ns_per_byte);
  near(OpKind::kReduce, flat, 1, 5 * a + s * ns_per_byte);
  near(OpKind::kGather, flat, 1, a + (n - 1) / n * s * ns_per_byte);
  // Of one level that was not measured, and with four ranks of a machine at once.
  near(OpKind::kAllReduce, {1, 1}, 4, 14 * a + 2 * 7 / 8.0 * 4 * s * ns_per_byte);
  near(OpKind::kAllGather, {1, 1}, 4, 7 * a + 7 / 8.0 * 4 * s * ns_per_byte);
  EXPECT_EQ(cost.link_of(flat), 1);
  EXPECT_EQ(cost.link_of({0, 0}), 0);
}

TEST(CollectiveCost, LevelsOfOneRankCostNothing) {
  Cluster cluster = small_cluster(2);
  cluster.levels[1].ranks = 1;
  const CollectiveCost cost(cluster);
  EXPECT_EQ(cost.link_of({1, 1}), -1);
  EXPECT_EQ(cost.time_ns(OpKind::kAllReduce, {1, 1}, 1 << 20, 1), 0);
  EXPECT_EQ(cost.link_of({0, 1}), 0);
}

// Beyond latency; of what is added up only, and by what it is added in.
TEST(CollectiveCost, SumsOfSixteenBitsTakeAsMuchLongerAsWasMeasured) {
  Cluster cluster = small_cluster(2);
  cluster.levels[1].float16_sum_factor = 3;
  cluster.levels[1].bfloat16_sum_factor = 1.5;
  const CollectiveCost cost(cluster);
  const auto time_ns = [&](OpKind kind, int level, std::int64_t bytes, DType dtype) {
    return cost.time_ns(kind, {level, level}, bytes, 1, dtype);
  };
  const std::int64_t bytes = 1 << 22, latency_ns = time_ns(OpKind::kAllReduce, 1, 1, DType::kFloat32);
  const std::int64_t float32_ns = time_ns(OpKind::kAllReduce, 1, bytes, DType::kFloat32);
  ASSERT_GT(float32_ns, latency_ns);
  EXPECT_EQ(time_ns(OpKind::kAllReduce, 1, bytes, DType::kFloat16), latency_ns + 3 * (float32_ns - latency_ns));
  EXPECT_NEAR(static_cast<double>(time_ns(OpKind::kAllReduce, 1, bytes, DType::kBFloat16) - latency_ns),
              1.5 * static_cast<double>(float32_ns - latency_ns), 1);
  EXPECT_EQ(time_ns(OpKind::kAllReduce, 1, 1, DType::kFloat16), latency_ns);
  EXPECT_EQ(time_ns(OpKind::kAllReduce, 0, bytes, DType::kFloat16),
            time_ns(OpKind::kAllReduce, 0, bytes, DType::kFloat32));
  EXPECT_EQ(time_ns(OpKind::kAllGather, 1, bytes, DType::kFloat16),
            time_ns(OpKind::kAllGather, 1, bytes, DType::kFloat32));

  // fp16 payloads are summed as such, and take as much longer.
  Cluster slow_sums = small_cluster(2);
  const Option option = {{{.kind = OpKind::kEncode, .device = OpDevice::kGpu},
                          {.kind = OpKind::kAllReduce, .levels = {1, 1}, .encoded = true},
                          {.kind = OpKind::kDecode, .device = OpDevice::kGpu}}};
  const auto load_ns = [&](const Cluster& of) {
    std::vector<std::string> notes;
    const std::vector<CodecCost> codecs = codec_costs(of, OpDevice::kGpu, {"cast(fp16)"}, &notes).value();
    const CostModel model(of, OpDevice::kGpu);
    OptionChain chain;
    EXPECT_TRUE(make_chain(model, &codecs.at(0), {.elems = 1 << 21}, option, &chain));
    return chain.loads[kLink + 1];
  };
  slow_sums.codecs.clear();
  for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
    slow_sums.codecs.push_back({.codec = "cast(fp16)", .direction = direction, .curve = {{1}, {1}}, .unknown = {}});
  }
  const std::int64_t as_float32_ns = load_ns(slow_sums);
  slow_sums.levels[1].float16_sum_factor = 3;
  EXPECT_EQ(load_ns(slow_sums), latency_ns + 3 * (as_float32_ns - latency_ns));
}

// The table of the ACP-SGD notes, section 3: the ring's bandwidth term, 32 ranks, fp32, as it is printed there.
// Elements are those of section 4: all, of both factors, of vectors.
struct Printed {
  const char* model;
  std::int64_t elems, factor_elems, vector_elems;
  const char *dense_10, *dense_1, *power_10, *power_1, *acp_10, *acp_1;  // ms at 10 and 1 Gb/s
};
const Printed kPrinted[] = {
    {"ResNet-50, 4", 25'557'032, 110'240 + 219'724, 54'120, "158.5", "1584.5", "2.4", "23.8", "1.4", "13.6"},
    {"ResNet-152, 4", 60'192'808, 306'848 + 678'476, 152'424, "373.2", "3732.0", "7.1", "70.5", "4.0", "40.0"},
    {"BERT-Base, 32", 110'111'042, 3'696'648 + 2'755'584, 154'946, "682.7", "6826.9", "41.0", "409.6", "21.0", "209.6"},
    {"BERT-Large, 32", 336'232'258, 8'136'712 + 7'213'056, 356'162, "2084.6", "20846.4", "97.4", "973.8", "49.8",
     "497.9"},
};

// Of an all-reduce, from what an all-gather takes without latency.
std::string ring_ms(int gbit_per_s, std::int64_t elems) {
  const std::int64_t ns = 2480 / gbit_per_s;  // (31 / 32) * 320 B * 8 ns/B at 1 Gb/s
  Cluster cluster;
  cluster.levels.push_back({"inter", 32, "", {{OpKind::kAllGather, {{320, 320 << 20}, {ns, ns << 20}}}}, {}});
  const std::int64_t time_ns = CollectiveCost(cluster).time_ns(OpKind::kAllReduce, {0, 0}, 4 * elems, 1);
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", static_cast<double>(time_ns) / 1e6);
  return text;
}

TEST(CollectiveCost, RingTermsAreAsPrinted) {
  for (const Printed& printed : kPrinted) {
    SCOPED_TRACE(printed.model);
    const std::int64_t power = printed.factor_elems + printed.vector_elems;
    const std::int64_t acp = printed.factor_elems / 2 + printed.vector_elems;
    EXPECT_EQ(ring_ms(10, printed.elems), printed.dense_10);
    EXPECT_EQ(ring_ms(1, printed.elems), printed.dense_1);
    EXPECT_EQ(ring_ms(10, power), printed.power_10);
    EXPECT_EQ(ring_ms(1, power), printed.power_1);
    EXPECT_EQ(ring_ms(10, acp), printed.acp_10);
    EXPECT_EQ(ring_ms(1, acp), printed.acp_1);
  }
}

TEST(TensorSums, AddUpTensorByTensor) {
  const Cluster cluster = small_cluster(2);
  std::vector<std::string> notes;
  const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kGpu, {}, &notes).value();
  std::vector<JobTensor> tensors(3);
  for (std::size_t t = 0; t < tensors.size(); ++t) tensors[t].shape = {static_cast<std::int64_t>(100 * (t + 1))};
  TensorSums sums(codecs, tensors);
  EXPECT_EQ(sums.encode_ns(codecs[1], OpDevice::kCpu, 1, 1, 2),
            codecs[1].encode_ns(OpDevice::kCpu, 200) + codecs[1].encode_ns(OpDevice::kCpu, 300));
  EXPECT_EQ(sums.decode_ns(codecs[0], OpDevice::kGpu, 8, 0, 1),
            codecs[0].decode_ns(OpDevice::kGpu, 13) + codecs[0].decode_ns(OpDevice::kGpu, 25));
  EXPECT_EQ(sums.payload_bytes(codecs[0], 1, 0, 2),
            static_cast<std::int64_t>(codecs[0].codec->max_payload_bytes(1, 100, DType::kFloat32) +
                                      codecs[0].codec->max_payload_bytes(1, 200, DType::kFloat32) +
                                      codecs[0].codec->max_payload_bytes(1, 300, DType::kFloat32)));
}

TEST(CodecCosts, TimesAreThoseOfAsManyThreadsAsCodecsHave) {
  Cluster cluster = small_cluster(2);
  cluster.codecs.clear();
  for (const int threads : {2, 1, 4}) {
    for (const OpKind direction : {OpKind::kEncode, OpKind::kDecode}) {
      cluster.codecs.push_back({"cast(fp16)", OpDevice::kCpu, direction, threads, line(0, 8 / threads), {}});
    }
  }
  std::vector<std::string> notes;
  for (const int threads : {1, 2, 4}) {
    cluster.cpu_codec_threads = threads;
    const std::vector<CodecCost> codecs = codec_costs(cluster, OpDevice::kGpu, {}, &notes).value();
    ASSERT_EQ(codecs.size(), 1u);
    EXPECT_EQ(codecs[0].encode_ns(OpDevice::kCpu, 100), 800 / threads);
    EXPECT_EQ(codecs[0].decode_ns(OpDevice::kCpu, 100), 800 / threads);
  }
  cluster.cpu_codec_threads = 3;
  EXPECT_TRUE(codec_costs(cluster, OpDevice::kGpu, {}, &notes).value().empty());
}

TEST(CodecCosts, WhatIsAllowedIsCompared) {
  const Cluster cluster = small_cluster(2);
  std::vector<std::string> notes;
  EXPECT_EQ(codec_costs(cluster, OpDevice::kGpu, {"topk(0.125)"}, &notes).value().size(), 1u);
  EXPECT_TRUE(notes.empty());
  EXPECT_TRUE(codec_costs(cluster, OpDevice::kGpu, {"randk"}, &notes).value().empty());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("no times"), std::string::npos);
  EXPECT_FALSE(codec_costs(cluster, OpDevice::kGpu, {"nonsense"}, &notes).ok());
}

}  // namespace
}  // namespace cortado

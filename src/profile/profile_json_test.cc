// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "cortado/cluster.h"
#include "cortado/job.h"

namespace cortado {
namespace {

constexpr const char* kJob = R"json({
 "format": "cortado.job/1", "name": "small", "forward_ns": null, "trainer": {"version": 3},
 "tensors": [
  {"name": "b", "shape": [], "dtype": "float32", "ready_ns": 0},
  {"name": "w", "shape": [3, 4, 5], "dtype": "bfloat16", "ready_ns": 70, "rms": 0.5,
   "errors": {"topk(density=0.01)": 0.9}, "layer/kind": "conv"}]})json";

constexpr const char* kCluster = R"json({
 "format": "cortado.cluster/1", "name": "two",
 "levels": [
  {"name": "intra", "ranks": 2, "link": "shm", "overlap_time_share": 0.75, "float16_sum_factor": 1.75, "collectives": {"all_reduce": {"bytes": [10, 20], "time_ns": [5, 7]}}},
  {"name": "inter", "ranks": 3, "collectives": {"all_gather": {"bytes": [10], "time_ns": [5]}}, "switch": "s1"}],
 "ranges": [{"levels": "flat", "collectives": {"all_reduce": {"bytes": [8], "time_ns": [9]}}}],
 "codecs": [{"codec": "cast(fp16)", "device": "cpu", "threads": 2, "direction": "encode", "elems": [1], "time_ns": [1]}],
 "copies": {"host_to_device": {"bytes": [8], "time_ns": [9]}, "pack": {"elems": [8], "time_ns": [13]}},
 "contention": {"gpu_codec_slows_backward": 0.5, "cpu_codec_workers": 3, "cpu_codec_threads": 2, "cpu_codec": "rans", "transfers_slow_backward": 0.25, "collective_start_ns": 1700, "measured": true},
 "host": {"fingerprint": "abc"}})json";

std::string with(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(JobJson, ReadsWhatThereIs) {
  const Result<Job> job = job_from_json(kJob);
  ASSERT_TRUE(job.ok()) << job.status().to_string();
  EXPECT_EQ(job.value().name, "small");
  EXPECT_FALSE(job.value().forward_ns.has_value());
  EXPECT_EQ(job.value().backward_end_ns(), 70);
  ASSERT_EQ(job.value().tensors.size(), 2u);
  EXPECT_EQ(job.value().tensors[0].elems(), 1);
  const JobTensor& w = job.value().tensors[1];
  EXPECT_EQ(w.rows(), 3);
  EXPECT_EQ(w.cols(), 20);
  EXPECT_EQ(w.size_bytes(), 120);
  EXPECT_EQ(w.rms, 0.5);
  ASSERT_EQ(w.errors.size(), 1u);
  EXPECT_EQ(w.errors[0].relative_l2, 0.9);
}

TEST(JobJson, UnknownFieldsAreKeptAndWritingIsStable) {
  const std::string written = job_to_json(job_from_json(kJob).value());
  EXPECT_NE(written.find(R"("trainer": {"version":3})"), std::string::npos) << written;
  EXPECT_NE(written.find(R"("layer/kind":"conv")"), std::string::npos) << written;
  EXPECT_EQ(job_to_json(job_from_json(written).value()), written);
}

TEST(JobJson, AnyDTypeIsWrittenAndOneThatNoGradientHasRefused) {
  Job job = job_from_json(kJob).value();
  job.tensors[0].dtype = DType::kUint8;
  EXPECT_NE(job_from_json(job_to_json(job)).status().message().find("$.tensors[0].dtype: expected \"float32\""),
            std::string::npos);
}

TEST(JobJson, OverlapOfTheForwardPassIsReadAndWritten) {
  EXPECT_FALSE(job_from_json(kJob).value().overlap_forward);
  const Job job = job_from_json(with(kJob, "\"forward_ns\": null", "\"overlap_forward\": true")).value();
  EXPECT_TRUE(job.overlap_forward);
  EXPECT_TRUE(job_from_json(job_to_json(job)).value().overlap_forward);
}

TEST(ClusterJson, ReadsWhatThereIs) {
  const Result<Cluster> read = cluster_from_json(kCluster);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  const Cluster& cluster = read.value();
  EXPECT_EQ(cluster.topology().world_size(), 6);
  EXPECT_EQ(cluster.levels[0].collectives.at(OpKind::kAllReduce).times_ns, (std::vector<std::int64_t>{5, 7}));
  ASSERT_EQ(cluster.ranges.size(), 1u);
  EXPECT_EQ(cluster.ranges[0].levels, (LevelRange{0, 1}));
  EXPECT_EQ(cluster.codecs[0].threads, 2);
  EXPECT_EQ(cluster.host_to_device.at(8), 9);
  EXPECT_EQ(cluster.device_to_host.at(8), 0);
  EXPECT_EQ(cluster.pack.at(8), 13);
  EXPECT_EQ(cluster.unpack.at(8), 0);
  EXPECT_EQ(cluster.gpu_codec_slows_backward, 0.5);
  EXPECT_EQ(cluster.cpu_codec_workers, 3);
  EXPECT_EQ(cluster.cpu_codec_threads, 2);
  EXPECT_EQ(cluster.cpu_codec, "rans");
  EXPECT_EQ(cluster.transfers_slow_backward, 0.25);
  EXPECT_EQ(cluster.collective_start_ns, 1700);
  EXPECT_EQ(cluster.levels[0].overlap_time_share, 0.75);
  EXPECT_EQ(cluster.levels[0].float16_sum_factor, 1.75);
  EXPECT_FALSE(cluster.levels[0].bfloat16_sum_factor.has_value());
  EXPECT_FALSE(cluster.levels[1].overlap_time_share.has_value());
  EXPECT_EQ(cluster.fingerprint, "abc");
}

TEST(ClusterJson, UnknownFieldsAreKeptAndWritingIsStable) {
  const std::string written = cluster_to_json(cluster_from_json(kCluster).value());
  EXPECT_NE(written.find(R"("switch":"s1")"), std::string::npos) << written;
  EXPECT_NE(written.find(R"("measured":true)"), std::string::npos) << written;
  EXPECT_EQ(cluster_to_json(cluster_from_json(written).value()), written);
}

TEST(ProfileJson, TheCommittedFilesRead) {
  for (const char* name : {"bert_base", "gpt2", "lstm", "resnet101", "ugatit", "vgg16"}) {
    const Result<Job> job = load_job(std::string("tests/data/planner/jobs/") + name + ".json");
    ASSERT_TRUE(job.ok()) << job.status().to_string();
    EXPECT_EQ(job.value().name, name);
  }
  for (const char* name : {"nvlink_100g", "pcie_25g"}) {
    const Result<Cluster> cluster = load_cluster(std::string("tests/data/planner/clusters/") + name + ".json");
    ASSERT_TRUE(cluster.ok()) << cluster.status().to_string();
    EXPECT_EQ(cluster.value().topology().world_size(), 64);
  }
}

struct BadInput {
  const char *from, *to, *error;
};

TEST(JobJson, RefusesBadInputWithItsPlace) {
  const BadInput cases[] = {
      {"\"ready_ns\": 70", "\"ready_ns\": NaN", "$.tensors[1].ready_ns: expected a finite number, got NaN (byte"},
      {"\"ready_ns\": 70", "\"ready_ns\": -1", "$.tensors[1].ready_ns: expected from 0"},
      {"\"ready_ns\": 0", "\"ready_ns\": 71", "$.tensors[1].ready_ns: expected at least that of the tensor before, 71"},
      {"\"ready_ns\": 70", "\"ready_ns\": 7.5", "$.tensors[1].ready_ns: expected nanoseconds, an integer, got 7.5"},
      {", \"ready_ns\": 0", "", "$.tensors[0].ready_ns: expected nanoseconds, got nothing"},
      {"\"name\": \"w\"", "\"name\": \"b\"", "$.tensors[1].name: expected each tensor once, got \"b\" again"},
      {"\"name\": \"w\", ", "", "$.tensors[1].name: expected a text, got nothing"},
      {"[3, 4, 5]", "[3, -4, 5]", "$.tensors[1].shape[1]: expected a dimension of at least 0, got -4"},
      {"[3, 4, 5]", "[3, \"x\", 5]", "$.tensors[1].shape[1]: expected a dimension, an integer, got \"x\""},
      {"[3, 4, 5]", "[4294967296, 4294967296]", "$.tensors[1].shape: expected at most 2^48 elements"},
      {"[3, 4, 5]", "[0, 4294967296, 4294967296]", "$.tensors[1].shape: expected at most 2^48 elements"},
      {"bfloat16", "float64", "$.tensors[1].dtype: expected \"float32\", \"float16\" or \"bfloat16\""},
      {"\"rms\": 0.5", "\"rms\": -0.5", "$.tensors[1].rms: expected a number of at least 0, got -0.5"},
      {"\"rms\": 0.5", "\"rms\": -1", "$.tensors[1].rms: expected a number of at least 0"},
      {"0.9}", R"(0.9, "topk": 0.9})",
       "$.tensors[1].errors.topk: expected each codec once, got it again, perhaps in another spelling"},
      {"0.9", "-0.9", "$.tensors[1].errors[\"topk(density=0.01)\"]: expected a number of at least 0"},
      {"\"forward_ns\": null", "\"forward_ns\": -5", "$.forward_ns: expected from 0"},
      {"\"forward_ns\": null", "\"backward_ns\": 69", "$.backward_ns: expected at least the last ready_ns, 70"},
      {"cortado.job/1", "cortado.job/2", "$.format: expected \"cortado.job/1\", got \"cortado.job/2\""},
      {"cortado.job/1", "cortado.plan/1", "$.format: expected \"cortado.job/1\""},
      {"\"forward_ns\": null,", "\"forward_ns\": null,,", "$: expected JSON, got \",\" (byte"},
      {"\"forward_ns\": null,", "\"forward_ns\": null, \"forward_ns\": 1,",
       "$.forward_ns: expected one of them, got a second one"},
      {"\"dtype\": \"float32\"", "\"dtype\": 32",
       "$.tensors[0].dtype: expected \"float32\", \"float16\" or \"bfloat16\", got 32"},
  };
  for (const BadInput& bad : cases) {
    const Result<Job> job = job_from_json(with(kJob, bad.from, bad.to));
    ASSERT_FALSE(job.ok()) << bad.to;
    EXPECT_NE(job.status().message().find(bad.error), std::string::npos)
        << bad.to << " -> " << job.status().to_string();
  }
  EXPECT_EQ(job_from_json(with(kJob, "job/1", "job/2")).status().code(), StatusCode::kUnsupported);
  EXPECT_FALSE(job_from_json("").ok());
  EXPECT_FALSE(job_from_json("[]").ok());
  EXPECT_FALSE(job_from_json(R"({"format": "cortado.job/1", "name": "n", "tensors": []})").ok());
}

TEST(ClusterJson, RefusesBadInputWithItsPlace) {
  const BadInput cases[] = {
      {"[5, 7]", "[5, 4]",
       "$.levels[0].collectives.all_reduce.time_ns[1]: expected at least the entry before, 5, got 4"},
      {"[5, 7]", "[5, -7]", "$.levels[0].collectives.all_reduce.time_ns[1]: expected from 0"},
      {"[5, 7]", "[5, NaN]", "$.levels[0].collectives.all_reduce.time_ns[1]: expected a finite number, got NaN (byte"},
      {"[5, 7]", "[5, 7.5]", "$.levels[0].collectives.all_reduce.time_ns[1]: expected nanoseconds, an integer"},
      {"[5, 7]", "[5]", "$.levels[0].collectives.all_reduce.time_ns: expected as many entries as bytes, 2, got 1"},
      {"[10, 20]", "[10, 10]", "$.levels[0].collectives.all_reduce.bytes[1]: expected more than the entry before, 10"},
      {"[10, 20]", "[0, 10]", "$.levels[0].collectives.all_reduce.bytes[0]: expected from 1"},
      {"{\"bytes\": [10], \"time_ns\": [5]}", "{\"bytes\": [], \"time_ns\": []}",
       "$.levels[1].collectives.all_gather.bytes: expected at least one entry"},
      {"\"all_gather\": {", "\"all_scatter\": {", "$.levels[1].collectives.all_scatter: expected all_reduce"},
      {"\"ranks\": 3, ", "", "$.levels[1].ranks: expected a number of ranks, got nothing"},
      {"\"ranks\": 3", "\"ranks\": 0", "$.levels[1].ranks: expected from 1"},
      {"\"ranks\": 3", "\"ranks\": -7", "got -7"},
      {"\"ranks\": 3", "\"ranks\": 5000000000",
       "$.levels[1].ranks: expected a number of ranks, below 2^31, got 5000000000"},
      {"\"name\": \"inter\"", "\"name\": \"intra\"", "$.levels: "},
      {"\"levels\": \"flat\"", "\"levels\": \"outer\"", "$.ranges[0].levels: expected a range of levels"},
      {"\"device\": \"cpu\"", "\"device\": \"tpu\"", "$.codecs[0].device: expected \"cpu\" or \"gpu\""},
      {"\"direction\": \"encode\"", "\"direction\": \"both\"", "$.codecs[0].direction: expected"},
      {"\"threads\": 2", "\"threads\": 0", "$.codecs[0].threads: expected from 1"},
      {"0.5", "1.5", "$.contention.gpu_codec_slows_backward: expected a number from 0 to 1"},
      {"0.25", "-1", "$.contention.transfers_slow_backward: expected a number from 0 to 1"},
      {"1700", "-1", "$.contention.collective_start_ns: expected from 0"},
      {"1700", "1.5", "$.contention.collective_start_ns: expected nanoseconds or null"},
      {"[13]", "[-13]", "$.copies.pack.time_ns[0]: expected from 0"},
      {"1.75", "0.5", "$.levels[0].float16_sum_factor: expected a number from 1 to 100"},
      {"0.75", "0", "$.levels[0].overlap_time_share: expected a number above 0"},
      {"\"cpu_codec_workers\": 3", "\"cpu_codec_workers\": 0", "$.contention.cpu_codec_workers: expected from 1"},
      {"cortado.cluster/1", "cortado.cluster/9", "$.format: expected \"cortado.cluster/1\", got \"cortado.cluster/9\""},
  };
  for (const BadInput& bad : cases) {
    const Result<Cluster> cluster = cluster_from_json(with(kCluster, bad.from, bad.to));
    ASSERT_FALSE(cluster.ok()) << bad.to;
    EXPECT_NE(cluster.status().message().find(bad.error), std::string::npos)
        << bad.to << " -> " << cluster.status().to_string();
  }
}

// Two spellings passed as two codecs.
TEST(ClusterJson, ACodecIsThereOnceHoweverItIsSpelt) {
  Cluster cluster = cluster_from_json(kCluster).value();
  CodecTimes again = cluster.codecs[0];
  again.codec = "cast( dtype=fp16 )";
  cluster.codecs.push_back(again);
  const std::string place = "$.codecs[" + std::to_string(cluster.codecs.size() - 1) + "]";
  EXPECT_EQ(cluster.check().message(), place +
                                           ": expected codec, device, direction and threads that differ from those "
                                           "before, got those of $.codecs[0] (cast(fp16))");
  cluster.codecs.back().direction = OpKind::kDecode;
  EXPECT_TRUE(cluster.check().ok());
}

// Found in review: a name in another encoding ended the process once all was measured.
TEST(ClusterJson, WritesWhateverANameIs) {
  Cluster cluster = cluster_from_json(kCluster).value();
  cluster.name = "caf\xe9";
  const Result<Cluster> read = cluster_from_json(cluster_to_json(cluster));
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(read.value().name, "caf\xef\xbf\xbd");
}

TEST(TimeCurve, IsLinearBetweenAndBeyondWhatWasMeasured) {
  const TimeCurve curve = {{100, 200, 400}, {1000, 1100, 1500}};
  EXPECT_EQ(curve.at(0), 0);
  EXPECT_EQ(curve.at(1), 1000);
  EXPECT_EQ(curve.at(100), 1000);
  EXPECT_EQ(curve.at(150), 1050);
  EXPECT_EQ(curve.at(200), 1100);
  EXPECT_EQ(curve.at(300), 1300);
  EXPECT_EQ(curve.at(400), 1500);
  EXPECT_EQ(curve.at(1400), 3500);
  EXPECT_EQ(curve.at(std::int64_t{1} << 62), kMaxNs);
  const TimeCurve point = {{100}, {1000}};
  EXPECT_EQ(point.at(50), 1000);
  EXPECT_EQ(point.at(250), 2500);
  EXPECT_EQ(TimeCurve{}.at(5), 0);
}

}  // namespace
}  // namespace cortado

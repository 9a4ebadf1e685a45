// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Calibrate: measures what collectives and codecs take, over any communicator, into a cluster profile.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/communicator.h"
#include "cortado/option.h"
#include "cortado/status.h"
#include "cortado/topology.h"
#include "cortado/trace.h"

namespace cortado {

class SchemeDevice;

struct CalibrateOptions {
  std::string name = "calibrated";
  std::vector<std::string> codecs = {};  // specifications
  std::vector<OpKind> collectives = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kAllToAll,
                                     OpKind::kReduce,    OpKind::kBroadcast,     OpKind::kGather};
  bool contention = true;  // of codecs and transfers with computation, and of transfers with each other
  // Every rank's own, or none has one: codecs with a variant there are timed on it, too, and copies to it and back.
  // Of a CUDA device: create_cuda_scheme_device() (cortado/cuda.h).
  std::shared_ptr<const SchemeDevice> device = {};
  // With a device: something that is computed there, as the backward pass would be, not given by this library; returns
  // when it has been. What codecs on the device do to it is gpu_codec_slows_backward, which is not measured without.
  std::function<Status()> device_computation = {};
  // Seconds for everything. What is left of it is divided among the points that are left; sizes of which one run would
  // take more than twice their share, or three of them all that is left, are left out (curves go on beyond their last
  // point). Collectives go on while a run takes at most 4 % of all, until half a budget too much was spent, or 10 s,
  // and `transfers` may take a quarter more. Of everything two sizes are measured, thrice each, however long that
  // takes. Where all-reduces or all-gathers end early and there is time, they have one more size in two runs, of which
  // the shorter counts; other collectives that end before all-reduces do go on in proportion to these, to a point of no
  // runs. A codec runs five times at most, so that links have more.
  double budget_s = 50;
  std::int64_t max_bytes = std::int64_t{32} << 20;  // largest collective; from 4096 to 2^34
  std::int64_t max_elems = std::int64_t{4} << 20;   // largest tensor of a codec; from 1024 to 2^34
  std::optional<Topology> topology = {};            // not given: what the launcher has told (agree_on_topology)
  std::string transport_version = {};               // of what is behind the communicator: "torch 2.13.0"
  double timeout_s = 300;                           // of a collective
  // An earlier measurement; that of rank 0 counts. If it is of these ranks and this communicator, what it holds is kept
  // and what is missing measured; if not, everything is measured.
  std::optional<Cluster> known = {};
  // Called on this rank with a line about what is kept, if `known` is given.
  std::function<void(const std::string& line)> note = {};
  // Called on this rank before each point: share of the points done, and what comes next.
  std::function<void(double done, const std::string& next)> progress = {};
};

// Every rank of `communicator` calls it with the same options, and gets the same cluster.
//
//   a collective  each rank's median over the runs, from a barrier on; of these the longest of any rank. Those of up to
//                 2 MiB, of which engines have several under way, are called four at once, the smallest ones twice
//                 in a row, if there is time for it, and what one takes of that counts. A level's groups run at the
//                 same time, so points of outer levels are what their whole link takes
//   a codec       the same; all ranks encode at the same time, as in training. One thread, the caller's. What error
//                 feedback costs belongs to encode: the residual added, the payload decoded, what was lost written (not
//                 of casts and other codecs that train without). Of payloads that are gathered checks are made and
//                 proved, and what is decoded is added up
//   on a device   codecs there, one tensor at a time: from giving the work to a stream until it is known to be done.
//                 Encoding has the decoding that error feedback needs. Residuals and sums are the host's, and not in
//                 it; copies, from pinned memory and to it, are timed by themselves. Makes the device the thread's
//                 current
//   packing       where there are codecs: values copied into a buffer and scaled, and back with a look for Inf and NaN
//   contention    by how much a matrix product slows down while another thread of the rank encodes with the codec that
//                 takes longest for a value; of device_computation the same, beside the device's; 0 where it is not
//                 measured
//   starts        with all-reduces: what starting one of 256 KiB (less, where that takes long) keeps a thread for that
//                 computes before and after: of a run the mean of four on each of all ranks, of the runs the median
//   transfers     with all-reduces and contention: by how much computation slows down while a transfer runs. It is what
//                 an all-reduce of all ranks adds to matrix products that outlast it, beyond its start, as a share of
//                 what it takes alone. Not given where even the largest that fits into the budget takes less than
//                 thrice the smallest's time, which is mostly latency, or where it takes longer than some seconds of
//                 products
//   overlap       of each level, two all-reduces of the largest size that was measured and fits into what is left, at
//                 once against one after the other (without all-reduce: the first collective that was measured)
//
// Beside "time_ns" stand "spread_ns" (from the first to the ninth decile, the largest of any rank) and "runs". Times
// are made to rise with size. Takes memory for four of the largest collectives, and for the largest tensor six times,
// three of which are of 8 MiB at least (on a device thrice, and pinned once). An error of one rank's device is an error
// of all ranks.
Result<Cluster> calibrate(Communicator* communicator, const CalibrateOptions& options,
                          const Clock* clock = steady_clock());

// What a cluster file must say to be of these ranks: the machines and how many ranks run on each ("2 ranks on AMD
// EPYC, 16 cores, x86_64") and the communicator ("callback(gloo), torch 2.13.0"). Every rank calls it.
struct ClusterIdentity {
  std::string fingerprint;
  std::string communicator;
};
Result<ClusterIdentity> cluster_identity(Communicator* communicator, const std::string& transport_version,
                                         std::chrono::nanoseconds timeout);

// kMismatch, with the place in the file, what was expected and what was found, if `cluster` was measured elsewhere.
Status check_cluster_is_of(const Cluster& cluster, const ClusterIdentity& identity, const Topology& topology);

}  // namespace cortado

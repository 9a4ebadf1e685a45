// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/candidates.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <span>
#include <utility>

#include "bucket/layout.h"
#include "collective/agreement.h"
#include "core/check.h"
#include "core/finite.h"
#include "core/format.h"
#include "core/seconds.h"
#include "cortado/calibrate.h"
#include "cortado/job.h"
#include "cortado/planner.h"
#include "engine/round_layouts.h"
#include "engine/trained_codec.h"
#include "engine/treatment.h"
#include "planner/simulate/timeline.h"
#include "session/settings.h"

namespace cortado {

namespace {

constexpr double kHopeless = 1.1;  // times dense, as predicted
// What travels in fp16 is gradients divided by the number of ranks before they are rounded, and sums of these: none is
// larger than the largest gradient of any rank. That may grow by this factor in steps to come.
constexpr double kLargestFloat16 = 65504, kMayGrow = 64;

std::chrono::nanoseconds timeout_of(const AutoOptions& options) { return from_seconds(options.timeout_s); }

std::int64_t scaled_ns(double factor, std::int64_t time_ns) {
  return std::llround(std::min(static_cast<double>(kMaxNs), factor * static_cast<double>(time_ns)));
}

// ---- settings as the planner sees them -----------------------------------------------------------------------------

std::vector<AutoSetting> allowed_settings(const AutoOptions& options, const std::vector<std::string>& refused) {
  std::vector<AutoSetting> allowed;
  for (const AutoSetting& setting : auto_settings()) {
    const bool is_refused = std::find(refused.begin(), refused.end(), setting.spec) != refused.end();
    if (setting.quality <= options.quality && !is_refused) allowed.push_back(setting);
  }
  return allowed;
}

// What a plan may encode with.
std::vector<std::string> codecs_for_plans(const AutoOptions& options, const std::vector<std::string>& refused) {
  std::vector<std::string> codecs;
  if (std::find(refused.begin(), refused.end(), "plan") != refused.end()) return codecs;
  const std::vector<std::string> of_plans = auto_plan_codecs(options.quality);
  for (const AutoSetting& setting : allowed_settings(options, refused)) {
    const std::string codec = codec_of_setting(setting.spec).value();
    if (std::find(of_plans.begin(), of_plans.end(), codec) != of_plans.end()) codecs.push_back(codec);
  }
  return codecs;
}

Job make_job(const std::vector<EngineTensor>& tensors, const MeasuredSteps& steps) {
  Job job;
  job.name = "training";
  job.description = "measured by auto";
  job.device = OpDevice::kCpu;
  // From the end of one step to the end of the next: optimizer, forward and backward pass are one stretch.
  job.forward_ns = 0;
  job.optimizer_ns = 0;
  // What is handed over together is in about the reverse order of registration, and is encoded in that order.
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return steps.ready_ns[a] < steps.ready_ns[b]; });
  for (const std::size_t t : order) {
    JobTensor& tensor = job.tensors.emplace_back();
    tensor.name = tensors[t].name;
    tensor.shape = {tensors[t].rows, tensors[t].cols};
    if (tensors[t].dimensions < 2) tensor.shape = {tensors[t].cols};
    tensor.dtype = tensors[t].dtype;
    tensor.ready_ns = std::max<std::int64_t>(0, steps.ready_ns[t]);
  }
  return job;
}

Job at_pace(Job job, double pace) {
  for (JobTensor& tensor : job.tensors) tensor.ready_ns = scaled_ns(pace, tensor.ready_ns);
  return job;
}

// Computation is the CPU's, and codecs are; links are as fast as they were.
Cluster at_pace(Cluster cluster, double pace) {
  const auto change = [pace](TimeCurve& curve) {
    for (std::int64_t& time_ns : curve.times_ns) time_ns = scaled_ns(pace, time_ns);
  };
  for (CodecTimes& codec : cluster.codecs) {
    if (codec.device == OpDevice::kCpu) change(codec.curve);
  }
  change(cluster.pack);
  change(cluster.unpack);
  if (cluster.collective_start_ns.has_value()) {
    cluster.collective_start_ns = scaled_ns(pace, *cluster.collective_start_ns);
  }
  return cluster;
}

LevelRange all_levels(const Cluster& cluster) { return {0, static_cast<int>(cluster.levels.size()) - 1}; }

// Nothing is encoded. Buffers are summed as they are handed over: what was ready at the same time was one; without them
// the engine makes messages of float32.
Plan plan_of_dense(const Job& job, const Cluster& cluster, bool takes_buffers) {
  Plan plan;
  plan.topology = cluster.topology();
  const auto bytes_of = [](const JobTensor& tensor) {
    return tensor.elems() * static_cast<std::int64_t>(sizeof(float));
  };
  std::int64_t total = 0;
  for (const JobTensor& tensor : job.tensors) total += bytes_of(tensor);
  const std::int64_t cap = budget_bytes({.kind = FusionBudget::Kind::kLatency}, total, total);
  std::int64_t ready_ns = -1, bytes = 0;
  for (const JobTensor& tensor : job.tensors) {
    const bool is_full = takes_buffers ? tensor.ready_ns != ready_ns : bytes > 0 && bytes + bytes_of(tensor) > cap;
    if (plan.buckets.empty() || is_full) {
      plan.buckets.emplace_back().option.operations = {{.kind = OpKind::kAllReduce, .levels = all_levels(cluster)}};
      bytes = 0;
    }
    ready_ns = tensor.ready_ns;
    plan.buckets.back().tensors.push_back(tensor.name);
    bytes += bytes_of(tensor);
  }
  return plan;
}

// What the planner needs to know of a setting: its codec, and its engine's messages.
struct SettingShape {
  std::string codec;
  CodecTraits traits;
  EngineOptions options;
  Layout messages;  // of the first round
};

Result<SettingShape> shape_of_setting(const std::string& setting, const std::vector<EngineTensor>& tensors) {
  SettingShape shape;
  CORTADO_ASSIGN_OR_RETURN(shape.options, EngineOptions::parse(setting));
  CORTADO_ASSIGN_OR_RETURN(shape.codec, codec_of_setting(setting));
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> made, make_codec(shape.codec));
  shape.traits = made->row().traits;
  TrainedCodec trained;
  if (shape.options.method == EngineOptions::Method::kCodec) {
    CORTADO_ASSIGN_OR_RETURN(trained, make_trained_codec(shape.options));
  }
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Treatment> treatments, choose_treatments(tensors, shape.options, trained));
  shape.messages = choose_round_layouts(tensors, treatments, shape.options, trained).first.front();
  return shape;
}

// Each message is a bucket. Vectors that travel beside factors are tensors of the codec's, too: it leaves them whole.
Plan plan_of_setting(const SettingShape& shape, const std::vector<EngineTensor>& tensors, const Cluster& cluster) {
  Plan plan;
  plan.topology = cluster.topology();
  const Operation dense{.kind = OpKind::kAllReduce, .levels = all_levels(cluster)};
  const Operation encoded{.kind = shape.traits.linear ? OpKind::kAllReduce : OpKind::kAllGather,
                          .levels = all_levels(cluster),
                          .encoded = true};
  std::vector<bool> travels(tensors.size());
  for (const Message& message : shape.messages.messages) {
    PlanBucket& bucket = plan.buckets.emplace_back();
    bool is_encoded = shape.options.method == EngineOptions::Method::kCast;
    for (const Slot& slot : message.slots) {
      travels[slot.tensor] = true;
      is_encoded = is_encoded || slot.kind != SlotKind::kDense;
      bucket.tensors.push_back(tensors[slot.tensor].name);
    }
    bucket.option.operations = {dense};
    if (!is_encoded) continue;
    bucket.codec = shape.codec;
    bucket.option.operations = {{.kind = OpKind::kEncode}, encoded, {.kind = OpKind::kDecode}};
  }
  PlanBucket rest;  // tensors of no elements
  rest.option.operations = {dense};
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (!travels[t]) rest.tensors.push_back(tensors[t].name);
  }
  if (!rest.tensors.empty()) plan.buckets.push_back(std::move(rest));
  return plan;
}

// Of every level and every range that was measured, with its outermost level.
template <typename Change>
void change_collectives(Cluster* cluster, Change change) {
  for (ClusterLevel& level : cluster->levels) change(level, level.collectives);
  for (ClusterRange& range : cluster->ranges) {
    change(cluster->levels[static_cast<std::size_t>(range.levels.last)], range.collectives);
  }
}

// Steps that overflow and parameters that are not used say nothing of the others.
bool tells_sizes(const std::vector<float>& sample) {
  return all_finite(sample.data(), static_cast<std::int64_t>(sample.size()), DType::kFloat32) &&
         std::any_of(sample.begin(), sample.end(), [](float value) { return value != 0; });
}

// Of the payload that a codec makes of a gradient once training has settled: what it held back of the same gradient in
// some steps before is added, where the engine does so.
Result<double> settled_payload_bytes(const TrainedCodec& trained, const std::vector<float>& gradient) {
  constexpr int kSteps = 4;
  const auto elems = static_cast<std::int64_t>(gradient.size());
  std::vector<float> values = gradient, decoded(gradient.size());
  std::vector<std::byte> scratch(trained.codec->scratch_bytes(1, elems, DType::kFloat32));
  for (int step = 1;; ++step) {
    CORTADO_ASSIGN_OR_RETURN(const std::vector<std::byte> payload,
                             encode_sample(*trained.codec, {values.data(), DType::kFloat32, 1, elems}));
    if (step == kSteps || !trained.has_feedback()) return static_cast<double>(payload.size());
    CORTADO_RETURN_IF_ERROR(trained.codec->decode(payload, {decoded.data(), DType::kFloat32, 1, elems}, scratch));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = gradient[i] + (values[i] - decoded[i]);
  }
}

// What a codec sends, as a share of the most it could: of the samples or, without any, of normal values.
Result<double> payload_share(const std::string& codec, const GradientSamples& samples) {
  constexpr std::int64_t kSide = 256;
  EngineOptions options;
  options.codec = codec;
  CORTADO_ASSIGN_OR_RETURN(const TrainedCodec trained, make_trained_codec(options));
  double expected = 0, most = 0;
  for (const std::vector<float>& sample : samples) {
    if (trained.is_summed || !tells_sizes(sample)) continue;
    const auto elems = static_cast<std::int64_t>(sample.size());
    CORTADO_ASSIGN_OR_RETURN(const double bytes, settled_payload_bytes(trained, sample));
    expected += bytes;
    most += static_cast<double>(trained.codec->max_payload_bytes(1, elems, DType::kFloat32));
  }
  if (most == 0) {
    CORTADO_ASSIGN_OR_RETURN(expected, expected_payload_bytes(trained, kSide, kSide, DType::kFloat32));
    most = static_cast<double>(trained.codec->max_payload_bytes(kSide, kSide, DType::kFloat32));
  }
  return std::min(1.0, std::max(1.0, expected) / std::max(1.0, most));
}

// The planner knows no more than the most that a payload can have. Where payloads vary, `cluster` with the gathers of
// what they have: curves whose sizes are as much larger.
Result<Cluster> with_expected_sizes(const Cluster& cluster, const std::string& codec, const GradientSamples& samples) {
  CORTADO_ASSIGN_OR_RETURN(const double share, payload_share(codec, samples));
  Cluster scaled = cluster;
  change_collectives(&scaled, [&](const ClusterLevel&, CollectiveCurves& curves) {
    const auto gather = curves.find(OpKind::kAllGather);
    if (gather == curves.end()) return;
    for (std::int64_t& size : gather->second.sizes) {
      size = static_cast<std::int64_t>(static_cast<double>(size) / share);
    }
  });
  return scaled;
}

// Engines of plans decode what they encode, to see what is lost; engines of settings see it when they decode what all
// ranks sent. `cluster` with the codec's times in the latter.
Cluster with_encoding_alone(const Cluster& cluster, const std::string& codec) {
  Cluster alone = cluster;
  const auto curve_of = [&](OpKind direction) -> TimeCurve* {
    for (CodecTimes& times : alone.codecs) {
      if (times.codec == codec && times.device == OpDevice::kCpu && times.threads == alone.cpu_codec_threads &&
          times.direction == direction) {
        return &times.curve;
      }
    }
    return nullptr;
  };
  TimeCurve* const encode = curve_of(OpKind::kEncode);
  const TimeCurve* const decode = curve_of(OpKind::kDecode);
  if (encode == nullptr || decode == nullptr) return alone;
  std::int64_t before_ns = 0;  // curves do not fall, whatever two that were measured apart say
  for (std::size_t i = 0; i < encode->sizes.size(); ++i) {
    std::int64_t& time_ns = encode->times_ns[i];
    before_ns = time_ns = std::max(before_ns, time_ns - decode->at(encode->sizes[i]));
  }
  return alone;
}

// Codecs of low rank make float32 factors. `cluster` with the same factors on a narrower wire: curves whose sizes are
// as much larger, and whose times beyond the first grow as sums of that type do. (Ranges that were not measured are
// made of whatever collective a level has.)
Cluster with_wire(const Cluster& cluster, DType wire) {
  Cluster narrow = cluster;
  change_collectives(&narrow, [&](const ClusterLevel& level, CollectiveCurves& curves) {
    for (auto& [kind, curve] : curves) {
      const std::int64_t latency_ns = curve.times_ns.front();
      for (std::int64_t& size : curve.sizes) size *= static_cast<std::int64_t>(sizeof(float) / dtype_bytes(wire));
      for (std::int64_t& time_ns : curve.times_ns) {
        time_ns = latency_ns + std::llround(level.sum_factor(wire) * static_cast<double>(time_ns - latency_ns));
      }
    }
  });
  return narrow;
}

// What engines work in, and send, but for buffers that are handed over.
Job in_float32(Job job) {
  for (JobTensor& tensor : job.tensors) tensor.dtype = DType::kFloat32;
  return job;
}

Result<Timeline> simulate_dense(const Job& job, const Cluster& cluster, bool takes_buffers) {
  Cluster scaled = cluster;
  if (takes_buffers) scaled.unpack = {};  // they are scaled where they lie
  return simulate_plan(plan_of_dense(job, cluster, takes_buffers), takes_buffers ? job : in_float32(job), scaled);
}

std::int64_t total_ns(const Timeline& timeline, std::string_view name) {
  std::int64_t total = 0;
  for (const TimelineEvent& event : timeline.events) {
    if (event.name == name) total += event.end_ns - event.start_ns;
  }
  return total;
}

struct Prediction {
  std::int64_t step_ns = 0;
  std::int64_t transfers_ns = 0;  // links are busy
};

Prediction prediction_of(const Timeline& timeline, const Cluster& cluster) {
  Prediction prediction{.step_ns = timeline.step_ns};
  const int first_link = static_cast<int>(timeline.rows.size() - cluster.levels.size());
  for (const TimelineEvent& event : timeline.events) {
    if (event.row >= first_link) prediction.transfers_ns += event.end_ns - event.start_ns;
  }
  return prediction;
}

Result<Prediction> predict_dense(const Job& job, const Cluster& cluster, bool takes_buffers) {
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_dense(job, cluster, takes_buffers));
  return prediction_of(timeline, cluster);
}

// When the last gradient is ready, if nothing is compressed; but for what the engine does before, as auto measures it.
Result<std::int64_t> dense_backward_ns(const Job& job, const Cluster& cluster, bool takes_buffers) {
  Cluster without_engine = cluster;
  without_engine.pack = without_engine.unpack = {};
  without_engine.collective_start_ns.reset();
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_dense(job, without_engine, takes_buffers));
  std::int64_t end_ns = 0;
  for (const TimelineEvent& event : timeline.events) {
    if (event.name == "backward") end_ns = std::max(end_ns, event.end_ns);
  }
  return end_ns;
}

Cluster with_links_slower_by(const Cluster& cluster, double factor) {
  Cluster slower = cluster;
  change_collectives(&slower, [&](const ClusterLevel&, CollectiveCurves& curves) {
    for (auto& [kind, curve] : curves) {
      for (std::int64_t& time_ns : curve.times_ns) {
        time_ns = scaled_ns(factor, time_ns);
      }
    }
  });
  return slower;
}

}  // namespace

bool tell_sizes(const GradientSamples& samples) { return std::any_of(samples.begin(), samples.end(), tells_sizes); }

bool has_varying_payloads(const std::string& what) {
  if (what == "none" || what.starts_with('{')) return false;
  const Result<std::string> codec = codec_of_setting(what);
  const Result<std::unique_ptr<Codec>> made = codec.ok() ? make_codec(codec.value()) : codec.status();
  return made.ok() && !made.value()->row().traits.fixed_size;
}

std::map<std::uint32_t, std::int64_t> sampled_elems(const std::vector<EngineTensor>& tensors) {
  std::vector<std::uint32_t> largest(tensors.size());
  std::iota(largest.begin(), largest.end(), 0u);
  const auto elems_of = [&](std::uint32_t t) { return tensors[t].rows * tensors[t].cols; };
  std::stable_sort(largest.begin(), largest.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return elems_of(a) > elems_of(b); });
  std::int64_t left = std::int64_t{8} << 20;
  std::map<std::uint32_t, std::int64_t> sampled;
  for (const std::uint32_t t : largest) {
    const std::int64_t elems = tensors[t].dimensions > 1 ? std::min(elems_of(t), left) : 0;
    if (elems > 0) sampled[t] = elems;
    left -= elems;
  }
  return sampled;
}

Result<Cluster> with_slowed_backward(const Cluster& cluster, const Job& job, std::int64_t dense_ready_ns,
                                     bool takes_buffers) {
  Cluster slowed = cluster;
  double least = 0, most = 1;
  for (int halving = 0; halving < 10; ++halving) {
    const double middle = (least + most) / 2;
    slowed.transfers_slow_backward = middle;
    CORTADO_ASSIGN_OR_RETURN(const std::int64_t end_ns, dense_backward_ns(job, slowed, takes_buffers));
    (end_ns < dense_ready_ns ? least : most) = middle;
  }
  slowed.transfers_slow_backward = least;
  return slowed;
}

Result<Cluster> as_dense_steps_show(const Cluster& cluster, const Job& job, const MeasuredSteps& steps,
                                    bool takes_buffers) {
  constexpr double kMostFactor = 2, kCounts = 1.2;
  const auto slower_by = [&](double factor) {
    return with_slowed_backward(with_links_slower_by(cluster, factor), job, steps.dense_ready_ns, takes_buffers);
  };
  const auto dense = [&](double factor) -> Result<std::int64_t> {
    CORTADO_ASSIGN_OR_RETURN(const Cluster links, slower_by(factor));
    CORTADO_ASSIGN_OR_RETURN(const Prediction predicted, predict_dense(job, links, takes_buffers));
    return predicted.step_ns;
  };
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t as_measured_ns, dense(1));
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t slower_ns, dense(kMostFactor));
  if (static_cast<double>(slower_ns) < kCounts * static_cast<double>(as_measured_ns)) return slower_by(1);
  double least = 1 / kMostFactor, most = kMostFactor;
  for (int halving = 0; halving < 12; ++halving) {
    const double middle = std::sqrt(least * most);
    CORTADO_ASSIGN_OR_RETURN(const std::int64_t middle_ns, dense(middle));
    (middle_ns < steps.dense_ns ? least : most) = middle;
  }
  return slower_by(std::sqrt(least * most));
}

namespace {

// How predictions are made once the dense steps have shown what links and backward pass are like.
struct Fit {
  std::vector<EngineTensor> tensors;
  Job job;
  Cluster cluster;
  bool takes_buffers = true, keeps_gradients = false;
  std::int64_t told_dense_ns = 0;  // what is said of dense: predicted, with links as they were measured
  std::int64_t dense_ns = 0;       // measured; 0: predictions count as they are
  Prediction dense = {};           // of the same step

  // What the dense step took beyond its prediction is added in proportion to the time that links are busy; if it took
  // less, all are shortened in proportion.
  std::int64_t fitted_ns(const Prediction& prediction) const {
    auto ns = static_cast<double>(prediction.step_ns);
    const auto missing = static_cast<double>(dense_ns - dense.step_ns);
    if (dense_ns > 0 && missing < 0) ns *= static_cast<double>(dense_ns) / static_cast<double>(dense.step_ns);
    if (dense_ns > 0 && missing > 0 && dense.transfers_ns > 0) {
      ns += missing * static_cast<double>(prediction.transfers_ns) / static_cast<double>(dense.transfers_ns);
    }
    return std::max<std::int64_t>(1, std::llround(ns));
  }

  Result<std::vector<std::int64_t>> predict(const std::string& what, const GradientSamples& samples,
                                            std::span<const double> paces) const {
    std::vector<std::int64_t> predicted_ns;
    if (what.starts_with('{')) {
      CORTADO_ASSIGN_OR_RETURN(const Plan plan, plan_from_json(what));
      for (const double pace : paces) {
        CORTADO_ASSIGN_OR_RETURN(predicted_ns.emplace_back(), predict_plan(plan, pace));
      }
      return predicted_ns;
    }
    CORTADO_ASSIGN_OR_RETURN(const SettingShape shape, shape_of_setting(what, tensors));
    Cluster links = cluster;
    if (shape.traits.low_rank && shape.options.wire != DType::kFloat32) links = with_wire(cluster, shape.options.wire);
    if (!shape.traits.fixed_size) {
      CORTADO_ASSIGN_OR_RETURN(links, with_expected_sizes(links, shape.codec, samples));
    }
    if (shape.traits.needs_residual && !shape.traits.linear) links = with_encoding_alone(links, shape.codec);
    // Gradients are encoded where they lie.
    links.pack = links.unpack = {};
    for (const double pace : paces) {
      CORTADO_ASSIGN_OR_RETURN(predicted_ns.emplace_back(),
                               predict_messages(shape, in_float32(at_pace(job, pace)), at_pace(links, pace)));
    }
    return predicted_ns;
  }

  Result<std::int64_t> predict_plan(const Plan& plan, double pace) const {
    const Cluster links = at_pace(cluster, pace);
    CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_plan(plan, in_float32(at_pace(job, pace)), links));
    return fitted_ns(prediction_of(timeline, links));
  }

  // Of a setting, once job and cluster are as for its engine.
  Result<std::int64_t> predict_messages(const SettingShape& shape, const Job& of_engine, Cluster links) const {
    const Plan plan = plan_of_setting(shape, tensors, links);
    if (keeps_gradients || shape.options.method == EngineOptions::Method::kCast) {
      CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_messages(plan, of_engine, links));
      return fitted_ns(prediction_of(timeline, links));
    }
    // Engines with error feedback decode when all has arrived and is known to be finite, beside no transfer.
    Cluster idle_links = links;
    idle_links.transfers_slow_backward = 0;
    CORTADO_ASSIGN_OR_RETURN(const Timeline decoded, simulate_messages(plan, of_engine, idle_links));
    for (CodecTimes& times : links.codecs) {
      if (times.direction == OpKind::kDecode) std::fill(times.curve.times_ns.begin(), times.curve.times_ns.end(), 0);
    }
    CORTADO_ASSIGN_OR_RETURN(const Timeline arrived, simulate_messages(plan, of_engine, links));
    Prediction predicted = prediction_of(arrived, links);
    predicted.step_ns += total_ns(decoded, "decode");
    return fitted_ns(predicted);
  }
};

// The planner's own plan, if it encodes anything.
Result<std::optional<AutoCandidate>> best_plan(const Fit& fit, const std::vector<std::string>& codecs) {
  PlannerConstraints constraints;
  constraints.allowed_codecs = codecs;
  constraints.max_lossy_passes = 1;  // as the settings
  CORTADO_ASSIGN_OR_RETURN(Plan plan, make_plan(in_float32(fit.job), fit.cluster, constraints));
  const bool encodes = std::any_of(plan.buckets.begin(), plan.buckets.end(),
                                   [](const PlanBucket& bucket) { return bucket.option.encodes() > 0; });
  if (!encodes) return std::optional<AutoCandidate>();
  char label[96];
  std::snprintf(label, sizeof(label), "plan(hash=%016llx, buckets=%zu)",
                static_cast<unsigned long long>(plan_hash(plan)), plan.buckets.size());
  CORTADO_ASSIGN_OR_RETURN(const std::int64_t predicted_ns, fit.predict_plan(plan, /*pace=*/1));
  return std::optional(AutoCandidate{.label = label, .what = plan_to_json(plan), .predicted_ns = predicted_ns});
}

// Of `cluster` as measured, or with `fits` as the dense steps show it.
Result<Fit> make_fit(const CandidateRequest& request, const Job& job, const MeasuredSteps& steps,
                     const Cluster& cluster) {
  // A file was measured with more time, and perhaps for other plans: it counts as it is.
  const bool fits = !request.cluster.has_value();
  const bool takes_buffers = request.options.takes_buffers;
  Fit fit{.tensors = request.tensors,
          .job = job,
          .cluster = cluster,
          .takes_buffers = takes_buffers,
          .keeps_gradients = steps.keeps_gradients};
  if (fits) {
    CORTADO_ASSIGN_OR_RETURN(fit.cluster, with_slowed_backward(cluster, job, steps.dense_ready_ns, takes_buffers));
  }
  // Who averages by itself scales gradients while it copies them.
  Cluster of_dense = fit.cluster;
  if (request.options.can_average) of_dense.pack = {};
  CORTADO_ASSIGN_OR_RETURN(const Prediction told, predict_dense(job, of_dense, takes_buffers));
  fit.told_dense_ns = told.step_ns;
  if (!fits) return fit;
  CORTADO_ASSIGN_OR_RETURN(fit.cluster, as_dense_steps_show(cluster, job, steps, takes_buffers));
  CORTADO_ASSIGN_OR_RETURN(fit.dense, predict_dense(job, fit.cluster, takes_buffers));
  fit.dense_ns = steps.dense_ns;
  return fit;
}

// Payloads whose sizes vary travel behind their sizes in a plan, and beside them in the engine of a setting. On several
// levels a plan may make that good.
bool may_pay_in_plans(const std::string& codec, const Cluster& cluster) {
  const Result<std::unique_ptr<Codec>> made = make_codec(codec);
  return cluster.levels.size() > 1 || (made.ok() && made.value()->row().traits.fixed_size);
}

// On rank 0: predictions for `candidates`; and the planner's plan, if it encodes anything.
Status add_predictions(const CandidateRequest& request, const Job& job, const MeasuredSteps& steps,
                       const Cluster& cluster, Candidates* candidates) {
  const AutoOptions& options = request.options;
  CORTADO_ASSIGN_OR_RETURN(const Fit fit, make_fit(request, job, steps, cluster));
  candidates->list[0].predicted_ns = fit.told_dense_ns;
  for (AutoCandidate& candidate : std::span(candidates->list).subspan(1)) {
    const double as_dense[] = {1};
    const Result<std::vector<std::int64_t>> predicted_ns = fit.predict(candidate.what, steps.samples, as_dense);
    if (predicted_ns.ok()) {
      candidate.predicted_ns = predicted_ns.value()[0];
    } else {  // a cluster file may have no times of this codec
      candidates->notes.push_back("auto has no prediction of " + candidate.label + ", which is tried only after the " +
                                  "others: " + predicted_ns.status().message());
    }
  }
  candidates->predict = [fit](const std::string& what, const GradientSamples& samples, std::span<const double> paces) {
    return fit.predict(what, samples, paces);
  };
  std::vector<std::string> codecs = codecs_for_plans(options, request.refused);
  std::erase_if(codecs, [&](const std::string& codec) { return !may_pay_in_plans(codec, cluster); });
  if (codecs.empty()) return {};
  Result<std::optional<AutoCandidate>> planned = best_plan(fit, codecs);
  if (!planned.ok()) {
    candidates->notes.push_back("auto has no plan to try: " + planned.status().message());
  } else if (planned.value().has_value()) {
    candidates->list.push_back(*std::move(planned).value());
  }
  return {};
}

Result<Cluster> measure_cluster(const AutoOptions& options, const Topology& topology, Communicator* communicator,
                                const Clock* clock) {
  // First what settings travel by, as later ones may find the time spent. Where all ranks are on one level, ways of two
  // collectives send as many bytes as one does, and the second one can't begin while the backward pass runs.
  std::vector<OpKind> collectives = {OpKind::kAllReduce, OpKind::kAllGather};
  std::vector<OpKind> others = {OpKind::kReduce, OpKind::kBroadcast, OpKind::kGather};
  std::vector<OpKind>& halves = topology.levels.size() > 1 ? collectives : others;
  halves.insert(halves.end(), {OpKind::kReduceScatter, OpKind::kAllToAll});
  CalibrateOptions calibration{.name = "as measured by auto",
                               .codecs = auto_codecs(options.quality),
                               .collectives = std::move(collectives),
                               .contention = false,
                               .budget_s = options.measure_s,
                               .topology = topology,
                               .transport_version = options.transport_version,
                               .timeout_s = options.timeout_s,
                               .progress = nullptr};
  CORTADO_ASSIGN_OR_RETURN(Cluster cluster, calibrate(communicator, calibration, clock));
  // Collectives with a root are not worth the time to measure them, and formulas for them promise too much.
  change_collectives(&cluster, [&](const ClusterLevel&, CollectiveCurves& curves) {
    for (const OpKind kind : others) curves[kind] = {.sizes = {1}, .times_ns = {kMaxNs / 1024}};
  });
  return cluster;
}

// Best first, dense where it is, those without a prediction last; without those that can't win.
void keep_promising(std::int64_t dense_ns, Candidates* candidates) {
  std::vector<AutoCandidate>& list = candidates->list;
  const auto is_hopeless = [&](const AutoCandidate& candidate) {
    return static_cast<double>(candidate.predicted_ns) > kHopeless * static_cast<double>(dense_ns);
  };
  list.erase(std::remove_if(list.begin() + 1, list.end(), is_hopeless), list.end());
  const auto key = [](const AutoCandidate& of) { return std::pair(of.predicted_ns < 0, of.predicted_ns); };
  std::stable_sort(list.begin() + 1, list.end(),
                   [&](const AutoCandidate& a, const AutoCandidate& b) { return key(a) < key(b); });
  if (list.size() > kMostTried + 1) list.resize(kMostTried + 1);
}

}  // namespace

Result<Placement> find_placement(const Result<std::optional<LauncherPlace>>& place, Communicator* communicator,
                                 std::chrono::nanoseconds timeout) {
  const Result<Topology> agreed = agree_on_topology(communicator, place.ok() ? place.value() : std::nullopt, timeout);
  if (agreed.ok()) return Placement{agreed.value(), place.ok() ? "" : place.status().message()};
  // What ranks disagree on, and numbers that can't be: the same error on all of them.
  const StatusCode code = agreed.status().code();
  if (code != StatusCode::kMismatch && code != StatusCode::kInvalidArgument) return agreed.status();
  CORTADO_ASSIGN_OR_RETURN(Topology flat, Topology::two_levels(communicator->world_size(), 1));
  return Placement{std::move(flat), agreed.status().message()};
}

Result<std::optional<Cluster>> given_cluster(const AutoOptions& options, const Topology& topology,
                                             Communicator* communicator) {
  if (options.cluster.empty()) return std::optional<Cluster>();
  CORTADO_ASSIGN_OR_RETURN(const ClusterIdentity identity,
                           cluster_identity(communicator, options.transport_version, timeout_of(options)));
  // One letter, then the file or the error.
  std::string text;
  if (communicator->rank() == 0) {
    const Result<Cluster> loaded = load_cluster(options.cluster);
    const Status fits = loaded.ok() ? check_cluster_is_of(loaded.value(), identity, topology) : loaded.status();
    const bool is_torch = identity.communicator.starts_with("callback");
    const std::string advice = !loaded.ok() ? ""
                               : is_torch   ? "; measure here with torchrun ... -m cortado.calibrate"
                                            : "; measure here with mpirun ... cortado calibrate";
    text = fits.ok() ? "+" + cluster_to_json(loaded.value()) : "-" + fits.message() + advice;
  }
  CORTADO_ASSIGN_OR_RETURN(text, text_of_rank_0(communicator, text, timeout_of(options)));
  if (text.front() == '-') {
    return make_error(StatusCode::kMismatch, "cluster=%s: %s", options.cluster.c_str(), text.c_str() + 1);
  }
  CORTADO_ASSIGN_OR_RETURN(Cluster cluster, cluster_from_json(std::string_view(text).substr(1)));
  return std::optional<Cluster>(std::move(cluster));
}

bool may_run(const std::string& what, const AutoOptions& options, const std::vector<std::string>& refused) {
  if (what == "none") return true;
  if (!what.starts_with('{')) {
    const std::vector<AutoSetting> allowed = allowed_settings(options, refused);
    return std::any_of(allowed.begin(), allowed.end(),
                       [&](const AutoSetting& setting) { return setting.spec == what; });
  }
  const Result<Plan> plan = plan_from_json(what);
  const std::vector<std::string> codecs = codecs_for_plans(options, refused);
  return plan.ok() &&
         std::all_of(plan.value().buckets.begin(), plan.value().buckets.end(), [&](const PlanBucket& bucket) {
           return bucket.option.encodes() == 0 || std::find(codecs.begin(), codecs.end(), bucket.codec) != codecs.end();
         });
}

Result<Candidates> find_candidates(const CandidateRequest& request, const MeasuredSteps& steps,
                                   Communicator* communicator, const Clock* clock) {
  const AutoOptions& options = request.options;
  std::vector<std::string> refused = request.refused;
  Candidates candidates;
  const std::string fp16 = "cast(fp16)";
  if (kMayGrow * steps.largest_gradient > kLargestFloat16 && may_run(fp16, options, refused)) {
    refused.push_back(fp16);
    candidates.notes.push_back(fp16 + " is left out, of plans too: fp16 ends at " + format_text("%g", kLargestFloat16) +
                               ", and the largest gradient, " + format_text("%.3g", steps.largest_gradient) +
                               ", may grow by " + format_text("%g", kMayGrow) + " in steps to come");
  }
  const CandidateRequest fitting{request.tensors, options, request.topology, request.cluster, refused};
  const std::vector<AutoSetting> settings = allowed_settings(options, refused);
  candidates.list = {{.label = "dense", .what = "none"}};
  for (const AutoSetting& setting : settings) candidates.list.push_back({.label = setting.spec, .what = setting.spec});
  std::optional<Cluster> cluster = request.cluster;
  if (cluster.has_value()) {  // a file may spell codecs its own way
    for (CodecTimes& times : cluster->codecs) times.codec = canonical_codec(times.codec);
  }
  if (!cluster.has_value() && options.measure_s > 0) {
    CORTADO_ASSIGN_OR_RETURN(cluster, measure_cluster(options, request.topology, communicator, clock));
  }
  if (cluster.has_value() && communicator->rank() == 0) {
    // All is predicted at the pace of the dense steps, as it is compared with these. What was measured just now was
    // beside the steps in which nothing travels.
    const Job job = at_pace(make_job(request.tensors, steps), steps.dense_pace());
    if (!request.cluster.has_value()) cluster = at_pace(*std::move(cluster), steps.dense_pace());
    Status predicted = job.check();
    if (predicted.ok()) predicted = add_predictions(fitting, job, steps, *cluster, &candidates);
    if (predicted.ok()) {
      keep_promising(!request.cluster.has_value() ? steps.dense_ns : candidates.list[0].predicted_ns, &candidates);
    } else {
      candidates.notes.push_back("auto tries without predictions: " + predicted.message());
    }
  }
  CORTADO_ASSIGN_OR_RETURN(const std::string text,
                           text_of_rank_0(communicator, candidates_to_json(candidates), timeout_of(options)));
  CORTADO_ASSIGN_OR_RETURN(Candidates found, candidates_from_json(text));
  found.predict = std::move(candidates.predict);
  return found;
}

}  // namespace cortado

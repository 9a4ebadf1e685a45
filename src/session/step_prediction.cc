// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "session/step_prediction.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "bucket/layout.h"
#include "core/check.h"
#include "core/finite.h"
#include "engine/round_layouts.h"
#include "engine/trained_codec.h"
#include "engine/treatment.h"
#include "planner/simulate/timeline.h"
#include "session/settings.h"

namespace cortado {

namespace {

std::int64_t scaled_ns(double factor, std::int64_t time_ns) {
  return std::llround(std::min(static_cast<double>(kMaxNs), factor * static_cast<double>(time_ns)));
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
  bool decodes_while_waiting = false;
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
    shape.decodes_while_waiting = !trained.is_summed;
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

bool is_transfer(const TimelineEvent& event, const Timeline& timeline, const Cluster& cluster) {
  return event.row >= static_cast<int>(timeline.rows.size() - cluster.levels.size());
}

// Of an engine that decodes messages one after the other, in the order in which they arrive, once nothing is left to
// encode and to start: what of that is left when all has arrived. `arrived`: without decoding; `decoded`: with it.
std::int64_t decode_left_ns(const Timeline& arrived, const Timeline& decoded, const Cluster& cluster) {
  std::map<int, std::int64_t> arrival_ns, decode_ns;  // by bucket
  std::int64_t ready_ns = 0, last_arrival_ns = 0;
  for (const TimelineEvent& event : arrived.events) {
    if (is_transfer(event, arrived, cluster)) {
      std::int64_t& end_ns = arrival_ns[event.bucket];
      end_ns = std::max(end_ns, event.end_ns);
      last_arrival_ns = std::max(last_arrival_ns, event.end_ns);
    } else if (event.name == "backward" || event.name == "encode" || event.name == "start") {
      ready_ns = std::max(ready_ns, event.end_ns);
    }
  }
  for (const TimelineEvent& event : decoded.events) {
    if (event.name == "decode") decode_ns[event.bucket] += event.end_ns - event.start_ns;
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> messages;  // arrival, decoding
  for (const auto& [bucket, time_ns] : decode_ns) messages.emplace_back(arrival_ns[bucket], time_ns);
  std::sort(messages.begin(), messages.end());
  std::int64_t now_ns = ready_ns;
  for (const auto& [at_ns, time_ns] : messages) now_ns = std::max(now_ns, at_ns) + time_ns;
  return std::max<std::int64_t>(0, now_ns - std::max(ready_ns, last_arrival_ns));
}

Prediction prediction_of(const Timeline& timeline, const Cluster& cluster) {
  Prediction prediction{.step_ns = timeline.step_ns};
  for (const TimelineEvent& event : timeline.events) {
    if (is_transfer(event, timeline, cluster)) prediction.transfers_ns += event.end_ns - event.start_ns;
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

// Of a setting, once job and cluster are as for its engine.
Result<std::int64_t> messages_ns(const StepPredictor& predictor, const SettingShape& shape, const Job& of_engine,
                                 Cluster links) {
  const Plan plan = plan_of_setting(shape, predictor.tensors, links);
  if (predictor.keeps_gradients || shape.options.method == EngineOptions::Method::kCast) {
    CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_messages(plan, of_engine, links));
    return predictor.fitted_ns(prediction_of(timeline, links));
  }
  // Engines with error feedback decode when all has arrived and is known to be finite, beside no transfer; gathered
  // payloads also while later messages are awaited (predicted as fast as beside none).
  Cluster idle_links = links;
  idle_links.transfers_slow_backward = 0;
  CORTADO_ASSIGN_OR_RETURN(const Timeline decoded, simulate_messages(plan, of_engine, idle_links));
  for (CodecTimes& times : links.codecs) {
    if (times.direction == OpKind::kDecode) std::fill(times.curve.times_ns.begin(), times.curve.times_ns.end(), 0);
  }
  CORTADO_ASSIGN_OR_RETURN(const Timeline arrived, simulate_messages(plan, of_engine, links));
  Prediction predicted = prediction_of(arrived, links);
  predicted.step_ns +=
      shape.decodes_while_waiting ? decode_left_ns(arrived, decoded, links) : total_ns(decoded, "decode");
  return predictor.fitted_ns(predicted);
}

}  // namespace

Job job_of_steps(const std::vector<EngineTensor>& tensors, const MeasuredSteps& steps) {
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

Job in_float32(Job job) {
  for (JobTensor& tensor : job.tensors) tensor.dtype = DType::kFloat32;
  return job;
}

bool tell_sizes(const GradientSamples& samples) { return std::any_of(samples.begin(), samples.end(), tells_sizes); }

bool has_varying_payloads(const AutoCandidate& candidate) {
  if (candidate.what == "none" || candidate.plan.has_value()) return false;
  const Result<std::string> codec = codec_of_setting(candidate.what);
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

Result<StepPredictor> make_predictor(const std::vector<EngineTensor>& tensors, const Job& job,
                                     const MeasuredSteps& steps, const Cluster& cluster,
                                     const PredictorOptions& options) {
  const bool takes_buffers = options.takes_buffers;
  StepPredictor predictor{.tensors = tensors, .job = job, .cluster = cluster, .keeps_gradients = steps.keeps_gradients};
  if (options.fits) {
    CORTADO_ASSIGN_OR_RETURN(predictor.cluster,
                             with_slowed_backward(cluster, job, steps.dense_ready_ns, takes_buffers));
  }
  // Who averages by itself scales gradients while it copies them.
  Cluster of_dense = predictor.cluster;
  if (options.can_average) of_dense.pack = {};
  CORTADO_ASSIGN_OR_RETURN(const Prediction told, predict_dense(job, of_dense, takes_buffers));
  predictor.told_dense_ns = told.step_ns;
  if (!options.fits) return predictor;
  CORTADO_ASSIGN_OR_RETURN(predictor.cluster, as_dense_steps_show(cluster, job, steps, takes_buffers));
  CORTADO_ASSIGN_OR_RETURN(predictor.dense, predict_dense(job, predictor.cluster, takes_buffers));
  predictor.dense_ns = steps.dense_ns;
  return predictor;
}

std::int64_t StepPredictor::fitted_ns(const Prediction& prediction) const {
  auto ns = static_cast<double>(prediction.step_ns);
  const auto missing = static_cast<double>(dense_ns - dense.step_ns);
  if (dense_ns > 0 && missing < 0) ns *= static_cast<double>(dense_ns) / static_cast<double>(dense.step_ns);
  if (dense_ns > 0 && missing > 0 && dense.transfers_ns > 0) {
    ns += missing * static_cast<double>(prediction.transfers_ns) / static_cast<double>(dense.transfers_ns);
  }
  return std::max<std::int64_t>(1, std::llround(ns));
}

Result<std::vector<std::int64_t>> StepPredictor::predict(const AutoCandidate& candidate, const GradientSamples& samples,
                                                         std::span<const double> paces) const {
  std::vector<std::int64_t> predicted_ns;
  if (candidate.plan.has_value()) {
    for (const double pace : paces) {
      CORTADO_ASSIGN_OR_RETURN(predicted_ns.emplace_back(), predict_plan(*candidate.plan, pace));
    }
    return predicted_ns;
  }
  CORTADO_ASSIGN_OR_RETURN(const SettingShape shape, shape_of_setting(candidate.what, tensors));
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
                             messages_ns(*this, shape, in_float32(at_pace(job, pace)), at_pace(links, pace)));
  }
  return predicted_ns;
}

Result<std::int64_t> StepPredictor::predict_plan(const Plan& plan, double pace) const {
  const Cluster links = at_pace(cluster, pace);
  CORTADO_ASSIGN_OR_RETURN(const Timeline timeline, simulate_plan(plan, in_float32(at_pace(job, pace)), links));
  return fitted_ns(prediction_of(timeline, links));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Of Calibrator: packing, codecs, and what a codec does to computation beside it.
#include <atomic>
#include <cmath>
#include <thread>

#include "core/check.h"
#include "core/checksum.h"
#include "core/differences.h"
#include "core/finite.h"
#include "core/philox.h"
#include "cortado/codec.h"
#include "profile/calibrator.h"

namespace cortado {

namespace {

// How often a tensor is packed in one run: ranks that share cores get turns of milliseconds, and what ends
// within one seems to have the core for itself.
constexpr int kPackings = 4;

bool is_cpu_curve(const CodecTimes& times, const std::string& spec) {
  return times.codec == spec && times.device == OpDevice::kCpu && times.threads == 1;
}

// What a rank's thread does for one tensor: beside encode and decode the passes of error feedback and, of payloads that
// are gathered, checks and sums; where codecs are fast these cost as much.
class CodecWork {
 public:
  CodecWork(const Codec& codec, std::int64_t elems)
      : codec_(codec),
        has_feedback_(!codec.row().traits.lossless && !codec.is_majority_vote()),
        is_gathered_(!codec.row().traits.linear),
        cols_(static_cast<std::int64_t>(std::sqrt(static_cast<double>(elems)))),
        rows_(elems / cols_),
        gradient_(size()),
        residual_(has_feedback_ ? size() : 0),
        values_(size()),
        decoded_(size()),
        sum_(is_gathered_ ? size() : 0),
        payload_(codec.max_payload_bytes(rows_, cols_, DType::kFloat32)),
        scratch_(codec.scratch_bytes(rows_, cols_, DType::kFloat32)) {
    philox_fill_normal(1, 0, 0, gradient_.data(), rows_ * cols_);
    for (float& value : gradient_) value *= 1e-3f;
  }

  std::int64_t elems() const { return rows_ * cols_; }

  Status encode() {
    const std::size_t count = size();
    const float* input = gradient_.data();
    if (has_feedback_) {
      for (std::size_t i = 0; i < count; ++i) values_[i] = gradient_[i] + residual_[i];
      input = values_.data();
    }
    CORTADO_ASSIGN_OR_RETURN(
        payload_bytes_, codec_.encode({input, DType::kFloat32, rows_, cols_}, {.seed = 1, .step = step_++, .tensor = 1},
                                      payload_.span(), scratch_.span()));
    if (is_gathered_) check_ = checksum_64(payload());
    if (!has_feedback_) return {};
    CORTADO_RETURN_IF_ERROR(decode_alone());
    (void)take_differences(values_.data(), decoded_.data(), elems(), residual_.data());
    return {};
  }

  Status decode() {
    CORTADO_CHECK(!is_gathered_ || checksum_64(payload()) == check_, "nothing has touched it");
    CORTADO_RETURN_IF_ERROR(decode_alone());
    for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += decoded_[i];
    return {};
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(rows_ * cols_); }
  std::span<const std::byte> payload() { return payload_.span().first(payload_bytes_); }
  Status decode_alone() {
    return codec_.decode(payload(), {decoded_.data(), DType::kFloat32, rows_, cols_}, scratch_.span());
  }

  const Codec& codec_;
  bool has_feedback_, is_gathered_;
  std::int64_t cols_, rows_;
  AlignedBuffer<float> gradient_, residual_, values_, decoded_, sum_;
  AlignedBuffer<std::byte> payload_, scratch_;
  std::uint64_t payload_bytes_ = 0, step_ = 0, check_ = 0;
};

// The codec that takes longest to encode a value of its largest tensor; empty: none was measured. A file that is kept
// may have codecs that are not here.
std::string slowest_of(const std::vector<CodecTimes>& times) {
  std::string slowest;
  double most = -1;
  for (const CodecTimes& entry : times) {
    if (entry.direction != OpKind::kEncode || !is_cpu_curve(entry, entry.codec)) continue;
    const double ns = static_cast<double>(entry.curve.times_ns.back()) / static_cast<double>(entry.curve.sizes.back());
    if (ns > most && make_codec(entry.codec).ok()) most = ns, slowest = entry.codec;
  }
  return slowest;
}

}  // namespace

// In both directions.
bool is_measured(const std::vector<CodecTimes>& times, const std::string& spec) {
  return std::count_if(times.begin(), times.end(),
                       [&](const CodecTimes& entry) { return is_cpu_curve(entry, spec); }) == 2;
}

// What a plan's engine does to every gradient, encoded or not: into the bucket's buffer, scaled, and out of it, with a
// look for Inf and NaN.
Status Calibrator::measure_packing(Cluster* cluster) {
  if (!measures_packing(*cluster)) return {};
  const float scale = 1.0f / static_cast<float>(communicator_->world_size());
  Curve packing, unpacking;
  for (const std::int64_t elems : packed_sizes()) {
    AlignedBuffer<float> gradient(static_cast<std::size_t>(elems)), values(static_cast<std::size_t>(elems));
    const std::string size = ", " + std::to_string(elems) + " elements";
    CORTADO_ASSIGN_OR_RETURN(const Point in, measure(
                                                 "pack" + size,
                                                 [&]() -> Status {
                                                   for (std::size_t i = 0; i < values.size(); ++i)
                                                     values[i] = gradient[i] * scale;
                                                   return {};
                                                 },
                                                 kPackings));
    CORTADO_ASSIGN_OR_RETURN(const Point out, measure(
                                                  "unpack" + size,
                                                  [&]() -> Status {
                                                    for (std::size_t i = 0; i < values.size(); ++i)
                                                      gradient[i] = values[i] * scale;
                                                    CORTADO_CHECK(all_finite(values.data(), elems, DType::kFloat32),
                                                                  "nothing but zeros");
                                                    return {};
                                                  },
                                                  kPackings));
    packing.add(elems, in);
    unpacking.add(elems, out);
  }
  const auto keep = [&](const char* pointer, const Curve& curve, TimeCurve* times) {
    if (!times->sizes.empty()) return;  // known
    note_spread(pointer, curve, &cluster->unknown);
    *times = curve.times;
  };
  keep("/copies/pack", packing, &cluster->pack);
  keep("/copies/unpack", unpacking, &cluster->unpack);
  return {};
}

Status Calibrator::measure_codec(const std::string& spec, std::vector<CodecTimes>* times) {
  if (is_measured(*times, spec)) return {};
  std::erase_if(*times, [&](const CodecTimes& entry) { return is_cpu_curve(entry, spec); });
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  Curve encode, decode;
  for (const std::int64_t elems : sizes_up_to(kSmallestElems, options_.max_elems)) {
    if (!is_worth_it(encode)) {
      points_done_ += 2;
      continue;
    }
    CodecWork work(*codec, elems);
    const std::string size = ", " + std::to_string(work.elems()) + " elements";
    CORTADO_ASSIGN_OR_RETURN(const Point encoding,
                             measure(
                                 "encode " + spec + size, [&] { return work.encode(); }, 1, kMostCodecRuns));
    CORTADO_ASSIGN_OR_RETURN(const Point decoding,
                             measure(
                                 "decode " + spec + size, [&] { return work.decode(); }, 1, kMostCodecRuns));
    encode.add(work.elems(), encoding);
    decode.add(work.elems(), decoding);
  }
  for (const auto& [direction, curve] : {std::pair(OpKind::kEncode, &encode), std::pair(OpKind::kDecode, &decode)}) {
    CodecTimes entry;
    entry.codec = spec;
    entry.device = OpDevice::kCpu;
    entry.direction = direction;
    entry.curve = curve->times;
    note_spread("", *curve, &entry.unknown);
    times->push_back(std::move(entry));
  }
  return {};
}

// By how much a product of matrices slows down while another thread encodes with the slowest codec, which computation
// would meet most.
Status Calibrator::measure_contention(Cluster* cluster) {
  if (!options_.contention) return {};
  const std::string spec = slowest_of(cluster->codecs);
  if (spec == cluster->cpu_codec) return {};  // known; or there is none
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  CodecWork work(*codec, std::min<std::int64_t>(options_.max_elems, 1 << 18));
  MatrixProduct matrices;
  const auto product = [&] { return matrices.run(); };
  CORTADO_ASSIGN_OR_RETURN(const Point alone, measure("matrix product", product));
  std::atomic<bool> stop = false;
  Status encoded;
  std::thread encoder([&] {
    while (!stop && encoded.ok()) encoded = work.encode();
  });
  const Result<Point> beside = measure("matrix product beside " + spec, product);
  stop = true;
  encoder.join();
  CORTADO_RETURN_IF_ERROR(beside.status());
  CORTADO_RETURN_IF_ERROR(encoded);
  const double slower =
      static_cast<double>(alone.median_ns) / static_cast<double>(std::max<std::int64_t>(1, beside.value().median_ns));
  cluster->cpu_codec = spec;
  cluster->cpu_codec_slows_backward = std::round(1000 * std::clamp(1 - slower, 0.0, 1.0)) / 1000;
  return {};
}

}  // namespace cortado

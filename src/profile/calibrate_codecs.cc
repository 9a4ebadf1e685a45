// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Of Calibrator: packing, codecs, and what a codec does to computation beside it.
#include <algorithm>
#include <cmath>
#include <latch>
#include <thread>

#include "codec/cast/cast.h"
#include "codec/cast/float_chunks.h"
#include "codec/lowrank/lowrank_kernels.h"
#include "codec/lowrank/orthogonalise.h"
#include "core/check.h"
#include "core/checksum.h"
#include "core/differences.h"
#include "core/finite.h"
#include "core/float_passes.h"
#include "core/philox.h"
#include "cortado/codec.h"
#include "cortado/engine.h"
#include "profile/calibrator.h"

namespace cortado {

namespace {

// How often a tensor is packed, encoded or decoded in one run: ranks that share cores get turns of milliseconds, and
// what ends within one seems to have the core for itself.
constexpr int kPackings = 4;
int codings_of(std::int64_t elems) {
  constexpr std::int64_t kElems = std::int64_t{1} << 21, kMost = 64;
  return static_cast<int>(std::clamp(kElems / elems, std::int64_t{1}, kMost));
}

// Arrays of a tensor's elements, as many as `values` has room for, of which each call takes the next one.
class Rotating {
 public:
  Rotating(std::span<float> values, std::int64_t elems)
      : elems_(static_cast<std::size_t>(elems)), values_(values.first(values.size() / elems_ * elems_)) {}

  float* next() {
    at_ = (at_ + elems_) % values_.size();
    return values_.data() + at_;
  }
  std::span<float> all() { return values_; }

 private:
  std::size_t elems_, at_ = 0;
  std::span<float> values_;
};

// What a rank's thread does for one tensor, in engines of plans: casts in one pass, which sees what they lose; beside
// encode and decode the passes of error feedback and, of payloads that are gathered, checks and sums; where codecs are
// fast these cost as much.
class CpuCodecWork final : public CodecWork {
 public:
  CpuCodecWork(const Codec& codec, std::int64_t elems, CpuArrays& arrays)
      : CodecWork(elems),
        codec_(codec),
        has_feedback_(has_feedback(codec)),
        is_gathered_(!codec.row().traits.linear),
        cast_(has_feedback_ ? DType::kFloat32 : cast_dtype(codec)),
        gradients_(arrays.gradients.span(), this->elems()),
        residuals_(arrays.residuals.span(), this->elems()),
        outputs_(arrays.outputs.span(), this->elems()),
        values_(has_feedback_ ? size() : 0),
        decoded_(size()),
        payload_(codec.max_payload_bytes(rows_, cols_, DType::kFloat32)),
        scratch_(codec.scratch_bytes(rows_, cols_, DType::kFloat32)) {
    if (has_feedback_) std::ranges::fill(residuals_.all(), 0.0f);
  }

  Status encode() override {
    const float* input = gradients_.next();
    float* residual = residuals_.next();
    if (cast_ != DType::kFloat32) {
      payload_bytes_ = payload_.size();
      for_chunks(elems(), [&](std::int64_t at, std::int64_t count) {
        (void)measured_cast(input + at, 0.5f, 2.0f, count, payload_.data(), cast_, at);
      });
      return {};
    }
    if (has_feedback_) {
      for_chunks(elems(), [&](std::int64_t at, std::int64_t count) {
        std::copy_n(input + at, count, values_.data() + at);
        add_values(residual + at, count, values_.data() + at);
      });
      input = values_.data();
    }
    CORTADO_ASSIGN_OR_RETURN(
        payload_bytes_, codec_.encode({input, DType::kFloat32, rows_, cols_}, {.seed = 1, .step = step_++, .tensor = 1},
                                      payload_.span(), scratch_.span()));
    if (is_gathered_) check_ = checksum_64(payload());
    if (!has_feedback_) return {};
    CORTADO_RETURN_IF_ERROR(decode_to(decoded_.data()));
    (void)take_differences(values_.data(), decoded_.data(), elems(), residual);
    return {};
  }

  Status decode() override {
    CORTADO_CHECK(!is_gathered_ || checksum_64(payload()) == check_, "nothing has touched it");
    float* output = outputs_.next();
    if (cast_ != DType::kFloat32) {
      widen_gradient(payload_.data(), cast_, elems(), output);
      CORTADO_CHECK(all_finite(payload_.data(), elems(), cast_), "all of them are small");
      return {};
    }
    if (!is_gathered_) return decode_to(output);
    if (codec_.can_add()) return codec_.decode_add(payload(), {output, DType::kFloat32, rows_, cols_}, scratch_.span());
    CORTADO_RETURN_IF_ERROR(decode_to(decoded_.data()));
    add_values(decoded_.data(), elems(), output);
    return {};
  }

 private:
  std::span<const std::byte> payload() { return payload_.span().first(payload_bytes_); }
  Status decode_to(float* values) {
    return codec_.decode(payload(), {values, DType::kFloat32, rows_, cols_}, scratch_.span());
  }

  const Codec& codec_;
  const bool has_feedback_, is_gathered_;
  const DType cast_;
  Rotating gradients_, residuals_, outputs_;
  AlignedBuffer<float> values_, decoded_;
  AlignedBuffer<std::byte> payload_, scratch_;
  std::uint64_t payload_bytes_ = 0, step_ = 0, check_ = 0;
};

// Low rank does not train as a codec that keeps nothing: engines keep bases and what was sent last, and read gradient
// and residual once (codec/lowrank/lowrank_kernels.h). So that is what is timed: passes and what factors are put
// through.
class CpuLowRankWork final : public CodecWork {
 public:
  CpuLowRankWork(const EngineOptions& options, std::int64_t elems, CpuArrays& arrays)
      : CodecWork(elems),
        has_two_rounds_(options.method == EngineOptions::Method::kPower),
        has_both_sides_(!has_two_rounds_ && options.sides == EngineOptions::Sides::kBoth),
        rank_(static_cast<int>(std::min<std::int64_t>(has_both_sides_ ? (options.rank + 1) / 2 : options.rank, cols_))),
        gradients_(arrays.gradients.span(), this->elems()),
        residuals_(arrays.residuals.span(), this->elems()),
        outputs_(arrays.outputs.span(), this->elems()),
        row_basis_(row_elems()),
        col_basis_(col_elems()),
        row_(row_elems()),
        col_(col_elems()),
        made_orthonormal_(std::max(row_elems(), col_elems())),
        pair_row_(2 * row_elems()),
        pair_col_(2 * col_elems()),
        scratch_(2 * std::max(row_elems(), col_elems())) {
    std::ranges::fill(residuals_.all(), 0.0f);
    random_basis(scratch_.data(), rows_, rank_, {.seed = 1, .step = 0, .tensor = 2});
    for (std::int64_t i = 0; i < rows_; ++i)
      for (int k = 0; k < rank_; ++k) row_basis_[i * rank_ + k] = scratch_[k * rows_ + i];
    random_basis(col_basis_.data(), cols_, rank_, {.seed = 1, .step = 0, .tensor = 1});
  }

  Status encode() override {
    float* residual = residuals_.next();
    ResidualPass pass{.rows = rows_,
                      .cols = cols_,
                      .gradient = gradients_.next(),
                      .residual_in = residual,
                      .residual_out = residual,
                      .sent = pair()};
    if (has_both_sides_) {
      project_both(pass, {row_basis_.data(), col_basis_.data(), rank_}, {row_.data(), col_.data()});
      remove_overlap({rows_, cols_, rank_, row_basis_.data(), col_basis_.data()}, row_.data(), col_.data(),
                     scratch_.data());
    } else {
      project_rows(pass, col_basis_.data(), rank_, row_.data());
    }
    if (has_two_rounds_) {
      orthogonalise_rows(row_.data(), rows_, rank_, {}, scratch_.data());
      pass.gradient = nullptr, pass.residual_out = nullptr, pass.sent = {};
      project_cols(pass, row_.data(), rank_, col_.data());
    }
    return {};
  }

  Status decode() override {
    reconstruct(pair(), rows_, cols_, 1.0f, outputs_.next(), DType::kFloat32, /*streams=*/true);
    if (has_two_rounds_) return {};
    std::copy_n(row_.data(), row_elems(), made_orthonormal_.data());
    orthogonalise_rows(made_orthonormal_.data(), rows_, rank_, {}, scratch_.data());
    if (!has_both_sides_) return {};
    std::copy_n(col_.data(), col_elems(), made_orthonormal_.data());
    orthogonalise(made_orthonormal_.data(), cols_, rank_, {});
    return {};
  }

 private:
  std::int64_t row_elems() const { return rows_ * rank_; }
  std::int64_t col_elems() const { return rank_ * cols_; }
  FactorPair pair() const {
    return {.row = pair_row_.data(), .col = pair_col_.data(), .rank = has_both_sides_ ? 2 * rank_ : rank_};
  }

  const bool has_two_rounds_, has_both_sides_;
  const int rank_;
  Rotating gradients_, residuals_, outputs_;
  AlignedBuffer<float> row_basis_, col_basis_, row_, col_, made_orthonormal_, pair_row_, pair_col_, scratch_;
};

bool is_of(const CodecTimes& times, OpDevice device) {
  return times.device == device && (device == OpDevice::kGpu || times.threads == 1);
}

// The codec that takes longest to encode a value of its largest tensor; empty: none was measured. A file that is kept
// may have codecs that can't run here.
std::string slowest_of(const std::vector<CodecTimes>& times, OpDevice device,
                       FunctionRef<bool(const std::string& spec)> can_run) {
  std::string slowest;
  double most = -1;
  for (const CodecTimes& entry : times) {
    if (entry.direction != OpKind::kEncode || !is_of(entry, device)) continue;
    const double ns = static_cast<double>(entry.curve.times_ns.back()) / static_cast<double>(entry.curve.sizes.back());
    if (ns > most && can_run(entry.codec)) most = ns, slowest = entry.codec;
  }
  return slowest;
}

}  // namespace

CodecWork::CodecWork(std::int64_t elems)
    : cols_(static_cast<std::int64_t>(std::sqrt(static_cast<double>(elems)))), rows_(elems / cols_) {}

void CodecWork::fill(std::span<float> values) {
  philox_fill_normal(1, 0, 0, values.data(), std::ssize(values));
  for (float& value : values) value *= 1e-3f;
}

CpuArrays::CpuArrays(std::int64_t max_elems) {
  constexpr std::int64_t kElems = std::int64_t{1} << 23, kArrays = 8;
  const auto elems = static_cast<std::size_t>(std::max(max_elems, std::min(kElems, kArrays * max_elems)));
  gradients = AlignedBuffer<float>(elems);
  residuals = AlignedBuffer<float>(elems);
  outputs = AlignedBuffer<float>(elems);
  CodecWork::fill(gradients.span());
}

std::unique_ptr<CodecWork> make_cpu_work(const Codec& codec, std::int64_t elems, CpuArrays& arrays) {
  const Result<EngineOptions> options = EngineOptions::parse(codec.spec());
  if (codec.row().traits.low_rank && options.ok()) {
    return std::make_unique<CpuLowRankWork>(options.value(), elems, arrays);
  }
  return std::make_unique<CpuCodecWork>(codec, elems, arrays);
}

bool is_measured(const std::vector<CodecTimes>& times, const std::string& spec, OpDevice device) {
  return std::count_if(times.begin(), times.end(),
                       [&](const CodecTimes& entry) { return entry.codec == spec && is_of(entry, device); }) == 2;
}

// What a plan's engine does to every gradient, encoded or not: into the bucket's buffer, scaled, and out of it, with a
// look for Inf and NaN.
Status Calibrator::measure_packing(Cluster* cluster) {
  if (!measures_packing(*cluster)) return {};
  const float scale = 1.0f / static_cast<float>(communicator_->world_size());
  Curve packing, unpacking;
  for (const std::int64_t elems : packed_sizes()) {
    Rotating gradients(cpu_arrays().gradients.span(), elems), messages(cpu_arrays().residuals.span(), elems);
    Rotating outputs(cpu_arrays().outputs.span(), elems);
    const std::string size = ", " + std::to_string(elems) + " elements";
    CORTADO_ASSIGN_OR_RETURN(const Point in, measure(
                                                 "pack" + size,
                                                 [&]() -> Status {
                                                   const float* gradient = gradients.next();
                                                   float* values = messages.next();
                                                   scale_values(gradient, scale, elems, values);
                                                   return {};
                                                 },
                                                 kPackings));
    CORTADO_ASSIGN_OR_RETURN(const Point out, measure(
                                                  "unpack" + size,
                                                  [&]() -> Status {
                                                    const float* values = messages.next();
                                                    float* gradient = outputs.next();
                                                    scale_values(values, scale, elems, gradient);
                                                    CORTADO_CHECK(all_finite(values, elems, DType::kFloat32),
                                                                  "small numbers");
                                                    return {};
                                                  },
                                                  kPackings));
    packing.add(elems, in);
    unpacking.add(elems, out);
  }
  keep_unless_known("/copies/pack", packing, &cluster->pack, &cluster->unknown);
  keep_unless_known("/copies/unpack", unpacking, &cluster->unpack, &cluster->unknown);
  return {};
}

Result<std::unique_ptr<CodecWork>> Calibrator::make_work(const Codec& codec, OpDevice device, std::int64_t elems) {
  if (device == OpDevice::kCpu) return make_cpu_work(codec, elems, cpu_arrays());
  // The other ranks wait for this one meanwhile, and shall hear of it.
  Result<std::unique_ptr<CodecWork>> work = make_device_work(*options_.device, codec, elems, clock_, timeout_ / 2);
  CORTADO_RETURN_IF_ERROR(on_all_ranks(codec.spec() + " on the device", work.status()));
  return work;
}

Status Calibrator::measure_codec(const std::string& spec, OpDevice device, std::vector<CodecTimes>* times) {
  if (is_measured(*times, spec, device)) return {};
  std::erase_if(*times, [&](const CodecTimes& entry) { return entry.codec == spec && is_of(entry, device); });
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  const std::string where = device == OpDevice::kGpu ? " on the device" : "";
  Curve encode, decode;
  bool is_long_enough = false;  // larger sizes take longer still, and what they take is told by the size before
  for (const std::int64_t elems : sizes_up_to(kSmallestElems, options_.max_elems)) {
    is_long_enough |= !is_worth_it(encode, device == OpDevice::kCpu ? codings_of(elems) : 1);
    if (is_long_enough) {
      points_done_ += 2;
      continue;
    }
    CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<CodecWork> work, make_work(*codec, device, elems));
    const std::string size = where + ", " + std::to_string(work->elems()) + " elements";
    const int codings = device == OpDevice::kCpu ? codings_of(work->elems()) : 1;
    CORTADO_ASSIGN_OR_RETURN(const Point encoding,
                             measure(
                                 "encode " + spec + size, [&] { return work->encode(); }, codings, kMostCodecRuns));
    CORTADO_ASSIGN_OR_RETURN(const Point decoding,
                             measure(
                                 "decode " + spec + size, [&] { return work->decode(); }, codings, kMostCodecRuns));
    encode.add(work->elems(), encoding);
    decode.add(work->elems(), decoding);
  }
  for (const auto& [direction, curve] : {std::pair(OpKind::kEncode, &encode), std::pair(OpKind::kDecode, &decode)}) {
    CodecTimes entry;
    entry.codec = spec;
    entry.device = device;
    entry.direction = direction;
    entry.curve = curve->times;
    note_spread("", *curve, &entry.unknown);
    times->push_back(std::move(entry));
  }
  return {};
}

// The share of its speed that `computation` loses while another thread encodes again and again.
Result<double> Calibrator::share_lost_beside(const std::string& spec, OpDevice device, const std::string& name,
                                             FunctionRef<Status()> computation) {
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, make_codec(spec));
  // On a device small tensors are mostly launches, between which it has nothing to do.
  const std::int64_t most_elems = device == OpDevice::kCpu ? 1 << 18 : options_.max_elems;
  CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<CodecWork> work,
                           make_work(*codec, device, std::min(options_.max_elems, most_elems)));
  CORTADO_ASSIGN_OR_RETURN(const Point alone, measure(name, computation));
  Status encoded;
  std::latch has_begun(1);  // a busy machine may start a thread late
  std::jthread encoder([&](const std::stop_token& stop) {
    encoded = work->encode();
    has_begun.count_down();
    while (!stop.stop_requested() && encoded.ok()) encoded = work->encode();
  });
  has_begun.wait();
  const Result<Point> beside = measure(name + " beside " + spec, computation);
  encoder.request_stop();
  encoder.join();
  CORTADO_RETURN_IF_ERROR(beside.status());
  CORTADO_RETURN_IF_ERROR(on_all_ranks("encode " + spec, encoded));
  const double kept =
      static_cast<double>(alone.median_ns) / static_cast<double>(std::max<std::int64_t>(1, beside.value().median_ns));
  return std::round(1000 * std::clamp(1 - kept, 0.0, 1.0)) / 1000;
}

// Beside the slowest codec, which computation would meet most.
Status Calibrator::measure_contention(Cluster* cluster) {
  if (!options_.contention) return {};
  const std::string spec =
      slowest_of(cluster->codecs, OpDevice::kCpu, [](const std::string& codec) { return make_codec(codec).ok(); });
  if (spec.empty() || spec == cluster->cpu_codec) return {};  // there is none; or it is known
  MatrixProduct matrices;
  CORTADO_ASSIGN_OR_RETURN(cluster->cpu_codec_slows_backward,
                           share_lost_beside(spec, OpDevice::kCpu, "matrix product", [&] { return matrices.run(); }));
  cluster->cpu_codec = spec;
  return {};
}

Status Calibrator::measure_contention_on_device(Cluster* cluster) {
  if (!options_.contention || device_codecs_.empty() || !options_.device_computation) return {};
  const std::string spec = slowest_of(cluster->codecs, OpDevice::kGpu, [&](const std::string& codec) {
    return std::count(device_codecs_.begin(), device_codecs_.end(), codec) > 0;
  });
  if (spec.empty() || spec == cluster->gpu_codec) return {};
  CORTADO_ASSIGN_OR_RETURN(
      cluster->gpu_codec_slows_backward,
      share_lost_beside(spec, OpDevice::kGpu, "computation on the device", options_.device_computation));
  cluster->gpu_codec = spec;
  return {};
}

}  // namespace cortado

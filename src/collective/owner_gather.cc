// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// A rank's message is a header, the payload of its lossy tensors and that of its exact ones. The first all-gather of a
// step has room for about what each rank sent in the steps before (its capacity); what did not fit, the rest, follows
// in a second one. Everybody knows all capacities, because they come from the headers of the steps before.
#include "cortado/owner_gather.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "codec/tensor_list.h"
#include "collective/agreement.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "core/finite.h"
#include "core/float16.h"
#include "core/format.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"
#include "core/seconds.h"

namespace cortado {

namespace {

struct Header {
  std::uint64_t step = 0;
  std::uint64_t codec_hash = 0;
  std::uint64_t lossy_bytes = 0;
  std::uint64_t exact_bytes = 0;
  std::uint64_t is_finite = 1;
  OwnerNote note;

  std::uint64_t payload_bytes() const { return lossy_bytes + exact_bytes; }
};

constexpr std::int64_t kHeaderBytes = sizeof(Header);

// Room for a payload that is a little larger. The largest of the last steps keeps most of its room, as entropy-coded
// sizes go up and down and what does not fit takes a second gather.
constexpr std::int64_t capacity_after(std::int64_t payload_bytes, std::int64_t before) {
  const std::int64_t needed = kHeaderBytes + payload_bytes + payload_bytes / 32 + 64;
  return std::max(needed, before - (before - needed + 7) / 8);
}

float load(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return dtype == DType::kFloat16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

void store(float value, void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] = dtype == DType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  }
}

bool is_all_zero(const TensorView& view) {
  for (std::int64_t i = 0; i < view.elems(); ++i) {
    if (load(view.data, view.dtype, i) != 0) return false;
  }
  return true;
}

// The tensors that one rank owns: their indices, and where they lie in the step in hand.
struct OwnerShare {
  std::vector<std::size_t> lossy, exact;
  std::vector<TensorView> lossy_views, exact_views;
  std::uint64_t most_bytes = 0;  // of its payloads; no damaged header can ask for more memory
  bool has_fixed_size = false;
};

std::string describe(const OwnedTensor& tensor) {
  char text[120];
  std::snprintf(text, sizeof(text), " %" PRId64 " x %" PRId64 " %s of rank %d%s", tensor.rows, tensor.cols,
                std::string(dtype_name(tensor.dtype)).c_str(), tensor.owner, tensor.is_exact ? ", exact" : "");
  return tensor.name + text;
}

std::string settings_text(const OwnerGatherOptions& options) {
  return options.codec + (options.use_error_feedback ? ", with error feedback" : ", without error feedback") +
         ", aggregate " + std::to_string(options.aggregate) + ", seed " + std::to_string(options.random_seed);
}

Status check_tensors(const std::vector<OwnedTensor>& tensors, int world_size) {
  std::unordered_set<std::string_view> names;
  for (const OwnedTensor& tensor : tensors) {
    const std::string& name = tensor.name;
    if (!names.insert(name).second) {
      return make_error(StatusCode::kInvalidArgument, "two tensors have the name %s", name.c_str());
    }
    if (tensor.owner < 0 || tensor.owner >= world_size) {
      return make_error(StatusCode::kInvalidArgument, "%s: owner must be a rank from 0 to %d, got %d", name.c_str(),
                        world_size - 1, tensor.owner);
    }
    if (!checked_size_bytes(tensor.rows, tensor.cols, tensor.dtype).has_value() || tensor.dtype == DType::kUint8) {
      return make_error(StatusCode::kInvalidArgument,
                        "%s: expected a shape that memory can hold and fp32, fp16 or bf16, got %" PRId64 " x %" PRId64
                        " %s",
                        name.c_str(), tensor.rows, tensor.cols, std::string(dtype_name(tensor.dtype)).c_str());
    }
  }
  return {};
}

class OwnerGatherImpl final : public OwnerGather {
 public:
  OwnerGatherImpl(std::vector<OwnedTensor> tensors, const OwnerGatherOptions& options, Communicator* communicator,
                  const Clock* clock, TensorListCodec codec, TensorListCodec exact)
      : tensors_(std::move(tensors)),
        options_(options),
        communicator_(communicator),
        clock_(clock),
        codec_(std::move(codec)),
        exact_(std::move(exact)),
        shares_(static_cast<std::size_t>(communicator->world_size())) {
    residuals_.resize(tensors_.size());
    roundings_.resize(tensors_.size());
    defers_.resize(tensors_.size());
    carried_.resize(tensors_.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const OwnedTensor& tensor = tensors_[i];
      const TensorView view = {nullptr, tensor.dtype, tensor.rows, tensor.cols};
      OwnerShare& share = shares_[static_cast<std::size_t>(tensor.owner)];
      (tensor.is_exact ? share.exact : share.lossy).push_back(i);
      (tensor.is_exact ? share.exact_views : share.lossy_views).push_back(view);
      report_.all_dense_bytes += view.size_bytes();
      if (tensor.owner != rank()) continue;
      report_.dense_bytes += view.size_bytes();
      if (tensor.is_exact || is_alone()) continue;
      carried_[i].resize(static_cast<std::size_t>(view.size_bytes()));
      sources_.emplace_back(carried_[i].data(), view.dtype, view.rows, view.cols);
      if (!options_.use_error_feedback) continue;
      residuals_[i].resize(static_cast<std::size_t>(view.elems()));
      if (view.dtype != DType::kFloat32) roundings_[i].resize(residuals_[i].size());
    }
    for (const OwnerShare& share : shares_)
      exact_scratch_bytes_ = std::max(exact_scratch_bytes_, exact_.scratch_bytes(share.exact_views));
    measure_codec();
    forget_sizes();
  }

  Status set_codec(std::string_view spec, std::optional<std::int64_t> aggregate) override {
    CORTADO_RETURN_IF_ERROR(failure_);
    CORTADO_ASSIGN_OR_RETURN(codec_, TensorListCodec::create(spec, aggregate.value_or(options_.aggregate)));
    options_.aggregate = aggregate.value_or(options_.aggregate);
    measure_codec();
    codec_is_new_ = true;
    return {};
  }

  Status run(std::uint64_t step, std::span<void* const> data, const OwnerNote& own_note,
             std::span<OwnerNote> notes) override {
    CORTADO_RETURN_IF_ERROR(failure_);
    CORTADO_RETURN_IF_ERROR(check_arguments(data, notes));
    for (OwnerShare& share : shares_) {
      for (std::size_t k = 0; k < share.lossy.size(); ++k) share.lossy_views[k].data = data[share.lossy[k]];
      for (std::size_t k = 0; k < share.exact.size(); ++k) share.exact_views[k].data = data[share.exact[k]];
    }
    if (is_alone()) {
      ++report_.steps;
      if (!notes.empty()) notes[0] = own_note;
      return {};
    }
    const Status status = exchange(step, own_note, notes).with_context("step " + std::to_string(step));
    if (!status.ok()) {
      failure_ = status;
      if (!communicator_->abandon(status.to_string()) && in_flight_) {  // the transport may still read and write there
        keep_for_ever(std::array{std::move(sent_), std::move(received_), std::move(rest_)});
        keep_for_ever(std::array{std::move(capacities_), std::move(rests_)});
      }
    }
    return status;
  }

  const std::vector<OwnedTensor>& tensors() const override { return tensors_; }

  OwnerGatherReport report() const override {
    OwnerGatherReport report = report_;
    for (const auto& residual : residuals_) report.residual_bytes += static_cast<std::int64_t>(residual.size()) * 4;
    report.memory_bytes = report.residual_bytes +
                          static_cast<std::int64_t>(sent_.size() + received_.size() + rest_.size() + scratch_.size());
    for (const auto& rounding : roundings_) report.memory_bytes += static_cast<std::int64_t>(rounding.size()) * 4;
    for (const auto& carried : carried_) report.memory_bytes += static_cast<std::int64_t>(carried.size());
    return report;
  }

  std::vector<OwnerResidual> save_residuals() const override {
    std::vector<OwnerResidual> saved;
    if (!options_.use_error_feedback) return saved;
    for (const std::size_t i : own().lossy) {
      if (elems(i) == 0) continue;
      saved.push_back({tensors_[i].name, is_alone() ? std::vector<float>(elems(i)) : residuals_[i]});
    }
    return saved;
  }

  Status load_residuals(const std::vector<OwnerResidual>& saved) override {
    const auto find = [&](std::size_t i) {
      return std::find_if(saved.begin(), saved.end(),
                          [&](const auto& entry) { return entry.name == tensors_[i].name; });
    };
    for (const std::size_t i : own().lossy) {
      const auto entry = find(i);
      if (entry == saved.end() || !options_.use_error_feedback || entry->values.size() == elems(i)) continue;
      return make_error(StatusCode::kMismatch, "the saved residual of %s has %zu values, the tensor has %zu",
                        entry->name.c_str(), entry->values.size(), elems(i));
    }
    for (const std::size_t i : own().lossy) {
      const auto entry = find(i);
      if (residuals_[i].empty()) continue;
      if (entry != saved.end()) {
        residuals_[i] = entry->values;
      } else {
        std::fill(residuals_[i].begin(), residuals_[i].end(), 0.0f);
      }
    }
    return {};
  }

 private:
  int rank() const { return communicator_->rank(); }
  bool is_alone() const { return communicator_->world_size() == 1; }  // then nothing is encoded, and nothing owed
  std::size_t elems(std::size_t i) const { return static_cast<std::size_t>(tensors_[i].rows * tensors_[i].cols); }
  const OwnerShare& own() const { return shares_[static_cast<std::size_t>(rank())]; }

  Status check_arguments(std::span<void* const> data, std::span<OwnerNote> notes) const {
    if (data.size() != tensors_.size()) {
      return make_error(StatusCode::kInvalidArgument, "expected the addresses of %zu tensors, got %zu", tensors_.size(),
                        data.size());
    }
    if (!notes.empty() && notes.size() != shares_.size()) {
      return make_error(StatusCode::kInvalidArgument, "expected room for %zu notes, got %zu", shares_.size(),
                        notes.size());
    }
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (data[i] == nullptr && tensors_[i].rows * tensors_[i].cols != 0) {
        return make_error(StatusCode::kInvalidArgument, "the address of %s is null", tensors_[i].name.c_str());
      }
    }
    return {};
  }

  std::string name_all() const { return name_tensors(tensors_.empty() ? "" : tensors_[0].name, tensors_.size()); }
  std::string name_share(const OwnerShare& share) const {
    const std::vector<std::size_t>& first = share.lossy.empty() ? share.exact : share.lossy;
    return name_tensors(first.empty() ? "" : tensors_[first[0]].name, share.lossy.size() + share.exact.size());
  }

  // What depends on the codec.
  void measure_codec() {
    codec_hash_ = fnv1a_64(codec_.codec().spec() + "/" + std::to_string(options_.aggregate));
    std::uint64_t scratch_bytes = exact_scratch_bytes_;
    for (OwnerShare& share : shares_) {
      share.has_fixed_size = codec_.is_plain() || share.lossy.empty();
      share.most_bytes = codec_.max_payload_bytes(share.lossy_views) + exact_.max_payload_bytes(share.exact_views);
      scratch_bytes = std::max(scratch_bytes, codec_.scratch_bytes(share.lossy_views));
    }
    if (!is_alone()) reserve(&scratch_, scratch_bytes);
  }

  // As before the first step: sizes that vary are not known.
  void forget_sizes() {
    capacities_.assign(shares_.size(), kHeaderBytes);
    for (std::size_t r = 0; r < shares_.size(); ++r) {
      if (shares_[r].has_fixed_size) capacities_[r] += static_cast<std::int64_t>(shares_[r].most_bytes);
    }
  }

  Status exchange(std::uint64_t step, const OwnerNote& own_note, std::span<OwnerNote> notes) {
    const std::int64_t begin_ns = clock_->now_ns();
    CORTADO_ASSIGN_OR_RETURN(const Header header, encode_own(step, own_note));
    const std::int64_t encoded_ns = clock_->now_ns();
    if (const Status status = gather(header); !status.ok()) return status.with_context("gather of " + name_all());
    const std::int64_t gathered_ns = clock_->now_ns();
    CORTADO_RETURN_IF_ERROR(decode_all());
    report_.finite = is_all_finite();
    finish_own();
    if (!notes.empty()) {
      for (std::size_t r = 0; r < shares_.size(); ++r) notes[r] = headers_[r].note;
    }
    report_.encode_ns += encoded_ns - begin_ns;
    report_.gather_ns += gathered_ns - encoded_ns;
    report_.decode_ns += clock_->now_ns() - gathered_ns;
    report_.payload_bytes = static_cast<std::int64_t>(header.payload_bytes());
    report_.all_payload_bytes = 0;
    for (const Header& one : headers_) report_.all_payload_bytes += static_cast<std::int64_t>(one.payload_bytes());
    ++report_.steps;
    return {};
  }

  // ---- encode

  // What is encoded: the tensor, and with feedback what it still owes, as far as its dtype can tell. Not with one of
  // zeros, which may stand for a layer without a gradient in this step: nobody would apply what it gets.
  void carry(std::size_t i, const TensorView& view, bool adds_residual) {
    if (view.elems() == 0) return;
    std::memcpy(carried_[i].data(), view.data, carried_[i].size());
    if (!adds_residual || residuals_[i].empty()) return;
    defers_[i] = is_all_zero(view) ? 1 : 0;
    if (defers_[i] != 0) return;
    for (std::int64_t e = 0; e < view.elems(); ++e) {
      const float wanted = load(view.data, view.dtype, e) + residuals_[i][static_cast<std::size_t>(e)];
      store(wanted, carried_[i].data(), view.dtype, e);
      if (roundings_[i].empty()) continue;
      roundings_[i][static_cast<std::size_t>(e)] = wanted - load(carried_[i].data(), view.dtype, e);
    }
  }

  Result<Header> encode_own(std::uint64_t step, const OwnerNote& own_note) {
    Header header{.step = step, .codec_hash = codec_hash_, .note = own_note};
    for (const auto* views : {&own().lossy_views, &own().exact_views}) {
      for (const TensorView& view : *views) {
        if (!all_finite(view.data, view.elems(), view.dtype)) header.is_finite = 0;
      }
    }
    for (std::size_t k = 0; k < own().lossy.size(); ++k) {
      carry(own().lossy[k], own().lossy_views[k], header.is_finite != 0);
    }
    exact_sources_.assign(own().exact_views.begin(), own().exact_views.end());
    const auto capacity = static_cast<std::uint64_t>(capacities_[static_cast<std::size_t>(rank())]);
    reserve(&sent_, std::max(capacity, static_cast<std::uint64_t>(kHeaderBytes) + own().most_bytes));
    // Ranks draw from streams of their own.
    const EncodeContext context{options_.random_seed, step, static_cast<std::uint64_t>(rank()) << 32};
    const std::span<std::byte> payload = std::span(sent_).subspan(kHeaderBytes);
    CORTADO_ASSIGN_OR_RETURN(header.lossy_bytes, codec_.encode(sources_, context, payload, scratch_));
    CORTADO_ASSIGN_OR_RETURN(header.exact_bytes,
                             exact_.encode(exact_sources_, context, payload.subspan(header.lossy_bytes), scratch_));
    std::memcpy(sent_.data(), &header, sizeof(header));
    return header;
  }

  // ---- gather

  Status gather(const Header& own_header) {
    const std::int64_t own_bytes = kHeaderBytes + static_cast<std::int64_t>(own_header.payload_bytes());
    CORTADO_RETURN_IF_ERROR(all_gather(sent_.data(), capacities_, &received_));
    report_.collectives = 1;
    headers_.resize(shares_.size());
    rests_.assign(shares_.size(), 0);
    std::int64_t offset = 0, all_rests = 0;
    for (std::size_t r = 0; r < shares_.size(); ++r) {
      std::memcpy(&headers_[r], received_.data() + offset, sizeof(Header));
      offset += capacities_[r];
      const std::int64_t bytes =
          kHeaderBytes + static_cast<std::int64_t>(std::min(headers_[r].payload_bytes(), shares_[r].most_bytes));
      rests_[r] = std::max<std::int64_t>(bytes - capacities_[r], 0);
      all_rests += rests_[r];
    }
    // Before sizes are relied on that follow from the codec.
    CORTADO_RETURN_IF_ERROR(check_headers(own_header));
    if (all_rests > 0) {
      const std::int64_t sent = std::min(own_bytes, capacities_[static_cast<std::size_t>(rank())]);
      CORTADO_RETURN_IF_ERROR(all_gather(sent_.data() + sent, rests_, &rest_));
      report_.collectives = 2;
    }
    return {};
  }

  Status all_gather(const std::byte* sent, const std::vector<std::int64_t>& counts, std::vector<std::byte>* received) {
    reserve(received, static_cast<std::uint64_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})));
    CORTADO_ASSIGN_OR_RETURN(
        const WorkId work,
        communicator_->start(
            {.kind = CollectiveKind::kAllGather, .sent = sent, .received = received->data(), .counts = counts}));
    const Status status = communicator_->wait(work, from_seconds(options_.timeout_s));
    in_flight_ = !status.ok();
    return status;
  }

  Status check_headers(const Header& own_header) const {
    for (std::size_t r = 0; r < headers_.size(); ++r) {
      if (headers_[r].step != own_header.step) {
        return make_error(StatusCode::kMismatch,
                          "rank %zu sends its tensors of step %" PRIu64 ", rank %d those of step %" PRIu64
                          ": one of them has left out a step",
                          r, headers_[r].step, rank(), own_header.step);
      }
      if (headers_[r].codec_hash != own_header.codec_hash) {
        return make_error(StatusCode::kMismatch, "rank %zu has encoded with another codec than rank %d, which used %s",
                          r, rank(), codec_.codec().spec().c_str());
      }
    }
    return {};
  }

  // ---- decode

  Status decode_all() {
    std::int64_t offset = 0, rest_offset = 0;
    for (std::size_t r = 0; r < shares_.size(); ++r) {
      const Header& header = headers_[r];
      const std::byte* payload = received_.data() + offset + kHeaderBytes;
      if (rests_[r] > 0) {  // the two parts become one
        const auto first = static_cast<std::size_t>(capacities_[r] - kHeaderBytes);
        joined_.assign(payload, payload + first);
        joined_.insert(joined_.end(), rest_.data() + rest_offset, rest_.data() + rest_offset + rests_[r]);
        payload = joined_.data();
      }
      CORTADO_RETURN_IF_ERROR(decode_share(r, {payload, std::min(header.payload_bytes(), shares_[r].most_bytes)}));
      offset += capacities_[r];
      rest_offset += rests_[r];
    }
    for (std::size_t r = 0; r < shares_.size(); ++r) {
      const auto bytes = static_cast<std::int64_t>(headers_[r].payload_bytes());
      const std::int64_t before = codec_is_new_ ? 0 : capacities_[r];  // of another codec it says nothing
      capacities_[r] = shares_[r].has_fixed_size ? kHeaderBytes + bytes : capacity_after(bytes, before);
    }
    codec_is_new_ = false;
    return {};
  }

  Status decode_share(std::size_t r, std::span<const std::byte> payload) {
    const Header& header = headers_[r];
    Status status = make_error(StatusCode::kCorruptData, "sizes in its header are not possible");
    if (header.lossy_bytes <= payload.size() && header.exact_bytes == payload.size() - header.lossy_bytes) {
      status = codec_.decode(payload.first(header.lossy_bytes), shares_[r].lossy_views, scratch_);
      if (status.ok()) {
        status = exact_.decode(payload.subspan(header.lossy_bytes), shares_[r].exact_views, scratch_);
      }
    }
    return status.with_context("decode of what rank " + std::to_string(r) + " sent of " + name_share(shares_[r]));
  }

  // All ranks have decoded the same bytes.
  bool is_all_finite() const {
    for (std::size_t r = 0; r < shares_.size(); ++r) {
      if (headers_[r].is_finite == 0) return false;
      // What was given is finite, and arrives as it is unless something was added.
      if (codec_.is_plain() && !options_.use_error_feedback) continue;
      for (const TensorView& view : shares_[r].lossy_views) {
        if (!all_finite(view.data, view.elems(), view.dtype)) return false;
      }
    }
    return true;
  }

  // Error and residuals of what this rank has sent.
  void finish_own() {
    const bool keeps = report_.finite;
    double lost = 0, total = 0;
    for (std::size_t k = 0; k < own().lossy.size(); ++k) {
      const TensorView& decoded = own().lossy_views[k];
      std::vector<float>& residual = residuals_[own().lossy[k]];
      const std::vector<float>& rounding = roundings_[own().lossy[k]];
      const bool defers = defers_[own().lossy[k]] != 0;
      for (std::int64_t e = 0; e < decoded.elems(); ++e) {
        const float wanted = load(sources_[k].data, decoded.dtype, e);
        const float difference = wanted - load(decoded.data, decoded.dtype, e);
        lost += static_cast<double>(difference) * difference;
        total += static_cast<double>(wanted) * wanted;
        if (!keeps || residual.empty()) continue;
        float& owed = residual[static_cast<std::size_t>(e)];
        if (defers) {
          owed += difference;
        } else {
          owed = difference + (rounding.empty() ? 0 : rounding[static_cast<std::size_t>(e)]);
        }
      }
    }
    if (keeps) report_.relative_l2_error = total > 0 ? std::sqrt(lost / total) : 0;
  }

  static void reserve(std::vector<std::byte>* buffer, std::uint64_t bytes) {
    if (buffer->size() < bytes) buffer->resize(bytes);
  }

  std::vector<OwnedTensor> tensors_;
  OwnerGatherOptions options_;
  Communicator* communicator_;
  const Clock* clock_;
  TensorListCodec codec_, exact_;
  std::vector<OwnerShare> shares_;  // of each rank
  std::uint64_t codec_hash_ = 0;
  std::uint64_t exact_scratch_bytes_ = 0;

  // By tensor; empty where this rank is not the owner or the only rank, or the tensor is exact.
  std::vector<std::vector<std::byte>> carried_;
  std::vector<std::vector<float>> residuals_;
  std::vector<std::vector<float>> roundings_;             // of what is carried, where the tensor is not float32
  std::vector<char> defers_;                              // its residual to a later step, as it is all zeros
  std::vector<ConstTensorView> sources_, exact_sources_;  // what this rank encodes

  std::vector<std::byte> sent_, received_, rest_, joined_, scratch_;
  std::vector<std::int64_t> capacities_, rests_;
  bool codec_is_new_ = false;
  bool in_flight_ = false;  // a collective whose end was not seen
  std::vector<Header> headers_;
  OwnerGatherReport report_;
  Status failure_;
};

}  // namespace

Result<std::unique_ptr<OwnerGather>> OwnerGather::create(std::vector<OwnedTensor> tensors,
                                                         const OwnerGatherOptions& options, Communicator* communicator,
                                                         const Clock* clock) {
  std::vector<std::string> descriptions;
  for (const OwnedTensor& tensor : tensors) descriptions.push_back(describe(tensor));
  // First what ranks must share, so that an error of a rank's own is the same on all.
  CORTADO_RETURN_IF_ERROR(
      check_agreement(communicator, settings_text(options), descriptions, from_seconds(options.timeout_s)));
  CORTADO_RETURN_IF_ERROR(check_tensors(tensors, communicator->world_size()));
  CORTADO_ASSIGN_OR_RETURN(TensorListCodec codec, TensorListCodec::create(options.codec, options.aggregate));
  CORTADO_ASSIGN_OR_RETURN(TensorListCodec exact, TensorListCodec::create("none"));
  return std::unique_ptr<OwnerGather>(std::make_unique<OwnerGatherImpl>(std::move(tensors), options, communicator,
                                                                        clock, std::move(codec), std::move(exact)));
}

}  // namespace cortado

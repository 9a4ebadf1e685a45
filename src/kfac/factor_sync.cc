// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/factor_sync.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "core/check.h"
#include "core/float_passes.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"
#include "core/seconds.h"
#include "kfac/triangle.h"

namespace cortado {

namespace {

// So that factors and gradients never draw the same random numbers.
constexpr std::uint64_t kSeedOfFactors = 0x6661'6374'6f72'7321ull;

}  // namespace

std::int64_t FactorSlot::elems() const { return matrices * triangle_elems(n); }

FactorSync::FactorSync(std::vector<FactorSlot> slots, bool sums_over_ranks, TensorListCodec codec,
                       std::uint64_t random_seed, double timeout_s, Communicator* communicator)
    : slots_(std::move(slots)),
      sums_over_ranks_(sums_over_ranks && communicator->world_size() > 1),
      codec_(std::move(codec)),
      random_seed_(random_seed ^ kSeedOfFactors),
      timeout_s_(timeout_s),
      communicator_(communicator),
      segments_(static_cast<std::size_t>(communicator->world_size())),
      offsets_(slots_.size()),
      batches_(slots_.size()),
      is_touched_(slots_.size()) {
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    if (wants(s)) segments_[static_cast<std::size_t>(slots_[s].owner)].slots.push_back(s);
  }
  std::int64_t at = 0;
  for (Segment& segment : segments_) {
    segment.first = at;
    for (const std::size_t s : segment.slots) {
      offsets_[s] = segment.first + segment.triangle_elems;
      segment.triangle_elems += slots_[s].elems();
    }
    at += segment.elems();
  }
  batch_.resize(static_cast<std::size_t>(at));
  sums_.resize(static_cast<std::size_t>(segments_[static_cast<std::size_t>(rank())].elems()));
}

FactorSync::~FactorSync() {
  if (!in_flight_ || communicator_->abandon("K-FAC was destroyed after a broken collective")) return;
  keep_for_ever(std::array{std::move(batch_), std::move(sums_)});
  keep_for_ever(std::array{std::move(announced_), std::move(received_announced_)});
  keep_for_ever(std::array{std::move(sent_), std::move(received_)});
  keep_for_ever(std::array{std::move(sizes_), std::move(received_sizes_)});
}

// Most steps have no batch, and writing zeros over zeros would take them the longer the larger the model is.
void FactorSync::reset() {
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    if (is_touched_[s]) std::fill_n(triangles(s), slots_[s].elems(), 0.0f);
    is_touched_[s] = false, batches_[s] = 0;
  }
}

FactorSync::Sum FactorSync::sum(std::size_t slot) const {
  const Segment& own = segments_[static_cast<std::size_t>(rank())];
  const auto place = std::find(own.slots.begin(), own.slots.end(), slot) - own.slots.begin();
  return {sums_.data() + (offsets_[slot] - own.first),
          static_cast<double>(sums_[static_cast<std::size_t>(own.triangle_elems + place)])};
}

std::int64_t FactorSync::memory_bytes() const {
  return static_cast<std::int64_t>((batch_.size() + sums_.size() + decoded_.size()) * sizeof(float) + sent_.size() +
                                   received_.size() + scratch_.size());
}

Status FactorSync::reduce(std::uint64_t step) {
  finish_means();
  if (!sums_over_ranks_) {
    const Segment& own = segments_[static_cast<std::size_t>(rank())];
    std::copy_n(batch_.begin() + own.first, own.elems(), sums_.begin());
  } else if (codec_.is_plain()) {
    CORTADO_RETURN_IF_ERROR(reduce_plain());
  } else {
    CORTADO_RETURN_IF_ERROR(reduce_encoded(step));
  }
  reset();
  return {};
}

// The mean over batches, and whether there was one.
void FactorSync::finish_means() {
  for (const Segment& segment : segments_) {
    for (std::size_t k = 0; k < segment.slots.size(); ++k) {
      const std::size_t s = segment.slots[k];
      float* values = batch_.data() + offsets_[s];
      if (batches_[s] > 1) {
        const float share = 1.0f / static_cast<float>(batches_[s]);
        scale_values(values, share, slots_[s].elems(), values);
      }
      batch_[static_cast<std::size_t>(segment.first + segment.triangle_elems) + k] = batches_[s] > 0 ? 1.0f : 0.0f;
    }
  }
}

Status FactorSync::wait(Result<WorkId> work) {
  if (!work.ok()) return work.status();
  const Status status = communicator_->wait(work.value(), from_seconds(timeout_s_));
  in_flight_ = !status.ok();
  return status;
}

Status FactorSync::reduce_plain() {
  sizes_.clear();
  for (const Segment& segment : segments_) sizes_.push_back(segment.elems());
  traffic_.payload_bytes = traffic_.dense_bytes = static_cast<std::int64_t>(batch_.size() * sizeof(float));
  traffic_.relative_l2_error = 0;
  traffic_.collectives = 1;
  ++traffic_.messages;
  return wait(communicator_->start({.kind = CollectiveKind::kReduceScatter,
                                    .dtype = DType::kFloat32,
                                    .sent = batch_.data(),
                                    .received = sums_.data(),
                                    .counts = sizes_}));
}

// ---- compressed ----------------------------------------------------------------------------------------------------

// A message holds the counts of the owner's slots, then the payload of their triangles.
Status FactorSync::encode_for_owners(std::uint64_t step) {
  sizes_.clear();
  double lost = 0, total = 0;
  traffic_.payload_bytes = traffic_.dense_bytes = 0;
  sent_.clear();
  for (std::size_t owner = 0; owner < segments_.size(); ++owner) {
    const Segment& segment = segments_[owner];
    if (static_cast<int>(owner) == rank() || segment.slots.empty()) {  // one's own factors need no message
      sizes_.push_back(0);
      continue;
    }
    std::vector<TensorView> views, decoded;
    decoded_.resize(std::max(decoded_.size(), static_cast<std::size_t>(segment.triangle_elems)));
    for (const std::size_t s : segment.slots) {
      views.push_back({batch_.data() + offsets_[s], DType::kFloat32, 1, slots_[s].elems()});
      decoded.push_back({decoded_.data() + (offsets_[s] - segment.first), DType::kFloat32, 1, slots_[s].elems()});
    }
    const std::size_t begin = sent_.size(), counts_bytes = segment.slots.size() * sizeof(float);
    sent_.resize(begin + counts_bytes + codec_.max_payload_bytes(views));
    scratch_.resize(std::max<std::size_t>(scratch_.size(), codec_.scratch_bytes(views)));
    const float* triangles = batch_.data() + segment.first;
    std::memcpy(sent_.data() + begin, triangles + segment.triangle_elems, counts_bytes);
    const EncodeContext context{random_seed_, step,
                                static_cast<std::uint64_t>(rank()) << 48 | static_cast<std::uint64_t>(owner) << 24};
    const std::span<std::byte> room = std::span(sent_).subspan(begin + counts_bytes);
    CORTADO_ASSIGN_OR_RETURN(
        const std::uint64_t bytes,
        codec_.encode(std::vector<ConstTensorView>(views.begin(), views.end()), context, room, scratch_));
    CORTADO_RETURN_IF_ERROR(codec_.decode(room.first(bytes), decoded, scratch_));  // for the error
    for (std::int64_t i = 0; i < segment.triangle_elems; ++i) {
      const double value = triangles[i],
                   difference = value - static_cast<double>(decoded_[static_cast<std::size_t>(i)]);
      lost += difference * difference;
      total += value * value;
    }
    sent_.resize(begin + counts_bytes + bytes);
    sizes_.push_back(static_cast<std::int64_t>(counts_bytes + bytes));
    traffic_.payload_bytes += sizes_.back();
    traffic_.dense_bytes += segment.elems() * static_cast<std::int64_t>(sizeof(float));
  }
  if (std::isfinite(total)) traffic_.relative_l2_error = total > 0 ? std::sqrt(lost / total) : 0;
  return {};
}

Status FactorSync::reduce_encoded(std::uint64_t step) {
  CORTADO_RETURN_IF_ERROR(encode_for_owners(step));
  const std::uint64_t codec_hash = fnv1a_64(codec_.codec().spec());
  announced_.resize(sizes_.size());
  received_announced_.resize(sizes_.size());
  for (std::size_t r = 0; r < sizes_.size(); ++r) announced_[r] = {sizes_[r], codec_hash};
  CORTADO_RETURN_IF_ERROR(wait(communicator_->start({.kind = CollectiveKind::kAllToAll,
                                                     .sent = announced_.data(),
                                                     .received = received_announced_.data(),
                                                     .elems = static_cast<std::int64_t>(sizeof(Announced))})));
  received_sizes_.clear();
  for (std::size_t r = 0; r < received_announced_.size(); ++r) {
    received_sizes_.push_back(received_announced_[r].bytes);
    if (received_announced_[r].codec_hash == codec_hash) continue;
    return make_error(StatusCode::kMismatch, "rank %zu has encoded its factors with another codec than rank %d (%s)", r,
                      rank(), codec_.codec().spec().c_str());
  }
  const Segment& own = segments_[static_cast<std::size_t>(rank())];
  std::vector<TensorView> views;
  for (const std::size_t s : own.slots) views.push_back({nullptr, DType::kFloat32, 1, slots_[s].elems()});
  const auto most = static_cast<std::int64_t>(own.slots.size() * sizeof(float) + codec_.max_payload_bytes(views));
  for (std::size_t r = 0; r < sizes_.size(); ++r) {
    if (received_sizes_[r] >= 0 && received_sizes_[r] <= most) continue;
    return make_error(StatusCode::kCorruptData, "rank %zu announces factors of %lld bytes, at most %lld are possible",
                      r, static_cast<long long>(received_sizes_[r]), static_cast<long long>(most));
  }
  received_.resize(
      static_cast<std::size_t>(std::accumulate(received_sizes_.begin(), received_sizes_.end(), std::int64_t{0})));
  CORTADO_RETURN_IF_ERROR(wait(communicator_->start({.kind = CollectiveKind::kAllToAll,
                                                     .sent = sent_.data(),
                                                     .received = received_.data(),
                                                     .counts = sizes_,
                                                     .received_counts = received_sizes_})));
  traffic_.collectives = 2;
  ++traffic_.messages;

  // In rank order, one's own among them.
  std::fill(sums_.begin(), sums_.end(), 0.0f);
  decoded_.resize(std::max(decoded_.size(), static_cast<std::size_t>(own.elems())));
  std::size_t at = 0;
  for (std::size_t r = 0; r < received_sizes_.size(); ++r) {
    const auto bytes = static_cast<std::size_t>(received_sizes_[r]);
    CORTADO_RETURN_IF_ERROR(add_decoded(static_cast<int>(r), std::span(received_).subspan(at, bytes))
                                .with_context("factors of rank " + std::to_string(r)));
    at += bytes;
  }
  return {};
}

Status FactorSync::add_decoded(int from, std::span<const std::byte> message) {
  const Segment& own = segments_[static_cast<std::size_t>(rank())];
  if (own.slots.empty()) return {};
  const float* values = batch_.data() + own.first;
  if (from != rank()) {
    const std::size_t counts_bytes = own.slots.size() * sizeof(float);
    if (message.size() < counts_bytes) {
      return make_error(StatusCode::kCorruptData, "%zu bytes are too few", message.size());
    }
    std::vector<TensorView> views;
    for (const std::size_t s : own.slots) {
      views.push_back({decoded_.data() + (offsets_[s] - own.first), DType::kFloat32, 1, slots_[s].elems()});
    }
    std::memcpy(decoded_.data() + own.triangle_elems, message.data(), counts_bytes);
    scratch_.resize(std::max<std::size_t>(scratch_.size(), codec_.scratch_bytes(views)));
    CORTADO_RETURN_IF_ERROR(codec_.decode(message.subspan(counts_bytes), views, scratch_));
    values = decoded_.data();
  }
  add_values(values, static_cast<std::int64_t>(sums_.size()), sums_.data());
  return {};
}

}  // namespace cortado

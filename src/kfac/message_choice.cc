// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "kfac/message_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codec/tensor_list.h"
#include "core/check.h"
#include "core/format.h"
#include "planner/cost/codec_cost.h"
#include "planner/cost/collective_cost.h"

namespace cortado {

namespace {

class MessageCost {
 public:
  MessageCost(const MessageShape& shape, const Cluster& cluster)
      : shape_(shape),
        collectives_(cluster),
        whole_{0, static_cast<int>(cluster.levels.size()) - 1},
        ranks_(static_cast<double>(shape.ranks.size())),
        cluster_ranks_(cluster.topology().world_size()) {}

  std::int64_t uncompressed_ns() const {
    std::int64_t all = 0, most = 0;
    for (const auto& own : shape_.elems) {
      const std::int64_t elems = std::accumulate(own.begin(), own.end(), std::int64_t{0});
      all += elems;
      most = std::max(most, elems);
    }
    if (shape_.is_sum) return collective_ns(OpKind::kReduceScatter, 4.0 * static_cast<double>(all));
    return collective_ns(OpKind::kAllGather, 4.0 * static_cast<double>(most) * ranks_);
  }

  std::int64_t compressed_ns(const MessageTrial& trial, const TensorListCodec& codec, const CodecCost& cost) const {
    const auto payload = static_cast<double>(trial.payload_bytes);
    if (!shape_.is_sum) return codec_ns(codec, cost) + collective_ns(OpKind::kAllGather, payload * ranks_);
    // Nothing for oneself is in the payload, but in the size that belongs to a time. Sizes travel first.
    return codec_ns(codec, cost) + collective_ns(OpKind::kAllToAll, payload * ranks_ / (ranks_ - 1)) +
           collective_ns(OpKind::kAllToAll, 16 * ranks_);
  }

 private:
  // Among fewer ranks than the cluster has, a smaller share of the bytes is another rank's.
  std::int64_t collective_ns(OpKind kind, double bytes) const {
    const double share = (ranks_ - 1) / ranks_ * cluster_ranks_ / (cluster_ranks_ - 1);
    return collectives_.time_ns(kind, whole_, std::llround(bytes * share), 1);
  }

  // Of the rank that takes longest.
  std::int64_t codec_ns(const TensorListCodec& codec, const CodecCost& cost) const {
    std::vector<std::int64_t> encode, decode;  // by owner
    for (const auto& own : shape_.elems) {
      encode.push_back(0);
      decode.push_back(0);
      for (const std::int64_t elems : codec.elems_of_calls(own)) {
        encode.back() += cost.encode_ns(OpDevice::kCpu, elems);
        decode.back() += cost.decode_ns(OpDevice::kCpu, elems);
      }
    }
    const std::int64_t all_encode = std::accumulate(encode.begin(), encode.end(), std::int64_t{0});
    const std::int64_t all_decode = std::accumulate(decode.begin(), decode.end(), std::int64_t{0});
    std::int64_t longest = 0;
    for (std::size_t r = 0; r < encode.size(); ++r) {
      const auto others = static_cast<std::int64_t>(encode.size()) - 1;
      longest = std::max(longest, shape_.is_sum ? all_encode - encode[r] + all_decode - decode[r] + others * decode[r]
                                                : encode[r] + all_decode);
    }
    return longest;
  }

  const MessageShape& shape_;
  CollectiveCost collectives_;
  LevelRange whole_;
  double ranks_, cluster_ranks_;
};

double to_ms(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

std::string text_of(const MessageTrial& trial, bool aggregates) {
  if (!aggregates) return trial.codec;
  return trial.codec +
         (trial.aggregate == 0 ? ", all tensors together" : format_text(", %d together", int(trial.aggregate)));
}

}  // namespace

Result<MessageChoice> choose_codec(const MessageShape& shape, std::span<const MessageTrial> trials,
                                   const Cluster& cluster, double min_gain) {
  std::vector<std::string> specs, notes;
  for (const MessageTrial& trial : trials) {
    specs.push_back(trial.codec);
    if (!trial.timed_as.empty()) specs.push_back(trial.timed_as);
  }
  CORTADO_ASSIGN_OR_RETURN(const std::vector<CodecCost> costs, codec_costs(cluster, OpDevice::kCpu, specs, &notes));
  const MessageCost message(shape, cluster);
  MessageChoice choice{.uncompressed_ns = message.uncompressed_ns(), .reason = {}};
  std::string best;
  for (std::size_t t = 0; t < trials.size(); ++t) {
    CORTADO_ASSIGN_OR_RETURN(const TensorListCodec codec,
                             TensorListCodec::create(trials[t].codec, trials[t].aggregate));
    const auto cost_of = [&](const std::string& spec) {
      return std::find_if(costs.begin(), costs.end(), [&](const CodecCost& one) { return one.codec->spec() == spec; });
    };
    auto cost = cost_of(codec.codec().spec());
    if (cost == costs.end() && !trials[t].timed_as.empty()) {
      CORTADO_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> timed, make_codec(trials[t].timed_as));
      cost = cost_of(timed->spec());
    }
    if (cost == costs.end()) continue;
    const std::int64_t ns = message.compressed_ns(trials[t], codec, *cost);
    if (choice.trial >= 0 && ns >= choice.predicted_ns) continue;
    choice.trial = static_cast<int>(t);
    choice.predicted_ns = ns;
    best = text_of(trials[t], codec.aggregates());
  }
  if (choice.trial < 0) {
    choice.reason = "uncompressed: " + (notes.empty() ? "there is no candidate" : notes.front());
  } else if (static_cast<double>(choice.predicted_ns) > (1 - min_gain) * static_cast<double>(choice.uncompressed_ns)) {
    choice.reason = format_text("uncompressed: %.3g ms predicted, and with %s %.3g ms", to_ms(choice.uncompressed_ns),
                                best.c_str(), to_ms(choice.predicted_ns));
    choice.trial = -1;
  } else {
    choice.reason = format_text("%s: %.3g ms predicted instead of %.3g ms", best.c_str(), to_ms(choice.predicted_ns),
                                to_ms(choice.uncompressed_ns));
  }
  return choice;
}

}  // namespace cortado

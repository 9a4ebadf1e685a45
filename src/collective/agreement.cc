// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "collective/agreement.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "core/check.h"
#include "core/checksum.h"
#include "core/hash.h"
#include "core/keep_for_ever.h"

namespace cortado {

namespace {

constexpr std::size_t kSettingsBytes = 1000;
// Of what ranks send each other here. Builds with another one have other settings, in the first thing they compare.
constexpr std::uint64_t kBlocksVersion = 2;

// What each rank sends; without padding.
struct Summary {
  char settings[kSettingsBytes];
  char failure[kSettingsBytes];
  std::uint64_t failure_code;
  std::uint64_t settings_hash;
  std::uint64_t tensor_count;
};

struct Outcome {
  std::uint64_t code;
  char message[kSettingsBytes];
};

void copy_text(std::string_view text, char (&to)[kSettingsBytes]) {
  std::memcpy(to, text.data(), std::min(text.size(), kSettingsBytes - 1));
}

Status first_failure(const std::vector<Summary>& summaries) {
  Status first;
  for (std::size_t rank = 0; rank < summaries.size(); ++rank) {
    const auto code = static_cast<StatusCode>(summaries[rank].failure_code);
    const Status status = Status(code, summaries[rank].failure).with_context("rank " + std::to_string(rank));
    if (!status.ok() && (first.ok() || (status.is_fatal() && !first.is_fatal()))) first = status;
  }
  return first;
}

}  // namespace

Result<std::vector<std::byte>> gather_checked_bytes(Communicator* communicator, std::string_view what,
                                                    std::span<const std::byte> own, std::chrono::nanoseconds timeout) {
  const auto ranks = static_cast<std::size_t>(communicator->world_size());
  const std::uint64_t own_check = checksum_64(own);
  std::vector<std::byte> sent(own.begin(), own.end());
  const auto check_bytes = std::as_bytes(std::span(&own_check, 1));
  sent.insert(sent.end(), check_bytes.begin(), check_bytes.end());
  std::vector<std::byte> received(ranks * sent.size()), all(ranks * own.size());
  Status status = communicator->all_gather(sent, received, timeout);
  for (std::size_t rank = 0; rank < ranks && status.ok(); ++rank) {
    const std::span<const std::byte> block = std::span(received).subspan(rank * sent.size(), sent.size());
    std::uint64_t check = 0;
    std::memcpy(&check, block.data() + own.size(), sizeof(check));
    if (check != checksum_64(block.first(own.size()))) {
      status = make_error(StatusCode::kCorruptData, "what rank %zu sent was damaged", rank);
    }
    std::copy_n(block.begin(), own.size(), all.begin() + static_cast<std::ptrdiff_t>(rank * own.size()));
  }
  if (!status.ok()) return status.with_context("comparing " + std::string(what) + " over all ranks");
  return all;
}

Status check_agreement(Communicator* communicator, std::string_view settings, const std::vector<std::string>& tensors,
                       std::chrono::nanoseconds timeout, const Status& failure) {
  Summary own{};
  copy_text(settings, own.settings);
  copy_text(failure.message(), own.failure);
  own.failure_code = static_cast<std::uint64_t>(failure.code());
  own.settings_hash = fnv1a_64(settings) + kBlocksVersion;
  own.tensor_count = tensors.size();
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Summary> summaries,
                           gather_checked(communicator, "settings", std::span<const Summary>(&own, 1), timeout));
  for (std::size_t rank = 1; rank < summaries.size(); ++rank) {
    if (summaries[rank].settings_hash != summaries[0].settings_hash) {
      return make_error(StatusCode::kMismatch,
                        "ranks were attached with different settings: rank 0 has \"%s\", rank %zu has \"%s\"",
                        summaries[0].settings, rank, summaries[rank].settings);
    }
    if (summaries[rank].tensor_count != summaries[0].tensor_count) {
      return make_error(StatusCode::kMismatch,
                        "ranks have different models: rank 0 has %" PRIu64 " tensors, rank %zu has %" PRIu64,
                        summaries[0].tensor_count, rank, summaries[rank].tensor_count);
    }
  }
  std::vector<std::uint64_t> hashes;
  for (const std::string& tensor : tensors) hashes.push_back(fnv1a_64(tensor));
  if (hashes.empty()) return first_failure(summaries);
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> all,
                           gather_checked(communicator, "models", std::span<const std::uint64_t>(hashes), timeout));
  for (std::size_t t = 0; t < hashes.size(); ++t) {
    for (std::size_t rank = 1; rank < summaries.size(); ++rank) {
      if (all[rank * hashes.size() + t] == all[t]) continue;
      return make_error(StatusCode::kMismatch,
                        "ranks have different models: tensor %zu of rank %zu differs from rank 0's in name, shape or "
                        "dtype (here on rank %d it is %s)",
                        t, rank, communicator->rank(), tensors[t].c_str());
    }
  }
  return first_failure(summaries);
}

Status check_same_number(Communicator* communicator, std::string_view what, std::uint64_t number,
                         std::chrono::nanoseconds timeout) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> all,
                           gather_checked(communicator, what, std::span<const std::uint64_t>(&number, 1), timeout));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return make_error(StatusCode::kMismatch, "ranks differ in %.*s: rank 0 has %" PRIu64 ", rank %zu has %" PRIu64,
                      static_cast<int>(what.size()), what.data(), all[0], rank, all[rank]);
  }
  return {};
}

Status agree_on_outcome(Communicator* communicator, std::string_view what, const Status& own,
                        std::chrono::nanoseconds timeout) {
  Outcome sent{};
  sent.code = static_cast<std::uint64_t>(own.code());
  copy_text(own.message(), sent.message);
  const Result<std::vector<Outcome>> gathered =
      gather_checked(communicator, what, std::span<const Outcome>(&sent, 1), timeout);
  if (!own.ok() && (gathered.ok() || gathered.status().code() == StatusCode::kCorruptData)) return own;
  CORTADO_RETURN_IF_ERROR(gathered.status());
  const std::vector<Outcome>& all = gathered.value();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Status theirs(static_cast<StatusCode>(all[rank].code), all[rank].message);
    if (!theirs.ok()) return theirs.with_context(std::string(what) + ": rank " + std::to_string(rank));
  }
  return {};
}

namespace {

std::int64_t ordered(std::int64_t number) { return number; }
double ordered(double number) { return std::isnan(number) ? std::numeric_limits<double>::infinity() : number; }

}  // namespace

template <typename Number>
Result<std::vector<Number>> largest_of_ranks(Communicator* communicator, std::span<const Number> own,
                                             std::chrono::nanoseconds timeout) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<Number> all, gather_checked(communicator, "numbers", own, timeout));
  std::vector<Number> largest(own.size(), std::numeric_limits<Number>::lowest());
  for (std::size_t i = 0; i < all.size(); ++i) {
    largest[i % own.size()] = std::max(largest[i % own.size()], ordered(all[i]));
  }
  return largest;
}
template Result<std::vector<std::int64_t>> largest_of_ranks(Communicator*, std::span<const std::int64_t>,
                                                            std::chrono::nanoseconds);
template Result<std::vector<double>> largest_of_ranks(Communicator*, std::span<const double>, std::chrono::nanoseconds);

Result<std::vector<std::int64_t>> mean_of_ranks(Communicator* communicator, std::span<const std::int64_t> own,
                                                std::chrono::nanoseconds timeout) {
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::int64_t> all, gather_checked(communicator, "numbers", own, timeout));
  std::vector<double> sums(own.size());
  for (std::size_t i = 0; i < all.size(); ++i) sums[i % own.size()] += static_cast<double>(all[i]);
  std::vector<std::int64_t> means;
  for (const double sum : sums) means.push_back(std::llround(sum / communicator->world_size()));
  return means;
}

Result<std::string> text_of_rank_0(Communicator* communicator, const std::string& own,
                                   std::chrono::nanoseconds timeout) {
  const std::uint64_t own_head[] = {own.size(), checksum_64(std::as_bytes(std::span(own)))};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> heads,
                           gather_checked(communicator, "texts", std::span<const std::uint64_t>(own_head), timeout));
  if (heads[0] == 0) return std::string();
  auto kept = std::make_unique<std::string>(communicator->rank() == 0 ? own : std::string(heads[0], '\0'));
  std::string& text = *kept;
  CORTADO_ASSIGN_OR_RETURN(const WorkId work, communicator->start({.kind = CollectiveKind::kBroadcast,
                                                                   .dtype = DType::kUint8,
                                                                   .root = 0,
                                                                   .sent = text.data(),
                                                                   .received = text.data(),
                                                                   .elems = static_cast<std::int64_t>(text.size())}));
  if (const Status status = communicator->wait(work, timeout); !status.ok()) {
    keep_for_ever(std::move(kept));
    return status;
  }
  if (checksum_64(std::as_bytes(std::span(text))) != heads[1]) {
    return make_error(StatusCode::kCorruptData, "the text that rank 0 sent was damaged");
  }
  return std::move(text);
}

namespace {

// "rank 1, 3": those whose checksum is not the one that most have (of equally many, the lowest rank's).
struct Minority {
  std::string ranks;
  std::size_t reference = 0;  // the first rank of the others
};

Minority find_minority(std::span<const std::uint64_t> checksums) {
  Minority found;
  std::ptrdiff_t most = 0;
  for (std::size_t rank = 0; rank < checksums.size(); ++rank) {
    const std::ptrdiff_t equal = std::count(checksums.begin(), checksums.end(), checksums[rank]);
    if (equal <= most) continue;
    most = equal;
    found.reference = rank;
  }
  for (std::size_t rank = 0; rank < checksums.size(); ++rank) {
    if (checksums[rank] == checksums[found.reference]) continue;
    found.ranks += (found.ranks.empty() ? "rank " : ", ") + std::to_string(rank);
  }
  return found;
}

}  // namespace

Result<ReplicaDifference> compare_replicas(Communicator* communicator, std::span<const ReplicaTensor> tensors,
                                           std::chrono::nanoseconds timeout) {
  CORTADO_RETURN_IF_ERROR(check_same_number(communicator, "how many tensors are compared", tensors.size(), timeout));
  std::vector<std::uint64_t> own;
  for (const ReplicaTensor& tensor : tensors) own.push_back(fnv1a_64(tensor.name) ^ checksum_64(tensor.bytes));
  if (own.empty()) return ReplicaDifference{};
  CORTADO_ASSIGN_OR_RETURN(const std::vector<std::uint64_t> all,
                           gather_checked(communicator, "checksums", std::span<const std::uint64_t>(own), timeout));
  std::string text;
  std::size_t more = 0;
  std::vector<std::uint64_t> of_ranks(static_cast<std::size_t>(communicator->world_size()));
  for (std::size_t t = 0; t < own.size(); ++t) {
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) of_ranks[rank] = all[rank * own.size() + t];
    const Minority minority = find_minority(of_ranks);
    if (minority.ranks.empty()) continue;
    if (!text.empty()) {
      ++more;
      continue;
    }
    text = "\"" + tensors[t].name + "\" of " + minority.ranks + " is not that of rank " +
           std::to_string(minority.reference);
  }
  if (more > 0) text += " (and " + std::to_string(more) + " more tensor" + (more == 1 ? "" : "s") + ")";
  return ReplicaDifference{.text = std::move(text)};
}

Status ReplicaHistory::note(const ReplicaDifference& difference, std::int64_t step) {
  if (difference.text.empty()) {
    equal_at_ = step;
    return {};
  }
  const std::string before = equal_at_ < 0 ? "" : "; all were equal before step " + std::to_string(equal_at_);
  return make_error(StatusCode::kMismatch, "before step %" PRId64 " replicas differ: %s%s", step,
                    difference.text.c_str(), before.c_str());
}

}  // namespace cortado

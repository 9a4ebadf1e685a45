// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/rans/rans_stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>
#include <optional>

#include "codec/explain.h"
#include "core/check.h"

namespace cortado {

namespace {

// What the payload begins with; spec.md.
enum Mode : std::uint8_t { kStored = 0, kConstant = 1, kCoded = 2 };

// With threads to share the work: what one of them takes at a time, and what is encoded before it is moved to its
// place. Waking threads costs tens of microseconds. One thread moves every few chunks, which stay in its cache until
// then.
constexpr std::int64_t kTaskCodes = std::int64_t{1} << 18;
constexpr std::int64_t kBatchCodes = std::int64_t{1} << 22;
constexpr std::uint64_t kHeaderBytes = 4;
constexpr std::uint64_t kMaxModelBytes = kHeaderBytes + 2 * 256 + 4;
constexpr std::uint64_t kAlignBytes = 64;

std::byte* align(std::byte* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return memory + (kAlignBytes - address % kAlignBytes) % kAlignBytes;
}

void for_each(ThreadPool* pool, std::int64_t count, FunctionRef<void(std::int64_t)> body) {
  if (pool != nullptr) return pool->parallel_for(count, body);
  for (std::int64_t i = 0; i < count; ++i) body(i);
}

// The chunks of a message.
struct Chunks {
  std::int64_t elems, chunk_codes;

  std::int64_t count() const { return elems / chunk_codes + (elems % chunk_codes != 0); }
  std::int64_t begin(std::int64_t chunk) const { return chunk * chunk_codes; }
  std::int64_t elems_of(std::int64_t chunk) const { return std::min(chunk_codes, elems - begin(chunk)); }
  std::int64_t task_chunks() const { return std::max(kTaskCodes / chunk_codes, kRansChunksAtOnce); }
};

// Calls body(begin, end) for parts of the chunks first ... last - 1.
void for_chunks(ThreadPool* pool, const Chunks& chunks, std::int64_t first, std::int64_t last,
                FunctionRef<void(std::int64_t, std::int64_t)> body) {
  const std::int64_t step = chunks.task_chunks();
  for_each(pool, (last - first + step - 1) / step, [&](std::int64_t task) {
    const std::int64_t begin = first + task * step;
    body(begin, std::min(begin + step, last));
  });
}

// ---- encode --------------------------------------------------------------------------------------------------------

void count_codes(const std::uint8_t* codes, const Chunks& chunks, ThreadPool* pool, RansCounts* counts) {
  constexpr std::int64_t kMaxParts = 8;
  RansCounts partial[kMaxParts];
  const std::int64_t parts = pool == nullptr ? 1 : std::min<std::int64_t>(pool->threads(), kMaxParts);
  const std::int64_t chunks_a_part = (chunks.count() + parts - 1) / parts;
  for_each(pool, parts, [&](std::int64_t part) {
    const std::int64_t begin = std::min(chunks.elems, chunks.begin(part * chunks_a_part));
    const std::int64_t end = std::min(chunks.elems, chunks.begin((part + 1) * chunks_a_part));
    rans_count(codes + begin, end - begin, &partial[part]);
    partial[part].settle();
  });
  for (std::int64_t part = 0; part < parts; ++part) {
    for (std::size_t symbol = 0; symbol < 256; ++symbol) counts->sums[symbol] += partial[part].sums[symbol];
  }
}

// One or two bytes a symbol: 0, a rare symbol's frequency, or 15 + frequency / 16; seven bits a byte, lower ones first.
std::byte* put_frequencies(const RansFrequencies& frequencies, std::size_t first, std::size_t last, std::byte* to) {
  for (std::size_t symbol = first; symbol <= last; ++symbol) {
    const std::uint32_t frequency = frequencies[symbol];
    const std::uint32_t code = frequency < kRansCoarse ? frequency : kRansCoarse - 1 + frequency / kRansCoarse;
    if (code >= 128) *to++ = static_cast<std::byte>(code | 128);
    *to++ = static_cast<std::byte>(code < 128 ? code : code >> 7);
  }
  return to;
}

// Header, table and zeros up to a multiple of 8; returns the bytes.
std::uint64_t put_model(const RansFrequencies& frequencies, std::int64_t chunk_codes,
                        std::byte (&model)[kMaxModelBytes]) {
  const auto [first, last] = rans_range(frequencies);
  std::fill(model, model + sizeof(model), std::byte{0});
  model[0] = std::byte{kCoded};
  model[1] = static_cast<std::byte>(std::countr_zero(static_cast<std::uint64_t>(chunk_codes)));
  model[2] = static_cast<std::byte>(first);
  model[3] = static_cast<std::byte>(last);
  const std::byte* end = put_frequencies(frequencies, first, last, model + kHeaderBytes);
  return (static_cast<std::uint64_t>(end - model) + 7) / 8 * 8;
}

// Memory to encode some chunks, each in a slot of its own, before their place is known.
class Workspace {
 public:
  explicit Workspace(const Chunks& chunks)
      : slots_(std::min(chunks.count(), std::max(kBatchCodes / chunks.chunk_codes, kRansChunksAtOnce))),
        slot_bytes_(max_rans_chunk_bytes(std::min(chunks.elems, chunks.chunk_codes))) {}

  std::int64_t slots() const { return slots_; }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(slots_) * (sizeof(RansEncodeJob) + slot_bytes_); }
  RansEncodeJob* jobs(std::byte* memory) const {
    return ::new (memory) RansEncodeJob[static_cast<std::size_t>(slots_)];
  }
  std::byte* slot_end(std::byte* memory, std::int64_t slot) const {
    return memory + static_cast<std::uint64_t>(slots_) * sizeof(RansEncodeJob) +
           static_cast<std::uint64_t>(slot + 1) * slot_bytes_;
  }

 private:
  std::int64_t slots_;
  std::uint64_t slot_bytes_;
};

// Nothing if the codes as they are take less.
std::optional<std::uint64_t> encode_coded(const std::uint8_t* codes, const Chunks& chunks,
                                          const RansFrequencies& frequencies, std::byte* payload, std::byte* memory,
                                          ThreadPool* pool) {
  const RansEncodeTable table = make_rans_encode_table(frequencies);
  std::byte model[kMaxModelBytes];
  const std::uint64_t directory_at = put_model(frequencies, chunks.chunk_codes, model);
  const std::uint64_t chunks_at = directory_at + 8 * static_cast<std::uint64_t>(chunks.count());
  const auto room_bytes = static_cast<std::uint64_t>(chunks.elems);
  if (chunks_at > room_bytes) return std::nullopt;
  std::memcpy(payload, model, directory_at);

  const Workspace workspace(chunks);
  RansEncodeJob* jobs = workspace.jobs(memory);
  const bool is_shared = pool != nullptr && pool->threads() > 1;
  const std::int64_t batch = is_shared ? workspace.slots() : std::min(workspace.slots(), kRansChunksAtOnce);
  std::uint64_t at = chunks_at;
  for (std::int64_t first = 0; first < chunks.count(); first += batch) {
    const std::int64_t last = std::min(first + batch, chunks.count());
    for_chunks(pool, chunks, first, last, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        jobs[chunk - first] = {.codes = codes + chunks.begin(chunk),
                               .elems = chunks.elems_of(chunk),
                               .room_end = workspace.slot_end(memory, chunk - first)};
      }
      rans_encode_chunks(table, {jobs + (begin - first), jobs + (end - first)});
    });
    std::byte* const entries = payload + directory_at;
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      at += jobs[chunk - first].bytes();
      const std::uint64_t chunk_end = at - chunks_at;
      std::memcpy(entries + 8 * chunk, &chunk_end, sizeof(chunk_end));
    }
    if (at > room_bytes) return std::nullopt;
    for_chunks(pool, chunks, first, last, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const RansEncodeJob& job = jobs[chunk - first];
        std::uint64_t chunk_end;
        std::memcpy(&chunk_end, entries + 8 * chunk, sizeof(chunk_end));
        std::memcpy(payload + chunks_at + chunk_end - job.bytes(), job.begin, job.bytes());
      }
    });
  }
  return at;
}

// ---- decode --------------------------------------------------------------------------------------------------------

// What stands before the directory.
struct Model {
  RansFrequencies frequencies = {};
  std::int64_t chunk_codes = 0;
  std::uint64_t table_end = 0;
  std::uint64_t bytes = 0;  // with the zeros behind the table
};

Status read_frequencies(std::span<const std::byte> payload, std::size_t first, std::size_t last, Model* model) {
  std::size_t at = kHeaderBytes;
  std::uint32_t sum = 0;
  for (std::size_t symbol = first; symbol <= last; ++symbol) {
    const std::uint32_t byte = at < payload.size() ? std::to_integer<std::uint32_t>(payload[at]) : 0;
    const std::size_t end = at + (byte < 128 ? 1 : 2);
    if (end > payload.size()) {
      return make_error(StatusCode::kCorruptData, "the table ends after %zu bytes, before symbol %zu of %zu to %zu",
                        payload.size(), symbol, first, last);
    }
    const std::uint32_t upper = byte < 128 ? 0 : std::to_integer<std::uint32_t>(payload[at + 1]);
    if (byte >= 128 && upper == 0) {
      return make_error(StatusCode::kCorruptData, "symbol %zu of %zu to %zu has a frequency of two bytes, expected one",
                        symbol, first, last);
    }
    at = end;
    const std::uint32_t code = byte % 128 + 128 * upper;
    const std::uint32_t frequency = code < kRansCoarse ? code : (code - kRansCoarse + 1) * kRansCoarse;
    if (frequency >= kRansTotal || (frequency == 0 && (symbol == first || symbol == last))) {
      return make_error(StatusCode::kCorruptData, "symbol %zu of %zu to %zu has frequency %u", symbol, first, last,
                        frequency);
    }
    model->frequencies[symbol] = static_cast<std::uint16_t>(frequency);
    sum += frequency;
  }
  if (sum != kRansTotal) {
    return make_error(StatusCode::kCorruptData, "the frequencies add up to %u, expected %u", sum, kRansTotal);
  }
  model->table_end = at;
  model->bytes = (at + 7) / 8 * 8;
  return {};
}

Status read_model(std::span<const std::byte> payload, Model* model) {
  if (payload.size() < kHeaderBytes) {
    return make_error(StatusCode::kCorruptData, "%zu bytes, shorter than the header", payload.size());
  }
  const auto chunk_bits = std::to_integer<unsigned>(payload[1]);
  const auto first = std::to_integer<std::size_t>(payload[2]), last = std::to_integer<std::size_t>(payload[3]);
  if (chunk_bits >= 63 || (std::int64_t{1} << chunk_bits) < kMinRansChunkCodes ||
      (std::int64_t{1} << chunk_bits) > kMaxRansChunkCodes) {
    return make_error(StatusCode::kCorruptData, "chunks of 2^%u codes, expected %lld to %lld", chunk_bits,
                      static_cast<long long>(kMinRansChunkCodes), static_cast<long long>(kMaxRansChunkCodes));
  }
  if (first >= last) {
    return make_error(StatusCode::kCorruptData, "symbols %zu to %zu, expected at least two", first, last);
  }
  model->chunk_codes = std::int64_t{1} << chunk_bits;
  return read_frequencies(payload, first, last, model);
}

// The directory: where each chunk ends, counted from the first one's begin.
class Directory {
 public:
  Directory(std::span<const std::byte> payload, std::uint64_t begin, const Chunks& chunks)
      : entries_(payload.data() + begin), first_(entries_ + 8 * chunks.count()) {}

  const std::byte* begin_of(std::int64_t chunk) const { return first_ + (chunk == 0 ? 0 : end_offset(chunk - 1)); }
  const std::byte* end_of(std::int64_t chunk) const { return first_ + end_offset(chunk); }
  std::uint64_t end_offset(std::int64_t chunk) const {
    std::uint64_t offset;
    std::memcpy(&offset, entries_ + 8 * chunk, sizeof(offset));
    return offset;
  }

 private:
  const std::byte* entries_;
  const std::byte* first_;
};

// It is whole, every chunk has a legal size and lies behind the one before, and the last one ends with the payload.
Status check_directory(std::span<const std::byte> payload, std::uint64_t directory_at, const Chunks& chunks) {
  const auto count = static_cast<std::uint64_t>(chunks.count());
  if (payload.size() < directory_at || (payload.size() - directory_at) / 8 < count) {
    return make_error(StatusCode::kCorruptData, "%zu bytes, too short for a directory of %llu chunks at byte %llu",
                      payload.size(), static_cast<unsigned long long>(count),
                      static_cast<unsigned long long>(directory_at));
  }
  const Directory directory(payload, directory_at, chunks);
  const std::uint64_t available = payload.size() - directory_at - 8 * count;
  std::uint64_t begin = 0;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const std::uint64_t end = directory.end_offset(chunk);
    const std::uint64_t most = max_rans_chunk_bytes(chunks.elems_of(chunk));
    if (end < begin || end > available || end - begin < kRansStateBytes || end - begin > most) {
      return make_error(StatusCode::kCorruptData,
                        "chunk %lld of %lld lies at bytes %llu to %llu of %llu, expected %llu to %llu bytes",
                        static_cast<long long>(chunk), static_cast<long long>(chunks.count()),
                        static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end),
                        static_cast<unsigned long long>(available), static_cast<unsigned long long>(kRansStateBytes),
                        static_cast<unsigned long long>(most));
    }
    begin = end;
  }
  if (begin == available) return {};
  return make_error(StatusCode::kCorruptData, "the chunks end at byte %llu of %llu",
                    static_cast<unsigned long long>(begin), static_cast<unsigned long long>(available));
}

Status decode_coded(std::span<const std::byte> payload, std::uint8_t* codes, std::int64_t elems, std::byte* scratch,
                    ThreadPool* pool) {
  Model model;
  CORTADO_RETURN_IF_ERROR(read_model(payload, &model));
  const Chunks chunks = {elems, model.chunk_codes};
  CORTADO_RETURN_IF_ERROR(check_directory(payload, model.bytes, chunks));
  const Directory directory(payload, model.bytes, chunks);

  auto* table = ::new (align(scratch)) RansDecodeTable;
  make_rans_decode_table(model.frequencies, table);
  std::atomic<std::int64_t> first_corrupt{chunks.count()};
  for_chunks(pool, chunks, 0, chunks.count(), [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end && first_corrupt.load() > begin; begin += kRansChunksAtOnce) {
      RansDecodeJob jobs[kRansChunksAtOnce];
      const std::int64_t count = std::min(kRansChunksAtOnce, end - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        jobs[i] = {.begin = directory.begin_of(begin + i),
                   .end = directory.end_of(begin + i),
                   .codes = codes + chunks.begin(begin + i),
                   .elems = chunks.elems_of(begin + i)};
      }
      rans_decode_chunks(*table, {jobs, jobs + count}, payload.data() + payload.size());
      for (std::int64_t i = 0; i < count; ++i) {
        std::int64_t first = first_corrupt.load();
        while (!jobs[i].is_whole && begin + i < first && !first_corrupt.compare_exchange_weak(first, begin + i)) {
        }
      }
    }
  });
  if (first_corrupt == chunks.count()) return {};
  return make_error(StatusCode::kCorruptData, "chunk %lld of %lld: its coders do not end as they began",
                    static_cast<long long>(first_corrupt), static_cast<long long>(chunks.count()));
}

// ---- explain -------------------------------------------------------------------------------------------------------

// "3: 63488, 5: 2048, ...", of 65536.
std::string first_frequencies(const RansFrequencies& frequencies) {
  constexpr int kShown = 4;
  std::string text;
  int shown = 0;
  for (std::size_t symbol = 0; symbol < frequencies.size(); ++symbol) {
    if (frequencies[symbol] == 0) continue;
    if (shown++ == kShown) return text + ", ...";
    text += (text.empty() ? "" : ", ") + std::to_string(symbol) + ": " + std::to_string(frequencies[symbol]);
  }
  return text;
}

// Behind the mode; nothing where it makes no sense any more.
Status explain_coded(std::span<const std::byte> payload, std::int64_t elems, PayloadExplainer* explainer) {
  Model model;
  CORTADO_RETURN_IF_ERROR(read_model(payload, &model));
  const auto [first, last] = rans_range(model.frequencies);
  explainer->take(1, "chunk codes", "2 to the power of this: " + std::to_string(model.chunk_codes));
  explainer->take(1, "first symbol", std::to_string(first));
  explainer->take(1, "last symbol", std::to_string(last));
  explainer->take(model.table_end - kHeaderBytes, "frequencies",
                  "symbol by symbol, of 65536: " + first_frequencies(model.frequencies));
  explainer->take(model.bytes - model.table_end, "zeros", "up to a multiple of 8 bytes");
  const Chunks chunks = {elems, model.chunk_codes};
  CORTADO_RETURN_IF_ERROR(check_directory(payload, model.bytes, chunks));
  const Directory directory(payload, model.bytes, chunks);
  explainer->take(8 * static_cast<std::uint64_t>(chunks.count()), "directory",
                  "where each of " + std::to_string(chunks.count()) + " chunks ends, from the begin of the first");
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const auto bytes = static_cast<std::uint64_t>(directory.end_of(chunk) - directory.begin_of(chunk));
    explainer->take(bytes, "chunk " + std::to_string(chunk),
                    std::to_string(chunks.elems_of(chunk)) + " codes: 32 states of 4 bytes, " +
                        std::to_string((bytes - kRansStateBytes) / 2) + " words of 2");
  }
  return {};
}

}  // namespace

Parameter chunk_codes_parameter(const char* meaning) {
  return {.name = "chunk_codes",
          .kind = ParameterKind::kInteger,
          .default_text = "65536",
          .min = kMinRansChunkCodes,
          .max = kMaxRansChunkCodes,
          .meaning = meaning};
}

Status check_chunk_codes(const char* codec, std::int64_t chunk_codes) {
  if (std::has_single_bit(static_cast<std::uint64_t>(chunk_codes)) && chunk_codes >= kMinRansChunkCodes &&
      chunk_codes <= kMaxRansChunkCodes) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "%s(chunk_codes=%lld): chunk_codes must be a power of two from %lld to %lld", codec,
                    static_cast<long long>(chunk_codes), static_cast<long long>(kMinRansChunkCodes),
                    static_cast<long long>(kMaxRansChunkCodes));
}

std::uint64_t max_rans_bytes(std::int64_t elems) { return elems == 0 ? 0 : 1 + static_cast<std::uint64_t>(elems); }

std::uint64_t rans_scratch_bytes(std::int64_t elems, std::int64_t chunk_codes) {
  if (elems == 0) return 0;
  return std::max<std::uint64_t>(Workspace({elems, chunk_codes}).bytes(), sizeof(RansDecodeTable)) + kAlignBytes - 1;
}

std::uint64_t encode_codes(const std::uint8_t* codes, std::int64_t elems, std::int64_t chunk_codes, std::byte* payload,
                           std::byte* scratch, ThreadPool* pool, RansCounts* counts) {
  if (elems == 0) return 0;
  const Chunks chunks = {elems, chunk_codes};
  RansCounts own;
  if (counts == nullptr) {
    counts = &own;
    count_codes(codes, chunks, pool, counts);
  }
  counts->settle();
  if (counts->sums[codes[0]] == static_cast<std::uint64_t>(elems)) {
    payload[0] = std::byte{kConstant};
    payload[1] = static_cast<std::byte>(codes[0]);
    return 2;
  }
  if (const auto bytes = encode_coded(codes, chunks, rans_frequencies(counts->sums), payload, align(scratch), pool)) {
    return *bytes;
  }
  payload[0] = std::byte{kStored};
  std::memcpy(payload + 1, codes, static_cast<std::size_t>(elems));
  return max_rans_bytes(elems);
}

Status decode_codes(std::span<const std::byte> payload, std::uint8_t* codes, std::int64_t elems, std::byte* scratch,
                    ThreadPool* pool) {
  if (payload.empty() && elems == 0) return {};
  const auto mode = payload.empty() ? 0u : std::to_integer<unsigned>(payload[0]);
  if (elems > 0 && !payload.empty() && mode == kCoded) return decode_coded(payload, codes, elems, scratch, pool);
  const std::uint64_t expected_bytes = elems == 0 ? 0 : mode == kConstant ? 2 : max_rans_bytes(elems);
  if (payload.size() != expected_bytes || mode > kCoded) {
    return make_error(StatusCode::kCorruptData, "%zu bytes in mode %u, expected %llu bytes for %lld codes or mode 2",
                      payload.size(), mode, static_cast<unsigned long long>(expected_bytes),
                      static_cast<long long>(elems));
  }
  if (mode == kConstant) {
    std::memset(codes, std::to_integer<int>(payload[1]), static_cast<std::size_t>(elems));
  } else {
    std::memcpy(codes, payload.data() + 1, static_cast<std::size_t>(elems));
  }
  return {};
}

std::vector<PayloadSection> explain_codes(std::span<const std::byte> payload, std::int64_t elems) {
  PayloadExplainer explainer(payload);
  const auto mode = explainer.peek<std::uint8_t>();
  if (elems > 0 && mode.has_value()) {
    constexpr const char* kModes[] = {"0: the codes as they are", "1: all codes are equal", "2: coded"};
    explainer.take(1, "mode", *mode <= kCoded ? kModes[*mode] : "unknown: " + std::to_string(*mode));
    const std::uint64_t bytes = *mode == kStored ? static_cast<std::uint64_t>(elems) : 1;
    if (*mode < kCoded) explainer.take(bytes, "codes", first_values(explainer.next(bytes), DType::kUint8));
    const Status status = *mode == kCoded ? explain_coded(payload, elems, &explainer) : Status();
    if (!status.ok()) explainer.take(explainer.rest().size(), "unreadable", status.message());
  }
  return std::move(explainer).finish();
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// `cortado codec bench`: size, error and speed of codecs on tensors of files, one thread.
//
// Speeds are medians of calls that walk pools of memory larger than caches, so that small tensors are measured out of
// cache too, in turn with a copy between two such pools.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "cli/codec_commands.h"
#include "cli/json.h"
#include "cli/tensor_file.h"
#include "cortado/codec.h"
#include "cortado/files.h"

namespace cortado::cli {

namespace {

constexpr std::uint64_t kPoolBytes = std::uint64_t{128} << 20;
constexpr int kFewestRounds = 5;
constexpr double kLeastSeconds = 0.3;

struct Measurement {
  std::uint64_t payload_bytes = 0;
  double ratio = NAN;
  double relative_l2_error = NAN;
  double max_abs_error = NAN;
  double encode_bytes_per_s = NAN;
  double decode_bytes_per_s = NAN;
  double memcpy_bytes_per_s = NAN;
};

// The share of a memory copy that moves as many bytes: the tensor and its payload.
double share_of_memcpy(const Measurement& m, double tensor_bytes, double bytes_per_s) {
  const double moved_bytes = tensor_bytes + static_cast<double>(m.payload_bytes);
  return moved_bytes / tensor_bytes * bytes_per_s / m.memcpy_bytes_per_s;
}

class Pool {
 public:
  explicit Pool(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kAlignmentBytes, rounded_up(bytes)))), bytes_(bytes) {
    if (data_ != nullptr) std::memset(data_.get(), 0, bytes);  // so that no page is missing when it is timed
  }
  bool ok() const { return data_ != nullptr; }
  std::uint64_t bytes() const { return bytes_; }
  std::span<std::byte> slot(std::uint64_t i, std::uint64_t slot_bytes) const {
    return {data_.get() + i * slot_bytes, slot_bytes};
  }

 private:
  static constexpr std::uint64_t kAlignmentBytes = 64;
  static std::uint64_t rounded_up(std::uint64_t bytes) { return (bytes / kAlignmentBytes + 1) * kAlignmentBytes; }
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  std::unique_ptr<std::byte, Free> data_;
  std::uint64_t bytes_;
};

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The values of a tensor as float32, which holds all of them exactly.
Result<std::vector<float>> floats_of(ConstTensorView tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elems()));
  if (tensor.dtype == DType::kUint8) {
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.data);
    std::copy(bytes, bytes + values.size(), values.begin());
    return values;
  }
  // A tensor of 16-bit floats is a payload of the codec that makes such.
  const char* same = tensor.dtype == DType::kFloat16 ? "cast(fp16)" : "cast(bf16)";
  const std::unique_ptr<Codec> widen = make_codec(tensor.dtype == DType::kFloat32 ? "none" : same).value();
  const std::span<const std::byte> payload(static_cast<const std::byte*>(tensor.data),
                                           static_cast<std::size_t>(tensor.size_bytes()));
  const Status status = widen->decode(payload, {values.data(), DType::kFloat32, tensor.rows, tensor.cols}, {});
  if (!status.ok()) return status;
  return values;
}

Status measure_error(ConstTensorView tensor, ConstTensorView decoded, Measurement* m) {
  const Result<std::vector<float>> a = floats_of(tensor), b = floats_of(decoded);
  if (!a.ok() || !b.ok()) return a.ok() ? b.status() : a.status();
  double squares = 0, squared_error = 0;
  m->max_abs_error = 0;
  for (std::size_t i = 0; i < a.value().size(); ++i) {
    const double value = a.value()[i], back = b.value()[i];
    const bool same = value == back || (std::isnan(value) && std::isnan(back));
    const double error = same ? 0 : std::fabs(value - back);
    squares += value * value;
    squared_error += error * error;
    if (std::isnan(error) || error > m->max_abs_error) m->max_abs_error = error;  // NaN stays: nothing is above it
  }
  // Of a tensor with Inf or NaN that decodes to something else it is no number, and not 0.
  m->relative_l2_error = squared_error == 0 ? 0 : std::isfinite(squares) ? std::sqrt(squared_error / squares) : NAN;
  return {};
}

// One tensor with one codec, and the memory to do it again and again.
class Experiment {
 public:
  Experiment(const Codec& codec, ConstTensorView tensor)
      : codec_(codec),
        tensor_(tensor),
        tensor_bytes_(static_cast<std::uint64_t>(tensor.size_bytes())),
        payload_bytes_(codec.max_payload_bytes(tensor.rows, tensor.cols, tensor.dtype)),
        copies_(copies_of(std::max(tensor_bytes_, payload_bytes_))),
        inputs_(copies_ * tensor_bytes_),
        outputs_(copies_ * tensor_bytes_),
        payloads_(copies_ * payload_bytes_),
        scratch_(codec.scratch_bytes(tensor.rows, tensor.cols, tensor.dtype)) {}

  Result<Measurement> run() {
    if (!inputs_.ok() || !outputs_.ok() || !payloads_.ok() || !scratch_.ok()) {
      return make_error(StatusCode::kUnsupported, "no memory for three times %llu bytes",
                        static_cast<unsigned long long>(inputs_.bytes()));
    }
    Measurement m;
    std::memcpy(inputs_.slot(0, tensor_bytes_).data(), tensor_.data, tensor_bytes_);
    const Result<std::uint64_t> bytes = encode(0);
    if (!bytes.ok()) return bytes.status();
    m.payload_bytes = bytes.value();
    for (std::uint64_t i = 1; i < copies_; ++i) {
      std::memcpy(inputs_.slot(i, tensor_bytes_).data(), tensor_.data, tensor_bytes_);
      std::memcpy(payloads_.slot(i, payload_bytes_).data(), payloads_.slot(0, payload_bytes_).data(), m.payload_bytes);
    }
    const Status decoded = decode(0, m.payload_bytes);
    if (!decoded.ok()) return decoded;
    const Status compared = measure_error(tensor_, view(outputs_, 0), &m);
    if (!compared.ok()) return compared;
    m.ratio = static_cast<double>(tensor_bytes_) / static_cast<double>(m.payload_bytes);
    time(&m);
    return m;
  }

 private:
  static std::uint64_t copies_of(std::uint64_t largest_bytes) {
    return std::max<std::uint64_t>(1, kPoolBytes / std::max<std::uint64_t>(largest_bytes, 1));
  }

  TensorView view(const Pool& pool, std::uint64_t i) const {
    return {pool.slot(i, tensor_bytes_).data(), tensor_.dtype, tensor_.rows, tensor_.cols};
  }
  Result<std::uint64_t> encode(std::uint64_t i) const {
    return codec_.encode(view(inputs_, i), {}, payloads_.slot(i, payload_bytes_), scratch_.slot(0, scratch_.bytes()));
  }
  Status decode(std::uint64_t i, std::uint64_t bytes) const {
    return codec_.decode(payloads_.slot(i, payload_bytes_).first(bytes), view(outputs_, i),
                         scratch_.slot(0, scratch_.bytes()));
  }

  // A sample is as many calls as walk a good part of the pools, or so many that reading the clock costs nothing.
  void time(Measurement* m) {
    const std::uint64_t calls = std::min<std::uint64_t>((copies_ + 7) / 8, 1 << 16);
    std::vector<double> encode_s, decode_s, memcpy_s;
    double total_s = 0;
    for (std::uint64_t next = 0; total_s < kLeastSeconds || encode_s.size() < kFewestRounds; next += calls) {
      const auto each = [&](auto&& call) {
        return seconds_of([&] {
          for (std::uint64_t i = 0; i < calls; ++i) call((next + i) % copies_);
        });
      };
      encode_s.push_back(each([&](std::uint64_t i) { (void)encode(i).ok(); }));
      // Half the pool away from where payloads have just been written, which may be in a cache.
      decode_s.push_back(
          each([&](std::uint64_t i) { (void)decode((i + copies_ / 2) % copies_, m->payload_bytes).ok(); }));
      memcpy_s.push_back(seconds_of([&] { copy_a_part(encode_s.size()); }));
      total_s += encode_s.back() + decode_s.back() + memcpy_s.back();
    }
    const double bytes = static_cast<double>(calls * tensor_bytes_);
    m->encode_bytes_per_s = bytes / median(encode_s);
    m->decode_bytes_per_s = bytes / median(decode_s);
    m->memcpy_bytes_per_s = 2.0 * kCopiedBytes / median(memcpy_s);
  }

  // Between the halves of a pool of its own, a part at a time.
  static void copy_a_part(std::size_t round) {
    static const Pool pool(2 * kPoolBytes);
    const std::uint64_t part = round % (kPoolBytes / kCopiedBytes);
    if (pool.ok()) {
      std::memcpy(pool.slot(part, kCopiedBytes).data(), pool.slot(part, kCopiedBytes).data() + kPoolBytes,
                  kCopiedBytes);
    }
  }

  static constexpr std::uint64_t kCopiedBytes = kPoolBytes / 4;

  const Codec& codec_;
  const ConstTensorView tensor_;
  const std::uint64_t tensor_bytes_, payload_bytes_, copies_;
  Pool inputs_, outputs_, payloads_, scratch_;
};

void print_json(const std::string& path, const Codec& codec, ConstTensorView tensor, const Measurement& m) {
  std::printf(
      "{\"codec\": %s, \"file\": %s, \"elems\": %lld, \"payload_bytes\": %llu, \"ratio\": %s, "
      "\"relative_l2_error\": %s, \"max_abs_error\": %s, \"encode_bytes_per_s\": %s, \"decode_bytes_per_s\": %s, "
      "\"memcpy_bytes_per_s\": %s}\n",
      json_text(codec.spec()).c_str(), json_text(path).c_str(), static_cast<long long>(tensor.elems()),
      static_cast<unsigned long long>(m.payload_bytes), json_number(m.ratio).c_str(),
      json_number(m.relative_l2_error).c_str(), json_number(m.max_abs_error).c_str(),
      json_number(m.encode_bytes_per_s).c_str(), json_number(m.decode_bytes_per_s).c_str(),
      json_number(m.memcpy_bytes_per_s).c_str());
}

constexpr int kSpecWidth = 38;  // of a line of 100 columns

void print_head(const std::string& path, const TensorFile& tensor) {
  std::string shape;
  for (const std::int64_t size : tensor.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(size);
  std::printf("%s: %s %s\n", path.c_str(), shape.empty() ? "one value" : shape.c_str(),
              std::string(dtype_name(tensor.dtype)).c_str());
  std::printf("%-*s %8s %9s %9s %8s %5s %8s %5s\n", kSpecWidth, "codec", "ratio", "rel. L2", "max error", "encode",
              "share", "decode", "share");
}

void print_row(const Codec& codec, ConstTensorView tensor, const Measurement& m) {
  std::string spec = codec.spec();
  if (spec.size() > kSpecWidth) {
    std::printf("%s\n", spec.c_str());
    spec.clear();
  }
  const double bytes = static_cast<double>(tensor.size_bytes());
  std::printf("%-*s %8.2f %9.3g %9.3g %8.2f %4.0f%% %8.2f %4.0f%%\n", kSpecWidth, spec.c_str(), m.ratio,
              m.relative_l2_error, m.max_abs_error, m.encode_bytes_per_s * 1e-9,
              100 * share_of_memcpy(m, bytes, m.encode_bytes_per_s), m.decode_bytes_per_s * 1e-9,
              100 * share_of_memcpy(m, bytes, m.decode_bytes_per_s));
}

int bench_file(const std::string& path, const std::vector<std::unique_ptr<Codec>>& codecs,
               const BenchOptions& options) {
  const Result<std::unique_ptr<InputFile>> input = InputFile::open(path);
  if (!input.ok()) return report_error(path, input.status());
  const Result<TensorFile> read = read_tensor_file(input.value()->bytes(), options.input);
  if (!read.ok()) return report_error(path, read.status());
  const ConstTensorView tensor = read.value().matrix();
  if (tensor.elems() == 0) {
    return report_error(path, Status(StatusCode::kInvalidArgument, "the tensor is empty: there is nothing to measure"));
  }
  int code = kDone;
  double memcpy_bytes_per_s = 0;
  for (const std::unique_ptr<Codec>& codec : codecs) {
    const Result<Measurement> measured = Experiment(*codec, tensor).run();
    if (!measured.ok()) {
      code = report_error(path, measured.status());
      continue;
    }
    const Measurement& m = measured.value();
    if (!options.as_json && memcpy_bytes_per_s == 0) print_head(path, read.value());
    memcpy_bytes_per_s = std::max(memcpy_bytes_per_s, m.memcpy_bytes_per_s);
    options.as_json ? print_json(path, *codec, tensor, m) : print_row(*codec, tensor, m);
    std::fflush(stdout);
  }
  if (!options.as_json && memcpy_bytes_per_s > 0) {
    std::printf(
        "GB/s of uncompressed bytes, one thread; shares are of a memory copy that moves as many bytes\n"
        "(%.2f GB/s read and written)\n\n",
        memcpy_bytes_per_s * 1e-9);
  }
  return code;
}

}  // namespace

int bench_codecs(const BenchOptions& options) {
  std::vector<std::unique_ptr<Codec>> codecs;
  for (const std::string& spec : options.specs) {
    Result<std::unique_ptr<Codec>> codec = make_codec(spec);
    if (!codec.ok()) return report_wrong_codec(codec.status());
    codecs.push_back(std::move(codec).value());
  }
  int code = kDone;
  for (const std::string& path : options.paths) code = std::max(code, bench_file(path, codecs, options));
  return code;
}

}  // namespace cortado::cli

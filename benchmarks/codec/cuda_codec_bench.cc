// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How near the device variants come to the memory's limit: bytes that a codec must move (values read, payload written,
// or the other way round) over its time, as a share of what a copy on the device moves in the same run. Rows are CSV.
//
//   cuda_codec_bench [MiB of a message, 256]
//   cuda_codec_bench --values FILE [MiB, 256]     writes the float32 values of the messages, for others to measure with
//
// A message is one tensor, or 64: normal float32 values; for entropy coders codes of 4 bits, a byte each, whose entropy
// is said. Payloads and decoded values of the first and the last tensor are compared with the codec's before the clock
// starts. Without a device it says so and ends with 0.
#include <array>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/codec/cuda_low_rank.h"
#include "codec/device_batch.h"
#include "core/cuda_device.h"
#include "core/philox.h"

namespace cortado {
namespace {

std::vector<float> normal_values(std::int64_t elems) {
  std::vector<float> values(static_cast<std::size_t>(elems));
  philox_fill_normal(1, 0, 0, values.data(), elems);
  return values;
}

// 4 bits of N(0, 1), as a quantiser makes them.
std::vector<std::byte> normal_codes(std::int64_t elems) {
  const std::vector<float> normal = normal_values(elems);
  std::vector<std::byte> codes(normal.size());
  for (std::size_t i = 0; i < normal.size(); ++i) {
    codes[i] = static_cast<std::byte>(std::clamp(static_cast<int>(normal[i] * 2 + 8), 0, 15));
  }
  return codes;
}

double entropy_bits(const std::vector<std::byte>& codes) {
  std::array<std::uint64_t, 256> counts = {};
  for (const std::byte code : codes) ++counts[std::to_integer<std::size_t>(code)];
  double bits = 0;
  for (const std::uint64_t count : counts) {
    const double share = static_cast<double>(count) / static_cast<double>(codes.size());
    if (count > 0) bits -= share * std::log2(share);
  }
  return bits;
}

struct Row {
  std::string name;
  const char* direction;
  std::int64_t tensors, values;
  double payload_bytes, moved_bytes;
  std::string entropy_bits;  // of codes, empty for values
};

// One codec with a message of equal tensors on the device.
class Message {
 public:
  Message(const std::string& spec, DType dtype, const std::vector<std::byte>& input, std::int64_t tensors,
          cudaStream_t stream)
      : codec_(make_codec(spec).value()), input_(input), stream_(stream), step_(8) {
    const std::int64_t elem_bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
    const std::int64_t elems = static_cast<std::int64_t>(input.size()) / elem_bytes / tensors;
    const std::int64_t rows = elems >= 4096 ? 2048 : 1, cols = elems / rows;
    tensor_bytes_ = static_cast<std::uint64_t>(rows * cols * elem_bytes);
    values_ = std::make_unique<DeviceMemory>(input.size());
    const std::uint64_t stride = (codec_->max_payload_bytes(rows, cols, dtype) + 255) / 256 * 256;
    payloads_ = std::make_unique<DeviceMemory>(static_cast<std::uint64_t>(tensors) * stride);
    for (std::int64_t i = 0; i < tensors; ++i) {
      const auto number = static_cast<std::uint64_t>(i);
      tensors_.push_back({.data = values_->get() + number * tensor_bytes_,
                          .dtype = dtype,
                          .rows = rows,
                          .cols = cols,
                          .payload = payloads_->get() + number * stride,
                          .number = number});
    }
    to_device(values_->get(), input);
    to_device(step_.get(), std::vector<std::uint64_t>{kStep});
    batch_ = make_cuda_batch(spec, tensors_).value();
    workspace_ = std::make_unique<DeviceMemory>(batch_->workspace_bytes());
    require(batch_->set_up(tensors_, {.seed = kSeed, .step = step_.get<std::uint64_t>()}, workspace_->get(), stream_));
  }

  void encode() { require(batch_->encode(stream_)); }
  void decode() { require(batch_->decode(stream_)); }

  // Encodes and decodes; returns the bytes of all payloads.
  std::uint64_t check() {
    encode();
    require(cudaStreamSynchronize(stream_), "encode");
    const std::vector<std::uint64_t> sizes = from_device<std::uint64_t>(batch_->payload_bytes(), tensors_.size());
    const std::set<std::size_t> checked = {0, sizes.size() - 1};
    for (const std::size_t i : checked) check_payload(i, sizes[i]);
    require(cudaMemset(values_->get(), 0xa5, input_.size()), "values");
    decode();
    require(cudaStreamSynchronize(stream_), "decode");
    for (const std::uint32_t fault : from_device<std::uint32_t>(batch_->faults(), tensors_.size())) {
      require(fault == 0, codec_->spec() + ": the device's decoder refuses a payload of its encoder");
    }
    for (const std::size_t i : checked) check_values(i, sizes[i]);
    to_device(values_->get(), input_);
    std::uint64_t total = 0;
    for (const std::uint64_t bytes : sizes) total += bytes;
    return total;
  }

  std::uint64_t tensor_bytes() const { return tensor_bytes_; }
  std::int64_t values() const {
    return static_cast<std::int64_t>(tensors_.size()) * tensors_[0].rows * tensors_[0].cols;
  }

 private:
  static constexpr std::uint64_t kSeed = 7, kStep = 3;
  static constexpr double kLowRankBound = 1e-5;  // of the codec's spec.md

  std::vector<std::byte> payload_of_codec(std::size_t i) const {
    const DeviceTensor& tensor = tensors_[i];
    std::vector<std::byte> payload(codec_->max_payload_bytes(tensor.rows, tensor.cols, tensor.dtype));
    std::vector<std::byte> scratch = scratch_of(tensor);
    const EncodeContext context = {.seed = kSeed, .step = kStep, .tensor = tensor.number};
    const ConstTensorView view = {input_.data() + i * tensor_bytes_, tensor.dtype, tensor.rows, tensor.cols};
    payload.resize(codec_->encode(view, context, payload, scratch).value());
    return payload;
  }

  std::vector<std::byte> values_of_codec(std::size_t i, const std::vector<std::byte>& payload) const {
    const DeviceTensor& tensor = tensors_[i];
    std::vector<std::byte> values(tensor_bytes_), scratch = scratch_of(tensor);
    require(codec_->decode(payload, {values.data(), tensor.dtype, tensor.rows, tensor.cols}, scratch));
    return values;
  }

  // Low rank is held to a bound, which shows in the values.
  void check_payload(std::size_t i, std::uint64_t bytes) const {
    require(codec_->row().traits.low_rank || from_device<std::byte>(tensors_[i].payload, bytes) == payload_of_codec(i),
            codec_->spec() + ": the device's payload of tensor " + std::to_string(i) + " is not the codec's");
  }

  void check_values(std::size_t i, std::uint64_t bytes) const {
    const std::vector<std::byte> found = from_device<std::byte>(tensors_[i].data, tensor_bytes_);
    const std::string what = codec_->spec() + ": the device's values of tensor " + std::to_string(i);
    require(found == values_of_codec(i, from_device<std::byte>(tensors_[i].payload, bytes)),
            what + " are not the codec's");
    if (!codec_->row().traits.low_rank) return;
    const double distance = relative_distance(as_floats(found), as_floats(values_of_codec(i, payload_of_codec(i))));
    require(distance <= kLowRankBound, what + " are " + std::to_string(distance) + " from the codec's");
  }

  static std::vector<float> as_floats(const std::vector<std::byte>& bytes) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  std::vector<std::byte> scratch_of(const DeviceTensor& tensor) const {
    return std::vector<std::byte>(codec_->scratch_bytes(tensor.rows, tensor.cols, tensor.dtype));
  }

  const std::unique_ptr<Codec> codec_;
  const std::vector<std::byte>& input_;
  const cudaStream_t stream_;
  const DeviceMemory step_;
  std::uint64_t tensor_bytes_ = 0;
  std::unique_ptr<DeviceMemory> values_, payloads_, workspace_;
  std::vector<DeviceTensor> tensors_;
  std::unique_ptr<DeviceBatch> batch_;
};

class Bench {
 public:
  explicit Bench(std::int64_t message_bytes) : message_bytes_(message_bytes) {
    require(cudaStreamCreate(&stream_), "stream");
    const std::vector<float> values = normal_values(message_bytes / 4);
    values_.resize(values.size() * sizeof(float));
    std::memcpy(values_.data(), values.data(), values_.size());
    codes_ = normal_codes(message_bytes);
    std::puts(
        "codec,direction,tensors,values,payload_bytes,moved_bytes,entropy_bits,median_us,slowest_us,moved_GB_per_s,"
        "input_GB_per_s,share_of_copy");
    run_copy();
  }
  ~Bench() { cudaStreamDestroy(stream_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void run(const char* spec, std::int64_t tensors, bool of_codes) {
    Message message(spec, of_codes ? DType::kUint8 : DType::kFloat32, of_codes ? codes_ : values_, tensors, stream_);
    const auto payload_bytes = static_cast<double>(message.check());
    const double input_bytes = static_cast<double>(message.tensor_bytes()) * static_cast<double>(tensors);
    const std::string entropy = of_codes ? std::to_string(entropy_bits(codes_)) : "";
    Row row = {spec, "encode", tensors, message.values(), payload_bytes, input_bytes + payload_bytes, entropy};
    print(row, input_bytes, time_of(stream_, [&] { message.encode(); }));
    row.direction = "decode";
    print(row, input_bytes, time_of(stream_, [&] { message.decode(); }));
  }

  // One pass of low-rank compression with residual: gradient and residual read, residual written.
  void run_low_rank(int rank, std::int64_t tensors) {
    const MatrixShape shape = {2048, message_bytes_ / 4 / tensors / 2048};
    const std::vector<MatrixShape> shapes(static_cast<std::size_t>(tensors), shape);
    LowRankModel(shapes, rank, stream_).check(shapes.size() - 1);
    LowRankModel model(shapes, rank, stream_);
    model.send_rows();
    const auto bytes = static_cast<double>(4 * model.elems()), sent = static_cast<double>(4 * model.factor_elems());
    Row row = {"low rank " + std::to_string(rank),
               "project rows",
               tensors,
               static_cast<std::int64_t>(model.elems()),
               sent,
               3 * bytes,
               ""};
    print(row, bytes, time_of(stream_, [&] { model.project_rows(); }));
    row.direction = "project cols";
    print(row, bytes, time_of(stream_, [&] { model.project_cols(); }));
    row.direction = "orthogonalise cols", row.moved_bytes = 2 * sent;
    print(row, bytes, time_of(stream_, [&] { model.orthogonalise_cols(); }));
    row.direction = "reconstruct", row.moved_bytes = bytes;
    print(row, bytes, time_of(stream_, [&] { model.reconstruct(); }));
  }

 private:
  void run_copy() {
    const DeviceMemory from(values_.size()), to(values_.size());
    to_device(from.get(), values_);
    const auto copy = [&] {
      require(cudaMemcpyAsync(to.get(), from.get(), values_.size(), cudaMemcpyDeviceToDevice, stream_), "copy");
    };
    copy();
    require(cudaStreamSynchronize(stream_), "copy");
    require(from_device<std::byte>(to.get(), values_.size()) == values_, "a copy differs from what was copied");
    const Seconds seconds = time_of(stream_, copy);
    const auto bytes = static_cast<double>(values_.size());
    copy_bytes_per_s_ = 2 * bytes / seconds.median;
    print({"copy", "copy", 1, message_bytes_ / 4, bytes, 2 * bytes, ""}, bytes, seconds);
  }

  void print(const Row& row, double input_bytes, const Seconds& seconds) const {
    const double moved = row.moved_bytes / seconds.median;
    std::printf("\"%s\",%s,%lld,%lld,%.0f,%.0f,%s,%.1f,%.1f,%.1f,%.1f,%.3f\n", row.name.c_str(), row.direction,
                static_cast<long long>(row.tensors), static_cast<long long>(row.values), row.payload_bytes,
                row.moved_bytes, row.entropy_bits.c_str(), seconds.median * 1e6, seconds.slowest * 1e6, moved / 1e9,
                input_bytes / seconds.median / 1e9, moved / copy_bytes_per_s_);
    std::fflush(stdout);
  }

  const std::int64_t message_bytes_;
  std::vector<std::byte> values_, codes_;
  cudaStream_t stream_ = nullptr;
  double copy_bytes_per_s_ = 0;
};

int write_values(const char* path, std::int64_t elems) {
  const std::vector<float> values = normal_values(elems);
  std::FILE* const file = std::fopen(path, "wb");
  const bool is_written =
      file != nullptr && std::fwrite(values.data(), sizeof(float), values.size(), file) == values.size();
  const bool is_closed = file != nullptr && std::fclose(file) == 0;
  require(is_written && is_closed, std::string(path) + ": can't be written");
  return 0;
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  const bool only_values = argc > 2 && std::string_view(argv[1]) == "--values";
  const int at = only_values ? 3 : 1;
  const std::int64_t message_bytes = (argc > at ? std::atoll(argv[at]) : 256) << 20;
  if (only_values) return cortado::write_values(argv[2], message_bytes / 4);
  if (cortado::cuda_device_count() == 0) {
    std::puts("no CUDA device: nothing was measured");
    return 0;
  }
  cortado::Bench bench(message_bytes);
  const char* const specs[] = {"cast(bf16)",
                               "cast(fp16)",
                               "sign",
                               "fp8(e4m3)",
                               "quant(bits=4)",
                               "quant(bits=4, round=stochastic)",
                               "quant(bits=8, block=tensor, scale=range, round=stochastic)",
                               "compso(bound=4e-3, chunk_codes=16384)",
                               "compso(bound=4e-3, coder=none)",
                               "float_rans(chunk_codes=16384)",
                               "topk(density=0.01)",
                               "topk(density=0.01, select=sampled)",
                               "randk(density=0.01)",
                               "acp(rank=4)"};
  for (const std::int64_t tensors : {1, 64}) {
    for (const char* const spec : specs) bench.run(spec, tensors, false);
    for (const char* const spec : {"rans(chunk_codes=4096)", "rans(chunk_codes=16384)"}) bench.run(spec, tensors, true);
    for (const int rank : {1, 4, 8}) bench.run_low_rank(rank, tensors);
  }
}

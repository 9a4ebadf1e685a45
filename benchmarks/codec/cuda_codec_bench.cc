// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// How near the device variants come to the memory's limit: bytes that a codec must move (values read, payload written,
// or the other way round) over its time, as a share of what a copy on the device moves in the same run. Payloads are
// compared with the codec's before the clock starts. Rows are CSV.
//
//   cuda_codec_bench [MiB of float32 values, 256]
//
// Without a device it says so and ends with 0.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codec/device_batch.h"
#include "codec/lowrank/lowrank_batch.h"
#include "core/cuda_device.h"
#include "core/philox.h"

namespace cortado {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t bytes) { require(cudaMalloc(&memory_, bytes + 1), "cudaMalloc"); }
  ~DeviceMemory() { cudaFree(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <typename T = std::byte>
  T* get() const {
    return static_cast<T*>(memory_);
  }
  void set(const void* from, std::uint64_t bytes) const {
    require(cudaMemcpy(memory_, from, bytes, cudaMemcpyHostToDevice), "to the device");
  }

 private:
  void* memory_ = nullptr;
};

struct Seconds {
  double median, slowest;
};

// Of one call, measured by events around each of many.
Seconds time_of(cudaStream_t stream, const std::function<void()>& call) {
  constexpr int kWarmUp = 5, kRuns = 40;
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "event");
  require(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int run = 0; run < kWarmUp + kRuns; ++run) {
    require(cudaEventRecord(begin, stream), "record");
    call();
    require(cudaEventRecord(end, stream), "record");
    require(cudaEventSynchronize(end), "wait");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    if (run >= kWarmUp) times.push_back(static_cast<double>(milliseconds) / 1e3);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.back()};
}

class Bench {
 public:
  explicit Bench(std::int64_t values_bytes) : values_bytes_(values_bytes) {
    require(cudaStreamCreate(&stream_), "stream");
    const DeviceMemory from(static_cast<std::uint64_t>(values_bytes)), to(static_cast<std::uint64_t>(values_bytes));
    const Seconds seconds = time_of(stream_, [&] {
      require(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(values_bytes), cudaMemcpyDeviceToDevice,
                              stream_),
              "copy");
    });
    copy_bytes_per_s_ = 2 * static_cast<double>(values_bytes) / seconds.median;
    std::printf(
        "codec,direction,tensors,values,payload_bytes,moved_bytes,median_us,slowest_us,moved_GB_per_s,"
        "input_GB_per_s,share_of_copy\n");
    row("copy", "copy", 1, values_bytes / 4, static_cast<double>(values_bytes), 2 * static_cast<double>(values_bytes),
        seconds);
  }
  ~Bench() { cudaStreamDestroy(stream_); }

  // `tensors` of equal shape that have all the values together. `codes`: bytes of 4 bits of N(0, 1), for entropy
  // coders.
  void run(const char* spec, std::int64_t tensors, bool codes) {
    const std::unique_ptr<Codec> codec = make_codec(spec).value();
    const DType dtype = codes ? DType::kUint8 : DType::kFloat32;
    const std::int64_t elem_bytes = codes ? 1 : 4, elems = values_bytes_ / elem_bytes / tensors;
    const std::int64_t rows = elems >= 4096 ? 2048 : 1, cols = elems / rows;
    std::vector<float> normal(static_cast<std::size_t>(rows * cols));
    philox_fill_normal(1, 0, 0, normal.data(), rows * cols);
    std::vector<std::byte> input(normal.size() * static_cast<std::size_t>(elem_bytes));
    if (codes) {
      for (std::size_t i = 0; i < normal.size(); ++i) {
        input[i] = static_cast<std::byte>(std::clamp(static_cast<int>(normal[i] * 2 + 8), 0, 15));
      }
    } else {
      std::memcpy(input.data(), normal.data(), input.size());
    }
    const std::uint64_t room = codec->max_payload_bytes(rows, cols, dtype);
    const std::uint64_t stride = (room + 255) / 256 * 256;
    const DeviceMemory values(static_cast<std::uint64_t>(tensors) * input.size());
    const DeviceMemory payloads(static_cast<std::uint64_t>(tensors) * stride), step(8);
    const std::uint64_t first_step = 3;
    step.set(&first_step, 8);
    std::vector<DeviceTensor> batch_tensors;
    for (std::int64_t i = 0; i < tensors; ++i) {
      DeviceTensor tensor = {.dtype = dtype, .rows = rows, .cols = cols, .number = static_cast<std::uint64_t>(i)};
      tensor.data = values.get() + static_cast<std::uint64_t>(i) * input.size();
      tensor.payload = payloads.get() + static_cast<std::uint64_t>(i) * stride;
      require(cudaMemcpy(tensor.data, input.data(), input.size(), cudaMemcpyHostToDevice), "values");
      batch_tensors.push_back(tensor);
    }
    std::unique_ptr<DeviceBatch> batch = make_cuda_batch(spec, batch_tensors).value();
    const DeviceMemory workspace(batch->workspace_bytes());
    require(batch->set_up(batch_tensors, {.seed = 7, .step = step.get<std::uint64_t>()}, workspace.get(), stream_));
    require(batch->encode(stream_));
    require(cudaStreamSynchronize(stream_), spec);
    const std::uint64_t bytes = check(*codec, *batch, batch_tensors[0], input, first_step);
    const double moved =
        static_cast<double>(tensors) * (static_cast<double>(input.size()) + static_cast<double>(bytes));
    const double payload_bytes = static_cast<double>(tensors) * static_cast<double>(bytes);
    row(spec, "encode", tensors, tensors * rows * cols, payload_bytes, moved,
        time_of(stream_, [&] { require(batch->encode(stream_)); }));
    row(spec, "decode", tensors, tensors * rows * cols, payload_bytes, moved,
        time_of(stream_, [&] { require(batch->decode(stream_)); }));
  }

  // One pass of low-rank compression with residual: gradient and residual read, residual written.
  void run_low_rank(int rank, std::int64_t tensors) {
    const std::int64_t rows = 2048, cols = values_bytes_ / 4 / tensors / rows;
    const auto elems = static_cast<std::uint64_t>(rows * cols), count = static_cast<std::uint64_t>(tensors);
    const auto factor_elems = static_cast<std::uint64_t>((rows + cols) * rank);
    const DeviceMemory gradients(4 * count * elems), residuals(4 * count * elems), factors(8 * count * factor_elems);
    const DeviceMemory step(8);
    require(cudaMemset(gradients.get(), 0, 4 * count * elems), "gradients");
    require(cudaMemset(residuals.get(), 0, 4 * count * elems), "residuals");
    require(cudaMemset(factors.get(), 0, 8 * count * factor_elems), "factors");
    require(cudaMemset(step.get(), 0, 8), "step");
    std::vector<LowRankTensor> batch_tensors;
    for (std::uint64_t i = 0; i < count; ++i) {
      auto* const row_factor = factors.get<float>() + 2 * i * factor_elems;
      auto* const sent = row_factor + factor_elems;
      LowRankTensor tensor;
      tensor.pass.rows = rows, tensor.pass.cols = cols;
      tensor.pass.gradient = gradients.get<float>() + i * elems;
      tensor.pass.residual_out = residuals.get<float>() + i * elems;
      tensor.pass.residual_in = tensor.pass.residual_out;
      tensor.pass.sent = {sent, sent + rows * rank, rank};
      tensor.rank = rank;
      tensor.row = row_factor;
      tensor.col = row_factor + rows * rank;
      tensor.output = gradients.get<float>() + i * elems;
      tensor.number = i;
      batch_tensors.push_back(tensor);
    }
    std::unique_ptr<LowRankBatch> batch = make_cuda_low_rank_batch(batch_tensors).value();
    const DeviceMemory workspace(batch->workspace_bytes());
    require(batch->set_up(batch_tensors, {.seed = 7, .step = step.get<std::uint64_t>()}, workspace.get(), stream_));
    require(batch->random_col_basis(stream_));
    const std::string name = "low rank " + std::to_string(rank);
    const double bytes = static_cast<double>(4 * count * elems), sent = static_cast<double>(4 * count * factor_elems);
    const std::int64_t values = tensors * rows * cols;
    row(name.c_str(), "project rows", tensors, values, sent, 3 * bytes,
        time_of(stream_, [&] { require(batch->project_rows(stream_)); }));
    row(name.c_str(), "project cols", tensors, values, sent, 3 * bytes,
        time_of(stream_, [&] { require(batch->project_cols(stream_)); }));
    row(name.c_str(), "orthogonalise cols", tensors, values, sent, 2 * sent,
        time_of(stream_, [&] { require(batch->orthogonalise_cols(stream_)); }));
    row(name.c_str(), "reconstruct", tensors, values, sent, bytes,
        time_of(stream_, [&] { require(batch->reconstruct(1, stream_)); }));
  }

 private:
  // The payload of the first tensor is the codec's; returns its bytes. Low rank is held to a bound, by the tests.
  static std::uint64_t check(const Codec& codec, const DeviceBatch& batch, const DeviceTensor& tensor,
                             const std::vector<std::byte>& input, std::uint64_t step) {
    std::vector<std::byte> expected(codec.max_payload_bytes(tensor.rows, tensor.cols, tensor.dtype));
    std::vector<std::byte> scratch(codec.scratch_bytes(tensor.rows, tensor.cols, tensor.dtype));
    const EncodeContext context = {.seed = 7, .step = step, .tensor = tensor.number};
    expected.resize(
        codec.encode({input.data(), tensor.dtype, tensor.rows, tensor.cols}, context, expected, scratch).value());
    std::uint64_t bytes = 0;
    require(cudaMemcpy(&bytes, batch.payload_bytes(), sizeof(bytes), cudaMemcpyDeviceToHost), "size");
    std::vector<std::byte> found(bytes);
    require(cudaMemcpy(found.data(), tensor.payload, bytes, cudaMemcpyDeviceToHost), "payload");
    if (!codec.row().traits.low_rank && found != expected) {
      std::fprintf(stderr, "%s: the device's payload is not the codec's\n", codec.spec().c_str());
      std::exit(1);
    }
    return bytes;
  }

  void row(const char* name, const char* direction, std::int64_t tensors, std::int64_t values, double payload_bytes,
           double moved_bytes, const Seconds& seconds) const {
    const double moved = moved_bytes / seconds.median;
    std::printf("\"%s\",%s,%lld,%lld,%.0f,%.0f,%.1f,%.1f,%.1f,%.1f,%.3f\n", name, direction,
                static_cast<long long>(tensors), static_cast<long long>(values), payload_bytes, moved_bytes,
                seconds.median * 1e6, seconds.slowest * 1e6, moved / 1e9,
                static_cast<double>(values_bytes_) / seconds.median / 1e9, moved / copy_bytes_per_s_);
    std::fflush(stdout);
  }

  const std::int64_t values_bytes_;
  cudaStream_t stream_ = nullptr;
  double copy_bytes_per_s_ = 0;
};

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  const std::int64_t mebibytes = argc > 1 ? std::atoll(argv[1]) : 256;
  if (cortado::cuda_device_count() == 0) {
    std::puts("no CUDA device: nothing was measured");
    return 0;
  }
  cortado::Bench bench(mebibytes << 20);
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

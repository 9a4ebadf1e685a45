// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What a step of ACP-SGD takes on a CUDA device: compression and reconstruction of all matrices of a GPT of 350 M
// parameters (24 blocks of width 1024, a vocabulary of 50,257), fp32 gradients, rank 4. The matrices have normal
// values. torch_acp_step_cuda.py gives the times of a backward pass of the same model and of PyTorch's PowerSGD hook.
//
//   cuda_acp_step_bench [WIDTH of the model, 1024]
//
// A row "step" is the mean of a step that sends row factors and one that sends column factors. The first, a middle and
// the last matrix are compared with the CPU before the clock starts. Without a device it says so and ends with 0.
#include "benchmarks/codec/cuda_low_rank.h"
#include "core/cuda_device.h"

namespace cortado {
namespace {

std::vector<MatrixShape> gpt(std::int64_t width) {
  constexpr std::int64_t kVocabulary = 50257, kContext = 1024;
  constexpr int kBlocks = 24;
  std::vector<MatrixShape> shapes = {{kVocabulary, width}, {kContext, width}};
  for (int block = 0; block < kBlocks; ++block) {
    shapes.push_back({3 * width, width});  // query, key and value
    shapes.push_back({width, width});
    shapes.push_back({4 * width, width});
    shapes.push_back({width, 4 * width});
  }
  return shapes;
}

void run(std::int64_t width) {
  constexpr int kRank = 4;
  cudaStream_t stream = nullptr;
  require(cudaStreamCreate(&stream), "stream");
  {
    const std::vector<MatrixShape> shapes = gpt(width);
    for (const std::size_t i : {std::size_t{0}, shapes.size() / 2, shapes.size() - 1}) {
      LowRankModel(shapes, kRank, stream).check(i);
    }
    LowRankModel model(shapes, kRank, stream);
    model.send_rows();
    std::puts("what,elems,tokens,median_us,slowest_us");
    // Times are those of both kinds of step together.
    const auto row = [&](const char* what, const std::function<void()>& both) {
      const Seconds seconds = time_of(stream, both);
      std::printf("acp(rank=%d) %s,%llu,,%.1f,%.1f\n", kRank, what, static_cast<unsigned long long>(model.elems()),
                  seconds.median / 2 * 1e6, seconds.slowest / 2 * 1e6);
      std::fflush(stdout);
    };
    row("step", [&] { model.send_cols(), model.send_rows(); });
    row("orthogonalise", [&] { model.orthogonalise_rows(), model.orthogonalise_cols(); });
    row("project", [&] { model.project_cols(), model.project_rows(); });
    row("keep pair", [&] { model.keep_sent(), model.keep_sent(); });
    row("reconstruct", [&] { model.reconstruct(), model.reconstruct(); });
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace cortado

int main(int argc, char** argv) {
  if (cortado::cuda_device_count() == 0) {
    std::puts("no CUDA device: nothing was measured");
    return 0;
  }
  cortado::run(argc > 1 ? std::atoll(argv[1]) : 1024);
}

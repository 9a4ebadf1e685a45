// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Data-parallel training in a C++ program with MPI: a linear model, fitted by gradient descent, whose gradients are
// averaged over all ranks: with ACP-SGD, another method, or as a plan says. Link cortado_mpi.
//
//   mpirun -n 4 mpi_least_squares                                    acp(rank=4)
//   mpirun -n 4 mpi_least_squares "topk(density=0.1)"                another method
//   mpirun -n 4 mpi_least_squares examples/mpi_least_squares.json    a plan: each tensor its own way
//
// Ends with 0 if the model was found and all ranks have the same bytes.
#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cortado/engine.h"
#include "cortado/mpi.h"
#include "cortado/plan.h"

namespace {

constexpr const char* kUsage =
    "usage: mpirun -n RANKS mpi_least_squares [METHOD | PLAN.json]\n"
    "  METHOD     how gradients travel: acp(rank=4), which is the default, topk(density=0.1) ...\n"
    "  PLAN.json  a plan for the tensors weight and bias; examples/mpi_least_squares.json is one for 4 ranks\n";

constexpr int kInputs = 48, kOutputs = 32, kSamples = 256, kSteps = 400;
constexpr float kLearningRate = 0.2f;

// Y = X W + b with W of rank 6, and the samples of this rank.
struct Problem {
  std::vector<float> weight, bias;
  std::vector<float> x, y;

  explicit Problem(int rank)
      : weight(kInputs * kOutputs), bias(kOutputs), x(kSamples * kInputs), y(kSamples * kOutputs) {
    std::mt19937 everybodys(1);
    std::normal_distribution<float> normal;
    for (int k = 0; k < 6; ++k) {
      std::vector<float> left(kInputs), right(kOutputs);
      for (float& value : left) value = normal(everybodys);
      for (float& value : right) value = normal(everybodys);
      for (int i = 0; i < kInputs; ++i) {
        for (int j = 0; j < kOutputs; ++j) weight[i * kOutputs + j] += left[i] * right[j] / 6;
      }
    }
    for (float& value : bias) value = normal(everybodys);
    std::mt19937 own(100 + static_cast<unsigned>(rank));
    for (float& value : x) value = normal(own);
    for (int s = 0; s < kSamples; ++s) predict(weight, bias, &x[s * kInputs], &y[s * kOutputs]);
  }

  static void predict(const std::vector<float>& weight, const std::vector<float>& bias, const float* in, float* out) {
    for (int j = 0; j < kOutputs; ++j) out[j] = bias[j];
    for (int i = 0; i < kInputs; ++i) {
      for (int j = 0; j < kOutputs; ++j) out[j] += in[i] * weight[i * kOutputs + j];
    }
  }

  // Gradients of the mean squared error over this rank's samples; returns the error.
  float gradients(const std::vector<float>& w, const std::vector<float>& b, std::vector<float>* dw,
                  std::vector<float>* db) const {
    dw->assign(w.size(), 0);
    db->assign(b.size(), 0);
    std::vector<float> out(kOutputs);
    float loss = 0;
    for (int s = 0; s < kSamples; ++s) {
      predict(w, b, &x[s * kInputs], out.data());
      for (int j = 0; j < kOutputs; ++j) {
        out[j] -= y[s * kOutputs + j];
        loss += out[j] * out[j] / kSamples;
        (*db)[j] += out[j] / kSamples;
      }
      for (int i = 0; i < kInputs; ++i) {
        for (int j = 0; j < kOutputs; ++j) (*dw)[i * kOutputs + j] += x[s * kInputs + i] * out[j] / kSamples;
      }
    }
    return loss;
  }
};

// The library never ends a program; this one ends the job at the first error, whichever rank has it.
void check(const cortado::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

template <typename T>
T unwrap(cortado::Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

std::unique_ptr<cortado::Engine> make_engine(const std::string& method, cortado::Communicator* communicator) {
  const std::vector<cortado::EngineTensor> tensors{{.name = "weight", .rows = kInputs, .cols = kOutputs},
                                                   {.name = "bias", .rows = 1, .cols = kOutputs, .dimensions = 1}};
  if (method.ends_with(".json")) {
    return unwrap(cortado::Engine::create(tensors, unwrap(cortado::load_plan(method)), {}, communicator));
  }
  return unwrap(cortado::Engine::create(tensors, unwrap(cortado::EngineOptions::parse(method)), communicator));
}

int train(const std::string& method) {
  const auto communicator = unwrap(cortado::make_mpi_communicator(MPI_Comm_c2f(MPI_COMM_WORLD)));
  const int rank = communicator->rank();
  const auto engine = make_engine(method, communicator.get());
  if (rank == 0) std::printf("%s\n", engine->describe().c_str());

  const Problem problem(rank);
  std::vector<float> weight(kInputs * kOutputs), bias(kOutputs), weight_gradient, bias_gradient;
  float loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    loss = problem.gradients(weight, bias, &weight_gradient, &bias_gradient);
    if (step % 100 == 0 && rank == 0) std::printf("step %3d  loss %.6f\n", step, loss);
    // As the backward pass would: what is ready first is submitted first, and travels meanwhile.
    check(engine->begin_step({}));
    const cortado::Gradient of_bias{.tensor = 1, .data = bias_gradient.data()};
    check(engine->submit({&of_bias, 1}));
    const cortado::Gradient of_weight{.tensor = 0, .data = weight_gradient.data()};
    check(engine->submit({&of_weight, 1}));
    unwrap(engine->finish_step());
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] -= kLearningRate * weight_gradient[i];
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] -= kLearningRate * bias_gradient[i];
  }

  double distance = 0, norm = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    distance += std::pow(weight[i] - problem.weight[i], 2);
    norm += std::pow(problem.weight[i], 2);
  }
  const double error = std::sqrt(distance / norm);
  const cortado::EngineReport report = engine->report();

  std::vector<float> of_root = weight;
  MPI_Bcast(of_root.data(), static_cast<int>(of_root.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int good = of_root == weight && error < 0.01 ? 1 : 0, all_good = 0;
  MPI_Allreduce(&good, &all_good, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("%d ranks, %s: ratio %.1f at a relative L2 error of the gradients of %.3f in the last step\n",
                report.world_size, report.spec.c_str(), report.ratio, report.relative_l2_error);
    std::printf("final loss %.2e, weights within %.2e of the true ones: %s\n", loss, error,
                all_good != 0 ? "found, the same on every rank" : "NOT FOUND, or ranks differ");
  }
  return all_good != 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string method = argc > 1 ? argv[1] : "acp(rank=4)";
  const bool asks = method == "--help" || method == "-h";
  if (asks || argc > 2) {
    std::fputs(kUsage, asks ? stdout : stderr);
    return asks ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  MPI_Init(&argc, &argv);
  const int code = train(method);
  MPI_Finalize();
  return code;
}

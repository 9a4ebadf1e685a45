// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Engine: averages the gradients of one training step over the ranks of a communicator, compressed as its options say.
//
//   auto engine = Engine::create(tensors, options, communicator).value();
//   each step:  engine->begin_step({});
//               engine->submit(gradients that became ready);      // any number of times, during the backward pass
//               engine->finish_step();                             // every gradient now holds the mean over ranks
//
// Every tensor must be submitted exactly once a step, on every rank; the order may differ between ranks, the
// collectives are started in one order that all ranks share. submit() encodes in the caller's thread (and the engine's
// own pool when options.threads > 1), starts the collectives that became complete and decodes those that have ended; it
// never waits for a peer. finish_step() waits. There is no background thread.
//
// An Engine is used by one thread at a time and must be gone before its communicator. After a fatal error each further
// call returns that error. In steady state no call allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cortado/communicator.h"
#include "cortado/plan.h"
#include "cortado/spec.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/trace.h"

namespace cortado {

struct EngineOptions {
  // ---- changes results ----
  enum class Method { kNone, kCast, kPower, kAcp, kCodec, kPlan };
  enum class Sides { kBoth, kAlternate };
  enum class Phase { kBalanced, kGlobal };
  enum class Rollback { kRounded, kExact };
  // What is done with what a codec lost. kAuto: kResidual, but kNone for lossless codecs, majority votes and codecs
  // that lose more than there was (unbiased sparsifiers). kDgc: momentum correction and masking of Deep Gradient
  // Compression; the optimiser's own momentum must be off.
  enum class Feedback { kAuto, kResidual, kDgc, kNone };

  Method method = Method::kAcp;
  std::string codec;               // kCodec: its specification; compositions are one codec. kPlan: which plan
  int rank = 4;                    // matrix rank of kPower and kAcp
  DType wire = DType::kFloat32;    // kPower, kAcp, kCast: dtype of what travels (factors and dense tensors)
  Sides sides = Sides::kBoth;      // kAcp. kBoth: both factors in every step, of half the rank each (rounded up);
                                   // kAlternate: one factor a step, as published. Equal bytes on average
  Phase phase = Phase::kBalanced;  // kGlobal: all tensors send the same side in a step, as published
  double min_compression_rate = kAutoRate;  // a matrix stays dense unless rows * cols > rate * rank * (rows + cols);
                                            // kCodec: unless its payload is by more than rate smaller than dense
  static constexpr double kAutoRate = -1;   // 2; kCodec: 1
  std::int64_t min_elems = 256;             // kCodec: smaller tensors stay dense
  int start_step = 2;                       // dense steps before the first compressed one
  std::vector<std::string> dense;           // tensor names, or prefixes ending in '*', that stay dense
  bool dense_embeddings = false;
  bool use_error_feedback = true;          // kPower, kAcp
  Feedback feedback = Feedback::kAuto;     // kCodec
  double momentum = 0.9;                   // of kDgc
  bool warm_start = true;                  // kPower, kAcp: reuse factors from step to step
  Rollback rollback = Rollback::kRounded;  // kExact: a second residual buffer, bit-exact undo of a non-finite step
  std::uint64_t random_seed = 0;
  double bucket_cap_mib = kAutoBucketCap;       // dense MiB a message may stand for, scaled to its compressed size;
                                                // 0: no fusion, one message a tensor
  static constexpr double kAutoBucketCap = -1;  // 25 with phase=global, as published; cast: as DDP's buckets; else by
                                                // latency

  // ---- changes only speed and failure handling ----
  int threads = 1;          // threads that encode and decode, the caller's included
  double timeout_s = 1800;  // of each wait for a collective
  bool overlap = true;      // false: nothing is encoded or sent before finish_step(), to measure what overlap gains

  // From one string ("acp(rank=4, start_step=0)", "topk(density=0.01, threads=2) | quant"): the engine's parameters
  // stand with those of the first codec. Errors name the parameter, the value and what was expected.
  static Result<EngineOptions> parse(std::string_view spec);

  // The string with every parameter that is not its default; parse(to_spec()) gives equal options.
  std::string to_spec() const;

  // The same without the options that change only speed and failure handling: what ranks and saved states must share.
  std::string results_spec() const;
};

// The parameters every method takes, for documentation and for `cortado codec list`.
const std::vector<Parameter>& engine_parameters();

struct EngineTensor {
  std::string name;  // unique and the same on all ranks
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;  // outermost dimension in memory; 1 for vectors
  std::int64_t cols = 0;
  int dimensions = 2;  // of the framework's tensor; fewer than 2 stay dense
  bool is_embedding = false;

  std::int64_t elems() const { return rows * cols; }
  std::int64_t size_bytes() const { return elems() * static_cast<std::int64_t>(dtype_bytes(dtype)); }
};

// Where a ready gradient lies: rows * cols dense elements of the tensor's dtype. Read, and overwritten with the mean,
// by submit() or finish_step(); must stay valid, and is the engine's alone, until finish_step() returns.
struct Gradient {
  std::uint32_t tensor = 0;
  void* data = nullptr;
};

struct StepContext {
  // Loss scale the gradients carry. Residuals are kept in unscaled units, so the scale may change between steps.
  double gradient_scale = 1.0;
  // True if the caller keeps an untouched copy of each local gradient until finish_step() returns and can hand it out
  // (LocalGradient). Then a message is decoded as soon as its collective ends; otherwise, with rollback=rounded, once
  // the step is known to be finite; gathered payloads also while finish_step() waits for others.
  bool keeps_local_gradients = false;
  // True: a tensor whose gradient is all zeros here sends nothing in this step and its residual waits. For frameworks
  // that drop what arrives for a parameter that no rank has used.
  bool holds_zero_gradients = false;
  // Engines on a device (cortado/cuda.h): the cudaStream_t that computes the gradients, and goes on with the means.
  void* device_stream = nullptr;
  // Likewise: where the loss scale, a float, lies on the device once that stream has done what it was given so far. In
  // place of gradient_scale; nobody waits for it before gradients have come. As it is until finish_step() returns.
  const void* device_gradient_scale = nullptr;
};

// The kept copy of the local gradient of a tensor; nullptr stands for all zeros. Called only to undo a non-finite step.
using LocalGradient = std::function<const void*(std::uint32_t tensor)>;

// A tensor or a step that did not travel as asked for, and why.
struct Fallback {
  std::string tensor;      // empty: the whole step
  std::string reason;      // "1-D", "min_compression_rate", "warm-up", "non-finite" ...
  std::int64_t count = 0;  // steps it happened in
};

struct TensorReport {
  std::string name;
  std::int64_t elems = 0;
  std::int64_t payload_bytes = 0;  // of the last step
  double relative_l2_error = 0;    // ||G + E - decoded(own)|| / ||G + E|| of this rank in the last compressed step
  bool compressed = false;
};

struct EngineReport {
  std::string spec;
  std::string communicator;
  int world_size = 1;
  std::int64_t steps = 0;
  std::int64_t passed_steps = 0;  // of these without this engine (AutoEngine::pass_step()); nothing is known of them
  std::int64_t non_finite_steps = 0;
  std::string last_non_finite;     // "step 12: layer.weight, rank 1"; empty when there was none
  std::int64_t payload_bytes = 0;  // handed to collectives in the last step, per rank
  std::int64_t dense_bytes = 0;    // of the gradients in their own dtypes
  double ratio = 1;                // dense_bytes / payload_bytes
  double relative_l2_error = 0;    // over the tensors that are rounded or projected, last step
  // Norm of what the last compressed step of this rank lost, in the units of its unscaled gradients: of its residuals,
  // but for tensors that sent nothing in it and steps that were undone.
  double residual_l2 = 0;
  std::int64_t messages = 0;                                             // collectives in the last step
  std::int64_t stage_ns[kStageCount] = {};                               // summed over all steps
  std::int64_t residual_bytes = 0, factor_bytes = 0, message_bytes = 0;  // memory held
  std::vector<TensorReport> tensors;
  std::vector<Fallback> fallbacks;
  std::string host_reason;  // why it encodes on the CPU, where gradients are on a device or a plan says gpu; else empty
};

// The state that a checkpoint must hold besides the model and the optimiser: per rank, keyed by tensor name.
// Of engines of a plan: what is kept where an option encodes (docs/schemes.md). Of low rank whose sides alternate, in
// "other_basis": the basis of the other side, which the step after the next projects on if nobody sends anything.
struct PlaceState {
  std::string name;
  std::int64_t begin = 0;  // element of the tensor
  std::vector<float> values;
};
struct TensorState {
  std::string name;
  std::vector<float> residual;  // rows * cols, materialised, in unscaled units; empty if none
  std::vector<float> basis;     // low rank: the factor the next step projects on
  std::vector<float> velocity;  // feedback=dgc: rows * cols
  std::vector<PlaceState> places = {};
};
struct EngineState {
  std::string spec;
  int world_size = 1;
  int rank = 0;
  std::int64_t step = 0;                                      // finite steps finished
  std::int64_t phase_step = 0;                                // finite compressed steps finished: decides the sides
  std::vector<std::vector<std::vector<std::string>>> layout;  // [phase][message][slot] = tensor name
  std::vector<TensorState> tensors;
};

// A tensor that should have the same bytes on every rank: a parameter of the model, say.
struct ReplicaTensor {
  std::string name;
  std::span<const std::byte> bytes;
};

struct StepOutcome {
  // false: some rank carried Inf or NaN; state is as before the step. Always true for kNone and on
  // one rank, where nothing is encoded and nothing looked at.
  bool finite = true;
};

class SchemeDevice;

class Engine {
 public:
  // Checks the options against the tensors, compares both over all ranks (a difference is kMismatch on every rank and
  // names the first one), allocates everything. `communicator`, `clock` and `trace` must outlive the engine.
  static Result<std::unique_ptr<Engine>> create(std::vector<EngineTensor> tensors, const EngineOptions& options,
                                                Communicator* communicator, const Clock* clock = steady_clock(),
                                                TraceRecorder* trace = nullptr);
  // The same for a plan: every bucket of it is one message and travels as its option says. The plan must be for as many
  // ranks, and have every tensor, of its size; else every rank gets the same error. Of `options` count random_seed and
  // timeout_s. Gradients are in host memory; `device` (create_cuda_scheme_device(), cortado/cuda.h) encodes and decodes
  // what the plan gives to a GPU. Without one, and where report() says why, the CPU does it, with the same results.
  static Result<std::unique_ptr<Engine>> create(std::vector<EngineTensor> tensors, const Plan& plan,
                                                const EngineOptions& options, Communicator* communicator,
                                                const Clock* clock = steady_clock(), TraceRecorder* trace = nullptr,
                                                std::shared_ptr<const SchemeDevice> device = nullptr);
  virtual ~Engine() = default;

  virtual Status begin_step(const StepContext& context) = 0;
  virtual Status submit(std::span<const Gradient> gradients) = 0;

  // Method kNone, and auto: `gradients` lie in one buffer of the caller's and fill it. The buffer is summed in place as
  // a whole, scaled by 1 / world_size before the sum (auto: while it runs dense; later as by submit()). Until
  // finish_step() returns it is in use by the communicator; to give up earlier, abandon() or destroy the engine first.
  // Of kNone errors name the gradients, which are used for nothing else.
  virtual Status submit_buffer(std::span<const Gradient> gradients, void* data, std::int64_t elems, DType dtype) = 0;

  virtual Result<StepOutcome> finish_step(const LocalGradient& local_gradient = {}) = 0;

  // Between steps: what the next step is called in errors, reports and events, where this engine takes over from
  // another one. Steps begin at 0; after load_state() they go on from the step of the state.
  virtual void set_first_step(std::int64_t step) = 0;

  // Gives up the step in hand after an error of the caller's; the engine can't be used afterwards.
  virtual void abandon(const std::string& why) = 0;

  virtual const EngineOptions& options() const = 0;
  virtual const std::vector<EngineTensor>& tensors() const = 0;
  virtual bool is_on_device() const { return false; }  // takes gradients in device memory (cortado/cuda.h)
  virtual EngineReport report() const = 0;
  virtual void set_trace(TraceRecorder* trace) = 0;  // nullptr: off
  virtual Trace trace() const = 0;                   // what has been recorded; no events without a recorder
  // The memory bill and what is compressed, as printed before the first step; one line each.
  virtual std::string describe() const = 0;

  // Engines of a plan, between steps: from the next step on another plan is executed. Every rank calls it at the same
  // step with the same plan, or all get kMismatch and go on as before. What residuals hold is carried over, by name.
  virtual Status switch_plan(const Plan& plan);

  // Compares a checksum of each tensor over all ranks. Every rank must call it, between the same steps, with the same
  // list. If some differ, every rank gets the same kMismatch, which names the step, the first tensor in the list, the
  // ranks whose tensor is not that of most, and the last step at which all were equal. That ends nothing: once the
  // tensors are equal again, training may go on. Costs one reading of the tensors and 8 bytes a tensor and rank.
  virtual Status check_replicas(std::span<const ReplicaTensor> tensors) = 0;

  // Between steps only. save_state materialises residuals in place (bits of later steps do not change).
  virtual Result<EngineState> save_state() = 0;
  // Another world size: residuals are dropped (set to zero), the rest is kept; returns a sentence that says so, or an
  // empty string. Names, shapes and options that change results must agree, else nothing is changed.
  virtual Result<std::string> load_state(const EngineState& state) = 0;
};

}  // namespace cortado

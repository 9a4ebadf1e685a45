// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Kfac: preconditions the gradients of a data-parallel step with Kronecker factors (K-FAC), each layer by the rank that
// owns it, and exchanges what the owners computed in few messages, compressed if asked.
//
//   auto kfac = Kfac::create(layers, options, communicator).value();
//   each step:  kfac->add_activations(layer, batch);        // in the forward pass, where update_factors
//               kfac->add_output_gradients(layer, batch);   // in the backward pass, likewise
//               kfac->reduce_gradients(gradients);          // only where nobody else averages them over ranks
//               kfac->step(hyperparameters, gradients);     // gradients are now preconditioned, the same on every rank
//
// Of a layer with a inputs (one more with a bias) and g outputs, X its activations (N x a, with a column of ones for
// the bias) and D the gradients of its outputs (N x g):
//
//   A <- decay A + (1 - decay) X^T X / N     G <- decay G + (1 - decay) D^T D / N     both begin as the identity
//   eigen     V = Q_G [ (Q_G^T W Q_A) / (d_G d_A^T + damping) ] Q_A^T   with A = Q_A diag(d_A) Q_A^T, d_A >= 0; G alike
//   cholesky  V = (G + damping I)^-1 W (A + damping I)^-1
//   gradient  V min(1, sqrt(kl_clip / |lr^2 sum over layers of <V, W>|))
//
// W is the gradient of the weight with that of the bias as last column (g x a). A convolution's X has a row for each
// image and position, its patch and the one divided by the number of positions; so has D. Groups are layers of their
// own. Source: KAISA (arXiv 2107.01739) and gpauloski/kfac-pytorch; DP-KFAC (arXiv 2206.15143); COMPSO (PPoPP 2025).
//
// Batches and gradients may be in the memory of a device (KfacOptions::device): then what touches them, and all large
// products, happen there, beside what its streams compute. Calls take the stream that computes what they are given
// (device_stream, a cudaStream_t; null: the default stream). add_activations() and add_output_gradients() do not wait;
// step() waits for the device where something must come to the host, and leaves its results in the order of that
// stream. Results are near those of the CPU. With MEM-OPT and DP-KFAC ranks may differ in where they work.
//
// A Kfac is used by one thread at a time, by all ranks in the same order, and must be gone before its communicator.
// After a fatal error each further call returns that error. Matrix products run in BLAS, so ranks that compute the same
// thing for themselves (COMM-OPT, HYBRID-OPT) get the same bytes on machines of one kind; with MEM-OPT and DP-KFAC
// every byte comes from one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/cluster.h"
#include "cortado/communicator.h"
#include "cortado/owner_gather.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/trace.h"

namespace cortado {

// ---- layers --------------------------------------------------------------------------------------------------------

// One dimension of a convolution's window.
struct KfacWindow {
  std::int64_t size = 1, stride = 1, dilation = 1;
  std::int64_t pad_before = 0, pad_after = 0;
};

// A linear layer, or a convolution over one dimension (the first window is {}) or two.
struct KfacLayer {
  std::string name;         // unique and the same on all ranks
  std::int64_t inputs = 0;  // of one group, without the bias: columns of the weight; channels x window for convolutions
  std::int64_t outputs = 0;  // of one group
  bool has_bias = false;
  std::int64_t groups = 1;
  bool is_convolution = false;
  KfacWindow window[2] = {};  // height, width

  std::int64_t channels() const { return inputs / (window[0].size * window[1].size); }  // of one group
  std::int64_t a_dim() const { return inputs + (has_bias ? 1 : 0); }
  std::int64_t g_dim() const { return outputs; }
  std::int64_t gradient_elems() const { return groups * a_dim() * g_dim(); }
};

// Numbers of values, summed over layers, of what K-FAC holds and sends.
struct KfacVolumes {
  std::int64_t gradient = 0;
  std::int64_t a = 0, g = 0;   // factors as full matrices
  std::int64_t triangles = 0;  // of both, as they travel
  std::int64_t eigenvectors = 0, eigenvalues = 0;
  std::int64_t eigenvalue_products = 0;  // d_G d_A^T, which others send in place of eigenvalues
};
KfacVolumes kfac_volumes(std::span<const KfacLayer> layers);

// ---- assignment ----------------------------------------------------------------------------------------------------

// Ranks form a grid: `columns` columns of `workers` ranks each, rank r in column r % columns and row r / columns. The
// ranks of a layer's column are its gradient workers: they hold its inverses and precondition its gradient. Each of
// them sends the result to the other ranks of its row.
struct KfacGrid {
  int workers = 1;
  int columns = 1;

  int column_of(int rank) const { return rank % columns; }
  int row_of(int rank) const { return rank / columns; }
};

struct KfacWork {
  double a = 0, g = 0;  // cost of the inverses of the two factors, in any unit
};

struct KfacPlacement {
  int column = 0;
  int a_rank = 0, g_rank = 0;  // which rank of that column inverts A, and G

  bool operator==(const KfacPlacement&) const = default;
};

// Longest work first, ties by index; each layer goes to the column with the least load, and there to the rank with the
// least (both factors, or with colocate = false one after the other). Pure.
std::vector<KfacPlacement> assign_layers(std::span<const KfacWork> layers, const KfacGrid& grid, bool colocate);

// ---- options -------------------------------------------------------------------------------------------------------

enum class KfacStrategy : std::uint8_t {
  kCommOpt,    // every rank is gradient worker of all layers: factors and inverses travel, gradients don't
  kHybridOpt,  // `workers` gradient workers for each layer
  kMemOpt,     // one gradient worker for each layer: factors and preconditioned gradients travel
  kDpKfac,     // as kMemOpt, but the factors are those of the worker's own batch and don't travel
};
std::string_view kfac_strategy_name(KfacStrategy strategy);  // "COMM-OPT" ...

enum class KfacInverse : std::uint8_t { kEigen, kCholesky };

class KfacInverter;  // who inverts factors: src/kfac/inverter.h
class KfacDevice;    // where batches and gradients are, if not in host memory: src/kfac/kfac_device.h

struct KfacOptions {
  KfacStrategy strategy = KfacStrategy::kCommOpt;
  int workers = 0;  // kHybridOpt: a divisor of the world size
  KfacInverse inverse = KfacInverse::kEigen;
  // Damping split between the factors: A + pi sqrt(damping) I and G + sqrt(damping) / pi I, pi^2 = mean eigenvalue of A
  // over that of G.
  bool pi_correction = false;
  bool colocate_factors = true;  // one rank inverts both factors of a layer
  bool balance_memory = false;   // assignment by n^2 instead of n^3

  // Codec, feedback and aggregation of preconditioned gradients. What feedback adds is scaled with them, by the
  // kl_clip of the step in which it comes, and not counted in it.
  OwnerGatherOptions gradients;
  std::string factor_compression = "none";  // codec of factors, and of eigenvectors or inverses
  // In words, what else ranks must have in common: "factors every 5 steps, inverses every 50". Compared at the start;
  // ranks that do not update in the same steps would wait for each other's collectives.
  std::string schedule = {};
  double timeout_s = 1800;                 // of each wait for a collective
  int threads = 1;                         // that invert factors, the caller's included; results do not depend on it
  std::shared_ptr<KfacInverter> inverter;  // null: `device`, or these threads; a CUDA device: cortado/kfac_cuda.h
  std::shared_ptr<KfacDevice> device;      // null: host memory; a CUDA device: cortado/kfac_cuda.h

  // With "auto" as one of the two codecs: before the first message of a kind, and after 1000, 10,000, ... of them, each
  // rank encodes what it is about to send with every candidate, and rank 0 predicts from these sizes and from its
  // cluster what the message takes. If the shortest saves at least min_gain of the uncompressed message, the next 6 (24
  // where neither takes half of the other) are on trial, three with it and three without in turns, and it stays if it
  // has saved as much by the clock: so two runs need not decide alike, but all ranks do.
  std::vector<std::string> candidates = {"compso(bound=0.004)", "compso(bound=0.004, coder=none)"};
  std::optional<Cluster> cluster;
  double min_gain = 0.2;  // less is not seen in a step, and costs accuracy all the same
};

// May change from step to step; the same on all ranks, which step() compares.
struct KfacHyperparameters {
  double factor_decay = 0.95;
  double damping = 1e-3;
  double kl_clip = 1e-3;  // 0: off
  double lr = 0.1;
  bool update_factors = true;
  bool update_inverses = true;
};

// ---- data ----------------------------------------------------------------------------------------------------------

// Dense and contiguous: rows x features for a linear layer, images x channels x height x width for a convolution (of
// all groups). fp32, fp16 or bf16.
struct KfacBatch {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t count = 0;  // rows, or images
  std::int64_t height = 1, width = 1;
  void* device_stream = nullptr;  // that has computed it
};

// Gradients of a layer's parameters, dense and row-major, overwritten with what they become. A null weight stands for a
// layer that no rank has used in this step: it counts as zero and nothing is written.
struct KfacGradient {
  void* weight = nullptr;  // groups x outputs x inputs
  void* bias = nullptr;    // groups x outputs
  DType dtype = DType::kFloat32;
};

struct KfacOutcome {
  // false: some gradient was Inf or NaN on some rank, or became so on its way (cast(fp16) overflows from 65520 on,
  // but not where gradients are kept as fp16);
  // gradients are as they were and no residual has changed.
  bool finite = true;
  double scale = 1;  // by kl_clip
};

// ---- report and state ----------------------------------------------------------------------------------------------

enum class KfacStage : std::uint8_t {
  kFactors,          // products of activations and of output gradients
  kReduceFactors,    // their sums over ranks, encoding and decoding included
  kInverses,         // eigenvectors or inverses
  kGatherInverses,   // to the other gradient workers
  kReduceGradients,  // reduce_gradients()
  kPrecondition,
  kEncode,  // preconditioned gradients
  kGather,
  kDecode,
  kApply,  // clip, and write to the gradients
};
constexpr int kKfacStageCount = 10;
std::string_view kfac_stage_name(KfacStage stage);  // "factors" ...

// One kind of message. Bytes are what this rank handed over in the last such message: its own share of a gather, all it
// contributed to a sum.
struct KfacTraffic {
  std::int64_t messages = 0;     // since the start
  std::int64_t collectives = 0;  // of the last message
  std::int64_t payload_bytes = 0, dense_bytes = 0;
  double relative_l2_error = 0;
};

// Something that was not done as asked, and why.
struct KfacFallback {
  std::string layer;  // empty: of a message of all layers
  std::string reason;
  std::int64_t count = 0;
};

// How "auto" lets one kind of message travel, and why. Times are of one message, from encoding to decoding, and where
// they are of a compressed one of the candidate that is predicted to be the shortest, taken or not. Measured ones are
// medians over the messages on trial, which all ranks begin together, of the time of the rank that takes longest.
struct KfacChoice {
  std::string message;         // "factors", "inverses" or "gradients"
  std::string codec = "none";  // of the last message; "none" also where it declines, or has not decided yet
  std::int64_t aggregate = 0;
  std::int64_t predicted_ns = 0, predicted_uncompressed_ns = 0;  // 0: not yet, or no candidate
  std::int64_t measured_ns = 0, measured_uncompressed_ns = 0;    // 0: not yet, or not tried
  std::string reason;                                            // empty: no message yet
};

struct KfacReport {
  std::int64_t steps = 0;
  std::int64_t non_finite_steps = 0;
  std::int64_t stage_ns[kKfacStageCount] = {};  // sums over all steps
  KfacTraffic factors, inverses, gradients, reduced_gradients;
  std::vector<KfacFallback> fallbacks;
  std::vector<KfacChoice> choices;  // of the messages whose codec is chosen
};

struct KfacMemory {                // of the host and, with KfacOptions::device, of the device
  std::int64_t factors_bytes = 0;  // running averages this rank holds
  std::int64_t batch_bytes = 0;    // what add_activations() and add_output_gradients() add up in
  std::int64_t inverses_bytes = 0;
  std::int64_t gradients_bytes = 0;  // as matrices
  std::int64_t exchange_bytes = 0;   // messages and residuals
  std::int64_t scratch_bytes = 0;
  std::int64_t total_bytes() const {
    return factors_bytes + batch_bytes + inverses_bytes + gradients_bytes + exchange_bytes + scratch_bytes;
  }
};

// What a checkpoint must hold of one layer on one rank. Lists are empty where this rank does not hold it.
struct KfacLayerState {
  std::string name;
  std::vector<float> a_factor, g_factor;    // groups x triangle
  std::vector<float> a_inverse, g_inverse;  // groups x dim x dim: eigenvectors as rows, or inverses
  std::vector<float> a_eigenvalues, g_eigenvalues;
  std::vector<float> residual;  // of the preconditioned gradient, g x a for each group
};
struct KfacState {
  std::string strategy;  // and the other options it was saved with, for people: loading takes any
  int world_size = 1;
  int rank = 0;
  std::int64_t step = 0;
  std::vector<KfacLayerState> layers;
};

class Kfac {
 public:
  // Checks layers and options, compares both over all ranks (kMismatch on every rank names the first difference), makes
  // the sub-groups and allocates.
  static Result<std::unique_ptr<Kfac>> create(std::vector<KfacLayer> layers, const KfacOptions& options,
                                              Communicator* communicator, const Clock* clock = steady_clock());
  virtual ~Kfac() = default;

  // False where the factors of a layer are another rank's alone (DP-KFAC): its batches need not be added.
  virtual bool wants_batches(std::size_t layer) const = 0;

  // Several in one step (micro-batches, a layer that is called twice) are averaged. `scale`: what the loss, and so the
  // output gradients, were multiplied by. Memory on a device is read later: it must stay as it is until step() or
  // release_batches() has returned, and may then change in the order of the stream that these were given.
  virtual Status add_activations(std::size_t layer, const KfacBatch& batch) = 0;
  virtual Status add_output_gradients(std::size_t layer, const KfacBatch& batch, double scale = 1) = 0;
  virtual void reset_batch() = 0;  // forgets what was added since the last step
  virtual Status release_batches(void* device_stream) = 0;

  // Averages the gradients of this rank's micro-batches over all ranks, where the next step() needs them: on the
  // gradient workers of each layer. Elsewhere they stay as they are.
  virtual Status reduce_gradients(std::span<const KfacGradient> gradients, void* device_stream = nullptr) = 0;

  // Preconditions. `gradients` has one entry a layer, averaged over ranks (by the caller, or by reduce_gradients()).
  // Begins with a comparison over all ranks of the values, the step, the codecs and which layers have gradients (one
  // all-gather of 8 bytes a rank): kMismatch on all of them where they differ, before anything is sent that another
  // rank may not expect.
  virtual Result<KfacOutcome> step(const KfacHyperparameters& values, std::span<const KfacGradient> gradients,
                                   void* device_stream = nullptr) = 0;

  // From the next step on the codec of preconditioned gradients, the same on all ranks, as that step compares;
  // kFailedPrecondition where it is "auto".
  virtual Status set_compression(std::string_view spec) = 0;
  // The same of factors, and of eigenvectors or inverses.
  virtual Status set_factor_compression(std::string_view spec) = 0;

  // From the next step on the candidates of "auto", as many as at first, each of the same codec as the one that was in
  // its place then, and as fast where the cluster has no times of it. What is decided, or on trial, goes on with the
  // one in the same place. kFailedPrecondition without "auto".
  virtual Status set_candidates(const std::vector<std::string>& candidates) = 0;

  virtual const std::vector<KfacLayer>& layers() const = 0;
  virtual const std::vector<KfacPlacement>& placements() const = 0;
  virtual const KfacGrid& grid() const = 0;
  virtual std::int64_t steps() const = 0;
  virtual KfacReport report() const = 0;
  virtual KfacMemory memory() const = 0;

  // Between steps. Loading takes of each layer what it finds in one or several states (those of all ranks of a job of
  // another world size or strategy, in any order) and returns a sentence about what it did not find and began anew, or
  // an empty string. Inverses that are not there, or of the other kind, are computed from the factors in the next step.
  // Those that are still to be computed so are not saved. All ranks load at the same point; if a state does not fit on
  // one of them, or a factor or residual has an Inf or NaN, all get an error and nothing has changed.
  virtual KfacState save_state(bool with_inverses = true) const = 0;
  virtual Result<std::string> load_state(std::span<const KfacState> states) = 0;
};

}  // namespace cortado

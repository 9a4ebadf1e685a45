// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// OwnerGather: tensors that one rank each has computed reach all ranks, compressed, in one message a rank: one
// all-gather, and a second one where payloads of varying size have outgrown what the step before left room for (at
// first always). For K-FAC's preconditioned gradients and eigenvectors, and for other optimisers whose matrices have
// owners (Shampoo, Muon).
//
//   auto gather = OwnerGather::create(tensors, {.codec = "compso(bound=4e-3)"}, communicator).value();
//   each step:  every rank fills the tensors it owns;  gather->run(step, addresses);  every tensor is the same on every
//   rank
//
// The owner uses the decoded value too, so all ranks hold the same bytes, whatever the codec loses; with a lossless
// codec (compso(bound=0), float_rans) those of `none`. With use_error_feedback an owner adds to a tensor what encoding
// it has lost so far: the sum of what everyone got differs from the sum of the tensors by the last loss only. A tensor
// that is all zeros in a step, as that of a layer which nobody used, is sent as it is, and stays owed what it was.
//
// An OwnerGather is used by one thread at a time, by all ranks in the same order, and must be gone before its
// communicator. After a fatal error each further call returns that error. It allocates while payloads grow.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cortado/communicator.h"
#include "cortado/status.h"
#include "cortado/tensor_view.h"
#include "cortado/trace.h"

namespace cortado {

struct OwnedTensor {
  std::string name;  // unique and the same on all ranks
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  int owner = 0;          // rank that computes it
  bool is_exact = false;  // travels without loss whatever the codec (eigenvalues)
};

struct OwnerGatherOptions {
  std::string codec = "none";
  bool use_error_feedback = false;
  std::int64_t aggregate = 0;  // tensors of one table of codes with `compso`; 0: all of a rank
  std::uint64_t random_seed = 0;
  double timeout_s = 1800;  // of each wait for a collective
};

// A few bytes that travel with a rank's tensors.
struct OwnerNote {
  double value = 0;
  std::uint64_t flags = 0;
};

struct OwnerGatherReport {
  std::int64_t steps = 0;
  std::int64_t payload_bytes = 0;      // this rank's own tensors in the last step
  std::int64_t dense_bytes = 0;        // of the same
  std::int64_t all_payload_bytes = 0;  // of all ranks
  std::int64_t all_dense_bytes = 0;
  std::int64_t collectives = 0;  // in the last step
  double relative_l2_error = 0;  // of this rank's tensors in the last step, what was added by feedback included
  // Whether all that ranks gave and got in the last step is finite, the same on all of them: a codec may overflow
  // (cast(fp16) from 65520 on). If not, residuals and the error are those of the step before. One rank: true.
  bool finite = true;
  std::int64_t encode_ns = 0, gather_ns = 0, decode_ns = 0;  // sums over all steps
  std::int64_t memory_bytes = 0, residual_bytes = 0;
};

// What an owner still owes of a tensor; empty if nothing.
struct OwnerResidual {
  std::string name;
  std::vector<float> values;
};

class OwnerGather {
 public:
  // Checks the tensors and the codec, compares both over all ranks (kMismatch on every rank names the first
  // difference). Tensors are fp32, fp16 or bf16.
  static Result<std::unique_ptr<OwnerGather>> create(std::vector<OwnedTensor> tensors,
                                                     const OwnerGatherOptions& options, Communicator* communicator,
                                                     const Clock* clock = steady_clock());
  virtual ~OwnerGather() = default;

  // From the next step on; on all ranks in the same step, else that step ends with kMismatch. Residuals are kept.
  // `aggregate` as in the options; not given: as before.
  virtual Status set_codec(std::string_view spec, std::optional<std::int64_t> aggregate = {}) = 0;

  // data[i] is the address of tensor i, dense and row-major: read where this rank is the owner, written everywhere.
  // `step` keys the random numbers and must be the same on all ranks, else kMismatch. `notes` (empty, or one a rank)
  // gets the notes of all ranks. Where a tensor is not finite, so is what every rank gets for it, and no residual of
  // any rank changes.
  virtual Status run(std::uint64_t step, std::span<void* const> data, const OwnerNote& own_note = {},
                     std::span<OwnerNote> notes = {}) = 0;

  virtual const std::vector<OwnedTensor>& tensors() const = 0;
  virtual OwnerGatherReport report() const = 0;

  // Residuals of the tensors this rank owns. Loading takes those it finds by name and sets the others to zero; sizes
  // must agree. One rank loses nothing and keeps none: it saves zeros.
  virtual std::vector<OwnerResidual> save_residuals() const = 0;
  virtual Status load_residuals(const std::vector<OwnerResidual>& residuals) = 0;
};

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "codec/sparse.h"

#include "core/check.h"

namespace cortado {

namespace {

Status check_sparse(const Codec& codec, const char* call, ConstTensorView view) {
  if (sparse_elems(view.rows, view.cols).has_value() && (view.data != nullptr || view.elems() == 0)) return {};
  return make_error(StatusCode::kInvalidArgument, "%s: %s of %lld x %lld: expected a tensor in memory",
                    codec.spec().c_str(), call, static_cast<long long>(view.rows), static_cast<long long>(view.cols));
}

Status check_room(const Codec& codec, const char* name, std::uint64_t room, std::uint64_t needed) {
  if (room >= needed) return {};
  return make_error(StatusCode::kInvalidArgument, "%s: select: room for %llu %s, expected at least %llu",
                    codec.spec().c_str(), static_cast<unsigned long long>(room), name,
                    static_cast<unsigned long long>(needed));
}

}  // namespace

Status check_select(const Codec& codec, ConstTensorView input, std::span<const float> values,
                    std::span<const std::byte> index, std::span<const std::byte> scratch) {
  CORTADO_RETURN_IF_ERROR(check_sparse(codec, "select", input));
  const Sparsifier& sparsifier = *codec.sparsifier();
  const auto max_kept = static_cast<std::uint64_t>(sparsifier.max_kept(input.rows, input.cols));
  CORTADO_RETURN_IF_ERROR(check_room(codec, "values", values.size(), max_kept));
  CORTADO_RETURN_IF_ERROR(
      check_room(codec, "bytes of index", index.size(), sparsifier.max_index_bytes(input.rows, input.cols)));
  return check_room(codec, "bytes of scratch", scratch.size(),
                    sparsifier.select_scratch_bytes(input.rows, input.cols, input.dtype));
}

Status check_scatter(const Codec& codec, std::span<const float> values, TensorView output) {
  CORTADO_RETURN_IF_ERROR(check_sparse(codec, "scatter", output));
  const std::int64_t max_kept = codec.sparsifier()->max_kept(output.rows, output.cols);
  if (values.size() <= static_cast<std::uint64_t>(max_kept)) return {};
  return make_error(StatusCode::kInvalidArgument, "%s: scatter of %zu values, expected at most %lld",
                    codec.spec().c_str(), values.size(), static_cast<long long>(max_kept));
}

}  // namespace cortado

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/job.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/check.h"
#include "core/checked_math.h"
#include "core/format.h"
#include "cortado/cluster.h"
#include "cortado/codec.h"
#include "profile/places.h"

namespace cortado {

namespace {

// Sums of bytes over any number of tensors that fit into memory stay far below 2^63.
constexpr std::int64_t kMaxTensorElems = std::int64_t{1} << 48;

Status check_shape(const std::string& place, const JobTensor& tensor) {
  std::int64_t elems = 1;
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    const std::int64_t extent = tensor.shape[d];
    if (extent < 0) return refuse(place_of(place + ".shape", d), "a dimension of at least 0", std::to_string(extent));
    // Whatever is beside a 0: cols() multiplies without it.
    const std::optional<std::int64_t> product = checked_mul(elems, std::max<std::int64_t>(extent, 1));
    if (!product.has_value() || *product > kMaxTensorElems) {
      return refuse(place + ".shape", "at most 2^48 elements", "more");
    }
    elems = *product;
  }
  return {};
}

Status check_errors(const std::string& place, const JobTensor& tensor) {
  if (tensor.rms.has_value() && !(std::isfinite(*tensor.rms) && *tensor.rms >= 0)) {
    return refuse(place + ".rms", "a number of at least 0", number_text(*tensor.rms));
  }
  std::set<std::string> codecs;
  for (const MeasuredError& error : tensor.errors) {
    const std::string where = field_of(place + ".errors", error.codec);
    if (!codecs.insert(canonical_codec(error.codec)).second) {
      return refuse(where, "each codec once", "it again, perhaps in another spelling");
    }
    if (!(std::isfinite(error.relative_l2) && error.relative_l2 >= 0)) {
      return refuse(where, "a number of at least 0", number_text(error.relative_l2));
    }
  }
  return {};
}

Status check_time(const char* place, const std::optional<std::int64_t>& time_ns) {
  if (!time_ns.has_value()) return {};
  return check_range(place, *time_ns, 0, kMaxNs, "nanoseconds");
}

}  // namespace

std::int64_t JobTensor::rows() const { return shape.size() > 1 ? shape[0] : 1; }

std::int64_t JobTensor::cols() const {
  std::int64_t cols = 1;
  for (std::size_t d = shape.size() > 1 ? 1 : 0; d < shape.size(); ++d) cols *= shape[d];
  return cols;
}

std::int64_t Job::backward_end_ns() const {
  return backward_ns.value_or(tensors.empty() ? 0 : tensors.back().ready_ns);
}

Status Job::check() const {
  CORTADO_RETURN_IF_ERROR(check_time("$.forward_ns", forward_ns));
  CORTADO_RETURN_IF_ERROR(check_time("$.backward_ns", backward_ns));
  CORTADO_RETURN_IF_ERROR(check_time("$.optimizer_ns", optimizer_ns));
  if (tensors.empty()) return refuse("$.tensors", "at least one tensor", "none");
  std::set<std::string> names;
  std::int64_t before = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const JobTensor& tensor = tensors[i];
    const std::string place = place_of("$.tensors", i);
    if (tensor.name.empty()) return refuse(place + ".name", "a name", "an empty one");
    if (!names.insert(tensor.name).second) {
      return refuse(place + ".name", "each tensor once", "\"" + tensor.name + "\" again");
    }
    CORTADO_RETURN_IF_ERROR(check_shape(place, tensor));
    CORTADO_RETURN_IF_ERROR(check_range(place + ".ready_ns", tensor.ready_ns, 0, kMaxNs, "nanoseconds"));
    if (tensor.ready_ns < before) {
      return refuse(place + ".ready_ns", "at least that of the tensor before, " + std::to_string(before),
                    std::to_string(tensor.ready_ns));
    }
    before = tensor.ready_ns;
    CORTADO_RETURN_IF_ERROR(check_errors(place, tensor));
  }
  if (backward_ns.has_value() && *backward_ns < before) {
    return refuse("$.backward_ns", "at least the last ready_ns, " + std::to_string(before),
                  std::to_string(*backward_ns));
  }
  return {};
}

}  // namespace cortado

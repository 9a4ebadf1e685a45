// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Of cortado._core: what a job and a cluster take, measured; and their files.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "cortado/auto.h"
#include "cortado/calibrate.h"
#include "cortado/codec.h"
#include "cortado/device_library.h"
#include "cortado/job.h"
#include "python/binding.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace cortado_python;

namespace {

using cortado::Result;
using cortado::Status;

std::string calibrate(nb::object group, int rank, int world_size, const std::string& group_name,
                      const std::vector<std::string>& codecs, double budget_s, const std::string& name,
                      const std::string& transport_version, const std::optional<std::string>& known,
                      const std::optional<nb::callable>& note, const std::optional<nb::callable>& progress,
                      const std::optional<std::string>& device_library, int device,
                      const std::optional<nb::callable>& computation) {
  PyCommunicator communicator(std::move(group), rank, world_size, group_name);
  cortado::CalibrateOptions options;
  options.name = name;
  options.codecs = codecs;
  options.budget_s = budget_s;
  options.transport_version = transport_version;
  if (known.has_value()) options.known = unwrap(cortado::cluster_from_json(*known));
  // Nothing may be thrown through the library. An error of who is only told is printed, and ends nothing; a Ctrl-C
  // comes again, in the next function of the communicator.
  const auto tell = [](const auto& call) {
    nb::gil_scoped_acquire gil;
    try {
      call();
    } catch (nb::python_error& raised) {
      if (raised.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        raised.discard_as_unraisable("a function given to calibrate()");
      }
    }
  };
  if (note.has_value()) {
    options.note = [&](const std::string& line) { tell([&] { (*note)(line); }); };
  }
  if (progress.has_value()) {
    options.progress = [&](double done, const std::string& next) { tell([&] { (*progress)(done, next); }); };
  }
  if (computation.has_value()) {
    options.device_computation = [&]() -> Status {
      nb::gil_scoped_acquire gil;
      try {
        (*computation)();
        return {};
      } catch (nb::python_error& raised) {
        return {cortado::StatusCode::kIoError, text_of(raised)};
      }
    };
  }
  const cortado::DeviceLibrary* library = nullptr;
  if (device_library.has_value()) {
    library = unwrap(cortado::load_device_library(*device_library));
    if (library->create_scheme_device == nullptr) {
      raise({cortado::StatusCode::kUnsupported, *device_library + " has no codecs"});
    }
  }
  const CurrentDevice current(library);
  if (library != nullptr) options.device = library->create_scheme_device(device);
  return cortado::cluster_to_json(
      unwrapped_without_gil([&] { return cortado::calibrate(communicator.get(), options); }));
}

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// What `spec` loses of a matrix: |decoded - matrix| / |matrix|.
Result<double> relative_error(const std::string& spec, const Matrix& matrix) {
  const Result<std::unique_ptr<cortado::Codec>> made = cortado::make_codec(spec);
  if (!made.ok()) return made.status();
  const cortado::Codec& codec = *made.value();
  const auto rows = static_cast<std::int64_t>(matrix.shape(0)), cols = static_cast<std::int64_t>(matrix.shape(1));
  constexpr cortado::DType kFloat = cortado::DType::kFloat32;
  std::vector<std::byte> payload(codec.max_payload_bytes(rows, cols, kFloat));
  std::vector<std::byte> scratch(codec.scratch_bytes(rows, cols, kFloat));
  const Result<std::uint64_t> bytes = codec.encode({matrix.data(), kFloat, rows, cols}, {}, payload, scratch);
  if (!bytes.ok()) return bytes.status();
  std::vector<float> decoded(static_cast<std::size_t>(rows * cols));
  const Status status =
      codec.decode(std::span(payload).first(bytes.value()), {decoded.data(), kFloat, rows, cols}, scratch);
  if (!status.ok()) return status;
  double squares = 0, lost = 0;
  for (std::size_t i = 0; i < decoded.size(); ++i) {
    const double value = matrix.data()[i], difference = decoded[i] - value;
    squares += value * value;
    lost += difference * difference;
  }
  return squares > 0 ? std::sqrt(lost / squares) : 0.0;
}

}  // namespace

namespace cortado_python {

void bind_profiles(nb::module_& m) {
  m.def("calibrate", &calibrate, "group"_a.none(), "rank"_a, "world_size"_a, "group_name"_a, "codecs"_a, "budget_s"_a,
        "name"_a, "transport_version"_a, "known"_a = nb::none(), "note"_a = nb::none(), "progress"_a = nb::none(),
        "device_library"_a = nb::none(), "device"_a = 0, "computation"_a = nb::none(),
        "Every rank: the text of a cluster file (cortado.cluster/1).");
  m.def(
      "relative_error",
      [](const std::string& spec, const Matrix& matrix) {
        return unwrapped_without_gil([&] { return relative_error(spec, matrix); });
      },
      "spec"_a, "matrix"_a, "What a codec loses of a float32 matrix, as a share of its norm.");
  m.def(
      "auto_codecs", [] { return cortado::auto_codecs(cortado::Quality::kAggressive); },
      "The codecs of all settings that auto knows.");
  m.def(
      "auto_settings",
      [] {
        nb::list settings;
        for (const cortado::AutoSetting& setting : cortado::auto_settings()) {
          settings.append(
              nb::make_tuple(setting.spec, std::string(cortado::quality_name(setting.quality)), setting.evidence));
        }
        return settings;
      },
      "What auto knows: specification, the quality from which on it may be used, and why.");
  m.def(
      "canonical_job", [](const std::string& json) { return job_to_json(unwrap(cortado::job_from_json(json))); },
      "json"_a, "Checks the text of a job file and returns it as cortado writes it.");
  m.def(
      "canonical_cluster",
      [](const std::string& json) { return cluster_to_json(unwrap(cortado::cluster_from_json(json))); }, "json"_a,
      "Checks the text of a cluster file and returns it as cortado writes it.");
  m.def(
      "save_job",
      [](const std::string& json, const nb::bytes& path) {
        check(cortado::save_job(unwrap(cortado::job_from_json(json)), {path.c_str(), path.size()}));
      },
      "json"_a, "path"_a);
  m.def(
      "save_cluster",
      [](const std::string& json, const nb::bytes& path) {
        check(cortado::save_cluster(unwrap(cortado::cluster_from_json(json)), {path.c_str(), path.size()}));
      },
      "json"_a, "path"_a);
}

}  // namespace cortado_python

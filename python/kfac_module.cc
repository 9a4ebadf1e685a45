// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// cortado._core.Kfac and OwnerGather: include/cortado/kfac.h and owner_gather.h for Python.
#include "cortado/kfac.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cortado/device_library.h"
#include "cortado/owner_gather.h"
#include "python/binding.h"

namespace cortado_python {

using namespace nb::literals;

namespace {

using cortado::Kfac;
using cortado::KfacLayer;
using cortado::OwnerGather;

void* address(std::uintptr_t value) { return reinterpret_cast<void*>(value); }

// (name, inputs, outputs, has_bias, groups, windows); windows: None, or (size, stride, dilation, before, after) each of
// height and width.
using LayerTuple = std::tuple<
    std::string, std::int64_t, std::int64_t, bool, std::int64_t,
    std::optional<std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>>>>;

KfacLayer layer_of(const LayerTuple& tuple) {
  const auto& [name, inputs, outputs, has_bias, groups, windows] = tuple;
  KfacLayer layer{.name = name, .inputs = inputs, .outputs = outputs, .has_bias = has_bias, .groups = groups};
  if (!windows.has_value()) return layer;
  if (windows->size() != 2) throw nb::value_error("windows of height and width are expected");
  layer.is_convolution = true;
  for (std::size_t d = 0; d < 2; ++d) {
    const auto [size, stride, dilation, before, after] = (*windows)[d];
    layer.window[d] = {size, stride, dilation, before, after};
  }
  return layer;
}

cortado::KfacStrategy strategy_of(const std::string& name) {
  using enum cortado::KfacStrategy;
  for (const cortado::KfacStrategy strategy : {kCommOpt, kHybridOpt, kMemOpt, kDpKfac}) {
    if (name == cortado::kfac_strategy_name(strategy)) return strategy;
  }
  throw nb::value_error(("unknown strategy " + name).c_str());
}

// (address of the weight's gradient, of the bias's, dtype); 0: not there.
using GradientTuple = std::tuple<std::uintptr_t, std::uintptr_t, int>;

std::vector<cortado::KfacGradient> gradients_of(const std::vector<GradientTuple>& tuples) {
  std::vector<cortado::KfacGradient> gradients;
  for (const auto& [weight, bias, dtype] : tuples) {
    gradients.push_back({address(weight), address(bias), static_cast<cortado::DType>(dtype)});
  }
  return gradients;
}

nb::dict to_dict(const cortado::KfacTraffic& traffic) {
  nb::dict entry;
  entry["messages"] = traffic.messages;
  entry["collectives"] = traffic.collectives;
  entry["payload_bytes"] = traffic.payload_bytes;
  entry["dense_bytes"] = traffic.dense_bytes;
  entry["relative_error"] = traffic.relative_l2_error;
  return entry;
}

// The lists of a layer's state and their names.
struct StateList {
  const char* name;
  std::vector<float> cortado::KfacLayerState::*list;
};
constexpr std::array<StateList, 7> kStateLists = {{
    {"a_factor", &cortado::KfacLayerState::a_factor},
    {"g_factor", &cortado::KfacLayerState::g_factor},
    {"a_inverse", &cortado::KfacLayerState::a_inverse},
    {"g_inverse", &cortado::KfacLayerState::g_inverse},
    {"a_eigenvalues", &cortado::KfacLayerState::a_eigenvalues},
    {"g_eigenvalues", &cortado::KfacLayerState::g_eigenvalues},
    {"residual", &cortado::KfacLayerState::residual},
}};

cortado::KfacState state_of(const nb::dict& dict) {
  cortado::KfacState state{.strategy = nb::cast<std::string>(dict["strategy"]),
                           .world_size = nb::cast<int>(dict["world_size"]),
                           .rank = nb::cast<int>(dict["rank"]),
                           .step = nb::cast<std::int64_t>(dict["step"]),
                           .layers = {}};
  for (auto [name, entry] : nb::cast<nb::dict>(dict["layers"])) {
    cortado::KfacLayerState layer;
    layer.name = nb::cast<std::string>(name);
    const nb::dict lists = nb::cast<nb::dict>(entry);
    for (const StateList& list : kStateLists) {
      if (lists.contains(list.name)) layer.*(list.list) = to_vector(lists[list.name]);
    }
    state.layers.push_back(std::move(layer));
  }
  return state;
}

class PyKfac {
 public:
  PyKfac(const std::vector<LayerTuple>& layers, const nb::dict& options, nb::object group, int rank, int world_size,
         const std::string& group_name)
      : communicator_(std::move(group), rank, world_size, group_name, nb::cast<bool>(options["checks_collectives"])) {
    std::vector<KfacLayer> list;
    for (const LayerTuple& layer : layers) list.push_back(layer_of(layer));
    if (options.contains("device_library")) {
      library_ = unwrap(cortado::load_device_library(nb::cast<std::string>(options["device_library"])));
      if (library_->create_kfac_device == nullptr) throw nb::value_error("the library has no K-FAC");
    }
    const CurrentDevice current(library_);  // before what may be destroyed here
    cortado::KfacOptions chosen;
    chosen.strategy = strategy_of(nb::cast<std::string>(options["strategy"]));
    chosen.workers = nb::cast<int>(options["workers"]);
    chosen.inverse =
        nb::cast<bool>(options["is_eigen"]) ? cortado::KfacInverse::kEigen : cortado::KfacInverse::kCholesky;
    chosen.pi_correction = nb::cast<bool>(options["pi_correction"]);
    chosen.colocate_factors = nb::cast<bool>(options["colocate_factors"]);
    chosen.balance_memory = nb::cast<bool>(options["balance_memory"]);
    chosen.gradients.codec = nb::cast<std::string>(options["compression"]);
    chosen.schedule = nb::cast<std::string>(options["schedule"]);
    chosen.gradients.use_error_feedback = nb::cast<bool>(options["use_error_feedback"]);
    chosen.gradients.aggregate = nb::cast<std::int64_t>(options["aggregate"]);
    chosen.gradients.random_seed = nb::cast<std::uint64_t>(options["random_seed"]);
    chosen.factor_compression = nb::cast<std::string>(options["factor_compression"]);
    chosen.timeout_s = nb::cast<double>(options["timeout_s"]);
    chosen.threads = nb::cast<int>(options["threads"]);
    if (options.contains("cluster")) {
      chosen.cluster = unwrap(cortado::cluster_from_json(nb::cast<std::string>(options["cluster"])));
      chosen.candidates = nb::cast<std::vector<std::string>>(options["candidates"]);
    }
    if (library_ != nullptr) {
      const int device = nb::cast<int>(options["device"]);
      chosen.device = unwrapped_without_gil([&] {
        auto made = library_->create_kfac_device(device);
        if (!made.ok()) communicator_.get()->abandon(made.status().to_string());  // or the other ranks would wait
        return made;
      });
    }
    kfac_ = unwrapped_without_gil([&] { return Kfac::create(std::move(list), chosen, communicator_.get()); });
  }

  ~PyKfac() {
    const CurrentDevice current(library_);
    kfac_.reset();
  }
  PyKfac(const PyKfac&) = delete;
  PyKfac& operator=(const PyKfac&) = delete;

  bool wants_batches(std::size_t layer) const { return kfac().wants_batches(layer); }

  void add_batch(std::size_t layer, bool is_activations, std::uintptr_t data, int dtype, std::int64_t count,
                 std::int64_t height, std::int64_t width, double scale, std::uintptr_t device_stream) {
    const OneThread::Call inside(one_thread_, "add_batch");
    const CurrentDevice current(library_);
    const cortado::KfacBatch batch{address(data),         static_cast<cortado::DType>(dtype), count, height, width,
                                   address(device_stream)};
    checked_without_gil([&] {
      return is_activations ? kfac_->add_activations(layer, batch) : kfac_->add_output_gradients(layer, batch, scale);
    });
  }
  void reset_batch() { kfac().reset_batch(); }
  void release_batches(std::uintptr_t device_stream) {
    const OneThread::Call inside(one_thread_, "release_batches");
    const CurrentDevice current(library_);
    check(kfac_->release_batches(address(device_stream)));
  }

  void reduce_gradients(const std::vector<GradientTuple>& gradients, std::uintptr_t device_stream) {
    const OneThread::Call inside(one_thread_, "reduce_gradients");
    const CurrentDevice current(library_);
    checked_without_gil([&] { return kfac_->reduce_gradients(gradients_of(gradients), address(device_stream)); });
  }

  bool step(double factor_decay, double damping, double kl_clip, double lr, bool update_factors, bool update_inverses,
            const std::vector<GradientTuple>& gradients, std::uintptr_t device_stream) {
    const OneThread::Call inside(one_thread_, "step");
    const CurrentDevice current(library_);
    const cortado::KfacHyperparameters values{factor_decay, damping, kl_clip, lr, update_factors, update_inverses};
    return unwrapped_without_gil([&] { return kfac_->step(values, gradients_of(gradients), address(device_stream)); })
        .finite;
  }

  void set_compression(const std::string& spec) { check(kfac().set_compression(spec)); }
  void set_factor_compression(const std::string& spec) { check(kfac().set_factor_compression(spec)); }
  void set_candidates(const std::vector<std::string>& specs) { check(kfac().set_candidates(specs)); }
  std::int64_t steps() const { return kfac().steps(); }

  // (column, rank of A, rank of G) of each layer.
  std::vector<std::tuple<int, int, int>> placements() const {
    std::vector<std::tuple<int, int, int>> all;
    for (const cortado::KfacPlacement& p : kfac().placements()) all.emplace_back(p.column, p.a_rank, p.g_rank);
    return all;
  }

  nb::dict report() const {
    const cortado::KfacReport report = kfac().report();
    nb::dict stages, traffic, result;
    for (int s = 0; s < cortado::kKfacStageCount; ++s) {
      stages[std::string(cortado::kfac_stage_name(static_cast<cortado::KfacStage>(s))).c_str()] = report.stage_ns[s];
    }
    traffic["factors"] = to_dict(report.factors);
    traffic["inverses"] = to_dict(report.inverses);
    traffic["gradients"] = to_dict(report.gradients);
    traffic["reduced_gradients"] = to_dict(report.reduced_gradients);
    nb::list fallbacks;
    for (const cortado::KfacFallback& fallback : report.fallbacks) {
      nb::dict entry;
      entry["layer"] = fallback.layer;
      entry["reason"] = fallback.reason;
      entry["count"] = fallback.count;
      fallbacks.append(entry);
    }
    result["steps"] = report.steps;
    result["non_finite_steps"] = report.non_finite_steps;
    result["time_by_stage_ns"] = stages;
    result["traffic"] = traffic;
    result["fallbacks"] = fallbacks;
    nb::dict choices;
    for (const cortado::KfacChoice& choice : report.choices) {
      nb::dict entry;
      entry["codec"] = choice.codec;
      entry["aggregate"] = choice.aggregate;
      entry["predicted_ns"] = choice.predicted_ns;
      entry["predicted_uncompressed_ns"] = choice.predicted_uncompressed_ns;
      entry["measured_ns"] = choice.measured_ns;
      entry["measured_uncompressed_ns"] = choice.measured_uncompressed_ns;
      entry["reason"] = choice.reason;
      choices[choice.message.c_str()] = entry;
    }
    result["auto"] = choices;
    return result;
  }

  nb::dict memory() const {
    const cortado::KfacMemory memory = kfac().memory();
    nb::dict result;
    result["factors"] = memory.factors_bytes;
    result["batch"] = memory.batch_bytes;
    result["inverses"] = memory.inverses_bytes;
    result["gradients"] = memory.gradients_bytes;
    result["exchange"] = memory.exchange_bytes;
    result["scratch"] = memory.scratch_bytes;
    result["total"] = memory.total_bytes();
    return result;
  }

  nb::dict save_state(bool with_inverses) const {
    cortado::KfacState state = kfac().save_state(with_inverses);
    nb::dict layers, result;
    for (cortado::KfacLayerState& layer : state.layers) {
      nb::dict entry;
      for (const StateList& list : kStateLists) {
        if (!(layer.*(list.list)).empty()) entry[list.name] = to_numpy(std::move(layer.*(list.list)));
      }
      layers[layer.name.c_str()] = entry;
    }
    result["format"] = "cortado.kfac/1";
    result["strategy"] = state.strategy;
    result["world_size"] = state.world_size;
    result["rank"] = state.rank;
    result["step"] = state.step;
    result["layers"] = layers;
    return result;
  }

  std::string load_state(const std::vector<nb::dict>& dicts) {
    std::vector<cortado::KfacState> states;
    for (const nb::dict& dict : dicts) states.push_back(state_of(dict));
    const OneThread::Call inside(one_thread_, "load_state");
    return unwrapped_without_gil([&] { return kfac_->load_state(states); });
  }

 private:
  // For calls that keep the GIL.
  Kfac& kfac() const {
    one_thread_.refuse_others();
    return *kfac_;
  }

  OneThread one_thread_{"KFAC"};
  PyCommunicator communicator_;
  const cortado::DeviceLibrary* library_ = nullptr;  // of the device, if there is one
  std::unique_ptr<Kfac> kfac_;
};

// (name, dtype, rows, cols, owner)
using TensorTuple = std::tuple<std::string, int, std::int64_t, std::int64_t, int>;

class PyOwnerGather {
 public:
  PyOwnerGather(const std::vector<TensorTuple>& tensors, const std::string& codec, bool use_error_feedback,
                std::int64_t aggregate, std::uint64_t random_seed, double timeout_s, nb::object group, int rank,
                int world_size, const std::string& group_name, bool checks_collectives)
      : communicator_(std::move(group), rank, world_size, group_name, checks_collectives) {
    std::vector<cortado::OwnedTensor> list;
    for (const auto& [name, dtype, rows, cols, owner] : tensors) {
      list.push_back({name, static_cast<cortado::DType>(dtype), rows, cols, owner});
    }
    const cortado::OwnerGatherOptions options{codec, use_error_feedback, aggregate, random_seed, timeout_s};
    gather_ = unwrapped_without_gil([&] { return OwnerGather::create(std::move(list), options, communicator_.get()); });
  }

  void run(std::uint64_t step, const std::vector<std::uintptr_t>& addresses) {
    const OneThread::Call inside(one_thread_, "run");
    std::vector<void*> data;
    for (const std::uintptr_t value : addresses) data.push_back(address(value));
    checked_without_gil([&] { return gather_->run(step, data); });
  }

  void set_codec(const std::string& spec) { check(gather().set_codec(spec)); }

  nb::dict report() const {
    const cortado::OwnerGatherReport report = gather().report();
    nb::dict result;
    result["steps"] = report.steps;
    result["payload_bytes"] = report.payload_bytes;
    result["dense_bytes"] = report.dense_bytes;
    result["all_payload_bytes"] = report.all_payload_bytes;
    result["all_dense_bytes"] = report.all_dense_bytes;
    result["collectives"] = report.collectives;
    result["relative_error"] = report.relative_l2_error;
    result["finite"] = report.finite;
    result["encode_ns"] = report.encode_ns;
    result["gather_ns"] = report.gather_ns;
    result["decode_ns"] = report.decode_ns;
    result["memory_bytes"] = report.memory_bytes;
    return result;
  }

  nb::dict save_residuals() const {
    nb::dict result;
    for (cortado::OwnerResidual& residual : gather().save_residuals()) {
      result[residual.name.c_str()] = to_numpy(std::move(residual.values));
    }
    return result;
  }

  void load_residuals(const nb::dict& dict) {
    std::vector<cortado::OwnerResidual> residuals;
    for (auto [name, values] : dict) residuals.push_back({nb::cast<std::string>(name), to_vector(values)});
    check(gather().load_residuals(residuals));
  }

 private:
  // For calls that keep the GIL.
  OwnerGather& gather() const {
    one_thread_.refuse_others();
    return *gather_;
  }

  OneThread one_thread_{"gather"};
  PyCommunicator communicator_;
  std::unique_ptr<OwnerGather> gather_;
};

}  // namespace

void bind_kfac(nb::module_& m) {
  nb::class_<PyKfac>(m, "Kfac", "cortado::Kfac over a process group given as a Python object, or None for one rank.")
      .def(nb::init<const std::vector<LayerTuple>&, const nb::dict&, nb::object, int, int, const std::string&>(),
           "layers"_a, "options"_a, "group"_a.none(), "rank"_a, "world_size"_a, "group_name"_a)
      .def("wants_batches", &PyKfac::wants_batches, "layer"_a)
      .def("add_batch", &PyKfac::add_batch, "layer"_a, "is_activations"_a, "data"_a, "dtype"_a, "count"_a,
           "height"_a = 1, "width"_a = 1, "scale"_a = 1.0, "device_stream"_a = 0)
      .def("reset_batch", &PyKfac::reset_batch)
      .def("release_batches", &PyKfac::release_batches, "device_stream"_a)
      .def("reduce_gradients", &PyKfac::reduce_gradients, "gradients"_a, "device_stream"_a = 0)
      .def("step", &PyKfac::step, "factor_decay"_a, "damping"_a, "kl_clip"_a, "lr"_a, "update_factors"_a,
           "update_inverses"_a, "gradients"_a, "device_stream"_a = 0)
      .def("set_compression", &PyKfac::set_compression, "spec"_a)
      .def("set_factor_compression", &PyKfac::set_factor_compression, "spec"_a)
      .def("set_candidates", &PyKfac::set_candidates, "specs"_a)
      .def("report", &PyKfac::report)
      .def("memory", &PyKfac::memory)
      .def("save_state", &PyKfac::save_state, "with_inverses"_a = true)
      .def("load_state", &PyKfac::load_state, "states"_a)
      .def_prop_ro("steps", &PyKfac::steps)
      .def_prop_ro("placements", &PyKfac::placements);

  nb::class_<PyOwnerGather>(m, "OwnerGather", "cortado::OwnerGather over a process group given as a Python object.")
      .def(nb::init<const std::vector<TensorTuple>&, const std::string&, bool, std::int64_t, std::uint64_t, double,
                    nb::object, int, int, const std::string&, bool>(),
           "tensors"_a, "codec"_a, "use_error_feedback"_a, "aggregate"_a, "random_seed"_a, "timeout_s"_a,
           "group"_a.none(), "rank"_a, "world_size"_a, "group_name"_a, "checks_collectives"_a)
      .def("run", &PyOwnerGather::run, "step"_a, "addresses"_a)
      .def("set_codec", &PyOwnerGather::set_codec, "spec"_a)
      .def("report", &PyOwnerGather::report)
      .def("save_residuals", &PyOwnerGather::save_residuals)
      .def("load_residuals", &PyOwnerGather::load_residuals, "residuals"_a);
}

}  // namespace cortado_python

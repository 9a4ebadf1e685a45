// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// cortado._core: the C++ API for Python, without torch. Tensors come as addresses; whoever passes one keeps the memory
// alive. Calls that encode, decode or wait release the GIL; the communicator's functions take it again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cortado/auto.h"
#include "cortado/codec.h"
#include "cortado/codec_file.h"
#include "cortado/communicator.h"
#include "cortado/device_library.h"
#include "cortado/engine.h"
#include "cortado/files.h"
#include "cortado/plan.h"
#include "cortado/trace.h"
#include "cortado/version.h"
#include "python/binding.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace cortado_python;

namespace {

using cortado::Result;
using cortado::Status;

// What stops a program rather than a call (Ctrl-C, SystemExit) and came up in a function of the communicator: C++ sees
// an error, Python gets the exception itself. Of this thread, with the GIL held.
thread_local PyObject* stopping_exception = nullptr;

// ---- the communicator's functions, implemented by a Python object --------------------------------------------------

int report_python_error(nb::python_error& error, char* text, std::size_t text_bytes) {
  const bool timed_out = error.matches(PyExc_TimeoutError);
  std::snprintf(text, text_bytes, "%s", text_of(error).c_str());
  return timed_out ? cortado::CommunicatorCallbacks::kTimedOut : 1;
}

template <typename F>
int call_python(char* error, std::size_t error_bytes, F&& call) {
  nb::gil_scoped_acquire gil;
  try {
    call();
    return 0;
  } catch (nb::python_error& raised) {
    return report_python_error(raised, error, error_bytes);
  } catch (const std::exception& unexpected) {  // of a cast: the group returned something else
    std::snprintf(error, error_bytes, "%s", unexpected.what());
    return 1;
  }
}

// Of C++, which may have cut it within a character.
nb::object str_of(std::string_view text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

nb::handle group_of(void* context) { return nb::handle(static_cast<PyObject*>(context)); }

// None where the blocks are equal.
nb::object list_of(std::span<const std::int64_t> counts) {
  if (counts.empty()) return nb::none();
  nb::list list;
  for (const std::int64_t count : counts) list.append(count);
  return list;
}

cortado::CommunicatorCallbacks callbacks_for(nb::handle group, int rank, int world_size, const char* name) {
  cortado::CommunicatorCallbacks callbacks;
  callbacks.context = group.ptr();
  callbacks.rank = rank;
  callbacks.world_size = world_size;
  callbacks.name = name;
  callbacks.start = [](void* context, const cortado::CollectiveCall* call, std::uint64_t work, char* error,
                       std::size_t bytes) {
    return call_python(error, bytes, [&] {
      const std::string_view kind = cortado::collective_kind_name(call->kind);
      group_of(context).attr("start")(work, nb::str(kind.data(), kind.size()), static_cast<int>(call->dtype),
                                      reinterpret_cast<std::uintptr_t>(call->sent),
                                      reinterpret_cast<std::uintptr_t>(call->received), call->elems, call->root,
                                      list_of(call->counts), list_of(call->received_counts));
    });
  };
  callbacks.test = [](void* context, std::uint64_t work, int* done, char* error, std::size_t bytes) {
    return call_python(error, bytes, [&] { *done = nb::cast<bool>(group_of(context).attr("test")(work)) ? 1 : 0; });
  };
  callbacks.wait = [](void* context, std::uint64_t work, std::int64_t timeout_ns, char* error, std::size_t bytes) {
    return call_python(error, bytes,
                       [&] { group_of(context).attr("wait")(work, static_cast<double>(timeout_ns) * 1e-9); });
  };
  callbacks.all_gather = [](void* context, const void* sent, std::int64_t sent_bytes, void* received,
                            std::int64_t timeout_ns, char* error, std::size_t bytes) {
    return call_python(error, bytes, [&] {
      const nb::bytes all = nb::cast<nb::bytes>(group_of(context).attr("all_gather")(
          nb::bytes(sent, static_cast<std::size_t>(sent_bytes)), static_cast<double>(timeout_ns) * 1e-9));
      const auto expected = static_cast<std::size_t>(sent_bytes) *
                            static_cast<std::size_t>(nb::cast<int>(group_of(context).attr("world_size")));
      if (all.size() != expected) {
        throw std::length_error("all_gather returned " + std::to_string(all.size()) + " bytes, expected " +
                                std::to_string(expected));
      }
      std::memcpy(received, all.data(), all.size());
    });
  };
  if (nb::hasattr(group, "check_peers")) {
    callbacks.check_peers = [](void* context, char* error, std::size_t bytes) {
      return call_python(error, bytes, [&] { group_of(context).attr("check_peers")(); });
    };
  }
  if (nb::hasattr(group, "announce")) {
    callbacks.abandon = [](void* context, const char* why) {  // also as an engine is destroyed
      const nb::gil_scoped_acquire gil;
      const nb::error_scope being_raised;
      try {
        group_of(context).attr("announce")(str_of(why));
      } catch (nb::python_error& error) {  // this rank has given up anyway; what stops the program is kept
        static_cast<void>(text_of(error));
      } catch (...) {
      }
    };
  }
  callbacks.subgroup = [](void* context, const int* ranks, std::int64_t rank_count,
                          cortado::CommunicatorCallbacks* table, char* error, std::size_t bytes) {
    return call_python(error, bytes, [&] {
      nb::list list;
      for (std::int64_t i = 0; i < rank_count; ++i) list.append(ranks[i]);
      const nb::object subgroup = group_of(context).attr("subgroup")(list);  // the whole group keeps it alive
      *table = callbacks_for(subgroup, nb::cast<int>(subgroup.attr("rank")), nb::cast<int>(subgroup.attr("world_size")),
                             nb::borrow<nb::str>(subgroup.attr("name")).c_str());
    });
  };
  return callbacks;
}

// ---- engine --------------------------------------------------------------------------------------------------------

// Which tensors lie where in one buffer of the caller's; made once for each bucket of DDP's.
struct BucketMap {
  std::vector<std::uint32_t> tensors;
  std::vector<std::int64_t> offsets_bytes;
  std::vector<cortado::Gradient> gradients;  // filled at each submission
};

class PyEngine {
 public:
  using Tensor = std::tuple<std::string, int, std::int64_t, std::int64_t, int, bool>;

  // `what`: a specification, one of auto, or the JSON text of a plan. `takes_buffers` and `transport_version` as in
  // AutoOptions. `timeout_s`: instead of that of `what`. `checks_collectives`: over a checking communicator. With
  // `device_library`, its path, gradients are on `device`; those of a plan are in host memory, and it encodes on
  // `device` what it gives to a GPU.
  PyEngine(const nb::list& tensors, const std::string& what, nb::object group, int rank, int world_size,
           const std::string& group_name, bool takes_buffers, bool can_average, const std::string& transport_version,
           std::optional<double> timeout_s, bool checks_collectives, const std::optional<std::string>& device_library,
           int device)
      : communicator_(std::move(group), rank, world_size, group_name, checks_collectives), device_(device) {
    std::vector<cortado::EngineTensor> list;
    for (nb::handle item : tensors) {
      list.push_back({.name = nb::cast<std::string>(item[0]),
                      .dtype = static_cast<cortado::DType>(nb::cast<int>(item[1])),
                      .rows = nb::cast<std::int64_t>(item[2]),
                      .cols = nb::cast<std::int64_t>(item[3]),
                      .dimensions = nb::cast<int>(item[4]),
                      .is_embedding = nb::cast<bool>(item[5])});
    }
    if (device_library.has_value()) library_ = unwrap(cortado::load_device_library(*device_library));
    const CurrentDevice current(library_);
    if (is_plan(what)) {
      const cortado::Plan plan = unwrap(cortado::plan_from_json(what));
      cortado::EngineOptions options;
      options.timeout_s = timeout_s.value_or(options.timeout_s);
      engine_ = unwrapped_without_gil([&] {
        return cortado::Engine::create(std::move(list), plan, options, communicator_.get(), cortado::steady_clock(),
                                       nullptr,
                                       library_ == nullptr ? nullptr : library_->create_scheme_device(device_));
      });
      return;
    }
    if (cortado::is_auto_spec(what)) {
      cortado::AutoOptions options = unwrap(cortado::AutoOptions::parse(what));
      options.takes_buffers = takes_buffers;
      options.transport_version = transport_version;
      options.timeout_s = timeout_s.value_or(options.timeout_s);
      options.can_average = can_average && options.timeout_s >= cortado::AutoOptions{}.timeout_s;
      auto made = unwrapped_without_gil([&] {
        return library_ != nullptr
                   ? library_->create_auto_engine(std::move(list), options, communicator_.get(), device_)
                   : cortado::AutoEngine::create(std::move(list), options, communicator_.get());
      });
      auto_ = made.get();
      engine_ = std::move(made);
      return;
    }
    cortado::EngineOptions options = unwrap(cortado::EngineOptions::parse(what));
    options.timeout_s = timeout_s.value_or(options.timeout_s);
    if (library_ != nullptr) {
      engine_ = unwrapped_without_gil(
          [&] { return library_->create_engine(std::move(list), options, communicator_.get(), device_); });
      return;
    }
    engine_ =
        unwrapped_without_gil([&] { return cortado::Engine::create(std::move(list), options, communicator_.get()); });
  }

  void switch_plan(const std::string& json) {
    const OneThread::Call inside(one_thread_, "switch_plan");
    const cortado::Plan plan = unwrap(cortado::plan_from_json(json));
    const CurrentDevice current(library_);
    checked_without_gil([&] { return engine_->switch_plan(plan); });
  }

  void begin_step(double gradient_scale, bool keeps_local_gradients, bool holds_zero_gradients,
                  std::uintptr_t device_stream, std::uintptr_t device_gradient_scale) {
    const OneThread::Call inside(one_thread_, "begin_step");
    const CurrentDevice current(library_);
    check(engine_->begin_step({.gradient_scale = gradient_scale,
                               .keeps_local_gradients = keeps_local_gradients,
                               .holds_zero_gradients = holds_zero_gradients,
                               .device_stream = reinterpret_cast<void*>(device_stream),
                               .device_gradient_scale = reinterpret_cast<const void*>(device_gradient_scale)}));
  }

  void submit(BucketMap& map, std::uintptr_t base) {
    const OneThread::Call inside(one_thread_, "submit");
    place(map, base);
    const CurrentDevice current(library_);
    checked_without_gil([&] { return engine_->submit(map.gradients); });
  }

  // For codec none and auto: the bucket fills the buffer.
  void submit_buffer(BucketMap& map, std::uintptr_t data, std::int64_t elems, int dtype) {
    const OneThread::Call inside(one_thread_, "submit_buffer");
    place(map, data);
    checked_without_gil([&] {
      return engine_->submit_buffer(map.gradients, reinterpret_cast<void*>(data), elems,
                                    static_cast<cortado::DType>(dtype));
    });
  }

  // `local_gradient` maps a tensor's index to the address of its kept gradient, 0 for zeros; called only to undo a
  // step.
  bool finish_step(const std::optional<nb::callable>& local_gradient) {
    const OneThread::Call inside(one_thread_, "finish_step");
    cortado::LocalGradient lookup;
    if (local_gradient.has_value()) {
      lookup = [&](std::uint32_t tensor) {
        nb::gil_scoped_acquire gil;
        return reinterpret_cast<const void*>(nb::cast<std::uintptr_t>((*local_gradient)(tensor)));
      };
    }
    const CurrentDevice current(library_);
    Result<cortado::StepOutcome> outcome = [&] {
      nb::gil_scoped_release release;
      return engine_->finish_step(lookup);
    }();
    return unwrap(std::move(outcome)).finite;
  }

  bool may_pass() const {
    one_thread_.refuse_others();
    return auto_ != nullptr && auto_->may_pass();
  }
  void pass_step() {
    if (auto_ == nullptr) throw nb::value_error("pass_step: this engine is not auto's");
    const OneThread::Call inside(one_thread_, "pass_step");
    const CurrentDevice current(library_);
    checked_without_gil([&] { return auto_->pass_step(); });
  }

  void abandon(const std::string& why) {
    const OneThread::Call inside(one_thread_, "abandon");
    engine_->abandon(why);
  }
  std::string describe() const { return engine().describe(); }
  std::string spec() const {
    one_thread_.refuse_others();
    return auto_ != nullptr ? auto_->summary() : engine_->options().to_spec();
  }
  bool is_auto() const { return auto_ != nullptr; }
  std::vector<std::string> take_news() {
    one_thread_.refuse_others();
    return auto_ != nullptr ? auto_->take_news() : std::vector<std::string>();
  }
  nb::object decision() const;
  double timeout_s() const { return engine().options().timeout_s; }
  bool sends_buffers() const {
    return auto_ == nullptr && engine().options().method == cortado::EngineOptions::Method::kNone;
  }

  void check_replicas(const std::vector<std::tuple<std::string, std::uintptr_t, std::size_t>>& tensors) {
    const OneThread::Call inside(one_thread_, "check_replicas");
    std::vector<cortado::ReplicaTensor> list;
    for (const auto& [name, data, bytes] : tensors) {
      list.push_back({name, {reinterpret_cast<const std::byte*>(data), bytes}});
    }
    checked_without_gil([&] { return engine_->check_replicas(list); });
  }

  nb::dict report() const;
  nb::dict save_state();
  std::string load_state(const nb::dict& state);
  void start_trace(std::size_t capacity) {
    one_thread_.refuse_others();
    trace_ = std::make_unique<cortado::TraceRecorder>(capacity);
    engine_->set_trace(trace_.get());
  }
  std::string trace_json() const {
    if (trace_ == nullptr) throw nb::value_error("no trace was started: call start_trace() before the steps to record");
    return cortado::trace_to_json(engine().trace());
  }

  ~PyEngine() {
    const CurrentDevice current(library_);
    engine_.reset();
  }

 private:
  // For calls that keep the GIL.
  const cortado::Engine& engine() const {
    one_thread_.refuse_others();
    return *engine_;
  }

  static bool is_plan(const std::string& what) { return what.starts_with('{'); }

  static void place(BucketMap& map, std::uintptr_t base) {
    for (std::size_t i = 0; i < map.tensors.size(); ++i) {
      map.gradients[i] = {map.tensors[i],
                          reinterpret_cast<void*>(base + static_cast<std::uintptr_t>(map.offsets_bytes[i]))};
    }
  }

  OneThread one_thread_{"engine"};
  PyCommunicator communicator_;
  const cortado::DeviceLibrary* library_ = nullptr;  // of an engine that is on a device, or encodes there
  int device_ = 0;
  std::unique_ptr<cortado::TraceRecorder> trace_;
  std::unique_ptr<cortado::Engine> engine_;
  cortado::AutoEngine* auto_ = nullptr;  // engine_, if it is one
};

nb::object PyEngine::decision() const {
  if (auto_ == nullptr) return nb::none();
  one_thread_.refuse_others();
  const cortado::AutoDecision decision = auto_->decision();  // to make objects may run others, and so other threads
  const auto known = [](std::int64_t value) -> nb::object {
    if (value < 0) return nb::none();
    return nb::int_(value);
  };
  nb::list candidates;
  for (const cortado::AutoCandidate& candidate : decision.candidates) {
    nb::dict entry;
    entry["label"] = candidate.label;
    entry["what"] = candidate.what;
    entry["predicted_ns"] = known(candidate.predicted_ns);
    entry["simulated_ns"] = known(candidate.simulated_ns);
    entry["measured_ns"] = known(candidate.measured_ns);
    entry["steps"] = candidate.steps;
    entry["trials_ns"] = candidate.trials_ns;
    entry["pace"] = candidate.pace > 0 ? nb::object(nb::float_(candidate.pace)) : nb::none();
    entry["predicted_at_pace_ns"] = known(candidate.predicted_at_pace_ns);
    candidates.append(entry);
  }
  nb::dict result;
  result["decided"] = decision.decided;
  result["step"] = decision.step;
  result["chosen"] = decision.chosen;
  result["candidates"] = candidates;
  result["reason"] = decision.reason;
  result["step_ns"] = known(decision.step_ns);
  result["drift"] = decision.drift;
  result["relative_error"] = decision.relative_error;
  result["residual"] = decision.residual;
  return result;
}

nb::dict PyEngine::report() const {
  const cortado::EngineReport report = engine().report();
  nb::dict stages;
  for (int s = 0; s < cortado::kStageCount; ++s) {
    stages[std::string(cortado::stage_name(static_cast<cortado::Stage>(s))).c_str()] = report.stage_ns[s];
  }
  nb::list tensors;
  for (const cortado::TensorReport& tensor : report.tensors) {
    nb::dict entry;
    entry["name"] = tensor.name;
    entry["elems"] = tensor.elems;
    entry["payload_bytes"] = tensor.payload_bytes;
    entry["relative_error"] = tensor.relative_l2_error;
    entry["compressed"] = tensor.compressed;
    tensors.append(entry);
  }
  nb::list fallbacks;
  for (const cortado::Fallback& fallback : report.fallbacks) {
    nb::dict entry;
    entry["tensor"] = fallback.tensor;
    entry["reason"] = fallback.reason;
    entry["steps"] = fallback.count;
    fallbacks.append(entry);
  }
  nb::dict memory;
  memory["residual"] = report.residual_bytes;
  memory["factors"] = report.factor_bytes;
  memory["messages"] = report.message_bytes;
  nb::dict result;
  result["spec"] = report.spec;
  result["communicator"] = report.communicator;
  result["world_size"] = report.world_size;
  result["steps"] = report.steps;
  result["passed_steps"] = report.passed_steps;
  result["non_finite_steps"] = report.non_finite_steps;
  result["last_non_finite"] = report.last_non_finite;
  result["bytes_per_step"] = report.payload_bytes;
  result["dense_bytes_per_step"] = report.dense_bytes;
  result["ratio"] = report.ratio;
  result["relative_error"] = report.relative_l2_error;
  result["messages_per_step"] = report.messages;
  result["time_by_stage_ns"] = stages;
  result["memory_bytes"] = memory;
  result["tensors"] = tensors;
  result["fallbacks"] = fallbacks;
  result["host_reason"] = report.host_reason;
  return result;
}

nb::dict PyEngine::save_state() {
  const OneThread::Call inside(one_thread_, "save_state");
  const CurrentDevice current(library_);
  cortado::EngineState state = unwrapped_without_gil([&] { return engine_->save_state(); });
  nb::dict tensors;
  for (cortado::TensorState& tensor : state.tensors) {
    nb::dict entry;
    entry["residual"] = to_numpy(std::move(tensor.residual));
    entry["basis"] = to_numpy(std::move(tensor.basis));
    entry["velocity"] = to_numpy(std::move(tensor.velocity));
    nb::dict places;
    for (cortado::PlaceState& place : tensor.places) {
      places[(place.name + "@" + std::to_string(place.begin)).c_str()] = to_numpy(std::move(place.values));
    }
    entry["places"] = places;
    tensors[tensor.name.c_str()] = entry;
  }
  nb::dict result;
  result["format"] = "cortado.state/1";
  result["spec"] = state.spec;
  result["world_size"] = state.world_size;
  result["rank"] = state.rank;
  result["step"] = state.step;
  result["phase_step"] = state.phase_step;
  result["layout"] = nb::cast(state.layout);
  result["tensors"] = tensors;
  return result;
}

std::string PyEngine::load_state(const nb::dict& dict) {
  cortado::EngineState state{.spec = nb::cast<std::string>(dict["spec"]),
                             .world_size = nb::cast<int>(dict["world_size"]),
                             .rank = nb::cast<int>(dict["rank"]),
                             .step = nb::cast<std::int64_t>(dict["step"]),
                             .phase_step = nb::cast<std::int64_t>(dict["phase_step"]),
                             .layout = nb::cast<decltype(state.layout)>(dict["layout"]),
                             .tensors = {}};
  for (auto [name, entry] : nb::cast<nb::dict>(dict["tensors"])) {
    cortado::TensorState& tensor = state.tensors.emplace_back();
    tensor = {.name = nb::cast<std::string>(name),
              .residual = to_vector(entry["residual"]),
              .basis = to_vector(entry["basis"]),
              .velocity = to_vector(entry["velocity"])};
    for (auto [place, values] : nb::cast<nb::dict>(entry["places"])) {
      const std::string key = nb::cast<std::string>(place);  // NAME@BEGIN
      const std::size_t at = key.rfind('@');
      if (at == std::string::npos) throw nb::value_error("a place is called NAME@BEGIN");
      tensor.places.push_back({key.substr(0, at), std::strtoll(key.c_str() + at + 1, nullptr, 10), to_vector(values)});
    }
  }
  const OneThread::Call inside(one_thread_, "load_state");
  const CurrentDevice current(library_);
  Result<std::string> warning = [&] {
    nb::gil_scoped_release release;
    return engine_->load_state(state);
  }();
  return unwrap(std::move(warning));
}

cortado::Plan plan_of(const std::string& json) { return unwrap(cortado::plan_from_json(json)); }

cortado::Trace trace_of(const std::string& json) { return unwrap(cortado::parse_trace(json)); }

// ---- files of compressed tensors -----------------------------------------------------------------------------------

using InputArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using InputBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

cortado::DType dtype_of(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(Code::Float, 32)) return cortado::DType::kFloat32;
  if (is(Code::Float, 16)) return cortado::DType::kFloat16;
  if (is(Code::Bfloat, 16)) return cortado::DType::kBFloat16;
  if (is(Code::UInt, 8)) return cortado::DType::kUint8;
  raise(cortado::make_error(cortado::StatusCode::kUnsupported,
                            "codecs take float32, float16, bfloat16 and uint8, got dtype code %d of %d bits",
                            dtype.code, dtype.bits));
}

nb::dlpack::dtype dlpack_dtype_of(cortado::DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const bool is_bf16 = dtype == cortado::DType::kBFloat16, is_uint8 = dtype == cortado::DType::kUint8;
  const Code code = is_bf16 ? Code::Bfloat : is_uint8 ? Code::UInt : Code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * cortado::dtype_bytes(dtype)), 1};
}

nb::bytes compress(const InputArray& array, const std::string& spec, std::uint64_t seed, std::int64_t chunk_elems) {
  cortado::CodecFileInfo info;
  info.spec = spec;
  info.dtype = dtype_of(array.dtype());
  info.chunk_elems = chunk_elems;
  for (std::size_t i = 0; i < array.ndim(); ++i) info.shape.push_back(static_cast<std::int64_t>(array.shape(i)));
  std::string file;
  const Status status = [&]() -> Status {
    nb::gil_scoped_release release;
    Result<cortado::CodecFileWriter> created = cortado::CodecFileWriter::create(std::move(info), seed);
    if (!created.ok()) return created.status();
    cortado::CodecFileWriter& writer = created.value();
    const auto append = [&](std::span<const std::byte> bytes) {
      file.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    append(writer.header());
    const std::size_t elem_bytes = cortado::dtype_bytes(writer.info().dtype);
    while (writer.next_chunk().elems() > 0) {
      const std::size_t at = static_cast<std::size_t>(writer.next_chunk().first_elem) * elem_bytes;
      const auto chunk = writer.encode_chunk(static_cast<const std::byte*>(array.data()) + at);
      if (!chunk.ok()) return chunk.status();
      append(chunk.value());
    }
    return {};
  }();
  check(status);
  return nb::bytes(file.data(), file.size());
}

template <typename Framework>
nb::object decompress_to(cortado::CodecFileReader& reader, const std::vector<std::size_t>& shape, std::size_t elems) {
  const cortado::DType dtype = reader.info().dtype;
  const std::size_t elem_bytes = cortado::dtype_bytes(dtype);
  auto* memory = new std::byte[elems * elem_bytes];
  nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<std::byte*>(p); });
  Status status;
  {
    nb::gil_scoped_release release;
    while (status.ok() && reader.next_chunk().elems() > 0) {
      status = reader.decode_chunk(memory + static_cast<std::size_t>(reader.next_chunk().first_elem) * elem_bytes);
    }
  }
  check(status);
  return nb::cast(nb::ndarray<Framework>(memory, shape.size(), shape.data(), owner, nullptr, dlpack_dtype_of(dtype)));
}

nb::object decompress(const InputBytes& data, bool as_torch) {
  cortado::CodecFileReader reader =
      unwrap(cortado::CodecFileReader::open(std::as_bytes(std::span(data.data(), data.size()))));
  if (reader.info().dtype == cortado::DType::kBFloat16 && !as_torch) {
    raise(cortado::make_error(cortado::StatusCode::kUnsupported,
                              "the tensor is bfloat16, which NumPy does not have; say framework=\"torch\""));
  }
  std::vector<std::size_t> shape;
  std::size_t elems = 1;
  for (const std::int64_t size : reader.info().shape) {
    shape.push_back(static_cast<std::size_t>(size));
    elems *= static_cast<std::size_t>(size);
  }
  return as_torch ? decompress_to<nb::pytorch>(reader, shape, elems) : decompress_to<nb::numpy>(reader, shape, elems);
}

}  // namespace

namespace cortado_python {

std::string text_of(nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) Py_XDECREF(std::exchange(stopping_exception, error.value().inc_ref().ptr()));
  std::string message = nb::str(error.value()).c_str();  // what() would bring the traceback too
  if (error.matches(PyExc_TimeoutError) || error.matches(PyExc_RuntimeError)) return message;
  return nb::str(error.type().attr("__name__")).c_str() + (": " + message);
}

[[noreturn]] void raise(const Status& status) {
  if (PyObject* stopping = std::exchange(stopping_exception, nullptr); stopping != nullptr) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(stopping)), stopping);
    Py_DECREF(stopping);
    throw nb::python_error();
  }
  const std::string code(cortado::status_code_name(status.code()));
  nb::module_::import_("cortado.errors").attr("raise_status")(code, str_of(status.message()));
  throw std::runtime_error(status.to_string());  // not reached: raise_status raises
}

PyCommunicator::PyCommunicator(nb::object group, int rank, int world_size, const std::string& name, bool is_checked)
    : group_(std::move(group)), name_(name) {
  if (group_.is_none()) {
    alone_ = std::make_unique<cortado::LocalGroup>(1);
    communicator_ = alone_->communicator(0);
    return;
  }
  owned_ = unwrap(cortado::make_callback_communicator(callbacks_for(group_, rank, world_size, name_.c_str())));
  communicator_ = owned_.get();
  if (!is_checked) return;
  checking_ = cortado::make_checking_communicator(communicator_);
  communicator_ = checking_.get();
}

nb::object to_numpy(std::vector<float>&& values) {
  auto* owned = new std::vector<float>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

std::vector<float> to_vector(nb::handle array) {
  const auto view = nb::cast<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(array);
  return {view.data(), view.data() + view.size()};
}

}  // namespace cortado_python

NB_MODULE(_core, m) {
  m.doc() = "Cortado's C++ engine; use it through the cortado package.";
  m.attr("__version__") = cortado::version();
  nb::set_leak_warnings(false);  // engines whose messages are on their way after an error are kept until the end

  nb::class_<BucketMap>(m, "BucketMap", "Tensor indices and byte offsets of one gradient buffer.")
      .def(
          "__init__",
          [](BucketMap* self, std::vector<std::uint32_t> tensors, std::vector<std::int64_t> offsets_bytes) {
            if (tensors.size() != offsets_bytes.size()) throw nb::value_error("one offset a tensor is expected");
            const std::size_t count = tensors.size();
            new (self) BucketMap{std::move(tensors), std::move(offsets_bytes), std::vector<cortado::Gradient>(count)};
          },
          "tensors"_a, "offsets_bytes"_a);

  nb::class_<PyEngine>(m, "Engine", "cortado::Engine over a process group given as a Python object.")
      .def(nb::init<const nb::list&, const std::string&, nb::object, int, int, const std::string&, bool, bool,
                    const std::string&, std::optional<double>, bool, const std::optional<std::string>&, int>(),
           "tensors"_a, "what"_a, "group"_a, "rank"_a, "world_size"_a, "group_name"_a, "takes_buffers"_a = false,
           "can_average"_a = false, "transport_version"_a = "", "timeout_s"_a = nb::none(),
           "checks_collectives"_a = false, "device_library"_a = nb::none(), "device"_a = 0)
      .def("begin_step", &PyEngine::begin_step, "gradient_scale"_a = 1.0, "keeps_local_gradients"_a = false,
           "holds_zero_gradients"_a = false, "device_stream"_a = 0, "device_gradient_scale"_a = 0)
      .def("submit", &PyEngine::submit, "map"_a, "base"_a)
      .def("submit_buffer", &PyEngine::submit_buffer, "map"_a, "data"_a, "elems"_a, "dtype"_a)
      .def("finish_step", &PyEngine::finish_step, "local_gradient"_a = nb::none())
      .def("pass_step", &PyEngine::pass_step)
      .def("abandon", &PyEngine::abandon, "why"_a)
      .def("describe", &PyEngine::describe)
      .def("report", &PyEngine::report)
      .def("save_state", &PyEngine::save_state)
      .def("load_state", &PyEngine::load_state, "state"_a)
      .def("switch_plan", &PyEngine::switch_plan, "json"_a)
      .def("check_replicas", &PyEngine::check_replicas, "tensors"_a, "Of each tensor name, address and bytes.")
      .def("start_trace", &PyEngine::start_trace, "capacity"_a)
      .def("trace_json", &PyEngine::trace_json)
      .def("take_news", &PyEngine::take_news, "What auto has to say since the last call.")
      .def("decision", &PyEngine::decision, "Of auto; else None.")
      .def_prop_ro("is_auto", &PyEngine::is_auto)
      .def_prop_ro("may_pass", &PyEngine::may_pass, "Of auto; else false.")
      .def_prop_ro("spec", &PyEngine::spec)
      .def_prop_ro("timeout_s", &PyEngine::timeout_s)
      .def_prop_ro("sends_buffers", &PyEngine::sends_buffers);

  bind_kfac(m);
  bind_profiles(m);

  m.def(
      "write_file",
      [](const nb::bytes& path, const std::string& text) {
        check(cortado::write_file({path.c_str(), path.size()}, text));
      },
      "path"_a, "text"_a, "Replaces a file once all of the text is written.");
  // Views of a trace, given as the text of a file cortado.trace/1.
  m.def(
      "trace_to_text", [](const std::string& json) { return cortado::trace_to_text(trace_of(json)); }, "json"_a);
  m.def(
      "trace_to_chrome", [](const std::string& json) { return cortado::trace_to_chrome(trace_of(json)); }, "json"_a);
  m.def(
      "summarize_trace",
      [](const std::string& json, bool by_tensor) {
        const cortado::Trace trace = trace_of(json);
        return by_tensor ? cortado::summarize_by_tensor(trace) : cortado::summarize_by_stage(trace);
      },
      "json"_a, "by_tensor"_a);
  m.def(
      "canonical_spec",
      [](const std::string& spec) {
        if (cortado::is_auto_spec(spec)) return unwrap(cortado::AutoOptions::parse(spec)).to_spec();
        return unwrap(cortado::EngineOptions::parse(spec)).to_spec();
      },
      "spec"_a, "Checks a codec string, or one of auto, and returns it with defaults left out.");
  m.def(
      "canonical_plan", [](const std::string& json) { return cortado::plan_to_json(plan_of(json)); }, "json"_a,
      "Checks the text of a plan and returns it as cortado writes it.");
  m.def(
      "save_plan",
      [](const std::string& json, const nb::bytes& path) {
        check(cortado::save_plan(plan_of(json), {path.c_str(), path.size()}));
      },
      "json"_a, "path"_a);
  m.def(
      "plan_hash", [](const std::string& json) { return cortado::plan_hash(plan_of(json)); }, "json"_a);
  m.def(
      "device_count",
      [](const std::string& path) { return unwrap(cortado::load_device_library(path))->device_count(); },
      "device_library"_a, "How many devices the library at this path finds.");
  m.def("compress", &compress, "array"_a, "spec"_a, "seed"_a = 0, "chunk_elems"_a = 0,
        "The bytes of a codec file (docs/wire_format.md).");
  m.def("decompress", &decompress, "data"_a, "as_torch"_a, "The array that a codec file holds.");
}

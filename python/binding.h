// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// What the parts of cortado._core share: errors as exceptions and the other way round, communicators over Python
// objects, the current device, lists of values.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cortado/communicator.h"
#include "cortado/device_library.h"
#include "cortado/status.h"

namespace cortado_python {

namespace nb = nanobind;

// Of an error that came up in a function called from C++, through which nothing may be thrown. What stops a program
// (Ctrl-C) is kept, and raised as itself by the next raise() of the thread.
std::string text_of(nb::python_error& error);

// Raises what cortado/errors.py makes of the status; a Ctrl-C that came up in a function called from C++ as itself.
[[noreturn]] void raise(const cortado::Status& status);

inline void check(const cortado::Status& status) {
  if (!status.ok()) raise(status);
}

template <typename T>
T unwrap(cortado::Result<T>&& result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

// Calls without the GIL, and raises what went wrong with it.
template <typename F>
void checked_without_gil(F&& call) {
  cortado::Status status;
  {
    nb::gil_scoped_release release;
    status = call();
  }
  check(status);
}

template <typename F>
auto unwrapped_without_gil(F&& call) {
  auto result = [&] {
    nb::gil_scoped_release release;
    return call();
  }();
  return unwrap(std::move(result));
}

// An object that one thread at a time may use. A call that lets go of the GIL, itself or in a function of the
// communicator, is noted while it runs; another thread that comes meanwhile gets an error. The same one may: a signal
// handler runs in the thread that waits for a peer. All with the GIL held.
class OneThread {
 public:
  // `what` it is, for the error: "engine".
  explicit OneThread(const char* what) : what_(what) {}

  // For what is done before the GIL is let go of.
  void refuse_others() const {
    if (call_ == nullptr || thread_ == std::this_thread::get_id()) return;
    raise(cortado::make_error(cortado::StatusCode::kFailedPrecondition,
                              "the %s is in %s() on another thread, and takes one at a time: call it from the thread "
                              "that trains",
                              what_, call_));
  }

  // Such a call, from its construction on.
  class Call {
   public:
    Call(OneThread& object, const char* name) : object_(object), before_(object.call_) {
      object_.refuse_others();
      object_.call_ = name;
      object_.thread_ = std::this_thread::get_id();
    }
    ~Call() { object_.call_ = before_; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    OneThread& object_;
    const char* before_;
  };

 private:
  const char* what_;
  const char* call_ = nullptr;  // that runs; the outermost one's thread
  std::thread::id thread_;
};

// What works on a device makes it the current one of the thread; the caller gets his own back. Null: there is none.
class CurrentDevice {
 public:
  explicit CurrentDevice(const cortado::DeviceLibrary* library) : library_(library) {
    if (library_ != nullptr) before_ = library_->current_device();
  }
  ~CurrentDevice() {
    if (library_ != nullptr) library_->set_current_device(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const cortado::DeviceLibrary* library_;
  int before_ = 0;
};

// The process group that a Python object stands for (group.py), or a rank that is alone where it is None. The object
// and the name live in here.
class PyCommunicator {
 public:
  // `is_checked`: what collectives deliver is compared with what the ranks sent (make_checking_communicator).
  PyCommunicator(nb::object group, int rank, int world_size, const std::string& name, bool is_checked = false);

  cortado::Communicator* get() const { return communicator_; }

 private:
  nb::object group_;
  std::string name_;
  std::unique_ptr<cortado::LocalGroup> alone_;
  std::unique_ptr<cortado::Communicator> owned_;
  std::unique_ptr<cortado::Communicator> checking_;
  cortado::Communicator* communicator_ = nullptr;
};

nb::object to_numpy(std::vector<float>&& values);
std::vector<float> to_vector(nb::handle array);

void bind_kfac(nb::module_& m);      // kfac_module.cc
void bind_profiles(nb::module_& m);  // profile_module.cc

}  // namespace cortado_python

// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
//
// Status and Result<T>: the one error type of Cortado. The library does not throw, print or exit; every
// function that can fail returns one of these and the text says what, where, expected and got.
// Both are value types without shared state; distinct objects may be used from distinct threads.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cortado {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,     // a value the caller passed is wrong; nothing was changed
  kNotFound,            // a name (codec, option, tensor, file) is unknown
  kFailedPrecondition,  // the call comes at the wrong time (attached twice, engine already failed)
  kCorruptData,         // bytes that came from outside are damaged, cut short or foreign
  kUnsupported,         // legal, but not by this build, machine or version
  kMismatch,            // ranks disagree (settings, tensors, plans)
  kTimeout,             // a peer did not answer in time
  kPeerFailed,          // a peer is gone or reported an error
  kIoError,             // the operating system refused
  kInternal,            // a broken invariant of Cortado itself
};

// "invalid argument", "timeout" ...: the words used in messages and by the Python exceptions.
std::string_view status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // Of a step, or a collective: true if what returned it can't be used any more. What ranks agree to refuse together
  // (a plan, a state, replicas that differ) is kMismatch, too, and ends nothing where its function says so.
  bool is_fatal() const;

  // "timeout: all-reduce of message 2 ..."; "ok" for success.
  std::string to_string() const;

  // The same error with `context + ": "` in front of its message; ok stays ok.
  Status with_context(std::string_view context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// printf-like construction of an error.
[[gnu::format(printf, 2, 3)]] Status make_error(StatusCode code, const char* format, ...);

// Either a value or the error that kept it from being made. value() on an error is a programming error and ends
// the process with the message.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: conversion is the point
  Result(Status status) : status_(std::move(status)) {}  // NOLINT

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& value() & { return require(), *value_; }
  const T& value() const& { return require(), *value_; }
  T&& value() && { return require(), *std::move(value_); }

 private:
  void require() const;

  std::optional<T> value_;
  Status status_;
};

// Ends the process with the text of `status`; what Result::value() does when there is none.
[[noreturn]] void die_of_missing_value(const Status& status);

template <typename T>
void Result<T>::require() const {
  if (!value_.has_value()) die_of_missing_value(status_);
}

}  // namespace cortado

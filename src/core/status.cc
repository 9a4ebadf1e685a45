// Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
#include "cortado/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "core/format.h"

namespace cortado {

std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kNotFound:
      return "not found";
    case StatusCode::kFailedPrecondition:
      return "failed precondition";
    case StatusCode::kCorruptData:
      return "corrupt data";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kMismatch:
      return "mismatch";
    case StatusCode::kTimeout:
      return "timeout";
    case StatusCode::kPeerFailed:
      return "peer failed";
    case StatusCode::kIoError:
      return "input/output error";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown error";
}

bool Status::is_fatal() const {
  // What the ranks no longer agree on can't be mended by one of them; a refused argument changes nothing.
  return code_ == StatusCode::kMismatch || code_ == StatusCode::kTimeout || code_ == StatusCode::kPeerFailed ||
         code_ == StatusCode::kCorruptData || code_ == StatusCode::kInternal;
}

std::string Status::to_string() const {
  std::string text(status_code_name(code_));
  if (!message_.empty()) text += ": " + message_;
  return text;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return Status(code_, std::string(context) + ": " + message_);
}

Status make_error(StatusCode code, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string message = format_arguments(format, arguments);
  va_end(arguments);
  return Status(code, std::move(message));
}

void die_of_missing_value(const Status& status) {
  std::fprintf(stderr, "value() of a Result that holds an error: %s\n", status.to_string().c_str());
  std::abort();
}

}  // namespace cortado

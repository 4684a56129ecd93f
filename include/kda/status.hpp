// SPDX-License-Identifier: Apache-2.0
// Status: how every call of libkda reports success or failure. The library never throws across its
// API, prints, or exits; callers that prefer exceptions wrap calls in throw_if_error().
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kda {

/// A kind of failure. Values are part of the C ABI: the list only grows.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< an argument contradicts the documented contract; the message names it
  kUnsupported = 2,      ///< legal, but no implementation of this build serves it
  kUnavailable = 3,      ///< the named device or backend does not exist here
  kOutOfMemory = 4,      ///< a host allocation failed; nothing was written
  kOutOfResources = 5,   ///< a thread could not be started; nothing was written
  kInternal = 6,         ///< a bug in libkda
  kDeviceError = 7,      ///< a CUDA call failed; the message has the call and the launch shape
};

/// Short lower-case name of a code, e.g. "invalid argument".
const char* status_code_name(StatusCode code) noexcept;

/// A code and, unless it is kOk, a message that names the argument, what came and what is accepted.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) noexcept
      : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// The exception form of a Status.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status)
      : std::runtime_error(status.message()), code_(status.code()) {}
  StatusCode code() const noexcept { return code_; }

 private:
  StatusCode code_;
};

/// Throws kda::Error unless `status` is ok.
inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace kda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "logitless/result.h"

namespace logitless::cli {

// The program's exit codes, as documented in `logitless --help`.
inline constexpr int kExitFine = 0;
inline constexpr int kExitVerificationFailed = 1;
inline constexpr int kExitRegression = 1;  // a benchmark is slower than its baseline
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitCancelled = 130;  // 128 + SIGINT, the shell's convention

// Ends a command with one sentence on stderr. Thrown by commands only and caught in main; the
// library part (safetensors, cases) returns Result instead.
struct Failure {
  int exit_code = kExitBadInput;
  std::string message;
};

[[noreturn]] inline void fail(std::string message) {
  throw Failure{.exit_code = kExitBadInput, .message = std::move(message)};
}

[[noreturn]] inline void fail(const Error& error) {
  throw Failure{.exit_code = error.kind == ErrorKind::cancelled ? kExitCancelled : kExitBadInput,
                .message = error.message};
}

template <typename T>
T take(Result<T> result) {
  if (!result) fail(result.error());
  return std::move(result).value();
}

inline void take(const Result<void>& result) {
  if (!result) fail(result.error());
}

}  // namespace logitless::cli

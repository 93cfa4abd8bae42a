// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "logitless/export.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// What went wrong, in few kinds; the sentence with the values is Error::message.
enum class ErrorKind : int32_t {
  invalid_argument = 1,  // an argument breaks a rule; found before anything is written
  invalid_data = 2,      // the contents of a buffer break a rule (a target out of range); ditto
  workspace_too_small = 3,
  limit_too_small = 4,  // workspace_limit_bytes is below the least possible workspace
  cancelled = 5,        // the cancel token fired; the outputs' contents are unspecified
  isa_unusable = 6,     // the instruction set asked for is unknown or not offered by this CPU
  communication = 7,    // the transport between ranks failed
  wrong_type = 8,       // an argument's element type is not one that is taken; found like 1
};

struct Error {
  ErrorKind kind = ErrorKind::invalid_argument;
  std::string message;  // one sentence: argument, what came, what is allowed
};

// A value or an Error; shares its vocabulary with C++23's std::expected and can be retired for it.
template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }
  // Precondition: has_value().
  T& value() & { return assert(has_value()), *std::get_if<0>(&state_); }
  const T& value() const& { return assert(has_value()), *std::get_if<0>(&state_); }
  T&& value() && { return assert(has_value()), std::move(*std::get_if<0>(&state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  // Precondition: !has_value().
  const Error& error() const { return assert(!has_value()), *std::get_if<1>(&state_); }

  template <typename F>
  auto and_then(F&& f) && -> std::invoke_result_t<F, T&&> {
    if (!has_value()) return error();
    return std::forward<F>(f)(std::move(*this).value());
  }
  template <typename F>
  auto transform(F&& f) && -> Result<std::invoke_result_t<F, T&&>> {
    if (!has_value()) return error();
    return std::forward<F>(f)(std::move(*this).value());
  }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  Result() = default;
  Result(Error error) : error_(std::move(error)), ok_(false) {}

  bool has_value() const noexcept { return ok_; }
  explicit operator bool() const noexcept { return ok_; }
  const Error& error() const { return assert(!ok_), error_; }

  template <typename F>
  auto and_then(F&& f) && -> std::invoke_result_t<F> {
    if (!ok_) return error_;
    return std::forward<F>(f)();
  }

 private:
  Error error_;
  bool ok_ = true;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

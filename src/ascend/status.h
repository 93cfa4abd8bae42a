// SPDX-License-Identifier: Apache-2.0
// What every C function returns and leaves behind: a code, and a message that the calling thread
// can fetch once. Also the only try block of the C face.
#pragma once

#include <cstdint>
#include <exception>
#include <locale>
#include <new>
#include <sstream>
#include <string>
#include <utility>

#include "acl/acl_rt.h"
#include "aclnn/opdev/op_errno.h"

namespace logitless::ascend {

// 0, or a code with one sentence: which argument, what came, what is allowed.
struct [[nodiscard]] Status {
  int32_t code = 0;
  std::string message;
  bool ok() const { return code == 0; }
};

// The values one after the other, numbers without a locale's separators.
template <class... Values>
std::string text(const Values&... values) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  (stream << ... << values);
  return std::move(stream).str();
}

template <class... Values>
Status failure(int32_t code, const Values&... values) {
  return {code, text(values...)};
}

// Replaces what aclGetRecentErrMsg returns next on this thread. `function`: the C function's name.
void leave_message(const char* function, const Status& status) noexcept;
// The same for something worth saying about a call that succeeded.
void leave_hint(const char* function, const std::string& hint) noexcept;
// The pending message, which is cleared, or null.
const char* take_message() noexcept;

// The last failure of a runtime function on this thread.
int32_t last_runtime_error(bool clear) noexcept;
void set_last_runtime_error(int32_t code) noexcept;

enum class Face { runtime, aclnn };

// Runs body() -> Status on behalf of a C function; nothing thrown gets further.
template <class Body>
int32_t at_c_boundary(Face face, const char* function, const Body& body) noexcept {
  int32_t code = 0;
  try {
    const Status status = body();
    code = status.code;
    if (code != 0) leave_message(function, status);
  } catch (const std::bad_alloc&) {
    code = face == Face::runtime ? ACL_ERROR_BAD_ALLOC : ACLNN_ERR_INNER;
    leave_message(function, {code, {}});
  } catch (...) {
    code = face == Face::runtime ? ACL_ERROR_INTERNAL_ERROR : ACLNN_ERR_INNER;
    leave_message(function, {code, {}});
  }
  if (code != 0 && face == Face::runtime) set_last_runtime_error(code);
  return code;
}

template <class Body>
aclError runtime_call(const char* function, const Body& body) noexcept {
  return at_c_boundary(Face::runtime, function, body);
}

template <class Body>
int32_t aclnn_call(const char* function, const Body& body) noexcept {
  return at_c_boundary(Face::aclnn, function, body);
}

}  // namespace logitless::ascend

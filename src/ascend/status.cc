// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>

namespace logitless::ascend {
namespace {

// Plain arrays, so that no destructor runs at the end of a thread: a client's static destructors
// may still call us then. Longer messages are cut.
struct Messages {
  char pending[2048];
  char taken[2048];
  bool has_pending;
  int32_t last_runtime_error;
};
thread_local Messages messages = {};

const char* kind_of(int32_t code) {
  switch (code / 1000) {
    case 100:
    case 107:
    case 161:
      return "AclNN_Parameter_Error(EZ1001)";
    case 200:
    case 207:
    case 361:
    case 507:
      return "AclNN_Runtime_Error(EZ9903)";
    default:
      return "AclNN_Inner_Error(EZ9999)";
  }
}

void leave(const char* kind, const char* function, const char* sentence) {
  timeval now = {};
  gettimeofday(&now, nullptr);
  tm local = {};
  localtime_r(&now.tv_sec, &local);
  char time[32] = {};
  strftime(time, sizeof(time), "%Y-%m-%d-%H:%M:%S", &local);
  snprintf(messages.pending, sizeof(messages.pending), "[PID: %d] %s.%03d.%03d %s: %s: %s",
           static_cast<int>(getpid()), time, static_cast<int>(now.tv_usec / 1000),
           static_cast<int>(now.tv_usec % 1000), kind, function, sentence);
  messages.has_pending = true;
}

}  // namespace

void leave_message(const char* function, const Status& status) noexcept {
  const bool known = !status.message.empty();
  const bool memory = status.code == ACL_ERROR_BAD_ALLOC || status.code == ACLNN_ERR_INNER;
  leave(kind_of(status.code), function,
        known    ? status.message.c_str()
        : memory ? "out of host memory or an unexpected exception"
                 : "an unexpected exception");
}

void leave_hint(const char* function, const std::string& hint) noexcept {
  leave("AclNN_Hint", function, hint.c_str());
}

const char* take_message() noexcept {
  if (!messages.has_pending) return nullptr;
  snprintf(messages.taken, sizeof(messages.taken), "%s", messages.pending);
  messages.has_pending = false;
  return messages.taken;
}

int32_t last_runtime_error(bool clear) noexcept {
  const int32_t code = messages.last_runtime_error;
  if (clear) messages.last_runtime_error = 0;
  return code;
}

void set_last_runtime_error(int32_t code) noexcept { messages.last_runtime_error = code; }

}  // namespace logitless::ascend

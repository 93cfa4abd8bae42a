// SPDX-License-Identifier: Apache-2.0
// Process, device, contexts.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "aclnn/aclnn_base.h"
#include "device.h"
#include "logitless/tensor.h"
#include "memory.h"
#include "tensor.h"

namespace logitless::ascend {

Registry& Registry::instance() {
  static Registry* const registry = new Registry;
  return *registry;
}

Device& Device::instance() {
  static Device* const device = new Device;
  return *device;
}

namespace {

thread_local void* chosen_context = nullptr;

Status check_device_id(int32_t deviceId) {
  if (deviceId == 0) return {};
  return failure(ACL_ERROR_RT_INVALID_DEVICEID, "deviceId: is ", deviceId,
                 ", must be 0: there is one device, the CPU");
}

Status check_not_on_stream_thread() {
  if (!on_stream_thread()) return {};
  return failure(ACL_ERROR_RT_INTERNAL_ERROR,
                 "called from a stream's own callback, which would wait for itself");
}

void* make_context(bool is_default) {
  // The default stream's context is known only afterwards; nobody asks a default stream for it.
  auto context = std::make_shared<Context>();
  context->is_default = is_default;
  context->default_stream = std::make_shared<Stream>(nullptr);
  return Registry::instance().add(std::move(context));
}

// The context is no longer to be found.
void close_context(void* handle, bool drop) {
  const std::shared_ptr<Context> context = Registry::instance().take<Context>(handle);
  if (!context) return;
  for (const std::shared_ptr<Stream>& stream : Registry::instance().take_if<Stream>(
           [&](const Stream& s) { return s.context() == handle; })) {
    forget_subscription(*stream);
    stream->close(drop);
  }
  forget_subscription(*context->default_stream);
  context->default_stream->close(drop);
}

std::vector<std::shared_ptr<Stream>> all_streams() {
  std::vector<std::shared_ptr<Stream>> streams = Registry::instance().all<Stream>();
  for (const auto& context : Registry::instance().all<Context>()) {
    streams.push_back(context->default_stream);
  }
  std::sort(streams.begin(), streams.end(),
            [](const auto& a, const auto& b) { return a->id() < b->id(); });
  return streams;
}

Status synchronize_device(int32_t timeout) {
  if (timeout < -1) {
    return failure(ACL_ERROR_RT_PARAM_INVALID, "timeout: is ", timeout,
                   ", must be at least -1 (milliseconds, -1 = for ever)");
  }
  if (Status status = check_not_forked(); !status.ok()) return status;
  if (Status status = check_not_on_stream_thread(); !status.ok()) return status;
  if (Status status = current_context(nullptr); !status.ok()) return status;
  const Deadline deadline = deadline_after(timeout);
  const auto streams = all_streams();
  for (const auto& stream : streams) {
    if (!stream->wait_idle(deadline)) {
      return failure(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "timeout: stream ", stream->id(),
                     " is not done after ", timeout, " ms");
    }
  }
  Status failed;
  for (const auto& stream : streams) {
    const Status status = stream->take_failure();
    if (status.ok()) continue;
    if (failed.ok()) failed.code = status.code;
    failed.message += (failed.message.empty() ? "" : "; ") + status.message;
  }
  return failed;
}

Status reset_device(int32_t deviceId, bool force) {
  if (Status status = check_device_id(deviceId); !status.ok()) return status;
  if (Status status = check_not_on_stream_thread(); !status.ok()) return status;
  void* context = nullptr;
  Device& device = Device::instance();
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.users == 0) {
      if (force) return {};
      return failure(ACL_ERROR_RT_CONTEXT_NULL,
                     "deviceId: 0 is not set (any more), call aclrtSetDevice first");
    }
    device.users = force ? 0 : device.users - 1;
    if (device.users == 0) std::swap(context, device.default_context);
  }
  // In a forked child the streams' threads are gone: there is nothing to wait for.
  if (context != nullptr && !streams_lost_in_fork()) close_context(context, force);
  return {};
}

Status drop_inits(int64_t left, uint64_t* refCount) {
  if (Status status = check_not_on_stream_thread(); !status.ok()) return status;
  Device& device = Device::instance();
  {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.inits == 0) {
      return failure(ACL_ERROR_REPEAT_FINALIZE, "aclInit was not called, or was undone already");
    }
    device.inits = left < 0 ? device.inits - 1 : left;
    if (refCount != nullptr) *refCount = static_cast<uint64_t>(device.inits);
    if (device.inits > 0) return {};
  }
  if (streams_lost_in_fork()) return {};
  for (const auto& stream : all_streams()) stream->wait_idle({});
  return {};
}

Status check_last_error_level(aclrtLastErrLevel level) {
  if (level == ACL_RT_THREAD_LEVEL) return {};
  return failure(ACL_ERROR_INVALID_PARAM, "level: is ", static_cast<int>(level), ", must be 0");
}

// Makes fork safe: the child finds every mutex that it may still use free, and knows whether the
// parent had threads that did not come along.
std::atomic<bool> forked_with_streams{false};

void before_fork() {
  Device::instance().mutex.lock();
  Registry::instance().mutex().lock();
  Allocations::instance().mutex().lock();
}

void after_fork_in_parent() {
  Allocations::instance().mutex().unlock();
  Registry::instance().mutex().unlock();
  Device::instance().mutex.unlock();
}

void after_fork_in_child() {
  if (Stream::any_started()) forked_with_streams.store(true);
  after_fork_in_parent();
}

const int fork_handlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

bool streams_lost_in_fork() { return forked_with_streams.load(); }

Status check_not_forked() {
  if (!streams_lost_in_fork()) return {};
  return failure(ACL_ERROR_RT_INTERNAL_ERROR,
                 "this process was forked from one with streams, whose threads did not come along: "
                 "neither streams nor events work here");
}

Status current_context(std::shared_ptr<Context>* context, void** handle) {
  std::shared_ptr<Context> found;
  if (chosen_context != nullptr) found = Registry::instance().find<Context>(chosen_context);
  if (!found) {
    return failure(
        ACL_ERROR_RT_CONTEXT_NULL,
        "this thread has no device, call aclrtSetDevice or aclrtSetCurrentContext first");
  }
  if (handle != nullptr) *handle = chosen_context;
  if (context != nullptr) *context = std::move(found);
  return {};
}

}  // namespace logitless::ascend

using namespace logitless::ascend;

extern "C" {

aclError aclInit(const char* configPath) {
  return runtime_call(__func__, [&]() -> Status {
    if (configPath != nullptr && configPath[0] != '\0' && access(configPath, R_OK) != 0) {
      return failure(ACL_ERROR_INVALID_FILE, "configPath: cannot read ", configPath);
    }
    Device& device = Device::instance();
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.inits++ > 0) {
      return failure(ACL_ERROR_REPEAT_INITIALIZE, "was called already; now counted ", device.inits,
                     " times");
    }
    return {};
  });
}

aclError aclFinalize(void) {
  return runtime_call(__func__, [&] { return drop_inits(0, nullptr); });
}

aclError aclFinalizeReference(uint64_t* refCount) {
  return runtime_call(__func__, [&] { return drop_inits(-1, refCount); });
}

const char* aclGetRecentErrMsg(void) { return take_message(); }

aclError aclrtGetVersion(int32_t* majorVersion, int32_t* minorVersion, int32_t* patchVersion) {
  return runtime_call(__func__, [&]() -> Status {
    if (majorVersion == nullptr || minorVersion == nullptr || patchVersion == nullptr) {
      return failure(ACL_ERROR_INVALID_PARAM,
                     "majorVersion, minorVersion, patchVersion: one is null");
    }
    *majorVersion = ACL_MAJOR_VERSION;
    *minorVersion = ACL_MINOR_VERSION;
    *patchVersion = ACL_PATCH_VERSION;
    return {};
  });
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level) {
  const aclError status = runtime_call(__func__, [&] { return check_last_error_level(level); });
  return status != 0 ? status : last_runtime_error(false);
}

aclError aclrtGetLastError(aclrtLastErrLevel level) {
  const aclError status = runtime_call(__func__, [&] { return check_last_error_level(level); });
  return status != 0 ? status : last_runtime_error(true);
}

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t) {
  return runtime_call(__func__, [&]() -> Status {
    const int value = static_cast<int>(opt);
    if (value >= ACL_OPT_DETERMINISTIC && value <= ACL_OPT_ENABLE_KERNEL_EARLY_START) return {};
    return failure(ACL_ERROR_INVALID_PARAM, "opt: is ", value, ", must be 0 to 3");
  });
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t) {
  return runtime_call(__func__, [&]() -> Status {
    const int value = static_cast<int>(opt);
    if (value < ACL_OPT_DETERMINISTIC || value > ACL_OPT_ENABLE_KERNEL_EARLY_START) {
      return failure(ACL_ERROR_INVALID_PARAM, "opt: is ", value, ", must be 0 to 3");
    }
    return current_context(nullptr);
  });
}

aclError aclrtSetDevice(int32_t deviceId) {
  return runtime_call(__func__, [&]() -> Status {
    if (Status status = check_device_id(deviceId); !status.ok()) return status;
    Device& device = Device::instance();
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.default_context == nullptr) device.default_context = make_context(true);
    ++device.users;
    chosen_context = device.default_context;
    return {};
  });
}

aclError aclrtResetDevice(int32_t deviceId) {
  return runtime_call(__func__, [&] { return reset_device(deviceId, false); });
}

aclError aclrtResetDeviceForce(int32_t deviceId) {
  return runtime_call(__func__, [&] { return reset_device(deviceId, true); });
}

aclError aclrtGetDevice(int32_t* deviceId) {
  return runtime_call(__func__, [&]() -> Status {
    if (deviceId == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "deviceId: is null");
    if (Status status = current_context(nullptr); !status.ok()) return status;
    *deviceId = 0;
    return {};
  });
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  return runtime_call(__func__, [&]() -> Status {
    if (count == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "count: is null");
    *count = 1;
    return {};
  });
}

aclError aclrtGetRunMode(aclrtRunMode* runMode) {
  return runtime_call(__func__, [&]() -> Status {
    if (runMode == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "runMode: is null");
    *runMode = ACL_HOST;
    return {};
  });
}

aclError aclrtSynchronizeDevice(void) {
  return runtime_call(__func__, [&] { return synchronize_device(-1); });
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  return runtime_call(__func__, [&] { return synchronize_device(timeout); });
}

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
  return runtime_call(__func__, [&]() -> Status {
    if (context == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "context: is null");
    if (Status status = check_device_id(deviceId); !status.ok()) return status;
    if (Status status = check_not_forked(); !status.ok()) return status;
    chosen_context = make_context(false);
    *context = chosen_context;
    return {};
  });
}

aclError aclrtDestroyContext(aclrtContext context) {
  return runtime_call(__func__, [&]() -> Status {
    if (context == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "context: is null");
    if (Status status = check_not_forked(); !status.ok()) return status;
    if (Status status = check_not_on_stream_thread(); !status.ok()) return status;
    const std::shared_ptr<Context> found = Registry::instance().find<Context>(context);
    if (!found) {
      return failure(ACL_ERROR_RT_INVALID_HANDLE,
                     "context: is not a living context (destroyed, or not from here)");
    }
    if (found->is_default) {
      return failure(ACL_ERROR_RT_PARAM_INVALID,
                     "context: is the device's default one, which aclrtResetDevice releases");
    }
    close_context(context, false);
    return {};
  });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return runtime_call(__func__, [&]() -> Status {
    if (context == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "context: is null");
    if (!Registry::instance().find<Context>(context)) {
      return failure(ACL_ERROR_RT_INVALID_HANDLE,
                     "context: is not a living context (destroyed, or not from here)");
    }
    chosen_context = context;
    return {};
  });
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  return runtime_call(__func__, [&]() -> Status {
    if (context == nullptr) return failure(ACL_ERROR_INVALID_PARAM, "context: is null");
    void* handle = nullptr;
    if (Status status = current_context(nullptr, &handle); !status.ok()) return status;
    *context = handle;
    return {};
  });
}

aclnnStatus aclnnInit(const char*) { return ACLNN_SUCCESS; }

aclnnStatus aclnnFinalize() { return ACLNN_SUCCESS; }

size_t aclDataTypeSize(aclDataType dataType) { return size_of_data_type(dataType); }

float aclFloat16ToFloat(aclFloat16 value) {
  logitless::float16 half;
  half.bits = value;
  return static_cast<float>(half);
}

aclFloat16 aclFloatToFloat16(float value) { return logitless::float16(value).bits; }

const char* aclrtGetSocName(void) { return "Logitless_CPU"; }

void aclAppLog(aclLogLevel logLevel, const char* func, const char* file, uint32_t line,
               const char* fmt, ...) {
  const char* const to_stdout = getenv("ASCEND_SLOG_PRINT_TO_STDOUT");
  if (to_stdout == nullptr || strcmp(to_stdout, "1") != 0 || fmt == nullptr) return;
  const char* const least = getenv("ASCEND_GLOBAL_LOG_LEVEL");
  if (static_cast<int>(logLevel) < (least != nullptr ? atoi(least) : ACL_ERROR)) return;
  char message[1024];
  va_list values;
  va_start(values, fmt);
  vsnprintf(message, sizeof(message), fmt, values);
  va_end(values);
  static const char* const kNames[] = {"DEBUG", "INFO", "WARNING", "ERROR"};
  const int level = std::clamp(static_cast<int>(logLevel), 0, 3);
  printf("[%s] %s (%s:%u) %s\n", kNames[level], func != nullptr ? func : "",
         file != nullptr ? file : "", line, message);
}

// A per-thread host memory pool of the original: clients look these up and call them when found.
__attribute__((visibility("default"))) int InitHugeMemThreadLocal(void*, bool) { return 0; }
__attribute__((visibility("default"))) void UnInitHugeMemThreadLocal(void*, bool) {}
__attribute__((visibility("default"))) void ReleaseHugeMem(void*, bool) {}

}  // extern "C"

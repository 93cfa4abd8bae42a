// SPDX-License-Identifier: Apache-2.0
// The process's one device, its contexts, and which of them a thread has chosen.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "handles.h"
#include "status.h"
#include "stream.h"

namespace logitless::ascend {

struct Context {
  static constexpr HandleKind kKind = HandleKind::context;
  bool is_default = false;
  std::shared_ptr<Stream> default_stream;  // its handle is never told
};

struct Device {
  static Device& instance();  // never destroyed, as the registry
  std::mutex mutex;
  int64_t inits = 0;                // aclInit
  int64_t users = 0;                // aclrtSetDevice
  void* default_context = nullptr;  // handle, null without users
};

// 107002 when the thread has chosen no device, or what it chose is gone. handle may be null.
Status current_context(std::shared_ptr<Context>* context, void** handle = nullptr);

}  // namespace logitless::ascend

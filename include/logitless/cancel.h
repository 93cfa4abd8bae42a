// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include "logitless/export.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Set from any thread or signal handler; a running operator looks at it between tiles and then
// returns ErrorKind::cancelled. The outputs' contents are unspecified afterwards.
class CancelToken {
 public:
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  void reset() noexcept { cancelled_.store(false, std::memory_order_relaxed); }
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <pthread.h>

namespace logitless {
namespace {

std::atomic<bool> forked{false};

[[gnu::constructor]] void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

}  // namespace

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
#include "tests/support/allocation_hook.h"

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "tests/support/sanitizers.h"

// The __libc_ functions behind the replaced ones are glibc's.
#if LOGITLESS_SANITIZED || !defined(__GLIBC__)
#define LOGITLESS_NO_ALLOCATION_HOOK
#endif

namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> calls{0};

}  // namespace

#ifndef LOGITLESS_NO_ALLOCATION_HOOK
extern "C" {

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* old, size_t size);
void* __libc_memalign(size_t alignment, size_t size);

void* malloc(size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  return __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  return __libc_calloc(count, size);
}

void* realloc(void* old, size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  return __libc_realloc(old, size);
}

void* memalign(size_t alignment, size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  return __libc_memalign(alignment, size);
}

int posix_memalign(void** result, size_t alignment, size_t size) {
  if (armed.load(std::memory_order_relaxed)) ++calls;
  *result = __libc_memalign(alignment, size);
  return *result == nullptr ? ENOMEM : 0;
}

}  // extern "C"
#endif

namespace logitless::test {

bool allocation_hook_available() {
#ifdef LOGITLESS_NO_ALLOCATION_HOOK
  return false;
#else
  return true;
#endif
}

AllocationGuard::AllocationGuard() {
  calls = 0;
  armed = true;
}

AllocationGuard::~AllocationGuard() { armed = false; }

int64_t AllocationGuard::allocations() const { return calls; }

}  // namespace logitless::test

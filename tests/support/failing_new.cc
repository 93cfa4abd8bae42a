// SPDX-License-Identifier: Apache-2.0
#include "tests/support/failing_new.h"

#include <cstdlib>
#include <new>

#include "tests/support/sanitizers.h"

// The other sanitizers' operator new stands in the same place, and is not weak.
#if LOGITLESS_SANITIZED && !defined(LOGITLESS_ADDRESS_SANITIZED)
#define LOGITLESS_REPLACES_NEW 0
#else
#define LOGITLESS_REPLACES_NEW 1
#endif

namespace {

struct State {
  bool armed = false;
  int64_t before = 0;
  size_t bytes = 0;
};
thread_local State state;

#if LOGITLESS_REPLACES_NEW
void* allocate(size_t bytes, size_t alignment) {
  if (state.armed && bytes >= state.bytes && state.before-- == 0) throw std::bad_alloc();
  // aligned_alloc wants a multiple of the alignment.
  void* const memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes > 0 ? bytes : 1)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
#endif

}  // namespace

#if LOGITLESS_REPLACES_NEW
void* operator new(size_t bytes) { return allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
// All forms that the library has: a sanitizer wants what it allocated itself back by its own.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes, static_cast<size_t>(alignment));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

namespace logitless::test {

bool failing_new_available() { return LOGITLESS_REPLACES_NEW; }

FailingNew::FailingNew(int64_t before, size_t bytes) {
  state = {.armed = true, .before = before, .bytes = bytes};
}
FailingNew::~FailingNew() { state = {}; }
bool FailingNew::failed() const { return state.before < 0; }

}  // namespace logitless::test

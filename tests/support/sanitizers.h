// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// LOGITLESS_SANITIZED: built with a sanitizer that replaces malloc or keeps shadow memory.
// LOGITLESS_ADDRESS_SANITIZED: that one is AddressSanitizer.
#if defined(__SANITIZE_ADDRESS__)
#define LOGITLESS_ADDRESS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LOGITLESS_ADDRESS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(LOGITLESS_ADDRESS_SANITIZED)
#define LOGITLESS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif
#ifndef LOGITLESS_SANITIZED
#define LOGITLESS_SANITIZED 0
#endif

#ifdef LOGITLESS_ADDRESS_SANITIZED
#include <sanitizer/asan_interface.h>
#endif

namespace logitless::test {

inline constexpr bool kSanitized = LOGITLESS_SANITIZED == 1;
#ifdef LOGITLESS_ADDRESS_SANITIZED
inline constexpr bool kThreadSanitized = false;
#else
inline constexpr bool kThreadSanitized = kSanitized;
#endif

// Memory fresh from mmap may lie where the sanitizer's allocator had memory before, and still be
// marked as freed there.
inline void mark_as_mapped([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef LOGITLESS_ADDRESS_SANITIZED
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
}

}  // namespace logitless::test

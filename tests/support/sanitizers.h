// SPDX-License-Identifier: Apache-2.0
#pragma once

// LOGITLESS_SANITIZED: built with a sanitizer that replaces malloc or keeps shadow memory.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOGITLESS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define LOGITLESS_SANITIZED 1
#endif
#endif
#ifndef LOGITLESS_SANITIZED
#define LOGITLESS_SANITIZED 0
#endif

namespace logitless::test {
inline constexpr bool kSanitized = LOGITLESS_SANITIZED == 1;
}  // namespace logitless::test

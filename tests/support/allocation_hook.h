// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Counts calls of malloc, calloc, realloc, aligned_alloc, posix_memalign and memalign (so also of
// operator new) by any thread of this process while it is armed. Link allocation_hook.cc into the
// test program itself: its definitions then stand before the C library's. Sanitizers replace the
// same functions; there the hook is absent and available() says so.
namespace logitless::test {

bool allocation_hook_available();

class AllocationGuard {
 public:
  AllocationGuard();
  ~AllocationGuard();
  AllocationGuard(const AllocationGuard&) = delete;
  AllocationGuard& operator=(const AllocationGuard&) = delete;
  int64_t allocations() const;
};

}  // namespace logitless::test

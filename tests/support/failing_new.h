// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace logitless::test {

// While one lives, operator new throws std::bad_alloc once on this thread: for the allocation of at
// least `bytes` that `before` others came before. failing_new.cc replaces the program's operator
// new; ThreadSanitizer's cannot be replaced, and failing_new_available() says so.
bool failing_new_available();

class FailingNew {
 public:
  FailingNew(int64_t before, size_t bytes);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;
  bool failed() const;  // whether there was such an allocation
};

}  // namespace logitless::test

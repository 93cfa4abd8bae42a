// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/support/judge.h"
#include "tests/support/sanitizers.h"

#ifdef LOGITLESS_ADDRESS_SANITIZED
// clang's OpenMP keeps what it allocated for threads until the process ends.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp.so"; }
#endif

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  logitless::test::print_margins();
  return result;
}

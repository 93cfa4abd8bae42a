// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/support/judge.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  logitless::test::print_margins();
  return result;
}

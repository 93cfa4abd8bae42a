// SPDX-License-Identifier: Apache-2.0
#include "cli/table.h"

#include <gtest/gtest.h>

namespace logitless::cli {
namespace {

TEST(Table, AlignsColumnsByCharactersNotBytes) {
  Table table({{"name", Align::left}, {"n", Align::right}, {"", Align::left}});
  table.row({"é", "1", "✓"});
  table.row({"longer name", "1,000", "x"});
  table.row({"short row"});
  EXPECT_EQ(table.str(),
            "name             n\n"
            "---------------------\n"
            "é                1  ✓\n"
            "longer name  1,000  x\n"
            "short row\n");
}

TEST(Marks, ArePlainWhereStdoutIsNoTerminal) {
  if (stdout_is_terminal()) GTEST_SKIP() << "stdout is a terminal";
  EXPECT_STREQ(marks().good, "ok");
  EXPECT_STREQ(marks().bad, "BEYOND");
}

}  // namespace
}  // namespace logitless::cli

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "logitless/machine.h"
#include "logitless/options.h"

namespace logitless::test {

// A suite that runs once per usable instruction set; helpers that run plans assert that the plan
// really took it.
class IsaTest : public testing::TestWithParam<Isa> {
 protected:
  static constexpr int kThreads = 2;
  static Isa isa() { return GetParam(); }
  static PlanOptions options(int threads = kThreads) {
    return {.threads = threads, .isa = GetParam()};
  }
};

inline std::string isa_name(const testing::TestParamInfo<Isa>& info) { return name_of(info.param); }

#define LOGITLESS_INSTANTIATE_PER_ISA(suite)                                           \
  INSTANTIATE_TEST_SUITE_P(PerIsa, suite, testing::ValuesIn(logitless::usable_isas()), \
                           logitless::test::isa_name)

}  // namespace logitless::test

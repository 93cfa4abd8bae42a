// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "logitless/machine.h"
#include "logitless/options.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {
// How GoogleTest prints a parameter.
inline void PrintTo(Isa isa, std::ostream* out) { *out << name_of(isa); }
}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

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

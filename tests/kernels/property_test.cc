// SPDX-License-Identifier: Apache-2.0
// The laws of properties.h on random problems: by RapidCheck, which shrinks what fails, and on a
// fixed series per level.
#include <gtest/gtest.h>

#include "tests/kernels/kernel_fixture.h"
#include "tests/kernels/properties.h"

#ifdef LOGITLESS_RAPIDCHECK
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#endif

namespace logitless {
namespace {

using properties::Law;

class Properties : public testing::TestWithParam<std::tuple<Isa, Law>> {};

TEST_P(Properties, HoldOnAFixedSeries) {
  const auto& [isa, law] = GetParam();
  Random random(17);
  for (int problem = 0; problem < 1500; ++problem) {
    const std::string wrong = law.holds(*cpu::kernels_of(isa), [&](int64_t low, int64_t high) {
      return low + random.below(static_cast<int>(high - low + 1));
    });
    ASSERT_EQ(wrong, "") << "problem " << problem;
  }
}

#ifdef LOGITLESS_RAPIDCHECK
TEST_P(Properties, HoldOnAnyProblem) {
  const auto& [isa, law] = GetParam();
  const cpu::Kernels& kernels = *cpu::kernels_of(isa);
  const auto holds = law.holds;
  EXPECT_TRUE(rc::check(law.name, [&] {
    const std::string wrong = holds(kernels, [](int64_t low, int64_t high) {
      return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(low, high + 1));
    });
    if (!wrong.empty()) RC_FAIL(wrong);
  }));
}
#endif

INSTANTIATE_TEST_SUITE_P(PerIsa, Properties,
                         testing::Combine(testing::ValuesIn(usable_isas()),
                                          testing::ValuesIn(properties::kLaws)),
                         [](const auto& p) {
                           return std::string(name_of(std::get<0>(p.param))) + "_" +
                                  std::get<1>(p.param).name;
                         });

}  // namespace
}  // namespace logitless

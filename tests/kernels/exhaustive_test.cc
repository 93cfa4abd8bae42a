// SPDX-License-Identifier: Apache-2.0
// All 2^32 floats, on every level that this CPU offers: minutes, so a slow test.
#include <cstdio>

#include "tests/kernels/all_floats.h"
#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

std::vector<const cpu::Kernels*> levels() {
  std::vector<const cpu::Kernels*> all;
  for (const Isa isa : usable_isas()) all.push_back(cpu::kernels_of(isa));
  return all;
}

TEST(Exhaustive, ExpOfEveryFloatIsWithinTwoUlpOnEveryLevel) {
  const auto worst = worst_exp_error(levels(), 1);
  for (size_t i = 0; i < worst.size(); ++i) {
    const char* name = name_of(levels()[i]->isa);
    std::printf("%s: worst error %.3f ulp of %.0f permitted\n", name, worst[i], kPermittedUlp);
    EXPECT_LE(worst[i], kPermittedUlp) << name;
  }
}

TEST(Exhaustive, EveryFloatIsStoredAndPackedAsTheStorageTypesSayOnEveryLevel) {
  const auto wrong = wrong_conversions(levels(), 1);
  for (size_t i = 0; i < wrong.size(); ++i) EXPECT_EQ(wrong[i], 0) << name_of(levels()[i]->isa);
}

}  // namespace
}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kPermittedUlp = 2.0;  // docs/numerics.md quotes this number

class Exp : public KernelTest {};

// Distance of y from exp(x) in units of the last place of the exact value.
double ulp_error(float x, float y) {
  const double exact = std::exp(static_cast<double>(x));
  if (std::isnan(x)) return std::isnan(y) ? 0 : kInf;
  if (exact > static_cast<double>(std::numeric_limits<float>::max())) {
    return y == kInf || y == std::numeric_limits<float>::max() ? 0 : kInf;
  }
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::fabs(static_cast<double>(y) - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Worst error over every `step`-th float.
double worst_error(const cpu::Kernels& kernels, uint64_t step) {
  constexpr int64_t kBlock = 4096;
  const auto count = static_cast<int64_t>((uint64_t{1} << 32) / step);
  double worst = 0;
#pragma omp parallel for reduction(max : worst) schedule(static)
  for (int64_t block = 0; block < count; block += kBlock) {
    float x[kBlock];
    float y[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) {
      x[i] = std::bit_cast<float>(static_cast<uint32_t>(static_cast<uint64_t>(block + i) * step));
    }
    kernels.exp(x, kBlock, y);
    for (int64_t i = 0; i < kBlock; ++i) {
      // An infinite or NaN error must survive the comparison.
      const double error = ulp_error(x[i], y[i]);
      if (!(error <= worst)) worst = error;
    }
  }
  return worst;
}

TEST_P(Exp, SampledFloatsAreWithinTwoUlp) {
  const double worst = worst_error(kernels(), 4099);
  RecordProperty("worst_ulp", std::to_string(worst));
  EXPECT_LE(worst, kPermittedUlp);
}

TEST_P(Exp, ExhaustiveFloatsAreWithinTwoUlp) {
  SKIP_REPEATED_VECTOR_CODE();
  const double worst = worst_error(kernels(), 1);
  std::printf("%s: worst error %.3f ulp of %.0f permitted\n", name_of(GetParam()), worst,
              kPermittedUlp);
  EXPECT_LE(worst, kPermittedUlp);
}

TEST_P(Exp, SpecialValuesAreExact) {
  const float x[] = {-kInf, kInf, 0.0f, -0.0f, std::nanf(""), -104.0f, 89.0f, -1e30f, 1e30f};
  float y[9];
  kernels().exp(x, 9, y);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], kInf);
  EXPECT_EQ(y[2], 1.0f);
  EXPECT_EQ(y[3], 1.0f);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0f);
  EXPECT_EQ(y[6], kInf);
  EXPECT_EQ(y[7], 0.0f);
  EXPECT_EQ(y[8], kInf);
}

TEST_P(Exp, AnElementDoesNotDependOnItsPlace) {
  Random random(1);
  float x[67];
  float y[67];
  for (float& v : x) v = 50.0f * random.uniform();
  kernels().exp(x, 67, y);
  for (int i = 0; i < 67; ++i) {
    float alone = 0;
    kernels().exp(x + i, 1, &alone);
    EXPECT_EQ(std::bit_cast<uint32_t>(alone), std::bit_cast<uint32_t>(y[i])) << i;
  }
}

TEST_P(Exp, SoftmaxIsExpTimesTheInverseSum) {
  Random random(2);
  float x[45];
  float y[45];
  for (float& v : x) v = 5.0f * random.uniform();
  kernels().softmax(x, 45, 4.0f, 0.125f, y);
  for (int i = 0; i < 45; ++i) {
    const double exact = std::exp(static_cast<double>(x[i] - 4.0f)) * 0.125;
    EXPECT_NEAR(y[i], exact, 3 * 0x1p-24 * exact) << i;
  }
}

LOGITLESS_PER_ISA(Exp);

}  // namespace
}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/all_floats.h"
#include "tests/kernels/kernel_fixture.h"

namespace logitless {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class Exp : public KernelTest {};

TEST_P(Exp, SampledFloatsAreWithinTwoUlp) {
  const double worst = worst_exp_error({&kernels()}, 4099)[0];
  RecordProperty("worst_ulp", std::to_string(worst));
  EXPECT_LE(worst, kPermittedUlp);
}

// Where something changes: the rounding of x / ln 2, the subnormals, 0 and infinity, the clamp.
TEST_P(Exp, BoundariesAreWithinTwoUlp) {
  std::vector<float> x;
  const auto around = [&](double where) {
    const auto centre = std::bit_cast<uint32_t>(static_cast<float>(where));
    for (uint32_t i = 0; i < 129; ++i) x.push_back(std::bit_cast<float>(centre - 64 + i));
  };
  for (int n = -153; n <= 130; ++n) {
    if (n != 0) around(n * std::log(2.0));
    around((n + 0.5) * std::log(2.0));
  }
  for (const double limit : {-105.0, -104.0, -103.9720764, -103.2789, -87.33654, 88.72284, 89.0}) {
    around(limit);
  }
  for (const float tiny : {0x1p-149f, 0x1p-126f, 0x1p-100f, 0x1p-25f, 0x1p-24f}) {
    x.push_back(tiny);
    x.push_back(-tiny);
  }
  std::vector<float> y(x.size());
  kernels().exp(x.data(), static_cast<int64_t>(x.size()), y.data());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = exp_ulp_error(x[i], y[i]);
    EXPECT_LE(error, kPermittedUlp) << x[i] << " gives " << y[i];
    worst = std::max(worst, error);
  }
  RecordProperty("worst_ulp", std::to_string(worst));
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

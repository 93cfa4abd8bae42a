// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/adamw.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <vector>

namespace logitless::train_lm {
namespace {

Parameter some_parameter() {
  Parameter parameter("p", 7, 33);
  parameter.initialise(RandomNumbers(1, Purpose::hidden), 0.5f);
  return parameter;
}

void set_gradient(Parameter& parameter, int64_t step) {
  const RandomNumbers random(2, Purpose::hidden, step);
  for (int64_t i = 0; i < parameter.size(); ++i) {
    // Over many magnitudes, of both signs, some 0.
    const float power = std::exp2(-20.0f * random.uniform(2 * i));
    parameter.gradient[static_cast<size_t>(i)] =
        i % 11 == 0 ? 0.0f : power * (random.uniform(2 * i + 1) - 0.5f);
  }
}

TEST(AdamW, IsItsFormula) {
  const AdamW adamw = {.beta1 = 0.8, .beta2 = 0.9, .epsilon = 1e-6, .decay = 0.05};
  Parameter parameter = some_parameter();
  const size_t n = static_cast<size_t>(parameter.size());
  std::vector<double> value(parameter.value.begin(), parameter.value.end()), mean(n), square(n);
  for (int64_t step = 1; step <= 5; ++step) {
    set_gradient(parameter, step);
    const double rate = 0.1 / static_cast<double>(step);
    update(adamw, rate, step, parameter);
    for (size_t i = 0; i < n; ++i) {
      const double g = static_cast<double>(parameter.gradient[i]);
      mean[i] = 0.8 * mean[i] + 0.2 * g;
      square[i] = 0.9 * square[i] + 0.1 * g * g;
      const double mean_hat = mean[i] / (1 - std::pow(0.8, step));
      const double square_hat = square[i] / (1 - std::pow(0.9, step));
      value[i] -= rate * (mean_hat / (std::sqrt(square_hat) + 1e-6) + 0.05 * value[i]);
      // A dozen roundings to float, each of something below 1 in size.
      ASSERT_NEAR(static_cast<double>(parameter.value[i]), value[i], 16 * 0x1p-24)
          << step << " " << i;
    }
  }
}

TEST(AdamW, ThreadsChangeNoBit) {
  const int before = omp_get_max_threads();
  std::vector<std::vector<float>> values;
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    Parameter parameter = some_parameter();
    set_gradient(parameter, 1);
    update({}, 1e-3, 1, parameter);
    values.push_back(parameter.value);
  }
  omp_set_num_threads(before);
  EXPECT_EQ(values[0], values[1]);
}

}  // namespace
}  // namespace logitless::train_lm

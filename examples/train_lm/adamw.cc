// SPDX-License-Identifier: Apache-2.0
#include "examples/train_lm/adamw.h"

#include <cmath>

namespace logitless::train_lm {

void update(const AdamW& adamw, double rate, int64_t step, Parameter& parameter) {
  const double steps = static_cast<double>(step);
  const float beta1 = static_cast<float>(adamw.beta1);
  const float beta2 = static_cast<float>(adamw.beta2);
  const float rest1 = static_cast<float>(1 - adamw.beta1);
  const float rest2 = static_cast<float>(1 - adamw.beta2);
  const float mean_scale = static_cast<float>(rate / (1 - std::pow(adamw.beta1, steps)));
  const float square_scale = static_cast<float>(1 / (1 - std::pow(adamw.beta2, steps)));
  const float epsilon = static_cast<float>(adamw.epsilon);
  const float kept = static_cast<float>(1 - rate * adamw.decay);
  float* const value = parameter.value.data();
  float* const mean = parameter.mean.data();
  float* const square = parameter.square.data();
  const float* const gradient = parameter.gradient.data();
  const int64_t size = parameter.size();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < size; ++i) {
    const float g = gradient[i];
    mean[i] = beta1 * mean[i] + rest1 * g;
    square[i] = beta2 * square[i] + rest2 * g * g;
    value[i] =
        kept * value[i] - mean_scale * mean[i] / (std::sqrt(square_scale * square[i]) + epsilon);
  }
}

}  // namespace logitless::train_lm

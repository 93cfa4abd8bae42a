// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "examples/train_lm/parameter.h"

namespace logitless::train_lm {

// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101). With g the gradient:
//
//   mean   = beta1 mean + (1 - beta1) g          mean_hat   = mean / (1 - beta1^step)
//   square = beta2 square + (1 - beta2) g^2      square_hat = square / (1 - beta2^step)
//   value -= rate * (mean_hat / (sqrt(square_hat) + epsilon) + decay * value)
struct AdamW {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double decay = 0.1;
};

// step: from 1. Element by element, so the same bits for any number of threads.
void update(const AdamW& adamw, double rate, int64_t step, Parameter& parameter);

}  // namespace logitless::train_lm

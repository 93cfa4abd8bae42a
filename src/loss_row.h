// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

namespace logitless {

// log(sum_exp_logits) - predicted_logits. A row that saw nothing but -inf has no softmax: its loss
// is undefined (NaN), as frameworks say; where only the target's logit is -inf it is +inf.
inline float loss_of_row(float max, float sum, float predicted) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  return max == -kInf ? std::numeric_limits<float>::quiet_NaN() : std::log(sum) - predicted;
}

}  // namespace logitless

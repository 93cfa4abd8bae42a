// SPDX-License-Identifier: Apache-2.0
// Which tokens of a training step count, and with which weight: what one call and a vocabulary
// split over ranks must agree on.
#pragma once

#include <cstdint>
#include <string>

#include "logitless/loss_and_gradient.h"
#include "views.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

class StepTokens {
 public:
  // V: of the whole vocabulary. The operands must outlive this.
  StepTokens(const LossAndGradientOperands& operands, int64_t BT, int64_t V)
      : in_(operands), BT_(BT), V_(V) {}

  // Before anything else is asked but counts(). Also the rule about data: a token that counts has
  // its target in the vocabulary.
  Result<void> count() {
    for (int64_t b = 0; b < BT_; ++b) {
      if (!counts(b)) continue;
      ++counting_;
      const int64_t target = integer_at(in_.target, b);
      if (target < 0 || target >= V_) {
        return Error{ErrorKind::invalid_data, "target[" + std::to_string(b) + "] is " +
                                                  std::to_string(target) +
                                                  ", must be in [0, V) = [0, " +
                                                  std::to_string(V_) + ") where the row counts"};
      }
    }
    const bool plain = !in_.token_weights && counting_ > 0;
    normalizer_ = in_.normalizer.value_or(plain ? static_cast<double>(counting_) : 1.0);
    for (int64_t b = 0; b < BT_; ++b) weighted_ += has_gradient(b) ? 1 : 0;
    return {};
  }

  bool counts(int64_t b) const { return row_counts(in_.rows, in_.target, b); }
  // In the total.
  double weight(int64_t b) const {
    const double w = in_.token_weights ? static_cast<double>(f32_at(*in_.token_weights, b)) : 1.0;
    return w / normalizer_;
  }
  // Counts, and its weight is not 0, as far as fp32 can tell.
  bool has_gradient(int64_t b) const { return counts(b) && static_cast<float>(weight(b)) != 0.0f; }

  int64_t counting() const { return counting_; }
  int64_t weighted() const { return weighted_; }  // tokens that have a gradient

 private:
  const LossAndGradientOperands& in_;
  int64_t BT_;
  int64_t V_;
  int64_t counting_ = 0;
  int64_t weighted_ = 0;
  double normalizer_ = 1;
};

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "reference/reference.h"
#include "tests/support/cases.h"

namespace logitless::test {

// What a framework computes eagerly in the operand type: logits as a whole matrix rounded to it,
// log-softmax in float, grad_logits rounded to it, two more products rounded to it. Our error may
// be at most twice that.
struct EagerResult {
  std::vector<double> logits_max, sum_exp_logits;  // [BT]
  std::vector<double> loss;                        // [BT]; 0 where the target is outside
  reference::Matrix grad_input;                    // [BT, H]
  reference::Matrix grad_weight;                   // [V, H]
};
// Of a gradient case's operands; statistics are its own, from its own logits.
EagerResult eager(const GradientCase& c);

// A correct implementation in plain float loops, and wrong ones: they show that the allowed errors
// are neither too small nor so large that a mistake passes.
enum class Mutation {
  none,
  drop_k_pair,        // the last two products of every logit are missing
  drop_last_column,   // the last vocabulary row
  drop_last_token,    // in grad_weight; its rows of the other outputs are those of the one before
  inexact_max,        // the sum of exp is rebased by a maximum that is off by 2^-12
  one_after_scaling,  // grad_logits = softmax * grad - 1
};
ForwardResult plain_float(const ForwardCase& c, Mutation mutation = Mutation::none);
GradientResult plain_float(const GradientCase& c, Mutation mutation = Mutation::none);

}  // namespace logitless::test

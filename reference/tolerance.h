// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "logitless/tensor.h"

// How far a correct implementation may be from the definition in double: computed from the
// arithmetic that docs/numerics.md promises, never guessed.
//
// Model. A rounding to nearest has an error that is uniform in +- half an ulp, so its standard
// deviation is at most u |x| / sqrt(3), u = half an ulp of 1 (unit_roundoff). Roundings of
// different operations are independent: variances add. From the variance of one element (its
// `deviation`, which reference.h computes beside the value) the allowed error is
//
//   kMargin * (spread(samples) * deviation + bias + half an ulp of the output type + floor)
//
// spread(n) * deviation is what the largest of n such errors exceeds with probability < 1e-4; the
// deviations are upper estimates (by up to 1.4), so in practice it never is exceeded.
namespace logitless::reference {

// Beyond the exact half ulp of the last rounding, which some element always nearly reaches.
inline constexpr double kMargin = 1.125;
// exp is promised within 2 ulp of float: relative error.
inline constexpr double kExpError = 4.0 * 0x1p-24;
// Dot-product instructions flush operands, products and sums below 2^-126 to zero; thousands of
// such terms with factors up to a few hundred stay below this.
inline constexpr double kFloor = 0x1p-104;

// 2^-24, 2^-11, 2^-8 * 1/2 ...: half an ulp of 1.
double unit_roundoff(DType dtype);
// Distance of the neighbours of `dtype` at |value|; subnormals included.
double spacing(DType dtype, double value);
// value rounded once to nearest even, straight from double; overflow gives infinity.
double round_to(DType dtype, double value);
// Half the spacing at value: the error of the one rounding of an output.
double half_ulp(DType dtype, double value);
// The largest of n independent normal errors, in deviations: sqrt(2 ln(1e4 n)).
double spread(double samples);

// Variance of sum_k a_k b_k accumulated in float in ascending k. Every addition rounds a partial
// sum s_k: variance kMeanSquare u^2 / 3 sum_k s_k^2, where kMeanSquare is the mean of 1 / m^2 over
// the significands m of ordinary numbers (log-uniform in [1, 2): 3 / (8 ln 2)). The sum of squared
// products counts once more for products that are rounded on their own (no FMA).
inline constexpr double kMeanSquare = 0.541;
double partial_sums_variance(double sum_of_squared_partial_sums, double sum_of_squares);
// The same without the partial sums at hand. They are a random walk to `sum`:
// sum_k s_k^2 <= terms * (sum_of_squares / 2 + sum^2 / 3), which also holds for one or two products
// far larger than the rest, wherever they stand.
double product_sum_variance(double terms, double sum, double sum_of_squares);

// Variance of the relative error of exp(logit - max) for an exact logit: the argument is rounded
// once, exp has its promised error.
double exp_variance(double argument);

// Relative variance of a sum of exps kept per segment of kSegment columns and merged in order. In
// the worst case a segment is summed one column after the other; its errors average out over the
// segments, those of the running sum over segments do not. repetition: how many equal terms a
// segment has for an average one (1 = all differ): equal terms are rounded alike.
inline constexpr double kSegment = 256;
double exp_sum_variance(double terms, double repetition);

// Variance of one element of grad_logits as it enters the products.
struct GradLogitsError {
  DType multiply = DType::bf16;
  double value = 0;             // grad_logits[b, v]
  double softmax = 0;           // softmax[b, v]
  double scale = 0;             // |grad + grad_logsumexp| of the token: what its errors grow by
  double logsumexp_part = 0;    // softmax * grad_logsumexp: value is what is left beside it
  double softmax_variance = 0;  // relative: of the logit (its absolute error) and of exp
  double flip = 0;       // |change| of the softmax if a rounded logit falls on the other side
  double underflow = 0;  // largest error from below the least normal number; see below
};
double grad_logits_variance(const GradLogitsError& element);
// fp16 holds grad_logits scaled by the power of two that brings the token's largest |grad| into
// [1, 2): the absolute error of a subnormal is 2^-25 in that scale, `largest_grad` its measure.
double grad_logits_underflow(DType multiply, double largest_grad);

// ---- allowed errors, one function per output; `samples`: how many elements are judged ----------

// Absolute, of a float maximum. flip: the ulp of a rounded logit that may fall either way, or 0.
double allowed_logits_max(double value, double deviation, double flip, double samples);
// Absolute, of a float sum; deviation and flip are relative.
double allowed_sum_exp_logits(double value, double deviation, double flip, double samples);
double allowed_predicted_logits(double value, double deviation, double flip, double samples);
// deviation and flip: what the statistics bring along (0 when the loss alone is judged).
double allowed_loss(double value, double log_sum, double predicted, double deviation, double flip,
                    double samples);
double allowed_logsumexp(double value, double log_sum, double deviation, double flip,
                         double samples);
// argument = logit - logits_max; deviation: of the logit and the statistics, relative to the
// softmax.
double allowed_softmax(double value, double argument, double deviation, double flip,
                       double samples);
// An element of written logits of type `output`.
double allowed_logit(double value, double deviation, DType output, double samples);
// grad_input and grad_weight. value: what the buffer should hold, `initial` included when it was
// accumulated into (else 0); terms: V for grad_input, BT for grad_weight; deviation and bias from
// reference::grad_input or grad_weight.
struct GradElement {
  double value = 0;
  double deviation = 0;
  double bias = 0;
  double initial = 0;
  double terms = 0;
  DType output = DType::f32;
};
double allowed_grad_input(const GradElement& element, double samples);
double allowed_grad_weight(const GradElement& element, double samples);

}  // namespace logitless::reference

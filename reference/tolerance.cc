// SPDX-License-Identifier: Apache-2.0
#include "reference/tolerance.h"

#include <algorithm>
#include <cmath>

namespace logitless::reference {
namespace {

constexpr double kFloatRoundoff = 0x1p-24;
// Variance of one float rounding, relative to the square of the rounded value.
constexpr double kFloatVariance = kFloatRoundoff * kFloatRoundoff / 3.0;

struct Format {
  int significand_bits;  // with the hidden one
  int least_exponent;    // of a normal number
  double largest;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {11, -14, 65504.0};
    case DType::bf16:
      return {8, -126, 0x1.fep127};
    case DType::f32:
    case DType::i32:
    case DType::i64:
    case DType::u8:
      break;
  }
  return {24, -126, 0x1.fffffep127};
}

double allowed(double samples, double deviation, double exact_parts) {
  return kMargin * (spread(samples) * deviation + exact_parts + kFloor);
}

}  // namespace

double unit_roundoff(DType dtype) { return std::ldexp(1.0, -format_of(dtype).significand_bits); }

double spacing(DType dtype, double value) {
  const Format format = format_of(dtype);
  int exponent = format.least_exponent;
  if (value != 0.0 && std::isfinite(value)) exponent = std::max(exponent, std::ilogb(value));
  return std::ldexp(1.0, exponent - (format.significand_bits - 1));
}

double round_to(DType dtype, double value) {
  if (!std::isfinite(value)) return value;
  const double step = spacing(dtype, value);
  const double rounded = std::nearbyint(value / step) * step;
  if (std::abs(rounded) > format_of(dtype).largest) return std::copysign(INFINITY, value);
  return std::copysign(rounded, value);
}

double half_ulp(DType dtype, double value) { return 0.5 * spacing(dtype, value); }

double spread(double samples) { return std::sqrt(2.0 * std::log(1e4 * std::max(samples, 1.0))); }

double partial_sums_variance(double sum_of_squared_partial_sums, double sum_of_squares) {
  return kMeanSquare * kFloatVariance * (sum_of_squared_partial_sums + sum_of_squares);
}

double product_sum_variance(double terms, double sum, double sum_of_squares) {
  return partial_sums_variance(terms * (sum_of_squares / 2.0 + sum * sum / 3.0), sum_of_squares);
}

double exp_variance(double argument) {
  const double argument_error = std::isfinite(argument) ? argument : 0.0;
  return kFloatVariance * argument_error * argument_error + kExpError * kExpError / 3.0;
}

double exp_sum_variance(double terms, double repetition) {
  // A running sum of n equal terms has the variance n / 3 in units of one rounding. Each merge
  // rounds a product besides the sum and has one more exp (exact while the maximum stays).
  const double segments = std::max(1.0, std::ceil(terms / kSegment));
  const double within = repetition * std::min(terms, kSegment) / 3.0 / segments;
  return kFloatVariance * (within + segments / 3.0 + 4.0) + kExpError * kExpError / 3.0;
}

double grad_logits_variance(const GradLogitsError& e) {
  const double operand_roundoff = unit_roundoff(e.multiply);
  // In float: 1 / sum, its product with exp, the subtraction, the scaling.
  // Both parts are rounded before they cancel in their sum, which is rounded itself.
  const double part = e.value - e.logsumexp_part;
  double variance = kFloatVariance * 2.0 * part * part;
  if (e.logsumexp_part != 0.0) {
    variance += kFloatVariance * (e.logsumexp_part * e.logsumexp_part + e.value * e.value);
  }
  // Relative to softmax, not to softmax - 1.
  const double softmax = e.softmax * e.scale;
  variance += softmax * softmax * (e.softmax_variance + 2.0 * kFloatVariance);
  // One flip is an error of its own, not a deviation: half of it, as spread() is above 4.
  variance += 0.25 * e.flip * e.flip * e.scale * e.scale;
  if (e.multiply != DType::f32) {
    const double rounding = std::max(operand_roundoff * std::abs(e.value), e.underflow);
    variance += rounding * rounding / 3.0;
  }
  return variance;
}

double grad_logits_underflow(DType multiply, double largest_grad) {
  if (multiply != DType::f16 || !(largest_grad > 0.0) || !std::isfinite(largest_grad)) return 0.0;
  return std::ldexp(0x1p-25, std::ilogb(largest_grad));
}

double allowed_logits_max(double value, double deviation, double flip, double samples) {
  // Already a float: the last rounding of the sum is part of deviation, except for sums so short
  // that the model's average says less than the half ulp.
  return allowed(samples, deviation, flip + half_ulp(DType::f32, value));
}

double allowed_sum_exp_logits(double value, double deviation, double flip, double samples) {
  return allowed(samples, deviation * value, flip * value + half_ulp(DType::f32, value));
}

double allowed_predicted_logits(double value, double deviation, double flip, double samples) {
  return allowed(samples, deviation, flip + half_ulp(DType::f32, value));
}

double allowed_loss(double value, double log_sum, double predicted, double deviation, double flip,
                    double samples) {
  // log within 2 ulp of float, predicted as it was rounded, the subtraction.
  const double rounding = 4.0 * half_ulp(DType::f32, log_sum) + half_ulp(DType::f32, predicted) +
                          half_ulp(DType::f32, value);
  return allowed(samples, deviation, flip + rounding);
}

double allowed_logsumexp(double value, double log_sum, double deviation, double flip,
                         double samples) {
  const double rounding = 4.0 * half_ulp(DType::f32, log_sum) + half_ulp(DType::f32, value);
  return allowed(samples, deviation, flip + rounding);
}

double allowed_softmax(double value, double argument, double deviation, double flip,
                       double samples) {
  // exp, the reciprocal, the product.
  const double relative = kExpError + 2.0 * kFloatRoundoff + kFloatRoundoff * std::abs(argument);
  const double rounding = value > 0.0 ? relative * value : 0.0;
  return allowed(samples, deviation * value, flip * value + rounding + half_ulp(DType::f32, value));
}

double allowed_logit(double value, double deviation, DType output, double samples) {
  return allowed(samples, deviation, half_ulp(output, value));
}

namespace {

double allowed_grad(const GradElement& element, double samples) {
  // Partial sums that start from `initial` are that much larger, and so are their roundings.
  const double from_initial = kFloatVariance * element.terms * element.initial * element.initial;
  const double deviation = std::sqrt(element.deviation * element.deviation + from_initial);
  return allowed(samples, deviation, element.bias + half_ulp(element.output, element.value));
}

}  // namespace

double allowed_grad_input(const GradElement& element, double samples) {
  return allowed_grad(element, samples);
}

double allowed_grad_weight(const GradElement& element, double samples) {
  return allowed_grad(element, samples);
}

}  // namespace logitless::reference

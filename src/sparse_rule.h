// SPDX-License-Identifier: Apache-2.0
// The threshold of a row of a sparse gradient, from the sums of its larger softmax values.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "plan.h"

namespace logitless {
inline namespace LOGITLESS_ABI_NAMESPACE {

// Softmax values by their binary exponent: bin k holds those in [2^-k, 2^(1-k)), bin 0 also more.
class SoftmaxBins {
 public:
  // Values below 2^-kBins are beyond any threshold: eps >= 2^-16, and rest^2 counts from 2^-48 on.
  static constexpr int kBins = 96;

  // p > 0. The scale is of the values, the weight of their number.
  void add(float p) {
    const int bin = 127 - static_cast<int>(std::bit_cast<uint32_t>(p) >> 23);
    if (bin >= kBins) return;
    const int k = std::max(bin, 0);
    sum_[k] += static_cast<double>(p);
    ++count_[k];
  }

  struct Threshold {
    float tau;        // a power of two, at most 1
    double expected;  // number of elements kept
  };
  // The largest tau with tau * below(tau) <= (tolerance * rest)^2, where values count `each` times.
  // At tau <= tolerance^2 * rest it holds whatever the values are.
  Threshold threshold(double rest, double tolerance, double each = 1) const {
    const double bound = tolerance * tolerance * rest * rest;
    double above = 0;
    double number = 0;
    for (int k = 0; k < kBins; ++k) {
      above += each * sum_[k];
      number += each * static_cast<double>(count_[k]);
      const double tau = std::ldexp(1.0, -k);
      const double below = std::max(0.0, rest - above);
      if (tau * below <= bound) return {static_cast<float>(tau), number + below / tau};
    }
    return {0.0f, std::numeric_limits<double>::infinity()};
  }

 private:
  double sum_[kBins] = {};
  int64_t count_[kBins] = {};
};

// The least threshold any values lead to: what has to be known of a row.
inline float least_threshold(double rest, double tolerance) {
  const double bound = tolerance * tolerance * rest;
  return bound > 0 ? static_cast<float>(std::exp2(std::floor(std::log2(bound)))) : 0.0f;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

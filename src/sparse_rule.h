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

// The largest that is at most x, a positive number; exact, so the same in every C library.
inline double power_of_two_within(double x) { return std::ldexp(1.0, std::ilogb(x)); }

// Softmax values by their binary exponent: bin k holds those in [2^-k, 2^(1-k)), bin 0 also more.
class SoftmaxBins {
 public:
  // 2^-31 of the least threshold is still a normal number, as choosing by it needs.
  static constexpr int kBins = 96;

  // p > 0
  void add(float p) {
    const int bin = 127 - static_cast<int>(std::bit_cast<uint32_t>(p) >> 23);
    if (bin >= kBins) return;
    const int k = std::max(bin, 0);
    sum_[k] += static_cast<double>(p);
    ++count_[k];
  }

  // The bins that say something about a row of this rest, as ranks tell each other: no value is
  // above the first of them, no threshold below the last.
  static int levels(double tolerance) {
    return static_cast<int>(std::ceil(-2 * std::log2(tolerance))) + 4;
  }
  static int first_level(double rest, int levels) {
    const int bin = 127 - static_cast<int>(std::bit_cast<uint32_t>(static_cast<float>(rest)) >> 23);
    return std::clamp(bin - 1, 0, kBins - levels);
  }
  void read(int first, int levels, double* sums, int32_t* counts) const {
    for (int k = 0; k < levels; ++k) {
      sums[k] = sum_[first + k];
      counts[k] = static_cast<int32_t>(count_[first + k]);
    }
  }
  void add(int first, int levels, const double* sums, const int32_t* counts) {
    for (int k = 0; k < levels; ++k) {
      sum_[first + k] += sums[k];
      count_[first + k] += counts[k];
    }
  }

  struct Threshold {
    float tau;        // a power of two, at most 1
    double expected;  // number of elements kept
  };
  // The largest tau with tau * below(tau) <= (tolerance * rest)^2. At tau <= tolerance^2 * rest it
  // holds whatever the values are. 0 where it would be below `least`, the size from which on the
  // values are complete, or below 2^-95, or where rest is no number.
  Threshold threshold(double rest, double tolerance, double least) const {
    const double bound = tolerance * tolerance * rest * rest;
    double above = 0;
    double number = 0;
    for (int k = 0; k < kBins; ++k) {
      above += sum_[k];
      number += static_cast<double>(count_[k]);
      const double tau = std::ldexp(1.0, -k);
      if (tau < least) break;
      const double below = std::max(0.0, rest - above);
      if (tau * below <= bound) return {static_cast<float>(tau), number + below / tau};
    }
    return {0.0f, std::numeric_limits<double>::infinity()};
  }

 private:
  double sum_[kBins] = {};
  int64_t count_[kBins] = {};
};

// What a sample of a row says about its tail: the sum of the exponentials below a threshold, by
// powers of two, relative to the sample's largest.
struct SparseTail {
  static constexpr int kLevels = 24;
  float reference = 0;        // the sample's maximum
  float candidates = 0;       // how many to expect of the whole row
  float below[kLevels] = {};  // of those < 2^-k; [0] of all

  // The threshold, relative to exp(reference), that the rule will probably not fall short of, from
  // the sum of the exponentials without the target's in the share of the columns seen so far,
  // relative to the same. For the others the sample speaks, without its largest, which may stand
  // for too much. Of the tail each level is taken for what the sample has and four standard
  // deviations more, and sixteen elements that it may have missed. A row whose threshold does fall
  // short comes once more.
  double guess(double sum, double seen, double tolerance, double each) const {
    const double rest = sum + 0.8 * (1 - seen) * static_cast<double>(below[1]);
    const double bound = tolerance * tolerance * rest * rest;
    double level = 1;
    for (int k = 0; k < kLevels; ++k, level *= 0.5) {
      const auto sampled = static_cast<double>(below[k]);
      const double mass = sampled + 4 * std::sqrt(each * level * sampled) + 16 * each * level;
      const double t = k == 0 ? bound / mass : std::min(level, bound / mass);
      if (t >= 0.5 * level) return t;
    }
    return 0;
  }
};

// A sample of a row, its target left out, as exponentials relative to the largest of them.
class SampledRow {
 public:
  // 0 <= e <= 1, or NaN, of either sign: it is in the sum, and in no level.
  void add(float e) {
    const int level = 127 - static_cast<int>(std::bit_cast<uint32_t>(e) >> 23);
    sum_ += static_cast<double>(e);
    if (level < 0 || level >= SparseTail::kLevels) return;
    at_level_[level] += static_cast<double>(e);
    ++count_[level];
  }
  void add(const SampledRow& other) {
    sum_ += other.sum_;
    for (int k = 0; k < SparseTail::kLevels; ++k) {
      at_level_[k] += other.at_level_[k];
      count_[k] += other.count_[k];
    }
  }
  double sum() const { return sum_; }

  // Each value stands for `each`.
  SparseTail tail(float reference, double each) const {
    SparseTail tail{.reference = reference};
    double below = sum_ - at_level_[0];
    tail.below[0] = static_cast<float>(each * sum_);
    for (int k = 1; k < SparseTail::kLevels; ++k) {
      below -= at_level_[k];
      tail.below[k] = static_cast<float>(each * std::max(0.0, below));
    }
    return tail;
  }

  // The number of elements that pass `threshold`: those above it, and of the smaller ones a share.
  double candidates(double threshold, double each) const {
    double number = 0;
    double below = each * sum_;
    double level = 1;
    for (int k = 0; k < SparseTail::kLevels && threshold < level; ++k, level *= 0.5) {
      number += each * static_cast<double>(count_[k]);
      below -= each * at_level_[k];
    }
    return number + std::max(0.0, below) / threshold;
  }

  // The number of elements that the rule would keep, were the row's sum without the target `rest`;
  // infinite where a sum is no number.
  double expected(double rest, double tolerance, double each) const {
    const double bound = tolerance * tolerance * rest * rest;
    double below = each * sum_;
    double number = 0;
    double tau = 1;
    if (tau * below <= bound) {  // beyond the largest value
      return below / power_of_two_within(bound / below);
    }
    for (int k = 0; k < SparseTail::kLevels; ++k, tau *= 0.5) {
      below -= each * at_level_[k];
      number += each * static_cast<double>(count_[k]);
      // Level k holds values from 2^-k on.
      if (tau * below <= bound) return number + std::max(0.0, below) / tau;
    }
    return std::numeric_limits<double>::infinity();
  }

 private:
  double sum_ = 0;
  double at_level_[SparseTail::kLevels] = {};
  int32_t count_[SparseTail::kLevels] = {};
};

// All that is asked about a sample.
struct Sample {
  SampledRow row;
  double moments[2] = {};  // of the logits relative to the largest, but for those of no weight
  int64_t number = 0;      // of the same

  void add(const Sample& other) {
    row.add(other.row);
    for (int i : {0, 1}) moments[i] += other.moments[i];
    number += other.number;
  }
};

// The least threshold any values lead to: what has to be known of a row.
inline float least_threshold(double rest, double tolerance) {
  const double bound = tolerance * tolerance * rest;
  return bound > 0 ? static_cast<float>(power_of_two_within(bound)) : 0.0f;
}

}  // namespace LOGITLESS_ABI_NAMESPACE
}  // namespace logitless

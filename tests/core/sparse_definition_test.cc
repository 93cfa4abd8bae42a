// SPDX-License-Identifier: Apache-2.0
// The definition of the sparse gradient keeps its own promises: every element right on average over
// seeds, every row's error within the tolerance. And the check for bias can fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "reference/sparse_gradient.h"

namespace logitless::test {
namespace {

using reference::BiasCheck;
using reference::Matrix;
using reference::SparseGradient;
using reference::SparseOperands;
using reference::SparseRule;

// A trained model's softmax: a token's target stands out, a few others compete.
SparseOperands peaked(int64_t BT, int64_t V, double eps) {
  SparseOperands o;
  o.logits = Matrix(BT, V);
  o.eps = eps;
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  for (int64_t b = 0; b < BT; ++b) {
    for (int64_t v = 0; v < V; ++v) o.logits(b, v) = 2.5 * normal(random);
    const auto target = static_cast<int64_t>(random() % static_cast<uint64_t>(V));
    o.logits(b, target) += b % 4 == 0 ? 0.0 : 3.0 * static_cast<double>(b % 4);
    o.target.push_back(target);
    o.grad.push_back(0.5 + static_cast<double>(b % 3));
  }
  return o;
}

TEST(SparseChoice, IsUniformAndDependsOnAllItIsGiven) {
  constexpr int kBins = 64;
  constexpr int64_t kTokens = 200, kVocabulary = 2000;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    std::vector<double> bins(kBins);
    double sum = 0, products = 0;
    for (int64_t b = 0; b < kTokens; ++b) {
      const uint32_t token = reference::sparse_token_hash(seed, b);
      for (int64_t v = 0; v < kVocabulary; ++v) {
        const uint32_t vocab = reference::sparse_vocab_hash(seed, v);
        const double u = reference::sparse_uniform(token, vocab);
        const double next =
            reference::sparse_uniform(token, reference::sparse_vocab_hash(seed, v + 1));
        ASSERT_GE(u, 0.0);
        ASSERT_LE(u, 1.0);
        ++bins[std::min(static_cast<size_t>(u * kBins), size_t{kBins - 1})];
        sum += u - 0.5;
        products += (u - 0.5) * (next - 0.5);
      }
    }
    const double n = static_cast<double>(kTokens) * static_cast<double>(kVocabulary);
    double chi = 0;
    for (const double count : bins) chi += (count - n / kBins) * (count - n / kBins) * kBins / n;
    EXPECT_LT(chi, 63 + 5 * std::sqrt(2.0 * 63));
    EXPECT_LT(std::abs(sum), 5 * std::sqrt(n / 12));
    EXPECT_LT(std::abs(products), 5 * std::sqrt(n) / 12);
  }
  EXPECT_NE(reference::sparse_token_hash(1, 5), reference::sparse_token_hash(2, 5));
  EXPECT_NE(reference::sparse_token_hash(1, 5), reference::sparse_token_hash(1, 6));
  EXPECT_NE(reference::sparse_token_hash(1, 5), reference::sparse_vocab_hash(1, 5));
}

TEST(SparseRule, FindsTheLargestPowerOfTwo) {
  // rest 1/2, target 0. At 1/8: below = 1/16 + 1/16, product 1/64; at 1/4: below 1/4, product 1/16.
  const std::vector<double> p = {0.5, 0.25, 0.125, 0.0625, 0.0625};
  const auto tau = [&](double limit) {
    return reference::sparse_rule(p, 0, std::sqrt(limit) / 0.5).tau;
  };
  EXPECT_EQ(tau(1.0 / 16 * 1.001), 0.25);
  EXPECT_EQ(tau(1.0 / 16 * 0.999), 0.125);
  EXPECT_EQ(tau(1.0 / 64 * 1.001), 0.125);
  EXPECT_EQ(tau(1.0 / 64 * 0.999), 0.0625);  // nothing is below
  EXPECT_EQ(tau(1e-12), 0.0625);
  EXPECT_EQ(tau(0.5 * 1.001), 1.0);
  EXPECT_EQ(tau(100.0), 1.0);
  const SparseRule rule = reference::sparse_rule(p, 0, std::sqrt(0.0157) / 0.5);
  EXPECT_EQ(rule.rest, 0.5);
  EXPECT_EQ(rule.expected_kept, 3 + 2 * 0.5);
  EXPECT_NEAR(rule.deviation, std::sqrt(2 * 0.0625 * 0.0625), 1e-15);
  EXPECT_NEAR(rule.tau_distance, 0.0, 1e-15);  // 0.125 stands on the edge
  // All of it on the target: nothing is left to choose.
  EXPECT_EQ(reference::sparse_rule(std::vector<double>{0, 1, 0}, 1, 0.5).expected_kept, 1.0);
}

TEST(SparseRule, IsTheLargestForRandomRows) {
  const SparseOperands o = peaked(40, 300, 0.01);
  const SparseGradient g = reference::sparse_grad_logits(o);
  for (int64_t b = 0; b < 40; ++b) {
    const SparseRule& rule = g.rules[static_cast<size_t>(b)];
    const double w = o.grad[static_cast<size_t>(b)];
    const auto product = [&](double tau) {
      double below = 0;
      for (int64_t v = 0; v < 300; ++v) {
        const double p = g.expected(b, v) / w;
        if (v != o.target[static_cast<size_t>(b)] && p < tau) below += p;
      }
      return tau * below;
    };
    const double limit = std::pow(0.01 * rule.rest, 2);
    EXPECT_LE(product(rule.tau), limit * (1 + 1e-9));
    EXPECT_GT(product(2 * rule.tau), limit * (1 - 1e-9));
    EXPECT_LE(rule.deviation, 0.01 * rule.rest);
    double sum = 0;
    for (int64_t v = 0; v < 300; ++v) sum += g.expected(b, v);
    EXPECT_NEAR(sum, 0.0, 1e-12);
  }
}

TEST(SparseGradient, EveryElementIsRightOnAverageAndTheErrorIsWithinTheTolerance) {
  constexpr int64_t kRows = 8, kColumns = 40;
  constexpr int kSeeds = 8000;
  for (const double eps : {0.05, 0.25}) {
    SparseOperands o = peaked(kRows, kColumns, eps);
    Matrix sum(kRows, kColumns);
    std::vector<double> squared_error(kRows), kept(kRows);
    SparseGradient g;
    for (int seed = 0; seed < kSeeds; ++seed) {
      o.seed = static_cast<uint64_t>(seed);
      g = reference::sparse_grad_logits(o);
      for (int64_t b = 0; b < kRows; ++b) {
        const auto i = static_cast<size_t>(b);
        for (int64_t v = 0; v < kColumns; ++v) {
          const double value = g.value(b, v);
          sum(b, v) += value;
          squared_error[i] += std::pow(value - g.expected(b, v), 2);
          kept[i] += value != 0 ? 1 : 0;
        }
      }
    }
    for (int64_t b = 0; b < kRows; ++b) {
      const auto i = static_cast<size_t>(b);
      const SparseRule& rule = g.rules[i];
      const double w = o.grad[i];
      for (int64_t v = 0; v < kColumns; ++v) {
        const double p = std::abs(g.expected(b, v) / w);
        const double deviation = p < rule.tau ? std::sqrt(p * (rule.tau - p)) * w : 0.0;
        EXPECT_NEAR(sum(b, v) / kSeeds, g.expected(b, v),
                    5 * deviation / std::sqrt(double{kSeeds}) + 1e-12)
            << b << ", " << v;
      }
      const double error = std::sqrt(squared_error[i] / kSeeds);
      EXPECT_LE(error, eps * rule.rest * w);
      EXPECT_NEAR(error, rule.deviation * w, 0.05 * rule.deviation * w) << b;
      EXPECT_NEAR(kept[i] / kSeeds, rule.expected_kept, 0.1) << b;
    }
  }
}

TEST(SparseGradient, IgnoresRowsWithoutGradientAndTakesIdsAndOffset) {
  SparseOperands o = peaked(6, 200, 0.05);
  o.grad[2] = 0;
  for (int64_t v = 0; v < 200; ++v) o.logits(2, v) = NAN;
  o.logits(4, 7) = NAN;
  const SparseGradient g = reference::sparse_grad_logits(o);
  for (int64_t v = 0; v < 200; ++v) {
    EXPECT_EQ(g.value(2, v), 0.0);
    EXPECT_TRUE(std::isnan(g.value(4, v)));
  }
  EXPECT_EQ(g.not_finite, (std::vector<uint8_t>{0, 0, 0, 0, 1, 0}));
  // Ids are what the choice depends on, not places.
  SparseOperands ids = o;
  ids.token_ids = {0, 1, 2, 3, 4, 5};
  EXPECT_EQ(reference::sparse_grad_logits(ids).value(5, 0), g.value(5, 0));
  ids.token_ids[5] = 77;
  const auto row = [](const SparseGradient& from, int64_t b) {
    return std::vector<double>(from.value.row(b), from.value.row(b) + from.value.cols);
  };
  EXPECT_NE(row(reference::sparse_grad_logits(ids), 5), row(g, 5));
  SparseOperands moved = o;
  moved.vocab_start_index = 1;
  EXPECT_NE(row(reference::sparse_grad_logits(moved), 5), row(g, 5));
  SparseOperands other = o;
  other.seed = 1;
  EXPECT_NE(row(reference::sparse_grad_logits(other), 5), row(g, 5));
}

// ---- the check for bias -----------------------------------------------------------------------

// grad_input of `value` for random weights, over seeds, each as `of` makes it.
template <typename Of>
double worst_bias(SparseOperands o, int seeds, const Of& of) {
  Matrix weight(o.logits.cols, 24);
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  for (double& value : weight.values) value = normal(random);
  BiasCheck check(reference::times(reference::sparse_grad_logits(o).expected, weight));
  for (int seed = 0; seed < seeds; ++seed) {
    o.seed = static_cast<uint64_t>(seed);
    check.add(reference::times(of(o), weight));
  }
  EXPECT_EQ(check.samples(), seeds);
  EXPECT_EQ(check.rows(), o.logits.rows);
  EXPECT_EQ(check.fine(), check.worst() <= BiasCheck::kMostErrors);
  return check.worst();
}

Matrix dropped(const SparseOperands& o, double threshold) {
  const SparseGradient g = reference::sparse_grad_logits(o);
  Matrix value = g.expected;
  for (int64_t b = 0; b < value.rows; ++b) {
    const double w = std::abs(o.grad[static_cast<size_t>(b)]);
    for (int64_t v = 0; v < value.cols; ++v) {
      if (std::abs(value(b, v)) < threshold * w) value(b, v) = 0;
    }
  }
  return value;
}

TEST(BiasCheck, PassesTheRuleAndFailsWhatIsBiased) {
  const SparseOperands o = peaked(30, 600, 0.02);
  const double limit = BiasCheck::kMostErrors;
  EXPECT_LT(worst_bias(o, 256,
                       [](const auto& each) { return reference::sparse_grad_logits(each).value; }),
            limit);
  // Dropping, which is the same for every seed.
  EXPECT_GT(worst_bias(o, 256, [](const auto& each) { return dropped(each, 0x1p-12); }), limit);
  // What is kept stays as it is instead of growing to tau.
  EXPECT_GT(worst_bias(o, 256,
                       [](const auto& each) {
                         SparseGradient g = reference::sparse_grad_logits(each);
                         for (size_t i = 0; i < g.value.values.size(); ++i) {
                           if (g.value.values[i] != 0) g.value.values[i] = g.expected.values[i];
                         }
                         return g.value;
                       }),
            limit);
  // Kept one time in five too seldom.
  EXPECT_GT(worst_bias(o, 256,
                       [](const auto& each) {
                         SparseGradient g = reference::sparse_grad_logits(each);
                         uint64_t turn = each.seed;
                         for (size_t i = 0; i < g.value.values.size(); ++i) {
                           if (std::isfinite(g.distance.values[i]) && g.value.values[i] != 0 &&
                               ++turn % 5 == 0) {
                             g.value.values[i] = 0;
                           }
                         }
                         return g.value;
                       }),
            limit);
  // A NaN is not 0 on average.
  EXPECT_GT(worst_bias(o, 2,
                       [](const auto& each) {
                         Matrix value = reference::sparse_grad_logits(each).value;
                         value(0, 0) = NAN;
                         return value;
                       }),
            limit);
}

TEST(BiasCheck, AllowsTheRoundingItIsToldOf) {
  Matrix expected(2, 3);
  expected.values = {1, 2, 3, 0, 0, 0};
  Matrix got = expected;
  got(0, 1) *= 1 + 0x1p-14;
  BiasCheck strict(expected), told(expected, {0x1p-12, 0.0});
  for (int i = 0; i < 4; ++i) {
    strict.add(got);
    told.add(got);
  }
  EXPECT_FALSE(strict.fine());
  EXPECT_TRUE(told.fine());
  EXPECT_EQ(told.rows(), 1);                             // the other has no gradient
  EXPECT_EQ(BiasCheck(expected, {0.5, 0.0}).rows(), 0);  // hardly a bit of it is right
}

}  // namespace
}  // namespace logitless::test

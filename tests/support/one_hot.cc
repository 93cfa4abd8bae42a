// SPDX-License-Identifier: Apache-2.0
#include "tests/support/one_hot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "reference/tolerance.h"

namespace logitless::test {
namespace {

// Float's own errors of one softmax: of the exponential, the sum, the logits' maximum.
constexpr double kFewUlps = 0x1p-19;
constexpr int kMostReports = 5;

StepCase empty_step(const Shape& shape, const Arithmetic& arithmetic) {
  StepCase c;
  c.shape = shape;
  c.arithmetic = arithmetic;
  c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
  c.input = TestTensor::matrix(arithmetic.operand, shape.BT, shape.H);
  c.weight = TestTensor::matrix(arithmetic.operand, shape.V, shape.H);
  c.target = TestTensor::vector(DType::i64, shape.BT);
  return c;
}

// Logits such as a trained model's: a few of the vocabulary compete, the rest is far below.
void fill(OneHot& o, uint64_t seed) {
  const auto [BT, V, H] = o.step.shape;
  std::mt19937_64 random(seed * 7919 + static_cast<uint64_t>(BT * 131 + V * 17));
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const int64_t rows = o.input_is_identity ? BT : V;
  TestTensor& identity = o.input_is_identity ? o.step.input : o.step.weight;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < H; ++h) identity.set(r, h, h == r ? 1.0 : 0.0);
  }
  TestTensor& other = o.input_is_identity ? o.step.weight : o.step.input;
  for (int64_t r = 0; r < other.rows(); ++r) {
    for (int64_t h = rows; h < H; ++h) other.set(r, h, normal(random));
  }
  for (int64_t b = 0; b < BT; ++b) {
    const bool flat = b % 6 == 5;
    const auto target = static_cast<int64_t>(random() % static_cast<uint64_t>(V));
    o.step.target.set_index(b, target);
    for (int64_t v = 0; v < V; ++v) {
      const double near = uniform(random) < 0.04 ? 0.0 : 10.0;
      const double bump = v == target ? 3.0 * static_cast<double>(b % 4) : 0.0;
      o.set_logit(b, v, flat ? 0.1 * normal(random) : 2.0 * normal(random) - near + bump);
    }
  }
}

bool has_gradient(const StepCase& c, int64_t b) {
  return c.row_counts(b) && static_cast<float>(c.token_weight(b)) != 0.0f;
}

}  // namespace

double OneHot::logit(int64_t b, int64_t v) const {
  const double value = input_is_identity ? step.weight.get(v, b) : step.input.get(b, v);
  return reference::round_to(step.arithmetic.multiplied(), value);
}

void OneHot::set_logit(int64_t b, int64_t v, double value) {
  if (input_is_identity) {
    step.weight.set(v, b, value);
  } else {
    step.input.set(b, v, value);
  }
}

double OneHot::grad_logit(const StepResult& result, int64_t b, int64_t v) const {
  return input_is_identity ? result.gradients.grad_weight->get(v, b)
                           : result.gradients.grad_input->get(b, v);
}

OneHot one_hot_input(const OneHotShape& shape, const Arithmetic& arithmetic, uint64_t seed) {
  OneHot o;
  o.step = empty_step({.BT = shape.BT, .V = shape.V, .H = shape.BT + shape.further}, arithmetic);
  o.further = shape.further;
  o.input_is_identity = true;
  fill(o, seed);
  return o;
}

OneHot one_hot_weight(const OneHotShape& shape, const Arithmetic& arithmetic, uint64_t seed) {
  OneHot o;
  o.step = empty_step({.BT = shape.BT, .V = shape.V, .H = shape.V + shape.further}, arithmetic);
  o.further = shape.further;
  fill(o, seed);
  return o;
}

reference::SparseOperands definition_operands(const OneHot& o) {
  const StepCase& c = o.step;
  reference::SparseOperands d;
  d.logits = reference::Matrix(c.shape.BT, c.shape.V);
  d.eps = static_cast<double>(c.grad_tolerance);
  d.seed = c.seed;
  for (int64_t b = 0; b < c.shape.BT; ++b) {
    d.target.push_back(c.target.get_index(b));
    const double weight = static_cast<double>(static_cast<float>(c.token_weight(b)));
    d.grad.push_back(has_gradient(c, b) ? weight : 0.0);
    if (c.token_ids) d.token_ids.push_back(c.token_ids->get_index(b));
    for (int64_t v = 0; v < c.shape.V; ++v) d.logits(b, v) = o.logit(b, v);
  }
  return d;
}

KeptSet& KeptSet::operator+=(const KeptSet& other) {
  sparse_rows += other.sparse_rows;
  dense_rows += other.dense_rows;
  unclear_rows += other.unclear_rows;
  kept += other.kept;
  within_an_ulp += other.within_an_ulp;
  return *this;
}

KeptSet expect_kept_set(const OneHot& o, const StepResult& exact, const StepResult& got) {
  const StepCase& c = o.step;
  SCOPED_TRACE(c.describe() + ", grad_tolerance " + std::to_string(c.grad_tolerance) + ", seed " +
               std::to_string(c.seed));
  const auto [BT, V, H] = c.shape;
  const reference::SparseOperands operands = definition_operands(o);
  const reference::SparseGradient want = reference::sparse_grad_logits(operands);
  KeptSet set;
  int64_t rows = 0, nonzero = 0, zero_targets = 0, either_way = 0;
  int reports = 0;
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const double w = operands.grad[i];
    if (w == 0.0) {
      for (int64_t v = 0; v < V; ++v) EXPECT_EQ(o.grad_logit(got, b, v), 0.0) << b << " " << v;
      continue;
    }
    ++rows;
    bool same = true, drawn = false;
    for (int64_t v = 0; v < V; ++v) {
      const double value = o.grad_logit(got, b, v), other = o.grad_logit(exact, b, v);
      same = same && (value == other || (std::isnan(value) && std::isnan(other)));
      // What underflows in float is not drawn.
      drawn = drawn || (std::isfinite(want.distance(b, v)) &&
                        std::abs(want.expected(b, v)) > 0x1p-100 * std::abs(w));
    }
    if (want.not_finite[i]) {
      EXPECT_TRUE(same) << "row " << b << " has no finite statistics";
      ++set.dense_rows;
      continue;
    }
    const reference::SparseRule& rule = want.rules[i];
    if (!want.dense[i].may_be_sparse) {
      EXPECT_TRUE(same) << "row " << b << " would keep " << rule.expected_kept << " of " << V;
    }
    if (!want.dense[i].may_be_dense && drawn) {
      EXPECT_FALSE(same) << "row " << b << " would keep " << rule.expected_kept << " of " << V;
    }
    if (same) {
      // Nothing to choose: sparse or dense, it is the same.
      either_way += drawn ? 0 : 1;
      set.dense_rows += drawn ? 1 : 0;
      continue;
    }
    ++set.sparse_rows;
    for (int64_t v = 0; v < V; ++v) {
      const double value = o.grad_logit(got, b, v);
      nonzero += value != 0.0 ? 1 : 0;
      zero_targets += v == operands.target[i] && value == 0.0 ? 1 : 0;
    }
    // The target's element is softmax - 1 in float, and so is rest.
    const double target_error = kFewUlps * std::abs(w);
    EXPECT_NEAR(o.grad_logit(got, b, operands.target[i]), -rule.rest * w, target_error) << b;
    // Both sides of the limit know the mass below a threshold as rest without the softmax values
    // above it, of which each is right to two ulps.
    const double limit = operands.eps * rule.rest * operands.eps * rule.rest;
    const double below = std::min(rule.rest, limit / (2.0 * rule.tau));
    if (rule.tau_distance < kFewUlps + 0x1p-20 / rule.rest + 0x1p-22 * rule.rest / below) {
      ++set.unclear_rows;
      continue;
    }
    for (int64_t v = 0; v < V && reports < kMostReports; ++v) {
      if (v == operands.target[i]) continue;
      const double value = o.grad_logit(got, b, v), expected = want.value(b, v);
      set.kept += value != 0.0 ? 1 : 0;
      if ((value != 0.0) != (expected != 0.0)) {
        if (want.distance(b, v) < kFewUlps) {
          ++set.within_an_ulp;
          continue;
        }
        ++reports;
        ADD_FAILURE() << "[" << b << ", " << v << "] is " << value << ", must be " << expected
                      << ": p " << want.expected(b, v) / w << ", tau " << rule.tau
                      << ", u tau / p off by " << want.distance(b, v) << ", rest " << rule.rest
                      << ", another tau off by " << rule.tau_distance;
      } else if (value != 0.0) {
        // tau times a float is exact.
        const bool chosen = std::isfinite(want.distance(b, v));
        const double allowed = chosen ? 0.0 : kFewUlps * std::abs(expected);
        if (std::abs(value - expected) > allowed) {
          ++reports;
          ADD_FAILURE() << "[" << b << ", " << v << "] is " << value << ", must be " << expected
                        << (chosen ? " (tau)" : "");
        }
      }
    }
  }
  const SparseCounts& counts = got.gradients.sparse_counts;
  EXPECT_EQ(counts.rows, rows);
  EXPECT_GE(counts.dense_rows, set.dense_rows);
  EXPECT_LE(counts.dense_rows, set.dense_rows + either_way);
  EXPECT_EQ(counts.elements, (counts.rows - counts.dense_rows) * V);
  if (either_way == 0) {
    // The target is kept, also where its element is 0.
    EXPECT_GE(counts.kept, nonzero);
    EXPECT_LE(counts.kept, nonzero + zero_targets);
  }
  return set;
}

void expect_products(const OneHot& o, const StepResult& got) {
  const StepCase& c = o.step;
  SCOPED_TRACE(c.describe());
  const auto [BT, V, H] = c.shape;
  const DType multiply = c.arithmetic.multiplied();
  const TestTensor& other = o.input_is_identity ? c.weight : c.input;
  const TestTensor& product =
      o.input_is_identity ? *got.gradients.grad_input : *got.gradients.grad_weight;
  const int64_t terms = o.input_is_identity ? V : BT;
  for (int64_t r = 0; r < product.rows(); ++r) {
    for (int64_t h = H - o.further; h < H; ++h) {
      double want = 0.0, size = 0.0, count = 2.0;
      for (int64_t k = 0; k < terms; ++k) {
        const double g = o.input_is_identity ? o.grad_logit(got, r, k) : o.grad_logit(got, k, r);
        if (g == 0.0) continue;
        const double term = g * reference::round_to(multiply, other.get(k, h));
        want += term;
        size += std::abs(term);
        ++count;
      }
      ASSERT_NEAR(product.get(r, h), want, count * 0x1p-23 * size + reference::kFloor)
          << r << " " << h;
    }
  }
}

void expect_same_counts(const StepResult& a, const StepResult& b) {
  const SparseCounts &x = a.gradients.sparse_counts, &y = b.gradients.sparse_counts;
  EXPECT_EQ(x.rows, y.rows);
  EXPECT_EQ(x.dense_rows, y.dense_rows);
  EXPECT_EQ(x.kept, y.kept);
  EXPECT_EQ(x.elements, y.elements);
}

StepCase some_tokens(const StepCase& c, std::span<const int64_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  StepCase part = empty_step({.BT = n, .V = c.shape.V, .H = c.shape.H}, c.arithmetic);
  part.grad_input = c.grad_input;
  part.grad_weight = c.grad_weight;
  part.grad_tolerance = c.grad_tolerance;
  part.seed = c.seed;
  part.normalizer = c.normalizer;
  part.weight = c.weight.contiguous_copy();
  part.token_ids = TestTensor::vector(DType::i64, n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = tokens[static_cast<size_t>(i)];
    part.target.set_index(i, c.target.get_index(b));
    part.token_ids->set_index(i, b);
    for (int64_t h = 0; h < c.shape.H; ++h) part.input.set(i, h, c.input.get(b, h));
  }
  return part;
}

}  // namespace logitless::test

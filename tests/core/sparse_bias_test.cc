// SPDX-License-Identifier: Apache-2.0
// Over many seeds the sparse gradient is the exact one; what leaves out small elements is not, and
// the same check says so.
#include <gtest/gtest.h>

#include <cmath>

#include "reference/sparse_gradient.h"
#include "tests/support/steps.h"

namespace logitless::test {
namespace {

using reference::BiasCheck;
using reference::Matrix;

constexpr int kSeeds = 256;
constexpr Shape kShape{.BT = 40, .V = 1200, .H = 20};
// Relative, of a softmax whose logits are sums of floats; and absolute, of softmax - 1.
constexpr double kFloatError = 0x1p-17;
constexpr double kTargetError = 0x1p-21;

Matrix matrix_of(const TestTensor& tensor) {
  Matrix m(tensor.rows(), tensor.cols());
  m.values = tensor.values();
  return m;
}

// Peaked, so that no row is dense: a dense one has grad_logits rounded to the operand type.
StepCase peaked_step(const Arithmetic& arithmetic) {
  StepCase c = make_step(kShape, arithmetic);
  c.grad_tolerance = 0x1p-4f;
  c.grad_input = c.grad_weight = GradientOutput{.dtype = DType::f32};
  for (int64_t b = 0; b < kShape.BT; ++b) {
    for (int64_t h = 0; h < kShape.H; ++h) c.input.set(b, h, c.input.get(b, h) * 2.5);
  }
  return c;
}

struct Checks {
  BiasCheck input, weight;
};

// From the statistics of the library, in double.
Checks checks_for(const StepCase& c, const StepResult& statistics) {
  const GradientCase g = gradient_case_of(c, &statistics);
  const reference::GradientOperands operands = g.reference_operands();
  const Matrix input = reference::grad_input(operands, {.multiply = c.arithmetic.multiply}).value;
  const Matrix weight = reference::grad_weight(operands, {.multiply = c.arithmetic.multiply}).value;
  const auto lengths = [](const Matrix& m) {
    std::vector<double> all;
    for (int64_t r = 0; r < m.rows; ++r) {
      double squares = 0;
      for (int64_t h = 0; h < m.cols; ++h) squares += m(r, h) * m(r, h);
      all.push_back(std::sqrt(squares));
    }
    return all;
  };
  std::vector<double> input_rounding = lengths(input), weight_rounding = lengths(weight);
  for (double& length : input_rounding) length *= kFloatError;
  for (double& length : weight_rounding) length *= kFloatError;
  const auto weight_lengths = lengths(reference::read(c.operands().weight));
  const auto input_lengths = lengths(reference::read(c.operands().input));
  for (int64_t b = 0; b < kShape.BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const auto t = static_cast<size_t>(c.target.get_index(b));
    input_rounding[i] += kTargetError * std::abs(operands.grad[i]) * weight_lengths[t];
    weight_rounding[t] += kTargetError * std::abs(operands.grad[i]) * input_lengths[i];
  }
  return {BiasCheck(input, input_rounding),
          BiasCheck(weight, weight_rounding, BiasCheck::Rows::as_they_are)};
}

TEST(SparseBias, IsNoneOver256Seeds) {
  for (const Arithmetic& arithmetic : all_arithmetics()) {
    StepCase c = peaked_step(arithmetic);
    Checks checks = checks_for(c, run_step(c, {.threads = 2}, Strategy::automatic));
    EXPECT_GT(checks.input.rows(), kShape.BT / 2);
    EXPECT_GT(checks.weight.rows(), kShape.V / 2);
    const auto plan = plan_loss_and_gradient(kShape, c.types(), {.threads = 2});
    ASSERT_TRUE(plan);
    double kept = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      c.seed = static_cast<uint64_t>(seed);
      const StepResult r = run_step(c, *plan);
      ASSERT_EQ(r.gradients.sparse_counts.dense_rows, 0);
      kept += static_cast<double>(r.gradients.sparse_counts.kept) /
              static_cast<double>(r.gradients.sparse_counts.elements) / kSeeds;
      checks.input.add(matrix_of(*r.gradients.grad_input));
      checks.weight.add(matrix_of(*r.gradients.grad_weight));
    }
    EXPECT_LT(kept, 0.1);
    EXPECT_TRUE(checks.input.fine()) << arithmetic.name << ": " << checks.input.worst();
    EXPECT_TRUE(checks.weight.fine()) << arithmetic.name << ": " << checks.weight.worst();
    std::printf(
        "%s: %.1f %% kept; worst of %d directions %.2f standard errors in grad_input, %.2f in "
        "grad_weight\n",
        arithmetic.name, 100 * kept, BiasCheck::kDirections, checks.input.worst(),
        checks.weight.worst());
  }
}

TEST(SparseBias, OfDroppingIsSeen) {
  const StepCase c = peaked_step(all_arithmetics()[2]);
  Checks checks = checks_for(c, run_step(c, {.threads = 2}, Strategy::automatic));
  const LossAndGradientOperands operands = c.operands();
  reference::SparseOperands definition;
  definition.logits =
      reference::logits(operands.input, operands.weight, {}, reference::all_rows(kShape.BT)).value;
  definition.eps = 0.5;
  for (int64_t b = 0; b < kShape.BT; ++b) {
    definition.target.push_back(c.target.get_index(b));
    definition.grad.push_back(static_cast<double>(static_cast<float>(c.token_weight(b))));
  }
  const Matrix weight = reference::read(operands.weight), input = reference::read(operands.input);
  const Matrix exact = reference::sparse_grad_logits(definition).expected;
  Matrix dropped = exact;
  for (int64_t b = 0; b < kShape.BT; ++b) {
    for (int64_t v = 0; v < kShape.V; ++v) {
      const double p = std::abs(exact(b, v) / definition.grad[static_cast<size_t>(b)]);
      if (p < 0x1p-12) dropped(b, v) = 0;
    }
  }
  // All of it passes: what fails is what was left out.
  Checks whole = checks_for(c, run_step(c, {.threads = 2}, Strategy::automatic));
  for (int i = 0; i < 2; ++i) {
    whole.input.add(reference::times(exact, weight));
    whole.weight.add(reference::transposed_times(exact, input));
    checks.input.add(reference::times(dropped, weight));
    checks.weight.add(reference::transposed_times(dropped, input));
  }
  EXPECT_TRUE(whole.input.fine());
  EXPECT_TRUE(whole.weight.fine());
  EXPECT_FALSE(checks.input.fine());
  EXPECT_FALSE(checks.weight.fine());
}

}  // namespace
}  // namespace logitless::test

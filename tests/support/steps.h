// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "tests/support/cases.h"

// Operands, runs and judgements of loss and gradient in one call, as cases.h has them for the
// separate operators.
namespace logitless::test {

struct StepCase {
  Shape shape;
  Arithmetic arithmetic;
  DType target_type = DType::i64;
  float grad_tolerance = 0.0f;
  uint64_t seed = 0;
  std::optional<GradientOutput> grad_input, grad_weight;
  std::optional<int64_t> ignore_index = {};
  std::optional<double> normalizer = {};
  Layout grad_input_layout = {}, grad_weight_layout = {};
  int64_t vector_stride = 1;
  TestTensor input, weight, target;
  std::optional<TestTensor> counts = {}, token_weights = {}, token_ids = {};

  bool row_counts(int64_t b) const;
  // w[b], as the operator computes it: in double, rounded to float for the gradient.
  double token_weight(int64_t b) const;
  LossAndGradientTypes types() const;
  LossAndGradientOperands operands() const;
  std::string describe() const;
};

// Every target inside; where V = 0 no row counts.
StepCase make_step(const Shape& shape, const Arithmetic& arithmetic,
                   const CaseOptions& how = {.outside = 0});

struct StepResult {
  TestTensor loss, logits_max, sum_exp_logits, predicted_logits;
  double total = std::numeric_limits<double>::quiet_NaN();
  GradientResult gradients;
  std::vector<uint64_t> bits() const;  // of everything
  // Of what belongs to one token: statistics, loss, its row of grad_input.
  std::vector<uint64_t> token_bits(int64_t token) const;
};

// The gradient operator's case for the same step, from given statistics; without them only what
// its outputs look like.
GradientCase gradient_case_of(const StepCase& c, const StepResult* statistics = nullptr);

// Plans, asserts ISA, strategy and limit, runs in a guarded workspace, checks gaps. Any error is a
// test failure.
StepResult run_step(const StepCase& c, const PlanOptions& options, Strategy strategy);
StepResult run_step(const StepCase& c, const LossAndGradientPlan& plan);

// Statistics and loss: the bits of the separate operators. Gradients: of the gradient operator
// where recomputed, within the allowed error (one more rounding of softmax) in one pass.
void expect_step(const StepCase& c, const StepResult& got, const PlanOptions& options,
                 Strategy strategy);
// The gradients alone, from the statistics beside them.
void expect_one_pass_gradient(const StepCase& c, const StepResult& got);

}  // namespace logitless::test

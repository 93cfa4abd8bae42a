// SPDX-License-Identifier: Apache-2.0
#include "tests/support/steps.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <utility>

namespace logitless::test {

bool StepCase::row_counts(int64_t b) const {
  if (counts && counts->get_index(b) == 0) return false;
  return !ignore_index || target.get_index(b) != *ignore_index;
}

double StepCase::token_weight(int64_t b) const {
  double rows = 0;
  for (int64_t i = 0; i < shape.BT; ++i) rows += row_counts(i) ? 1 : 0;
  const double n = normalizer.value_or(token_weights || rows == 0 ? 1.0 : rows);
  return (token_weights ? token_weights->get(b) : 1.0) / n;
}

LossAndGradientTypes StepCase::types() const {
  return {.operand = arithmetic.operand,
          .multiply = arithmetic.multiply,
          .target = target_type,
          .grad_tolerance = grad_tolerance,
          .grad_input = grad_input,
          .grad_weight = grad_weight};
}

LossAndGradientOperands StepCase::operands() const {
  LossAndGradientOperands o;
  o.input = input.matrix_view();
  o.weight = weight.matrix_view();
  o.target = target.vector_view();
  o.rows.ignore_index = ignore_index;
  if (counts) o.rows.counts = counts->vector_view();
  if (token_weights) o.token_weights = token_weights->vector_view();
  o.normalizer = normalizer;
  o.seed = seed;
  if (token_ids) o.token_ids = token_ids->vector_view();
  return o;
}

std::string StepCase::describe() const {
  return "BT " + std::to_string(shape.BT) + ", V " + std::to_string(shape.V) + ", H " +
         std::to_string(shape.H) + ", " + arithmetic.name;
}

StepCase make_step(const Shape& shape, const Arithmetic& arithmetic, const CaseOptions& how) {
  CaseOptions inside = how;
  inside.outside = 0;
  ForwardCase forward = make_forward_case(shape, arithmetic, inside);
  StepCase c;
  c.shape = shape;
  c.arithmetic = arithmetic;
  c.target_type = forward.target_type;
  c.grad_input = c.grad_weight = GradientOutput{.dtype = arithmetic.operand};
  c.input = std::move(forward.input);
  c.weight = std::move(forward.weight);
  c.target = std::move(forward.target);
  // An empty vocabulary has no valid target.
  if (shape.V == 0) c.ignore_index = 0;
  for (int64_t b = 0; shape.V == 0 && b < shape.BT; ++b) c.target.set_index(b, 0);
  return c;
}

std::vector<uint64_t> StepResult::bits() const {
  std::vector<uint64_t> all = gradients.bits();
  for (const TestTensor* t : {&loss, &logits_max, &sum_exp_logits, &predicted_logits}) {
    const auto bits = t->all_bits();
    all.insert(all.end(), bits.begin(), bits.end());
  }
  all.push_back(std::bit_cast<uint64_t>(total));
  return all;
}

std::vector<uint64_t> StepResult::token_bits(int64_t token) const {
  std::vector<uint64_t> all{loss.bits(token), logits_max.bits(token), sum_exp_logits.bits(token),
                            predicted_logits.bits(token)};
  if (gradients.grad_input) {
    const auto row = gradients.grad_input->row_bits(token);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

GradientCase gradient_case_of(const StepCase& c, const StepResult* statistics) {
  GradientCase g;
  g.shape = c.shape;
  g.arithmetic = c.arithmetic;
  g.target_type = c.target_type;
  g.grad_input = c.grad_input;
  g.grad_weight = c.grad_weight;
  g.grad_input_layout = c.grad_input_layout;
  g.grad_weight_layout = c.grad_weight_layout;
  g.grad_tolerance = c.grad_tolerance;
  g.seed = c.seed;
  if (statistics == nullptr) return g;
  const int64_t BT = c.shape.BT, V = c.shape.V, H = c.shape.H;
  g.grad = TestTensor::vector(DType::f32, BT);
  g.logits_max = TestTensor::vector(DType::f32, BT);
  g.sum_exp_logits = TestTensor::vector(DType::f32, BT);
  g.masked_target = TestTensor::vector(c.target_type, BT);
  g.input = TestTensor::matrix(c.arithmetic.operand, BT, H);
  g.weight = TestTensor::matrix(c.arithmetic.operand, V, H);
  for (int64_t b = 0; b < BT; ++b) {
    g.grad.set(b, c.row_counts(b) ? c.token_weight(b) : 0.0);
    g.logits_max.set(b, statistics->logits_max.get(b));
    g.sum_exp_logits.set(b, statistics->sum_exp_logits.get(b));
    g.masked_target.set_index(b, c.target.get_index(b));
    for (int64_t h = 0; h < H; ++h) g.input.set(b, h, c.input.get(b, h));
  }
  for (int64_t v = 0; v < V; ++v) {
    for (int64_t h = 0; h < H; ++h) g.weight.set(v, h, c.weight.get(v, h));
  }
  if (c.token_ids) {
    g.token_ids = TestTensor::vector(DType::i64, BT);
    for (int64_t b = 0; b < BT; ++b) g.token_ids->set_index(b, c.token_ids->get_index(b));
  }
  return g;
}

namespace {

StepResult make_step_outputs(const StepCase& c) {
  StepResult r;
  const int64_t BT = c.shape.BT, stride = c.vector_stride;
  r.loss = TestTensor::vector(DType::f32, BT, stride);
  r.logits_max = TestTensor::vector(DType::f32, BT, stride);
  r.sum_exp_logits = TestTensor::vector(DType::f32, BT, stride);
  r.predicted_logits = TestTensor::vector(DType::f32, BT, stride);
  r.gradients = make_gradient_outputs(gradient_case_of(c));
  return r;
}

}  // namespace

StepResult run_step(const StepCase& c, const PlanOptions& options, Strategy strategy) {
  const auto plan = plan_loss_and_gradient(c.shape, c.types(), options, strategy);
  if (!plan) {
    ADD_FAILURE() << "plan_loss_and_gradient: " << plan.error().message;
    return make_step_outputs(c);
  }
  EXPECT_EQ(plan->isa(), options.isa.value_or(plan->isa()));
  EXPECT_TRUE(strategy == Strategy::automatic || plan->strategy() == strategy);
  if (options.workspace_limit_bytes > 0) {
    EXPECT_LE(plan->workspace_bytes(), options.workspace_limit_bytes);
  }
  return run_step(c, *plan);
}

StepResult run_step(const StepCase& c, const LossAndGradientPlan& plan) {
  StepResult r = make_step_outputs(c);
  const GradientOutputs gradients = outputs_of(r.gradients);
  LossAndGradientOutputs outputs;
  outputs.loss = r.loss.vector_view();
  outputs.total = &r.total;
  outputs.logits_max = r.logits_max.vector_view();
  outputs.sum_exp_logits = r.sum_exp_logits.vector_view();
  outputs.predicted_logits = r.predicted_logits.vector_view();
  outputs.grad_input = gradients.grad_input;
  outputs.grad_weight = gradients.grad_weight;
  if (c.grad_tolerance > 0) outputs.sparse_counts = &(r.gradients.sparse_counts = kOldCounts);
  const auto ran = run(plan, c.operands(), outputs, guarded_workspace(plan.workspace_bytes()));
  if (!ran) ADD_FAILURE() << "loss_and_gradient: " << ran.error().message;
  EXPECT_EQ(r.gradients.damage() + r.loss.damage() + r.logits_max.damage() +
                r.sum_exp_logits.damage() + r.predicted_logits.damage(),
            "");
  return r;
}

void expect_step(const StepCase& c, const StepResult& got, const PlanOptions& options,
                 Strategy strategy) {
  SCOPED_TRACE(c.describe() + (strategy == Strategy::one_pass ? ", one pass" : ", recompute"));
  const int64_t BT = c.shape.BT;
  std::vector<float> max(static_cast<size_t>(BT)), sum(max), predicted(max), loss(max);
  std::vector<uint8_t> counts(static_cast<size_t>(BT));
  for (int64_t b = 0; b < BT; ++b) counts[static_cast<size_t>(b)] = c.row_counts(b) ? 1 : 0;
  const ForwardOperands forward{
      .input = c.input.matrix_view(),
      .weight = c.weight.matrix_view(),
      .target = c.target.vector_view(),
      .rows = {.ignore_index = c.ignore_index,
               .counts = vector_view<uint8_t>(std::span<const uint8_t>(counts))}};
  const auto forward_plan = plan_forward(
      c.shape,
      {.operand = c.arithmetic.operand, .multiply = c.arithmetic.multiply, .target = c.target_type},
      options);
  ASSERT_TRUE(forward_plan);
  ASSERT_TRUE(run(*forward_plan, forward,
                  {.logits_max = vector_view<float>(std::span<float>(max)),
                   .sum_exp_logits = vector_view<float>(std::span<float>(sum)),
                   .predicted_logits = vector_view<float>(std::span<float>(predicted))},
                  guarded_workspace(forward_plan->workspace_bytes())));
  LossOperands statistics{vector_view<float>(std::span<const float>(max)),
                          vector_view<float>(std::span<const float>(sum)),
                          vector_view<float>(std::span<const float>(predicted))};
  statistics.counts = vector_view<uint8_t>(std::span<const uint8_t>(counts));
  ASSERT_TRUE(run(*plan_loss(BT, 0, {}, options), statistics,
                  {.loss = vector_view<float>(std::span<float>(loss))}));
  double total = 0.0;
  for (int64_t b = 0; b < BT; ++b) {
    const auto i = static_cast<size_t>(b);
    const auto same = [&](const TestTensor& t, float want) {
      return t.bits(b) == std::bit_cast<uint32_t>(want) ||
             (std::isnan(want) && std::isnan(t.get(b)));
    };
    EXPECT_TRUE(same(got.logits_max, max[i])) << b;
    EXPECT_TRUE(same(got.sum_exp_logits, sum[i])) << b;
    EXPECT_TRUE(same(got.predicted_logits, predicted[i])) << b;
    EXPECT_TRUE(same(got.loss, loss[i])) << b;
    if (counts[i]) total += c.token_weight(b) * static_cast<double>(loss[i]);
  }
  EXPECT_TRUE(got.total == total || (std::isnan(total) && std::isnan(got.total)))
      << got.total << " " << total;

  GradientCase gradient = gradient_case_of(c, &got);
  if (strategy == Strategy::recompute) {
    EXPECT_EQ(run_gradient(gradient, options).bits(), got.gradients.bits());
    return;
  }
  expect_one_pass_gradient(c, got);
}

void expect_one_pass_gradient(const StepCase& c, const StepResult& got) {
  const GradientCase gradient = gradient_case_of(c, &got);
  reference::GradientOptions how = gradient.reference_options();
  if (c.arithmetic.multiplied() == DType::bf16) how.held_softmax = DType::bf16;
  // Two more exps and products in float: from segment to row.
  if (c.arithmetic.multiplied() != DType::bf16) how.held_softmax = DType::f32;
  ReferenceGradient want;
  const auto operands = gradient.reference_operands();
  if (c.grad_input) want.input = reference::grad_input(operands, how);
  if (c.grad_weight) want.weight = reference::grad_weight(operands, how);
  expect_gradient(gradient, got.gradients, want);
}

}  // namespace logitless::test
